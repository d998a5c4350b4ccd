# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Causal TSSA under torch.compile on a CPU: one opaque operator, whose chunks run code that Inductor made once for all layers.

The caller's graph sees an operator with a closed-form backward, so it does not grow with the formulas. Inside, chunks of
many tokens run compiled formulas; what is shorter, at the end of a row, runs the eager ones of tssa_chunks.py.

Inductor has no fused running sum on CPUs: here one is unrolled over UNROLLED_TOKENS consecutive tokens, each in a tensor of
its own (a *phase*), and only the sums before each group of them pass through memory.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .tssa_chunks import (
    BackwardChunk,
    BackwardTokens,
    CompiledChunks,
    ForwardChunk,
    ForwardTokens,
    Kept,
    OutputGrads,
    causal_backward,
    causal_forward,
)
from .tssa_state import EPS_MEMBERSHIP, EPS_SUM_SQ, TSSAState, cache_bytes, custom_operator, membership_of, state_shapes
from .tssa_sums import suffix_sum, with_borders


UNROLLED_TOKENS = 8  # of a group: their sums are unrolled
BLOCK_GROUPS = 8  # groups of a block: their sums are masked ones, block by block
SHORTEST_CHUNK = 2 * UNROLLED_TOKENS * BLOCK_GROUPS  # tokens; longer ones have twice as many, and so on
COMPILED_CHUNK_NUMBERS = cache_bytes() // 2  # size of a chunk's tensors, which stay in the caches


# Running sums over a chunk -------------------------------------------------------------------------------------------


