# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Trains an image classifier: transformers' run_image_classification plus recipes, distillation, EMA weights and a card.

    python examples/run_image_classification.py examples/recipes/image_pretraining.yaml \
        --config_name tost-vision-small-patch16 --config_overrides drop_path_rate=0.05 --dataset_name ILSVRC/imagenet-1k \
        --do_train --do_eval --output_dir my-tost --dataloader_num_workers 8
    python examples/run_image_classification.py examples/recipes/image_finetuning.yaml --model_name_or_path my-tost \
        --dataset_name uoft-cs/cifar10 --do_train --do_eval --output_dir my-cifar --dataloader_num_workers 8

It has the arguments of transformers' run_image_classification.py and of `ToSTVisionTrainingArguments`. The first argument may
be a .yaml or .json file of arguments, such as the published recipes; those after it take precedence. Start it with `accelerate
launch` to use several devices.
"""

import io
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import script_setup  # noqa: F401
import datasets
import scripting
import torch
from classification import (
    compute_metrics,
    find_column,
    label_candidates,
    load_classifier,
    prepare_splits,
    pretrained_names,
)
from datasets import Dataset
from PIL import Image, ImageOps
from scripting import (
    check_actions,
    check_limits,
    load_pretrained,
    override_config,
    parse_args,
    read_dataset,
    run,
    set_up_logging,
)
from training_runs import train_and_report
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoModelForImageClassification,
    PreTrainedConfig,
    ViTImageProcessorPil,
    set_seed,
)
from transformers.hf_argparser import HfArg

from tost_hf.image_processing import CROPS, convert_image, make_image_processor
from tost_hf.training.augmentation import EpochOrder, ImageCollator, TrainingView, draw_seed
from tost_hf.training.trainer_vision import ToSTVisionTrainer, ToSTVisionTrainingArguments


logger = logging.getLogger("run_image_classification")

IMAGE_COLUMNS = ("image", "img", "pixel_values")  # usual names, of columns that are no `datasets.Image`
EVALUATION_SPLITS = ("validation", "valid", "val", "dev", "test")


@dataclass
class ModelArguments(scripting.ModelArguments):
    """Which model or configuration."""

    model_type: str = HfArg(default="tost_vision", help="The type of model to train from scratch with default sizes.")
    image_size: int | None = HfArg(
        default=None, help="Side of the images in training and evaluation. Default: the configuration's."
    )
    crop: str | None = HfArg(
        default=None,
        help="How evaluation resizes images: cropped to the center, or squashed. Default: center for square images, the only "
        "ones that can be cropped, squash for others.",
        metadata={"choices": list(CROPS)},
    )
    teacher_model_name_or_path: str | None = HfArg(
        default=None, help="The teacher for --distillation_type soft or hard: an image classifier with the data's classes."
    )

    def __post_init__(self):
        if self.model_name_or_path is not None and self.config_name is not None:
            raise ValueError("--config_name is for a model trained from scratch, not for --model_name_or_path.")


@dataclass
class DataTrainingArguments:
    """Which images, and their labels."""

    dataset_name: str | None = HfArg(default=None, help="The dataset, a Hub id or a folder.")
    dataset_config_name: str | None = HfArg(default=None, help="The configuration of the dataset.")
    train_dir: str | None = HfArg(default=None, help="A folder with one folder of training images per class.")
    validation_dir: str | None = HfArg(default=None, help="A folder with one folder of validation images per class.")
    train_file: str | None = HfArg(default=None, help="A parquet file of training images.")
    validation_file: str | None = HfArg(default=None, help="A parquet file of validation images.")
    image_column_name: str | None = HfArg(default=None, help="The column of images. Default: the only one.")
    label_column_name: str | None = HfArg(default=None, help="The column of labels. Default: the only one.")
    class_names: str | None = HfArg(
        default=None,
        help="The names of the labels 0, 1, ..., separated by commas. Default: labels are names themselves.",
    )
    train_val_split: float = HfArg(
        default=0.15, help="The fraction of training images to hold out if there are no validation images."
    )
    max_train_samples: int | None = HfArg(default=None, help="The maximum number of training images.")
    max_eval_samples: int | None = HfArg(default=None, help="The maximum number of validation images.")

    def __post_init__(self):
        if not any((self.dataset_name, self.train_dir, self.validation_dir, self.train_file, self.validation_file)):
            raise ValueError(
                "There are no images to work on: give --dataset_name, --train_dir, --train_file, --validation_dir or "
                "--validation_file."
            )
        check_limits(self)
        if not 0 <= self.train_val_split < 1:
            raise ValueError(f"--train_val_split must be at least 0 and below 1, got {self.train_val_split}.")


# Images and labels ---------------------------------------------------------------------------------------------------


def load_images(
    model_args: ModelArguments,
    data_args: DataTrainingArguments,
    seed: int,
    requested: Sequence[str] = ("train", "validation"),
    model_names: Sequence[str] = (),
) -> tuple[dict[str, Dataset], list[str]]:
    """The images of the requested splits, and the names of the classes.

    Args:
        model_args, data_args: the arguments.
        seed: of the images that are held out or drawn.
        requested: "train", if the model is trained, and "validation".
        model_names: the classes of the pretrained model, none without one.

    Returns:
        The splits with undecoded "image", "source" for messages and "label", a class index; and the names of the classes.

    Raises:
        ValueError: the images cannot be read, a requested split does not exist, or a label is no class.
    """
    options = {"cache_dir": model_args.cache_dir, "token": model_args.token}
    all_splits = {}
    if data_args.dataset_name is not None:
        all_splits = dict(read_dataset(data_args.dataset_name, data_args.dataset_config_name, **options))
        evaluation_split = next((name for name in EVALUATION_SPLITS if name in all_splits), None)
        if evaluation_split is not None:
            logger.info(f"Evaluation is on the split {evaluation_split!r}.")
            all_splits["validation"] = all_splits[evaluation_split]
    else:
        for split, folder, file in (
            ("train", data_args.train_dir, data_args.train_file),
            ("validation", data_args.validation_dir, data_args.validation_file),
        ):
            if folder is not None:
                check_class_folders(folder)
                files = os.path.join(folder, "**")
                all_splits[split] = read_dataset("imagefolder", data_files=files, split="train", drop_labels=False, **options)
            elif file is not None:
                all_splits[split] = read_dataset("parquet", data_files=file, split="train", **options)
    holds_out = "validation" not in all_splits and data_args.train_val_split > 0
    return prepare_splits(all_splits, choose_columns, data_args, requested, holds_out, model_names, "Image", seed)


def check_class_folders(folder: str) -> None:
    """Raises a ValueError for images that are in no class's folder, FileNotFoundError if there is no such folder."""
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"The folder of images {folder!r} does not exist.")
    extensions = Image.registered_extensions()
    if loose := sorted(path.name for path in Path(folder).iterdir() if path.suffix.lower() in extensions):
        example = Path(folder, "cat", loose[0])
        raise ValueError(
            f"{folder!r} must have a folder of images for each class; move {loose[0]!r} to {example}, for example."
        )


