# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A program as an ONNX file, in float32, float16 or int8."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from .programs import ModelProgram
from .tracing import exporting_by, trace, without_cummax


OPSET = 18


def save_onnx(program: ModelProgram, path: Path, dtype: str) -> None:
    """Writes the program, and a file `*.data` beside it where one file would be too large.

    Raises:
        ValueError: PyTorch cannot export it.
    """
    from onnxscript.optimizer import fold_constants

    traced = without_cummax(trace(program))
    with exporting_by("PyTorch's ONNX exporter"):
        exported = torch.onnx.export(
            traced,
            dynamo=True,
            input_names=[spec.name for spec in program.inputs],
            output_names=[spec.name for spec in program.outputs],
            opset_version=OPSET,
            optimize=False,  # its rule for x + 0 drops EPS_MEMBERSHIP as well, and leading padding would divide 0 by 0
        )
    assert exported is not None
    fold_constants(exported.model)
    _tidy(exported.model, program)
    if dtype != "int8":
        exported.save(path)
        return
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        exported.save(Path(scratch, "float32.onnx"))
        _quantize(Path(scratch, "float32.onnx"), path)


def _tidy(model: Any, program: ModelProgram) -> None:
    """Names the free dimensions, and removes float64 and the names of files of this machine.

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
    """Weights of matrix products and of embeddings in int8, by ONNX Runtime's own dynamic quantiser."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    folded = source.with_name("folded.onnx")
    with exporting_by("ONNX Runtime's quantiser"):
        quant_pre_process(source, folded, skip_symbolic_shape=True)
        quantize_dynamic(
            folded, target, weight_type=QuantType.QInt8, per_channel=True, op_types_to_quantize=["MatMul", "Gemm"]
        )


__all__ = ["save_onnx"]
