# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Tensor parallelism: each process has some of the heads of every layer, as transformers' `tp_plan="auto"` cuts them.

A head's statistics are its own; only the softmax over heads joins them. Of its part of the softmax each process tells the
others one number per token, the logarithm of the sum over its heads.
"""

import functools
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from ..model.tssa import TSSAOutput
from ..model.tssa_formulas import bidirectional as bidirectional_formulas
from ..model.tssa_formulas import causal as causal_formulas
from ..model.tssa_formulas import step as step_formulas
from ..model.tssa_state import TSSAState, as_state, compute_dtype, state_dtypes, zero_state
from .exchange import gather


class HeadsParallel(TensorParallelLayer):
    """transformers' parallel style of an attention layer: its parameters of heads are cut by heads, its softmax joins them."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        whole = module._parameters.get(param)
        if whole is not None:
            cut = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            module._parameters[param] = nn.Parameter(cut, requires_grad=whole.requires_grad)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Raises a ValueError where the processes cannot have as many heads each."""
        layer = cast(Any, module)  # of this package, or of the same code loaded from a model's folder
        if not hasattr(layer, "operators"):  # softmax attention, whose projections alone are cut
            _check_heads("num_attention_heads", layer.config.num_attention_heads, mesh)
            _check_heads("num_key_value_heads", layer.config.num_attention_heads // layer.num_key_value_groups, mesh)
            return module
        _check_heads("num_attention_heads", layer.num_heads, mesh)
        softmax = functools.partial(membership_of_all_heads, mesh)
        layer.operators = layer.operators._replace(
            tssa=functools.partial(tssa_of_heads, softmax), step=functools.partial(step_of_heads, softmax)
        )
        return super().install_forward(module, mesh)


def _check_heads(name: str, heads: int, mesh: DeviceMesh) -> None:
    if heads % mesh.size():
        raise ValueError(
            f"{heads} heads ({name}) cannot be cut for {mesh.size()} processes: the number of processes must divide them."
        )


def membership_of_all_heads(
    mesh: DeviceMesh, score: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None
) -> torch.Tensor:
    """`membership_of` this process's heads, (..., own heads), in a softmax over those of all processes."""
    wide = state_dtypes(score)[1]  # a logarithm of float32 would cost digits
    logit = (score * temp).to(wide)
    total = gather(logit.logsumexp(-1, keepdim=True), mesh).logsumexp(0)
    membership = (logit - total).exp().to(score.dtype)
    return membership if padding is None else membership.masked_fill(padding.unsqueeze(-1), 0)


def tssa_of_heads(
    softmax,
    w: torch.Tensor,
    temp: torch.Tensor,
    denom_bias: torch.Tensor | None = None,
    *,
    causal: bool = True,
    mask: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_state: TSSAState | None = None,
    log_decay: torch.Tensor | None = None,
    **kwargs,
) -> TSSAOutput:
    """`tssa` of this process's heads, (B, T, own heads, p), by the formulas."""
    dtype, padding = compute_dtype(w.dtype), None if mask is None else ~mask.bool()
    temp = temp.reshape(-1).to(dtype)
    if not causal:
        output, membership = bidirectional_formulas(w, temp, padding, seq_idx, softmax)
        return TSSAOutput(output, membership.transpose(1, 2), None)
    output, membership, final = causal_formulas(
        w,
        temp,
        None if denom_bias is None else denom_bias.to(dtype),
        padding,
        seq_idx,
        initial_state,
        _without_padding(log_decay, padding, dtype),
        softmax=softmax,
    )
    return TSSAOutput(output, membership.transpose(1, 2), final)


def step_of_heads(
    softmax,
    w: torch.Tensor,
    temp: torch.Tensor,
    denom_bias: torch.Tensor | None,
    state: TSSAState | None,
    *,
    mask: torch.Tensor | None = None,
    log_decay: torch.Tensor | None = None,
    **kwargs,
) -> TSSAOutput:
    """`tssa_step` of this process's heads, (B, own heads, p), by the formulas."""
    dtype, padding = compute_dtype(w.dtype), None if mask is None else ~mask.bool()
    return TSSAOutput(
        *step_formulas(
            w,
            temp.reshape(-1).to(dtype),
            None if denom_bias is None else denom_bias.to(dtype),
            padding,
            zero_state(w.unsqueeze(1)) if state is None else as_state(state, w),
            _without_padding(log_decay, padding, dtype),
            softmax=softmax,
        )
    )


def _without_padding(log_decay: torch.Tensor | None, padding: torch.Tensor | None, dtype: torch.dtype):
    """`log_decay` in the compute dtype, 0 at padding."""
    if log_decay is None:
        return None
    log_decay = log_decay.to(dtype)
    return log_decay if padding is None else log_decay.masked_fill(padding.unsqueeze(-1), 0)


ALL_PARALLEL_STYLES.register("tost_heads", HeadsParallel())  # type: ignore[arg-type]  # as transformers itself does
