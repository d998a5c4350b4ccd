# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Inputs of ToST text models: the padding mask, positions, packed sequences, the cache.

Shapes are checked, and values where something would be silently wrong, on every device alike: whether positions restart, a
sequence longer than the position tables, and gaps in the padding of a cached sliding window. Decoding steps without a sliding
window read no values, as this would synchronize a device.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from .cache_tost import ToSTCache, check_cache
from .configuration_tost import SLIDING_ATTENTION, TSSA, ToSTConfig
from .tssa_reference import is_traced, sequence_starts


# transformers 5.24 renamed the argument of models and masks, and the field of outputs; the old one is deprecated there
CACHE_NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def rename_cache(options: dict[str, Any], name: str = CACHE_NAME) -> None:
    """Renames the cache among arguments, in place, from either of its names.

    Raises:
        ValueError: both names are given.
    """
    cache = options.pop("past_key_values" if name == "cache" else "cache", None)
    if cache is None:
        return
    if options.get(name) is not None:
        raise ValueError("cache and past_key_values are two names of one argument: pass only one of them.")
    options[name] = cache


def accept_cache(forward: Callable) -> Callable:
    """Lets the base model's `forward`, to which the heads pass all names, accept `past_key_values` as `cache` as well.

    Raises:
        TypeError: an argument of another name holds a cache. It would be ignored, and each token processed without a state.
    """

    @functools.wraps(forward)
    def forward_with_either_name(self, *args, **kwargs):
        if "cache" in kwargs:
            rename_cache(kwargs, "past_key_values")
        for name, value in kwargs.items():
            if isinstance(value, Cache) and name != "past_key_values":
                raise TypeError(
                    f"{type(self).__name__} got a cache in the argument {name!r}, which it does not know: pass it as "
                    f"past_key_values. If you called generate, transformers {transformers.__version__} is newer than this "
                    "model's code: update tost_hf (or the model's repository), or pass use_cache=False."
                )
        return forward(self, *args, **kwargs)

    return forward_with_either_name


class ToSTInputs(NamedTuple):
    """Arguments of every layer in a forward pass, besides the hidden states."""

    attention_mask: torch.Tensor | None  # (B, T), true at real tokens; None if all are
    position_ids: torch.Tensor  # (B, T)
    seq_idx: torch.Tensor | None  # (B, T), sequence numbers of packed sequences
    past_key_values: Cache | None
    causal_mask_mapping: dict  # see `create_causal_mask_mapping`


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
    """Checks the arguments of `ToSTModel.forward`, and fills in the missing ones.

    Args:
        inputs_embeds: the new tokens, (B, T, D).
        attention_mask: may also be the output of `ToSTForCausalLM.create_masks_for_generate`.

    The others are as in `ToSTModel.forward`.

    Raises:
        ValueError: arguments contradict each other in shape or meaning.
        IndexError: a sequence is longer than the learned tables.
    """
    _reject_ring_attention()
    B, T, _ = inputs_embeds.shape
    device = inputs_embeds.device
    if B == 0 or T == 0:
        raise ValueError(f"The batch is empty: its shape is ({B}, {T}); a forward pass needs at least one token.")
    if past_key_values is not None:
        check_cache(past_key_values, config, B)
    past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
    if isinstance(past_length, torch.Tensor) and past_length.device.type == "cpu" and _has_values(past_length):
        past_length = int(past_length)  # of a static cache
    prepared_masks = attention_mask if isinstance(attention_mask, dict) else None
    if prepared_masks is not None:
        attention_mask = prepared_masks[TSSA]
    full_mask = _check_mask(cast(torch.Tensor | None, attention_mask), B, T, past_length)
    mask = None if full_mask is None else full_mask[:, -T:]
    if position_ids is not None:
        position_ids = _expand_numbers("position_ids", position_ids, B, T)
    is_explicit = seq_idx is not None or cu_seq_lens_q is not None
    if is_explicit:
        seq_idx = _get_seq_idx(seq_idx, cu_seq_lens_q, B, T, device)
    elif position_ids is not None and T > 1:
        seq_idx = _infer_seq_idx(position_ids, mask)
    may_be_packed = seq_idx is not None and (is_explicit or _has_values(seq_idx))
    if may_be_packed and past_key_values is not None:
        raise ValueError(
            "Packed sequences (position_ids that restart, seq_idx or cu_seq_lens_q) cannot be combined with a cache: a batch "
            "element would have several states; run them without past_key_values, or unpacked."
        )
    if past_key_values is not None:
        seq_idx = None
    if use_cache and past_key_values is None and not may_be_packed:
        past_key_values = ToSTCache(config)
    if position_ids is None:
        position_ids = _count_positions(full_mask, seq_idx, past_length, T, device).expand(B, T)
    if config.position_embedding_type == "learned":
        if mask is not None:  # positions of padding are not used, and may be -1 where real tokens are counted
            position_ids = position_ids.masked_fill(~mask, 0)
        _check_positions(position_ids, past_length, cast(int, config.max_position_embeddings))
    causal_mask_mapping = prepared_masks or create_causal_mask_mapping(
        config, inputs_embeds, full_mask, seq_idx, past_key_values, past_length
    )
    return ToSTInputs(mask, position_ids, seq_idx, past_key_values, causal_mask_mapping)


