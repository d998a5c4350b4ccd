# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Inputs of ToST text models: checks, the padding mask, positions, packed sequences, the cache.

Values are read on the CPU only: on other devices that would synchronize, and fail during the capture of a CUDA graph; nor can
a compiler do it. The one exception is a text longer than the tables of positions, whose error would else be the device's own.
"""

from typing import NamedTuple, cast

import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from .cache_tost import ToSTCache, cached_length, check_cache
from .configuration_tost import CAUSAL_STATISTICS, SLIDING_ATTENTION, ToSTConfig
from .tssa_reference import sequence_starts


class ToSTInputs(NamedTuple):
    """Arguments of every layer in a forward pass, besides the hidden states."""

    attention_mask: torch.Tensor | None  # (B, T), true at real tokens; None if all are
    position_ids: torch.Tensor  # (B, T)
    seq_idx: torch.Tensor | None  # (B, T), sequence numbers of packed sequences
    past_key_values: Cache | None
    attention_masks: dict  # see `build_attention_masks`


def resolve_inputs(
    config: ToSTConfig,
    inputs_embeds: torch.Tensor,
    *,
    attention_mask: torch.Tensor | dict | None,
    position_ids: torch.Tensor | None,
    past_key_values: Cache | None,
    seq_idx: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None,
    use_cache: bool,
) -> ToSTInputs:
    """Checks the arguments of `ToSTModel.forward` against each other, and completes them.

    Args:
        inputs_embeds: the new tokens, (B, T, D).
        attention_mask: may also be the output of `ToSTForCausalLM.create_masks_for_generate`.

    The others are as in `ToSTModel.forward`.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: arguments disagree in shape or meaning.
        IndexError: a position is past the learned tables.
    """
    _reject_ring_attention()
    B, T, _ = inputs_embeds.shape
    device = inputs_embeds.device
    prepared: dict | None = None
    if B == 0 or T == 0:
        raise ValueError(f"The batch is empty: its shape is ({B}, {T}); a forward pass needs at least one token.")
    if past_key_values is not None:
        check_cache(past_key_values, config, B)
    past_length = 0 if past_key_values is None else cached_length(past_key_values)
    if isinstance(past_length, torch.Tensor) and _is_readable(past_length):  # of a static cache
        past_length = int(past_length)
    if isinstance(attention_mask, dict):
        prepared = attention_mask
        attention_mask = prepared[CAUSAL_STATISTICS]
    full_mask = _check_mask(cast(torch.Tensor | None, attention_mask), B, T, past_length)
    mask = None if full_mask is None else full_mask[:, -T:]
    given_idx = _given_sequences(seq_idx, cu_seq_lens_q, B, T, device)
    seq_idx = _find_sequences(given_idx, position_ids, mask, B, T, cached=past_key_values is not None)
    if position_ids is None:
        position_ids = _count_positions(full_mask, given_idx, past_length, T, device)
    else:
        _check_continuation(position_ids, full_mask, past_length)
    position_ids = position_ids.expand(B, T)
    _check_positions(position_ids, mask, past_length, config.max_position_embeddings)
    # packed sequences have no single state; where position_ids cannot be read they may or may not be packed
    unpacked = seq_idx is None or (given_idx is None and not _is_readable(seq_idx))
    if use_cache and past_key_values is None and unpacked:
        past_key_values = ToSTCache(config)
    masks = prepared or build_attention_masks(config, inputs_embeds, full_mask, seq_idx, past_key_values, past_length)
    return ToSTInputs(mask, position_ids, seq_idx, past_key_values, masks)


def _reject_ring_attention() -> None:
    """Raises inside torch's `context_parallel`, which replaces torch's attention function."""
    if torch.compiler.is_compiling():
        return
    if (getattr(F.scaled_dot_product_attention, "__module__", None) or "").startswith("torch.distributed."):
        raise ValueError(
            "torch's context_parallel shards texts for softmax attention: a ToST model would read each shard as a separate "
            "text. Call tost_hf.parallel.parallelize(model, device_mesh) instead, and give the model whole texts."
        )


def check_prompt(inputs: torch.Tensor | None, options: dict) -> None:
    """Rejects (ValueError) a prompt, in `inputs` or the options of `generate`, of which every token is in the cache."""
    cache, mask = options.get("past_key_values"), options.get("attention_mask")
    prompt = next((x for x in (inputs, options.get("input_ids"), options.get("inputs_embeds")) if x is not None), None)
    cached = int(cache.get_seq_length()) if isinstance(cache, Cache) else 0
    # with a longer mask, which covers the cached tokens, the prompt is what follows them
    if prompt is not None and (mask is None or mask.shape[1] == prompt.shape[1]) and 0 < prompt.shape[1] <= cached:
        raise ValueError(
            f"past_key_values holds {cached} tokens already, and the prompt has {prompt.shape[1]}: give the whole text, "
            "including the cached tokens, with at least one more; or only the new tokens, with an attention_mask that covers "
            "the cached ones as well."
        )


def _is_readable(x: torch.Tensor) -> bool:
    """Whether a tensor's values can be read without synchronizing a device."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


