# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Resuming from the newest complete checkpoint, also after a run that was killed.

A checkpoint is complete if it has `trainer_state.json`, which Trainer writes last, and the files that the settings require,
none of them empty or cut off, as a full disk or a power failure leaves them.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from accelerate.utils import gather_object
from torch import nn
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME

from ..files import TRAINER_STATE, open_safetensors, read_json


logger = logging.getLogger(__name__)


def output_folder(trainer: Trainer) -> Path:
    """Where a trainer's checkpoints are saved."""
    assert trainer.args.output_dir is not None  # TrainingArguments sets a default
    return Path(trainer.args.output_dir)


def list_checkpoints(output_dir: str | Path) -> dict[int, Path]:
    """The `checkpoint-STEP` folders of an output folder by step, newest first; other names are ignored."""
    folders = {}
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        match = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-([0-9]+)", path.name)
        if match and path.is_dir():
            folders[int(match[1])] = path
    return dict(sorted(folders.items(), reverse=True))


def is_finished(folder: Path) -> bool:
    """Whether saving a checkpoint was completed, even if files of it are missing now."""
    return (folder / TRAINER_STATE).is_file()


def choose_checkpoint(trainer: Trainer, resume_from_checkpoint: str | bool | None) -> str | None:
    """The checkpoint to resume from.

    Args:
        trainer: its settings determine which files a checkpoint must have.
        resume_from_checkpoint: a checkpoint folder; True or "true" for the newest complete one in the output folder; None for
            the same if there is one; False or "false" for none.

    Returns:
        The folder, or None to start at the beginning. All processes return the same.

    Raises:
        FileNotFoundError: the folder does not exist, or True was passed and there is no complete checkpoint.
        ValueError: the checkpoint is incomplete, no checkpoint is complete although one was finished, or DeepSpeed saved it
            with another number of processes.
    """
    option = str(resume_from_checkpoint).lower()
    if option == "false":
        return None
    if option in ("none", "true"):
        folder = _find_newest_complete(trainer)
        if folder is None:
            if option == "true":
                raise FileNotFoundError(f"There is no complete checkpoint in {trainer.args.output_dir!r} to resume from.")
            return None
    else:
        folder = Path(str(resume_from_checkpoint))
        if not folder.is_dir():
            raise FileNotFoundError(f"The checkpoint folder {resume_from_checkpoint!r} does not exist.")
        if problems := _gather_problems(trainer, folder):
            raise ValueError(
                f"The checkpoint {resume_from_checkpoint!r} is incomplete: {'; '.join(problems)}. Choose another."
            )
    if _process_count_changed(trainer, folder):
        message = f"{folder} was saved by another number of processes than the {trainer.args.world_size} of this run"
        if trainer.is_deepspeed_enabled:
            raise ValueError(
                f"{message}, each with its shard of DeepSpeed's optimizer: start the same number, or start from its weights "
                "in another output_dir."
            )
        logger.warning(f"{message}: the order of the data and all random numbers differ from those of an uninterrupted run.")
    return str(folder)


def _find_newest_complete(trainer: Trainer) -> Path | None:
    folders, any_finished = [], False
    for step in sorted(set(gather_object(list(list_checkpoints(output_folder(trainer))))), reverse=True):
        folder = output_folder(trainer) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        problems = _gather_problems(trainer, folder)
        if not problems:
            return folder
        logger.warning(f"Skipped the incomplete checkpoint {folder}: {'; '.join(problems)}.")
        folders.append(str(folder))
        any_finished = any_finished or any(gather_object([is_finished(folder)]))
    if any_finished:  # otherwise the run was killed during its first save
        raise ValueError(
            f"None of the checkpoints can be resumed from: {', '.join(folders)}. To start afresh, use another --output_dir or "
            "--resume_from_checkpoint false."
        )
    return None


def _gather_problems(trainer: Trainer, folder: Path) -> list[str]:
    """Problems of a checkpoint on any of the processes, each of which needs its own files."""
    return sorted(set(gather_object(list(_find_problems(trainer, folder)))))


