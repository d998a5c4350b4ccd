# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Token Statistics Self-Attention written down: the formulas of every form, for autograd. Read this file first.

Each head is one subspace. A token's *membership* Pi in the heads is a softmax over them; a head's output is the token's own
projection w, scaled down where the second moment of the head's tokens is large (arXiv 2412.17810, section 3; the causal form
is that of the authors' code). With s = w^2, for each head and channel i:

    causal, token t                                          bidirectional
    S_ti = sum_{j <= t} s_ji                                 S_i = sum_j s_ji
    score_t = sum_i s_ti / max(S_ti, 1e-12) + p bias_t       score_t = sum_i s_ti / max(S_i, 1e-24)
    Pi_t = softmax over heads of temp score_t                the same
    N_ti = sum_{j <= t} Pi_j s_ji                            N_i = sum_j Pi_j s_ji
    D_t = sum_{j <= t} Pi_j                                  D = sum_j Pi_j
    output_ti = -Pi_t w_ti / (1 + N_ti / (D_t + 1e-8))       the same with N_i and D

These functions are the reference of tests and benchmarks, and what torch.export and compilers for devices other than the CPU
see: no step depends on a tensor's values. The other engines compute the same numbers faster.

Arguments they share: w (B, T, H, p), projected tokens of any dtype; `temp` (H,) in the compute dtype; `padding` (B, T), true
where there is no token; `seq_idx` (B, T), the sequence numbers of packed rows.
"""

import torch
from torch.nn import functional as F

from .tssa_state import (
    EPS_MEMBERSHIP,
    EPS_NORM,
    EPS_SUM_SQ,
    TSSAState,
    as_state,
    membership_of,
    real_tokens,
    sequence_starts,
)


def causal(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    state: TSSAState | None = None,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState]:
    """Prefix sums over the tokens.

    Args:
        bias: `denom_bias` at each token, (T, H) or (B, T, H), in the compute dtype.
        state: the sums before the first token; with packed rows, of each row's first sequence.

    Returns:
        Output (B, T, H, p) in the dtype of `w`, membership (B, T, H), and the sums after the last token.
    """
    offset = None if seq_idx is None else _offset_in_sequence(seq_idx)
    before = _sums_before(state, offset, temp.dtype)
    x = real_tokens(w, padding, temp.dtype)
    sq = x * x
    sum_sq = _running_sum(sq, offset, before[0])
    score = (sq / sum_sq.clamp_min(EPS_SUM_SQ)).sum(-1)
    if bias is not None:
        score = score + w.shape[-1] * bias
    membership = membership_of(score, temp, padding)
    weight = membership.unsqueeze(-1)
    sum_weighted_sq = _running_sum(sq * weight, offset, before[1])
    sum_membership = _running_sum(membership, offset, before[2])
    moment = sum_weighted_sq / (sum_membership + EPS_MEMBERSHIP).unsqueeze(-1)
    output = -(x * weight) / (1 + moment)
    # a copy: compiled code that updates a cache in place must not see views of its own work buffers
    final = (s[:, -1].clone() for s in (sum_sq, sum_weighted_sq, sum_membership))
    return output.to(w.dtype), membership, as_state(final, w)


def bidirectional(
    w: torch.Tensor,
    temp: torch.Tensor,
    padding: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every running sum becomes a total. Returns output (B, T, H, p) in the dtype of `w` and membership (B, T, H)."""
    x = real_tokens(w, padding, temp.dtype)
    sq = x * x
    norm_sq = _total(sq, seq_idx).clamp_min(EPS_NORM**2)
    membership = membership_of((sq / norm_sq).sum(-1), temp, padding)
    weight = membership.unsqueeze(-1)
    moment = _total(sq * weight, seq_idx) / (_total(membership, seq_idx) + EPS_MEMBERSHIP).unsqueeze(-1)
    return (-(x * weight) / (1 + moment)).to(w.dtype), membership


def step(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    padding: torch.Tensor | None,
    state: TSSAState,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState]:
    """The causal form of one token, from the sums before it.

    Args:
        w: the projected token, (B, H, p).
        bias: (H,) or (B, H), in the compute dtype.
        padding: (B,), true where the token is padding, which leaves the sums as they were.

    Returns:
        Output (B, H, p) in the dtype of `w`, membership (B, H), and the sums after the token.
    """
    x = real_tokens(w, padding, temp.dtype)
    sq = x * x
    sum_sq = state.sum_sq + sq
    score = (sq / sum_sq.clamp_min(EPS_SUM_SQ)).sum(-1)
    if bias is not None:
        score = score + w.shape[-1] * bias
    membership = membership_of(score, temp, padding)
    sum_weighted_sq = state.sum_weighted_sq + sq * membership.unsqueeze(-1)
    sum_membership = state.sum_membership + membership
    moment = (sum_weighted_sq / (sum_membership + EPS_MEMBERSHIP).unsqueeze(-1)).to(temp.dtype)
    output = -(x * membership.unsqueeze(-1)) / (1 + moment)
    return output.to(w.dtype), membership, TSSAState(sum_sq, sum_weighted_sq, sum_membership)


# Sums over tokens, of packed sequences each on its own ------------------------------------------------------------------


def _offset_in_sequence(seq_idx: torch.Tensor) -> torch.Tensor:
    """Distance (B, T) of each token from the first one of its packed sequence."""
    t = torch.arange(seq_idx.shape[1], device=seq_idx.device).expand_as(seq_idx)
    return t - t.masked_fill(~sequence_starts(seq_idx), 0).cummax(1).values


def _per_token(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(B, T) with as many dimensions as `like` (B, T, ...)."""
    return x.view(*x.shape, *[1] * (like.ndim - 2))


def _sums_before(state: TSSAState | None, offset: torch.Tensor | None, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """What the state adds to each token's sums, (B, 1 or T, ...); only a row's first sequence goes on from it."""
    if state is None:
        return [None, None, None]
    sums = [s.to(dtype).unsqueeze(1) for s in state]
    if offset is None:
        return sums
    later = offset < torch.arange(offset.shape[1], device=offset.device)
    return [s.masked_fill(_per_token(later, s), 0) for s in sums]


def _running_sum(x: torch.Tensor, offset: torch.Tensor | None, before: torch.Tensor | None = None) -> torch.Tensor:
    """Sums over the tokens (dimension 1) up to each one, from the start of its packed sequence, plus those before.

    Packed rows take doubling steps rather than a difference of two cumulative sums, which would cancel digits.
    """
    if offset is None:
        # cumsum lays its result out as it sees it: head by head it takes half the time
        x = x.transpose(1, 2).cumsum(2).transpose(1, 2)
    else:
        offset = _per_token(offset, x)
        distance = 1
        while distance < x.shape[1]:
            earlier = F.pad(x[:, :-distance], (0, 0) * (x.ndim - 2) + (distance, 0))
            x = x + earlier.masked_fill(offset < distance, 0)
            distance *= 2
    return x if before is None else x + before


def _total(x: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
    """Sum over all tokens (B, 1, ...) or, in packed rows, over each token's own sequence (B, T, ...)."""
    if seq_idx is None:
        return x.sum(1, keepdim=True)
    to_last = _offset_in_sequence(seq_idx.flip(1)).flip(1)
    last = _per_token(torch.arange(seq_idx.shape[1], device=x.device) + to_last, x)
    return _running_sum(x, _offset_in_sequence(seq_idx)).gather(1, last.expand_as(x))
