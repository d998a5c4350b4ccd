# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The eager engine of causal TSSA: one pass over chunks of tokens, each small enough for the cache.

The backward is written down in closed form and goes through the chunks in reverse. For it only the input, the scores, the
memberships and the sums before each chunk are kept. The loops over rows and chunks serve the compiled engine as well, which
brings its own code for a chunk (`CompiledChunks`).

Sums that forget are multiplied by a token's factor before it is added, as the tokens go by. The border between two packed
sequences is a factor 0, so that packing costs the same wherever sequences end. 0 times NaN is NaN: a running sum that is not
finite stays so to the end of its row, where one look finds it, and that row's sequences are then computed one by one.

In the backward, `grad_x` is the gradient with respect to x. The output is -x Pi D / (N + D), with N and D the running sums of
weighted squares and of memberships.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .tssa_state import (
    EPS_MEMBERSHIP,
    EPS_SUM_SQ,
    TSSAState,
    cache_bytes,
    membership_of,
    quick_membership_of,
    sequence_starts,
    state_shapes,
    zero_state,
)
from .tssa_sums import DecayedSum, Factors, RunningSum, decay_grad, factors_of, load_tokens, pad_tokens, round_up, with_borders


CHUNK_TOKENS = 256  # of a chunk: enough for the operations to be worth spreading over threads
CHUNK_NUMBERS = cache_bytes()  # size of a chunk's tensors, several rows together: the working set stays in the caches


# What goes in and comes out -------------------------------------------------------------------------------------------


class ForwardTokens(NamedTuple):
    """Tensors with a value for each token, of all rows or of one chunk."""

    output: torch.Tensor  # (B, T, H, p), filled
    w: torch.Tensor  # (B, T, H, p)
    bias: torch.Tensor  # (B, T, H), in the compute dtype
    padding: torch.Tensor | None  # (B, T)
    log_decay: torch.Tensor | None  # (B, T, H) or (B, T, 1)


class BackwardTokens(NamedTuple):
    """The same for the backward."""

    grad_w: torch.Tensor  # (B, T, H, p), filled
    grad_output: torch.Tensor  # (B, T, H, p)
    grad_membership: torch.Tensor | None  # (B, T, H)
    w: torch.Tensor  # (B, T, H, p)
    padding: torch.Tensor | None  # (B, T)
    membership: torch.Tensor  # (B, T, H)
    score: torch.Tensor  # (B, T, H)
    log_decay: torch.Tensor | None  # (B, T, H) or (B, T, 1)
    grad_log_decay: torch.Tensor | None  # (B, T, H), filled


class ForwardChunk(NamedTuple):
    """What a chunk's forward returns, beside the output."""

    membership: torch.Tensor  # (rows, tokens, H)
    score: torch.Tensor  # (rows, tokens, H)
    sums: TSSAState  # after the chunk
    factors: Factors | None = None  # of eager code, with what it found


class BackwardChunk(NamedTuple):
    """What a chunk's backward returns, beside the gradient of w."""

    grad_score: torch.Tensor  # (rows, tokens, H)
    grad_temp: torch.Tensor  # (H,)
    grad_sums: TSSAState  # of the sums before the chunk


class Kept(NamedTuple):
    """What the forward keeps for the backward; empty tensors where there will be none."""

    score: torch.Tensor  # (B, T, H)
    sums: TSSAState  # before each chunk, (borders, ...): those of a group of rows after each other
    factors: Sequence[Sequence[Factors | None]] | None = None  # of each group's chunks; None if they are to be formed again


class CausalResult(NamedTuple):
    """What `causal_forward` returns."""

    output: torch.Tensor  # (B, T, H, p), dtype of w
    membership: torch.Tensor  # (B, T, H)
    state: TSSAState  # after the last token
    kept: Kept


