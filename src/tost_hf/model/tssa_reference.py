# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Token Statistics Self-Attention: the reference implementation of every form in plain PyTorch. Read this file first.

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

With decay, the causal form multiplies its sums by a decay a_t in (0, 1] per head before it adds a token:

    S_t = a_t S_{t-1} + s_t,    N_t = a_t N_{t-1} + Pi_t s_t,    D_t = a_t D_{t-1} + Pi_t

All else is as above. Packed sequences are a decay of 0 at the first token of each. `normalize_scores=False` is the paper's
ablation, in which score_t = sum_i s_ti (plus p bias_t) and S has no effect. Nothing is ever divided by a product of factors:
it may be 0.

These functions are the reference of tests and benchmarks. The bidirectional form, a single token, torch.export and compilers
for devices other than the CPU run them: no step depends on a tensor's values. The other backends compute the same faster.

Arguments they share: w (B, T, H, p), projected tokens of any dtype; `temp` (H,) in the compute dtype; `padding` (B, T), true
where there is no token; `log_decay` (B, T, H) or (B, T, 1), log a_t in the compute dtype, 0 at padding.
"""

import functools
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.nn import functional as F


BLOCK_TOKENS = 16  # whose decayed sums are formed together, a power of two
MAX_SCAN_STEPS = 24  # over the blocks, in programs for sequences of any length

EPS_SUM_SQ = 1e-12  # minimum of a causal running sum of squares
EPS_NORM = 1e-12  # minimum of a channel's norm over the tokens (bidirectional)
EPS_MEMBERSHIP = 1e-8  # keeps the mean over memberships finite when nothing has been counted yet


class TSSAState(NamedTuple):
    """The whole causal state of one layer: 2 * H * p + H numbers per sequence, whatever the length of its past.

        sum_sq          = sum_i w_i^2             (B, H, p)
        sum_weighted_sq = sum_i Pi_i * w_i^2      (B, H, p)
        sum_membership  = sum_i Pi_i              (B, H)

    The two sums whose quotient scales the output are float64: a float32 sum of a million terms, added one by one, is off by
    1e-3. The same error in `sum_sq` does not show, since it hardly moves the score of a late token.

    Example:

    ```python
    >>> state = tssa(torch.randn(2, 100, 4, 16), temp=torch.ones(4)).final_state
    >>> state.sum_weighted_sq.shape, state.sum_weighted_sq.dtype
    (torch.Size([2, 4, 16]), torch.float64)
    ```
    """

    sum_sq: torch.Tensor  # (B, H, p), float32 (float64 for float64 tokens)
    sum_weighted_sq: torch.Tensor  # (B, H, p), float64
    sum_membership: torch.Tensor  # (B, H), float64


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics of `dtype` inputs are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def state_shapes(w: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """The shapes of a state's three sums, for tokens w (B, T, H, p)."""
    B, _, H, p = w.shape
    return (B, H, p), (B, H, p), (B, H)


def state_dtypes(w: torch.Tensor) -> tuple[torch.dtype, ...]:
    """The dtypes of a state's three sums, for tokens like `w`."""
    wide = torch.float32 if w.device.type == "mps" else torch.float64  # Apple's devices have no float64
    return compute_dtype(w.dtype), wide, wide


def zero_state(w: torch.Tensor) -> TSSAState:
    """The state before the first of the tokens w (B, T, H, p)."""
    return TSSAState(*(w.new_zeros(shape, dtype=dtype) for shape, dtype in zip(state_shapes(w), state_dtypes(w))))


def as_state(sums: Iterable[torch.Tensor], w: torch.Tensor) -> TSSAState:
    """Three sums in the dtypes of a state for tokens like `w`."""
    return TSSAState(*(x.to(dtype) for x, dtype in zip(sums, state_dtypes(w))))


