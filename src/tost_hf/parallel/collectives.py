# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Collectives with gradients."""

import torch
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh


# renamed in torch 2.13
_all_gather = getattr(_functional_collectives, "all_gather_single_autograd", None) or (
    _functional_collectives.all_gather_tensor_autograd
)


def gather(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Gathers the tensors of all processes, (processes, ...); the gradient is the sum over the processes.

    All processes have to take part in the backward pass: a result that only some of them use would cause a deadlock.
    """
    return _all_gather(x.unsqueeze(0).contiguous(), 0, mesh)