class OutputGrads(NamedTuple):
    """Gradients of what the operator returns; None where there is none."""

    output: torch.Tensor | None
    membership: torch.Tensor | None
    sum_sq: torch.Tensor | None
    sum_weighted_sq: torch.Tensor | None
    sum_membership: torch.Tensor | None


class InputGrads(NamedTuple):
    """Gradients of what the operator takes."""

    w: torch.Tensor
    temp: torch.Tensor
    bias: torch.Tensor  # (B, T, H)
    log_decay: torch.Tensor | None  # (B, T, H)
    sum_sq: torch.Tensor
    sum_weighted_sq: torch.Tensor
    sum_membership: torch.Tensor


class CompiledChunks(NamedTuple):
    """Code for chunks of one length; it takes what `_forward_chunk` and `_backward_chunk` take but the workspace."""

    tokens: int  # of a chunk
    rows: int  # worked on together
    borders: int  # least number of places for the sums at borders of chunks, used or not
    forward: Callable[[ForwardTokens, torch.Tensor, TSSAState], ForwardChunk] | None  # None for the eager code
    backward: Callable[[BackwardTokens, torch.Tensor, TSSAState, TSSAState], BackwardChunk] | None


def _part(tensors, rows: slice = slice(None), tokens: slice = slice(None)):
    """The same tuple, of some rows and tokens."""
    return type(tensors)(*(None if x is None else x[rows, tokens] for x in tensors))


# How the work is cut ----------------------------------------------------------------------------------------------------


class _RowGroup(NamedTuple):
    """Rows that are worked on together, few enough that a chunk of them stays in the cache."""

    rows: slice
    chunks: list[slice]  # of the tokens
    borders: slice  # of the sums before these chunks, among those of all rows

    def sums_before(self, sums: TSSAState) -> list[TSSAState]:
        """For each chunk the places of the sums before it, (rows, ...), among those of all (borders, ...)."""
        size = self.rows.stop - self.rows.start
        return list(map(TSSAState._make, zip(*(x[self.borders].split(size) for x in sums))))


def _cut(w: torch.Tensor, compiled: CompiledChunks | None) -> list[_RowGroup]:
    B, T, H, p = w.shape
    size = CHUNK_TOKENS if compiled is None else compiled.tokens
    count = max(1, CHUNK_NUMBERS // (size * H * p)) if compiled is None else compiled.rows
    chunks = [slice(t, min(t + size, T)) for t in range(0, T, size)]
    groups, place = [], 0
    for row in range(0, B, count):
        rows = slice(row, min(row + count, B))
        borders = slice(place, place + (rows.stop - rows.start) * len(chunks))
        groups.append(_RowGroup(rows, chunks, borders))
        place = borders.stop
    return groups


# The operator -----------------------------------------------------------------------------------------------------------


def causal_tssa(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    state: TSSAState,
    log_decay: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState]:
    """Causal TSSA with autograd; as `tssa_formulas.causal`, but `bias` (B, T, H) and `state` are always given."""
    log_decay = with_borders(log_decay, seq_idx, temp.dtype)
    if not torch.is_grad_enabled():  # what learns would have the function below keep what nobody asks for
        result = causal_forward(w, temp, bias, padding, seq_idx, log_decay, state, keep=False)
        return result.output, result.membership, result.state
    output, membership, *final = _CausalTSSA.apply(w, temp, bias, padding, seq_idx, log_decay, *state)
    return output, membership, TSSAState(*final)


class _CausalTSSA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, temp, bias, padding, seq_idx, log_decay, *state):
        result = causal_forward(w, temp, bias, padding, seq_idx, log_decay, TSSAState(*state), any(ctx.needs_input_grad))
        kept = result.kept.score, *result.kept.sums
        ctx.save_for_backward(w, temp, bias, padding, seq_idx, log_decay, *state, result.membership, *kept)
        ctx.factors = result.kept.factors
        ctx.set_materialize_grads(False)
        return result.output, result.membership, *result.state

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        *inputs, sum_sq, sum_weighted_sq, sum_membership, membership, score = ctx.saved_tensors[:11]
        state, sums = TSSAState(sum_sq, sum_weighted_sq, sum_membership), TSSAState(*ctx.saved_tensors[11:])
        kept, learned = Kept(score, sums, ctx.factors), ctx.needs_input_grad[5]
        ctx.factors = None  # a graph that is held on to holds them no longer than saved tensors
        grad = causal_backward(OutputGrads(*grads), *inputs, state, learned, membership, kept)
        return grad.w, grad.temp, grad.bias, None, None, grad.log_decay, *grad[4:]


