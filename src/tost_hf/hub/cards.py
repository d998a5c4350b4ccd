# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Model cards (README.md): metadata and a template, filled from the files of a model folder.

What the folder does not say is left out of its card. Only a person can choose a licence: none is written unless it is given.
A card is rendered once; one that exists is replaced as a whole or not at all, so that no text of a person is merged or edited.
"""

import json
import os
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig

from ..cache_files import state_bytes
from ..model.configuration_tost import (
    BEYOND_PAPER,
    CAUSAL_STATISTICS,
    OPTION_DEFAULTS,
    PRESETS,
    ToSTConfig,
)
from ..model.configuration_tost_vision import VISION_PRESETS, ToSTVisionConfig
from .checks import load_config, model_class, parameter_count, weight_files
from .markdown import code_block, escape, link, number, python_string, table
from .records import CARD, IMAGE_PROCESSOR_FILES, Card, Records, read_records, save_card, stored_dtypes


TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent))
TEMPLATES.filters |= {"markdown": escape, "number": number}
SPEED = Path(__file__).with_name("figures.json")  # {preset: {"text", "table", "command"}}, written by `make results`
PAPER_TAG = "arxiv:2412.17810"
HUB = "https://huggingface.co"
TASKS = {  # Auto class and pipeline tag of each model class
    "ToSTForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "ToSTForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ToSTForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "ToSTForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
    "ToSTForMaskedLM": ("AutoModelForMaskedLM", "fill-mask"),
    "ToSTModel": ("AutoModel", "feature-extraction"),
    "ToSTForImageClassification": ("AutoModelForImageClassification", "image-classification"),
    "ToSTVisionModel": ("AutoModel", "image-feature-extraction"),
}
PRESET_CARDS = (
    *PRESETS,
    "tost-vision-tiny-patch16",
    "tost-vision-small-patch16",
    "tost-vision-medium-patch16",
)
NO_RECORDS = Records([], {}, None, {}, {})  # of a preset, whose card describes an architecture
_PRESET_FIELDS = (  # which tell the paper's sizes from others; a configuration lacks those of the other modality
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "vocab_size"),
    *("max_position_embeddings", "use_bias", "tie_word_embeddings", "num_class_attention_layers", "patch_size"),
    *("num_channels", "attention_type", "normalize_patch_tokens", "qkv_bias", *OPTION_DEFAULTS),
)
_LICENCE = re.compile(r"[A-Za-z0-9][\w.+-]{0,99}")


def build_card(
    folder: str | os.PathLike,
    *,
    repo_id: str | None = None,
    revision: str | None = None,
    license: str | None = None,
    with_code: bool | None = None,
) -> ModelCard:
    """The card of the model in a folder, as `write_card` writes it.

    It is made of `config.json`, the headers of the safetensors files, `trainer_state.json`, `all_results.json`,
    `eval_results.json`, and, where they exist,

    - `evaluation.json`: {"results": [{"task_type", "dataset_type", "dataset_name", "metric_type", "metric_value", and as far
      as known "dataset_config", "dataset_split", "metric_name", "protocol", "command", "seed", "date", "num_examples"}]};
    - `run_arguments.json`: {"command", "dataset_name", "dataset_config_name", "model_name_or_path"}, all optional.

    An existing `README.md` is not read.

    Example:
        >>> card = build_card("./my-tost", repo_id="me/my-tost", license="apache-2.0")
        >>> print(card.data.pipeline_tag)

    Args:
        folder: the folder of a ToST model.
        repo_id: the repository of the card; the examples name the folder if left out.
        revision: the commit or tag that the examples pin.
        license: the licence of the weights, an identifier of the Hub ("apache-2.0", "mit"). Left out, the card names none.
        with_code: whether the repository will hold the model's source files; None if it holds what the folder does.

    Raises:
        FileNotFoundError: the folder has no weights.
        ValueError: the folder holds no ToST model, or one of the files is damaged; the message says which.
    """
    folder = Path(folder)
    config = load_config(folder)
    weights = weight_files(folder)
    if repo_id is not None:
        validate_repo_id(repo_id)
    if license is not None and not _LICENCE.fullmatch(license):
        raise ValueError(f"{license!r} is no licence's identifier; give one of the Hub's, such as apache-2.0, mit or other.")
    if with_code is None:
        with_code = bool(getattr(config, "auto_map", None)) and any(folder.glob("modeling_tost*.py"))
    full_name = repo_id or _printable(folder.resolve().name)
    records, name = read_records(folder), full_name.rpartition("/")[2]
    processors = IMAGE_PROCESSOR_FILES if isinstance(config, ToSTVisionConfig) else ("tokenizer_config.json",)
    data = _metadata(config, name, license, records)
    text = _render(
        data,
        config,
        records,
        stored_dtypes(weights),
        has_weights=True,
        repo_id=python_string(full_name),
        revision=revision,
        pinned=f", revision={python_string(_printable(revision))}" if revision else "",
        has_code=with_code,
        has_processor=any((folder / file).is_file() for file in processors),
    )
    return _make_card(data, name, text)


def write_card(
    folder: str | os.PathLike,
    *,
    repo_id: str | None = None,
    revision: str | None = None,
    license: str | None = None,
    with_code: bool | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes the `README.md` of a model folder; the other arguments and errors are those of `build_card`.

    Args:
        overwrite: replace one that exists, all of it.

    Returns:
        The path of the card.

    Raises:
        FileExistsError: there is one, and `overwrite` is not set.

    Example:
        >>> write_card("./my-tost", license="apache-2.0")
    """
    target = Path(folder, CARD)
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists: edit it by hand, or replace it, text written by hand included (--overwrite).")
    save_card(build_card(folder, repo_id=repo_id, revision=revision, license=license, with_code=with_code), target)
    return target


