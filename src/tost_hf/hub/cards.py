# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Model cards (README.md), filled from the files of a model folder: configuration, training state, evaluation results.

What the folder does not say is left out of its card. Only a person can choose a licence: none is written unless it is given.

    python -m tost_hf.cards model_cards     # writes the cards of the paper's sizes, which have no weights
"""

import argparse
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import is_jinja_available, validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from ..files import ALL_RESULTS, EVAL_RESULTS, EVALUATION, RUN_ARGUMENTS, TRAIN_RESULTS, TRAINER_STATE, staged_file
from ..model.cache_tost import state_bytes
from ..model.configuration_tost import PRESETS, ToSTConfig
from ..model.configuration_tost_vision import VISION_PRESETS, ToSTVisionConfig
from .checks import SECRET_TEXTS, load_config, model_class, parameter_count, weight_files


CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card_template.md")
PAPER = "https://arxiv.org/abs/2412.17810"
PAPER_TAG = "arxiv:2412.17810"

TASKS = {  # Auto class and pipeline tag of each model class
    "ToSTForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "ToSTForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
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

# Published by the authors (arXiv 2412.17810) ---------------------------------------------------------------------------

LANGUAGE_TABLE = """\
| model | parameters | OpenWebText | LAMBADA | WikiText | PTB | average |
|---|---|---|---|---|---|---|
| GPT2-Base | 124M | 2.84 | 4.32 | 4.13 | 5.75 | 4.26 |
| ToST-Base | 109,597,584 | 3.20 | 4.98 | 4.77 | 6.39 | 4.84 |
| ToST-Medium | 303,662,464 | 2.88 | 4.45 | 4.30 | 5.64 | 4.32 |
| ToST-Large | 655,136,720 | 2.72 | 4.32 | 3.99 | 5.03 | 4.02 |"""
LANGUAGE_NOTE = (
    "Cross-entropy in nats a GPT-2 token, zero-shot, as the mean over random windows of 1,024 tokens drawn with replacement. "
    "A sweep over a whole test set is another protocol and gives other numbers. Parameters without the table of positions."
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
    "Top-1 accuracy in %. Pre-training on ImageNet-1k; the datasets below the two ImageNet rows are fine-tuned on. T, S "
    "and M are the tiny, small and medium sizes of 12, 12 and 24 layers, with patches of 16 pixels."
)
PUBLISHED = {
    **dict.fromkeys(PRESETS, (LANGUAGE_TABLE, LANGUAGE_NOTE)),
    **{name: (VISION_TABLE, VISION_NOTE) for name in PRESET_CARDS if name in VISION_PRESETS},
}

# Measured by us (`make results` writes it from the benchmarks' rows): {name of a size: {"text", "table", "command"}}
FIGURES = Path(__file__).with_name("figures.json")

# The recipes' commands; sequences of a micro-batch x micro-batches where they differ from tost-base's 60 x 8
_BATCHES = {"tost-medium": (30, 16), "tost-large": (20, 24)}


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
    auto_class, pipeline_tag = _task(config)
    weights = weight_files(folder)
    name = repo_id or folder.resolve().name
    old = _read_card(folder / CARD)
    drafted = _TRAINER_DRAFT in old.text
    run = _read_json(folder / RUN_ARGUMENTS)
    measured = _evaluation_results(folder / EVALUATION)
    metrics, samples = _training_evaluation(folder)
    results = [_to_eval_result(result) for result in measured]
    if _is_hub_id(run.get("dataset_name")):
        results += _training_eval_results(metrics, pipeline_tag, run)
    data = _metadata(config, old.data, drafted, run, results)
    data.license = license or data.license
    data.model_name = name.rpartition("/")[2] if data.eval_results else None

    card = _fill(
        data,
        config,
        name.rpartition("/")[2],
        has_weights=True,
        repo_id=name,
        revision=revision,
        pinned=f', revision="{revision}"' if revision else "",
        dtypes=_stored_dtypes(weights),
        has_code=_has_code(folder, config, auto_class) if with_code is None else with_code,
        has_processor=any((folder / file).is_file() for file in _processor_files(config)),
        evaluation_table=_evaluation_table(measured),
        evaluation_commands=_unique(result["command"] for result in measured if result.get("command")),
        training_evaluation_table=_table(("metric", "value"), [(_metric_name(k), _number(v)) for k, v in metrics.items()]),
        eval_examples=_number(samples),
        training_command=run.get("command"),
        training_table=_training_table(folder),
        hyperparameters=_hyperparameters(old.text),
    )
    merged = _merge(_sections(old.text), _sections(card.text), drafted)
    card.text = "\n" + _without_secrets("\n\n".join(text for _, text in merged)) + "\n"
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
        pipeline_tag=_task(config)[1],
        tags=_tags(config),
    )
    return _fill(data, config, name, has_weights=False, training_command=command)


# Reading a folder -----------------------------------------------------------------------------------------------------


def _task(config: PreTrainedConfig) -> tuple[str, str]:
    """The Auto class and the pipeline tag of a configuration's model."""
    name = model_class(config).__name__
    if name not in TASKS:
        raise ValueError(f"There is no card for the architecture {name!r}, which is not a model to publish.")
    return TASKS[name]


