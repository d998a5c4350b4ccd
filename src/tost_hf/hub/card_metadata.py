# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The metadata of a model card: what the Hub reads, completed from the configuration and the records of a folder."""

from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig

from ..files import EVAL_RESULTS, EVALUATION
from .card_sections import is_trainers_draft
from .checks import model_class
from .records import Card, Records, TrainingRun


PAPER_TAG = "arxiv:2412.17810"
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


def task(config: PreTrainedConfig) -> tuple[str, str]:
    """The Auto class and the pipeline tag of a configuration's model.

    Raises:
        ValueError: it is not a model to publish.
    """
    name = model_class(config).__name__
    if name not in TASKS:
        raise ValueError(f"There is no card for the architecture {name!r}, which is not a model to publish.")
    return TASKS[name]


def card_metadata(config: PreTrainedConfig, card: Card, name: str, license: str | None, records: Records) -> ModelCardData:
    """The metadata of the existing card, completed; of a draft of Trainer's, without the names of local folders.

    Args:
        config: the model's configuration.
        card: the existing card.
        name: the model's name.
        license: the licence; None keeps the card's.
        records: what the folder says of training and evaluation.
    """
    old, drafted, run = card.data, is_trainers_draft(card.text), records.run
    _, pipeline_tag = task(config)
    results = [_to_eval_result(result) for result in records.results]
    if is_hub_id(run.dataset_name):
        results += _training_eval_results(records.evaluation.metrics, pipeline_tag, run)
    if old.pipeline_tag is not None and old.pipeline_tag not in [tag for _, tag in TASKS.values()]:
        pipeline_tag = old.pipeline_tag  # a person's choice
    data = ModelCardData(
        license=license or old.license,
        license_name=old.license_name,
        license_link=old.license_link,
        language=old.language,
        library_name=old.library_name or "transformers",
        pipeline_tag=pipeline_tag,
        tags=[*listed(old.tags), *tags(config)],
        datasets=_hub_ids(old.datasets, run.dataset_name, checked=drafted),
        metrics=list(dict.fromkeys([*listed(old.metrics), *(result.metric_type for result in results)])) or None,
        base_model=_hub_ids(old.base_model, run.model_name_or_path, checked=drafted),
    )
    data.eval_results = [*results, *_foreign_results(old.eval_results, results, checked=drafted)] or None
    for key, value in old.to_dict().items():
        if key not in data and key != "model-index":
            data[key] = value
    data.model_name = name if data.eval_results else None
    return data


def tags(config: PreTrainedConfig) -> list[str]:
    """The tags of a configuration's model."""
    return ["tost", PAPER_TAG, *(["tssa"] if getattr(config, "attention_type", "tssa") == "tssa" else [])]


def is_hub_id(name) -> bool:
    """Whether a name that a script was given is an id on the Hub, rather than a folder."""
    if not isinstance(name, str) or "/" not in name:
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _hub_ids(set_by_hand, from_run, checked: bool):
    """The ids of the existing card (of a draft, those alone that are ids), or else the run's."""
    if not set_by_hand:
        return [from_run] if is_hub_id(from_run) else None
    if not checked:
        return set_by_hand
    return [name for name in listed(set_by_hand) if is_hub_id(name)] or None


def _to_eval_result(result: dict) -> EvalResult:
    details = {
        key: result[key] for key in ("protocol", "command", "seed", "num_examples", "date") if result.get(key) is not None
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


def _training_eval_results(metrics: dict[str, float], pipeline_tag: str, run: TrainingRun) -> list[EvalResult]:
    """Trainer's evaluation, on the data set that the training script was given."""
    name, config_name = run.dataset_name, run.dataset_config_name
    assert name is not None  # for it is an id on the Hub
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
        if not metric.startswith("ema_")  # the averaged weights are another model
    ]


def _foreign_results(old: list[EvalResult] | None, new: list[EvalResult], checked: bool) -> list[EvalResult]:
    """The results of the existing card that are not ours to renew (of a draft, those alone on data with an id)."""
    ours = (EVALUATION, EVAL_RESULTS)
    seen = [(result.task_type, result.dataset_type, result.metric_type) for result in new]
    return [
        result
        for result in old or []
        if not (isinstance(result.metric_args, dict) and result.metric_args.get("file") in ours)
        and (result.task_type, result.dataset_type, result.metric_type) not in seen
        and (not checked or is_hub_id(result.dataset_type))
    ]


def listed(value) -> list:
    """What metadata gives as a list, or as the one item alone."""
    return [] if value is None else list(value) if isinstance(value, list) else [value]
