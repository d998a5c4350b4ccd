# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Writing files and folders: under a temporary name beside the target, moved when complete; opening and hashing them."""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME


def check_folder(target: Path, overwrite: bool, sources: Iterable[str | os.PathLike] = ()) -> None:
    """Checks a folder that a command is asked to write to, before anything is computed.

    Args:
        overwrite: whether it may have files in it.
        sources: folders that the command reads, which its output must not be, contain or lie in, links resolved. Names that
            are no folders, such as repositories, are passed over.

    Raises:
        FileExistsError: it is a file, or is not empty without `overwrite`.
        ValueError: it overlaps a source.
    """
    for source in filter(os.path.isdir, sources):
        read, written = Path(source).resolve(), target.resolve()
        if read.is_relative_to(written) or written.is_relative_to(read):
            raise ValueError(f"{target} is, contains or lies in {source}, which is read: choose a folder outside it.")
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; name a folder for the model.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise FileExistsError(f"The folder {target} is not empty; choose another, or overwrite it (--overwrite).")


def check_file(target: Path, overwrite: bool) -> None:
    """Raises OSError where a file would replace a folder, or another file unless `overwrite`."""
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder; name a file.")
    if target.exists() and not overwrite:
        raise FileExistsError(f"The file {target} exists; choose another, or overwrite it (--overwrite).")


def sha256(file: Path) -> str:
    """The SHA-256 of a whole file, in hexadecimal."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


EVALUATION = "evaluation.json"  # written by examples/evaluate_lm.py and evaluate_image_classification.py
EVAL_RESULTS = "eval_results.json"  # these three by Trainer.save_metrics
ALL_RESULTS = "all_results.json"
TRAIN_RESULTS = "train_results.json"
TRAINER_STATE = "trainer_state.json"
RUN_ARGUMENTS = "run_arguments.json"  # written by the training scripts
EXPORT_DESCRIPTION = "export.json"  # this and the programs are written by export/
PROGRAM_FILES = ("model.onnx", "model.onnx.data")
DESCRIPTIONS = (CONFIG_NAME, EXPORT_DESCRIPTION)  # without which nothing loads the files beside them
SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
# what a folder tells of its model's training and evaluation
RECORDS = (EVALUATION, EVAL_RESULTS, ALL_RESULTS, TRAIN_RESULTS, TRAINER_STATE, RUN_ARGUMENTS)


@contextmanager
def open_safetensors(file: str | os.PathLike, device: str = "cpu") -> Iterator[safe_open]:
    """A safetensors file, opened; ValueError if it is damaged or cut short."""
    try:
        with safe_open(file, "pt", device=device) as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(
            f"{os.fspath(file)!r} is not a readable safetensors file: it is truncated or damaged ({error})."
        ) from error


def is_weights_name(name: str) -> bool:
    """Whether `save_pretrained` writes a model's weights, or the index of their shards, under this very name."""
    return name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) or SHARD_NAME.fullmatch(name) is not None


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A temporary folder to write a model to; its files then replace those of `target`, and old weights are removed.

    Other files of `target` and of its subfolders stay. The old description (`config.json` or `export.json`) is removed first
    and the new one moved last: an interruption between leaves a folder that cannot be loaded, never one model's weights with
    another's configuration.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as private:
        folder = Path(private, "model")  # with ordinary permissions, which the temporary folder has not
        folder.mkdir()
        yield folder
        if not target.exists():
            folder.rename(target)
            return
        written = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        for path in _stale_files(target, written):
            (target / path).unlink(missing_ok=True)
        for path in sorted(written, key=lambda path: path.name in DESCRIPTIONS):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / path, target / path)


def _stale_files(target: Path, written: list[Path]) -> Iterator[Path]:
    """What is removed of an old model or export: first its description, then what no new file replaces."""
    for path in written:
        if path.name in DESCRIPTIONS:
            yield path
            if path.name == EXPORT_DESCRIPTION:
                yield from (path.with_name(name) for name in PROGRAM_FILES if path.with_name(name) not in written)
    if any(is_weights_name(str(path)) for path in written):
        for old in list(target.iterdir()):
            if (is_weights_name(old.name) or old.name in RECORDS) and Path(old.name) not in written:
                yield Path(old.name)


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """A temporary name to write a file under; it then replaces `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield staged
        os.replace(staged, target)
    finally:
        staged.unlink(missing_ok=True)
