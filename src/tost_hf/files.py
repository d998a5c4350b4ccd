# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Files and folders: writes them under a temporary name and renames them when complete; reads files."""

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME


def check_folder(target: Path, overwrite: bool, sources: Iterable[str | os.PathLike] = ()) -> None:
    """Checks an output folder before a command starts computing.

    Args:
        overwrite: whether the folder may contain files.
        sources: folders that the command reads; after resolving links, the output must not be, contain or be inside one of
            them. Names that are not folders, such as repositories, are ignored.

    Raises:
        FileExistsError: the target is a file, or is not empty without `overwrite`.
        ValueError: it overlaps a source.
    """
    output = target.resolve()
    for source in filter(os.path.isdir, sources):
        input_folder = Path(source).resolve()
        if input_folder.is_relative_to(output) or output.is_relative_to(input_folder):
            raise ValueError(f"{target} is, contains or lies in {source}, which is read: choose a folder outside it.")
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; name a folder for the model.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise FileExistsError(f"The folder {target} is not empty; choose another, or overwrite it (--overwrite).")


def check_file(target: Path, overwrite: bool, sources: Iterable[Path] = ()) -> None:
    """Checks an output file before a command starts computing.

    Args:
        overwrite: whether the file may exist.
        sources: existing files that the command reads.

    Raises:
        OSError: the target is a folder, or a file that exists without `overwrite`.
        ValueError: it is one of the sources.
    """
    if target.exists() and any(target.samefile(source) for source in sources):
        raise ValueError(f"{target} is read: choose another file to write.")
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder; name a file.")
    if target.exists() and not overwrite:
        raise FileExistsError(f"The file {target} exists; choose another, or overwrite it (--overwrite).")


def is_path(name: str) -> bool:
    """Whether a name can only be that of a file or folder, not of a repository of the Hub."""
    return os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1


EVALUATION = "evaluation.json"  # written by examples/evaluate_lm.py and evaluate_image_classification.py
EVAL_RESULTS = "eval_results.json"  # this and the next two are written by Trainer.save_metrics
ALL_RESULTS = "all_results.json"
TRAIN_RESULTS = "train_results.json"
TRAINER_STATE = "trainer_state.json"
RUN_ARGUMENTS = "run_arguments.json"  # this and the next are written by the training scripts
CURVES = "curves.png"
TRAINING_ARGS = "training_args.bin"  # a pickle of Trainer; its constant is in transformers.trainer, which is slow to import
EXPORT_DESCRIPTION = "export.json"  # this and the programs are written by export/
PROGRAM_FILES = ("model.onnx", "model.onnx.data")
DESCRIPTIONS = (CONFIG_NAME, EXPORT_DESCRIPTION)  # without them a model or an export cannot be loaded
SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
# of training and evaluation, in a model folder
RESULT_FILES = (EVALUATION, EVAL_RESULTS, ALL_RESULTS, TRAIN_RESULTS, TRAINER_STATE, RUN_ARGUMENTS)


@contextmanager
def open_safetensors(file: str | os.PathLike, device: str = "cpu") -> Iterator[safe_open]:
    """Opens a safetensors file; ValueError if it is damaged or truncated."""
    try:
        with safe_open(file, "pt", device=device) as handle:
            yield handle
    except SafetensorError as error:
        raise ValueError(
            f"{os.fspath(file)!r} is not a readable safetensors file: it is truncated or damaged ({error})."
        ) from error


@contextmanager
def name_file_in_errors(file: Path) -> Iterator[None]:
    """Raises ValueError, with the file's name, in place of the errors of any type that libraries raise for odd content."""
    try:
        yield
    except (OSError, ImportError):
        raise
    except Exception as error:
        kind, message = type(error).__name__, " ".join(str(error).split())
        reason = message if type(error) is ValueError else f"{kind}: {message}"
        raise ValueError(f"{str(file)!r} is damaged, or has a wrong value ({reason}): correct or replace it.") from error


def read_json(file: Path) -> dict:
    """The object in a JSON file; an empty dict if the file does not exist.

    Raises:
        ValueError: the file does not contain a JSON object.
    """
    if not file.is_file():
        return {}
    with name_file_in_errors(file):
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it must contain a JSON object, not a {type(content).__name__}")
    return content


def is_weights_name(name: str) -> bool:
    """Whether `save_pretrained` writes a model's weights, or the index of their shards, under this name."""
    return name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) or SHARD_NAME.fullmatch(name) is not None


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder to write a model to; its files then replace those of `target`, and old weights are removed.

    Other files of `target` and of its subfolders stay. The old description (`config.json` or `export.json`) is removed first
    and the new one is moved last: an interruption leaves a folder that cannot be loaded, never one model's weights with the
    configuration of another.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        folder = Path(temporary, "model")  # has default permissions, unlike the temporary folder
        folder.mkdir()
        yield folder
        if not target.exists():
            folder.rename(target)
            return
        new_files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        for path in _find_stale_files(target, new_files):
            (target / path).unlink(missing_ok=True)
        for path in sorted(new_files, key=lambda path: path.name in DESCRIPTIONS):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / path, target / path)


def _find_stale_files(target: Path, new_files: list[Path]) -> Iterator[Path]:
    """Files of an old model or export to remove: first its description, then weights and results that are not replaced."""
    for path in new_files:
        if path.name in DESCRIPTIONS:
            yield path
            if path.name == EXPORT_DESCRIPTION:
                yield from (path.with_name(name) for name in PROGRAM_FILES if path.with_name(name) not in new_files)
    if any(is_weights_name(str(path)) for path in new_files):
        for old_path in list(target.iterdir()):
            name = old_path.name
            if (is_weights_name(name) or name in RESULT_FILES) and Path(name) not in new_files:
                yield Path(name)


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """Yields a temporary path to write a file to; the file then replaces `target`. Several threads may write one target."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        staged = Path(temporary, target.name)
        staged.touch()
        mode = staged.stat().st_mode  # of a new file, whereas safetensors writes files that only their owner may read
        yield staged
        staged.chmod(mode)
        os.replace(staged, target)