def causal_forward(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    state: TSSAState,
    keep: bool,
    compiled: CompiledChunks | None = None,
) -> CausalResult:
    """Goes through the chunks of each group of rows; keeps what `causal_backward` needs if `keep`.

    `log_decay` forgets all at the borders of packed sequences; `seq_idx` tells where they are.
    """
    result = _forward_rows(w, temp, bias, padding, log_decay, state, keep, compiled)
    for part, before, is_last in _sequences_to_separate(seq_idx, state, result.state):
        inputs = (x if x is None else x[part] for x in (bias, padding, log_decay))
        alone = _forward_rows(w[part], temp, *inputs, before, keep, compiled)
        result.output[part], result.membership[part] = alone.output, alone.membership
        if keep:
            result.kept.score[part] = alone.kept.score
        if is_last:
            for x, value in zip(result.state, alone.state):
                x[part[0]] = value
    return result


def causal_backward(
    grads: OutputGrads,
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    state: TSSAState,
    decay_is_learned: bool,
    membership: torch.Tensor,
    kept: Kept,
    compiled: CompiledChunks | None = None,
) -> InputGrads:
    """The gradients of what `causal_forward` takes; `log_decay` has one if it is learned."""
    result = _backward_rows(grads, w, temp, padding, log_decay, decay_is_learned, membership, kept, compiled)
    by_state = TSSAState(*result[4:])
    for part, before, is_last in _sequences_to_separate(seq_idx, state, by_state):
        w_, bias_, padding_, decay_ = (x if x is None else x[part] for x in (w, bias, padding, log_decay))
        alone = _forward_rows(w_, temp, bias_, padding_, decay_, before, True, compiled)
        by_tokens = (x if x is None else x[part] for x in grads[:2])
        by_final = (None if x is None or not is_last else x[part[0]] for x in grads[2:])
        back = OutputGrads(*by_tokens, *by_final)
        kept_alone = alone.kept._replace(factors=None)
        done = _backward_rows(back, w_, temp, padding_, decay_, decay_is_learned, alone.membership, kept_alone, compiled)
        result.w[part], result.bias[part] = done.w, done.bias
        if result.log_decay is not None:
            result.log_decay[part] = done.log_decay
        for x, value in zip(by_state, done[4:]):
            x[part[0]] = value if part[1].start == 0 else x[part[0]]
    return result


def _sequences_to_separate(
    seq_idx: torch.Tensor | None, state: TSSAState, found: TSSAState
) -> list[tuple[tuple[slice, slice], TSSAState, bool]]:
    """The packed sequences of rows whose sums came out not finite, whatever made them so: none may spoil another.

    Returns:
        Of each its row and tokens, the sums before it, and whether it is its row's last.
    """
    if seq_idx is None:
        return []
    finite = [x.isfinite().flatten(1).all(1) for x in found]
    spoiled = ~(finite[0] & finite[1] & finite[2])
    sequences = []
    for row in spoiled.nonzero().flatten().tolist():
        starts = sequence_starts(seq_idx[row : row + 1])[0].nonzero().flatten().tolist()
        for start, stop in zip(starts, [*starts[1:], seq_idx.shape[1]]):
            rows = slice(row, row + 1)
            before = TSSAState(*(x[rows] if start == 0 else torch.zeros_like(x[rows]) for x in state))
            sequences.append(((rows, slice(start, stop)), before, stop == seq_idx.shape[1]))
    return sequences


