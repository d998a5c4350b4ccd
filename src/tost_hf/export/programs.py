# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Models as functions from tensors to tensors, for tracing; inputs and outputs of language models include the state.

One program starts and continues a sequence: before the first token, the state is zeros, and keys and values have length 0. A
model with sliding windows starts with a window of padding. All tensors of the state are float32 inputs and outputs.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache_files import layer_shapes
from ..model.cache_tost import ToSTCache, get_layer_type
from ..model.configuration_tost import FULL_ATTENTION, SLIDING_ATTENTION, TSSA
from ..model.inputs_tost import CACHE_NAME
from ..model.modeling_tost_vision import ToSTVisionPreTrainedModel
from ..model.tssa_reference import TSSAState


BATCH, TOKENS, CACHED, HEIGHT, WIDTH = "batch", "tokens", "cached", "height", "width"  # dynamic dimensions
KV_LENGTH = f"{CACHED}+{TOKENS}"
PAST, PRESENT = "past.", "present."  # prefixes of the state's tensors as inputs and outputs
Sizes = dict[str, int]  # of dynamic dimensions, by name
SAMPLE_SIZES = {BATCH: 2, TOKENS: 5}
SAMPLE_CACHED = 3  # beyond a sliding window


class TensorSpec(NamedTuple):
    """An input or output; dynamic dimensions of `shape` are names."""

    name: str
    dtype: str  # name of the NumPy dtype
    shape: tuple[int | str, ...]


class ModelProgram(nn.Module):
    """A model as a function from tensors to a tuple of tensors.

    Attributes:
        inputs, outputs: the specs of inputs and outputs, in order.
        state: the specs of the state's tensors, without prefixes; empty except for language models.
        window: number of cached tokens before the first token, which are padding: a sliding window, or 0.
        sample_sizes: dynamic dimensions of the traced inputs, all different.
    """

    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    state: list[TensorSpec]

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.state = []
        self.window = 0
        self.sample_sizes = SAMPLE_SIZES

    @property
    def is_vision(self) -> bool:
        return self.inputs[0].name == "pixel_values"

    def sample_inputs(self, sizes: Sizes | None = None) -> tuple[torch.Tensor, ...]:
        """Inputs of these dynamic sizes, by default `sample_sizes`."""
        sizes = self.sample_sizes if sizes is None else sizes
        shapes = [[sizes[n] if isinstance(n, str) else n for n in spec.shape] for spec in self.inputs]
        return tuple(torch.ones(shape, dtype=getattr(torch, spec.dtype)) for shape, spec in zip(shapes, self.inputs))


