# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Writing files and folders: under a temporary name beside the target, moved when complete."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME


def check_folder(target: Path, overwrite: bool) -> None:
    """Refuses (FileExistsError) to write a model over a file, or over a folder that is not empty unless `overwrite`."""
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; name a folder for the model.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise FileExistsError(f"The folder {target} is not empty; choose another, or overwrite it (--overwrite).")


def check_file(target: Path, overwrite: bool) -> None:
    """Refuses (OSError) to write a file over a folder, or over another file unless `overwrite`."""
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder; name a file, such as ckpt.pt.")
    if target.exists() and not overwrite:
        raise FileExistsError(f"The file {target} exists; choose another, or overwrite it (--overwrite).")


EVALUATION = "evaluation.json"  # written by examples/evaluate_lm.py and evaluate_image_classification.py
EVAL_RESULTS = "eval_results.json"  # these three by Trainer.save_metrics
ALL_RESULTS = "all_results.json"
TRAIN_RESULTS = "train_results.json"
TRAINER_STATE = "trainer_state.json"
RUN_ARGUMENTS = "run_arguments.json"  # written by the training scripts
SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
RECORDS = (  # what a folder tells of its model's training and evaluation
    EVALUATION,
    EVAL_RESULTS,
    ALL_RESULTS,
    TRAIN_RESULTS,
    TRAINER_STATE,
    RUN_ARGUMENTS,
)


def is_weights_name(name: str) -> bool:
    """Whether `save_pretrained` writes a model's weights, or the index of their shards, under this very name."""
    return name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) or SHARD_NAME.fullmatch(name) is not None


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Turns what safetensors and torch.save raise when a disk is full into an OSError."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        raise OSError(f"{target} could not be written; is the disk full? ({str(error).splitlines()[0]})") from error


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A new folder to write a model into; its files then replace those of `target`, and the former model's weights go.

    The former configuration goes first and the new one comes last: whoever stops it between leaves a folder that nobody can
    load, never one model's weights with another's configuration.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as private:
        folder = Path(private, "model")  # with ordinary permissions, which the temporary folder has not
        folder.mkdir()
        with _writing(target):
            yield folder
        if not target.exists():
            folder.rename(target)
            return
        written = {file.name for file in folder.iterdir()}
        if CONFIG_NAME in written and not (target / CONFIG_NAME).is_dir():
            (target / CONFIG_NAME).unlink(missing_ok=True)
        if any(is_weights_name(name) for name in written):
            _remove_former_model(target, written)
        for name in sorted(written, key=CONFIG_NAME.__eq__):
            if (target / name).is_dir() and not (target / name).is_symlink():  # only a file is replaced in one step
                shutil.rmtree(target / name)
            os.replace(folder / name, target / name)


def _remove_former_model(target: Path, written: set[str]) -> None:
    """Removes weights and results that no file of the new model replaces."""
    for old in list(target.iterdir()):
        if (is_weights_name(old.name) or old.name in RECORDS) and old.name not in written:
            old.unlink()


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """A new name to write a file under; it then becomes `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with _writing(target):
            yield staged
        os.replace(staged, target)
    finally:
        staged.unlink(missing_ok=True)
