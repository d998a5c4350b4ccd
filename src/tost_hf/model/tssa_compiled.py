# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Causal TSSA under torch.compile on a CPU: one opaque operator, whose chunks run code that Inductor made once for all layers.

The caller's graph sees an operator with a closed-form backward, so it does not grow with the formulas. Inside, chunks of
many tokens run compiled formulas; what is shorter (ends, packed sequences) runs the eager ones of tssa.py.

Inductor has no fused running sum on CPUs: here one is unrolled over GROUP_TOKENS consecutive tokens, each in a tensor of its
own (a *phase*), and only the sums before each group pass through memory.
"""

import functools
import re
import warnings

import torch

from .tssa import (
    EPS_MEMBERSHIP,
    EPS_SUM_SQ,
    CompiledChunks,
    _membership,
    _suffix_sum,
    _sum_shapes,
    causal_backward,
    causal_forward,
)


GROUP_TOKENS = 8  # tokens of a group: their sums are unrolled
BLOCK_GROUPS = 8  # groups of a block: their sums are masked ones, block by block
CHUNK_TOKENS = 2 * GROUP_TOKENS * BLOCK_GROUPS  # of the shortest chunks; longer ones have twice as many, and so on
CHUNK_NUMBERS = 2**19  # size of a chunk's tensors, which stay in the cache


# Running sums over a chunk -------------------------------------------------------------------------------------------


def _phases(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(rows, tokens, ...) as GROUP_TOKENS tensors (rows, blocks, groups, ...), of the first, second, ... tokens of groups."""
    return x.unflatten(1, (-1, BLOCK_GROUPS, GROUP_TOKENS)).unbind(3)


