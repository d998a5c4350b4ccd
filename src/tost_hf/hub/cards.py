# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Model cards (README.md): metadata and a template, filled from the files of a model folder.

A card leaves out what the folder's files do not state. It names a license only if the caller passes one.
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import CONFIG_NAME

from ..cache_files import state_bytes
from ..files import CURVES, is_weights_name, name_file_in_errors, staged_file
from ..model.configuration_tost import BEYOND_PAPER, TSSA
from .loading import IMAGE_PROCESSOR_FILES, empty_model, has_file, load_config, model_class
from .results import CARD, Results, load_card, read_results


PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp")
TEMPLATE = Path(__file__).with_name("card_template.md")
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


def build_card(
    folder: str | os.PathLike, *, repo_id: str | None = None, revision: str | None = None, license: str | None = None
) -> ModelCard:
    """Builds the card of the model in a folder.

    It is built from `config.json`, the results and the state that Trainer saves, and, where they exist,

    - `evaluation.json`: {"results": [{"task_type", "dataset_type", "dataset_name", "metric_type", "metric_value", and optional
      "dataset_config", "dataset_split", "metric_name", "protocol", "command", "seed", "date", "num_examples"}]};
    - `run_arguments.json`: {"command", "dataset_name", "dataset_config_name", "model_name_or_path"}, all optional.

    An existing `README.md` is not read.

    Example:
        >>> build_card("./my-tost", repo_id="me/my-tost", license="apache-2.0").save("README.md")

    Args:
        folder: the folder of a ToST model.
        repo_id: the repository that the card's examples load from; the folder by default.
        revision: the commit or tag that the examples pin; without it the remote code's example names the branch main.
        license: the license of the weights, as an identifier of the Hub ("apache-2.0", "mit"). By default the card names none.

    Raises:
        FileNotFoundError: the folder has no weights.
        ValueError: the folder contains no ToST model, or one of the files is damaged; the message says which.
    """
    folder = Path(folder)
    config: Any = load_config(folder)
    if not any(is_weights_name(path.name) for path in folder.iterdir()):
        raise FileNotFoundError(f"{folder} has no weights in safetensors files.")
    class_name, full_name = model_class(config).__name__, repo_id or folder.resolve().name
    if class_name not in TASKS:
        raise ValueError(f"There is no model card for the architecture {class_name!r}; it cannot be published.")
    auto_class, pipeline_tag = TASKS[class_name]
    results, is_vision, name = read_results(folder), config.model_type == "tost_vision", full_name.rpartition("/")[2]
    commands = dict.fromkeys(filter(None, ((x.metric_args or {}).get("command") for x in results.evaluation)))
    with name_file_in_errors(folder / CONFIG_NAME):
        description = describe(config)
    return ModelCard.from_template(
        _make_metadata(results, name, license, pipeline_tag, getattr(config, "attention_type", "tssa")),
        template_path=str(TEMPLATE),
        name=name,
        config=config,
        auto_class=auto_class,
        is_vision=is_vision,
        beyond_paper=[option for option in config.options() if option in BEYOND_PAPER],
        description=make_markdown_table(("model", class_name), description.items()),
        evaluation=_describe_evaluation(results.evaluation),
        commands=_break_lines("\n".join(commands)),
        training_evaluation=make_markdown_table(("metric", "value"), results.metrics.items()).replace("_", " "),
        run=results.run_arguments,
        run_command=_break_lines(results.run_arguments.get("command", "")),
        training=make_markdown_table(("training", "value"), results.training.items()).replace("_", " "),
        curves=CURVES if (folder / CURVES).is_file() else None,
        source=json.dumps(full_name) + (f", revision={json.dumps(revision)}" if revision else ""),
        revision=revision,
        has_processor=has_file(folder, IMAGE_PROCESSOR_FILES if is_vision else ("tokenizer_config.json",)),
    )


