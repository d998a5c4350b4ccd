# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The CPU backend of causal TSSA: one pass over chunks of tokens that fit the cache, with the backward in closed form.

tssa_reference.py defines what is computed; its names are used here. The backward saves the input, the scores, the memberships
and the sums before each chunk, and recomputes the rest chunk by chunk, from the last to the first. Both passes are custom
operators: compilers see them as one node each.

A chunk is divided into blocks. Running sums are formed token by token within all blocks at once, then over the blocks, and
added up. With decay a sum is multiplied by a token's factor before the token is added.

In the backward, `grad_x` is the gradient with respect to x. The output is written as -w Pi D / (N + D).
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from .tssa_reference import (
    BLOCK_TOKENS,
    EPS_MEMBERSHIP,
    EPS_SUM_SQ,
    TSSAState,
    custom_operator,
    state_shapes,
)


CHUNK_TOKENS = 256
VECTOR_HEADS = 16  # float32 numbers in the widest vectors of a CPU
CHUNK_NUMBERS = 2**20  # in a chunk's tensors, of several batch elements: the working set stays in the cache


def causal(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    state: TSSAState,
    log_decay: torch.Tensor | None,
    normalize_scores: bool,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState]:
    """As `tssa_reference.causal`, but `bias` (B, T, H) and `state` are always given. Differentiable once."""
    inputs = w, temp, bias, padding, log_decay, *state
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    output, membership, *sums = _forward_operator(*inputs, needs_grad, CHUNK_TOKENS, normalize_scores)[:5]
    return output, membership, TSSAState(*sums)


class _Inputs(NamedTuple):
    """The operator's inputs that forward and backward share."""

    w: torch.Tensor  # (B, T, H, p)
    temp: torch.Tensor  # (H,)
    padding: torch.Tensor | None  # (B, T)
    log_decay: torch.Tensor | None  # (B, T, H) or (B, T, 1)
    state: TSSAState
    normalize_scores: bool


class _SavedTensors(NamedTuple):
    """What the forward saves for the backward; without gradients, the last two are empty."""

    membership: torch.Tensor  # (B, T, H)
    score: torch.Tensor  # (B, T, H)
    sums: TSSAState  # before each chunk and after the last, (chunks + 1, B, ...): for compilers a number that is never 1


# Batch elements and chunks ----------------------------------------------------------------------------------------------