def membership_of(score: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """Pi, the softmax over heads of `temp` times the score (..., H); 0 where `padding` (...) is true."""
    membership = (score * temp).softmax(-1)
    return membership if padding is None else membership.masked_fill(padding.unsqueeze(-1), 0)


def bias_of_tokens(denom_bias: torch.Tensor | None, positions: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The score bias of the tokens in `dtype`: `denom_bias` itself, or with positions its entries there."""
    if denom_bias is None:
        return None
    if positions is not None and positions.ndim == 2 and positions.stride(0) == 0:
        positions = positions[:1]  # shared by the batch: one look-up, and one gradient
    # an embedding, not an index: the gradient of an index adds up in whatever order threads come
    return (denom_bias if positions is None else F.embedding(positions, denom_bias)).to(dtype)


def real_tokens(w: torch.Tensor, padding: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Tokens (..., H, p) in `dtype`, 0 where `padding` (...) is true (not multiplied by 0: padding may hold NaN)."""
    return w.to(dtype) if padding is None else w.to(dtype).masked_fill(padding[..., None, None], 0)


def per_head(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Numbers of each head (..., H) with as many dimensions as `like`, (..., H) or (..., H, p)."""
    return x.view(*x.shape, *[1] * (like.ndim - x.ndim))


def sequence_starts(seq_idx: torch.Tensor) -> torch.Tensor:
    """Whether a packed sequence starts at a token, (B, T), by the tokens' sequence numbers (B, T)."""
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)


def reset_at_starts(log_decay: torch.Tensor | None, seq_idx: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`log_decay` by which no sum goes from one packed sequence to the next; the first continues from the sums before it."""
    starts = F.pad(sequence_starts(seq_idx)[:, 1:], (1, 0)).unsqueeze(-1)
    log_decay = torch.zeros_like(starts, dtype=dtype) if log_decay is None else log_decay
    return log_decay.masked_fill(starts, float("-inf"))


def _operator_namespace(package: str) -> str:
    # The installed package's is fixed wherever its files move: compiled and exported programs name it. A model's own code,
    # loaded beside it, gets another one.
    return "tost_hf" if package == "tost_hf.model" else re.sub(r"\W", "_", package or __name__, flags=re.ASCII)


OPERATOR_NAMESPACE = _operator_namespace(__name__.rpartition(".")[0])


def custom_operator(name: str, mutates_args: tuple[str, ...] = ()) -> Callable:
    """A decorator that makes a function a `torch.library` operator, which compilers do not look into."""
    return torch.library.custom_op(f"{OPERATOR_NAMESPACE}::{name}", mutates_args=mutates_args)


def causal(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    state: TSSAState | None = None,
    log_decay: torch.Tensor | None = None,
    softmax: Callable[..., torch.Tensor] = membership_of,
    normalize_scores: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState]:
    """Prefix sums over the tokens.

    Args:
        bias: `denom_bias` at each token, (T, H) or (B, T, H), in the compute dtype.
        state: the sums before the first token.
        softmax: what gives the memberships, called as `membership_of`; another one where these are not all heads.

    Returns:
        Output (B, T, H, p) in the dtype of `w`, membership (B, T, H), and the sums after the last token.
    """
    prefix_sums = _cumulative_sum if log_decay is None else functools.partial(_decayed_sum, log_decay.exp())
    before = [None] * 3 if state is None else [s.to(temp.dtype) for s in state]
    x = real_tokens(w, padding, temp.dtype)
    sq = x * x
    sum_sq = prefix_sums(sq, before[0])
    score = (sq / sum_sq.clamp_min(EPS_SUM_SQ) if normalize_scores else sq).sum(-1)
    if bias is not None:
        score = score + w.shape[-1] * bias
    membership = softmax(score, temp, padding)
    weight = membership.unsqueeze(-1)
    sum_weighted_sq = prefix_sums(sq * weight, before[1])
    sum_membership = prefix_sums(membership, before[2])
    moment = sum_weighted_sq / (sum_membership + EPS_MEMBERSHIP).unsqueeze(-1)
    output = -(x * weight) / (1 + moment)
    # a copy: compiled code that updates a cache in place must not see views of its work buffers
    final = (s[:, -1].clone() for s in (sum_sq, sum_weighted_sq, sum_membership))
    return output.to(w.dtype), membership, as_state(final, w)


def bidirectional(
    w: torch.Tensor,
    temp: torch.Tensor,
    padding: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    softmax: Callable[..., torch.Tensor] = membership_of,
    normalize_scores: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every running sum becomes a total. Returns output (B, T, H, p) in the dtype of `w` and membership (B, T, H).

    `softmax` is as in `causal`; `seq_idx` (B, T) are the numbers of packed sequences.
    """
    x = real_tokens(w, padding, temp.dtype)
    sq = x * x
    score = (sq / _sum_sequence(sq, seq_idx).clamp_min(EPS_NORM**2) if normalize_scores else sq).sum(-1)
    membership = softmax(score, temp, padding)
    weight = membership.unsqueeze(-1)
    moment = _sum_sequence(sq * weight, seq_idx) / (_sum_sequence(membership, seq_idx) + EPS_MEMBERSHIP).unsqueeze(-1)
    return (-(x * weight) / (1 + moment)).to(w.dtype), membership


def step(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    padding: torch.Tensor | None,
    state: TSSAState,
    log_decay: torch.Tensor | None = None,
    softmax: Callable[..., torch.Tensor] = membership_of,
    normalize_scores: bool = True,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState]:
    """The causal form of one token, from the sums before it.

    Args:
        w: the projected token, (B, H, p).
        bias: (H,) or (B, H), in the compute dtype.
        padding: (B,), true where the token is padding, which leaves the sums as they were.
        log_decay: (H,) or (B, H), in the compute dtype, 0 at padding.
        softmax: as in `causal`.
        in_place: whether the token is added to the tensors of `state`, for which there is then no gradient.

    Returns:
        Output (B, H, p) in the dtype of `w`, membership (B, H), and the sums after the token.
    """
    add = torch.Tensor.add_ if in_place else torch.add
    if log_decay is not None:
        # as 1 + (factor - 1): a factor near 1, rounded before it multiplies, would be off by as much at every step
        loss = log_decay.expm1().expand(state.sum_membership.shape)
        state = TSSAState(*(add(s, s * per_head(loss, s)) for s in state))
    x = real_tokens(w, padding, temp.dtype)
    sq = x * x
    sum_sq = add(state.sum_sq, sq)
    score = (sq / sum_sq.clamp_min(EPS_SUM_SQ) if normalize_scores else sq.to(sum_sq.dtype)).sum(-1)
    if bias is not None:
        score = score + w.shape[-1] * bias
    membership = softmax(score, temp, padding)
    sum_weighted_sq = add(state.sum_weighted_sq, sq * membership.unsqueeze(-1))
    sum_membership = add(state.sum_membership, membership)
    moment = (sum_weighted_sq / (sum_membership + EPS_MEMBERSHIP).unsqueeze(-1)).to(temp.dtype)
    output = -(x * membership.unsqueeze(-1)) / (1 + moment)
    return output.to(w.dtype), membership, TSSAState(sum_sq, sum_weighted_sq, sum_membership)


# Sums over tokens -------------------------------------------------------------------------------------------------------


def _per_token(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(B, T) with as many dimensions as `like` (B, T, ...)."""
    return x.view(*x.shape, *[1] * (like.ndim - 2))


def _cumulative_sum(x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Sums of tokens (B, T, H, ...) up to each one, on from a sum before the first (B, H, ...) or None."""
    # cumsum lays its result out as it sees it: head by head it takes half the time
    sums = x.transpose(1, 2).cumsum(2).transpose(1, 2)
    return sums if before is None else sums + before.unsqueeze(1)


def _decayed_sum(factor: torch.Tensor, x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """`_cumulative_sum`, multiplied by the token's factor (B, T, H) before each token is added.

    In doubling steps, within blocks of tokens and then over the blocks.
    """
    T = x.shape[1]
    if before is not None:  # as a token before the others
        x, factor = torch.cat([before.unsqueeze(1), x], 1), F.pad(factor, (0, 0, 1, 0), value=1)
    place = torch.arange(x.shape[1], device=x.device)
    sums, product = _scan_by_doubling(x, factor, place % BLOCK_TOKENS, BLOCK_TOKENS.bit_length() - 1)
    block = torch.arange(T // BLOCK_TOKENS + 3, device=x.device)  # more than enough: programs are for any number but one
    last = (block * BLOCK_TOKENS - 1).clamp(0, x.shape[1] - 1)  # of the block before
    total = sums.index_select(1, last).masked_fill(_per_token(block[None] == 0, sums), 0)
    block_product = product.index_select(1, last)
    if torch.compiler.is_exporting():  # few operations, whatever the length
        logs = block_product.clamp_min(torch.finfo(x.dtype).tiny).log()  # log 0 would have no gradient
        numbers = (total.unsqueeze(-1) if total.ndim == 3 else total).transpose(1, 2)
        numbers = (_decay_matrix(logs.transpose(1, 2)) @ numbers).transpose(1, 2)
        total = numbers.squeeze(-1) if total.ndim == 3 else numbers
    else:
        # programs for any length take the steps of the longest
        steps = MAX_SCAN_STEPS if torch.compiler.is_compiling() else len(block).bit_length()
        total, _ = _scan_by_doubling(total, block_product, block, steps)
    sums = sums + per_head(product, sums) * total.index_select(1, place // BLOCK_TOKENS)
    return sums if before is None else sums[:, 1:]


def _scan_by_doubling(
    total: torch.Tensor, product: torch.Tensor, offset: torch.Tensor, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decayed sums over up to 2**steps places, not beyond the place of offset 0, and the products of the factors."""
    place = torch.arange(total.shape[1], device=total.device)
    for distance in (2**step for step in range(steps)):
        early, earlier = (offset < distance)[None], (place - distance).clamp_min(0)
        before = total.index_select(1, earlier).masked_fill(_per_token(early, total), 0)
        total = total + per_head(product, total) * before
        product = product * product.index_select(1, earlier).masked_fill(early[..., None], 1)
    return total, product


def _decay_matrix(logs: torch.Tensor) -> torch.Tensor:
    """(..., n, n): at [t, s] the product of the factors after s up to t, of logarithms (..., n); 0 where s is later."""
    place = torch.arange(logs.shape[-1], device=logs.device)
    after = place.unsqueeze(1) > place
    sums = torch.where(after, logs.unsqueeze(-1), 0).cumsum(-2)  # nothing is subtracted: no digit cancels
    return sums.masked_fill(place.unsqueeze(1) < place, float("-inf")).exp()


def _sum_sequence(x: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
    """Sum over all tokens (B, 1, ...) or, of packed sequences, over each token's own (B, T, ...)."""
    if seq_idx is None:
        return x.sum(1, keepdim=True)
    starts = sequence_starts(seq_idx)
    number = starts.cumsum(1)
    last = torch.searchsorted(number, number, right=True) - 1  # token of each one's sequence
    sums = _decayed_sum((~starts).to(x.dtype).unsqueeze(-1), x, None)
    return sums.gather(1, _per_token(last, x).expand_as(x))
