# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What a model folder says of its model: evaluation results, the training run, the stored weights, and the existing card.

A person asks for evaluation results, so a wrong one is an error. Of what programs left beside the weights, values of another
kind than expected are skipped, as are numbers that are not finite: neither JSON nor YAML has them.
"""

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import ModelCard, ModelCardData
from safetensors import SafetensorError, safe_open

from ..files import ALL_RESULTS, EVAL_RESULTS, EVALUATION, RUN_ARGUMENTS, TRAIN_RESULTS, TRAINER_STATE, staged_file


CARD = "README.md"
IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MAX_RECORD_BYTES = 256 * 2**20
MAX_CARD_BYTES = 4 * 2**20
MAX_METADATA = 100_000  # characters

_RUN_FIELDS = ("command", "dataset_name", "dataset_config_name", "model_name_or_path")
_TRAINING_FIELDS = ("global_step", "epoch", "train_samples", "train_batch_size", "train_loss", "train_runtime")
_RESULT_FIELDS: dict[str, tuple[Any, str]] = {  # of a result in evaluation.json: its type, in words
    **dict.fromkeys(("task_type", "dataset_type", "dataset_name", "metric_type"), (str, "a text")),
    "metric_value": (int | float, "a number"),
    "num_examples": (int | None, "a whole number"),
    **dict.fromkeys(
        ("dataset_config", "dataset_split", "metric_name", "protocol", "command", "seed", "date"),
        (str | int | None, "a text or a whole number"),
    ),
}
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_METADATA = re.compile(r"\s*---\n(?P<yaml>.*?)^---[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)


class Card(ModelCard):
    """A model's card; huggingface_hub declares the metadata of any repository's."""

    data: ModelCardData


class Records(NamedTuple):
    """All that a folder's records say."""

    results: list[dict]  # of evaluation.json
    metrics: dict[str, float]  # of Trainer's last evaluation, without the "eval_" of their names
    eval_examples: float | None  # of that evaluation
    run: dict[str, str]  # what run_arguments.json says of a run of a training script
    training: dict[str, float]  # what Trainer's results and state say of training; the time in seconds


