# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The formats of exported programs: torch.export, and those that are written from its graphs."""

import contextlib
import importlib.util
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._sympy.value_ranges import ValueRanges

from .programs import BATCH, CACHED, HEIGHT, MASKED, TOKENS, WIDTH, LanguageProgram, ModelProgram, Sizes


ONNX_OPSET = 18
EXECUTORCH_PROMPT_TOKENS = 32  # that one call reads of a prompt
EXECUTORCH_MAX_TOKENS = 1024  # of a text, in models with softmax attention


@contextlib.contextmanager
def _exporting_by(exporter: str) -> Iterator[None]:
    """Silences an exporter and turns its RuntimeError into a ValueError with the first line of the reason."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{exporter} cannot export this model: {reason}") from error
        finally:
            logging.disable(disabled)


# torch.export ---------------------------------------------------------------------------------------------------------


def _trace(program: ModelProgram, sizes: Sizes | None = None) -> torch.export.ExportedProgram:
    """The program's graph, with dynamic dimensions, or with all dimensions of the given sizes.

    Raises:
        ValueError: PyTorch cannot export it.
    """
    dynamic = (_dynamic_shapes(program),) if sizes is None else None  # one tuple, of the parameter *inputs
    with _exporting_by("PyTorch"), torch.no_grad():
        traced = torch.export.export(
            program,
            program.sample(sizes),
            dynamic_shapes=dynamic,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    # such as that the batch is not the number of tokens: true of the traced sample, and without effect on what is computed
    for node in list(traced.graph.nodes):
        if node.target is torch.ops.aten._assert_scalar.default:
            traced.graph.erase_node(node)
    traced.graph_module.recompile()
    for size, bounds in traced.range_constraints.items():  # nor that there are as many tokens as the sample has
        traced.range_constraints[size] = ValueRanges(0, bounds.upper)
    return traced


def _dynamic_shapes(program: ModelProgram) -> tuple[dict[int, Any], ...]:
    """The `dynamic_shapes` of torch.export, by input."""
    dims: dict[str, Any] = {MASKED: torch.export.Dim.AUTO}
    patch_size = getattr(program.model.config, "patch_size", 1)
    for name in (HEIGHT, WIDTH):  # in whole patches
        dims[name] = torch.export.Dim.AUTO if patch_size == 1 else patch_size * torch.export.Dim(f"{name}_in_patches")
    named = {name for spec in program.inputs for name in spec.shape if isinstance(name, str)} - set(dims)
    dims |= {name: torch.export.Dim(name) for name in named}
    return tuple({d: dims[name] for d, name in enumerate(spec.shape) if isinstance(name, str)} for spec in program.inputs)


def _without_cummax(traced: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The graph in core ATen operators, without aten.cummax, which neither ONNX nor ExecuTorch has."""
    return traced.run_decompositions({torch.ops.aten.cummax.default: _cummax})