def complete_card(folder: Path, repo_id: str, *, license: str | None = None, revision: str | None = None) -> str:
    """The text of the card to publish: that of the folder, which is not changed, with the license and for the repository.

    Raises:
        ValueError: there is no card and no license; the card names no license or another one, or is an unfilled template.
        FileNotFoundError, ValueError: as in `build_card`.
    """
    path = folder / CARD
    if license is not None and not path.is_file():
        return str(build_card(folder, license=license, repo_id=repo_id, revision=revision))
    card, text = check_card(path, license), path.read_bytes().decode()
    if not card.data.get("license"):
        card.data["license"] = license
        text = str(card)
    name = folder.resolve().name  # of the card's title and in its examples
    text = text.replace(f"\n# {name}\n", f"\n# {repo_id.rpartition('/')[2]}\n", 1)
    loading = rf'from_pretrained\((\s*)(?:{re.escape(json.dumps(name))}|{re.escape(json.dumps(repo_id))})(, revision="[^"]*")?'
    pin = f", revision={json.dumps(revision)}" if revision else None  # or as it is
    return re.sub(loading, lambda match: f"from_pretrained({match[1]}{json.dumps(repo_id)}{pin or match[2] or ''}", text)


def _break_lines(commands: str) -> str:
    """Shell commands with each option on a line of its own; quoted arguments stay as they are."""
    return re.sub(r"('[^']*'|\"[^\"]*\")| (?=--)", lambda match: match[1] or " \\\n    ", commands)


def check_card(path: Path, license: str | None = None) -> ModelCard:
    """Loads a model card and checks that it can be published, with this license if it names none.

    Raises:
        ValueError: there is no card, its metadata does not parse, it names no license or another one, or it is an unfilled
            template.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} has no model card; publish with --license, which writes one.")
    card = load_card(path)
    old_license = card.data.get("license")
    if not (old_license or license):
        raise ValueError(
            f"The card {path} names no license: --license apache-2.0 (or whichever it is) adds it, or a line in its metadata."
        )
    if old_license and license not in (None, old_license):
        raise ValueError(f"The card {path} names the license {old_license!r}, not {license!r}: edit it, or omit --license.")
    if "[More Information Needed]" in card.content:
        raise ValueError(f"The card {path} is an unfilled template: complete it by hand.")
    return card


def save_card(card: ModelCard, path: Path) -> None:
    """Writes a card under a temporary name and moves it."""
    with staged_file(path) as staged:
        card.save(staged)


def find_pictures(card: str) -> list[str]:
    """The names of pictures in a card's text that are files, not on the web."""
    names = re.findall(r"!\[[^\]]*\]\(\s*(<[^>\n]+>|[^)\s]+)", card)
    names += re.findall(r"""<img\b[^>]*?\ssrc\s*=\s*["']?([^"'\s>]+)""", card, re.IGNORECASE)
    paths = [unquote(re.split("[?#]", name.strip("<>"))[0]) for name in names]
    return [path for path in dict.fromkeys(paths) if ":" not in path and path.lower().endswith(PICTURE_SUFFIXES)]


def make_markdown_table(header: Sequence[str], records: Iterable[Sequence]) -> str:
    """A Markdown table, without the columns in which no record has a value; empty without records.

    Integers have thousands separators, floats six significant digits.
    """
    cells = [[_format_cell(value) for value in record] for record in records]
    columns = [i for i in range(len(header)) if any(line[i] for line in cells)]
    lines = ["| " + " | ".join(line[i] for i in columns) + " |" for line in (header, *cells)]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]]) if cells else ""


def _format_cell(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value:.6g}" if isinstance(value, float) else f"{value:,}"
    return "" if value is None else str(value).replace("|", r"\|").replace("\n", " ")


