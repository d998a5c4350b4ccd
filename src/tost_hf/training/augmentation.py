# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Image augmentation for training. Each random view depends only on its seed, so that a resumed run repeats it exactly.

The operations are Kornia's, which is maintained, Apache-licensed and needs only PyTorch. timm, the origin of the recipe,
needs torchvision; Albumentations has not been maintained since 2025, and its successor is AGPL. Mixup and CutMix are
implemented here, as Kornia's Mixup does not sample from a Beta distribution.
"""

import math

import numpy as np
import torch
from kornia.augmentation import RandomErasing
from kornia.augmentation.auto import RandAugment
from kornia.augmentation.random_generator import ResizedCropGenerator
from PIL import Image
from torch import nn
from torch.nn import functional as F


MAX_MAGNITUDE = 30  # of RandAugment, as in its paper

# (operation, value at magnitude 0, value at magnitude 30): timm's "increasing" set. Operations with two directions are listed
# once per direction, the others twice, so that all are equally likely.
_ONE_DIRECTION = [
    ("auto_contrast", 0, 1),
    ("equalize", 0, 1),
    ("invert", 0, 1),
    ("rotate", -30.0, 30.0),  # degrees
    ("posterize", 1.0, 4.0),  # bits, from the most to the fewest
    ("solarize_add", 0.0, 0.43),
    ("shear_x", -0.093, 0.093),  # half turns: a slope of 0.3
    ("shear_y", -0.093, 0.093),
    ("translate_x", -0.45, 0.45),
    ("translate_y", -0.45, 0.45),
]
# Kornia's contrast multiplies pixel values, as Pillow's brightness does; Kornia's brightness adds a constant, which is harsher
_FACTORS_ABOVE_1 = [("color", 1.0, 1.9), ("contrast", 1.0, 1.9), ("sharpness", 1.0, 1.9), ("brightness", 1.0, 1.45)]
_FACTORS_BELOW_1 = [("color", 0.1, 1.0), ("contrast", 0.1, 1.0), ("sharpness", 0.1, 1.0), ("brightness", 0.55, 1.0)]
_INCREASING = 2 * _ONE_DIRECTION + _FACTORS_ABOVE_1
_DECREASING = 2 * [("solarize", 0.0, 1.0)] + _FACTORS_BELOW_1  # the lower the value the stronger


class TrainingView:
    """A random view of an image: crop, flip, RandAugment, normalization, erasing. The same seed returns the same view.

    Args:
        size: (height, width) of the view.
        mean, std: per-channel mean and standard deviation for normalization.
        operations: number of RandAugment operations to choose.
        magnitude: their strength, from 0 to 30 (timm's m9 is 27).
        magnitude_std: standard deviation of the strength (timm's mstd0.5 is 1.5).
        probability: of applying a chosen operation.
        erasing: probability of erasing a rectangle.
        scale: range of the cropped fraction of the image's area.
        padding: if above 0, the image is resized as a whole, and the crop, of the view's size, is from the image with this
            many reflected pixels on each side, as is usual for small images; below the view's sides.
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
        padding: int = 0,
    ):
        height, width = size
        if not 0 <= padding < min(size):
            raise ValueError(f"padding must be from 0 to {min(size) - 1}, below the view's sides, got {padding}.")
        self.size, self.padding = (height, width), padding
        self.operations, self.probability = operations, probability
        self.magnitude, self.magnitude_std = magnitude, magnitude_std
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
        aspect = width / height  # views of any shape distort an image alike, by up to a third
        self.crop = ResizedCropGenerator(self.size, scale, (3 / 4 * aspect, 4 / 3 * aspect))
        self.increasing, self.decreasing = (
            RandAugment(1, 1, [[entry] for entry in entries]) for entries in (_INCREASING, _DECREASING)
        )
        self.erase = RandomErasing(p=erasing) if erasing > 0 else nn.Identity()

    @torch.no_grad()
    def __call__(self, image: Image.Image, seed: int) -> torch.Tensor:
        """Returns the view (3, height, width) of an RGB image."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed the GPUs
            x = self._crop(image)
            if torch.rand(()) < 0.5:
                x = x.flip(-1)
            for _ in range(self.operations):
                if torch.rand(()) < self.probability:
                    x = self._distort(x)
            return self.erase((x - self.mean) / self.std)[0]

    def _crop(self, image: Image.Image) -> torch.Tensor:
        """A random crop (1, 3, height, width), from 0 to 1."""
        (height, width), padding = self.size, self.padding
        box = None
        if padding == 0:
            corners = self.crop(torch.Size((1, 3, image.height, image.width)))["src"][0]
            (left, top), (right, bottom) = corners[0].tolist(), corners[2].tolist()
            box = (left, top, right + 1, bottom + 1)
        # resized by Pillow, as in evaluation: Kornia would not antialias when downscaling
        view = image.resize((width, height), Image.Resampling.BICUBIC, box=box)
        x = torch.from_numpy(np.array(view)).permute(2, 0, 1)[None].float() / 255
        if padding > 0:
            top, left = torch.randint(2 * padding + 1, (2,)).tolist()
            x = F.pad(x, (padding,) * 4, mode="reflect")[..., top : top + height, left : left + width]
        return x

    def _distort(self, x: torch.Tensor) -> torch.Tensor:
        magnitude = float(torch.normal(float(self.magnitude), float(self.magnitude_std), ()))
        magnitude = min(max(magnitude, 1e-3), MAX_MAGNITUDE - 1e-3)
        increasing = torch.rand(()) < len(_INCREASING) / len(_INCREASING + _DECREASING)
        rand_augment = self.increasing if increasing else self.decreasing
        # Kornia annotates `m` as an int, but accepts floats
        rand_augment.m = magnitude if increasing else MAX_MAGNITUDE - magnitude  # type: ignore[assignment]
        return rand_augment(x)


class EpochOrder:
    """Maps a position in an epoch to (index, draw): each image `repeats` times in a row, each time with another draw number.

    The length of an epoch does not change, so that it contains only one in `repeats` images (repeated augmentation, arXiv
    1901.09335). The order depends on the seed and the epoch. A data set that has it is read sequentially
    (`train_sampling_strategy="sequential"`), and passes on `set_epoch`, which Accelerate calls.
    """

    def __init__(self, length: int, repeats: int = 1, seed: int = 0):
        self.length, self.repeats, self.seed = length, repeats, seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # for the workers of a loader, if they persist
        self._permutation: tuple[int, np.ndarray] = (-1, np.empty(0))  # of an epoch

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __getitem__(self, position: int) -> tuple[int, int]:
        epoch = int(self._epoch)
        if self._permutation[0] != epoch:
            self._permutation = (epoch, np.random.default_rng((self.seed, epoch)).permutation(self.length))
        return int(self._permutation[1][position // self.repeats]), epoch * self.repeats + position % self.repeats


def draw_seed(seed: int, index: int, draw: int) -> int:
    """The seed of one draw of one image, independent of all other draws."""
    return int(np.random.SeedSequence((seed, index, draw)).generate_state(1, np.uint64)[0] >> 1)


def mix(
    images: torch.Tensor, labels: torch.Tensor, num_labels: int, mixup: float, cutmix: float, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixes each image with its counterpart in the flipped batch by Mixup or CutMix, one of them per batch, as timm does.

    Args:
        images: (B, C, height, width).
        labels: (B,), class indices.
        num_labels: number of classes K.
        mixup, cutmix: alpha of the Beta distribution; 0 to disable.
        rng: random number generator.

    Returns:
        The mixed images and their soft labels (B, K).
    """
    labels = F.one_hot(labels, num_labels).float()
    use_cutmix = cutmix > 0 and (mixup == 0 or rng.random() < 0.5)
    alpha = cutmix if use_cutmix else mixup
    lam = float(rng.beta(alpha, alpha))  # weight of the original image
    flipped_images = images.flip(0)
    if use_cutmix:
        height, width = images.shape[-2:]
        y, x = rng.integers(height), rng.integers(width)
        half = math.sqrt(1 - lam) / 2
        top, bottom = max(0, int(y - half * height)), min(height, int(y + half * height))
        left, right = max(0, int(x - half * width)), min(width, int(x + half * width))
        images = images.clone()
        images[..., top:bottom, left:right] = flipped_images[..., top:bottom, left:right]
        lam = 1 - (bottom - top) * (right - left) / (height * width)
    else:
        images = lam * images + (1 - lam) * flipped_images
    return images, lam * labels + (1 - lam) * labels.flip(0)


class ImageCollator:
    """Collates images; applies Mixup or CutMix to training views, which have a "seed"."""

    def __init__(self, num_labels: int, mixup: float = 0.0, cutmix: float = 0.0):
        self.num_labels, self.mixup, self.cutmix = num_labels, mixup, cutmix

    def __call__(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        images = torch.stack([example["pixel_values"] for example in examples])
        labels = torch.tensor([example["labels"] for example in examples])
        if "seed" in examples[0] and (self.mixup > 0 or self.cutmix > 0):
            rng = np.random.default_rng([example["seed"] for example in examples])
            images, labels = mix(images, labels, self.num_labels, self.mixup, self.cutmix, rng)
        return {"pixel_values": images, "labels": labels}


__all__ = ["EpochOrder", "ImageCollator", "TrainingView", "draw_seed", "mix"]
