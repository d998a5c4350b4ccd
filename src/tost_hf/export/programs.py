# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Models as functions from tensors to tensors, which exporters trace; inputs and outputs include a text's state.

One program of a language model starts and continues a text: the state before the first token is zeros (and keys and values of
no tokens). The whole state is float32 outside the program.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache_files import layer_shapes
from ..model.cache_tost import ToSTCache, layer_type_of
from ..model.configuration_tost import CAUSAL_STATISTICS, SLIDING_ATTENTION
from ..model.modeling_tost_vision import ToSTVisionPreTrainedModel
from ..model.tssa_reference import TSSAState


BATCH, TOKENS, CACHED, HEIGHT, WIDTH = "batch", "tokens", "cached", "height", "width"  # dynamic dimensions
MASKED = f"{CACHED}+{TOKENS}"
PAST, PRESENT = "past.", "present."  # prefixes of the state's tensors as inputs and outputs
Sizes = dict[str, int]  # of dynamic dimensions, by name
SAMPLE_SIZES = {BATCH: 2, TOKENS: 5, CACHED: 3, MASKED: 8}


class TensorSpec(NamedTuple):
    """An input or output; in `shape`, dynamic dimensions are names."""

    name: str
    dtype: str  # numpy's name
    shape: tuple[int | str, ...]


class ModelProgram(nn.Module):
    """A model from a flat tuple of tensors to another.

    Attributes:
        inputs, outputs: their descriptions, in order.
        state: the tensors of a text's state, without prefixes; empty except in language models.
        sample_sizes: dynamic dimensions of the traced inputs, no two equal.
    """

    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    state: list[TensorSpec]

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.state = []
        self.sample_sizes = SAMPLE_SIZES

    @property
    def takes_images(self) -> bool:
        return self.inputs[0].name == "pixel_values"

    def sample(self, sizes: Sizes | None = None) -> tuple[torch.Tensor, ...]:
        """Inputs of these dynamic sizes, by default `sample_sizes`."""
        sizes = self.sample_sizes if sizes is None else sizes
        shapes = [[sizes[n] if isinstance(n, str) else n for n in spec.shape] for spec in self.inputs]
        return tuple(torch.ones(shape, dtype=getattr(torch, spec.dtype)) for shape, spec in zip(shapes, self.inputs))


