# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The eager engine of causal TSSA: one pass over chunks of tokens, each small enough for the cache.

The backward is written down in closed form and goes through the chunks in reverse. For it only the input, the scores, the
memberships and the sums before each chunk are kept. The loops over rows and chunks serve the compiled engine as well, which
brings its own code for a chunk (`CompiledChunks`).

In the backward, `grad_x` is the gradient with respect to x. The output is -x Pi D / (N + D), with N and D the running sums of
weighted squares and of memberships.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .tssa_formulas import causal
from .tssa_state import EPS_MEMBERSHIP, EPS_SUM_SQ, TSSAState, membership_of, sequence_starts, state_shapes, zero_state


CHUNK_TOKENS = 256  # of a chunk: enough for the operations to be worth spreading over threads
CHUNK_NUMBERS = 2**20  # size of a chunk's tensors, several rows together: the working set stays in the cache
GROUP_TOKENS = 16  # tokens summed one after the other within a chunk


# What goes in and comes out -------------------------------------------------------------------------------------------


class ForwardTokens(NamedTuple):
    """Tensors with a value for each token, of all rows or of one chunk."""

    output: torch.Tensor  # (B, T, H, p), filled
    w: torch.Tensor  # (B, T, H, p)
    bias: torch.Tensor  # (B, T, H), in the compute dtype
    padding: torch.Tensor | None  # (B, T)


class BackwardTokens(NamedTuple):
    """The same for the backward."""

    grad_w: torch.Tensor  # (B, T, H, p), filled
    grad_output: torch.Tensor  # (B, T, H, p)
    grad_membership: torch.Tensor | None  # (B, T, H)
    w: torch.Tensor  # (B, T, H, p)
    padding: torch.Tensor | None  # (B, T)
    membership: torch.Tensor  # (B, T, H)
    score: torch.Tensor  # (B, T, H)


class ForwardChunk(NamedTuple):
    """What a chunk's forward returns, beside the output."""

    membership: torch.Tensor  # (rows, tokens, H)
    score: torch.Tensor  # (rows, tokens, H)
    sums: TSSAState  # after the chunk


class BackwardChunk(NamedTuple):
    """What a chunk's backward returns, beside the gradient of w."""

    grad_score: torch.Tensor  # (rows, tokens, H)
    grad_temp: torch.Tensor  # (H,)
    grad_sums: TSSAState  # of the sums before the chunk


class Kept(NamedTuple):
    """What the forward keeps for the backward; empty tensors where there will be none."""

    score: torch.Tensor  # (B, T, H)
    sums: TSSAState  # before each chunk, (borders, ...): those of a group of rows after each other


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


class _Chunk(NamedTuple):
    start: int
    stop: int
    starts_sequence: torch.Tensor | None  # (rows,), where a packed sequence begins at the first token

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.stop)


class _RowGroup(NamedTuple):
    """Rows that are worked on together, few enough that a chunk of them stays in the cache."""

    rows: slice
    chunks: list[_Chunk]
    borders: slice  # of the sums before these chunks, among those of all rows

    def sums_before(self, index: int, sums: TSSAState) -> TSSAState:
        """The places of the sums (borders, ...) before chunk `index`, (rows, ...)."""
        shape = (len(self.chunks), self.rows.stop - self.rows.start)
        return TSSAState(*(x[self.borders].unflatten(0, shape)[index] for x in sums))


def _cut_tokens(T: int, seq_idx: torch.Tensor | None, size: int) -> list[_Chunk]:
    """Chunks of at most `size` tokens that straddle no border of any row."""
    if seq_idx is None:
        return [_Chunk(t, min(t + size, T), None) for t in range(0, T, size)]
    starts = sequence_starts(seq_idx)
    borders = [*starts.any(0).nonzero().flatten().tolist(), T]
    chunks = []
    for start, stop in itertools.pairwise(borders):
        for t in range(start, stop, size):
            chunks.append(_Chunk(t, min(t + size, stop), starts[:, t] if t == start and t > 0 else None))
    return chunks


