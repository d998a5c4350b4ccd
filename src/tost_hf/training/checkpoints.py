# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Which checkpoint a run goes on from: the newest one that is complete, and none that would change the run in silence.

Complete means that every file which the run's settings need is there and whole: weights, averaged weights, optimizer,
scheduler, loss scaler, random numbers, trainer_state.json. Nothing is unpickled to find that out: of safetensors files the
header is read, of torch's own (zip archives) the table of contents.
"""

import json
import logging
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from transformers import Trainer, TrainerState
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    ADAPTER_WEIGHTS_NAME,
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from ..files import TRAINER_STATE
from .streams import PackedStream


logger = logging.getLogger(__name__)

OPTIMIZER, SCHEDULER, SCALER = "optimizer.pt", "scheduler.pt", "scaler.pt"
FSDP_WEIGHTS, FSDP_OPTIMIZER = "pytorch_model_fsdp", "optimizer"  # the beginnings of accelerate's names


def output_folder(trainer: Trainer) -> Path:
    """Where a trainer's checkpoints lie."""
    assert trainer.args.output_dir is not None  # TrainingArguments names one where none is given
    return Path(trainer.args.output_dir)


def choose_checkpoint(trainer: Trainer, wanted: str | bool | None) -> str | None:
    """The checkpoint to go on from.

    Args:
        trainer: its settings say which files a checkpoint must have.
        wanted: a checkpoint's folder; True or "true" for the newest complete one in the output folder; None for that one if
            there is any; False or "false" for none.

    Returns:
        The folder, or None to start at the beginning. All processes get the same answer.

    Raises:
        FileNotFoundError: the folder named does not exist, or True was given and there is no complete checkpoint.
        ValueError: the checkpoint named is incomplete or of another model, checkpoints that were complete once are all
            damaged, or DeepSpeed saved one with another number of processes.
    """
    word = str(wanted).lower()
    if word == "false":
        return None
    if word not in ("none", "true"):
        folder = Path(str(wanted))
        if not folder.is_dir():
            raise FileNotFoundError(f"The checkpoint folder {wanted!r} does not exist.")
        problems = _problems_of_all_processes(trainer, folder)
        if problems:
            raise ValueError(f"The checkpoint {wanted!r} is incomplete: {'; '.join(problems)}. Name another one.")
        chosen: Path | None = folder
    else:
        chosen = _newest_complete(trainer)
        if chosen is None and word == "true":
            raise FileNotFoundError(f"There is no complete checkpoint in {trainer.args.output_dir!r} to resume from.")
    if chosen is None:
        return None
    _check_model(trainer, chosen)
    if _processes_differ(trainer, chosen):
        if trainer.is_deepspeed_enabled:
            raise ValueError(
                f"{chosen} was saved by another number of processes than the {trainer.args.world_size} of today, each with "
                "its part of DeepSpeed's optimizer: start as many as then, or begin from its weights in another output_dir."
            )
        logger.warning(
            f"{chosen} was saved by another number of processes than the {trainer.args.world_size} of today: the order of the "
            "data and all random numbers differ from those of a run without interruption."
        )
    return str(chosen)


def checkpoints(output_dir: str | Path) -> dict[int, Path]:
    """The folders `checkpoint-STEP` of an output folder by their step, the newest first; no other name counts."""
    found = {}
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-([0-9]+)", path.name)
        if step and path.is_dir():
            found[int(step[1])] = path
    return dict(sorted(found.items(), reverse=True))


def delete_old_checkpoints(output_dir: str | Path, limit: int, kept: list[Path]) -> None:
    """Deletes the checkpoints saved first until `limit` are left, unfinished ones before all; those of `kept` stay."""

    def saved(path: Path) -> float:
        return (path / TRAINER_STATE).stat().st_mtime if (path / TRAINER_STATE).is_file() else 0.0

    kept_folders = {Path(path).resolve() for path in kept}
    oldest_first = sorted(checkpoints(output_dir).items(), key=lambda found: (saved(found[1]), found[0]))
    excess = len(oldest_first) - limit
    for path in [path for _, path in oldest_first if path.resolve() not in kept_folders][: max(0, excess)]:
        (path / TRAINER_STATE).unlink(missing_ok=True)  # first: what is left if this is killed is no checkpoint
        shutil.rmtree(path, ignore_errors=True)


