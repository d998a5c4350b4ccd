# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints that are complete or skipped: a manifest for each, and the choice of the one to resume from.

`manifest.json` lists a checkpoint's files with sizes and SHA-256 sums, so that a missing or changed one shows. It is empty
while the checkpoint is being saved, and moved into place at the end. A checkpoint without a manifest, such as one of
Trainer or one fetched from the Hub, is complete if it has `trainer_state.json`, which Trainer writes last.
"""

import json
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..files import TRAINER_STATE, sha256, staged_file
from ..hub.records import open_safetensors, read_json


logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
UNLISTED_FILES = (MANIFEST, "README.md")  # a card may be edited
TORCH_WRITE_ERRORS = "inline_container|PytorchStreamWriter|iostream"  # in a RuntimeError: torch.save could not write


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
    """Whether a checkpoint was saved completely, whatever became of it since."""
    if (folder / MANIFEST).is_file():
        return (folder / MANIFEST).stat().st_size > 0
    return (folder / TRAINER_STATE).is_file()


def begin_manifest(folder: Path) -> None:
    """Marks a checkpoint as unfinished."""
    with staged_file(folder / MANIFEST) as staged:
        staged.touch()


def write_manifest(folder: Path) -> None:
    """Lists the files of a checkpoint that is complete."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    listed = {
        name: {"size": path.stat().st_size, "sha256": sha256(path)}
        for name, path in files.items()
        if name not in UNLISTED_FILES
    }
    with staged_file(folder / MANIFEST) as staged:
        staged.write_text(json.dumps({"files": listed}, indent=2) + "\n", encoding="utf-8")


def delete_old_checkpoints(output_dir: str | Path, limit: int, kept: list[Path]) -> None:
    """Deletes the checkpoints saved first until `limit` are left, unfinished ones before all; those of `kept` stay."""

    def saved(path: Path) -> tuple[bool, float]:
        state = path / TRAINER_STATE
        return is_finished(path), state.stat().st_mtime if state.is_file() else 0.0

    found = list(checkpoints(output_dir).values())
    kept = [path.resolve() for path in kept]
    removable = [path for path in found if path.resolve() not in kept]
    removable.sort(key=saved)
    for path in removable[: max(0, len(found) - limit)]:
        (path / TRAINER_STATE).unlink(missing_ok=True)  # first: what is left if this is killed is no checkpoint
        shutil.rmtree(path, ignore_errors=True)


# The checkpoint to resume from -----------------------------------------------------------------------------------------


class CompleteCheckpoint(str):
    """The folder of a checkpoint that `choose_checkpoint` found complete: its files are not read a second time."""


def choose_checkpoint(trainer: Trainer, wanted: str | bool | None) -> CompleteCheckpoint | None:
    """The checkpoint to resume from.

    Args:
        trainer: its settings say which files a checkpoint must have.
        wanted: a checkpoint's folder; True or "true" for the newest complete one in the output folder; None for that one if
            there is any; False or "false" for none. What this function returned is returned again, unread.

    Returns:
        The folder, or None to start at the beginning. All processes get the same answer.

    Raises:
        FileNotFoundError: the folder named does not exist, or True was given and there is no complete checkpoint.
        ValueError: the checkpoint named is incomplete, all checkpoints were finished once and are damaged now, or DeepSpeed
            saved one with another number of processes.
    """
    if isinstance(wanted, CompleteCheckpoint):
        return wanted
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
        problems = _gather_problems(trainer, chosen)
        if problems:
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
    return CompleteCheckpoint(chosen)


def _find_newest_complete(trainer: Trainer) -> Path | None:
    steps = sorted(set(gather_object(list(checkpoints(output_folder(trainer))))), reverse=True)
    skipped: list[str] = []
    finished, chosen = False, None
    for step in steps:
        folder = output_folder(trainer) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        problems = _gather_problems(trainer, folder)
        if not problems:
            chosen = folder
            break
        skipped.append(f"{folder}: {'; '.join(problems)}")
        finished = finished or any(gather_object([is_finished(folder)]))
    if chosen is None and finished:
        raise ValueError(
            f"None of the checkpoints can be resumed from. {'. '.join(skipped)}. To start afresh, use another --output_dir or "
            "--resume_from_checkpoint false."
        )
    for reason in skipped:  # unfinished ones alone: the run was killed in its first save
        logger.warning(f"Skipped the incomplete checkpoint {reason}.")
    return chosen


def _gather_problems(trainer: Trainer, folder: Path) -> list[str]:
    """What is wrong with a checkpoint, as seen by any process: each has files that it alone needs."""
    return sorted(set(gather_object(list(_find_problems(trainer, folder)))))