def _cut_rows(w: torch.Tensor, seq_idx: torch.Tensor | None, compiled: CompiledChunks | None) -> list[_RowGroup]:
    B, T, H, p = w.shape
    size = CHUNK_TOKENS if compiled is None else compiled.tokens
    count = max(1, CHUNK_NUMBERS // (size * H * p)) if compiled is None else compiled.rows
    groups, place = [], 0
    for row in range(0, B, count):
        rows = slice(row, min(row + count, B))
        chunks = _cut_tokens(T, None if seq_idx is None else seq_idx[rows], size)
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
    if log_decay is not None:
        return causal(w, temp, bias, padding, seq_idx, state, log_decay)
    output, membership, *final = _CausalTSSA.apply(w, temp, bias, padding, seq_idx, *state)
    return output, membership, TSSAState(*final)


class _CausalTSSA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, temp, bias, padding, seq_idx, *state):
        result = causal_forward(w, temp, bias, padding, seq_idx, TSSAState(*state), any(ctx.needs_input_grad))
        ctx.save_for_backward(w, temp, padding, seq_idx, result.membership, result.kept.score, *result.kept.sums)
        ctx.set_materialize_grads(False)
        return result.output, result.membership, *result.state

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        w, temp, padding, seq_idx, membership, score, *sums = ctx.saved_tensors
        kept = Kept(score, TSSAState(*sums))
        grad = causal_backward(OutputGrads(*grads), w, temp, padding, seq_idx, membership, kept)
        return grad.w, grad.temp, grad.bias, None, None, grad.sum_sq, grad.sum_weighted_sq, grad.sum_membership


def causal_forward(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    state: TSSAState,
    keep: bool,
    compiled: CompiledChunks | None = None,
) -> CausalResult:
    """Goes through the chunks of each group of rows; keeps what `causal_backward` needs if `keep`."""
    groups = _cut_rows(w, seq_idx, compiled)
    borders = max(groups[-1].borders.stop, compiled.borders if compiled is not None else 0) if keep and groups else 0
    output = torch.empty_like(w, memory_format=torch.contiguous_format)
    membership = w.new_empty(w.shape[:3], dtype=temp.dtype)
    final = TSSAState(*(torch.empty_like(x) for x in state))
    score = torch.empty_like(membership) if keep else membership.new_empty(0)
    kept = Kept(score, TSSAState(*(membership.new_empty(borders, *shape[1:]) for shape in state_shapes(w))))
    for group in groups:
        tokens = _part(ForwardTokens(output, w, bias, padding), group.rows)
        codes = _chunk_codes(tokens.w, group.chunks, temp.dtype, compiled, backward=False)
        sums = _part(state, group.rows)
        for index, chunk in enumerate(group.chunks):
            sums = _clear_rows(sums, chunk.starts_sequence)
            if keep:
                for place, value in zip(group.sums_before(index, kept.sums), sums):
                    place.copy_(value)
            done = codes[chunk.stop - chunk.start](_part(tokens, tokens=chunk.tokens), temp, sums)
            membership[group.rows, chunk.tokens] = done.membership
            if keep:
                score[group.rows, chunk.tokens] = done.score
            sums = done.sums
        for x, value in zip(final, sums):
            x[group.rows] = value
    return CausalResult(output, membership, final, kept)


def causal_backward(
    grads: OutputGrads,
    w: torch.Tensor,
    temp: torch.Tensor,
    padding: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    membership: torch.Tensor,
    kept: Kept,
    compiled: CompiledChunks | None = None,
) -> InputGrads:
    """Goes through the chunks in reverse, each time from the sums before it."""
    grad_w = torch.empty_like(w, memory_format=torch.contiguous_format)
    grad_score, grad_temp = torch.empty_like(membership), torch.zeros_like(temp)
    grad_output = w.new_zeros(()).expand_as(w) if grads.output is None else grads.output
    grad_final = TSSAState(*(zero if grad is None else grad for grad, zero in zip(grads[2:], zero_state(w))))
    all_tokens = BackwardTokens(grad_w, grad_output, grads.membership, w, padding, membership, kept.score)
    grad_initial = []
    for group in _cut_rows(w, seq_idx, compiled):
        tokens = _part(all_tokens, group.rows)
        codes = _chunk_codes(tokens.w, group.chunks, temp.dtype, compiled, backward=True)
        grad_sums = _part(grad_final, group.rows)
        for index in reversed(range(len(group.chunks))):
            chunk = group.chunks[index]
            code, sums = codes[chunk.stop - chunk.start], group.sums_before(index, kept.sums)
            done = code(_part(tokens, tokens=chunk.tokens), temp, sums, grad_sums)
            grad_score[group.rows, chunk.tokens] = done.grad_score
            grad_temp += done.grad_temp
            grad_sums = _clear_rows(done.grad_sums, chunk.starts_sequence)
        grad_initial.append(grad_sums)
    grad_bias = grad_score.mul_(w.shape[-1])
    return InputGrads(grad_w, grad_temp, grad_bias, *(torch.cat(parts) for parts in zip(*grad_initial)))


