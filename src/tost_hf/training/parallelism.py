# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Context-parallel training (several processes share each sequence) and tensor-parallel training (each has some heads).

transformers' Trainer does not save the optimizer of a tensor-parallel model, as each process has a shard of its state. Here
the shards are gathered when a checkpoint is saved, and loading shards them again, for the current number of processes.
"""

import os
from itertools import chain
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.utils import recursively_apply
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import TrainingArguments


USE_CONFIG = "ACCELERATE_USE_PARALLELISM_CONFIG"  # environment variable


def check_processes(args: TrainingArguments) -> None:
    """Raises a ValueError if several processes were started that are not connected."""
    num_processes = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
    if num_processes > 1 and args.world_size == 1:
        raise ValueError(
            f"{num_processes} processes were started, but each would train alone and write the same files: there is no "
            "device that connects them. To train on CPUs, set use_cpu=True (--use_cpu) or ACCELERATE_USE_CPU=true."
        )


# Context parallelism -------------------------------------------------------------------------------------------------


def make_context_mesh(args: Any, model: nn.Module | None) -> DeviceMesh | None:
    """The mesh (data-parallel groups, processes per group) of a context-parallel run; None for another run.

    The size is `context_parallel_size`, or `cp_size` of Accelerate's ParallelismConfig, which by itself would use ring
    attention and is removed from the arguments.

    Raises:
        ValueError: the size does not suit the number of processes or Accelerate's configuration, or that is for a
            tensor-parallel model and the model is not.
    """
    size, config = getattr(args, "context_parallel_size", 1), args.parallelism_config
    if config is None and os.environ.get(USE_CONFIG) == "true":
        config = ParallelismConfig()  # of `accelerate launch`, from the environment
    if config is not None and config.cp_size > 1:
        if size not in (1, config.cp_size) or max(config.tp_size, config.dp_replicate_size) > 1:
            raise ValueError(
                f"Context parallelism cannot be combined with the other sizes of {config!r} and context_parallel_size {size}: "
                "set cp_size, and dp_shard_size for FSDP."
            )
        args.parallelism_config = None  # FSDP, where enabled, shards the model over all processes
        os.environ[USE_CONFIG] = "false"
        size = args.context_parallel_size = config.cp_size
    elif config is not None and config.tp_size > 1 and not is_tensor_parallel(model):
        raise ValueError(
            f"ParallelismConfig(tp_size={config.tp_size}) needs a model that was loaded tensor-parallel: "
            f"from_pretrained(..., distributed_config=DistributedConfig(tp_size={config.tp_size}))."
        )
    if size == 1:
        return None
    if args.world_size % size:
        raise ValueError(
            f"context_parallel_size {size} must divide the number of processes, {args.world_size}: start more "
            "with `accelerate launch --num_processes`."
        )
    # Accelerate's data loaders look up these dimension names
    return init_device_mesh(args.device.type, (args.world_size // size, size), mesh_dim_names=("dp_replicate", "cp"))


# Tensor parallelism --------------------------------------------------------------------------------------------------


def is_tensor_parallel(model: nn.Module | None) -> bool:
    return getattr(model, "is_distributed_loading_by_transformers", False)


def shard_loaded_weights(model: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, *args) -> None:
    """A hook of `model.load_state_dict`: the full weights of a checkpoint are sharded like the model's."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if prefix + name in state_dict:
            state_dict[prefix + name] = _shard_like(state_dict[prefix + name], parameter)


class FullOptimizerState:
    """Makes the optimizer of a tensor-parallel model save and load the state of the whole model, by torch's hooks.

    Args:
        optimizer: its `load_state_dict` then accepts a full state, whatever the number of processes that saved it, and its
            `state_dict` returns one after `gather`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._gathered_state: dict[str, Any] | None = None
        optimizer.register_state_dict_post_hook(self._take_gathered_state)
        optimizer.register_load_state_dict_pre_hook(_shard_state)

    def gather(self, keep: bool) -> None:
        """Gathers the state for the next call of `state_dict`, which Trainer makes on one process only.

        Args:
            keep: whether this process calls `state_dict`; all processes must call `gather`.
        """

        def gather_tensor(x: DTensor) -> torch.Tensor | None:
            full_tensor = x.full_tensor()
            return full_tensor.cpu() if keep else None

        self._gathered_state = None
        state = recursively_apply(gather_tensor, self.optimizer.state_dict(), test_type=_is_sharded)
        self._gathered_state = state if keep else None

    def _take_gathered_state(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state, self._gathered_state = self._gathered_state or state_dict, None
        return state


def _shard_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    keys, parameters = (
        chain.from_iterable(group["params"] for group in groups)
        for groups in (state_dict["param_groups"], optimizer.param_groups)
    )
    state = {
        key: {name: _shard_like(value, parameter) for name, value in state_dict["state"][key].items()}
        for key, parameter in zip(keys, parameters)
        if key in state_dict["state"]
    }
    return state_dict | {"state": state}


def _is_sharded(x: Any) -> bool:
    return isinstance(x, DTensor)


def _shard_like(x: Any, parameter: torch.Tensor) -> Any:
    """A full tensor sharded like a parameter of its shape; anything else unchanged."""
    if not isinstance(parameter, DTensor) or _is_sharded(x) or getattr(x, "shape", None) != parameter.shape:
        return x
    return distribute_tensor(x, parameter.device_mesh, parameter.placements, src_data_rank=None)


__all__ = ["FullOptimizerState", "check_processes", "is_tensor_parallel", "make_context_mesh", "shard_loaded_weights"]
