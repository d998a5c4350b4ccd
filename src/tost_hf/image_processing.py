# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The image processor of ToST vision models: that of transformers' ViT, with the authors' two evaluation crops."""

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
    """The processor that converts images of any size to `pixel_values`, normalised with ImageNet's mean and deviation.

    For RGB models it converts images of any mode. For models of grey images, `num_channels=1`, it accepts grey images only,
    `image.convert("L")`, and rejects others: transformers has no setting that converts to grey.

    Args:
        config_or_size: the configuration of a model, whose `image_size` and `num_channels` are used, or the side or (height,
            width) of RGB images.
        crop: "center" resizes the shorter side and crops the centre, as after pre-training; "squash" resizes both sides,
            whatever the aspect ratio, as after fine-tuning.

    Returns:
        A processor that works without torchvision. `save_pretrained` saves it, `AutoImageProcessor` loads it. Its
        `pixel_values` have shape (images, channels, height, width).

    Raises:
        ImportError: Pillow is not installed.
        ValueError: `crop` is neither of these, a side is below 1, or the model has neither 3 channels nor 1.

    Example:
        >>> processor = make_image_processor(model.config)
        >>> logits = model(**processor(Image.open("cat.png"), return_tensors="pt")).logits
    """
    from transformers import ViTImageProcessorPil  # needs Pillow, the models do not
    from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, PILImageResampling

    if crop not in CROPS:
        raise ValueError(f"crop must be one of {', '.join(CROPS)}, got {crop!r}.")
    image_size = getattr(config_or_size, "image_size", config_or_size)
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if min(height, width) < 1:
        raise ValueError(f"The sides of an image must be at least 1, got {height} x {width}.")
    num_channels = getattr(config_or_size, "num_channels", 3)
    if num_channels not in (1, 3):
        raise ValueError(f"There are image processors for RGB and grey images; the model has {num_channels} channels.")
    mean, std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    if num_channels == 1:
        mean, std = ([sum(values) / 3] for values in (mean, std))
    output_size = {"height": height, "width": width}
    do_center_crop = crop == "center"
    return ViTImageProcessorPil(
        do_convert_rgb=num_channels == 3,
        size={"shortest_edge": max(height, width)} if do_center_crop else output_size,
        resample=PILImageResampling.BICUBIC,
        do_center_crop=do_center_crop,
        crop_size=output_size if do_center_crop else None,
        image_mean=mean,
        image_std=std,
    )


def save_image_processor(config: "ToSTVisionConfig", folder: Path) -> None:
    """Saves the image processor of a model beside its weights; warns if it has none, or if Pillow is missing."""
    if not is_vision_available():
        logger.warning("Pillow is not installed, so the folder gets no image processor.")
    elif config.num_channels not in (1, 3):
        logger.warning(f"The folder gets no image processor: there is none for images of {config.num_channels} channels.")
    else:
        make_image_processor(config).save_pretrained(folder)


__all__ = ["CROPS", "make_image_processor", "save_image_processor"]
