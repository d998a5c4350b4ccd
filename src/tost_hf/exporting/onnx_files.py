# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A program as an ONNX file, in float32, float16 or int8."""

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from .programs import HEIGHT, MASKED, WIDTH, ModelProgram


OPSET = 18
MODEL_FILE = "model.onnx"


def trace(program: ModelProgram) -> Any:
    """The program as a `torch.onnx.ONNXProgram`, its free dimensions free.

    Raises:
        ValueError: PyTorch cannot export it.
    """
    with quiet():
        try:
            traced = torch.onnx.export(
                program,
                program.sample(),
                dynamo=True,
                dynamic_shapes=(free_dimensions(program),),
                input_names=[spec.name for spec in program.inputs],
                output_names=[spec.name for spec in program.outputs],
                opset_version=OPSET,
                custom_translation_table={torch.ops.aten.cummax.default: _cummax},
            )
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise ValueError(f"PyTorch cannot export this model to ONNX: {reason}") from error
    assert traced is not None
    _tidy(traced.model)
    return traced


def free_dimensions(program: ModelProgram) -> tuple[dict[int, Any], ...]:
    """For torch.export: of each input, which dimensions are free."""
    dims: dict[str, Any] = {MASKED: torch.export.Dim.AUTO}
    patch_size = getattr(program.model.config, "patch_size", 1)
    for name in (HEIGHT, WIDTH):  # in whole patches
        dims[name] = torch.export.Dim.AUTO if patch_size == 1 else patch_size * torch.export.Dim(f"{name}_in_patches")
    named = {name for spec in program.inputs for name in spec.shape if isinstance(name, str)} - set(dims)
    dims |= {name: torch.export.Dim(name) for name in named}
    return tuple({d: dims[name] for d, name in enumerate(spec.shape) if isinstance(name, str)} for spec in program.inputs)


@contextlib.contextmanager
def quiet():
    """Without what exporters print of each of their steps."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "root")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels):
                logger.setLevel(level)


def _cummax(x, dim: int):
    """aten.cummax of (rows, n) along dimension 1, which ONNX lacks: of each place the greatest of those up to it."""
    import onnxscript

    op: Any = onnxscript.opset18  # declared for tensors; lists are as good
    assert dim in (1, -1)
    count = op.Shape(x, start=1, end=2)
    place = op.Range(op.Constant(value_int=0), op.Squeeze(count), op.Constant(value_int=1))
    later = op.Greater(op.Unsqueeze(place, [0]), op.Unsqueeze(place, [1]))
    least = op.ReduceMin(x, keepdims=0)
    seen = op.Where(op.Unsqueeze(later, [0]), least, op.Unsqueeze(x, [1]))
    return op.ReduceMax(seen, [2], keepdims=0), op.ArgMax(seen, axis=2, keepdims=0, select_last_index=1)


def _tidy(model: Any) -> None:
    """Takes out float64, and what names files of this machine.

    The state is float32 outside and computed with in float32: its way through float64 in a cache's layers changes nothing.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedNodesPass

    for node in list(model.graph):
        if node.op_type != "Cast" or node.attributes["to"].as_int() != ir.DataType.DOUBLE:
            continue
        before = node.inputs[0]
        if before.dtype != ir.DataType.FLOAT:
            continue
        for use in list(node.outputs[0].uses()):
            if use.node.op_type == "Cast" and use.node.attributes["to"].as_int() == ir.DataType.FLOAT:
                _replace(use.node.outputs[0], before, model.graph)
    RemoveUnusedNodesPass()(model)
    ClearMetadataAndDocStringPass()(model)


def _replace(value: Any, by: Any, graph: Any) -> None:
    """Whatever takes `value` takes `by` from here on; an output of the graph keeps its name."""
    import onnx_ir as ir

    for use in list(value.uses()):
        use.node.replace_input_with(use.idx, by)
    if value in graph.outputs:
        same = ir.node("Identity", [by])
        same.outputs[0].name, same.outputs[0].type, same.outputs[0].shape = value.name, value.type, value.shape
        value.name = None
        graph.append(same)
        graph.outputs[list(graph.outputs).index(value)] = same.outputs[0]


def write(traced: Any, folder: Path, dtype: str) -> Path:
    """Writes `model.onnx`, and `model.onnx.data` beside it where one file would be too large."""
    path = folder / MODEL_FILE
    if dtype != "int8":
        traced.save(path)
        return path
    whole = folder / "float32.onnx"
    traced.save(whole)
    _quantize(whole, path)
    for file in folder.glob(f"{whole.name}*"):
        file.unlink()
    return path


def _quantize(source: Path, target: Path) -> None:
    """Weights of matrix products and of embeddings in int8, by ONNX Runtime's own dynamic quantiser."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    folded = source.with_name("float32.onnx.folded")
    with quiet():
        quant_pre_process(source, folded, skip_symbolic_shape=True)
        quantize_dynamic(
            folded, target, weight_type=QuantType.QInt8, per_channel=True, op_types_to_quantize=["MatMul", "Gemm"]
        )


__all__ = ["MODEL_FILE", "free_dimensions", "quiet", "trace", "write"]
