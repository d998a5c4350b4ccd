# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What a model folder says of its model: evaluation results, the training run, and the existing card."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import yaml
from huggingface_hub import ModelCard

from ..files import EVAL_RESULTS, EVALUATION, RUN_ARGUMENTS, TRAIN_RESULTS, TRAINER_STATE


CARD = "README.md"
IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

_TRAINING_FIELDS = ("global_step", "epoch", "train_samples", "train_batch_size", "train_loss", "train_runtime")


class Records(NamedTuple):
    """All that a folder's records say."""

    results: list[dict] = []  # of evaluation.json
    metrics: dict[str, float] = {}  # of Trainer's last evaluation, without the "eval_" of their names
    run: dict[str, str] = {}  # what run_arguments.json says of a run of a training script
    training: dict[str, float] = {}  # what Trainer's results and state say of training; times in seconds


def read_json(path: Path) -> dict:
    """The object in a JSON file, or an empty one where there is no file.

    Raises:
        ValueError: it holds something else.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not valid JSON ({error}); correct or delete it.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object, got a {type(content).__name__}.")
    return content


def read_records(folder: Path) -> Records:
    """Reads the records of a model folder, each of which may be missing. Numbers that are not finite are left out.

    Raises:
        ValueError: one of them is no JSON object.
    """
    state = read_json(folder / TRAINER_STATE)
    evaluation = read_json(folder / EVAL_RESULTS) or _last_logged_evaluation(state)
    metrics = {}
    for key, value in evaluation.items():
        name = key.removeprefix("eval_")
        about_speed = name.endswith(("runtime", "_per_second", "samples", "_time"))
        if (name != key or key == "perplexity") and not about_speed and _is_number(value):
            metrics[name] = value
    training = state | read_json(folder / TRAIN_RESULTS)
    return Records(
        [result for result in read_json(folder / EVALUATION).get("results", []) if _is_number(result["metric_value"])],
        metrics,
        read_json(folder / RUN_ARGUMENTS),
        {key: training[key] for key in _TRAINING_FIELDS if training.get(key) and _is_number(training[key])},
    )


def _is_number(value) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _last_logged_evaluation(state: dict) -> dict:
    """The last evaluation in trainer_state.json, if it was one of the weights in the folder, not of earlier ones."""
    logged = [entry for entry in state.get("log_history", []) if "eval_loss" in entry]
    return logged[-1] if logged and logged[-1].get("step") == state.get("global_step") else {}


def load_card(path: Path) -> ModelCard:
    """The model card in a file; without metadata where it has none.

    Raises:
        ValueError: the metadata is no YAML, or holds values of a wrong kind.
    """
    try:
        return ModelCard.load(path)
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"The metadata at the top of {str(path)!r} cannot be read ({reason}); correct it.") from error