def _clear_rows(sums: TSSAState, rows: torch.Tensor | None) -> TSSAState:
    """The sums with the marked rows (B,) set to zero."""
    if rows is None:
        return sums
    return TSSAState(*(x.masked_fill(rows.view(-1, *[1] * (x.ndim - 1)), 0) for x in sums))


def _chunk_codes(
    w: torch.Tensor, chunks: list[_Chunk], dtype: torch.dtype, compiled: CompiledChunks | None, backward: bool
) -> dict[int, Callable]:
    """For each length of chunk, what computes it: `_forward_chunk` or `_backward_chunk`, or compiled code for it."""
    eager = _backward_chunk if backward else _forward_chunk
    code = None if compiled is None else compiled.backward if backward else compiled.forward
    codes = {} if compiled is None or code is None else {compiled.tokens: code}
    lengths = {chunk.stop - chunk.start for chunk in chunks} - codes.keys()
    spaces = {size: _Workspace(w, size, dtype, backward) for size in map(_round_up, lengths)}
    return codes | {length: functools.partial(eager, spaces[_round_up(length)]) for length in lengths}


# One chunk --------------------------------------------------------------------------------------------------------------


class _RunningSum:
    """Running sums over the tokens of a chunk, (rows, tokens, H, p), in a tensor that every chunk uses again.

    They are added up inside groups of tokens, then over the groups, and then joined. Whole tensors are added, which is
    faster than `torch.cumsum` along this dimension, and a token's sum takes in nothing of the tokens after it (before it, in
    reverse), not even a zero times infinity.

    Args:
        tensor: where the sums go.
        source: what is summed; `tensor` itself if None.
        reverse: sum from the last token back.
    """

    def __init__(self, tensor: torch.Tensor, source: torch.Tensor | None = None, reverse: bool = False):
        order = -1 if reverse else 1
        self.groups = tensor.unflatten(1, (-1, GROUP_TOKENS))
        tokens = self.groups.unbind(2)[::order]
        terms = tokens if source is None else source.unflatten(1, (-1, GROUP_TOKENS)).unbind(2)[::order]
        self.first = None if source is None else (tokens[0], terms[0])
        self.inside = list(zip(tokens, terms[1:], tokens[1:]))
        before = self.groups.new_zeros(self.groups[:, :1, 0].shape).repeat(1, self.groups.shape[1] + 1, 1, 1)
        chain = before.unbind(1)[::order]
        self.over = list(zip(chain, tokens[-1].unbind(1)[::order], chain[1:]))
        self.before = before[:, 1:] if reverse else before[:, :-1]
        self.total = chain[-1]

    def __call__(self, carry: torch.Tensor) -> torch.Tensor:
        """Sums on from `carry` (rows, H, p); returns the sum over all tokens, in the carry's dtype."""
        if self.first is not None:
            self.first[0].copy_(self.first[1])
        for total, term, result in itertools.chain(self.inside, self.over):
            torch.add(total, term, out=result)
        self.groups.add_((self.before + carry.to(self.total.dtype).unsqueeze(1)).unsqueeze(2))
        return carry + self.total


class _Workspace:
    """Tensors for one length of chunk, a multiple of GROUP_TOKENS, and the running sums between them.

    Each is named after what it holds first; later steps write over it, so that the whole stays in the cache.
    """

    def __init__(self, w: torch.Tensor, tokens: int, dtype: torch.dtype, backward: bool):
        rows, _, H, p = w.shape

        def new():
            return w.new_empty(rows, tokens, H, p, dtype=dtype)

        self.x, self.sq, self.sum_sq = new(), new(), new()
        self.add_up_sq = _RunningSum(self.sum_sq, source=self.sq)
        if not backward:
            self.add_up_weighted_sq = _RunningSum(self.sq)
            return
        self.grad, self.sum_weighted_sq, self.grad_quotient, self.inverse = new(), new(), new(), new()
        self.add_up_weighted_sq = _RunningSum(self.sum_weighted_sq)
        self.add_up_grad_sq = _RunningSum(self.sum_sq, reverse=True)
        self.add_up_grad_weighted_sq = _RunningSum(self.grad_quotient, reverse=True)


