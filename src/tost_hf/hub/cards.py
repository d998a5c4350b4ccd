# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Model cards (README.md): metadata and a template, filled from the files of a model folder.

A card leaves out what the folder's files do not state. It names a license only if the caller passes one.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME

from ..cache_files import state_bytes
from ..files import check_file, is_weights_name, name_file_in_errors, staged_file
from ..model.configuration_tost import BEYOND_PAPER, CAUSAL_STATISTICS, PRESETS, ToSTConfig
from ..model.configuration_tost_vision import VISION_PRESETS, ToSTVisionConfig
from .checks import load_config, model_class, parameter_count
from .records import CARD, IMAGE_PROCESSOR_FILES, Records, load_card, read_records


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
PRESET_CARDS = (*PRESETS, *(f"tost-vision-{size}-patch16" for size in ("tiny", "small", "medium")))


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
    with name_file_in_errors(folder / CONFIG_NAME):
        facts = describe(config)
    full_name = repo_id or folder.resolve().name
    processors = IMAGE_PROCESSOR_FILES if isinstance(config, ToSTVisionConfig) else ("tokenizer_config.json",)
    return _render(
        config,
        full_name.rpartition("/")[2],
        license,
        read_records(folder),
        facts,
        has_weights=True,
        source=json.dumps(full_name) + (f", revision={json.dumps(revision)}" if revision else ""),
        revision=revision,
        has_code=with_code,
        has_processor=any((folder / file).is_file() for file in processors),
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


def complete_card(folder: str | os.PathLike, repo_id: str, license: str, **options: Any) -> None:
    """Names license and repository in a card without a license, such as that of a training script, or writes a missing card.

    What `write_card` wrote before is written again for the repository; what was added below it, and metadata, stay.

    Args:
        options: the other arguments of `build_card`.

    Raises:
        ValueError: the card names another license.
        FileNotFoundError, ValueError: as in `build_card`.
    """
    path = Path(folder, CARD)
    if not path.is_file():
        write_card(folder, repo_id=repo_id, license=license, **options)
        return
    card = load_card(path)
    named_license = card.data.get("license")
    if named_license not in (None, license):
        raise ValueError(f"The card {path} names the license {named_license!r}, not {license!r}: edit it, or omit --license.")
    if named_license is not None:
        return
    text, generated_text = card.text.rstrip(), build_card(folder).text.rstrip()
    if text.startswith(generated_text):
        new_card = build_card(folder, repo_id=repo_id, license=license, **options)
        new_card.text = f"{new_card.text.rstrip()}{text.removeprefix(generated_text)}\n"
        for name, value in card.data.to_dict().items():
            if name != "model-index" and new_card.data.get(name) is None:
                new_card.data[name] = value
        card = new_card
    else:  # edited by hand
        card.data["license"] = license
    save_card(card, path)


def save_card(card: ModelCard, path: Path) -> None:
    """Writes a card under a temporary name and moves it."""
    with staged_file(path) as staged:
        card.save(staged)


def preset_card(name: str) -> ModelCard:
    """The card of one of the paper's sizes, such as "tost-base": an architecture, without weights or results."""
    config: PreTrainedConfig
    if name in VISION_PRESETS:
        config = ToSTVisionConfig.from_preset(name, num_labels=1000, architectures=["ToSTForImageClassification"])
    else:
        config = ToSTConfig.from_preset(name, architectures=["ToSTForCausalLM"])
    # without weights the license is that of the architecture's code
    return _render(config, name, "apache-2.0", Records(), describe(config), preset=name)


def write_preset_cards(folder: str | os.PathLike, *, overwrite: bool = False) -> list[Path]:
    """Writes a card `NAME.md` for each of the paper's sizes, which have no weights; returns the paths.

    Raises:
        FileExistsError: one of the files exists, and `overwrite` is not set.
    """
    paths = {name: Path(folder, f"{name}.md") for name in PRESET_CARDS}
    for path in paths.values():
        check_file(path, overwrite)
    for name, path in paths.items():
        save_card(preset_card(name), path)
    return list(paths.values())


def make_markdown_table(header: Sequence[str], records: Iterable[Sequence]) -> str:
    """A Markdown table, without the columns in which no record has a value; empty without records."""
    cells = [["" if x is None else str(x).replace("|", r"\|").replace("\n", " ") for x in record] for record in records]
    if not cells:
        return ""
    columns = [i for i in range(len(header)) if any(line[i] for line in cells)]
    lines = ["| " + " | ".join(line[i] for i in columns) + " |" for line in (header, *cells)]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])


