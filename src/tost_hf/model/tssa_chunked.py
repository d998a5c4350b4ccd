# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The CPU backend of causal TSSA: one pass over chunks of tokens that fit the cache, with the backward in closed form.

tssa_reference.py defines what is computed and the names S, N, D and Pi. The forward saves the input, the scores, the
memberships and the sums before each chunk; the backward recomputes everything else, from the last chunk to the first. Both
passes are custom operators, which compilers see as one node each.

A chunk is divided into blocks. Running sums are computed token by token within all blocks at once, then over the blocks, and
added. With decay, a sum is multiplied by a token's decay before the token is added.

`grad_x` is the gradient with respect to x. The output is computed as -w Pi D / (N + D), where D includes the epsilon.
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
CHUNK_NUMBERS = 2**20  # maximum size of a tensor of one chunk of several batch elements, so that all of them fit the cache


def causal(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    state: TSSAState,
    log_decay: torch.Tensor | None,
    normalize_scores: bool,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState]:
    """As `tssa_reference.causal`, but `bias` (B, T, H) and `state` are required. Differentiable once."""
    inputs = w, temp, bias, padding, log_decay, *state
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    output, membership, *sums = _forward_operator(*inputs, needs_grad, CHUNK_TOKENS, normalize_scores)[:5]
    return output, membership, TSSAState(*sums)


class _Inputs(NamedTuple):
    """The inputs that forward and backward share."""

    w: torch.Tensor  # (B, T, H, p)
    temp: torch.Tensor  # (H,)
    padding: torch.Tensor | None  # (B, T)
    log_decay: torch.Tensor | None  # (B, T, H) or (B, T, 1)
    state: TSSAState
    normalize_scores: bool


class _SavedTensors(NamedTuple):
    """What the forward saves for the backward; without gradients, `score` and `sums` are empty."""

    membership: torch.Tensor  # (B, T, H)
    score: torch.Tensor  # (B, T, H)
    # before each chunk and after the last, (chunks + 1, B, ...); chunks alone could be 1, on which compilers specialise
    sums: TSSAState


# Batch elements and chunks ----------------------------------------------------------------------------------------------


