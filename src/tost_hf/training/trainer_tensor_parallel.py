# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Tensor-parallel training of a model loaded with `DistributedConfig(tp_plan="auto")`, with checkpoints of the full model.

transformers' Trainer does not save the optimizer of such a model, as each process has a shard of its state. Here the shards
are gathered and saved by parameter name; loading shards them again, for the current number of processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from .trainer import ToSTTrainer


FULL_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class TensorParallelTrainer(ToSTTrainer):
    """`ToSTTrainer` that saves tensor-parallel models as full checkpoints, optimizer included.

    A run may resume with another number of processes. Other models are trained as by `ToSTTrainer`.

    Raises:
        ValueError: raised by `train`: the checkpoint is of a tensor-parallel run and the model is not, or vice versa.

    Example, in a script started by `torchrun --nproc_per_node 2`:

    ```python
    >>> from transformers.distributed import DistributedConfig

    >>> model = ToSTForCausalLM.from_pretrained("my-tost", distributed_config=DistributedConfig(tp_plan="auto"))
    >>> TensorParallelTrainer(model, ToSTTrainingArguments("out"), train_dataset=dataset).train()
    ```
    """

    model: nn.Module
    optimizer: Any  # Accelerate's, around torch's

    def __init__(self, model=None, args=None, **kwargs):
        with _allow_saving_optimizer(args, is_tensor_parallel(model)):
            super().__init__(model, args, **kwargs)

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

    def __init__(self, trainer: TensorParallelTrainer, state: dict[str, Any] | None):
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


__all__ = ["TensorParallelTrainer"]
