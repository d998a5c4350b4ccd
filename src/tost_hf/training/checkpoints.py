# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The newest complete checkpoint, to resume from it after a run that was killed.

A checkpoint is complete if it has `trainer_state.json`, which Trainer writes last, the weights and, unless `save_only_model`,
the optimizer and the random states, and if none of these files is cut off, as a full disk or a power failure leaves them.
"""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from accelerate.utils import gather_object
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..files import TRAINER_STATE, open_safetensors


logger = logging.getLogger(__name__)

WEIGHTS = "*model*.safetensors or */adapter_model.safetensors or pytorch_model*.bin"
CHECKED = ["*model*.safetensors", "*/*model*.safetensors", "*model*.bin", "optimizer*", "scheduler.pt", "rng_state*.pth"]
CHECKED += ["config.json", TRAINER_STATE]


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
        ValueError: the checkpoint is incomplete, or no checkpoint is complete although one was finished.
    """
    option = str(resume_from_checkpoint).lower()
    if option == "false":
        return None
    if option in ("none", "true"):
        folder = _find_newest(trainer)
        if folder is None and option == "true":
            raise FileNotFoundError(f"There is no complete checkpoint in {trainer.args.output_dir!r} to resume from.")
    else:
        folder = Path(str(resume_from_checkpoint))
        if not folder.is_dir():
            raise FileNotFoundError(f"The checkpoint folder {resume_from_checkpoint!r} does not exist.")
        if problems := _gather_problems(trainer, folder):
            raise ValueError(f"The checkpoint {resume_from_checkpoint!r} is incomplete: {problems}. Choose another.")
    if folder is None:
        return None
    rank = "" if trainer.args.world_size == 1 else f"_{trainer.args.process_index}"
    if any(folder.glob("rng_state*.pth")) and not (folder / f"rng_state{rank}.pth").exists():
        logger.warning(
            f"{folder} was saved by another number of processes than the {trainer.args.world_size} of this run: the order of "
            "the data and all random numbers differ from those of an uninterrupted run."
        )
    return str(folder)


def _find_newest(trainer: Trainer) -> Path | None:
    skipped, any_finished = [], False
    for step in sorted(set(gather_object(list(list_checkpoints(output_folder(trainer))))), reverse=True):
        folder = output_folder(trainer) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        problems = _gather_problems(trainer, folder)
        if not problems:
            return folder
        logger.warning(f"Skipped the incomplete checkpoint {folder}: {problems}.")
        skipped.append(str(folder))
        any_finished = any_finished or any(gather_object([(folder / TRAINER_STATE).is_file()]))
    if any_finished:  # otherwise the run was killed during its first save
        raise ValueError(
            f"None of the checkpoints can be resumed from: {', '.join(skipped)}. To start afresh, use another --output_dir or "
            "--resume_from_checkpoint false."
        )
    return None


def _gather_problems(trainer: Trainer, folder: Path) -> str:
    """What a checkpoint lacks on any of the processes, each of which needs its own files; empty if it is complete."""
    return "; ".join(sorted(set(gather_object(list(_find_problems(trainer, folder))))))


def _find_problems(trainer: Trainer, folder: Path) -> Iterator[str]:
    if trainer.is_deepspeed_enabled:
        required = ["latest"]  # names the folder with weights and optimizer
    else:
        required = ["pytorch_model_fsdp*" if trainer.is_fsdp_enabled else WEIGHTS]
        required += [] if trainer.args.save_only_model else ["optimizer*" if trainer.is_fsdp_enabled else "optimizer.pt"]
    if not trainer.args.save_only_model:
        required.append("rng_state*.pth")
    own_files: list[str] = getattr(trainer, "checkpoint_files", list)()
    for patterns in [TRAINER_STATE, *required, *own_files]:
        if not any(any(folder.glob(pattern)) for pattern in patterns.split(" or ")):
            yield f"{patterns} is missing"
    for path in sorted({path for pattern in CHECKED + own_files for path in folder.glob(pattern)}):
        if path.is_file() and not _is_complete(path):
            yield f"{path.relative_to(folder).as_posix()} is cut off or damaged"


def _is_complete(path: Path) -> bool:
    """Whether a file was written to its end, of a kind where that can be seen without reading its tensors."""
    try:
        if path.suffix == ".safetensors":
            with open_safetensors(path):
                pass
        elif path.suffix in (".pt", ".pth", ".bin"):
            ZipFile(path).close()  # reads the directory of its members, which torch.save writes last
        elif path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
    except (BadZipFile, ValueError):
        return False
    return True


__all__ = ["choose_checkpoint", "list_checkpoints", "output_folder"]
