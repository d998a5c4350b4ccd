# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The GPU backend of TSSA: Triton kernels, forward and backward, causal and bidirectional, and the one-token decoding step.

The operator is two chained sums over tokens with a softmax over heads between them. As in Mamba-2's chunked scan, tokens are
split into chunks; only chunk totals cross a chunk's border, and totals add. Each direction is three kernels that process all
chunks in parallel, with a scan over the chunk totals ("state passing") after the first and the second:

    forward    totals of S          -> scan -> membership, totals of N and D -> scan -> output
    backward   totals of dN and dD  -> scan -> score gradient, totals of dS  -> scan -> dw

with S = sum w^2, N = sum Pi w^2, D = sum Pi: prefix sums in the causal form, totals in the bidirectional one (`CAUSAL`). The
gradient of a prefix sum is a suffix sum, so the backward scans run in reverse. With decay (`log_decay`), the causal sums are
multiplied by a factor before each token is added: chunk totals are then decayed to the chunk's end (those of gradients to its
start), and the scans take each chunk's sum of log factors. The backward processes a chunk from its end and needs the forward's
sums on the way: its first kernel stores them every 8 tokens.

All three sums of a chunk or sequence are one row of a float32 tensor (rows, 2 C + H), C = H p: S, N, then D; gradients dS, dN,
dD likewise. No sum is formed by subtraction, and there are no atomics: two runs agree bit for bit. Chunks are 64 tokens from
the sequence's start, so an output never depends on later tokens. In packed batches a chunk ends where its sequence does, and a
table built on the host lists the chunks: sequences share nothing, whatever they hold (NaN, inf).

The kernels are bound as custom operators, opaque to compilers, in a namespace named after the package that this file is loaded
into: an installed package and a model's remote code can both be loaded. Nothing here needs Triton until it is called.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .tssa_reference import (
    EPS_MEMBERSHIP,
    EPS_NORM,
    EPS_SUM_SQ,
    bias_of_tokens,
    custom_operator,
    sequence_starts,
    state_dtypes,
    state_shapes,
    zero_state,
)
from .tssa_reference import bidirectional as bidirectional_reference
from .tssa_reference import causal as causal_reference


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


_jit = (lambda fn: fn) if triton is None else triton.jit
_jit_any_length = (lambda fn: fn) if triton is None else triton.jit(do_not_specialize=["T", "bias_tokens"])
# whether the kernels are compiled for NVIDIA devices, and may use one of their instructions
_NVIDIA = None if triton is None else tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)


# ---------------------------------------------------------------------------------------------------------------------
# Loads, stores and masks. Tensors are contiguous: w, grad, output, dw (B, T, H, p); membership, dscore, log_decay and
# dlog_decay (B, T, H); bias (B or 1, T, H). Carries have one row per chunk in the causal form, one per sequence otherwise.
#
# A program takes one chunk and HEADS heads, and loops over the chunk in tiles of TILE tokens x HEADS heads x BLOCK_P >= P
# channels. A thread has 8 neighbouring channels of all of a tile's tokens, so running sums are plain additions in its
# registers. Chunks are addressed with 64 bits, what is inside them with 32.
# ---------------------------------------------------------------------------------------------------------------------


@_jit
def _program(chunk_table, T, H: tl.constexpr, HEADS: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr):
    """The program's chunk and heads (HEADS,); the chunk's first token in the flattened batch, its length, its carry row."""
    groups: tl.constexpr = (H + HEADS - 1) // HEADS
    chunk = tl.program_id(0).to(tl.int64) // groups
    heads = tl.program_id(0) % groups * HEADS + tl.arange(0, HEADS)
    if chunk_table is None:
        per_sequence = tl.cdiv(T, CHUNK)
        row = chunk // per_sequence
        start = (chunk % per_sequence) * CHUNK
        stop = T.to(tl.int64)
        sequence = row
    else:
        row = tl.load(chunk_table + 4 * chunk)
        start = tl.load(chunk_table + 4 * chunk + 1)
        stop = tl.load(chunk_table + 4 * chunk + 2)
        sequence = tl.load(chunk_table + 4 * chunk + 3)
    if CAUSAL:
        carry = chunk
    else:
        carry = sequence
    return chunk, heads, row * T + start, tl.minimum(stop - start, CHUNK).to(tl.int32), carry


@_jit
def _head_mask(exists, heads, H: tl.constexpr):
    """`exists` (TILE,) for each head, (TILE, HEADS), where there is such a head."""
    if tl.constexpr(H) % heads.shape[0] == 0:
        return exists[:, None] & tl.full(heads.shape, True, tl.int1)[None, :]
    else:
        return exists[:, None] & (heads < H)[None, :]