def _forward_rows(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    state: TSSAState,
    keep: bool,
    compiled: CompiledChunks | None,
) -> CausalResult:
    groups = _cut(w, compiled)
    borders = max(groups[-1].borders.stop, compiled.borders if compiled is not None else 0) if keep and groups else 0
    output = torch.empty_like(w, memory_format=torch.contiguous_format)
    membership = w.new_empty(w.shape[:3], dtype=temp.dtype)
    final = TSSAState(*(torch.empty_like(x) for x in state))
    score = torch.empty_like(membership) if keep else membership.new_empty(0)
    factors: list[list[Factors | None]] = [[] for _ in groups]
    kept = Kept(score, TSSAState(*(membership.new_empty(borders, *shape[1:]) for shape in state_shapes(w))), factors)
    for group, found in zip(groups, factors):
        tokens = _part(ForwardTokens(output, w, bias, padding, log_decay), group.rows)
        codes = _chunk_codes(tokens, group.chunks, temp.dtype, compiled, both_ways=keep and compiled is None)
        sums, places = _part(state, group.rows), group.sums_before(kept.sums) if keep else []
        for index, chunk in enumerate(group.chunks):
            if keep:
                for place, value in zip(places[index], sums):
                    place.copy_(value)
            done = codes[index](_part(tokens, tokens=chunk), temp, sums)
            membership[group.rows, chunk] = done.membership
            if keep:
                score[group.rows, chunk] = done.score
                found.append(done.factors)
            sums = done.sums
        for x, value in zip(final, sums):
            x[group.rows] = value
    return CausalResult(output, membership, final, kept)


def _backward_rows(
    grads: OutputGrads,
    w: torch.Tensor,
    temp: torch.Tensor,
    padding: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    decay_is_learned: bool,
    membership: torch.Tensor,
    kept: Kept,
    compiled: CompiledChunks | None,
) -> InputGrads:
    """Goes through the chunks in reverse, each time from the sums before it; `log_decay` has a gradient if it is learned."""
    grad_w = torch.empty_like(w, memory_format=torch.contiguous_format)
    grad_score, grad_temp = torch.empty_like(membership), torch.zeros_like(temp)
    grad_output = w.new_zeros(()).expand_as(w) if grads.output is None else grads.output
    grad_final = TSSAState(*(zero if grad is None else grad for grad, zero in zip(grads[2:], zero_state(w))))
    grad_log_decay = torch.empty_like(membership) if decay_is_learned else None
    all_tokens = BackwardTokens(
        grad_w=grad_w,
        grad_output=grad_output,
        grad_membership=grads.membership,
        w=w,
        padding=padding,
        membership=membership,
        score=kept.score,
        log_decay=log_decay,
        grad_log_decay=grad_log_decay,
    )
    grad_initial = []
    for group, factors in zip(_cut(w, compiled), kept.factors or itertools.repeat(None)):
        tokens = _part(all_tokens, group.rows)
        codes = _chunk_codes(tokens, group.chunks, temp.dtype, compiled, factors)
        grad_sums = _part(grad_final, group.rows)
        for chunk, code, sums in reversed(list(zip(group.chunks, codes, group.sums_before(kept.sums)))):
            done = code(_part(tokens, tokens=chunk), temp, sums, grad_sums)
            grad_score[group.rows, chunk] = done.grad_score
            grad_temp += done.grad_temp
            grad_sums = done.grad_sums
        grad_initial.append(grad_sums)
    grad_bias = grad_score.mul_(w.shape[-1])
    return InputGrads(grad_w, grad_temp, grad_bias, grad_log_decay, *(torch.cat(parts) for parts in zip(*grad_initial)))


