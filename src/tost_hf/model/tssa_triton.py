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
at its start), and the scans take in each chunk's sum of the factors' logarithms. The backward goes through a chunk from its
end, and needs the forward's sums on the way: its first kernel keeps them every 8 tokens. Statistics are float32 whatever
comes in, no sum is formed by subtraction, and there are no atomics: two runs agree to the last bit.

Chunks are cut at fixed places, every 64 tokens, so an output never depends on the tokens after it. In packed rows a
chunk ends where its sequence does; a table made on the host lists the chunks, which are the same as if each sequence
were alone.

The kernels are bound as custom operators, opaque to compilers, in a namespace named after the package this file is loaded
into: an installed package and a model's remote code can both be loaded. Nothing here needs Triton until it is called.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from .tssa_reference import EPS_MEMBERSHIP, EPS_NORM, EPS_SUM_SQ, custom_operator, sequence_starts, state_dtypes, state_shapes
from .tssa_tuned import TUNED, Sizes


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


_jit = (lambda fn: fn) if triton is None else triton.jit
_LENGTHS = ["T", "tokens", "chunks", "bias_tokens", "bias_rows"]
_jit_any_length = (lambda fn: fn) if triton is None else triton.jit(do_not_specialize=_LENGTHS)
# where the kernels are compiled for NVIDIA's devices, and so may name one of their instructions
_NVIDIA = None if triton is None else tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels. Tensors are contiguous: w, grad, output, dw (B, T, H, p); membership, dscore, log_decay, dlog_decay (B, T, H);
# chunk totals and carries (chunks, H, p) or (chunks, H), where carries of the bidirectional form have one row a sequence.
#
# A program takes one chunk and either a group of heads or all of them, and goes through the chunk by tiles of TILE tokens x
# HEADS heads x BLOCK_P >= P channels. A thread has 8 neighbouring channels of all of a tile's tokens, so running sums are
# plain additions in its registers. Chunks are placed by 64-bit addresses, what is inside them by 32-bit ones.
# ---------------------------------------------------------------------------------------------------------------------


