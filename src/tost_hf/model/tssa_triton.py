# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Triton kernels of TSSA, forward and backward, causal and bidirectional, and the decode step.

The operator is two chained sums over tokens with a softmax over heads between them. Tokens are cut into chunks; only totals
cross a chunk's border, and totals add. So each direction is three kernels that work on all chunks at once, with a small
scan over the chunk totals after the first and the second:

    forward    totals of w^2        -> scan -> membership, totals of Pi w^2 and Pi -> scan -> output
    backward   totals of dN and dD  -> scan -> score gradient, totals of dS        -> scan -> dw

with S = sum w^2, N = sum Pi w^2, D = sum Pi: running sums in the causal form, totals in the bidirectional one (`CAUSAL`).
A running sum's gradient is a suffix sum, so the backward scans run the other way. A causal form that forgets (`log_decay`)
multiplies its sums by a factor before each token is added: totals are then of what is left at the chunk's end (of gradients,
at its start), and the scans take in each chunk's sum of the factors' logarithms. Statistics are float32 whatever comes in,
no sum is formed by subtraction, and there are no atomics: two runs agree to the last bit.

Chunks are cut at fixed places, by (H, p) alone, so an output never depends on the tokens after it. In packed rows a
chunk ends where its sequence does; a table made on the host lists the chunks, which are the same as if each sequence
were alone.

The kernels are bound as custom operators, opaque to compilers, in a namespace named after the package this file is loaded
into: an installed package and a model's remote code can both be loaded. Nothing here needs Triton until it is called.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .tssa_state import EPS_MEMBERSHIP, EPS_NORM, EPS_SUM_SQ, custom_operator, sequence_starts, state_shapes


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


_jit = (lambda fn: fn) if triton is None else triton.jit
_jit_any_length = (lambda fn: fn) if triton is None else triton.jit(do_not_specialize=["T", "bias_tokens"])


# ---------------------------------------------------------------------------------------------------------------------
# Kernels. Tensors are contiguous: w, grad, output, dw (B, T, H, p); membership, dscore, log_decay, dlog_decay (B, T, H);
# chunk totals and carries (chunks, H, p) or (chunks, H), where carries of the bidirectional form have one row a sequence.
# Blocks: BLOCK_T tokens, BLOCK_H >= H heads, BLOCK_P >= P channels of one head. Addresses are 64-bit.
# ---------------------------------------------------------------------------------------------------------------------


@_jit
def _real(mask, tokens, exists):
    """Which of the tokens exist and are not padding."""
    if mask is not None:
        exists = exists & (tl.load(mask + tokens, mask=exists, other=0) != 0)
    return exists


@_jit
def _chunk(index, mask, chunk_table, T, CAUSAL: tl.constexpr, BLOCK_T: tl.constexpr):
    """A chunk's tokens (places in the flattened batch), which of them exist, are real, and have a next one in the chunk; and
    its row of carries."""
    if chunk_table is None:
        per_row = tl.cdiv(T, BLOCK_T)
        row = index // per_row
        start = (index % per_row) * BLOCK_T
        stop = T.to(tl.int64)
        sequence = row
    else:
        row = tl.load(chunk_table + 4 * index)
        start = tl.load(chunk_table + 4 * index + 1)
        stop = tl.load(chunk_table + 4 * index + 2)
        sequence = tl.load(chunk_table + 4 * index + 3)
    t = start + tl.arange(0, BLOCK_T)
    exists = t < stop
    tokens = row * T + t
    if CAUSAL:
        carry = index
    else:
        carry = sequence
    return tokens, exists, _real(mask, tokens, exists), (t + 1 < stop) & (tl.arange(0, BLOCK_T) < BLOCK_T - 1), carry


