# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Model cards (README.md), filled from the files of a model folder: configuration, training state, evaluation results.

What the folder does not say is left out of its card. Only a person can choose a licence: none is written unless it is given.
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import is_jinja_available, validate_repo_id
from transformers import PreTrainedConfig

from ..cache_files import state_bytes
from ..model.configuration_tost import (
    ABLATIONS,
    BEYOND_PAPER,
    CAUSAL_STATISTICS,
    FULL_ATTENTION,
    OPTION_DEFAULTS,
    PAPER_PRESETS,
    PRESETS,
    ToSTConfig,
)
from ..model.configuration_tost_vision import VISION_PRESETS, ToSTVisionConfig
from .card_metadata import card_metadata, listed, tags, task
from .card_sections import hyperparameters, mark_sections, merge
from .checks import load_config, model_class, parameter_count, weight_files
from .markdown import Markdown, code, code_block, duration, escape, link, number, python_literal, table
from .records import (
    CARD,
    Card,
    Records,
    TrainingSummary,
    has_code,
    has_processor,
    load_card,
    read_records,
    save_card,
    stored_dtypes,
)
from .secrets import without_secrets


TEMPLATE = Path(__file__).with_name("card_template.md")
PAPER = "https://arxiv.org/abs/2412.17810"
HUB = "https://huggingface.co"
_LICENCE = re.compile(r"[A-Za-z0-9][\w.+-]{0,99}")

PRESET_CARDS = (
    *PRESETS,
    "tost-vision-tiny-patch16",
    "tost-vision-small-patch16",
    "tost-vision-medium-patch16",
)

# Published by the authors (arXiv 2412.17810) ---------------------------------------------------------------------------

LANGUAGE_TABLE = """\
| model | parameters | OpenWebText | LAMBADA | WikiText | PTB | average |
|---|---|---|---|---|---|---|
| GPT2-Base | 124M | 2.84 | 4.32 | 4.13 | 5.75 | 4.26 |
| ToST-Base | 109,597,584 | 3.20 | 4.98 | 4.77 | 6.39 | 4.84 |
| ToST-Medium | 303,662,464 | 2.88 | 4.45 | 4.30 | 5.64 | 4.32 |
| ToST-Large | 655,136,720 | 2.72 | 4.32 | 3.99 | 5.03 | 4.02 |"""
LANGUAGE_NOTE = (
    "Cross-entropy in nats per GPT-2 token, zero-shot, as the mean over random windows of 1,024 tokens drawn with "
    "replacement. A sweep over a whole test set is another protocol and gives other numbers. Parameters without the table of "
    "positions."
)
VISION_TABLE = """\
| dataset | ToST-T | ToST-S | ToST-M | XCiT-S | XCiT-M | ViT-S | ViT-B |
|---|---|---|---|---|---|---|---|
| parameters | 5.8M | 22.6M | 68.1M | 24.9M | 80.2M | 22.1M | 86.6M |
| ImageNet-1k | 67.3 | 77.9 | 80.3 | 80.5 | 81.5 | 79.8 | 81.8 |
| ImageNet-ReaL | 72.2 | 84.1 | 85.6 | 85.6 | 85.9 | 85.6 | 86.7 |
| CIFAR-10 | 95.5 | 96.5 | 97.5 | 98.1 | 98.3 | 98.6 | 98.8 |
| CIFAR-100 | 78.3 | 82.7 | 84.5 | 86.1 | 87.6 | 88.8 | 89.3 |
| Flowers-102 | 88.6 | 92.8 | 94.2 | 93.9 | 94.0 | 94.0 | 95.7 |
| Oxford Pets | 85.6 | 91.1 | 92.8 | 92.9 | 94.0 | 92.8 | 94.1 |"""
VISION_NOTE = (
    "Top-1 accuracy in %. Pre-training on ImageNet-1k, and fine-tuning on each dataset below the two ImageNet rows. T, S and "
    "M are the tiny, small and medium sizes of 12, 12 and 24 layers, with patches of 16 pixels."
)
PUBLISHED = {
    **dict.fromkeys(PAPER_PRESETS, (LANGUAGE_TABLE, LANGUAGE_NOTE)),
    **{name: (VISION_TABLE, VISION_NOTE) for name in PRESET_CARDS if name in VISION_PRESETS},
}

POOLED = {"mean": "the mean of its tokens'", "first": "its first token's", "last": "its last token's"}

# Measured by us (`make results` writes it from the benchmarks' rows): {name of a size: {"text", "table", "command"}}
FIGURES = Path(__file__).with_name("figures.json")

