# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A Trainer that loses nothing: it resumes from complete checkpoints alone, and stops at a loss that is NaN or infinite."""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..files import TRAINER_STATE
from .checkpoints import checkpoints, choose_checkpoint, delete_old_checkpoints, output_folder


TORCH_WRITES = "inline_container|PytorchStreamWriter|iostream"  # in a RuntimeError: torch.save could not write


class GuardedTrainer(Trainer):
    """`Trainer` whose checkpoints are complete or skipped, and that never saves a model whose loss is NaN.

    transformers' own goes on from a checkpoint whose optimizer, scheduler or random numbers are missing, replaces a NaN in the
    log by the mean of the losses before, and goes on until all good checkpoints are deleted.
    """

    _finite_until = 0  # the step of the last check
    _not_a_number: torch.Tensor | float = 0.0  # until a loss that is NaN or infinite makes it NaN

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self._check_processes()

    def _check_processes(self) -> None:
        """Refuses (ValueError) processes that would each train alone, or hold what they were asked to share."""
        started = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
        if started > 1 and self.args.world_size == 1:
            raise ValueError(
                f"{started} processes were started, but each would train alone and write the same files: there is no device "
                "that joins them. To train on CPUs, set use_cpu=True (--use_cpu) or ACCELERATE_USE_CPU=true."
            )
        asked = self.args.fsdp_plugin_args is not None or os.environ.get("ACCELERATE_USE_FSDP") == "true"
        if self.args.world_size > 1 and asked and not self.is_fsdp_enabled:
            raise ValueError(
                "FSDP was asked for, but Accelerate shards no model on CPUs: each process would hold all of it. Train on "
                "devices that Accelerate knows, or without FSDP."
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """`Trainer.train`.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the newest complete one in `output_dir`.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: the checkpoint is incomplete or of another model.
            FloatingPointError: the loss became NaN or infinite; nothing was saved since.
        """
        if resume_from_checkpoint is not None:
            resume_from_checkpoint = choose_checkpoint(self, resume_from_checkpoint)
        self._finite_until = 0 if resume_from_checkpoint is None else int(self._step_of(resume_from_checkpoint))
        self._not_a_number = 0.0
        result = super().train(resume_from_checkpoint, *args, **kwargs)
        self._check_loss()
        return result

    @staticmethod
    def _step_of(folder: str) -> int:
        name = Path(folder).name.rpartition("-")[2]
        return int(name) if name.isdecimal() else 0

    def _run_epoch(self, *args, **kwargs) -> None:
        """Trains no further where a checkpoint of the last step was resumed: Trainer counts steps after each, not before."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        # 0 x NaN and 0 x infinity are NaN, and nothing waits for the device
        self._not_a_number = self._not_a_number + 0 * loss.detach()
        return loss

    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, *args, **kwargs) -> None:
        if self.control.should_log or self.control.should_evaluate or self.control.should_save:
            self._check_loss(None if self.accelerator.optimizer_step_was_skipped else grad_norm)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _check_loss(self, grad_norm: torch.Tensor | float | None = None) -> None:
        """Stops all processes if a loss since the last check, or the gradient just applied, was NaN or infinite."""
        # here it waits for the device, as logging does
        seen = float(self._not_a_number) + (0.0 if grad_norm is None else 0 * float(grad_norm))
        if math.isnan(self.accelerator.reduce(torch.tensor(seen, device=self.args.device), "sum").item()):
            folders = [str(path) for path in checkpoints(output_folder(self)).values() if (path / TRAINER_STATE).is_file()]
            last = f"the last checkpoint is {folders[0]}" if folders else "there is no checkpoint"
            raise FloatingPointError(
                f"The loss or its gradient became NaN or infinite after step {self._finite_until}, by step "
                f"{self.state.global_step}. Training has stopped, and nothing was saved since: {last}. Lower the learning "
                "rate, or look for bad values in the data and in the model trained from."
            )
        self._finite_until = self.state.global_step

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # trainer_state.json, written next, says that all files are there

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with _saving(f"the model to {output_dir or self.args.output_dir}"):
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model, trial) -> None:
        run_dir = Path(self._get_output_dir(trial))
        folder = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:  # one of an earlier run is replaced file by file
            (folder / TRAINER_STATE).unlink(missing_ok=True)
        # Trainer's rotation would take checkpoint-20-old, too
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            with _saving(f"the checkpoint {folder}"):
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save and limit is not None and limit > 0:
            best = self.state.best_model_checkpoint
            kept = [folder] if best is None else [folder, Path(best)]
            delete_old_checkpoints(run_dir, limit, kept)


class _SavingFailed(OSError):
    """Has the sentence already."""


@contextmanager
def _saving(what: str) -> Iterator[None]:
    """Turns what a full disk causes, an exception of the one who happens to write, into an OSError that says what to do."""
    try:
        yield
    except _SavingFailed:  # of the model within the checkpoint
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search(TORCH_WRITES, str(error)):
            raise
        raise _SavingFailed(
            f"Saving {what} failed: {error}. Earlier checkpoints are as they were: make room on the disk and start again to "
            "go on from there."
        ) from error


__all__ = ["GuardedTrainer"]