def _forward_chunk(space: _Workspace, tokens: ForwardTokens, temp: torch.Tensor, sums: TSSAState) -> ForwardChunk:
    """One chunk: fills the output, goes on from `sums`."""
    padding, count_tokens = tokens.padding, tokens.w.shape[1]
    x = _load(tokens.w, padding, space.x)
    may_be_floored = _may_be_floored(sums.sum_sq)
    sq = torch.mul(x, x, out=space.sq)
    sum_sq = space.add_up_sq(sums.sum_sq)
    if may_be_floored:
        space.sum_sq.clamp_min_(EPS_SUM_SQ)
    ratio = torch.div(sq, space.sum_sq, out=space.sum_sq)
    score = ratio.sum(-1)[:, :count_tokens].add_(tokens.bias, alpha=tokens.w.shape[-1])
    membership = membership_of(score, temp, padding)

    weight = _pad_tokens(membership, x.shape[1])
    sq.mul_(weight.unsqueeze(-1))
    sum_weighted_sq = space.add_up_weighted_sq(sums.sum_weighted_sq)
    count = weight.cumsum(1)
    sum_membership = sums.sum_membership + count[:, -1]
    count.add_(sums.sum_membership.to(temp.dtype).unsqueeze(1)).add_(EPS_MEMBERSHIP)
    # -x Pi / (1 + N / D), as -x Pi D / (N + D)
    numerator = torch.mul(x, (weight * count).neg_().unsqueeze(-1), out=ratio)
    denominator = sq.add_(count.unsqueeze(-1))
    torch.div(numerator[:, :count_tokens], denominator[:, :count_tokens], out=tokens.output)
    return ForwardChunk(membership, score, TSSAState(sum_sq, sum_weighted_sq, sum_membership))


def _backward_chunk(
    space: _Workspace, tokens: BackwardTokens, temp: torch.Tensor, sums: TSSAState, grad_sums: TSSAState
) -> BackwardChunk:
    """One chunk: fills the gradient of w; `grad_sums` are the gradients of the sums after the chunk."""
    padding, count_tokens, size = tokens.padding, tokens.w.shape[1], space.sq.shape[1]
    x, grad = _load(tokens.w, padding, space.x), _load(tokens.grad_output, padding, space.grad)
    membership, score = _pad_tokens(tokens.membership, size), _pad_tokens(tokens.score, size)
    weight = membership.unsqueeze(-1)
    sq = torch.mul(x, x, out=space.sq)
    count = membership.cumsum(1).add_(sums.sum_membership.unsqueeze(1)).add_(EPS_MEMBERSHIP)

    grad_membership, grad_weighted_sq, grad_sum_membership = _output_to_membership(
        space, x, grad, membership, count, sums, grad_sums
    )
    if tokens.grad_membership is not None:
        grad_membership[:, :count_tokens] += tokens.grad_membership

    # membership -> score: the one step that joins the heads
    grad_logit = grad_membership.sub_((membership * grad_membership).sum(-1, keepdim=True)).mul_(membership)
    grad_temp = (grad_logit * score).sum((0, 1))
    grad_score = grad_logit.mul_(temp)

    grad_sq, grad_sum_sq = _score_to_squares(space, sq, grad_score, sums, grad_sums)
    grad_sq.addcmul_(space.grad_quotient, weight)
    weighted_count = (membership * count).unsqueeze(-1)
    grad_x = space.grad.mul_(weighted_count.neg_()).addcmul_(grad_sq, x, value=2)[:, :count_tokens]
    tokens.grad_w.copy_(grad_x if padding is None else grad_x.masked_fill_(padding[..., None, None], 0))
    grads = TSSAState(grad_sum_sq, grad_weighted_sq, grad_sum_membership)
    return BackwardChunk(grad_score[:, :count_tokens], grad_temp, grads)