# JSON -----------------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict:
    """The object in a JSON file, or an empty one where there is no file.

    Raises:
        ValueError: it holds something else, or is too large for a record.
    """
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_RECORD_BYTES:
        raise ValueError(f"{str(path)!r} is larger than {MAX_RECORD_BYTES:,} bytes, too large for a run's record; delete it.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # fails for halves of characters, which no card can hold
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not valid JSON ({error}); correct or delete it.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object, got a {type(content).__name__}.")
    return content


def read_records(folder: Path) -> Records:
    """Reads the records of a model folder, each of which may be missing.

    Raises:
        ValueError: one of them is no JSON object, or an evaluation result lacks what it needs or has a value of a wrong kind.
    """
    state, results = read_json(folder / TRAINER_STATE), read_json(folder / ALL_RESULTS)
    evaluation = read_json(folder / EVAL_RESULTS) or results
    if not any(key.startswith("eval_") for key in evaluation):
        evaluation = _last_logged_evaluation(state)
    metrics = {}
    for key, value in evaluation.items():
        name = key.removeprefix("eval_")
        about_speed = name.endswith(("runtime", "_per_second", "_samples", "_time")) or name == "samples"
        if (name != key or key == "perplexity") and not about_speed and _is_number(value):
            metrics[name] = value
    run = read_json(folder / RUN_ARGUMENTS)
    training = state | read_json(folder / TRAIN_RESULTS) | results
    examples = evaluation.get("eval_samples")
    return Records(
        _evaluation_results(folder / EVALUATION),
        metrics,
        examples if _is_number(examples) else None,
        {key: run[key] for key in _RUN_FIELDS if isinstance(run.get(key), str)},
        {key: training[key] for key in _TRAINING_FIELDS if _is_number(training.get(key)) and training[key]},
    )


def _is_number(value) -> bool:
    """Whether a value is a finite number."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _last_logged_evaluation(state: dict) -> dict:
    """The last evaluation in trainer_state.json, if it was one of the weights in the folder, not of earlier ones."""
    history = state.get("log_history")
    entries = history if isinstance(history, list) else []
    logged = [entry for entry in entries if isinstance(entry, dict) and "eval_loss" in entry]
    return logged[-1] if logged and logged[-1].get("step") == state.get("global_step") else {}


def _evaluation_results(path: Path) -> list[dict]:
    """The results in evaluation.json whose values are finite."""
    results = read_json(path).get("results", [])
    if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
        raise ValueError(f'"results" in {str(path)!r} must be a list of objects.')
    for result in results:
        for key, (kind, in_words) in _RESULT_FIELDS.items():
            if isinstance(value := result.get(key), bool) or not isinstance(value, kind):
                raise ValueError(f"In {str(path)!r} the {key!r} of a result must be {in_words}, got {value!r}.")
    return [result for result in results if _is_number(result["metric_value"])]


# Weights --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_safetensors(file: Path) -> Iterator[safe_open]:
    """A safetensors file, opened; ValueError if it is damaged or cut short."""
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file: it is truncated or damaged ({error}).") from error


def stored_dtypes(weights: list[Path]) -> list[str]:
    """Names of the floating-point dtypes in safetensors files, the most frequent first.

    Raises:
        ValueError: a file is damaged.
    """
    counts: Counter[str] = Counter()
    for path in weights:
        with open_safetensors(path) as file:
            for name in file.keys():
                tensor = file.get_slice(name)
                counts[tensor.get_dtype()] += math.prod(tensor.get_shape())
    return [_DTYPES.get(dtype, dtype) for dtype, _ in counts.most_common() if dtype.lstrip("B").startswith("F")]


# The card -------------------------------------------------------------------------------------------------------------


def load_card(path: Path) -> Card:
    """The model card in a file; without metadata where it has none.

    Raises:
        ValueError: the metadata is no YAML, is huge, deep or endless, or holds values of a wrong kind.
    """
    if path.stat().st_size > MAX_CARD_BYTES:
        raise ValueError(f"{str(path)!r} is larger than {MAX_CARD_BYTES:,} bytes, too large for a card; shorten it.")
    try:
        content = path.read_text(encoding="utf-8-sig")
        found = _METADATA.match(content)
        if not found and content.lstrip().startswith("---\n"):
            raise ValueError('the line "---" that ends the metadata is missing')
        metadata, text = (found["yaml"], content[found.end() :]) if found else ("", content)
        if len(metadata) > MAX_METADATA:
            raise ValueError(f"it is larger than {MAX_METADATA:,} characters")
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(metadata)):
            raise ValueError("it has aliases, by which little text is endlessly much; write out what they stand for")
        card = Card(f"---\n{metadata.strip() or '{}'}\n---\n{text}")
        _check_metadata(card.data)
    except Exception as error:  # YAML's own errors, and whatever a wrong kind of value leads to in huggingface_hub
        reason = " ".join(str(error).split())
        raise ValueError(f"The metadata at the top of {str(path)!r} cannot be read ({reason}); correct it.") from error
    return card


def save_card(card: ModelCard, path: Path) -> None:
    """Writes a card under a temporary name and moves it."""
    with staged_file(path) as staged:
        card.save(staged)


def _check_metadata(data: ModelCardData) -> None:
    """Rejects values that would be taken for something else."""
    for key in vars(data):
        if hasattr(ModelCardData, key):
            raise ValueError(f"{key!r} is not a name that metadata can have")
    data.to_yaml()  # as `card.content` is written
    for key in ("license_name", "license_link", "library_name", "pipeline_tag"):
        if not isinstance(data.get(key), str | None):
            raise ValueError(f"{key!r} must be a text, got {data[key]!r}")
    for key in ("license", "tags", "datasets", "metrics", "base_model"):
        value = data.get(key, [])
        if not isinstance(value, str | list) or any(isinstance(item, list | dict) for item in value):
            raise ValueError(f"{key!r} must be a text or a list of texts")
