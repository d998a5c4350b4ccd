# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Token Statistics Self-Attention (TSSA, arXiv 2412.17810): the operator. layers_tost.py builds the layer on it.

TSSA compares no pairs of tokens: time is linear in the number of tokens, and the causal form has a recurrent state of constant
size (`TSSAState`). tssa_reference.py defines what is computed, in float32, or in float64 for float64 inputs.

The argument `backend` or, without it, the environment variable TOST_HF_BACKEND chooses "torch" (the reference implementation,
on every device and for every dtype), "numba" (the kernels for CPUs, tssa_cpu.py), "triton" (the kernels for GPUs,
tssa_triton.py) or "auto" (the kernels for the device where they can run, else the reference implementation). Programs of
torch.export contain the reference implementation.
"""

import functools
import operator
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .tssa_reference import (
    TSSAState,
    as_state,
    compute_dtype,
    has_tangent,
    is_traced,
    reset_at_starts,
    select_bias,
    softmax_over_heads,
    state_shapes,
    step,
    tssa_reference,
    zero_state,
)


BACKENDS = ("auto", "torch", "numba", "triton")
KERNELS = {"cpu": "numba", "cuda": "triton"}  # by device


class TSSAOutput(NamedTuple):
    """What `tssa` and `tssa_step` return; for `tssa_step` without the dimension T.

    Attributes:
        output: (B, T, H, p), in the dtype of the input.
        membership: (B, H, T), float32 or float64; 0 at padding.
        final_state: the recurrent state after the last token; None in the bidirectional form.

    Example:

    ```python
    >>> output, membership, final_state = tssa(torch.randn(1, 10, 4, 8), temp=torch.ones(4))
    >>> output.shape, membership.shape
    (torch.Size([1, 10, 4, 8]), torch.Size([1, 4, 10]))
    ```
    """

    output: torch.Tensor
    membership: torch.Tensor
    final_state: TSSAState | None


def tssa(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    positions: torch.Tensor | None = None,
    causal: bool = True,
    mask: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_state: TSSAState | None = None,
    log_decay: torch.Tensor | None = None,
    softmax: Callable[..., torch.Tensor] | None = None,
    backend: str | None = None,
) -> TSSAOutput:
    """Token Statistics Self-Attention of projected tokens (paper, section 3; causal form of the authors' code).

        output = -w Pi / (1 + N / D),  N = sum Pi w^2,  D = sum Pi,
        Pi = softmax_heads(temp (sum_i w_i^2 / S_i + p bias))

    with S = sum w^2; the sums are over the tokens so far (causal) or over all (bidirectional).

    Args:
        w: projected tokens, (B, T, H, p), in the layout of the input projection's output.
        temp: one learned scalar per head, H numbers of any shape.
        bias: learned score bias of each token, (T, H) or (B, T, H), or of each position, (positions, H); causal form only.
        positions: (B, T) or (1, T) integers, the tokens' indices into a `bias` of positions; any number at padding.
        causal: whether a token depends on itself and earlier tokens (language) or on all tokens (vision, encoders).
        mask: (B, T), true or 1 at real tokens. Padding does not change the state and its output is 0.
        seq_idx: (B, T) integers, the sequence numbers of packed sequences, each of adjacent tokens.
        initial_state: the recurrent state before the first token; causal form only.
        log_decay: logarithm of the decay, at most 0, by which a head's state is multiplied before a token is added: (H,),
            (T, H) or (B, T, H); causal form only. None, like 0, for no decay. Padding has no decay.
        softmax: a function that replaces `tssa_reference.softmax_over_heads` where w contains only some of the heads (tensor
            parallelism); the reference implementation runs. None for all heads.
        backend: "auto", "torch", "numba" or "triton"; None for the environment variable TOST_HF_BACKEND, else "auto".

    Returns:
        `TSSAOutput` with the output (B, T, H, p) in `w`'s dtype, the membership (B, H, T) and, for the causal form, the state
        after the last token (of each batch element's last packed sequence). All three are differentiable any number of
        times, by autograd of the reference implementation after the first, and in forward mode by that implementation.

    Raises:
        ValueError: shapes disagree, the bidirectional form gets `initial_state`, `bias` or `log_decay`, or the backend is
            unknown, does not support these tokens, or fails or is wrong on this device.
        IndexError: a position is not an index into `bias` (on a CPU).
        RuntimeError: a Triton kernel failed, and the device cannot be used any more.

    Example:

    ```python
    >>> w = torch.randn(2, 100, 4, 16)
    >>> tssa(w, temp=torch.ones(4)).output.shape
    torch.Size([2, 100, 4, 16])
    >>> tssa(w, temp=torch.ones(4), causal=False).final_state is None
    True
    ```
    """
    temp = _check_inputs(w, temp, bias, positions, causal, mask, seq_idx, initial_state)
    _check_log_decay(log_decay, w, causal)
    dtype = compute_dtype(w.dtype)
    mask = None if mask is None else mask.bool()
    positions = _mask_positions(positions, mask)
    log_decay = _expand_log_decay(log_decay, mask, w.shape[:3], dtype)
    tensors = w, temp, bias, log_decay, *(initial_state or ())
    needs_grad = _needs_grad(*tensors)
    if causal and seq_idx is not None:
        log_decay = reset_at_starts(log_decay, seq_idx, dtype)
    temp, form = temp.to(dtype), "causal" if causal else "bidirectional"
    state = None if initial_state is None else as_state(initial_state, w)
    kernels = None
    if softmax is None and (causal or seq_idx is None) and not has_tangent(*tensors):
        kernels = choose_kernels(w, backend, form, decay=log_decay is not None, gradients=needs_grad)
    if kernels == "numba":
        from .tssa_cpu import tssa_cpu

        bias = None if bias is None else bias.to(dtype)
        outputs = tssa_cpu(w, temp, bias, positions, mask, log_decay, state, causal, needs_grad)
    elif kernels == "triton":
        from .tssa_triton import tssa_triton

        outputs = tssa_triton(w, temp, select_bias(bias, positions, dtype), mask, log_decay, state, causal)
    else:
        inputs = w, temp, select_bias(bias, positions, dtype), mask, log_decay, state, causal
        outputs = tssa_reference(*inputs, seq_idx, softmax or softmax_over_heads)
    output, membership, final_state = outputs
    return TSSAOutput(output, membership.transpose(1, 2), final_state)


def tssa_step(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    positions: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    initial_state: TSSAState | None = None,
    log_decay: torch.Tensor | None = None,
    softmax: Callable[..., torch.Tensor] | None = None,
    backend: str | None = None,
    in_place: bool = False,
) -> TSSAOutput:
    """Causal TSSA of one token per sequence, from the recurrent state before it; arguments not listed are those of `tssa`.

    Args:
        w: the projected token, (B, H, p).
        bias: score bias of the token, (H,) or (B, H), or of each position, (positions, H).
        positions: (B,) integers.
        mask: (B,), true or 1 where the token is real; padding leaves the state unchanged.
        initial_state: the state before the token; None at the start of a sequence. Not modified unless `in_place`.
        log_decay: (H,) or (B, H).
        in_place: whether the tensors of `initial_state` are updated in place, as in decoding. They must be contiguous and have
            the dtypes of a `TSSAState`, and nothing may need a gradient.

    Returns:
        `TSSAOutput` with the output (B, H, p), the membership (B, H) and the state after the token.

    Raises:
        ValueError: `log_decay` has another shape, the backend is unknown or does not support these tokens, or
            `initial_state` cannot be updated in place.
        RuntimeError: as in `tssa`.

    Example:

    ```python
    >>> state = tssa(torch.randn(2, 100, 4, 16), temp=torch.ones(4)).final_state
    >>> tssa_step(torch.randn(2, 4, 16), torch.ones(4), initial_state=state).output.shape
    torch.Size([2, 4, 16])
    ```
    """
    _check_log_decay(log_decay, w, causal=True)
    tensors = w, temp, bias, log_decay, *(initial_state or ())
    needs_grad = _needs_grad(*tensors)
    state = zero_state(w.unsqueeze(1)) if initial_state is None else as_state(initial_state, w)
    if in_place and initial_state is not None:
        if needs_grad or any(x is not y for x, y in zip(state, initial_state)):
            raise ValueError(
                "tssa_step cannot update a state in place if a gradient is needed or if it has other dtypes than a TSSAState."
            )
        if not all(x.is_contiguous() for x in state):
            raise ValueError(
                "tssa_step cannot update a state in place whose tensors are not contiguous: in an expanded state, sequences "
                "share numbers. Clone it, or omit in_place."
            )
    if needs_grad:  # by the kernels of `tssa`, as those of one token have no gradient
        bias = bias if bias is None or positions is not None else bias.unsqueeze(-2)
        log_decay = None if log_decay is None else log_decay.expand(w.shape[:2]).unsqueeze(1)
        positions, mask = (None if x is None else x.unsqueeze(1) for x in (positions, mask))
        options: dict[str, Any] = {"mask": mask, "initial_state": state, "log_decay": log_decay, "softmax": softmax}
        output, membership, final_state = tssa(w.unsqueeze(1), temp, bias, positions=positions, backend=backend, **options)
        return TSSAOutput(output.squeeze(1), membership.squeeze(-1), final_state)
    dtype, mask = compute_dtype(w.dtype), None if mask is None else mask.bool()
    positions = _mask_positions(positions, mask)
    temp = temp.reshape(-1).to(dtype)
    log_decay = _expand_log_decay(log_decay, mask, w.shape[:2], dtype)
    kernels = None
    if softmax is None and not has_tangent(*tensors):
        kernels = choose_kernels(w, backend, "step", decay=log_decay is not None)
    if kernels is None:
        bias, padding = select_bias(bias, positions, dtype), None if mask is None else ~mask
        softmax = softmax or softmax_over_heads
        return TSSAOutput(*step(w, temp, bias, padding, state, log_decay, softmax, in_place))
    if not in_place:  # the kernels update it
        state = TSSAState(*(x.clone(memory_format=torch.contiguous_format) for x in state))
    if kernels == "numba":
        from .tssa_cpu import step_cpu

        bias = None if bias is None else bias.to(dtype)
        output, membership = step_cpu(w, temp, bias, positions, mask, log_decay, state)
    else:
        from .tssa_triton import tssa_step_triton

        bias = select_bias(bias, positions, dtype)
        bias = None if bias is None else bias.expand(w.shape[:2])
        output, membership = tssa_step_triton(w, temp, bias, mask, log_decay, *state)
    return TSSAOutput(output, membership, state)


def _needs_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors if x is not None)


def choose_kernels(
    w: torch.Tensor, backend: str | None, form: str, decay: bool = False, gradients: bool = False
) -> str | None:
    """The kernels, "numba" or "triton", that compute tokens w (..., H, p); None for the reference implementation.

    `form` is "causal", "bidirectional" or "step"; `decay` and `gradients` are those of `tssa_triton.find_problem`.

    Raises:
        ValueError: the requested backend is unknown, or cannot run.
    """
    is_compiling = torch.compiler.is_compiling()
    # programs contain the reference implementation, and exporters replace `max`, without which numba cannot be imported
    if torch.compiler.is_exporting() or torch.jit.is_tracing() or (is_traced() and not is_compiling):
        return None
    heads, channels = map(operator.index, w.shape[-2:])  # constants for compilers, as for the kernels
    kernels = _find_kernels(backend, w.device, w.dtype, heads, channels, form, decay, gradients)
    if kernels == "numba":
        # compilers fuse the reference step with what surrounds it; subclasses of tensors may have no array
        can_run = form != "step" if is_compiling else type(w) in (torch.Tensor, torch.nn.Parameter)
        return kernels if can_run else None
    return kernels


@torch.compiler.assume_constant_result
def _find_kernels(backend: str | None, device: torch.device, dtype: torch.dtype, *args) -> str | None:
    """`choose_kernels`, apart from what differs between tensors; compilers call it while they trace."""
    requested = backend or os.environ.get("TOST_HF_BACKEND") or "auto"
    if requested not in BACKENDS:
        raise ValueError(f"There is no TSSA backend {requested!r}; choose one of {', '.join(BACKENDS)}.")
    kernels = KERNELS.get(device.type, "torch") if requested == "auto" else requested
    if kernels == "torch" or (requested == "auto" and dtype == torch.float64):
        return None
    if kernels == "numba":
        from .tssa_cpu import find_problem
    else:
        from .tssa_triton import find_problem
    problem = find_problem(device, dtype, *args)
    if problem is None:
        return kernels
    if requested != "auto":
        raise ValueError(f"The TSSA backend {requested!r} cannot run: {problem}; choose 'auto' or 'torch'.")
    _warn_of_fallback(problem)
    return None


@functools.cache
def _warn_of_fallback(reason: str) -> None:
    warnings.warn(
        f"TSSA runs by its reference implementation, which is slow: {reason}. backend='torch' or TOST_HF_BACKEND=torch "
        "chooses it without this warning.",
        stacklevel=2,
    )


def _check_inputs(w, temp, bias, positions, causal, mask, seq_idx, initial_state) -> torch.Tensor:
    """Raises for shapes that disagree; returns `temp` as (H,)."""
    if w.ndim != 4:
        raise ValueError(f"tssa expects projected tokens of shape (batch, tokens, heads, head_dim), got {tuple(w.shape)}.")
    if not w.is_floating_point():
        raise ValueError(f"tssa expects floating-point tokens, got {w.dtype}.")
    B, T, H, _ = w.shape
    if temp.numel() != H:
        raise ValueError(f"temp must contain one number per head ({H}), got shape {tuple(temp.shape)}.")
    for name, tensor in (("mask", mask), ("seq_idx", seq_idx)):
        if tensor is not None and tensor.shape != (B, T):
            raise ValueError(f"{name} must have shape (batch, tokens) = ({B}, {T}), got {tuple(tensor.shape)}.")
    if seq_idx is not None and (seq_idx.is_floating_point() or seq_idx.is_complex()):
        raise ValueError(f"seq_idx must contain integers, got {seq_idx.dtype}.")
    if mask is not None and mask.is_floating_point():
        raise ValueError(f"mask must be true or 1 at real tokens, got {mask.dtype}: TSSA has no additive mask.")
    # dimension by dimension, as exporters would compare batch sizes with numbers of tokens in whole shapes
    if positions is not None:
        _check_positions(w, bias, positions)
    elif bias is not None and (bias.ndim > 3 or bias.shape[-2:] != (T, H) or (bias.ndim == 3 and bias.shape[0] not in (B, 1))):
        raise ValueError(
            f"bias must have shape (tokens, heads) = ({T}, {H}) or (batch, tokens, heads), got {tuple(bias.shape)}."
        )
    if not causal and (bias is not None or initial_state is not None):
        raise ValueError("bias and initial_state belong to the causal form; bidirectional TSSA has neither.")
    if initial_state is not None:
        expected = tuple(state_shapes(w))
        actual = tuple(tuple(x.shape) for x in initial_state)
        if actual != expected:
            raise ValueError(f"initial_state must contain tensors of shapes {expected}, got {actual}.")
    return temp.reshape(-1)


def _check_positions(w: torch.Tensor, bias: torch.Tensor | None, positions: torch.Tensor) -> None:
    """Raises for positions that are not indices into a `bias`."""
    B, T, H, _ = w.shape
    if bias is None or bias.ndim != 2 or bias.shape[1] != H:
        shape = None if bias is None else tuple(bias.shape)
        raise ValueError(f"With positions, bias must have shape (positions, heads = {H}), got {shape}.")
    if (
        positions.dtype not in (torch.int32, torch.int64)
        or positions.ndim != 2
        or positions.shape[1] != T
        or positions.shape[0] not in (B, 1)
    ):
        actual = f"{positions.dtype} of shape {tuple(positions.shape)}"
        raise ValueError(f"positions must be int32 or int64 of shape (batch, tokens) = ({B}, {T}), got {actual}.")


def _check_log_decay(log_decay: torch.Tensor | None, w: torch.Tensor, causal: bool) -> None:
    """Raises if `log_decay` does not fit the tokens w, (B, T, H, p) or (B, H, p)."""
    if log_decay is None:
        return
    if not causal:
        raise ValueError("log_decay belongs to the causal form; bidirectional TSSA has no order in which to decay.")
    *tokens, _ = w.shape
    dims = log_decay.ndim
    if not 0 < dims <= len(tokens) or tuple(log_decay.shape) != tuple(tokens[-dims:]):
        shapes = [tuple(tokens[start:]) for start in reversed(range(len(tokens)))]
        raise ValueError(f"log_decay must have one of the shapes {', '.join(map(str, shapes))}, got {tuple(log_decay.shape)}.")


def _mask_positions(positions: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The positions of real tokens, 0 at padding, where they may be no indices."""
    return positions if positions is None or mask is None else positions.masked_fill(~mask, 0)


def _expand_log_decay(log_decay: torch.Tensor | None, mask: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype):
    """Expands `log_decay` to `shape`, with a value for each token and head; 0 at padding."""
    if log_decay is None:
        return None
    log_decay = log_decay.to(dtype).expand(shape)
    return log_decay if mask is None else log_decay.masked_fill(~mask.bool().unsqueeze(-1), 0)
