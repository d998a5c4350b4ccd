# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Layers that text and vision models share: the short convolution, the MLP, Token Statistics Self-Attention."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .tssa import TSSAOutput, choose_kernels, tssa, tssa_step
from .tssa_reference import TSSAState, compute_dtype, has_tangent, sequence_starts
from .tssa_reference import convolve as convolve_reference


# Short convolution ----------------------------------------------------------------------------------------------------


class ShortConvolution(nn.Module):
    """A causal depthwise convolution over the inputs of a layer, with a residual connection.

        y_t = x_t + sum_{j < conv_kernel} weight_j x_{t-j}

    `t - j` counts the real tokens of one sequence: padding is skipped, packed sequences are independent, and there are zeros
    before the first token. The state of a sequence is its last `conv_kernel - 1` inputs.

    `weight` (D, conv_kernel) is initialized to 0, so that the output equals the input. Unlike in causal-conv1d and fla's
    `ShortConvolution`, the first column is the current token's, which is the last one there, there is the residual connection,
    and neither a bias nor an activation.
    """

    def __init__(self, hidden_size: int, conv_kernel: int):
        super().__init__()
        self.conv_kernel = conv_kernel
        self.weight = nn.Parameter(torch.zeros(hidden_size, conv_kernel))

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        conv_state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolves tokens.

        Args:
            hidden_states: (B, T, D).
            mask: (B, T), true or 1 at real tokens; None if all are.
            seq_idx: (B, T), sequence numbers of packed sequences.
            conv_state: the last `conv_kernel - 1` inputs before these tokens, (B, conv_kernel - 1, D); None at the start of
                a sequence.

        Returns:
            The convolved tokens (B, T, D), and the last `conv_kernel - 1` real inputs (B, conv_kernel - 1, D), oldest first.
        """
        mask = None if mask is None else mask.bool()
        seq_idx = None if seq_idx is None else sequence_starts(seq_idx).cumsum(1)  # as numbers may repeat
        inputs = hidden_states, self.weight, mask, seq_idx, conv_state
        if hidden_states.device.type == "cpu" and hidden_states.dtype == self.weight.dtype != torch.float16:
            form = "step" if hidden_states.shape[1] == 1 else "causal"
            kernels = choose_kernels(hidden_states.unsqueeze(-2), None, form)
            if kernels == "numba" and not has_tangent(hidden_states, self.weight, conv_state):
                from .tssa_cpu import convolve

                return convolve(*inputs)
        return convolve_reference(*inputs)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, conv_kernel={self.conv_kernel}"


# MLP ------------------------------------------------------------------------------------------------------------------


def make_dropout(p: float) -> nn.Module:
    """A dropout with probability p; of 0 an identity, as an idle `nn.Dropout` takes as long as a residual connection."""
    return nn.Dropout(p) if p else nn.Identity()


class MLP(nn.Module):
    """Two linear layers with the activation of `config` between them; `inner_dropout` acts on the intermediate features."""

    def __init__(self, config: PreTrainedConfig, bias: bool = True, inner_dropout: float = 0.0):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.inner_dropout = make_dropout(inner_dropout)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)
        self.dropout = make_dropout(config.hidden_dropout)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        intermediate = self.inner_dropout(self.act_fn(self.up_proj(hidden_states)))
        return self.dropout(self.down_proj(intermediate))


# Outputs --------------------------------------------------------------------------------------------------------------


@dataclass
class MembershipsMixin:
    """Adds `memberships` to an output class of transformers.

    Args:
        memberships: with `output_memberships=True`, Pi of every TSSA layer, each (B, H, T) in float32, 0 at padding.
    """

    memberships: tuple[torch.FloatTensor, ...] | None = None


# TSSA -----------------------------------------------------------------------------------------------------------------


FLOAT32_PARAMETERS = ("temp", "denom_bias", "forget_bias")
MIN_MEMORY, MAX_MEMORY = 4, 1024  # tokens


def initial_decay_bias(num_heads: int) -> torch.Tensor:
    """Logits (H,) of the decays 1 - 1 / tau, where tau is log-spaced over the heads from 4 to 1,024 tokens."""
    tau = torch.logspace(math.log2(MIN_MEMORY), math.log2(MAX_MEMORY), num_heads, base=2)
    return torch.log(tau - 1)


class LayerOperators(NamedTuple):
    """The functions that a layer calls; tensor and context parallelism replace them by functions of the same signatures."""

    tssa: Callable[..., TSSAOutput] = tssa
    step: Callable[..., TSSAOutput] = tssa_step
    convolve: Callable[..., tuple[torch.Tensor, torch.Tensor]] = ShortConvolution.__call__


class TokenStatisticsSelfAttention(nn.Module):
    """One TSSA layer with its two projections, for language (causal) and vision (bidirectional) alike.

    Args:
        hidden_size: width D of the tokens.
        num_attention_heads: number of heads H; divides `hidden_size`.
        causal: whether a token depends only on itself and the tokens before it.
        layer_idx: the layer's index in a cache; needed for `past_key_values`.
        max_position_embeddings: length of the learned score bias `denom_bias`; None for no bias (bidirectional form, or a
            causal form without positions).
        in_bias: whether the input projection has a bias.
        out_bias: whether the output projection has a bias.
        attention_dropout: dropout on 1 / (1 + moment), as in the paper's code.
        hidden_dropout: dropout after the output projection.
        decay_type: decay of the recurrent state: "none", "head" (learned for each head) or "token" (computed for each head
            from each token); causal form only.
        conv_kernel: kernel size of the `ShortConvolution` on the layer's input; None for none. Causal form only.
        backend: as in `tssa`; can be changed later.

    `temp` (H, 1), `denom_bias` (H, max_position_embeddings, 1) and `forget_bias` (H,) stay in float32 whatever dtype the
    module is cast to.

    Raises:
        ValueError: the bidirectional form has a `decay_type` or `conv_kernel`.

    Example:

    ```python
    >>> attention = TokenStatisticsSelfAttention(32, 4, causal=True)
    >>> output, membership = attention(torch.randn(2, 10, 32))
    >>> output.shape, membership.shape
    (torch.Size([2, 10, 32]), torch.Size([2, 4, 10]))
    ```
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        causal: bool,
        layer_idx: int | None = None,
        max_position_embeddings: int | None = None,
        in_bias: bool = False,
        out_bias: bool = False,
        attention_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        decay_type: str = "none",
        conv_kernel: int | None = None,
        backend: str | None = None,
    ):
        super().__init__()
        self.operators = LayerOperators()
        if not causal and (decay_type != "none" or conv_kernel is not None):
            raise ValueError("decay_type and conv_kernel belong to the causal form; bidirectional TSSA has neither.")
        self.backend = backend
        self.num_heads = num_attention_heads
        self.head_dim = hidden_size // num_attention_heads
        self.causal = causal
        self.layer_idx = layer_idx
        self.attention_dropout = attention_dropout
        self.convolution = None if conv_kernel is None else ShortConvolution(hidden_size, conv_kernel)
        self.in_proj = nn.Linear(hidden_size, hidden_size, bias=in_bias)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=out_bias)
        self.out_dropout = make_dropout(hidden_dropout)
        dtype = compute_dtype(torch.get_default_dtype())  # not the dtype of the other weights
        self.temp = nn.Parameter(torch.ones(num_attention_heads, 1, dtype=dtype))
        self.denom_bias = None
        if max_position_embeddings is not None:
            self.denom_bias = nn.Parameter(torch.zeros(num_attention_heads, max_position_embeddings, 1, dtype=dtype))
        self.forget_bias = self.forget_proj = None
        if decay_type != "none":
            self.forget_bias = nn.Parameter(initial_decay_bias(num_attention_heads).to(dtype))
        if decay_type == "token":
            self.forget_proj = nn.Linear(hidden_size, num_attention_heads, bias=False)
            nn.init.zeros_(self.forget_proj.weight)

    @property
    def float32_parameters(self) -> list[str]:
        """Names of the parameters that stay in float32 whatever dtype the module is cast to."""
        return [name for name in FLOAT32_PARAMETERS if getattr(self, name) is not None]

    def _apply(self, fn, recurse=True):
        # called by model.to(dtype) and model.half(): restores the float32 values that a cast would round
        float32_data = {name: getattr(self, name).data for name in self.float32_parameters}
        float32_data = {name: data for name, data in float32_data.items() if data.dtype in (torch.float32, torch.float64)}
        super()._apply(fn, recurse)
        for name, data in float32_data.items():
            param = getattr(self, name)
            if param.dtype in (torch.float16, torch.bfloat16):
                param.data = data.to(device=param.device)
        return self

    def log_decay(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """The forget gate: the log decay (B, T, H) at convolved tokens (B, T, D); None without decay."""
        if self.forget_bias is None:
            return None
        dtype = compute_dtype(hidden_states.dtype)
        logit = self.forget_bias.to(dtype).expand(*hidden_states.shape[:2], -1)
        if self.forget_proj is not None:
            logit = logit + self.forget_proj(hidden_states)
        return F.logsigmoid(logit)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        past_key_values=None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the layer.

        Args:
            hidden_states: (B, T, D).
            attention_mask: (B, T), true or 1 at real tokens; does not include tokens in the cache.
            position_ids: (B, T), indices into `denom_bias`; required if the layer has one.
            seq_idx: (B, T), packed sequences; see `tssa`.
            past_key_values: a cache of `TSSACacheLayer`s, which is read and updated.

        Returns:
            The output (B, T, D) and the membership (B, H, T).
        """
        B, T, _ = hidden_states.shape
        cache_layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        inputs, conv_state = hidden_states, None
        if cache_layer is not None:
            cache_layer.prefetch()
            conv_state = cache_layer.conv_state
        if self.convolution is not None:
            args = inputs, attention_mask, seq_idx, conv_state
            hidden_states, conv_state = self.operators.convolve(self.convolution, *args)
        w = self.in_proj(hidden_states).view(B, T, -1, self.head_dim)
        log_decay = self.log_decay(hidden_states)
        if self.denom_bias is None:
            position_ids = None
        else:
            assert position_ids is not None
        output, membership, state = self._compute_statistics(w, position_ids, log_decay, attention_mask, seq_idx, cache_layer)
        if cache_layer is not None:
            assert state is not None  # only causal layers have a cache
            options = {"mask": attention_mask, "log_decay": log_decay, "inputs": inputs, "conv_state": conv_state}
            cache_layer.update_state(TSSAState(*state), w, membership, **options)
        if self.training and self.attention_dropout > 0:
            ones = torch.ones_like(output) if self.causal else output.new_ones(B, 1, self.num_heads, self.head_dim)
            output = output * F.dropout(ones, self.attention_dropout)
        return self.out_dropout(self.out_proj(output.reshape(B, T, -1))), membership

    def _compute_statistics(self, w, positions, log_decay, mask, seq_idx, cache_layer) -> TSSAOutput:
        """Runs the operator, or its one-token step when decoding with a cache layer."""
        state = None if cache_layer is None else cache_layer.current_state()
        bias = None if self.denom_bias is None else self.denom_bias.squeeze(-1).t()
        if cache_layer is None or w.shape[1] > 1:
            return self.operators.tssa(
                w,
                self.temp,
                bias,
                positions=positions,
                causal=self.causal,
                mask=mask,
                seq_idx=seq_idx,
                initial_state=state,
                log_decay=log_decay,
                backend=self.backend,
            )
        positions, log_decay, mask = (None if x is None else x[:, 0] for x in (positions, log_decay, mask))
        output, membership, state = self.operators.step(
            w[:, 0],
            self.temp,
            bias,
            positions=positions,
            mask=mask,
            initial_state=state,
            log_decay=log_decay,
            backend=self.backend,
            in_place=cache_layer.can_update_in_place,
        )
        return TSSAOutput(output.unsqueeze(1), membership.unsqueeze(-1), state)


__all__ = ["MembershipsMixin", "ShortConvolution", "TokenStatisticsSelfAttention"]