def _output_to_membership(
    space: _Workspace,
    x: torch.Tensor,
    grad: torch.Tensor,
    membership: torch.Tensor,
    count: torch.Tensor,
    sums: TSSAState,
    grad_sums: TSSAState,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From the output to the running sums N and D (`count`) and the membership.

    Leaves g / (N + D) in `space.grad` and the gradients of N's terms in `space.grad_quotient`.

    Returns:
        The gradients of the membership, and of the sums of weighted squares and of memberships before the chunk.
    """
    weight = membership.unsqueeze(-1)
    sum_weighted_sq = torch.mul(space.sq, weight, out=space.sum_weighted_sq)
    space.add_up_weighted_sq(sums.sum_weighted_sq)
    inverse = torch.add(sum_weighted_sq, count.unsqueeze(-1), out=space.inverse).reciprocal_()
    torch.mul(grad, inverse, out=space.grad)
    quotient = torch.mul(space.grad, x, out=space.grad_quotient)
    grad_membership = quotient.sum(-1).mul_(count).neg_()
    quotient.mul_(inverse)  # g x / (N + D)^2
    product = torch.mul(quotient, sum_weighted_sq, out=sum_weighted_sq)
    grad_count = product.sum(-1).mul_(membership).neg_()
    quotient.mul_((membership * count).unsqueeze(-1))
    grad_weighted_sq = space.add_up_grad_weighted_sq(grad_sums.sum_weighted_sq)
    grad_counts = suffix_sum(grad_count)
    grad_sum_membership = grad_sums.sum_membership + grad_counts[:, 0]
    grad_counts.add_(grad_sums.sum_membership.to(membership.dtype).unsqueeze(1))
    grad_membership += torch.mul(space.sq, quotient, out=product).sum(-1) + grad_counts
    return grad_membership, grad_weighted_sq, grad_sum_membership


def _score_to_squares(
    space: _Workspace, sq: torch.Tensor, grad_score: torch.Tensor, sums: TSSAState, grad_sums: TSSAState
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the score to the squares, by way of their running sums: their gradient, and that of the sum before the chunk."""
    space.add_up_sq(sums.sum_sq)
    floored = space.sum_sq < EPS_SUM_SQ if _may_be_floored(sums.sum_sq) else None
    if floored is not None:
        space.sum_sq.clamp_min_(EPS_SUM_SQ)
    inverse = space.sum_sq.reciprocal_()
    grad_ratio = torch.mul(inverse, grad_score.unsqueeze(-1), out=space.inverse)
    loss = inverse.mul_(sq).mul_(grad_ratio)  # minus the gradient of a running sum, in the same tensor
    if floored is not None:
        loss.masked_fill_(floored, 0)
    grad_sum_sq = space.add_up_grad_sq(grad_sums.sum_sq.neg()).neg()
    return grad_ratio.sub_(loss), grad_sum_sq


def _may_be_floored(sum_sq: torch.Tensor) -> bool:
    """Whether running sums of squares that go on from this one can lie below the floor; true where looking is costly."""
    return sum_sq.device.type != "cpu" or bool((sum_sq < EPS_SUM_SQ).any())  # elsewhere a look would wait for the device


def _round_up(tokens: int) -> int:
    return -(-tokens // GROUP_TOKENS) * GROUP_TOKENS


def _load(x: torch.Tensor, padding: torch.Tensor | None, buffer: torch.Tensor) -> torch.Tensor:
    """A chunk `x` in the buffer's dtype and length, 0 at padding (not multiplied: it may hold NaN) and past the end."""
    if padding is None and x.shape == buffer.shape and x.dtype == buffer.dtype:
        return x
    real = buffer[:, : x.shape[1]]
    real.copy_(x)
    if padding is not None:
        real.masked_fill_(padding[..., None, None], 0)
    buffer[:, x.shape[1] :] = 0
    return buffer


def _pad_tokens(x: torch.Tensor, tokens: int) -> torch.Tensor:
    return x if x.shape[1] == tokens else F.pad(x, (0, 0, 0, tokens - x.shape[1]))


def suffix_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums over the tokens (dimension 1) from each one to the last."""
    return x.flip(1).cumsum(1).flip(1)
