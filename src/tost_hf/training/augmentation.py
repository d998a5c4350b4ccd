# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Augmentation of images in training. Every draw depends on a seed given with it, so that a resumed run repeats it exactly.

The operations are Kornia's, which is maintained, Apache-licensed and needs PyTorch only. timm's, where the recipe comes from,
does not run without torchvision; Albumentations is not maintained since 2025, and its successor is AGPL. Mixup and CutMix
are a few lines of tensor arithmetic here, as Kornia's Mixup does not draw from a Beta distribution.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from kornia.augmentation import RandomErasing, RandomHorizontalFlip
from kornia.augmentation.auto import RandAugment
from kornia.augmentation.random_generator import ResizedCropGenerator
from PIL import Image
from torch.nn import functional as F


MAX_MAGNITUDE = 30  # of RandAugment, as in its paper

# (operation, from, to) at magnitudes 0 to 30: timm's "increasing" set. What can go both ways is listed once for each.
_ONE_WAY = [
    ("auto_contrast", 0, 1),
    ("equalize", 0, 1),
    ("invert", 0, 1),
    ("rotate", -30.0, 30.0),  # degrees, of either sign
    ("posterize", 1.0, 4.0),  # bits, from the most to the fewest
    ("solarize_add", 0.0, 0.43),
    ("shear_x", -0.093, 0.093),  # half turns: a slope of 0.3
    ("shear_y", -0.093, 0.093),
    ("translate_x", -0.45, 0.45),
    ("translate_y", -0.45, 0.45),
]
# Kornia's contrast multiplies, as Pillow's brightness does; its brightness adds, which is harsher
_UP = [("color", 1.0, 1.9), ("contrast", 1.0, 1.9), ("sharpness", 1.0, 1.9), ("brightness", 1.0, 1.45)]
_DOWN = [("color", 0.1, 1.0), ("contrast", 0.1, 1.0), ("sharpness", 0.1, 1.0), ("brightness", 0.55, 1.0)]
_INCREASING = 2 * _ONE_WAY + _UP
_DECREASING = 2 * [("solarize", 0.0, 1.0)] + _DOWN  # the lower the value the stronger