def _reject_ring_attention() -> None:
    """Raises inside torch's `context_parallel`, which replaces torch's attention function."""
    if torch.compiler.is_compiling():
        return
    if (getattr(F.scaled_dot_product_attention, "__module__", None) or "").startswith("torch.distributed."):
        raise ValueError(
            "torch's context_parallel shards sequences for softmax attention: a ToST model would process each shard as a "
            "separate sequence. Call tost_hf.parallel.parallelize(model, device_mesh) instead, and pass whole sequences."
        )


def check_prompt(inputs: torch.Tensor | None, options: dict) -> None:
    """Raises ValueError if the prompt, in `inputs` or the options of `generate`, has no tokens after the cached ones."""
    cache, mask = options.get(CACHE_NAME), options.get("attention_mask")
    prompt = next((x for x in (inputs, options.get("input_ids"), options.get("inputs_embeds")) if x is not None), None)
    num_cached = int(cache.get_seq_length()) if isinstance(cache, Cache) else 0
    # a mask longer than the prompt covers the cached tokens as well: then the prompt consists of new tokens
    if prompt is not None and (mask is None or mask.shape[1] == prompt.shape[1]) and 0 < prompt.shape[1] <= num_cached:
        raise ValueError(
            f"past_key_values holds {num_cached} tokens already, and the prompt has {prompt.shape[1]}: pass the whole prompt, "
            "including the cached tokens, with at least one more; or only the new tokens, with an attention_mask that covers "
            "the cached ones as well."
        )


def _has_values(x: torch.Tensor) -> bool:
    """Whether a tensor has values that can be read: not if a compiler traces it, or on the meta device."""
    return not x.is_meta and not is_traced()


def _expand_numbers(name: str, x: torch.Tensor, B: int, T: int) -> torch.Tensor:
    """Expands a number of each token, (B, T) or (1, T), to (B, T)."""
    if x.shape not in ((B, T), (1, T)) or x.is_floating_point():
        raise ValueError(f"{name} must be integers of shape ({B}, {T}), got {x.dtype} {tuple(x.shape)}.")
    return x.expand(B, T)


# Padding ---------------------------------------------------------------------------------------------------------------


def _check_mask(mask: torch.Tensor | None, B: int, T: int, past_length) -> torch.Tensor | None:
    """The boolean padding mask, (B, T) or (B, past_length + T); None if all tokens are known to be real."""
    if mask is None:
        return None
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask must have shape (batch, tokens), got {tuple(mask.shape)}: TSSA has no token-by-token mask."
        )
    length_is_known = isinstance(past_length, int)
    if mask.shape[0] != B or mask.shape[1] < T or (length_is_known and mask.shape[1] not in (T, past_length + T)):
        expected = f"({B}, {T})" if length_is_known and not past_length else f"({B}, cached tokens + {T})"
        raise ValueError(f"attention_mask must have shape {expected}, got {tuple(mask.shape)}.")
    if mask.device.type == "cpu" and _has_values(mask) and mask.shape[1] == past_length + T and mask.all():
        return None  # as computing without a mask is faster
    return mask.bool()


# Packed sequences ------------------------------------------------------------------------------------------------------


def _get_seq_idx(seq_idx, cu_seq_lens_q, B: int, T: int, device) -> torch.Tensor:
    """Sequence numbers (B, T) from `seq_idx` or, without it, `cu_seq_lens_q`."""
    if seq_idx is not None:
        return _expand_numbers("seq_idx", seq_idx, B, T).to(device)
    if B != 1:
        raise ValueError(f"cu_seq_lens_q is for a batch of size 1, but the batch has {B}; use seq_idx.")
    if cu_seq_lens_q.ndim != 1 or len(cu_seq_lens_q) < 2 or cu_seq_lens_q.is_floating_point():
        raise ValueError(
            f"cu_seq_lens_q must be integers of shape (sequences + 1,), got {cu_seq_lens_q.dtype} "
            f"{tuple(cu_seq_lens_q.shape)}."
        )
    boundaries = cu_seq_lens_q.to(device).long().contiguous()
    return torch.searchsorted(boundaries, torch.arange(T, device=device), right=True).unsqueeze(0)


