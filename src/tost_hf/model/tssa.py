# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Token Statistics Self-Attention (TSSA, arXiv 2412.17810): the operator and the attention layer built on it.

Each head is one subspace. A token's *membership* in the heads is a softmax over them; a head's output is the token's own
projection, scaled down where the second moment of the head's tokens is large. No token is ever compared with another
one, so time is linear in the number of tokens, and the causal form needs only three running sums:

    sum_sq          = sum_i w_i^2             (B, H, p)
    sum_weighted_sq = sum_i Pi_i * w_i^2      (B, H, p)
    sum_membership  = sum_i Pi_i              (B, H)

Symbols: B batch, T tokens, H heads, p head dimension, w the projected tokens, Pi the membership.
Everything inside runs in float32, or in float64 for float64 inputs, whatever comes in; `sum_weighted_sq` and
`sum_membership` are carried on in float64.

Two implementations: the *reference* in PyTorch, for every device and dtype, and the kernels of tssa_triton.py. `backend=`
or, without it, the environment variable TOST_HF_BACKEND chooses: "auto" takes the kernels on a GPU, where they can run.
The causal reference works chunk by chunk; under torch.compile on a CPU it is the operator of tssa_compiled.py.
"""

import functools
import itertools
import os
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


EPS_SUM_SQ = 1e-12  # floor of a causal running sum of squares
EPS_NORM = 1e-12  # floor of a channel's norm over the tokens (bidirectional)
EPS_MEMBERSHIP = 1e-8  # keeps the mean over memberships finite when nothing has been counted yet
CHUNK_TOKENS = 256  # tokens a step of the eager path: enough for the operations to be worth spreading over threads
CHUNK_NUMBERS = 2**20  # size of a tensor there, which takes in several rows: the working set stays in the cache
GROUP_TOKENS = 16  # tokens summed one after the other within a chunk
BACKENDS = ("auto", "reference", "triton")


class TSSAState(NamedTuple):
    """The whole causal state of one layer: 2 * H * p + H numbers a sequence, whatever the length of its past.

    The sums whose quotient scales the output are float64: a float32 sum of a million terms, added one by one, is off by 1e-3.
    An error of `sum_sq`, by which a late token's score is hardly moved, does not show.
    """

    sum_sq: torch.Tensor  # (B, H, p), float32 (float64 for float64 tokens)
    sum_weighted_sq: torch.Tensor  # (B, H, p), float64
    sum_membership: torch.Tensor  # (B, H), float64


class TSSAOutput(NamedTuple):
    """What `tssa` returns."""

    output: torch.Tensor  # (B, T, H, p), dtype of the input
    membership: torch.Tensor  # (B, H, T), float32 or float64; 0 at padding
    final_state: TSSAState | None  # None in the bidirectional form


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics of `dtype` inputs are kept: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tssa(
    w: torch.Tensor,
    temp: torch.Tensor,
    denom_bias: torch.Tensor | None = None,
    *,
    causal: bool = True,
    mask: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_state: TSSAState | None = None,
    backend: str | None = None,
) -> TSSAOutput:
    """Token Statistics Self-Attention between the two projections (paper, section 3; causal form of the authors' code).

    Args:
        w: projected tokens, (B, T, H, p), as the input projection leaves them (no transpose needed).
        temp: one learned scalar a head, H numbers of any shape.
        denom_bias: learned score bias of each token's position, (T, H) or (B, T, H); causal form only.
        causal: prefix sums over positions (language) or sums over all tokens (vision, encoders).
        mask: (B, T), true or 1 at real tokens. Padding adds nothing to any sum and its output is 0.
        seq_idx: (B, T) integers, packed rows: tokens of one sequence are adjacent and share a number, and each sequence
            is computed as if it were alone.
        initial_state: running sums of the tokens before these; causal form only.
        backend: "auto", "reference" or "triton"; None for the environment variable TOST_HF_BACKEND, else "auto".

    Returns:
        `TSSAOutput` with the output (B, T, H, p) in `w`'s dtype, the membership (B, H, T) and, for the causal form, the
        sums after the last token (of each row's last sequence, where rows are packed). All three are differentiable once.

    Raises:
        ValueError: shapes disagree, `initial_state` / `denom_bias` is given to the bidirectional form, or the backend is
            unknown or cannot take these tokens.
    """
    temp = _check_inputs(w, temp, denom_bias, causal, mask, seq_idx, initial_state)
    dtype = compute_dtype(w.dtype)
    if _choose_backend(backend, w.device.type, w.dtype) == "triton":
        from .tssa_triton import tssa_triton

        bias = None if denom_bias is None else denom_bias.reshape(-1, *denom_bias.shape[-2:])
        mask = None if mask is None else mask.bool()
        output, membership, *final = tssa_triton(w, temp, bias, mask, seq_idx, initial_state, causal)
        return TSSAOutput(output, membership.transpose(1, 2), _as_state(final, w) if causal else None)

    padding = None if mask is None else ~mask.bool()
    if not causal:
        output, membership = _bidirectional(w, temp.to(dtype), padding, seq_idx)
        return TSSAOutput(output, membership.transpose(1, 2), None)

    bias = w.new_zeros(1, 1, 1, dtype=dtype) if denom_bias is None else denom_bias.to(dtype)
    bias = bias.reshape(-1, *bias.shape[-2:]).expand(w.shape[0], w.shape[1], w.shape[2])
    state = _zero_state(w) if initial_state is None else _as_state(initial_state, w)
    arguments = (w, temp.to(dtype), bias, padding, seq_idx, *state)
    if not torch.compiler.is_compiling():
        output, membership, *final = _CausalTSSA.apply(*arguments)
    elif w.device.type == "cpu" and not torch.compiler.is_exporting():
        from .tssa_compiled import causal_tssa

        output, membership, *final = causal_tssa(*arguments)
    else:
        output, membership, *final = _causal_whole(*arguments)
    return TSSAOutput(output, membership.transpose(1, 2), TSSAState(*final))


def tssa_step(
    w: torch.Tensor,
    temp: torch.Tensor,
    denom_bias: torch.Tensor | None,
    state: TSSAState | None,
    *,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> TSSAOutput:
    """Causal TSSA of one new token.

    Args:
        w: the projected token, (B, H, p).
        temp: H numbers of any shape.
        denom_bias: score bias at the token's position, (H,) or (B, H), or None.
        state: the running sums before the token; None at the start of a sequence. Left as they are.
        mask: (B,), true or 1 where the token is real; a padding token leaves the state as it was.
        backend: as in `tssa`. The kernel has no gradient: where one is needed, the reference runs.

    Returns:
        `TSSAOutput` with the output (B, H, p), the membership (B, H) and the new state.

    Raises:
        ValueError: the backend is unknown or cannot take these tokens.
    """
    dtype = compute_dtype(w.dtype)
    state = _zero_state(w.unsqueeze(1)) if state is None else _as_state(state, w)
    temp = temp.reshape(-1).to(dtype)
    mask = None if mask is None else mask.bool()
    tensors = (w, temp, *state) if denom_bias is None else (w, temp, denom_bias, *state)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if _choose_backend(backend, w.device.type, w.dtype) == "triton" and not needs_grad:
        from .tssa_triton import tssa_step_triton

        bias = None if denom_bias is None else denom_bias.reshape(-1, w.shape[1])
        state = TSSAState(*(x.clone(memory_format=torch.contiguous_format) for x in state))  # the kernel adds in place
        return TSSAOutput(*tssa_step_triton(w, temp, bias, mask, *state), state)

    x = w.to(dtype)
    if mask is not None:
        x = x.masked_fill(~mask[:, None, None], 0)
    sq = x * x
    sum_sq = state.sum_sq + sq
    score = (sq / sum_sq.clamp_min(EPS_SUM_SQ)).sum(-1)
    if denom_bias is not None:
        score = score + w.shape[-1] * denom_bias.to(dtype)
    membership = (score * temp).softmax(-1)
    if mask is not None:
        membership = membership.masked_fill(~mask[:, None], 0)
    sum_weighted_sq = state.sum_weighted_sq + sq * membership.unsqueeze(-1)
    sum_membership = state.sum_membership + membership
    moment = (sum_weighted_sq / (sum_membership + EPS_MEMBERSHIP).unsqueeze(-1)).to(dtype)
    output = -(x * membership.unsqueeze(-1)) / (1 + moment)
    return TSSAOutput(output.to(w.dtype), membership, TSSAState(sum_sq, sum_weighted_sq, sum_membership))


@functools.cache
def _warn_of_fallback(reason: str) -> None:
    warnings.warn(
        f"TSSA runs its reference implementation on the GPU, which is slow: {reason}. backend='reference' or "
        "TOST_HF_BACKEND=reference asks for it without this warning.",
        stacklevel=2,
    )


@torch.compiler.assume_constant_result
def _choose_backend(backend: str | None, device: str, dtype: torch.dtype) -> str:
    """The backend, "reference" or "triton", for tokens of a dtype on a kind of device; see `tssa`."""
    wanted = backend or os.environ.get("TOST_HF_BACKEND") or "auto"
    if wanted not in BACKENDS:
        raise ValueError(f"There is no TSSA backend {wanted!r}; choose one of {', '.join(BACKENDS)}.")
    if wanted == "reference" or (wanted == "auto" and (device != "cuda" or dtype == torch.float64)):
        return "reference"
    from .tssa_triton import is_available, supports

    problem = None
    if not is_available():
        problem = "Triton is not installed (pip install triton)"
    elif not supports(torch.empty(0, dtype=dtype, device=device)):
        problem = f"the Triton kernels do not take {dtype} tokens on {device}"
    if problem is None:
        return "triton"
    if wanted == "triton":
        raise ValueError(f"The TSSA backend 'triton' cannot run: {problem}; choose 'auto' or 'reference'.")
    _warn_of_fallback(problem)
    return "reference"


def _check_inputs(w, temp, denom_bias, causal, mask, seq_idx, initial_state) -> torch.Tensor:
    """Refuses shapes that disagree; returns `temp` as (H,)."""
    if w.ndim != 4:
        raise ValueError(f"tssa takes projected tokens of shape (batch, tokens, heads, head_dim), got {tuple(w.shape)}.")
    if not w.is_floating_point():
        raise ValueError(f"tssa takes floating-point tokens, got {w.dtype}.")
    B, T, H, p = w.shape
    if temp.numel() != H:
        raise ValueError(f"temp must hold one number a head ({H}), got shape {tuple(temp.shape)}.")
    for name, tensor in (("mask", mask), ("seq_idx", seq_idx)):
        if tensor is not None and tensor.shape != (B, T):
            raise ValueError(f"{name} must have shape (batch, tokens) = ({B}, {T}), got {tuple(tensor.shape)}.")
    if denom_bias is not None and denom_bias.shape not in ((T, H), (1, T, H), (B, T, H)):
        raise ValueError(
            f"denom_bias must have shape (tokens, heads) = ({T}, {H}), with or without the batch in front, got "
            f"{tuple(denom_bias.shape)}."
        )
    if not causal and (denom_bias is not None or initial_state is not None):
        raise ValueError("denom_bias and initial_state belong to the causal form; bidirectional TSSA has neither.")
    if initial_state is not None:
        expected = ((B, H, p), (B, H, p), (B, H))
        shapes = tuple(tuple(x.shape) for x in initial_state)
        if shapes != expected:
            raise ValueError(f"initial_state must hold tensors of shapes {expected}, got {shapes}.")
    return temp.reshape(-1)


def _sum_shapes(w: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    B, _, H, p = w.shape
    return (B, H, p), (B, H, p), (B, H)


def sum_dtypes(w: torch.Tensor) -> tuple[torch.dtype, ...]:
    """The dtypes of the state's three sums, for tokens like `w`."""
    wide = torch.float32 if w.device.type == "mps" else torch.float64  # Apple's devices have no float64
    return compute_dtype(w.dtype), wide, wide


def _zero_state(w: torch.Tensor) -> TSSAState:
    return TSSAState(*(w.new_zeros(shape, dtype=dtype) for shape, dtype in zip(_sum_shapes(w), sum_dtypes(w))))


def _as_state(sums, w: torch.Tensor) -> TSSAState:
    return TSSAState(*(x.to(dtype) for x, dtype in zip(sums, sum_dtypes(w))))


def _membership(score: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the heads of scores (B, T, H); 0 at padding."""
    membership = (score * temp).softmax(-1)
    return membership if padding is None else membership.masked_fill(padding.unsqueeze(-1), 0)


# ---------------------------------------------------------------------------------------------------------------------
# Eager causal path: one pass over chunks of tokens, each small enough for the cache, with a closed-form backward that
# goes through them in reverse. Only the input, the scores, the memberships and the sums at chunk borders are
# kept for it.
# ---------------------------------------------------------------------------------------------------------------------


class CompiledChunks(NamedTuple):
    """Compiled code for chunks of one length; it takes what `_forward_chunk` and `_backward_chunk` take but the workspace."""

    tokens: int  # of a chunk
    rows: int  # worked on together
    borders: int  # least number of places for the sums at borders of chunks, used or not
    forward: Callable | None  # None for the eager code
    backward: Callable | None


def _plan_chunks(T: int, seq_idx: torch.Tensor | None, size: int) -> list[tuple[int, int, torch.Tensor | None]]:
    """Chunks (start, stop, starts_sequence) of at most `size` tokens that straddle no border of any row.

    `starts_sequence` (B,) marks the rows in which a packed sequence begins at the chunk's first token.
    """
    if seq_idx is None:
        return [(t, min(t + size, T), None) for t in range(0, T, size)]
    new_sequence = seq_idx[:, 1:] != seq_idx[:, :-1]
    borders = [0, *(new_sequence.any(0).nonzero().flatten() + 1).tolist(), T]
    chunks = []
    for start, stop in itertools.pairwise(borders):
        starts_sequence = new_sequence[:, start - 1] if start else None
        for t in range(start, stop, size):
            chunks.append((t, min(t + size, stop), starts_sequence if t == start else None))
    return chunks


def _may_be_floored(sum_sq: torch.Tensor) -> bool:
    """Whether a running sum of squares that goes on from this one can lie below the floor (for all one knows)."""
    return sum_sq.device.type != "cpu" or bool((sum_sq < EPS_SUM_SQ).any())  # elsewhere a look would wait for the device


def _clear_rows(sums: tuple[torch.Tensor, ...], rows: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The sums with the marked rows (B,) set to zero."""
    if rows is None:
        return sums
    return tuple(x.masked_fill(rows.view(-1, *[1] * (x.ndim - 1)), 0) for x in sums)


def _plan(w: torch.Tensor, seq_idx: torch.Tensor | None, compiled: CompiledChunks | None) -> list[tuple[slice, list]]:
    """Rows that are worked on together, few enough that a chunk of them stays in the cache, and the chunks of each."""
    B, T, H, p = w.shape
    size = CHUNK_TOKENS if compiled is None else compiled.tokens
    rows = max(1, CHUNK_NUMBERS // (size * H * p)) if compiled is None else compiled.rows
    groups = [slice(row, min(row + rows, B)) for row in range(0, B, rows)]
    return [(group, _plan_chunks(T, None if seq_idx is None else seq_idx[group], size)) for group in groups]


class _RunningSum:
    """Running sums over the tokens of a chunk, (rows, tokens, H, p), in a tensor that every chunk uses again.

    They are added up inside groups of tokens, then over the groups, and then joined. Whole tensors are added, which is
    faster than `torch.cumsum` along this dimension, and a token's sum takes in nothing of the tokens after it (before it, in
    reverse), not even a zero times infinity.

    Args:
        tensor: where the sums go.
        source: what is summed; `tensor` itself if None.
        reverse: sum from the last token back.
    """

    def __init__(self, tensor: torch.Tensor, source: torch.Tensor | None = None, reverse: bool = False):
        order = -1 if reverse else 1
        self.groups = tensor.unflatten(1, (-1, GROUP_TOKENS))
        tokens = self.groups.unbind(2)[::order]
        terms = tokens if source is None else source.unflatten(1, (-1, GROUP_TOKENS)).unbind(2)[::order]
        self.first = None if source is None else (tokens[0], terms[0])
        self.inside = list(zip(tokens, terms[1:], tokens[1:]))
        before = self.groups.new_zeros(self.groups[:, :1, 0].shape).repeat(1, self.groups.shape[1] + 1, 1, 1)
        chain = before.unbind(1)[::order]
        self.over = list(zip(chain, tokens[-1].unbind(1)[::order], chain[1:]))
        self.before = before[:, 1:] if reverse else before[:, :-1]
        self.total = chain[-1]

    def __call__(self, carry: torch.Tensor) -> torch.Tensor:
        """Sums on from `carry` (rows, H, p); returns the sum over all tokens, in the carry's dtype."""
        if self.first is not None:
            self.first[0].copy_(self.first[1])
        for total, term, result in itertools.chain(self.inside, self.over):
            torch.add(total, term, out=result)
        self.groups.add_((self.before + carry.to(self.total.dtype).unsqueeze(1)).unsqueeze(2))
        return carry + self.total


class _Workspace:
    """Tensors for one length of chunk, a multiple of GROUP_TOKENS, and the running sums between them."""

    def __init__(self, w: torch.Tensor, tokens: int, dtype: torch.dtype, backward: bool):
        rows, _, H, p = w.shape

        def new():
            return w.new_empty(rows, tokens, H, p, dtype=dtype)

        self.x, self.sq, self.a = new(), new(), new()
        self.prefix_a = _RunningSum(self.a, source=self.sq)
        if not backward:
            self.prefix_sq = _RunningSum(self.sq)
            return
        self.grad, self.b, self.c, self.d = new(), new(), new(), new()
        self.prefix_b = _RunningSum(self.b)
        self.suffix_a = _RunningSum(self.a, reverse=True)
        self.suffix_c = _RunningSum(self.c, reverse=True)


def _chunk_steps(w, chunks, dtype, compiled: CompiledChunks | None, backward: bool) -> dict[int, Callable]:
    """For each length of chunk, what computes it: `_forward_chunk` or `_backward_chunk`, or compiled code for it."""
    chunk = _backward_chunk if backward else _forward_chunk
    code = None if compiled is None else compiled.backward if backward else compiled.forward
    steps = {} if code is None else {compiled.tokens: code}
    lengths = {stop - start for start, stop, _ in chunks} - steps.keys()
    spaces = {size: _Workspace(w, size, dtype, backward) for size in map(_round_up, lengths)}
    return steps | {length: functools.partial(chunk, spaces[_round_up(length)]) for length in lengths}


def _round_up(tokens: int) -> int:
    return -(-tokens // GROUP_TOKENS) * GROUP_TOKENS


def _load(x: torch.Tensor, padding: torch.Tensor | None, buffer: torch.Tensor) -> torch.Tensor:
    """A chunk `x` in the buffer's dtype and length, 0 at padding (not multiplied: it may hold NaN) and past the end."""
    if padding is None and x.shape == buffer.shape and x.dtype == buffer.dtype:
        return x
    real = buffer[:, : x.shape[1]]
    real.copy_(x)
    if padding is not None:
        real.masked_fill_(padding[..., None, None], 0)
    buffer[:, x.shape[1] :] = 0
    return buffer


def _pad_tokens(x: torch.Tensor, tokens: int) -> torch.Tensor:
    return x if x.shape[1] == tokens else F.pad(x, (0, 0, 0, tokens - x.shape[1]))


def _suffix_sum(x: torch.Tensor) -> torch.Tensor:
    return x.flip(1).cumsum(1).flip(1)


def causal_forward(w, temp, bias, padding, seq_idx, sum_sq, sum_weighted_sq, sum_membership, keep, compiled=None):
    """Output, membership, the three final sums, and what the backward needs: scores and the sums before each chunk.

    The last four are empty unless `keep`.
    """
    dtype = temp.dtype
    plan = _plan(w, seq_idx, compiled)
    count = sum((rows.stop - rows.start) * len(chunks) for rows, chunks in plan)
    count = max(count, compiled.borders if compiled is not None else 0) if keep else 0
    output = torch.empty_like(w, memory_format=torch.contiguous_format)
    membership = w.new_empty(w.shape[:3], dtype=dtype)
    final = [torch.empty_like(x) for x in (sum_sq, sum_weighted_sq, sum_membership)]
    scores = torch.empty_like(membership) if keep else membership.new_empty(0)
    carries = [membership.new_empty(count, *shape[1:]) for shape in _sum_shapes(w)]
    place = 0
    for rows, chunks in plan:
        stop = place + (rows.stop - rows.start) * len(chunks) if keep else 0
        _forward_rows(
            w[rows],
            temp,
            bias[rows],
            None if padding is None else padding[rows],
            [x[rows] for x in (sum_sq, sum_weighted_sq, sum_membership)],
            chunks,
            (output[rows], membership[rows], [x[rows] for x in final]),
            (scores[rows], [x[place:stop].unflatten(0, (len(chunks), rows.stop - rows.start)) for x in carries])
            if keep
            else None,
            compiled,
        )
        place = stop
    return output, membership, *final, scores, *carries


def causal_backward(
    grad_output,
    grad_membership,
    grad_sum_sq,
    grad_sum_weighted_sq,
    grad_sum_membership,
    w,
    temp,
    padding,
    seq_idx,
    membership,
    scores,
    *carries,
    compiled=None,
):
    """Gradients of w, temp, bias (B, T, H) and the three initial sums."""
    dw = torch.empty_like(w, memory_format=torch.contiguous_format)
    dscores, dtemp = torch.empty_like(membership), torch.zeros_like(temp)
    if grad_output is None:
        grad_output = w.new_zeros(()).expand_as(w)
    dfinal = (grad_sum_sq, grad_sum_weighted_sq, grad_sum_membership)
    dfinal = [zero if grad is None else grad for grad, zero in zip(dfinal, _zero_state(w))]
    place, dinitial = 0, []
    for rows, chunks in _plan(w, seq_idx, compiled):
        stop = place + (rows.stop - rows.start) * len(chunks)
        dinitial.append(
            _backward_rows(
                w[rows],
                temp,
                None if padding is None else padding[rows],
                chunks,
                (
                    membership[rows],
                    scores[rows],
                    [x[place:stop].unflatten(0, (len(chunks), rows.stop - rows.start)) for x in carries],
                ),
                (grad_output[rows], None if grad_membership is None else grad_membership[rows], [x[rows] for x in dfinal]),
                (dw[rows], dscores[rows], dtemp),
                compiled,
            )
        )
        place = stop
    return dw, dtemp, dscores.mul_(w.shape[-1]), *(torch.cat(parts) for parts in zip(*dinitial))


class _CausalTSSA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, temp, bias, padding, seq_idx, *state):
        *outputs, scores, sum_sq, sum_weighted_sq, sum_membership = causal_forward(
            w, temp, bias, padding, seq_idx, *state, any(ctx.needs_input_grad)
        )
        carries = (sum_sq, sum_weighted_sq, sum_membership)
        ctx.save_for_backward(w, temp, padding, seq_idx, outputs[1], scores, *carries)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        dw, dtemp, dbias, *dstate = causal_backward(*grads, *ctx.saved_tensors)
        return dw, dtemp, dbias, None, None, *dstate


def _tokens(x: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    return None if x is None else x[:, start:stop]


def _forward_rows(w, temp, bias, padding, state, chunks, outputs, kept, compiled):
    """Fills `outputs`, and where not None `kept`, for rows that are worked on together."""
    output, memberships, final = outputs
    steps = _chunk_steps(w, chunks, temp.dtype, compiled, backward=False)
    for index, (start, stop, starts_sequence) in enumerate(chunks):
        state = _clear_rows(state, starts_sequence)
        if kept is not None:
            for carry, value in zip(kept[1], state):
                carry[index] = value
        inputs = (_tokens(x, start, stop) for x in (output, w, bias, padding))
        membership, score, *state = steps[stop - start](*inputs, temp, *state)
        memberships[:, start:stop] = membership
        if kept is not None:
            kept[0][:, start:stop] = score
    for x, value in zip(final, state):
        x.copy_(value)


def _forward_chunk(space, output, w, bias, padding, temp, sum_sq, sum_weighted_sq, sum_membership):
    """One chunk: fills `output`, returns its membership and score (rows, tokens, H) and the three sums after it."""
    tokens = w.shape[1]
    x = _load(w, padding, space.x)
    may_be_floored = _may_be_floored(sum_sq)
    sq = torch.mul(x, x, out=space.sq)
    sum_sq = space.prefix_a(sum_sq)
    if may_be_floored:
        space.a.clamp_min_(EPS_SUM_SQ)
    score = torch.div(sq, space.a, out=space.a).sum(-1)[:, :tokens].add_(bias, alpha=w.shape[-1])
    membership = _membership(score, temp, padding)

    weight = _pad_tokens(membership, x.shape[1])
    sq.mul_(weight.unsqueeze(-1))
    sum_weighted_sq = space.prefix_sq(sum_weighted_sq)
    count = weight.cumsum(1)
    sum_membership, count = sum_membership + count[:, -1], count.add_(sum_membership.to(temp.dtype).unsqueeze(1))
    # -x Pi / (1 + N / D), as -x Pi D / (N + D)
    count.add_(EPS_MEMBERSHIP)
    torch.mul(x, (weight * count).neg_().unsqueeze(-1), out=space.a)
    torch.div(space.a[:, :tokens], sq.add_(count.unsqueeze(-1))[:, :tokens], out=output)
    return membership, score, sum_sq, sum_weighted_sq, sum_membership


def _backward_rows(w, temp, padding, chunks, kept, grads, results, compiled):
    """Fills `dw` and `dscores`, adds to `dtemp`, and returns the gradients of the initial state.

    dname is the gradient with respect to name. A running sum's gradient is a suffix sum: U, V and W, of the weighted squares,
    the memberships and the squares. They start as the gradients of the final state.
    """
    memberships, scores, carries = kept
    grad_output, grad_membership, (grad_sum_sq, U, V) = grads
    dw, dscores, dtemp = results
    sums = (-grad_sum_sq, U, V)
    steps = _chunk_steps(w, chunks, temp.dtype, compiled, backward=True)
    for index in reversed(range(len(chunks))):
        start, stop, starts_sequence = chunks[index]
        tensors = (dw, grad_output, grad_membership, w, padding, memberships, scores)
        inputs = (_tokens(x, start, stop) for x in tensors)
        dscore, dtemp_here, *sums = steps[stop - start](*inputs, temp, *(x[index] for x in carries), *sums)
        dscores[:, start:stop] = dscore
        dtemp += dtemp_here
        sums = _clear_rows(sums, starts_sequence)
    minus_W, U, V = sums
    return -minus_W, U, V


def _backward_chunk(
    space,
    dw,
    grad,
    grad_membership,
    w,
    padding,
    membership,
    score,
    temp,
    sum_sq,
    sum_weighted_sq,
    sum_membership,
    minus_W,
    U,
    V,
):
    """One chunk: fills `dw`, returns dscore, dtemp and -W, U and V before the chunk.

    N and D are the running sums of weighted squares and memberships, so the output is -x Pi D / (N + D).
    """
    dtype, tokens, size = temp.dtype, w.shape[1], space.sq.shape[1]
    a, b, c, d = space.a, space.b, space.c, space.d
    x = _load(w, padding, space.x)
    grad = _load(grad, padding, space.grad)
    membership, score = _pad_tokens(membership, size), _pad_tokens(score, size)
    weight = membership.unsqueeze(-1)

    # the forward values again, from the sums at the chunk's border
    sq = torch.mul(x, x, out=space.sq)
    space.prefix_a(sum_sq)
    floored = a < EPS_SUM_SQ if _may_be_floored(sum_sq) else None
    if floored is not None:
        a.clamp_min_(EPS_SUM_SQ)
    a.reciprocal_()
    torch.mul(sq, weight, out=b)
    space.prefix_b(sum_weighted_sq)
    count = membership.cumsum(1).add_(sum_membership.unsqueeze(1)).add_(EPS_MEMBERSHIP)
    torch.add(b, count.unsqueeze(-1), out=d).reciprocal_()
    weighted_count = (membership * count).unsqueeze(-1)

    # output -> N, D, membership
    torch.mul(grad, d, out=space.grad)  # g / (N + D)
    torch.mul(space.grad, x, out=c)
    dmembership = c.sum(-1).mul_(count).neg_()
    c.mul_(d)  # g x / (N + D)^2
    dcount = torch.mul(c, b, out=b).sum(-1).mul_(membership).neg_()
    c.mul_(weighted_count)
    U = space.suffix_c(U)
    suffix_v = _suffix_sum(dcount)
    V, suffix_v = V + suffix_v[:, 0], suffix_v.add_(V.to(dtype).unsqueeze(1))
    dmembership += torch.mul(sq, c, out=b).sum(-1) + suffix_v
    if grad_membership is not None:
        dmembership[:, :tokens] += grad_membership

    # membership -> score: the one step that joins the heads
    dlogit = dmembership.sub_((membership * dmembership).sum(-1, keepdim=True)).mul_(membership)
    dtemp = (dlogit * score).sum((0, 1))
    dscore = dlogit.mul_(temp)

    # score -> running sum of squares -> tokens
    dratio = torch.mul(a, dscore.unsqueeze(-1), out=d)
    a.mul_(sq).mul_(dratio)
    if floored is not None:
        a.masked_fill_(floored, 0)
    minus_W = space.suffix_a(minus_W)
    dsq = dratio.sub_(a).addcmul_(c, weight)
    dx = space.grad.mul_(weighted_count.neg_()).addcmul_(dsq, x, value=2)[:, :tokens]
    dw.copy_(dx if padding is None else dx.masked_fill_(padding[..., None, None], 0))
    return dscore[:, :tokens], dtemp, minus_W, U, V


# ---------------------------------------------------------------------------------------------------------------------
# Whole-sequence formulas for torch.export and for compilers on other devices, which fuse them and derive their backward. No
# step depends on a tensor's values.
# ---------------------------------------------------------------------------------------------------------------------


def _offset_in_sequence(seq_idx: torch.Tensor) -> torch.Tensor:
    """Distance (B, T) of each token from the first one of its packed sequence."""
    t = torch.arange(seq_idx.shape[1], device=seq_idx.device).expand_as(seq_idx)
    begins = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)
    return t - t.masked_fill(~begins, 0).cummax(1).values


def _running_sum(x: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
    """Sum over tokens (dimension 1) up to each one, from the start of its packed sequence.

    Doubling steps, not a difference of two cumulative sums: that would cancel digits.
    """
    if offset is None:
        return x.cumsum(1)
    offset = offset.view(*offset.shape, *[1] * (x.ndim - 2))
    step = 1
    while step < x.shape[1]:
        earlier = F.pad(x[:, :-step], (0, 0) * (x.ndim - 2) + (step, 0))
        x = x + earlier.masked_fill(offset < step, 0)
        step *= 2
    return x


def _real_tokens(w: torch.Tensor, padding: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """All tokens in the compute dtype, 0 at padding (not multiplied: it may hold NaN)."""
    return w.to(dtype) if padding is None else w.to(dtype).masked_fill(padding[..., None, None], 0)


def _causal_whole(w, temp, bias, padding, seq_idx, *state):
    x = _real_tokens(w, padding, temp.dtype)
    offset = None if seq_idx is None else _offset_in_sequence(seq_idx)
    carried = [s.to(temp.dtype).unsqueeze(1) for s in state]
    if offset is not None:  # the state continues in a row's first sequence only
        later = offset < torch.arange(w.shape[1], device=w.device)
        carried = [s.masked_fill(later.view(*later.shape, *[1] * (s.ndim - 2)), 0) for s in carried]
    sq = x * x
    sum_sq = _running_sum(sq, offset) + carried[0]
    score = (sq / sum_sq.clamp_min(EPS_SUM_SQ)).sum(-1) + w.shape[-1] * bias
    membership = _membership(score, temp, padding)
    weight = membership.unsqueeze(-1)
    sum_weighted_sq = _running_sum(sq * weight, offset) + carried[1]
    sum_membership = _running_sum(membership, offset) + carried[2]
    moment = sum_weighted_sq / (sum_membership + EPS_MEMBERSHIP).unsqueeze(-1)
    output = -(x * weight) / (1 + moment)
    # a copy: compiled code that updates a cache in place must not see views of its own work buffers
    final = (s[:, -1].clone() for s in (sum_sq, sum_weighted_sq, sum_membership))
    return output.to(w.dtype), membership, *_as_state(final, w)


# ---------------------------------------------------------------------------------------------------------------------
# Bidirectional form: every running sum becomes a total.
# ---------------------------------------------------------------------------------------------------------------------


def _total(x: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
    """Sum over all tokens (B, 1, ...) or, in packed rows, over each token's own sequence (B, T, ...)."""
    if seq_idx is None:
        return x.sum(1, keepdim=True)
    T = seq_idx.shape[1]
    to_last = _offset_in_sequence(seq_idx.flip(1)).flip(1)
    last = (torch.arange(T, device=x.device) + to_last).view(*seq_idx.shape, *[1] * (x.ndim - 2))
    return _running_sum(x, _offset_in_sequence(seq_idx)).gather(1, last.expand_as(x))


def _bidirectional(w, temp, padding, seq_idx):
    x = _real_tokens(w, padding, temp.dtype)
    sq = x * x
    norm_sq = _total(sq, seq_idx).clamp_min(EPS_NORM**2)
    membership = _membership((sq / norm_sq).sum(-1), temp, padding)
    weight = membership.unsqueeze(-1)
    moment = _total(sq * weight, seq_idx) / (_total(membership, seq_idx) + EPS_MEMBERSHIP).unsqueeze(-1)
    return (-(x * weight) / (1 + moment)).to(w.dtype), membership


# ---------------------------------------------------------------------------------------------------------------------
# The layer
# ---------------------------------------------------------------------------------------------------------------------


class TokenStatisticsSelfAttention(nn.Module):
    """One TSSA layer with its two projections, for language (causal) and vision (bidirectional) alike.

    Args:
        hidden_size: width D of the tokens.
        num_attention_heads: number of heads H; divides `hidden_size`.
        causal: whether a token sees only itself and the tokens before it.
        layer_idx: the layer's place in a cache; needed for `past_key_values`.
        max_position_embeddings: rows of the learned score bias `denom_bias`; None for none (bidirectional, position-free).
        in_bias, out_bias: whether the input and the output projection have a bias.
        attention_dropout: dropout on 1 / (1 + moment), as in the paper's code.
        hidden_dropout: dropout after the output projection.
        backend: as in `tssa`; may be set later as well.

    `temp` (H, 1) and `denom_bias` (H, max_position_embeddings, 1) stay in float32 whatever dtype the module is moved to.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        causal: bool,
        layer_idx: int | None = None,
        max_position_embeddings: int | None = None,
        in_bias: bool = False,
        out_bias: bool = False,
        attention_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        backend: str | None = None,
    ):
        super().__init__()
        self.backend = backend
        self.num_heads = num_attention_heads
        self.head_dim = hidden_size // num_attention_heads
        self.causal = causal
        self.layer_idx = layer_idx
        self.attention_dropout = attention_dropout
        self.in_proj = nn.Linear(hidden_size, hidden_size, bias=in_bias)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=out_bias)
        self.out_dropout = nn.Dropout(hidden_dropout)
        self.temp = nn.Parameter(torch.ones(num_attention_heads, 1))
        self.denom_bias = None
        if max_position_embeddings is not None:
            self.denom_bias = nn.Parameter(torch.zeros(num_attention_heads, max_position_embeddings, 1))

    def _apply(self, fn, recurse=True):
        # model.to(dtype) and model.half() come through here; the statistics' own parameters keep their float32 values
        kept = {name: getattr(self, name) for name in ("temp", "denom_bias") if getattr(self, name) is not None}
        kept = {name: param.data for name, param in kept.items() if param.dtype in (torch.float32, torch.float64)}
        super()._apply(fn, recurse)
        for name, data in kept.items():
            param = getattr(self, name)
            if param.dtype in (torch.float16, torch.bfloat16):
                param.data = data.to(device=param.device)
        return self

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        past_key_values=None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends.

        Args:
            hidden_states: (B, T, D).
            attention_mask: (B, T), true or 1 at real tokens; these tokens only, not those in the cache.
            position_ids: (B, T), rows of `denom_bias`; needed where the layer has one.
            seq_idx: (B, T), packed rows; see `tssa`.
            past_key_values: a cache of `CausalStatisticsLayer`s; read, then updated.

        Returns:
            The attended tokens (B, T, D) and the membership (B, H, T).
        """
        B, T, _ = hidden_states.shape
        w = self.in_proj(hidden_states).view(B, T, self.num_heads, self.head_dim)
        # a look-up, not an index: the gradient of an index adds up in whatever order threads come
        bias = None if self.denom_bias is None else F.embedding(position_ids, self.denom_bias[..., 0].t())
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        state = None if layer is None else layer.exact_state
        if layer is not None and T == 1:
            step_mask = None if attention_mask is None else attention_mask[:, 0]
            step_bias = None if bias is None else bias[:, 0]
            out, membership, state = tssa_step(w[:, 0], self.temp, step_bias, state, mask=step_mask, backend=self.backend)
            out, membership = out.unsqueeze(1), membership.unsqueeze(-1)
        else:
            out, membership, state = tssa(
                w,
                self.temp,
                bias,
                causal=self.causal,
                mask=attention_mask,
                seq_idx=seq_idx,
                initial_state=state,
                backend=self.backend,
            )
        if layer is not None:
            layer.update_state(TSSAState(*state), w, membership)
        if self.training and self.attention_dropout > 0:
            keep = torch.ones_like(out) if self.causal else out.new_ones(B, 1, self.num_heads, self.head_dim)
            out = out * F.dropout(keep, self.attention_dropout)
        return self.out_dropout(self.out_proj(out.reshape(B, T, -1))), membership