def preset_card(name: str) -> ModelCard:
    """The card of one of the paper's sizes, such as "tost-base": an architecture, without weights or results.

    Raises:
        ValueError: there is no such size.
    """
    config: PreTrainedConfig
    if name in PRESETS:
        config = ToSTConfig.from_preset(name, architectures=["ToSTForCausalLM"])
    elif name in VISION_PRESETS:
        config = ToSTVisionConfig.from_preset(name, num_labels=1000, architectures=["ToSTForImageClassification"])
    else:
        raise ValueError(f"There is no preset {name!r}; choose one of {', '.join([*PRESETS, *VISION_PRESETS])}.")
    data = ModelCardData(
        license="apache-2.0",  # of the architecture's code: there is nothing else
        library_name="transformers",
        pipeline_tag=_task(config)[1],
        tags=_tags(config),
    )
    return _make_card(data, name, _render(data, config))


def write_preset_cards(folder: str | os.PathLike) -> list[Path]:
    """Writes the cards of the paper's sizes, which have no weights, into a folder, as `tost-base.md` and so on.

    Returns:
        Their paths.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = [Path(folder, f"{name}.md") for name in PRESET_CARDS]
    for name, path in zip(PRESET_CARDS, paths):
        save_card(preset_card(name), path)
    return paths


# Metadata -------------------------------------------------------------------------------------------------------------


def _metadata(config: PreTrainedConfig, name: str, license: str | None, records: Records) -> ModelCardData:
    run, pipeline_tag = records.run, _task(config)[1]
    results = [_to_eval_result(result) for result in records.results]
    if is_hub_id(run.get("dataset_name")):
        results += _training_results(records.metrics, pipeline_tag, run)
    return ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag=pipeline_tag,
        tags=_tags(config),
        datasets=_ids(run.get("dataset_name")),
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        base_model=_ids(run.get("model_name_or_path")),
        eval_results=results or None,
        model_name=name if results else None,
    )


def _task(config: PreTrainedConfig) -> tuple[str, str]:
    """The Auto class and the pipeline tag of a configuration's model; ValueError if it is none to publish."""
    name = model_class(config).__name__
    if name not in TASKS:
        raise ValueError(f"There is no card for the architecture {name!r}, which is not a model to publish.")
    return TASKS[name]


def _tags(config: PreTrainedConfig) -> list[str]:
    return ["tost", PAPER_TAG, *(["tssa"] if getattr(config, "attention_type", "tssa") == "tssa" else [])]


def _ids(name: str | None) -> list[str] | None:
    return [name] if name is not None and is_hub_id(name) else None


def is_hub_id(name) -> bool:
    """Whether a name that a script was given is an id on the Hub, rather than a folder."""
    if not isinstance(name, str) or "/" not in name:
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _to_eval_result(result: dict) -> EvalResult:
    """A result of evaluation.json; what EvalResult has no field for goes into `metric_args`."""
    fields = {key: value for key, value in result.items() if key in EvalResult.__dataclass_fields__}
    details = {
        key: result[key] for key in ("protocol", "command", "seed", "num_examples", "date") if result.get(key) is not None
    }
    return EvalResult(**fields | {"metric_args": details or None})


def _training_results(metrics: dict[str, float], pipeline_tag: str, run: dict[str, str]) -> list[EvalResult]:
    """Trainer's evaluation, on the dataset that the training script was given."""
    config_name = run.get("dataset_config_name")
    return [
        EvalResult(
            task_type=pipeline_tag,
            dataset_type=run["dataset_name"],
            dataset_name=" ".join(filter(None, (run["dataset_name"], config_name))),
            dataset_config=config_name,
            metric_type=metric,
            metric_name=f"{metric} (validation data of the training script)",
            metric_value=value,
        )
        for metric, value in metrics.items()
        if not metric.startswith("ema_")  # the EMA weights are another model
    ]