# Padding ---------------------------------------------------------------------------------------------------------------


def _check_mask(mask: torch.Tensor | None, B: int, T: int, past_length) -> torch.Tensor | None:
    """The padding mask as booleans, (B, T) or (B, past_length + T); None if it is known to mask nothing."""
    if mask is None:
        return None
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask must have shape (batch, tokens), got {tuple(mask.shape)}: TSSA has no token-by-token mask."
        )
    known = isinstance(past_length, int)
    if mask.shape[0] != B or mask.shape[1] < T or (known and mask.shape[1] not in (T, past_length + T)):
        wanted = f"({B}, {T})" if known and not past_length else f"({B}, cached tokens + {T})"
        raise ValueError(f"attention_mask must have shape {wanted}, got {tuple(mask.shape)}.")
    if _is_readable(mask):
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("attention_mask must hold 1 at real tokens and 0 at padding, and nothing else.")
        if mask.shape[1] == past_length + T and mask.all():
            return None
    return mask.bool()


def _previous_real(mask: torch.Tensor) -> torch.Tensor:
    """Index (B, T) of the last real token before each token; -1 if there is none."""
    t = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    return F.pad(t.masked_fill(~mask, -1).cummax(1)[0][:, :-1], (1, 0), value=-1)


# Packed sequences ------------------------------------------------------------------------------------------------------


def _given_sequences(seq_idx, cu_seq_lens_q, B: int, T: int, device) -> torch.Tensor | None:
    """Sequence numbers (B, T) from `seq_idx` or `cu_seq_lens_q`."""
    for name, x in (("seq_idx", seq_idx), ("cu_seq_lens_q", cu_seq_lens_q)):
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}.")
        if x is not None and (x.is_floating_point() or x.is_complex()):
            raise ValueError(f"{name} must hold integers, got {x.dtype}.")
    if seq_idx is not None and seq_idx.shape not in ((B, T), (1, T)):
        raise ValueError(f"seq_idx must have shape ({B}, {T}), got {tuple(seq_idx.shape)}.")
    if seq_idx is not None:
        seq_idx = seq_idx.to(device).expand(B, T)
    if cu_seq_lens_q is None:
        return seq_idx
    if B != 1:
        raise ValueError(f"cu_seq_lens_q is for a batch of size 1, but the batch has {B}; use seq_idx.")
    if cu_seq_lens_q.ndim != 1 or len(cu_seq_lens_q) < 2:
        raise ValueError(f"cu_seq_lens_q must have shape (sequences + 1,), got {tuple(cu_seq_lens_q.shape)}.")
    if _is_readable(cu_seq_lens_q):
        if cu_seq_lens_q[0] != 0 or cu_seq_lens_q[-1] != T or (cu_seq_lens_q.diff() < 0).any():
            raise ValueError(f"cu_seq_lens_q must rise from 0 to the number of tokens ({T}), got {cu_seq_lens_q.tolist()}.")
    boundaries = cu_seq_lens_q.to(device).long()
    from_lengths = torch.searchsorted(boundaries.contiguous(), torch.arange(T, device=device), right=True).unsqueeze(0)
    if seq_idx is not None and _is_readable(seq_idx):
        if not torch.equal(_real_sequence_starts(seq_idx, None), _real_sequence_starts(from_lengths, None)):
            raise ValueError("seq_idx and cu_seq_lens_q begin their sequences at different tokens; give one of them.")
    return from_lengths


