# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Shared by the evaluation scripts: arguments, data, and the results from which model cards are made."""

import json
import logging
import math
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import torch
from datasets import Dataset
from scripting import LOADERS, HubArguments, file_extension, load_pretrained, read_dataset
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from tost_hf.files import EVALUATION, read_json, staged_file
from tost_hf.hub.results import read_evaluation


logger = logging.getLogger("evaluation")

SPLITS = ("test", "validation", "valid", "val", "dev")  # the first existing one is evaluated
IDENTITY_KEYS = ("task_type", "dataset_type", "dataset_name", "dataset_config", "dataset_split", "metric_name")


@dataclass(kw_only=True)
class EvaluationArguments(HubArguments):
    """The model, the amount of data, and the file of the results."""

    model: str = HfArg(help="The model, a folder or a Hub id.")
    output_file: str | None = HfArg(default=None, help="Default: evaluation.json in the model's folder.")
    dataset_split: str | None = HfArg(
        default=None, help="The split. Default: the test data, else the validation data, else the only split."
    )
    max_examples: int | None = HfArg(default=None, help="Use only the first N examples.")
    batch_size: int = HfArg(default=8, help="Examples per batch; does not change the results.")
    dtype: str = HfArg(
        default="float32",
        help="The dtype of the weights.",
        metadata={"choices": ["auto", "bfloat16", "float16", "float32", "float64"]},
    )
    device: str | None = HfArg(default=None, help="The device. Default: the GPU if there is one.")

    @property
    def limit(self) -> str:
        """The part of a metric's name that states `max_examples`."""
        return "" if self.max_examples is None else f", first {self.max_examples} examples"

    def load_model(self, auto_class) -> PreTrainedModel:
        model = load_pretrained(auto_class, self.model, dtype=self.dtype, **self.hub_options)
        return model.to(self.device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


@dataclass
class Source:
    """Examples to evaluate on, and the names of their dataset, configuration and split."""

    examples: Dataset
    name: str
    config: str | None = None
    split: str | None = None


@dataclass
class Measurement:
    """A metric: `name` distinguishes it from others on the same data, `protocol` describes how it was measured."""

    metric_type: str
    name: str
    value: float
    num_examples: int
    protocol: str


def load_source(source: str, args: EvaluationArguments, **file_options) -> Source:
    """The examples of a file (txt, json, jsonl, csv, parquet), of a folder, or of a Hub dataset written NAME or NAME:CONFIG.

    Args:
        source: the file, the folder or the dataset.
        args: the split, the number of examples, and access to the Hub.
        file_options: options of the loader of txt files.

    Raises:
        ValueError: the data cannot be read, the split does not exist or is ambiguous, or there are no examples.
    """
    options = {"cache_dir": args.cache_dir, "token": args.token}
    name, config, split = source, None, args.dataset_split
    if os.path.isfile(source):
        loader, split = LOADERS.get(file_extension(source), "text"), None
        examples = read_dataset(
            loader, data_files=source, split="train", **options, **(file_options if loader == "text" else {})
        )
    else:
        if not os.path.isdir(source):
            name, _, config = source.partition(":")
        splits = read_dataset(name, config or None, **options)
        candidates = [split] if split is not None else [*SPLITS, *(splits if len(splits) == 1 else ())]
        split = next((candidate for candidate in candidates if candidate in splits), None)
        if split is None:
            raise ValueError(f"{source} has the splits {', '.join(splits)}; choose one of them by --dataset_split.")
        examples = splits[split]
        if split == "train" and os.path.isdir(name) and not any(Path(name).rglob("*train*")):
            split = None  # datasets calls it so where nothing names a split
    if len(examples) == 0:
        raise ValueError(f"{source} has no examples to evaluate on.")
    if args.max_examples is not None:
        examples = examples.select(range(min(args.max_examples, len(examples))))
    # a local path means nothing to readers of a model card
    name = Path(name).resolve().name if os.path.exists(name) else name
    return Source(examples, name, config or None, split)


def make_results(
    task_type: str, title: str, source: Source, measurements: list[Measurement], command: str, seed: int | None = None
) -> list[dict]:
    """One dictionary per measurement, with the fields of huggingface_hub's `EvalResult` and the command that repeats it.

    Values that are not finite are logged and omitted, because JSON has no such numbers.
    """
    run = {"seed": seed, "date": datetime.now(UTC).date().isoformat(), "command": command}
    results = []
    for measurement in measurements:
        if not math.isfinite(measurement.value):
            logger.warning(f"{measurement.name} on {title} is {measurement.value}: it is left out of the results.")
            continue
        result = {
            "task_type": task_type,
            "dataset_type": source.name,
            "dataset_name": title,
            "dataset_config": source.config,
            "dataset_split": source.split,
            "metric_type": measurement.metric_type,
            "metric_name": measurement.name,
            "metric_value": measurement.value,
            "protocol": measurement.protocol,
            "num_examples": measurement.num_examples,
        }
        results.append(result | run)
    return results


def results_file(args: EvaluationArguments) -> Path:
    """The file of the results: `output_file`, or `evaluation.json` in the model's folder.

    Raises:
        ValueError: the model is not a local folder, or the file contains something other than results.
    """
    if args.output_file is None and not os.path.isdir(args.model):
        raise ValueError(f"{args.model!r} is no folder that results could be written to: give --output_file.")
    file = Path(args.output_file or Path(args.model) / EVALUATION)
    read_results(file)  # fails before a long evaluation rather than after it
    return file


def read_results(file: Path) -> dict:
    """The content of a results file, `{"results": [...]}`, whose list is empty if there is no file."""
    content = read_json(file) if file.exists() else {"results": []}
    if "results" not in content:
        raise ValueError(f'{file} does not contain {{"results": [...]}}: move it away, or choose another --output_file.')
    read_evaluation(file)
    return content


def write_results(file: Path, results: list[dict]) -> None:
    """Merges results into a file, replacing those of the same data and metric name."""
    content = read_results(file)
    by_identity = {tuple(result.get(key) for key in IDENTITY_KEYS): result for result in content["results"]}
    for result in results:
        by_identity.pop(identity := tuple(result.get(key) for key in IDENTITY_KEYS), None)
        by_identity[identity] = result
    content["results"] = list(by_identity.values())
    with staged_file(file) as staged:
        staged.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def print_results(results: list[dict]) -> None:
    """Prints results as a table."""
    columns = ["dataset_name", "dataset_split", "metric_name", "metric_value", "num_examples"]
    print(pd.DataFrame(results, columns=columns).fillna("").to_string(index=False, float_format="{:.4f}".format))