def choose_columns(split: str, dataset: Dataset, data_args: DataTrainingArguments) -> Dataset:
    """Selects the columns of images and labels and renames them to "image" (undecoded) and "label"; adds "source"."""
    images = [column for column, feature in dataset.features.items() if isinstance(feature, datasets.Image)]
    images = images or [column for column in IMAGE_COLUMNS if column in dataset.column_names]
    columns = {
        "image": find_column(split, dataset, "image", data_args.image_column_name, images),
        "label": find_column(split, dataset, "label", data_args.label_column_name, label_candidates(dataset)),
    }
    dataset = dataset.select_columns(list(columns.values()))
    dataset = dataset.rename_columns({old: new for new, old in columns.items() if old != new})
    dataset = dataset.cast_column("image", datasets.Image(decode=False))
    return dataset.add_column("source", [f"Image {index} of the {split} split" for index in range(len(dataset))])


def read_image(source: str, encoded: dict | None) -> Image.Image:
    """Decodes an image to RGB; gray and palette images are converted, transparent ones are put on white."""
    encoded = encoded or {}
    name = source + (f" ({encoded['path']})" if encoded.get("path") else "")
    if not encoded.get("bytes") and (not encoded.get("path") or os.path.getsize(encoded["path"]) == 0):
        raise ValueError(f"{name} is empty.")
    try:
        with Image.open(io.BytesIO(encoded["bytes"]) if encoded.get("bytes") else encoded["path"]) as image:
            return convert_image(ImageOps.exif_transpose(image), num_channels=3)
    except Exception as error:  # Pillow decodes lazily, and its readers raise many types
        raise ValueError(f"{name} cannot be read as an image: {error}") from error


