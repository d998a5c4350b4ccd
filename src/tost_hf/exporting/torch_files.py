# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A program as a file of torch.export, which PyTorch runs without this package."""

import io
from pathlib import Path
from typing import Any

import torch
from torch.utils._sympy.value_ranges import ValueRanges

from .onnx_files import free_dimensions, quiet
from .programs import ModelProgram


MODEL_FILE = "model.pt2"


def trace(program: ModelProgram) -> Any:
    """The program as a `torch.export.ExportedProgram`, its free dimensions free.

    Raises:
        ValueError: PyTorch cannot export it.
    """
    with quiet():
        try:
            # one tuple, as the program takes any number of tensors
            traced = torch.export.export(
                program,
                program.sample(),
                dynamic_shapes=(free_dimensions(program),),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
        except RuntimeError as error:
            raise ValueError(f"PyTorch cannot export this model: {str(error).strip().splitlines()[0]}") from error
    # such as that the batch is not the number of tokens: true of the traced sample, and without effect on what is computed
    for node in list(traced.graph.nodes):
        if node.target is torch.ops.aten._assert_scalar.default:
            traced.graph.erase_node(node)
    traced.graph_module.recompile()
    for size, bounds in traced.range_constraints.items():  # nor that there are as many tokens as the sample has
        traced.range_constraints[size] = ValueRanges(0, bounds.upper)
    return traced


def write(traced: Any, folder: Path, dtype: str) -> Path:
    """Writes `model.pt2`."""
    content = io.BytesIO()  # a file that cannot be written would end the process: PyTorch's writer raises in its destructor
    with quiet():
        torch.export.save(traced, content)
    (folder / MODEL_FILE).write_bytes(content.getbuffer())
    return folder / MODEL_FILE


__all__ = ["MODEL_FILE", "trace", "write"]
