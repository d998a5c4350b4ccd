# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Resuming from the newest checkpoint that was saved completely, however the run before ended.

A checkpoint is complete if it has `trainer_state.json`, which Trainer writes last, and the files that the settings ask for.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..files import TRAINER_STATE


logger = logging.getLogger(__name__)


def output_folder(trainer: Trainer) -> Path:
    """Where a trainer's checkpoints are saved."""
    assert trainer.args.output_dir is not None  # TrainingArguments names one where none is given
    return Path(trainer.args.output_dir)


def checkpoints(output_dir: str | Path) -> dict[int, Path]:
    """The folders `checkpoint-STEP` of an output folder by their step, the newest first; no other name counts."""
    found = {}
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-([0-9]+)", path.name)
        if step and path.is_dir():
            found[int(step[1])] = path
    return dict(sorted(found.items(), reverse=True))


def is_finished(folder: Path) -> bool:
    """Whether a checkpoint was saved to its end, whatever became of it since."""
    return (folder / TRAINER_STATE).is_file()


def choose_checkpoint(trainer: Trainer, wanted: str | bool | None) -> str | None:
    """The checkpoint to resume from.

    Args:
        trainer: its settings say which files a checkpoint must have.
        wanted: a checkpoint's folder; True or "true" for the newest complete one in the output folder; None for that one if
            there is any; False or "false" for none.

    Returns:
        The folder, or None to start at the beginning. All processes get the same answer.

    Raises:
        FileNotFoundError: the folder named does not exist, or True was given and there is no complete checkpoint.
        ValueError: the checkpoint named is incomplete, all checkpoints were finished once and miss files now, or DeepSpeed
            saved one with another number of processes.
    """
    word = str(wanted).lower()
    if word == "false":
        return None
    if word in ("none", "true"):
        chosen = _find_newest_complete(trainer)
        if chosen is None:
            if word == "true":
                raise FileNotFoundError(f"There is no complete checkpoint in {trainer.args.output_dir!r} to resume from.")
            return None
    else:
        chosen = Path(str(wanted))
        if not chosen.is_dir():
            raise FileNotFoundError(f"The checkpoint folder {wanted!r} does not exist.")
        if problems := _gather_problems(trainer, chosen):
            raise ValueError(f"The checkpoint {wanted!r} is incomplete: {'; '.join(problems)}. Name another one.")
    if _process_count_changed(trainer, chosen):
        saved_by = f"{chosen} was saved by another number of processes than the {trainer.args.world_size} of this run"
        if trainer.is_deepspeed_enabled:
            raise ValueError(
                f"{saved_by}, each with its shard of DeepSpeed's optimizer: start as many as then, or begin from its weights "
                "in another output_dir."
            )
        logger.warning(
            f"{saved_by}: the order of the data and all random numbers differ from those of a run without interruption."
        )
    return str(chosen)


def _find_newest_complete(trainer: Trainer) -> Path | None:
    skipped, finished = [], False
    for step in sorted(set(gather_object(list(checkpoints(output_folder(trainer))))), reverse=True):
        folder = output_folder(trainer) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        problems = _gather_problems(trainer, folder)
        if not problems:
            return folder
        logger.warning(f"Skipped the incomplete checkpoint {folder}: {'; '.join(problems)}.")
        skipped.append(str(folder))
        finished = finished or any(gather_object([is_finished(folder)]))
    if finished:  # else the run was killed in its first save
        raise ValueError(
            f"None of the checkpoints can be resumed from: {', '.join(skipped)}. To start afresh, use another --output_dir or "
            "--resume_from_checkpoint false."
        )
    return None


def _gather_problems(trainer: Trainer, folder: Path) -> list[str]:
    """What is wrong with a checkpoint, as seen by any process: each has files that it alone needs."""
    return sorted(set(gather_object(list(_find_problems(trainer, folder)))))


def _find_problems(trainer: Trainer, folder: Path) -> Iterator[str]:
    for alternatives in _required_files(trainer, folder):
        if not any(any(folder.glob(pattern)) for pattern in alternatives):
            yield f"{alternatives[0]} is missing"


def _required_files(trainer: Trainer, folder: Path) -> Iterator[tuple[str, ...]]:
    """What the run's settings need of a checkpoint, whoever saved it: patterns, of each tuple one at least."""
    yield (TRAINER_STATE,)
    if trainer.is_deepspeed_enabled:
        yield ("latest",)  # names the folder of weights and optimizer
    elif trainer.is_fsdp_enabled:
        yield ("pytorch_model_fsdp*",)
    else:
        yield ("model.safetensors", "model.safetensors.index.json", "pytorch_model*.bin", "**/adapter_model.*")
    yield from ((name,) for name in getattr(trainer, "required_files", list)())
    if trainer.args.save_only_model:
        return
    if trainer.is_fsdp_enabled:
        yield ("optimizer.bin", "optimizer_*")
    elif not trainer.is_deepspeed_enabled:
        yield ("optimizer.pt",)
        yield ("scheduler.pt",)
    if getattr(trainer.accelerator, "scaler", None) is not None:
        yield ("scaler.pt",)
    yield ("rng_state*.pth",)


def _process_count_changed(trainer: Trainer, folder: Path) -> bool:
    """Whether the checkpoint has random states, but none of this process."""
    rank = "" if trainer.args.world_size <= 1 else f"_{trainer.args.process_index}"
    return any(folder.glob("rng_state*.pth")) and not (folder / f"rng_state{rank}.pth").exists()


class CheckpointTrainer(Trainer):
    """`Trainer` that resumes from complete checkpoints only, and trains no step more than it was to.

    transformers' own resumes from a checkpoint whose weights, optimizer, scheduler or random numbers are missing, and trains
    one more step after a checkpoint of the last one.
    """

    model: nn.Module

    def required_files(self) -> list[str]:
        """Files of a checkpoint that this trainer cannot resume without, besides Trainer's own."""
        return []

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """`Trainer.train`.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the newest complete one in `output_dir`.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: the checkpoint is incomplete.
            RuntimeError: it is of another model.
        """
        if resume_from_checkpoint is not None:
            resume_from_checkpoint = choose_checkpoint(self, resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raises for missing parameters, as strict loading does; Trainer only warns."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        loaded = {id(value) for name, value in parameters.items() if name not in load_result.missing_keys}  # tied ones, too
        missing = [name for name in load_result.missing_keys if name in parameters and id(parameters[name]) not in loaded]
        if missing:
            raise RuntimeError(f"The checkpoint is of another model: {', '.join(missing)} missing")
        super()._issue_warnings_after_load(load_result)

    def _run_epoch(self, *args, **kwargs) -> None:
        """Trains no further where a checkpoint of the last step was resumed: Trainer counts steps after each, not before."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:  # one that is written again is incomplete until the end
            (folder / TRAINER_STATE).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)


__all__ = ["CheckpointTrainer", "checkpoints", "choose_checkpoint", "is_finished", "output_folder"]