def _find_problems(trainer: Trainer, folder: Path) -> Iterator[str]:
    manifest, finished = folder / MANIFEST, is_finished(folder)
    if not finished:
        yield "saving was not completed" if manifest.is_file() else f"{TRAINER_STATE} is missing"
    for alternatives in _required_files(trainer, folder):
        if not any(any(folder.glob(pattern)) for pattern in alternatives):
            yield f"{alternatives[0]} is missing"
    if not manifest.is_file():
        for pattern in (TRAINER_STATE, "*.safetensors", "*.pt", "*.pth"):
            yield from (f"{path.name} is damaged" for path in sorted(folder.glob(pattern)) if not _is_complete(path))
        return
    try:
        listed = _read_manifest(manifest) if finished else {}
    except ValueError:
        yield f"{MANIFEST} is damaged, or of an earlier version"
        return
    # the first process of each machine reads the files for all
    hashes = trainer.args.local_process_index == 0
    for name, saved in listed.items():
        path = folder / name
        if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
            yield f"{name} is missing"
        elif path.stat().st_size != saved["size"] or (hashes and sha256(path) != saved["sha256"]):
            yield f"{name} is damaged: it is not the file that was saved"


def _is_complete(file: Path) -> bool:
    """Whether a file can be opened as what its name says, which one that was cut short cannot; no pickle is loaded."""
    if not file.is_file():
        return False
    try:
        if file.suffix == ".json":
            read_json(file)
        elif file.suffix == ".safetensors":
            with open_safetensors(file):
                pass
        else:
            return zipfile.is_zipfile(file)  # as torch.save writes
    except ValueError:
        return False
    return True


def _read_manifest(file: Path) -> dict[str, dict[str, Any]]:
    """The size and hash of each file that a manifest lists; ValueError unless it is as `write_manifest` writes it."""
    try:
        listed = read_json(file)["files"]
        return {name: {"size": int(saved["size"]), "sha256": str(saved["sha256"])} for name, saved in listed.items()}
    except (OverflowError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is no manifest: {error}") from error


def _required_files(trainer: Trainer, folder: Path) -> Iterator[tuple[str, ...]]:
    """What the run's settings need of a checkpoint, whoever saved it: patterns, of each tuple one at least."""
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


# Trainer ---------------------------------------------------------------------------------------------------------------


class CheckpointTrainer(Trainer):
    """`Trainer` that resumes from complete checkpoints only, and trains no step more than it was to.

    transformers' own resumes from a checkpoint whose weights, optimizer, scheduler or random numbers are missing, trains one
    more step after a checkpoint of the last one, and deletes old checkpoints by the beginning of their names.
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
            ValueError: the checkpoint is incomplete, of another model, or has a pickle of other objects than Trainer saves.
        """
        if resume_from_checkpoint is not None:
            resume_from_checkpoint = choose_checkpoint(self, resume_from_checkpoint)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except UnpicklingError as error:
            if resume_from_checkpoint is None:
                raise
            raise ValueError(
                f"optimizer.pt, scheduler.pt or the rng_state file of {resume_from_checkpoint} is a pickle of other objects "
                f"than Trainer saves, and was not loaded: {error}. Resume from another checkpoint."
            ) from error

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        try:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        except RuntimeError as error:
            if "Error(s) in loading state_dict" not in str(error):
                raise
            raise ValueError(
                f"The checkpoint {resume_from_checkpoint} is of another model: {error}. Use the configuration it was saved "
                "with, another --output_dir, or --resume_from_checkpoint false."
            ) from error

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raises for missing parameters, as strict loading does; Trainer only warns."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        loaded = {id(value) for name, value in parameters.items() if name not in load_result.missing_keys}  # tied ones, too
        missing = [name for name in load_result.missing_keys if name in parameters and id(parameters[name]) not in loaded]
        if missing:
            raise RuntimeError(f"Error(s) in loading state_dict: {', '.join(missing)} missing")
        super()._issue_warnings_after_load(load_result)

    def _run_epoch(self, *args, **kwargs) -> None:
        """Trains no further where a checkpoint of the last step was resumed: Trainer counts steps after each, not before."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        run_dir = Path(self._get_output_dir(trial))
        folder = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # Trainer would delete checkpoint-20-old, too
        try:
            with _explain_failure(folder):
                if self.args.should_save:
                    begin_manifest(folder)
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    write_manifest(folder)
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save and limit is not None and limit > 0:
            best = self.state.best_model_checkpoint
            delete_old_checkpoints(run_dir, limit, [folder] if best is None else [folder, Path(best)])


@contextmanager
def _explain_failure(folder: Path) -> Iterator[None]:
    """Turns what a full disk causes, an exception of whichever library writes, into an OSError that says what to do."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search(TORCH_WRITE_ERRORS, str(error)):
            raise
        blocking = [str(path) for path in folder.glob("*.*") if path.is_dir()]
        advice = f"move the folder {blocking[0]}, where a file belongs," if blocking else "free disk space"
        raise OSError(
            f"Saving the checkpoint {folder} failed: {error}. Earlier checkpoints are unchanged: {advice} and start again to "
            "resume from there."
        ) from error


__all__ = [
    "CheckpointTrainer",
    "checkpoints",
    "choose_checkpoint",
    "delete_old_checkpoints",
    "is_finished",
    "output_folder",
]