@_jit
def _channel_mask(mask, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """`mask` (..., HEADS) for each channel, (..., HEADS, BLOCK_P), where there is such a channel."""
    mask = tl.expand_dims(mask, -1)
    if P == BLOCK_P:
        return mask
    else:
        return mask & (tl.arange(0, BLOCK_P) < P)


@_jit
def _load(pointer, first, t, heads, exists, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """A tile (TILE, HEADS, BLOCK_P) in float32; 0, and not read, at tokens that do not exist."""
    offsets = (t[:, None] * H + heads[None, :])[:, :, None] * P + tl.arange(0, BLOCK_P)[None, None, :]
    mask = _channel_mask(_head_mask(exists, heads, H), P, BLOCK_P)
    return tl.load(pointer + first * (H * P) + offsets, mask=mask, other=0.0).to(tl.float32)


@_jit
def _store(pointer, value, first, t, heads, exists, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    offsets = (t[:, None] * H + heads[None, :])[:, :, None] * P + tl.arange(0, BLOCK_P)[None, None, :]
    mask = _channel_mask(_head_mask(exists, heads, H), P, BLOCK_P)
    tl.store(pointer + first * (H * P) + offsets, value, mask=mask)


@_jit
def _load_heads(pointer, first, t, heads, exists, H: tl.constexpr):
    """One number per token and head, (TILE, HEADS); 0, and not read, at tokens that do not exist."""
    offsets = t[:, None] * H + heads[None, :]
    return tl.load(pointer + first * H + offsets, mask=_head_mask(exists, heads, H), other=0.0)


@_jit
def _store_heads(pointer, value, first, t, heads, exists, H: tl.constexpr):
    tl.store(pointer + first * H + t[:, None] * H + heads[None, :], value, mask=_head_mask(exists, heads, H))


@_jit
def _load_tile(
    w, membership, log_decay, mask, first, start, count, heads,
    H: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A chunk's tokens from `start` on: their indices, which are real, w, membership (0 of None), log decay."""
    t = start + tl.arange(0, TILE)
    real = t < count
    if mask is not None:
        real = real & (tl.load(mask + first + t, mask=real, other=0) != 0)
    x = _load(w, first, t, heads, real, H, P, BLOCK_P)
    if membership is None:
        pi = tl.zeros([TILE, heads.shape[0]], tl.float32)
    else:
        pi = _load_heads(membership, first, t, heads, real, H)
    if log_decay is None:  # Triton returns a None in a tuple as a literal only
        return t, real, x, pi, None
    else:
        return t, real, x, pi, _load_heads(log_decay, first, t, heads, t < count, H)


@_jit
def _load_state(states, row, heads, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """The three sums of a row: (HEADS, BLOCK_P) twice, and (HEADS,)."""
    states += row * (2 * H * P + H)
    offsets = heads[:, None] * P + tl.arange(0, BLOCK_P)[None, :]
    mask = _channel_mask(heads < H, P, BLOCK_P)
    S = tl.load(states + offsets, mask=mask, other=0.0)
    N = tl.load(states + H * P + offsets, mask=mask, other=0.0)
    return S, N, tl.load(states + 2 * H * P + heads, mask=heads < H, other=0.0)


@_jit
def _store_state(states, row, S, N, D, heads, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """Stores S, or N and D, or all three."""
    states += row * (2 * H * P + H)
    offsets = heads[:, None] * P + tl.arange(0, BLOCK_P)[None, :]
    mask = _channel_mask(heads < H, P, BLOCK_P)
    if S is not None:
        tl.store(states + offsets, S, mask=mask)
    if N is not None:
        tl.store(states + H * P + offsets, N, mask=mask)
        tl.store(states + 2 * H * P + heads, D, mask=heads < H)


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic of tiles
# ---------------------------------------------------------------------------------------------------------------------


@_jit
def _reciprocal(x):
    """1 / x of a normal number: one instruction where it can be named, eight for a quotient."""
    if _NVIDIA:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x


@_jit
def _clamp(S, floor):
    """At least `floor`; NaN stays NaN."""
    return tl.maximum(S, floor, propagate_nan=tl.PropagateNan.ALL)


@_jit
def _expm1_poly(x):
    """exp(x) - 1 for -0.1 < x <= 0, exact to float32, where exp(x) - 1 would keep few digits."""
    return x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))))


@_jit
def _decay_factor(decay):
    """exp(decay), rounded once: the hardware's is off by 2e-7, and the factors of a chunk multiply."""
    return tl.where(decay > -0.1, 1.0 + _expm1_poly(decay), tl.exp(decay))


@_jit
def _apply_decay(total, decay):
    """total * exp(decay). A factor close to 1 would be rounded the same way at each of thousands of steps."""
    return tl.where(decay > -0.1, total + total * _expm1_poly(decay), total * tl.exp(decay))


@_jit
def _scan_combine(factor, total, next_factor, next_total):
    """Two neighbouring spans of tokens as one: the product of the factors, and the decayed total."""
    return factor * next_factor, total * next_factor + next_total


@_jit
def _scan_combine_log(decay, total, next_decay, next_total):
    """`_scan_combine` with log factors: of many chunks, each close to 1, a product would lose digits."""
    return decay + next_decay, total * tl.exp(next_decay) + next_total


@_jit
def _scan_combine_decayed(factor, total, decayed, next_factor, next_total, next_decayed):
    """`_scan_combine`, and the sum before the last token times its factor."""
    return factor * next_factor, total * next_factor + next_total, total * next_factor + next_decayed


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
def _running_sum(values, carry, decay, CAUSAL: tl.constexpr):
    """Prefix sums over a tile's tokens (axis 0) on top of `carry`; in the bidirectional form `carry`, which is the total.

    With `decay`, a sum is multiplied by exp(decay) before the token's own value is added.
    """
    carry = tl.broadcast_to(tl.expand_dims(carry, 0), values.shape)
    if not CAUSAL:
        return carry
    is_first = _per_token(tl.arange(0, values.shape[0]) == 0, values)
    if decay is None:
        return tl.cumsum(tl.where(is_first, carry + values, values), 0)
    else:
        factor = tl.broadcast_to(_per_token(_decay_factor(decay), values), values.shape)
        values = tl.where(is_first, carry * factor + values, values)
        _, values = tl.associative_scan((factor, values), 0, _scan_combine)
        return values


@_jit
def _running_sum_decayed(values, carry, decay, CAUSAL: tl.constexpr):
    """`_running_sum`, and the sum before each token times its factor, where subtracting the token would cancel digits."""
    if decay is None:
        return _running_sum(values, carry, None, CAUSAL), None
    else:
        is_first = _per_token(tl.arange(0, values.shape[0]) == 0, values)
        factor = tl.broadcast_to(_per_token(_decay_factor(decay), values), values.shape)
        decayed = tl.where(is_first, factor * tl.expand_dims(carry, 0), 0.0)
        _, values, decayed = tl.associative_scan((factor, decayed + values, decayed), 0, _scan_combine_decayed)
        return values, decayed


@_jit
def _last(values):
    """The last token's values, selected as integers: adding an integer 0 compiles to nothing, adding a float 0 does not."""
    is_last = _per_token(tl.arange(0, values.shape[0]) == values.shape[0] - 1, values)
    bits = tl.where(is_last, values.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 0).to(tl.float32, bitcast=True)


@_jit
def _total(values, carry, decay):
    """The sum after the tile's last token."""
    return _last(_running_sum(values, carry, decay, True))


@_jit
def _swap_neighbours(bits, distance: tl.constexpr):
    """A tile (TILE, HEADS, ...) with each two neighbouring blocks of `distance` tokens swapped."""
    pairs = tl.reshape(bits, [bits.shape[0] // (2 * distance), 2, distance, bits.shape[1], bits.shape[2]])
    return tl.reshape(tl.sum(pairs, 1, keep_dims=True) - pairs, bits.shape)


@_jit
def _flip(x):
    """A tile with its tokens in reverse order.

    As integers, where a + b - b is b: that compiles to no instruction at all, while a scan in reverse would shuffle values
    between threads.
    """
    bits = x.to(tl.int32, bitcast=True)
    if len(x.shape) == 2:
        bits = bits[:, :, None]
    for power in tl.static_range(5):
        if x.shape[0] > 2**power:
            bits = _swap_neighbours(bits, 2**power)
    return tl.reshape(bits, x.shape).to(tl.float32, bitcast=True)


@_jit
def _suffix_sum(values, carry, next_decay, CAUSAL: tl.constexpr):
    """`_running_sum` over the tokens in reverse; `next_decay` is the log decay of the token after each."""
    if not CAUSAL:
        return tl.broadcast_to(tl.expand_dims(carry, 0), values.shape)
    elif next_decay is None:
        return _flip(_running_sum(_flip(values), carry, None, True))
    else:
        return _flip(_running_sum(_flip(values), carry, _flip(next_decay), True))


@_jit
def _first(values):
    return _last(_flip(values))


@_jit
def _softmax_over_heads(score, temp, heads, real, H: tl.constexpr):
    """The membership (TILE, HEADS); 0 at padding and where there is no such head."""
    score *= tl.load(temp + heads, mask=heads < H, other=0.0)[None, :]
    score = tl.where((heads < H)[None, :], score, float("-inf"))
    pi = tl.exp(score - tl.max(score, 1)[:, None])
    return tl.where(_head_mask(real, heads, H), pi * (1.0 / tl.sum(pi, 1))[:, None], 0.0)


@_jit
def _output_grad(x, g, N, D):
    """From the output's gradient g: the gradient of -w Pi times Pi, and that of N, both still without the factor Pi D.

    The output is -w Pi D / (N + D). The gradient of D is -Pi times the sum over channels of N times the second.
    """
    inverse = _reciprocal(N + D[:, :, None])
    of_w = g * inverse
    return of_w, of_w * x * inverse


@_jit
def _score_grad(x, S, q, floor):
    """1 / S, and the gradient of S through the score, from the score's gradient q (TILE, HEADS)."""
    inverse = _reciprocal(_clamp(S, floor))
    return inverse, tl.where(S < floor, 0.0, -q[:, :, None] * inverse * inverse * (x * x))


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


@_jit_any_length
def chunk_state_kernel(
    w,
    membership,  # None: S only
    log_decay, mask, chunk_table, totals, total_decay,
    T,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Chunk totals of S, of the log factors and, where the membership is known, of N and D."""
    chunk, heads, first, count, _carry = _program(chunk_table, T, H, HEADS, CAUSAL, CHUNK)
    S = tl.zeros([HEADS, BLOCK_P], tl.float32)
    N = tl.zeros([HEADS, BLOCK_P], tl.float32)
    D = tl.zeros([HEADS], tl.float32)
    decay_sum = tl.zeros([HEADS], tl.float32)
    for start in range(0, count, TILE):
        _t, _real, x, pi, decay = _load_tile(w, membership, log_decay, mask, first, start, count, heads, H, P, TILE, BLOCK_P)
        S = _total(x * x, S, decay)
        if log_decay is not None:
            decay_sum += tl.sum(decay, 0)
        if membership is not None:
            N = _total(x * x * pi[:, :, None], N, decay)
            D = _total(pi, D, decay)
    if membership is None:
        _store_state(totals, chunk, S, None, None, heads, H, P, BLOCK_P)
    else:
        _store_state(totals, chunk, S, N, D, heads, H, P, BLOCK_P)
    if log_decay is not None:
        tl.store(total_decay + chunk * H + heads, decay_sum, mask=heads < H)


@_jit_any_length
def state_passing_kernel(
    totals, carries,
    initial_S, initial_N, initial_D,  # (B, H, p) twice and (B, H), or None
    final_S, final_N, final_D,
    total_decay, sequence_table,
    T,
    FROM: tl.constexpr, TO: tl.constexpr,  # columns of the 2 H P + H
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, REVERSE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Carries: exclusive prefix sums of chunk totals over each sequence's chunks, or its total (bidirectional).

    Carry j is the sum of the j chunks before it: the totals are read shifted by one, so that nothing is subtracted. One
    program per sequence and block of columns.
    """
    width: tl.constexpr = 2 * H * P + H
    blocks: tl.constexpr = (TO - FROM + BLOCK_C - 1) // BLOCK_C
    sequence = tl.program_id(0).to(tl.int64) // blocks
    column = FROM + tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < TO
    if sequence_table is None:
        count = tl.cdiv(T, CHUNK).to(tl.int64)
        first = sequence * count
        initial_row = sequence
        final_row = sequence
    else:  # the initial state enters a packed row's first sequence, the final one leaves its last
        first = tl.load(sequence_table + 4 * sequence)
        count = tl.load(sequence_table + 4 * sequence + 1)
        initial_row = tl.load(sequence_table + 4 * sequence + (3 if REVERSE else 2))
        final_row = tl.load(sequence_table + 4 * sequence + (2 if REVERSE else 3))
    is_S = inside & (column < H * P)
    is_N = inside & (column >= H * P) & (column < 2 * H * P)
    is_D = inside & (column >= 2 * H * P)
    carry = tl.zeros([BLOCK_C], tl.float32)
    if initial_S is not None:
        if initial_row >= 0:
            carry += tl.load(initial_S + initial_row * (H * P) + column, mask=is_S, other=0.0).to(tl.float32)
            carry += tl.load(initial_N + initial_row * (H * P) + column - H * P, mask=is_N, other=0.0).to(tl.float32)
            carry += tl.load(initial_D + initial_row * H + column - 2 * H * P, mask=is_D, other=0.0).to(tl.float32)
    for j0 in range(0, count + 1, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        if REVERSE:
            chunk = first + count - 1 - j
            previous = chunk + 1
        else:
            chunk = first + j
            previous = chunk - 1
        known = ((j > 0) & (j <= count))[:, None] & inside[None, :]
        x = tl.load(totals + previous[:, None] * width + column[None, :], mask=known, other=0.0)
        offsets = chunk[:, None] * width + column[None, :]
        is_carry = (j < count)[:, None] & inside[None, :]
        if total_decay is not None:
            head = tl.where(column < 2 * H * P, column // P % H, column - 2 * H * P)
            decay = tl.load(total_decay + previous[:, None] * H + head[None, :], mask=known, other=0.0)
            decay, x = tl.associative_scan((decay, x), 0, _scan_combine_log)
            x += tl.exp(decay) * carry[None, :]
            tl.store(carries + offsets, x, mask=is_carry)
            carry = tl.sum(tl.where((j == j0 + BLOCK_N - 1)[:, None], x, 0.0), 0)
        else:
            if CAUSAL:
                tl.store(carries + offsets, carry[None, :] + tl.cumsum(x, 0), mask=is_carry)
            carry += tl.sum(x, 0)
    if not CAUSAL:
        tl.store(carries + sequence * width + column, carry, mask=inside)
    if final_S is not None:
        if final_row >= 0:
            tl.store(final_S + final_row * (H * P) + column, carry, mask=is_S)
            tl.store(final_N + final_row * (H * P) + column - H * P, carry, mask=is_N)
            tl.store(final_D + final_row * H + column - 2 * H * P, carry, mask=is_D)


@_jit_any_length
def chunk_fwd_membership_kernel(
    w, temp,
    bias,  # or None
    log_decay, mask, chunk_table, carries, membership, totals,
    T,
    bias_tokens,  # after which the bias repeats
    floor,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Softmax over the heads, and the chunk totals of N and D, which need it. All heads in one program."""
    chunk, heads, first, count, carry = _program(chunk_table, T, H, HEADS, CAUSAL, CHUNK)
    S, _N, _D = _load_state(carries, carry, heads, H, P, BLOCK_P)
    total_N = tl.zeros([HEADS, BLOCK_P], tl.float32)
    total_D = tl.zeros([HEADS], tl.float32)
    for start in range(0, count, TILE):
        t, real, x, pi, decay = _load_tile(w, None, log_decay, mask, first, start, count, heads, H, P, TILE, BLOCK_P)
        running_S = _running_sum(x * x, S, decay, CAUSAL)
        score = tl.sum(x * x * _reciprocal(_clamp(running_S, floor)), 2)
        if bias is not None:
            score += P * _load_heads(bias, first % bias_tokens, t, heads, real, H)
        pi = _softmax_over_heads(score, temp, heads, real, H)
        _store_heads(membership, pi, first, t, heads, t < count, H)
        total_N = _total(x * x * pi[:, :, None], total_N, decay)
        total_D = _total(pi, total_D, decay)
        if CAUSAL:
            S = _last(running_S)
    _store_state(totals, chunk, None, total_N, total_D, heads, H, P, BLOCK_P)


@_jit_any_length
def chunk_fwd_output_kernel(
    w, membership, log_decay, mask, chunk_table, carries, output,
    T, eps,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The output -w Pi / (1 + N / D), as -w Pi D / (D + N)."""
    _chunk, heads, first, count, carry = _program(chunk_table, T, H, HEADS, CAUSAL, CHUNK)
    _S, N, D = _load_state(carries, carry, heads, H, P, BLOCK_P)
    for start in range(0, count, TILE):
        t, _real, x, pi, decay = _load_tile(w, membership, log_decay, mask, first, start, count, heads, H, P, TILE, BLOCK_P)
        running_N = _running_sum(x * x * pi[:, :, None], N, decay, CAUSAL)
        running_D = _running_sum(pi, D, decay, CAUSAL)
        value = x * (-pi * (running_D + eps))[:, :, None] * _reciprocal(running_N + (running_D + eps)[:, :, None])
        _store(output, value, first, t, heads, t < count, H, P, BLOCK_P)
        if CAUSAL:
            N = _last(running_N)
            D = _last(running_D)


@_jit_any_length
def chunk_bwd_state_kernel(
    w, grad, membership, log_decay, mask, chunk_table, carries, spans, totals, total_decay,
    T, eps,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Chunk totals of dN and dD; the forward's sums before each span, for the two kernels that process chunks in reverse."""
    chunk, heads, first, count, carry = _program(chunk_table, T, H, HEADS, CAUSAL, CHUNK)
    S, N, D = _load_state(carries, carry, heads, H, P, BLOCK_P)
    dN_sum = tl.zeros([HEADS, BLOCK_P], tl.float32)
    dD_sum = tl.zeros([HEADS, BLOCK_P], tl.float32)
    decay_sum = tl.zeros([HEADS], tl.float32)
    for start in range(0, count, TILE):
        t, real, x, pi, decay = _load_tile(w, membership, log_decay, mask, first, start, count, heads, H, P, TILE, BLOCK_P)
        g = _load(grad, first, t, heads, real, H, P, BLOCK_P)
        running_N = _running_sum(x * x * pi[:, :, None], N, decay, CAUSAL)
        running_D = _running_sum(pi, D, decay, CAUSAL)
        _of_w, dmoment = _output_grad(x, g, running_N, running_D + eps)
        dN = dmoment * (pi * (running_D + eps))[:, :, None]
        dD = dmoment * pi[:, :, None] * running_N
        if log_decay is not None:  # last: with a strong decay, those of small memberships would be no normal numbers
            factor = tl.exp(decay_sum[None, :] + tl.cumsum(decay, 0))[:, :, None]
            dN, dD = dN * factor, dD * factor
            decay_sum += tl.sum(decay, 0)
        dN_sum += tl.sum(dN, 0)
        dD_sum -= tl.sum(dD, 0)
        if CAUSAL:
            if start % SPAN == 0:
                _store_state(spans, chunk * (CHUNK // SPAN) + start // SPAN, S, N, D, heads, H, P, BLOCK_P)
            S = _total(x * x, S, decay)
            N = _last(running_N)
            D = _last(running_D)
    _store_state(totals, chunk, None, dN_sum, tl.sum(dD_sum, 1), heads, H, P, BLOCK_P)
    if log_decay is not None:
        tl.store(total_decay + chunk * H + heads, decay_sum, mask=heads < H)


@_jit
def _load_tile_and_state(
    w, grad, membership, log_decay, mask, spans, chunk, first, count, carry, heads, back,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """`_load_tile` of a chunk's `back`-th tile from its end, the next tokens' log decay, grad, and the forward's sums before.

    Those are the sums before the tile's span plus the tiles between, never the later sums minus tokens. The log decay of the
    token after the chunk counts as 0: carries are decayed already.
    """
    start = (tl.cdiv(count, TILE) - 1 - back) * TILE
    if CAUSAL:
        S, N, D = _load_state(spans, chunk * (CHUNK // SPAN) + start // SPAN, heads, H, P, BLOCK_P)
        for place in range(start // SPAN * SPAN, start, TILE):
            t, real, x, pi, decay = _load_tile(w, membership, log_decay, mask, first, place, count, heads, H, P, TILE, BLOCK_P)
            S = _total(x * x, S, decay)
            N = _total(x * x * pi[:, :, None], N, decay)
            D = _total(pi, D, decay)
    else:
        S, N, D = _load_state(spans, carry, heads, H, P, BLOCK_P)
    t, real, x, pi, decay = _load_tile(w, membership, log_decay, mask, first, start, count, heads, H, P, TILE, BLOCK_P)
    g = _load(grad, first, t, heads, real, H, P, BLOCK_P)
    if log_decay is None:
        return t, real, x, pi, None, None, g, S, N, D
    else:
        next_decay = _load_heads(log_decay, first, t + 1, heads, t + 1 < count, H)
        return t, real, x, pi, decay, next_decay, g, S, N, D


@_jit_any_length
def chunk_bwd_score_kernel(
    w, grad,
    grad_membership,  # or None
    temp,
    bias,  # or None
    membership, log_decay, mask, chunk_table, spans, grad_carries, dscore, dtemp, totals,
    T, bias_tokens, floor, eps,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Backward of the softmax over the heads, and the chunk totals of dS, which need it. All heads in one program."""
    chunk, heads, first, count, carry = _program(chunk_table, T, H, HEADS, CAUSAL, CHUNK)
    _after_dS, after_dN, after_dD = _load_state(grad_carries, carry, heads, H, P, BLOCK_P)
    dS_sum = tl.zeros([HEADS, BLOCK_P], tl.float32)
    dtemp_sum = tl.zeros([HEADS], tl.float32)
    scale = tl.load(temp + heads, mask=heads < H, other=0.0)
    for back in range(0, tl.cdiv(count, TILE)):
        t, real, x, pi, decay, next_decay, g, S, N, D = _load_tile_and_state(
            w, grad, membership, log_decay, mask, spans, chunk, first, count, carry, heads, back,
            H, P, CAUSAL, CHUNK, SPAN, TILE, BLOCK_P,
        )  # fmt: skip
        N = _running_sum(x * x * pi[:, :, None], N, decay, CAUSAL)
        D = _running_sum(pi, D, decay, CAUSAL) + eps
        of_w, dmoment = _output_grad(x, g, N, D)
        dN = _suffix_sum(dmoment * (pi * D)[:, :, None], after_dN, next_decay, CAUSAL)
        dD = _suffix_sum(-pi * tl.sum(dmoment * N, 2), after_dD, next_decay, CAUSAL)
        dpi = tl.sum(x * (x * dN - of_w * D[:, :, None]), 2) + dD
        if grad_membership is not None:
            dpi += _load_heads(grad_membership, first, t, heads, real, H)
        dlogit = pi * (dpi - tl.sum(pi * dpi, 1)[:, None])
        _store_heads(dscore, dlogit * scale[None, :], first, t, heads, t < count, H)
        S = _running_sum(x * x, S, decay, CAUSAL)
        inverse, dS = _score_grad(x, S, dlogit * scale[None, :], floor)
        score = tl.sum(x * x * inverse, 2)
        if bias is not None:
            score += P * _load_heads(bias, first % bias_tokens, t, heads, real, H)
        dtemp_sum += tl.sum(dlogit * score, 0)
        if CAUSAL:
            after_dN = _first(dN)
            after_dD = _first(dD)
        dS_sum = _first(_suffix_sum(dS, dS_sum, next_decay, True))
    if log_decay is not None:
        dS_sum *= _decay_factor(tl.load(log_decay + first * H + heads, mask=heads < H, other=0.0))[:, None]
    tl.store(dtemp + chunk * H + heads, dtemp_sum, mask=heads < H)
    _store_state(totals, chunk, dS_sum, None, None, heads, H, P, BLOCK_P)


@_jit_any_length
def chunk_bwd_input_kernel(
    w, grad, membership, dscore, log_decay, mask, chunk_table, spans, grad_carries, dw, dlog_decay,
    T, floor, eps,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The gradients of w and of the log decay."""
    chunk, heads, first, count, carry = _program(chunk_table, T, H, HEADS, CAUSAL, CHUNK)
    after_dS, after_dN, after_dD = _load_state(grad_carries, carry, heads, H, P, BLOCK_P)
    for back in range(0, tl.cdiv(count, TILE)):
        t, real, x, pi, decay, next_decay, g, S, N, D = _load_tile_and_state(
            w, grad, membership, log_decay, mask, spans, chunk, first, count, carry, heads, back,
            H, P, CAUSAL, CHUNK, SPAN, TILE, BLOCK_P,
        )  # fmt: skip
        q = _load_heads(dscore, first, t, heads, real, H)
        N, decayed_N = _running_sum_decayed(x * x * pi[:, :, None], N, decay, CAUSAL)
        D, decayed_D = _running_sum_decayed(pi, D, decay, CAUSAL)
        of_w, dmoment = _output_grad(x, g, N, D + eps)
        pi_D = (pi * (D + eps))[:, :, None]
        dN = _suffix_sum(dmoment * pi_D, after_dN, next_decay, CAUSAL)
        S, decayed_S = _running_sum_decayed(x * x, S, decay, CAUSAL)
        inverse, dS = _score_grad(x, S, q, floor)
        dS = _suffix_sum(dS, after_dS, next_decay, CAUSAL)
        dsq = q[:, :, None] * inverse + dS + pi[:, :, None] * dN
        _store(dw, 2.0 * x * dsq - of_w * pi_D, first, t, heads, t < count, H, P, BLOCK_P)
        if log_decay is not None:
            dD = _suffix_sum(-pi * tl.sum(dmoment * N, 2), after_dD, next_decay, CAUSAL)
            ddecay = tl.sum(dN * decayed_N + dS * decayed_S, 2) + dD * decayed_D
            _store_heads(dlog_decay, ddecay, first, t, heads, t < count, H)
            after_dD = _first(dD)
        if CAUSAL:
            after_dN = _first(dN)
            after_dS = _first(dS)


@_jit
def step_kernel(
    w, temp,
    bias, log_decay, mask,  # or None
    sum_sq, sum_weighted_sq, sum_membership, output, membership,
    bias_stride, decay_stride,  # 0 where all batch elements share a row
    floor, eps,
    H: tl.constexpr, P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One token: updates the sums in place. One program per batch element."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)
    is_head = heads < H
    is_channel = is_head[:, None] & (tl.arange(0, BLOCK_P) < P)[None, :]
    offsets = (row * H + heads)[:, None] * P + tl.arange(0, BLOCK_P)[None, :]
    real = is_head
    if mask is not None:
        real = is_head & (tl.load(mask + row + 0 * heads) != 0)
    x = tl.load(w + offsets, mask=is_channel & real[:, None], other=0.0).to(tl.float32)
    S = tl.load(sum_sq + offsets, mask=is_channel, other=0.0)
    N = tl.load(sum_weighted_sq + offsets, mask=is_channel, other=0.0)
    D = tl.load(sum_membership + row * H + heads, mask=is_head, other=0.0)
    if log_decay is not None:
        decay = tl.load(log_decay + row * decay_stride + heads, mask=real, other=0.0)
        S, N, D = _apply_decay(S, decay[:, None]), _apply_decay(N, decay[:, None]), _apply_decay(D, decay)
    S += x * x
    score = tl.sum(x * x / _clamp(S, floor), 1)
    if bias is not None:
        score += P * tl.load(bias + row * bias_stride + heads, mask=is_head, other=0.0)
    score = tl.where(is_head, score * tl.load(temp + heads, mask=is_head, other=0.0), float("-inf"))
    pi = tl.exp(score - tl.max(score, 0))
    pi = tl.where(real, pi / tl.sum(pi, 0), 0.0)
    N += x * x * pi[:, None]
    D += pi
    tl.debug_barrier()  # in small tiles several threads read the same number: all must have, before one writes
    tl.store(sum_sq + offsets, S, mask=is_channel)
    tl.store(sum_weighted_sq + offsets, N, mask=is_channel)
    tl.store(sum_membership + row * H + heads, D, mask=is_head)
    tl.store(membership + row * H + heads, pi, mask=is_head)
    moment = (N / (D + eps)[:, None]).to(tl.float32)
    tl.store(output + offsets, -(x * pi[:, None]) / (1.0 + moment), mask=is_channel)


# ---------------------------------------------------------------------------------------------------------------------
# Launching
# ---------------------------------------------------------------------------------------------------------------------


# Tokens of a chunk; of a span, before which the backward stores the forward's sums; of a tile, which a thread holds at once.
_CHUNK, _SPAN, _TILE = 64, 8, 4
_SCAN_CHUNKS, _SCAN_COLUMNS = 64, 32  # block of the scans over chunk totals
# (tokens of a tile, warps of a program) by device name and kernel, where they were measured: `kernel_times.py --sweep` prints
# a line for the GPU it runs on. Tiles are powers of 2, at most 8.
TUNED: dict[str, dict[str, tuple[int, int]]] = {}


class _Blocks(NamedTuple):
    heads: int  # of a program: a power of 2
    channels: int  # a power of 2, at least p
    warps: int


def _blocks(H: int, p: int, all_heads: bool) -> _Blocks:
    """Block sizes, from the shape of a token alone: if they depended on T, outputs would depend on later tokens.

    A warp takes 256 channels, 8 per thread: in bfloat16 those are the 16 bytes that a thread reads at once. With fewer,
    threads would share a tile's tokens.
    """
    channels = triton.next_power_of_2(p)
    heads = max(1, 256 // channels)
    if all_heads:
        heads = max(heads, triton.next_power_of_2(H))
    return _Blocks(heads, channels, min(16, heads * channels // 256))


class _Layout(NamedTuple):
    """How a batch is split into chunks. Without packing both tables are None: the kernels find a chunk from its number."""

    chunks: int
    sequences: int
    chunk_table: torch.Tensor | None  # (chunks, 4): batch row, first token, one past the sequence's last token, sequence
    sequence_table: torch.Tensor | None  # (sequences, 4): first chunk, chunks, row if it starts it, row if it ends it; or -1


_packed_layouts = WeakTensorKeyDictionary()  # of each `seq_idx`, which the layers of a model share: (its version, layout)


def _layout(w: torch.Tensor, seq_idx: torch.Tensor | None) -> _Layout:
    B, T = w.shape[:2]
    if seq_idx is None or w.numel() == 0:
        return _Layout(B * _cdiv(T, _CHUNK), B, None, None)
    if seq_idx.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "Packed sequences cannot be captured in a CUDA graph: where sequences end decides which kernels run."
        )
    if seq_idx.is_inference():  # changes leave no trace in its version
        return _packed_layout(seq_idx)
    version, layout = _packed_layouts.get(seq_idx, (None, None))
    if version != seq_idx._version:
        layout = _packed_layout(seq_idx)
        _packed_layouts[seq_idx] = seq_idx._version, layout
    return layout


def _packed_layout(seq_idx: torch.Tensor) -> _Layout:
    T = seq_idx.shape[1]
    on_host = seq_idx.cpu()
    row, start = sequence_starts(on_host).nonzero(as_tuple=True)
    stop = start.roll(-1)
    stop[stop == 0] = T  # the next sequence starts the next row
    chunks = _cdiv(stop - start, _CHUNK)
    first = chunks.cumsum(0) - chunks
    sequence = torch.repeat_interleave(chunks)
    chunk_start = start[sequence] + (torch.arange(len(sequence)) - first[sequence]) * _CHUNK
    chunk_table = torch.stack([row[sequence], chunk_start, stop[sequence], sequence], 1)
    sequence_table = torch.stack([first, chunks, row.where(start == 0, -1), row.where(stop == T, -1)], 1)
    return _Layout(len(sequence), len(row), chunk_table.to(seq_idx.device), sequence_table.to(seq_idx.device))


def _cdiv(n, m):
    return (n + m - 1) // m


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


class _Launcher:
    """What the launches of one forward or backward share."""

    def __init__(self, w, log_decay, mask, seq_idx, causal):
        self.w, self.causal = w.contiguous(), causal
        self.B, self.T, self.H, self.p = w.shape
        self.layout = _layout(w, seq_idx)
        self.carries = self.layout.chunks if causal else self.layout.sequences
        self.total_decay = None if log_decay is None else self.empty(self.layout.chunks, self.H)
        mask = None if mask is None else mask.bool().contiguous().view(torch.uint8)
        self.tokens = (_contiguous(log_decay), mask, self.layout.chunk_table)
        self.tuned = TUNED.get(torch.cuda.get_device_name(w.device) if w.is_cuda else "cpu", {}) if TUNED else {}

    def empty(self, *shape: int) -> torch.Tensor:
        return self.w.new_empty(shape, dtype=torch.float32)

    def empty_states(self, rows: int) -> torch.Tensor:
        """Rows of S, N and D, as the kernels have them."""
        return self.empty(rows, 2 * self.H * self.p + self.H)

    def final_state(self) -> tuple[torch.Tensor, ...]:
        """Uninitialised tensors of a `TSSAState`."""
        return tuple(self.w.new_empty(size, dtype=dtype) for size, dtype in zip(state_shapes(self.w), state_dtypes(self.w)))

    def launch(self, kernel, *args, all_heads: bool = False, **sizes: int) -> None:
        """Launches a kernel over all chunks; its programs take all heads or as many as a program should have."""
        blocks = _blocks(self.H, self.p, all_heads)
        tile, warps = self.tuned.get(kernel.fn.__name__, (_TILE, blocks.warps))
        heads = blocks.heads if all_heads else max(1, blocks.heads * warps // blocks.warps)
        sizes |= {"H": self.H, "P": self.p, "CAUSAL": self.causal, "CHUNK": _CHUNK}
        grid = (self.layout.chunks * _cdiv(self.H, heads),)
        kernel[grid](*args, **sizes, TILE=tile, HEADS=heads, BLOCK_P=blocks.channels, num_warps=warps)

    def pass_states(self, totals, carries, sums, initial, final, reverse: bool = False) -> None:
        """Fills the carries of the `sums` "S", "ND" or "SND" from chunk totals, from `initial` on; writes `final`."""
        C = self.H * self.p
        first, last = 0 if "S" in sums else C, 2 * C + self.H if "N" in sums else C
        grid = (self.layout.sequences * _cdiv(last - first, _SCAN_COLUMNS),)
        state_passing_kernel[grid](
            *(totals, carries, *initial, *final, self.total_decay, self.layout.sequence_table, self.T, first, last),
            H=self.H,
            P=self.p,
            CAUSAL=self.causal,
            REVERSE=reverse,
            CHUNK=_CHUNK,
            BLOCK_N=_SCAN_CHUNKS,
            BLOCK_C=_SCAN_COLUMNS,
        )


def _epsilon(causal: bool) -> float:
    """The least S."""
    return EPS_SUM_SQ if causal else EPS_NORM**2


NO_STATE = (None, None, None)


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, membership, the three sums after the last token, and the carries for the backward.

    The carries are flat, since a compiler would ask of a dimension whether it is 1, and specialise the number of tokens. Those
    of packed sequences are not returned, since their number depends on where sequences end: the backward recomputes them.
    """
    with torch.cuda.device_of(w):
        run = _Launcher(w, log_decay, mask, seq_idx, causal)
        output, membership, bias = torch.empty_like(run.w), run.empty(run.B, run.T, run.H), _contiguous(bias)
        initial = [_contiguous(x) for x in (sum_sq, sum_weighted_sq, sum_membership)]
        final = run.final_state() if causal else NO_STATE
        totals, carries = run.empty_states(run.layout.chunks), run.empty_states(run.carries)
        run.launch(chunk_state_kernel, run.w, None, *run.tokens, totals, run.total_decay, run.T)
        run.pass_states(totals, carries, "S", initial, final)
        run.launch(
            chunk_fwd_membership_kernel,
            *(run.w, temp, bias, *run.tokens, carries, membership, totals, run.T, _bias_tokens(bias), _epsilon(causal)),
            all_heads=True,
        )
        run.pass_states(totals, carries, "ND", initial, final)
        run.launch(chunk_fwd_output_kernel, run.w, membership, *run.tokens, carries, output, run.T, EPS_MEMBERSHIP)
    after_S, after_N, after_D = (run.empty(0) if x is None else x for x in final)
    return output, membership, after_S, after_N, after_D, carries.flatten() if seq_idx is None else run.empty(0)


def _bias_tokens(bias: torch.Tensor | None) -> int:
    """Tokens of the flattened batch after which a bias (B or 1, T, H) repeats."""
    return 1 if bias is None else max(1, bias.shape[0] * bias.shape[1])


@_forward.register_fake
def _(w, temp, bias, mask, seq_idx, sum_sq, sum_weighted_sq, sum_membership, log_decay, causal):
    B, T, H, p = w.shape
    rows = 0 if seq_idx is not None else B * _cdiv(T, _CHUNK) if causal else B
    sizes = zip(state_shapes(w), state_dtypes(w)) if causal else [((0,), torch.float32)] * 3
    state = [w.new_empty(size, dtype=dtype) for size, dtype in sizes]
    membership, carries = (w.new_empty(size, dtype=torch.float32) for size in ((B, T, H), rows * (2 * H * p + H)))
    return w.new_empty(w.shape), membership, *state, carries


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
    carries: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of w, temp, bias, the three initial sums and the log decay."""
    with torch.cuda.device_of(w):
        run = _Launcher(w, log_decay, mask, seq_idx, causal)
        grad = torch.zeros_like(run.w) if grad_output is None else grad_output.contiguous()
        grad_membership, bias = _contiguous(grad_membership), _contiguous(bias)
        totals, grad_carries = run.empty_states(run.layout.chunks), run.empty_states(run.carries)
        if seq_idx is not None:
            carries = run.empty_states(run.carries)
            run.launch(chunk_state_kernel, run.w, membership, *run.tokens, totals, run.total_decay, run.T)
            initial = [_contiguous(x) for x in (sum_sq, sum_weighted_sq, sum_membership)]
            run.pass_states(totals, carries, "SND", initial, NO_STATE)
        after: list[torch.Tensor | None] = [grad_sum_sq, grad_sum_weighted_sq, grad_sum_membership]
        if any(x is not None for x in after):
            after = [y.zero_() if x is None else x.contiguous() for x, y in zip(after, run.final_state())]
        before = NO_STATE if sum_sq is None else run.final_state()
        spans = run.empty_states(run.layout.chunks * (_CHUNK // _SPAN)) if causal else carries
        run.launch(
            chunk_bwd_state_kernel,
            *(run.w, grad, membership, *run.tokens, carries, spans, totals, run.total_decay, run.T, EPS_MEMBERSHIP),
            SPAN=_SPAN,
        )
        run.pass_states(totals, grad_carries, "ND", after, before, reverse=True)
        dscore, dtemp = torch.empty_like(membership), run.empty(run.layout.chunks, run.H)
        run.launch(
            chunk_bwd_score_kernel,
            *(run.w, grad, grad_membership, temp, bias, membership, *run.tokens, spans, grad_carries, dscore, dtemp, totals),
            *(run.T, _bias_tokens(bias), _epsilon(causal), EPS_MEMBERSHIP),
            all_heads=True,
            SPAN=_SPAN,
        )
        run.pass_states(totals, grad_carries, "S", after, before, reverse=True)
        dw, dlog_decay = torch.empty_like(run.w), None if log_decay is None else torch.empty_like(membership)
        run.launch(
            chunk_bwd_input_kernel,
            *(run.w, grad, membership, dscore, *run.tokens, spans, grad_carries, dw, dlog_decay),
            *(run.T, _epsilon(causal), EPS_MEMBERSHIP),
            SPAN=_SPAN,
        )
    dbias = None
    if bias is not None:
        dbias = run.p * (dscore if bias.shape[0] == run.B else dscore.sum(0, keepdim=True))
    given = (run.empty(0) if x is None else x for x in (dbias, *before, dlog_decay))
    dbias, before_S, before_N, before_D, dlog_decay = given
    return dw, dtemp.sum(0), dbias, before_S, before_N, before_D, dlog_decay


@_backward.register_fake
def _(
    grad_output, grad_membership, grad_sum_sq, grad_sum_weighted_sq, grad_sum_membership, w, temp, bias, mask, seq_idx,
    sum_sq, sum_weighted_sq, sum_membership, log_decay, *rest,
):  # fmt: skip
    def like(x):
        return w.new_empty(0, dtype=torch.float32) if x is None else x.new_empty(x.shape)

    return like(w), like(temp), *(like(x) for x in (bias, sum_sq, sum_weighted_sq, sum_membership, log_decay))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.causal = inputs
    membership, carries = output[1], output[5]
    ctx.save_for_backward(*tensors, membership, carries)
    ctx.mark_non_differentiable(*(output[5:] if ctx.causal else output[2:]))
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx, *grads):
    saved = ctx.saved_tensors  # once: checkpointing recomputes them at each access
    dw, dtemp, dbias, *dstate, dlog_decay = _backward(*grads[:5], *saved, ctx.causal)
    given = [x is not None for x in saved[:9]]
    dbias, *dstate, dlog_decay = (x if y else None for x, y in zip((dbias, *dstate, dlog_decay), (given[2], *given[5:9])))
    return dw, dtemp, dbias, None, None, *dstate, dlog_decay, None


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
    strides = [H if x is not None and x.shape[0] == B else 0 for x in (bias, log_decay)]
    blocks = _blocks(H, p, all_heads=True)
    with torch.cuda.device_of(w):
        step_kernel[(B,)](
            *(w, temp, bias, log_decay, mask, sum_sq, sum_weighted_sq, sum_membership, output, membership),
            *(*strides, EPS_SUM_SQ, EPS_MEMBERSHIP),
            H=H,
            P=p,
            BLOCK_H=blocks.heads,
            BLOCK_P=blocks.channels,
            num_warps=blocks.warps,
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
    """Whether the kernels accept `w`: float32, bfloat16 or float16 on a GPU, or anywhere under TRITON_INTERPRET=1."""
    if triton is None or w.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return w.is_cuda or not isinstance(chunk_fwd_output_kernel, triton.JITFunction)


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
    """`tssa.tssa` by the kernels, without its checks of shapes.

    Args:
        w: (B, T, H, p), of a dtype and device that `supports` accepts.
        temp: (H,).
        bias: (T, H) or (B or 1, T, H), or (positions, H) with `positions`, or None; causal form only.
        mask: (B, T), bool, true at real tokens, or None.
        seq_idx: (B, T) integers, packed sequences, or None. Read on the host, once for all layers that share the tensor.
        state: sums before the first token, (B, H, p), (B, H, p) and (B, H), or None; causal form only.
        causal: prefix sums or totals.
        log_decay: (B, T, H), or None; at padding it counts as 0. Causal form only.
        positions: (B or 1, T) integers, the tokens' rows of `bias`.

    Returns:
        The output (B, T, H, p) in `w`'s dtype, the membership (B, T, H), and the three sums after the last token (None in
        the bidirectional form), all differentiable once with respect to w, temp, bias, state and log_decay.
    """
    if positions is not None and positions.stride(0) == 0:
        positions = positions[:1]  # shared by the batch: one look-up, and one gradient
    bias = bias_of_tokens(bias, positions, torch.float32)
    if bias is not None and bias.ndim == 2:
        bias = bias.unsqueeze(0)
    sums = NO_STATE if state is None else [x.to(dtype) for x, dtype in zip(state, state_dtypes(w))]
    log_decay = None if log_decay is None else log_decay.float()
    if log_decay is not None and mask is not None:
        log_decay = log_decay.masked_fill(~mask.unsqueeze(-1), 0)
    output, membership, *rest = _forward(w, temp.float().contiguous(), bias, mask, seq_idx, *sums, log_decay, causal)
    return output, membership, *(rest[:3] if causal else NO_STATE)


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
    """Causal TSSA of one new token. Has no gradient: a backward through it raises an error.

    Args:
        w: (B, H, p), of a dtype and device that `supports` accepts.
        temp: (H,).
        bias: (B or 1, H), or (positions, H) with `positions`, or None.
        mask: (B,), bool, or None; a padding token leaves the sums as they were.
        sum_sq, sum_weighted_sq, sum_membership: (B, H, p), (B, H, p) and (B, H), float32 or float64 and contiguous; updated
            in place. A million terms added one by one need float64 in the last two.
        log_decay: (B or 1, H), or None.
        positions: (B,) integers, the tokens' rows of `bias`.

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
    bias = bias_of_tokens(bias, positions, torch.float32)
    log_decay = None if log_decay is None else log_decay.float()
    return _step(w, temp.float().contiguous(), bias, mask, sum_sq, sum_weighted_sq, sum_membership, log_decay)


# ---------------------------------------------------------------------------------------------------------------------
# Self-check: on each device, for each token shape and dtype, the kernels are compared once with the float64 reference
# before they are used.
# ---------------------------------------------------------------------------------------------------------------------


CHECK_TOKENS = 70  # more than one chunk, and not a whole number of tiles
CHECK_STEPS = 3
CHECK_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # relative RMS, ten times the rounding

_problems: dict[tuple, str | None] = {}  # what was found, for the life of the process


def kernel_problem(w: torch.Tensor, form: str, *, forgets: bool = False, gradients: bool = False) -> str | None:
    """What is wrong with the kernels for tokens like `w`, as the end of an error message.

    Args:
        w: (..., H, p); only its device, dtype, H and p count.
        form: "bidirectional", "causal", or "step" for one-token steps.
        forgets: whether there is a `log_decay`.
        gradients: whether the backward kernels are checked as well.

    Returns:
        None where nothing is wrong, and where nothing can be checked: while a compiler traces or a CUDA graph is captured.
    """
    if torch.compiler.is_compiling() or type(w) is not torch.Tensor:
        return None
    key = (w.device, w.dtype, *w.shape[-2:], form, forgets, gradients)
    if key not in _problems:
        if w.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        _problems[key] = _find_problem(*key)
    return _problems[key]


def _find_problem(device, dtype, H, p, form, forgets, gradients) -> str | None:
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), torch.autocast(device.type, enabled=False):
            errors = _check_errors(_check_tokens(device, dtype, H, p, form, forgets, gradients), form, gradients)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler, a driver or a launch: whatever it raises, the reference still runs
        found = f"failed with {type(error).__name__}: {str(error)[:500]}"
    else:
        wrong = [f"{name} by {error:.1e}" for name, error in errors.items() if not error < CHECK_TOLERANCES[dtype]]
        if not wrong:
            return None
        found = f"differ from the reference ({', '.join(wrong)})"
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return (
        f"on {place} the Triton kernels {found}. Please report this message to the authors of tost_hf (heads {H}, "
        f"head_dim {p}, {dtype}, {form}{', decay' * forgets}{', gradients' * gradients}, torch {torch.__version__})"
    )


def _check_tokens(device, dtype, H, p, form, forgets, gradients) -> dict[str, torch.Tensor]:
    """Random w (1, CHECK_TOKENS, H, p), temp and, for the causal forms, bias and log decay, without the global generator."""
    draw = torch.Generator().manual_seed(0)
    tokens = {"w": torch.randn(1, CHECK_TOKENS, H, p, generator=draw).to(dtype), "temp": torch.rand(H, generator=draw) + 0.5}
    if form != "bidirectional":
        tokens["bias"] = 0.3 * torch.rand(1, CHECK_TOKENS, H, generator=draw)
        if forgets:
            tokens["log_decay"] = -0.5 * torch.rand(1, CHECK_TOKENS, H, generator=draw)
    return {name: x.to(device).requires_grad_(gradients) for name, x in tokens.items()}


def _check_errors(tokens: dict[str, torch.Tensor], form: str, gradients: bool) -> dict[str, float]:
    """Relative RMS errors of the kernels' output, membership and gradients, by name."""
    exact = {name: x.detach().double().requires_grad_(gradients) for name, x in tokens.items()}
    w, temp, decay = tokens["w"], tokens["temp"], tokens.get("log_decay")
    if form == "step":
        state, steps = zero_state(w), []
        for t in range(CHECK_STEPS):
            now = None if decay is None else decay[:, t]
            steps.append(tssa_step_triton(w[:, t], temp, tokens["bias"][:, t], None, *state, now))
        got = [torch.stack(x, 1) for x in zip(*steps)]
    else:
        got = list(tssa_triton(w, temp, tokens.get("bias"), None, None, None, form == "causal", decay)[:2])
    if form == "bidirectional":
        wanted = list(bidirectional_reference(exact["w"], exact["temp"]))
    else:
        wanted = list(causal_reference(exact["w"], exact["temp"], exact["bias"], log_decay=exact.get("log_decay"))[:2])
    pairs = {name: (x, y[:, : x.shape[1]]) for name, x, y in zip(("output", "membership"), got, wanted)}
    if gradients:
        grads = [
            torch.autograd.grad([x.double().square().sum() for x in out], list(leaves.values()))
            for out, leaves in ((got, tokens), (wanted, exact))
        ]
        pairs |= {f"gradient of {name}": pair for name, pair in zip(tokens, zip(*grads))}
    return {name: ((x.double() - y).square().mean() / y.square().mean()).sqrt().item() for name, (x, y) in pairs.items()}
