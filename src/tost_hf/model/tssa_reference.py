# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Token Statistics Self-Attention: the reference implementation of every form, and of the short convolution, in plain PyTorch.
Read this file first.

Each head is one subspace. A token's *membership* Pi is a softmax over the heads. A head outputs the token's projection w,
scaled down where the second moment of the head's tokens is large (arXiv 2412.17810, section 3; the causal form follows the
authors' code). With s = w^2, for each head and channel i:

    causal, token t                                          bidirectional
    S_ti = sum_{j <= t} s_ji                                 S_i = sum_j s_ji
    score_t = sum_i s_ti / max(S_ti, 1e-12) + p bias_t       score_t = sum_i s_ti / max(S_i, 1e-24)
    Pi_t = softmax over heads of temp score_t                the same
    N_ti = sum_{j <= t} Pi_j s_ji                            N_i = sum_j Pi_j s_ji
    D_t = sum_{j <= t} Pi_j                                  D = sum_j Pi_j
    output_ti = -Pi_t w_ti / (1 + N_ti / (D_t + 1e-8))       the same with N_i and D

With decay, the causal form multiplies each head's state by a_t in (0, 1] before it adds token t:

    S_t = a_t S_{t-1} + s_t,    N_t = a_t N_{t-1} + Pi_t s_t,    D_t = a_t D_{t-1} + Pi_t

All else is as above. Packed sequences have a decay of 0 at their first tokens. No code divides by a product of decays, which
may be 0.

Tests and benchmarks compare with these functions. The bidirectional form, single tokens, torch.export and compilers for
devices other than the CPU run them, since no step depends on a tensor's values. The other backends are faster.

Common arguments: w (B, T, H, p), projected tokens of any dtype; `temp` (H,) in the compute dtype; `padding` (B, T), true at
padding; `log_decay` (B, T, H) or (B, T, 1), log a_t in the compute dtype, 0 at padding.
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.autograd import forward_ad
from torch.nn import functional as F


BLOCK_TOKENS = 16  # tokens per block of a decayed sum, a power of two
MAX_SCAN_STEPS = 24  # doubling steps over the blocks in programs compiled for any length

EPS_SUM_SQ = 1e-12  # minimum of a causal running sum of squares
EPS_NORM = 1e-12  # minimum of a channel's norm over the tokens (bidirectional)
EPS_MEMBERSHIP = 1e-8  # avoids 0 / 0 in the moment before the first real token


class TSSAState(NamedTuple):
    """The causal state of one layer: 2 * H * p + H numbers per sequence, independent of the sequence length.

    Attributes:
        sum_sq: sum_i w_i^2, (B, H, p), float32 (float64 for float64 tokens).
        sum_weighted_sq: sum_i Pi_i * w_i^2, (B, H, p), float64.
        sum_membership: sum_i Pi_i, (B, H), float64.

    The two sums whose quotient scales the output are float64: a float32 sum of a million terms, added one by one, has an error
    of 1e-3. `sum_sq` may have that error, since it hardly changes the score of a late token.

    Example:

    ```python
    >>> state = tssa(torch.randn(2, 100, 4, 16), temp=torch.ones(4)).final_state
    >>> state.sum_weighted_sq.shape, state.sum_weighted_sq.dtype
    (torch.Size([2, 4, 16]), torch.float64)
    ```
    """

    sum_sq: torch.Tensor
    sum_weighted_sq: torch.Tensor
    sum_membership: torch.Tensor


