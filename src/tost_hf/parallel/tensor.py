# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Tensor parallelism: each process holds some of the heads of every layer, by transformers' `tp_plan="auto"`.

The statistics of a head are independent of other heads; only the softmax over heads is shared. For it, each process sends one
number per token, the log-sum-exp over its own heads.
"""

import functools
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from ..model.tssa import tssa, tssa_step
from ..model.tssa_reference import state_dtypes
from .collectives import gather


class HeadwiseParallel(TensorParallelLayer):
    """transformers' parallel style of an attention layer: shards its parameters by heads, shares the softmax over heads."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        whole = module._parameters.get(param)
        if whole is not None:
            sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            module._parameters[param] = nn.Parameter(sharded, requires_grad=whole.requires_grad)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Raises a ValueError where the processes cannot hold the same number of heads each."""
        layer = cast(Any, module)  # of this package, or of the same code loaded from a model's folder
        if not hasattr(layer, "operators"):  # softmax attention, of which only the projections are sharded
            _check_heads("num_attention_heads", layer.config.num_attention_heads, mesh)
            _check_heads("num_key_value_heads", layer.config.num_attention_heads // layer.num_key_value_groups, mesh)
            return module
        _check_heads("num_attention_heads", layer.num_heads, mesh)
        softmax = functools.partial(membership_over_all_heads, mesh)
        layer.operators = layer.operators._replace(
            tssa=functools.partial(tssa, softmax=softmax), step=functools.partial(tssa_step, softmax=softmax)
        )
        return super().install_forward(module, mesh)


def _check_heads(name: str, heads: int, mesh: DeviceMesh) -> None:
    if heads % mesh.size():
        raise ValueError(
            f"{name} {heads} cannot be sharded over {mesh.size()} processes: start a number that divides it, or train "
            "with fully_shard or DistributedDataParallel."
        )


def membership_over_all_heads(
    mesh: DeviceMesh, score: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None
) -> torch.Tensor:
    """`membership_of` this process's heads, (..., own heads), in a softmax over those of all processes."""
    wide = state_dtypes(score)[1]  # a logarithm of float32 would cost digits
    logit = (score * temp).to(wide)
    total = gather(logit.logsumexp(-1, keepdim=True), mesh).logsumexp(0)
    membership = (logit - total).exp().to(score.dtype)
    return membership if padding is None else membership.masked_fill(padding.unsqueeze(-1), 0)


ALL_PARALLEL_STYLES.register("tost_heads", HeadwiseParallel())  # type: ignore[arg-type]  # as transformers itself does