def _column_phases(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Phases of (rows, tokens, H), to be multiplied with those of (rows, tokens, H, p)."""
    return _phases(x.unsqueeze(-1))


def _join(phases: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(phases, 3).flatten(1, 3)


def _exclusive_sum(x: torch.Tensor, dim: int, reverse: bool) -> torch.Tensor:
    """Sums of what comes before (after, in reverse) along a short dimension; nothing of the rest goes in, not even NaN."""
    place = torch.arange(x.shape[dim], device=x.device)
    earlier = place > place[:, None] if reverse else place < place[:, None]
    earlier = earlier.view(*earlier.shape, *[1] * (x.ndim - dim - 1))
    return torch.where(earlier, x.unsqueeze(dim), 0).sum(dim + 1)


def _sums_before(phases: list[torch.Tensor], carry: torch.Tensor, reverse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums on from `carry` before each group (rows, blocks, groups, H, p), and after the chunk in the carry's dtype."""
    groups = functools.reduce(torch.add, phases)
    blocks = groups.sum(2)
    before = _exclusive_sum(blocks, 1, reverse) + carry.to(groups.dtype).unsqueeze(1)
    return _exclusive_sum(groups, 2, reverse) + before.unsqueeze(2), carry + blocks.sum(1)


def _running_sums(before: torch.Tensor, phases: list[torch.Tensor], reverse: bool = False) -> list[torch.Tensor]:
    """The phases' inclusive running sums, on from those before each group."""
    sums = []
    for x in reversed(phases) if reverse else phases:
        before = before + x
        sums.append(before)
    return sums[::-1] if reverse else sums


# The formulas of a chunk ---------------------------------------------------------------------------------------------


def _forward_formulas(x, bias, padding, temp, sum_sq, sum_weighted_sq, sum_membership):
    """Of real tokens: the output, and what `tssa._forward_chunk` returns."""
    x = _phases(x)
    sq = [a * a for a in x]
    before, sum_sq = _sums_before(sq, sum_sq)
    denominators = [s.clamp_min(EPS_SUM_SQ) for s in _running_sums(before, sq)]
    score = _join([(a / s).sum(-1) for a, s in zip(sq, denominators)]) + x[0].shape[-1] * bias
    membership = _membership(score, temp, padding)

    count = membership.cumsum(1)
    count, sum_membership = count + sum_membership.to(temp.dtype).unsqueeze(1), sum_membership + count[:, -1]
    Pi, D = _column_phases(membership), _column_phases(count + EPS_MEMBERSHIP)
    weighted = [a * b for a, b in zip(sq, Pi)]
    before, sum_weighted_sq = _sums_before(weighted, sum_weighted_sq)
    N = _running_sums(before, weighted)
    output = _join([-(a * pi * d) / (n + d) for a, pi, n, d in zip(x, Pi, N, D)])
    return output, membership, score, sum_sq, sum_weighted_sq, sum_membership


def _backward_formulas(
    x, grad, grad_membership, membership, score, temp, sum_sq, sum_weighted_sq, sum_membership, minus_W, U, V
):
    """Of real tokens: their gradient, and what `tssa._backward_chunk` returns, in its names."""
    x, grad = _phases(x), _phases(grad)
    count = membership.cumsum(1) + (sum_membership.to(temp.dtype) + EPS_MEMBERSHIP).unsqueeze(1)
    Pi, D = _column_phases(membership), _column_phases(count)
    sq = [a * a for a in x]
    weighted = [a * pi for a, pi in zip(sq, Pi)]
    N = _running_sums(_sums_before(weighted, sum_weighted_sq)[0], weighted)

    # output -> N, D, membership
    scaled = [g / (n + d) for g, n, d in zip(grad, N, D)]  # g / (N + D)
    dquotient = [a * b / (n + d) for a, b, n, d in zip(scaled, x, N, D)]  # g x / (N + D)^2
    dmembership = -count * _join([(a * b).sum(-1) for a, b in zip(scaled, x)])
    dcount = -membership * _join([(a * n).sum(-1) for a, n in zip(dquotient, N)])
    dN = [a * pi * d for a, pi, d in zip(dquotient, Pi, D)]
    after, next_U = _sums_before(dN, U, reverse=True)
    suffix_u = _running_sums(after, dN, reverse=True)
    suffix_v = _suffix_sum(dcount)
    V, suffix_v = V + suffix_v[:, 0], suffix_v + V.to(temp.dtype).unsqueeze(1)
    dmembership = dmembership + suffix_v + _join([(a * u).sum(-1) for a, u in zip(sq, suffix_u)])
    if grad_membership is not None:
        dmembership = dmembership + grad_membership

    # membership -> score
    dlogit = membership * (dmembership - (membership * dmembership).sum(-1, keepdim=True))
    dtemp = (dlogit * score).sum(1).sum(0)
    dscore = dlogit * temp

    # score -> running sum of squares -> tokens
    sums = _running_sums(_sums_before(sq, sum_sq)[0], sq)
    denominators = [s.clamp_min(EPS_SUM_SQ) for s in sums]
    dratio = [a / s for a, s in zip(_column_phases(dscore), denominators)]
    dsums = [torch.where(s < EPS_SUM_SQ, 0, a * b / d) for a, b, s, d in zip(dratio, sq, sums, denominators)]
    after, minus_W = _sums_before(dsums, minus_W, reverse=True)
    suffix_w = _running_sums(after, dsums, reverse=True)
    dsq = [a - b + u * pi for a, b, u, pi in zip(dratio, suffix_w, suffix_u, Pi)]
    dx = _join([2 * a * b - g * pi * d for a, b, g, pi, d in zip(x, dsq, scaled, Pi, D)])
    return dx, dscore, dtemp, minus_W, next_U, V


# What runs them ------------------------------------------------------------------------------------------------------

_compiled_forward = torch.compile(_forward_formulas)  # when it first runs
_compiled_backward = torch.compile(_backward_formulas)


def _dense(x: torch.Tensor | None, padding: torch.Tensor | None = None, dtype: torch.dtype | None = None):
    """A copy with the strides of its shape alone, lest the code is compiled anew for each length of row; 0 at padding."""
    if x is None:
        return None
    copy = x.new_empty(x.shape, dtype=dtype or x.dtype).copy_(x)
    return copy if padding is None else copy.masked_fill_(padding[..., None, None], 0)


def _forward_chunk(output, w, bias, padding, temp, *sums):
    x = _dense(w, padding, temp.dtype)
    result, *rest = _compiled_forward(x, _dense(bias), _dense(padding), temp, *map(_dense, sums))
    output.copy_(result)
    return rest


def _backward_chunk(dw, grad, grad_membership, w, padding, membership, score, temp, *sums):
    x, grad = (_dense(tokens, padding, temp.dtype) for tokens in (w, grad))
    small = map(_dense, (grad_membership, membership, score))
    dx, *rest = _compiled_backward(x, grad, *small, temp, *map(_dense, sums))
    dw.copy_(dx)  # 0 at padding, where x and grad are
    return rest


# Where compiling fails, eager code goes on over the same chunks.
_CODE = [(_forward_chunk, _backward_chunk), (None, None)]


def _plan(w: torch.Tensor, seq_idx: torch.Tensor | None) -> CompiledChunks:
    """Chunks as long as the cache allows; the shortest where packed sequences end anywhere."""
    B, T, H, p = w.shape
    tokens = CHUNK_TOKENS
    while seq_idx is None and 2 * tokens <= T and B * 2 * tokens * H * p <= CHUNK_NUMBERS:
        tokens *= 2
    rows = max(1, CHUNK_NUMBERS // (tokens * H * p))
    return CompiledChunks(tokens, rows, _border_count(B, T), *_CODE[0])


def _border_count(B: int, T: int) -> int:
    """Of the shortest chunks: the compiler must know it for any length."""
    return B * ((T + CHUNK_TOKENS - 1) // CHUNK_TOKENS)


def _run(function, w: torch.Tensor, seq_idx: torch.Tensor | None, *arguments):
    """`causal_forward` or `causal_backward` with compiled chunks."""
    try:
        return function(*arguments, compiled=_plan(w, seq_idx))
    except torch._dynamo.exc.BackendCompilerFailed as error:
        warnings.warn(
            "TSSA could not be compiled for the CPU and runs its eager code, which is slower; is there a C++ compiler? "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0]})",
            stacklevel=2,
        )
        del _CODE[0]
        return function(*arguments, compiled=_plan(w, seq_idx))


