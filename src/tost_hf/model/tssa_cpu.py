# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The numba backend of TSSA and of the short convolution: kernels for CPUs, with the backward in closed form.

tssa_reference.py defines what is computed and the names S, N, D and Pi. Sequences are ranges of one array of tokens (N, H, p):
the same loops compute the sequences of a batch, one-token steps and the requests that vLLM serves together. Tokens are
processed in chunks, in which a running sum after token t is

    carry * (product of the chunk's decays up to t) + local

with `carry`, the sum before the chunk, and `local`, the decayed sum of the chunk's tokens, in float32. At the end of a chunk
they are added in float64, so that the error does not grow with the number of tokens. The forward saves the state before each
chunk; the backward recomputes a chunk's sums from it, from the last chunk to the first.

A decay of 0 resets the state instead of multiplying it, so that infinities and NaN do not reach other packed sequences.
Gradients `grad_x` are with respect to x. The output is computed as -w Pi D / (N + D), where D includes the epsilon.

Loops over channels start at 0, as numba vectorizes no others. bfloat16, which numba lacks, is passed as its bits (uint16).
"""

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .tssa_reference import (
    EPS_MEMBERSHIP,
    EPS_NORM,
    EPS_SUM_SQ,
    TSSAState,
    custom_operator,
    differentiate_reference,
    select_bias,
    state_dtypes,
    state_shapes,
    tssa_reference,
)
from .tssa_reference import convolve as convolve_reference


try:
    import numba
    from llvmlite import ir
    from numba import types
    from numba.core.caching import FunctionCache
    from numba.extending import intrinsic
except ImportError as error:
    numba, _import_error, FunctionCache = None, error, object  # type: ignore[assignment,misc]


CHUNK_TOKENS = 32
F32, F64 = np.float32, np.float64
EPS_S, EPS_D, EPS_S_BIDIRECTIONAL = F32(EPS_SUM_SQ), F32(EPS_MEMBERSHIP), F32(EPS_NORM**2)
WEAK_DECAY = F32(-0.1)  # log decays above are expanded around a decay of 1, below which this would cancel digits


class _Cache(FunctionCache):
    """numba's cache of a compiled function on disk, which raises no errors: without it the function is compiled."""

    has_warned = False

    def load_overload(self, *args):
        try:
            return super().load_overload(*args)
        except Exception as error:  # of any type if a file is damaged
            self._warn(error)
            return None

    def save_overload(self, *args):
        try:
            super().save_overload(*args)
        except Exception as error:  # as above; an OSError if the disk is full
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not _Cache.has_warned:
            _Cache.has_warned = True  # once for all functions
            warnings.warn(
                f"numba's cache in {self.cache_path} cannot be used ({error!r}), so that the kernels are compiled again, for "
                "several seconds. Remove the folder, or free disk space; NUMBA_CACHE_DIR chooses another folder.",
                stacklevel=2,
            )


def _jit(function: Callable) -> Any:
    if numba is None:
        return function
    # sums may be reordered, but not as if there were no infinities and NaN
    options: dict[str, Any] = {"fastmath": {"contract", "nsz", "arcp", "reassoc"}, "error_model": "numpy", "nogil": True}
    dispatcher = numba.njit(**options)(function)
    with contextlib.suppress(RuntimeError):  # neither this folder nor the user's cache is writable
        dispatcher._cache = _Cache(function)
    return dispatcher


def _intrinsic(function: Callable) -> Any:
    return function if numba is None else intrinsic(function)


# Numbers --------------------------------------------------------------------------------------------------------------


@_intrinsic
def _load(typing_context, x):
    """x, or the bits of a bfloat16, as float32."""

    def widen(context, builder, signature, args):
        bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    def identity(context, builder, signature, args):
        return args[0]

    return types.float32(x), widen if x == types.uint16 else identity


@_intrinsic
def _cast(typing_context, x, like):
    """float32 x as a float32, or as the bits of the nearest bfloat16 if `like` are such bits."""

    def narrow(context, builder, signature, args):
        integer = ir.IntType(32)
        bits, sixteen = builder.bitcast(args[0], integer), ir.Constant(integer, 16)
        is_odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(integer, 1))
        rounded = builder.add(bits, builder.add(is_odd, ir.Constant(integer, 0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])  # rounding might carry into the exponent
        high_bits = builder.select(is_nan, ir.Constant(integer, 0x7FC0), builder.lshr(rounded, sixteen))
        return builder.trunc(high_bits, ir.IntType(16))

    def identity(context, builder, signature, args):
        return args[0]

    return like(types.float32, like), narrow if like == types.uint16 else identity


# Causal form ----------------------------------------------------------------------------------------------------------


@_jit
def _select_tokens(first, last, mask, tokens):
    """Writes the indices of the real tokens from `first` to before `last` to `tokens`; returns their number."""
    n = 0
    for t in range(first, last):
        if mask[t]:
            tokens[n] = t
            n += 1
    return n


@_jit
def _zero_padding(first, last, mask, values):
    """Sets `values` (N, ...) to 0 at the padding from `first` to before `last`."""
    for t in range(first, last):
        if not mask[t]:
            values[t] = values.dtype.type(0)


@_jit
def _is_reset(t, first, mask, log_decay, h):
    """Whether a packed sequence starts in the padding directly before token t."""
    while t > first and not mask[t - 1]:
        t -= 1
        if log_decay[t, h] == -np.inf:
            return True
    return False


@_jit
def _compute_decays(log_decay, first, mask, tokens, n, decay, from_start, to_end, total):
    """Decays of a chunk's tokens (n, H), their products from its first token and after each token, and the total (H,)."""
    for h in range(total.shape[0]):
        total[h] = 1
        for j in range(n):
            logarithm = log_decay[tokens[j], h]
            if _is_reset(tokens[j], first, mask, log_decay, h):
                a = F64(0)
            elif logarithm > WEAK_DECAY:
                a = F64(1) + F64(math.expm1(logarithm))
            else:
                a = F64(math.exp(logarithm))
            decay[j, h] = a
            total[h] *= a
            from_start[j, h] = total[h]
        to_end[n, h] = 1
        for j in range(n - 1, -1, -1):
            to_end[j, h] = 0 if decay[j, h] == 0 else to_end[j + 1, h] * decay[j, h]


@_jit
def _split_sums(sums, H, P):
    """Views of S and N (H, P) and D (H, 1) in one vector."""
    size = H * P
    return sums[:size].reshape((H, P)), sums[size : 2 * size].reshape((H, P)), sums[2 * size :].reshape((H, 1))


@_jit
def _copy(source, target):
    for h in range(source.shape[0]):
        for i in range(source.shape[1]):
            target[h, i] = source[h, i]


@_jit
def _load_sum(source, has_source, total, carry):
    """Sets the total, and its copy in float32, to `source` (H, n) or to 0."""
    for h in range(total.shape[0]):
        for i in range(total.shape[1]):
            total[h, i] = source[h, i] if has_source else 0
            carry[h, i] = total[h, i]


@_jit
def _reset(h, total, carry, local):
    for i in range(total.shape[1]):
        total[h, i] = 0
        carry[h, i] = 0
        local[h, i] = 0


@_jit
def _fold(total_decay, total, carry, local):
    """Adds the sums of a chunk to the total; `carry` is its copy in float32."""
    for h in range(total.shape[0]):
        for i in range(total.shape[1]):
            total[h, i] = total[h, i] * total_decay[h] + F64(local[h, i])
            carry[h, i] = total[h, i]
            local[h, i] = 0


@_jit
def _softmax_over_heads(logits):
    largest = F32(-np.inf)
    for h in range(logits.shape[0]):
        largest = max(largest, logits[h])
    total = F32(0)
    for h in range(logits.shape[0]):
        logits[h] = math.exp(logits[h] - largest)
        total += logits[h]
    for h in range(logits.shape[0]):
        logits[h] /= total


@_jit
def _are_indices(positions, mask, size):
    """Whether the positions of all real tokens are indices into `size` elements."""
    for t in range(len(positions)):
        if mask[t] and not 0 <= positions[t] < size:
            return False
    return True


@_jit
def _causal_forward(
    first, last, starts, w, temp, mask, log_decay, rows, has_state, bias,
    positions, sum_sq, sum_weighted_sq, sum_membership, output, membership, score, carries,
):  # fmt: skip
    """The sequences from `first` to before `last`. Sequence r has the tokens from starts[r] to before starts[r + 1]; its state
    is in rows[r] of the three state arrays, which are updated. Arrays without elements stand for None."""
    H, P = w.shape[1], w.shape[2]
    has_decay, has_positions, saves = len(log_decay) > 0, len(positions) > 0, len(carries) > 0
    S, N, D = np.empty((H, P), F64), np.empty((H, P), F64), np.empty((H, 1), F64)
    S_carry, N_carry, D_carry = np.empty((H, P), F32), np.empty((H, P), F32), np.empty((H, 1), F32)
    S_local, N_local, D_local = np.zeros((H, P), F32), np.zeros((H, P), F32), np.zeros((H, 1), F32)
    tokens, total_decay = np.empty(CHUNK_TOKENS, np.int64), np.ones(H, F64)
    decay, from_start = np.ones((CHUNK_TOKENS, H), F32), np.ones((CHUNK_TOKENS, H), F32)
    to_end, zero = np.ones((CHUNK_TOKENS + 1, H), F32), output.dtype.type(0)
    for r in range(first, last):
        row = rows[r]
        _load_sum(sum_sq[row], has_state[r], S, S_carry)
        _load_sum(sum_weighted_sq[row], has_state[r], N, N_carry)
        _load_sum(sum_membership[row], has_state[r], D, D_carry)
        for start in range(starts[r], starts[r + 1], CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, starts[r + 1])
            if saves:
                saved_S, saved_N, saved_D = _split_sums(carries[r, (start - starts[r]) // CHUNK_TOKENS], H, P)
                _copy(S_carry, saved_S)
                _copy(N_carry, saved_N)
                _copy(D_carry, saved_D)
            n = _select_tokens(start, end, mask, tokens)
            if n < end - start:
                _zero_padding(start, end, mask, output)
                _zero_padding(start, end, mask, membership)
                if saves:
                    _zero_padding(start, end, mask, score)
            if has_decay:
                _compute_decays(log_decay, starts[r], mask, tokens, n, decay, from_start, to_end, total_decay)
            for j in range(n):
                t = tokens[j]
                for h in range(H):
                    a, A, sum_of_ratios = decay[j, h], from_start[j, h], F32(0)
                    if a == 0:
                        _reset(h, S, S_carry, S_local)
                    for i in range(P):
                        v = _load(w[t, h, i])
                        q = v * v
                        s = S_local[h, i] * a + q
                        S_local[h, i] = s
                        sum_of_ratios += q / max(S_carry[h, i] * A + s, EPS_S)
                    position = positions[t] if has_positions else t % bias.shape[1]
                    sum_of_ratios += F32(P) * bias[h, position]
                    if saves:
                        score[t, h] = sum_of_ratios
                    membership[t, h] = sum_of_ratios * temp[h]
                _softmax_over_heads(membership[t])
            _fold(total_decay, S, S_carry, S_local)
            for j in range(n):
                t = tokens[j]
                for h in range(H):
                    a, A, pi = decay[j, h], from_start[j, h], membership[t, h]
                    if a == 0:
                        _reset(h, N, N_carry, N_local)
                        _reset(h, D, D_carry, D_local)
                    D_local[h, 0] = D_local[h, 0] * a + pi
                    d = D_carry[h, 0] * A + D_local[h, 0] + EPS_D
                    scale = -pi * d
                    for i in range(P):
                        v = _load(w[t, h, i])
                        s = N_local[h, i] * a + pi * (v * v)
                        N_local[h, i] = s
                        output[t, h, i] = _cast(scale * v / (N_carry[h, i] * A + s + d), zero)
            _fold(total_decay, N, N_carry, N_local)
            _fold(total_decay, D, D_carry, D_local)
        for h in range(H):
            if has_decay and _is_reset(starts[r + 1], starts[r], mask, log_decay, h):
                _reset(h, S, S_carry, S_local)
                _reset(h, N, N_carry, N_local)
                _reset(h, D, D_carry, D_local)
        _copy(S, sum_sq[row])
        _copy(N, sum_weighted_sq[row])
        _copy(D, sum_membership[row])


@_jit
def _causal_backward(
    first, last, starts, w, temp, mask, log_decay, membership, score, carries,
    grad_output, grad_membership, grad_S, grad_N, grad_D, grad_w, grad_temp, grad_score, grad_log_decay,
):  # fmt: skip
    """The gradients of the sequences from `first` to before `last`. `grad_S`, `grad_N` and `grad_D` are the gradients of the
    final state and become those of the initial state. The running sums of U are the gradients of N, W of S and V of D."""
    H, P, has_decay = w.shape[1], w.shape[2], len(log_decay) > 0
    U, W, V = np.empty((H, P), F64), np.empty((H, P), F64), np.empty((H, 1), F64)
    U_carry, W_carry, V_carry = np.empty((H, P), F32), np.empty((H, P), F32), np.empty((H, 1), F32)
    U_local, W_local, V_local = np.zeros((H, P), F32), np.zeros((H, P), F32), np.zeros((H, 1), F32)
    sums, D = np.empty((CHUNK_TOKENS + 1, P), F32), np.empty((CHUNK_TOKENS + 1, H), F32)
    grad_x, grad_pi = np.empty((CHUNK_TOKENS, H, P), F32), np.empty((CHUNK_TOKENS, H), F32)
    tokens, total_decay = np.empty(CHUNK_TOKENS, np.int64), np.ones(H, F64)
    decay, from_start = np.ones((CHUNK_TOKENS, H), F32), np.ones((CHUNK_TOKENS, H), F32)
    to_end, zero = np.ones((CHUNK_TOKENS + 1, H), F32), grad_w.dtype.type(0)
    for r in range(first, last):
        _load_sum(grad_S[r], True, W, W_carry)
        _load_sum(grad_N[r], True, U, U_carry)
        _load_sum(grad_D[r], True, V, V_carry)
        for h in range(H):
            if has_decay and _is_reset(starts[r + 1], starts[r], mask, log_decay, h):
                _reset(h, U, U_carry, U_local)
                _reset(h, W, W_carry, W_local)
                _reset(h, V, V_carry, V_local)
        for k in range((starts[r + 1] - starts[r] + CHUNK_TOKENS - 1) // CHUNK_TOKENS - 1, -1, -1):
            start = starts[r] + k * CHUNK_TOKENS
            end = min(start + CHUNK_TOKENS, starts[r + 1])
            saved_S, saved_N, saved_D = _split_sums(carries[r, k], H, P)
            n = _select_tokens(start, end, mask, tokens)
            if n < end - start:
                _zero_padding(start, end, mask, grad_score)
                _zero_padding(start, end, mask, grad_w)
                if has_decay:
                    _zero_padding(start, end, mask, grad_log_decay)
            if has_decay:
                _compute_decays(log_decay, starts[r], mask, tokens, n, decay, from_start, to_end, total_decay)

            # output -> N, D and membership
            for h in range(H):
                D[0, h] = saved_D[h, 0]
                for i in range(P):
                    sums[0, i] = saved_N[h, i]
                for j in range(n):
                    t, a = tokens[j], decay[j, h]
                    pi = membership[t, h]
                    D[j + 1, h] = (D[j, h] * a if a > 0 else 0) + pi
                    for i in range(P):
                        v = _load(w[t, h, i])
                        sums[j + 1, i] = (sums[j, i] * a if a > 0 else F32(0)) + pi * (v * v)
                for j in range(n - 1, -1, -1):
                    t, a, A = tokens[j], decay[j, h], to_end[j + 1, h]
                    pi, d = membership[t, h], D[j + 1, h] + EPS_D
                    pi_d = pi * d
                    sum_gx, sum_N, sum_U, sum_decay = F32(0), F32(0), F32(0), F32(0)
                    for i in range(P):
                        v = _load(w[t, h, i])
                        N = sums[j + 1, i]
                        inverse = F32(1) / (N + d)
                        e = _load(grad_output[t, h, i]) * inverse
                        y = e * v
                        sum_gx += y
                        y *= inverse
                        sum_N += y * N
                        u = U_local[h, i] + y * pi_d
                        U_local[h, i] = u * a
                        u += U_carry[h, i] * A
                        sum_U += v * v * u
                        sum_decay += u * sums[j, i]
                        grad_x[j, h, i] = F32(2) * pi * v * u - e * pi_d
                    u = V_local[h, 0] - pi * sum_N
                    V_local[h, 0] = u * a
                    u += V_carry[h, 0] * A
                    grad_pi[j, h] = sum_U - sum_gx * d + u + grad_membership[t, h]
                    if has_decay:
                        grad_log_decay[t, h] = a * (sum_decay + u * D[j, h]) if a > 0 else 0
                        if a == 0:
                            _reset(h, U, U_carry, U_local)
                            _reset(h, V, V_carry, V_local)
            _fold(total_decay, U, U_carry, U_local)
            _fold(total_decay, V, V_carry, V_local)

            # membership -> score, the only step across heads
            for j in range(n):
                t, mean = tokens[j], F32(0)
                for h in range(H):
                    mean += membership[t, h] * grad_pi[j, h]
                for h in range(H):
                    grad_logit = membership[t, h] * (grad_pi[j, h] - mean)
                    grad_temp[r, h] += grad_logit * score[t, h]
                    grad_score[t, h] = grad_logit * temp[h]

            # score -> squares and S
            for h in range(H):
                for i in range(P):
                    sums[0, i] = saved_S[h, i]
                for j in range(n):
                    t, a = tokens[j], decay[j, h]
                    for i in range(P):
                        v = _load(w[t, h, i])
                        sums[j + 1, i] = (sums[j, i] * a if a > 0 else F32(0)) + v * v
                for j in range(n - 1, -1, -1):
                    t, a, A, sum_decay = tokens[j], decay[j, h], to_end[j + 1, h], F32(0)
                    for i in range(P):
                        v = _load(w[t, h, i])
                        S = sums[j + 1, i]
                        inverse = F32(1) / max(S, EPS_S)
                        e = grad_score[t, h] * inverse
                        y = v * v * e * inverse
                        u = W_local[h, i] - (y if S >= EPS_S else F32(0))
                        W_local[h, i] = u * a
                        u += W_carry[h, i] * A
                        sum_decay += u * sums[j, i]
                        grad_w[t, h, i] = _cast(grad_x[j, h, i] + F32(2) * v * (e + u), zero)
                    if has_decay:
                        grad_log_decay[t, h] += a * sum_decay if a > 0 else 0
                        if a == 0:
                            _reset(h, W, W_carry, W_local)
            _fold(total_decay, W, W_carry, W_local)
        _copy(W, grad_S[r])
        _copy(U, grad_N[r])
        _copy(V, grad_D[r])


# Bidirectional form ---------------------------------------------------------------------------------------------------


@_jit
def _bidirectional_forward(
    first, last, starts, w, temp, mask, output, membership, score, carries
):  # fmt: skip
    """The sequences from `first` to before `last`; their sums are written to `carries` (sequences, 1, 2 H p + H)."""
    H, P = w.shape[1], w.shape[2]
    total_D, total, one = np.empty((H, 1), F64), np.empty((H, P), F64), np.ones(H, F64)
    local, factor, D_local = np.zeros((H, P), F32), np.empty((H, P), F32), np.zeros((H, 1), F32)
    tokens, zero = np.empty(CHUNK_TOKENS, np.int64), output.dtype.type(0)
    for r in range(first, last):
        S, N, D = _split_sums(carries[r, 0], H, P)
        total[:] = 0
        total_D[:] = 0
        for start in range(starts[r], starts[r + 1], CHUNK_TOKENS):
            n = _select_tokens(start, min(start + CHUNK_TOKENS, starts[r + 1]), mask, tokens)
            for j in range(n):
                for h in range(H):
                    for i in range(P):
                        v = _load(w[tokens[j], h, i])
                        local[h, i] += v * v
            _fold(one, total, S, local)
        for h in range(H):
            for i in range(P):
                factor[h, i] = F32(1) / max(S[h, i], EPS_S_BIDIRECTIONAL)
        total[:] = 0
        for start in range(starts[r], starts[r + 1], CHUNK_TOKENS):
            n = _select_tokens(start, min(start + CHUNK_TOKENS, starts[r + 1]), mask, tokens)
            for j in range(n):
                t = tokens[j]
                for h in range(H):
                    sum_of_ratios = F32(0)
                    for i in range(P):
                        v = _load(w[t, h, i])
                        sum_of_ratios += v * v * factor[h, i]
                    score[t, h] = sum_of_ratios
                    membership[t, h] = sum_of_ratios * temp[h]
                _softmax_over_heads(membership[t])
                for h in range(H):
                    pi = membership[t, h]
                    D_local[h, 0] += pi
                    for i in range(P):
                        v = _load(w[t, h, i])
                        local[h, i] += pi * (v * v)
            _fold(one, total, N, local)
            _fold(one, total_D, D, D_local)
        for h in range(H):
            d = D[h, 0] + EPS_D
            for i in range(P):
                local[h, i] = d / (N[h, i] + d)
        for t in range(starts[r], starts[r + 1]):
            if not mask[t]:
                output[t] = zero
                membership[t] = 0
                score[t] = 0
            else:
                for h in range(H):
                    pi = membership[t, h]
                    for i in range(P):
                        output[t, h, i] = _cast(-pi * _load(w[t, h, i]) * local[h, i], zero)
        local[:] = 0


@_jit
def _bidirectional_backward(
    first, last, starts, w, temp, mask, membership, score, carries, grad_output, grad_membership,
    grad_w, grad_temp,
):  # fmt: skip
    """The gradients of the sequences from `first` to before `last`."""
    H, P = w.shape[1], w.shape[2]
    total, one, local = np.empty((H, P), F64), np.ones(H, F64), np.zeros((H, P), F32)
    scale, factor = np.empty((H, P), F32), np.empty((H, P), F32)  # 1 / (1 + N / D) and 1 / S
    U, W, V, grad_pi = np.empty((H, P), F32), np.empty((H, P), F32), np.empty(H, F32), np.empty(H, F32)
    tokens, zero = np.empty(CHUNK_TOKENS, np.int64), grad_w.dtype.type(0)
    grad_score = np.empty((starts[last] - starts[first], H), F32)
    for r in range(first, last):
        S, N, D = _split_sums(carries[r, 0], H, P)
        # output -> N and D
        total[:] = 0
        for start in range(starts[r], starts[r + 1], CHUNK_TOKENS):
            n = _select_tokens(start, min(start + CHUNK_TOKENS, starts[r + 1]), mask, tokens)
            for j in range(n):
                t = tokens[j]
                for h in range(H):
                    pi = membership[t, h]
                    for i in range(P):
                        local[h, i] += pi * _load(w[t, h, i]) * _load(grad_output[t, h, i])
            _fold(one, total, U, local)
        for h in range(H):
            d, sum_N = D[h, 0] + EPS_D, F32(0)
            for i in range(P):
                inverse = F32(1) / (N[h, i] + d)
                scale[h, i] = d * inverse
                u = U[h, i] * inverse
                sum_N += u * N[h, i] * inverse
                U[h, i] = u * scale[h, i]
                factor[h, i] = F32(1) / max(S[h, i], EPS_S_BIDIRECTIONAL)
            V[h] = -sum_N

        # membership -> score -> S
        total[:] = 0
        for start in range(starts[r], starts[r + 1], CHUNK_TOKENS):
            n = _select_tokens(start, min(start + CHUNK_TOKENS, starts[r + 1]), mask, tokens)
            for j in range(n):
                t, mean = tokens[j], F32(0)
                for h in range(H):
                    sum_U = V[h]
                    for i in range(P):
                        v = _load(w[t, h, i])
                        sum_U += v * v * U[h, i] - v * _load(grad_output[t, h, i]) * scale[h, i]
                    grad_pi[h] = sum_U + grad_membership[t, h]
                    mean += membership[t, h] * grad_pi[h]
                for h in range(H):
                    grad_logit = membership[t, h] * (grad_pi[h] - mean)
                    grad_temp[r, h] += grad_logit * score[t, h]
                    s = grad_logit * temp[h]
                    grad_score[t - starts[first], h] = s
                    for i in range(P):
                        v = _load(w[t, h, i])
                        local[h, i] -= (v * factor[h, i]) * (v * factor[h, i]) * s
            _fold(one, total, W, local)
        for h in range(H):
            for i in range(P):
                W[h, i] = W[h, i] if S[h, i] >= EPS_S_BIDIRECTIONAL else 0

        for t in range(starts[r], starts[r + 1]):
            if not mask[t]:
                grad_w[t] = zero
            else:
                for h in range(H):
                    pi, s = membership[t, h], grad_score[t - starts[first], h]
                    for i in range(P):
                        grad_sq = pi * U[h, i] + s * factor[h, i] + W[h, i]
                        g = F32(2) * _load(w[t, h, i]) * grad_sq - pi * scale[h, i] * _load(grad_output[t, h, i])
                        grad_w[t, h, i] = _cast(g, zero)


# Short convolution ----------------------------------------------------------------------------------------------------


@_jit
def _transpose_weight(weight):
    result = np.empty((weight.shape[1], weight.shape[0]), F32)
    for i in range(weight.shape[0]):
        for k in range(weight.shape[1]):
            result[k, i] = _load(weight[i, k])
    return result


@_jit
def _convolve(first, last, starts, x, weight, mask, seq_idx, rows, has_state, state, output):
    """`layers_tost.ShortConvolution`: the tokens x (N, D) of the sequences from `first` to before `last`; weight (D, K).

    `state` (rows, K - 1, D) is updated. The j-th token before a token is at previous[j - 1] if that is not negative, else in
    row -1 - previous[j - 1] of the window, the state before the sequence.
    """
    width, K = weight.shape
    window, total, zero = np.zeros((K - 1, width), F32), np.empty(width, F32), output.dtype.type(0)
    previous, factors = np.empty(K, np.int64), _transpose_weight(weight)
    for r in range(first, last):
        for k in range(K - 1):
            previous[k] = k + 1 - K
            for i in range(width):
                window[k, i] = _load(state[rows[r], k, i]) if has_state[r] else F32(0)
        in_sequence, sequence = K - 1, 0  # how many tokens before the next one are in its sequence
        for t in range(starts[r], starts[r + 1]):
            if not mask[t]:
                output[t] = zero
                continue
            if len(seq_idx) > 0 and seq_idx[t] != sequence:
                in_sequence, sequence = 0, seq_idx[t]
            for i in range(width):
                total[i] = (F32(1) + factors[0, i]) * _load(x[t, i])
            for j in range(in_sequence):
                p = previous[j]
                if p >= 0:
                    for i in range(width):
                        total[i] += factors[j + 1, i] * _load(x[p, i])
                else:
                    for i in range(width):
                        total[i] += factors[j + 1, i] * window[-1 - p, i]
            for i in range(width):
                output[t, i] = _cast(total[i], zero)
            for j in range(K - 2, 0, -1):
                previous[j] = previous[j - 1]
            previous[0] = t
            in_sequence = min(in_sequence + 1, K - 1)
        for k in range(K - 1):
            p = previous[K - 2 - k]
            for i in range(width):
                state[rows[r], k, i] = x[p, i] if p >= 0 else _cast(window[-1 - p, i], zero)


@_jit
def _convolve_backward(
    first, last, starts, x, weight, mask, seq_idx, state, grad_output, grad_state, grad_x, grad_weight
):  # fmt: skip
    """The gradients, in reverse order of the tokens: the j-th token after a token is at following[j - 1].

    `grad_state` (sequences, K - 1, D) is the gradient of the state after a sequence, and becomes that of the state before it.
    """
    width, K = weight.shape
    total, value, grad_final = np.empty(width, F32), np.empty(width, F32), np.empty((K - 1, width), F32)
    following, factors, zero = np.empty(K, np.int64), _transpose_weight(weight), grad_x.dtype.type(0)
    for r in range(first, last):
        for k in range(K - 1):
            for i in range(width):
                grad_final[k, i] = _load(grad_state[r, k, i])
        count, in_sequence, sequence = 0, 0, 0  # real tokens after this one, and those of them in its sequence
        for t in range(starts[r + 1] - 1, starts[r] - K, -1):
            is_token, k = t >= starts[r], t - starts[r] + K - 1  # or row k of the state
            if is_token and not mask[t]:
                grad_x[t] = zero
                continue
            number = seq_idx[t] if len(seq_idx) > 0 and is_token else 0
            if number != sequence:
                in_sequence, sequence = 0, number
            for i in range(width):
                value[i] = _load(x[t, i]) if is_token else _load(state[r, k, i])
            for i in range(width):
                total[i] = grad_final[K - 2 - count, i] if count < K - 1 else F32(0)
            if is_token:
                for i in range(width):
                    g = _load(grad_output[t, i])
                    total[i] += (F32(1) + factors[0, i]) * g
                    grad_weight[r, 0, i] += g * value[i]
            for j in range(in_sequence):
                p = following[j]
                if p >= 0:
                    for i in range(width):
                        g = _load(grad_output[p, i])
                        total[i] += factors[j + 1, i] * g
                        grad_weight[r, j + 1, i] += g * value[i]
            for i in range(width):
                if is_token:
                    grad_x[t, i] = _cast(total[i], zero)
                else:
                    grad_state[r, k, i] = _cast(total[i], zero)
            for j in range(K - 2, 0, -1):
                following[j] = following[j - 1]
            following[0] = t if is_token else -1
            in_sequence, count = min(in_sequence + 1, K - 1), count + 1


# Calls ----------------------------------------------------------------------------------------------------------------


MIN_THREADED_WORK = 2**18  # numbers; for fewer, other threads take longer to start than to compute
# numba has no optional arrays: these stand for None
_NO_INDEX, _NO_HEADS, _NO_CARRIES = np.empty(0, np.int64), np.empty((0, 0), F32), np.empty((0, 0, 0), F32)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="tost_hf")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


def _run(kernel: Callable, starts: np.ndarray, tokens: np.ndarray, *args) -> None:
    """Calls a kernel for all sequences, with torch's number of threads where this pays."""
    count = starts.shape[0] - 1
    threads = 1 if count == 1 or tokens.size < MIN_THREADED_WORK else torch.get_num_threads()
    if threads == 1:
        kernel(0, count, starts, tokens, *args)
        return
    bounds = np.searchsorted(starts, starts[-1] * np.arange(threads + 1) / threads)
    ranges = [(first, last) for first, last in pairwise(bounds.tolist()) if first < last]
    futures = []
    for sequences in ranges[1:]:
        try:
            futures.append(_pool().submit(kernel, *sequences, starts, tokens, *args))
        except RuntimeError as error:
            if "shutdown" not in str(error):
                raise
            kernel(*sequences, starts, tokens, *args)  # this thread outlives the main thread, but not the pool
    kernel(*ranges[0], starts, tokens, *args)
    for future in futures:
        future.result()


def as_array(x: torch.Tensor) -> np.ndarray:
    """The array of x, of any strides; of bfloat16, the bits."""
    if x.requires_grad:
        x = x.detach()
    x = x.resolve_neg()
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def parameter_array(x: torch.Tensor) -> np.ndarray:
    """A contiguous array of a parameter. `numpy()` would fix the size of the storage, which FSDP frees and allocates again."""
    x = x.detach().resolve_neg()  # dlpack ignores the negative bit
    x = x.view(torch.uint16) if x.dtype == torch.bfloat16 else x
    return np.ascontiguousarray(np.from_dlpack(x))


def _flat(x: torch.Tensor | None) -> Any:
    """A contiguous array (B T, ...) of x (B, T, ...)."""
    return None if x is None else np.ascontiguousarray(as_array(x)).reshape(-1, *x.shape[2:])


def _or(x: np.ndarray | None, placeholder: np.ndarray) -> np.ndarray:
    return placeholder if x is None else x


def _mask(mask: torch.Tensor | None, tokens: np.ndarray) -> np.ndarray:
    return np.ones(len(tokens), np.bool_) if mask is None else _flat(mask)


def _bias(bias: torch.Tensor | None, temp: np.ndarray) -> np.ndarray:
    """The array (H, n) of a bias (..., H), or 0."""
    return np.zeros((len(temp), 1), F32) if bias is None else parameter_array(bias.reshape(-1, len(temp)).t())


@functools.lru_cache(64)
def _batch(B: int, T: int, has_state: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`starts`, `rows` and `has_state` of B sequences of T tokens, as in `compute_causal`."""
    return np.arange(B + 1) * T, np.arange(B), np.full(B, has_state)


def compute_causal(
    starts: np.ndarray,
    rows: np.ndarray,
    has_state: np.ndarray,
    w: np.ndarray,
    temp: np.ndarray,
    bias: np.ndarray,
    positions: np.ndarray | None,
    mask: np.ndarray,
    log_decay: np.ndarray | None,
    state: Iterable[np.ndarray],
    output: np.ndarray,
    membership: np.ndarray,
    score: np.ndarray = _NO_HEADS,
    carries: np.ndarray = _NO_CARRIES,
) -> None:
    """Causal TSSA of sequences of any lengths, without a gradient; all arrays but those of `state` are contiguous.

    Args:
        starts: (R + 1,) int64: the index of each sequence's first token, and the number of tokens.
        rows: (R,) int64, each sequence's row in the arrays of `state`.
        has_state: (R,) bool; a sequence without a state starts with zeros.
        w: (N, H, p), float32 or the bits of bfloat16.
        temp: (H,) float32.
        bias: (H, n) float32; token t has entry t modulo n or, with `positions` (N,) int64, entry positions[t].
        mask: (N,) bool, true at real tokens.
        log_decay: (N, H) float32.
        state: the three sums, (rows, H, p), (rows, H, p) and (rows, H); updated in place.
        output: (N, H, p), as `w`; written.
        membership: (N, H) float32; written.
        score: (N, H) float32; written for the backward, as are
        carries: (R, chunks, 2 H p + H) float32, the states before each chunk of equally long sequences.

    Raises:
        IndexError: a real token's position is not an index into `bias`; the state is not updated.
    """
    if positions is not None and not _are_indices(positions, mask, bias.shape[1]):
        raise IndexError("A position is not below max_position_embeddings.")
    inputs = w, temp, mask, _or(log_decay, _NO_HEADS), rows, has_state, bias, _or(positions, _NO_INDEX)
    S, N, D = state
    _run(_causal_forward, starts, *inputs, S, N, D[..., None], output, membership, score, carries)


def convolve_sequences(
    starts: np.ndarray,
    rows: np.ndarray,
    has_state: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    mask: np.ndarray,
    seq_idx: np.ndarray | None,
    state: np.ndarray,
    output: np.ndarray,
) -> None:
    """The short convolution of tokens x (N, D) of sequences as in `compute_causal`; updates `state` (rows, K - 1, D)."""
    _run(_convolve, starts, x, weight, mask, _or(seq_idx, _NO_INDEX), rows, has_state, state, output)


# Operators. They cannot return None: outputs that are not needed are empty tensors. ------------------------------------


def _make_operator(name, schema, compute, fake, setup_context, differentiate) -> Callable:
    """A differentiable function; compilers see it as one operator."""
    operator = custom_operator(name, schema)(compute)
    operator.register_fake(fake)
    operator.register_autograd(differentiate, setup_context=setup_context)

    class Function(torch.autograd.Function):  # torch's dispatcher takes longer than the kernels for a few hundred tokens
        @staticmethod
        def forward(ctx, *inputs):
            output = compute(*inputs)
            setup_context(ctx, inputs, output)
            return output

        backward = staticmethod(differentiate)

    def run(*inputs):
        if torch.compiler.is_compiling():
            return operator(*inputs)
        needs_grad = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
        return Function.apply(*inputs) if needs_grad else compute(*inputs)

    run.operator = operator  # type: ignore[attr-defined]  # for tests
    return run


def _make_backward(name, schema, compute, fake) -> Callable:
    """A function for the backward pass: `compute` of plain tensors, and an operator of those that compilers trace."""
    operator = custom_operator(name, schema)(compute)
    operator.register_fake(fake)
    return lambda x, *inputs: (compute if type(x) is torch.Tensor else operator)(x, *inputs)


def _carry_shape(w: torch.Tensor, causal: bool) -> tuple[int, int, int]:
    """Shape of the states before all chunks of tokens w (B, T, H, p), or of the sums over all tokens."""
    B, T, H, p = w.shape
    return B, (T + CHUNK_TOKENS - 1) // CHUNK_TOKENS if causal else 1, 2 * H * p + H


def _copy_state(state: Iterable[torch.Tensor | None], w: torch.Tensor, causal: bool = True) -> list[torch.Tensor]:
    """Contiguous copies of a state's three sums, or of their gradients; for None zeros, in the bidirectional form nothing."""
    return [
        torch.zeros(shape if causal else 0, dtype=dtype) if x is None else x.clone(memory_format=torch.contiguous_format)
        for x, shape, dtype in zip(state, state_shapes(w), state_dtypes(w))
    ]


def _compute_forward(w, temp, bias, positions, mask, log_decay, S, N, D, causal, needs_grad):
    """Output, membership, the state after the last token (empty in the bidirectional form), score and carries.

    The last two are for the backward; the causal form without gradients has none. The carries are flattened, as compilers
    would specialize on whether the number of chunks is 1.
    """
    output, membership, saves = w.new_empty(w.shape), w.new_empty(w.shape[:3], dtype=torch.float32), needs_grad or not causal
    score = membership.new_empty(membership.shape if saves else 0)
    carries = membership.new_empty(_carry_shape(w, causal) if saves else 0)
    state, sequences = _copy_state((S, N, D), w, causal), _batch(*w.shape[:2], S is not None)
    tokens, heads = _flat(w), parameter_array(temp)
    token_mask, outputs = _mask(mask, tokens), [_flat(output), _flat(membership)]
    outputs += [_flat(score), as_array(carries)] if saves else []
    if causal:
        options: tuple[Any, ...] = _bias(bias, heads), _flat(positions), token_mask, _flat(log_decay)
        compute_causal(*sequences, tokens, heads, *options, map(as_array, state), *outputs)  # type: ignore[call-arg]
    else:
        _run(_bidirectional_forward, sequences[0], tokens, heads, token_mask, *outputs)
    return output, membership, *state, score, carries.flatten()


def _fake_forward(w, temp, bias, positions, mask, log_decay, S, N, D, causal, needs_grad):
    saves = needs_grad or not causal
    sizes = w.shape[:3], w.shape[:3] if saves else 0, math.prod(_carry_shape(w, causal)) if saves else 0
    membership, score, carries = (w.new_empty(size, dtype=torch.float32) for size in sizes)
    return w.new_empty(w.shape), membership, *_copy_state([None] * 3, w, causal), score, carries


def _compute_backward(
    w, temp, mask, log_decay, membership, score, carries, grad_output, grad_membership, grad_S, grad_N, grad_D,
    causal,
):  # fmt: skip
    """Gradients of w, temp, and in the causal form of the score, the log decay, and the initial state."""
    grad_w, grad_temp = w.new_empty(w.shape), temp.new_zeros(w.shape[0], w.shape[2], dtype=torch.float64)
    grad_score = score.new_empty(score.shape if causal else 0)
    grad_log_decay = score.new_empty(0 if log_decay is None else score.shape)
    state, starts = _copy_state((grad_S, grad_N, grad_D), w, causal), _batch(*w.shape[:2])[0]
    grad_output, grad_membership = (
        torch.zeros_like(x) if grad is None else grad for x, grad in ((w, grad_output), (membership, grad_membership))
    )
    tokens = _flat(w)
    inputs: tuple[Any, ...] = tokens, parameter_array(temp), _mask(mask, tokens)
    saved = _flat(membership), _flat(score), as_array(carries).reshape(_carry_shape(w, causal))
    grads: tuple[Any, ...] = _flat(grad_output), _flat(grad_membership)
    results: tuple[Any, ...] = _flat(grad_w), as_array(grad_temp)
    if causal:
        S, N, D = map(as_array, state)
        inputs, grads = (*inputs, _or(_flat(log_decay), _NO_HEADS)), (*grads, S, N, D[..., None])
        results = *results, _flat(grad_score), _NO_HEADS if log_decay is None else _flat(grad_log_decay)
    kernel = _causal_backward if causal else _bidirectional_backward
    _run(kernel, starts, *inputs, *saved, *grads, *results)
    return grad_w, grad_temp.sum(0).float(), grad_score, grad_log_decay, *state


def _fake_backward(w, temp, mask, log_decay, membership, score, *args):
    grad_score, grad_log_decay = (score.new_empty(score.shape if x else 0) for x in (args[-1], log_decay is not None))
    grad_state = _copy_state([None] * 3, w, args[-1])
    return w.new_empty(w.shape), temp.new_empty(temp.shape), grad_score, grad_log_decay, *grad_state


_backward = _make_backward(
    "tssa_cpu_backward",
    "(Tensor w, Tensor temp, Tensor? mask, Tensor? log_decay, Tensor membership, Tensor score, Tensor carries, "
    "Tensor? grad_output, Tensor? grad_membership, Tensor? grad_S, Tensor? grad_N, Tensor? grad_D, bool causal) "
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _compute_backward,
    _fake_backward,
)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.causal, _ = inputs
    ctx.save_for_backward(*tensors, output[1], *output[5:])
    ctx.mark_non_differentiable(*output[5 if ctx.causal else 2 :])
    ctx.set_materialize_grads(False)


def _run_reference(is_causal, w, temp, bias, positions, mask, log_decay, S, N, D):
    state, bias = None if S is None else TSSAState(S, N, D), select_bias(bias, positions, temp.dtype)
    output, membership, final_state = tssa_reference(w, temp, bias, mask, log_decay, state, is_causal)
    return output, membership, *(final_state or ())


def _differentiate(ctx, *grads):
    # accessed once, as activation checkpointing recomputes them at each access
    w, temp, bias, positions, mask, log_decay, S, N, D, *saved = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        inputs = w, temp, bias, positions, mask, log_decay, S, N, D
        return *differentiate_reference(functools.partial(_run_reference, ctx.causal), inputs, grads[:5]), None, None
    inputs = w, temp, mask, log_decay, *saved, *grads[:5], ctx.causal
    grad_w, grad_temp, grad_score, grad_log_decay, *grad_state = _backward(*inputs)
    grad_bias = None
    if ctx.needs_input_grad[2]:
        grad_bias = w.shape[-1] * grad_score
        if positions is None:
            grad_bias = grad_bias.sum_to_size(bias.shape)
        else:
            table = grad_bias.new_zeros(bias.shape)
            grad_bias = table.index_add(0, positions.flatten(), grad_bias.flatten(0, 1))
    grad_decay, grad_state = None if log_decay is None else grad_log_decay, [None] * 3 if S is None else grad_state
    return grad_w, grad_temp, grad_bias, None, None, grad_decay, *grad_state, None, None


_forward = _make_operator(
    "tssa_cpu_forward",
    "(Tensor w, Tensor temp, Tensor? bias, Tensor? positions, Tensor? mask, Tensor? log_decay, Tensor? S, Tensor? N, "
    "Tensor? D, bool causal, bool needs_grad) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _compute_forward,
    _fake_forward,
    _setup_context,
    _differentiate,
)


def _copy_conv_state(state: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    shape = x.shape[0], weight.shape[1] - 1, x.shape[2]
    return x.new_zeros(shape) if state is None else state.to(x.dtype, memory_format=torch.contiguous_format, copy=True)


def _compute_convolution(x, weight, mask, seq_idx, conv_state):
    output, state, tokens = x.new_empty(x.shape), _copy_conv_state(conv_state, x, weight), _flat(x)
    inputs = tokens, parameter_array(weight), _mask(mask, tokens), _flat(seq_idx)
    convolve_sequences(*_batch(*x.shape[:2], conv_state is not None), *inputs, as_array(state), _flat(output))
    return output, state


def _compute_convolution_backward(x, weight, mask, seq_idx, conv_state, grad_output, grad_final_state):
    """Gradients of the tokens, the weight and the state before the tokens."""
    grad_output = torch.zeros_like(x) if grad_output is None else grad_output
    grad_x, grad_weight = x.new_empty(x.shape), x.new_zeros(len(x), *weight.shape[::-1], dtype=torch.float64)
    state, grad_state = (_copy_conv_state(s, x, weight) for s in (conv_state, grad_final_state))
    tokens = _flat(x)
    inputs = tokens, parameter_array(weight), _mask(mask, tokens), _or(_flat(seq_idx), _NO_INDEX), as_array(state)
    results = as_array(grad_state), _flat(grad_x), as_array(grad_weight)
    _run(_convolve_backward, _batch(*x.shape[:2])[0], *inputs, _flat(grad_output), *results)
    return grad_x, grad_weight.sum(0).t().to(weight.dtype).contiguous(), grad_state


_convolution_backward = _make_backward(
    "convolution_cpu_backward",
    "(Tensor x, Tensor weight, Tensor? mask, Tensor? seq_idx, Tensor? conv_state, Tensor? grad_output, "
    "Tensor? grad_final_state) -> (Tensor, Tensor, Tensor)",
    _compute_convolution_backward,
    lambda x, weight, *_: (torch.empty_like(x), torch.empty_like(weight), _copy_conv_state(None, x, weight)),
)


def _setup_convolution_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _differentiate_convolution(ctx, *grads):
    inputs = ctx.saved_tensors
    if torch.is_grad_enabled():
        return tuple(differentiate_reference(convolve_reference, inputs, grads))
    grad_x, grad_weight, grad_state = _convolution_backward(*inputs, *grads)
    return grad_x, grad_weight, None, None, None if inputs[-1] is None else grad_state


# As `tssa_reference.convolve`; weight of the dtype of x
convolve = _make_operator(
    "convolution_cpu_forward",
    "(Tensor x, Tensor weight, Tensor? mask, Tensor? seq_idx, Tensor? conv_state) -> (Tensor, Tensor)",
    _compute_convolution,
    lambda x, weight, *_: (torch.empty_like(x), _copy_conv_state(None, x, weight)),
    _setup_convolution_context,
    _differentiate_convolution,
)


# Functions that tssa.py calls -----------------------------------------------------------------------------------------


def find_problem(device: torch.device, dtype: torch.dtype, *args) -> str | None:
    """Why the kernels cannot run for a dtype on a device; None if they can. `args` are those of the Triton kernels."""
    if numba is None:
        return f"numba cannot be imported ({_import_error}): pip install numba"
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return "NUMBA_DISABLE_JIT is set, so that numba compiles no kernels"
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the numba kernels do not support {dtype} tokens on {device}"
    return None


def tssa_cpu(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor | None,
    mask: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    state: TSSAState | None,
    causal: bool,
    needs_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState | None]:
    """TSSA, as `tssa.tssa` without its checks.

    Args:
        w: (B, T, H, p), of a dtype that `find_problem` accepts; float16 is cast.
        temp: (H,), float32.
        bias: (T, H), (1, T, H) or (B, T, H), float32, or with `positions` (B, T) of each position, (n, H).
        mask: (B, T), bool, true at real tokens, or None.
        log_decay: (B, T, H) or (B, T, 1), float32, or None; of padding only -inf counts, the start of a packed sequence.
        state: the recurrent state before the first token, or None.

    Returns:
        The output (B, T, H, p) in `w`'s dtype, the membership (B, T, H), and the state after the last token (None in the
        bidirectional form), all differentiable; second derivatives are the reference implementation's.
    """
    tokens = w.float() if w.dtype == torch.float16 else w
    log_decay = None if log_decay is None else log_decay.expand(w.shape[:3])
    positions = None if positions is None else positions.long().expand(w.shape[:2])
    inputs = tokens, temp, bias, positions, mask, log_decay, *(state or (None, None, None)), causal
    output, membership, *final_state = _forward(*inputs, needs_grad)[:5]
    output = output if output.dtype == w.dtype else output.to(w.dtype)
    return output, membership, TSSAState(*final_state) if causal else None


def step_cpu(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor | None,
    mask: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    state: TSSAState,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal TSSA of one token w (B, H, p) per sequence: output and membership, without a gradient. Updates `state`."""
    tokens = np.ascontiguousarray(as_array(w.float() if w.dtype == torch.float16 else w))
    heads, results = parameter_array(temp), (np.empty_like(tokens), np.empty(tokens.shape[:2], F32))
    positions, mask, log_decay = (None if x is None else x.unsqueeze(1) for x in (positions, mask, log_decay))
    positions = None if positions is None else positions.long()
    options: tuple[Any, ...] = _bias(bias, heads), _flat(positions), _mask(mask, tokens), _flat(log_decay)
    compute_causal(*_batch(len(tokens), 1), tokens, heads, *options, map(as_array, state), *results)  # type: ignore[call-arg]
    output, membership = map(torch.from_numpy, results)
    return output.view(torch.bfloat16) if w.dtype == torch.bfloat16 else output.to(w.dtype), membership