class LanguageProgram(ModelProgram):
    """A language model with its state.

    Inputs: `input_ids` (batch, tokens); `attention_mask` (batch, tokens), or of the cached tokens, too, if the model has
    attention layers; `position_ids` (batch, tokens) if the model has positions; the state.
    Outputs: `logits` (batch, tokens, vocabulary), `memberships` (batch, layers, heads, tokens) of the TSSA layers, and
    the new state.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        config: Any = model.config
        self.config = config
        self.window = config.sliding_window if SLIDING_ATTENTION in config.layer_types else 0
        cached, num_tokens = self.window + SAMPLE_CACHED, SAMPLE_SIZES[TOKENS]
        window_length = f"{self.window}+{TOKENS}"  # of keys and values if nothing grows
        kv_lengths = {KV_LENGTH: cached + num_tokens, window_length: self.window + num_tokens}
        self.sample_sizes = SAMPLE_SIZES | {CACHED: cached} | kv_lengths
        kv_length = KV_LENGTH if FULL_ATTENTION in config.layer_types else window_length
        has_attention = set(config.layer_types) != {TSSA}
        self.has_positions = config.position_embedding_type == "learned" or has_attention
        for i, layer_type in enumerate(config.layer_types):
            for name, shape in layer_shapes(config, layer_type, cached).items():
                sizes = [CACHED if layer_type == FULL_ATTENTION and d == 1 else n for d, n in enumerate(shape)]
                self.state.append(TensorSpec(f"layers.{i}.{name}", "float32", (BATCH, *sizes)))
        token_shape = (BATCH, TOKENS)
        self.inputs = [TensorSpec("input_ids", "int64", token_shape)]
        self.inputs.append(TensorSpec("attention_mask", "int64", (BATCH, kv_length) if has_attention else token_shape))
        if self.has_positions:
            self.inputs.append(TensorSpec("position_ids", "int64", token_shape))
        self.inputs += [spec._replace(name=PAST + spec.name) for spec in self.state]
        num_tssa_layers = config.layer_types.count(TSSA)
        self.outputs = [
            TensorSpec("logits", "float32", (*token_shape, config.vocab_size)),
            TensorSpec("memberships", "float32", (BATCH, num_tssa_layers, config.num_attention_heads, TOKENS)),
        ]
        self.outputs += [
            spec._replace(name=PRESENT + spec.name, shape=tuple(KV_LENGTH if n == CACHED else n for n in spec.shape))
            for spec in self.state
        ]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named_inputs = dict(zip((spec.name for spec in self.inputs), inputs))
        input_ids = named_inputs["input_ids"]
        cache = self._make_cache([named_inputs[PAST + spec.name] for spec in self.state])
        outputs = self.model(
            input_ids,
            attention_mask=named_inputs["attention_mask"],
            position_ids=named_inputs.get("position_ids", torch.zeros_like(input_ids)),
            past_key_values=cache,
            use_cache=True,
            output_memberships=True,
        )
        memberships = torch.stack([x for x in outputs.memberships if x is not None], 1)
        return outputs.logits.float(), memberships.float(), *(x.float() for x in _state_tensors(getattr(outputs, CACHE_NAME)))

    def _make_cache(self, state: list[torch.Tensor]) -> Cache:
        cache, tensors = ToSTCache(self.config), iter(state)
        cached_length = next((x.shape[2] for x, spec in zip(state, self.state) if CACHED in spec.shape), self.window)
        for layer in cast(list[Any], cache.layers):
            if get_layer_type(layer) == TSSA:
                tssa_state = TSSAState(next(tensors), next(tensors), next(tensors))
                layer.lazy_initialization(tssa_state)
                layer.set_state(tssa_state)
                if self.config.conv_kernel is not None:
                    layer.set_conv_state(next(tensors).to(self.model.dtype))
                layer.cumulative_length = layer.cumulative_length + cached_length
            else:
                layer.update(next(tensors).to(self.model.dtype), next(tensors).to(self.model.dtype))
                if layer.is_sliding:
                    layer.cumulative_length = cached_length
        return cache


def _state_tensors(cache: Cache) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for layer in cast(list[Any], cache.layers):
        is_tssa = get_layer_type(layer) == TSSA
        tensors += layer.tensors().values() if is_tssa else (layer.keys, layer.values)
    return tensors


class StatelessProgram(ModelProgram):
    """A model without state: an image model, an encoder or a text classifier.

    Inputs: `pixel_values` (batch, channels, height, width), the sides being multiples of the patch size; or `input_ids` and
    `attention_mask`, each (batch, tokens).
    Outputs: those of the model, such as `logits` (batch, classes), and of image models with TSSA also `memberships` (batch,
    layers, heads, patches). Tuples, such as a backbone's `feature_maps`, are stacked along dimension 1.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        config: Any = model.config
        other_sizes = {BATCH: 3, TOKENS: 7}
        self.options = {"use_cache": False} if getattr(config, "is_causal", False) else {}
        self.inputs = [TensorSpec(name, "int64", (BATCH, TOKENS)) for name in ("input_ids", "attention_mask")]
        # from the sizes of an output's dimension for the two samples to the dimension's name
        dim_names = {(2, 3): BATCH, (5, 7): TOKENS}
        if isinstance(model, ToSTVisionPreTrainedModel):
            p = config.patch_size
            self.sample_sizes, other_sizes = ({BATCH: b, HEIGHT: y * p, WIDTH: x * p} for b, y, x in ((2, 3, 5), (3, 4, 7)))
            self.options = {"output_memberships": True} if config.attention_type == "tssa" else {}
            self.inputs = [TensorSpec("pixel_values", "float32", (BATCH, config.num_channels, HEIGHT, WIDTH))]
            dim_names = {(2, 3): BATCH, (3, 4): "rows", (5, 7): "columns", (15, 28): "patches", (16, 29): "1+patches"}
        with torch.no_grad():
            outputs = self._named_outputs(*self.sample_inputs())
            other_outputs = self._named_outputs(*self.sample_inputs(other_sizes))
        self.outputs = [
            TensorSpec(name, "float32", tuple(dim_names.get(n, n[0]) for n in zip(x.shape, other_outputs[name].shape)))
            for name, x in outputs.items()
        ]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self._named_outputs(*inputs).values())

    def _named_outputs(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.model(**{spec.name: x for spec, x in zip(self.inputs, inputs)}, **self.options)
        return {name: (torch.stack(x, 1) if isinstance(x, tuple) else x).float() for name, x in outputs.items()}


def make_program(model: PreTrainedModel) -> ModelProgram:
    """Makes the program of a ToST model.

    Raises:
        ValueError: the model cannot be exported; the message says why.
    """
    return (LanguageProgram if model.can_generate() else StatelessProgram)(model).eval()
