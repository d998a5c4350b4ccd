# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The image processor of ToST vision models: transformers' own of ViT, with the authors' two evaluation crops."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils import is_vision_available


if TYPE_CHECKING:
    from transformers import ViTImageProcessorPil

    from .model.configuration_tost_vision import ToSTVisionConfig

logger = logging.getLogger(__name__)

CROPS = ("center", "squash")


def make_image_processor(
    config_or_size: "ToSTVisionConfig | int | tuple[int, int]", crop: str = "center"
) -> "ViTImageProcessorPil":
    """The processor that turns pictures of any size and mode into RGB `pixel_values` with ImageNet's statistics.

    Args:
        config_or_size: the configuration of a model, whose `image_size` is used, or a side, or (height, width).
        crop: "center" resizes the shorter side and cuts out the centre, as after pre-training; "squash" resizes both sides
            whatever the shape of the picture, as after fine-tuning.

    Returns:
        A processor that works without torchvision. `save_pretrained` writes it, `AutoImageProcessor` reads it back. Its
        `pixel_values` have shape (images, 3, height, width).

    Raises:
        ImportError: Pillow is not installed.
        ValueError: `crop` is neither, or a side is below 1.

    Example:
        >>> processor = make_image_processor(model.config)
        >>> logits = model(**processor(Image.open("cat.png"), return_tensors="pt")).logits
    """
    from transformers import ViTImageProcessorPil  # needs Pillow, which the models do not
    from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, PILImageResampling

    if crop not in CROPS:
        raise ValueError(f"crop must be one of {', '.join(CROPS)}, got {crop!r}.")
    sides = getattr(config_or_size, "image_size", config_or_size)
    height, width = (sides, sides) if isinstance(sides, int) else sides
    if min(height, width) < 1:
        raise ValueError(f"The sides of an image must be at least 1, got {height} x {width}.")
    exact = {"height": height, "width": width}
    centered = crop == "center"
    return ViTImageProcessorPil(
        do_convert_rgb=True,
        size={"shortest_edge": max(height, width)} if centered else exact,
        resample=PILImageResampling.BICUBIC,
        do_center_crop=centered,
        crop_size=exact if centered else None,
        image_mean=IMAGENET_DEFAULT_MEAN,
        image_std=IMAGENET_DEFAULT_STD,
    )


def save_image_processor(config: "ToSTVisionConfig", folder: Path) -> None:
    """Writes the processor of a model beside its weights; without Pillow it warns and writes none."""
    if is_vision_available():
        make_image_processor(config).save_pretrained(folder)
    else:
        logger.warning("Pillow is not installed, so the folder gets no image processor.")


__all__ = ["CROPS", "make_image_processor", "save_image_processor"]
