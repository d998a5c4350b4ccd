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
    """The processor that turns pictures of any size into `pixel_values` with ImageNet's statistics.

    For models of RGB images it converts pictures of any mode. For models of grey images, `num_channels=1`, it takes grey
    pictures alone, `picture.convert("L")`, and rejects others: transformers has no setting that converts to grey.

    Args:
        config_or_size: the configuration of a model, whose `image_size` and `num_channels` are used, or a side, or (height,
            width), of RGB images.
        crop: "center" resizes the shorter side and cuts out the centre, as after pre-training; "squash" resizes both sides
            whatever the shape of the picture, as after fine-tuning.

    Returns:
        A processor that works without torchvision. `save_pretrained` writes it, `AutoImageProcessor` reads it back. Its
        `pixel_values` have shape (images, channels, height, width).

    Raises:
        ImportError: Pillow is not installed.
        ValueError: `crop` is neither, a side is below 1, or the model takes neither 3 channels nor 1.

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
    channels = getattr(config_or_size, "num_channels", 3)
    if channels not in (1, 3):
        raise ValueError(f"There are image processors for RGB and grey images; the model takes {channels} channels.")
    mean, std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    if channels == 1:
        mean, std = ([sum(values) / 3] for values in (mean, std))
    exact = {"height": height, "width": width}
    centered = crop == "center"
    return ViTImageProcessorPil(
        do_convert_rgb=channels == 3,
        size={"shortest_edge": max(height, width)} if centered else exact,
        resample=PILImageResampling.BICUBIC,
        do_center_crop=centered,
        crop_size=exact if centered else None,
        image_mean=mean,
        image_std=std,
    )


def save_image_processor(config: "ToSTVisionConfig", folder: Path) -> None:
    """Writes the processor of a model beside its weights; warns where there is none for it, or no Pillow to make it."""
    if not is_vision_available():
        logger.warning("Pillow is not installed, so the folder gets no image processor.")
    elif config.num_channels not in (1, 3):
        logger.warning(f"The folder gets no image processor: there is none for images of {config.num_channels} channels.")
    else:
        make_image_processor(config).save_pretrained(folder)


__all__ = ["CROPS", "make_image_processor", "save_image_processor"]
