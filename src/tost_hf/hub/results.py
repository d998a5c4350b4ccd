# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Results of training and evaluation in a model folder, and the existing model card."""

import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard

from ..files import EVAL_RESULTS, EVALUATION, RUN_ARGUMENTS, TRAIN_RESULTS, TRAINER_STATE, name_file_in_errors, read_json


CARD = "README.md"

_TRAINING_FIELDS = ("global_step", "epoch", "train_samples", "train_batch_size", "train_loss", "train_runtime")
_FIELDS_OF_LAST_START = ("train_loss", "train_runtime")  # the others are of all parts of a resumed run
# a path from a root or the home folder, or out of the working directory; a root's has two parts, unlike "</s>"
_PATH_START = r"""(?<![\w/.~\\-])(?:file://)?(?:(?:~|\.\.?)/|/(?![/\s])(?=[^\s'"`<>()\[\],;:]+/)|[A-Za-z]:[\\/]|\\\\(?=[^\s\\]+\\)|\.\.\\)"""
_LOCAL_PATH = re.compile(_PATH_START + r"""[^\s'"`<>()\[\],;:]*""")
_OPTION = r"((?:--?[\w-]+=)?)"  # of a command, before a path
_QUOTED_PATH = re.compile(rf"""(['"]){_OPTION}({_PATH_START}[^'"\n]*)\1""")
_PATH_ALONE = re.compile(rf"{_OPTION}({_PATH_START}(?:(?! -).)*)")  # perhaps with spaces


class Results(NamedTuple):
    """The results in a model folder. Of files on this machine only the names are left."""

    evaluation: list[EvalResult] = []  # of evaluation.json
    metrics: dict[str, float] = {}  # of Trainer's last evaluation, without the "eval_" of their names
    run_arguments: dict[str, str] = {}  # of the training script
    training: dict[str, float] = {}  # from Trainer's results and state; times in seconds


def read_results(folder: Path) -> Results:
    """Reads the result files of a model folder, each of which may be missing. Skips numbers that are not finite.

    Raises:
        ValueError: one of the files is damaged, or has a value of a wrong type.
    """
    state, metrics, run_arguments = (read_json(folder / name) for name in (TRAINER_STATE, EVAL_RESULTS, RUN_ARGUMENTS))
    with name_file_in_errors(folder / TRAINER_STATE):
        metrics = metrics or _last_logged_evaluation(state)
    with name_file_in_errors(folder / RUN_ARGUMENTS):
        if not all(isinstance(value, str) for value in run_arguments.values()):
            raise ValueError("its values must be strings")
    training = state | read_json(folder / TRAIN_RESULTS)
    start_step = training.get("train_start_step")
    start = f" (from step {start_step} on)" if start_step and _is_finite_number(start_step) else ""
    return Results(
        read_evaluation(folder / EVALUATION),
        {key.removeprefix("eval_"): x for key, x in metrics.items() if _is_quality(key) and _is_finite_number(x)},
        shorten_paths(run_arguments),
        {
            key + start * (key in _FIELDS_OF_LAST_START): training[key]
            for key in _TRAINING_FIELDS
            if training.get(key) and _is_finite_number(training[key])
        },
    )


def read_evaluation(file: Path) -> list[EvalResult]:
    """The finite results in a file such as `evaluation.json`, which may be missing; see `build_card`.

    Values without a field in `EvalResult`, such as the protocol, are in `metric_args`.

    Raises:
        ValueError: the file is damaged, or a result lacks a value or has one of a wrong type.
    """
    with name_file_in_errors(file):
        results = [_to_eval_result(shorten_paths(result)) for result in read_json(file).get("results", [])]
    return [result for result in results if _is_finite_number(result.metric_value)]


def _to_eval_result(values: dict) -> EvalResult:
    fields = {name: value for name, value in values.items() if name in EvalResult.__dataclass_fields__}
    extra = {name: value for name, value in values.items() if name not in fields and value is not None}
    for name, value in values.items():
        if not isinstance(value, str | int | float | None) or (name == "command" and not isinstance(value, str)):
            raise ValueError(f"{name} must be a string, got {value!r}")
    return EvalResult(**fields, metric_args=extra or None)


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _is_quality(key: str) -> bool:
    """Whether a name in eval_results.json is that of a metric of the model, not of speed or size."""
    is_speed = key.endswith(("runtime", "_per_second", "samples", "_time"))
    return (key.startswith("eval_") or key == "perplexity") and not is_speed


def _last_logged_evaluation(state: dict) -> dict:
    """The last evaluation in trainer_state.json, if it evaluated the weights in the folder, not earlier ones."""
    evaluations = [entry for entry in state.get("log_history", []) if "eval_loss" in entry]
    return evaluations[-1] if evaluations and evaluations[-1].get("step") == state.get("global_step") else {}


def shorten_paths(value: Any) -> Any:
    """The same text or JSON value with paths of this machine, also in commands, replaced by their last part.

    >>> shorten_paths("python examples/run_clm.py --train_file /home/me/text.txt")
    'python examples/run_clm.py --train_file text.txt'
    """
    if isinstance(value, dict):
        return {name: shorten_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shorten_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    path = _PATH_ALONE.fullmatch(value)
    if path and len(_LOCAL_PATH.findall(value)) == 1:
        return path[1] + _last_part(path[2])
    value = _QUOTED_PATH.sub(lambda match: f"{match[1]}{match[2]}{_last_part(match[3])}{match[1]}", value)
    return _LOCAL_PATH.sub(lambda match: _last_part(match[0]), value)


def _last_part(path: str) -> str:
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def find_local_paths(text: str) -> list[str]:
    """Paths in a text that are in the user's home folder, or exist on this machine outside of folders of the system."""
    home = os.path.expanduser("~").rstrip("/") + "/"
    paths = [match.removeprefix("file://").rstrip(".") for match in _LOCAL_PATH.findall(text)]
    return [path for path in paths if (home != "/" and path.startswith(home)) or (_is_private(path) and os.path.exists(path))]


def _is_private(path: str) -> bool:
    return os.path.isabs(path) and path.split("/")[1] not in ("bin", "dev", "etc", "lib", "opt", "proc", "usr")


def load_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of a folder's model card; empty if it has none.

    Raises:
        ValueError: as `load_card`.
    """
    return load_card(folder / CARD).data.to_dict() if (folder / CARD).is_file() else {}


def load_card(path: Path) -> ModelCard:
    """Loads the model card in a file, which may lack metadata.

    Raises:
        ValueError: the metadata is not valid YAML, or a value has a wrong type.
    """
    with name_file_in_errors(path):
        return ModelCard.load(path)
