"""Small runs of ToSTVisionTrainer and run_image_classification.py on real digits."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import randomize, small_vision_config
from PIL import Image as PILImage
from scripts import EXAMPLES, command_line
from sklearn.datasets import load_digits
from transformers import AutoImageProcessor, RegNetConfig, RegNetForImageClassification, ViTImageProcessorPil

from tost_hf import ToSTForImageClassification
from tost_hf.image_processing import make_image_processor
from tost_hf.training.trainer_vision import ToSTVisionTrainer, ToSTVisionTrainingArguments


NAMES = ["zero", "one", "two"]
TINY = "patch_size=4,hidden_size=32,num_hidden_layers=2,num_class_attention_layers=1,num_attention_heads=4"


def digit_pictures(count: int, offset: int = 0) -> list[tuple[PILImage.Image, int]]:
    """Real digits of the classes 0, 1, 2, 0, ... as gray pictures of 8 x 8 pixels."""
    digits = load_digits()
    indices_of_class = [np.flatnonzero(digits.target == number) for number in range(len(NAMES))]
    samples = [(int(indices_of_class[i % 3][(offset + i) // 3]), i % 3) for i in range(count)]
    return [(PILImage.fromarray((digits.images[index] * 15.9).astype(np.uint8)), number) for index, number in samples]


@pytest.fixture(scope="session")
def digit_folder(tmp_path_factory) -> Path:
    """Image folders "train" of 96 digits and "validation" of 30."""
    folder = tmp_path_factory.mktemp("digits")
    for split, count, offset in (("train", 96, 0), ("validation", 30, 96)):
        for i, (picture, number) in enumerate(digit_pictures(count, offset)):
            (folder / split / NAMES[number]).mkdir(parents=True, exist_ok=True)
            picture.save(folder / split / NAMES[number] / f"{i:03}.png")
    return folder


@pytest.fixture
def image_args(digit_folder, tmp_path):
    """Arguments of a small run of the script; keywords replace or add, None omits, True is a flag without a value."""

    def make(recipe="image_pretraining", **changes) -> list[str]:
        values = {
            "config_name": "tost-vision-tiny-patch16",
            "config_overrides": TINY,
            "image_size": 16,
            "train_dir": digit_folder / "train",
            "validation_dir": digit_folder / "validation",
            "cache_dir": tmp_path / "cache",
            "output_dir": tmp_path / "out",
            "total_batch_size": 8,
            "per_device_train_batch_size": 8,
            "bf16": "false",
            "max_steps": 3,
            "learning_rate": 0.001,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": "true",
            "use_cpu": True,
            "do_train": True,
        } | changes
        return [str(EXAMPLES / "recipes" / f"{recipe}.yaml"), *command_line(values)]

    return make


def load_processor(folder) -> ViTImageProcessorPil:
    return AutoImageProcessor.from_pretrained(folder, backend="pil")


def results(output_dir) -> dict[str, float]:
    return json.loads((Path(output_dir) / "eval_results.json").read_text())


def tiny_vision_model(**changes) -> ToSTForImageClassification:
    config = small_vision_config(num_class_attention_layers=1, num_labels=3, **changes)
    return randomize(ToSTForImageClassification(config))


def tiny_teacher(names=tuple(NAMES)) -> RegNetForImageClassification:
    """A convolutional network with random weights."""
    torch.manual_seed(1)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8, "layer_type": "x"}
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    return RegNetForImageClassification(RegNetConfig(**sizes, **labels))


def training_args(tmp_path, **changes) -> ToSTVisionTrainingArguments:
    values = {
        "output_dir": str(tmp_path / "out"),
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return ToSTVisionTrainingArguments(**(values | changes))


def digit_examples(count: int = 32) -> list[dict]:
    pixels = make_image_processor(16)([picture for picture, _ in digit_pictures(count)], return_tensors="pt")["pixel_values"]
    return [{"pixel_values": image, "labels": number} for image, (_, number) in zip(pixels, digit_pictures(count))]


def make_trainer(tmp_path, model=None, **changes) -> ToSTVisionTrainer:
    return ToSTVisionTrainer(
        model or tiny_vision_model(),
        training_args(tmp_path, **changes),
        train_dataset=digit_examples(),
        eval_dataset=digit_examples(12),
    )
