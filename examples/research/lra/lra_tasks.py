# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The data of the five tasks of Long Range Arena, as token ids."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from listops import TOKENS
from PIL import Image
from scripting import read_dataset
from torch.nn.utils.rnn import pad_sequence


logger = logging.getLogger("lra_tasks")

LABELS = ("label", "Target", "labels")
AAN_COLUMNS = ["label", "id1", "id2", "text1", "text2"]
AAN_FILES = {"train": "*train.tsv", "validation": "*eval.tsv", "test": "*test.tsv"}
QUOTE_NONE = 3  # of Python's csv
LISTOPS_IDS = {token: number for number, token in enumerate(TOKENS, 1)}


class Task(NamedTuple):
    """A task: an example's token ids from its columns, and the share of training data to validate on."""

    columns: tuple[str, ...]  # any name that the first column may have, or both texts of a pair
    encode: Callable[[Any, int], list[int]]
    validation_share: float = 0.0

    @property
    def reads_pairs(self) -> bool:
        return "text2" in self.columns


# Token ids; 0 is padding -----------------------------------------------------------------------------------------------


def encode_listops(source: str, length: int) -> list[int]:
    """ListOps' tokens without the parentheses, as in the arena's own pipeline."""
    return [LISTOPS_IDS[token] for token in source.split() if token not in ("(", ")")][:length]


def encode_bytes(text: str, length: int) -> list[int]:
    return [byte + 1 for byte in text.encode()[:length]]


def encode_pixels(picture: Image.Image, length: int) -> list[int]:
    """Grey levels in raster order, of the picture at `length` pixels."""
    side = math.isqrt(length)
    picture = picture.convert("L")
    if picture.size != (side, side):
        picture = picture.resize((side, side), Image.Resampling.BOX)
    return (np.asarray(picture, dtype=np.int64).ravel() + 1).tolist()


PICTURES = ("image", "img")
TASKS = {
    "listops": Task(("Source",), encode_listops),
    "text": Task(("text",), encode_bytes),
    "retrieval": Task(("text1", "text2"), encode_bytes),
    "image": Task(PICTURES, encode_pixels, validation_share=0.1),
    "pathfinder": Task(PICTURES, encode_pixels),
}


# Data ------------------------------------------------------------------------------------------------------------------


class Examples(torch.utils.data.Dataset):
    """Examples as token ids and labels, made when they are asked for."""

    def __init__(self, dataset: Dataset, task: Task, length: int, where: str = "the data"):
        self.dataset, self.task, self.length = dataset, task, length
        label = _column(dataset, LABELS, where)
        texts = task.columns if task.reads_pairs else (_column(dataset, task.columns, where),)
        self.texts = [_column(dataset, (name,), where) for name in texts]
        self.labels = [int(value) for value in dataset[label]]  # AAN's files have 0.0 and 1.0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        example = self.dataset[index]
        names = ("input_ids", "other_input_ids")
        ids = {name: self.task.encode(example[column], self.length) for name, column in zip(names, self.texts)}
        if not all(ids.values()):
            raise ValueError(f"Example {index} holds no token; remove it.")
        return ids | {"labels": self.labels[index]}

    def check_labels(self, classes: int) -> None:
        """ValueError if a label is none of so many classes."""
        wrong = [label for label in self.labels if not 0 <= label < classes]
        if wrong:
            raise ValueError(f"The label {wrong[0]} is none of the {classes} classes of this task.")


def _column(dataset: Dataset, names: tuple[str, ...], where: str) -> str:
    found = [name for name in names if name in dataset.column_names]
    if not found:
        raise ValueError(f"{where} has no column {' or '.join(names)}; its columns are {', '.join(dataset.column_names)}.")
    return found[0]


def collate(items: list[dict]) -> dict[str, torch.Tensor]:
    """A batch, padded on the right with 0, with an attention mask for each text."""
    batch = {"labels": torch.tensor([item["labels"] for item in items])}
    for name in items[0].keys() - {"labels"}:
        sequences = [torch.tensor(item[name]) for item in items]
        mask = name.replace("input_ids", "attention_mask")
        batch[name] = pad_sequence(sequences, batch_first=True)
        batch[mask] = pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    return batch


def load_splits(name: str, task: Task, config: str | None = None, **options) -> dict[str, Dataset]:
    """The examples of "train", "validation" and "test" of a folder or a Hub data set.

    Args:
        name: its folder or Hub id; for pairs also a folder of the arena's own files, *.train.tsv, *.eval.tsv, *.test.tsv.
        options: for `load_dataset`.

    Raises:
        ValueError: the data cannot be read, or has no training or test examples.
    """
    folder = Path(name)
    if task.reads_pairs and folder.is_dir() and any(folder.glob("*.tsv")):
        files = {split: [str(file) for file in sorted(folder.glob(form))] for split, form in AAN_FILES.items()}
        columns = {"sep": "\t", "column_names": AAN_COLUMNS, "quoting": QUOTE_NONE}
        found = read_dataset("csv", data_files={split: names for split, names in files.items() if names}, **columns, **options)
    else:
        found = read_dataset(name, config, **options)
    splits = {split: found[split] for split in ("train", "validation", "test") if split in found}
    for split in ("train", "test"):
        if split not in splits:
            raise ValueError(f"{name!r} has no split {split!r}; it has {', '.join(found)}.")
    if "validation" in splits:
        return splits
    if task.validation_share:
        parts = splits["train"].train_test_split(task.validation_share, seed=0)
        return splits | {"train": parts["train"], "validation": parts["test"]}
    logger.warning("There are no validation examples: as in the arena's own pipeline, the test examples are used instead.")
    return splits | {"validation": splits["test"]}