@_jit
def _chunk(index, chunk_table, T, CAUSAL: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk's first token (its place in the flattened batch), how many it has, and its row of carries."""
    if chunk_table is None:
        per_row = tl.cdiv(T, CHUNK)
        row = index // per_row
        start = (index % per_row) * CHUNK
        stop = T.to(tl.int64)
        sequence = row
    else:
        row = tl.load(chunk_table + 4 * index)
        start = tl.load(chunk_table + 4 * index + 1)
        stop = tl.load(chunk_table + 4 * index + 2)
        sequence = tl.load(chunk_table + 4 * index + 3)
    if CAUSAL:
        carry = index
    else:
        carry = sequence
    return row * T + start, tl.minimum(stop - start, CHUNK).to(tl.int32), carry


@_jit
def _group(H: tl.constexpr, HEADS: tl.constexpr):
    """The chunk and the heads of a program that takes a group of heads."""
    groups: tl.constexpr = (H + HEADS - 1) // HEADS
    return tl.program_id(0).to(tl.int64) // groups, tl.program_id(0) % groups * HEADS + tl.arange(0, HEADS)


@_jit
def _real(mask, first, t, exists):
    """Which of a chunk's tokens t exist and are not padding."""
    if mask is not None:
        exists = exists & (tl.load(mask + first + t, mask=exists, other=0) != 0)
    return exists


@_jit
def _of_heads(exists, heads, H: tl.constexpr):
    """`exists` (TILE,) for each of the heads, (TILE, HEADS), where there is such a head."""
    if tl.constexpr(H) % heads.shape[0] == 0:
        return exists[:, None] & tl.full(heads.shape, True, tl.int1)[None, :]
    else:
        return exists[:, None] & (heads < H)[None, :]


@_jit
def _of_channels(of_heads, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """`of_heads` (..., HEADS) for each of the channels, (..., HEADS, BLOCK_P), where there is such a channel."""
    of_heads = tl.expand_dims(of_heads, -1)
    if P == BLOCK_P:
        return of_heads
    else:
        return of_heads & (tl.arange(0, BLOCK_P) < P)


@_jit
def _load(pointer, first, t, heads, exists, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """A tile of tokens, (TILE, HEADS, BLOCK_P) in float32; where none `exists`, 0 and not read."""
    places = (t[:, None] * H + heads[None, :])[:, :, None] * P + tl.arange(0, BLOCK_P)[None, None, :]
    here = _of_channels(_of_heads(exists, heads, H), P, BLOCK_P)
    return tl.load(pointer + first * (H * P) + places, mask=here, other=0.0).to(tl.float32)


@_jit
def _store(pointer, value, first, t, heads, exists, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    places = (t[:, None] * H + heads[None, :])[:, :, None] * P + tl.arange(0, BLOCK_P)[None, None, :]
    tl.store(pointer + first * (H * P) + places, value, mask=_of_channels(_of_heads(exists, heads, H), P, BLOCK_P))


@_jit
def _load_heads(pointer, first, t, heads, exists, H: tl.constexpr):
    """A number of each token and head, (TILE, HEADS); where none `exists`, 0 and not read."""
    places = t[:, None] * H + heads[None, :]
    return tl.load(pointer + first * H + places, mask=_of_heads(exists, heads, H), other=0.0)


@_jit
def _store_heads(pointer, value, first, t, heads, exists, H: tl.constexpr):
    places = t[:, None] * H + heads[None, :]
    tl.store(pointer + first * H + places, value, mask=_of_heads(exists, heads, H))


@_jit
def _load_bias(
    bias, positions, first, t, heads, exists, bias_tokens, bias_rows, row_stride, head_stride, H: tl.constexpr
):  # fmt: skip
    """The score bias of each token and head, (TILE, HEADS); NaN where a token's position is no row of `bias`."""
    if positions is None:
        bias += first % bias_tokens * row_stride
        rows = t
        inside = exists
    else:
        rows = tl.load(positions + first % bias_tokens + t, mask=exists, other=0)
        inside = exists & (rows.to(tl.uint32, bitcast=True) < bias_rows)
    places = rows[:, None] * row_stride + heads[None, :] * head_stride
    values = tl.load(bias + places, mask=_of_heads(inside, heads, H), other=0.0)
    if positions is None:
        return values
    else:
        return tl.where((exists & ~inside)[:, None], float("nan"), values)


@_jit
def _load_row(pointer, row, heads, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """The heads' part of a row of carries, (HEADS, BLOCK_P)."""
    places = heads[:, None] * P + tl.arange(0, BLOCK_P)[None, :]
    return tl.load(pointer + row * (H * P) + places, mask=_of_channels(heads < H, P, BLOCK_P), other=0.0)


@_jit
def _store_row(pointer, value, row, heads, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    places = heads[:, None] * P + tl.arange(0, BLOCK_P)[None, :]
    tl.store(pointer + row * (H * P) + places, value, mask=_of_channels(heads < H, P, BLOCK_P))


@_jit
def _decay(log_decay, first, t, heads, exists, H: tl.constexpr):
    """Logarithms of the factors (TILE, HEADS), 0 where no token is; None if nothing is forgotten."""
    if log_decay is None:
        return None
    else:
        return _load_heads(log_decay, first, t, heads, exists, H)


@_jit
def _inverse(x):
    """1 / x, of a normal number: one instruction where it can be named, eight for a quotient."""
    if _NVIDIA:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x


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
    """(TILE,) or (TILE, HEADS) with as many dimensions as `values`."""
    missing: tl.constexpr = len(values.shape) - len(x.shape)
    if missing == 2:
        return x[:, None, None]
    elif missing == 1:
        return tl.expand_dims(x, -1)
    else:
        return x


@_jit
def _running(values, carry, decay, CAUSAL: tl.constexpr):
    """Sums over tokens (axis 0): those of the tile on top of the carry, or the carry alone, which is then the total.

    With `decay`, a sum is multiplied by exp(decay) before the token's own value is added to it.
    """
    carry = tl.broadcast_to(tl.expand_dims(carry, 0), values.shape)
    if not CAUSAL:
        return carry
    is_first = _per_token(tl.arange(0, values.shape[0]) == 0, values)
    if decay is None:
        return tl.cumsum(tl.where(is_first, carry + values, values), 0)
    else:
        factor = tl.broadcast_to(_per_token(_factor(decay), values), values.shape)
        values = tl.where(is_first, carry * factor + values, values)
        _, values = tl.associative_scan((factor, values), 0, _join)
        return values


@_jit
def _last(values):
    """The last token's numbers. Picked as integers: adding a float 0 is an instruction, adding an integer one is none."""
    is_last = _per_token(tl.arange(0, values.shape[0]) == values.shape[0] - 1, values)
    if len(values.shape) == 2:
        return tl.sum(tl.where(is_last, values, 0.0), 0)  # in threads that may share the tokens
    bits = tl.where(is_last, values.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 0).to(tl.float32, bitcast=True)


@_jit
def _total(values, carry, decay):
    """The sum after the tile's last token."""
    if decay is None:
        return carry + tl.sum(values, 0)
    else:
        return _last(_running(values, carry, decay, True))


@_jit
def _tile(w, mask, first, start, count, heads, H: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, BLOCK_P: tl.constexpr):
    """A chunk's tokens from `start` on: which they are, which are real, and w."""
    t = start + tl.arange(0, TILE)
    real = _real(mask, first, t, t < count)
    return t, real, _load(w, first, t, heads, real, H, P, BLOCK_P)


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
    CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Chunk totals of w^2, of the factors' logarithms and, where the membership is known, of Pi w^2 and Pi.

    One program a chunk and group of heads.
    """
    index, heads = _group(H, HEADS)
    first, count, _ = _chunk(index, chunk_table, T, CAUSAL, CHUNK)
    sum_sq = tl.zeros([HEADS, BLOCK_P], tl.float32)
    weighted_sq = tl.zeros([HEADS, BLOCK_P], tl.float32)
    pi_sum = tl.zeros([HEADS], tl.float32)
    decay_sum = tl.zeros([HEADS], tl.float32)
    for start in range(0, count, TILE):
        t, real, x = _tile(w, mask, first, start, count, heads, H, P, TILE, BLOCK_P)
        decay = _decay(log_decay, first, t, heads, t < count, H)
        sum_sq = _total(x * x, sum_sq, decay)
        if log_decay is not None:
            decay_sum += tl.sum(decay, 0)
        if membership is not None:
            pi = _load_heads(membership, first, t, heads, real, H)
            weighted_sq = _total(x * x * pi[:, :, None], weighted_sq, decay)
            pi_sum = _total(pi, pi_sum, decay)
    _store_row(total_sq, sum_sq, index, heads, H, P, BLOCK_P)
    if log_decay is not None:
        tl.store(total_decay + index * H + heads, decay_sum, mask=heads < H)
    if membership is not None:
        _store_row(total_weighted_sq, weighted_sq, index, heads, H, P, BLOCK_P)
        tl.store(total_membership + index * H + heads, pi_sum, mask=heads < H)


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
            carry += tl.load(initial + initial_row * width + channels, mask=inside, other=0.0).to(tl.float32)
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


@_jit
def _softmax_over_heads(score, temp, heads, real, H: tl.constexpr):
    """The membership (TILE, HEADS); 0 where no real token or no such head is."""
    score *= tl.load(temp + heads, mask=heads < H, other=0.0)[None, :]
    score = tl.where((heads < H)[None, :], score, float("-inf"))
    pi = tl.exp(score - tl.max(score, 1)[:, None])
    return tl.where(_of_heads(real, heads, H), pi * (1.0 / tl.sum(pi, 1))[:, None], 0.0)


@_jit_any_length
def _membership_kernel(
    w,
    temp,
    bias,  # a row for each position, or for each of the first tokens
    positions,  # or None
    log_decay,
    mask,
    chunk_table,
    sum_sq,
    membership,
    total_weighted_sq,
    total_membership,
    T,
    bias_tokens,  # after which positions, or without them rows of the bias, start again
    bias_rows,
    row_stride,
    head_stride,
    floor,
    H: tl.constexpr,
    P: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Softmax over the heads, and the chunk totals that need it. One program a chunk, all heads."""
    index = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)
    first, count, carry = _chunk(index, chunk_table, T, CAUSAL, CHUNK)
    before = _load_row(sum_sq, carry, heads, H, P, BLOCK_P)
    weighted_sq = tl.zeros([HEADS, BLOCK_P], tl.float32)
    pi_sum = tl.zeros([HEADS], tl.float32)
    for start in range(0, count, TILE):
        t, real, x = _tile(w, mask, first, start, count, heads, H, P, TILE, BLOCK_P)
        decay = _decay(log_decay, first, t, heads, t < count, H)
        S = _running(x * x, before, decay, CAUSAL)
        score = tl.sum(x * x * _inverse(tl.maximum(S, floor)), 2)
        if bias is not None:
            places = bias_tokens, bias_rows, row_stride, head_stride
            score += P * _load_bias(bias, positions, first, t, heads, real, *places, H)
        pi = _softmax_over_heads(score, temp, heads, real, H)
        _store_heads(membership, pi, first, t, heads, t < count, H)
        weighted_sq = _total(x * x * pi[:, :, None], weighted_sq, decay)
        pi_sum = _total(pi, pi_sum, decay)
        if CAUSAL:
            before = _last(S)
    _store_row(total_weighted_sq, weighted_sq, index, heads, H, P, BLOCK_P)
    tl.store(total_membership + index * H + heads, pi_sum, mask=heads < H)


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
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The output -w Pi / (1 + N / D), as -w Pi D / (D + N). One program a chunk and group of heads."""
    index, heads = _group(H, HEADS)
    first, count, carry = _chunk(index, chunk_table, T, CAUSAL, CHUNK)
    weighted_sq = _load_row(sum_weighted_sq, carry, heads, H, P, BLOCK_P)
    pi_sum = tl.load(sum_membership + carry * H + heads, mask=heads < H, other=0.0)
    for start in range(0, count, TILE):
        t, real, x = _tile(w, mask, first, start, count, heads, H, P, TILE, BLOCK_P)
        pi = _load_heads(membership, first, t, heads, real, H)
        decay = _decay(log_decay, first, t, heads, t < count, H)
        N = _running(x * x * pi[:, :, None], weighted_sq, decay, CAUSAL)
        D = _running(pi, pi_sum, decay, CAUSAL)
        value = x * (-pi * (D + eps))[:, :, None] * _inverse(N + (D + eps)[:, :, None])
        _store(output, value, first, t, heads, t < count, H, P, BLOCK_P)
        if CAUSAL:
            weighted_sq = _last(N)
            pi_sum = _last(D)


@_jit
def _swap(bits, distance: tl.constexpr):
    """A tile (TILE, HEADS, ...) with each two neighbouring blocks of `distance` tokens swapped."""
    pairs = tl.reshape(bits, [bits.shape[0] // (2 * distance), 2, distance, bits.shape[1], bits.shape[2]])
    return tl.reshape(tl.sum(pairs, 1, keep_dims=True) - pairs, bits.shape)


@_jit
def _flip(x):
    """A tile with its tokens in reverse order.

    By integers, where a + b - b is b: that compiles to no instruction at all, and a scan in reverse would shuffle between
    threads.
    """
    bits = x.to(tl.int32, bitcast=True)
    if len(x.shape) == 2:
        bits = bits[:, :, None]
    for power in tl.static_range(5):
        if x.shape[0] > 2**power:
            bits = _swap(bits, 2**power)
    return tl.reshape(bits, x.shape).to(tl.float32, bitcast=True)


@_jit
def _suffix(values, carry, next_decay, CAUSAL: tl.constexpr):
    """As `_running`, over the tokens in reverse; `next_decay` is that of the token after each."""
    if not CAUSAL:
        return tl.broadcast_to(tl.expand_dims(carry, 0), values.shape)
    elif next_decay is None:
        return _flip(_running(_flip(values), carry, None, True))
    else:
        return _flip(_running(_flip(values), carry, _flip(next_decay), True))


@_jit
def _first(values):
    return _last(_flip(values))


@_jit
def _total_back(values, carry, next_decay):
    """The sum before the tile's first token, from that of the tokens after it."""
    if next_decay is None:
        return carry + tl.sum(values, 0)
    else:
        return _first(_suffix(values, carry, next_decay, True))


@_jit
def _next_decay(log_decay, first, t, heads, count, H: tl.constexpr):
    """Logarithm of the next token's factor; 0 where the chunk ends, since carries are decayed by then."""
    return _decay(log_decay, first, t + 1, heads, t + 1 < count, H)


@_jit
def _output_grad(x, g, N, D):
    """From the output's gradient g: the gradient of -w Pi times Pi, and that of N, both still without the factor Pi D.

    The output is -w Pi D / (N + D). The gradient of D is -Pi times the sum over channels of N and what is returned last.
    """
    inverse = _inverse(N + D[:, :, None])
    of_w = g * inverse
    return of_w, of_w * x * inverse


@_jit_any_length
def _moment_grad_kernel(
    w,
    grad,
    membership,
    log_decay, mask, chunk_table,
    sum_sq, sum_weighted_sq, sum_membership,
    span_sq, span_weighted_sq, span_membership,
    total_dN, total_dD, total_decay,
    T, eps,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Chunk totals of the gradients of N and D; the forward's sums before each span, for the two kernels that go back.

    One program a chunk and group of heads.
    """
    index, heads = _group(H, HEADS)
    first, count, carry = _chunk(index, chunk_table, T, CAUSAL, CHUNK)
    before_sq = _load_row(sum_sq, carry, heads, H, P, BLOCK_P)
    weighted_sq = _load_row(sum_weighted_sq, carry, heads, H, P, BLOCK_P)
    pi_sum = tl.load(sum_membership + carry * H + heads, mask=heads < H, other=0.0)
    dN_sum = tl.zeros([HEADS, BLOCK_P], tl.float32)
    dD_sum = tl.zeros([HEADS, BLOCK_P], tl.float32)
    decay_sum = tl.zeros([HEADS], tl.float32)
    for start in range(0, count, TILE):
        t, real, x = _tile(w, mask, first, start, count, heads, H, P, TILE, BLOCK_P)
        pi = _load_heads(membership, first, t, heads, real, H)
        decay = _decay(log_decay, first, t, heads, t < count, H)
        g = _load(grad, first, t, heads, real, H, P, BLOCK_P)
        N = _running(x * x * pi[:, :, None], weighted_sq, decay, CAUSAL)
        D = _running(pi, pi_sum, decay, CAUSAL)
        _, dmoment = _output_grad(x, g, N, D + eps)
        dN = dmoment * (pi * (D + eps))[:, :, None]
        dD = dmoment * pi[:, :, None] * N
        if log_decay is not None:  # last: with a strong factor, those of small memberships would be no normal numbers
            left = tl.exp(decay_sum[None, :] + tl.cumsum(decay, 0))[:, :, None]
            dN, dD = dN * left, dD * left
            decay_sum += tl.sum(decay, 0)
        dN_sum += tl.sum(dN, 0)
        dD_sum -= tl.sum(dD, 0)
        if CAUSAL:
            if start % SPAN == 0:
                row = index * (CHUNK // SPAN) + start // SPAN
                _store_row(span_sq, before_sq, row, heads, H, P, BLOCK_P)
                _store_row(span_weighted_sq, weighted_sq, row, heads, H, P, BLOCK_P)
                tl.store(span_membership + row * H + heads, pi_sum, mask=heads < H)
            before_sq = _total(x * x, before_sq, decay)
            weighted_sq = _last(N)
            pi_sum = _last(D)
    _store_row(total_dN, dN_sum, index, heads, H, P, BLOCK_P)
    tl.store(total_dD + index * H + heads, tl.sum(dD_sum, 1), mask=heads < H)
    if log_decay is not None:
        tl.store(total_decay + index * H + heads, decay_sum, mask=heads < H)


@_jit
def _sums_before(
    span_sq, span_weighted_sq, span_membership, w, membership, log_decay, mask, index, first, start, count, carry, heads,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The forward's sums before a tile: those before its span, and the tiles between. Never by taking off what came later."""
    row = carry
    if CAUSAL:
        row = index * (CHUNK // SPAN) + start // SPAN
    S = _load_row(span_sq, row, heads, H, P, BLOCK_P)
    N = _load_row(span_weighted_sq, row, heads, H, P, BLOCK_P)
    D = tl.load(span_membership + row * H + heads, mask=heads < H, other=0.0)
    if CAUSAL:
        for earlier in range(start // SPAN * SPAN, start, TILE):
            t, real, x = _tile(w, mask, first, earlier, count, heads, H, P, TILE, BLOCK_P)
            pi = _load_heads(membership, first, t, heads, real, H)
            decay = _decay(log_decay, first, t, heads, t < count, H)
            S = _total(x * x, S, decay)
            N = _total(x * x * pi[:, :, None], N, decay)
            D = _total(pi, D, decay)
    return S, N, D


@_jit
def _score_grad(x, S, q, floor):
    """1 / S, and the gradient of S by way of the score, from the score's gradient q (TILE, HEADS)."""
    inverse = _inverse(tl.maximum(S, floor))
    return inverse, tl.where(S < floor, 0.0, -q[:, :, None] * inverse * inverse * (x * x))


@_jit_any_length
def _score_grad_kernel(
    w,
    grad,
    grad_membership,  # or None
    temp,
    bias,
    positions,
    membership,
    log_decay, mask, chunk_table,
    span_sq, span_weighted_sq, span_membership,
    suffix_dN, suffix_dD, dscore, dtemp, total_dS,
    T, bias_tokens, bias_rows, row_stride, head_stride, floor, eps,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Backward of the softmax over the heads, and the chunk totals that need it. One program a chunk, all heads."""
    index = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)
    first, count, carry = _chunk(index, chunk_table, T, CAUSAL, CHUNK)
    after_dN = _load_row(suffix_dN, carry, heads, H, P, BLOCK_P)
    after_dD = tl.load(suffix_dD + carry * H + heads, mask=heads < H, other=0.0)
    dS_sum = tl.zeros([HEADS, BLOCK_P], tl.float32)
    dtemp_sum = tl.zeros([HEADS], tl.float32)
    scale = tl.load(temp + heads, mask=heads < H, other=0.0)
    for back in range(0, tl.cdiv(count, TILE)):
        start = (tl.cdiv(count, TILE) - 1 - back) * TILE
        S, N, D = _sums_before(
            span_sq, span_weighted_sq, span_membership, w, membership, log_decay, mask, index, first, start, count, carry,
            heads, H, P, CAUSAL, CHUNK, SPAN, TILE, BLOCK_P,
        )  # fmt: skip
        t, real, x = _tile(w, mask, first, start, count, heads, H, P, TILE, BLOCK_P)
        pi = _load_heads(membership, first, t, heads, real, H)
        decay = _decay(log_decay, first, t, heads, t < count, H)
        next_decay = _next_decay(log_decay, first, t, heads, count, H)
        g = _load(grad, first, t, heads, real, H, P, BLOCK_P)
        N = _running(x * x * pi[:, :, None], N, decay, CAUSAL)
        D = _running(pi, D, decay, CAUSAL) + eps
        of_w, dmoment = _output_grad(x, g, N, D)
        U = _suffix(dmoment * (pi * D)[:, :, None], after_dN, next_decay, CAUSAL)
        V = _suffix(-pi * tl.sum(dmoment * N, 2), after_dD, next_decay, CAUSAL)
        dpi = tl.sum(x * (x * U - of_w * D[:, :, None]), 2) + V
        if grad_membership is not None:
            dpi += _load_heads(grad_membership, first, t, heads, real, H)
        dlogit = pi * (dpi - tl.sum(pi * dpi, 1)[:, None])
        _store_heads(dscore, dlogit * scale[None, :], first, t, heads, t < count, H)
        S = _running(x * x, S, decay, CAUSAL)
        inverse, dS = _score_grad(x, S, dlogit * scale[None, :], floor)
        score = tl.sum(x * x * inverse, 2)
        if bias is not None:
            places = bias_tokens, bias_rows, row_stride, head_stride
            score += P * _load_bias(bias, positions, first, t, heads, real, *places, H)
        dtemp_sum += tl.sum(dlogit * score, 0)
        if CAUSAL:
            after_dN = _first(U)
            after_dD = _first(V)
        dS_sum = _total_back(dS, dS_sum, next_decay)
    if log_decay is not None:
        dS_sum *= _factor(tl.load(log_decay + first * H + heads, mask=heads < H, other=0.0))[:, None]
    tl.store(dtemp + index * H + heads, dtemp_sum, mask=heads < H)
    _store_row(total_dS, dS_sum, index, heads, H, P, BLOCK_P)


@_jit
def _join_and_left(factor, total, left, next_factor, next_total, next_left):
    """As `_join`, and what the last factor leaves of the sum before it."""
    return factor * next_factor, total * next_factor + next_total, total * next_factor + next_left


@_jit
def _running_and_left(values, carry, decay, CAUSAL: tl.constexpr):
    """Sums up to each token, and what its factor left of the sum before it, for which `sum - value` would cancel digits."""
    if decay is None:
        return _running(values, carry, None, CAUSAL), None
    else:
        is_first = _per_token(tl.arange(0, values.shape[0]) == 0, values)
        factor = tl.broadcast_to(_per_token(_factor(decay), values), values.shape)
        left = tl.where(is_first, factor * tl.expand_dims(carry, 0), 0.0)
        _, values, left = tl.associative_scan((factor, left + values, left), 0, _join_and_left)
        return values, left


@_jit_any_length
def _input_grad_kernel(
    w,
    grad,
    membership,
    dscore,
    log_decay,
    mask,
    chunk_table,
    span_sq,
    span_weighted_sq,
    span_membership,
    suffix_dN,
    suffix_dD,  # None where nothing is forgotten
    suffix_dS,
    dw,
    dlog_decay,
    T,
    floor,
    eps,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The gradients of w and of the factors' logarithms. One program a chunk and group of heads."""
    index, heads = _group(H, HEADS)
    first, count, carry = _chunk(index, chunk_table, T, CAUSAL, CHUNK)
    after_dN = _load_row(suffix_dN, carry, heads, H, P, BLOCK_P)
    after_dS = _load_row(suffix_dS, carry, heads, H, P, BLOCK_P)
    if log_decay is not None:
        after_dD = tl.load(suffix_dD + carry * H + heads, mask=heads < H, other=0.0)
    for back in range(0, tl.cdiv(count, TILE)):
        start = (tl.cdiv(count, TILE) - 1 - back) * TILE
        S, N, D = _sums_before(
            span_sq, span_weighted_sq, span_membership, w, membership, log_decay, mask, index, first, start, count, carry,
            heads, H, P, CAUSAL, CHUNK, SPAN, TILE, BLOCK_P,
        )  # fmt: skip
        t, real, x = _tile(w, mask, first, start, count, heads, H, P, TILE, BLOCK_P)
        pi = _load_heads(membership, first, t, heads, real, H)
        decay = _decay(log_decay, first, t, heads, t < count, H)
        next_decay = _next_decay(log_decay, first, t, heads, count, H)
        g = _load(grad, first, t, heads, real, H, P, BLOCK_P)
        q = _load_heads(dscore, first, t, heads, real, H)
        N, left_N = _running_and_left(x * x * pi[:, :, None], N, decay, CAUSAL)
        D, left_D = _running_and_left(pi, D, decay, CAUSAL)
        of_w, dmoment = _output_grad(x, g, N, D + eps)
        pi_D = (pi * (D + eps))[:, :, None]
        U = _suffix(dmoment * pi_D, after_dN, next_decay, CAUSAL)
        S, left_S = _running_and_left(x * x, S, decay, CAUSAL)
        inverse, dS = _score_grad(x, S, q, floor)
        W = _suffix(dS, after_dS, next_decay, CAUSAL)
        dsq = q[:, :, None] * inverse + W + pi[:, :, None] * U
        _store(dw, 2.0 * x * dsq - of_w * pi_D, first, t, heads, t < count, H, P, BLOCK_P)
        if log_decay is not None:
            V = _suffix(-pi * tl.sum(dmoment * N, 2), after_dD, next_decay, CAUSAL)
            ddecay = tl.sum(U * left_N + W * left_S, 2) + V * left_D
            _store_heads(dlog_decay, ddecay, first, t, heads, t < count, H)
            after_dD = _first(V)
        if CAUSAL:
            after_dN = _first(U)
            after_dS = _first(W)


@_jit_any_length
def _finish_kernel(
    dscore,
    order,  # (tokens,), tokens by their row of the bias; None where token i has row i % bias_rows
    ends,  # (bias_rows + 1,), where each row's tokens start in `order`, and where the last one's end
    dtemp_of_chunks,
    dbias,  # or None
    dtemp,
    tokens,
    bias_rows,
    chunks,
    row_stride,
    head_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradients of temp and the bias, from those of chunks and tokens: one program for temp, then one for each row."""
    row = tl.program_id(0).to(tl.int64) - 1
    heads = tl.arange(0, HEADS)
    total = tl.zeros([BLOCK, HEADS], tl.float32)
    if row < 0:
        for j in range(0, chunks, BLOCK):
            chunk = j + tl.arange(0, BLOCK)
            total += _load_heads(dtemp_of_chunks, 0, chunk, heads, chunk < chunks, H)
        tl.store(dtemp + heads, tl.sum(total, 0), mask=heads < H)
    elif dbias is not None:
        if order is None:
            count = tl.cdiv(tokens - row, bias_rows)
        else:
            first = tl.load(ends + row)
            count = tl.load(ends + row + 1) - first
        for start in range(0, count, BLOCK):
            i = start + tl.arange(0, BLOCK)
            if order is None:
                token = row + i * bias_rows
            else:
                token = tl.load(order + first + i, mask=i < count, other=0)
            total += _load_heads(dscore, 0, token, heads, i < count, H)
        tl.store(dbias + row * row_stride + heads * head_stride, P * tl.sum(total, 0), mask=heads < H)


@_jit
def _step_kernel(
    w,
    temp,
    bias,
    positions,
    log_decay,
    mask,
    sum_sq,
    sum_weighted_sq,
    sum_membership,
    output,
    membership,
    position_stride, bias_rows, row_stride, head_stride,
    floor,
    eps,
    decay_stride,
    H: tl.constexpr, P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
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
        place = row
        inside = is_head
        if positions is not None:
            place = tl.load(positions + row * position_stride + 0 * heads).to(tl.int64)
            inside = is_head & (place >= 0) & (place < bias_rows)
        score += P * tl.load(bias + place * row_stride + heads * head_stride, mask=inside, other=float("nan"))
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
    heads: int  # of a program that takes them all: a power of 2, at least H
    group: int  # of one that does not
    channels: int  # a power of 2, at least p
    warps: int  # of a program that takes all heads
    group_warps: int  # of one that does not


def _blocks(H: int, p: int) -> _Blocks:
    """Block sizes, from the shape of a token alone: depending on T, they would let outputs depend on later tokens.

    A warp takes 256 channels, 8 a thread: in bfloat16 those are the 16 bytes that a thread reads at once. With fewer,
    threads would share a tile's tokens.
    """
    channels = _power_of_2(p)
    group = max(1, 256 // channels)
    heads = max(group, _power_of_2(H))
    warps, group_warps = (min(16, h * channels // 256) for h in (heads, group))
    return _Blocks(heads, group, channels, warps, group_warps)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class _Layout(NamedTuple):
    """How rows are cut. Without packing both tables are None: the kernels find a chunk from its number."""

    chunks: int
    sequences: int
    chunk_table: torch.Tensor | None  # (chunks, 4): row, first token, one past the sequence's last token, sequence
    sequence_table: torch.Tensor | None  # (sequences, 4): first chunk, chunks, row if it starts it, row if it ends it; or -1


_known = WeakTensorKeyDictionary()  # what the layers of a model find in a tensor that they share, such as seq_idx, once


def _layout(w: torch.Tensor, seq_idx: torch.Tensor | None, block_t: int) -> _Layout:
    B, T = w.shape[:2]
    if seq_idx is None or w.numel() == 0:
        return _Layout(B * _cdiv(T, block_t), B, None, None)
    if seq_idx.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("Packed rows cannot be captured in a CUDA graph: where sequences end decides which kernels run.")
    return _find_once(_packed_layout, seq_idx, block_t)


def _find_once(find, x: torch.Tensor, *others):
    """find(x, *others), from memory where x and the others are what they were; other tensors count by themselves."""
    tensors = [y for y in (x, *others) if isinstance(y, torch.Tensor)]
    # changes made to some tensors leave no trace, nor do those that a graph makes
    if any(y.is_inference() for y in tensors) or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return find(x, *others)
    key = tuple((WeakIdRef(y), y._version) if isinstance(y, torch.Tensor) else y for y in (x, *others))
    known = _known.setdefault(x, {})
    if find not in known or known[find][0] != key:
        known[find] = key, find(x, *others)
    return known[find][1]


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


class _Bias(NamedTuple):
    """The score bias as the kernels read it."""

    table: torch.Tensor | None  # (rows, H)
    positions: torch.Tensor | None  # (B or 1, T), rows of the table
    tokens: int  # after which positions, or without them rows of the table, start again
    rows: int
    strides: tuple[int, ...]


def _bias(table: torch.Tensor | None, positions: torch.Tensor | None) -> _Bias:
    if table is None:
        return _Bias(None, None, 1, 1, (1, 1))
    rows, positions = len(table), None if positions is None else _find_once(_short_positions, positions)
    return _Bias(table, positions, max(1, rows if positions is None else positions.numel()), rows, table.stride())


def _short_positions(positions: torch.Tensor) -> torch.Tensor:
    """Positions as int32, half of the bytes; one row where all rows share it."""
    return (positions[:1] if positions.stride(0) == 0 else positions).to(torch.int32).contiguous()


def _tokens_by_row(positions: torch.Tensor, mask: torch.Tensor | None, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Real tokens by their row of the bias: their places in the flattened batch, and where each row's start (rows + 1,)."""
    if mask is not None:
        positions = positions.masked_fill(~mask.bool(), rows)
    of_tokens, order = positions.flatten().sort(stable=True)
    return order, torch.searchsorted(of_tokens, torch.arange(rows + 1, device=positions.device))


def _cdiv(n, m):
    return (n + m - 1) // m


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


# Tokens of a chunk; of a span, before which the backward keeps the forward's sums; of a tile, which a thread holds at once.
_CHUNK, _SPAN, _TILE = 64, 8, 4
_SCAN_CHUNKS, _SCAN_CHANNELS = 64, 32  # block of the scans over chunk totals
_FINISH_TOKENS = 64  # or chunks, that a program adds up at once


class _Call:
    """What the launches of one forward or backward share."""

    def __init__(self, w, log_decay, mask, seq_idx, causal):
        self.w, self.causal = w.contiguous(), causal
        self.mask = None if mask is None else mask.bool().contiguous().view(torch.uint8)
        self.B, self.T, self.H, self.p = w.shape
        self.blocks = _blocks(self.H, self.p)
        self.layout = _layout(w, seq_idx, _CHUNK)
        log_decay = _contiguous(log_decay)
        self.total_decay = None if log_decay is None else self.new(self.layout.chunks, self.H)
        self.where = (log_decay, self.mask, self.layout.chunk_table)
        self.sizes = {"H": self.H, "P": self.p, "CHUNK": _CHUNK, "BLOCK_P": self.blocks.channels, "CAUSAL": causal}
        self.tuned = TUNED.get(torch.cuda.get_device_name(w.device) if w.is_cuda else "cpu", {}) if TUNED else {}

    def new(self, *shape: int) -> torch.Tensor:
        return self.w.new_empty(shape, dtype=torch.float32)

    def new_totals(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.new(self.layout.chunks, self.H, self.p), self.new(self.layout.chunks, self.H)

    def new_span_sums(self) -> tuple[torch.Tensor, ...]:
        spans = self.layout.chunks * (_CHUNK // _SPAN)
        return self.new(spans, self.H, self.p), self.new(spans, self.H, self.p), self.new(spans, self.H)

    def new_state(self) -> tuple[torch.Tensor, ...]:
        sizes = zip(state_shapes(self.w), state_dtypes(self.w))
        return tuple(self.w.new_empty(shape, dtype=dtype) for shape, dtype in sizes)

    def by_group(self, kernel, *args, **sizes) -> None:
        """Launches a kernel whose programs take a group of heads each."""
        tile, num_warps = self.tuned.get(kernel.fn.__name__, Sizes(_TILE, self.blocks.group_warps))
        group = max(1, self.blocks.group * num_warps // self.blocks.group_warps)
        grid = (self.layout.chunks * _cdiv(self.H, group),)
        kernel[grid](*args, HEADS=group, TILE=tile, num_warps=num_warps, **self.sizes, **sizes)

    def all_heads(self, kernel, *args, **sizes) -> None:
        """Launches a kernel whose programs take all heads."""
        tile, num_warps = self.tuned.get(kernel.fn.__name__, Sizes(_TILE, self.blocks.warps))
        grid = (self.layout.chunks,)
        kernel[grid](*args, HEADS=self.blocks.heads, TILE=tile, num_warps=num_warps, **self.sizes, **sizes)

    def totals(self, membership: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Chunk totals of w^2 and, given the membership, of Pi w^2 and Pi."""
        total_sq = self.new_totals()[0]
        weighted = (None, None) if membership is None else self.new_totals()
        self.by_group(_totals_kernel, self.w, membership, *self.where, total_sq, *weighted, self.total_decay, self.T)
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
            BLOCK_T=_CHUNK,
            BLOCK_N=_SCAN_CHUNKS,
            BLOCK_C=_SCAN_CHANNELS,
        )
        return carries

    def finish(self, dscore, dtemp_of_chunks, bias, positions, mask) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradients of temp and the bias."""
        dtemp, tokens, rows = self.new(self.H), self.B * self.T, 0 if bias is None else len(bias)
        order = ends = dbias = None
        if bias is not None:
            dbias = torch.empty_like(bias)
            if positions is not None:
                order, ends = _find_once(_tokens_by_row, positions, mask, rows)
        strides = (1, 1) if dbias is None else dbias.stride()
        _finish_kernel[(1 + rows,)](
            *(dscore, order, ends, dtemp_of_chunks, dbias, dtemp, tokens, rows, self.layout.chunks, *strides),
            H=self.H,
            P=self.p,
            HEADS=_power_of_2(self.H),
            BLOCK=_FINISH_TOKENS,
            num_warps=2,
        )
        return dtemp, dbias

    def carries(self, membership, initial) -> list[torch.Tensor]:
        """The carries of the three sums of the forward, again."""
        totals = self.totals(membership)
        return self.scan(totals[:1], initial[:1], (None,)) + self.scan(totals[1:], initial[1:], (None, None))


def _carry_sizes(w: torch.Tensor, seq_idx: torch.Tensor | None, causal: bool) -> list[tuple[int]]:
    """Sizes of the flat carries kept for the backward. None for packed rows: their number depends on where sequences end.

    Flat, because a compiler would ask of a dimension of its own whether it is 1, and fix the number of tokens by that.
    """
    B, T, H, p = w.shape
    rows = 0 if seq_idx is not None else B * _cdiv(T, _CHUNK) if causal else B
    return [(rows * H * p,), (rows * H * p,), (rows * H,)]


def _floor(causal: bool) -> float:
    return EPS_SUM_SQ if causal else EPS_NORM**2


# ---------------------------------------------------------------------------------------------------------------------
# Custom operators. They cannot return None: what does not exist is an empty tensor.
# ---------------------------------------------------------------------------------------------------------------------


@custom_operator("tssa_forward")
def _forward(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor | None,
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
        by_position = _bias(bias, positions)
        initial = [_contiguous(x) for x in (sum_sq, sum_weighted_sq, sum_membership)]
        final = call.new_state() if causal else (None,) * 3
        sums = call.scan(call.totals()[:1], initial[:1], final[:1])
        totals = call.new_totals()
        call.all_heads(
            _membership_kernel,
            *(call.w, temp, by_position.table, by_position.positions, *call.where, *sums, membership, *totals, call.T),
            *(by_position.tokens, by_position.rows, *by_position.strides, _floor(causal)),
        )
        sums += call.scan(totals, initial[1:], final[1:])
        call.by_group(
            _output_kernel,
            *(call.w, membership, *call.where, *sums[1:], output, call.T, EPS_MEMBERSHIP),
        )
    after_sq, after_weighted_sq, after_membership = (call.new(0) if x is None else x for x in final)
    carry_sq, carry_weighted_sq, carry_membership = (call.new(0) if seq_idx is not None else x.flatten() for x in sums)
    after = after_sq, after_weighted_sq, after_membership
    return output, membership, *after, carry_sq, carry_weighted_sq, carry_membership


@_forward.register_fake
def _(w, temp, bias, positions, mask, seq_idx, sum_sq, sum_weighted_sq, sum_membership, log_decay, causal):
    states = zip(state_shapes(w), state_dtypes(w)) if causal else [((0,), torch.float32)] * 3
    single = zip((w.shape[:3], *_carry_sizes(w, seq_idx, causal)), [torch.float32] * 4)
    membership, *carries = (w.new_empty(shape, dtype=dtype) for shape, dtype in single)
    state = (w.new_empty(shape, dtype=dtype) for shape, dtype in states)
    return w.new_empty(w.shape), membership, *state, *carries


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
    positions: torch.Tensor | None,
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
        grad_membership, by_position = _contiguous(grad_membership), _bias(bias, positions)
        grad = torch.zeros_like(call.w) if grad_output is None else grad_output.contiguous()
        sums = [carry_sq, carry_weighted_sq, carry_membership]
        if seq_idx is not None:
            sums = call.carries(membership, [_contiguous(x) for x in (sum_sq, sum_weighted_sq, sum_membership)])
        dS, dN, dD = (_contiguous(x) for x in (grad_sum_sq, grad_sum_weighted_sq, grad_sum_membership))
        dstate = (None,) * 3 if sum_sq is None else call.new_state()
        dw, dscore, dtemp = torch.empty_like(call.w), torch.empty_like(membership), call.new(call.layout.chunks, call.H)
        before, totals = call.new_span_sums() if causal else sums, call.new_totals()
        call.by_group(
            _moment_grad_kernel,
            *(call.w, grad, membership, *call.where, *sums, *before, *totals, call.total_decay, call.T, EPS_MEMBERSHIP),
            SPAN=_SPAN,
        )
        suffix_dN, suffix_dD = call.scan(totals, (dN, dD), dstate[1:], reverse=True)
        total_dS = call.new_totals()[0]
        call.all_heads(
            _score_grad_kernel,
            *(call.w, grad, grad_membership, temp, by_position.table, by_position.positions, membership, *call.where),
            *(*before, suffix_dN, suffix_dD, dscore, dtemp, total_dS),
            *(call.T, by_position.tokens, by_position.rows, *by_position.strides, _floor(causal), EPS_MEMBERSHIP),
            SPAN=_SPAN,
        )
        (suffix_dS,) = call.scan((total_dS,), (dS,), dstate[:1], reverse=True)
        for_decay, dlog_decay = (None, None) if log_decay is None else (suffix_dD, torch.empty_like(membership))
        call.by_group(
            _input_grad_kernel,
            *(call.w, grad, membership, dscore, *call.where, *before, suffix_dN, for_decay, suffix_dS, dw, dlog_decay),
            *(call.T, _floor(causal), EPS_MEMBERSHIP),
            SPAN=_SPAN,
        )
        dtemp, dbias = call.finish(dscore, dtemp, bias, positions, mask)
    given = (call.new(0) if x is None else x for x in (dbias, *dstate, dlog_decay))
    dbias, d_sq, d_weighted_sq, d_membership, dlog_decay = given
    return dw, dtemp, dbias, d_sq, d_weighted_sq, d_membership, dlog_decay


@_backward.register_fake
def _(
    grad_output, grad_membership, grad_sum_sq, grad_sum_weighted_sq, grad_sum_membership, w, temp, bias, positions, mask,
    seq_idx, sum_sq, sum_weighted_sq, sum_membership, log_decay, *rest,
):  # fmt: skip
    def like(x):
        return w.new_empty(0, dtype=torch.float32) if x is None else x.new_empty(x.shape)

    dbias = like(None) if bias is None else torch.empty_like(bias)
    others = sum_sq, sum_weighted_sq, sum_membership, log_decay
    return w.new_empty(w.shape), torch.empty_like(temp), dbias, *(like(x) for x in others)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.causal = inputs
    membership, carries = output[1], output[5:]
    ctx.save_for_backward(*tensors, membership, *carries)
    ctx.mark_non_differentiable(*(carries if ctx.causal else output[2:]))
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx, *grads):
    saved = ctx.saved_tensors  # once: checkpointing computes them at each look
    dw, dtemp, dbias, *dstate, dlog_decay = _backward(*grads[:5], *saved, ctx.causal)
    bias, sum_sq, log_decay = saved[2], saved[6], saved[9]
    dbias, dlog_decay = None if bias is None else dbias, None if log_decay is None else dlog_decay
    return dw, dtemp, dbias, None, None, None, *((None,) * 3 if sum_sq is None else dstate), dlog_decay, None


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)


@custom_operator("tssa_step", mutates_args=("sum_sq", "sum_weighted_sq", "sum_membership"))
def _step(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor | None,
    mask: torch.Tensor | None,
    sum_sq: torch.Tensor,
    sum_weighted_sq: torch.Tensor,
    sum_membership: torch.Tensor,
    log_decay: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and membership of one token."""
    B, H, p = w.shape
    w, log_decay = w.contiguous(), _contiguous(log_decay)
    output, membership = torch.empty_like(w), w.new_empty((B, H), dtype=torch.float32)
    mask = None if mask is None else mask.bool().contiguous().view(torch.uint8)
    decay_stride = 0 if log_decay is None or log_decay.shape[0] != B else H
    rows, strides = (1, (1, 1)) if bias is None else (len(bias), bias.stride())
    if positions is None and rows != B:
        strides = 0, strides[1]
    blocks = _blocks(H, p)
    with torch.cuda.device_of(w):
        _step_kernel[(B,)](
            *(w, temp, bias, positions, log_decay, mask, sum_sq, sum_weighted_sq, sum_membership, output, membership),
            *(0 if positions is None else positions.stride(0), rows, *strides, EPS_SUM_SQ, EPS_MEMBERSHIP, decay_stride),
            H=H,
            P=p,
            BLOCK_H=blocks.heads,
            BLOCK_P=blocks.channels,
            num_warps=blocks.warps,
        )
    return output, membership


@_step.register_fake
def _(w, temp, bias, positions, mask, sum_sq, sum_weighted_sq, sum_membership, log_decay):
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
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """TSSA by the kernels; `tssa.tssa` without its checks of shapes.

    Args:
        w: (B, T, H, p), of a dtype and device that `supports` accepts.
        temp: (H,).
        bias: (B or 1, T, H), or (rows, H) with `positions`, or None.
        mask: (B, T), bool, true at real tokens, or None.
        seq_idx: (B, T) integers, packed rows, or None. Read on the host, once for all layers that share the tensor.
        state: sums before the first token, (B, H, p), (B, H, p) and (B, H), in the dtypes of a `TSSAState`, or None; causal
            form only.
        causal: prefix sums or totals.
        log_decay: (B, T, H), logarithms of the factors that the sums are multiplied by before a token is added, or None
            where nothing is forgotten; taken as 0 at padding. Causal form only.
        positions: (B or 1, T) integers, the tokens' rows of `bias`; where one is none, the membership is NaN.

    Returns:
        The output (B, T, H, p) in `w`'s dtype, the membership (B, T, H), and the three sums after the last token (None in
        the bidirectional form), all differentiable once with respect to w, temp, bias, state and log_decay.
    """
    sums = (None,) * 3 if state is None else [x.to(dtype) for x, dtype in zip(state, state_dtypes(w))]
    bias = None if bias is None else bias.float() if positions is not None else bias.float().reshape(-1, w.shape[2])
    log_decay = None if log_decay is None else log_decay.float()
    if positions is not None and positions.shape[0] != w.shape[0]:
        positions = positions.expand(w.shape[:2])
    if log_decay is not None and mask is not None:
        log_decay = log_decay.masked_fill(~mask.unsqueeze(-1), 0)
    output, membership, *rest = _forward(
        w, temp.float().contiguous(), bias, positions, mask, seq_idx, *sums, log_decay, causal
    )
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
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal TSSA of one new token. Has no gradient: a backward through it is refused.

    Args:
        w: (B, H, p), of a dtype and device that `supports` accepts.
        temp: (H,).
        bias: (B or 1, H), or (rows, H) with `positions`, or None.
        mask: (B,), bool, or None; a padding token leaves the sums as they were.
        sum_sq, sum_weighted_sq, sum_membership: (B, H, p), (B, H, p) and (B, H), float32 or float64 and contiguous; updated
            in place. A million terms added one by one need float64 in the last two.
        log_decay: (B or 1, H), or None; as in `tssa_triton`.
        positions: (B,) integers, the tokens' rows of `bias`; where one is none, the output is NaN.

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
    return _step(w, temp.float().contiguous(), bias, positions, mask, sum_sq, sum_weighted_sq, sum_membership, log_decay)
