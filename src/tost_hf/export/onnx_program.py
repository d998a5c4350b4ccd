# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Writes a program as ONNX, with torch.export and torch.onnx."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._sympy.value_ranges import ValueRanges

from .programs import CACHED, HEIGHT, WIDTH, ModelProgram


ONNX_OPSET = 18


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppresses output, warnings and log messages of the exporters."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(disabled_level)


# torch.export ---------------------------------------------------------------------------------------------------------


def _trace(program: ModelProgram) -> torch.export.ExportedProgram:
    """The program's graph, with dynamic dimensions."""
    with _silence(), torch.no_grad():
        traced = torch.export.export(
            program,
            program.sample_inputs(),
            dynamic_shapes=(_dynamic_shapes(program),),  # a tuple for the parameter *inputs
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    # remove assertions that hold for the traced sample only, such as batch != tokens; the graph does not depend on them
    for node in list(traced.graph.nodes):
        if node.target is torch.ops.aten._assert_scalar.default:
            traced.graph.erase_node(node)
    traced.graph_module.recompile()
    for symbol, bounds in traced.range_constraints.items():  # and lower bounds that the sample implies
        traced.range_constraints[symbol] = ValueRanges(0, bounds.upper)
    return traced


def _dynamic_shapes(program: ModelProgram) -> tuple[dict[int, Any], ...]:
    """The `dynamic_shapes` of torch.export for each input."""
    names = {name for spec in program.inputs for name in spec.shape if isinstance(name, str)}
    dims: dict[str, Any] = {name: torch.export.Dim.AUTO if "+" in name else torch.export.Dim(name) for name in names}
    if program.window:
        dims[CACHED] = torch.export.Dim(CACHED, min=program.window)
    if program.is_vision:
        patch_size = cast(int, program.model.config.patch_size)
        dims |= {name: patch_size * torch.export.Dim(f"{name}_in_patches") for name in (HEIGHT, WIDTH)}
    return tuple({d: dims[name] for d, name in enumerate(spec.shape) if isinstance(name, str)} for spec in program.inputs)


def _cummax(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """aten.cummax of (batch, n) along dimension 1: the cumulative maximum and its indices."""
    assert dim in (1, -1)
    positions = torch.arange(x.shape[1])
    is_later = positions[None] > positions[:, None]
    prefixes = torch.where(is_later, x.amin((0, 1)), x[:, None])
    return prefixes.amax(2), prefixes.argmax(2)


# ONNX -----------------------------------------------------------------------------------------------------------------


def save_onnx(program: ModelProgram, path: Path) -> None:
    """Writes the program, and its weights to a file `*.data` beside it if one file would be too large."""
    from onnxscript.optimizer import fold_constants

    with _silence():
        # to core ATen operators, replacing aten.cummax, which ONNX does not have
        traced = _trace(program).run_decompositions({torch.ops.aten.cummax.default: _cummax})
        exported = torch.onnx.export(
            traced,
            dynamo=True,
            input_names=[spec.name for spec in program.inputs],
            output_names=[spec.name for spec in program.outputs],
            opset_version=ONNX_OPSET,
            optimize=False,  # its rule for x + 0 also removes EPS_MEMBERSHIP, so that leading padding would compute 0 / 0
        )
    assert exported is not None
    fold_constants(exported.model)
    _clean_onnx(exported.model, program)
    exported.save(path)


def _clean_onnx(model: Any, program: ModelProgram) -> None:
    """Names the dynamic dimensions, and removes float64 and paths of local files.

    The program's state and computations are in float32: the casts of the state to float64 and back, in the layers of a cache,
    have no effect.
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
