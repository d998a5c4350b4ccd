# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Shared by the classification scripts: labels, the model's head, accuracy, and the table and figures of a card."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from datasets import ClassLabel, Dataset
from matplotlib.figure import Figure
from scripting import load_pretrained
from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix
from transformers import EvalPrediction, PreTrainedConfig, PreTrainedModel

from tost_hf.files import staged_file
from tost_hf.hub.cards import make_markdown_table
from tost_hf.training.metrics import Accuracy


logger = logging.getLogger("scripting.classification")  # at the level of the scripts

TITLE = "## Accuracy by class"
CONFUSION = "confusion_matrix.png"
MAX_CLASSES = 30  # of a table and a confusion matrix that can be read
HELD_OUT_FRACTION, MIN_HELD_OUT, MAX_HELD_OUT_FRACTION = 0.05, 100, 0.25  # by default, of the training examples
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


def encode_labels(
    splits: dict[str, Dataset], class_names: str | None, model_names: Sequence[str], trains: bool, kind: str
) -> tuple[dict[str, Dataset], list[str]]:
    """Converts the column "label" of all splits to class indices.

    Labels are the names of classes, compared as strings; whole numbers are names, too. Training keeps the model's classes and
    their order if the training data has the same classes; evaluation and prediction are always of the model's classes.

    Args:
        splits: the examples, those of training first.
        class_names: the value of `--class_names`, the names of the labels 0, 1, ...
        model_names: the classes of the pretrained model, none without one.
        trains: whether the model is trained.
        kind: what an example is, for messages.

    Returns:
        The splits, and the names of the classes.

    Raises:
        ValueError: a label is missing, is no name or is none of the classes; a class has no name or the name of another; there
            is only one class, or no model to evaluate.
    """
    if not trains and not model_names:
        raise ValueError("There is no model to evaluate: give --model_name_or_path, or train one (--do_train).")
    chosen_names = None if class_names is None else _check_names([name.strip() for name in class_names.split(",")])
    labels = {split: read_labels(split, dataset, chosen_names, kind) for split, dataset in splits.items()}
    classes = list(model_names)
    if trains:
        split, dataset = next(iter(splits.items()))
        feature = dataset.features["label"]
        names = feature.names if isinstance(feature, ClassLabel) else sorted(set(labels[split]))
        names = chosen_names or _check_names(names)
        if len(names) == 1:
            raise ValueError(f"All examples are of one class, {names[0]!r}; a classifier needs at least two.")
        classes = classes if sorted(classes) == sorted(names) else names
    indices = {split: class_indices(split, labels[split], classes, kind) for split in splits}
    splits = {split: data.remove_columns("label").add_column("label", indices[split]) for split, data in splits.items()}
    return splits, classes


def _check_names(names: list[str]) -> list[str]:
    for name, count in Counter(names).items():
        if not name or count > 1:
            problem = f"two classes are called {name!r}" if name else "a class has an empty name"
            raise ValueError(f"Of the classes {', '.join(names)} {problem}: each needs a name of its own.")
    return names


def read_labels(split: str, dataset: Dataset, chosen_names: list[str] | None, kind: str) -> list[str]:
    """The labels of a split as names; numbers are those of `chosen_names`, or else names themselves."""
    feature, labels = dataset.features["label"], dataset["label"][:]
    for index, label in enumerate(labels):
        if label is None or label == "":
            raise ValueError(f"{kind} {index} of the {split} split has no label.")
        if not isinstance(label, str | int) and not (isinstance(label, float) and label.is_integer()):
            raise ValueError(
                f"{kind} {index} of the {split} split has the label {label!r}: it must be a name or a whole number."
            )
    if chosen_names is not None:
        numbers = {str(number): name for number, name in enumerate(chosen_names)}
        clash = next((name for number, name in numbers.items() if name in numbers and name != number), None)
        if clash is not None and any(isinstance(label, str) for label in labels):
            raise ValueError(
                f"The labels of the {split} split are strings, of which {clash!r} may be a name or a number of --class_names: "
                "leave --class_names out, as labels are names."
            )
        names = numbers | {name: name for name in chosen_names}
        return [
            names.get(label, label) if isinstance(label, str) else numbers.get(str(int(label)), str(label)) for label in labels
        ]
    if isinstance(feature, ClassLabel):
        names = dict(enumerate(feature.names))
        return [names.get(label, str(label)) for label in labels]
    return [str(int(label)) if isinstance(label, float) else str(label) for label in labels]


def class_indices(split: str, labels: Sequence[str], classes: Sequence[str], kind: str) -> list[int]:
    """The indices of labels in `classes`.

    Args:
        split: name of the split, for messages.
        labels: names of classes.
        classes: the model's.
        kind: what an example is, for messages.

    Raises:
        ValueError: a label is not among them, or two of them have its name.
    """
    counts, indices = Counter(classes), {name: index for index, name in enumerate(classes)}
    for index, label in enumerate(labels):
        if counts[label] != 1:
            raise ValueError(
                f"{kind} {index} of the {split} split has the label {label!r}, which is "
                f"{'more than one' if counts[label] else 'none'} of the {len(classes)} classes {', '.join(classes[:20])}"
                f"{', ...' if len(classes) > 20 else ''}: name it as one of them, or train the model on it."
            )
    return [indices[label] for label in labels]