def _membership_of(score: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """`tssa_reference.membership_of`: torch's softmax on CPUs takes 7 times as long for 12 heads as for 16, a full vector."""
    H = score.shape[-1]
    logits = score.new_full((*score.shape[:-1], -(-H // VECTOR_HEADS) * VECTOR_HEADS), float("-inf"))
    torch.mul(score, temp, out=logits[..., :H])
    membership = logits.softmax(-1)[..., :H]
    return membership if padding is None else membership.masked_fill_(padding.unsqueeze(-1), 0)


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _element_slices(w: torch.Tensor) -> list[slice]:
    """Batch elements that are computed together."""
    return _slices(len(w), max(1, CHUNK_NUMBERS // (CHUNK_TOKENS * w.shape[2] * w.shape[3])))


def _buffers(w: torch.Tensor, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors for a chunk of the tokens w, reused by all chunks: allocating new ones would cost as much as filling them."""
    elements, T, H, p = w.shape
    return [w.new_empty(elements, _whole_blocks(min(T, CHUNK_TOKENS)), H, p, dtype=dtype) for _ in range(count)]


def _forward(inputs: _Inputs, bias: torch.Tensor, needs_grad: bool) -> tuple[torch.Tensor, TSSAState, _SavedTensors]:
    """Output, state after the last token, and what the backward needs."""
    w, temp, padding, log_decay, state, normalize_scores = inputs
    chunks = _slices(w.shape[1], CHUNK_TOKENS)
    output = torch.empty_like(w, memory_format=torch.contiguous_format)
    membership = w.new_empty(w.shape[:3], dtype=temp.dtype)
    score = torch.empty_like(membership) if needs_grad else membership.new_empty(0)
    num_saved = len(chunks) + 1 if needs_grad else 0
    saved_sums = TSSAState(*(membership.new_empty(num_saved, *shape) for shape in state_shapes(w)))
    final = TSSAState(*(torch.empty_like(x) for x in state))
    for elements in _element_slices(w):
        buffers, sums = _buffers(w[elements], 3, temp.dtype), TSSAState(*(x[elements] for x in state))
        for index, tokens in enumerate(chunks):
            chunk = elements, tokens
            if needs_grad:
                for saved, x in zip(saved_sums, sums):
                    saved[index, elements] = x
            chunk_padding, decay = None if padding is None else padding[chunk], _decay(log_decay, chunk)
            chunk_score, membership[chunk], sums = _forward_chunk(
                buffers, w[chunk], temp, bias[chunk], chunk_padding, decay, sums, normalize_scores, output[chunk]
            )
            if needs_grad:
                score[chunk] = chunk_score
        for result, saved, x in zip(final, saved_sums, sums):
            result[elements] = x
            saved[len(chunks) :, elements] = x
    return output, final, _SavedTensors(membership, score, saved_sums)


def _backward(
    inputs: _Inputs, saved: _SavedTensors, grads: list[torch.Tensor | None], needs_decay_grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, TSSAState]:
    """Gradients of w, temp, bias, `log_decay` (empty if not needed) and the state, from those of the five outputs."""
    w, temp, padding, log_decay, state, normalize_scores = inputs
    chunks = _slices(w.shape[1], CHUNK_TOKENS)
    grad_output, grad_membership = grads[:2]
    grad_output = w.new_zeros(()).expand_as(w) if grad_output is None else grad_output
    grad_w = torch.empty_like(w, memory_format=torch.contiguous_format)
    grad_score, grad_temp = torch.empty_like(saved.membership), torch.zeros_like(temp)
    grad_log_decay = torch.empty_like(saved.membership) if needs_decay_grad else temp.new_empty(0)
    grad_state = TSSAState(*(torch.zeros_like(x) if grad is None else grad.clone() for grad, x in zip(grads[2:], state)))
    for elements in _element_slices(w):
        buffers, grad_sums = _buffers(w[elements], 7, temp.dtype), TSSAState(*(x[elements] for x in grad_state))
        for index, tokens in reversed(list(enumerate(chunks))):
            chunk = elements, tokens
            grad_score[chunk], by_decay, by_temp, grad_sums = _backward_chunk(
                buffers,
                w[chunk],
                temp,
                None if padding is None else padding[chunk],
                _decay(log_decay, chunk),
                TSSAState(*(x[index, elements] for x in saved.sums)),
                saved.membership[chunk],
                saved.score[chunk],
                grad_output[chunk],
                None if grad_membership is None else grad_membership[chunk],
                grad_sums,
                normalize_scores,
                grad_w[chunk],
            )
            grad_temp += by_temp
            if by_decay is not None and needs_decay_grad:
                grad_log_decay[chunk] = by_decay
        for result, x in zip(grad_state, grad_sums):
            result[elements] = x
    return grad_w, grad_temp, grad_score.mul_(w.shape[-1]), grad_log_decay, grad_state


# Running sums within a chunk --------------------------------------------------------------------------------------------


class _Decay(NamedTuple):
    """Decay factors of a chunk, each exp of a sum of logarithms that is at most 0. H is 1 where all heads share them."""

    tokens: tuple[torch.Tensor, ...]  # BLOCK_TOKENS times (elements, blocks, H, 1), of each token
    into: tuple[torch.Tensor, torch.Tensor]  # (elements, blocks, tokens, H, 1), from a block's start, or end, to each token
    blocks: tuple[torch.Tensor, ...]  # `blocks` times (elements, H, 1), through each block
    to_blocks: tuple[torch.Tensor, torch.Tensor]  # (elements, blocks, H, 1), from the chunk's start, or its end, to each block
    chunk: torch.Tensor  # (elements, H, 1), through the chunk


def _decay(log_decay: torch.Tensor | None, chunk: tuple[slice, slice]) -> _Decay | None:
    if log_decay is None:
        return None
    logs = log_decay[chunk]
    logs = _pad_tokens(logs, _whole_blocks(logs.shape[1])).unflatten(1, (-1, BLOCK_TOKENS)).unsqueeze(-1)
    inside = logs.cumsum(2)
    blocks = inside[:, :, -1]
    through = blocks.cumsum(1)
    return _Decay(
        tokens=logs.exp().unbind(2),
        into=(inside.exp(), _sums_after(logs, 2).exp()),
        blocks=blocks.exp().unbind(1),
        to_blocks=(F.pad(through[:, :-1], (0, 0, 0, 0, 1, 0)).exp(), _sums_after(blocks, 1).exp()),
        chunk=through[:, -1].exp(),
    )


def _sums_after(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sums along `dim` of what follows each entry. Nothing is subtracted: logarithms may be -inf."""
    sums = x.flip(dim).cumsum(dim).flip(dim).narrow(dim, 1, x.shape[dim] - 1)
    return torch.cat([sums, torch.zeros_like(x.narrow(dim, 0, 1))], dim)


def _scan(
    terms: torch.Tensor, carry: torch.Tensor, decay: _Decay | None, out: torch.Tensor, reverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Running sums over the tokens of `terms` (elements, tokens, H, p), continued from `carry` (elements, H, p).

    In reverse they go from the gradients of running sums to those of their terms: they start at the last token, and a token's
    factor multiplies what leaves it. No sum includes anything of the tokens behind it, not even 0 times infinity.

    Args:
        out: where the sums are written; may be `terms`.

    Returns:
        The sum over all tokens, in the carry's dtype, and the sums from which each block continues, (elements, blocks, H, p).
    """
    order, way = (-1, 1) if reverse else (1, 0)
    blocks = out.unflatten(1, (-1, BLOCK_TOKENS))
    sums, values = blocks.unbind(2)[::order], terms.unflatten(1, (-1, BLOCK_TOKENS)).unbind(2)[::order]
    # factors on the way into the first token, from token to token, and out of the last one
    factors = [None] * (BLOCK_TOKENS + 1) if decay is None else [*decay.tokens, None][::order]
    if out is not terms:
        sums[0].copy_(values[0])
    for before, value, factor, result in zip(sums, values[1:], factors[1:], sums[1:]):
        _add(value, before, factor, result)
    ends = sums[-1] if factors[-1] is None else sums[-1] * factors[-1]

    elements, count, _, H, p = blocks.shape
    totals = blocks.new_zeros(elements, count + 1, H, p)
    chain, through = totals.unbind(1)[::order], [None] * count if decay is None else decay.blocks[::order]
    for before, value, factor, result in zip(chain, ends.unbind(1)[::order], through, chain[1:]):
        _add(value, before, factor, result)
    start = carry.to(blocks.dtype).unsqueeze(1)
    before_blocks = totals[:, 1:] if reverse else totals[:, :-1]
    if decay is None:
        before_blocks = before_blocks + start
        blocks.add_(before_blocks.unsqueeze(2))
        return carry + chain[-1], before_blocks
    before_blocks = torch.addcmul(before_blocks, start, decay.to_blocks[way])
    blocks.addcmul_(before_blocks.unsqueeze(2), decay.into[way])
    return carry * decay.chunk + chain[-1], before_blocks


def _add(term: torch.Tensor, before: torch.Tensor, factor: torch.Tensor | None, out: torch.Tensor) -> None:
    if factor is None:
        torch.add(term, before, out=out)
    else:
        torch.addcmul(term, before, factor, out=out)


def _scan_heads(
    terms: torch.Tensor, carry: torch.Tensor, decay: _Decay | None, reverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_scan` of one number per head, (elements, tokens, H), in front of what it returns the sums."""
    sums = torch.empty_like(terms, memory_format=torch.contiguous_format)
    total, before_blocks = _scan(terms.unsqueeze(-1), carry.unsqueeze(-1), decay, sums.unsqueeze(-1), reverse)
    return sums, total.squeeze(-1), before_blocks.squeeze(-1)


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def _pad_tokens(x: torch.Tensor, tokens: int) -> torch.Tensor:
    return x if x.shape[1] == tokens else F.pad(x, (0, 0, 0, tokens - x.shape[1]))


def _block_ends(x: torch.Tensor) -> torch.Tensor:
    """The last token of each block, (elements, blocks, ...)."""
    return x.unflatten(1, (-1, BLOCK_TOKENS))[:, :, -1]


def _load(x: torch.Tensor, padding: torch.Tensor | None, buffer: torch.Tensor) -> torch.Tensor:
    """A chunk in the buffer's dtype and length, 0 past its end and at padding (not multiplied by 0: padding may be NaN)."""
    if padding is None and x.shape == buffer.shape and x.dtype == buffer.dtype:
        return x
    real = buffer[:, : x.shape[1]]
    real.copy_(x)
    if padding is not None:
        real.masked_fill_(padding[..., None, None], 0)
    buffer[:, x.shape[1] :] = 0
    return buffer


def _is_clamped(sum_sq: torch.Tensor, decay: _Decay | None) -> bool:
    """Whether running sums of squares may lie below their epsilon: checked where that does not wait for a device."""
    lowest = sum_sq if decay is not None else sum_sq[:, 0]  # without decay they only grow
    return sum_sq.device.type != "cpu" or not lowest.amin().item() >= EPS_SUM_SQ  # which NaN is not


# One chunk --------------------------------------------------------------------------------------------------------------


def _forward_chunk(
    buffers: list[torch.Tensor],
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    decay: _Decay | None,
    before: TSSAState,
    normalize_scores: bool,
    output: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState]:
    """Fills the output; returns score, membership and the sums after the chunk."""
    T = w.shape[1]
    x, sq, S = (buffer[:, : _whole_blocks(T)] for buffer in buffers)
    x = _load(w, padding, x)
    torch.mul(x, x, out=sq)
    sum_sq, _ = _scan(sq, before.sum_sq, decay, out=S)
    if not normalize_scores:
        S.fill_(1)
    elif _is_clamped(S, decay):
        S.clamp_min_(EPS_SUM_SQ)
    ratio = torch.div(sq, S, out=S)
    score = ratio.sum(-1)[:, :T].add_(bias, alpha=w.shape[-1])
    membership = _membership_of(score, temp, padding)

    Pi = _pad_tokens(membership, x.shape[1])
    D, sum_membership, _ = _scan_heads(Pi, before.sum_membership, decay)
    D += EPS_MEMBERSHIP
    N = sq.mul_(Pi.unsqueeze(-1))
    sum_weighted_sq, _ = _scan(N, before.sum_weighted_sq, decay, out=N)
    numerator = torch.mul(x, (Pi * D).neg_().unsqueeze(-1), out=ratio)
    torch.div(numerator[:, :T], N.add_(D.unsqueeze(-1))[:, :T], out=output)
    return score, membership, TSSAState(sum_sq, sum_weighted_sq, sum_membership)


def _backward_chunk(
    buffers: list[torch.Tensor],
    w: torch.Tensor,
    temp: torch.Tensor,
    padding: torch.Tensor | None,
    decay: _Decay | None,
    before: TSSAState,
    membership: torch.Tensor,
    score: torch.Tensor,
    grad_output: torch.Tensor,
    grad_membership: torch.Tensor | None,
    grad_after: TSSAState,
    normalize_scores: bool,
    grad_w: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, TSSAState]:
    """Fills `grad_w`; returns the gradients of score, `log_decay`, temp and the sums before the chunk.

    With decay a_t, a running sum N of terms y is N_t = a_t N_{t-1} + y_t, and its gradient U_t = dN_t + a_{t+1} U_{t+1}, where
    dN_t is the gradient through the output of token t. The gradient of log a_t is G_t = a_t U_t N_{t-1}, and therefore
    G_t = G_{t+1} + dN_t N_t - U_t y_t: a sum, from the end of each block, of terms that the other gradients need as well.
    """
    T = w.shape[1]
    size = _whole_blocks(T)
    x, grad, sq, N, U, inverse, S = (buffer[:, :size] for buffer in buffers)
    x, grad_output = _load(w, padding, x), _load(grad_output, padding, grad)
    Pi = _pad_tokens(membership, size)
    torch.mul(x, x, out=sq)

    # output -> N, D and membership
    sum_D, _, _ = _scan_heads(Pi, before.sum_membership, decay)
    D = sum_D + EPS_MEMBERSHIP
    torch.mul(sq, Pi.unsqueeze(-1), out=N)
    _scan(N, before.sum_weighted_sq, decay, out=N)
    N_ends = _block_ends(N).clone()
    torch.add(N, D.unsqueeze(-1), out=inverse).reciprocal_()
    torch.mul(grad_output, inverse, out=grad)  # g / (N + D)
    torch.mul(grad, x, out=U)
    grad_pi = U.sum(-1).mul_(D).neg_()
    U.mul_(inverse)  # g x / (N + D)^2
    grad_D = N.mul_(U).sum(-1).mul_(Pi).neg_()
    U.mul_((Pi * D).unsqueeze(-1))  # now the gradient of N by the token's own output
    grad_sum_weighted_sq, after_N = _scan(U, grad_after.sum_weighted_sq, decay, out=U, reverse=True)
    V, grad_sum_membership, after_D = _scan_heads(grad_D, grad_after.sum_membership, decay, reverse=True)
    by_sums = torch.mul(sq, U, out=N).sum(-1).add_(V)
    grad_pi += by_sums
    if grad_membership is not None:
        grad_pi[:, :T] += grad_membership

    # membership -> score: the only step that mixes the heads
    grad_logit = grad_pi.sub_((Pi * grad_pi).sum(-1, keepdim=True)).mul_(Pi)
    grad_temp = (grad_logit[:, :T] * score).sum((0, 1))
    grad_score = grad_logit.mul_(temp)

    # score -> squares, by way of their running sums
    _scan(sq, before.sum_sq, decay, out=S)
    S_ends = _block_ends(S).clone()
    clamped = None  # where the squares are divided by a constant
    if not normalize_scores:
        clamped = S.new_ones((), dtype=torch.bool)
        S.fill_(1)
    elif _is_clamped(S, decay):
        clamped = S < EPS_SUM_SQ
        S.clamp_min_(EPS_SUM_SQ)
    S.reciprocal_()
    grad_ratio = torch.mul(S, grad_score.unsqueeze(-1), out=inverse)
    by_clamped = 0 if clamped is None or decay is None else (sq * grad_ratio).masked_fill_(~clamped, 0).sum(-1)
    loss = S.mul_(sq).mul_(grad_ratio)  # minus the gradient of S
    if clamped is not None:
        loss.masked_fill_(clamped, 0)
    grad_sum_sq, after_S = _scan(loss, grad_after.sum_sq.neg(), decay, out=loss, reverse=True)
    grad_sq = grad_ratio.sub_(loss)

    grad_log_decay = None
    if decay is not None:
        # dN N and dD D cancel but for the epsilon in D, and so do the terms of S but where it is clamped
        terms = by_sums.mul_(Pi).add_(grad_D, alpha=EPS_MEMBERSHIP).sub_(by_clamped)
        terms = terms.add_(torch.mul(sq, grad_sq, out=loss).sum(-1)).neg_().unflatten(1, (-1, BLOCK_TOKENS))
        after = (N_ends * after_N).sub_(S_ends * after_S).sum(-1).addcmul_(_block_ends(sum_D), after_D)
        terms[:, :, -1] += after  # G of the token after each block
        grad_log_decay = terms.flip(2).cumsum(2).flip(2).flatten(1, 2)[:, :T]

    grad_sq.addcmul_(U, Pi.unsqueeze(-1))
    grad_x = grad.mul_((Pi * D).neg_().unsqueeze(-1)).addcmul_(grad_sq, x, value=2)[:, :T]
    grad_w.copy_(grad_x if padding is None else grad_x.masked_fill_(padding[..., None, None], 0))
    grad_before = TSSAState(grad_sum_sq.neg(), grad_sum_weighted_sq, grad_sum_membership)
    return grad_score[:, :T], grad_log_decay, grad_temp, grad_before


# Custom operators. They cannot return None: what does not exist is an empty tensor. -------------------------------------

_T = torch.Tensor


@custom_operator("causal_forward")
def _forward_operator(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    sum_sq: torch.Tensor,
    sum_weighted_sq: torch.Tensor,
    sum_membership: torch.Tensor,
    needs_grad: bool,
    chunk_tokens: int,  # shapes depend on it, and compilers store what they compiled on disk
    normalize_scores: bool,
) -> tuple[_T, _T, _T, _T, _T, _T, _T, _T, _T]:
    """Output, membership, the three sums after the last token, score, and the sums before each chunk."""
    state = TSSAState(sum_sq, sum_weighted_sq, sum_membership)
    output, final, saved = _forward(_Inputs(w, temp, padding, log_decay, state, normalize_scores), bias, needs_grad)
    return output, saved.membership, *final, saved.score, *saved.sums


@_forward_operator.register_fake
def _(w, temp, bias, padding, log_decay, sum_sq, sum_weighted_sq, sum_membership, needs_grad, chunk_tokens, _):
    membership = w.new_empty(w.shape[:3], dtype=temp.dtype)
    chunks = (w.shape[1] + chunk_tokens - 1) // chunk_tokens + 1 if needs_grad else 0
    final = (x.new_empty(x.shape) for x in (sum_sq, sum_weighted_sq, sum_membership))
    score = torch.empty_like(membership) if needs_grad else membership.new_empty(0)
    return w.new_empty(w.shape), membership, *final, score, *(temp.new_empty(chunks, *shape) for shape in state_shapes(w))


@custom_operator("causal_backward")
def _backward_operator(
    grad_output: torch.Tensor | None,
    grad_membership: torch.Tensor | None,
    grad_sum_sq: torch.Tensor | None,
    grad_sum_weighted_sq: torch.Tensor | None,
    grad_sum_membership: torch.Tensor | None,
    w: torch.Tensor,
    temp: torch.Tensor,
    padding: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    state: list[torch.Tensor],
    saved: list[torch.Tensor],
    needs_decay_grad: bool,
    normalize_scores: bool,
) -> tuple[_T, _T, _T, _T, _T, _T, _T]:
    """Gradients of w, temp, bias, `log_decay` (empty if not needed) and the three sums before the first token."""
    inputs = _Inputs(w, temp, padding, log_decay, TSSAState(*state), normalize_scores)
    membership, score, *sums = saved
    grads = [grad_output, grad_membership, grad_sum_sq, grad_sum_weighted_sq, grad_sum_membership]
    saved_tensors = _SavedTensors(membership, score, TSSAState(*sums))
    grad_w, grad_temp, grad_bias, grad_log_decay, grad_state = _backward(inputs, saved_tensors, grads, needs_decay_grad)
    return grad_w, grad_temp, grad_bias, grad_log_decay, *grad_state


@_backward_operator.register_fake
def _(*args):
    w, temp, _, _, state, saved, needs_decay_grad, _ = args[5:]
    membership = saved[0]
    grad_log_decay = temp.new_empty(membership.shape if needs_decay_grad else 0)
    grad_state = (x.new_empty(x.shape) for x in state)
    return w.new_empty(w.shape), temp.new_empty(temp.shape), temp.new_empty(membership.shape), grad_log_decay, *grad_state


def _setup_context(ctx, inputs, output):
    w, temp, _bias, *others = inputs[:8]
    ctx.save_for_backward(w, temp, *others, output[1], *output[5:])
    ctx.mark_non_differentiable(*output[5:])
    ctx.set_materialize_grads(False)
    ctx.normalize_scores = inputs[10]


def _differentiate(ctx, *grads):
    tensors = ctx.saved_tensors  # once: checkpointing recomputes them at each access
    inputs, state, saved = tensors[:4], tensors[4:7], tensors[7:]
    needs_decay_grad = ctx.needs_input_grad[4]
    by_input = _backward_operator(*grads[:5], *inputs, state, saved, needs_decay_grad, ctx.normalize_scores)
    grad_w, grad_temp, grad_bias, grad_log_decay, *grad_state = by_input
    by_decay = grad_log_decay if needs_decay_grad else None
    return grad_w, grad_temp, grad_bias, None, by_decay, *grad_state, None, None, None


_forward_operator.register_autograd(_differentiate, setup_context=_setup_context)
