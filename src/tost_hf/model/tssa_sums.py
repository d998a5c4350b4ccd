# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Running sums over a chunk, plain or decayed, and the gradient of what decays them, for the engine of tssa_chunks.py."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from .tssa_state import sequence_starts


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
