# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Token Statistics Self-Attention (TSSA, arXiv 2412.17810): the operator and the attention layer built on it.

Each head is one subspace. A token's *membership* in the heads is a softmax over them; a head's output is the token's own
projection, scaled down where the second moment of the head's tokens is large. No token is ever compared with another
one, so time is linear in the number of tokens, and the causal form needs only three running sums:

    sum_sq          = sum_i w_i^2             (B, H, p)
    sum_weighted_sq = sum_i Pi_i * w_i^2      (B, H, p)
    sum_membership  = sum_i Pi_i              (B, H)

Symbols: B batch, T tokens, H heads, p head dimension, w the projected tokens, Pi the membership.
Everything inside runs in float32, or in float64 for float64 inputs, whatever comes in.
"""

import itertools
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


EPS_SUM_SQ = 1e-12  # floor of a causal running sum of squares
EPS_NORM = 1e-12  # floor of a channel's norm over the tokens (bidirectional)
EPS_MEMBERSHIP = 1e-8  # keeps the mean over memberships finite when nothing has been counted yet
CHUNK_TOKENS = 32  # tokens a step of the eager path: its working set stays in a core's cache


class TSSAState(NamedTuple):
    """The whole causal state of one layer: 2 * H * p + H numbers a sequence, whatever the length of its past."""

    sum_sq: torch.Tensor  # (B, H, p)
    sum_weighted_sq: torch.Tensor  # (B, H, p)
    sum_membership: torch.Tensor  # (B, H)


class TSSAOutput(NamedTuple):
    """What `tssa` returns."""

    output: torch.Tensor  # (B, T, H, p), dtype of the input
    membership: torch.Tensor  # (B, H, T), float32 or float64; 0 at padding
    final_state: TSSAState | None  # None in the bidirectional form


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics of `dtype` inputs are kept: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tssa(
    w: torch.Tensor,
    temp: torch.Tensor,
    denom_bias: torch.Tensor | None = None,
    *,
    causal: bool = True,
    mask: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_state: TSSAState | None = None,
) -> TSSAOutput:
    """Token Statistics Self-Attention between the two projections (paper, section 3; causal form of the authors' code).

    Args:
        w: projected tokens, (B, T, H, p), as the input projection leaves them (no transpose needed).
        temp: one learned scalar a head, H numbers of any shape.
        denom_bias: learned score bias of each token's position, (T, H) or (B, T, H); causal form only.
        causal: prefix sums over positions (language) or sums over all tokens (vision, encoders).
        mask: (B, T), true or 1 at real tokens. Padding adds nothing to any sum and its output is 0.
        seq_idx: (B, T) integers, packed rows: tokens of one sequence are adjacent and share a number, and each sequence
            is computed as if it were alone.
        initial_state: running sums of the tokens before these; causal form only.

    Returns:
        `TSSAOutput` with the output (B, T, H, p) in `w`'s dtype, the membership (B, H, T) and, for the causal form, the
        sums after the last token (of each row's last sequence, where rows are packed). All three are differentiable once.

    Raises:
        ValueError: shapes disagree, or `initial_state` / `denom_bias` is given to the bidirectional form.
    """
    temp = _check_inputs(w, temp, denom_bias, causal, mask, seq_idx, initial_state)
    dtype = compute_dtype(w.dtype)
    padding = None if mask is None else ~mask.bool()
    if not causal:
        output, membership = _bidirectional(w, temp.to(dtype), padding, seq_idx)
        return TSSAOutput(output, membership.transpose(1, 2), None)

    bias = w.new_zeros(1, 1, 1, dtype=dtype) if denom_bias is None else denom_bias.to(dtype)
    bias = bias.reshape(-1, *bias.shape[-2:]).expand(w.shape[0], w.shape[1], w.shape[2])
    state = initial_state or _zero_state(w, dtype)
    state = TSSAState(*(x.to(dtype) for x in state))
    if torch.compiler.is_compiling():
        output, membership, *final = _causal_whole(w, temp.to(dtype), bias, padding, seq_idx, state)
    else:
        chunks = _plan_chunks(w.shape[1], seq_idx)
        output, membership, *final = _CausalTSSA.apply(w, temp.to(dtype), bias, padding, *state, chunks)
    return TSSAOutput(output, membership.transpose(1, 2), TSSAState(*final))


def tssa_step(
    w: torch.Tensor,
    temp: torch.Tensor,
    denom_bias: torch.Tensor | None,
    state: TSSAState | None,
    *,
    mask: torch.Tensor | None = None,
) -> TSSAOutput:
    """Causal TSSA of one new token.

    Args:
        w: the projected token, (B, H, p).
        temp: H numbers of any shape.
        denom_bias: score bias at the token's position, (H,) or (B, H), or None.
        state: the running sums before the token; None at the start of a sequence.
        mask: (B,), true or 1 where the token is real; a padding token leaves the state as it was.

    Returns:
        `TSSAOutput` with the output (B, H, p), the membership (B, H) and the new state.
    """
    dtype = compute_dtype(w.dtype)
    x = w.to(dtype)
    state = state or _zero_state(w.unsqueeze(1), dtype)
    if mask is not None:
        padding = ~mask.bool().unsqueeze(-1)
        x = x.masked_fill(padding.unsqueeze(-1), 0)
    sq = x * x
    sum_sq = state.sum_sq + sq
    score = (sq / sum_sq.clamp_min(EPS_SUM_SQ)).sum(-1)
    if denom_bias is not None:
        score = score + w.shape[-1] * denom_bias.to(dtype)
    membership = (score * temp.reshape(-1).to(dtype)).softmax(-1)
    if mask is not None:
        membership = membership.masked_fill(padding, 0)
    weight = membership.unsqueeze(-1)
    sum_weighted_sq = state.sum_weighted_sq + sq * weight
    sum_membership = state.sum_membership + membership
    moment = sum_weighted_sq / (sum_membership + EPS_MEMBERSHIP).unsqueeze(-1)
    output = -(x * weight) / (1 + moment)
    return TSSAOutput(output.to(w.dtype), membership, TSSAState(sum_sq, sum_weighted_sq, sum_membership))


def _check_inputs(w, temp, denom_bias, causal, mask, seq_idx, initial_state) -> torch.Tensor:
    """Refuses shapes that disagree; returns `temp` as (H,)."""
    if w.ndim != 4:
        raise ValueError(f"tssa takes projected tokens of shape (batch, tokens, heads, head_dim), got {tuple(w.shape)}.")
    if not w.is_floating_point():
        raise ValueError(f"tssa takes floating-point tokens, got {w.dtype}.")
    B, T, H, p = w.shape
    if temp.numel() != H:
        raise ValueError(f"temp must hold one number a head ({H}), got shape {tuple(temp.shape)}.")
    for name, tensor in (("mask", mask), ("seq_idx", seq_idx)):
        if tensor is not None and tensor.shape != (B, T):
            raise ValueError(f"{name} must have shape (batch, tokens) = ({B}, {T}), got {tuple(tensor.shape)}.")
    if denom_bias is not None and denom_bias.shape not in ((T, H), (1, T, H), (B, T, H)):
        raise ValueError(
            f"denom_bias must have shape (tokens, heads) = ({T}, {H}), with or without the batch in front, got "
            f"{tuple(denom_bias.shape)}."
        )
    if not causal and (denom_bias is not None or initial_state is not None):
        raise ValueError("denom_bias and initial_state belong to the causal form; bidirectional TSSA has neither.")
    if initial_state is not None:
        expected = ((B, H, p), (B, H, p), (B, H))
        shapes = tuple(tuple(x.shape) for x in initial_state)
        if shapes != expected:
            raise ValueError(f"initial_state must hold tensors of shapes {expected}, got {shapes}.")
    return temp.reshape(-1)


def _zero_state(w: torch.Tensor, dtype: torch.dtype) -> TSSAState:
    B, _, H, p = w.shape
    return TSSAState(*(w.new_zeros(shape, dtype=dtype) for shape in ((B, H, p), (B, H, p), (B, H))))


def _membership(score: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the heads of scores (B, T, H); 0 at padding."""
    membership = (score * temp).softmax(-1)
    return membership if padding is None else membership.masked_fill(padding.unsqueeze(-1), 0)


# ---------------------------------------------------------------------------------------------------------------------
# Eager causal path: one pass over chunks of tokens, each small enough for the cache, with a closed-form backward that
# goes through them in reverse. Only the input, the memberships and the sums at chunk borders are kept for it.
# ---------------------------------------------------------------------------------------------------------------------


def _plan_chunks(T: int, seq_idx: torch.Tensor | None) -> list[tuple[int, int, torch.Tensor | None]]:
    """Chunks (start, stop, starts_sequence) that straddle no border of any row.

    `starts_sequence` (B,) marks the rows in which a packed sequence begins at the chunk's first token.
    """
    if seq_idx is None:
        return [(t, min(t + CHUNK_TOKENS, T), None) for t in range(0, T, CHUNK_TOKENS)]
    new_sequence = seq_idx[:, 1:] != seq_idx[:, :-1]
    borders = [0, *(new_sequence.any(0).nonzero().flatten() + 1).tolist(), T]
    chunks = []
    for start, stop in itertools.pairwise(borders):
        starts_sequence = new_sequence[:, start - 1] if start else None
        for t in range(start, stop, CHUNK_TOKENS):
            chunks.append((t, min(t + CHUNK_TOKENS, stop), starts_sequence if t == start else None))
    return chunks


def _clear_rows(sums: tuple[torch.Tensor, ...], rows: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The sums with the marked rows (B,) set to zero."""
    if rows is None:
        return sums
    return tuple(x.masked_fill(rows.view(-1, *[1] * (x.ndim - 1)), 0) for x in sums)


def _suffix_sum(x: torch.Tensor) -> torch.Tensor:
    return x.flip(1).cumsum(1).flip(1)


def _load_chunk(w, padding, start, stop, dtype):
    """A chunk's tokens in the compute dtype with padding zeroed (not multiplied: padding may hold NaN), and its padding."""
    x = w[:, start:stop].to(dtype)
    if padding is None:
        return x, None
    padding = padding[:, start:stop]
    return x.masked_fill(padding[..., None, None], 0), padding


class _CausalTSSA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, temp, bias, padding, sum_sq, sum_weighted_sq, sum_membership, chunks):
        dtype, p = temp.dtype, w.shape[-1]
        needs_backward = any(ctx.needs_input_grad)
        output = torch.empty_like(w, memory_format=torch.contiguous_format)
        memberships = w.new_empty(w.shape[:3], dtype=dtype)
        state, carries = (sum_sq, sum_weighted_sq, sum_membership), []
        for start, stop, starts_sequence in chunks:
            state = _clear_rows(state, starts_sequence)
            carries.extend(state if needs_backward else ())
            x, pad = _load_chunk(w, padding, start, stop, dtype)
            sq = x * x
            running = sq.cumsum(1).add_(state[0].unsqueeze(1))
            total_sq = running[:, -1].clone()
            score = torch.div(sq, running.clamp_min_(EPS_SUM_SQ), out=running).sum(-1)
            membership = _membership(score.add_(bias[:, start:stop], alpha=p), temp, pad)
            memberships[:, start:stop] = membership
            weight = membership.unsqueeze(-1)
            running = torch.cumsum(sq.mul_(weight), 1, out=running).add_(state[1].unsqueeze(1))
            total_weighted_sq = running[:, -1].clone()
            count = membership.cumsum(1).add_(state[2].unsqueeze(1))
            state = (total_sq, total_weighted_sq, count[:, -1].clone())
            denom = running.div_((count + EPS_MEMBERSHIP).unsqueeze(-1)).add_(1)
            output[:, start:stop] = torch.mul(x, weight, out=sq).div_(denom).neg_()
        if not chunks:
            state = tuple(x.clone() for x in state)
        if needs_backward:
            ctx.chunks = chunks
            ctx.save_for_backward(w, temp, bias, padding, memberships, *carries)
        ctx.set_materialize_grads(False)
        return output, memberships, *state

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, grad_membership, grad_sum_sq, grad_sum_weighted_sq, grad_sum_membership):
        # dname is the gradient with respect to name. A running sum's gradient is a suffix sum: U, V and W, of the weighted
        # squares, the memberships and the squares. They start as the gradients of the final state.
        w, temp, bias, padding, memberships, *carries = ctx.saved_tensors
        dtype, p = temp.dtype, w.shape[-1]
        B, _, H, _ = w.shape
        dw = torch.empty_like(w, memory_format=torch.contiguous_format)
        dscores = torch.empty_like(memberships)
        grad_output = torch.zeros_like(w) if grad_output is None else grad_output
        dtemp = torch.zeros_like(temp)
        W, U, V = (
            memberships.new_zeros(shape) if grad is None else grad
            for grad, shape in (
                (grad_sum_sq, (B, H, p)),
                (grad_sum_weighted_sq, (B, H, p)),
                (grad_sum_membership, (B, H)),
            )
        )
        for index in reversed(range(len(ctx.chunks))):
            start, stop, starts_sequence = ctx.chunks[index]
            sum_sq, sum_weighted_sq, sum_membership = (x.unsqueeze(1) for x in carries[3 * index : 3 * index + 3])
            x, pad = _load_chunk(w, padding, start, stop, dtype)
            membership = memberships[:, start:stop]
            weight = membership.unsqueeze(-1)

            # the forward values again, from the sums at the chunk's border
            sq = x * x
            running = sq.cumsum(1).add_(sum_sq)
            floored = running < EPS_SUM_SQ
            inverse = running.clamp_min_(EPS_SUM_SQ).reciprocal_()
            ratio = sq * inverse
            score = ratio.sum(-1).add_(bias[:, start:stop], alpha=p)
            inverse_count = (membership.cumsum(1).add_(sum_membership).add_(EPS_MEMBERSHIP)).reciprocal_()
            moment = (sq * weight).cumsum(1).add_(sum_weighted_sq).mul_(inverse_count.unsqueeze(-1))
            shrink = (moment + 1).reciprocal_()

            # output -> moment, membership
            grad = grad_output[:, start:stop].to(dtype)
            if pad is not None:
                grad = grad.masked_fill(pad[..., None, None], 0)
            dx = (grad * shrink).neg_()
            dmembership = (dx * x).sum(-1)
            dmoment = (grad * x).mul_(shrink).mul_(shrink).mul_(weight)
            dcount = moment.mul_(dmoment).sum(-1).mul_(inverse_count).neg_()
            suffix_u = _suffix_sum(dmoment.mul_(inverse_count.unsqueeze(-1))).add_(U.unsqueeze(1))
            suffix_v = _suffix_sum(dcount).add_(V.unsqueeze(1))

            # membership -> score: the one step that joins the heads
            dmembership += (sq * suffix_u).sum(-1) + suffix_v
            if grad_membership is not None:
                dmembership += grad_membership[:, start:stop]
            dlogit = membership * (dmembership - (membership * dmembership).sum(-1, keepdim=True))
            dtemp += (dlogit * score).sum((0, 1))
            dscore = dlogit.mul_(temp)
            dscores[:, start:stop] = dscore

            # score -> running sum of squares -> tokens
            dratio = inverse.mul_(dscore.unsqueeze(-1))
            dsum_sq = ratio.mul_(dratio).neg_().masked_fill_(floored, 0)
            suffix_w = _suffix_sum(dsum_sq).add_(W.unsqueeze(1))
            W, U, V = _clear_rows((suffix_w[:, 0], suffix_u[:, 0].clone(), suffix_v[:, 0]), starts_sequence)
            dsq = dratio.add_(suffix_w).add_(suffix_u.mul_(weight))
            dx.mul_(weight).addcmul_(dsq, x, value=2)
            if pad is not None:
                dx.masked_fill_(pad[..., None, None], 0)
            dw[:, start:stop] = dx
        return dw, dtemp, dscores.mul_(p), None, W, U, V, None


# ---------------------------------------------------------------------------------------------------------------------
# Whole-sequence formulas for compilers, which fuse them and derive their backward. No step depends on a tensor's values.
# ---------------------------------------------------------------------------------------------------------------------


def _offset_in_sequence(seq_idx: torch.Tensor) -> torch.Tensor:
    """Distance (B, T) of each token from the first one of its packed sequence."""
    t = torch.arange(seq_idx.shape[1], device=seq_idx.device).expand_as(seq_idx)
    begins = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)
    return t - t.masked_fill(~begins, 0).cummax(1).values


