# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The eager engine of bidirectional TSSA on CPUs: a few rows at a time, in two work tensors that stay in the cache.

The forward takes the steps of `tssa_reference.bidirectional` in their order, so that rows that are not packed give the same
numbers, bit for bit. The backward is written down in closed form; for it only the input, the scores, the memberships and each
sequence's sums are kept. A packed sequence is worked on alone.

In the backward, `grad_x` is the gradient with respect to x. The output is -x Pi q with q = D / (N + D), where N and D are the
sums of weighted squares and of memberships.
"""

import itertools
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .tssa_reference import EPS_MEMBERSHIP, EPS_NORM, cache_bytes, membership_of, real_tokens, sequence_starts


GROUP_NUMBERS = cache_bytes()  # size of a group's work tensors


class _Sums(NamedTuple):
    """Totals over the tokens of sequences."""

    sum_sq: torch.Tensor  # (sequences, 1, H, p)
    sum_weighted_sq: torch.Tensor  # (sequences, 1, H, p)
    counted: torch.Tensor  # (sequences, 1, H, 1), of memberships, plus EPS_MEMBERSHIP


class _Forward(NamedTuple):
    """What a group's forward returns, beside the output."""

    membership: torch.Tensor  # (rows, tokens, H)
    score: torch.Tensor  # (rows, tokens, H)
    sums: _Sums


# How the work is cut ----------------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Sequences of one length that are worked on together."""

    rows: slice
    tokens: slice
    sequences: slice  # their places among all sequences

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Their part of x (B, T, ...)."""
        return x[self.rows, self.tokens]


def _cut(w: torch.Tensor, seq_idx: torch.Tensor | None) -> list[_Group]:
    """Groups of rows, or packed sequences one by one.

    A group has at least as many rows as there are threads, if w has: torch then adds up each row as it would in all of w.
    """
    B, T, H, p = w.shape
    if seq_idx is None:
        rows = max(GROUP_NUMBERS // max(1, T * H * p), torch.get_num_threads())
        count = max(1, B // rows)
        borders = [B * i // count for i in range(count + 1)]
        return [_Group(slice(a, b), slice(0, T), slice(a, b)) for a, b in itertools.pairwise(borders)]
    starts = sequence_starts(seq_idx).nonzero().tolist()
    groups = []
    for index, ((row, start), (next_row, end)) in enumerate(zip(starts, [*starts[1:], [B, 0]])):
        tokens = slice(start, end if next_row == row else T)
        groups.append(_Group(slice(row, row + 1), tokens, slice(index, index + 1)))
    return groups


class _Workspace:
    """Two tensors that all groups use, one after the other."""

    def __init__(self, w: torch.Tensor, groups: list[_Group], dtype: torch.dtype):
        numbers = max((group.of(w).numel() for group in groups), default=0)
        self.tensors = [w.new_empty(numbers, dtype=dtype) for _ in range(2)]

    def like(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Both, in the shape of x."""
        return [tensor[: x.numel()].view(x.shape) for tensor in self.tensors]


# The operator -----------------------------------------------------------------------------------------------------------


