# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""States of sequences in a batch: copies, which nothing shares memory with.

A state has one size at any length, so a batch of sequences of any lengths is the concatenation of their states. Keys and
values of hybrid models are aligned at their ends, with padding before the shorter ones.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..cache_files import fill_layer, layer_shapes
from ..model.cache_tost import CausalStatisticsCache, layer_type_of
from ..model.configuration_tost import CAUSAL_STATISTICS


def empty_state(model: Any) -> Cache:
    """The state of one sequence before its first token."""
    cache = CausalStatisticsCache(model.config)
    like = model.get_input_embeddings().weight
    dtype = like.dtype if like.is_floating_point() else model.dtype
    for layer, kind in zip(cache.layers, model.config.layer_types):
        shapes = layer_shapes(model.config, kind, 0)
        fill_layer(layer, {name: torch.zeros(1, *x, dtype=dtype, device=like.device) for name, x in shapes.items()}, 0)
    return cache


def concat_states(config: Any, caches: Sequence[Cache], length: int) -> Cache:
    """One batch of all sequences of these caches; `length` is the number of tokens of the longest."""
    layers = [[_layer_tensors(layer, length) for layer in cache.layers] for cache in caches]
    return _build([{name: torch.cat([x[name] for x in parts]) for name in parts[0]} for parts in zip(*layers)], config, length)


def select_states(config: Any, cache: Cache, indices: Sequence[int], length: int) -> Cache:
    """The sequences at these batch indices; `length` is the number of tokens of the longest of them."""
    layers = [_layer_tensors(layer, length) for layer in cache.layers]
    return _build([{name: x[list(indices)] for name, x in tensors.items()} for tensors in layers], config, length)


def state_tensors(cache: Cache) -> list[torch.Tensor]:
    """All tensors of a cache."""
    return [x for layer in cache.layers for x in _layer_tensors(layer, None).values()]


def _build(layers: list[dict[str, torch.Tensor]], config: Any, length: int) -> Cache:
    cache = CausalStatisticsCache(config)
    for layer, tensors in zip(cache.layers, layers):
        fill_layer(layer, tensors, length)
    return cache


def _layer_tensors(layer: Any, length: int | None) -> dict[str, torch.Tensor]:
    """The tensors of a layer by name. Keys and values: the last `length` tokens, as far as a sliding window reaches."""
    if layer_type_of(layer) == CAUSAL_STATISTICS:
        return layer.tensors()
    tensors = {"keys": layer.keys, "values": layer.values}
    if length is None:
        return tensors
    kept = min(length, layer.sliding_window - 1) if layer.is_sliding else length
    # from the right: a negative pad removes the padding that no longer is before any of the sequences
    return {name: F.pad(x, (0, 0, kept - x.shape[2], 0)) for name, x in tensors.items()}


__all__ = ["concat_states", "empty_state", "select_states", "state_tensors"]
