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
sums on the way: its first kernel stores them before every span of 8 tokens.

The three sums of a sequence, a chunk or a span are one record of a float32 tensor (records, 2 C + H), C = H p: S, N, then D;
gradients dS, dN, dD likewise. No sum is formed by subtraction, and there are no atomics: two runs agree bit for bit. Chunks
are 64 tokens from the sequence's start, so an output never depends on later tokens. Packed sequences are a log factor of minus
infinity at the first token of each.

The kernels are bound as custom operators, opaque to compilers, in a namespace named after the package that this file is loaded
into: an installed package and a model's remote code can both be loaded. Nothing here needs Triton until it is called.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .tssa_reference import (
    EPS_MEMBERSHIP,
    EPS_NORM,
    EPS_SUM_SQ,
    TSSAState,
    as_state,
    bidirectional,
    causal,
    custom_operator,
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
# whether the kernels are compiled for NVIDIA devices, and may use one of their instructions
_NVIDIA = _constexpr(triton is not None and not triton.knobs.runtime.interpret and torch.version.hip is None)

# Tokens of a chunk; of a span, before which the backward stores the forward's sums; of a tile, which a thread holds at once.
CHUNK, SPAN, TILE = 64, 8, 4
SCAN_CHUNKS, SCAN_COLUMNS = 64, 32  # block of the scans over chunk totals
_CHUNK, _SPAN, _TILE = _constexpr(CHUNK), _constexpr(SPAN), _constexpr(TILE)
_EPS_SUM_SQ, _EPS_SQUARED_NORM, _EPS_MEMBERSHIP = map(_constexpr, (EPS_SUM_SQ, EPS_NORM**2, EPS_MEMBERSHIP))


# ---------------------------------------------------------------------------------------------------------------------
# Loads, stores and masks. Tensors are contiguous: w, grad, output, dw (B, T, H, p); membership, bias, dscore, log_decay and
# dlog_decay (B, T, H). Carries have one record per chunk in the causal form, one per sequence otherwise.
#
# A program takes one chunk and HEADS heads, and loops over the chunk in tiles of TILE tokens x HEADS heads x BLOCK_P >= P
# channels. A thread has 8 neighbouring channels of all of a tile's tokens, so running sums are plain additions in its
# registers. Chunks are addressed with 64 bits, what is inside them with 32.
# ---------------------------------------------------------------------------------------------------------------------


@_jit
def _program(T, H: tl.constexpr, HEADS: tl.constexpr, CAUSAL: tl.constexpr):
    """The program's chunk and heads (HEADS,); the chunk's first token in the flattened batch, its length, its carry."""
    groups: tl.constexpr = (H + HEADS - 1) // HEADS
    chunk = tl.program_id(0).to(tl.int64) // groups
    heads = tl.program_id(0) % groups * HEADS + tl.arange(0, HEADS)
    per_sequence = tl.cdiv(T, _CHUNK)
    sequence = chunk // per_sequence
    start = chunk % per_sequence * _CHUNK
    count = tl.minimum(T - start, _CHUNK).to(tl.int32)
    if CAUSAL:
        return chunk, heads, sequence * T + start, count, chunk
    else:
        return chunk, heads, sequence * T + start, count, sequence


@_jit
def _tile(mask, first, start, count, heads, H: tl.constexpr):
    """A tile's tokens from `start` on: places in the chunk, whether they exist and whether they are real, (TILE, HEADS)."""
    t = start + tl.arange(0, _TILE)
    exists = t < count
    real = exists
    if mask is not None:
        real = real & (tl.load(mask + first + t, mask=real, other=0) != 0)
    if tl.constexpr(H) % heads.shape[0] == 0:
        is_head = tl.full(heads.shape, True, tl.int1)
    else:
        is_head = heads < H
    return t[:, None] * H + heads[None, :], exists[:, None] & is_head[None, :], real[:, None] & is_head[None, :]