# The recipes' commands; sequences of a micro-batch x micro-batches where they differ from tost-base's 60 x 8
_BATCHES = {"tost-medium": (30, 16), "tost-plus-medium": (30, 16), "tost-large": (20, 24)}


# The public functions -------------------------------------------------------------------------------------------------


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

    A `README.md` that is there already keeps what a person wrote: metadata, sections of their own, sections whose generated
    text they changed. The drafts that `Trainer` and `push_to_hub` write are replaced; what `Trainer`'s says about data sets,
    the base model and hyperparameters is taken over.

    Args:
        folder: the folder of a ToST model.
        repo_id: the repository that the card will stand in; the examples name the folder if left out.
        revision: the commit or tag that the examples are to pin.
        license: the licence of the weights, an identifier of the Hub ("apache-2.0", "mit"). Left out, it is the existing
            card's, or none.
        with_code: whether the repository will hold the model's source files; None if it holds what the folder does.

    Raises:
        FileNotFoundError: the folder has no weights.
        ValueError: the folder holds no ToST model, or one of the files is damaged; the sentence says which.
        ImportError: Jinja2 is not installed.
    """
    folder = Path(folder)
    config = load_config(folder)
    weights = weight_files(folder)
    if repo_id is not None:
        validate_repo_id(repo_id)
    if license is not None and not _LICENCE.fullmatch(license):
        raise ValueError(f"{license!r} is no licence's identifier; give one of the Hub's, such as apache-2.0, mit or other.")
    full_name = repo_id or _printable(folder.resolve().name)
    old = load_card(folder / CARD) if (folder / CARD).is_file() else Card("---\n{}\n---\n")
    records, name = read_records(folder), full_name.rpartition("/")[2]
    card = _fill(
        card_metadata(config, old, name, license, records),
        config,
        name,
        has_weights=True,
        repo_id=python_literal(full_name),
        revision=revision,
        pinned=f", revision={python_literal(_printable(revision))}" if revision else "",
        dtypes=stored_dtypes(weights),
        has_code=has_code(folder, config, task(config)[0]) if with_code is None else with_code,
        has_processor=has_processor(folder, config),
        hyperparameters=hyperparameters(without_secrets(old.text)),
        **_what_was_recorded(records),
    )
    card.text = without_secrets(merge(old.text, card.text))
    return card


def write_card(
    folder: str | os.PathLike,
    *,
    repo_id: str | None = None,
    revision: str | None = None,
    license: str | None = None,
    with_code: bool | None = None,
) -> Path:
    """Writes the `README.md` of a model folder, or refreshes it; the arguments are those of `build_card`.

    Returns:
        The path of the card.
    """
    target = Path(folder, CARD)
    save_card(build_card(folder, repo_id=repo_id, revision=revision, license=license, with_code=with_code), target)
    return target


def preset_card(name: str) -> ModelCard:
    """The card of one of the paper's sizes, such as "tost-base": an architecture, without weights or results.

    Raises:
        ValueError: there is no such size.
        ImportError: Jinja2 is not installed.
    """
    config: PreTrainedConfig
    if name in PRESETS:
        config = ToSTConfig.from_preset(name, architectures=["ToSTForCausalLM"])
        command = (
            f"python examples/run_clm.py --config_name {name} --tokenizer_name gpt2 \\\n"
            "    --dataset_name Skylion007/openwebtext --do_train --do_eval --output_dir my-tost"
        )
        if name in _BATCHES:
            size, steps = _BATCHES[name]
            command += f" \\\n    --per_device_train_batch_size {size} --gradient_accumulation_steps {steps}"
    elif name in VISION_PRESETS:
        config = ToSTVisionConfig.from_preset(name, num_labels=1000, architectures=["ToSTForImageClassification"])
        command = (
            f"python examples/run_image_classification.py --config_name {name} \\\n"
            "    --dataset_name ILSVRC/imagenet-1k --do_train --do_eval --output_dir my-tost-vision"
        )
    else:
        raise ValueError(f"There is no preset {name!r}; choose one of {', '.join([*PRESETS, *VISION_PRESETS])}.")
    data = ModelCardData(
        license="apache-2.0",  # of the architecture's code: there is nothing else
        library_name="transformers",
        pipeline_tag=task(config)[1],
        tags=tags(config),
    )
    return _fill(data, config, name, has_weights=False, training_command=code_block(command, "bash"))


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


# What the records say -------------------------------------------------------------------------------------------------


def _what_was_recorded(records: Records) -> dict[str, str | None]:
    """What the template takes from the records of training and evaluation."""
    commands = dict.fromkeys(result["command"] for result in records.results if result.get("command"))
    metrics, examples = records.evaluation
    return {
        "evaluation_table": _evaluation_table(records.results),
        "evaluation_commands": code_block("\n".join(map(str, commands)), "bash") if commands else None,
        "training_evaluation_table": table(("metric", "value"), [(_metric_name(k), number(v)) for k, v in metrics.items()]),
        "eval_examples": number(examples),
        "training_command": code_block(records.run.command, "bash") if records.run.command else None,
        "training_table": _training_table(records.training),
    }


def _training_table(training: TrainingSummary) -> str:
    rows = [
        ("optimizer steps", number(training.steps)),
        ("epochs", number(training.epochs)),
        ("training examples", number(training.examples)),
        ("examples per device and micro-batch", number(training.batch_size)),
        ("mean training loss", number(training.loss)),
        ("time", None if training.seconds is None else duration(training.seconds)),
    ]
    return table(("", ""), rows)


# Text -----------------------------------------------------------------------------------------------------------------


def _fill(data: ModelCardData, config: PreTrainedConfig, name: str, *, has_weights: bool, **values) -> ModelCard:
    """Fills the template; `values` are Markdown already."""
    if not is_jinja_available():
        raise ImportError("Model cards need Jinja2, which is not installed: pip install jinja2")
    known: dict[str, Any] = {
        "name": escape(name),
        "paper": PAPER,
        "has_weights": has_weights,
        "license": ", ".join(map(code, listed(data.license))),
        "base_models": ", ".join(link(name, HUB) for name in listed(data.base_model)),
        "datasets": ", ".join(link(name, f"{HUB}/datasets") for name in listed(data.datasets)),
        "architecture_table": _architecture_table(config, values.get("dtypes", ())),
    }
    known |= _about_model(config) | _figures(config) | values
    card = ModelCard.from_template(data, template_path=str(TEMPLATE), **known)
    card.text = mark_sections(re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", without_secrets(card.text))))
    return card


def _about_model(config: PreTrainedConfig) -> dict[str, object]:
    """What the template takes from the configuration."""
    auto_class, pipeline_tag = task(config)
    known = {
        "kind": "language",
        "is_causal": getattr(config, "is_causal", False),
        "preset": _find_preset(config),
        "config": config,
        "attention_type": "tssa",
        "config_class": type(config).__name__,
        "model_class": model_class(config).__name__,
        "auto_class": auto_class,
        "pipeline_tag": pipeline_tag,
    }
    if isinstance(config, ToSTVisionConfig):
        return known | {"kind": "vision", "attention_type": config.attention_type, "image_size": _sides(config)}
    state = state_bytes(config)
    key_value_size = 2 * config.num_hidden_layers * config.hidden_size * 4  # keys and values in float32
    return known | {
        "beyond_paper": [name for name in config.options() if name in BEYOND_PAPER],
        "state_size": state.saved,
        "state_in_memory": state.in_memory,
        "state_per_token": state.per_token,
        "attention_layers": config.num_hidden_layers - config.layer_types.count(CAUSAL_STATISTICS),
        "key_value_size": key_value_size,
    }


def _figures(config: PreTrainedConfig) -> dict[str, str | None]:
    """What was published of, and measured on, the paper's size that the configuration is, if it is one."""
    preset = _find_preset(config) if task(config)[1] in ("text-generation", "image-classification") else None
    published, note = (None, None) if preset is None else PUBLISHED.get(preset, (None, None))
    speed = json.loads(FIGURES.read_text(encoding="utf-8")).get(preset, {})
    return {
        "published_table": published,
        "published_note": note,
        "speed_text": speed.get("text"),
        "speed_table": speed.get("table"),
        "speed_command": speed.get("command"),
    }


