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

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME

from ..cache_files import state_bytes
from ..files import CURVES, is_weights_name, name_file_in_errors, staged_file
from ..model.configuration_tost import BEYOND_PAPER, CAUSAL_STATISTICS
from ..model.configuration_tost_vision import ToSTVisionConfig
from .loading import IMAGE_PROCESSOR_FILES, empty_model, has_file, load_config, model_class
from .results import CARD, Results, load_card, read_results


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
    folder: str | os.PathLike,
    *,
    repo_id: str | None = None,
    revision: str | None = None,
    license: str | None = None,
    with_code: bool | None = None,
) -> ModelCard:
    """Builds the card of the model in a folder, as `write_card` writes it.

    It is built from `config.json`, the results and the state that Trainer saves, and, where they exist,

    - `evaluation.json`: {"results": [{"task_type", "dataset_type", "dataset_name", "metric_type", "metric_value", and optional
      "dataset_config", "dataset_split", "metric_name", "protocol", "command", "seed", "date", "num_examples"}]};
    - `run_arguments.json`: {"command", "dataset_name", "dataset_config_name", "model_name_or_path"}, all optional.

    An existing `README.md` is not read.

    Example:
        >>> card = build_card("./my-tost", repo_id="me/my-tost", license="apache-2.0")
        >>> print(card.data.pipeline_tag)

    Args:
        folder: the folder of a ToST model.
        repo_id: the repository that the card's examples load from; the folder by default.
        revision: the commit or tag that the examples pin.
        license: the license of the weights, as an identifier of the Hub ("apache-2.0", "mit"). By default the card names none.
        with_code: whether the repository will contain the model's source files; by default if the config has an `auto_map`.

    Raises:
        FileNotFoundError: the folder has no weights.
        ValueError: the folder contains no ToST model, or one of the files is damaged; the message says which.
    """
    folder = Path(folder)
    config = load_config(folder)
    if not any(is_weights_name(path.name) for path in folder.iterdir()):
        raise FileNotFoundError(f"{folder} has no weights in safetensors files.")
    if repo_id is not None:
        validate_repo_id(repo_id)
    if with_code is None:
        with_code = bool(getattr(config, "auto_map", None))
    results, full_name, is_vision = (
        read_results(folder),
        repo_id or folder.resolve().name,
        isinstance(config, ToSTVisionConfig),
    )
    auto_class, pipeline_tag = _find_task(config)
    with name_file_in_errors(folder / CONFIG_NAME):
        description = describe(config)
    return ModelCard.from_template(
        _make_metadata(config, full_name.rpartition("/")[2], license, results),
        template_path=str(TEMPLATE),
        name=full_name.rpartition("/")[2],
        config=config,
        auto_class=auto_class,
        pipeline_tag=pipeline_tag,
        is_vision=is_vision,
        beyond_paper=[option for option in config.options() if option in BEYOND_PAPER],
        description=make_markdown_table(("model", model_class(config).__name__), description.items()),
        evaluation=_describe_evaluation(results.evaluation),
        commands="\n".join(dict.fromkeys(filter(None, ((x.metric_args or {}).get("command") for x in results.evaluation)))),
        training_evaluation=_number_table("metric", results.metrics),
        run=results.run_arguments,
        training=_number_table("training", results.training),
        curves=CURVES if (folder / CURVES).is_file() else None,
        source=json.dumps(full_name) + (f", revision={json.dumps(revision)}" if revision else ""),
        revision=revision,
        has_code=with_code,
        has_processor=has_file(folder, IMAGE_PROCESSOR_FILES if is_vision else ("tokenizer_config.json",)),
    )


def write_card(folder: str | os.PathLike, *, overwrite: bool = False, **options: Any) -> Path:
    """Writes the `README.md` of a model folder.

    Args:
        overwrite: replace the whole of an existing card.
        options: the arguments of `build_card`.

    Returns:
        The path of the card.

    Raises:
        FileExistsError: the card exists, and `overwrite` is not set.
        FileNotFoundError, ValueError: as in `build_card`.

    Example:
        >>> write_card("./my-tost", license="apache-2.0")
    """
    target = Path(folder, CARD)
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists: edit it by hand, or replace it, text written by hand included (--overwrite).")
    save_card(build_card(folder, **options), target)
    return target


def complete_card(
    folder: Path, repo_id: str, *, license: str | None = None, revision: str | None = None, with_code: bool = True
) -> str:
    """The text of the card to publish: that of the folder, which is not changed, with the license and for the repository.

    What `build_card` wrote is written again for the repository; what was added below it, and metadata, stay.

    Raises:
        ValueError: there is no card and no license; the card names no license or another one, or is an unfilled template.
        FileNotFoundError, ValueError: as in `build_card`.
    """
    path = folder / CARD
    options: dict[str, Any] = {"repo_id": repo_id, "revision": revision, "with_code": with_code}
    if not path.is_file():
        if license is None:
            raise ValueError(f"{folder} has no model card; publish with --license, which writes one.")
        return str(build_card(folder, license=license, **options))
    card = check_card(path, license)
    old_license = card.data.get("license")
    text, generated_text = card.text.rstrip(), build_card(folder, license=old_license).text.rstrip()
    if text.startswith(generated_text):
        new_card = build_card(folder, license=old_license or license, **options)
        new_card.text = f"{new_card.text.rstrip()}{text.removeprefix(generated_text)}\n"
        for name, value in card.data.to_dict().items():
            if name != "model-index" and new_card.data.get(name) is None:
                new_card.data[name] = value
        card = new_card
    elif old_license is None:  # edited by hand
        card.data["license"] = license
    else:
        return path.read_bytes().decode()
    return str(card)


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