def is_hub_id(name: str) -> bool:
    """Whether a name passed to a script is a repository id on the Hub, not a folder."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name and not Path(name).exists()


def describe(config: Any) -> dict[str, str]:
    """Describes a configuration: displayed names and values."""
    description = {
        "parameters": f"{empty_model(config).num_parameters():,}",
        "layers": str(config.num_hidden_layers),
        "heads": f"{config.num_attention_heads} of {config.hidden_size // config.num_attention_heads} channels",
        "width": f"{config.hidden_size:,}, of the MLP {config.intermediate_size:,}",
    }
    if config.dtype is not None:
        description["dtype"] = str(config.dtype).removeprefix("torch.")
    options = dict(config.options())
    if config.model_type == "tost_vision":
        height, width = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
        description["images"] = f"{height} x {width} pixels, patches of {config.patch_size}, attention {config.attention_type}"
    else:
        description["vocabulary"] = f"{config.vocab_size:,}"
        length = f"{config.max_position_embeddings:,}"
        has_limit = config.position_embedding_type == "learned"
        description["positions"] = length if has_limit else f"no limit; meant for texts of up to {length} tokens"
        description["state"] = "none: an encoder processes the whole sequence at once"
        if config.is_causal:
            state = state_bytes(config)
            growth = f", and {state.per_token:,} with every token" if state.per_token else ""
            description["state"] = f"{state.saved:,} bytes per sequence at any length ({state.in_memory:,} in memory){growth}"
        if options.pop("layer_types", None):
            for layer_type in sorted({*config.layer_types} - {TSSA}):
                numbers = [str(i) for i, x in enumerate(config.layer_types) if x == layer_type]
                description["layers"] += f"; {layer_type} in {', '.join(numbers)} (counted from 0)"
    if (config.architectures or [""])[0].endswith("Classification"):
        names = [str(config.id2label[i]) for i in sorted(config.id2label)]
        show_names = 0 < len(names) <= 20 and not names[0].startswith("LABEL_")
        description["classes"] = f"{len(names):,}" + (f": {', '.join(names)}" if show_names else "")
    if options:
        description["options"] = ", ".join(f"{name} {value}" for name, value in options.items())
    return description


def _make_metadata(results: Results, name: str, license: str | None, pipeline_tag: str, attention: str) -> ModelCardData:
    run = results.run_arguments
    ids = {key: value for key, value in run.items() if is_hub_id(value)}
    dataset, config_name, base_model = ids.get("dataset_name"), run.get("dataset_config_name"), ids.get("model_name_or_path")
    eval_results = list(results.evaluation)
    if dataset:  # of Trainer's evaluation; the EMA weights are another model
        eval_results += [
            EvalResult(
                task_type=pipeline_tag,
                dataset_type=dataset,
                dataset_name=" ".join(filter(None, (dataset, config_name))),
                dataset_config=config_name,
                metric_type=metric,
                metric_name=f"{metric} (validation data of the training script)",
                metric_value=value,
            )
            for metric, value in results.metrics.items()
            if not metric.startswith("ema_")
        ]
    return ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag=pipeline_tag,
        tags=["tost", "arxiv:2412.17810", *(["tssa"] if attention == "tssa" else [])],
        datasets=[dataset] if dataset else None,
        metrics=list(dict.fromkeys(result.metric_type for result in eval_results)) or None,
        base_model=[base_model] if base_model else None,
        eval_results=eval_results or None,
        model_name=name if eval_results else None,
    )


def _describe_evaluation(results: list[EvalResult]) -> str:
    """A table of the results on each dataset and split, and below it the numbered protocols."""
    groups: dict[str, list[tuple]] = {}
    for result in results:
        values = result.metric_args or {}
        seed = f"seed {values['seed']}" if "seed" in values else None
        protocol = "; ".join(" ".join(str(x).split()) for x in (values.get("protocol"), seed, values.get("date")) if x)
        cells = (result.metric_name or result.metric_type, result.metric_value, values.get("num_examples"), protocol)
        groups.setdefault(", ".join(filter(None, (result.dataset_name, result.dataset_split))), []).append(cells)
    blocks = []
    for dataset, group in groups.items():
        numbers = {protocol: i for i, protocol in enumerate(filter(None, dict.fromkeys(x[-1] for x in group)), start=1)}
        records = [(*cells, numbers.get(protocol)) for *cells, protocol in group]
        blocks += [f"{dataset}:", make_markdown_table(("metric", "value", "examples", "protocol"), records)]
        blocks += ["\n".join(f"{i}. {protocol}" for protocol, i in numbers.items())] if numbers else []
    return "\n\n".join(blocks)
