# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Running sums over a chunk, plain or decayed, and the gradient of what decays them, for the engine of tssa_chunks.py."""

import itertools
from typing import NamedTuple

import torch
from torch.nn import functional as F

from .tssa_state import sequence_starts


GROUP_TOKENS = 16  # tokens summed one after the other within a chunk


class Way(NamedTuple):
    """Factors on the way through a chunk, onwards for sums or back for their gradients."""

    inside: torch.Tensor  # (rows, groups, tokens, H or 1, 1) from outside a group to each token
    to_borders: torch.Tensor  # (rows, groups + 1, H or 1, 1) from outside the chunk to each border of groups


class Factors(NamedTuple):
    """By what decayed sums are multiplied in a chunk; their gradients a token's factor multiplies once they have passed it."""

    tokens: tuple[torch.Tensor, ...]  # of the tokens by place in a group, (rows, groups, H or 1, 1)
    groups: tuple[torch.Tensor, ...]  # (rows, H or 1, 1) through each group
    chunk: torch.Tensor  # the same through the chunk
    onwards: Way
    back: Way | None


def factors_of(log_decay: torch.Tensor, chunks: int, tokens: int, backward: bool) -> list[Factors]:
    """For each chunk of `log_decay` (rows, chunks * tokens, H or 1) its factors, those of several tokens as products.

    Chunks are made up to whole groups with factors of 1; `back` is there if asked for.
    """
    logs = F.pad(log_decay.unflatten(1, (chunks, tokens)), (0, 0, 0, round_up(tokens) - tokens))
    each = logs.exp().unflatten(2, (-1, GROUP_TOKENS)).unsqueeze(-1)
    inside = each.cumprod(3)
    groups = inside[:, :, :, -1]
    borders = _products_before(groups)
    fields = [each, groups, borders[:, :, -1], inside, borders]
    if backward:
        fields += [_products_before(each.flip(3).flatten(1, 2))[:, :, :-1].flip(2).view_as(each)]
        fields += [_products_before(groups.flip(2)).flip(2)]
    return [
        Factors(each.unbind(2), groups.unbind(1), chunk, Way(*ways[:2]), Way(*ways[2:]) if backward else None)
        for each, groups, chunk, *ways in zip(*(x.unbind(1) for x in fields))
    ]