def _find_sequences(given_idx, position_ids, mask, B: int, T: int, *, cached: bool) -> torch.Tensor | None:
    """Sequence numbers (B, T) of packed sequences, as given or from positions that restart at 0; otherwise None."""
    found_idx = None
    if position_ids is not None:
        if position_ids.ndim != 2 or position_ids.shape[0] not in (B, 1) or position_ids.shape[1] != T:
            raise ValueError(f"position_ids must have shape ({B}, {T}), got {tuple(position_ids.shape)}.")
        if position_ids.is_floating_point():
            raise ValueError(f"position_ids must hold integers, got {position_ids.dtype}.")
        found_idx = _packed_sequences(position_ids.expand(B, T), mask, cached)
        if given_idx is not None and _is_readable(position_ids):
            restarts = _real_sequence_starts(torch.zeros_like(given_idx) if found_idx is None else found_idx, mask)
            if not torch.equal(_real_sequence_starts(given_idx, mask), restarts):
                raise ValueError(
                    "position_ids do not restart at 0 exactly where seq_idx / cu_seq_lens_q begin a new sequence; give "
                    "position_ids that do, or leave them out."
                )
    seq_idx = found_idx if given_idx is None else given_idx
    if seq_idx is not None and cached:
        raise ValueError(
            "Packed sequences (position_ids that restart, seq_idx or cu_seq_lens_q) cannot be combined with a cache: a batch "
            "element would have several states; run them without past_key_values, or unpacked."
        )
    return seq_idx