@_jit
def _channels(places, mask, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """Offsets (..., HEADS, BLOCK_P) of the channels of heads at `places` (..., HEADS), and which of them exist."""
    channel = tl.arange(0, BLOCK_P)
    offsets, mask = tl.expand_dims(places, -1) * P + channel, tl.expand_dims(mask, -1)
    if P == BLOCK_P:
        return offsets, mask
    else:
        return offsets, mask & (channel < P)


@_jit
def _load(pointer, first, places, mask, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """A tile (TILE, HEADS, BLOCK_P) in float32; 0, and not read, where the mask is false."""
    offsets, mask = _channels(places, mask, P, BLOCK_P)
    return tl.load(pointer + first * (H * P) + offsets, mask=mask, other=0.0).to(tl.float32)


@_jit
def _store(pointer, value, first, places, mask, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    offsets, mask = _channels(places, mask, P, BLOCK_P)
    tl.store(pointer + first * (H * P) + offsets, value, mask=mask)


@_jit
def _load_heads(pointer, first, places, mask, H: tl.constexpr):
    """One number per token and head, (TILE, HEADS); 0, and not read, where the mask is false. None of None."""
    if pointer is None:
        return None
    else:
        return tl.load(pointer + first * H + places, mask=mask, other=0.0)


@_jit
def _store_heads(pointer, value, first, places, mask, H: tl.constexpr):
    tl.store(pointer + first * H + places, value, mask=mask)


@_jit
def _load_state(states, record, heads, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """The three sums of a record: (HEADS, BLOCK_P) twice, and (HEADS,)."""
    states += record * (2 * H * P + H)
    offsets, mask = _channels(heads, heads < H, P, BLOCK_P)
    S = tl.load(states + offsets, mask=mask, other=0.0)
    N = tl.load(states + H * P + offsets, mask=mask, other=0.0)
    return S, N, tl.load(states + 2 * H * P + heads, mask=heads < H, other=0.0)


@_jit
def _store_state(states, record, S, N, D, heads, H: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """Stores S, or N and D, or all three."""
    states += record * (2 * H * P + H)
    offsets, mask = _channels(heads, heads < H, P, BLOCK_P)
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
def _clamp(S, CAUSAL: tl.constexpr):
    """S, at least its epsilon, and where it is smaller; NaN stays NaN."""
    epsilon: tl.constexpr = _EPS_SUM_SQ if CAUSAL else _EPS_SQUARED_NORM
    return tl.maximum(S, epsilon, propagate_nan=tl.PropagateNan.ALL), S < epsilon


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
def _scan_combine(factor, total, decayed, next_factor, next_total, next_decayed):
    """Two neighbouring spans of tokens as one: the product of the factors, the decayed total, and that of all but the last
    token's value."""
    return factor * next_factor, total * next_factor + next_total, total * next_factor + next_decayed


@_jit
def _scan_combine_log(decay, total, next_decay, next_total):
    """The same with log factors: of many chunks, each close to 1, a product would lose digits."""
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
def _decayed_scan(values, carry, decay):
    """Prefix sums with decay on top of `carry`; the sum before each token times its factor, exact where it is small."""
    is_first = _per_token(tl.arange(0, values.shape[0]) == 0, values)
    factor = tl.broadcast_to(_per_token(_decay_factor(decay), values), values.shape)
    decayed = tl.where(is_first, factor * tl.expand_dims(carry, 0), 0.0)
    _, values, decayed = tl.associative_scan((factor, decayed + values, decayed), 0, _scan_combine)
    return values, decayed


@_jit
def _running_sum(values, carry, decay, CAUSAL: tl.constexpr):
    """Prefix sums over a tile's tokens (axis 0) on top of `carry`; in the bidirectional form `carry`, which is the total.

    With `decay`, a sum is multiplied by exp(decay) before the token's own value is added.
    """
    if not CAUSAL:
        return tl.broadcast_to(tl.expand_dims(carry, 0), values.shape)
    elif decay is None:
        is_first = _per_token(tl.arange(0, values.shape[0]) == 0, values)
        return tl.cumsum(tl.where(is_first, tl.expand_dims(carry, 0) + values, values), 0)
    else:
        return _decayed_scan(values, carry, decay)[0]


@_jit
def _select(values, token: tl.constexpr):
    """One token's values, selected as integers: adding an integer 0 compiles to nothing, adding a float 0 does not."""
    is_token = _per_token(tl.arange(0, values.shape[0]) == token, values)
    bits = tl.where(is_token, values.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 0).to(tl.float32, bitcast=True)


@_jit
def _last(values):
    return _select(values, _TILE - 1)


@_jit
def _total(values, carry, decay):
    """The sum after the tile's last token."""
    return _last(_running_sum(values, carry, decay, True))


@_jit
def _flip(x):
    """A tile with its tokens in reverse order.

    As integers, where a + b - b is b: that compiles to no instruction at all, while a scan in reverse would shuffle values
    between threads.
    """
    tl.static_assert(_TILE == 4)
    # x.shape[:0]: a shape joins a list of sizes on its right only
    bits = tl.reshape(x.to(tl.int32, bitcast=True), x.shape[:0] + [2, 2] + x.shape[1:])  # noqa: RUF005
    for axis in tl.static_range(2):
        bits = tl.sum(bits, axis, keep_dims=True) - bits
    return tl.reshape(bits, x.shape).to(tl.float32, bitcast=True)


@_jit
def _suffix_sum(values, carry, next_decay, CAUSAL: tl.constexpr):
    """`_running_sum` over the tokens in reverse; `next_decay` is the log decay of the token after each."""
    if not CAUSAL:
        return _running_sum(values, carry, None, False)
    elif next_decay is None:
        return _flip(_running_sum(_flip(values), carry, None, True))
    else:
        return _flip(_running_sum(_flip(values), carry, _flip(next_decay), True))


@_jit
def _score(x, inverse_S, bias, first, places, real, H: tl.constexpr, P: tl.constexpr):
    """The score (TILE, HEADS) of tokens from 1 / S."""
    score = tl.sum(x * x * inverse_S, 2)
    if bias is not None:
        score += P * _load_heads(bias, first, places, real, H)
    return score


@_jit
def _membership(score, temp, heads, real, H: tl.constexpr):
    """The softmax over the heads, (TILE, HEADS); 0 at padding and where there is no such head."""
    score *= tl.load(temp + heads, mask=heads < H, other=0.0)[None, :]
    score = tl.where((heads < H)[None, :], score, float("-inf"))
    pi = tl.exp(score - tl.max(score, 1)[:, None])
    return tl.where(real, pi * (1.0 / tl.sum(pi, 1))[:, None], 0.0)


@_jit
def _output_grad(x, g, N, D):
    """From the output's gradient g: the gradient of -w Pi times Pi, and that of N, both still without the factor Pi D.

    The output is -w Pi D / (N + D). The gradient of D is -Pi times the sum over channels of N times the second.
    """
    inverse = _reciprocal(N + D[:, :, None])
    of_w = g * inverse
    return of_w, of_w * x * inverse


@_jit
def _score_grad(x, S, q, CAUSAL: tl.constexpr):
    """1 / S, and the gradient of S through the score, from the score's gradient q (TILE, HEADS)."""
    S, is_clamped = _clamp(S, CAUSAL)
    inverse = _reciprocal(S)
    return inverse, tl.where(is_clamped, 0.0, -q[:, :, None] * inverse * inverse * (x * x))


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


@_jit_any_length
def chunk_state_kernel(
    w, log_decay, mask, T,
    totals, total_decay,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Chunk totals of S and of the log factors."""
    chunk, heads, first, count, _carry = _program(T, H, HEADS, CAUSAL)
    S = tl.zeros([HEADS, BLOCK_P], tl.float32)
    decay_sum = tl.zeros([HEADS], tl.float32)
    for start in range(0, count, _TILE):
        places, exists, real = _tile(mask, first, start, count, heads, H)
        x = _load(w, first, places, real, H, P, BLOCK_P)
        decay = _load_heads(log_decay, first, places, exists, H)
        S = _total(x * x, S, decay)
        if log_decay is not None:
            decay_sum += tl.sum(decay, 0)
    _store_state(totals, chunk, S, None, None, heads, H, P, BLOCK_P)
    if log_decay is not None:
        tl.store(total_decay + chunk * H + heads, decay_sum, mask=heads < H)


@_jit_any_length
def state_passing_kernel(
    totals, carries,
    initial, final,  # (B, 2 H P + H), or None
    total_decay, T,
    FROM: tl.constexpr, TO: tl.constexpr,  # columns of the 2 H P + H
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, REVERSE: tl.constexpr,
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
    count = tl.cdiv(T, _CHUNK).to(tl.int64)
    first = sequence * count
    carry = tl.zeros([BLOCK_C], tl.float32)
    if initial is not None:
        carry = tl.load(initial + sequence * width + column, mask=inside, other=0.0)
    for j0 in range(0, count + 1, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        chunk = first + (count - 1 - j if REVERSE else j)
        previous = chunk + (1 if REVERSE else -1)
        known = ((j > 0) & (j <= count))[:, None] & inside[None, :]
        offsets = chunk[:, None] * width + column[None, :]
        x = tl.load(totals + (width if REVERSE else -width) + offsets, mask=known, other=0.0)
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
    if final is not None:
        tl.store(final + sequence * width + column, carry, mask=inside)


@_jit_any_length
def chunk_fwd_membership_kernel(
    w, log_decay, mask, T,
    temp,
    bias,  # or None
    carries, membership, totals,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Softmax over the heads, and the chunk totals of N and D, which need it. All heads in one program."""
    chunk, heads, first, count, carry = _program(T, H, HEADS, CAUSAL)
    S, _N, _D = _load_state(carries, carry, heads, H, P, BLOCK_P)
    total_N = tl.zeros([HEADS, BLOCK_P], tl.float32)
    total_D = tl.zeros([HEADS], tl.float32)
    for start in range(0, count, _TILE):
        places, exists, real = _tile(mask, first, start, count, heads, H)
        x = _load(w, first, places, real, H, P, BLOCK_P)
        decay = _load_heads(log_decay, first, places, exists, H)
        running_S = _running_sum(x * x, S, decay, CAUSAL)
        score = _score(x, _reciprocal(_clamp(running_S, CAUSAL)[0]), bias, first, places, real, H, P)
        pi = _membership(score, temp, heads, real, H)
        _store_heads(membership, pi, first, places, exists, H)
        total_N = _total(x * x * pi[:, :, None], total_N, decay)
        total_D = _total(pi, total_D, decay)
        if CAUSAL:
            S = _last(running_S)
    _store_state(totals, chunk, None, total_N, total_D, heads, H, P, BLOCK_P)


@_jit_any_length
def chunk_fwd_output_kernel(
    w, log_decay, mask, T,
    membership, carries, output,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The output -w Pi / (1 + N / D), as -w Pi D / (D + N)."""
    _chunk, heads, first, count, carry = _program(T, H, HEADS, CAUSAL)
    _S, N, D = _load_state(carries, carry, heads, H, P, BLOCK_P)
    for start in range(0, count, _TILE):
        places, exists, real = _tile(mask, first, start, count, heads, H)
        x = _load(w, first, places, real, H, P, BLOCK_P)
        pi = _load_heads(membership, first, places, real, H)
        decay = _load_heads(log_decay, first, places, exists, H)
        running_N = _running_sum(x * x * pi[:, :, None], N, decay, CAUSAL)
        running_D = _running_sum(pi, D, decay, CAUSAL)
        count_D = running_D + _EPS_MEMBERSHIP
        value = x * (-pi * count_D)[:, :, None] * _reciprocal(running_N + count_D[:, :, None])
        _store(output, value, first, places, exists, H, P, BLOCK_P)
        if CAUSAL:
            N = _last(running_N)
            D = _last(running_D)


@_jit_any_length
def chunk_bwd_state_kernel(
    w, log_decay, mask, T,
    grad, membership, carries, spans, totals, total_decay,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Chunk totals of dN and dD; the forward's sums before each span, for the two kernels that process chunks in reverse."""
    chunk, heads, first, count, carry = _program(T, H, HEADS, CAUSAL)
    S, N, D = _load_state(carries, carry, heads, H, P, BLOCK_P)
    dN_sum = tl.zeros([HEADS, BLOCK_P], tl.float32)
    dD_sum = tl.zeros([HEADS, BLOCK_P], tl.float32)
    decay_sum = tl.zeros([HEADS], tl.float32)
    for start in range(0, count, _TILE):
        places, exists, real = _tile(mask, first, start, count, heads, H)
        x = _load(w, first, places, real, H, P, BLOCK_P)
        pi = _load_heads(membership, first, places, real, H)
        decay = _load_heads(log_decay, first, places, exists, H)
        g = _load(grad, first, places, real, H, P, BLOCK_P)
        running_N = _running_sum(x * x * pi[:, :, None], N, decay, CAUSAL)
        running_D = _running_sum(pi, D, decay, CAUSAL)
        count_D = running_D + _EPS_MEMBERSHIP
        _of_w, dmoment = _output_grad(x, g, running_N, count_D)
        dN = dmoment * (pi * count_D)[:, :, None]
        dD = dmoment * pi[:, :, None] * running_N
        if log_decay is not None:  # last: with a strong decay, those of small memberships would be no normal numbers
            factor = tl.exp(decay_sum[None, :] + tl.cumsum(decay, 0))[:, :, None]
            dN, dD = dN * factor, dD * factor
            decay_sum += tl.sum(decay, 0)
        dN_sum += tl.sum(dN, 0)
        dD_sum -= tl.sum(dD, 0)
        if CAUSAL:
            if start // _SPAN * _SPAN == start:
                _store_state(spans, chunk * (_CHUNK // _SPAN) + start // _SPAN, S, N, D, heads, H, P, BLOCK_P)
            S = _total(x * x, S, decay)
            N = _last(running_N)
            D = _last(running_D)
    _store_state(totals, chunk, None, dN_sum, tl.sum(dD_sum, 1), heads, H, P, BLOCK_P)
    if log_decay is not None:
        tl.store(total_decay + chunk * H + heads, decay_sum, mask=heads < H)


@_jit
def _state_before(
    w, log_decay, mask, membership, spans, chunk, first, start, carry, heads,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The forward's sums before a tile: those before its span plus the tiles between, never later sums minus tokens."""
    if CAUSAL:
        S, N, D = _load_state(spans, chunk * (_CHUNK // _SPAN) + start // _SPAN, heads, H, P, BLOCK_P)
        for place in range(start // _SPAN * _SPAN, start, _TILE):
            places, exists, real = _tile(mask, first, place, start, heads, H)
            x = _load(w, first, places, real, H, P, BLOCK_P)
            pi = _load_heads(membership, first, places, real, H)
            decay = _load_heads(log_decay, first, places, exists, H)
            S = _total(x * x, S, decay)
            N = _total(x * x * pi[:, :, None], N, decay)
            D = _total(pi, D, decay)
    else:
        S, N, D = _load_state(spans, carry, heads, H, P, BLOCK_P)
    return S, N, D


@_jit
def _load_next_decay(log_decay, first, start, count, heads, H: tl.constexpr):
    """The log decay of the token after each; 0 after the chunk, whose carries are decayed already."""
    places, exists, _real = _tile(None, first, start + 1, count, heads, H)
    return _load_heads(log_decay, first, places, exists, H)


@_jit_any_length
def chunk_bwd_score_kernel(
    w, log_decay, mask, T,
    grad,
    grad_membership,  # or None
    temp,
    bias,  # or None
    membership, spans, grad_carries, dscore, dtemp, totals,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Backward of the softmax over the heads, and the chunk totals of dS, which need it. All heads in one program."""
    chunk, heads, first, count, carry = _program(T, H, HEADS, CAUSAL)
    _after_dS, after_dN, after_dD = _load_state(grad_carries, carry, heads, H, P, BLOCK_P)
    dS_sum = tl.zeros([HEADS, BLOCK_P], tl.float32)
    dtemp_sum = tl.zeros([HEADS], tl.float32)
    scale = tl.load(temp + heads, mask=heads < H, other=0.0)
    for back in range(0, tl.cdiv(count, _TILE)):
        start = (tl.cdiv(count, _TILE) - 1 - back) * _TILE
        S, N, D = _state_before(
            w, log_decay, mask, membership, spans, chunk, first, start, carry, heads, H, P, CAUSAL, BLOCK_P
        )
        places, exists, real = _tile(mask, first, start, count, heads, H)
        x = _load(w, first, places, real, H, P, BLOCK_P)
        pi = _load_heads(membership, first, places, real, H)
        decay = _load_heads(log_decay, first, places, exists, H)
        next_decay = _load_next_decay(log_decay, first, start, count, heads, H)
        g = _load(grad, first, places, real, H, P, BLOCK_P)
        N = _running_sum(x * x * pi[:, :, None], N, decay, CAUSAL)
        D = _running_sum(pi, D, decay, CAUSAL) + _EPS_MEMBERSHIP
        of_w, dmoment = _output_grad(x, g, N, D)
        dN = _suffix_sum(dmoment * (pi * D)[:, :, None], after_dN, next_decay, CAUSAL)
        dD = _suffix_sum(-pi * tl.sum(dmoment * N, 2), after_dD, next_decay, CAUSAL)
        dpi = tl.sum(x * (x * dN - of_w * D[:, :, None]), 2) + dD
        if grad_membership is not None:
            dpi += _load_heads(grad_membership, first, places, real, H)
        dlogit = pi * (dpi - tl.sum(pi * dpi, 1)[:, None])
        _store_heads(dscore, dlogit * scale[None, :], first, places, exists, H)
        S = _running_sum(x * x, S, decay, CAUSAL)
        inverse, dS = _score_grad(x, S, dlogit * scale[None, :], CAUSAL)
        dtemp_sum += tl.sum(dlogit * _score(x, inverse, bias, first, places, real, H, P), 0)
        if CAUSAL:
            after_dN = _select(dN, 0)
            after_dD = _select(dD, 0)
        dS_sum = _select(_suffix_sum(dS, dS_sum, next_decay, True), 0)
    if log_decay is not None:
        dS_sum *= _decay_factor(tl.load(log_decay + first * H + heads, mask=heads < H, other=0.0))[:, None]
    tl.store(dtemp + chunk * H + heads, dtemp_sum, mask=heads < H)
    _store_state(totals, chunk, dS_sum, None, None, heads, H, P, BLOCK_P)


@_jit_any_length
def chunk_bwd_input_kernel(
    w, log_decay, mask, T,
    grad, membership, dscore, spans, grad_carries, dw, dlog_decay,
    H: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The gradients of w and of the log decay."""
    chunk, heads, first, count, carry = _program(T, H, HEADS, CAUSAL)
    after_dS, after_dN, after_dD = _load_state(grad_carries, carry, heads, H, P, BLOCK_P)
    for back in range(0, tl.cdiv(count, _TILE)):
        start = (tl.cdiv(count, _TILE) - 1 - back) * _TILE
        before_S, before_N, before_D = _state_before(
            w, log_decay, mask, membership, spans, chunk, first, start, carry, heads, H, P, CAUSAL, BLOCK_P
        )
        places, exists, real = _tile(mask, first, start, count, heads, H)
        x = _load(w, first, places, real, H, P, BLOCK_P)
        pi = _load_heads(membership, first, places, real, H)
        decay = _load_heads(log_decay, first, places, exists, H)
        next_decay = _load_next_decay(log_decay, first, start, count, heads, H)
        g = _load(grad, first, places, real, H, P, BLOCK_P)
        q = _load_heads(dscore, first, places, real, H)
        N = _running_sum(x * x * pi[:, :, None], before_N, decay, CAUSAL)
        D = _running_sum(pi, before_D, decay, CAUSAL)
        of_w, dmoment = _output_grad(x, g, N, D + _EPS_MEMBERSHIP)
        pi_D = (pi * (D + _EPS_MEMBERSHIP))[:, :, None]
        dN = _suffix_sum(dmoment * pi_D, after_dN, next_decay, CAUSAL)
        inverse, dS = _score_grad(x, _running_sum(x * x, before_S, decay, CAUSAL), q, CAUSAL)
        dS = _suffix_sum(dS, after_dS, next_decay, CAUSAL)
        dsq = q[:, :, None] * inverse + dS + pi[:, :, None] * dN
        _store(dw, 2.0 * x * dsq - of_w * pi_D, first, places, exists, H, P, BLOCK_P)
        if dlog_decay is not None:
            dD = _suffix_sum(-pi * tl.sum(dmoment * N, 2), after_dD, next_decay, CAUSAL)
            by_N = dN * _decayed_scan(x * x * pi[:, :, None], before_N, decay)[1]
            by_S = dS * _decayed_scan(x * x, before_S, decay)[1]
            ddecay = tl.sum(by_N + by_S, 2) + dD * _decayed_scan(pi, before_D, decay)[1]
            _store_heads(dlog_decay, ddecay, first, places, exists, H)
            after_dD = _select(dD, 0)
        if CAUSAL:
            after_dN = _select(dN, 0)
            after_dS = _select(dS, 0)


@_jit
def step_kernel(
    w, temp,
    bias, log_decay, mask,  # or None
    sum_sq, sum_weighted_sq, sum_membership, output, membership,
    H: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One token: updates the sums in place. One program per batch element."""
    element = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)
    is_head = heads < H
    places = element * H + heads
    offsets, is_channel = _channels(places, is_head, P, BLOCK_P)
    real = is_head
    if mask is not None:
        real = is_head & (tl.load(mask + element + 0 * heads) != 0)
    x = tl.load(w + offsets, mask=is_channel & real[:, None], other=0.0).to(tl.float32)
    S = tl.load(sum_sq + offsets, mask=is_channel, other=0.0)
    N = tl.load(sum_weighted_sq + offsets, mask=is_channel, other=0.0)
    D = tl.load(sum_membership + places, mask=is_head, other=0.0)
    if log_decay is not None:
        decay = tl.load(log_decay + places, mask=real, other=0.0)
        S, N, D = _apply_decay(S, decay[:, None]), _apply_decay(N, decay[:, None]), _apply_decay(D, decay)
    S += x * x
    score = tl.sum(x * x / _clamp(S, True)[0], 1)
    if bias is not None:
        score += P * tl.load(bias + places, mask=is_head, other=0.0)
    score = tl.where(is_head, score * tl.load(temp + heads, mask=is_head, other=0.0), float("-inf"))
    pi = tl.exp(score - tl.max(score, 0))
    pi = tl.where(real, pi / tl.sum(pi, 0), 0.0)
    N += x * x * pi[:, None]
    D += pi
    tl.debug_barrier()  # in small tiles several threads read the same number: all must have, before one writes
    tl.store(sum_sq + offsets, S, mask=is_channel)
    tl.store(sum_weighted_sq + offsets, N, mask=is_channel)
    tl.store(sum_membership + places, D, mask=is_head)
    tl.store(membership + places, pi, mask=is_head)
    moment = (N / (D + _EPS_MEMBERSHIP)[:, None]).to(tl.float32)
    tl.store(output + offsets, -(x * pi[:, None]) / (1.0 + moment), mask=is_channel)


# ---------------------------------------------------------------------------------------------------------------------
# Launching
# ---------------------------------------------------------------------------------------------------------------------


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
    heads = max(1, 256 // channels, triton.next_power_of_2(H) if all_heads else 1)
    return _Blocks(heads, channels, min(16, heads * channels // 256))


def _cdiv(n, m):
    return (n + m - 1) // m


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def _as_bytes(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else mask.bool().contiguous().view(torch.uint8)


class _Launcher:
    """What the launches of one forward or backward share."""

    def __init__(self, w, log_decay, mask, causal):
        self.w, self.causal = w.contiguous(), causal
        self.B, self.T, self.H, self.p = w.shape
        self.chunks = self.B * _cdiv(self.T, CHUNK)
        self.tokens = (self.w, _contiguous(log_decay), _as_bytes(mask), self.T)
        self.total_decay = None if log_decay is None else self.empty(self.chunks, self.H)
        self.totals = self.empty_states(self.chunks)

    def empty(self, *shape: int) -> torch.Tensor:
        return self.w.new_empty(shape, dtype=torch.float32)

    def empty_states(self, records: int) -> torch.Tensor:
        return self.empty(records, 2 * self.H * self.p + self.H)

    def empty_carries(self) -> torch.Tensor:
        return self.empty_states(self.chunks if self.causal else self.B)

    def launch(self, kernel, *args, all_heads: bool = False) -> None:
        """Launches a kernel over all chunks; its programs take all heads or as many as a program should have."""
        heads, channels, warps = _blocks(self.H, self.p, all_heads)
        grid = (self.chunks * _cdiv(self.H, heads),)
        sizes = {"H": self.H, "P": self.p, "CAUSAL": self.causal, "HEADS": heads, "BLOCK_P": channels}
        kernel[grid](*self.tokens, *args, **sizes, num_warps=warps)

    def pass_states(self, carries, sums, initial=None, final=None, reverse: bool = False) -> None:
        """Fills the carries of the `sums`, "S" or "ND", from chunk totals, from `initial` on; writes `final`."""
        C = self.H * self.p
        first, last = (0, C) if sums == "S" else (C, 2 * C + self.H)
        state_passing_kernel[(self.B * _cdiv(last - first, SCAN_COLUMNS),)](
            *(self.totals, carries, initial, final, self.total_decay, self.T, first, last),
            H=self.H,
            P=self.p,
            CAUSAL=self.causal,
            REVERSE=reverse,
            BLOCK_N=SCAN_CHUNKS,
            BLOCK_C=SCAN_COLUMNS,
        )


# ---------------------------------------------------------------------------------------------------------------------
# Custom operators. They cannot return None: what does not exist is an empty tensor.
# ---------------------------------------------------------------------------------------------------------------------


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
    """Output, membership, the sums after the last token (B, 2 C + H), and the carries for the backward.

    The carries are flat, since a compiler would ask of a dimension whether it is 1, and specialise the number of tokens.
    """
    with torch.cuda.device_of(w):
        run = _Launcher(w, log_decay, mask, causal)
        output, membership, carries = torch.empty_like(run.w), run.empty(run.B, run.T, run.H), run.empty_carries()
        final = run.empty_states(run.B) if causal else None
        run.launch(chunk_state_kernel, run.totals, run.total_decay)
        run.pass_states(carries, "S", initial, final)
        args = temp, _contiguous(bias), carries, membership, run.totals
        run.launch(chunk_fwd_membership_kernel, *args, all_heads=True)
        run.pass_states(carries, "ND", initial, final)
        run.launch(chunk_fwd_output_kernel, membership, carries, output)
    return output, membership, run.empty(0) if final is None else final, carries.flatten()


@_forward.register_fake
def _(w, temp, bias, mask, log_decay, initial, causal):
    B, T, H, p = w.shape
    chunks = B * _cdiv(T, CHUNK) if causal else B
    sizes = (B, T, H), (B, 2 * H * p + H) if causal else (0,), chunks * (2 * H * p + H)
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
    """Gradients of w, temp, the score, the log decay and the initial sums."""
    with torch.cuda.device_of(w):
        run = _Launcher(w, log_decay, mask, causal)
        grad = torch.zeros_like(run.w) if grad_output is None else grad_output.contiguous()
        after = _contiguous(grad_final), None if initial is None else torch.empty_like(initial)
        grad_carries = run.empty_carries()
        spans = run.empty_states(run.chunks * (CHUNK // SPAN)) if causal else carries
        run.launch(chunk_bwd_state_kernel, grad, membership, carries, spans, run.totals, run.total_decay)
        run.pass_states(grad_carries, "ND", *after, reverse=True)
        dscore, dtemp = torch.empty_like(membership), run.empty(run.chunks, run.H)
        args = grad, _contiguous(grad_membership), temp, _contiguous(bias), membership, spans, grad_carries
        run.launch(chunk_bwd_score_kernel, *args, dscore, dtemp, run.totals, all_heads=True)
        run.pass_states(grad_carries, "S", *after, reverse=True)
        dw, dlog_decay = torch.empty_like(run.w), torch.empty_like(membership) if needs_decay_grad else None
        run.launch(chunk_bwd_input_kernel, grad, membership, dscore, spans, grad_carries, dw, dlog_decay)
    dlog_decay, dinitial = (run.empty(0) if x is None else x for x in (dlog_decay, after[1]))
    return dw, dtemp.sum(0), dscore, dlog_decay, dinitial


@_backward.register_fake
def _(grad_output, grad_membership, grad_final, w, temp, bias, mask, log_decay, initial, membership, *rest):
    inputs = w, temp, membership, membership if rest[-1] else None, initial
    return tuple(temp.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.causal = inputs
    ctx.save_for_backward(*tensors, output[1], output[3])
    ctx.mark_non_differentiable(*(output[3:] if ctx.causal else output[2:]))
    ctx.set_materialize_grads(False)


def _differentiate(ctx, *grads):
    saved = ctx.saved_tensors  # once: checkpointing recomputes them at each access
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
    """Causal TSSA of one new token. Has no gradient: a backward through it raises an error.

    Args:
        w: (B, H, p), of a dtype and device that `find_unsupported` accepts.
        temp: (H,), float32.
        bias: (B, H), float32, or None.
        mask: (B,), bool, or None; a padding token leaves the sums as they were.
        log_decay: (B, H), float32, or None.
        sum_sq, sum_weighted_sq, sum_membership: (B, H, p), (B, H, p) and (B, H), float32 or float64 and contiguous; updated
            in place. A million terms added one by one need float64 in the last two.

    Returns:
        The output (B, H, p) in `w`'s dtype and the membership (B, H).

    Raises:
        ValueError: the sums are not contiguous.
    """
    B, H, p = w.shape
    state = sum_sq, sum_weighted_sq, sum_membership
    if not all(x.is_contiguous() for x in state):
        raise ValueError(f"The sums are updated in place: they must be contiguous, got strides {[x.stride() for x in state]}.")
    w, temp, bias, log_decay = w.contiguous(), temp.contiguous(), _contiguous(bias), _contiguous(log_decay)
    output, membership = torch.empty_like(w), w.new_empty((B, H), dtype=torch.float32)
    heads, channels, warps = _blocks(H, p, all_heads=True)
    with torch.cuda.device_of(w):
        args = w, temp, bias, log_decay, _as_bytes(mask), *state, output, membership
        step_kernel[(B,)](*args, H=H, P=p, HEADS=heads, BLOCK_P=channels, num_warps=warps)
    return output, membership


@tssa_step_triton.register_fake
def _(w, *rest):
    return w.new_empty(w.shape), w.new_empty(w.shape[:2], dtype=torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# What tssa.py calls
# ---------------------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Whether Triton can be imported."""
    return triton is not None


def find_unsupported(dtype: torch.dtype, device: str) -> str | None:
    """Why the kernels do not accept tokens of a dtype on a kind of device; on a CPU they run under TRITON_INTERPRET=1 only."""
    if triton is None:
        return "Triton is not installed (pip install triton)"
    on_device = device == "cuda" or not isinstance(chunk_fwd_output_kernel, triton.JITFunction)
    if on_device and dtype in CHECK_TOLERANCES:
        return None
    return f"the Triton kernels do not take {dtype} tokens on {device}"


def tssa_triton(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    state: TSSAState | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState | None]:
    """`tssa.tssa` by the kernels, without its checks.

    Args:
        w: (B, T, H, p), of a dtype and device that `find_unsupported` accepts.
        temp: (H,), float32.
        bias: (T, H) or (B or 1, T, H), float32, or None; causal form only.
        mask: (B, T), bool, true at real tokens, or None.
        log_decay: (B, T, H) or (B, T, 1), float32, 0 at padding, or None; causal form only.
        state: sums before the first token, or None; causal form only.
        causal: prefix sums or totals.

    Returns:
        The output (B, T, H, p) in `w`'s dtype, the membership (B, T, H), and the sums after the last token (None in the
        bidirectional form), all differentiable once with respect to w, temp, bias, log_decay and state.
    """
    B, T, H, p = w.shape
    bias, log_decay = (None if x is None else x.expand(B, T, H) for x in (bias, log_decay))
    initial = None if state is None else torch.cat([x.float().flatten(1) for x in state], 1)
    output, membership, final, _ = _forward(w, temp.contiguous(), bias, mask, log_decay, initial, causal)
    if not causal:
        return output, membership, None
    S, N, D = final.split([H * p, H * p, H], 1)
    return output, membership, as_state((x.contiguous() for x in (S.view(B, H, p), N.view(B, H, p), D)), w)


# ---------------------------------------------------------------------------------------------------------------------
# Self-check: on each device, for each token shape and dtype, the kernels are compared once with the float64 reference
# before they are used.
# ---------------------------------------------------------------------------------------------------------------------


CHECK_TOKENS = 70  # more than one chunk, and not a whole number of tiles
CHECK_STEPS = 3
CHECK_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # relative RMS, ten times the rounding

_problems: dict[tuple, str | None] = {}  # what was found, for the life of the process


def kernel_problem(w: torch.Tensor, form: str, *, decay: bool = False, gradients: bool = False) -> str | None:
    """What is wrong with the kernels for tokens like `w`, as the end of an error message.

    Args:
        w: (..., H, p); only its device, dtype, H and p count.
        form: "bidirectional", "causal", or "step" for one-token steps.
        decay: whether there is a `log_decay`.
        gradients: whether the backward kernels are checked as well.

    Returns:
        None where nothing is wrong, and where nothing can be checked: while a compiler traces or a CUDA graph is captured.
    """
    if torch.compiler.is_compiling() or type(w) is not torch.Tensor:
        return None
    key = (w.device, w.dtype, *w.shape[-2:], form, decay, gradients)
    if key not in _problems:
        if w.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        _problems[key] = _find_problem(*key)
    return _problems[key]


def _find_problem(device, dtype, H, p, form, decay, gradients) -> str | None:
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), torch.autocast(device.type, enabled=False):
            errors = _relative_errors(device, dtype, H, p, form, decay, gradients)
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
        f"head_dim {p}, {dtype}, {form}{', decay' * decay}{', gradients' * gradients}, torch {torch.__version__})"
    )


def _relative_errors(device, dtype, H, p, form, decay, gradients) -> dict[str, float]:
    """Relative RMS errors of the kernels' output, membership and gradients on random tokens, by name."""
    draw = torch.Generator().manual_seed(0)  # not the global generator
    size = 1, CHECK_TOKENS, H
    inputs: dict[str, Any] = {
        "w": torch.randn(*size, p, generator=draw).to(dtype),
        "temp": torch.rand(H, generator=draw) + 0.5,
    }
    if form != "bidirectional":
        inputs["bias"] = 0.3 * torch.rand(size, generator=draw)
    if decay:
        inputs["log_decay"] = -0.5 * torch.rand(size, generator=draw)
    inputs = {name: x.to(device).requires_grad_(gradients) for name, x in inputs.items()}
    exact: dict[str, Any] = {name: x.detach().double().requires_grad_(gradients) for name, x in inputs.items()}
    w, temp, bias, log_decay = inputs["w"], inputs["temp"], inputs.get("bias"), inputs.get("log_decay")
    if form == "step":
        state = zero_state(w)
        at = [[None if x is None else x[:, t] for x in (w, bias, log_decay)] for t in range(CHECK_STEPS)]
        steps = [tssa_step_triton(x, temp, b, None, d, *state) for x, b, d in at]
        got = tuple(torch.stack(x, 1) for x in zip(*steps))
    else:
        got = tssa_triton(w, temp, bias, None, log_decay, None, form == "causal")[:2]
    wanted = (bidirectional if form == "bidirectional" else causal)(**exact)[:2]
    pairs = {name: (x, y[:, : x.shape[1]]) for name, x, y in zip(("output", "membership"), got, wanted)}
    if gradients:
        grads = [
            torch.autograd.grad([x.double().square().sum() for x in out], list(leaves.values()))
            for out, leaves in ((got, inputs), (wanted, exact))
        ]
        pairs |= {f"gradient of {name}": pair for name, pair in zip(inputs, zip(*grads))}
    return {name: ((x.double() - y).square().mean() / y.square().mean()).sqrt().item() for name, (x, y) in pairs.items()}
