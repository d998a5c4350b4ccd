# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Reads what a model folder records about its model: evaluation results, the training run, and the existing card."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard

from ..files import EVAL_RESULTS, EVALUATION, RUN_ARGUMENTS, TRAIN_RESULTS, TRAINER_STATE, name_file_in_errors, read_json


CARD = "README.md"
IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

_REQUIRED_STRINGS = ("task_type", "dataset_type", "dataset_name", "metric_type")  # of a result in evaluation.json
_OPTIONAL_STRINGS = ("dataset_config", "dataset_split", "metric_name", "protocol", "command", "date")
_TRAINING_FIELDS = ("global_step", "epoch", "train_samples", "train_batch_size", "train_loss", "train_runtime")
_FIELDS_OF_LAST_START = ("train_loss", "train_runtime")  # the others are of all parts of a resumed run


class Records(NamedTuple):
    """The records of a model folder."""

    results: list[dict] = []  # of evaluation.json
    metrics: dict[str, float] = {}  # of Trainer's last evaluation, without the "eval_" of their names
    run: dict[str, str] = {}  # run_arguments.json of the training script
    training: dict[str, float] = {}  # from Trainer's results and state; times in seconds


def read_records(folder: Path) -> Records:
    """Reads the records of a model folder, each of which may be missing. Skips numbers that are not finite.

    Raises:
        ValueError: one of the files is damaged, or has a value of a wrong type.
    """
    state, evaluation, run = (read_json(folder / name) for name in (TRAINER_STATE, EVAL_RESULTS, RUN_ARGUMENTS))
    with name_file_in_errors(folder / TRAINER_STATE):
        evaluation = evaluation or _last_logged_evaluation(state)
    with name_file_in_errors(folder / RUN_ARGUMENTS):
        _check_strings(run, optional=run)
    metrics = {}
    for key, value in evaluation.items():
        name = key.removeprefix("eval_")
        is_speed = name.endswith(("runtime", "_per_second", "samples", "_time"))
        if (name != key or key == "perplexity") and not is_speed and _is_finite_number(value):
            metrics[name] = value
    results = read_json(folder / EVALUATION).get("results", [])
    check_results(results, folder / EVALUATION)
    training = state | read_json(folder / TRAIN_RESULTS)
    start_step = training.get("train_start_step")
    start = f" (from step {start_step} on)" if start_step and _is_finite_number(start_step) else ""
    return Records(
        [result for result in results if _is_finite_number(result["metric_value"])],
        metrics,
        run,
        {
            key + start * (key in _FIELDS_OF_LAST_START): training[key]
            for key in _TRAINING_FIELDS
            if training.get(key) and _is_finite_number(training[key])
        },
    )


def check_results(results: Any, file: Path) -> None:
    """Raises ValueError, which names the file, unless they are a list of evaluation results as `build_card` describes them."""
    with name_file_in_errors(file):
        if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
            raise ValueError('it must contain {"results": [{...}, ...]}')
        for result in results:
            _check_strings(result, _REQUIRED_STRINGS, _OPTIONAL_STRINGS)
            if "metric_value" not in result:
                raise ValueError("a result lacks its metric_value")


def _check_strings(record: dict, required: Iterable[str] = (), optional: Iterable[str] = ()) -> None:
    for name in (*required, *optional):
        value = record.get(name)
        if not isinstance(value, str) and (value is not None or name in required):
            raise ValueError(f"{name} must be a string, got {value!r}")


def _is_finite_number(value) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _last_logged_evaluation(state: dict) -> dict:
    """The last evaluation in trainer_state.json, if it evaluated the weights in the folder, not earlier ones."""
    evaluations = [entry for entry in state.get("log_history", []) if "eval_loss" in entry]
    return evaluations[-1] if evaluations and evaluations[-1].get("step") == state.get("global_step") else {}


def load_card(path: Path) -> ModelCard:
    """Loads the model card in a file, which may lack metadata.

    Raises:
        ValueError: the metadata is not valid YAML, or a value has a wrong type.
    """
    with name_file_in_errors(path):
        return ModelCard.load(path)
