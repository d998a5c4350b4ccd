# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Softmax attention layers of hybrid models, on transformers' attention functions and masks."""

import functools

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_tost import CAUSAL_STATISTICS, SLIDING_ATTENTION
from .tssa_reference import compute_dtype, sequence_starts


def rotary_embedding(
    config: PreTrainedConfig, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of rotary positions (RoFormer, arXiv 2104.09864), each (B, T, head_dim), computed in float32.

    Args:
        config: its `rope_parameters` have rope_type "default", or "linear", which divides the frequencies by "factor".
        x: a tensor of the dtype and device of the result.
        position_ids: (B, T).
    """
    rope = config.rope_parameters
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=x.device) / config.head_dim
    frequency = 1.0 / rope["rope_theta"] ** exponent
    if rope["rope_type"] == "linear":
        frequency = frequency / rope["factor"]
    angle = position_ids[..., None].float() * frequency
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def apply_rotary_pos_emb(query, key, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (B, heads, T, head_dim), rotated."""

    def rotate(x):
        left, right = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat([-right, left], -1) * sin.unsqueeze(1)

    return rotate(query), rotate(key)


def eager_attention_forward(
    module: nn.Module, query, key, value, attention_mask: torch.Tensor | None, scaling: float, dropout: float = 0.0, **kwargs
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' attention interface, in plain PyTorch: the attended tokens (B, T, heads, head_dim), and the weights."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=compute_dtype(query.dtype)).to(query.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


class ToSTAttention(nn.Module):
    """Causal softmax attention of one layer, with grouped keys and values.

    Args:
        config: a `ToSTConfig` whose `layer_types` has an attention layer at `layer_idx`.
        layer_idx: index of the layer in the model and in a cache.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.layer_type = config.layer_types[layer_idx]
        self.head_dim = config.head_dim
        groups = config.num_key_value_heads or config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // groups
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.sliding_window = config.sliding_window if self.layer_type == SLIDING_ATTENTION else None
        width, bias = config.hidden_size, config.use_bias
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, groups * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, groups * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)
        self.out_dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attention_masks: dict,
        position_ids: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes the layer.

        Args:
            hidden_states: (B, T, D).
            attention_mask: (B, T), true at real tokens; of these tokens only, not those in the cache.
            attention_masks: from `build_attention_masks`.
            position_ids: (B, T).
            position_embeddings: from `rotary_embedding`; None where the embedded tokens contain their positions.
            past_key_values: a cache with an attention layer at `layer_idx`; updated.

        Returns:
            The attended tokens (B, T, D), and the attention weights if the attention function returns them.
        """
        B, T, _ = hidden_states.shape
        if attention_mask is not None:  # in addition to the mask of scores: padding may hold NaN, and 0 times NaN is NaN
            hidden_states = hidden_states.masked_fill(~attention_mask.bool().unsqueeze(-1), 0)
        query, key, value = (
            projection(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if position_embeddings is not None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        nonfinite = _nonfinite_tokens(query, key, value)
        if nonfinite is not None:  # a key keeps its NaN in the cache
            query, value = query.masked_fill(nonfinite, 0), value.masked_fill(nonfinite, 0)
            key = key.masked_fill(nonfinite, torch.nan)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = functools.partial(
            ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward),
            self,
            attention_mask=attention_masks[self.layer_type],
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            position_ids=position_ids,
        )
        nonfinite_keys = None
        if nonfinite is not None:
            nonfinite_keys = key.isnan().any(-1, keepdim=True)
            key = key.masked_fill(nonfinite_keys, 0)
        attended, weights = attend(query, key, value, dropout=self.attention_dropout if self.training else 0.0)
        if nonfinite_keys is not None:
            # with equal weights, the share of such keys among those that a query sees
            share, _ = attend(torch.zeros_like(query), torch.zeros_like(key), nonfinite_keys.to(value.dtype).expand_as(value))
            attended = attended.masked_fill(share != 0, torch.nan)
        return self.out_dropout(self.out_proj(attended.reshape(B, T, -1))), weights


def _nonfinite_tokens(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Tokens (B, 1, T, 1) whose query, key or value is not finite; None if there are none.

    Attention multiplies a masked value by 0, and 0 times NaN is NaN: such a token would spoil those before it and the other
    packed sequences. Only checked on the CPU: elsewhere the check would wait for the device. A single token, in decoding, sees
    nothing but its own past. Gradients are not separated.
    """
    if query.device.type != "cpu" or query.shape[2] == 1 or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    if all(x.detach().sum().isfinite() for x in (query, key, value)):
        return None
    finite = [x.detach().isfinite().all(-1).all(1) for x in (query, key, value)]
    nonfinite = ~(finite[0] & finite[1] & finite[2])
    return nonfinite[:, None, :, None] if nonfinite.any() else None


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
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    starts = isinstance(past_length, int) and past_length == 0
    if mask is not None and not starts and mask.shape[1] == inputs_embeds.shape[1]:
        raise ValueError(
            "With a cache, attention layers need an attention_mask that covers the cached tokens as well as the new ones."
        )
    packed = None
    if seq_idx is not None:
        if "flash" in config._attn_implementation and (mask is not None or len(seq_idx) > 1):
            raise ValueError("Flash attention supports packed sequences only in batches of size 1, unpadded; use 'sdpa'.")
        packed = _within_sequence(sequence_starts(seq_idx).cumsum(1))
    masks = {}
    for kind in kinds:
        create, conditions = create_causal_mask, [packed]
        if kind == SLIDING_ATTENTION:
            if mask is not None and starts:
                conditions.append(_window_of_real_tokens(mask, config.sliding_window))
            else:
                create = create_sliding_window_causal_mask
                _check_gaps(mask)
        conditions = [condition for condition in conditions if condition is not None]
        masks[kind] = create(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=mask,
            past_key_values=past_key_values,
            and_mask_function=_all_of(conditions) if conditions else None,
            layer_idx=config.layer_types.index(kind),
        )
    return masks


def _all_of(conditions: list):
    def condition(batch, head, query, key):
        result = conditions[0](batch, head, query, key)
        for further in conditions[1:]:
            result = result & further(batch, head, query, key)
        return result

    return condition


def _within_sequence(sequence: torch.Tensor):
    """Attention within packed sequences, by the tokens' sequence numbers (B, T)."""

    def condition(batch, head, query, key):
        return sequence[batch, query] == sequence[batch, key]

    return condition


def _window_of_real_tokens(mask: torch.Tensor, window: int):
    """A sliding window that counts real tokens only."""
    # a static cache has keys up to its size, which the causal mask excludes
    rank = nn.functional.pad(mask.long().cumsum(1), (0, window))

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


__all__ = ["ToSTAttention", "build_attention_masks", "rotary_embedding"]
