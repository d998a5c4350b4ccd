# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The data of the five tasks of Long Range Arena, as token ids."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset, Features, Value
from listops import TOKENS
from PIL import Image
from scripting import read_dataset
from torch.nn.utils.rnn import pad_sequence


logger = logging.getLogger("lra_tasks")

LABEL_COLUMNS = ("label", "Target", "labels")
AAN_FEATURES = Features({"label": Value("float64")} | dict.fromkeys(("id1", "id2", "text1", "text2"), Value("string")))
AAN_FILES = {"train": "*train.tsv", "validation": "*eval.tsv", "test": "*test.tsv"}
QUOTE_NONE = 3  # of Python's csv
LISTOPS_IDS = {token: number for number, token in enumerate(TOKENS, 1)}


class Task(NamedTuple):
    """A task: its columns, how they are encoded, and the fraction of the training data to validate on."""

    columns: tuple[str, ...]  # possible names of the column, or both columns of a pair
    encode: Callable[[Any, int], list[int]]
    validation_fraction: float = 0.0

    @property
    def reads_pairs(self) -> bool:
        return "text2" in self.columns


# Token ids; 0 is padding -----------------------------------------------------------------------------------------------


def encode_listops(source: str, length: int) -> list[int]:
    """ListOps' tokens without the parentheses, as in the arena's pipeline."""
    return [LISTOPS_IDS[token] for token in source.split() if token not in ("(", ")")][:length]


def encode_bytes(text: str, length: int) -> list[int]:
    return [byte + 1 for byte in text.encode()[:length]]


def encode_pixels(image: Image.Image, length: int) -> list[int]:
    """Gray levels in raster order, of the image resized to `length` pixels."""
    side = math.isqrt(length)
    image = image.convert("L")
    if image.size != (side, side):
        image = image.resize((side, side), Image.Resampling.BOX)
    return (np.asarray(image, dtype=np.int64).ravel() + 1).tolist()


IMAGE_COLUMNS = ("image", "img")
TASKS = {
    "listops": Task(("Source",), encode_listops),
    "text": Task(("text",), encode_bytes),
    "retrieval": Task(("text1", "text2"), encode_bytes),
    "image": Task(IMAGE_COLUMNS, encode_pixels, validation_fraction=0.1),
    "pathfinder": Task(IMAGE_COLUMNS, encode_pixels),
}


# Data ------------------------------------------------------------------------------------------------------------------


class Examples(torch.utils.data.Dataset):
    """Examples as token ids and labels, encoded on access."""

    def __init__(self, dataset: Dataset, task: Task, length: int, source: str = "the data"):
        self.dataset, self.task, self.length = dataset, task, length
        label_column = _find_column(dataset, LABEL_COLUMNS, source)
        columns = task.columns if task.reads_pairs else (_find_column(dataset, task.columns, source),)
        self.input_columns = [_find_column(dataset, (name,), source) for name in columns]
        self.labels = [int(label) for label in dataset[label_column]]  # AAN's files have 0.0 and 1.0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        example = self.dataset[index]
        names = ("input_ids", "other_input_ids")
        ids = {name: self.task.encode(example[column], self.length) for name, column in zip(names, self.input_columns)}
        if not all(ids.values()):
            raise ValueError(f"Example {index} has no token; remove it.")
        return ids | {"labels": self.labels[index]}

    def check_labels(self, classes: int) -> None:
        """Raises a ValueError if a label is none of the classes."""
        invalid = [label for label in self.labels if not 0 <= label < classes]
        if invalid:
            raise ValueError(f"The label {invalid[0]} is none of the {classes} classes of this task.")


def _find_column(dataset: Dataset, names: tuple[str, ...], source: str) -> str:
    matches = [name for name in names if name in dataset.column_names]
    if not matches:
        raise ValueError(f"{source} has no column {' or '.join(names)}; its columns are {', '.join(dataset.column_names)}.")
    return matches[0]


def collate(items: list[dict]) -> dict[str, torch.Tensor]:
    """A batch, padded on the right with 0, with an attention mask for each sequence."""
    batch = {"labels": torch.tensor([item["labels"] for item in items])}
    for name in items[0].keys() - {"labels"}:
        sequences = [torch.tensor(item[name]) for item in items]
        mask_name = name.replace("input_ids", "attention_mask")
        batch[name] = pad_sequence(sequences, batch_first=True)
        batch[mask_name] = pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    return batch


def load_splits(name: str, task: Task, config: str | None = None, **options) -> dict[str, Dataset]:
    """The examples of "train", "validation" and "test" of a folder or a Hub data set.

    Args:
        name: a folder or Hub id; for pairs also a folder of the arena's files, *.train.tsv, *.eval.tsv, *.test.tsv.
        options: for `load_dataset`.

    Raises:
        ValueError: the data cannot be read, or has no training or test examples.
    """
    folder = Path(name)
    if task.reads_pairs and folder.is_dir() and any(folder.glob("*.tsv")):
        files = {split: [str(file) for file in sorted(folder.glob(pattern))] for split, pattern in AAN_FILES.items()}
        columns = {"sep": "\t", "column_names": list(AAN_FEATURES), "features": AAN_FEATURES, "quoting": QUOTE_NONE}
        dataset = read_dataset(
            "csv", data_files={split: names for split, names in files.items() if names}, **columns, **options
        )
    else:
        dataset = read_dataset(name, config, **options)
    splits = {split: dataset[split] for split in ("train", "validation", "test") if split in dataset}
    for split in ("train", "test"):
        if split not in splits:
            raise ValueError(f"{name!r} has no split {split!r}; it has {', '.join(dataset)}.")
    if "validation" in splits:
        return splits
    if task.validation_fraction:
        split_dataset = splits["train"].train_test_split(task.validation_fraction, seed=0)
        return splits | {"train": split_dataset["train"], "validation": split_dataset["test"]}
    logger.warning("There are no validation examples: as in the arena's pipeline, the test examples are used instead.")
    return splits | {"validation": splits["test"]}