class LanguageProgram(ModelProgram):
    """Logits, memberships and the new state of tokens that follow a state.

    Inputs: `input_ids` (batch, tokens); `attention_mask`, 1 at real tokens, (batch, tokens), or with layers of attention
    (batch, cached+tokens); `position_ids` (batch, tokens) where the model has positions; the state.
    Outputs: `logits` (batch, tokens, vocabulary), `memberships` (batch, layers, heads, tokens) of the statistics layers, and
    the state.

    Raises:
        ValueError: the model has sliding windows, whose state depends on how many tokens were seen.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        config: Any = model.config
        self.config = config
        if SLIDING_ATTENTION in config.layer_types:
            raise ValueError("Layers of sliding_attention cannot be exported yet; give the model full_attention.")
        self.attends = set(config.layer_types) != {CAUSAL_STATISTICS}
        self.has_positions = config.max_position_embeddings is not None or self.attends
        for i, kind in enumerate(config.layer_types):
            for name, shape in layer_shapes(config, kind, SAMPLE_SIZES[CACHED]).items():
                sizes = [CACHED if name in ("keys", "values") and d == 1 else n for d, n in enumerate(shape)]
                self.state.append(TensorSpec(f"layers.{i}.{name}", "float32", (BATCH, *sizes)))
        tokens = (BATCH, TOKENS)
        self.inputs = [TensorSpec("input_ids", "int64", tokens)]
        self.inputs.append(TensorSpec("attention_mask", "int64", (BATCH, MASKED) if self.attends else tokens))
        if self.has_positions:
            self.inputs.append(TensorSpec("position_ids", "int64", tokens))
        self.inputs += [spec._replace(name=PAST + spec.name) for spec in self.state]
        layers = config.layer_types.count(CAUSAL_STATISTICS)
        self.outputs = [
            TensorSpec("logits", "float32", (*tokens, config.vocab_size)),
            TensorSpec("memberships", "float32", (BATCH, layers, config.num_attention_heads, TOKENS)),
        ]
        self.outputs += [
            spec._replace(name=PRESENT + spec.name, shape=tuple(MASKED if n == CACHED else n for n in spec.shape))
            for spec in self.state
        ]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip((spec.name for spec in self.inputs), inputs))
        tokens = given["input_ids"]
        cache = self._cache([given[PAST + spec.name] for spec in self.state])
        outputs = self.model(
            tokens,
            attention_mask=given["attention_mask"],
            position_ids=given.get("position_ids", torch.zeros_like(tokens)),
            past_key_values=cache,
            use_cache=True,
            output_memberships=True,
        )
        memberships = torch.stack([x for x in outputs.memberships if x is not None], 1)
        return outputs.logits.float(), memberships.float(), *(x.float() for x in _tensors(outputs.past_key_values))

    def _cache(self, state: list[torch.Tensor]) -> Cache:
        cache, tensors = ToSTCache(self.config), iter(state)
        cached = next((x.shape[2] for x in state if x.ndim == 4), 0)
        for layer in cast(list[Any], cache.layers):
            if layer_type_of(layer) == CAUSAL_STATISTICS:
                sums = TSSAState(next(tensors), next(tensors), next(tensors))
                layer.lazy_initialization(sums)
                layer.set_state(sums)
                if self.config.conv_kernel is not None:
                    layer.set_conv_state(next(tensors).to(self.model.dtype))
                layer.cumulative_length = layer.cumulative_length + cached
            else:
                layer.update(next(tensors).to(self.model.dtype), next(tensors).to(self.model.dtype))
        return cache


def _tensors(cache: Cache) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for layer in cast(list[Any], cache.layers):
        is_statistics = layer_type_of(layer) == CAUSAL_STATISTICS
        found += layer.tensors().values() if is_statistics else (layer.keys, layer.values)
    return found


class StatelessProgram(ModelProgram):
    """Outputs of image models, of encoders and of text classifiers, which have no state.

    Inputs: `pixel_values` (batch, channels, height, width), the sides multiples of the patch size; or `input_ids` and
    `attention_mask`, each (batch, tokens).
    Outputs: those that the model returns, such as `logits` (batch, classes); of image models with TSSA also `memberships`
    (batch, layers, heads, patches). A tuple is stacked along dimension 1, such as a backbone's `feature_maps`.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        config: Any = model.config
        other_sizes = {BATCH: 3, TOKENS: 7}
        self.options = {"use_cache": False} if getattr(config, "is_causal", False) else {}
        self.inputs = [TensorSpec(name, "int64", (BATCH, TOKENS)) for name in ("input_ids", "attention_mask")]
        names = {(2, 3): BATCH, (5, 7): TOKENS}  # dimensions of the two samples, which tell the dynamic ones of the outputs
        if isinstance(model, ToSTVisionPreTrainedModel):
            p = config.patch_size
            self.sample_sizes, other_sizes = ({BATCH: b, HEIGHT: y * p, WIDTH: x * p} for b, y, x in ((2, 3, 5), (3, 4, 7)))
            self.options = {"output_memberships": True} if config.attention_type == "tssa" else {}
            self.inputs = [TensorSpec("pixel_values", "float32", (BATCH, config.num_channels, HEIGHT, WIDTH))]
            names = {(2, 3): BATCH, (3, 4): "rows", (5, 7): "columns", (15, 28): "patches", (16, 29): "1+patches"}
        with torch.no_grad():
            sample, other = self._outputs(*self.sample()), self._outputs(*self.sample(other_sizes))
        self.outputs = [
            TensorSpec(name, "float32", tuple(names.get(sizes, sizes[0]) for sizes in zip(x.shape, other[name].shape)))
            for name, x in sample.items()
        ]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self._outputs(*inputs).values())

    def _outputs(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.model(**{spec.name: x for spec, x in zip(self.inputs, inputs)}, **self.options)
        return {name: (torch.stack(x, 1) if isinstance(x, tuple) else x).float() for name, x in outputs.items()}


def make_program(model: PreTrainedModel) -> ModelProgram:
    """The program of a ToST model.

    Raises:
        ValueError: it cannot be exported; the message says why.
    """
    return (LanguageProgram if model.can_generate() else StatelessProgram)(model).eval()