@_jit
def _load(pointer, tokens, head, real, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """One head of a chunk's tokens, (BLOCK_T, BLOCK_P) in float32; padding is 0 and is not read."""
    p = tl.arange(0, BLOCK_P)
    places = (tokens * H + head)[:, None] * P + p[None, :]
    return tl.load(pointer + places, mask=real[:, None] & (p < P)[None, :], other=0.0).to(tl.float32)


@_jit
def _store(pointer, value, tokens, head, exists, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    p = tl.arange(0, BLOCK_P)
    places = (tokens * H + head)[:, None] * P + p[None, :]
    tl.store(pointer + places, value, mask=exists[:, None] & (p < P)[None, :])


@_jit
def _load_row(pointer, row, head, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """One head of a row of carries, (BLOCK_P,)."""
    p = tl.arange(0, BLOCK_P)
    return tl.load(pointer + (row * H + head) * P + p, mask=p < P, other=0.0)


@_jit
def _store_row(pointer, value, row, head, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    p = tl.arange(0, BLOCK_P)
    tl.store(pointer + (row * H + head) * P + p, value, mask=p < P)


@_jit
def _decay(log_decay, tokens, head, exists, H: tl.constexpr):
    """Logarithms of one head's factors (BLOCK_T,), 0 where no token is; None if nothing is forgotten."""
    if log_decay is None:
        return None
    else:
        return tl.load(log_decay + tokens * H + head, mask=exists, other=0.0)


@_jit
def _lost(decay):
    """exp(decay) - 1 for -0.1 < decay <= 0, exact to float32 where 1 - exp(decay) would keep few digits."""
    return decay * (1 + decay / 2 * (1 + decay / 3 * (1 + decay / 4 * (1 + decay / 5 * (1 + decay / 6)))))


@_jit
def _factor(decay):
    """exp(decay), rounded once: the hardware's is off by 2e-7, and the factors of a chunk multiply."""
    return tl.where(decay > -0.1, 1.0 + _lost(decay), tl.exp(decay))


@_jit
def _forget(total, decay):
    """The total times exp(decay). A factor close to 1 would be rounded the same way at each of thousands of steps."""
    return tl.where(decay > -0.1, total + total * _lost(decay), total * tl.exp(decay))


@_jit
def _join(factor, total, next_factor, next_total):
    """Two neighbouring stretches of tokens as one: the product of the factors and the decayed total."""
    return factor * next_factor, total * next_factor + next_total


@_jit
def _join_chunks(decay, total, next_decay, next_total):
    """As `_join`, with the factors' logarithms: of many chunks, each close to 1, a product would lose digits."""
    return decay + next_decay, total * tl.exp(next_decay) + next_total


@_jit
def _per_token(x, values):
    """(BLOCK_T,) with as many dimensions as `values`."""
    if len(values.shape) == 2:
        return x[:, None]
    else:
        return x


@_jit
def _running(values, carry, decay, CAUSAL: tl.constexpr, REVERSE: tl.constexpr):
    """Sums over tokens (axis 0): the carry plus those inside the chunk, or the carry alone, which is then the total.

    With `decay`, a sum is multiplied by exp(decay) before the token's own value is added to it.
    """
    if not CAUSAL:
        return carry + tl.zeros_like(values)
    elif decay is None:
        return carry + tl.cumsum(values, 0, reverse=REVERSE)
    else:
        factor = _per_token(_factor(decay), values) + tl.zeros_like(values)
        factor, values = tl.associative_scan((factor, values), 0, _join, reverse=REVERSE)
        return factor * carry + values


@_jit
def _share(decay, REVERSE: tl.constexpr):
    """How much of each token's value is in the chunk's total; None for all of it."""
    if decay is None:
        return None
    else:
        return tl.exp(tl.cumsum(decay, 0, reverse=REVERSE))


@_jit
def _total(values, share):
    """Sum over tokens (axis 0)."""
    if share is not None:
        values *= _per_token(share, values)
    return tl.sum(values, 0)


@_jit
def _column(values, heads, head):
    """Column `head` of (BLOCK_T, BLOCK_H)."""
    return tl.sum(tl.where((heads == head)[None, :], values, 0.0), 1)


@_jit
def _moment(x, pi, weighted_sq, count, decay, eps, CAUSAL: tl.constexpr):
    """The second moment N / D of the head's tokens, and 1 / D."""
    N = _running(x * x * pi[:, None], weighted_sq[None, :], decay, CAUSAL, False)
    inverse = 1.0 / (_running(pi, count, decay, CAUSAL, False) + eps)
    return N * inverse[:, None], inverse


@_jit
def _moment_grad(g, x, pi, moment, inverse):
    """1 / (1 + moment), and the gradient of N by way of it, from the output's gradient g."""
    shrink = 1.0 / (1.0 + moment)
    return shrink, g * x * shrink * shrink * (pi * inverse)[:, None]


@_jit_any_length
def _totals_kernel(
    w,
    membership,  # None: totals of squares only
    log_decay,
    mask,
    chunk_table,
    total_sq,
    total_weighted_sq,
    total_membership,
    total_decay,
    T,
    H: tl.constexpr,
    P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Chunk totals of w^2, of the factors' logarithms and, where the membership is known, of Pi w^2 and Pi.

    One program a chunk and head.
    """
    index = tl.program_id(0).to(tl.int64) // H
    head = tl.program_id(0) % H
    tokens, exists, real, follows, _ = _chunk(index, mask, chunk_table, T, True, BLOCK_T)
    x = _load(w, tokens, head, real, H, P, BLOCK_P)
    sq = x * x
    share = _share(_decay(log_decay, tokens + 1, head, follows, H), True)
    _store_row(total_sq, _total(sq, share), index, head, H, P, BLOCK_P)
    if log_decay is not None:
        tl.store(total_decay + index * H + head, tl.sum(_decay(log_decay, tokens, head, exists, H), 0))
    if membership is not None:
        pi = tl.load(membership + tokens * H + head, mask=real, other=0.0)
        _store_row(total_weighted_sq, _total(sq * pi[:, None], share), index, head, H, P, BLOCK_P)
        tl.store(total_membership + index * H + head, _total(pi, share))


@_jit
def _scan(
    totals,
    carries,
    initial,
    final,
    total_decay,
    channels,
    width: tl.constexpr,
    first,
    count,
    sequence,
    initial_row,
    final_row,
    H: tl.constexpr,
    CAUSAL: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Exclusive sums of a block of channels over one sequence's chunks, or its total (bidirectional).

    Entry j is the sum of the j chunks before it: the totals are read shifted by one, so that nothing is subtracted.
    """
    inside = channels < width
    carry = tl.zeros(channels.shape, tl.float32)
    if initial is not None:
        if initial_row >= 0:
            carry += tl.load(initial + initial_row * width + channels, mask=inside, other=0.0)
    for j0 in range(0, count + 1, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        if REVERSE:
            chunk = first + count - 1 - j
            previous = chunk + 1
        else:
            chunk = first + j
            previous = chunk - 1
        known = ((j > 0) & (j <= count))[:, None] & inside[None, :]
        x = tl.load(totals + previous[:, None] * width + channels[None, :], mask=known, other=0.0)
        places = chunk[:, None] * width + channels[None, :]
        here = (j < count)[:, None] & inside[None, :]
        if total_decay is not None:
            heads = channels // (width // H)
            decay = tl.load(total_decay + previous[:, None] * H + heads[None, :], mask=known, other=0.0)
            decay, x = tl.associative_scan((decay, x), 0, _join_chunks)
            x += tl.exp(decay) * carry[None, :]
            tl.store(carries + places, x, mask=here)
            carry = tl.sum(tl.where((j == j0 + BLOCK_N - 1)[:, None], x, 0.0), 0)
        else:
            if CAUSAL:
                tl.store(carries + places, carry[None, :] + tl.cumsum(x, 0), mask=here)
            carry += tl.sum(x, 0)
    if not CAUSAL:
        tl.store(carries + sequence * width + channels, carry, mask=inside)
    if final is not None:
        if final_row >= 0:
            tl.store(final + final_row * width + channels, carry, mask=inside)


@_jit_any_length
def _scan_kernel(
    totals,
    carries,
    initial,
    final,
    totals2,  # None: no second set of channels
    carries2,
    initial2,
    final2,
    total_decay,
    sequence_table,
    T,
    WIDTH: tl.constexpr,
    WIDTH2: tl.constexpr,
    H: tl.constexpr,
    CAUSAL: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Carries from chunk totals (chunks, WIDTH) and (chunks, WIDTH2). One program a sequence and block of channels."""
    blocks: tl.constexpr = (WIDTH + BLOCK_C - 1) // BLOCK_C
    blocks2: tl.constexpr = (WIDTH2 + BLOCK_C - 1) // BLOCK_C
    sequence = tl.program_id(0).to(tl.int64) // (blocks + blocks2)
    block = tl.program_id(0) % (blocks + blocks2)
    if sequence_table is None:
        count = tl.cdiv(T, BLOCK_T).to(tl.int64)
        first = sequence * count
        initial_row = sequence
        final_row = sequence
    else:  # the state before the row enters its first sequence, the one after it leaves its last
        first = tl.load(sequence_table + 4 * sequence)
        count = tl.load(sequence_table + 4 * sequence + 1)
        initial_row = tl.load(sequence_table + 4 * sequence + (3 if REVERSE else 2))
        final_row = tl.load(sequence_table + 4 * sequence + (2 if REVERSE else 3))
    channels = tl.arange(0, BLOCK_C)
    if block < blocks:
        channels += block * BLOCK_C
        _scan(
            totals, carries, initial, final, total_decay, channels, WIDTH, first, count, sequence, initial_row, final_row, H,
            CAUSAL, REVERSE, BLOCK_N,
        )  # fmt: skip
    else:
        if totals2 is not None:
            channels += (block - blocks) * BLOCK_C
            _scan(
                totals2, carries2, initial2, final2, total_decay, channels, WIDTH2, first, count, sequence, initial_row,
                final_row, H, CAUSAL, REVERSE, BLOCK_N,
            )  # fmt: skip


@_jit_any_length
def _membership_kernel(
    w,
    temp,
    bias,
    log_decay,
    mask,
    chunk_table,
    sum_sq,
    membership,
    total_weighted_sq,
    total_membership,
    T,
    bias_tokens,  # T * B, or T where the rows share one bias
    floor,
    H: tl.constexpr,
    P: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Softmax over the heads, and the chunk totals that need it. One program a chunk, all heads."""
    index = tl.program_id(0).to(tl.int64)
    tokens, exists, real, follows, carry = _chunk(index, mask, chunk_table, T, CAUSAL, BLOCK_T)
    heads = tl.arange(0, BLOCK_H)
    score = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for head in range(H):
        x = _load(w, tokens, head, real, H, P, BLOCK_P)
        decay = _decay(log_decay, tokens, head, exists, H)
        S = _running(x * x, _load_row(sum_sq, carry, head, H, P, BLOCK_P)[None, :], decay, CAUSAL, False)
        z = tl.sum(x * x / tl.maximum(S, floor), 1)
        score = tl.where((heads == head)[None, :], z[:, None], score)
    real_heads = real[:, None] & (heads < H)[None, :]
    places = tokens[:, None] * H + heads[None, :]
    if bias is not None:
        score += P * tl.load(bias + (tokens % bias_tokens)[:, None] * H + heads[None, :], mask=real_heads, other=0.0)
    score *= tl.load(temp + heads, mask=heads < H, other=0.0)[None, :]
    score = tl.where((heads < H)[None, :], score, float("-inf"))
    pi = tl.exp(score - tl.max(score, 1)[:, None])
    pi = tl.where(real_heads, pi / tl.sum(pi, 1)[:, None], 0.0)
    tl.store(membership + places, pi, mask=exists[:, None] & (heads < H)[None, :])
    if log_decay is None:
        tl.store(total_membership + index * H + heads, tl.sum(pi, 0), mask=heads < H)
    for head in range(H):
        x = _load(w, tokens, head, real, H, P, BLOCK_P)
        weighted = x * x * _column(pi, heads, head)[:, None]
        share = _share(_decay(log_decay, tokens + 1, head, follows, H), True)
        _store_row(total_weighted_sq, _total(weighted, share), index, head, H, P, BLOCK_P)
        if log_decay is not None:
            tl.store(total_membership + index * H + head, _total(_column(pi, heads, head), share))


@_jit_any_length
def _output_kernel(
    w,
    membership,
    log_decay,
    mask,
    chunk_table,
    sum_weighted_sq,
    sum_membership,
    output,
    T,
    eps,
    H: tl.constexpr,
    P: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The output. One program a chunk and head."""
    index = tl.program_id(0).to(tl.int64) // H
    head = tl.program_id(0) % H
    tokens, exists, real, _, carry = _chunk(index, mask, chunk_table, T, CAUSAL, BLOCK_T)
    x = _load(w, tokens, head, real, H, P, BLOCK_P)
    pi = tl.load(membership + tokens * H + head, mask=real, other=0.0)
    weighted_sq = _load_row(sum_weighted_sq, carry, head, H, P, BLOCK_P)
    count = tl.load(sum_membership + carry * H + head)
    moment, _ = _moment(x, pi, weighted_sq, count, _decay(log_decay, tokens, head, exists, H), eps, CAUSAL)
    _store(output, -(x * pi[:, None]) / (1.0 + moment), tokens, head, exists, H, P, BLOCK_P)


@_jit
def _output_grad(
    w, grad, membership, sum_weighted_sq, sum_membership, decay, tokens, head, real, carry, eps, H: tl.constexpr,
    P: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Of one head's tokens: w, the gradient of the output, the moment, 1 / (1 + moment) and the gradient of N."""
    x = _load(w, tokens, head, real, H, P, BLOCK_P)
    g = _load(grad, tokens, head, real, H, P, BLOCK_P)
    pi = tl.load(membership + tokens * H + head, mask=real, other=0.0)
    weighted_sq = _load_row(sum_weighted_sq, carry, head, H, P, BLOCK_P)
    count = tl.load(sum_membership + carry * H + head)
    moment, inverse = _moment(x, pi, weighted_sq, count, decay, eps, CAUSAL)
    shrink, dN = _moment_grad(g, x, pi, moment, inverse)
    return x, g, moment, shrink, dN


@_jit_any_length
def _moment_grad_kernel(
    w,
    grad,
    membership,
    log_decay,
    mask,
    chunk_table,
    sum_weighted_sq,
    sum_membership,
    total_dN,
    total_dD,
    total_decay,
    T,
    eps,
    H: tl.constexpr,
    P: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Chunk totals of the gradients of N and D. One program a chunk and head."""
    index = tl.program_id(0).to(tl.int64) // H
    head = tl.program_id(0) % H
    tokens, exists, real, _, carry = _chunk(index, mask, chunk_table, T, CAUSAL, BLOCK_T)
    decay = _decay(log_decay, tokens, head, exists, H)
    _, _, moment, _, dN = _output_grad(
        w, grad, membership, sum_weighted_sq, sum_membership, decay, tokens, head, real, carry, eps, H, P, CAUSAL, BLOCK_P
    )
    share = _share(decay, False)
    _store_row(total_dN, _total(dN, share), index, head, H, P, BLOCK_P)
    tl.store(total_dD + index * H + head, -_total(tl.sum(dN * moment, 1), share))
    if log_decay is not None:
        tl.store(total_decay + index * H + head, tl.sum(decay, 0))


@_jit
def _score_grad(x, S, q, floor):
    """The score without its bias, and the gradient of S by way of it, from the score's gradient q."""
    inverse = 1.0 / tl.maximum(S, floor)
    ratio = x * x * inverse
    return tl.sum(ratio, 1), tl.where(S < floor, 0.0, -q[:, None] * ratio * inverse)


@_jit_any_length
def _score_grad_kernel(
    w,
    grad,
    grad_membership,  # or None
    temp,
    bias,
    membership,
    log_decay,
    mask,
    chunk_table,
    sum_sq,
    sum_weighted_sq,
    sum_membership,
    suffix_dN,
    suffix_dD,
    dscore,
    dtemp,
    total_dS,
    T,
    bias_tokens,
    floor,
    eps,
    H: tl.constexpr,
    P: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Backward of the softmax over the heads, and the chunk totals that need it. One program a chunk, all heads."""
    index = tl.program_id(0).to(tl.int64)
    tokens, exists, real, follows, carry = _chunk(index, mask, chunk_table, T, CAUSAL, BLOCK_T)
    heads, dpi = tl.arange(0, BLOCK_H), tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for head in range(H):
        decay = _decay(log_decay, tokens, head, exists, H)
        x, g, moment, shrink, dN = _output_grad(
            w, grad, membership, sum_weighted_sq, sum_membership, decay, tokens, head, real, carry, eps, H, P, CAUSAL, BLOCK_P
        )
        dD = -tl.sum(dN * moment, 1)
        next_decay = _decay(log_decay, tokens + 1, head, follows, H)
        U = _running(dN, _load_row(suffix_dN, carry, head, H, P, BLOCK_P)[None, :], next_decay, CAUSAL, True)
        V = _running(dD, tl.load(suffix_dD + carry * H + head), next_decay, CAUSAL, True)
        dpi = tl.where((heads == head)[None, :], (tl.sum(x * (x * U - g * shrink), 1) + V)[:, None], dpi)
    real_heads, places = real[:, None] & (heads < H)[None, :], tokens[:, None] * H + heads[None, :]
    if grad_membership is not None:
        dpi += tl.load(grad_membership + places, mask=real_heads, other=0.0)
    pi = tl.load(membership + places, mask=real_heads, other=0.0)
    dlogit = pi * (dpi - tl.sum(pi * dpi, 1)[:, None])
    q = dlogit * tl.load(temp + heads, mask=heads < H, other=0.0)[None, :]
    tl.store(dscore + places, q, mask=exists[:, None] & (heads < H)[None, :])
    for head in range(H):
        x = _load(w, tokens, head, real, H, P, BLOCK_P)
        decay = _decay(log_decay, tokens, head, exists, H)
        S = _running(x * x, _load_row(sum_sq, carry, head, H, P, BLOCK_P)[None, :], decay, CAUSAL, False)
        z, dS = _score_grad(x, S, _column(q, heads, head), floor)
        if bias is not None:
            z += P * tl.load(bias + (tokens % bias_tokens) * H + head, mask=real, other=0.0)
        tl.store(dtemp + index * H + head, tl.sum(_column(dlogit, heads, head) * z, 0))
        _store_row(total_dS, _total(dS, _share(decay, False)), index, head, H, P, BLOCK_P)


@_jit
def _left(
    w, membership, mask, decay, tokens, head, exists, H: tl.constexpr, P: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The token before each one of a chunk: what the factor leaves of its w^2, Pi w^2 and Pi; None if nothing is forgotten."""
    if decay is None:
        return None, None, None
    else:
        earlier = exists & (tl.arange(0, BLOCK_T) > 0)
        x = _load(w, tokens - 1, head, _real(mask, tokens - 1, earlier), H, P, BLOCK_P)
        pi = tl.load(membership + (tokens - 1) * H + head, mask=earlier, other=0.0)
        factor = _factor(decay)
        sq = x * x * factor[:, None]
        return sq, sq * pi[:, None], pi * factor


@_jit
def _running_and_left(values, left, carry, decay, CAUSAL: tl.constexpr):
    """Sums up to each token, and what its factor left of the sum before it, for which `sum - value` would cancel digits."""
    if decay is None:
        return _running(values, carry, None, CAUSAL, False), None
    else:
        left = _running(left, carry, decay, CAUSAL, False)
        return left + values, left


@_jit_any_length
def _input_grad_kernel(
    w,
    grad,
    membership,
    dscore,
    log_decay,
    mask,
    chunk_table,
    sum_sq,
    sum_weighted_sq,
    sum_membership,
    suffix_dN,
    suffix_dD,  # None where nothing is forgotten
    suffix_dS,
    dw,
    dlog_decay,
    T,
    floor,
    eps,
    H: tl.constexpr,
    P: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The gradients of w and of the factors' logarithms. One program a chunk and head."""
    index = tl.program_id(0).to(tl.int64) // H
    head = tl.program_id(0) % H
    tokens, exists, real, follows, carry = _chunk(index, mask, chunk_table, T, CAUSAL, BLOCK_T)
    decay = _decay(log_decay, tokens, head, exists, H)
    next_decay = _decay(log_decay, tokens + 1, head, follows, H)
    x = _load(w, tokens, head, real, H, P, BLOCK_P)
    left_sq, left_weighted, left_pi = _left(w, membership, mask, decay, tokens, head, exists, H, P, BLOCK_T, BLOCK_P)
    carry_sq = _load_row(sum_sq, carry, head, H, P, BLOCK_P)
    S, left_S = _running_and_left(x * x, left_sq, carry_sq[None, :], decay, CAUSAL)
    inverse = 1.0 / tl.maximum(S, floor)
    q = tl.load(dscore + tokens * H + head, mask=real, other=0.0)[:, None]
    dS = tl.where(S < floor, 0.0, -q * x * x * inverse * inverse)
    Q = _running(dS, _load_row(suffix_dS, carry, head, H, P, BLOCK_P)[None, :], next_decay, CAUSAL, True)
    dsq = q * inverse + Q
    if decay is not None:
        ddecay = tl.sum(Q * left_S, 1)
    g = _load(grad, tokens, head, real, H, P, BLOCK_P)
    pi = tl.load(membership + tokens * H + head, mask=real, other=0.0)
    weighted_sq = _load_row(sum_weighted_sq, carry, head, H, P, BLOCK_P)
    count = tl.load(sum_membership + carry * H + head)
    N, left_N = _running_and_left(x * x * pi[:, None], left_weighted, weighted_sq[None, :], decay, CAUSAL)
    D, left_D = _running_and_left(pi, left_pi, count, decay, CAUSAL)
    inverse_count = 1.0 / (D + eps)
    moment = N * inverse_count[:, None]
    shrink, dN = _moment_grad(g, x, pi, moment, inverse_count)
    U = _running(dN, _load_row(suffix_dN, carry, head, H, P, BLOCK_P)[None, :], next_decay, CAUSAL, True)
    dsq += pi[:, None] * U
    _store(dw, 2.0 * x * dsq - g * shrink * pi[:, None], tokens, head, exists, H, P, BLOCK_P)
    if decay is not None:
        V = _running(-tl.sum(dN * moment, 1), tl.load(suffix_dD + carry * H + head), next_decay, CAUSAL, True)
        ddecay += tl.sum(U * left_N, 1) + V * left_D
        tl.store(dlog_decay + tokens * H + head, ddecay, mask=exists)


@_jit
def _step_kernel(
    w,
    temp,
    bias,
    log_decay,
    mask,
    sum_sq,
    sum_weighted_sq,
    sum_membership,
    output,
    membership,
    bias_stride,
    floor,
    eps,
    decay_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One token: updates the sums where they lie. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)
    p = tl.arange(0, BLOCK_P)
    is_head = heads < H
    is_channel = is_head[:, None] & (p < P)[None, :]
    places = (row * H + heads)[:, None] * P + p[None, :]
    real = is_head
    if mask is not None:
        real = is_head & (tl.load(mask + row + 0 * heads) != 0)
    x = tl.load(w + places, mask=is_channel & real[:, None], other=0.0).to(tl.float32)
    S = tl.load(sum_sq + places, mask=is_channel, other=0.0)
    N = tl.load(sum_weighted_sq + places, mask=is_channel, other=0.0)
    D = tl.load(sum_membership + row * H + heads, mask=is_head, other=0.0)
    if log_decay is not None:
        decay = tl.load(log_decay + row * decay_stride + heads, mask=real, other=0.0)
        S, N, D = _forget(S, decay[:, None]), _forget(N, decay[:, None]), _forget(D, decay)
    S += x * x
    score = tl.sum(x * x / tl.maximum(S, floor), 1)
    if bias is not None:
        score += P * tl.load(bias + row * bias_stride + heads, mask=is_head, other=0.0)
    score = tl.where(is_head, score * tl.load(temp + heads, mask=is_head, other=0.0), float("-inf"))
    pi = tl.exp(score - tl.max(score, 0))
    pi = tl.where(real, pi / tl.sum(pi, 0), 0.0)
    N += x * x * pi[:, None]
    D += pi
    tl.debug_barrier()  # in small tiles several threads read the same number: all must have, before one writes
    tl.store(sum_sq + places, S, mask=is_channel)
    tl.store(sum_weighted_sq + places, N, mask=is_channel)
    tl.store(sum_membership + row * H + heads, D, mask=is_head)
    tl.store(membership + row * H + heads, pi, mask=is_head)
    moment = (N / (D + eps)[:, None]).to(tl.float32)
    tl.store(output + places, -(x * pi[:, None]) / (1.0 + moment), mask=is_channel)


# ---------------------------------------------------------------------------------------------------------------------
# Launching
# ---------------------------------------------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    tokens: int  # of a chunk
    heads: int
    channels: int
    warps: int
    step_warps: int  # of the decode step, whose one tile is heads x channels


def _blocks(H: int, p: int) -> _Blocks:
    """Block sizes, from the shape of a token alone: depending on T, they would let outputs depend on later tokens.

    Tiles of tokens x channels and of tokens x heads hold up to 2,048 numbers where 16 tokens allow it, 8 a thread: about
    as much as leaves the backward's ten or so tiles in registers, with two programs or more on a multiprocessor.
    """
    heads, channels = _power_of_2(H), _power_of_2(p)
    widest = max(heads, channels)
    tokens, step_warps = max(16, min(64, 2048 // widest)), max(1, min(16, heads * channels // 256))
    return _Blocks(tokens, heads, channels, 8 if widest >= 32 else 4, step_warps)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class _Layout(NamedTuple):
    """How rows are cut. Without packing both tables are None, and the kernels reckon."""

    chunks: int
    sequences: int
    chunk_table: torch.Tensor | None  # (chunks, 4): row, first token, one past the sequence's last token, sequence
    sequence_table: torch.Tensor | None  # (sequences, 4): first chunk, chunks, row if it starts it, row if it ends it; or -1


_packed_layouts = WeakTensorKeyDictionary()  # the layers of a model share one seq_idx, which is read on the host once


def _layout(w: torch.Tensor, seq_idx: torch.Tensor | None, block_t: int) -> _Layout:
    B, T = w.shape[:2]
    if seq_idx is None or w.numel() == 0:
        return _Layout(B * _cdiv(T, block_t), B, None, None)
    if seq_idx.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("Packed rows cannot be captured in a CUDA graph: where sequences end decides which kernels run.")
    if seq_idx.is_inference():  # changes made to such a tensor leave no trace
        return _packed_layout(seq_idx, block_t)
    key = (seq_idx._version, block_t)
    known = _packed_layouts.get(seq_idx)
    if known is None or known[0] != key:
        known = _packed_layouts[seq_idx] = key, _packed_layout(seq_idx, block_t)
    return known[1]


def _packed_layout(seq_idx: torch.Tensor, block_t: int) -> _Layout:
    T = seq_idx.shape[1]
    on_host = seq_idx.cpu()
    row, start = sequence_starts(on_host).nonzero(as_tuple=True)
    stop = start.roll(-1)
    stop[stop == 0] = T  # the next sequence starts the next row
    chunks = _cdiv(stop - start, block_t)
    first = chunks.cumsum(0) - chunks
    sequence = torch.repeat_interleave(chunks)
    chunk_start = start[sequence] + (torch.arange(len(sequence)) - first[sequence]) * block_t
    chunk_table = torch.stack([row[sequence], chunk_start, stop[sequence], sequence], 1)
    sequence_table = torch.stack([first, chunks, row.where(start == 0, -1), row.where(stop == T, -1)], 1)
    return _Layout(len(sequence), len(row), chunk_table.to(seq_idx.device), sequence_table.to(seq_idx.device))


def _cdiv(n, m):
    return (n + m - 1) // m


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


_SCAN_CHUNKS, _SCAN_CHANNELS = 64, 32  # block of the scans over chunk totals


class _Call:
    """What the launches of one forward or backward share."""

    def __init__(self, w, log_decay, mask, seq_idx, causal):
        self.w, self.causal = w.contiguous(), causal
        self.mask = None if mask is None else mask.bool().contiguous().view(torch.uint8)
        self.B, self.T, self.H, self.p = w.shape
        self.blocks = _blocks(self.H, self.p)
        self.layout = _layout(w, seq_idx, self.blocks.tokens)
        log_decay = _contiguous(log_decay)
        self.total_decay = None if log_decay is None else self.new(self.layout.chunks, self.H)
        self.where = (log_decay, self.mask, self.layout.chunk_table)
        self.sizes = {"H": self.H, "P": self.p, "BLOCK_T": self.blocks.tokens, "BLOCK_P": self.blocks.channels}
        self.sizes["num_warps"] = self.blocks.warps

    def new(self, *shape: int) -> torch.Tensor:
        return self.w.new_empty(shape, dtype=torch.float32)

    def new_totals(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.new(self.layout.chunks, self.H, self.p), self.new(self.layout.chunks, self.H)

    def new_state(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.new(*shape) for shape in state_shapes(self.w))

    def per_head(self, kernel, *args, **sizes) -> None:
        kernel[(self.layout.chunks * self.H,)](*args, **self.sizes, **sizes)

    def all_heads(self, kernel, *args) -> None:
        kernel[(self.layout.chunks,)](*args, CAUSAL=self.causal, BLOCK_H=self.blocks.heads, **self.sizes)

    def totals(self, membership: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Chunk totals of w^2 and, given the membership, of Pi w^2 and Pi."""
        total_sq = self.new_totals()[0]
        weighted = (None, None) if membership is None else self.new_totals()
        self.per_head(_totals_kernel, self.w, membership, *self.where, total_sq, *weighted, self.total_decay, self.T)
        return [total_sq, *weighted]

    def scan(self, totals, initial, final, reverse: bool = False) -> list[torch.Tensor]:
        """Carries of one or two quantities from their chunk totals; starts at `initial`, writes `final`, where not None."""
        carries = [x.new_empty(self.layout.chunks if self.causal else self.layout.sequences, *x.shape[1:]) for x in totals]
        widths = [x.shape[1:].numel() for x in totals]
        args = list(zip(totals, carries, initial, final))
        if len(args) == 1:
            args.append((None,) * 4)
            widths.append(0)
        grid = (self.layout.sequences * sum(_cdiv(width, _SCAN_CHANNELS) for width in widths),)
        _scan_kernel[grid](
            *args[0],
            *args[1],
            self.total_decay,
            self.layout.sequence_table,
            self.T,
            *widths,
            H=self.H,
            CAUSAL=self.causal,
            REVERSE=reverse,
            BLOCK_T=self.blocks.tokens,
            BLOCK_N=_SCAN_CHUNKS,
            BLOCK_C=_SCAN_CHANNELS,
        )
        return carries

    def carries(self, membership, initial) -> list[torch.Tensor]:
        """The carries of the three sums of the forward, again."""
        totals = self.totals(membership)
        return self.scan(totals[:1], initial[:1], (None,)) + self.scan(totals[1:], initial[1:], (None, None))


def _carry_sizes(w: torch.Tensor, seq_idx: torch.Tensor | None, causal: bool) -> list[tuple[int]]:
    """Sizes of the flat carries kept for the backward. None for packed rows: their number depends on where sequences end.

    Flat, because a compiler would ask of a dimension of its own whether it is 1, and fix the number of tokens by that.
    """
    B, T, H, p = w.shape
    rows = 0 if seq_idx is not None else B * _cdiv(T, _blocks(H, p).tokens) if causal else B
    return [(rows * H * p,), (rows * H * p,), (rows * H,)]


def _floor(causal: bool) -> float:
    return EPS_SUM_SQ if causal else EPS_NORM**2


def _bias_tokens(bias: torch.Tensor | None) -> int:
    """Tokens after which the bias starts again: those of one row, if the rows share it."""
    return 1 if bias is None else max(1, bias.shape[0] * bias.shape[1])


# ---------------------------------------------------------------------------------------------------------------------
# Custom operators. They cannot return None: what does not exist is an empty tensor.
# ---------------------------------------------------------------------------------------------------------------------


@custom_operator("tssa_forward")
def _forward(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    sum_sq: torch.Tensor | None,
    sum_weighted_sq: torch.Tensor | None,
    sum_membership: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, membership, the three sums after the last token, and three carries for the backward."""
    with torch.cuda.device_of(w):
        call = _Call(w, log_decay, mask, seq_idx, causal)
        output, membership = torch.empty_like(call.w), call.new(call.B, call.T, call.H)
        bias = _contiguous(bias)
        initial = [_contiguous(x) for x in (sum_sq, sum_weighted_sq, sum_membership)]
        final = call.new_state() if causal else (None,) * 3
        sums = call.scan(call.totals()[:1], initial[:1], final[:1])
        totals = call.new_totals()
        call.all_heads(
            _membership_kernel,
            *(call.w, temp, bias, *call.where, *sums, membership, *totals, call.T, _bias_tokens(bias), _floor(causal)),
        )
        sums += call.scan(totals, initial[1:], final[1:])
        call.per_head(
            _output_kernel,
            *(call.w, membership, *call.where, *sums[1:], output, call.T, EPS_MEMBERSHIP),
            CAUSAL=causal,
        )
    after_sq, after_weighted_sq, after_membership = (call.new(0) if x is None else x for x in final)
    carry_sq, carry_weighted_sq, carry_membership = (call.new(0) if seq_idx is not None else x.flatten() for x in sums)
    after = after_sq, after_weighted_sq, after_membership
    return output, membership, *after, carry_sq, carry_weighted_sq, carry_membership


@_forward.register_fake
def _(w, temp, bias, mask, seq_idx, sum_sq, sum_weighted_sq, sum_membership, log_decay, causal):
    shapes = (w.shape[:3], *(state_shapes(w) if causal else ((0,),) * 3), *_carry_sizes(w, seq_idx, causal))
    return w.new_empty(w.shape), *(w.new_empty(shape, dtype=torch.float32) for shape in shapes)


@custom_operator("tssa_backward")
def _backward(
    grad_output: torch.Tensor | None,
    grad_membership: torch.Tensor | None,
    grad_sum_sq: torch.Tensor | None,
    grad_sum_weighted_sq: torch.Tensor | None,
    grad_sum_membership: torch.Tensor | None,
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    sum_sq: torch.Tensor | None,
    sum_weighted_sq: torch.Tensor | None,
    sum_membership: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    membership: torch.Tensor,
    carry_sq: torch.Tensor,
    carry_weighted_sq: torch.Tensor,
    carry_membership: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of w, temp, bias, the three initial sums and the factors' logarithms."""
    with torch.cuda.device_of(w):
        call = _Call(w, log_decay, mask, seq_idx, causal)
        bias, grad_membership = _contiguous(bias), _contiguous(grad_membership)
        grad = torch.zeros_like(call.w) if grad_output is None else grad_output.contiguous()
        sums = [carry_sq, carry_weighted_sq, carry_membership]
        if seq_idx is not None:
            sums = call.carries(membership, [_contiguous(x) for x in (sum_sq, sum_weighted_sq, sum_membership)])
        dS, dN, dD = (_contiguous(x) for x in (grad_sum_sq, grad_sum_weighted_sq, grad_sum_membership))
        dstate = (None,) * 3 if sum_sq is None else call.new_state()
        dw, dscore, dtemp = torch.empty_like(call.w), torch.empty_like(membership), call.new(call.layout.chunks, call.H)

        totals = call.new_totals()
        call.per_head(
            _moment_grad_kernel,
            *(call.w, grad, membership, *call.where, *sums[1:], *totals, call.total_decay, call.T, EPS_MEMBERSHIP),
            CAUSAL=causal,
        )
        suffix_dN, suffix_dD = call.scan(totals, (dN, dD), dstate[1:], reverse=True)
        total_dS = call.new_totals()[0]
        call.all_heads(
            _score_grad_kernel,
            *(call.w, grad, grad_membership, temp, bias, membership, *call.where, *sums, suffix_dN, suffix_dD),
            *(dscore, dtemp, total_dS, call.T, _bias_tokens(bias), _floor(causal), EPS_MEMBERSHIP),
        )
        (suffix_dS,) = call.scan((total_dS,), (dS,), dstate[:1], reverse=True)
        for_decay, dlog_decay = (None, None) if log_decay is None else (suffix_dD, torch.empty_like(membership))
        call.per_head(
            _input_grad_kernel,
            *(call.w, grad, membership, dscore, *call.where, *sums, suffix_dN, for_decay, suffix_dS, dw, dlog_decay, call.T),
            *(_floor(causal), EPS_MEMBERSHIP),
            CAUSAL=causal,
        )
    dbias = call.new(0) if bias is None else dscore.mul_(call.p)
    if bias is not None and bias.shape[0] != call.B:
        dbias = dbias.sum(0, keepdim=True)
    d_sq, d_weighted_sq, d_membership, dlog = (call.new(0) if x is None else x for x in (*dstate, dlog_decay))
    return dw, dtemp.sum(0), dbias, d_sq, d_weighted_sq, d_membership, dlog


@_backward.register_fake
def _(
    grad_output, grad_membership, grad_sum_sq, grad_sum_weighted_sq, grad_sum_membership, w, temp, bias, mask, seq_idx,
    sum_sq, sum_weighted_sq, sum_membership, log_decay, *rest,
):  # fmt: skip
    shapes = (temp.shape, (0,) if bias is None else bias.shape, *(((0,),) * 3 if sum_sq is None else state_shapes(w)))
    shapes += ((0,) if log_decay is None else log_decay.shape,)
    return w.new_empty(w.shape), *(w.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.causal = inputs
    membership, carries = output[1], output[5:]
    ctx.save_for_backward(*tensors, membership, *carries)
    ctx.mark_non_differentiable(*(carries if ctx.causal else output[2:]))
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx, *grads):
    saved = ctx.saved_tensors  # once: checkpointing computes them at each look
    dw, dtemp, dbias, *dstate, dlog_decay = _backward(*grads[:5], *saved, ctx.causal)
    bias, sum_sq, log_decay = saved[2], saved[5], saved[8]
    dbias, dlog_decay = None if bias is None else dbias, None if log_decay is None else dlog_decay
    return dw, dtemp, dbias, None, None, *((None,) * 3 if sum_sq is None else dstate), dlog_decay, None


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)


@custom_operator("tssa_step", mutates_args=("sum_sq", "sum_weighted_sq", "sum_membership"))
def _step(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    sum_sq: torch.Tensor,
    sum_weighted_sq: torch.Tensor,
    sum_membership: torch.Tensor,
    log_decay: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and membership of one token."""
    B, H, p = w.shape
    w, bias, log_decay = w.contiguous(), _contiguous(bias), _contiguous(log_decay)
    output, membership = torch.empty_like(w), w.new_empty((B, H), dtype=torch.float32)
    mask = None if mask is None else mask.bool().contiguous().view(torch.uint8)
    bias_stride, decay_stride = (0 if x is None or x.shape[0] != B else H for x in (bias, log_decay))
    blocks = _blocks(H, p)
    with torch.cuda.device_of(w):
        _step_kernel[(B,)](
            *(w, temp, bias, log_decay, mask, sum_sq, sum_weighted_sq, sum_membership, output, membership),
            *(bias_stride, EPS_SUM_SQ, EPS_MEMBERSHIP, decay_stride),
            H=H,
            P=p,
            BLOCK_H=blocks.heads,
            BLOCK_P=blocks.channels,
            num_warps=blocks.step_warps,
        )
    return output, membership


@_step.register_fake
def _(w, temp, bias, mask, sum_sq, sum_weighted_sq, sum_membership, log_decay):
    return w.new_empty(w.shape), w.new_empty(w.shape[:2], dtype=torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# What tssa.py calls
# ---------------------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Whether Triton can be imported."""
    return triton is not None


def supports(w: torch.Tensor) -> bool:
    """Whether the kernels take `w`: float32, bfloat16 or float16 on a GPU, or anywhere under TRITON_INTERPRET=1."""
    if triton is None or w.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return w.is_cuda or not isinstance(_output_kernel, triton.JITFunction)


def tssa_triton(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    causal: bool,
    log_decay: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """TSSA by the kernels; `tssa.tssa` without its checks of shapes.

    Args:
        w: (B, T, H, p), of a dtype and device that `supports` accepts.
        temp: (H,).
        bias: (B or 1, T, H), or None.
        mask: (B, T), bool, true at real tokens, or None.
        seq_idx: (B, T) integers, packed rows, or None. Read on the host, once for all layers that share the tensor.
        state: sums before the first token, (B, H, p), (B, H, p) and (B, H), or None; causal form only.
        causal: prefix sums or totals.
        log_decay: (B, T, H), logarithms of the factors that the sums are multiplied by before a token is added, or None
            where nothing is forgotten; taken as 0 at padding. Causal form only.

    Returns:
        The output (B, T, H, p) in `w`'s dtype, the membership (B, T, H), and the three sums after the last token (None in
        the bidirectional form), all differentiable once with respect to w, temp, bias, state and log_decay.
    """
    sums = (None,) * 3 if state is None else [x.float() for x in state]
    bias = None if bias is None else bias.float()
    log_decay = None if log_decay is None else log_decay.float()
    if log_decay is not None and mask is not None:
        log_decay = log_decay.masked_fill(~mask.unsqueeze(-1), 0)
    output, membership, *rest = _forward(w, temp.float().contiguous(), bias, mask, seq_idx, *sums, log_decay, causal)
    return output, membership, *(rest[:3] if causal else (None,) * 3)


def tssa_step_triton(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    sum_sq: torch.Tensor,
    sum_weighted_sq: torch.Tensor,
    sum_membership: torch.Tensor,
    log_decay: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal TSSA of one new token. Has no gradient: a backward through it is refused.

    Args:
        w: (B, H, p), of a dtype and device that `supports` accepts.
        temp: (H,).
        bias: (B or 1, H), or None.
        mask: (B,), bool, or None; a padding token leaves the sums as they were.
        sum_sq, sum_weighted_sq, sum_membership: (B, H, p), (B, H, p) and (B, H), float32 or float64 and contiguous; updated
            in place. A million terms added one by one need float64 in the last two.
        log_decay: (B or 1, H), or None; as in `tssa_triton`.

    Returns:
        The output (B, H, p) in `w`'s dtype and the membership (B, H).

    Raises:
        ValueError: the sums have another dtype, or are not contiguous.
    """
    for x in (sum_sq, sum_weighted_sq, sum_membership):
        if x.dtype not in (torch.float32, torch.float64) or not x.is_contiguous():
            raise ValueError(
                f"The sums are updated in place: they must be float32 or float64 and contiguous, got {x.dtype}, {x.stride()}."
            )
    bias = None if bias is None else bias.float()
    log_decay = None if log_decay is None else log_decay.float()
    return _step(w, temp.float().contiguous(), bias, mask, sum_sq, sum_weighted_sq, sum_membership, log_decay)