def _infer_seq_idx(position_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Sequence numbers (B, T) if positions of real tokens restart at 0, otherwise None.

    One flag is read, as in transformers' `find_packed_sequence_indices`. Where it has no value, it returns numbers even
    without a restart.
    """
    is_real = torch.ones_like(position_ids, dtype=torch.bool) if mask is None else mask
    restarts = is_real & (position_ids == 0) & (is_real.cumsum(1) > 1)  # not at the first real token
    return restarts.cumsum(1) if not _has_values(restarts) or restarts.any() else None


# Positions -------------------------------------------------------------------------------------------------------------


def _count_positions(full_mask, seq_idx, past_length, T: int, device) -> torch.Tensor:
    """Positions (B or 1, T) that count real tokens, from 0 in each packed sequence."""
    if full_mask is None and seq_idx is None:
        return (torch.arange(T, device=device) + past_length).unsqueeze(0)
    has_past = not (isinstance(past_length, int) and past_length == 0)
    if has_past and full_mask.shape[1] == T:
        raise ValueError(
            "With a cache, pass position_ids, or an attention_mask that covers the cached tokens as well as the new ones: "
            "positions count real tokens, and this mask does not tell which cached tokens are real."
        )
    mask = torch.ones_like(seq_idx, dtype=torch.bool) if full_mask is None else full_mask
    count = mask.long().cumsum(1)
    if seq_idx is not None:
        count = count - (count - mask.long()).masked_fill(~sequence_starts(seq_idx), 0).cummax(1)[0]
    return (count - 1).clamp_min(0)[:, -T:]


def _check_positions(position_ids: torch.Tensor, past_length, limit: int) -> None:
    """Raises for a sequence beyond the tables, where an embedding's own error would not say what to do."""
    # a position is at most the number of preceding tokens: values are read only if that exceeds the limit
    if not _has_values(position_ids) or isinstance(past_length, torch.Tensor) or past_length + position_ids.shape[1] <= limit:
        return
    if (high := int(position_ids.max())) >= limit:
        raise IndexError(
            f"Position {high} is past the end of this model's learned position tables, which hold {limit} "
            f"(max_position_embeddings): shorten the sequence, extend the tables with resize_position_embeddings and "
            f"fine-tune, or use a model without them (position_embedding_type='none')."
        )


# Attention masks -------------------------------------------------------------------------------------------------------


def create_causal_mask_mapping(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    mask: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    past_key_values: Cache | None,
    past_length,
) -> dict:
    """Masks in the format of the attention implementation, by layer type; empty without softmax attention layers.

    Args:
        inputs_embeds: (B, T, D).
        mask: (B, cached + T), true at real tokens.
        seq_idx: (B, T), sequence numbers of packed sequences, without a cache.
        past_length: number of cached tokens.

    Raises:
        ValueError: the mask does not cover the cached tokens, a sliding window cannot skip its padding, or flash attention
            does not support it.
    """
    layer_types = dict.fromkeys(config.layer_types[: config.num_hidden_layers])
    layer_types.pop(TSSA, None)
    if not layer_types:
        return {}
    # imported here, so that models without such layers load even if transformers moves this module
    from transformers import masking_utils

    has_past = not (isinstance(past_length, int) and past_length == 0)
    if mask is not None and has_past and mask.shape[1] == inputs_embeds.shape[1]:
        raise ValueError(
            "With a cache, attention layers need an attention_mask that covers the cached tokens as well as the new ones."
        )
    if seq_idx is not None and "flash" in config._attn_implementation and (mask is not None or len(seq_idx) > 1):
        raise ValueError("Flash attention supports packed sequences only in batches of size 1, unpadded; use 'sdpa'.")
    masks = {}
    for layer_type in layer_types:
        create_mask, mask_functions = masking_utils.create_causal_mask, []
        if seq_idx is not None:
            mask_functions.append(masking_utils.packed_sequence_mask_function(sequence_starts(seq_idx).cumsum(1)))
        if layer_type == SLIDING_ATTENTION and mask is not None and not has_past:
            mask_functions.append(_sliding_window_overlay(mask, config.sliding_window))
        elif layer_type == SLIDING_ATTENTION:
            create_mask = masking_utils.create_sliding_window_causal_mask
            _check_gaps(mask)
        options: dict[str, Any] = {CACHE_NAME: past_key_values, "layer_idx": config.layer_types.index(layer_type)}
        if mask_functions:
            options["and_mask_function"] = masking_utils.and_masks(*mask_functions)
        masks[layer_type] = create_mask(config=config, inputs_embeds=inputs_embeds, attention_mask=mask, **options)
    return masks


def _sliding_window_overlay(mask: torch.Tensor, sliding_window: int):
    """As transformers' function of this name, for a window that counts real tokens only."""
    # padded for the unused keys of a static cache, which the causal mask excludes
    rank = F.pad(mask.long().cumsum(1), (0, sliding_window))

    def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
        return rank[batch_idx, q_idx] - rank[batch_idx, kv_idx] < sliding_window

    return inner_mask


def _check_gaps(mask: torch.Tensor | None) -> None:
    """Rejects padding between real tokens, which a cached sliding window would count."""
    if mask is None or not _has_values(mask):
        return
    has_earlier, has_later = mask.cummax(1)[0], mask.flip(1).cummax(1)[0].flip(1)
    if (~mask & has_earlier & has_later).any():
        raise ValueError(
            "With a cache, sliding_attention layers cannot skip padding between real tokens: pad on the left, or run the "
            "whole sequence without past_key_values."
        )