# Text -----------------------------------------------------------------------------------------------------------------


def _make_card(data: ModelCardData, name: str, text: str) -> Card:
    return Card(f"---\n{data.to_yaml()}\n---\n\n# {escape(name)}\n\n{text.strip()}\n")


def _render(
    data: ModelCardData, config: PreTrainedConfig, records: Records = NO_RECORDS, dtypes: Sequence[str] = (), **values
) -> str:
    """The template, filled; `values` are Markdown already."""
    auto_class, pipeline_tag = _task(config)
    preset, is_vision = _find_preset(config), isinstance(config, ToSTVisionConfig)
    commands = dict.fromkeys(str(result["command"]) for result in records.results if result.get("command"))
    seconds = records.training.get("train_runtime")
    known: dict[str, Any] = {
        "paper": "https://arxiv.org/abs/2412.17810",
        "license": data.license,
        "base_models": ", ".join(link(name, HUB) for name in data.base_model or []),
        "datasets": ", ".join(link(name, f"{HUB}/datasets") for name in data.datasets or []),
        "kind": "vision" if is_vision else "language",
        "preset": preset,
        "speed": json.loads(SPEED.read_text(encoding="utf-8")).get(preset),
        "config": config,
        "config_class": type(config).__name__,
        "model_class": model_class(config).__name__,
        "num_parameters": parameter_count(config),
        "dtypes": dtypes,
        "auto_class": auto_class,
        "pipeline_tag": pipeline_tag,
        "is_causal": getattr(config, "is_causal", False),
        "attention_type": getattr(config, "attention_type", "tssa"),
        "beyond_paper": [name for name in config.options() if name in BEYOND_PAPER],
        "classes": _classes(config),
        "evaluation_table": _evaluation_table(records.results),
        "evaluation_commands": code_block("\n".join(commands), "bash") if commands else "",
        "training_evaluation_table": table(
            ("metric", "value"), [(_metric_name(name), number(value)) for name, value in records.metrics.items()]
        ),
        "eval_examples": records.eval_examples,
        "training_command": code_block(records.run["command"], "bash") if "command" in records.run else "",
        "training": records.training,
        "training_time": None if seconds is None else str(timedelta(seconds=round(seconds))),
    }
    if is_vision:
        size = config.image_size
        known["image_size"] = (size, size) if isinstance(size, int) else size
    else:
        known["state"] = state_bytes(config)
        attention: dict[str, list[int]] = {}
        for i, layer_type in enumerate(config.all_layer_types, start=1):
            if layer_type != CAUSAL_STATISTICS:
                attention.setdefault(layer_type, []).append(i)
        known["attention_layers"] = attention
        known["key_value_size"] = 2 * config.num_hidden_layers * config.hidden_size * 4  # keys and values in float32
    text = TEMPLATES.get_template("card_template.md").render(known | values)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text))


def _find_preset(config: Any) -> str | None:
    """The name of the paper's size that a configuration is, if it is one, for the task that was published."""
    if _task(config)[1] not in ("text-generation", "image-classification"):
        return None
    presets = VISION_PRESETS if isinstance(config, ToSTVisionConfig) else PRESETS
    for name in presets:
        preset = type(config).from_preset(name)
        if all(getattr(config, field, None) == getattr(preset, field, None) for field in _PRESET_FIELDS):
            return name
    return None


def _classes(config: PreTrainedConfig) -> str:
    """The number of classes, and their names where somebody gave them names."""
    labels = cast(dict[int, str], config.id2label)  # transformers makes the keys numbers, and counts if there are none
    names = [labels[i] for i in sorted(labels)]
    texts = [name for name in names if isinstance(name, str)]
    shown = len(names) == len(texts) <= 20 and not all(name.startswith("LABEL_") for name in texts)
    return f"{number(len(names))}{': ' + ', '.join(texts) if shown else ''}"


def _evaluation_table(results: list[dict]) -> str:
    header = ("dataset", "split", "metric", "value", "examples", "seed", "date", "protocol")
    keys = ("dataset_name", "dataset_split", "metric_name", "metric_value", "num_examples", "seed", "date", "protocol")
    numbers = ("metric_value", "num_examples")
    named = [result | {"metric_name": result.get("metric_name") or result["metric_type"]} for result in results]
    return table(header, [[number(r.get(key)) if key in numbers else r.get(key) for key in keys] for r in named])


def _metric_name(name: str) -> str:
    weights = " of the EMA weights (folder ema)" if name.startswith("ema_") else ""
    return name.removeprefix("ema_").replace("_", " ") + weights


def _printable(name: str) -> str:
    """A name from the file system or the command line, with "?" for what is no text in it."""
    return name.encode(errors="replace").decode()


__all__ = ["PRESET_CARDS", "build_card", "is_hub_id", "preset_card", "write_card", "write_preset_cards"]