def _running_sum(x: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
    """Sum over tokens (dimension 1) up to each one, from the start of its packed sequence.

    Doubling steps, not a difference of two cumulative sums: that would cancel digits.
    """
    if offset is None:
        return x.cumsum(1)
    offset = offset.view(*offset.shape, *[1] * (x.ndim - 2))
    step = 1
    while step < x.shape[1]:
        earlier = F.pad(x[:, :-step], (0, 0) * (x.ndim - 2) + (step, 0))
        x = x + earlier.masked_fill(offset < step, 0)
        step *= 2
    return x


def _causal_whole(w, temp, bias, padding, seq_idx, state):
    x, _ = _load_chunk(w, padding, 0, w.shape[1], temp.dtype)
    offset = None if seq_idx is None else _offset_in_sequence(seq_idx)
    carried = [s.unsqueeze(1) for s in state]
    if offset is not None:  # the state continues in a row's first sequence only
        later = offset < torch.arange(w.shape[1], device=w.device)
        carried = [s.masked_fill(later.view(*later.shape, *[1] * (s.ndim - 2)), 0) for s in carried]
    sq = x * x
    sum_sq = _running_sum(sq, offset) + carried[0]
    score = (sq / sum_sq.clamp_min(EPS_SUM_SQ)).sum(-1) + w.shape[-1] * bias
    membership = _membership(score, temp, padding)
    weight = membership.unsqueeze(-1)
    sum_weighted_sq = _running_sum(sq * weight, offset) + carried[1]
    sum_membership = _running_sum(membership, offset) + carried[2]
    moment = sum_weighted_sq / (sum_membership + EPS_MEMBERSHIP).unsqueeze(-1)
    output = -(x * weight) / (1 + moment)
    # a copy: compiled code that updates a cache in place must not see views of its own work buffers
    final = (s[:, -1].clone() for s in (sum_sq, sum_weighted_sq, sum_membership))
    return output.to(w.dtype), membership, *final


# ---------------------------------------------------------------------------------------------------------------------
# Bidirectional form: every running sum becomes a total.
# ---------------------------------------------------------------------------------------------------------------------


def _total(x: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
    """Sum over all tokens (B, 1, ...) or, in packed rows, over each token's own sequence (B, T, ...)."""
    if seq_idx is None:
        return x.sum(1, keepdim=True)
    T = seq_idx.shape[1]
    to_last = _offset_in_sequence(seq_idx.flip(1)).flip(1)
    last = (torch.arange(T, device=x.device) + to_last).view(*seq_idx.shape, *[1] * (x.ndim - 2))
    return _running_sum(x, _offset_in_sequence(seq_idx)).gather(1, last.expand_as(x))


def _bidirectional(w, temp, padding, seq_idx):
    x, _ = _load_chunk(w, padding, 0, w.shape[1], temp.dtype)
    sq = x * x
    norm_sq = _total(sq, seq_idx).clamp_min(EPS_NORM**2)
    membership = _membership((sq / norm_sq).sum(-1), temp, padding)
    weight = membership.unsqueeze(-1)
    moment = _total(sq * weight, seq_idx) / (_total(membership, seq_idx) + EPS_MEMBERSHIP).unsqueeze(-1)
    return (-(x * weight) / (1 + moment)).to(w.dtype), membership


# ---------------------------------------------------------------------------------------------------------------------
# The layer
# ---------------------------------------------------------------------------------------------------------------------


class TokenStatisticsSelfAttention(nn.Module):
    """One TSSA layer with its two projections, for language (causal) and vision (bidirectional) alike.

    Args:
        hidden_size: width D of the tokens.
        num_attention_heads: number of heads H; divides `hidden_size`.
        causal: whether a token sees only itself and the tokens before it.
        layer_idx: the layer's place in a cache; needed for `past_key_values`.
        max_position_embeddings: rows of the learned score bias `denom_bias`; None for none (bidirectional, position-free).
        in_bias, out_bias: whether the input and the output projection have a bias.
        attention_dropout: dropout on 1 / (1 + moment), as in the paper's code.
        hidden_dropout: dropout after the output projection.

    `temp` (H, 1) and `denom_bias` (H, max_position_embeddings, 1) stay in float32 whatever dtype the module is moved to.
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
    ):
        super().__init__()
        self.num_heads = num_attention_heads
        self.head_dim = hidden_size // num_attention_heads
        self.causal = causal
        self.layer_idx = layer_idx
        self.attention_dropout = attention_dropout
        self.in_proj = nn.Linear(hidden_size, hidden_size, bias=in_bias)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=out_bias)
        self.out_dropout = nn.Dropout(hidden_dropout)
        self.temp = nn.Parameter(torch.ones(num_attention_heads, 1))
        self.denom_bias = None
        if max_position_embeddings is not None:
            self.denom_bias = nn.Parameter(torch.zeros(num_attention_heads, max_position_embeddings, 1))

    def _apply(self, fn, recurse=True):
        # model.to(dtype) and model.half() come through here; the statistics' own parameters keep their float32 values
        kept = {name: getattr(self, name) for name in ("temp", "denom_bias") if getattr(self, name) is not None}
        kept = {name: param.data for name, param in kept.items() if param.dtype in (torch.float32, torch.float64)}
        super()._apply(fn, recurse)
        for name, data in kept.items():
            param = getattr(self, name)
            if param.dtype in (torch.float16, torch.bfloat16):
                param.data = data.to(device=param.device)
        return self

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        past_key_values=None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends.

        Args:
            hidden_states: (B, T, D).
            attention_mask: (B, T), true or 1 at real tokens; these tokens only, not those in the cache.
            position_ids: (B, T), rows of `denom_bias`; needed where the layer has one.
            seq_idx: (B, T), packed rows; see `tssa`.
            past_key_values: a cache of `CausalStatisticsLayer`s; read, then updated.

        Returns:
            The attended tokens (B, T, D) and the membership (B, H, T).
        """
        B, T, _ = hidden_states.shape
        w = self.in_proj(hidden_states).view(B, T, self.num_heads, self.head_dim)
        # a look-up, not an index: the gradient of an index adds up in whatever order threads come
        bias = None if self.denom_bias is None else F.embedding(position_ids, self.denom_bias[..., 0].t())
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        state = None if layer is None else layer.state
        if layer is not None and T == 1:
            step_mask = None if attention_mask is None else attention_mask[:, 0]
            out, membership, state = tssa_step(w[:, 0], self.temp, bias if bias is None else bias[:, 0], state, mask=step_mask)
            out, membership = out.unsqueeze(1), membership.unsqueeze(-1)
        else:
            out, membership, state = tssa(
                w, self.temp, bias, causal=self.causal, mask=attention_mask, seq_idx=seq_idx, initial_state=state
            )
        if layer is not None:
            layer.update_state(TSSAState(*state), w, membership)
        if self.training and self.attention_dropout > 0:
            keep = torch.ones_like(out) if self.causal else out.new_ones(B, 1, self.num_heads, self.head_dim)
            out = out * F.dropout(keep, self.attention_dropout)
        return self.out_dropout(self.out_proj(out.reshape(B, T, -1))), membership