def find_pictures(card: str) -> list[str]:
    """The names of pictures in a card's text that are files, not on the web."""
    names = re.findall(r"""!\[[^\]]*\]\(([^)\s]+)|<img[^>]*?src=["']([^"']+)""", card)
    return [name for name in dict.fromkeys("".join(pair) for pair in names) if "://" not in name]


def save_card(card: ModelCard, path: Path) -> None:
    """Writes a card under a temporary name and moves it."""
    with staged_file(path) as staged:
        card.save(staged)


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


# Description ----------------------------------------------------------------------------------------------------------


def describe(config: Any) -> dict[str, str]:
    """Describes a configuration: displayed names and values."""
    heads, width = config.num_attention_heads, config.hidden_size
    description = {
        "parameters": f"{empty_model(config).num_parameters():,}",
        "layers": str(config.num_hidden_layers),
        "heads": f"{heads} of {width // heads} channels",
        "width": f"{width:,}" + (f", of the MLP {config.intermediate_size:,}" if config.mlp_type == "mlp" else ""),
    }
    if config.dtype is not None:
        description["dtype"] = str(config.dtype).removeprefix("torch.")
    options = dict(config.options())
    if config.model_type == "tost_vision":
        height, image_width = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
        description["images"] = (
            f"{height} x {image_width} pixels, patches of {config.patch_size}, attention {config.attention_type}"
        )
    else:
        description["vocabulary"] = f"{config.vocab_size:,}"
        description["positions"] = (
            "no limit (position-free)" if config.is_position_free else f"{config.max_position_embeddings:,}"
        )
        description["state"] = _describe_state(config)
        if options.pop("layer_types", None):
            for layer_type in sorted({*config.layer_types} - {CAUSAL_STATISTICS}):
                numbers = [str(i) for i, x in enumerate(config.layer_types) if x == layer_type]
                description["layers"] += f"; {layer_type} in {', '.join(numbers)} (counted from 0)"
    if (config.architectures or [""])[0].endswith("Classification"):
        names = [str(config.id2label[i]) for i in sorted(config.id2label)]
        show_names = 0 < len(names) <= 20 and not names[0].startswith("LABEL_")
        description["classes"] = f"{len(names):,}" + (f": {', '.join(names)}" if show_names else "")
    if options:
        description["options"] = ", ".join(f"{name} {value}" for name, value in options.items())
    return description


def _describe_state(config: Any) -> str:
    """The size of the state of one sequence."""
    if not config.is_causal:
        return "none: an encoder processes the whole sequence at once"
    state = state_bytes(config)
    growth = f", and {state.per_token:,} with every token" if state.per_token else ""
    return f"{state.saved:,} bytes per sequence at any length ({state.in_memory:,} in memory){growth}"


# Metadata -------------------------------------------------------------------------------------------------------------


def _find_task(config: PreTrainedConfig) -> tuple[str, str]:
    """The Auto class and the pipeline tag of a configuration's model; ValueError if it has none."""
    name = model_class(config).__name__
    if name not in TASKS:
        raise ValueError(f"There is no model card for the architecture {name!r}; it cannot be published.")
    return TASKS[name]


def _make_metadata(config: PreTrainedConfig, name: str, license: str | None, results: Results) -> ModelCardData:
    pipeline_tag = _find_task(config)[1]
    datasets, base_models = (
        [value] if (value := results.run_arguments.get(key)) and is_hub_id(value) else None
        for key in ("dataset_name", "model_name_or_path")
    )
    eval_results = list(results.evaluation)
    if datasets:
        eval_results += _training_results(results, datasets[0], pipeline_tag)
    return ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag=pipeline_tag,
        tags=["tost", "arxiv:2412.17810", *(["tssa"] if getattr(config, "attention_type", "tssa") == "tssa" else [])],
        datasets=datasets,
        metrics=list(dict.fromkeys(result.metric_type for result in eval_results)) or None,
        base_model=base_models,
        eval_results=eval_results or None,
        model_name=name if eval_results else None,
    )


def _training_results(results: Results, dataset: str, pipeline_tag: str) -> list[EvalResult]:
    """Trainer's evaluation, on the dataset of the training script."""
    config_name = results.run_arguments.get("dataset_config_name")
    return [
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
        if not metric.startswith("ema_")  # the EMA weights are another model
    ]


# Text -----------------------------------------------------------------------------------------------------------------


def _describe_evaluation(results: list[EvalResult]) -> str:
    """A table of the results on each dataset and split, and below it the numbered protocols."""
    groups: dict[str, list[EvalResult]] = {}
    for result in results:
        groups.setdefault(", ".join(filter(None, (result.dataset_name, result.dataset_split))), []).append(result)
    blocks = []
    for dataset, group in groups.items():
        protocols = [_describe_protocol(result.metric_args or {}) for result in group]
        numbers = {protocol: i for i, protocol in enumerate(filter(None, dict.fromkeys(protocols)), start=1)}
        cells = [
            (x.metric_name or x.metric_type, x.metric_value, (x.metric_args or {}).get("num_examples"), numbers.get(protocol))
            for x, protocol in zip(group, protocols)
        ]
        blocks += [f"{dataset}:", make_markdown_table(("metric", "value", "examples", "protocol"), cells)]
        blocks += ["\n".join(f"{i}. {protocol}" for protocol, i in numbers.items())] if numbers else []
    return "\n\n".join(blocks)


def _describe_protocol(values: dict[str, Any]) -> str:
    seed = f"seed {values['seed']}" if "seed" in values else None
    return "; ".join(" ".join(x.split()) for x in (values.get("protocol"), seed, values.get("date")) if x)


def _number_table(title: str, numbers: dict[str, float]) -> str:
    return make_markdown_table((title, "value"), [(key.replace("_", " "), x) for key, x in numbers.items()])
