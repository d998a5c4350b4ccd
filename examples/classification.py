# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Shared by the classification scripts: labels, the model's head, accuracy, and the table and figures of a card."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import transformers
from datasets import ClassLabel, Dataset
from matplotlib.figure import Figure
from scripting import load_pretrained
from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix
from training_runs import CURVES
from transformers import EvalPrediction, PreTrainedConfig, PreTrainedModel

from tost_hf.files import staged_file
from tost_hf.hub.cards import make_markdown_table
from tost_hf.training.metrics import Accuracy


logger = logging.getLogger("scripting.classification")  # at the level of the scripts

TITLE = "## Accuracy by class"
CONFUSION = "confusion_matrix.png"
MAX_CLASSES = 30  # of a table and a confusion matrix that can be read
LABEL_COLUMNS = ("label", "labels", "fine_label")  # usual names, of columns that are no `ClassLabel`


# Labels --------------------------------------------------------------------------------------------------------------


def find_column(split: str, dataset: Dataset, kind: str, name: str | None, candidates: list[str]) -> str:
    """The column `name`, or else the only candidate.

    Args:
        split: name of the split, for messages.
        dataset: the examples.
        kind: "image", "text" or "label".
        name: the column that the user chose, or None.
        candidates: the columns that may be meant.

    Raises:
        ValueError: there is no such column, or more than one candidate.
    """
    available = ", ".join(dataset.column_names)
    if name is None:
        if len(candidates) != 1:
            raise ValueError(
                f"The {split} data has {'no' if not candidates else 'more than one'} column of {kind}s; choose one of "
                f"{available} by --{kind}_column_name."
            )
        return candidates[0]
    if name not in dataset.column_names:
        raise ValueError(f"The {split} data has no column {name!r}; choose one of {available}.")
    return name


def label_candidates(dataset: Dataset) -> list[str]:
    """The columns that may be that of the labels."""
    class_labels = [column for column, feature in dataset.features.items() if isinstance(feature, ClassLabel)]
    return class_labels or [column for column in LABEL_COLUMNS if column in dataset.column_names]


def class_names(dataset: Dataset, names: str | None, known_names: Sequence[str] = ()) -> list[str]:
    """The names of the classes, from `--class_names` or the data's column "label".

    Args:
        dataset: the examples.
        names: the value of `--class_names`.
        known_names: those of a trained model, whose order is kept if the data has the same.

    Raises:
        ValueError: there are no names, or only one.
    """
    feature = dataset.features["label"]
    if names is not None:
        return [name.strip() for name in names.split(",")]
    if isinstance(feature, ClassLabel) and feature.names:
        found = feature.names
    elif feature.dtype in ("string", "large_string"):
        found = sorted(set(dataset["label"]) - {None})
    else:
        found = []
    if len(found) == 1:
        raise ValueError(f"All examples are of one class, {found[0]!r}; a classifier needs at least two.")
    if found:
        return list(known_names) if sorted(known_names) == sorted(found) else found
    raise ValueError("The labels are numbers without names: give the names by --class_names cat,dog,... in their order.")


def encode_labels(split: str, dataset: Dataset, names: list[str], has_names: bool, kind: str) -> list[int]:
    """The column "label" as indices of `names`.

    Args:
        split: name of the split, for messages.
        dataset: the examples.
        names: the classes.
        has_names: whether a `ClassLabel`'s own names count; otherwise its numbers do.
        kind: what an example is, for messages.

    Raises:
        ValueError: a label is not among them.
    """
    feature, labels = dataset.features["label"], dataset["label"][:]
    by_name = feature.dtype in ("string", "large_string")
    if isinstance(feature, ClassLabel) and has_names:  # files may number the names differently
        by_name, id2label = True, dict(enumerate(feature.names))
        labels = [id2label.get(label, label) for label in labels]
    label2id = {name if by_name else number: number for number, name in enumerate(names)}
    for index, label in enumerate(labels):
        if label not in label2id:
            raise ValueError(
                f"{kind} {index} of the {split} split has the label {label!r}, which is none of the {len(names)} classes "
                f"{', '.join(names[:20])}{', ...' if len(names) > 20 else ''}."
            )
    return [label2id[label] for label in labels]


def label_names(config: PreTrainedConfig) -> list[str]:
    """The names of a model's classes, in their order."""
    return [config.id2label[i] for i in range(config.num_labels)]