def _real_sequence_starts(seq_idx: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Whether each real token belongs to another sequence than the real token before it, (B, T)."""
    mask = torch.ones_like(seq_idx, dtype=torch.bool) if mask is None else mask
    previous = _previous_real(mask)
    return mask & (previous >= 0) & (seq_idx != seq_idx.gather(1, previous.clamp_min(0)))


def _packed_sequences(position_ids: torch.Tensor, mask: torch.Tensor | None, cached: bool) -> torch.Tensor | None:
    """Sequence numbers (B, T) if positions of real tokens restart at 0, otherwise None.

    Positions that cannot be read give numbers in any case, except with a cache, which excludes packing.
    """
    readable = _is_readable(position_ids)
    if position_ids.shape[1] == 1 or (cached and not readable):
        return None
    mask = torch.ones_like(position_ids, dtype=torch.bool) if mask is None else mask
    previous = _previous_real(mask)
    follows = mask & (previous >= 0)
    restarts = follows & (position_ids == 0)
    if not readable:
        return restarts.cumsum(1)
    # positions from `generate` may decrease after padding: it continues from a padding token's 0
    t = torch.arange(mask.shape[1], device=mask.device)
    falls = follows & ~restarts & (position_ids <= position_ids.gather(1, previous.clamp_min(0)))
    if (falls & (previous == t - 1)).any():
        raise ValueError(
            "position_ids fall or repeat without restarting at 0: they describe neither one sequence nor packed sequences."
        )
    return restarts.cumsum(1) if restarts.any() else None


# Positions -------------------------------------------------------------------------------------------------------------


def _count_positions(full_mask, seq_idx, past_length, T: int, device) -> torch.Tensor:
    """Positions (B or 1, T) that count real tokens, from 0 in each packed sequence."""
    if full_mask is None and seq_idx is None:
        return (torch.arange(T, device=device) + past_length).unsqueeze(0)
    continues = not (isinstance(past_length, int) and past_length == 0)
    if continues and full_mask.shape[1] == T:
        raise ValueError(
            "With a cache, give position_ids, or an attention_mask that covers the cached tokens as well as the new ones: "
            "positions count real tokens, and this mask does not tell which cached tokens are real."
        )
    real = torch.ones_like(seq_idx, dtype=torch.bool) if full_mask is None else full_mask
    count = real.long().cumsum(1)
    if seq_idx is not None:
        count = count - (count - real.long()).masked_fill(~sequence_starts(seq_idx), 0).cummax(1)[0]
    return (count - 1).clamp_min(0)[:, -T:]


def _check_continuation(position_ids: torch.Tensor, full_mask: torch.Tensor | None, past_length) -> None:
    """Rejects positions that start at 0 although the cache holds real tokens of the sequence."""
    if not _is_readable(position_ids) or not past_length:
        return
    T = position_ids.shape[1]
    if full_mask is None:
        starts_again = position_ids == 0
    elif full_mask.shape[1] == T:  # which cached tokens are real is unknown
        return
    else:
        starts_again = (position_ids == 0) & full_mask[:, -T:] & full_mask[:, :-T].any(1, keepdim=True)
    if starts_again.any():
        raise ValueError(
            f"position_ids start at 0, but the cache holds {past_length} tokens already: continue from their positions, omit "
            "position_ids, or start with an empty cache."
        )


def _check_positions(position_ids: torch.Tensor, mask: torch.Tensor | None, past_length, limit: int | None) -> None:
    if limit is None or torch.compiler.is_compiling():
        return
    # a position is at most the number of tokens before it: on other devices values are read only if that is too large
    if not _is_readable(position_ids) and (
        isinstance(past_length, torch.Tensor) or past_length + position_ids.shape[1] <= limit
    ):
        return
    if mask is not None:
        position_ids = position_ids.masked_fill(~mask, 0)
    low, high = int(position_ids.min()), int(position_ids.max())
    if low < 0:
        raise IndexError(f"position_ids must not be negative, got {low}.")
    if high >= limit:
        raise IndexError(
            f"Position {high} is past the end of this model's learned position tables, which hold {limit} "
            f"(max_position_embeddings): shorten the text, extend the tables with resize_position_embeddings and "
            f"fine-tune, or use a position-free model (max_position_embeddings=None)."
        )


# Attention masks -------------------------------------------------------------------------------------------------------


def build_attention_masks(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    mask: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    past_key_values: Cache | None,
    past_length,
) -> dict:
    """Masks of scores for the attention implementation, by layer type; empty without attention layers.

    Args:
        inputs_embeds: (B, T, D).
        mask: (B, cached + T), true at real tokens.
        seq_idx: (B, T), sequence numbers of packed sequences, without a cache.
        past_length: number of cached tokens.

    Raises:
        ValueError: the mask does not cover the cached tokens, or does not determine a sliding window.
    """
    kinds = [kind for kind in dict.fromkeys(config.layer_types) if kind != CAUSAL_STATISTICS]
    if not kinds:
        return {}
    # imported here, so that models without such layers load even if transformers moves this module
    from transformers import masking_utils

    starts = isinstance(past_length, int) and past_length == 0
    if mask is not None and not starts and mask.shape[1] == inputs_embeds.shape[1]:
        raise ValueError(
            "With a cache, attention layers need an attention_mask that covers the cached tokens as well as the new ones."
        )
    if seq_idx is not None and "flash" in config._attn_implementation and (mask is not None or len(seq_idx) > 1):
        raise ValueError("Flash attention supports packed sequences only in batches of size 1, unpadded; use 'sdpa'.")
    masks = {}
    for kind in kinds:
        create, conditions = masking_utils.create_causal_mask, []
        if seq_idx is not None:
            conditions.append(masking_utils.packed_sequence_mask_function(sequence_starts(seq_idx).cumsum(1)))
        if kind == SLIDING_ATTENTION and mask is not None and starts:
            conditions.append(_window_of_real_tokens(mask, config.sliding_window))
        elif kind == SLIDING_ATTENTION:
            create = masking_utils.create_sliding_window_causal_mask
            _check_gaps(mask)
        masks[kind] = create(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=mask,
            past_key_values=past_key_values,
            and_mask_function=masking_utils.and_masks(*conditions) if conditions else None,
            layer_idx=config.layer_types.index(kind),
        )
    return masks


def _window_of_real_tokens(mask: torch.Tensor, window: int):
    """A sliding window that counts real tokens only."""
    # a static cache has keys up to its size, which the causal mask excludes
    rank = F.pad(mask.long().cumsum(1), (0, window))

    def condition(batch, head, query, key):
        return rank[batch, query] - rank[batch, key] < window

    return condition


def _check_gaps(mask: torch.Tensor | None) -> None:
    """Rejects padding between real tokens, which a cached sliding window would count; checked on the CPU only."""
    if mask is None or mask.device.type != "cpu" or torch.compiler.is_compiling():
        return
    later = mask.flip(1).cummax(1)[0].flip(1)
    if (~mask & mask.cummax(1)[0] & later).any():
        raise ValueError(
            "With a cache, sliding_attention layers cannot skip padding between real tokens: pad on the left, or run the "
            "whole text without past_key_values."
        )
