# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What a model folder says of its model: results, the training run, the stored weights, and the existing card.

Evaluation results are asked for by a person: a wrong one is an error. Of what programs left beside the weights, values of
another kind than expected are passed over, as are numbers that are not finite: neither JSON nor YAML has them.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml
from huggingface_hub import ModelCard, ModelCardData
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from ..files import ALL_RESULTS, EVAL_RESULTS, EVALUATION, RUN_ARGUMENTS, TRAIN_RESULTS, TRAINER_STATE, staged_file
from .secrets import without_secrets


CARD = "README.md"
IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MAX_RECORD_BYTES = 256 * 2**20
MAX_CARD_BYTES = 4 * 2**20
MAX_METADATA = 100_000  # characters

_RUN_FIELDS = ("command", "dataset_name", "dataset_config_name", "model_name_or_path")
_TRAINING_FIELDS = ("global_step", "epoch", "train_samples", "train_batch_size", "train_loss", "train_runtime")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Card(ModelCard):
    """A model's card; huggingface_hub declares the metadata of any repository's."""

    data: ModelCardData


class Records(NamedTuple):
    """All that a folder's records say, without secrets."""

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
            metrics[without_secrets(name)] = value
    run = read_json(folder / RUN_ARGUMENTS)
    training = state | read_json(folder / TRAIN_RESULTS) | results
    examples = evaluation.get("eval_samples")
    return Records(
        [{key: _without_secrets(value) for key, value in result.items()} for result in _evaluation_results(folder)],
        metrics,
        examples if _is_number(examples) else None,
        {key: without_secrets(run[key]) for key in _RUN_FIELDS if isinstance(run.get(key), str)},
        {key: training[key] for key in _TRAINING_FIELDS if _is_number(training.get(key)) and training[key]},
    )


def _is_number(value) -> bool:
    """Whether a value is a finite number."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _without_secrets(value):
    return without_secrets(value) if isinstance(value, str) else value


def _last_logged_evaluation(state: dict) -> dict:
    """The last evaluation in trainer_state.json, if it was one of the weights in the folder, not of earlier ones."""
    history = state.get("log_history")
    entries = history if isinstance(history, list) else []
    logged = [entry for entry in entries if isinstance(entry, dict) and "eval_loss" in entry]
    return logged[-1] if logged and logged[-1].get("step") == state.get("global_step") else {}


def _evaluation_results(folder: Path) -> list[dict]:
    """The results in evaluation.json whose values are finite."""
    path = folder / EVALUATION
    results = read_json(path).get("results", [])
    if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
        raise ValueError(f'"results" in {str(path)!r} must be a list of objects.')
    for result in results:
        _check_result(result, path)
    return [result for result in results if _is_number(result["metric_value"])]


def _check_result(result: dict, path: Path) -> None:
    for key in ("task_type", "dataset_type", "dataset_name", "metric_type"):
        if not isinstance(result.get(key), str):
            raise ValueError(f"A result in {str(path)!r} has no {key!r}, a text.")
    for key in ("dataset_config", "dataset_split", "metric_name", "protocol", "command", "seed", "date"):
        if isinstance(value := result.get(key), bool | float | list | dict):
            raise ValueError(f"A result in {str(path)!r} has a {key!r} that is neither a text nor a whole number: {value!r}.")
    value, examples = result.get("metric_value"), result.get("num_examples")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"A result in {str(path)!r} has no 'metric_value', a number: got {value!r}.")
    if isinstance(examples, bool) or not isinstance(examples, int | None):
        raise ValueError(f"A result in {str(path)!r} has a 'num_examples' that is no whole number: {examples!r}.")


# Files beside the configuration ---------------------------------------------------------------------------------------


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
    counts: dict[str, int] = {}
    for path in weights:
        with open_safetensors(path) as file:
            for name in file.keys():
                tensor = file.get_slice(name)
                if tensor.get_dtype().lstrip("B").startswith("F"):
                    counts[tensor.get_dtype()] = counts.get(tensor.get_dtype(), 0) + math.prod(tensor.get_shape())
    return [_DTYPES.get(dtype, dtype) for dtype in sorted(counts, key=lambda dtype: (-counts[dtype], dtype))]


def has_code(folder: Path, config: PreTrainedConfig, auto_class: str) -> bool:
    """Whether `trust_remote_code=True` finds the model's source file in the folder."""
    auto_map = getattr(config, "auto_map", None)
    reference = auto_map.get(auto_class) if isinstance(auto_map, dict) else None
    return isinstance(reference, str) and (folder / f"{reference.partition('.')[0]}.py").is_file()


def has_processor(folder: Path, config: PreTrainedConfig) -> bool:
    """Whether the folder has a tokenizer, or the image processor of a vision model."""
    vision = config.model_type == "tost_vision"
    names = IMAGE_PROCESSOR_FILES if vision else ("tokenizer_config.json",)
    return any((folder / name).is_file() for name in names)


# The card -------------------------------------------------------------------------------------------------------------


def load_card(path: Path) -> Card:
    """The model card in a file; without metadata where it has none.

    Raises:
        ValueError: the metadata is no YAML, is huge, deep or endless, or holds values of a wrong kind.
    """
    if path.stat().st_size > MAX_CARD_BYTES:
        raise ValueError(f"{str(path)!r} is larger than {MAX_CARD_BYTES:,} bytes, too large for a card; shorten it.")
    try:
        metadata, text = _split_metadata(path.read_text(encoding="utf-8-sig"))
        if len(metadata) > MAX_METADATA:
            raise ValueError(f"it is larger than {MAX_METADATA:,} characters")
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(metadata)):
            raise ValueError("it has aliases, by which little text is endlessly much; write out what they stand for")
        card = Card(f"---\n{metadata}\n---\n{text}")
        _check_metadata(card.data)
    except Exception as error:  # YAML's own errors, and whatever a wrong kind of value leads to in huggingface_hub
        reason = " ".join(str(error).split())
        raise ValueError(f"The metadata at the top of {str(path)!r} cannot be read ({reason}); correct it.") from error
    return card


def save_card(card: ModelCard, path: Path) -> None:
    """Writes a card under a temporary name and moves it."""
    with staged_file(path) as staged:
        card.save(staged)


def _split_metadata(content: str) -> tuple[str, str]:
    """The YAML between the lines "---" at the top ("{}" where there is none), and the text below."""
    lines = content.lstrip().split("\n")
    if lines[0] != "---":
        return "{}", content
    end = next((i for i, line in enumerate(lines) if i and line.rstrip(" \t") == "---"), None)
    if end is None:
        raise ValueError('the line "---" that ends the metadata is missing')
    return "\n".join(lines[1:end]) or "{}", "\n".join(lines[end + 1 :])


def _check_metadata(data: ModelCardData) -> None:
    """Refuses values that would be taken for something else."""
    for key in vars(data):
        if hasattr(ModelCardData, key):
            raise ValueError(f"{key!r} is not a name that metadata can have")
    data.to_yaml()  # as it will be written
    for key in ("license_name", "license_link", "library_name", "pipeline_tag"):
        if not isinstance(data.get(key), str | None):
            raise ValueError(f"{key!r} must be a text, got {data[key]!r}")
    for key in ("license", "tags", "datasets", "metrics", "base_model"):
        value = data.get(key, [])
        if not isinstance(value, str | list) or any(isinstance(item, list | dict) for item in value):
            raise ValueError(f"{key!r} must be a text or a list of texts")
