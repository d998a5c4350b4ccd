# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a small ToST image classifier: 2.8 M parameters in two hours of one CPU core, or 22 M on a GPU.

    python examples/train_small_images.py --images CIFAR10_FOLDER --size cpu --output_dir tost-cifar10-3m
    python examples/train_small_images.py --images CIFAR10_FOLDER --size cpu --teacher regnet --output_dir tost-cifar10-3m
    python examples/train_small_images.py --images CIFAR10_FOLDER --size cpu --trunk xca --output_dir xca
    python examples/train_small_images.py --images IMAGE_FOLDER --size gpu --output_dir tost-images

IMAGE_FOLDER (or a Hub id) is one that `datasets` reads: parquet files, or a folder per class. `run_image_classification.py`
trains on random crops and flips; a tenth of the training images is held out if there is no validation or test split. The size
"cpu" is for images of 32 pixels, as those of CIFAR-10; its models with other attention have about as many parameters. The
weights are then stored in bfloat16 and evaluated on all held-out images, beside the most frequent class. The output folder has
the model card, the training curves and the confusion matrix; OUTPUT_DIR-memberships has a page on TSSA's memberships for the
first held-out image. An interrupted run resumes from its last checkpoint; `--model_name_or_path` trains a finished model
further, with a lower `--learning_rate`.
"""

import argparse
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import script_setup  # noqa: F401
import run_image_classification as script
import torch
from classification import class_section, pretrained_names
from evaluate_image_classification import predict
from evaluation import Measurement, Source, make_results, print_results, write_results
from scripting import recorded_command
from sklearn.metrics import accuracy_score
from train_small import choose_size, command_line, finish_card, make_parser
from transformers import AutoConfig, AutoModelForImageClassification, ViTImageProcessorPil

from tost_hf.files import EVALUATION
from tost_hf.interpret import inspect_path
from tost_hf.model.configuration_tost_vision import ATTENTION_TYPES


MEMBERSHIPS_SUFFIX = "-memberships"  # of the pictures' folder, outside the model's, which is published
HELD_OUT_FRACTION = 0.1
CURVE_IMAGES = 1000  # held-out images evaluated during training


@dataclass(frozen=True)
class Size:
    """The sizes of a model and its training."""

    model: str  # changes to the configuration of tost-vision-tiny-patch16
    layers: int  # with TSSA
    image_size: int  # pixels
    patch_size: int
    batch: int
    steps: int
    learning_rate: float
    crop_padding: int = 0  # pixels; 0 for RandomResizedCrop
    workers: int = 0  # processes that read images
    distillation_alpha: float = 0.7
    distillation_tau: float = 2.0


SIZES = {
    "cpu": Size(
        "hidden_size=176,num_attention_heads=11,layer_scale_init_value=0.1", 6, 32, 8, 128, 16_000, 3e-3, crop_padding=4
    ),
    "gpu": Size("hidden_size=384,num_attention_heads=8", 12, 96, 8, 256, 10_000, 1e-3, workers=8),
}


def model_overrides(size: Size, trunk: str) -> str:
    """The configuration of a model with as many parameters for every kind of attention, up to a rounded number of layers.

    A layer with TSSA has 10 D^2 weights: two projections of D^2, and the MLP. XCA and softmax attention have four projections.
    """
    layers = size.layers if trunk == "tssa" else round(size.layers * 10 / 12)
    return f"{size.model},num_hidden_layers={layers},attention_type={trunk},drop_path_rate=0"


def make_arguments(args: argparse.Namespace) -> list[str]:
    """The arguments of `run_image_classification.py`."""
    size = choose_size(args, SIZES)
    options = {
        "image_size": args.image_size or size.image_size,
        "dataset_name": args.images,
        "train_val_split": HELD_OUT_FRACTION,
        "max_eval_samples": CURVE_IMAGES,
        "dataloader_num_workers": min(size.workers, os.cpu_count() or 1),
        "warmup_steps": size.steps // 10,
        "lr_scheduler_type": "cosine",
        "adam_beta2": 0.98,
        "weight_decay": 0.05,
        "max_grad_norm": 0,
        "label_smoothing_factor": 0.1,
        # for few epochs: neither the recipe's strong augmentation nor EMA weights
        "crop_padding": size.crop_padding,
        "min_crop_scale": 0.5,
    }
    if args.model_name_or_path is None:
        overrides = f"{model_overrides(size, args.trunk)},patch_size={args.patch_size or size.patch_size}"
        options |= {"config_name": "tost-vision-tiny-patch16", "config_overrides": overrides}
    if args.teacher is not None:
        options |= {"teacher_model_name_or_path": args.teacher, "distillation_type": args.distillation_type}
        options |= {"distillation_alpha": size.distillation_alpha, "distillation_tau": size.distillation_tau}
    return command_line(args, size, options)


def evaluate(images: str, folder: str, splits: dict) -> tuple[list[int], list[int]]:
    """Evaluates the stored weights on all held-out images and adds the accuracy to the folder's `evaluation.json`.

    Args:
        images: the name of the data.
        folder: the model's folder.
        splits: "train" and "validation" as in the training run.

    Returns:
        The labels and the predictions of the held-out images.
    """
    model = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    held_out = script.EvaluationImages(splits["validation"], ViTImageProcessorPil.from_pretrained(folder))
    predictions = predict(model, held_out, batch_size=64)[:, 0].tolist()
    labels, training_labels = (splits[split]["label"][:] for split in ("validation", "train"))
    [(most_frequent, _)] = Counter(training_labels).most_common(1)
    height, width = held_out[0]["pixel_values"].shape[-2:]
    protocol = f"images resized to {height} x {width} by the model's processor, {model.config.num_labels} classes"
    accuracy, baseline = accuracy_score(labels, predictions), labels.count(most_frequent) / len(labels)
    baseline_protocol = f"always {model.config.id2label[most_frequent]!r}, of the classes with most training images"
    measurements = [
        Measurement("accuracy", "Accuracy (top-1)", accuracy, len(labels), f"{protocol}, weights as stored"),
        Measurement("accuracy", "Baseline: accuracy of the most frequent class", baseline, len(labels), baseline_protocol),
    ]
    name = Path(images).name if os.path.exists(images) else images
    source = Source(splits["validation"], name, split="held-out")
    results = make_results("image-classification", name, source, measurements, recorded_command(sys.argv))
    write_results(Path(folder, EVALUATION), results)
    print_results(results)
    return labels, predictions


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "tost-images", SIZES)
    parser.add_argument("--images", required=True, metavar="IMAGE_FOLDER", help="a folder of images, or a dataset's Hub id")
    parser.add_argument("--trunk", choices=ATTENTION_TYPES, default="tssa", help="the attention over the patches")
    parser.add_argument("--teacher", metavar="FOLDER", help="a classifier of the same classes to distill from")
    parser.add_argument("--distillation_type", choices=("soft", "hard"), default="soft", help="of the teacher's logits")
    parser.add_argument("--image_size", type=int, help="pixels; default: that of the size")
    parser.add_argument("--patch_size", type=int, help="pixels; default: that of the size")
    args = parser.parse_args(arguments)
    if args.model_name_or_path is not None and (args.trunk != parser.get_default("trunk") or args.patch_size is not None):
        parser.error("--trunk and --patch_size are for a new model, without --model_name_or_path")
    script.main(make_arguments(args))
    data_args = script.DataTrainingArguments(dataset_name=args.images, train_val_split=HELD_OUT_FRACTION)
    model_args = script.ModelArguments(model_name_or_path=args.output_dir)
    splits, names = script.load_images(model_args, data_args, args.seed, model_names=pretrained_names(model_args))
    labels, predictions = evaluate(args.images, args.output_dir, splits)
    section = class_section(labels, predictions, names, args.output_dir)
    finish_card(args.output_dir, section)
    if AutoConfig.from_pretrained(args.output_dir).attention_type == "tssa":
        example = splits["validation"][0]
        image = script.read_image(example["source"], example["image"])
        inspect_path(args.output_dir, image, f"{Path(args.output_dir)}{MEMBERSHIPS_SUFFIX}", overwrite=True)
    print(section)


if __name__ == "__main__":
    main()
