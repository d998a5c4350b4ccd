# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The Triton backend of TSSA: kernels for GPUs, forward and backward, causal and bidirectional, and the one-token step.

TSSA is two chained sums over tokens with a softmax over heads between them. As in Mamba-2's chunked scan, tokens are split
into chunks, and only the totals of chunks cross their boundaries. Forward and backward run three kernels each, which process
all chunks in parallel, with a scan over the chunk totals ("state passing") after the first and the second:

    forward    totals of S          -> scan -> membership, totals of N and D -> scan -> output
    backward   totals of dN and dD  -> scan -> score gradient, totals of dS  -> scan -> dw

with S = sum w^2, N = sum Pi w^2, D = sum Pi: prefix sums in the causal form, totals in the bidirectional one (`CAUSAL`). The
gradient of a prefix sum is a suffix sum, so the backward scans run in reverse. With decay (`log_decay`), the state is
multiplied by the decay before each token is added: chunk totals are decayed to the chunk's end (those of gradients to its
start), and the scans read each chunk's sum of log decays; packed sequences have a log decay of -inf at their first tokens. The
backward processes a chunk from its end and needs the state before each token: its first kernel stores it for each sub-chunk.

The state (S, N, D) of a sequence, chunk or sub-chunk is a row of a float32 tensor (states, 2 C + H), C = H p; gradients are
stored as dS, dN, dD. No sum is formed by subtraction, and there are no atomics: results are bitwise reproducible. Chunks are
counted from the sequence's start, so an output never depends on later tokens.

The kernels are registered as custom operators, which are opaque to compilers. This file can be imported without Triton.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .tssa_reference import (
    EPS_MEMBERSHIP,
    EPS_NORM,
    EPS_SUM_SQ,
    TSSAState,
    as_state,
    custom_operator,
    differentiate_reference,
    tssa_reference,
    zero_state,
)


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


_jit = (lambda fn: fn) if triton is None else triton.jit
_jit_any_length = (lambda fn: fn) if triton is None else triton.jit(do_not_specialize=["T"])
_constexpr = (lambda x: x) if triton is None else tl.constexpr
# whether the kernels are compiled for NVIDIA devices and may contain PTX
_NVIDIA = _constexpr(triton is not None and not triton.knobs.runtime.interpret and torch.version.hip is None)

# Tokens of a chunk, of a sub-chunk (the backward stores the state before each), and of a tile (in a thread's registers)
CHUNK, SUB_CHUNK, TILE = 64, 8, 4
SCAN_CHUNKS, SCAN_COLUMNS = 64, 32  # block of the scans over chunk totals
_CHUNK, _SUB_CHUNK, _TILE = _constexpr(CHUNK), _constexpr(SUB_CHUNK), _constexpr(TILE)
_EPS_SUM_SQ, _EPS_SQUARED_NORM, _EPS_MEMBERSHIP = map(_constexpr, (EPS_SUM_SQ, EPS_NORM**2, EPS_MEMBERSHIP))


# Loads, stores and masks -----------------------------------------------------------------------------------------------
#
# Tensors are contiguous: w, grad, output, dw (B, T, H, p); membership, bias, dscore, log_decay and
# dlog_decay (B, T, H). Carries are the states before each chunk in the causal form, and of each sequence otherwise.
#
# A program processes one chunk and HEADS heads, and loops over the chunk in tiles of TILE tokens x HEADS heads x BLOCK_P >= P
# channels. A thread has 8 adjacent channels of all tokens of a tile, so running sums are additions in its registers.
# Offsets of chunks have 64 bits, offsets within them 32.


@_jit
def _locate_program(T, H: tl.constexpr, HEADS: tl.constexpr, CAUSAL: tl.constexpr):
    """The program's chunk and heads (HEADS,); the chunk's first token in the flattened batch, its length and carry index."""
    head_blocks: tl.constexpr = (H + HEADS - 1) // HEADS
    chunk = tl.program_id(0).to(tl.int64) // head_blocks
    heads = tl.program_id(0) % head_blocks * HEADS + tl.arange(0, HEADS)
    chunks_per_sequence = tl.cdiv(T, _CHUNK)
    sequence = chunk // chunks_per_sequence
    start = chunk % chunks_per_sequence * _CHUNK
    length = tl.minimum(T - start, _CHUNK).to(tl.int32)
    if CAUSAL:
        return chunk, heads, sequence * T + start, length, chunk
    else:
        return chunk, heads, sequence * T + start, length, sequence


@_jit
def _tile_offsets(mask, first_token, start, length, heads, H: tl.constexpr):
    """A tile that begins at token `start`: offsets in the chunk, whether these are in bounds, and whether the tokens are real;
    each (TILE, HEADS)."""
    t = start + tl.arange(0, _TILE)
    in_bounds = t < length
    is_real = in_bounds
    if mask is not None:
        is_real = is_real & (tl.load(mask + first_token + t, mask=is_real, other=0) != 0)
    if tl.constexpr(H) % heads.shape[0] == 0:
        is_head = tl.full(heads.shape, True, tl.int1)
    else:
        is_head = heads < H
    return t[:, None] * H + heads[None, :], in_bounds[:, None] & is_head[None, :], is_real[:, None] & is_head[None, :]


