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
from torch.nn import functional as F

from .tssa_reference import (
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


GROUP_TOKENS = 16  # tokens summed one after the other within a chunk
BLOCK_GROUPS = 4  # groups of decayed sums that are summed one after the other


class GroupFactors(NamedTuple):
    """By what decayed sums over groups are multiplied, block by block of groups, in the order of their way."""

    each: tuple[torch.Tensor, ...]  # through the groups by place in a block, (rows, blocks, H or 1, 1)
    inside: torch.Tensor  # (rows, blocks, groups, H or 1, 1) from outside a block through each group
    blocks: tuple[torch.Tensor, ...]  # (rows, H or 1, 1) through each block


class Way(NamedTuple):
    """Factors on the way through a chunk, onwards for sums or back for their gradients."""

    inside: torch.Tensor  # (rows, groups, tokens, H or 1, 1) from outside a group to each token
    to_groups: torch.Tensor  # (rows, groups, H or 1, 1) from outside the chunk to each group
    groups: GroupFactors


class Factors(NamedTuple):
    """By what decayed sums are multiplied in a chunk; their gradients a token's factor multiplies once they have passed it."""

    tokens: tuple[torch.Tensor, ...]  # of the tokens by place in a group, (rows, groups, H or 1, 1)
    chunk: torch.Tensor  # (rows, H or 1, 1) through the chunk
    onwards: Way
    back: Way | None
    # what a chunk's forward found and its backward need not find again
    counted: torch.Tensor | None = None  # (rows, tokens, H) decayed sums of memberships
    floored: bool | None = None  # whether decayed sums of squares may lie below their floor


def factors_of(log_decay: torch.Tensor, chunks: int, tokens: int, backward: bool) -> list[Factors]:
    """For each chunk of `log_decay` (rows, chunks * tokens, H or 1) its factors, exp of sums that are at most 0.

    Chunks are made up to whole groups with factors of 1; `back` is there if asked for.
    """
    rows = log_decay.shape[0]
    logs = log_decay.unflatten(1, (chunks, tokens)).transpose(0, 1).flatten(0, 1)
    logs = pad_tokens(logs, round_up(tokens)).unflatten(1, (-1, GROUP_TOKENS)).unsqueeze(-1)
    sums = logs.cumsum(2)
    through, inside = sums[:, :, -1], sums.exp()
    before = _sums_before(through).exp()
    fields = [logs.exp(), before[:, -1], inside, before[:, :-1], *_through_blocks(through, inside[:, :, -1])]
    if backward:
        fields.append(_sums_before(logs.flip(2).flatten(0, 1))[:, :-1].flip(1).view_as(logs).exp())
        fields.append(_sums_before(through.flip(1))[:, :-1].flip(1).exp())
        fields += (x.flip(1, 2) for x in _through_blocks(through.flip(1), inside[:, :, -1].flip(1)))
    return [
        Factors(each.unbind(2), chunk, _way(ways[:4]), _way(ways[4:], order=-1) if backward else None)
        for each, chunk, *ways in zip(*(x.unflatten(0, (chunks, rows)).unbind() for x in fields))
    ]


def _way(fields: Sequence[torch.Tensor], order: int = 1) -> Way:
    inside, to_groups, each, in_blocks = fields
    through = in_blocks[:, :, -1 if order > 0 else 0]
    return Way(inside, to_groups, GroupFactors(each.unbind(2), in_blocks, through.unbind(1)[::order]))


def _through_blocks(logs: torch.Tensor, through: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors through groups (..., groups, H or 1, 1), with their logarithms, as those through each and on from its block."""
    size = -1, block_size(through.shape[1])
    return through.unflatten(1, size), logs.unflatten(1, size).cumsum(2).exp()


def round_up(tokens: int) -> int:
    """To whole groups."""
    return -(-tokens // GROUP_TOKENS) * GROUP_TOKENS


def block_size(groups: int) -> int:
    """In how many groups a block is; all are one block where they cannot be cut evenly."""
    return BLOCK_GROUPS if groups % BLOCK_GROUPS == 0 else groups


def _sums_before(x: torch.Tensor) -> torch.Tensor:
    """Sums over dimension 1 of (..., n, H or 1, 1) before each and after the last, n + 1."""
    return F.pad(x.cumsum(1), (0, 0, 0, 0, 1, 0))


class RunningSum:
    """Running sums over the tokens of a chunk, (rows, tokens, H, p), in a tensor that every chunk uses again.

    They are added up inside groups of tokens, then over the groups, and then joined. Whole tensors are added, which is
    faster than `torch.cumsum` along this dimension, and a token's sum takes in nothing of the tokens after it (before it, in
    reverse), not even a zero times infinity.

    Args:
        tensor: where the sums go.
        source: what is summed; `tensor` itself if None.
        reverse: sum from the last token back: from gradients of a sum to those of its terms.
    """

    def __init__(self, tensor: torch.Tensor, source: torch.Tensor | None = None, reverse: bool = False):
        self.source, self.order = source, -1 if reverse else 1
        self.groups = tensor.unflatten(1, (-1, GROUP_TOKENS))
        self.inside: list[tuple[torch.Tensor, ...]] = []

    def _make_views(self) -> None:
        """The views between which sums are added up, when they are first needed: there are many."""
        tokens = self.groups.unbind(2)[:: self.order]
        terms = tokens if self.source is None else self.source.unflatten(1, (-1, GROUP_TOKENS)).unbind(2)[:: self.order]
        self.first = None if self.source is None else (tokens[0], terms[0])
        self.inside = list(zip(tokens, terms[1:], tokens[1:]))
        self.ends = tokens[-1]
        rows, groups, _, H, p = self.groups.shape
        self.over = self.groups.new_zeros(rows, groups + 1, H, p)
        self.before, self.after = (self.over[:, :-1], self.over[:, 1:])[:: self.order]
        self.total = self.after[:, -1 if self.order > 0 else 0]
        self._make_views_of_groups()

    def _make_views_of_groups(self) -> None:
        chain = self.over.unbind(1)[:: self.order]
        self.over_groups = list(zip(chain, self.ends.unbind(1)[:: self.order], chain[1:]))

    def _start(self) -> None:
        if not self.inside:
            self._make_views()
        if self.first is not None:
            self.first[0].copy_(self.first[1])

    def __call__(self, carry: torch.Tensor, factors: Factors | None = None) -> torch.Tensor:
        """Sums on from `carry` (rows, H, p); returns the sum over all tokens, in the carry's dtype.

        Leaves the sums that each group goes on from, (rows, groups, H, p), in `before_groups`.
        """
        self._start()
        for total, term, result in itertools.chain(self.inside, self.over_groups):
            torch.add(total, term, out=result)
        self.before_groups = self.before + carry.to(self.total.dtype).unsqueeze(1)
        self.groups.add_(self.before_groups.unsqueeze(2))
        return carry + self.total

    def of_column(
        self, x: torch.Tensor, carry: torch.Tensor, factors: Factors | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of x (rows, tokens, H) on from `carry` (rows, H): the sums, and the last in the carry's dtype.

        Decayed ones lie in the tensor that the next call writes over.
        """
        sums = suffix_sum(x) if self.order < 0 else x.cumsum(1)
        total = carry + sums[:, 0 if self.order < 0 else -1]
        return sums.add_(carry.to(x.dtype).unsqueeze(1)), total

    def last_sums(self) -> torch.Tensor:
        """Of each group the sum at its last token in order of time, (rows, groups, H, p)."""
        return self.groups[:, :, -1].clone()

    def may_be_below(self, floor: float, carry: torch.Tensor, factors: Factors | None) -> bool:
        """Whether sums just formed on from `carry`, of terms at least 0, lie below a floor; true if looking costs much."""
        if carry.device.type != "cpu":
            return True  # a look would wait for the device
        return self._are_below(floor, carry, factors)

    def _are_below(self, floor: float, carry: torch.Tensor, factors: Factors | None) -> bool:
        return not _reaches(carry, floor)  # they only grow


class DecayedSum(RunningSum):
    """The same of sums that a token's factor multiplies before it is added; in reverse, of their gradients.

    Over the groups they are added up block by block of them.
    """

    def _make_views_of_groups(self) -> None:
        blocks = self.after.unflatten(1, (-1, block_size(self.after.shape[1])))
        places = blocks.unbind(2)[:: self.order]
        ends = places[-1].unbind(1)[:: self.order]
        self.in_blocks, self.over_blocks = list(itertools.pairwise(places)), list(itertools.pairwise(ends))
        # what is still to be joined with the blocks before; their last sums are already
        self.later, self.earlier = (slice(1, None), slice(None, -1))[:: self.order]
        self.joined = blocks[:, self.later, self.earlier], places[-1][:, self.earlier].unsqueeze(2)

    def __call__(self, carry: torch.Tensor, factors: Factors | None = None) -> torch.Tensor:
        assert factors is not None
        self._start()
        if self.order > 0:
            way, tokens = factors.onwards, factors.tokens[1:]
        else:
            assert factors.back is not None  # as they were asked for
            way, tokens = factors.back, factors.tokens[:0:-1]
        for (total, term, result), factor in zip(self.inside, tokens):
            torch.addcmul(term, total, factor, out=result)
        if self.order > 0:
            self.after.copy_(self.ends)
        else:
            torch.mul(self.ends, factors.tokens[0], out=self.after)
        self._add_up_groups(way.groups)
        self.before_groups = torch.addcmul(self.before, carry.to(self.total.dtype).unsqueeze(1), way.to_groups)
        self.groups.addcmul_(self.before_groups.unsqueeze(2), way.inside)
        return torch.addcmul(self.total.to(carry.dtype), carry, factors.chunk.to(carry.dtype))

    def _add_up_groups(self, factors: GroupFactors) -> None:
        for (before, result), factor in zip(self.in_blocks, factors.each[:: self.order][1:]):
            result.addcmul_(before, factor)
        for (before, result), factor in zip(self.over_blocks, factors.blocks[1:]):
            result.addcmul_(before, factor)
        if self.over_blocks:
            joined, before = self.joined
            joined.addcmul_(before, factors.inside[:, self.later, self.earlier])

    def of_column(
        self, x: torch.Tensor, carry: torch.Tensor, factors: Factors | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.groups.copy_(x.unsqueeze(-1).view_as(self.groups))
        total = self(carry.unsqueeze(-1), factors).squeeze(-1)
        return self.groups.flatten(1, 2).squeeze(-1), total

    def _are_below(self, floor: float, carry: torch.Tensor, factors: Factors | None) -> bool:
        assert factors is not None
        if factors.floored is not None:
            return factors.floored
        # within a group what was there before decays to this at least; twice the floor, for rounding
        least = self.before_groups.amin(-1, keepdim=True) * factors.onwards.inside[:, :, -1]
        if least.shape[1] == 1 or _reaches(least[:, 1:], 2 * floor):  # all but the first group, where sums may begin
            return not (_reaches(least[:, 0], 2 * floor) or _reaches(self.groups[:, 0], floor))
        return not _reaches(self.groups, floor)


def _reaches(x: torch.Tensor, floor: float) -> bool:
    """Whether no number lies below the floor, and none is NaN, behind which others may."""
    return x.amin().item() >= floor


def decay_grad(terms: torch.Tensor, after_groups: torch.Tensor) -> torch.Tensor:
    """The gradient of a chunk's `log_decay`, (rows, tokens, H), from the gradients of running sums.

    With U the gradient of a running sum N, and dN what of it comes from its own token, log gamma_t has the gradient
    G_t = gamma_t U_t N_{t-1}. Since N_t = gamma_t N_{t-1} + x_t and U_t = dN_t + gamma_{t+1} U_{t+1}, that is as well
    G_{t+1} + dN_t N_t - U_t x_t: a sum over tokens, from the end of each group of them, of what the other gradients need
    anyway.

    Args:
        terms: U x - dN N, of all sums and channels, (rows, tokens, H).
        after_groups: G of the token after each group, (rows, groups, H).
    """
    terms = terms.neg().unflatten(1, (-1, GROUP_TOKENS))
    terms[:, :, -1] += after_groups
    return terms.flip(2).cumsum(2).flip(2).flatten(1, 2)


def with_borders(log_decay: torch.Tensor | None, seq_idx: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """`log_decay` (B, T, H), or (B, T, 1) where there was none, that forgets all before a later packed sequence of a row."""
    if seq_idx is None:
        return log_decay
    starts = F.pad(sequence_starts(seq_idx)[:, 1:], (1, 0)).unsqueeze(-1)  # the first goes on from the state
    log_decay = torch.zeros(starts.shape, dtype=dtype, device=seq_idx.device) if log_decay is None else log_decay
    return log_decay.masked_fill(starts, float("-inf"))


def pad_tokens(x: torch.Tensor, tokens: int) -> torch.Tensor:
    return x if x.shape[1] == tokens else F.pad(x, (0, 0, 0, tokens - x.shape[1]))


def load_tokens(x: torch.Tensor, padding: torch.Tensor | None, buffer: torch.Tensor) -> torch.Tensor:
    """A chunk `x` in the buffer's dtype and length, 0 at padding (not multiplied: it may hold NaN) and past the end."""
    if padding is None and x.shape == buffer.shape and x.dtype == buffer.dtype:
        return x
    real = buffer[:, : x.shape[1]]
    real.copy_(x)
    if padding is not None:
        real.masked_fill_(padding[..., None, None], 0)
    buffer[:, x.shape[1] :] = 0
    return buffer


def suffix_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums over the tokens (dimension 1) from each one to the last."""
    return x.flip(1).cumsum(1).flip(1)


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
    """Causal TSSA with autograd; as `tssa_reference.causal`, but `bias` (B, T, H) and `state` are always given."""
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