def _read_json(path: Path) -> dict:
    """The object in a JSON file, or an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not valid JSON ({error}); correct or delete it.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object, got a {type(content).__name__}.")
    return content


def _read_card(path: Path) -> ModelCard:
    if not path.is_file():
        return ModelCard("---\n{}\n---\n")
    try:
        text = path.read_text(encoding="utf-8-sig")
        return ModelCard(text if text.lstrip().startswith("---\n") else f"---\n{{}}\n---\n{text}")
    except Exception as error:  # YAML's own errors, and whatever a wrong kind of value leads to
        raise ValueError(f"The metadata at the top of {str(path)!r} cannot be read ({error}); correct it.") from error


def _stored_dtypes(weights: list[Path]) -> list[str]:
    """Names of the floating-point dtypes in the safetensors files, the most frequent first."""
    counts: dict[str, int] = {}
    for path in weights:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    tensor = file.get_slice(name)
                    if tensor.get_dtype().lstrip("B").startswith("F"):
                        counts[tensor.get_dtype()] = counts.get(tensor.get_dtype(), 0) + math.prod(tensor.get_shape())
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: it is truncated or damaged ({error}).") from error
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return [names.get(dtype, dtype) for dtype in sorted(counts, key=lambda dtype: (-counts[dtype], dtype))]


def _has_code(folder: Path, config: PreTrainedConfig, auto_class: str) -> bool:
    """Whether `trust_remote_code=True` finds the model's source file in the folder."""
    reference = (getattr(config, "auto_map", None) or {}).get(auto_class, "")
    return bool(reference) and (folder / f"{reference.partition('.')[0]}.py").is_file()


def _processor_files(config: PreTrainedConfig) -> tuple[str, ...]:
    if isinstance(config, ToSTVisionConfig):
        return ("preprocessor_config.json", "processor_config.json")
    return ("tokenizer_config.json",)


def _evaluation_results(path: Path) -> list[dict]:
    """The checked results in evaluation.json."""
    results = _read_json(path).get("results", [])
    if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
        raise ValueError(f'"results" in {str(path)!r} must be a list of objects.')
    for result in results:
        for key in ("task_type", "dataset_type", "dataset_name", "metric_type"):
            if not isinstance(result.get(key), str):
                raise ValueError(f"A result in {str(path)!r} has no {key!r}, a text.")
        value = result.get("metric_value")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"A result in {str(path)!r} has no 'metric_value', a number: got {value!r}.")
    return results


