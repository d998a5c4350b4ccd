# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Layers that text and vision models share: the short convolution, the ISTA step, Token Statistics Self-Attention."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from .tssa import TSSAOutput, tssa, tssa_step
from .tssa_reference import TSSAState, compute_dtype, sequence_starts


# Short convolution ----------------------------------------------------------------------------------------------------


class ShortConvolution(nn.Module):
    """A causal depthwise convolution over the inputs of a layer, with a residual connection.

        y_t = x_t + sum_{j < kernel} weight_j x_{t-j}

    `t - j` counts the real tokens of one sequence: padding is skipped, packed sequences are independent, and there are zeros
    before the first token. The state of a sequence is its last `kernel - 1` inputs.

    `weight` (D, kernel) is initialised to 0, where the output equals the input.
    """

    def __init__(self, hidden_size: int, kernel: int):
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.zeros(hidden_size, kernel))

    def forward(
        self, hidden_states: torch.Tensor, taps: torch.Tensor | None = None, recent: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolves tokens.

        Args:
            hidden_states: (B, T, D).
            taps: from `find_taps`, needed with padding or packed sequences.
            recent: the `kernel - 1` inputs before these tokens, (B, kernel - 1, D); None at the start of a sequence.

        Returns:
            The convolved tokens (B, T, D), and the last `kernel - 1` inputs (B, kernel - 1, D).
        """
        window = input_window(recent, hidden_states, self.kernel)
        T = hidden_states.shape[1]
        weights = self.weight.unbind(1)
        out = hidden_states * (1 + weights[0])
        for j in range(1, self.kernel):
            first = self.kernel - 1 - j
            earlier = window[:, first : first + T] if taps is None else _gather_tokens(window, taps[:, :-1, j - 1])
            out = torch.addcmul(out, earlier, weights[j])
        return out, last_inputs(window, taps, self.kernel)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, kernel={self.kernel}"


def convolve(
    convolution: ShortConvolution,
    hidden_states: torch.Tensor,
    mask: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    *,
    taps: torch.Tensor | None = None,
    recent: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ShortConvolution.forward`; without `taps`, those of `mask` and `seq_idx`, each (B, T)."""
    taps = find_taps(convolution.kernel, mask, seq_idx) if taps is None else taps
    return convolution(hidden_states, taps, recent)


def input_window(recent: torch.Tensor | None, hidden_states: torch.Tensor, kernel: int) -> torch.Tensor:
    """The inputs that a convolution reads, (B, kernel - 1 + T, D): the recent ones, or zeros, and the new ones."""
    if recent is None:
        return F.pad(hidden_states, (0, 0, kernel - 1, 0))
    return torch.cat([recent.to(hidden_states.dtype), hidden_states], 1)


def last_inputs(window: torch.Tensor, taps: torch.Tensor | None, kernel: int) -> torch.Tensor:
    """The last `kernel - 1` inputs of an `input_window`, oldest first."""
    # a copy: a view in a cache would keep the whole window in memory
    return window[:, 1 - kernel :].clone() if taps is None else _gather_tokens(window, taps[:, -1].flip(-1))


def find_taps(kernel: int, mask: torch.Tensor | None, seq_idx: torch.Tensor | None) -> torch.Tensor | None:
    """Indices in an `input_window` of the inputs before each token, and before the token that comes next.

    Args:
        mask: (B, T), true at real tokens; None if all are.
        seq_idx: (B, T), sequence numbers of packed sequences, which have no cached past.

    Returns:
        (B, T + 1, kernel - 1), the nearest first; None if they are the inputs directly before.
    """
    if mask is None and seq_idx is None:
        return None
    like = seq_idx if mask is None else mask
    assert like is not None
    B, T = like.shape
    last = torch.arange(kernel - 1 + T, device=like.device).expand(B, -1)  # index of the last real input up to each
    if mask is not None:
        last = last.masked_fill(F.pad(~mask.bool(), (kernel - 1, 0), value=False), 0).cummax(1)[0]
    before = F.pad(last, (1, 0))  # the same before each; that of the first is not used
    taps = [before[:, kernel - 1 :]]
    while len(taps) < kernel - 1:
        taps.append(before.gather(1, taps[-1]))
    found = torch.stack(taps, -1)
    if seq_idx is None:
        return found
    seq_idx = sequence_starts(seq_idx).cumsum(1)  # unique numbers, even if given ones repeat
    # without a past the first input of the window is 0, which is what an absent input counts as
    tokens = (found - (kernel - 1)).clamp_min(0)
    theirs = seq_idx.gather(1, tokens.flatten(1)).view_as(tokens)
    own = torch.cat([seq_idx, seq_idx[:, -1:]], 1).unsqueeze(-1)
    return found.masked_fill((found < kernel - 1) | (theirs != own), 0)


def _gather_tokens(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Tokens of x (B, N, D) at `index` (B, n)."""
    B, N, D = x.shape
    first = torch.arange(B, device=x.device).unsqueeze(1) * N
    # not x[...]: the gradient of indexing is summed in an arbitrary order
    return F.embedding(index + first, x.reshape(B * N, D))


# ISTA step ------------------------------------------------------------------------------------------------------------


class ISTAStep(nn.Module):
    """One ISTA step towards a sparse code of each token (CRATE, arXiv 2306.01129), in place of an MLP.

        code = relu(x + step_size * dictionary^T (x - dictionary x) - step_size * threshold)

    This is a proximal gradient step on 1/2 |x - dictionary code|^2 + threshold |code|_1, code >= 0, that starts at the token
    itself. The code replaces the token: there is no residual connection and no LayerScale. The one parameter is `dictionary`
    (D, D); an MLP of width 4 D has 8 D^2 weights.
    """

    def __init__(self, hidden_size: int, step_size: float, threshold: float):
        super().__init__()
        self.step_size, self.threshold = float(step_size), float(threshold)
        self.dictionary = nn.Parameter(torch.empty(hidden_size, hidden_size))
        nn.init.kaiming_uniform_(self.dictionary)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The codes of tokens (B, T, D), of the same shape and non-negative."""
        rest = hidden_states - F.linear(hidden_states, self.dictionary)
        return F.relu(hidden_states + self.step_size * (F.linear(rest, self.dictionary.t()) - self.threshold))

    def extra_repr(self) -> str:
        return f"{len(self.dictionary)}, step_size={self.step_size}, threshold={self.threshold}"


# TSSA -----------------------------------------------------------------------------------------------------------------


KEPT_IN_FLOAT32 = ("temp", "denom_bias", "forget_bias")
MIN_MEMORY, MAX_MEMORY = 4, 1024  # tokens


def initial_forget_bias(num_heads: int) -> torch.Tensor:
    """The logits (H,) of decays 1 - 1 / tau, tau from 4 to 1,024 tokens, spaced evenly in log over the heads."""
    tau = torch.logspace(math.log2(MIN_MEMORY), math.log2(MAX_MEMORY), num_heads, base=2)
    return torch.log(tau - 1)


class LayerOperators(NamedTuple):
    """The functions that a layer calls; tensor and context parallelism replace them by others with the same signatures."""

    tssa: Callable[..., TSSAOutput] = tssa
    step: Callable[..., TSSAOutput] = tssa_step
    convolve: Callable[..., tuple[torch.Tensor, torch.Tensor]] = convolve


UNNORMALIZED_SCORES = LayerOperators(
    tssa=functools.partial(tssa, normalize_scores=False),
    step=functools.partial(tssa_step, normalize_scores=False),
)


class TokenStatisticsSelfAttention(nn.Module):
    """One TSSA layer with its two projections, for language (causal) and vision (bidirectional) alike.

    Args:
        hidden_size: width D of the tokens.
        num_attention_heads: number of heads H; divides `hidden_size`.
        causal: whether a token sees only itself and the tokens before it.
        layer_idx: the layer's index in a cache; needed for `past_key_values`.
        max_position_embeddings: length of the learned score bias `denom_bias`; None for none (bidirectional, position-free).
        in_bias, out_bias: whether the input and the output projection have a bias.
        attention_dropout: dropout on 1 / (1 + moment), as in the paper's code.
        hidden_dropout: dropout after the output projection.
        forgetting: decay of the running sums: "none", "head" (learned, per head) or "token" (computed from each token, per
            head); causal form only.
        conv_kernel: taps of the `ShortConvolution` on the layer's input; None for none. Causal form only.
        normalize_scores: whether the squares that memberships are made from are divided by their sums. Without that (the
            paper's ablation) the reference backend runs, whatever `backend` says.
        backend: as in `tssa`; may be set later as well.

    `temp` (H, 1), `denom_bias` (H, max_position_embeddings, 1) and `forget_bias` (H,) stay in float32 whatever dtype the
    module is moved to.

    Raises:
        ValueError: forgetting or a convolution in the bidirectional form.

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
        forgetting: str = "none",
        conv_kernel: int | None = None,
        normalize_scores: bool = True,
        backend: str | None = None,
    ):
        super().__init__()
        self.operators = LayerOperators() if normalize_scores else UNNORMALIZED_SCORES
        if not causal and (forgetting != "none" or conv_kernel is not None):
            raise ValueError("forgetting and conv_kernel belong to the causal form; bidirectional TSSA has neither.")
        self.backend = backend
        self.normalize_scores = normalize_scores
        self.num_heads = num_attention_heads
        self.head_dim = hidden_size // num_attention_heads
        self.causal = causal
        self.layer_idx = layer_idx
        self.attention_dropout = attention_dropout
        self.convolution = None if conv_kernel is None else ShortConvolution(hidden_size, conv_kernel)
        self.in_proj = nn.Linear(hidden_size, hidden_size, bias=in_bias)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=out_bias)
        self.out_dropout = nn.Dropout(hidden_dropout)
        dtype = compute_dtype(torch.get_default_dtype())  # whatever dtype the other weights are built in
        self.temp = nn.Parameter(torch.ones(num_attention_heads, 1, dtype=dtype))
        self.denom_bias = None
        if max_position_embeddings is not None:
            self.denom_bias = nn.Parameter(torch.zeros(num_attention_heads, max_position_embeddings, 1, dtype=dtype))
        self.forget_bias = self.forget_proj = None
        if forgetting != "none":
            self.forget_bias = nn.Parameter(initial_forget_bias(num_attention_heads).to(dtype))
        if forgetting == "token":
            self.forget_proj = nn.Linear(hidden_size, num_attention_heads, bias=False)
            nn.init.zeros_(self.forget_proj.weight)

    @property
    def float32_parameters(self) -> list[str]:
        """Names of the parameters that stay in float32 whatever dtype the module is moved to."""
        return [name for name in KEPT_IN_FLOAT32 if getattr(self, name) is not None]

    def _apply(self, fn, recurse=True):
        # model.to(dtype) and model.half() come through here; float32 parameters keep their values
        kept = {name: getattr(self, name).data for name in self.float32_parameters}
        kept = {name: data for name, data in kept.items() if data.dtype in (torch.float32, torch.float64)}
        super()._apply(fn, recurse)
        for name, data in kept.items():
            param = getattr(self, name)
            if param.dtype in (torch.float16, torch.bfloat16):
                param.data = data.to(device=param.device)
        return self

    def log_decay(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logarithm of the decay (B, T, H) at convolved tokens (B, T, D); None without forgetting."""
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
        conv_taps: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the layer.

        Args:
            hidden_states: (B, T, D).
            attention_mask: (B, T), true or 1 at real tokens; of these tokens only, not those in the cache.
            position_ids: (B, T), indices into `denom_bias`; required if the layer has one.
            seq_idx: (B, T), packed sequences; see `tssa`.
            past_key_values: a cache of `CausalStatisticsLayer`s; read, then updated.
            conv_taps: output of `find_taps` for the convolution; computed here if None.

        Returns:
            The attended tokens (B, T, D) and the membership (B, H, T).
        """
        B, T, _ = hidden_states.shape
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        inputs, recent = hidden_states, None
        if self.convolution is not None:
            past = None if layer is None else layer.past_inputs
            hidden_states, recent = self.operators.convolve(
                self.convolution, inputs, attention_mask, seq_idx, taps=conv_taps, recent=past
            )
        w = self.in_proj(hidden_states).view(B, T, -1, self.head_dim)
        log_decay = self.log_decay(hidden_states)
        if self.denom_bias is None:
            position_ids = None
        else:
            assert position_ids is not None
        out, membership, state = self._statistics(w, position_ids, log_decay, attention_mask, seq_idx, layer)
        if layer is not None:
            assert state is not None  # only causal layers have a cache
            layer.update_state(TSSAState(*state), w, membership, log_decay=log_decay, inputs=inputs, recent_inputs=recent)
        if self.training and self.attention_dropout > 0:
            keep = torch.ones_like(out) if self.causal else out.new_ones(B, 1, self.num_heads, self.head_dim)
            out = out * F.dropout(keep, self.attention_dropout)
        return self.out_dropout(self.out_proj(out.reshape(B, T, -1))), membership

    def _statistics(self, w, positions, log_decay, mask, seq_idx, layer) -> TSSAOutput:
        """The operator, or its one-token step for decoding with a cache layer."""
        state = None if layer is None else layer.state
        bias = None if self.denom_bias is None else self.denom_bias.squeeze(-1).t()
        if layer is None or w.shape[1] > 1:
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
        out, membership, state = self.operators.step(
            w[:, 0],
            self.temp,
            bias,
            state,
            positions=positions,
            mask=mask,
            log_decay=log_decay,
            backend=self.backend,
            in_place=layer.may_be_overwritten,
        )
        return TSSAOutput(out.unsqueeze(1), membership.unsqueeze(-1), state)


__all__ = ["ISTAStep", "ShortConvolution", "convolve", "find_taps", "input_window", "last_inputs"]
