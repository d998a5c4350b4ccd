# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A Trainer that saves and resumes a model whose heads are cut over processes (`DistributedConfig(tp_plan="auto")`).

transformers' own refuses to: each process has a part of the optimizer's state. Here the parts are joined to be saved, under
the parameters' names, and cut again when they are loaded, for as many processes as there are then.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Trainer


BY_NAME = StateDictOptions(full_state_dict=True, cpu_offload=True)


class HeadsTrainer(Trainer):
    """`Trainer` whose checkpoints of a model with cut heads are those of the whole model."""

    model: nn.Module
    optimizer: Any  # Accelerate's, around the own one

    def __init__(self, model=None, args=None, **kwargs):
        with _without_a_word(args, _heads_are_cut(model)):
            super().__init__(model, args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        whole = None
        if _heads_are_cut(self.model):  # all processes give their parts, though one writes the file
            whole = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=BY_NAME)
        with self._whole_optimizer(whole):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with _cutting(self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with _cutting(self.model):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._whole_optimizer():
            super()._load_optimizer_and_scheduler(checkpoint)

    @contextmanager
    def _whole_optimizer(self, state: dict[str, Any] | None = None) -> Iterator[None]:
        """Within it the optimizer gives `state` as its own, and takes that of the whole model."""
        before = self.optimizer
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):  # which have files of their own
            self.optimizer = _WholeOptimizer(self, state)
        try:
            yield
        finally:
            self.optimizer = before


class _WholeOptimizer:
    """In an optimizer's place while its state is saved or loaded."""

    def __init__(self, trainer: HeadsTrainer, state: dict[str, Any] | None):
        self.trainer, self.optimizer, self.state = trainer, trainer.optimizer, state

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict() if self.state is None else self.state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        name = next((name for group in state["param_groups"] for name in group["params"]), None)
        if isinstance(name, str) != _heads_are_cut(self.trainer.model):
            before, now = ("cut", "now are not") if isinstance(name, str) else ("not cut", "now are")
            raise ValueError(
                f"The checkpoint is of a run whose heads were {before} and {now}: the state of its optimizer cannot be used. "
                "Go on as it was, or begin from its weights in another output_dir."
            )
        if _heads_are_cut(self.trainer.model):
            set_optimizer_state_dict(self.trainer.model, self.optimizer.optimizer, state, options=BY_NAME)
        else:
            self.optimizer.load_state_dict(state)


def _heads_are_cut(model: nn.Module | None) -> bool:
    return getattr(model, "is_distributed_loading_by_transformers", False)


@contextmanager
def _without_a_word(args, is_cut: bool) -> Iterator[None]:
    """transformers asks that no optimizer be saved; here it can be."""
    if not is_cut or args is None:
        yield
        return
    before, args.save_only_model = args.save_only_model, True
    try:
        yield
    finally:
        args.save_only_model = before


@contextmanager
def _cutting(model: nn.Module) -> Iterator[None]:
    """Whole weights that are loaded here are cut as the model's heads are."""
    if not _heads_are_cut(model):
        yield
        return
    hook = model.register_load_state_dict_pre_hook(_cut_weights)
    try:
        yield
    finally:
        hook.remove()


def _cut_weights(model: nn.Module, state_dict: dict[str, torch.Tensor], *args) -> None:
    for name, own in model.named_parameters(remove_duplicate=False):
        if name in state_dict and isinstance(own, DTensor) and not isinstance(state_dict[name], DTensor):
            state_dict[name] = distribute_tensor(state_dict[name], own.device_mesh, own.placements, src_data_rank=None)


__all__ = ["HeadsTrainer"]
