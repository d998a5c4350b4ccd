# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Context-parallel training (several processes share each sequence) and tensor-parallel training (each has some heads).

transformers' Trainer does not save the optimizer of a tensor-parallel model, as each process has a shard of its state. Here
the shards are gathered and saved by parameter name; loading shards them again, for the current number of processes.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import ParallelismConfig
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer

from ..parallel.context import parallelize


# older versions only consult Accelerate's ParallelismConfig
TRAINER_DIVIDES_BY_CP_SIZE = "get_cp_size" in Trainer._get_num_items_in_batch.__code__.co_names
USE_CONFIG = "ACCELERATE_USE_PARALLELISM_CONFIG"  # environment variable
FULL_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class ParallelTrainer(Trainer):
    """`Trainer` with context parallelism (`context_parallel_size`) and full checkpoints of tensor-parallel models."""

    model: nn.Module
    optimizer: Any  # Accelerate's, around torch's
    context_mesh: DeviceMesh | None = None  # (data-parallel groups, processes per group)

    def __init__(self, model=None, args=None, **kwargs):
        with _allow_saving_optimizer(args, is_tensor_parallel(model)):
            super().__init__(model, args, **kwargs)
        if self.context_mesh is not None and (self.args.label_smoothing_factor or self.compute_loss_func is not None):
            raise ValueError(
                "With context_parallel_size the model computes the loss, as a process has only the logits of its shard: "
                "leave label_smoothing_factor and compute_loss_func out."
            )

    def create_accelerator_and_postprocess(self) -> None:
        size = self._resolve_context_parallel_size()
        config = self.args.parallelism_config
        if config is not None and config.tp_size > 1 and not is_tensor_parallel(self.model):
            raise ValueError(
                f"ParallelismConfig(tp_size={config.tp_size}) needs a model that was loaded tensor-parallel: "
                f"from_pretrained(..., distributed_config=DistributedConfig(tp_size={config.tp_size}))."
            )
        super().create_accelerator_and_postprocess()
        if size > 1:
            if self.args.world_size % size:
                raise ValueError(
                    f"context_parallel_size {size} must divide the number of processes, {self.args.world_size}: start more "
                    "with `accelerate launch --num_processes`."
                )
            shape = (self.args.world_size // size, size)
            # Accelerate's data loaders look up these dimension names
            self.context_mesh = init_device_mesh(self.args.device.type, shape, mesh_dim_names=("dp_replicate", "cp"))
            self.accelerator.dataloader_config.dispatch_batches = False  # dispatching ignores the mesh

    def train(self, *args, **kwargs):
        """`Trainer.train`, also after `evaluate`, which prepares the model without DistributedDataParallel.

        Accelerate prepares no model twice, so that each process would train its own.
        """
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled or is_tensor_parallel(self.model)
        is_wrapped = any(isinstance(module, DistributedDataParallel) for module in self.model_wrapped.modules())
        if self.args.world_size > 1 and not is_sharded and not is_wrapped:
            model: Any = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
            model._is_accelerate_prepared = False
            self.model_wrapped = model
        return super().train(*args, **kwargs)

    def _resolve_context_parallel_size(self) -> int:
        """`context_parallel_size`, also from Accelerate's ParallelismConfig, which by itself would use ring attention."""
        args: Any = self.args
        size, config = getattr(args, "context_parallel_size", 1), args.parallelism_config
        if config is None and os.environ.get(USE_CONFIG) == "true":
            config = ParallelismConfig()  # of `accelerate launch`, from the environment
        if config is None or config.cp_size == 1:
            return size
        if size not in (1, config.cp_size) or max(config.tp_size, config.dp_replicate_size) > 1:
            raise ValueError(
                f"Context parallelism cannot be combined with the other sizes of {config!r} and context_parallel_size {size}: "
                "set cp_size, and dp_shard_size for FSDP."
            )
        args.parallelism_config = None  # FSDP, where enabled, shards the model over all processes
        os.environ[USE_CONFIG] = "false"
        args.context_parallel_size = config.cp_size
        return config.cp_size

    # Context parallelism ----------------------------------------------------------------------------------------------

    def get_cp_size(self) -> int:
        return super().get_cp_size() if self.context_mesh is None else self.context_mesh["cp"].size()

    def _get_dataloader(self, *args, **kwargs) -> DataLoader:
        """Data loaders return the same batches to the processes that share a sequence."""
        state = self.accelerator.state
        original_mesh, state.device_mesh = state.device_mesh, self.context_mesh or state.device_mesh
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            state.device_mesh = original_mesh  # otherwise FSDP would use it as its mesh

    def _get_num_items_in_batch(self, batch_samples, device):
        """Divides by `get_cp_size`: each process of a group counts the tokens of whole sequences."""
        count = super()._get_num_items_in_batch(batch_samples, device)
        if self.context_mesh is None or count is None or TRAINER_DIVIDES_BY_CP_SIZE:
            return count
        return count / self.get_cp_size()

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch=None):
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        if self.context_mesh is None or num_items_in_batch is None:
            return result
        # Trainer expects each process's part of the summed loss, but this is the loss of whole sequences
        size = self.get_cp_size()
        return (result[0] / size, result[1]) if isinstance(result, tuple) else result / size

    def prediction_step(self, model, inputs, prediction_loss_only: bool, ignore_keys=None):
        if self.context_mesh is not None and not prediction_loss_only:
            warnings.warn("With context_parallel_size, evaluation returns the loss and no other metrics.", stacklevel=2)
            prediction_loss_only = True
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def shard_sequences(self, model: nn.Module) -> nn.Module:
        """Makes the model context-parallel if the arguments ask for it."""
        return model if self.context_mesh is None else parallelize(model, self.context_mesh["cp"])

    # Tensor parallelism -----------------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        full_state = None
        if is_tensor_parallel(self.model):  # all processes take part, though only one writes the file
            full_state = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=FULL_STATE)
        with self._full_optimizer_state(full_state):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with _shard_loaded_weights(self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with _shard_loaded_weights(self.model):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._full_optimizer_state():
            super()._load_optimizer_and_scheduler(checkpoint)

    @contextmanager
    def _full_optimizer_state(self, state: dict[str, Any] | None = None) -> Iterator[None]:
        """Within it the optimizer's `state_dict` returns `state`, and its `load_state_dict` accepts a full state."""
        optimizer = self.optimizer
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):  # FSDP and DeepSpeed save other files
            self.optimizer = _FullStateOptimizer(self, state)
        try:
            yield
        finally:
            self.optimizer = optimizer


