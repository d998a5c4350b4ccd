# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Tensor-parallel training, of a model loaded with `DistributedConfig(tp_plan="auto")`, with checkpoints of the whole model.

transformers' own Trainer does not save the optimizer of such a model, as each process has a shard of its state. Here the
shards are gathered to be saved, under the parameters' names, and the state is sharded again when it is loaded, for as many
processes as there are then.
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
    """`ToSTTrainer` whose checkpoints of a tensor-parallel model are those of the whole model, optimizer included."""

    model: nn.Module
    optimizer: Any  # Accelerate's, around torch's

    def __init__(self, model=None, args=None, **kwargs):
        with _allow_saving_optimizer(args, is_tensor_parallel(model)):
            super().__init__(model, args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        whole = None
        if is_tensor_parallel(self.model):  # all processes send their shards, though one writes the file
            whole = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=FULL_STATE)
        with self._full_optimizer_state(whole):
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
        """Within it the optimizer returns `state` as its own, and loads that of the whole model."""
        before = self.optimizer
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):  # which save other files
            self.optimizer = _FullStateOptimizer(self, state)
        try:
            yield
        finally:
            self.optimizer = before


class _FullStateOptimizer:
    """Stands in for an optimizer while its state is saved or loaded."""

    def __init__(self, trainer: TensorParallelTrainer, state: dict[str, Any] | None):
        self.trainer, self.optimizer, self.state = trainer, trainer.optimizer, state

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict() if self.state is None else self.state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        name = next((name for group in state["param_groups"] for name in group["params"]), None)
        if isinstance(name, str) != is_tensor_parallel(self.trainer.model):
            before, now = ("tensor-parallel", "is not") if isinstance(name, str) else ("not tensor-parallel", "is")
            raise ValueError(
                f"The checkpoint is of a run that was {before} and now {now}: the state of its optimizer cannot be used. "
                "Resume as it was, or start from its weights in another output_dir."
            )
        if is_tensor_parallel(self.trainer.model):
            set_optimizer_state_dict(self.trainer.model, self.optimizer.optimizer, state, options=FULL_STATE)
        else:
            self.optimizer.load_state_dict(state)


def is_tensor_parallel(model: nn.Module | None) -> bool:
    return getattr(model, "is_distributed_loading_by_transformers", False)


@contextmanager
def _allow_saving_optimizer(args, tensor_parallel: bool) -> Iterator[None]:
    """transformers insists on save_only_model; here the optimizer can be saved."""
    if not tensor_parallel or args is None:
        yield
        return
    before, args.save_only_model = args.save_only_model, True
    try:
        yield
    finally:
        args.save_only_model = before


@contextmanager
def _shard_loaded_weights(model: nn.Module) -> Iterator[None]:
    """Whole weights that are loaded within it are sharded as the model's are."""
    if not is_tensor_parallel(model):
        yield
        return
    hook = model.register_load_state_dict_pre_hook(_shard_weights)
    try:
        yield
    finally:
        hook.remove()


def _shard_weights(model: nn.Module, state_dict: dict[str, torch.Tensor], *args) -> None:
    for name, own in model.named_parameters(remove_duplicate=False):
        if name in state_dict and isinstance(own, DTensor) and not isinstance(state_dict[name], DTensor):
            state_dict[name] = distribute_tensor(state_dict[name], own.device_mesh, own.placements, src_data_rank=None)


__all__ = ["TensorParallelTrainer"]
