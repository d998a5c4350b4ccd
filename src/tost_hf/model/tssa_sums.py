# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Running sums over a chunk, plain or decayed, and the gradient of what decays them, for the engine of tssa_chunks.py."""

import itertools
from typing import NamedTuple

import torch
from torch.nn import functional as F


GROUP_TOKENS = 16  # tokens summed one after the other within a chunk


class Factors(NamedTuple):
    """By what decayed sums are multiplied on their way through a chunk; each but the first (rows, ..., H or 1, 1)."""

    each: torch.Tensor  # (rows, tokens, H or 1), of the tokens
    tokens: list[torch.Tensor]  # (rows, groups, ...) from each token of a group to the next
    inside: torch.Tensor  # (rows, groups, tokens, ...) from before the group to each token
    ends: torch.Tensor | None  # (rows, groups, ...) from the group's last token out of it; None for 1
    groups: list[torch.Tensor]  # (rows, ...) through each group
    before_groups: torch.Tensor  # (rows, groups, ...) from before the chunk to each group
    chunk: torch.Tensor  # through the chunk


def factors_of(log_decay: torch.Tensor | None, tokens: int, reverse: bool = False) -> Factors | None:
    """Factors from `log_decay` (rows, up to `tokens`, H or 1), each exp of a sum that is at most 0.

    In reverse they are those of gradients, which a token's factor multiplies once they have passed the token.
    """
    if log_decay is None:
        return None
    logs = pad_tokens(log_decay, tokens).unflatten(1, (-1, GROUP_TOKENS)).unsqueeze(-1)
    each = logs.exp()
    factors, each = each.unbind(2), each.flatten(1, 2).squeeze(-1)
    if not reverse:
        inside = logs.cumsum(2)
        through = inside[:, :, -1]
        before = _exclusive(through.cumsum(1), 1)
        product = through.exp()
        chunk = (before + through)[:, -1].exp()
        return Factors(each, factors[1:], inside.exp(), None, product.unbind(1), before.exp(), chunk)
    inside = logs.flip(2).cumsum(2).flip(2)
    through = inside[:, :, 0]
    before = _exclusive(through.flip(1).cumsum(1), 1)
    chunk = (before[:, -1] + through[:, 0]).exp()
    inside = torch.cat([inside[:, :, 1:], torch.zeros_like(inside[:, :, :1])], 2).exp()
    return Factors(each, factors[:0:-1], inside, factors[0], through.exp().unbind(1)[::-1], before.flip(1).exp(), chunk)


def _exclusive(sums: torch.Tensor, dim: int) -> torch.Tensor:
    """Each the one before it, and 0 first."""
    count = sums.shape[dim]
    return torch.cat([torch.zeros_like(sums.narrow(dim, 0, 1)), sums.narrow(dim, 0, count - 1)], dim)


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
        self.before = before[:, 1:] if reverse else before[:, :-1]
        self.total = chain[-1]

    def __call__(self, carry: torch.Tensor, factors: Factors | None = None) -> torch.Tensor:
        """Sums on from `carry` (rows, H, p); returns the sum over all tokens, in the carry's dtype.

        Leaves the sums that each group goes on from, (rows, groups, H, p), in `before_groups`.
        """
        if not self.inside:
            self._make_views()
        if self.first is not None:
            self.first[0].copy_(self.first[1])
        if factors is None:
            for total, term, result in itertools.chain(self.inside, self.over):
                torch.add(total, term, out=result)
            self.before_groups = self.before + carry.to(self.total.dtype).unsqueeze(1)
            self.groups.add_(self.before_groups.unsqueeze(2))
            return carry + self.total
        for (total, term, result), factor in zip(self.inside, factors.tokens):
            torch.addcmul(term, total, factor, out=result)
        if factors.ends is not None:
            torch.mul(self.ends, factors.ends, out=self.scaled_ends)
        over = self.over if factors.ends is None else self.over_scaled
        for (total, term, result), factor in zip(over, factors.groups):
            torch.addcmul(term, total, factor, out=result)
        self.before_groups = torch.addcmul(self.before, carry.to(self.total.dtype).unsqueeze(1), factors.before_groups)
        self.groups.addcmul_(self.before_groups.unsqueeze(2), factors.inside)
        return torch.addcmul(self.total.to(carry.dtype), carry, factors.chunk.to(carry.dtype))

    def of_column(self, x: torch.Tensor, carry: torch.Tensor, factors: Factors | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of x (rows, tokens, H) on from `carry` (rows, H): the sums, and the last in the carry's dtype."""
        if factors is None:
            sums = suffix_sum(x) if self.order < 0 else x.cumsum(1)
            total = carry + sums[:, 0 if self.order < 0 else -1]
            return sums.add_(carry.to(x.dtype).unsqueeze(1)), total
        self.groups.copy_(x.unsqueeze(-1).view_as(self.groups))
        total = self(carry.unsqueeze(-1), factors).squeeze(-1)
        return self.groups.flatten(1, 2).squeeze(-1).clone(), total

    def last_sums(self) -> torch.Tensor:
        """Of each group the sum at its last token in order of time, (rows, groups, H, p)."""
        return self.groups[:, :, -1].clone()


class DecayGrad:
    """Gathers the gradient of a chunk's `log_decay`, (rows, tokens, H).

    With U the gradient of a running sum N, and dN what of it comes from its own token, log gamma_t has the gradient
    G_t = gamma_t U_t N_{t-1}. Since N_t = gamma_t N_{t-1} + x_t and U_t = dN_t + gamma_{t+1} U_{t+1}, that is as well
    G_{t+1} + dN_t N_t - U_t x_t: a sum over tokens, from the end of each group of them, of what the other gradients need
    anyway.
    """

    def __init__(self, like: torch.Tensor):
        self.terms = torch.zeros_like(like)  # dN N - U x, of both large sums
        self.after_groups = like.new_zeros(())  # (rows, groups, H)
        self.alone = like.new_zeros(())  # G of the sum of memberships

    def grad(self) -> torch.Tensor:
        terms = self.terms.unflatten(1, (-1, GROUP_TOKENS))
        terms[:, :, -1] += self.after_groups
        return terms.flip(2).cumsum(2).flip(2).flatten(1, 2) + self.alone


def pad_tokens(x: torch.Tensor, tokens: int) -> torch.Tensor:
    return x if x.shape[1] == tokens else F.pad(x, (0, 0, 0, tokens - x.shape[1]))


def suffix_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums over the tokens (dimension 1) from each one to the last."""
    return x.flip(1).cumsum(1).flip(1)
