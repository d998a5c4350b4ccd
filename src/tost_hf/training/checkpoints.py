# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints that are whole or skipped: a manifest for each, and the choice of the one to resume from.

`manifest.json` lists the names and sizes of a checkpoint's files, so that one that is missing, cut short or replaced shows. It
is empty while the checkpoint is being saved, and moved into place at the end. A checkpoint without a manifest, such as one of
Trainer or one fetched from the Hub, is complete if it has `trainer_state.json`, which Trainer writes last.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from transformers import Trainer
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME

from ..files import TRAINER_STATE, staged_file


logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
NOT_LISTED = (MANIFEST, "README.md")  # a card may be written again
TORCH_WRITES = "inline_container|PytorchStreamWriter|iostream"  # in a RuntimeError: torch.save could not write


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
    if (folder / MANIFEST).is_file():
        return (folder / MANIFEST).stat().st_size > 0
    return (folder / TRAINER_STATE).is_file()


def begin_manifest(folder: Path) -> None:
    """Marks a checkpoint as not finished."""
    with staged_file(folder / MANIFEST) as staged:
        staged.touch()


def write_manifest(folder: Path) -> None:
    """Lists the files of a checkpoint that is complete."""
    files = {file.relative_to(folder).as_posix(): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()}
    listed = {name: size for name, size in files.items() if name not in NOT_LISTED}
    with staged_file(folder / MANIFEST) as staged:
        staged.write_text(json.dumps({"files": listed}, indent=2) + "\n", encoding="utf-8")


def delete_old_checkpoints(output_dir: str | Path, limit: int, kept: list[Path]) -> None:
    """Deletes the checkpoints saved first until `limit` are left, unfinished ones before all; those of `kept` stay."""

    def saved(path: Path) -> float:
        return (path / TRAINER_STATE).stat().st_mtime if is_finished(path) and (path / TRAINER_STATE).is_file() else 0.0

    kept_folders = {Path(path).resolve() for path in kept}
    oldest_first = sorted(checkpoints(output_dir).items(), key=lambda found: (saved(found[1]), found[0]))
    excess = len(oldest_first) - limit
    for path in [path for _, path in oldest_first if path.resolve() not in kept_folders][: max(0, excess)]:
        (path / TRAINER_STATE).unlink(missing_ok=True)  # first: what is left if this is killed is no checkpoint
        shutil.rmtree(path, ignore_errors=True)


# The checkpoint to resume from -----------------------------------------------------------------------------------------


def choose_checkpoint(trainer: Trainer, wanted: str | bool | None) -> str | None:
    """The checkpoint to resume from.

    Args:
        trainer: its settings say which files a checkpoint must have.
        wanted: a checkpoint's folder; True or "true" for the newest whole one in the output folder; None for that one if there
            is any; False or "false" for none.

    Returns:
        The folder, or None to start at the beginning. All processes get the same answer.

    Raises:
        FileNotFoundError: the folder named does not exist, or True was given and there is no whole checkpoint.
        ValueError: the checkpoint named is incomplete or of another model, all checkpoints were finished once and are damaged
            now, or DeepSpeed saved one with another number of processes.
    """
    word = str(wanted).lower()
    if word == "false":
        return None
    if word in ("none", "true"):
        chosen = _find_newest_whole(trainer)
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
    _check_model(trainer, chosen)
    if _processes_differ(trainer, chosen):
        saved_by = f"{chosen} was saved by another number of processes than the {trainer.args.world_size} of today"
        if trainer.is_deepspeed_enabled:
            raise ValueError(
                f"{saved_by}, each with its part of DeepSpeed's optimizer: start as many as then, or begin from its weights "
                "in another output_dir."
            )
        logger.warning(
            f"{saved_by}: the order of the data and all random numbers differ from those of a run without interruption."
        )
    return str(chosen)


def _find_newest_whole(trainer: Trainer) -> Path | None:
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
    """What is wrong with a checkpoint in the eyes of any process: each has files that it alone needs."""
    return sorted(set(gather_object(list(_find_problems(trainer, folder)))))


def _find_problems(trainer: Trainer, folder: Path) -> Iterator[str]:
    if not is_finished(folder):
        yield "it was not saved to the end" if (folder / MANIFEST).is_file() else f"{TRAINER_STATE} is missing"
    for alternatives in _needed_files(trainer, folder):
        if not any(any(folder.glob(pattern)) for pattern in alternatives):
            yield f"{alternatives[0]} is missing"
    for name, size in _listed_files(folder).items():
        file = folder / name
        if not file.is_file():
            yield f"{name} is missing"
        elif size is not None and file.stat().st_size != size:
            yield f"{name} is damaged ({file.stat().st_size} bytes instead of {size})"
        elif (error := _read_error(file)) is not None:
            yield f"{name} is damaged ({error})"


