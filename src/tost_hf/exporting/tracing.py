# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Programs as graphs of torch.export, from which every format is written."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._sympy.value_ranges import ValueRanges

from .programs import HEIGHT, MASKED, WIDTH, ModelProgram, Sizes


@contextlib.contextmanager
def exporting_by(exporter: str) -> Iterator[None]:
    """Silences an exporter and turns its RuntimeError into a ValueError with the first line of the reason."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "root")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{exporter} cannot export this model: {reason}") from error
        finally:
            for logger, level in zip(loggers, levels):
                logger.setLevel(level)


def trace(program: ModelProgram, sizes: Sizes | None = None) -> torch.export.ExportedProgram:
    """The program's graph, with free dimensions, or with all dimensions of the given sizes.

    Raises:
        ValueError: PyTorch cannot export it.
    """
    free = (_free_dimensions(program),) if sizes is None else None  # one tuple: the program takes any number of tensors
    with exporting_by("PyTorch"), torch.no_grad():
        traced = torch.export.export(
            program,
            program.sample(sizes),
            dynamic_shapes=free,
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


def _free_dimensions(program: ModelProgram) -> tuple[dict[int, Any], ...]:
    """For torch.export: of each input, which dimensions are free."""
    dims: dict[str, Any] = {MASKED: torch.export.Dim.AUTO}
    patch_size = getattr(program.model.config, "patch_size", 1)
    for name in (HEIGHT, WIDTH):  # in whole patches
        dims[name] = torch.export.Dim.AUTO if patch_size == 1 else patch_size * torch.export.Dim(f"{name}_in_patches")
    named = {name for spec in program.inputs for name in spec.shape if isinstance(name, str)} - set(dims)
    dims |= {name: torch.export.Dim(name) for name in named}
    return tuple({d: dims[name] for d, name in enumerate(spec.shape) if isinstance(name, str)} for spec in program.inputs)


def without_cummax(traced: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The graph in core ATen operators, without aten.cummax, which neither ONNX nor ExecuTorch has."""
    return traced.run_decompositions({torch.ops.aten.cummax.default: _cummax})


def _cummax(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """aten.cummax of (batch, n) along dimension 1: at each position the maximum of all up to it."""
    assert dim in (1, -1)
    position = torch.arange(x.shape[1])
    later = position[None] > position[:, None]
    seen = torch.where(later, x.amin((0, 1)), x[:, None])
    return seen.amax(2), seen.argmax(2)


__all__ = ["exporting_by", "trace", "without_cummax"]
