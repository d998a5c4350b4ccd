# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Models as functions of tensors alone, which exporters trace; inputs and outputs are named and include a text's state.

A language model's program starts and continues a text alike: the state before the first token is zeros (and keys and values of
no tokens). All of the state is float32 outside the program.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache_files import layer_shapes
from ..model.cache_tost import CausalStatisticsCache, layer_type_of
from ..model.configuration_tost import CAUSAL_STATISTICS, SLIDING_ATTENTION
from ..model.modeling_tost_vision import ToSTVisionPreTrainedModel
from ..model.tssa_reference import TSSAState


BATCH, TOKENS, CACHED, HEIGHT, WIDTH = "batch", "tokens", "cached", "height", "width"  # dimensions that are free
MASKED = f"{CACHED}+{TOKENS}"
PAST, PRESENT = "past.", "present."  # before the names of the state's tensors that go in and come out
Sizes = dict[str, int]  # of free dimensions, by name
SAMPLE_SIZES = {BATCH: 2, TOKENS: 5, CACHED: 3, MASKED: 8}


class TensorSpec(NamedTuple):
    """An input or output: free dimensions are named, the others numbers."""

    name: str
    dtype: str  # numpy's name
    shape: tuple[int | str, ...]


class ModelProgram(nn.Module):
    """A model from a flat tuple of tensors to another.

    Attributes:
        inputs, outputs: their descriptions, in order.
        state: the tensors of a text's state, without prefixes; empty except in language models.
    """

    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    state: list[TensorSpec]

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.state = []

    def sample(self, sizes: Sizes | None = None) -> tuple[torch.Tensor, ...]:
        """Inputs of the traced shapes; by default no two sizes are equal."""
        sizes = SAMPLE_SIZES if sizes is None else sizes
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
                free = [CACHED if name in ("keys", "values") and d == 1 else n for d, n in enumerate(shape)]
                self.state.append(TensorSpec(f"layers.{i}.{name}", "float32", (BATCH, *free)))
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
        cache, rest = CausalStatisticsCache(self.config), iter(state)
        cached = next((x.shape[2] for x in state if x.ndim == 4), 0)
        for layer in cast(list[Any], cache.layers):
            if layer_type_of(layer) == CAUSAL_STATISTICS:
                sums = TSSAState(next(rest), next(rest), next(rest))
                layer.lazy_initialization(sums)
                layer.set_state(sums)
                if self.config.conv_kernel is not None:
                    layer.set_recent_inputs(next(rest).to(self.model.dtype))
                layer.cumulative_length = layer.cumulative_length + cached
            else:
                layer.update(next(rest).to(self.model.dtype), next(rest).to(self.model.dtype))
        return cache


def _tensors(cache: Cache) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for layer in cast(list[Any], cache.layers):
        own = layer_type_of(layer) == CAUSAL_STATISTICS
        found += layer.tensors().values() if own else (layer.keys, layer.values)
    return found


class VisionProgram(ModelProgram):
    """Outputs of an image model for `pixel_values` (batch, channels, height, width), sides multiples of the patch size.

    A classifier returns `logits` (batch, classes), a model without a head `last_hidden_state` and `pooler_output`; both also
    return `memberships` (batch, layers, heads, patches) where their attention is TSSA.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        config: Any = model.config
        self.inputs = [TensorSpec("pixel_values", "float32", (BATCH, config.num_channels, HEIGHT, WIDTH))]
        if hasattr(model, "classifier"):
            self.outputs = [TensorSpec("logits", "float32", (BATCH, config.num_labels))]
        else:
            width = config.hidden_size
            self.outputs = [
                TensorSpec("last_hidden_state", "float32", (BATCH, "1+patches", width)),
                TensorSpec("pooler_output", "float32", (BATCH, width)),
            ]
        self.has_memberships = config.attention_type == "tssa"
        if self.has_memberships:
            shape = (BATCH, config.num_hidden_layers, config.num_attention_heads, "patches")
            self.outputs.append(TensorSpec("memberships", "float32", shape))

    def sample(self, sizes: Sizes | None = None) -> tuple[torch.Tensor, ...]:
        config: Any = self.model.config
        sizes = sizes or {BATCH: 2, HEIGHT: 3 * config.patch_size, WIDTH: 5 * config.patch_size}
        return super().sample(sizes)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        options = {"output_memberships": True} if self.has_memberships else {}
        outputs = self.model(inputs[0], **options)
        found = [outputs[spec.name] for spec in self.outputs if spec.name != "memberships"]
        if self.has_memberships:
            found.append(torch.stack(outputs.memberships, 1))
        return tuple(x.float() for x in found)


class TextProgram(ModelProgram):
    """Outputs of a model that reads whole texts: encoders, and heads other than the language model's.

    Inputs: `input_ids` and `attention_mask`, both (batch, tokens).
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.inputs = [TensorSpec(name, "int64", (BATCH, TOKENS)) for name in ("input_ids", "attention_mask")]
        with torch.no_grad():
            small, large = (self._outputs(*self.sample(sizes)) for sizes in ({BATCH: 2, TOKENS: 5}, {BATCH: 3, TOKENS: 7}))
        free = {(2, 3): BATCH, (5, 7): TOKENS}  # a dimension that changes with the inputs'
        self.outputs = [
            TensorSpec(name, "float32", tuple(free.get(sizes, sizes[0]) for sizes in zip(x.shape, large[name].shape)))
            for name, x in small.items()
        ]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self._outputs(*inputs).values())

    def _outputs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        options = {"use_cache": False} if getattr(self.model.config, "is_causal", False) else {}
        outputs = self.model(input_ids, attention_mask=attention_mask, **options)
        return {name: x.float() for name, x in outputs.items() if isinstance(x, torch.Tensor)}


def program_of(model: PreTrainedModel) -> ModelProgram:
    """The program of a ToST model.

    Raises:
        ValueError: it cannot be exported; the message says why.
    """
    if isinstance(model, ToSTVisionPreTrainedModel):
        return VisionProgram(model).eval()
    return (LanguageProgram if model.can_generate() else TextProgram)(model).eval()


__all__ = ["LanguageProgram", "ModelProgram", "TensorSpec", "TextProgram", "VisionProgram", "program_of"]
