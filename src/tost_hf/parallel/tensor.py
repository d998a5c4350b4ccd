# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Tensor parallelism: each process computes some of the heads of every layer, by transformers' `tp_plan="auto"`.

The statistics of a head are independent of other heads, except for the softmax over heads. For it, the processes gather one
number per token, the log-sum-exp over the heads of each process.
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
    """A tensor-parallel style of transformers for attention layers: shards parameters by heads, softmax over all heads."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        param_tensor = module._parameters.get(param)
        if param_tensor is not None:
            sharded = distribute_tensor(param_tensor, mesh, [Shard(0)], src_data_rank=None)
            module._parameters[param] = nn.Parameter(sharded, requires_grad=param_tensor.requires_grad)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Raises a ValueError if the heads cannot be divided evenly among the processes."""
        layer = cast(Any, module)  # of this package or of remote code
        if not hasattr(layer, "operators"):  # softmax attention, where only the projections are sharded
            _check_heads("num_attention_heads", layer.config.num_attention_heads, mesh)
            _check_heads("num_key_value_heads", layer.config.num_attention_heads // layer.num_key_value_groups, mesh)
            return module
        _check_heads("num_attention_heads", layer.num_heads, mesh)
        softmax = functools.partial(softmax_over_heads_tensor_parallel, mesh)
        layer.operators = layer.operators._replace(
            tssa=functools.partial(tssa, softmax=softmax), step=functools.partial(tssa_step, softmax=softmax)
        )
        return super().install_forward(module, mesh)


def _check_heads(name: str, heads: int, mesh: DeviceMesh) -> None:
    if heads % mesh.size():
        raise ValueError(
            f"{name} {heads} cannot be sharded over {mesh.size()} processes: use a number of processes that divides it, or "
            "train with fully_shard or DistributedDataParallel."
        )


def softmax_over_heads_tensor_parallel(
    mesh: DeviceMesh, score: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None
) -> torch.Tensor:
    """`tssa_reference.softmax_over_heads` for scores (..., local heads): the softmax is over the heads of all processes."""
    dtype = state_dtypes(score)[1]  # float32 logarithms would lose digits
    logit = (score * temp).to(dtype)
    log_normalizer = gather(logit.logsumexp(-1, keepdim=True), mesh).logsumexp(0)
    membership = (logit - log_normalizer).exp().to(score.dtype)
    return membership if padding is None else membership.masked_fill(padding.unsqueeze(-1), 0)


ALL_PARALLEL_STYLES.register("tost_heads", HeadwiseParallel())  # type: ignore[arg-type]  # as transformers itself does
