# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Caches of sequences that are decoded in one batch."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..model.cache_tost import layer_type_of, set_cached_length
from ..model.configuration_tost import CAUSAL_STATISTICS
from ..model.tssa_reference import TSSAState


def concat_caches(caches: Sequence[Cache], longest: int) -> Cache:
    """Concatenates dynamic caches of one model along the batch, into the first of them; the others must not be used again.

    Keys and values are padded on the left to the same length; the attention mask has to exclude this padding. Statistics need
    none.

    Args:
        longest: number of tokens of the longest sequence.
    """
    for layers in zip(*(cache.layers for cache in caches)):
        result = cast(Any, layers[0])
        if layer_type_of(result) == CAUSAL_STATISTICS:
            result.set_state(TSSAState(*map(torch.cat, zip(*(layer.state for layer in layers)))))
            if result.recent_inputs is not None:
                result.set_recent_inputs(torch.cat([layer.past_inputs for layer in layers]))
        else:
            kept = min(longest, result.sliding_window - 1) if result.is_sliding else longest
            for name in ("keys", "values"):
                setattr(result, name, torch.cat([_last_tokens(getattr(layer, name), kept) for layer in layers]))
        set_cached_length(result, longest)
    return caches[0]


def _last_tokens(x: torch.Tensor, count: int) -> torch.Tensor:
    """The last tokens of keys or values (B, heads, tokens, width), padded on the left with zeros to `count`."""
    missing = count - x.shape[2]
    return F.pad(x, (0, 0, missing, 0)) if missing >= 0 else x[:, :, -missing:]