def _find_problems(trainer: Trainer, folder: Path) -> Iterator[str]:
    for alternatives in _required_files(trainer, folder):
        paths = [path for pattern in alternatives for path in folder.glob(pattern)]
        for path in paths or [folder / alternatives[0]]:
            yield from _find_damage(folder, path)
    if (folder / CONFIG_NAME).exists():  # adapters have none
        yield from _find_damage(folder, folder / CONFIG_NAME)


def _find_damage(folder: Path, path: Path) -> Iterator[str]:
    """Signs that a file was not written to its end; reads no tensors."""
    name = path.relative_to(folder).as_posix()
    if path.is_dir():  # of torch.distributed.checkpoint, which writes its metadata last
        yield from _find_damage(folder, path / ".metadata")
    elif not path.is_file():
        yield f"{name} is missing"
    elif path.stat().st_size == 0:
        yield f"{name} is empty"
    else:
        try:
            if path.suffix == ".safetensors":
                with open_safetensors(path):
                    pass
            elif path.suffix in (".pt", ".pth", ".bin"):
                ZipFile(path).close()  # reads the directory of its members, which torch.save writes last
            elif path.suffix == ".json":
                for shard in sorted(set(read_json(path).get("weight_map", {}).values())):
                    yield from _find_damage(folder, folder / shard)
        except (BadZipFile, ValueError):
            yield f"{name} is cut off or damaged"


def _required_files(trainer: Trainer, folder: Path) -> Iterator[tuple[str, ...]]:
    """Files that the settings require: tuples of patterns, at least one of which must match."""
    yield (TRAINER_STATE,)
    if trainer.is_deepspeed_enabled:
        yield ("latest",)  # names the folder with weights and optimizer
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
    """Whether the checkpoint has RNG states, but not the one of this process."""
    rank = "" if trainer.args.world_size <= 1 else f"_{trainer.args.process_index}"
    return any(folder.glob("rng_state*.pth")) and not (folder / f"rng_state{rank}.pth").exists()


class _SeededLengthGroupedSampler(LengthGroupedSampler):
    """`LengthGroupedSampler` whose order depends only on the seed and the epoch, which Accelerate sets."""

    def __init__(self, batch_size: int, lengths: list[int], seed: int):
        super().__init__(batch_size, lengths=lengths, generator=torch.Generator())
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch)
        return super().__iter__()


class CheckpointTrainer(Trainer):
    """`Trainer` that resumes from complete checkpoints only, and never trains beyond `max_steps`.

    transformers' Trainer also resumes from checkpoints without weights, optimizer, scheduler or RNG state, trains one more
    step after resuming from a checkpoint of the last step, and with "group_by_length" goes on in another order.
    """

    model: nn.Module

    def required_files(self) -> list[str]:
        """Files that this trainer needs to resume, in addition to Trainer's."""
        return []

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """`Trainer.train`.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the newest complete one in `output_dir`.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: the checkpoint is incomplete.
            RuntimeError: the checkpoint belongs to another model.
        """
        if resume_from_checkpoint is not None:
            resume_from_checkpoint = choose_checkpoint(self, resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _get_train_sampler(self, train_dataset=None):
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            return _SeededLengthGroupedSampler(sampler.batch_size, list(sampler.lengths), seed)
        return sampler

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raises for missing parameters, as strict loading does; Trainer only warns."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        ids = {id(value) for name, value in parameters.items() if name not in load_result.missing_keys}  # including tied ones
        names = [name for name in load_result.missing_keys if name in parameters and id(parameters[name]) not in ids]
        if names:
            raise RuntimeError(f"The checkpoint is of another model: {', '.join(names)} missing")
        load_result.missing_keys[:] = [
            name for name in load_result.missing_keys if name not in parameters
        ]  # tied ones are loaded
        super()._issue_warnings_after_load(load_result)

    def _run_epoch(self, *args, **kwargs) -> None:
        """Stops if a checkpoint of the last step was resumed: Trainer checks `max_steps` only after each step."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:  # a checkpoint that is overwritten is incomplete until it is saved
            (folder / TRAINER_STATE).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)


__all__ = ["CheckpointTrainer", "choose_checkpoint", "is_finished", "list_checkpoints", "output_folder"]