def _newest_complete(trainer: Trainer) -> Path | None:
    output_dir = output_folder(trainer)
    steps = sorted(set(gather_object(list(checkpoints(output_dir)))), reverse=True)
    skipped: list[str] = []
    finished = False
    for step in steps:
        folder = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        problems = _problems_of_all_processes(trainer, folder)
        if not problems:
            for sentence in skipped:
                logger.warning(f"Skipped the incomplete checkpoint {sentence}.")
            return folder
        skipped.append(f"{folder}: {'; '.join(problems)}")
        finished = finished or any(gather_object([not any(_json_problem(folder / TRAINER_STATE))]))
    if finished:
        raise ValueError(
            f"None of the checkpoints can be resumed from. {'. '.join(skipped)}. To start afresh, use another --output_dir or "
            "--resume_from_checkpoint false."
        )
    for sentence in skipped:  # the first one was being saved when the run was killed
        logger.warning(f"Skipped the incomplete checkpoint {sentence}.")
    return None


def _problems_of_all_processes(trainer: Trainer, folder: Path) -> list[str]:
    """What is missing from a checkpoint or damaged, by any process: each has files of its own."""
    found = [problem.replace(f"{folder}{os.sep}", "") for problem in _problems(trainer, folder)]
    return sorted(set(gather_object(found)))


def _problems(trainer: Trainer, folder: Path) -> Iterator[str]:
    try:
        if not (folder / TRAINER_STATE).is_file():
            yield f"{TRAINER_STATE} is missing"
        elif TrainerState.load_from_json(str(folder / TRAINER_STATE)).global_step < 1:
            yield f"{TRAINER_STATE} tells of no step"
    except (ValueError, TypeError, OSError) as error:
        yield f"{TRAINER_STATE} is damaged ({error})"
    if (folder / CONFIG_NAME).is_file():  # Trainer reads it
        yield from _json_problem(folder / CONFIG_NAME)

    if trainer.is_deepspeed_enabled:
        yield from _deepspeed_problems(trainer, folder)
    elif trainer.is_fsdp_enabled:
        yield from _fsdp_problems(folder, FSDP_WEIGHTS)
    else:
        yield from _weight_problems(folder)
    if getattr(trainer, "ema", None) is not None:
        yield from _safetensors_problem(folder / "ema" / SAFE_WEIGHTS_NAME)
    if not trainer.args.save_only_model:
        yield from _state_problems(trainer, folder)


def _state_problems(trainer: Trainer, folder: Path) -> Iterator[str]:
    """Problems of what a run goes on with besides weights."""
    if trainer.is_fsdp_enabled:
        yield from _fsdp_problems(folder, FSDP_OPTIMIZER)
    elif not trainer.is_deepspeed_enabled:  # its own files hold the optimizer
        yield from _zip_problem(folder / OPTIMIZER)
    if not (trainer.is_deepspeed_enabled and "scheduler" in _deepspeed_plugin(trainer).deepspeed_config):
        yield from _zip_problem(folder / SCHEDULER)
    if getattr(trainer.accelerator, "scaler", None) is not None:
        yield from _zip_problem(folder / SCALER)
    if not _processes_differ(trainer, folder):
        yield from _zip_problem(folder / _random_state_name(trainer))
        if (name := stream_state_name(trainer)) is not None:
            yield from _json_problem(folder / name)


def stream_file_name(trainer: Trainer) -> str:
    """The file of a checkpoint with this process's place in a stream of text."""
    return f"stream_{trainer.args.process_index}.json"


def stream_state_name(trainer: Trainer) -> str | None:
    """`stream_file_name` where a run goes on from that file; None if there is no stream, or it is to begin anew."""
    needed = isinstance(trainer.train_dataset, PackedStream) and not trainer.args.ignore_data_skip
    return stream_file_name(trainer) if needed else None


def _random_state_name(trainer: Trainer) -> str:
    return "rng_state.pth" if trainer.args.world_size <= 1 else f"rng_state_{trainer.args.process_index}.pth"


def _processes_differ(trainer: Trainer, folder: Path) -> bool:
    """Whether random states show that another number of processes saved a checkpoint: those of the first few, say."""
    if (folder / _random_state_name(trainer)).exists():
        return False
    if trainer.args.world_size <= 1:
        return (folder / "rng_state_0.pth").exists()
    several = {path.name for path in folder.glob("rng_state_*.pth")}
    first_few = several == {f"rng_state_{process}.pth" for process in range(len(several))}
    return (bool(several) and first_few) or (folder / "rng_state.pth").exists()