def _find_preset(config: PreTrainedConfig) -> str | None:
    """The name of the paper's size that a configuration is, if it is one."""
    size = "hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act "
    config_class: type[ToSTConfig | ToSTVisionConfig]
    presets: Iterable[str]
    if isinstance(config, ToSTVisionConfig):
        size += "num_class_attention_layers patch_size num_channels attention_type normalize_patch_tokens qkv_bias "
        size += " ".join(ABLATIONS)
        presets, config_class = VISION_PRESETS, ToSTVisionConfig
    else:
        size += "vocab_size max_position_embeddings use_bias tie_word_embeddings " + " ".join(OPTION_DEFAULTS)
        presets, config_class = PRESETS, ToSTConfig
    for name in presets:
        preset = config_class.from_preset(name)
        if all(getattr(config, key) == getattr(preset, key) for key in size.split()):
            return name
    return None


def _architecture_table(config: PreTrainedConfig, dtypes: Sequence[str]) -> str:
    rows = [
        ("model class", Markdown(code(model_class(config).__name__))),
        ("parameters", number(parameter_count(config))),
        ("stored as", " and ".join(dtypes)),
    ]
    heads = f"{config.num_attention_heads} of {config.hidden_size // config.num_attention_heads} channels"
    if isinstance(config, ToSTVisionConfig):
        height, width = _sides(config)
        rows += [
            ("layers", f"{config.num_hidden_layers}, then {config.num_class_attention_layers} of class attention"),
            ("heads", heads),
            ("width", number(config.hidden_size)),
            *_mlp_rows(config),
            ("patches", f"{config.patch_size} x {config.patch_size} pixels"),
            ("images it is meant for", f"{height} x {width} pixels"),
        ]
    else:
        positions = config.max_position_embeddings
        rows += [
            ("layers", number(config.num_hidden_layers)),
            ("heads", heads),
            ("width", number(config.hidden_size)),
            *_mlp_rows(config),
            ("vocabulary", number(config.vocab_size)),
            ("positions", "no limit" if positions is None else number(positions)),
            *_option_rows(cast(ToSTConfig, config)),
        ]
    if task(config)[1].endswith("classification"):
        labels = cast(dict[int, str], config.id2label)  # transformers makes the keys numbers, and counts if there are none
        names = [labels[i] for i in sorted(labels)]
        texts = [name for name in names if isinstance(name, str)]
        shown = len(names) == len(texts) <= 20 and not all(name.startswith("LABEL_") for name in texts)
        words = f": {without_secrets(', '.join(texts))}" if shown else ""
        rows.append(("classes", f"{number(len(names))}{words}"))
    if task(config)[1] == "text-classification":
        rows.append(("features of a text", POOLED[cast(ToSTConfig, config).pooling_in_use]))
    return table(("", ""), rows)