def _softmax_over_heads(score: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """`tssa_reference.softmax_over_heads` over full vectors: on CPUs, torch's softmax of 12 heads takes 7 times that of 16."""
    H = score.shape[-1]
    logits = score.new_full((*score.shape[:-1], -(-H // VECTOR_HEADS) * VECTOR_HEADS), float("-inf"))
    torch.mul(score, temp, out=logits[..., :H])
    membership = logits.softmax(-1)[..., :H]
    return membership if padding is None else membership.masked_fill_(padding.unsqueeze(-1), 0)


def _split(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _split_batch(w: torch.Tensor) -> list[slice]:
    """Slices of batch elements that are computed together."""
    return _split(len(w), max(1, CHUNK_NUMBERS // (CHUNK_TOKENS * w.shape[2] * w.shape[3])))


def _allocate_buffers(w: torch.Tensor, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Buffers for a chunk of the tokens w, reused for all chunks: to allocate new ones takes as long as to fill them."""
    elements, T, H, p = w.shape
    return [w.new_empty(elements, _round_up_to_blocks(min(T, CHUNK_TOKENS)), H, p, dtype=dtype) for _ in range(count)]


def _forward(inputs: _Inputs, bias: torch.Tensor, needs_grad: bool) -> tuple[torch.Tensor, TSSAState, _SavedTensors]:
    """Output, state after the last token, and tensors to save for the backward."""
    w, temp, padding, log_decay, state, normalize_scores = inputs
    chunks = _split(w.shape[1], CHUNK_TOKENS)
    output = torch.empty_like(w, memory_format=torch.contiguous_format)
    membership = w.new_empty(w.shape[:3], dtype=temp.dtype)
    score = torch.empty_like(membership) if needs_grad else membership.new_empty(0)
    num_saved = len(chunks) + 1 if needs_grad else 0
    saved_sums = TSSAState(*(membership.new_empty(num_saved, *shape) for shape in state_shapes(w)))
    final_state = TSSAState(*(torch.empty_like(x) for x in state))
    for elements in _split_batch(w):
        buffers, sums = _allocate_buffers(w[elements], 3, temp.dtype), TSSAState(*(x[elements] for x in state))
        for chunk_index, tokens in enumerate(chunks):
            chunk = elements, tokens
            if needs_grad:
                for saved_sum, x in zip(saved_sums, sums):
                    saved_sum[chunk_index, elements] = x
            chunk_padding, decay = None if padding is None else padding[chunk], _compute_chunk_decay(log_decay, chunk)
            chunk_score, membership[chunk], sums = _forward_chunk(
                buffers, w[chunk], temp, bias[chunk], chunk_padding, decay, sums, normalize_scores, output[chunk]
            )
            if needs_grad:
                score[chunk] = chunk_score
        for final_sum, saved_sum, x in zip(final_state, saved_sums, sums):
            final_sum[elements] = x
            saved_sum[len(chunks) :, elements] = x
    return output, final_state, _SavedTensors(membership, score, saved_sums)


def _backward(
    inputs: _Inputs, saved: _SavedTensors, grads: list[torch.Tensor | None], needs_decay_grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, TSSAState]:
    """Gradients of w, temp, bias, `log_decay` (empty if not needed) and the state, from those of the five outputs."""
    w, temp, padding, log_decay, state, normalize_scores = inputs
    chunks = _split(w.shape[1], CHUNK_TOKENS)
    grad_output, grad_membership = grads[:2]
    grad_output = w.new_zeros(()).expand_as(w) if grad_output is None else grad_output
    grad_w = torch.empty_like(w, memory_format=torch.contiguous_format)
    grad_score, grad_temp = torch.empty_like(saved.membership), torch.zeros_like(temp)
    grad_log_decay = torch.empty_like(saved.membership) if needs_decay_grad else temp.new_empty(0)
    grad_state = TSSAState(*(torch.zeros_like(x) if grad is None else grad.clone() for grad, x in zip(grads[2:], state)))
    for elements in _split_batch(w):
        buffers, grad_sums = _allocate_buffers(w[elements], 7, temp.dtype), TSSAState(*(x[elements] for x in grad_state))
        for chunk_index, tokens in reversed(list(enumerate(chunks))):
            chunk = elements, tokens
            grad_score[chunk], chunk_grad_log_decay, chunk_grad_temp, grad_sums = _backward_chunk(
                buffers,
                w[chunk],
                temp,
                None if padding is None else padding[chunk],
                _compute_chunk_decay(log_decay, chunk),
                TSSAState(*(x[chunk_index, elements] for x in saved.sums)),
                saved.membership[chunk],
                saved.score[chunk],
                grad_output[chunk],
                None if grad_membership is None else grad_membership[chunk],
                grad_sums,
                normalize_scores,
                grad_w[chunk],
            )
            grad_temp += chunk_grad_temp
            if chunk_grad_log_decay is not None and needs_decay_grad:
                grad_log_decay[chunk] = chunk_grad_log_decay
        for grad_initial_sum, x in zip(grad_state, grad_sums):
            grad_initial_sum[elements] = x
    return grad_w, grad_temp, grad_score.mul_(w.shape[-1]), grad_log_decay, grad_state


# Running sums within a chunk --------------------------------------------------------------------------------------------


class _ChunkDecay(NamedTuple):
    """Decays of a chunk, each the exp of a sum of log decays. H is 1 if all heads have the same decay."""

    per_token: tuple[torch.Tensor, ...]  # BLOCK_TOKENS times (elements, blocks, H, 1)
    to_tokens: tuple[torch.Tensor, torch.Tensor]  # (elements, blocks, tokens, H, 1), from a block's start and from its end
    per_block: tuple[torch.Tensor, ...]  # one (elements, H, 1) per block
    to_blocks: tuple[torch.Tensor, torch.Tensor]  # (elements, blocks, H, 1), from the chunk's start and from its end
    chunk: torch.Tensor  # (elements, H, 1)


def _compute_chunk_decay(log_decay: torch.Tensor | None, chunk: tuple[slice, slice]) -> _ChunkDecay | None:
    if log_decay is None:
        return None
    logs = log_decay[chunk]
    logs = _pad_tokens(logs, _round_up_to_blocks(logs.shape[1])).unflatten(1, (-1, BLOCK_TOKENS)).unsqueeze(-1)
    log_to_tokens = logs.cumsum(2)
    log_per_block = log_to_tokens[:, :, -1]
    log_through_blocks = log_per_block.cumsum(1)
    return _ChunkDecay(
        per_token=logs.exp().unbind(2),
        to_tokens=(log_to_tokens.exp(), _exclusive_suffix_sum(logs, 2).exp()),
        per_block=log_per_block.exp().unbind(1),
        to_blocks=(F.pad(log_through_blocks[:, :-1], (0, 0, 0, 0, 1, 0)).exp(), _exclusive_suffix_sum(log_per_block, 1).exp()),
        chunk=log_through_blocks[:, -1].exp(),
    )


def _exclusive_suffix_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sums along `dim` of the entries after each one. Computed without differences, as log decays may be -inf."""
    sums = x.flip(dim).cumsum(dim).flip(dim).narrow(dim, 1, x.shape[dim] - 1)
    return torch.cat([sums, torch.zeros_like(x.narrow(dim, 0, 1))], dim)


def _scan(
    terms: torch.Tensor, carry: torch.Tensor, decay: _ChunkDecay | None, out: torch.Tensor, reverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Running sums over the tokens of `terms` (elements, tokens, H, p), continued from `carry` (elements, H, p).

    With `reverse`, which computes the gradients of the terms from those of their running sums, the sums start at the last
    token, and a token's decay multiplies the sum after the token is added. Later tokens (earlier ones in reverse) are not
    even multiplied by 0, so that their infinities and NaN do not propagate.

    Args:
        out: where the sums are written; may be `terms`.

    Returns:
        The sum over all tokens, in the carry's dtype, and the carry into each block, (elements, blocks, H, p).
    """
    order, direction = (-1, 1) if reverse else (1, 0)
    blocks = out.unflatten(1, (-1, BLOCK_TOKENS))
    sums, token_terms = blocks.unbind(2)[::order], terms.unflatten(1, (-1, BLOCK_TOKENS)).unbind(2)[::order]
    # decays before the first term, between terms, and after the last one
    token_decays = [None] * (BLOCK_TOKENS + 1) if decay is None else [*decay.per_token, None][::order]
    if out is not terms:
        sums[0].copy_(token_terms[0])
    for previous_sum, term, a, next_sum in zip(sums, token_terms[1:], token_decays[1:], sums[1:]):
        _add_decayed(term, previous_sum, a, next_sum)
    block_totals = sums[-1] if token_decays[-1] is None else sums[-1] * token_decays[-1]

    elements, num_blocks, _, H, p = blocks.shape
    block_sums = blocks.new_zeros(elements, num_blocks + 1, H, p)
    ordered_sums = block_sums.unbind(1)[::order]
    block_decays = [None] * num_blocks if decay is None else decay.per_block[::order]
    for previous_sum, term, a, next_sum in zip(ordered_sums, block_totals.unbind(1)[::order], block_decays, ordered_sums[1:]):
        _add_decayed(term, previous_sum, a, next_sum)
    initial_sum = carry.to(blocks.dtype).unsqueeze(1)
    block_carries = block_sums[:, 1:] if reverse else block_sums[:, :-1]
    if decay is None:
        block_carries = block_carries + initial_sum
        blocks.add_(block_carries.unsqueeze(2))
        return carry + ordered_sums[-1], block_carries
    block_carries = torch.addcmul(block_carries, initial_sum, decay.to_blocks[direction])
    blocks.addcmul_(block_carries.unsqueeze(2), decay.to_tokens[direction])
    return carry * decay.chunk + ordered_sums[-1], block_carries


def _add_decayed(term: torch.Tensor, previous_sum: torch.Tensor, decay: torch.Tensor | None, out: torch.Tensor) -> None:
    if decay is None:
        torch.add(term, previous_sum, out=out)
    else:
        torch.addcmul(term, previous_sum, decay, out=out)


def _scan_heads(
    terms: torch.Tensor, carry: torch.Tensor, decay: _ChunkDecay | None, reverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_scan` of terms (elements, tokens, H). Returns the running sums, their total and the carry into each block."""
    sums = torch.empty_like(terms, memory_format=torch.contiguous_format)
    total, block_carries = _scan(terms.unsqueeze(-1), carry.unsqueeze(-1), decay, sums.unsqueeze(-1), reverse)
    return sums, total.squeeze(-1), block_carries.squeeze(-1)


def _round_up_to_blocks(length: int) -> int:
    return -(-length // BLOCK_TOKENS) * BLOCK_TOKENS


def _pad_tokens(x: torch.Tensor, length: int) -> torch.Tensor:
    return x if x.shape[1] == length else F.pad(x, (0, 0, 0, length - x.shape[1]))


def _select_block_ends(x: torch.Tensor) -> torch.Tensor:
    """The values at the last token of each block, (elements, blocks, ...)."""
    return x.unflatten(1, (-1, BLOCK_TOKENS))[:, :, -1]


def _load_chunk(x: torch.Tensor, padding: torch.Tensor | None, buffer: torch.Tensor) -> torch.Tensor:
    """A chunk in the dtype and length of the buffer: 0 past its end and at padding, not multiplied by 0, as padding may be
    NaN."""
    if padding is None and x.shape == buffer.shape and x.dtype == buffer.dtype:
        return x
    tokens = buffer[:, : x.shape[1]]
    tokens.copy_(x)
    if padding is not None:
        tokens.masked_fill_(padding[..., None, None], 0)
    buffer[:, x.shape[1] :] = 0
    return buffer


def _is_clamped(sum_sq: torch.Tensor, decay: _ChunkDecay | None) -> bool:
    """Whether running sums of squares may be below their epsilon; always true on a GPU, where the check would synchronise."""
    smallest_sums = sum_sq if decay is not None else sum_sq[:, 0]  # without decay, they only grow
    return sum_sq.device.type != "cpu" or not smallest_sums.amin().item() >= EPS_SUM_SQ  # also true if it is NaN


# One chunk --------------------------------------------------------------------------------------------------------------


def _forward_chunk(
    buffers: list[torch.Tensor],
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    decay: _ChunkDecay | None,
    initial_state: TSSAState,
    normalize_scores: bool,
    output: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState]:
    """Writes `output`; returns score, membership and the sums after the chunk."""
    T = w.shape[1]
    x, sq, S = (buffer[:, : _round_up_to_blocks(T)] for buffer in buffers)
    x = _load_chunk(w, padding, x)
    torch.mul(x, x, out=sq)
    sum_sq, _ = _scan(sq, initial_state.sum_sq, decay, out=S)
    if not normalize_scores:
        S.fill_(1)
    elif _is_clamped(S, decay):
        S.clamp_min_(EPS_SUM_SQ)
    ratio = torch.div(sq, S, out=S)
    score = ratio.sum(-1)[:, :T].add_(bias, alpha=w.shape[-1])
    membership = _softmax_over_heads(score, temp, padding)

    Pi = _pad_tokens(membership, x.shape[1])
    D, sum_membership, _ = _scan_heads(Pi, initial_state.sum_membership, decay)
    D += EPS_MEMBERSHIP
    N = sq.mul_(Pi.unsqueeze(-1))
    sum_weighted_sq, _ = _scan(N, initial_state.sum_weighted_sq, decay, out=N)
    numerator = torch.mul(x, (Pi * D).neg_().unsqueeze(-1), out=ratio)
    torch.div(numerator[:, :T], N.add_(D.unsqueeze(-1))[:, :T], out=output)
    return score, membership, TSSAState(sum_sq, sum_weighted_sq, sum_membership)


def _backward_chunk(
    buffers: list[torch.Tensor],
    w: torch.Tensor,
    temp: torch.Tensor,
    padding: torch.Tensor | None,
    decay: _ChunkDecay | None,
    initial_state: TSSAState,
    membership: torch.Tensor,
    score: torch.Tensor,
    grad_output: torch.Tensor,
    grad_membership: torch.Tensor | None,
    grad_final_state: TSSAState,
    normalize_scores: bool,
    grad_w: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, TSSAState]:
    """Writes `grad_w`; returns the gradients of score, `log_decay`, temp and the sums before the chunk.

    With decay a_t, a running sum N of terms y is N_t = a_t N_{t-1} + y_t. Its gradient is U_t = dN_t + a_{t+1} U_{t+1}, where
    dN_t is the gradient through the output of token t. The gradient of log a_t is G_t = a_t U_t N_{t-1}, and therefore
    G_t = G_{t+1} + dN_t N_t - U_t y_t: a suffix sum within each block, of terms that the other gradients need as well.
    """
    T = w.shape[1]
    padded_length = _round_up_to_blocks(T)
    x, grad, sq, N, U, inverse, S = (buffer[:, :padded_length] for buffer in buffers)
    x, grad_output = _load_chunk(w, padding, x), _load_chunk(grad_output, padding, grad)
    Pi = _pad_tokens(membership, padded_length)
    torch.mul(x, x, out=sq)

    # output -> N, D and membership
    sum_D, _, _ = _scan_heads(Pi, initial_state.sum_membership, decay)
    D = sum_D + EPS_MEMBERSHIP
    torch.mul(sq, Pi.unsqueeze(-1), out=N)
    _scan(N, initial_state.sum_weighted_sq, decay, out=N)
    N_ends = _select_block_ends(N).clone()
    torch.add(N, D.unsqueeze(-1), out=inverse).reciprocal_()
    torch.mul(grad_output, inverse, out=grad)  # g / (N + D)
    torch.mul(grad, x, out=U)
    grad_pi = U.sum(-1).mul_(D).neg_()
    U.mul_(inverse)  # g x / (N + D)^2
    grad_D = N.mul_(U).sum(-1).mul_(Pi).neg_()
    U.mul_((Pi * D).unsqueeze(-1))  # dN: the gradient of N through the output of the same token
    grad_sum_weighted_sq, U_carries = _scan(U, grad_final_state.sum_weighted_sq, decay, out=U, reverse=True)
    V, grad_sum_membership, V_carries = _scan_heads(grad_D, grad_final_state.sum_membership, decay, reverse=True)
    grad_pi_sums = torch.mul(sq, U, out=N).sum(-1).add_(V)
    grad_pi += grad_pi_sums
    if grad_membership is not None:
        grad_pi[:, :T] += grad_membership

    # membership -> score, the only step across heads
    grad_logit = grad_pi.sub_((Pi * grad_pi).sum(-1, keepdim=True)).mul_(Pi)
    grad_temp = (grad_logit[:, :T] * score).sum((0, 1))
    grad_score = grad_logit.mul_(temp)

    # score -> squares and their running sums
    _scan(sq, initial_state.sum_sq, decay, out=S)
    S_ends = _select_block_ends(S).clone()
    clamped = None  # where the squares are divided by a constant: S has no gradient
    if not normalize_scores:
        clamped = S.new_ones((), dtype=torch.bool)
        S.fill_(1)
    elif _is_clamped(S, decay):
        clamped = S < EPS_SUM_SQ
        S.clamp_min_(EPS_SUM_SQ)
    S.reciprocal_()
    grad_ratio = torch.mul(S, grad_score.unsqueeze(-1), out=inverse)
    clamped_terms = 0 if clamped is None or decay is None else (sq * grad_ratio).masked_fill_(~clamped, 0).sum(-1)
    neg_grad_S = S.mul_(sq).mul_(grad_ratio)  # minus the gradient of S
    if clamped is not None:
        neg_grad_S.masked_fill_(clamped, 0)
    grad_sum_sq, neg_grad_S_carries = _scan(neg_grad_S, grad_final_state.sum_sq.neg(), decay, out=neg_grad_S, reverse=True)
    grad_sq = grad_ratio.sub_(neg_grad_S)

    grad_log_decay = None
    if decay is not None:
        # dN N + dD D is 0 but for the epsilon in D; dS S is minus grad_ratio times sq except where S is clamped
        terms = grad_pi_sums.mul_(Pi).add_(grad_D, alpha=EPS_MEMBERSHIP).sub_(clamped_terms)
        terms = terms.add_(torch.mul(sq, grad_sq, out=neg_grad_S).sum(-1)).neg_().unflatten(1, (-1, BLOCK_TOKENS))
        G_carries = (
            (N_ends * U_carries).sub_(S_ends * neg_grad_S_carries).sum(-1).addcmul_(_select_block_ends(sum_D), V_carries)
        )
        terms[:, :, -1] += G_carries  # G of the token after each block
        grad_log_decay = terms.flip(2).cumsum(2).flip(2).flatten(1, 2)[:, :T]

    grad_sq.addcmul_(U, Pi.unsqueeze(-1))
    grad_x = grad.mul_((Pi * D).neg_().unsqueeze(-1)).addcmul_(grad_sq, x, value=2)[:, :T]
    grad_w.copy_(grad_x if padding is None else grad_x.masked_fill_(padding[..., None, None], 0))
    grad_initial_state = TSSAState(grad_sum_sq.neg(), grad_sum_weighted_sq, grad_sum_membership)
    return grad_score[:, :T], grad_log_decay, grad_temp, grad_initial_state


# Custom operators. They cannot return None: outputs that are not needed are empty tensors. -----------------------------

_Tensor = torch.Tensor


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
    chunk_tokens: int,  # an argument since the shapes of outputs depend on it and compilers cache programs on disk
    normalize_scores: bool,
) -> tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor]:
    """Output, membership, the three sums after the last token, score, and the sums before each chunk."""
    state = TSSAState(sum_sq, sum_weighted_sq, sum_membership)
    output, final_state, saved = _forward(_Inputs(w, temp, padding, log_decay, state, normalize_scores), bias, needs_grad)
    return output, saved.membership, *final_state, saved.score, *saved.sums


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
) -> tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor]:
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
    w, temp, _bias, *other_inputs = inputs[:8]
    ctx.save_for_backward(w, temp, *other_inputs, output[1], *output[5:])
    ctx.mark_non_differentiable(*output[5:])
    ctx.set_materialize_grads(False)
    ctx.normalize_scores = inputs[10]


def _differentiate(ctx, *grads):
    saved_tensors = ctx.saved_tensors  # accessed once, as activation checkpointing recomputes them at each access
    inputs, state, saved = saved_tensors[:4], saved_tensors[4:7], saved_tensors[7:]
    needs_decay_grad = ctx.needs_input_grad[4]
    input_grads = _backward_operator(*grads[:5], *inputs, state, saved, needs_decay_grad, ctx.normalize_scores)
    grad_w, grad_temp, grad_bias, grad_log_decay, *grad_state = input_grads
    decay_grad = grad_log_decay if needs_decay_grad else None
    return grad_w, grad_temp, grad_bias, None, decay_grad, *grad_state, None, None, None


_forward_operator.register_autograd(_differentiate, setup_context=_setup_context)
