# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Reads what a model folder records about its model: evaluation results, the training run, and the existing card."""

import math
from pathlib import Path
from typing import NamedTuple

import yaml
from huggingface_hub import ModelCard

from ..files import EVAL_RESULTS, EVALUATION, RUN_ARGUMENTS, TRAIN_RESULTS, TRAINER_STATE, read_json


CARD = "README.md"
IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

_TRAINING_FIELDS = ("global_step", "epoch", "train_samples", "train_batch_size", "train_loss", "train_runtime")


class Records(NamedTuple):
    """The records of a model folder."""

    results: list[dict] = []  # of evaluation.json
    metrics: dict[str, float] = {}  # of Trainer's last evaluation, without the "eval_" of their names
    run: dict[str, str] = {}  # run_arguments.json of the training script
    training: dict[str, float] = {}  # from Trainer's results and state; times in seconds


def read_records(folder: Path) -> Records:
    """Reads the records of a model folder, each of which may be missing. Skips numbers that are not finite.

    Raises:
        ValueError: one of the files does not contain a JSON object.
    """
    state = read_json(folder / TRAINER_STATE)
    evaluation = read_json(folder / EVAL_RESULTS) or _last_logged_evaluation(state)
    metrics = {}
    for key, value in evaluation.items():
        name = key.removeprefix("eval_")
        is_speed = name.endswith(("runtime", "_per_second", "samples", "_time"))
        if (name != key or key == "perplexity") and not is_speed and _is_finite_number(value):
            metrics[name] = value
    training = state | read_json(folder / TRAIN_RESULTS)
    return Records(
        [result for result in read_json(folder / EVALUATION).get("results", []) if _is_finite_number(result["metric_value"])],
        metrics,
        read_json(folder / RUN_ARGUMENTS),
        {key: training[key] for key in _TRAINING_FIELDS if training.get(key) and _is_finite_number(training[key])},
    )


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
    try:
        return ModelCard.load(path)
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"The metadata at the top of {str(path)!r} cannot be read ({reason}); correct it.") from error