def _training_evaluation(folder: Path) -> tuple[dict[str, float], int | None]:
    """The metrics of Trainer's last evaluation, without the "eval_" of their names, and the number of examples."""
    entry = _read_json(folder / EVAL_RESULTS) or _read_json(folder / ALL_RESULTS)
    if not any(key.startswith("eval_") for key in entry):
        state = _read_json(folder / TRAINER_STATE)
        logged = [line for line in state.get("log_history", []) if "eval_loss" in line]
        # an evaluation of earlier weights says nothing about those in the folder
        entry = logged[-1] if logged and logged[-1].get("step") == state.get("global_step") else {}
    metrics = {}
    for key, value in entry.items():
        name = key.removeprefix("eval_")
        about_speed = name.endswith(("runtime", "_per_second", "_samples", "_time")) or name == "samples"
        wanted = key.startswith("eval_") or key == "perplexity"
        if wanted and not about_speed and isinstance(value, int | float):
            metrics[name] = value
    return metrics, entry.get("eval_samples")


def _hyperparameters(text: str) -> list[str]:
    """The lines of Trainer's list of hyperparameters, whose only other copy is a pickle."""
    _, _, after = text.partition("### Training hyperparameters\n")
    lines = []
    for line in after.splitlines():
        if line.startswith("#"):
            break
        if line.startswith("- "):
            lines.append(line)
    return lines


def _training_table(folder: Path) -> str:
    """What trainer_state.json and all_results.json say about training."""
    state = _read_json(folder / TRAINER_STATE)
    results = _read_json(folder / TRAIN_RESULTS) | _read_json(folder / ALL_RESULTS)
    seconds = results.get("train_runtime")
    rows = [
        ("optimizer steps", state.get("global_step")),
        ("epochs", results.get("epoch", state.get("epoch"))),
        ("training examples", results.get("train_samples")),
        ("examples of a device's micro-batch", state.get("train_batch_size")),
        ("mean training loss", results.get("train_loss")),
        ("time", None if seconds is None else _duration(seconds)),
    ]
    return _table(("", ""), [(name, value if isinstance(value, str) else _number(value)) for name, value in rows if value])


# Metadata -------------------------------------------------------------------------------------------------------------


def _metadata(
    config: PreTrainedConfig, old: ModelCardData, drafted: bool, run: dict, results: list[EvalResult]
) -> ModelCardData:
    """The metadata of the existing card, completed; of a draft of Trainer's, without the names of local folders."""
    _, pipeline_tag = _task(config)
    if old.pipeline_tag not in (None, *(tag for _, tag in TASKS.values())):
        pipeline_tag = old.pipeline_tag  # a person's choice
    data = ModelCardData(
        license=old.license,
        license_name=old.license_name,
        license_link=old.license_link,
        language=old.language,
        library_name=old.library_name or "transformers",
        pipeline_tag=pipeline_tag,
        tags=[*(old.tags or []), *_tags(config)],
        datasets=_hub_ids(old.datasets, run.get("dataset_name"), checked=drafted),
        metrics=_unique([*_listed(old.metrics), *(result.metric_type for result in results)]),
        base_model=_hub_ids(old.base_model, run.get("model_name_or_path"), checked=drafted),
    )
    data.eval_results = [*results, *_foreign_results(old.eval_results, results, checked=drafted)] or None
    for key, value in old.to_dict().items():
        if key not in data and key != "model-index":
            data[key] = value
    return data


def _tags(config: PreTrainedConfig) -> list[str]:
    return ["tost", PAPER_TAG, *(["tssa"] if getattr(config, "attention_type", "tssa") == "tssa" else [])]


def _is_hub_id(name) -> bool:
    """Whether a name that a script was given is an id on the Hub, rather than a folder."""
    if not isinstance(name, str) or "/" not in name or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _hub_ids(set_by_hand, from_run, checked: bool):
    """The ids of the existing card (of a draft, those alone that are ids), or else the run's."""
    if not set_by_hand:
        return [from_run] if _is_hub_id(from_run) else None
    if not checked:
        return set_by_hand
    return [name for name in _listed(set_by_hand) if _is_hub_id(name)] or None