# The operator --------------------------------------------------------------------------------------------------------


def _operator(name: str):
    """A decorator for custom operators, in a namespace of the package's: a model's own code may be loaded beside it."""
    namespace = re.sub(r"\W", "_", (__name__.rpartition(".")[0] or __name__).removesuffix(".model"), flags=re.ASCII)
    return torch.library.custom_op(f"{namespace}::{name}", mutates_args=())


def causal_tssa(w, temp, bias, padding, seq_idx, sum_sq, sum_weighted_sq, sum_membership):
    """Output, membership (B, T, H) and the three final sums; `temp` and `bias` (B, T, H) in the compute dtype."""
    state = (sum_sq, sum_weighted_sq, sum_membership)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (w, temp, bias, *state))
    return _forward_operator(w, temp, bias, padding, seq_idx, *state, keep, CHUNK_TOKENS)[:5]


@_operator("reference_forward")
def _forward_operator(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    sum_sq: torch.Tensor,
    sum_weighted_sq: torch.Tensor,
    sum_membership: torch.Tensor,
    keep: bool,
    chunk_tokens: int,  # for the compiler, which keeps what it compiled on disk: shapes depend on it
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]:
    state = (sum_sq, sum_weighted_sq, sum_membership)
    return _run(causal_forward, w, seq_idx, w, temp, bias, padding, seq_idx, *state, keep and seq_idx is None)


@_forward_operator.register_fake
def _(w, temp, bias, padding, seq_idx, sum_sq, sum_weighted_sq, sum_membership, keep, chunk_tokens):
    B, T, H, _ = w.shape
    keep = keep and seq_idx is None
    count = _border_count(B, T) if keep else 0
    membership = w.new_empty((B, T, H), dtype=temp.dtype)
    return (
        w.new_empty(w.shape),
        membership,
        *(w.new_empty(x.shape, dtype=x.dtype) for x in (sum_sq, sum_weighted_sq, sum_membership)),
        torch.empty_like(membership) if keep else membership.new_empty(0),
        *(membership.new_empty((count, *shape[1:])) for shape in _sum_shapes(w)),
    )


@_operator("reference_backward")
def _backward_operator(
    grad_output: torch.Tensor | None,
    grad_membership: torch.Tensor | None,
    grad_sum_sq: torch.Tensor | None,
    grad_sum_weighted_sq: torch.Tensor | None,
    grad_sum_membership: torch.Tensor | None,
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    state: list[torch.Tensor],
    kept: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if seq_idx is not None:
        _, membership, _, _, _, *kept = _run(causal_forward, w, seq_idx, w, temp, bias, padding, seq_idx, *state, True)
        kept = (membership, *kept)
    grads = (grad_output, grad_membership, grad_sum_sq, grad_sum_weighted_sq, grad_sum_membership)
    return _run(causal_backward, w, seq_idx, *grads, w, temp, padding, seq_idx, *kept)


@_backward_operator.register_fake
def _(dout, dmembership, dsum_sq, dsum_weighted_sq, dsum_membership, w, temp, bias, padding, seq_idx, state, kept):
    return (
        w.new_empty(w.shape),
        temp.new_empty(temp.shape),
        temp.new_empty(bias.shape),
        *(x.new_empty(x.shape) for x in state),
    )


def _setup_context(ctx, inputs, output):
    *tensors, _, _ = inputs
    ctx.save_for_backward(*tensors, output[1], *output[5:])
    ctx.mark_non_differentiable(*output[5:])
    ctx.set_materialize_grads(False)


def _operator_backward(ctx, *grads):
    w, temp, bias, padding, seq_idx, *rest = ctx.saved_tensors
    dw, dtemp, dbias, *dstate = _backward_operator(*grads[:5], w, temp, bias, padding, seq_idx, rest[:3], rest[3:])
    return dw, dtemp, dbias, None, None, *dstate, None, None


_forward_operator.register_autograd(_operator_backward, setup_context=_setup_context)