def _chunk_codes(
    tokens: ForwardTokens | BackwardTokens,
    chunks: list[slice],
    dtype: torch.dtype,
    compiled: CompiledChunks | None,
    kept: Sequence[Factors | None] | None = None,
    both_ways: bool = True,
) -> list[Callable]:
    """For each chunk what computes it: compiled code for its length, or eager code with its factors, `kept` or new ones."""
    backward = isinstance(tokens, BackwardTokens)
    eager = _backward_chunk if backward else _forward_chunk
    code = None if compiled is None else compiled.backward if backward else compiled.forward
    codes: list[Callable] = []
    for length, same in itertools.groupby(chunks, lambda chunk: chunk.stop - chunk.start):
        parts = list(same)
        if compiled is not None and code is not None and length == compiled.tokens:
            codes += [code] * len(parts)
            continue
        space = _Workspace(tokens.w, round_up(length), dtype, backward, decayed=tokens.log_decay is not None)
        factors: Sequence[Factors | None] = [None] * len(parts)
        if kept is not None:
            factors = kept[len(codes) : len(codes) + len(parts)]
        elif tokens.log_decay is not None:
            factors = factors_of(tokens.log_decay[:, parts[0].start : parts[-1].stop], len(parts), length, both_ways)
        codes += [functools.partial(eager, space, x) for x in factors]
    return codes


# One chunk --------------------------------------------------------------------------------------------------------------


class _Workspace:
    """Tensors for one length of chunk, a multiple of GROUP_TOKENS, and the running sums between them.

    Each is named after what it holds first; later steps write over it, so that the whole stays in the cache.
    """

    def __init__(self, w: torch.Tensor, tokens: int, dtype: torch.dtype, backward: bool, decayed: bool):
        rows, _, H, p = w.shape
        running_sum = DecayedSum if decayed else RunningSum

        def new(size: int = p):
            return w.new_empty(rows, tokens, H, size, dtype=dtype)

        self.x, self.sq, self.sum_sq = new(), new(), new()
        self.add_up_sq = running_sum(self.sum_sq, source=self.sq)
        self.add_up_count = running_sum(new(1))
        if not backward:
            self.add_up_weighted_sq = running_sum(self.sq)
            return
        self.grad, self.sum_weighted_sq, self.grad_quotient, self.inverse = new(), new(), new(), new()
        self.add_up_weighted_sq = running_sum(self.sum_weighted_sq)
        self.add_up_grad_sq = running_sum(self.sum_sq, reverse=True)
        self.add_up_grad_count = running_sum(new(1), reverse=True)
        self.add_up_grad_weighted_sq = running_sum(self.grad_quotient, reverse=True)


def _forward_chunk(
    space: _Workspace, factors: Factors | None, tokens: ForwardTokens, temp: torch.Tensor, sums: TSSAState
) -> ForwardChunk:
    """One chunk: fills the output, goes on from `sums`."""
    padding, count_tokens = tokens.padding, tokens.w.shape[1]
    x = load_tokens(tokens.w, padding, space.x)
    sq = torch.mul(x, x, out=space.sq)
    sum_sq = space.add_up_sq(sums.sum_sq, factors)
    floored = space.add_up_sq.may_be_below(EPS_SUM_SQ, sums.sum_sq, factors)
    if floored:
        space.sum_sq.clamp_min_(EPS_SUM_SQ)
    ratio = torch.div(sq, space.sum_sq, out=space.sum_sq)
    score = ratio.sum(-1)[:, :count_tokens].add_(tokens.bias, alpha=tokens.w.shape[-1])
    membership = (membership_of if factors is None else quick_membership_of)(score, temp, padding)

    weight = pad_tokens(membership, x.shape[1])
    sq.mul_(weight.unsqueeze(-1))
    sum_weighted_sq = space.add_up_weighted_sq(sums.sum_weighted_sq, factors)
    counted, sum_membership = space.add_up_count.of_column(weight, sums.sum_membership, factors)
    if factors is not None and factors.back is not None:
        factors = factors._replace(counted=counted.clone(), floored=floored)
    count = counted.add_(EPS_MEMBERSHIP)
    # -x Pi / (1 + N / D), as -x Pi D / (N + D)
    numerator = torch.mul(x, (weight * count).neg_().unsqueeze(-1), out=ratio)
    denominator = sq.add_(count.unsqueeze(-1))
    torch.div(numerator[:, :count_tokens], denominator[:, :count_tokens], out=tokens.output)
    return ForwardChunk(membership, score, TSSAState(sum_sq, sum_weighted_sq, sum_membership), factors)