def _to_eval_result(result: dict) -> EvalResult:
    details = {
        key: _without_secrets(result[key])
        for key in ("protocol", "command", "seed", "num_examples", "date")
        if result.get(key) is not None
    }
    return EvalResult(
        task_type=result["task_type"],
        dataset_type=result["dataset_type"],
        dataset_name=result["dataset_name"],
        dataset_config=result.get("dataset_config"),
        dataset_split=result.get("dataset_split"),
        metric_type=result["metric_type"],
        metric_name=result.get("metric_name"),
        metric_value=result["metric_value"],
        metric_args={"file": EVALUATION} | details,
    )


def _training_eval_results(metrics: dict[str, float], pipeline_tag: str, run: dict) -> list[EvalResult]:
    """Trainer's evaluation, on the data set that the training script was given."""
    name, config_name = run["dataset_name"], run.get("dataset_config_name")
    return [
        EvalResult(
            task_type=pipeline_tag,
            dataset_type=name,
            dataset_name=" ".join(filter(None, (name, config_name))),
            dataset_config=config_name,
            metric_type=metric,
            metric_name=f"{metric} (validation data of the training script)",
            metric_value=value,
            metric_args={"file": EVAL_RESULTS},
        )
        for metric, value in metrics.items()
        if math.isfinite(value) and not metric.startswith("ema_")  # the averaged weights are another model
    ]


def _foreign_results(old: list[EvalResult] | None, new: list[EvalResult], checked: bool) -> list[EvalResult]:
    """The results of the existing card that are not ours to renew (of a draft, those alone on data with an id)."""
    ours = (EVALUATION, EVAL_RESULTS)
    seen = {(result.task_type, result.dataset_type, result.metric_type) for result in new}
    return [
        result
        for result in old or []
        if not (isinstance(result.metric_args, dict) and result.metric_args.get("file") in ours)
        and (result.task_type, result.dataset_type, result.metric_type) not in seen
        and (not checked or _is_hub_id(result.dataset_type))
    ]


# Text -----------------------------------------------------------------------------------------------------------------


def _fill(data: ModelCardData, config: PreTrainedConfig, name: str, *, has_weights: bool, **values) -> ModelCard:
    """Fills the template. Every section of the text ends with a comment by which an unchanged one is known again."""
    if not is_jinja_available():
        raise ImportError("Model cards need Jinja2, which is not installed: pip install jinja2")
    auto_class, pipeline_tag = _task(config)
    vision = isinstance(config, ToSTVisionConfig)
    preset = _find_preset(config)
    published = preset if pipeline_tag in ("text-generation", "image-classification") else None
    table, note = PUBLISHED.get(published, (None, None))
    speed = json.loads(FIGURES.read_text(encoding="utf-8")).get(published, {})
    known = {
        "name": name,
        "kind": "vision" if vision else "language",
        "paper": PAPER,
        "has_weights": has_weights,
        "preset": preset,
        "config": config,
        "attention_type": config.attention_type if vision else "tssa",
        "config_class": type(config).__name__,
        "image_size": _sides(config) if vision else None,
        "model_class": model_class(config).__name__,
        "auto_class": auto_class,
        "pipeline_tag": pipeline_tag,
        "architecture_table": _architecture_table(config, values.get("dtypes", ())),
        "published_table": table,
        "published_note": note,
        "speed_text": speed.get("text"),
        "speed_table": speed.get("table"),
        "speed_command": speed.get("command"),
        "state_size": None if vision else state_bytes(config)[0],
        "remainder_size": None if vision else state_bytes(config)[1],
        "key_value_size": 2 * config.num_hidden_layers * config.hidden_size * 4,  # keys and values in float32
        "license": data.license,
        "base_models": _links(data.base_model, ""),
        "datasets": _links(data.datasets, "datasets/"),
    }
    card = ModelCard.from_template(data, template_path=str(TEMPLATE), **(known | values))
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", _without_secrets(card.text)))
    sections = [_mark(section) for _, section in _sections(text)]
    card.text = "\n" + "\n\n".join(sections) + "\n"
    return card