class TrainingView:
    """A random view of a picture: crop, flip, RandAugment, normalisation, erasing. The same seed gives the same view.

    Args:
        size: (height, width) of the view.
        mean, std: statistics of the channels to normalise with.
        operations: how many of RandAugment's operations to choose.
        magnitude: their strength, from 0 to 30 (timm's m9 is 27).
        magnitude_std: spread of the strength (timm's mstd0.5 is 1.5).
        probability: how likely a chosen operation is to be applied.
        erasing: probability of erasing a rectangle.
        scale: bounds of the share of the picture's area that is cropped.
    """

    def __init__(
        self,
        size: tuple[int, int],
        mean: list[float],
        std: list[float],
        operations: int = 2,
        magnitude: float = 27,
        magnitude_std: float = 1.5,
        probability: float = 0.5,
        erasing: float = 0.25,
        scale: tuple[float, float] = (0.08, 1.0),
    ):
        height, width = size
        self.size, self.operations, self.probability = (height, width), operations, probability
        self.magnitude, self.magnitude_std = magnitude, magnitude_std
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
        self.crop = ResizedCropGenerator(self.size, scale, (3 / 4, 4 / 3))
        self.flip = RandomHorizontalFlip()
        self.increasing, self.decreasing = (
            RandAugment(1, 1, [[entry] for entry in entries]) for entries in (_INCREASING, _DECREASING)
        )
        self.erase = RandomErasing(p=erasing)

    @torch.no_grad()
    def __call__(self, image: Image.Image, seed: int) -> torch.Tensor:
        """The view (3, height, width) of an RGB picture."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reset the GPUs' dropout, too
            corners = self.crop(torch.Size((1, 3, image.height, image.width)))["src"][0]
            (left, top), (right, bottom) = corners[0].tolist(), corners[2].tolist()
            # Pillow resizes, as it does for the evaluation: Kornia would not smooth what it shrinks
            height, width = self.size
            view = image.resize((width, height), Image.Resampling.BICUBIC, box=(left, top, right + 1, bottom + 1))
            x = torch.from_numpy(np.array(view)).permute(2, 0, 1)[None].float() / 255
            x = self.flip(x)
            for _ in range(self.operations):
                if torch.rand(()) < self.probability:
                    x = self._distort(x)
            return self.erase((x - self.mean) / self.std)[0]

    def _distort(self, x: torch.Tensor) -> torch.Tensor:
        magnitude = float(torch.normal(float(self.magnitude), float(self.magnitude_std), ()))
        magnitude = min(max(magnitude, 1e-3), MAX_MAGNITUDE - 1e-3)
        increasing = torch.rand(()) < len(_INCREASING) / len(_INCREASING + _DECREASING)
        rand_augment = self.increasing if increasing else self.decreasing
        # kornia declares a whole number, and takes any
        rand_augment.m = magnitude if increasing else MAX_MAGNITUDE - magnitude  # type: ignore[assignment]
        return rand_augment(x)


class RepeatedSampler(torch.utils.data.Sampler):
    """Yields (index, draw): each image of a shuffled epoch `repeats` times in succession, every time another draw.

    An epoch keeps its length, so that it sees one of `repeats` images only (repeated augmentation, arXiv 1901.09335). The
    order follows from the seed and `epoch`, which the trainer sets.
    """

    def __init__(self, length: int, repeats: int = 1, seed: int = 0):
        self.length, self.repeats, self.seed, self.epoch = length, repeats, seed, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.length)
        for place in range(self.length):
            yield int(order[place // self.repeats]), self.epoch * self.repeats + place % self.repeats


def draw_seed(seed: int, index: int, draw: int) -> int:
    """The seed of one draw of one image, unrelated to those of the others."""
    return int(np.random.SeedSequence((seed, index, draw)).generate_state(1, np.uint64)[0] >> 1)


def mix(
    images: torch.Tensor, labels: torch.Tensor, num_labels: int, mixup: float, cutmix: float, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixup or CutMix, one of the two for a whole batch, of each image with its opposite in the batch, as timm does.

    Args:
        images: (B, C, height, width).
        labels: (B,), numbers of classes.
        num_labels: number of classes K.
        mixup, cutmix: alpha of the Beta distribution of each; 0 for none.
        rng: the source of random numbers.

    Returns:
        The images, and the shares (B, K) of the classes in each.
    """
    labels = F.one_hot(labels, num_labels).float()
    use_cutmix = cutmix > 0 and (mixup == 0 or rng.random() < 0.5)
    alpha = cutmix if use_cutmix else mixup
    lam = float(rng.beta(alpha, alpha))  # the share of the image itself
    others = images.flip(0)
    if use_cutmix:
        height, width = images.shape[-2:]
        y, x = rng.integers(height), rng.integers(width)
        half = math.sqrt(1 - lam) / 2
        top, bottom = max(0, int(y - half * height)), min(height, int(y + half * height))
        left, right = max(0, int(x - half * width)), min(width, int(x + half * width))
        images = images.clone()
        images[..., top:bottom, left:right] = others[..., top:bottom, left:right]
        lam = 1 - (bottom - top) * (right - left) / (height * width)
    else:
        images = lam * images + (1 - lam) * others
    return images, lam * labels + (1 - lam) * labels.flip(0)


class ImageCollator:
    """Makes batches; those of training views, which come with a "seed", are mixed."""

    def __init__(self, num_labels: int, mixup: float = 0.0, cutmix: float = 0.0):
        self.num_labels, self.mixup, self.cutmix = num_labels, mixup, cutmix

    def __call__(self, items: list[dict]) -> dict[str, torch.Tensor]:
        images = torch.stack([item["pixel_values"] for item in items])
        labels = torch.tensor([item["labels"] for item in items])
        if "seed" in items[0] and (self.mixup > 0 or self.cutmix > 0):
            rng = np.random.default_rng([item["seed"] for item in items])
            images, labels = mix(images, labels, self.num_labels, self.mixup, self.cutmix, rng)
        return {"pixel_values": images, "labels": labels}


__all__ = ["ImageCollator", "RepeatedSampler", "TrainingView", "draw_seed", "mix"]