class _FullStateOptimizer:
    """Replaces an optimizer while its state is saved or loaded."""

    def __init__(self, trainer: ParallelTrainer, state: dict[str, Any] | None):
        self.trainer, self.optimizer, self.state = trainer, trainer.optimizer, state

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict() if self.state is None else self.state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        name = next((name for group in state["param_groups"] for name in group["params"]), None)
        if isinstance(name, str) != is_tensor_parallel(self.trainer.model):
            previous, current = ("tensor-parallel", "is not") if isinstance(name, str) else ("not tensor-parallel", "is")
            raise ValueError(
                f"The checkpoint is of a run that was {previous} and now {current}: its optimizer state cannot be loaded. "
                "Resume with the same parallelism, or start from its weights in another output_dir."
            )
        if is_tensor_parallel(self.trainer.model):
            set_optimizer_state_dict(self.trainer.model, self.optimizer.optimizer, state, options=FULL_STATE)
        else:
            self.optimizer.load_state_dict(state)


def is_tensor_parallel(model: nn.Module | None) -> bool:
    return getattr(model, "is_distributed_loading_by_transformers", False)


@contextmanager
def _allow_saving_optimizer(args, tensor_parallel: bool) -> Iterator[None]:
    """transformers requires save_only_model; here the optimizer can be saved."""
    if not tensor_parallel or args is None:
        yield
        return
    original_value, args.save_only_model = args.save_only_model, True
    try:
        yield
    finally:
        args.save_only_model = original_value


@contextmanager
def _shard_loaded_weights(model: nn.Module) -> Iterator[None]:
    """Within it the full weights of a checkpoint are sharded like the model's when they are loaded."""
    if not is_tensor_parallel(model):
        yield
        return
    hook = model.register_load_state_dict_pre_hook(_shard_weights)
    try:
        yield
    finally:
        hook.remove()


def _shard_weights(model: nn.Module, state_dict: dict[str, torch.Tensor], *args) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state_dict and isinstance(parameter, DTensor) and not isinstance(state_dict[name], DTensor):
            state_dict[name] = distribute_tensor(
                state_dict[name], parameter.device_mesh, parameter.placements, src_data_rank=None
            )


__all__ = ["ParallelTrainer", "is_tensor_parallel"]