def _find_preset(config: PreTrainedConfig) -> str | None:
    """The name of the paper's size that a configuration is, if it is one."""
    size = "hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act "
    if isinstance(config, ToSTVisionConfig):
        size += "num_class_attention_layers patch_size num_channels attention_type normalize_patch_tokens qkv_bias"
        presets, config_class = VISION_PRESETS, ToSTVisionConfig
    else:
        size += "vocab_size max_position_embeddings use_bias tie_word_embeddings"
        presets, config_class = PRESETS, ToSTConfig
    for name in presets:
        preset = config_class.from_preset(name)
        if all(getattr(config, key) == getattr(preset, key) for key in size.split()):
            return name
    return None


def _architecture_table(config: PreTrainedConfig, dtypes: Sequence[str]) -> str:
    rows = [
        ("model class", f"`{model_class(config).__name__}`"),
        ("parameters", _number(parameter_count(config))),
        ("stored as", " and ".join(dtypes)),
    ]
    heads = f"{config.num_attention_heads} of {config.hidden_size // config.num_attention_heads} channels"
    if isinstance(config, ToSTVisionConfig):
        height, width = _sides(config)
        rows += [
            ("layers", f"{config.num_hidden_layers}, then {config.num_class_attention_layers} of class attention"),
            ("heads", heads),
            ("width", _number(config.hidden_size)),
            ("width of the MLP", _number(config.intermediate_size)),
            ("patches", f"{config.patch_size} x {config.patch_size} pixels"),
            ("images it is meant for", f"{height} x {width} pixels"),
        ]
    else:
        positions = config.max_position_embeddings
        rows += [
            ("layers", _number(config.num_hidden_layers)),
            ("heads", heads),
            ("width", _number(config.hidden_size)),
            ("width of the MLP", _number(config.intermediate_size)),
            ("vocabulary", _number(config.vocab_size)),
            ("positions", "no limit" if positions is None else _number(positions)),
        ]
    if _task(config)[1].endswith("classification"):
        names = [config.id2label[i] for i in sorted(config.id2label)]
        listed = len(names) <= 20 and not all(name.startswith("LABEL_") for name in names)
        rows.append(("classes", f"{_number(len(names))}: {', '.join(names)}" if listed else _number(len(names))))
    return _table(("", ""), rows)


def _sides(config: ToSTVisionConfig) -> Sequence[int]:
    return (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size


def _evaluation_table(results: list[dict]) -> str:
    header = ("dataset", "split", "metric", "value", "examples", "seed", "date", "protocol")
    rows = [
        (
            result["dataset_name"],
            result.get("dataset_split"),
            result.get("metric_name") or result["metric_type"],
            _number(result["metric_value"]),
            _number(result.get("num_examples")),
            result.get("seed"),
            result.get("date"),
            result.get("protocol"),
        )
        for result in results
    ]
    return _table(header, rows)


def _table(header: Sequence[str], rows: Iterable[Sequence]) -> str:
    """A Markdown table, without the rows that have no value in the end and the columns that have none at all."""
    rows = [["" if cell is None else " ".join(str(cell).split()).replace("|", "\\|") for cell in row] for row in rows]
    if len(header) == 2:
        rows = [row for row in rows if row[1]]
    columns = [i for i in range(len(header)) if any(row[i] for row in rows)]
    if not rows:
        return ""

    def line(row: Sequence[str]) -> str:
        return "|" + "|".join(f" {row[i]} " if row[i] else " " for i in columns) + "|"

    return "\n".join([line(header), "|---" * len(columns) + "|", *map(line, rows)])


def _number(value) -> str | None:
    if value is None:
        return None
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _metric_name(name: str) -> str:
    averaged = name.startswith("ema_")
    words = name.removeprefix("ema_").replace("_", " ")
    return f"{words} of the averaged weights (folder `ema`)" if averaged else words


def _links(names, prefix: str) -> str:
    return ", ".join(f"[{name}](https://huggingface.co/{prefix}{name})" for name in _listed(names))


def _listed(value) -> list:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _unique(values: Iterable) -> list | None:
    return list(dict.fromkeys(values)) or None


def _without_secrets(text):
    """The same text with access tokens taken out."""
    if not isinstance(text, str):
        return text
    text = re.sub(r"(--\w*token)([= ])[^\s\\]+", r"\1\2REMOVED", text)
    content = text.encode()
    for secret in SECRET_TEXTS.values():
        content = secret.sub(b"REMOVED", content)
    return content.decode()


# Sections: what is generated, and what a person wrote ------------------------------------------------------------------

_MARK = re.compile(r"\s*<!-- tost_hf ([0-9a-f]{8}) -->")
_TRAINER_DRAFT = "generated automatically according to the information the Trainer had access to"
_DRAFT_LINE = re.compile(  # what Trainer and push_to_hub leave to be filled in, or say of themselves
    r"\[More Information Needed\]|^More information needed$|^Users \(both direct and downstream\) should be made aware"
    r"|^This is the model card of a 🤗 transformers model|pushed without a model card\.$|^# Model Card for Model ID$",
    re.MULTILINE,
)


def _sections(text: str) -> list[tuple[str, str]]:
    """The heading line and the whole text of each section of level two; first, headed "", what stands before them."""
    sections, fence = [("", [])], None
    for line in text.split("\n"):
        opened = re.match(r"\s*(```|~~~)", line)
        if opened and fence in (None, opened[1]):
            fence = None if fence else opened[1]
        if fence is None and line.startswith("## "):
            sections.append((line.strip(), []))
        sections[-1][1].append(line)
    return [(title, "\n".join(lines).strip()) for title, lines in sections]


def _mark(text: str) -> str:
    return f"{text}\n\n<!-- tost_hf {_digest(text)} -->"


def _digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:8]