def round_up(tokens: int) -> int:
    """To whole groups."""
    return -(-tokens // GROUP_TOKENS) * GROUP_TOKENS


def _products_before(x: torch.Tensor) -> torch.Tensor:
    """Products over dimension 2 of (..., n, H or 1, 1) before each and after the last, n + 1."""
    return F.pad(x.cumprod(2), (0, 0, 0, 0, 1, 0), value=1.0)


class RunningSum:
    """Running sums over the tokens of a chunk, (rows, tokens, H, p), in a tensor that every chunk uses again.

    They are added up inside groups of tokens, then over the groups, and then joined. Whole tensors are added, which is
    faster than `torch.cumsum` along this dimension, and a token's sum takes in nothing of the tokens after it (before it, in
    reverse), not even a zero times infinity.

    Args:
        tensor: where the sums go.
        source: what is summed; `tensor` itself if None.
        reverse: sum from the last token back: from gradients of a decayed sum to those of its terms.
    """

    def __init__(self, tensor: torch.Tensor, source: torch.Tensor | None = None, reverse: bool = False):
        self.source, self.order = source, -1 if reverse else 1
        self.groups = tensor.unflatten(1, (-1, GROUP_TOKENS))
        self.inside: list[tuple[torch.Tensor, ...]] = []

    def _make_views(self) -> None:
        """The views between which sums are added up, when they are first needed: there are many."""
        order, reverse = self.order, self.order < 0
        tokens = self.groups.unbind(2)[::order]
        terms = tokens if self.source is None else self.source.unflatten(1, (-1, GROUP_TOKENS)).unbind(2)[::order]
        self.first = None if self.source is None else (tokens[0], terms[0])
        self.inside = list(zip(tokens, terms[1:], tokens[1:]))
        before = self.groups.new_zeros(self.groups[:, :1, 0].shape).repeat(1, self.groups.shape[1] + 1, 1, 1)
        self.ends, chain = tokens[-1], before.unbind(1)[::order]
        self.over = list(zip(chain, self.ends.unbind(1)[::order], chain[1:]))
        if reverse:  # where the ends go that factors have multiplied
            self.scaled_ends = torch.empty_like(self.ends)
            self.over_scaled = list(zip(chain, self.scaled_ends.unbind(1)[::order], chain[1:]))
        self.before, self.total = before, chain[-1]

    def __call__(self, carry: torch.Tensor, factors: Factors | None = None) -> torch.Tensor:
        """Sums on from `carry` (rows, H, p); returns the sum over all tokens, in the carry's dtype.

        Leaves in `before_groups` and `after_groups` the sums that each group goes on from and ends with, (rows, groups, H, p).
        """
        if not self.inside:
            self._make_views()
        if self.first is not None:
            self.first[0].copy_(self.first[1])
        if factors is None:
            for total, term, result in itertools.chain(self.inside, self.over):
                torch.add(total, term, out=result)
            self._keep_borders(self.before + carry.to(self.total.dtype).unsqueeze(1))
            self.groups.add_(self.before_groups.unsqueeze(2))
            return carry + self.total
        way, tokens, over = factors.onwards, factors.tokens[1:], self.over
        if self.order < 0:
            assert factors.back is not None  # as they were asked for
            way, tokens, over = factors.back, factors.tokens[:0:-1], self.over_scaled
        for (total, term, result), factor in zip(self.inside, tokens):
            torch.addcmul(term, total, factor, out=result)
        if self.order < 0:
            torch.mul(self.ends, factors.tokens[0], out=self.scaled_ends)
        for (total, term, result), factor in zip(over, factors.groups[:: self.order]):
            torch.addcmul(term, total, factor, out=result)
        self._keep_borders(torch.addcmul(self.before, carry.to(self.total.dtype).unsqueeze(1), way.to_borders))
        self.groups.addcmul_(self.before_groups.unsqueeze(2), way.inside)
        return torch.addcmul(self.total.to(carry.dtype), carry, factors.chunk.to(carry.dtype))

    def _keep_borders(self, sums: torch.Tensor) -> None:
        """Of the sums at the borders of groups, (rows, groups + 1, H, p)."""
        borders = sums[:, :-1], sums[:, 1:]
        self.before_groups, self.after_groups = borders[:: self.order]


class CountedSums:
    """Running sums of weighted squares N, (rows, tokens, H, p), and of the memberships D that they are divided by.

    Sums that factors decay lie in one tensor, D as a channel after those of N: half the steps, for the cost of one.

    Args:
        terms: where the terms of N are put and its sums left, if they are plain.
        decayed: whether sums are decayed; their terms are put into the attribute `terms`, in which the sums are left.
        reverse: as for `RunningSum`.
    """

    def __init__(self, terms: torch.Tensor, decayed: bool, reverse: bool = False):
        self.terms, self.reverse, self.both = terms, reverse, None
        if decayed:
            self.both = terms.new_empty(*terms.shape[:-1], terms.shape[-1] + 1)
            self.terms = self.both[..., :-1]
        self.add_up = RunningSum(terms if self.both is None else self.both, reverse=reverse)

    def __call__(
        self, counted: torch.Tensor, carry_sq: torch.Tensor, carry_count: torch.Tensor, factors: Factors | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """D from its terms `counted` (rows, tokens, H), and the last N and D, on from those of `carry`.

        D lies in the tensor that the next call writes over.
        """
        if self.both is None:
            sums = suffix_sum(counted) if self.reverse else counted.cumsum(1)
            last_count = carry_count + sums[:, 0 if self.reverse else -1]
            return sums.add_(carry_count.to(counted.dtype).unsqueeze(1)), self.add_up(carry_sq), last_count
        self.both[..., -1] = counted
        last = self.add_up(torch.cat([carry_sq, carry_count.unsqueeze(-1)], dim=-1), factors)
        return self.both[..., -1], last[..., :-1], last[..., -1]


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


def suffix_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums over the tokens (dimension 1) from each one to the last."""
    return x.flip(1).cumsum(1).flip(1)