def label_names(config: PreTrainedConfig) -> list[str]:
    """The names of a model's classes, in their order."""
    return [str(config.id2label[i]) for i in range(config.num_labels)]


def pretrained_names(model_args) -> list[str]:
    """The classes of the model that the arguments name, none without one."""
    return [] if model_args.model_name_or_path is None else label_names(model_args.load_config())


def prepare_splits(
    splits: dict[str, Dataset],
    choose_columns: Callable[[str, Dataset, Any], Dataset],
    data_args,
    requested: Sequence[str],
    holds_out: bool,
    model_names: Sequence[str],
    kind: str,
    seed: int,
) -> tuple[dict[str, Dataset], list[str]]:
    """The requested splits with their columns, class indices and limits, and the names of the classes.

    Args:
        splits: the data of each split.
        choose_columns: selects the columns of a split and renames that of the labels to "label".
        data_args: the arguments, with `class_names`, `train_val_split` and `max_..._samples`.
        requested: the splits that must exist.
        holds_out: whether validation examples are a part of the training examples.
        model_names: the classes of the pretrained model, none without one.
        kind: "Image" or "Text", for messages.
        seed: of the examples that are held out or drawn.

    Raises:
        ValueError: a requested split does not exist, lacks a column, or has a label that is no class.
    """
    splits = _select_splits(splits, requested, holds_out, f"{kind.lower()}s")
    splits = {split: choose_columns(split, dataset, data_args) for split, dataset in splits.items()}
    splits, names = encode_labels(splits, data_args.class_names, model_names, "train" in requested, kind)
    if holds_out and "train" in splits:
        size = data_args.train_val_split
        if size is None:
            count = len(splits["train"])
            size = min(max(round(HELD_OUT_FRACTION * count), MIN_HELD_OUT), max(round(MAX_HELD_OUT_FRACTION * count), 1))
        parts = splits["train"].train_test_split(size, seed=seed)
        splits |= {"train": parts["train"], "validation": parts["test"]}
    splits = {split: dataset for split, dataset in splits.items() if split in requested}
    return _limit_samples(splits, data_args, seed), names


def _select_splits(splits: dict[str, Dataset], requested: Sequence[str], holds_out: bool, kind: str) -> dict[str, Dataset]:
    """The requested splits in their order; training examples as well, if validation examples are a part of them."""
    names = set(requested)
    if holds_out and "validation" in names and "train" in splits:
        names = names - {"validation"} | {"train"}
    for split in sorted(names - splits.keys()):
        options = f"--{split}_dir or --{split}_file" if kind == "images" else f"--{split}_file"
        raise ValueError(f"There are no {split} {kind}; give {options}, or a dataset that has them.")
    return {split: splits[split] for split in ("train", "validation", "test") if split in names}


def _limit_samples(splits: dict[str, Dataset], data_args, seed: int) -> dict[str, Dataset]:
    """The splits with at most `--max_..._samples` examples, drawn with a seed, as the data may be sorted by class."""
    options, limited = {"train": "max_train_samples", "validation": "max_eval_samples", "test": "max_predict_samples"}, {}
    for split, dataset in splits.items():
        limit = getattr(data_args, options[split])
        limited[split] = dataset if limit is None else dataset.shuffle(seed=seed).select(range(min(limit, len(dataset))))
    return limited


# Model ---------------------------------------------------------------------------------------------------------------


def load_classifier(auto_class, model_args, config: PreTrainedConfig, names: list[str], trains: bool) -> PreTrainedModel:
    """The model to fine-tune, with a new head if its labels are not `names`, or a new model; or the model to evaluate.

    Raises:
        ValueError: the head of the model has an unknown name, or the model to evaluate lacks weights.
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
    if new_names and not trains:
        raise ValueError(
            f"{model_args.model_name_or_path} lacks {', '.join(new_names[:5])}, {len(new_names)} in all, or has them in "
            "another shape: train it first (--do_train)."
        )
    if base_names := sorted(name for name in new_names if head is None or not name.startswith(f"{head}.")):
        logger.warning(
            f"{model_args.model_name_or_path} lacks {', '.join(base_names[:5])}, {len(base_names)} in all, or has them in "
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
    """A section for the card: accuracy and most frequent mistake of each class, and a figure, which is written.

    Args:
        labels, predictions: class indices of the held-out examples.
        names: the classes; with more than 30 there is no table and no confusion matrix.
        folder: the model's folder.
    """
    if len(names) > MAX_CLASSES:
        return ""
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
    return "\n\n".join([TITLE, table, f"![Confusion matrix]({CONFUSION})"])