def _is_generated(text: str) -> bool:
    """Whether a section still is as it was generated."""
    mark = _MARK.search(text)
    return mark is not None and _digest(text[: mark.start()] + text[mark.end() :]) == mark[1]


def _merge(old: list[tuple[str, str]], new: list[tuple[str, str]], drafted: bool) -> list[tuple[str, str]]:
    """The new sections, and in their places those of the old card that a person wrote or changed."""
    merged, place = list(new), 1
    for title, text in old:
        index = next((i for i, (other, _) in enumerate(merged) if other == title), None)
        kept = _written_by_a_person(title, text, drafted)
        if kept and index is not None and _is_generated(merged[index][1]):
            merged[index] = title, kept
        elif kept:
            merged.insert(place, (title, kept))
            index = place
        if index is not None:
            place = index + 1
    return merged


def _written_by_a_person(title: str, text: str, drafted: bool) -> str:
    """What is to be kept of a section of the existing card: nothing of one that a program wrote."""
    if not text or _is_generated(text) or (drafted and title in ("", "## Training procedure")):
        return ""
    if not _DRAFT_LINE.search(text):
        return text
    # a form, huggingface_hub's or Trainer's: a person filled it in where it has lines that the form has not
    form = set(Path(ModelCard.default_template_path).read_text(encoding="utf-8").splitlines())
    lines = [line for line in text.split("\n") if not _DRAFT_LINE.search(line)]
    filled_in = any(line and line not in form and not line.startswith(("#", "<!--")) for line in lines)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() if filled_in else ""


# Writing --------------------------------------------------------------------------------------------------------------


def save_card(card: ModelCard, path: Path) -> None:
    """Writes a card under a temporary name and moves it."""
    with staged_file(path) as staged:
        card.save(staged)


def main(argv: list[str] | None = None) -> None:
    """Writes the cards of the paper's sizes into a folder."""
    parser = argparse.ArgumentParser(description="Writes the model cards of the paper's sizes, which have no weights.")
    parser.add_argument("folder", type=Path, help="where they go, such as model_cards")
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in PRESET_CARDS:
        save_card(preset_card(name), folder / f"{name}.md")


__all__ = ["PRESET_CARDS", "build_card", "preset_card", "write_card"]


if __name__ == "__main__":
    main()