def _phases(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(rows, tokens, ...) as UNROLLED_TOKENS tensors (rows, blocks, groups, ...): each group's first tokens, second, ..."""
    return x.unflatten(1, (-1, BLOCK_GROUPS, UNROLLED_TOKENS)).unbind(3)


def _column_phases(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Phases of (rows, tokens, H), to be multiplied with those of (rows, tokens, H, p)."""
    return _phases(x.unsqueeze(-1))


def _join(phases: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(phases, 3).flatten(1, 3)


def _exclusive_sum(x: torch.Tensor, dim: int, reverse: bool) -> torch.Tensor:
    """Sums of what comes before (after, in reverse) along a short dimension; nothing of the rest goes in, not even NaN."""
    place = torch.arange(x.shape[dim], device=x.device)
    earlier = place > place[:, None] if reverse else place < place[:, None]
    return torch.where(earlier.view(*earlier.shape, *[1] * (x.ndim - dim - 1)), x.unsqueeze(dim), 0).sum(dim + 1)


class _Level(NamedTuple):
    """Factors of decay over parts of a chunk, a few after each other; `rows` here are those of the parts they make up."""

    each: tuple[torch.Tensor, ...]  # through each part, (rows, H, 1)
    before: torch.Tensor  # from before the first part to each, (rows, parts, H, 1)
    after: torch.Tensor  # from each part to after the last


class _Decay(NamedTuple):
    """Factors of decay in a chunk, each exp of a sum that is at most 0."""

    tokens: list[torch.Tensor]  # of the phases, (rows, blocks, groups, H, 1)
    levels: list[_Level]  # of the groups of tokens, then of what each level makes up, up to the chunk
    chunk: torch.Tensor  # (rows, H, 1)


def _decay(log_decay: torch.Tensor | None) -> _Decay | None:
    """Of a chunk's `log_decay` (rows, tokens, H)."""
    if log_decay is None:
        return None
    phases = _column_phases(log_decay)
    logs, levels = functools.reduce(torch.add, phases).flatten(1, 2), []
    while logs.shape[1] > 1:
        parts = _parts(logs)
        each = parts.unbind(1)
        before, after = (
            [functools.reduce(torch.add, group, torch.zeros_like(each[0])) for group in groups]
            for groups in ([each[:i] for i in range(len(each))], [each[i + 1 :] for i in range(len(each))])
        )
        levels.append(_Level(parts.exp().unbind(1), torch.stack(before, 1).exp(), torch.stack(after, 1).exp()))
        logs = functools.reduce(torch.add, each).unflatten(0, (len(logs), -1))
    return _Decay([x.exp() for x in phases], levels, logs[:, 0].exp())


def _parts(x: torch.Tensor) -> torch.Tensor:
    """(rows, n, ...) as (rows * n / BLOCK_GROUPS, BLOCK_GROUPS, ...), or as it is where there are fewer."""
    return x.unflatten(1, (-1, min(x.shape[1], BLOCK_GROUPS))).flatten(0, 1)


def _decayed_before(
    terms: torch.Tensor, carry: torch.Tensor, levels: list[_Level], reverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The decayed sums on from `carry` (rows, H, p) before each of the terms (rows, n, H, p); and that of all terms alone."""
    order = -1 if reverse else 1
    level, parts = levels[0], _parts(terms)
    sums = [torch.zeros_like(parts[:, 0])]
    for x, factor in list(zip(parts.unbind(1), level.each))[::order]:
        sums.append(sums[-1] * factor + x)
    before, total = carry, sums.pop()
    if len(levels) > 1:
        before, total = _decayed_before(total.unflatten(0, (len(terms), -1)), carry, levels[1:], reverse)
        before = before.flatten(0, 1)
    into = level.after if reverse else level.before
    return (torch.stack(sums[::order], 1) + before.unsqueeze(1) * into).view_as(terms), total


def _sums_before(
    phases: Sequence[torch.Tensor], carry: torch.Tensor, decay: _Decay | None = None, reverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums on from `carry` before each group (rows, blocks, groups, H, p), and after the chunk in the carry's dtype.

    In reverse, they go from gradients of running sums to those of their terms, and each has been multiplied by the factors
    of the tokens behind it.
    """
    if decay is None:
        groups = functools.reduce(torch.add, phases)
        blocks = groups.sum(2)
        before = _exclusive_sum(blocks, 1, reverse) + carry.to(groups.dtype).unsqueeze(1)
        return _exclusive_sum(groups, 2, reverse) + before.unsqueeze(2), carry + blocks.sum(1)
    order = -1 if reverse else 1
    tokens = list(zip(phases, decay.tokens))[::order]
    groups = phases[-1] * decay.tokens[-1] if reverse else phases[0]
    for x, factor in tokens[1:]:
        groups = (groups + x) * factor if reverse else groups * factor + x
    before, total = _decayed_before(groups.flatten(1, 2), carry.to(groups.dtype), decay.levels, reverse)
    return before.view_as(groups), carry * decay.chunk + total


def _running_sums(
    before: torch.Tensor, phases: Sequence[torch.Tensor], decay: _Decay | None = None, reverse: bool = False
) -> list[torch.Tensor]:
    """The phases' inclusive running sums, on from those before each group."""
    sums: list[torch.Tensor] = []
    for i in reversed(range(len(phases))) if reverse else range(len(phases)):
        if decay is not None and not reverse:
            before = before * decay.tokens[i]
        elif decay is not None and sums:
            before = before * decay.tokens[i + 1]
        before = before + phases[i]
        sums.append(before)
    return sums[::-1] if reverse else sums


def _running_count(
    x: torch.Tensor, carry: torch.Tensor, decay: _Decay | None, reverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Running sums of x (rows, tokens, H) on from `carry`, and the last in the carry's dtype."""
    if decay is None:
        sums = suffix_sum(x) if reverse else x.cumsum(1)
        total = carry + sums[:, 0 if reverse else -1]
        return sums + carry.to(x.dtype).unsqueeze(1), total
    phases = _column_phases(x)
    before, total = _sums_before(phases, carry.unsqueeze(-1), decay, reverse)
    return _join(_running_sums(before, phases, decay, reverse)).squeeze(-1), total.squeeze(-1)


# The formulas of a chunk ---------------------------------------------------------------------------------------------


def _forward_formulas(
    x: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    temp: torch.Tensor,
    sums: TSSAState,
) -> tuple[torch.Tensor, ForwardChunk]:
    """The output, of tokens in the compute dtype that are 0 at padding, and the rest."""
    phases, decay = _phases(x), _decay(log_decay)
    sq = [a * a for a in phases]
    before, sum_sq = _sums_before(sq, sums.sum_sq, decay)
    denominators = [s.clamp_min(EPS_SUM_SQ) for s in _running_sums(before, sq, decay)]
    score = _join([(a / s).sum(-1) for a, s in zip(sq, denominators)]) + x.shape[-1] * bias
    membership = membership_of(score, temp, padding)

    count, sum_membership = _running_count(membership, sums.sum_membership, decay)
    Pi, D = _column_phases(membership), _column_phases(count + EPS_MEMBERSHIP)
    weighted = [a * b for a, b in zip(sq, Pi)]
    before, sum_weighted_sq = _sums_before(weighted, sums.sum_weighted_sq, decay)
    N = _running_sums(before, weighted, decay)
    output = _join([-(a * pi * d) / (n + d) for a, pi, n, d in zip(phases, Pi, N, D)])
    return output, ForwardChunk(membership, score, TSSAState(sum_sq, sum_weighted_sq, sum_membership))


def _backward_formulas(
    x: torch.Tensor,
    grad: torch.Tensor,
    grad_membership: torch.Tensor | None,
    membership: torch.Tensor,
    score: torch.Tensor,
    log_decay: torch.Tensor | None,
    temp: torch.Tensor,
    sums: TSSAState,
    grad_sums: TSSAState,
) -> tuple[torch.Tensor, torch.Tensor | None, BackwardChunk]:
    """The gradients of such tokens and of `log_decay`, and the rest."""
    phases, grad_phases, decay = _phases(x), _phases(grad), _decay(log_decay)
    counted, _ = _running_count(membership, sums.sum_membership, decay)
    count = counted + EPS_MEMBERSHIP
    Pi, D = _column_phases(membership), _column_phases(count)
    sq = [a * a for a in phases]
    weighted = [a * pi for a, pi in zip(sq, Pi)]
    before_N, _ = _sums_before(weighted, sums.sum_weighted_sq, decay)
    N = _running_sums(before_N, weighted, decay)

    # output -> N, D, membership
    scaled = [g / (n + d) for g, n, d in zip(grad_phases, N, D)]  # g / (N + D)
    grad_quotient = [a * b / (n + d) for a, b, n, d in zip(scaled, phases, N, D)]  # g x / (N + D)^2
    by_output = -count * _dot(scaled, phases)
    grad_count = -membership * _dot(grad_quotient, N)
    grad_N = [a * pi * d for a, pi, d in zip(grad_quotient, Pi, D)]
    after, grad_weighted_sq = _sums_before(grad_N, grad_sums.sum_weighted_sq, decay, reverse=True)
    grad_weighted = _running_sums(after, grad_N, decay, reverse=True)
    grad_counts, grad_sum_membership = _running_count(grad_count, grad_sums.sum_membership, decay, reverse=True)
    grad_pi = by_output + grad_counts + _dot(sq, grad_weighted)
    if grad_membership is not None:
        grad_pi = grad_pi + grad_membership

    # membership -> score
    grad_logit = membership * (grad_pi - (membership * grad_pi).sum(-1, keepdim=True))
    grad_temp = (grad_logit * score).sum(1).sum(0)
    grad_score = grad_logit * temp

    grad_sq, by_factor, grad_sum_sq = _score_to_squares(sq, grad_score, sums, grad_sums, decay)
    grad_log_decay = None
    if decay is not None:
        assert log_decay is not None and by_factor is not None  # as there are factors of decay
        by_factor = by_factor + _dot(grad_weighted, [before_N, *N[:-1]])
        before = torch.cat([sums.sum_membership.to(temp.dtype).unsqueeze(1), counted[:, :-1]], 1)
        grad_log_decay = log_decay.exp() * (by_factor + grad_counts * before)
    grad_sq = [a + u * pi for a, u, pi in zip(grad_sq, grad_weighted, Pi)]
    grad_x = _join([2 * a * b - g * pi * d for a, b, g, pi, d in zip(phases, grad_sq, scaled, Pi, D)])
    grads = TSSAState(grad_sum_sq, grad_weighted_sq, grad_sum_membership)
    return grad_x, grad_log_decay, BackwardChunk(grad_score, grad_temp, grads)


def _score_to_squares(
    sq: list[torch.Tensor], grad_score: torch.Tensor, sums: TSSAState, grad_sums: TSSAState, decay: _Decay | None
) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor]:
    """From the score to the squares, by way of their running sums.

    Returns:
        The gradients of the squares, of the factors of decay (rows, tokens, H) and of the sum before the chunk.
    """
    before, _ = _sums_before(sq, sums.sum_sq, decay)
    S = _running_sums(before, sq, decay)
    denominators = [s.clamp_min(EPS_SUM_SQ) for s in S]
    grad_ratio = [a / s for a, s in zip(_column_phases(grad_score), denominators)]
    grad_S = [torch.where(s < EPS_SUM_SQ, 0, -a * b / d) for a, b, s, d in zip(grad_ratio, sq, S, denominators)]
    after, grad_sum_sq = _sums_before(grad_S, grad_sums.sum_sq, decay, reverse=True)
    by_sum = _running_sums(after, grad_S, decay, reverse=True)
    by_factor = None if decay is None else _dot(by_sum, [before, *S[:-1]])
    return [a + b for a, b in zip(grad_ratio, by_sum)], by_factor, grad_sum_sq


def _dot(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of two lists of phases, for each token and head (rows, tokens, H)."""
    return _join([(x * y).sum(-1) for x, y in zip(a, b)])


# What runs them ------------------------------------------------------------------------------------------------------

_compiled_forward = torch.compile(_forward_formulas)  # when it first runs
_compiled_backward = torch.compile(_backward_formulas)


def _dense(x: torch.Tensor | None, padding: torch.Tensor | None = None, dtype: torch.dtype | None = None):
    """A copy with the strides of its shape alone, lest the code is compiled anew for each length of row; 0 at padding."""
    if x is None:
        return None
    copy = x.new_empty(x.shape, dtype=dtype or x.dtype).copy_(x)
    return copy if padding is None else copy.masked_fill_(padding[..., None, None], 0)


def _of_heads(log_decay: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if log_decay is None else log_decay.expand_as(like)


def _dense_state(state: TSSAState) -> TSSAState:
    return TSSAState(*map(_dense, state))


def _forward_chunk(tokens: ForwardTokens, temp: torch.Tensor, sums: TSSAState) -> ForwardChunk:
    x = _dense(tokens.w, tokens.padding, temp.dtype)
    decay = _dense(_of_heads(tokens.log_decay, tokens.bias))
    output, rest = _compiled_forward(x, _dense(tokens.bias), _dense(tokens.padding), decay, temp, _dense_state(sums))
    tokens.output.copy_(output)
    return rest


def _backward_chunk(tokens: BackwardTokens, temp: torch.Tensor, sums: TSSAState, grad_sums: TSSAState) -> BackwardChunk:
    x, grad = (_dense(x, tokens.padding, temp.dtype) for x in (tokens.w, tokens.grad_output))
    decay = _of_heads(tokens.log_decay, tokens.score)
    grad_pi, membership, score, decay = map(_dense, (tokens.grad_membership, tokens.membership, tokens.score, decay))
    states = _dense_state(sums), _dense_state(grad_sums)
    grad_x, grad_log_decay, rest = _compiled_backward(x, grad, grad_pi, membership, score, decay, temp, *states)
    tokens.grad_w.copy_(grad_x)  # 0 at padding, where x and grad are
    if tokens.grad_log_decay is not None:
        assert grad_log_decay is not None  # as there is a log_decay
        tokens.grad_log_decay.copy_(grad_log_decay)
    return rest


# Where compiling fails, eager code goes on over the same chunks.
_CODE = [(_forward_chunk, _backward_chunk), (None, None)]


def _chunks_for(w: torch.Tensor) -> CompiledChunks:
    """Chunks as long as the cache allows."""
    B, T, H, p = w.shape
    tokens = SHORTEST_CHUNK
    while 2 * tokens <= T and B * 2 * tokens * H * p <= COMPILED_CHUNK_NUMBERS:
        tokens *= 2
    rows = max(1, COMPILED_CHUNK_NUMBERS // (tokens * H * p))
    forward, backward = _CODE[0]
    return CompiledChunks(tokens=tokens, rows=rows, borders=_border_count(B, T), forward=forward, backward=backward)


def _border_count(B: int, T: int) -> int:
    """Of the shortest chunks: the compiler must know it for any length."""
    return B * ((T + SHORTEST_CHUNK - 1) // SHORTEST_CHUNK)


def _run(function):
    """`causal_forward` or `causal_backward` with compiled chunks."""
    try:
        return function()
    except torch._dynamo.exc.BackendCompilerFailed as error:
        warnings.warn(
            "TSSA could not be compiled for the CPU and runs its eager code, which is slower; is there a C++ compiler? "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0]})",
            stacklevel=2,
        )
        del _CODE[0]
        return function()


# The operator --------------------------------------------------------------------------------------------------------


def causal_tssa(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    state: TSSAState,
    log_decay: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState]:
    """As `tssa_chunks.causal_tssa`."""
    log_decay = with_borders(log_decay, seq_idx, temp.dtype)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (w, temp, bias, log_decay, *state))
    output, membership, *rest = _forward_operator(w, temp, bias, padding, seq_idx, log_decay, *state, keep, SHORTEST_CHUNK)
    return output, membership, TSSAState(*rest[:3])


@custom_operator("causal_forward")
def _forward_operator(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    log_decay: torch.Tensor | None,
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
    """The fields of `CausalResult`, one after the other."""
    state = TSSAState(sum_sq, sum_weighted_sq, sum_membership)
    result = _run(lambda: causal_forward(w, temp, bias, padding, seq_idx, log_decay, state, keep, _chunks_for(w)))
    return result.output, result.membership, *result.state, result.kept.score, *result.kept.sums


@_forward_operator.register_fake
def _(w, temp, bias, padding, seq_idx, log_decay, sum_sq, sum_weighted_sq, sum_membership, keep, chunk_tokens):
    B, T, H, _ = w.shape
    borders = _border_count(B, T) if keep else 0
    membership = w.new_empty((B, T, H), dtype=temp.dtype)
    return (
        w.new_empty(w.shape),
        membership,
        *(w.new_empty(x.shape, dtype=x.dtype) for x in (sum_sq, sum_weighted_sq, sum_membership)),
        torch.empty_like(membership) if keep else membership.new_empty(0),
        *(membership.new_empty((borders, *shape[1:])) for shape in state_shapes(w)),
    )


@custom_operator("causal_backward")
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
    log_decay: torch.Tensor | None,
    state: list[torch.Tensor],
    decay_is_learned: bool,
    membership: torch.Tensor,
    kept: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of `InputGrads`; empty for `log_decay` if it is not learned."""
    grads = OutputGrads(grad_output, grad_membership, grad_sum_sq, grad_sum_weighted_sq, grad_sum_membership)
    score, *sums = kept
    inputs = (w, temp, bias, padding, seq_idx, log_decay, TSSAState(*state))
    arguments = (grads, *inputs, decay_is_learned, membership, Kept(score, TSSAState(*sums)))
    grad = _run(lambda: causal_backward(*arguments, _chunks_for(w)))
    return tuple(grad if decay_is_learned else grad._replace(log_decay=temp.new_empty(0)))


@_backward_operator.register_fake
def _(*args):
    w, temp, bias, _, _, _, state, learned, membership, _ = args[5:]
    return (
        w.new_empty(w.shape),
        temp.new_empty(temp.shape),
        temp.new_empty(bias.shape),
        temp.new_empty(membership.shape if learned else 0),
        *(x.new_empty(x.shape) for x in state),
    )


def _setup_context(ctx, inputs, output):
    *tensors, _, _ = inputs
    ctx.save_for_backward(*tensors, output[1], *output[5:])
    ctx.mark_non_differentiable(*output[5:])
    ctx.set_materialize_grads(False)


def _operator_backward(ctx, *grads):
    inputs, rest = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
    state, membership, kept = rest[:3], rest[3], rest[4:]
    learned = ctx.needs_input_grad[5]
    by_input = _backward_operator(*grads[:5], *inputs, state, learned, membership, kept)
    grad_w, grad_temp, grad_bias, grad_log_decay, *grad_state = by_input
    return grad_w, grad_temp, grad_bias, None, None, grad_log_decay if learned else None, *grad_state, None, None


_forward_operator.register_autograd(_operator_backward, setup_context=_setup_context)