def select_samples(splits: dict[str, Dataset], limits: dict[str, int | None], requested: Sequence[str], kind: str, seed: int):
    """Limits splits, in place, to a number of examples.

    Args:
        splits: the data of each split.
        limits: the number of examples of each split, None for all.
        requested: the splits that must exist.
        kind: "images" or "texts", for messages.
        seed: of the order in which examples are drawn, as the data may be sorted by class.

    Raises:
        ValueError: a requested split does not exist.
    """
    for split in requested:
        if split not in splits:
            options = f"--{split}_dir or --{split}_file" if kind == "images" else f"--{split}_file"
            raise ValueError(f"There are no {split} {kind}; give {options}, or a dataset that has them.")
    for split, limit in limits.items():
        if split in splits and limit is not None:
            dataset = splits[split].shuffle(seed=seed)
            splits[split] = dataset.select(range(min(limit, len(dataset))))


# Model ---------------------------------------------------------------------------------------------------------------


def load_classifier(auto_class, model_args, config: PreTrainedConfig, names: list[str]) -> PreTrainedModel:
    """The model to fine-tune, with a new head if its labels are not `names`, or a new model.

    Raises:
        ValueError: the head of the model has an unknown name.
    """
    old_names = label_names(config)
    config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}
    if model_args.model_name_or_path is None or old_names != names:
        model = auto_class.from_config(config, **model_args.new_model_options)
    if model_args.model_name_or_path is None:
        return model
    with _hide_loading_report():
        pretrained, info = load_pretrained(
            auto_class,
            model_args.model_name_or_path,
            config=config,
            ignore_mismatched_sizes=True,  # of the head
            output_loading_info=True,
            **model_args.pretrained_options,
        )
    head = next((name for name in ("classifier", "score") if hasattr(pretrained, name)), None)
    new_names = [*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])]
    if trunk_names := sorted(name for name in new_names if head is None or not name.startswith(f"{head}.")):
        logger.warning(
            f"{model_args.model_name_or_path} lacks {', '.join(trunk_names[:5])}, {len(trunk_names)} in all, or has them in "
            "another shape: they start from random values."
        )
    if old_names != names:
        if head is None:
            raise ValueError(f"{type(pretrained).__name__} has no `classifier` that could be replaced for the new labels.")
        logger.info(
            f"The model's labels are {_list(old_names)}, the data's {_list(names)}: its {head} is replaced by a new one."
        )
        setattr(pretrained, head, getattr(model, head))  # the pretrained one is loaded if its size is the same
    return pretrained


@contextmanager
def _hide_loading_report() -> Iterator[None]:
    """Without transformers' table of new weights: that of the head is no news for new labels, others are warned of."""
    loading_logger = transformers.utils.logging.get_logger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    loading_logger.addFilter(is_other)
    try:
        yield
    finally:
        loading_logger.removeFilter(is_other)


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}, ... ({len(names)})" if len(names) > 3 else ", ".join(names)


# Results -------------------------------------------------------------------------------------------------------------


def preprocess_logits_for_metrics(logits, labels):
    """The most likely class, which evaluation collects instead of the logits."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def compute_metrics(eval_prediction: EvalPrediction) -> dict[str, float]:
    return Accuracy().compute(predictions=eval_prediction.predictions, references=eval_prediction.label_ids)


def plot_confusion(matrix: np.ndarray, names: list[str], folder: str) -> None:
    """Plots a confusion matrix (classes, classes), normalized over the examples of each class."""
    fractions = matrix / matrix.sum(1, keepdims=True).clip(1)
    side = 2 + 0.45 * len(names)
    figure = Figure(figsize=(side, side), layout="constrained")
    display = ConfusionMatrixDisplay(fractions, display_labels=names)
    display.plot(ax=figure.subplots(), values_format=".0%", xticks_rotation="vertical", colorbar=False)
    with staged_file(Path(folder, CONFUSION)) as staged:
        figure.savefig(staged, format="png", dpi=80)


def class_section(labels: list[int], predictions: list[int], names: list[str], folder: str) -> str:
    """A section for the card: accuracy and most frequent mistake of each class, and the figures, which are written.

    Args:
        labels, predictions: class indices of the held-out examples.
        names: the classes; with more than 30 there is no table and no confusion matrix.
        folder: the model's folder, which has the training curves.
    """
    figures = [f"![Loss and accuracy by step]({CURVES})"] if Path(folder, CURVES).is_file() else []
    if len(names) > MAX_CLASSES:
        return "\n\n".join(["## Training", *figures]) if figures else ""
    matrix = confusion_matrix(labels, predictions, labels=range(len(names)))
    plot_confusion(matrix, names, folder)
    records = []
    for label, counts in enumerate(matrix):
        mistakes = counts.copy()
        mistakes[label] = 0
        top_mistake = f"{names[mistakes.argmax()]} ({mistakes.max()})" if mistakes.any() else ""
        total = counts.sum()
        records.append((names[label], total, f"{counts[label] / total:.1%}" if total else "", top_mistake))
    table = make_markdown_table(("class", "held-out examples", "accuracy", "most frequent mistake"), records)
    return "\n\n".join([TITLE, table, *figures, f"![Confusion matrix]({CONFUSION})"])