def bidirectional_tssa(
    w: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None, seq_idx: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bidirectional TSSA with autograd; as `tssa_reference.bidirectional`."""
    return _BidirectionalTSSA.apply(w, temp, padding, _cut(w, seq_idx))


class _BidirectionalTSSA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, temp, padding, groups):
        H, p = w.shape[2:]
        sequences = groups[-1].sequences.stop if groups else 0
        output = torch.empty_like(w, memory_format=torch.contiguous_format)
        membership, score = (w.new_empty(w.shape[:3], dtype=temp.dtype) for _ in range(2))
        sums = _Sums(*(w.new_empty(sequences, 1, H, size, dtype=temp.dtype) for size in (p, p, 1)))
        space = _Workspace(w, groups, temp.dtype)
        for group in groups:
            done = _forward_group(space, group.of(w), temp, None if padding is None else group.of(padding), group.of(output))
            group.of(membership).copy_(done.membership)
            group.of(score).copy_(done.score)
            for x, value in zip(sums, done.sums):
                x[group.sequences] = value
        ctx.save_for_backward(w, temp, padding, membership, score, *sums)
        ctx.set_materialize_grads(False)
        ctx.groups = groups
        return output, membership

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, grad_membership):
        w, temp, padding, membership, score, *sums = ctx.saved_tensors
        grad_output = w.new_zeros(()).expand_as(w) if grad_output is None else grad_output
        if grad_membership is not None and padding is not None:
            grad_membership = grad_membership.masked_fill(padding.unsqueeze(-1), 0)
        grad_w = torch.empty_like(w, memory_format=torch.contiguous_format)
        grad_temp = torch.zeros_like(temp)
        space = _Workspace(w, ctx.groups, temp.dtype)
        for group in ctx.groups:
            hidden = None if padding is None else group.of(padding)
            x, grad = (real_tokens(group.of(tensor), hidden, temp.dtype) for tensor in (w, grad_output))
            kept = _Forward(group.of(membership), group.of(score), _Sums(*(tensor[group.sequences] for tensor in sums)))
            by_membership = None if grad_membership is None else group.of(grad_membership)
            grad_temp += _backward_group(space, x, grad, by_membership, temp, kept, group.of(grad_w))
        return grad_w, grad_temp, None, None


# One group --------------------------------------------------------------------------------------------------------------


def _forward_group(
    space: _Workspace, w: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None, output: torch.Tensor
) -> _Forward:
    """Fills the output of tokens w (rows, tokens, H, p)."""
    x = real_tokens(w, padding, temp.dtype)
    sq, ratio = space.like(x)
    torch.mul(x, x, out=sq)
    sum_sq = sq.sum(1, keepdim=True)
    score = torch.div(sq, sum_sq.clamp_min(EPS_NORM**2), out=ratio).sum(-1)
    membership = membership_of(score, temp, padding)
    weight = membership.unsqueeze(-1)
    sum_weighted_sq = sq.mul_(weight).sum(1, keepdim=True)
    count = (membership.sum(1, keepdim=True) + EPS_MEMBERSHIP).unsqueeze(-1)
    moment = sum_weighted_sq / count
    torch.div(torch.mul(x, weight, out=ratio), (1 + moment).neg_(), out=output)
    return _Forward(membership, score, _Sums(sum_sq, sum_weighted_sq, count))


def _backward_group(
    space: _Workspace,
    x: torch.Tensor,
    grad: torch.Tensor,
    grad_membership: torch.Tensor | None,
    temp: torch.Tensor,
    kept: _Forward,
    grad_w: torch.Tensor,
) -> torch.Tensor:
    """Fills the gradient of tokens x (rows, tokens, H, p) that are 0, as is `grad`, at padding; returns that of `temp`."""
    (N, D), membership = kept.sums[1:], kept.membership
    weight, quotient = membership.unsqueeze(-1), D / (N + D)
    weighted_grad, product = space.like(x)

    # output -> N, D
    torch.mul(grad, weight, out=weighted_grad)
    by_sums = torch.mul(weighted_grad, x, out=product).sum(1, keepdim=True).div_(N + D).div_(N + D)
    grad_N, grad_D = by_sums * D, -(by_sums * N).sum(-1)

    # N, D, output -> membership
    product = torch.mul(x, grad_N, out=product).addcmul_(grad, quotient, value=-1).mul_(x)
    grad_pi = product.sum(-1).add_(grad_D)
    if grad_membership is not None:
        grad_pi += grad_membership

    # membership -> score: the one step that joins the heads
    grad_logit = grad_pi.sub_((membership * grad_pi).sum(-1, keepdim=True)).mul_(membership)
    grad_temp = (grad_logit * kept.score).sum((0, 1))
    grad_score = grad_logit.mul_(temp).unsqueeze(-1)

    # score, N, output -> x; the factor 2 of the gradient of a square goes into the smaller tensors
    inverse = kept.sums.sum_sq.clamp_min(EPS_NORM**2).reciprocal_()
    loss = torch.mul(x, grad_score, out=product).mul_(x).sum(1, keepdim=True)
    grad_sum_sq = loss.mul_(inverse).mul_(inverse).masked_fill_(kept.sums.sum_sq < EPS_NORM**2, 0).mul_(-2)
    torch.addcmul(grad_sum_sq, grad_score, inverse.mul_(2), out=product)
    product.addcmul_(weight, grad_N.mul_(2)).mul_(x)
    torch.addcmul(product, weighted_grad, quotient, value=-1, out=grad_w)
    return grad_temp