def _backward_chunk(
    space: _Workspace,
    factors: Factors | None,
    tokens: BackwardTokens,
    temp: torch.Tensor,
    sums: TSSAState,
    grad_sums: TSSAState,
) -> BackwardChunk:
    """One chunk: fills the gradients of w and `log_decay`; `grad_sums` are the gradients of the sums after the chunk."""
    padding, count_tokens, size = tokens.padding, tokens.w.shape[1], space.sq.shape[1]
    x, grad = load_tokens(tokens.w, padding, space.x), load_tokens(tokens.grad_output, padding, space.grad)
    membership, score = pad_tokens(tokens.membership, size), pad_tokens(tokens.score, size)
    weight = membership.unsqueeze(-1)
    sq = torch.mul(x, x, out=space.sq)
    decay = None if tokens.grad_log_decay is None else _DecayTerms()

    counted = None if factors is None else factors.counted
    if counted is None:
        counted, _ = space.add_up_count.of_column(membership, sums.sum_membership, factors)
    by_output = _output_to_membership(space, x, grad, membership, counted, sums, grad_sums, factors, decay)
    grad_membership = by_output.membership
    if tokens.grad_membership is not None:
        grad_membership[:, :count_tokens] += tokens.grad_membership

    # membership -> score: the one step that joins the heads
    grad_logit = grad_membership.sub_((membership * grad_membership).sum(-1, keepdim=True)).mul_(membership)
    grad_temp = (grad_logit * score).sum((0, 1))
    grad_score = grad_logit.mul_(temp)

    grad_sq, grad_sum_sq = _score_to_squares(space, sq, grad_score, sums, grad_sums, factors, decay)
    if decay is not None and tokens.grad_log_decay is not None:
        tokens.grad_log_decay.copy_(decay_grad(decay.terms, decay.after_groups)[:, :count_tokens])
    grad_sq.addcmul_(space.grad_quotient, weight)
    weighted_count = (membership * by_output.counted).unsqueeze(-1)
    grad_x = space.grad.mul_(weighted_count.neg_()).addcmul_(grad_sq, x, value=2)[:, :count_tokens]
    tokens.grad_w.copy_(grad_x if padding is None else grad_x.masked_fill_(padding[..., None, None], 0))
    grads = TSSAState(grad_sum_sq, by_output.sum_weighted_sq, by_output.sum_membership)
    return BackwardChunk(grad_score[:, :count_tokens], grad_temp, grads)


class _DecayTerms:
    """What `decay_grad` takes, gathered on the way back."""

    terms: torch.Tensor  # (rows, tokens, H)
    after_groups: torch.Tensor  # (rows, groups, H)


class _OutputGrads(NamedTuple):
    """What `_output_to_membership` returns."""

    membership: torch.Tensor  # gradient
    sum_weighted_sq: torch.Tensor  # gradient of the sum before the chunk
    sum_membership: torch.Tensor  # the same
    counted: torch.Tensor  # D, the running sums of memberships