def is_hub_id(name: str) -> bool:
    """Whether a name passed to a script is a repository id on the Hub, not a folder."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name and not Path(name).exists()


# Facts ----------------------------------------------------------------------------------------------------------------


def describe(config: Any) -> dict[str, str]:
    """The facts of a configuration, from displayed names to displayed values."""
    heads, width = config.num_attention_heads, config.hidden_size
    facts = {
        "parameters": f"{parameter_count(config):,}",
        "layers": str(config.num_hidden_layers),
        "heads": f"{heads} of {width // heads} channels",
        "width": f"{width:,}" + (f", of the MLP {config.intermediate_size:,}" if config.mlp_type == "mlp" else ""),
    }
    if config.dtype is not None:
        facts["dtype"] = str(config.dtype).removeprefix("torch.")
    options = dict(config.options())
    if config.model_type == "tost_vision":
        height, image_width = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
        facts["images"] = f"{height} x {image_width} pixels, patches of {config.patch_size}, attention {config.attention_type}"
    else:
        facts["vocabulary"] = f"{config.vocab_size:,}"
        facts["positions"] = "no limit (position-free)" if config.is_position_free else f"{config.max_position_embeddings:,}"
        facts["state"] = _describe_state(config)
        if options.pop("layer_types", None):
            for layer_type in sorted({*config.layer_types} - {CAUSAL_STATISTICS}):
                numbers = [str(i) for i, x in enumerate(config.layer_types) if x == layer_type]
                facts["layers"] += f"; {layer_type} in {', '.join(numbers)} (counted from 0)"
    if (config.architectures or [""])[0].endswith("Classification"):
        names = [str(config.id2label[i]) for i in sorted(config.id2label)]
        show_names = 0 < len(names) <= 20 and not names[0].startswith("LABEL_")
        facts["classes"] = f"{len(names):,}" + (f": {', '.join(names)}" if show_names else "")
    if options:
        facts["options"] = ", ".join(f"{name} {value}" for name, value in options.items())
    return facts


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


def _make_metadata(config: PreTrainedConfig, name: str, license: str | None, records: Records) -> ModelCardData:
    pipeline_tag = _find_task(config)[1]
    datasets, base_models = (
        [value] if (value := records.run.get(key)) and is_hub_id(value) else None
        for key in ("dataset_name", "model_name_or_path")
    )
    results = [_to_eval_result(result) for result in records.results]
    if datasets:
        results += _training_results(records, datasets[0], pipeline_tag)
    return ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag=pipeline_tag,
        tags=["tost", "arxiv:2412.17810", *(["tssa"] if getattr(config, "attention_type", "tssa") == "tssa" else [])],
        datasets=datasets,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        base_model=base_models,
        eval_results=results or None,
        model_name=name if results else None,
    )


def _to_eval_result(result: dict) -> EvalResult:
    """Converts a result of evaluation.json; values without a field in EvalResult go into `metric_args`."""
    fields = {key: value for key, value in result.items() if key in EvalResult.__dataclass_fields__}
    extra = {key: value for key, value in result.items() if key not in fields and value is not None}
    return EvalResult(**fields, metric_args=extra or None)


def _training_results(records: Records, dataset: str, pipeline_tag: str) -> list[EvalResult]:
    """Trainer's evaluation, on the dataset of the training script."""
    config_name = records.run.get("dataset_config_name")
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
        for metric, value in records.metrics.items()
        if not metric.startswith("ema_")  # the EMA weights are another model
    ]


# Text -----------------------------------------------------------------------------------------------------------------


def _render(
    config: PreTrainedConfig, name: str, license: str | None, records: Records, facts: dict[str, str], **values: Any
) -> ModelCard:
    """Renders the template; `values` are already Markdown."""
    auto_class, pipeline_tag = _find_task(config)
    return ModelCard.from_template(
        _make_metadata(config, name, license, records),
        template_path=str(TEMPLATE),
        name=name,
        config=config,
        config_class=type(config).__name__,
        model_class=model_class(config).__name__,
        auto_class=auto_class,
        pipeline_tag=pipeline_tag,
        is_vision=isinstance(config, ToSTVisionConfig),
        beyond_paper=[option for option in config.options() if option in BEYOND_PAPER],
        facts=make_markdown_table(("model", model_class(config).__name__), facts.items()),
        evaluation=_describe_results(records.results),
        commands="\n".join(dict.fromkeys(result["command"] for result in records.results if result.get("command"))),
        training_evaluation=_number_table("metric", records.metrics),
        run=records.run,
        training=_number_table("training", records.training),
        **values,
    )


def _describe_results(results: list[dict]) -> str:
    """A table of the results on each dataset and split, and below it the numbered protocols."""
    groups: dict[str, list[dict]] = {}
    for result in results:
        groups.setdefault(", ".join(filter(None, map(result.get, ("dataset_name", "dataset_split")))), []).append(result)
    blocks = []
    for dataset, group in groups.items():
        protocols = [_describe_protocol(result) for result in group]
        numbers = {protocol: i for i, protocol in enumerate(filter(None, dict.fromkeys(protocols)), start=1)}
        values = [
            (x.get("metric_name") or x["metric_type"], *map(_format_number, (x["metric_value"], x.get("num_examples"))))
            for x in group
        ]
        records = [(*value, numbers.get(protocol)) for value, protocol in zip(values, protocols)]
        blocks += [f"{dataset}:", make_markdown_table(("metric", "value", "examples", "protocol"), records)]
        blocks += ["\n".join(f"{i}. {protocol}" for protocol, i in numbers.items())] if numbers else []
    return "\n\n".join(blocks)


def _describe_protocol(result: dict) -> str:
    seed = f"seed {result['seed']}" if result.get("seed") is not None else None
    return "; ".join(" ".join(x.split()) for x in (result.get("protocol"), seed, result.get("date")) if x)


def _number_table(title: str, numbers: dict[str, float]) -> str:
    return make_markdown_table((title, "value"), [(key.replace("_", " "), _format_number(x)) for key, x in numbers.items()])


def _format_number(value: Any) -> Any:
    """Formats integers with thousands separators and floats with six significant digits; returns other values unchanged."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else value
