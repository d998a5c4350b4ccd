# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Models as ONNX graphs that a page can run: the state goes in and comes out as plain float32 tensors, memberships beside."""

import importlib.util
import io
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ..model.cache_tost import CausalStatisticsCache
from ..model.modeling_tost import ToSTForCausalLM
from ..model.modeling_tost_vision import ToSTForImageClassification
from ..model.tssa_state import TSSAState


class StateTensor(NamedTuple):
    """One tensor of the state, which the page hands back at every step; zeros at first."""

    input: str
    output: str
    shape: tuple[int, ...]  # with one row


class _LanguageGraph(nn.Module):
    """One text: its next token (1, 1), the number of tokens before it (1,), and the state."""

    def __init__(self, model: ToSTForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position: torch.Tensor, states: list[torch.Tensor]):
        cache = CausalStatisticsCache(self.model.config)
        layers = cast(Any, cache.layers)
        count = len(states) // len(layers)
        for i, layer in enumerate(layers):
            sum_sq, sum_weighted_sq, sum_membership, *recent = states[i * count : (i + 1) * count]
            state = TSSAState(sum_sq, sum_weighted_sq.double(), sum_membership.double())
            layer.lazy_initialization(state)
            layer.set_state(state)
            layer.set_recent_inputs(recent[0] if recent else None)
            layer.cumulative_length = position.reshape(())
        out = self.model(input_ids, past_key_values=cache, use_cache=True, output_memberships=True, logits_to_keep=1)
        states = [x.float() for layer in layers for x in layer.tensors().values()]
        return out.logits[:, -1], torch.stack(out.memberships, 1), *states


class _VisionGraph(nn.Module):
    def __init__(self, model: ToSTForImageClassification):
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor):
        out = self.model(pixel_values, output_memberships=True)
        return (out.logits, torch.stack(out.memberships, 1)) if out.memberships else (out.logits,)


def write_language_graph(model: ToSTForCausalLM, path: Path) -> list[StateTensor]:
    """Writes a float32 graph of one step, the next token of one text: prompts are read token by token.

    Inputs: `input_ids` (1, 1) and `position` (1,), the number of tokens before, int64; and the state. Outputs: `logits`
    (1, vocabulary), `memberships` (1, layers, heads, 1), and the state after the token.

    Returns:
        The tensors of the state, in their order.
    """
    config = model.config
    heads, width = config.num_attention_heads, config.head_dim
    shapes = {"sum_sq": (1, heads, width), "sum_weighted_sq": (1, heads, width), "sum_membership": (1, heads)}
    if config.conv_kernel is not None:
        shapes["recent_inputs"] = (1, config.conv_kernel - 1, config.hidden_size)
    states = [
        StateTensor(f"layers.{i}.{name}", f"new.layers.{i}.{name}", shape)
        for i in range(config.num_hidden_layers)
        for name, shape in shapes.items()
    ]
    zeros = [torch.zeros(state.shape) for state in states]
    _write(
        _LanguageGraph(model),
        (torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long), zeros),
        path,
        ["input_ids", "position", *(state.input for state in states)],
        ["logits", "memberships", *(state.output for state in states)],
    )
    return states


def write_vision_graph(model: ToSTForImageClassification, path: Path, height: int, width: int) -> None:
    """Writes a float32 graph of one image (1, C, height, width), `pixel_values`.

    Outputs: `logits` (1, classes), and of a model with TSSA `memberships` (1, layers, heads, patches).
    """
    image = torch.zeros(1, model.config.num_channels, height, width)
    _write(_VisionGraph(model), (image,), path, ["pixel_values"], ["logits", "memberships"])


@torch.no_grad()
def _write(graph: nn.Module, inputs: tuple, path: Path, input_names: list[str], output_names: list[str]) -> None:
    if importlib.util.find_spec("onnxscript") is None:
        raise ImportError("An ONNX graph needs the package onnxscript: pip install onnx onnxscript")
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            graph.eval(),
            inputs,
            dynamo=True,
            input_names=input_names,
            output_names=output_names,
            verbose=False,
        )
        assert program is not None  # as with dynamo=True
        program.save(path)


__all__ = ["StateTensor", "write_language_graph", "write_vision_graph"]
