# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a small ToST image classifier: 2.8 M parameters in two hours of one CPU core, or 22 M on a GPU.

    python examples/train_small_images.py --images PHOTO_FOLDER --size photos --output_dir tost-photos-3m \
        --model_name_or_path model_cards/trained/tost-cifar10-3m
    python examples/train_small_images.py --images PHOTO_FOLDER --size photos --trunk vit --output_dir vit
    python examples/train_small_images.py --images CIFAR10_FOLDER --size cpu --output_dir tost-cifar10-3m
    python examples/train_small_images.py --images CIFAR10_FOLDER --size cpu --teacher regnet --output_dir tost-cifar10-3m
    python examples/train_small_images.py --images CIFAR10_FOLDER --size cpu --trunk xca --output_dir xca
    python examples/train_small_images.py --images IMAGE_FOLDER --size gpu --output_dir tost-images

IMAGE_FOLDER (or a Hub id) is one that `datasets` reads: parquet files, or a folder per class. `run_image_classification.py`
trains on random crops and flips; a tenth of the training images is held out if there is no validation or test split. The size
"cpu" is for images of 32 pixels, as those of CIFAR-10, "photos" for 96 pixels on a CPU. `--trunk` trains models with other
attention, or transformers' ViT, of about as many parameters. The weights are then stored in bfloat16 and evaluated on all
held-out images, beside the most frequent class. The output folder has the model card, the training curves and the confusion
matrix; OUTPUT_DIR-memberships has a page on TSSA's memberships for the first held-out image. An interrupted run resumes from
its last checkpoint; `--model_name_or_path` trains a finished model further, with a lower `--learning_rate`. All other
arguments are those of `run_image_classification.py`, such as `--cutmix 1`, and take precedence.
"""

import argparse
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
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
from tost_hf.model.configuration_tost_vision import ATTENTION_TYPES, ToSTVisionConfig


MEMBERSHIPS_SUFFIX = "-memberships"  # of the pictures' folder, outside the model's, which is published
HELD_OUT_FRACTION = 0.1
CURVE_IMAGES = 1000  # held-out images evaluated during training


@dataclass(frozen=True)
class Size:
    """The sizes of a model and its training."""

    width: int
    heads: int
    layers: int  # with TSSA
    layer_scale: float
    image_size: int  # pixels
    patch_size: int
    batch: int
    steps: int
    learning_rate: float
    augmentation: dict[str, float] = field(default_factory=dict)
    workers: int = 0  # processes that read images


SIZES = {
    # for few epochs: neither the recipe's strong augmentation nor EMA weights
    "cpu": Size(176, 11, 6, 0.1, 32, 8, 128, 16_000, 3e-3, {"crop_padding": 4}),
    "photos": Size(176, 11, 6, 0.1, 96, 8, 48, 4_600, 2e-3, {"min_crop_scale": 0.35}),
    "gpu": Size(384, 8, 12, 1.0, 96, 8, 256, 10_000, 1e-3, {"min_crop_scale": 0.5}, workers=8),
}
TRUNKS = (*ATTENTION_TYPES, "vit")
CLASS_ATTENTION_WEIGHTS = 24  # of ToST's two layers of class attention, in D^2


def model_options(size: Size, trunk: str, patch_size: int) -> dict[str, str]:
    """The model as arguments: with as many parameters for every trunk, up to a rounded number of layers.

    A layer with TSSA has 10 D^2 weights: two projections of D^2, and the MLP. XCA and softmax attention have four projections.
    ViT is that of transformers, with heads of 64 channels.
    """
    if trunk == "vit":
        width = 64 * round(size.width / 64)
        weights = (10 * size.layers + CLASS_ATTENTION_WEIGHTS) * size.width**2
        overrides = {"num_hidden_layers": round(weights / (12 * width**2)), "intermediate_size": 4 * width}
        overrides |= {"hidden_size": width, "num_attention_heads": width // 64}
        model = {"model_type": "vit"}
    else:
        layers = size.layers if trunk == "tssa" else round(size.layers * 10 / 12)
        overrides = {"hidden_size": size.width, "num_attention_heads": size.heads, "num_hidden_layers": layers}
        overrides |= {"attention_type": trunk, "layer_scale_init_value": size.layer_scale, "drop_path_rate": 0}
        model = {"config_name": "tost-vision-tiny-patch16"}
    overrides["patch_size"] = patch_size
    return model | {"config_overrides": ",".join(f"{name}={value}" for name, value in overrides.items())}


def make_arguments(args: argparse.Namespace) -> list[str]:
    """The arguments of `run_image_classification.py`."""
    size = choose_size(args, SIZES)
    options = {
        "image_size": size.image_size,
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
    }
    options |= size.augmentation
    if args.model_name_or_path is None:
        options |= model_options(size, args.trunk, args.patch_size or size.patch_size)
    if args.teacher is not None:
        options |= {"teacher_model_name_or_path": args.teacher, "distillation_type": "soft"}
        options |= {"distillation_alpha": 0.7, "distillation_tau": 2.0}
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
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
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
    parser.add_argument("--trunk", choices=TRUNKS, default="tssa", help="the attention over the patches, or a ViT")
    parser.add_argument("--teacher", metavar="FOLDER", help="a classifier of the same classes to distill from")
    parser.add_argument("--patch_size", type=int, help="pixels; default: that of the size")
    args, other_arguments = parser.parse_known_args(arguments)
    if args.model_name_or_path is not None and (args.trunk != parser.get_default("trunk") or args.patch_size is not None):
        parser.error("--trunk and --patch_size are for a new model, without --model_name_or_path")
    script.main([*make_arguments(args), *other_arguments])
    data_args = script.DataTrainingArguments(dataset_name=args.images, train_val_split=HELD_OUT_FRACTION)
    model_args = script.ModelArguments(model_name_or_path=args.output_dir)
    splits, names = script.load_images(model_args, data_args, args.seed, model_names=pretrained_names(model_args))
    labels, predictions = evaluate(args.images, args.output_dir, splits)
    section = class_section(labels, predictions, names, args.output_dir)
    config = AutoConfig.from_pretrained(args.output_dir)
    if config.model_type == ToSTVisionConfig.model_type:
        finish_card(args.output_dir, section)
    if getattr(config, "attention_type", None) == "tssa":
        example = splits["validation"][0]
        image = script.read_image(example["source"], example["image"])
        inspect_path(args.output_dir, image, f"{Path(args.output_dir)}{MEMBERSHIPS_SUFFIX}", overwrite=True)
    print(section)


if __name__ == "__main__":
    main()