def _cummax(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """aten.cummax of (batch, n) along dimension 1: at each position the maximum of all up to it."""
    assert dim in (1, -1)
    position = torch.arange(x.shape[1])
    later = position[None] > position[:, None]
    seen = torch.where(later, x.amin((0, 1)), x[:, None])
    return seen.amax(2), seen.argmax(2)


def _save_torch(program: ModelProgram, path: Path, dtype: str) -> None:
    traced = _trace(program)
    content = io.BytesIO()  # on a full disk PyTorch's file writer raises in its destructor, which ends the process
    with _exporting_by("PyTorch"):
        torch.export.save(traced, content)
    path.write_bytes(content.getbuffer())


# ONNX and OpenVINO ----------------------------------------------------------------------------------------------------


def _save_onnx(program: ModelProgram, path: Path, dtype: str) -> None:
    """Writes the program, and a file `*.data` beside it where one file would be too large."""
    from onnxscript.optimizer import fold_constants

    traced = _without_cummax(_trace(program))
    with _exporting_by("PyTorch's ONNX exporter"):
        exported = torch.onnx.export(
            traced,
            dynamo=True,
            input_names=[spec.name for spec in program.inputs],
            output_names=[spec.name for spec in program.outputs],
            opset_version=ONNX_OPSET,
            optimize=False,  # its rule for x + 0 drops EPS_MEMBERSHIP as well, and leading padding would divide 0 by 0
        )
    assert exported is not None
    fold_constants(exported.model)
    _clean_onnx(exported.model, program)
    if dtype != "int8":
        exported.save(path)
        return
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        exported.save(Path(scratch, "float32.onnx"))
        _quantize(Path(scratch, "float32.onnx"), path)


def _clean_onnx(model: Any, program: ModelProgram) -> None:
    """Names the dynamic dimensions, and removes float64 and the names of local files.

    The state is float32 outside and in computations: its casts to float64 and back, in a cache's layers, change nothing.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedNodesPass
    from onnxscript.rewriter.pattern import RewriteRule

    RewriteRule(
        lambda op, x: op.Cast(op.Cast(x, to=ir.DataType.DOUBLE), to=ir.DataType.FLOAT),
        lambda op, x: op.Identity(x),
        lambda context, x: x.dtype == ir.DataType.FLOAT,
        remove_nodes=False,
    ).apply_to_model(model)
    RemoveUnusedNodesPass()(model)
    ClearMetadataAndDocStringPass()(model)
    for specs, values in ((program.inputs, model.graph.inputs), (program.outputs, model.graph.outputs)):
        for spec, value in zip(specs, values, strict=True):
            value.shape = ir.Shape(spec.shape)


def _quantize(source: Path, target: Path) -> None:
    """Weights of matrix products and of embeddings in int8, by ONNX Runtime's dynamic quantiser."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    folded = source.with_name("folded.onnx")
    with _exporting_by("ONNX Runtime's quantiser"):
        quant_pre_process(source, folded, skip_symbolic_shape=True)
        quantize_dynamic(
            folded, target, weight_type=QuantType.QInt8, per_channel=True, op_types_to_quantize=["MatMul", "Gemm"]
        )


def _save_openvino(program: ModelProgram, path: Path, dtype: str) -> None:
    """Writes the graph and, beside it in a .bin file, the weights, from an ONNX file."""
    import openvino

    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        _save_onnx(program, Path(scratch, "model.onnx"), "float32")
        openvino.save_model(openvino.convert_model(Path(scratch, "model.onnx")), path, compress_to_fp16=dtype == "float16")


# ExecuTorch -----------------------------------------------------------------------------------------------------------


def fixed_sizes(program: ModelProgram, tokens: int = 1) -> Sizes:
    """The sizes of the dimensions that are dynamic in other formats: an ExecuTorch program has fixed shapes.

    Raises:
        ValueError: the program reads whole texts, whose length is not fixed.
    """
    config: Any = program.model.config
    if isinstance(program, LanguageProgram):
        cached = min(config.max_position_embeddings or EXECUTORCH_MAX_TOKENS, EXECUTORCH_MAX_TOKENS) - 1
        cached = cached if program.attends else 0
        return {BATCH: 1, TOKENS: tokens, CACHED: cached, MASKED: cached + tokens}
    if program.takes_images:
        sides = [config.image_size] * 2 if isinstance(config.image_size, int) else config.image_size
        rows, columns = (-(-side // config.patch_size) for side in sides)
        sizes = {BATCH: 1, HEIGHT: rows * config.patch_size, WIDTH: columns * config.patch_size}
        return sizes | {"rows": rows, "columns": columns, "patches": rows * columns, "1+patches": 1 + rows * columns}
    kind = type(program.model).__name__
    raise ValueError(f"An ExecuTorch program has fixed shapes, and a {kind} reads whole texts: choose another format.")


def executorch_methods(program: ModelProgram) -> dict[str, int]:
    """The methods of an ExecuTorch file, with the number of tokens that each reads."""
    if not isinstance(program, LanguageProgram):
        return {"forward": 1}
    limit = program.model.config.max_position_embeddings
    reads_prompts = limit is None or limit > EXECUTORCH_PROMPT_TOKENS
    return {"forward": 1} | ({"prompt": EXECUTORCH_PROMPT_TOKENS} if reads_prompts else {})


def _save_executorch(program: ModelProgram, path: Path, dtype: str) -> None:
    """Writes the program's methods, lowered to XNNPACK."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    with _exporting_by("ExecuTorch"), torch.no_grad():
        traced = {
            name: _without_cummax(_trace(program, fixed_sizes(program, count)))
            for name, count in executorch_methods(program).items()
        }
        lowered: Any = to_edge_transform_and_lower(traced, partitioner=[XnnpackPartitioner()]).to_executorch()
    with open(path, "wb") as file:
        lowered.write_to_file(file)


# All of them ----------------------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """A file format of programs."""

    runtime: str  # name of the runtime
    packages: str  # pip packages of the runtime
    file: str
    needs: tuple[str, ...]  # modules that write it
    install: str  # pip packages with these modules
    dtypes: tuple[str, ...]
    save: Callable[[ModelProgram, Path, str], None]  # to this file, in this dtype; ValueError if the exporter cannot


DTYPES = ("float32", "float16", "int8")
"""The dtypes of exported weights."""
_ONNX = ("onnx", "onnxscript", "onnxruntime")
FORMATS = {
    "onnx": Format("ONNX Runtime", "onnxruntime", "model.onnx", _ONNX, "'tost-hf[export]'", DTYPES, _save_onnx),
    "openvino": Format(
        "OpenVINO",
        "openvino",
        "model.xml",
        (*_ONNX, "openvino"),
        "'tost-hf[export]' openvino",
        DTYPES[:2],
        _save_openvino,
    ),
    "executorch": Format(
        "ExecuTorch", "executorch torch", "model.pte", ("executorch",), "executorch", DTYPES[:1], _save_executorch
    ),
    "torch": Format("torch.export", "torch", "model.pt2", (), "", DTYPES[:2], _save_torch),
}
"""The formats of `export_model` by name; `FORMATS[name].dtypes` are those that a format supports."""


def check_format(format: str, dtype: str) -> None:
    """Raises ValueError if there is no such format or it has no such dtype, ImportError if its packages are missing."""
    if format not in FORMATS:
        raise ValueError(f"There is no export format {format!r}; choose one of {', '.join(FORMATS)}.")
    if dtype not in FORMATS[format].dtypes:
        raise ValueError(f"The format {format} is written in {', '.join(FORMATS[format].dtypes)}, not in {dtype!r}.")
    for module in FORMATS[format].needs:
        if importlib.util.find_spec(module) is None:
            install = FORMATS[format].install
            raise ImportError(f"Exporting to {format} needs {module}, which is missing: pip install {install}.")


__all__ = ["DTYPES", "FORMATS", "check_format", "executorch_methods", "fixed_sizes"]