def _output_to_membership(
    space: _Workspace,
    x: torch.Tensor,
    grad: torch.Tensor,
    membership: torch.Tensor,
    counted: torch.Tensor,
    sums: TSSAState,
    grad_sums: TSSAState,
    factors: Factors | None,
    decay: _DecayTerms | None,
) -> _OutputGrads:
    """From the output to the running sums N and D (`counted`) and the membership.

    Leaves g / (N + D) in `space.grad` and the gradients of N's terms in `space.grad_quotient`.
    """
    weight = membership.unsqueeze(-1)
    count = counted + EPS_MEMBERSHIP
    sum_weighted_sq = torch.mul(space.sq, weight, out=space.sum_weighted_sq)
    space.add_up_weighted_sq(sums.sum_weighted_sq, factors)
    ends = None if decay is None else space.add_up_weighted_sq.last_sums()
    inverse = torch.add(sum_weighted_sq, count.unsqueeze(-1), out=space.inverse).reciprocal_()
    torch.mul(grad, inverse, out=space.grad)
    quotient = torch.mul(space.grad, x, out=space.grad_quotient)
    grad_membership = quotient.sum(-1).mul_(count).neg_()
    quotient.mul_(inverse)  # g x / (N + D)^2
    product = torch.mul(quotient, sum_weighted_sq, out=sum_weighted_sq)
    grad_count = product.sum(-1).mul_(membership).neg_()
    quotient.mul_((membership * count).unsqueeze(-1))
    grad_weighted_sq = space.add_up_grad_weighted_sq(grad_sums.sum_weighted_sq, factors)
    grad_counts, grad_sum_membership = space.add_up_grad_count.of_column(grad_count, grad_sums.sum_membership, factors)
    by_sums = torch.mul(space.sq, quotient, out=product).sum(-1).add_(grad_counts)
    grad_membership += by_sums
    if decay is not None:  # dN N and dD D cancel, but for the floor in count
        decay.terms = by_sums.mul_(membership).add_(grad_count, alpha=EPS_MEMBERSHIP)
        decay.after_groups = (ends * space.add_up_grad_weighted_sq.before_groups).sum(-1)
        counted_before = counted.unflatten(1, space.add_up_count.groups.shape[1:3])[:, :, -1]
        decay.after_groups.addcmul_(counted_before, space.add_up_grad_count.before_groups.squeeze(-1))
    return _OutputGrads(grad_membership, grad_weighted_sq, grad_sum_membership, count)


def _score_to_squares(
    space: _Workspace,
    sq: torch.Tensor,
    grad_score: torch.Tensor,
    sums: TSSAState,
    grad_sums: TSSAState,
    factors: Factors | None,
    decay: _DecayTerms | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the score to the squares, by way of their running sums: their gradient, and that of the sum before the chunk."""
    space.add_up_sq(sums.sum_sq, factors)
    ends = None if decay is None else space.add_up_sq.last_sums()
    may_be_floored = space.add_up_sq.may_be_below(EPS_SUM_SQ, sums.sum_sq, factors)
    floored = space.sum_sq < EPS_SUM_SQ if may_be_floored else None
    if floored is not None:
        space.sum_sq.clamp_min_(EPS_SUM_SQ)
    inverse = space.sum_sq.reciprocal_()
    grad_ratio = torch.mul(inverse, grad_score.unsqueeze(-1), out=space.inverse)
    if decay is not None and floored is not None:
        decay.terms -= (sq * grad_ratio).masked_fill_(~floored, 0).sum(-1)
    loss = inverse.mul_(sq).mul_(grad_ratio)  # minus the gradient of a running sum, in the same tensor
    if floored is not None:
        loss.masked_fill_(floored, 0)
    grad_sum_sq = space.add_up_grad_sq(grad_sums.sum_sq.neg(), factors).neg()
    grad_sq = grad_ratio.sub_(loss)
    if decay is not None:
        decay.terms += torch.mul(sq, grad_sq, out=loss).sum(-1)
        decay.after_groups -= (ends * space.add_up_grad_sq.before_groups).sum(-1)
    return grad_sq, grad_sum_sq
