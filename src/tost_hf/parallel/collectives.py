# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Collectives with gradients."""

import torch
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh


# by its new name, or by that of before torch 2.13
_all_gather = getattr(_functional_collectives, "all_gather_single_autograd", None) or (
    _functional_collectives.all_gather_tensor_autograd
)


def gather(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The tensors of all processes, (processes, ...); the gradient is the sum of those of all processes.

    Every process has to take part in the backward pass: a result that only some of them use would make the others wait.
    """
    return _all_gather(x.unsqueeze(0).contiguous(), 0, mesh)
