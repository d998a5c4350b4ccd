# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Token Statistics Self-Attention (TSSA, arXiv 2412.17810): the operator, and the attention layer built on it.

No token is ever compared with another one: time is linear in the number of tokens, and the causal form needs only three
running sums (`TSSAState`). tssa_formulas.py says what is computed. Everything inside runs in float32, or in float64 for
float64 inputs, whatever comes in.

Two backends: the *reference* in PyTorch, for every device and dtype, and the *triton* kernels of tssa_triton.py. `backend=`
or, without it, the environment variable TOST_HF_BACKEND chooses: "auto" takes the kernels on a GPU, where they can run. The
causal reference is the eager engine of tssa_chunks.py; under torch.compile on a CPU it is the operator of tssa_compiled.py;
under torch.export, and for other compilers, it is the formulas themselves. The bidirectional reference is the eager engine of
tssa_bidirectional.py on a CPU, and else, and for all compilers, the formulas.
"""

import functools
import math
import os
import warnings
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F

from .convolution_tost import ShortConvolution, convolve
from .tssa_bidirectional import bidirectional_tssa
from .tssa_chunks import causal_tssa
from .tssa_formulas import bidirectional as bidirectional_formulas
from .tssa_formulas import causal as causal_formulas
from .tssa_formulas import step as step_formulas
from .tssa_state import TSSAState, as_state, compute_dtype, state_shapes, zero_state


BACKENDS = ("auto", "reference", "triton")


class TSSAOutput(NamedTuple):
    """What `tssa` returns."""

    output: torch.Tensor  # (B, T, H, p), dtype of the input
    membership: torch.Tensor  # (B, H, T), float32 or float64; 0 at padding
    final_state: TSSAState | None  # None in the bidirectional form


def tssa(
    w: torch.Tensor,
    temp: torch.Tensor,
    denom_bias: torch.Tensor | None = None,
    *,
    causal: bool = True,
    mask: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_state: TSSAState | None = None,
    log_decay: torch.Tensor | None = None,
    backend: str | None = None,
) -> TSSAOutput:
    """Token Statistics Self-Attention between the two projections (paper, section 3; causal form of the authors' code).

    Args:
        w: projected tokens, (B, T, H, p), as the input projection leaves them (no transpose needed).
        temp: one learned scalar per head, H numbers of any shape.
        denom_bias: learned score bias of each token's position, (T, H) or (B, T, H); causal form only.
        causal: prefix sums over positions (language) or sums over all tokens (vision, encoders).
        mask: (B, T), true or 1 at real tokens. Padding adds nothing to any sum and its output is 0.
        seq_idx: (B, T) integers, packed rows: tokens of one sequence are adjacent and share a number, and each sequence
            is computed as if it were alone.
        initial_state: running sums of the tokens before these; causal form only.
        log_decay: logarithm, at most 0, of the factor by which a head's sums are multiplied before a token is added to them,
            (H,), (T, H) or (B, T, H); causal form only. None, as 0, for sums that forget nothing. Padding forgets nothing.
        backend: "auto", "reference" or "triton"; None for the environment variable TOST_HF_BACKEND, else "auto".

    Returns:
        `TSSAOutput` with the output (B, T, H, p) in `w`'s dtype, the membership (B, H, T) and, for the causal form, the
        sums after the last token (of each row's last sequence, where rows are packed). All three are differentiable once.

    Raises:
        ValueError: shapes disagree, `initial_state` / `denom_bias` / `log_decay` is given to the bidirectional form,
            `log_decay` is above 0, or the backend is unknown or cannot take these tokens.
        RuntimeError: the backend "triton" is asked for, and its kernels fail or are wrong on this device.
    """
    temp = _check_inputs(w, temp, denom_bias, causal, mask, seq_idx, initial_state)
    _check_log_decay(log_decay, w, causal)
    bias = None if denom_bias is None else denom_bias.reshape(-1, *denom_bias.shape[-2:])
    mask = None if mask is None else mask.bool()
    log_decay = _decay_of_tokens(log_decay, mask, w.shape[:3], compute_dtype(w.dtype))
    form, forgets = "causal" if causal else "bidirectional", log_decay is not None
    needs_grad = _needs_grad(w, temp, bias, log_decay, *(initial_state or ()))
    if _runs_on_kernels(w, backend, form, forgets=forgets, gradients=needs_grad):
        from .tssa_triton import tssa_triton

        output, membership, *sums = tssa_triton(w, temp, bias, mask, seq_idx, initial_state, causal, log_decay)
        after = as_state(cast(list[torch.Tensor], sums), w) if causal else None
        return TSSAOutput(output, membership.transpose(1, 2), after)

    dtype = compute_dtype(w.dtype)
    temp, padding = temp.to(dtype), None if mask is None else ~mask
    if not causal:
        output, membership = _bidirectional_reference(w, temp, padding, seq_idx)
        return TSSAOutput(output, membership.transpose(1, 2), None)
    bias = None if bias is None else bias.to(dtype)
    state = None if initial_state is None else as_state(initial_state, w)
    output, membership, final = _causal_reference(w, temp, bias, padding, seq_idx, state, log_decay)
    return TSSAOutput(output, membership.transpose(1, 2), final)


def _bidirectional_reference(w, temp, padding, seq_idx) -> tuple[torch.Tensor, torch.Tensor]:
    """The eager engine on a CPU; the formulas for compilers and other devices."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    engine = bidirectional_tssa if w.device.type == "cpu" and not traced else bidirectional_formulas
    return engine(w, temp, padding, seq_idx)


def _causal_reference(w, temp, bias, padding, seq_idx, state, log_decay) -> tuple[torch.Tensor, torch.Tensor, TSSAState]:
    """The reference engine that fits who is asking: eager code, a compiler for the CPU, or another one."""
    on_cpu = w.device.type == "cpu" and not torch.compiler.is_exporting()
    if torch.compiler.is_compiling() and not on_cpu:
        return causal_formulas(w, temp, bias, padding, seq_idx, state, log_decay)
    bias = w.new_zeros(1, 1, 1, dtype=temp.dtype) if bias is None else bias
    arguments = (w, temp, bias.expand(w.shape[:3]), padding, seq_idx, zero_state(w) if state is None else state, log_decay)
    if not torch.compiler.is_compiling():
        return causal_tssa(*arguments)
    from .tssa_compiled import causal_tssa as causal_tssa_compiled

    return causal_tssa_compiled(*arguments)


def tssa_step(
    w: torch.Tensor,
    temp: torch.Tensor,
    denom_bias: torch.Tensor | None,
    state: TSSAState | None,
    *,
    mask: torch.Tensor | None = None,
    log_decay: torch.Tensor | None = None,
    backend: str | None = None,
) -> TSSAOutput:
    """Causal TSSA of one new token.

    Args:
        w: the projected token, (B, H, p).
        temp: H numbers of any shape.
        denom_bias: score bias at the token's position, (H,) or (B, H), or None.
        state: the running sums before the token; None at the start of a sequence. Left as they are.
        mask: (B,), true or 1 where the token is real; a padding token leaves the state as it was.
        log_decay: (H,) or (B, H); as in `tssa`.
        backend: as in `tssa`. The kernel has no gradient: where one is needed, the reference runs.

    Returns:
        `TSSAOutput` with the output (B, H, p), the membership (B, H) and the new state.

    Raises:
        ValueError: `log_decay` has another shape or is above 0, or the backend is unknown or cannot take these tokens.
        RuntimeError: as in `tssa`.
    """
    _check_log_decay(log_decay, w, causal=True)
    dtype = compute_dtype(w.dtype)
    state = zero_state(w.unsqueeze(1)) if state is None else as_state(state, w)
    temp = temp.reshape(-1).to(dtype)
    mask = None if mask is None else mask.bool()
    log_decay = _decay_of_tokens(log_decay, mask, w.shape[:2], dtype)
    needs_grad = _needs_grad(w, temp, denom_bias, log_decay, *state)
    if _runs_on_kernels(w, backend, "step", forgets=log_decay is not None) and not needs_grad:
        from .tssa_triton import tssa_step_triton

        bias = None if denom_bias is None else denom_bias.reshape(-1, w.shape[1])
        state = TSSAState(*(x.clone(memory_format=torch.contiguous_format) for x in state))  # the kernel adds in place
        return TSSAOutput(*tssa_step_triton(w, temp, bias, mask, *state, log_decay), state)
    bias = None if denom_bias is None else denom_bias.to(dtype)
    return TSSAOutput(*step_formulas(w, temp, bias, None if mask is None else ~mask, state, log_decay))


def _needs_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors if x is not None)


def _runs_on_kernels(w: torch.Tensor, backend: str | None, form: str, **parts: bool) -> bool:
    """Whether the kernels are chosen for tokens w (..., H, p), can run, and compute there what they should."""
    if _choose_backend(backend, w.device.type, w.dtype) == "reference":
        return False
    from .tssa_check import kernel_problem

    problem = kernel_problem(w, form, **parts)
    if problem is None:
        return True
    if (backend or os.environ.get("TOST_HF_BACKEND")) == "triton":
        raise RuntimeError(f"The TSSA backend 'triton' cannot run: {problem}; choose 'auto' or 'reference'.")
    _warn_of_fallback(problem)
    return False


@functools.cache
def _warn_of_fallback(reason: str) -> None:
    warnings.warn(
        f"TSSA runs its reference implementation on the GPU, which is slow: {reason}. backend='reference' or "
        "TOST_HF_BACKEND=reference chooses it without this warning.",
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
    B, T, H, _ = w.shape
    if temp.numel() != H:
        raise ValueError(f"temp must hold one number per head ({H}), got shape {tuple(temp.shape)}.")
    for name, tensor in (("mask", mask), ("seq_idx", seq_idx)):
        if tensor is not None and tensor.shape != (B, T):
            raise ValueError(f"{name} must have shape (batch, tokens) = ({B}, {T}), got {tuple(tensor.shape)}.")
    if seq_idx is not None and seq_idx.is_floating_point():
        raise ValueError(f"seq_idx must hold integers, got {seq_idx.dtype}.")
    _check_mask(mask)
    # dimension by dimension: two shapes compared as a whole would have an exporter compare the batch with the tokens
    if denom_bias is not None and (
        denom_bias.ndim > 3 or denom_bias.shape[-2:] != (T, H) or (denom_bias.ndim == 3 and denom_bias.shape[0] not in (B, 1))
    ):
        raise ValueError(
            f"denom_bias must have shape (tokens, heads) = ({T}, {H}), with or without the batch in front, got "
            f"{tuple(denom_bias.shape)}."
        )
    if not causal and (denom_bias is not None or initial_state is not None):
        raise ValueError("denom_bias and initial_state belong to the causal form; bidirectional TSSA has neither.")
    if initial_state is not None:
        expected = tuple(state_shapes(w))
        shapes = tuple(tuple(x.shape) for x in initial_state)
        if shapes != expected:
            raise ValueError(f"initial_state must hold tensors of shapes {expected}, got {shapes}.")
    return temp.reshape(-1)


def _check_mask(mask: torch.Tensor | None) -> None:
    """Refuses a mask of anything but 0 and 1, such as one to be added to scores; looks only where that costs nothing."""
    if mask is None or mask.dtype == torch.bool or torch.compiler.is_compiling():
        return
    if not ((mask == 0) | (mask == 1)).all() if mask.device.type == "cpu" else mask.is_floating_point():
        raise ValueError(
            f"mask must hold 1 or true at real tokens and 0 or false at padding, got another {mask.dtype} mask; TSSA has no "
            "mask that is added to scores."
        )


def _check_log_decay(log_decay: torch.Tensor | None, w: torch.Tensor, causal: bool) -> None:
    """Refuses factors that do not fit the tokens w (B, T, H, p) or (B, H, p), or that grow; looks where that costs little."""
    if log_decay is None:
        return
    if not causal:
        raise ValueError("log_decay belongs to the causal form; bidirectional TSSA has no order in which to forget.")
    *tokens, _ = w.shape
    dims = log_decay.ndim
    if not 0 < dims <= len(tokens) or tuple(log_decay.shape) != tuple(tokens[-dims:]):
        shapes = [tuple(tokens[start:]) for start in reversed(range(len(tokens)))]
        raise ValueError(f"log_decay must have one of the shapes {', '.join(map(str, shapes))}, got {tuple(log_decay.shape)}.")
    if log_decay.device.type == "cpu" and not torch.compiler.is_compiling() and bool((log_decay > 0).any()):
        raise ValueError(f"log_decay must be at most 0, or the sums grow without end; got {log_decay.max().item():.3g}.")


def _decay_of_tokens(log_decay: torch.Tensor | None, mask: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype):
    """`log_decay` for each token and head, of shape `shape`; 0 at padding."""
    if log_decay is None:
        return None
    log_decay = log_decay.to(dtype).expand(shape)
    return log_decay if mask is None else log_decay.masked_fill(~mask.unsqueeze(-1), 0)


# The layer ------------------------------------------------------------------------------------------------------------


KEPT_IN_FLOAT32 = ("temp", "denom_bias", "forget_bias")
SHORTEST_MEMORY, LONGEST_MEMORY = 4, 1024  # tokens


def initial_forget_bias(num_heads: int) -> torch.Tensor:
    """The logits (H,) of forget factors 1 - 1 / tau, tau from 4 to 1,024 tokens, evenly spaced in log over the heads."""
    tau = torch.logspace(math.log2(SHORTEST_MEMORY), math.log2(LONGEST_MEMORY), num_heads, base=2)
    return torch.log(tau - 1)


class LayerOperators(NamedTuple):
    """What a layer computes with. Where tokens or heads are spread over processes, others stand here, called alike."""

    tssa: Callable[..., TSSAOutput] = tssa
    step: Callable[..., TSSAOutput] = tssa_step
    convolve: Callable[..., tuple[torch.Tensor, torch.Tensor]] = convolve


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
        forgetting: "none", "head" (a learned forget factor per head) or "token" (one per token and head); causal form only.
        conv_kernel: taps of the `ShortConvolution` on the layer's input; None for none. Causal form only.
        normalize_scores: whether the squares that memberships are made from are divided by their sums. Without that (the
            paper's ablation) the formulas of tssa_formulas.py run, whatever the backend.
        backend: as in `tssa`; may be set later as well.

    `temp` (H, 1), `denom_bias` (H, max_position_embeddings, 1) and `forget_bias` (H,) stay in float32 whatever dtype the
    module is moved to.
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
        forgetting: str = "none",
        conv_kernel: int | None = None,
        normalize_scores: bool = True,
        backend: str | None = None,
    ):
        super().__init__()
        self.operators = LayerOperators()
        if not causal and (forgetting != "none" or conv_kernel is not None):
            raise ValueError("forgetting and conv_kernel belong to the causal form; bidirectional TSSA has neither.")
        self.backend = backend
        self.normalize_scores = normalize_scores
        self.num_heads = num_attention_heads
        self.head_dim = hidden_size // num_attention_heads
        self.causal = causal
        self.layer_idx = layer_idx
        self.attention_dropout = attention_dropout
        self.convolution = None if conv_kernel is None else ShortConvolution(hidden_size, conv_kernel)
        self.in_proj = nn.Linear(hidden_size, hidden_size, bias=in_bias)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=out_bias)
        self.out_dropout = nn.Dropout(hidden_dropout)
        dtype = compute_dtype(torch.get_default_dtype())  # whatever dtype the other weights are built in
        self.temp = nn.Parameter(torch.ones(num_attention_heads, 1, dtype=dtype))
        self.denom_bias = None
        if max_position_embeddings is not None:
            self.denom_bias = nn.Parameter(torch.zeros(num_attention_heads, max_position_embeddings, 1, dtype=dtype))
        self.forget_bias = self.forget_proj = None
        if forgetting != "none":
            self.forget_bias = nn.Parameter(initial_forget_bias(num_attention_heads).to(dtype))
        if forgetting == "token":
            self.forget_proj = nn.Linear(hidden_size, num_attention_heads, bias=False)
            nn.init.zeros_(self.forget_proj.weight)

    def _apply(self, fn, recurse=True):
        # model.to(dtype) and model.half() come through here; the statistics' own parameters keep their float32 values
        kept = {name: getattr(self, name) for name in KEPT_IN_FLOAT32 if getattr(self, name) is not None}
        kept = {name: param.data for name, param in kept.items() if param.dtype in (torch.float32, torch.float64)}
        super()._apply(fn, recurse)
        for name, data in kept.items():
            param = getattr(self, name)
            if param.dtype in (torch.float16, torch.bfloat16):
                param.data = data.to(device=param.device)
        return self

    def log_decay(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logarithm of the forget factors (B, T, H) at convolved tokens (B, T, D); None where nothing is forgotten."""
        if self.forget_bias is None:
            return None
        dtype = compute_dtype(hidden_states.dtype)
        logit = self.forget_bias.to(dtype).expand(*hidden_states.shape[:2], -1)
        if self.forget_proj is not None:
            logit = logit + self.forget_proj(hidden_states)
        return F.logsigmoid(logit)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        past_key_values=None,
        conv_taps: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends.

        Args:
            hidden_states: (B, T, D).
            attention_mask: (B, T), true or 1 at real tokens; these tokens only, not those in the cache.
            position_ids: (B, T), rows of `denom_bias`; needed where the layer has one.
            seq_idx: (B, T), packed rows; see `tssa`.
            past_key_values: a cache of `CausalStatisticsLayer`s; read, then updated.
            conv_taps: what `find_taps` gives for the convolution; found here where left out.

        Returns:
            The attended tokens (B, T, D) and the membership (B, H, T).
        """
        B, T, _ = hidden_states.shape
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        inputs, recent = hidden_states, None
        if self.convolution is not None:
            past = None if layer is None else layer.past_inputs
            hidden_states, recent = self.operators.convolve(
                self.convolution, inputs, attention_mask, seq_idx, taps=conv_taps, recent=past
            )
        w = self.in_proj(hidden_states).view(B, T, -1, self.head_dim)
        log_decay = self.log_decay(hidden_states)
        bias = None
        if self.denom_bias is not None:
            assert position_ids is not None  # a layer with positions is told them
            # a look-up, not an index: the gradient of an index adds up in whatever order threads come
            bias = F.embedding(position_ids, self.denom_bias[..., 0].t())
        out, membership, state = self._statistics(w, bias, log_decay, attention_mask, seq_idx, layer)
        if layer is not None:
            assert state is not None  # only causal layers have a cache
            layer.update_state(TSSAState(*state), w, membership, log_decay=log_decay, inputs=inputs, recent_inputs=recent)
        if self.training and self.attention_dropout > 0:
            keep = torch.ones_like(out) if self.causal else out.new_ones(B, 1, self.num_heads, self.head_dim)
            out = out * F.dropout(keep, self.attention_dropout)
        return self.out_dropout(self.out_proj(out.reshape(B, T, -1))), membership

    def _statistics(self, w, bias, log_decay, mask, seq_idx, layer) -> TSSAOutput:
        """The operator, or its step where a cache layer goes on by one token."""
        state = None if layer is None else layer.state
        if not self.normalize_scores:
            if self.operators != LayerOperators():
                raise ValueError("A model with normalize_scores=False cannot be spread over processes: run each whole.")
            return self._unnormalized(w, bias, log_decay, mask, seq_idx, state)
        if layer is None or w.shape[1] > 1:
            return self.operators.tssa(
                w,
                self.temp,
                bias,
                causal=self.causal,
                mask=mask,
                seq_idx=seq_idx,
                initial_state=state,
                log_decay=log_decay,
                backend=self.backend,
            )
        bias, log_decay, mask = (None if x is None else x[:, 0] for x in (bias, log_decay, mask))
        out, membership, state = self.operators.step(
            w[:, 0], self.temp, bias, state, mask=mask, log_decay=log_decay, backend=self.backend
        )
        return TSSAOutput(out.unsqueeze(1), membership.unsqueeze(-1), state)

    def _unnormalized(self, w, bias, log_decay, mask, seq_idx, state) -> TSSAOutput:
        """The formulas with the squares themselves for scores; arguments as of `tssa`."""
        dtype = compute_dtype(w.dtype)
        temp, padding = self.temp.reshape(-1).to(dtype), None if mask is None else ~mask.bool()
        if not self.causal:
            output, membership = bidirectional_formulas(w, temp, padding, seq_idx, normalize_scores=False)
            return TSSAOutput(output, membership.transpose(1, 2), None)
        bias = None if bias is None else bias.to(dtype)
        log_decay = _decay_of_tokens(log_decay, mask, w.shape[:3], dtype)
        if state is not None and w.shape[1] == 1:  # its sums stay in float64
            bias, padding, log_decay = (None if x is None else x[:, 0] for x in (bias, padding, log_decay))
            out, membership, state = step_formulas(w[:, 0], temp, bias, padding, state, log_decay, normalize_scores=False)
            return TSSAOutput(out.unsqueeze(1), membership.unsqueeze(-1), state)
        output, membership, state = causal_formulas(w, temp, bias, padding, seq_idx, state, log_decay, normalize_scores=False)
        return TSSAOutput(output, membership.transpose(1, 2), state)