class TrainingImages(torch.utils.data.Dataset):
    """Randomly augmented images, in another order in each epoch; to be read sequentially."""

    def __init__(self, dataset: Dataset, view: TrainingView, repeats: int, seed: int):
        self.dataset, self.view, self.seed = dataset, view, seed
        self.order = EpochOrder(len(dataset), repeats, seed)
        self.set_epoch = self.order.set_epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> dict:
        index, draw = self.order[position]
        example, seed = self.dataset[index], draw_seed(self.seed, index, draw)
        pixel_values = self.view(read_image(example["source"], example["image"]), seed)
        return {"pixel_values": pixel_values, "labels": example["label"], "seed": seed}


class EvaluationImages(torch.utils.data.Dataset):
    """Images preprocessed by the image processor."""

    def __init__(self, dataset: Dataset, processor: ViTImageProcessorPil):
        self.dataset, self.processor = dataset, processor

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        example = self.dataset[index]
        image = read_image(example["source"], example["image"])
        mean = self.processor.image_mean
        if isinstance(mean, (list, tuple)) and len(mean) == 1:  # of a model of gray images
            image = image.convert("L")
        return {"pixel_values": self.processor(image, return_tensors="pt")["pixel_values"][0], "labels": example["label"]}


def describe_resizing(dataset: Dataset, config: PreTrainedConfig) -> None:
    """Logs that images are resized, unless the first one has the model's size."""
    example, (height, width) = dataset[0], image_sides(config)
    image = read_image(example["source"], example["image"])
    if (image.height, image.width) != (height, width):
        logger.info(
            f"Images, the first of {image.height} x {image.width} pixels, are resized to {height} x {width} (--image_size)."
        )


def image_sides(config: PreTrainedConfig) -> tuple[int, int]:
    """Height and width of a model's images."""
    size = config.image_size
    return (size, size) if isinstance(size, int) else tuple(size)


# Model ---------------------------------------------------------------------------------------------------------------


