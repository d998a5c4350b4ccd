# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Evaluates an image classifier, ToST or any other of transformers: accuracy, also top-5 and on ReaL labels.

    python examples/evaluate_image_classification.py --model my-tost-vision --dataset ILSVRC/imagenet-1k \
        --dataset_split validation --real_labels real.json
    python examples/evaluate_image_classification.py --model my-tost-vision --dataset imagenette \
        --label_column_name imagenet_label

Images are preprocessed by the model's processor. All classes of the model are candidates, even if the data has fewer. Top-5
accuracy is measured if there are more than ten. Results are written to the model's `evaluation.json`, from which its card is
made. To evaluate EMA weights, give the `ema` folder of a trained model.
"""

import json
import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import script_setup  # noqa: F401
import pyarrow.compute
import torch
from classification import class_indices, label_names, read_labels
from datasets import ClassLabel, Dataset, Value
from evaluation import EvaluationArguments, Measurement, load_source, make_results, print_results, results_file, write_results
from run_image_classification import (
    DataTrainingArguments,
    EvaluationImages,
    choose_columns,
    preprocess_logits_for_metrics,
)
from scripting import load_pretrained, parse_args, recorded_command, run
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoImageProcessor, AutoModelForImageClassification, PreTrainedModel
from transformers.hf_argparser import HfArg

import tost_hf  # noqa: F401  registers the models with the Auto classes
from tost_hf.training.metrics import Accuracy


logger = logging.getLogger("evaluate_image_classification")

IMAGENET_FILE = re.compile(r"ILSVRC2012_val_(\d{8})")


@dataclass(kw_only=True)
class ImageEvaluationArguments(EvaluationArguments):
    """The images and their labels."""

    dataset: str = HfArg(help="The images: a parquet file, a folder, or a Hub dataset NAME or NAME:CONFIG.")
    image_column_name: str | None = HfArg(default=None, help="The column of images. Default: the only one.")
    label_column_name: str | None = HfArg(
        default=None,
        help="The column of labels. Named labels are matched with the model's by name (by number if the model's have "
        "no names); plain numbers are the model's, unless all are names of its classes. Default: the only one.",
    )
    real_labels: str | None = HfArg(
        default=None,
        help="A JSON list with the right classes of each image (real.json of google-research/reassessed-imagenet), in "
        "the order of ImageNet's file names where the images have them, else in the order of the examples.",
    )
    dataloader_num_workers: int = HfArg(default=0, help="Processes that read images.")


def match_labels(examples: Dataset, split: str, names: list[str], data_args: DataTrainingArguments) -> Dataset:
    """Examples with "image", "label" and "source" whose labels are the model's class numbers."""
    examples = choose_columns(split, examples, data_args)
    unnamed = all(name == f"LABEL_{number}" for number, name in enumerate(names))
    feature = examples.features["label"]
    if unnamed and isinstance(feature, ClassLabel) and not set(feature.names) <= set(names):
        logger.warning("The model's classes have no names: the data's label numbers are used as the model's class numbers.")
        examples = examples.cast_column("label", Value("int64"))
    labels = read_labels(split, examples, None, "Image")
    has_numbers = not isinstance(examples.features["label"], ClassLabel) and not isinstance(examples["label"][0], str)
    if has_numbers and not set(labels) <= set(names):
        names = [str(number) for number in range(len(names))]
    indices = class_indices(split, labels, names, "Image")
    return examples.remove_columns("label").add_column("label", indices)


def load_real_labels(file: str, examples: Dataset) -> list[list[int]]:
    """The correct classes of each example's image, from a JSON list of lists.

    ImageNet's validation images are matched by the number in their file names, independently of the examples' order.
    """
    labels = json.loads(Path(file).read_text(encoding="utf-8"))
    paths = pyarrow.compute.struct_field(examples.with_format("arrow")["image"][:].combine_chunks(), "path").to_pylist()
    matches = [IMAGENET_FILE.search(path or "") for path in paths]
    indices = [int(match[1]) - 1 for match in matches] if all(matches) else range(len(examples))
    if not all(matches) and len(labels) != len(examples):
        raise ValueError(f"{file} has labels of {len(labels)} images, and the data {len(examples)} examples.")
    return [labels[index] for index in indices]


@torch.inference_mode()
def predict(model: PreTrainedModel, images: EvaluationImages, batch_size: int, num_workers: int = 0) -> torch.Tensor:
    """The five most likely classes of each image in order, (images, 5), or the most likely of ten at most, (images, 1)."""
    predictions = []
    for batch in tqdm(DataLoader(images, batch_size, num_workers=num_workers), desc="Classifying"):
        logits = model(pixel_values=batch["pixel_values"].to(model.device, model.dtype)).logits
        predictions.append(preprocess_logits_for_metrics(logits, batch["labels"]).cpu())
    return torch.cat(predictions)


def real_accuracy(predictions: torch.Tensor, real_labels: list[list[int]]) -> tuple[float, int]:
    """The fraction of images whose first prediction is among their labels, and how many images have any.

    As Beyer et al. (arXiv 2006.07159) do, images without a label are left out.
    """
    is_correct = [prediction in labels for prediction, labels in zip(predictions[:, 0].tolist(), real_labels) if labels]
    return sum(is_correct) / len(is_correct), len(is_correct)


def main(args: list[str] | None = None) -> None:
    argv = sys.argv[1:] if args is None else args
    (args,) = parse_args(argv, ImageEvaluationArguments, description=__doc__)
    command = recorded_command([__file__, *argv])
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    file = results_file(args)
    # gives the same pixels with and without torchvision
    processor = load_pretrained(AutoImageProcessor, args.model, backend="pil", **args.hub_options)
    model = args.load_model(AutoModelForImageClassification)
    names = label_names(model.config)

    source = load_source(args.dataset, args)
    data_args = DataTrainingArguments(
        dataset_name=args.dataset, image_column_name=args.image_column_name, label_column_name=args.label_column_name
    )
    examples = match_labels(source.examples, source.split or "evaluation", names, data_args)
    real_labels = None if args.real_labels is None else load_real_labels(args.real_labels, examples)

    images = EvaluationImages(examples, processor)
    predictions = predict(model, images, args.batch_size, args.dataloader_num_workers)
    height, width = images[0]["pixel_values"].shape[-2:]
    protocol = f"images made {height} x {width} by the model's processor, {len(names)} classes, {model.dtype}"
    accuracies = Accuracy().compute(predictions=predictions.tolist(), references=examples["label"][:])
    measurements = [Measurement("accuracy", f"Accuracy (top-1{args.limit})", accuracies["accuracy"], len(examples), protocol)]
    if "top5_accuracy" in accuracies:
        measurements.append(
            Measurement("accuracy", f"Accuracy (top-5{args.limit})", accuracies["top5_accuracy"], len(examples), protocol)
        )
    if real_labels is not None:
        accuracy, num_labeled = real_accuracy(predictions, real_labels)
        protocol = f"right if among the image's ReaL labels, images without any left out; {protocol}"
        measurements.append(
            Measurement("accuracy", f"Accuracy (top-1 on ReaL labels{args.limit})", accuracy, num_labeled, protocol)
        )

    title = " ".join(filter(None, (source.name, source.config)))
    results = make_results("image-classification", title, source, measurements, command)
    write_results(file, results)
    print_results(results)
    print(f"Written to {file}")


if __name__ == "__main__":
    run(main)