def _mlp_rows(config: PreTrainedConfig) -> list[tuple[str, str | None]]:
    """Rows on what the paper's ablation varies: the second half of a block, and the scores."""
    rows = [("width of the MLP", number(config.intermediate_size))]
    if config.mlp_type == "ista":
        step = f"one of size {number(config.ista_step_size)}, threshold {number(config.ista_threshold)}"
        rows = [("ISTA step in the MLP's place", step)]
    return rows if config.normalize_scores else [*rows, ("scores of memberships", "not normalised")]


def _option_rows(config: ToSTConfig) -> list[tuple[str, str | None]]:
    """Rows on the options that are on."""
    rows: list[tuple[str, str | None]] = []
    if not config.is_causal:
        rows.append(("direction", "both: an encoder"))
    if not config.pre_norm:
        rows.append(("norms", "after the attention and the MLP"))
    if config.forgetting != "none":
        rows.append(
            ("forgetting", {"head": "one factor per head", "token": "one factor per token and head"}[config.forgetting])
        )
    if config.conv_kernel is not None:
        rows.append(("convolution", f"{config.conv_kernel} tokens, in layers of statistics"))
    attention = [(i, kind) for i, kind in enumerate(config.all_layer_types, start=1) if kind != CAUSAL_STATISTICS]
    if attention:
        full = ", ".join(str(i) for i, kind in attention if kind == FULL_ATTENTION)
        sliding = ", ".join(str(i) for i, kind in attention if kind != FULL_ATTENTION)
        rows += [("layers with attention to all tokens", full)] if full else []
        rows += [(f"layers with attention to {config.sliding_window:,} tokens", sliding)] if sliding else []
        rows.append(("heads of keys and values", number(config.num_key_value_heads or config.num_attention_heads)))
        if rotary := getattr(config, "rope_parameters", None):  # no attribute where no layer rotates
            rows.append(("rotary positions", f"theta {number(rotary['rope_theta'])}"))
    return rows


def _sides(config: ToSTVisionConfig) -> Sequence[int]:
    return (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size


def _evaluation_table(results: list[dict]) -> str:
    header = ("dataset", "split", "metric", "value", "examples", "seed", "date", "protocol")
    rows = [
        (
            result["dataset_name"],
            result.get("dataset_split"),
            result.get("metric_name") or result["metric_type"],
            number(result["metric_value"]),
            number(result.get("num_examples")),
            result.get("seed"),
            result.get("date"),
            result.get("protocol"),
        )
        for result in results
    ]
    return table(header, rows)


def _printable(name: str) -> str:
    """A name from the file system or the command line, with "?" for what is no text in it."""
    return name.encode(errors="replace").decode()


def _metric_name(name: str) -> str:
    averaged = name.startswith("ema_")
    words = name.removeprefix("ema_").replace("_", " ")
    return Markdown(f"{escape(words)} of the averaged weights (folder `ema`)") if averaged else words


__all__ = ["PRESET_CARDS", "build_card", "preset_card", "write_card", "write_preset_cards"]