def load_config(model_args: ModelArguments) -> PreTrainedConfig:
    """The configuration of the model to fine-tune, or of the one to train from scratch."""
    config = model_args.load_config()
    image_size = model_args.image_size or getattr(config, "image_size", 224)
    config = override_config(config, model_args.config_overrides, image_size=image_size)
    if type(config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise ValueError(f"A model of the type {config.model_type!r} is no image classifier.")
    if getattr(config, "num_channels", 3) != 3:
        raise ValueError(f"This script makes RGB images; the model expects {config.num_channels} channels.")
    return config


def load_processor(model_args: ModelArguments, config: PreTrainedConfig) -> ViTImageProcessorPil:
    """The image processor for evaluation and inference, with the mean and deviation of the pretrained model."""
    processor = make_image_processor(config, model_args.crop)
    if model_args.model_name_or_path is not None:
        try:
            pretrained = ViTImageProcessorPil.from_pretrained(
                model_args.model_name_or_path,
                cache_dir=model_args.cache_dir,
                revision=model_args.model_revision,
                token=model_args.token,
            )
        except OSError:
            logger.warning(f"{model_args.model_name_or_path} has no image processor: ImageNet's mean and deviation are used.")
        else:
            processor.image_mean, processor.image_std = pretrained.image_mean, pretrained.image_std
    return processor


def load_teacher(model_args: ModelArguments) -> dict:
    """The trainer's arguments of the teacher, none without one."""
    name = model_args.teacher_model_name_or_path
    if name is None:
        return {}
    options = model_args.hub_options | {"revision": "main"}
    model = load_pretrained(AutoModelForImageClassification, name, dtype="float32", **options)
    try:
        processor = ViTImageProcessorPil.from_pretrained(name, **options)  # only its settings are used, which all have
    except OSError:
        logger.warning(f"{name} has no image processor: the teacher gets the student's input.")
        processor = None
    return {"teacher_model": model, "teacher_processor": processor}


# Training ------------------------------------------------------------------------------------------------------------


def preprocess_logits_for_metrics(logits, labels):
    """The five most likely of more than ten classes, or the most likely one, which evaluation collects, not the logits."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits.topk(5 if logits.shape[-1] > 10 else 1, dim=-1).indices


def make_view(config: PreTrainedConfig, processor: ViTImageProcessorPil, training_args) -> TrainingView:
    """The augmentation of the arguments."""
    return TrainingView(
        size=image_sides(config),
        mean=processor.image_mean,
        std=processor.image_std,
        operations=training_args.rand_augment_operations,
        magnitude=training_args.rand_augment_magnitude,
        magnitude_std=training_args.rand_augment_std,
        probability=training_args.rand_augment_probability,
        erasing=training_args.random_erasing,
        scale=(training_args.min_crop_scale, 1.0),
        padding=training_args.crop_padding,
    )


def main(args: list[str] | None = None, model_arguments: type[ModelArguments] = ModelArguments) -> None:
    args = sys.argv[1:] if args is None else args
    model_args, data_args, training_args = parse_args(
        args, model_arguments, DataTrainingArguments, ToSTVisionTrainingArguments, description=__doc__
    )
    check_actions(training_args, "do_train", "do_eval")
    set_up_logging(training_args, logger)
    set_seed(training_args.seed)

    config = load_config(model_args)
    flags = {"train": training_args.do_train, "validation": training_args.do_eval}
    requested = [split for split in flags if flags[split]]
    with training_args.main_process_first(desc="preparing the images"):
        splits, names = load_images(model_args, data_args, training_args.seed, requested, pretrained_names(model_args))
    model = load_classifier(AutoModelForImageClassification, model_args, config, names, training_args.do_train)
    processor = load_processor(model_args, config)

    describe_resizing(next(iter(splits.values())), config)
    image_datasets = {}
    if "train" in splits:
        training_args.train_sampling_strategy = "sequential"  # the data set shuffles
        view = make_view(config, processor, training_args)
        image_datasets["train"] = TrainingImages(
            splits["train"], view, training_args.repeated_augmentation, training_args.seed
        )
    if "validation" in splits:
        image_datasets["validation"] = EvaluationImages(splits["validation"], processor)
    trainer = ToSTVisionTrainer(
        model=model,
        args=training_args,
        train_dataset=image_datasets.get("train"),
        eval_dataset=image_datasets.get("validation"),
        processing_class=processor,
        data_collator=ImageCollator(len(names), training_args.mixup, training_args.cutmix),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        **load_teacher(model_args),
    )
    samples = {"train": len(splits.get("train", ())), "eval": len(splits.get("validation", ()))}
    train_and_report(trainer, model_args, data_args, "image-classification", "images", samples)


if __name__ == "__main__":
    run(main)