def _listed_files(folder: Path) -> dict[str, int | None]:
    """The files of a checkpoint by its manifest, with their sizes; without one, those that are there."""
    if (folder / MANIFEST).is_file() and is_finished(folder):
        try:
            return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        except (OSError, ValueError, KeyError, TypeError):
            return {MANIFEST: 0}  # a finished one is not empty
    found = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    return {name: None for name in found if name not in NOT_LISTED}


def _needed_files(trainer: Trainer, folder: Path) -> Iterator[tuple[str, ...]]:
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
    if not _processes_differ(trainer, folder):
        yield (_rng_file_name(trainer),)


def _read_error(file: Path) -> str | None:
    """Why Trainer could not read a file, if that shows without reading tensors; nothing is unpickled."""
    try:
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
        elif file.suffix == ".safetensors":
            with safe_open(file, "pt"):
                pass  # the header was compared with the file's size
        elif re.fullmatch(r"(optimizer|scheduler|scaler)\.pt|rng_state.*\.pth", file.name):
            with safe_globals():  # those of numpy, in random states
                foreign = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            if foreign:
                return f"it refers to {', '.join(foreign)}, which Trainer does not load"
    except Exception as error:  # torch raises whatever a damaged archive or pickle leads to
        return str(error).partition("\n")[0] or type(error).__name__
    return None


def _rng_file_name(trainer: Trainer) -> str:
    return "rng_state.pth" if trainer.args.world_size <= 1 else f"rng_state_{trainer.args.process_index}.pth"


def _processes_differ(trainer: Trainer, folder: Path) -> bool:
    """Whether random states show that another number of processes saved a checkpoint: those of the first few, say."""
    if (folder / _rng_file_name(trainer)).exists():
        return False
    if trainer.args.world_size <= 1:
        return (folder / "rng_state_0.pth").exists()
    several = {path.name for path in folder.glob("rng_state_*.pth")}
    first_few = several == {f"rng_state_{process}.pth" for process in range(len(several))}
    return (bool(several) and first_few) or (folder / "rng_state.pth").exists()


def _check_model(trainer: Trainer, folder: Path) -> None:
    """Rejects (ValueError) a checkpoint of another model: Trainer loads what fits and leaves the rest as it is."""
    files = [folder / SAFE_WEIGHTS_NAME] if (folder / SAFE_WEIGHTS_NAME).is_file() else folder.glob("model-*.safetensors")
    saved: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, "pt") as weights:
            saved |= {name: list(weights.get_slice(name).get_shape()) for name in weights.keys()}
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if not saved or hasattr(model, "peft_config") or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    names: dict[int, list[str]] = {}  # of each parameter, as tied ones have several and are saved under one
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parameters = dict(model.named_parameters())
    for aliases in names.values():
        shape = list(parameters[aliases[0]].shape)
        there = next((saved[name] for name in aliases if name in saved), None)
        if there != shape:
            found = "missing" if there is None else " x ".join(map(str, there))
            raise ValueError(
                f"The checkpoint {folder} is of another model: {aliases[0]} is {found} there and "
                f"{' x '.join(map(str, shape))} here. Use the configuration it was saved with, another --output_dir, or "
                "--resume_from_checkpoint false."
            )


# Trainer ---------------------------------------------------------------------------------------------------------------


class CheckpointTrainer(Trainer):
    """`Trainer` that resumes from whole checkpoints only, and trains no step more than it was to.

    transformers' own resumes from a checkpoint whose optimizer, scheduler or random numbers are missing, trains one more step
    after a checkpoint of the last one, and deletes old checkpoints by the beginning of their names.
    """

    def required_files(self) -> list[str]:
        """Files of a checkpoint that this trainer cannot resume without, besides Trainer's own."""
        return []

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """`Trainer.train`.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the newest whole one in `output_dir`.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: the checkpoint is incomplete or of another model.
        """
        if resume_from_checkpoint is not None:
            resume_from_checkpoint = choose_checkpoint(self, resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _run_epoch(self, *args, **kwargs) -> None:
        """Trains no further where a checkpoint of the last step was resumed: Trainer counts steps after each, not before."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with _explain_failure(f"the model to {output_dir or self.args.output_dir}"):
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model, trial) -> None:
        run_dir = Path(self._get_output_dir(trial))
        folder = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # Trainer would delete checkpoint-20-old, too
        try:
            with _explain_failure(f"the checkpoint {folder}"):
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


class _SavingError(OSError):
    """Says already what to do."""


@contextmanager
def _explain_failure(what: str) -> Iterator[None]:
    """Turns what a full disk causes, an exception of whichever library writes, into an OSError that says what to do."""
    try:
        yield
    except _SavingError:  # of the model within the checkpoint
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search(TORCH_WRITES, str(error)):
            raise
        raise _SavingError(
            f"Saving {what} failed: {error}. Earlier checkpoints are as they were: make room on the disk and start again to "
            "go on from there."
        ) from error


__all__ = ["CheckpointTrainer", "checkpoints", "choose_checkpoint", "delete_old_checkpoints", "is_finished", "output_folder"]