def is_traced() -> bool:
    """Whether values cannot be read: a compiler traces, or a transform of torch.func is active."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Whether forward-mode automatic differentiation is under way and one of the tensors has a tangent."""
    # private, and a shortcut only: outside of `dual_level` the level is -1, and `unpack_dual` takes ten times as long
    if torch.compiler.is_compiling() or getattr(forward_ad, "_current_level", 0) < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def differentiate_reference(
    reference: Callable[..., Iterable[torch.Tensor]],
    inputs: Sequence[torch.Tensor | None],
    grads: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """The gradients of `inputs` by autograd, with a graph: the backward of kernels where second derivatives are needed.

    Args:
        reference: a function of `inputs` that computes the kernels' outputs.
        grads: the outputs' gradients; None for 0.
    """
    with torch.enable_grad():
        # views, as these are partial derivatives: an input may have been computed from another
        inputs = [x if x is None or not x.requires_grad else x.view_as(x) for x in inputs]
        pairs = [(x, grad) for x, grad in zip(reference(*inputs), grads) if grad is not None and x.requires_grad]
        outputs, output_grads = zip(*pairs)
        variables = [x for x in inputs if x is not None and x.requires_grad]
        results = iter(torch.autograd.grad(outputs, variables, output_grads, create_graph=True, allow_unused=True))
    return [next(results) if x is not None and x.requires_grad else None for x in inputs]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics of `dtype` inputs are computed: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def state_shapes(w: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Shapes of a state's three tensors, for tokens w (B, T, H, p)."""
    B, _, H, p = w.shape
    return (B, H, p), (B, H, p), (B, H)


def state_dtypes(w: torch.Tensor) -> tuple[torch.dtype, ...]:
    """Dtypes of a state's three tensors, for tokens like `w`."""
    sum_dtype = torch.float32 if w.device.type == "mps" else torch.float64  # MPS has no float64
    return compute_dtype(w.dtype), sum_dtype, sum_dtype


def zero_state(w: torch.Tensor) -> TSSAState:
    """The state before the first token, for tokens w (B, T, H, p)."""
    return TSSAState(*(w.new_zeros(shape, dtype=dtype) for shape, dtype in zip(state_shapes(w), state_dtypes(w))))


def as_state(sums: Iterable[torch.Tensor], w: torch.Tensor) -> TSSAState:
    """Casts three tensors to the dtypes of a state for tokens like `w`; returns a state that has them itself."""
    sums, dtypes = TSSAState(*sums) if type(sums) is not TSSAState else sums, state_dtypes(w)
    return sums if (*(x.dtype for x in sums),) == dtypes else TSSAState(*(x.to(dtype) for x, dtype in zip(sums, dtypes)))


def softmax_over_heads(score: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """The membership Pi: the softmax of `temp` times the score (..., H) over the heads; 0 where `padding` (...) is true."""
    membership = (score * temp).softmax(-1)
    return membership if padding is None else membership.masked_fill(padding.unsqueeze(-1), 0)


def select_bias(bias: torch.Tensor | None, positions: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The score bias of the tokens in `dtype`: `bias` itself or, with `positions`, its entries at these."""
    if bias is None:
        return None
    if positions is not None and positions.ndim == 2 and positions.stride(0) == 0:
        positions = positions[:1]  # shared by the batch: one look-up and one gradient
    # F.embedding, as the gradient of indexing is summed in no fixed order
    return (bias if positions is None else F.embedding(positions, bias)).to(dtype)


def mask_padding(w: torch.Tensor, padding: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Tokens (..., H, p) in `dtype`, 0 where `padding` (...) is true; not multiplied by 0, as padding may be NaN."""
    return w.to(dtype) if padding is None else w.to(dtype).masked_fill(padding[..., None, None], 0)


def unsqueeze_like(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Appends dimensions of size 1 to x, up to the number of dimensions of `like`."""
    return x.view(*x.shape, *[1] * (like.ndim - x.ndim))


def apply_decay(total: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """`total` (..., H, n) or (..., H) times `decay` (..., H). A decay of 0 resets it: infinities and NaN do not remain."""
    decay = unsqueeze_like(decay, total)
    return total.masked_fill(decay == 0, 0) * decay


def sequence_starts(seq_idx: torch.Tensor) -> torch.Tensor:
    """Whether a packed sequence starts at each token, (B, T), from the sequence numbers (B, T)."""
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)


def reset_at_starts(log_decay: torch.Tensor | None, seq_idx: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sets `log_decay` to -inf where packed sequences start, but for the first, which continues from the initial state."""
    starts = F.pad(sequence_starts(seq_idx)[:, 1:], (1, 0)).unsqueeze(-1)
    log_decay = torch.zeros_like(starts, dtype=dtype) if log_decay is None else log_decay
    return log_decay.masked_fill(starts, float("-inf"))


def _operator_namespace(package: str) -> str:
    # Fixed for the installed package, as compiled and exported programs contain it. Remote code, which may be loaded beside
    # the package, needs a different namespace.
    return "tost_hf" if package == "tost_hf.model" else re.sub(r"\W", "_", package or __name__, flags=re.ASCII)


OPERATOR_NAMESPACE = _operator_namespace(__name__.rpartition(".")[0])


def custom_operator(name: str, schema: str | None = None, mutates_args: tuple[str, ...] = ()) -> Callable:
    """A decorator that registers a function as a `torch.library` operator, which is opaque to compilers.

    `schema` lists arguments and results; by default it follows from the function's types.
    """
    return torch.library.custom_op(f"{OPERATOR_NAMESPACE}::{name}", mutates_args=mutates_args, schema=schema)


def tssa_reference(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    log_decay: torch.Tensor | None = None,
    state: TSSAState | None = None,
    is_causal: bool = True,
    seq_idx: torch.Tensor | None = None,
    softmax: Callable[..., torch.Tensor] = softmax_over_heads,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState | None]:
    """TSSA in either form, as `tssa.tssa` without its checks; `mask` is bool, and only the bidirectional form reads `seq_idx`.

    Returns:
        Output (B, T, H, p) in the dtype of `w`, membership (B, T, H), and the state after the last token (None in the
        bidirectional form).
    """
    padding = None if mask is None else ~mask
    if is_causal:
        return causal(w, temp, bias, padding, state, log_decay, softmax)
    return *bidirectional(w, temp, padding, seq_idx, softmax), None


def causal(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    state: TSSAState | None = None,
    log_decay: torch.Tensor | None = None,
    softmax: Callable[..., torch.Tensor] = softmax_over_heads,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState]:
    """Causal TSSA (see the formulas above).

    Args:
        bias: the score bias of each token, (T, H) or (B, T, H), in the compute dtype.
        state: the recurrent state before the first token.
        softmax: computes the memberships, with the arguments of `softmax_over_heads`; another one under tensor parallelism.

    Returns:
        Output (B, T, H, p) in the dtype of `w`, membership (B, T, H), and the state after the last token.
    """
    prefix_sums = _cumulative_sum if log_decay is None else functools.partial(_decayed_sum, log_decay.exp())
    initial_sums = [None] * 3 if state is None else [s.to(temp.dtype) for s in state]
    x = mask_padding(w, padding, temp.dtype)
    sq = x * x
    sum_sq = prefix_sums(sq, initial_sums[0])
    score = (sq / sum_sq.clamp_min(EPS_SUM_SQ)).sum(-1)
    if bias is not None:
        score = score + w.shape[-1] * bias
    membership = softmax(score, temp, padding)
    weight = membership.unsqueeze(-1)
    sum_weighted_sq = prefix_sums(sq * weight, initial_sums[1])
    sum_membership = prefix_sums(membership, initial_sums[2])
    moment = sum_weighted_sq / (sum_membership + EPS_MEMBERSHIP).unsqueeze(-1)
    output = -(x * weight) / (1 + moment)
    # copies: compiled code that updates a cache in place must not see views of its work buffers
    final_sums = (s[:, -1].clone() for s in (sum_sq, sum_weighted_sq, sum_membership))
    return output.to(w.dtype), membership, as_state(final_sums, w)


def bidirectional(
    w: torch.Tensor,
    temp: torch.Tensor,
    padding: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    softmax: Callable[..., torch.Tensor] = softmax_over_heads,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bidirectional TSSA of sequences or, with sequence numbers `seq_idx` (B, T), packed sequences; `softmax` as in `causal`.

    Returns:
        Output (B, T, H, p) in the dtype of `w`, and membership (B, T, H).
    """
    x = mask_padding(w, padding, temp.dtype)
    sq = x * x
    score = (sq / _sum_sequence(sq, seq_idx).clamp_min(EPS_NORM**2)).sum(-1)
    membership = softmax(score, temp, padding)
    weight = membership.unsqueeze(-1)
    moment = _sum_sequence(sq * weight, seq_idx) / (_sum_sequence(membership, seq_idx) + EPS_MEMBERSHIP).unsqueeze(-1)
    return (-(x * weight) / (1 + moment)).to(w.dtype), membership


def step(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None,
    padding: torch.Tensor | None,
    state: TSSAState,
    log_decay: torch.Tensor | None = None,
    softmax: Callable[..., torch.Tensor] = softmax_over_heads,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, TSSAState]:
    """Causal TSSA of one token, from the state before it.

    Args:
        w: the projected token, (B, H, p).
        bias: (H,) or (B, H), in the compute dtype.
        padding: (B,), true where the token is padding, which leaves the state unchanged.
        log_decay: (H,) or (B, H), in the compute dtype, 0 at padding.
        softmax: as in `causal`.
        in_place: whether the tensors of `state` are updated in place, without a gradient.

    Returns:
        Output (B, H, p) in the dtype of `w`, membership (B, H), and the state after the token.
    """
    add = torch.Tensor.add_ if in_place else torch.add
    if log_decay is not None:
        # in float64, since a rounded decay close to 1 would add the same error at every step
        decay = log_decay.to(state.sum_membership.dtype).exp().expand(state.sum_membership.shape)
        decayed = (apply_decay(s, decay).to(s.dtype) for s in state)
        state = TSSAState(*(s.copy_(x) if in_place else x for s, x in zip(state, decayed)))
    x = mask_padding(w, padding, temp.dtype)
    sq = x * x
    sum_sq = add(state.sum_sq, sq)
    score = (sq / sum_sq.clamp_min(EPS_SUM_SQ)).sum(-1)
    if bias is not None:
        score = score + w.shape[-1] * bias
    membership = softmax(score, temp, padding)
    sum_weighted_sq = add(state.sum_weighted_sq, sq * membership.unsqueeze(-1))
    sum_membership = add(state.sum_membership, membership)
    moment = (sum_weighted_sq / (sum_membership + EPS_MEMBERSHIP).unsqueeze(-1)).to(temp.dtype)
    output = -(x * membership.unsqueeze(-1)) / (1 + moment)
    return output.to(w.dtype), membership, TSSAState(sum_sq, sum_weighted_sq, sum_membership)


# Short convolution ------------------------------------------------------------------------------------------------------


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    conv_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layers_tost.ShortConvolution` of tokens x (B, T, D), with weight (D, K) and packed sequences numbered from 1."""
    conv_kernel, T = weight.shape[1], x.shape[1]
    state_len = conv_kernel - 1
    seq_idx = None if seq_idx is None else F.pad(seq_idx, (state_len, 0))
    window = F.pad(x, (0, 0, state_len, 0)) if conv_state is None else torch.cat([conv_state.to(x.dtype), x], 1)
    indices = None
    if mask is not None:
        indices = left_padding_indices(F.pad(mask, (state_len, 0), value=True))
        window = permute_tokens(window, indices)
        seq_idx = None if seq_idx is None else permute_tokens(seq_idx, indices)
    weights = weight.unbind(1)
    output = window[:, state_len:] * (1 + weights[0])
    for j in range(1, conv_kernel):
        earlier = window[:, state_len - j : state_len - j + T]
        if seq_idx is not None:
            is_other_sequence = seq_idx[:, state_len - j : state_len - j + T] != seq_idx[:, state_len:]
            earlier = earlier.masked_fill(is_other_sequence.unsqueeze(-1), 0)
        output = torch.addcmul(output, earlier, weights[j])
    if indices is not None:  # restore the original order; the output at padding is arbitrary
        indices = (indices[:, state_len:] - state_len).clamp_min(0)
        output = output.gather(1, indices.unsqueeze(-1).expand_as(output))
    # a copy, as a view would keep the whole window in memory
    return output, window[:, T:].clone()


def left_padding_indices(mask: torch.Tensor) -> torch.Tensor:
    """The index (B, N) of each token after all padding is moved to the left; `mask` (B, N) is true at real tokens."""
    padding = ~mask
    return torch.where(mask, padding.sum(1, keepdim=True) + mask.cumsum(1), padding.cumsum(1)) - 1


def permute_tokens(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Moves each token of x (B, N, ...) to its index in `indices` (B, N), a permutation."""
    return torch.zeros_like(x).scatter(1, indices.view(*indices.shape, *[1] * (x.ndim - 2)).expand_as(x), x)


# Sums over tokens -------------------------------------------------------------------------------------------------------


def _cumulative_sum(x: torch.Tensor, initial_sum: torch.Tensor | None) -> torch.Tensor:
    """Prefix sums over the tokens of x (B, T, H, ...), continued from `initial_sum` (B, H, ...) or None."""
    # cumsum takes half the time with the tokens behind the heads
    sums = x.transpose(1, 2).cumsum(2).transpose(1, 2)
    return sums if initial_sum is None else sums + initial_sum.unsqueeze(1)


def _decayed_sum(decay: torch.Tensor, x: torch.Tensor, initial_sum: torch.Tensor | None) -> torch.Tensor:
    """`_cumulative_sum` with decay: multiplies the sum by a token's decay (B, T, H) before it adds the token.

    Doubling scans, first within blocks of tokens and then over the blocks.
    """
    T = x.shape[1]
    if initial_sum is not None:  # prepend it as a token
        x, decay = torch.cat([initial_sum.unsqueeze(1), x], 1), F.pad(decay, (0, 0, 1, 0), value=1)
    position = torch.arange(x.shape[1], device=x.device)
    sums, decay_product = _scan_by_doubling(x, decay, position % BLOCK_TOKENS, BLOCK_TOKENS.bit_length() - 1)
    block = torch.arange(T // BLOCK_TOKENS + 3, device=x.device)  # more than needed: dynamic shapes exclude size 1
    last_token = (block * BLOCK_TOKENS - 1).clamp(0, x.shape[1] - 1)  # of the previous block
    carry = sums.index_select(1, last_token).masked_fill(unsqueeze_like(block[None] == 0, sums), 0)
    block_decay = decay_product.index_select(1, last_token)
    if torch.compiler.is_exporting():  # few operations for any length
        log_block_decay = block_decay.clamp_min(torch.finfo(x.dtype).tiny).log()  # log 0 would have no gradient
        carry_columns = (carry.unsqueeze(-1) if carry.ndim == 3 else carry).transpose(1, 2)
        carry_columns = (_decay_matrix(log_block_decay.transpose(1, 2)) @ carry_columns).transpose(1, 2)
        carry = carry_columns.squeeze(-1) if carry.ndim == 3 else carry_columns
    else:
        # programs for any length run the number of steps of the longest sequence
        steps = MAX_SCAN_STEPS if torch.compiler.is_compiling() else len(block).bit_length()
        carry, _ = _scan_by_doubling(carry, block_decay, block, steps)
    sums = sums + apply_decay(carry.index_select(1, position // BLOCK_TOKENS), decay_product)
    return sums if initial_sum is None else sums[:, 1:]


def _scan_by_doubling(
    total: torch.Tensor, decay_product: torch.Tensor, offset: torch.Tensor, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A scan in doubling steps over up to 2**steps positions, which does not cross the position of offset 0.

    Returns:
        The decayed sums, and the products of the decays.
    """
    position = torch.arange(total.shape[1], device=total.device)
    for distance in (2**step for step in range(steps)):
        at_start, earlier_position = (offset < distance)[None], (position - distance).clamp_min(0)
        earlier_total = total.index_select(1, earlier_position).masked_fill(unsqueeze_like(at_start, total), 0)
        total = total + apply_decay(earlier_total, decay_product)
        decay_product = decay_product * decay_product.index_select(1, earlier_position).masked_fill(at_start[..., None], 1)
    return total, decay_product


def _decay_matrix(log_decay: torch.Tensor) -> torch.Tensor:
    """From log decays (..., n) a matrix (..., n, n): at [t, s] the product of the decays after s up to t, 0 for s > t."""
    position = torch.arange(log_decay.shape[-1], device=log_decay.device)
    is_later = position.unsqueeze(1) > position
    log_products = torch.where(is_later, log_decay.unsqueeze(-1), 0).cumsum(-2)  # no differences, which would cancel digits
    return log_products.masked_fill(position.unsqueeze(1) < position, float("-inf")).exp()


def _sum_sequence(x: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
    """The sum over all tokens, (B, 1, ...), or over each token's packed sequence, (B, T, ...)."""
    if seq_idx is None:
        return x.sum(1, keepdim=True)
    starts = sequence_starts(seq_idx)
    sequence_number = starts.cumsum(1)
    last_token = torch.searchsorted(sequence_number, sequence_number, right=True) - 1  # of each token's sequence
    sums = _decayed_sum((~starts).to(x.dtype).unsqueeze(-1), x, None)
    return sums.gather(1, unsqueeze_like(last_token, x).expand_as(x))