def _weight_problems(folder: Path) -> Iterator[str]:
    """Problems of an ordinary model's or an adapter's weights."""
    found = False
    for index in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        if (folder / index).is_file() and not (folder / SAFE_WEIGHTS_NAME).is_file():
            found = True
            yield from _index_problems(folder / index)
    for path in [folder / SAFE_WEIGHTS_NAME, *folder.glob(f"**/{ADAPTER_SAFE_WEIGHTS_NAME}")]:
        if path.is_file():
            found = True
            yield from _safetensors_problem(path)
    for path in [folder / WEIGHTS_NAME, *folder.glob(f"**/{ADAPTER_WEIGHTS_NAME}")]:
        if path.is_file():
            found = True
            yield from _zip_problem(path)
    if not found:
        yield f"{SAFE_WEIGHTS_NAME} is missing"


def _index_problems(index: Path) -> Iterator[str]:
    problems = list(_json_problem(index))
    yield from problems
    shards = {} if problems else json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        yield f"{index} is damaged (it has no weight_map of file names)"
        return
    for name in sorted(set(shards.values())):
        check = _safetensors_problem if name.endswith(".safetensors") else _zip_problem
        yield from check(index.parent / name)


def _fsdp_problems(folder: Path, name: str) -> Iterator[str]:
    """Problems of what accelerate saves of FSDP: one file, a file per process, or torch's distributed checkpoint."""
    files = [path for path in folder.glob(f"{name}*.bin") if path.is_file()]
    for path in files:
        yield from _zip_problem(path)
    parts = [path for path in folder.glob(f"{name}_[0-9]*") if path.is_dir()]
    for part in parts:
        # torch writes .metadata when all processes' files are complete
        if not (part / ".metadata").is_file() or (part / ".metadata").stat().st_size == 0:
            yield f"{part}/.metadata is missing"
        if not any(path.stat().st_size for path in part.glob("*.distcp")):
            yield f"{part}/*.distcp is missing"
    if not files and not parts:
        yield f"{name}.bin or {name}_0 is missing"


def _deepspeed_plugin(trainer: Trainer):
    return trainer.accelerator.state.deepspeed_plugin


def _deepspeed_problems(trainer: Trainer, folder: Path) -> Iterator[str]:
    """Problems of DeepSpeed's folder, which the file `latest` names."""
    latest = folder / "latest"
    if not latest.is_file():
        yield "latest is missing"
        return
    part = latest.read_text(encoding="utf-8", errors="replace").strip()
    files = sorted((folder / part).glob("*.pt"))
    for path in files:
        yield from _zip_problem(path)
    needed = ["model_states.pt"] + ["optim_states.pt"] * (_deepspeed_plugin(trainer).zero_stage > 0)
    for ending in needed:
        if not any(path.name.endswith(ending) for path in files):
            yield f"{part}/*{ending} is missing"


def _json_problem(path: Path) -> Iterator[str]:
    try:
        if not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
            yield f"{path} is damaged (no JSON object)"
    except (ValueError, OSError) as error:
        yield f"{path} is damaged ({error})"


def _safetensors_problem(path: Path) -> Iterator[str]:
    if not path.is_file():
        yield f"{path} is missing"
        return
    try:
        with safe_open(path, "pt") as weights:  # which compares the header with the file's size
            if not weights.keys():
                yield f"{path} holds no weights"
    except (SafetensorError, OSError) as error:
        yield f"{path} is damaged ({error})"


def _zip_problem(path: Path) -> Iterator[str]:
    if not path.is_file():
        yield f"{path} is missing"
        return
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                archive.open(entry).close()  # reads the entry's header
            if not any(name.endswith("data.pkl") for name in archive.namelist()):
                yield f"{path} is damaged (not a file of torch.save)"
                return
        if path.name not in (OPTIMIZER, SCHEDULER, SCALER) and not path.name.startswith("rng_state"):
            return  # not Trainer's own
        with safe_globals():
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # as Trainer will
    except pickle.UnpicklingError as error:
        yield f"{path} is damaged (it holds more than tensors: {str(error).splitlines()[0]})"
    except Exception as error:  # torch.load raises whatever a damaged pickle leads to
        yield f"{path} is damaged ({error})"


def _check_model(trainer: Trainer, folder: Path) -> None:
    """Refuses (ValueError) a checkpoint of another model: Trainer loads what fits and leaves the rest as it is."""
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


__all__ = ["checkpoints", "choose_checkpoint", "delete_old_checkpoints", "stream_file_name", "stream_state_name"]