@_jit
def _channel_offsets(head_offsets, mask, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """Offsets (..., HEADS, BLOCK_P) of the channels of heads at `head_offsets` (..., HEADS), and their mask."""
    channel = tl.arange(0, BLOCK_P)
    channel_offsets, mask = tl.expand_dims(head_offsets, -1) * P + channel, tl.expand_dims(mask, -1)
    if P == BLOCK_P:
        return channel_offsets, mask
    else:
        return channel_offsets, mask & (channel < P)


@_jit
def _load_tile(pointer, first_token, head_offsets, mask, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """A tile (TILE, HEADS, BLOCK_P) in float32; 0 and not read where the mask is false."""
    channel_offsets, mask = _channel_offsets(head_offsets, mask, P, BLOCK_P)
    return tl.load(pointer + first_token * (H * P) + channel_offsets, mask=mask, other=0.0).to(tl.float32)


@_jit
def _store_tile(pointer, value, first_token, head_offsets, mask, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    channel_offsets, mask = _channel_offsets(head_offsets, mask, P, BLOCK_P)
    tl.store(pointer + first_token * (H * P) + channel_offsets, value, mask=mask)


@_jit
def _load_heads(pointer, first_token, head_offsets, mask, H: tl.constexpr):
    """One number per token and head, (TILE, HEADS); 0 and not read where the mask is false. None if `pointer` is None."""
    if pointer is not None:  # without `return None`, which Triton 3.6 cannot compile
        return tl.load(pointer + first_token * H + head_offsets, mask=mask, other=0.0)


@_jit
def _store_heads(pointer, value, first_token, head_offsets, mask, H: tl.constexpr):
    tl.store(pointer + first_token * H + head_offsets, value, mask=mask)


@_jit
def _load_state(states, index, heads, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """The three sums of a state: S and N (HEADS, BLOCK_P), and D (HEADS,)."""
    states += index * (2 * H * P + H)
    channel_offsets, mask = _channel_offsets(heads, heads < H, P, BLOCK_P)
    S = tl.load(states + channel_offsets, mask=mask, other=0.0)
    N = tl.load(states + H * P + channel_offsets, mask=mask, other=0.0)
    return S, N, tl.load(states + 2 * H * P + heads, mask=heads < H, other=0.0)


@_jit
def _store_state(states, index, S, N, D, heads, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """Stores S, or N and D, or all three."""
    states += index * (2 * H * P + H)
    channel_offsets, mask = _channel_offsets(heads, heads < H, P, BLOCK_P)
    if S is not None:
        tl.store(states + channel_offsets, S, mask=mask)
    if N is not None:
        tl.store(states + H * P + channel_offsets, N, mask=mask)
        tl.store(states + 2 * H * P + heads, D, mask=heads < H)


# Arithmetic of tiles ---------------------------------------------------------------------------------------------------


@_jit
def _reciprocal(x):
    """1 / x of a normal number: one instruction in PTX, where a division takes eight."""
    if _NVIDIA:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x


@_jit
def _clamp(S, CAUSAL: tl.constexpr):
    """S clamped to its epsilon (NaN stays NaN), and where it was clamped."""
    epsilon: tl.constexpr = _EPS_SUM_SQ if CAUSAL else _EPS_SQUARED_NORM
    return tl.maximum(S, epsilon, propagate_nan=tl.PropagateNan.ALL), S < epsilon


@_jit
def _expm1_poly(x):
    """exp(x) - 1 for -0.1 < x <= 0, exact to float32; the difference itself would have few correct digits."""
    return x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))))


@_jit
def _compute_decay(log_decay):
    """exp(log_decay), rounded once. The hardware's exp has an error of 2e-7, which products of decays would multiply."""
    return tl.where(log_decay > -0.1, 1.0 + _expm1_poly(log_decay), tl.exp(log_decay))


@_jit
def _apply_decay(total, decay):
    """total * decay. A decay of 0 resets the total: infinities and NaN do not reach other packed sequences."""
    return tl.where(decay == 0, 0.0, total * decay)


@_jit
def _apply_log_decay(total, log_decay):
    """total * exp(log_decay). A decay close to 1 is not rounded first, which would add the same error at every step."""
    weakly_decayed = total + total * _expm1_poly(log_decay)
    return tl.where(log_decay > -0.1, weakly_decayed, _apply_decay(total, tl.exp(log_decay)))


@_jit
def _scan_combine(decay, total, decayed_prev, next_decay, next_total, next_decayed_prev):
    """Combines two adjacent ranges of tokens: the product of the decays, the decayed sum, and the decayed sum without
    the last token."""
    decayed = _apply_decay(total, next_decay)
    return decay * next_decay, decayed + next_total, decayed + next_decayed_prev


@_jit
def _scan_combine_log(log_decay, total, next_log_decay, next_total):
    """Combines two adjacent ranges of chunks. Sums log decays, as products of many decays close to 1 lose digits."""
    return log_decay + next_log_decay, _apply_decay(total, tl.exp(next_log_decay)) + next_total


@_jit
def _unsqueeze_like(x, like):
    """Appends dimensions to x, (TILE,) or (TILE, HEADS), up to the number of dimensions of `like`."""
    num_missing: tl.constexpr = len(like.shape) - len(x.shape)
    if num_missing == 2:
        return x[:, None, None]
    elif num_missing == 1:
        return tl.expand_dims(x, -1)
    else:
        return x


@_jit
def _decayed_scan(values, carry, log_decay):
    """Prefix sums with decay, continued from `carry`, and the decayed sum before each token, not computed as a difference."""
    is_first = _unsqueeze_like(tl.arange(0, values.shape[0]) == 0, values)
    decay = tl.broadcast_to(_unsqueeze_like(_compute_decay(log_decay), values), values.shape)
    decayed_prev = tl.where(is_first, _apply_decay(tl.expand_dims(carry, 0), decay), 0.0)
    _, values, decayed_prev = tl.associative_scan((decay, decayed_prev + values, decayed_prev), 0, _scan_combine)
    return values, decayed_prev


@_jit
def _running_sum(values, carry, log_decay, CAUSAL: tl.constexpr):
    """Prefix sums over a tile's tokens (axis 0), continued from `carry`; in the bidirectional form `carry`, the total.

    With `log_decay`, a sum is multiplied by exp(log_decay) before the token is added.
    """
    if not CAUSAL:
        return tl.broadcast_to(tl.expand_dims(carry, 0), values.shape)
    elif log_decay is None:
        is_first = _unsqueeze_like(tl.arange(0, values.shape[0]) == 0, values)
        return tl.cumsum(tl.where(is_first, tl.expand_dims(carry, 0) + values, values), 0)
    else:
        return _decayed_scan(values, carry, log_decay)[0]


@_jit
def _select_token(values, token: tl.constexpr):
    """The values of one token, selected as integers: adding an integer 0 compiles to no instruction, unlike a float 0."""
    is_token = _unsqueeze_like(tl.arange(0, values.shape[0]) == token, values)
    bits = tl.where(is_token, values.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 0).to(tl.float32, bitcast=True)


@_jit
def _sum_tile(values, carry, log_decay):
    """The decayed sum over a tile, continued from `carry`."""
    return _select_token(_running_sum(values, carry, log_decay, True), _TILE - 1)


@_jit
def _flip(x):
    """A tile with its tokens in reverse order.

    In integers, where a + b - a is b, this compiles to no instructions, while a reversed scan would shuffle values between
    threads.
    """
    tl.static_assert(_TILE == 4)
    # x.shape[:0], as the left operand of + must be a shape and not a list
    bits = tl.reshape(x.to(tl.int32, bitcast=True), x.shape[:0] + [2, 2] + x.shape[1:])  # noqa: RUF005
    for axis in tl.static_range(2):
        bits = tl.sum(bits, axis, keep_dims=True) - bits
    return tl.reshape(bits, x.shape).to(tl.float32, bitcast=True)


@_jit
def _suffix_sum(values, carry, next_log_decay, CAUSAL: tl.constexpr):
    """`_running_sum` over the tokens in reverse; `next_log_decay` is the log decay of the token after each."""
    if not CAUSAL:
        return _running_sum(values, carry, None, False)
    elif next_log_decay is None:
        return _flip(_running_sum(_flip(values), carry, None, True))
    else:
        return _flip(_running_sum(_flip(values), carry, _flip(next_log_decay), True))


@_jit
def _compute_score(x, inverse_S, bias, first_token, head_offsets, is_real, H: tl.constexpr, P: tl.constexpr):
    """The scores (TILE, HEADS), from 1 / S."""
    score = tl.sum(x * x * inverse_S, 2)
    if bias is not None:
        score += P * _load_heads(bias, first_token, head_offsets, is_real, H)
    return score


@_jit
def _softmax_over_heads(score, temp, heads, is_real, H: tl.constexpr):
    """The membership (TILE, HEADS); 0 at padding and for heads out of bounds."""
    score *= tl.load(temp + heads, mask=heads < H, other=0.0)[None, :]
    score = tl.where((heads < H)[None, :], score, float("-inf"))
    pi = tl.exp(score - tl.max(score, 1)[:, None])
    return tl.where(is_real, pi * (1.0 / tl.sum(pi, 1))[:, None], 0.0)


@_jit
def _bwd_output(x, pi, g, N, D, log_a, CAUSAL: tl.constexpr):
    """Running N and D (TILE, HEADS, ...) from those before the tile; from the output's gradient g, g / (N + D) and
    u = g w / (N + D)^2. The output is -w Pi D / (N + D), with epsilon in D.

    The gradient of N is Pi D u. The gradient of D is -Pi times the sum of N u over the channels.
    """
    N = _running_sum(x * x * pi[:, :, None], N, log_a, CAUSAL)
    D = _running_sum(pi, D, log_a, CAUSAL)
    inverse = _reciprocal(N + (D + _EPS_MEMBERSHIP)[:, :, None])
    g_scaled = g * inverse
    return N, D, g_scaled, g_scaled * x * inverse


@_jit
def _bwd_score(x, S, q, CAUSAL: tl.constexpr):
    """1 / S, and the gradient of S through the score, from the score's gradient q (TILE, HEADS)."""
    S, is_clamped = _clamp(S, CAUSAL)
    inverse = _reciprocal(S)
    # factors near 1 and near the result: the square of the inverse would be out of range for channels below 1e-10 or above 1e9
    return inverse, tl.where(is_clamped, 0.0, -(q[:, :, None] * inverse) * (inverse * x * x))


# Kernels ---------------------------------------------------------------------------------------------------------------


@_jit_any_length
def chunk_state_kernel(
    w, log_decay, mask, T,
    totals, chunk_log_decay,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Chunk totals of S and of the log decays."""
    chunk, heads, first_token, length, _carry_index = _locate_program(T, H, HEADS, CAUSAL)
    S = tl.zeros([HEADS, BLOCK_P], tl.float32)
    log_a_sum = tl.zeros([HEADS], tl.float32)
    for start in range(0, length, _TILE):
        head_offsets, in_bounds, is_real = _tile_offsets(mask, first_token, start, length, heads, H)
        x = _load_tile(w, first_token, head_offsets, is_real, H, P, BLOCK_P)
        log_a = _load_heads(log_decay, first_token, head_offsets, in_bounds, H)
        S = _sum_tile(x * x, S, log_a)
        if log_decay is not None:
            log_a_sum += tl.sum(log_a, 0)
    _store_state(totals, chunk, S, None, None, heads, H, P, BLOCK_P)
    if log_decay is not None:
        tl.store(chunk_log_decay + chunk * H + heads, log_a_sum, mask=heads < H)


@_jit_any_length
def state_passing_kernel(
    totals, carries,
    initial_state, final_state,  # (B, 2 H P + H), or None
    chunk_log_decay, T,
    COLUMN_START: tl.constexpr, COLUMN_END: tl.constexpr,  # columns of the 2 H P + H
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, REVERSE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Carries: exclusive prefix sums of chunk totals over each sequence's chunks, or their total (bidirectional).

    Carry j is the sum of the first j chunks: the totals are read shifted by one, which avoids differences. One program per
    sequence and block of columns.
    """
    state_size: tl.constexpr = 2 * H * P + H
    column_blocks: tl.constexpr = (COLUMN_END - COLUMN_START + BLOCK_C - 1) // BLOCK_C
    sequence = tl.program_id(0).to(tl.int64) // column_blocks
    column = COLUMN_START + tl.program_id(0) % column_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    in_bounds = column < COLUMN_END
    num_chunks = tl.cdiv(T, _CHUNK).to(tl.int64)
    first_chunk = sequence * num_chunks
    carry = tl.zeros([BLOCK_C], tl.float32)
    if initial_state is not None:
        carry = tl.load(initial_state + sequence * state_size + column, mask=in_bounds, other=0.0)
    for j0 in range(0, num_chunks + 1, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        chunk = first_chunk + (num_chunks - 1 - j if REVERSE else j)
        previous_chunk = chunk + (1 if REVERSE else -1)
        load_mask = ((j > 0) & (j <= num_chunks))[:, None] & in_bounds[None, :]
        offsets = chunk[:, None] * state_size + column[None, :]
        x = tl.load(totals + (state_size if REVERSE else -state_size) + offsets, mask=load_mask, other=0.0)
        store_mask = (j < num_chunks)[:, None] & in_bounds[None, :]
        if chunk_log_decay is not None:
            head = tl.where(column < 2 * H * P, column // P % H, column - 2 * H * P)
            log_decay = tl.load(chunk_log_decay + previous_chunk[:, None] * H + head[None, :], mask=load_mask, other=0.0)
            log_decay, x = tl.associative_scan((log_decay, x), 0, _scan_combine_log)
            x += _apply_decay(carry[None, :], tl.exp(log_decay))
            tl.store(carries + offsets, x, mask=store_mask)
            carry = tl.sum(tl.where((j == j0 + BLOCK_N - 1)[:, None], x, 0.0), 0)
        else:
            if CAUSAL:
                tl.store(carries + offsets, carry[None, :] + tl.cumsum(x, 0), mask=store_mask)
            carry += tl.sum(x, 0)
    if not CAUSAL:
        tl.store(carries + sequence * state_size + column, carry, mask=in_bounds)
    if final_state is not None:
        tl.store(final_state + sequence * state_size + column, carry, mask=in_bounds)


@_jit_any_length
def chunk_fwd_membership_kernel(
    w, log_decay, mask, T,
    temp,
    bias,  # or None
    carries, membership, totals,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The memberships, and the chunk totals of N and D, which depend on them. All heads in one program."""
    chunk, heads, first_token, length, carry_index = _locate_program(T, H, HEADS, CAUSAL)
    S, _N, _D = _load_state(carries, carry_index, heads, H, P, BLOCK_P)
    total_N = tl.zeros([HEADS, BLOCK_P], tl.float32)
    total_D = tl.zeros([HEADS], tl.float32)
    for start in range(0, length, _TILE):
        head_offsets, in_bounds, is_real = _tile_offsets(mask, first_token, start, length, heads, H)
        x = _load_tile(w, first_token, head_offsets, is_real, H, P, BLOCK_P)
        log_a = _load_heads(log_decay, first_token, head_offsets, in_bounds, H)
        running_S = _running_sum(x * x, S, log_a, CAUSAL)
        score = _compute_score(x, _reciprocal(_clamp(running_S, CAUSAL)[0]), bias, first_token, head_offsets, is_real, H, P)
        pi = _softmax_over_heads(score, temp, heads, is_real, H)
        _store_heads(membership, pi, first_token, head_offsets, in_bounds, H)
        total_N = _sum_tile(x * x * pi[:, :, None], total_N, log_a)
        total_D = _sum_tile(pi, total_D, log_a)
        if CAUSAL:
            S = _select_token(running_S, _TILE - 1)
    _store_state(totals, chunk, None, total_N, total_D, heads, H, P, BLOCK_P)


@_jit_any_length
def chunk_fwd_output_kernel(
    w, log_decay, mask, T,
    membership, carries, output,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The output -w Pi / (1 + N / D), as -w Pi D / (D + N)."""
    _chunk, heads, first_token, length, carry_index = _locate_program(T, H, HEADS, CAUSAL)
    _S, N, D = _load_state(carries, carry_index, heads, H, P, BLOCK_P)
    for start in range(0, length, _TILE):
        head_offsets, in_bounds, is_real = _tile_offsets(mask, first_token, start, length, heads, H)
        x = _load_tile(w, first_token, head_offsets, is_real, H, P, BLOCK_P)
        pi = _load_heads(membership, first_token, head_offsets, is_real, H)
        log_a = _load_heads(log_decay, first_token, head_offsets, in_bounds, H)
        running_N = _running_sum(x * x * pi[:, :, None], N, log_a, CAUSAL)
        running_D = _running_sum(pi, D, log_a, CAUSAL)
        D_eps = running_D + _EPS_MEMBERSHIP
        value = x * (-pi * D_eps)[:, :, None] * _reciprocal(running_N + D_eps[:, :, None])
        _store_tile(output, value, first_token, head_offsets, in_bounds, H, P, BLOCK_P)
        if CAUSAL:
            N = _select_token(running_N, _TILE - 1)
            D = _select_token(running_D, _TILE - 1)


@_jit_any_length
def chunk_bwd_state_kernel(
    w, log_decay, mask, T,
    grad, membership, carries, sub_chunk_states, totals, chunk_log_decay,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Chunk totals of dN and dD; the state before each sub-chunk, for the two kernels that process chunks in reverse."""
    chunk, heads, first_token, length, carry_index = _locate_program(T, H, HEADS, CAUSAL)
    S, N, D = _load_state(carries, carry_index, heads, H, P, BLOCK_P)
    dN_sum = tl.zeros([HEADS, BLOCK_P], tl.float32)
    dD_sum = tl.zeros([HEADS, BLOCK_P], tl.float32)
    log_a_sum = tl.zeros([HEADS], tl.float32)
    for start in range(0, length, _TILE):
        head_offsets, in_bounds, is_real = _tile_offsets(mask, first_token, start, length, heads, H)
        x = _load_tile(w, first_token, head_offsets, is_real, H, P, BLOCK_P)
        pi = _load_heads(membership, first_token, head_offsets, is_real, H)
        log_a = _load_heads(log_decay, first_token, head_offsets, in_bounds, H)
        g = _load_tile(grad, first_token, head_offsets, is_real, H, P, BLOCK_P)
        running_N, running_D, _g_scaled, u = _bwd_output(x, pi, g, N, D, log_a, CAUSAL)
        dN = u * (pi * (running_D + _EPS_MEMBERSHIP))[:, :, None]
        dD = u * pi[:, :, None] * running_N
        if log_decay is not None:  # multiplied last: strong decays times small memberships would be subnormal
            decay_to_tokens = tl.exp(log_a_sum[None, :] + tl.cumsum(log_a, 0))[:, :, None]
            dN, dD = _apply_decay(dN, decay_to_tokens), _apply_decay(dD, decay_to_tokens)
            log_a_sum += tl.sum(log_a, 0)
        dN_sum += tl.sum(dN, 0)
        dD_sum -= tl.sum(dD, 0)
        if CAUSAL:
            if start // _SUB_CHUNK * _SUB_CHUNK == start:
                sub_chunk = chunk * (_CHUNK // _SUB_CHUNK) + start // _SUB_CHUNK
                _store_state(sub_chunk_states, sub_chunk, S, N, D, heads, H, P, BLOCK_P)
            S = _sum_tile(x * x, S, log_a)
            N = _select_token(running_N, _TILE - 1)
            D = _select_token(running_D, _TILE - 1)
    _store_state(totals, chunk, None, dN_sum, tl.sum(dD_sum, 1), heads, H, P, BLOCK_P)
    if log_decay is not None:
        tl.store(chunk_log_decay + chunk * H + heads, log_a_sum, mask=heads < H)


@_jit
def _load_bwd_tile(
    w, log_decay, mask, grad, membership, sub_chunk_states, chunk, first_token, start, length, carry_index, heads,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A tile of the backward, from token `start` of the chunk: its offsets and masks, tokens, memberships and output gradient,
    and the state before it.

    The state is recomputed from that before the tile's sub-chunk: subtractions from later states would cancel digits.
    """
    if CAUSAL:
        S, N, D = _load_state(sub_chunk_states, chunk * (_CHUNK // _SUB_CHUNK) + start // _SUB_CHUNK, heads, H, P, BLOCK_P)
        for tile_start in range(start // _SUB_CHUNK * _SUB_CHUNK, start, _TILE):
            head_offsets, in_bounds, is_real = _tile_offsets(mask, first_token, tile_start, start, heads, H)
            x = _load_tile(w, first_token, head_offsets, is_real, H, P, BLOCK_P)
            pi = _load_heads(membership, first_token, head_offsets, is_real, H)
            log_a = _load_heads(log_decay, first_token, head_offsets, in_bounds, H)
            S = _sum_tile(x * x, S, log_a)
            N = _sum_tile(x * x * pi[:, :, None], N, log_a)
            D = _sum_tile(pi, D, log_a)
    else:
        S, N, D = _load_state(sub_chunk_states, carry_index, heads, H, P, BLOCK_P)
    head_offsets, in_bounds, is_real = _tile_offsets(mask, first_token, start, length, heads, H)
    x = _load_tile(w, first_token, head_offsets, is_real, H, P, BLOCK_P)
    pi = _load_heads(membership, first_token, head_offsets, is_real, H)
    g = _load_tile(grad, first_token, head_offsets, is_real, H, P, BLOCK_P)
    return head_offsets, in_bounds, is_real, x, pi, g, S, N, D


@_jit
def _load_next_log_decay(log_decay, first_token, start, length, heads, H: tl.constexpr):
    """The log decay of the token after each one of a tile; 0 after the chunk, whose carry is decayed. None without decay."""
    head_offsets, in_bounds, _is_real = _tile_offsets(None, first_token, start + 1, length, heads, H)
    return _load_heads(log_decay, first_token, head_offsets, in_bounds, H)


@_jit_any_length
def chunk_bwd_score_kernel(
    w, log_decay, mask, T,
    grad,
    grad_membership,  # or None
    temp,
    bias,  # or None
    membership, sub_chunk_states, grad_carries, dscore, dtemp, totals,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Backward of the softmax over the heads, and the chunk totals of dS, which depend on it. All heads in one program."""
    chunk, heads, first_token, length, carry_index = _locate_program(T, H, HEADS, CAUSAL)
    _carry_dS, carry_dN, carry_dD = _load_state(grad_carries, carry_index, heads, H, P, BLOCK_P)
    dS_sum = tl.zeros([HEADS, BLOCK_P], tl.float32)
    dtemp_sum = tl.zeros([HEADS], tl.float32)
    scale = tl.load(temp + heads, mask=heads < H, other=0.0)
    for reverse_index in range(0, tl.cdiv(length, _TILE)):
        start = (tl.cdiv(length, _TILE) - 1 - reverse_index) * _TILE
        head_offsets, in_bounds, is_real, x, pi, g, S, N, D = _load_bwd_tile(
            w, log_decay, mask, grad, membership, sub_chunk_states, chunk, first_token, start, length, carry_index, heads,
            H, P, CAUSAL, BLOCK_P,
        )  # fmt: skip
        log_a = _load_heads(log_decay, first_token, head_offsets, in_bounds, H)
        next_log_a = _load_next_log_decay(log_decay, first_token, start, length, heads, H)
        N, D, g_scaled, u = _bwd_output(x, pi, g, N, D, log_a, CAUSAL)
        D += _EPS_MEMBERSHIP
        dN = _suffix_sum(u * (pi * D)[:, :, None], carry_dN, next_log_a, CAUSAL)
        dD = _suffix_sum(-pi * tl.sum(u * N, 2), carry_dD, next_log_a, CAUSAL)
        dpi = tl.sum(x * (x * dN - g_scaled * D[:, :, None]), 2) + dD
        if grad_membership is not None:
            dpi += _load_heads(grad_membership, first_token, head_offsets, is_real, H)
        dlogit = pi * (dpi - tl.sum(pi * dpi, 1)[:, None])
        _store_heads(dscore, dlogit * scale[None, :], first_token, head_offsets, in_bounds, H)
        S = _running_sum(x * x, S, log_a, CAUSAL)
        inverse, dS = _bwd_score(x, S, dlogit * scale[None, :], CAUSAL)
        dtemp_sum += tl.sum(dlogit * _compute_score(x, inverse, bias, first_token, head_offsets, is_real, H, P), 0)
        if CAUSAL:
            carry_dN = _select_token(dN, 0)
            carry_dD = _select_token(dD, 0)
        dS_sum = _select_token(_suffix_sum(dS, dS_sum, next_log_a, True), 0)
    if log_decay is not None:
        decay = _compute_decay(tl.load(log_decay + first_token * H + heads, mask=heads < H, other=0.0))
        dS_sum = _apply_decay(dS_sum, decay[:, None])
    tl.store(dtemp + chunk * H + heads, dtemp_sum, mask=heads < H)
    _store_state(totals, chunk, dS_sum, None, None, heads, H, P, BLOCK_P)


@_jit_any_length
def chunk_bwd_input_kernel(
    w, log_decay, mask, T,
    grad, membership, dscore, sub_chunk_states, grad_carries, dw, dlog_decay,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The gradients of w and of the log decay."""
    chunk, heads, first_token, length, carry_index = _locate_program(T, H, HEADS, CAUSAL)
    carry_dS, carry_dN, carry_dD = _load_state(grad_carries, carry_index, heads, H, P, BLOCK_P)
    for reverse_index in range(0, tl.cdiv(length, _TILE)):
        start = (tl.cdiv(length, _TILE) - 1 - reverse_index) * _TILE
        head_offsets, in_bounds, is_real, x, pi, g, carry_S, carry_N, carry_D = _load_bwd_tile(
            w, log_decay, mask, grad, membership, sub_chunk_states, chunk, first_token, start, length, carry_index, heads,
            H, P, CAUSAL, BLOCK_P,
        )  # fmt: skip
        log_a = _load_heads(log_decay, first_token, head_offsets, in_bounds, H)
        next_log_a = _load_next_log_decay(log_decay, first_token, start, length, heads, H)
        q = _load_heads(dscore, first_token, head_offsets, is_real, H)
        N, D, g_scaled, u = _bwd_output(x, pi, g, carry_N, carry_D, log_a, CAUSAL)
        pi_D = (pi * (D + _EPS_MEMBERSHIP))[:, :, None]
        dN = _suffix_sum(u * pi_D, carry_dN, next_log_a, CAUSAL)
        inverse, dS = _bwd_score(x, _running_sum(x * x, carry_S, log_a, CAUSAL), q, CAUSAL)
        dS = _suffix_sum(dS, carry_dS, next_log_a, CAUSAL)
        dsq = q[:, :, None] * inverse + dS + pi[:, :, None] * dN
        _store_tile(dw, 2.0 * x * dsq - g_scaled * pi_D, first_token, head_offsets, in_bounds, H, P, BLOCK_P)
        if dlog_decay is not None:
            dD = _suffix_sum(-pi * tl.sum(u * N, 2), carry_dD, next_log_a, CAUSAL)
            dlog_a_N = dN * _decayed_scan(x * x * pi[:, :, None], carry_N, log_a)[1]
            dlog_a_S = dS * _decayed_scan(x * x, carry_S, log_a)[1]
            dlog_a = tl.sum(dlog_a_N + dlog_a_S, 2) + dD * _decayed_scan(pi, carry_D, log_a)[1]
            _store_heads(dlog_decay, dlog_a, first_token, head_offsets, in_bounds, H)
            carry_dD = _select_token(dD, 0)
        if CAUSAL:
            carry_dN = _select_token(dN, 0)
            carry_dS = _select_token(dS, 0)


@_jit
def step_kernel(
    w, temp,
    bias, log_decay, mask,  # or None
    sum_sq, sum_weighted_sq, sum_membership, output, membership,
    H: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One decoding step: updates the state in place. One program per batch element."""
    element = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)
    is_head = heads < H
    head_offsets = element * H + heads
    channel_offsets, is_channel = _channel_offsets(head_offsets, is_head, P, BLOCK_P)
    is_real = is_head
    if mask is not None:
        is_real = is_head & (tl.load(mask + element + 0 * heads) != 0)
    x = tl.load(w + channel_offsets, mask=is_channel & is_real[:, None], other=0.0).to(tl.float32)
    S = tl.load(sum_sq + channel_offsets, mask=is_channel, other=0.0)
    N = tl.load(sum_weighted_sq + channel_offsets, mask=is_channel, other=0.0)
    D = tl.load(sum_membership + head_offsets, mask=is_head, other=0.0)
    if log_decay is not None:
        log_a = tl.load(log_decay + head_offsets, mask=is_real, other=0.0)
        S, N, D = _apply_log_decay(S, log_a[:, None]), _apply_log_decay(N, log_a[:, None]), _apply_log_decay(D, log_a)
    S += x * x
    score = tl.sum(x * x / _clamp(S, True)[0], 1)
    if bias is not None:
        score += P * tl.load(bias + head_offsets, mask=is_head, other=0.0)
    score = tl.where(is_head, score * tl.load(temp + heads, mask=is_head, other=0.0), float("-inf"))
    pi = tl.exp(score - tl.max(score, 0))
    pi = tl.where(is_real, pi / tl.sum(pi, 0), 0.0)
    N += x * x * pi[:, None]
    D += pi
    tl.debug_barrier()  # in small tiles several threads load the same number, which must precede any store
    tl.store(sum_sq + channel_offsets, S, mask=is_channel)
    tl.store(sum_weighted_sq + channel_offsets, N, mask=is_channel)
    tl.store(sum_membership + head_offsets, D, mask=is_head)
    tl.store(membership + head_offsets, pi, mask=is_head)
    moment = (N / (D + _EPS_MEMBERSHIP)[:, None]).to(tl.float32)
    tl.store(output + channel_offsets, -(x * pi[:, None]) / (1.0 + moment), mask=is_channel)


# Launching -------------------------------------------------------------------------------------------------------------


def _choose_block_sizes(H: int, p: int, all_heads: bool) -> tuple[int, int, int]:
    """Heads and channels of a program, powers of 2 (all channels, at least p), and its warps.

    They do not depend on T, as rounding, and so the outputs, would then depend on later tokens.

    A warp processes 256 channels, 8 per thread: 16 bytes in bfloat16, the widest load of a thread. With fewer channels, the
    tokens of a tile would be distributed over threads.
    """
    channels = triton.next_power_of_2(p)
    heads = max(1, 256 // channels, triton.next_power_of_2(H) if all_heads else 1)
    return heads, channels, min(16, heads * channels // 256)


def _cdiv(n, m):
    return (n + m - 1) // m


def _make_contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def _as_bytes(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else mask.bool().contiguous().view(torch.uint8)


class _Launcher:
    """Arguments and buffers that the kernel launches of one forward or backward share."""

    def __init__(self, w, log_decay, mask, causal):
        self.w, self.causal = w.contiguous(), causal
        self.B, self.T, self.H, self.p = w.shape
        self.num_chunks = self.B * _cdiv(self.T, CHUNK)
        self.token_args = (self.w, _make_contiguous(log_decay), _as_bytes(mask), self.T)
        self.chunk_log_decay = None if log_decay is None else self.empty(self.num_chunks, self.H)
        self.totals = self.empty_states(self.num_chunks)

    def empty(self, *shape: int) -> torch.Tensor:
        return self.w.new_empty(shape, dtype=torch.float32)

    def empty_states(self, count: int) -> torch.Tensor:
        return self.empty(count, 2 * self.H * self.p + self.H)

    def empty_carries(self) -> torch.Tensor:
        return self.empty_states(self.num_chunks if self.causal else self.B)

    def launch(self, kernel, *args, all_heads: bool = False) -> None:
        """Launches a kernel over all chunks, with all heads or a block of heads in each program."""
        heads, channels, warps = _choose_block_sizes(self.H, self.p, all_heads)
        grid = (self.num_chunks * _cdiv(self.H, heads),)
        sizes = {"H": self.H, "P": self.p, "CAUSAL": self.causal, "HEADS": heads, "BLOCK_P": channels}
        kernel[grid](*self.token_args, *args, **sizes, num_warps=warps)

    def pass_states(self, carries, sums, initial_state=None, final_state=None, reverse: bool = False) -> None:
        """Scans the chunk totals of the `sums`, "S" or "ND", from `initial_state`; writes `carries` and `final_state`."""
        C = self.H * self.p
        column_start, column_end = (0, C) if sums == "S" else (C, 2 * C + self.H)
        grid = (self.B * _cdiv(column_end - column_start, SCAN_COLUMNS),)
        args = self.totals, carries, initial_state, final_state, self.chunk_log_decay, self.T, column_start, column_end
        sizes = {"H": self.H, "P": self.p, "CAUSAL": self.causal, "BLOCK_N": SCAN_CHUNKS, "BLOCK_C": SCAN_COLUMNS}
        state_passing_kernel[grid](*args, **sizes, REVERSE=reverse)


# Custom operators. They cannot return None: outputs that are not needed are empty tensors. -----------------------------


def _concatenate_state(state: TSSAState) -> torch.Tensor:
    """A state as float32 rows, (B, 2 C + H)."""
    return torch.cat([x.float().flatten(1) for x in state], 1)


def _split_state(rows: torch.Tensor, H: int, p: int) -> TSSAState:
    S, N, D = rows.split([H * p, H * p, H], 1)
    return TSSAState(S.view(-1, H, p), N.view(-1, H, p), D)


@custom_operator("tssa_forward")
def _forward(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    initial: torch.Tensor | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, membership, the state after the last token (B, 2 C + H), and the carries for the backward.

    The carries are flattened, as compilers would specialize on whether the number of chunks is 1.
    """
    with torch.cuda.device_of(w):
        launcher = _Launcher(w, log_decay, mask, causal)
        output, carries = torch.empty_like(launcher.w), launcher.empty_carries()
        membership = launcher.empty(launcher.B, launcher.T, launcher.H)
        final_state = launcher.empty_states(launcher.B) if causal else None
        launcher.launch(chunk_state_kernel, launcher.totals, launcher.chunk_log_decay)
        launcher.pass_states(carries, "S", initial, final_state)
        args = temp, _make_contiguous(bias), carries, membership, launcher.totals
        launcher.launch(chunk_fwd_membership_kernel, *args, all_heads=True)
        launcher.pass_states(carries, "ND", initial, final_state)
        launcher.launch(chunk_fwd_output_kernel, membership, carries, output)
    return output, membership, launcher.empty(0) if final_state is None else final_state, carries.flatten()


@_forward.register_fake
def _(w, temp, bias, mask, log_decay, initial, causal):
    B, T, H, p = w.shape
    num_carries = B * _cdiv(T, CHUNK) if causal else B
    sizes = (B, T, H), (B, 2 * H * p + H) if causal else (0,), num_carries * (2 * H * p + H)
    return w.new_empty(w.shape), *(w.new_empty(size, dtype=torch.float32) for size in sizes)


@custom_operator("tssa_backward")
def _backward(
    grad_output: torch.Tensor | None,
    grad_membership: torch.Tensor | None,
    grad_final: torch.Tensor | None,
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    initial: torch.Tensor | None,
    membership: torch.Tensor,
    carries: torch.Tensor,
    causal: bool,
    needs_decay_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of w, temp, the score, the log decay and the initial state."""
    with torch.cuda.device_of(w):
        launcher = _Launcher(w, log_decay, mask, causal)
        grad = torch.zeros_like(launcher.w) if grad_output is None else grad_output.contiguous()
        boundary_grads = _make_contiguous(grad_final), None if initial is None else torch.empty_like(initial)
        grad_carries = launcher.empty_carries()
        sub_chunk_states = launcher.empty_states(launcher.num_chunks * (CHUNK // SUB_CHUNK)) if causal else carries
        launcher.launch(
            chunk_bwd_state_kernel, grad, membership, carries, sub_chunk_states, launcher.totals, launcher.chunk_log_decay
        )
        launcher.pass_states(grad_carries, "ND", *boundary_grads, reverse=True)
        dscore, dtemp = torch.empty_like(membership), launcher.empty(launcher.num_chunks, launcher.H)
        args = (
            grad,
            _make_contiguous(grad_membership),
            temp,
            _make_contiguous(bias),
            membership,
            sub_chunk_states,
            grad_carries,
        )
        launcher.launch(chunk_bwd_score_kernel, *args, dscore, dtemp, launcher.totals, all_heads=True)
        launcher.pass_states(grad_carries, "S", *boundary_grads, reverse=True)
        dw, dlog_decay = torch.empty_like(launcher.w), torch.empty_like(membership) if needs_decay_grad else None
        launcher.launch(chunk_bwd_input_kernel, grad, membership, dscore, sub_chunk_states, grad_carries, dw, dlog_decay)
    dlog_decay, dinitial = (launcher.empty(0) if x is None else x for x in (dlog_decay, boundary_grads[1]))
    return dw, dtemp.sum(0), dscore, dlog_decay, dinitial


@_backward.register_fake
def _(grad_output, grad_membership, grad_final, w, temp, bias, mask, log_decay, initial, membership, *other_args):
    inputs = w, temp, membership, membership if other_args[-1] else None, initial
    return tuple(temp.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.causal = inputs
    ctx.save_for_backward(*tensors, output[1], output[3])
    ctx.mark_non_differentiable(*(output[3:] if ctx.causal else output[2:]))
    ctx.set_materialize_grads(False)


def _run_reference(is_causal, w, temp, bias, mask, log_decay, initial):
    state = None if initial is None else _split_state(initial, *w.shape[2:])
    output, membership, final_state = tssa_reference(w, temp, bias, mask, log_decay, state, is_causal)
    return output, membership, *(() if final_state is None else (_concatenate_state(final_state),))


def _differentiate(ctx, *grads):
    saved = ctx.saved_tensors  # accessed once, as activation checkpointing recomputes them at each access
    if torch.is_grad_enabled():  # create_graph=True
        return *differentiate_reference(functools.partial(_run_reference, ctx.causal), saved[:6], grads[:3]), None
    needs_decay_grad = ctx.needs_input_grad[4]
    dw, dtemp, dscore, dlog_decay, dinitial = _backward(*grads[:3], *saved, ctx.causal, needs_decay_grad)
    bias, initial = saved[2], saved[5]
    dbias = None if bias is None else dw.shape[-1] * dscore
    dlog_decay, dinitial = dlog_decay if needs_decay_grad else None, None if initial is None else dinitial
    return dw, dtemp, dbias, None, dlog_decay, dinitial, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


@custom_operator("tssa_step", mutates_args=("sum_sq", "sum_weighted_sq", "sum_membership"))
def tssa_step_triton(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    sum_sq: torch.Tensor,
    sum_weighted_sq: torch.Tensor,
    sum_membership: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal TSSA of one token per sequence: output (B, H, p) in `w`'s dtype and membership (B, H), without a gradient.

    Args:
        w: (B, H, p), of a dtype and device that `find_problem` accepts.
        temp: (H,), float32.
        bias: (B, H), float32, or None.
        mask: (B,), bool, or None; padding leaves the state unchanged.
        log_decay: (B, H), float32, or None.
        sum_sq, sum_weighted_sq, sum_membership: the state, (B, H, p), (B, H, p) and (B, H), float32 or float64 and contiguous;
            updated in place. For long sequences the last two should be float64.

    Raises:
        ValueError: the state is not contiguous.
    """
    B, H, p = w.shape
    state = sum_sq, sum_weighted_sq, sum_membership
    if not all(x.is_contiguous() for x in state):
        raise ValueError(
            f"The state is updated in place: its tensors must be contiguous, got strides {[x.stride() for x in state]}."
        )
    w, temp, bias, log_decay = w.contiguous(), temp.contiguous(), _make_contiguous(bias), _make_contiguous(log_decay)
    output, membership = torch.empty_like(w), w.new_empty((B, H), dtype=torch.float32)
    heads, channels, warps = _choose_block_sizes(H, p, all_heads=True)
    with torch.cuda.device_of(w):
        args = w, temp, bias, log_decay, _as_bytes(mask), *state, output, membership
        step_kernel[(B,)](*args, H=H, P=p, HEADS=heads, BLOCK_P=channels, num_warps=warps)
    return output, membership


@tssa_step_triton.register_fake
def _(w, *other_args):
    return w.new_empty(w.shape), w.new_empty(w.shape[:2], dtype=torch.float32)


# Functions that tssa.py calls ------------------------------------------------------------------------------------------


def tssa_triton(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    state: TSSAState | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState | None]:
    """TSSA, as `tssa.tssa` without its checks.

    Args:
        w: (B, T, H, p), of a dtype and device that `find_problem` accepts.
        temp: (H,), float32.
        bias: (T, H) or (B or 1, T, H), float32, or None; causal form only.
        mask: (B, T), bool, true at real tokens, or None.
        log_decay: (B, T, H) or (B, T, 1), float32, 0 at padding, or None; causal form only.
        state: the recurrent state before the first token, or None; causal form only.

    Returns:
        The output (B, T, H, p) in `w`'s dtype, the membership (B, T, H), and the state after the last token (None in the
        bidirectional form), all differentiable; second derivatives are the reference implementation's.
    """
    B, T, H, p = w.shape
    bias, log_decay = (None if x is None else x.expand(B, T, H) for x in (bias, log_decay))
    initial_state = None if state is None else _concatenate_state(state)
    output, membership, final_state, _ = _forward(w, temp.contiguous(), bias, mask, log_decay, initial_state, causal)
    if not causal:
        return output, membership, None
    return output, membership, as_state((x.contiguous() for x in _split_state(final_state, H, p)), w)


# Self-check against the float64 reference, before the first use for a device, token shape and dtype --------------------


CHECK_TOKENS = 70  # more than one chunk, and not a whole number of tiles
CHECK_STEPS = 3
CHECK_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # relative RMS, ten times rounding errors

# error messages of this process's self-checks; None for correct kernels
_check_results: dict[tuple, str | None] = {}


def find_problem(
    device: torch.device, dtype: torch.dtype, H: int, p: int, form: str, decay: bool = False, gradients: bool = False
) -> str | None:
    """Why the kernels cannot run for tokens (..., H, p); None if they can. A CPU needs TRITON_INTERPRET=1.

    Once per process they are compared with the reference, but not while a CUDA graph is captured, as they cannot run then.

    Args:
        form: "bidirectional", "causal", or "step" for one-token steps.
        decay: whether there is a `log_decay`.
        gradients: whether to check the backward kernels as well.

    Raises:
        RuntimeError: a kernel failed, and the device cannot be used any more.
    """
    if triton is None:
        return "Triton is not installed (pip install triton)"
    on_device = device.type == "cuda" or not isinstance(chunk_fwd_output_kernel, triton.JITFunction)
    if not on_device or dtype not in CHECK_TOLERANCES:
        return f"the Triton kernels do not support {dtype} tokens on {device}"
    key = (device, dtype, H, p, form, decay, gradients)
    if key not in _check_results:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        # in a thread of its own, as modes and hooks are per thread: autograd, inference, autocast, a compiler's tracing, and
        # the hooks of activation checkpointing, which would save the check's tensors, too
        with ThreadPoolExecutor(1) as executor:
            _check_results[key] = executor.submit(_run_check, *key).result()
    return _check_results[key]


def _run_check(device, dtype, H, p, form, decay, gradients) -> str | None:
    """The error message of kernels that fail or differ from the reference; None if they are correct."""
    try:
        with torch.set_grad_enabled(gradients):
            errors = _compute_relative_errors(device, dtype, H, p, form, decay, gradients)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # any failure of the compiler, the driver or a launch
        problem = f"failed with {type(error).__name__}: {str(error)[:500]}"
        if _is_context_lost(device):
            raise RuntimeError(
                f"The Triton kernels {problem}. The CUDA context is lost, so nothing else can run on {device} in this "
                "process: restart it with TOST_HF_BACKEND=torch, and report this message to the authors of tost_hf."
            ) from error
    else:
        mismatches = [f"{name} by {error:.1e}" for name, error in errors.items() if not error < CHECK_TOLERANCES[dtype]]
        if not mismatches:
            return None
        problem = f"differ from the reference ({', '.join(mismatches)})"
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return (
        f"on {device_name} the Triton kernels {problem}. Please report this message to the authors of tost_hf (heads {H}, "
        f"head_dim {p}, {dtype}, {form}{', decay' * decay}{', gradients' * gradients}, torch {torch.__version__})"
    )


def _is_context_lost(device: torch.device) -> bool:
    """Whether a failed launch has left the device unusable for this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _compute_relative_errors(device, dtype, H, p, form, decay, gradients) -> dict[str, float]:
    """Relative RMS errors of the kernels' output, membership and gradients on random tokens, by name."""
    generator = torch.Generator().manual_seed(0)  # not the global generator
    head_shape = 1, CHECK_TOKENS, H
    inputs: dict[str, Any] = {
        "w": torch.randn(*head_shape, p, generator=generator).to(dtype),
        "temp": torch.rand(H, generator=generator) + 0.5,
    }
    if form != "bidirectional":
        inputs["bias"] = 0.3 * torch.rand(head_shape, generator=generator)
    if decay:
        inputs["log_decay"] = -0.5 * torch.rand(head_shape, generator=generator)
    inputs = {name: x.to(device).requires_grad_(gradients) for name, x in inputs.items()}
    reference_inputs: dict[str, Any] = {name: x.detach().double().requires_grad_(gradients) for name, x in inputs.items()}
    w, temp, bias, log_decay = inputs["w"], inputs["temp"], inputs.get("bias"), inputs.get("log_decay")
    if form == "step":
        state = zero_state(w)
        step_inputs = [[None if x is None else x[:, t] for x in (w, bias, log_decay)] for t in range(CHECK_STEPS)]
        step_outputs = [tssa_step_triton(x, temp, b, None, d, *state) for x, b, d in step_inputs]
        actual = tuple(torch.stack(x, 1) for x in zip(*step_outputs))
    else:
        actual = tssa_triton(w, temp, bias, None, log_decay, None, form == "causal")[:2]
    expected = tssa_reference(**reference_inputs, is_causal=form != "bidirectional")[:2]
    pairs = {name: (x, y[:, : x.shape[1]]) for name, x, y in zip(("output", "membership"), actual, expected)}
    if gradients:
        grads = [
            torch.autograd.grad([x.double().square().sum() for x in outputs], list(leaves.values()))
            for outputs, leaves in ((actual, inputs), (expected, reference_inputs))
        ]
        pairs |= {f"gradient of {name}": pair for name, pair in zip(inputs, zip(*grads))}
    return {name: ((x.double() - y).square().mean() / y.square().mean()).sqrt().item() for name, (x, y) in pairs.items()}
