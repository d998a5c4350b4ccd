# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Context-parallel training: several processes share each sequence (`context_parallel_size`)."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader
from transformers import Trainer

from ..parallel.context import parallelize
from .trainer import ToSTTrainer


# older versions only consult Accelerate's ParallelismConfig
TRAINER_DIVIDES_BY_CP_SIZE = "get_cp_size" in Trainer._get_num_items_in_batch.__code__.co_names


class ContextParallelTrainer(ToSTTrainer):
    """`ToSTTrainer` with `args.context_parallel_size` processes per sequence; see `tost_hf.parallel.parallelize`.

    Evaluation then returns only the loss, as each process has only the logits of its shard.

    Raises:
        ValueError: `context_parallel_size` does not divide the number of processes, Accelerate's ParallelismConfig is set, or
            the loss is not the model's (label smoothing, `compute_loss_func`).

    Example, in a script started by `accelerate launch --num_processes 4`: two sequences at a time, each on two processes.

    ```python
    >>> args = ToSTTrainingArguments("out", context_parallel_size=2, per_device_train_batch_size=1)
    >>> ContextParallelTrainer(model, args, train_dataset=dataset).train()
    ```
    """

    context_mesh: DeviceMesh | None = None  # (data-parallel groups, processes per group)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.context_mesh is not None and (self.args.label_smoothing_factor or self.compute_loss_func is not None):
            raise ValueError(
                "With context_parallel_size the model computes the loss, as a process has only the logits of its shard: "
                "leave label_smoothing_factor and compute_loss_func out."
            )

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        size = getattr(self.args, "context_parallel_size", 1)
        if size > 1:
            self._check_context_parallel_size(size)
            shape = (self.args.world_size // size, size)
            # Accelerate's data loaders look up these dimension names
            self.context_mesh = init_device_mesh(self.args.device.type, shape, mesh_dim_names=("dp_replicate", "cp"))
            self.accelerator.dataloader_config.dispatch_batches = False  # dispatching ignores the mesh

    def _check_context_parallel_size(self, size: int) -> None:
        if self.args.world_size % size:
            raise ValueError(
                f"context_parallel_size {size} must divide the number of processes, {self.args.world_size}: start more with "
                "`accelerate launch --num_processes`."
            )
        if getattr(self.accelerator, "parallelism_config", None) is not None:
            raise ValueError(
                "context_parallel_size and Accelerate's ParallelismConfig exclude each other: leave the latter out."
            )

    def prepare_model(self, model: nn.Module) -> nn.Module:
        model = super().prepare_model(model)
        return model if self.context_mesh is None else parallelize(model, self.context_mesh["cp"])

    def get_cp_size(self) -> int:
        return super().get_cp_size() if self.context_mesh is None else self.context_mesh["cp"].size()

    def _get_dataloader(self, *args, **kwargs) -> DataLoader:
        with self._share_batches_within_groups():
            return super()._get_dataloader(*args, **kwargs)

    @contextmanager
    def _share_batches_within_groups(self) -> Iterator[None]:
        """Data loaders prepared within it return the same batches to the processes that share a sequence."""
        state = self.accelerator.state
        original_mesh, state.device_mesh = state.device_mesh, self.context_mesh or state.device_mesh
        try:
            yield
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


__all__ = ["ContextParallelTrainer"]
