# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The image processor of ToST vision models: that of transformers' ViT, with the authors' two evaluation crops."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import ViTImageProcessorPil
from transformers.image_utils import is_pil_image
from transformers.utils import is_vision_available

from .extras import require


if TYPE_CHECKING:
    from PIL.Image import Image

    from .model.configuration_tost_vision import ToSTVisionConfig

logger = logging.getLogger(__name__)

CROPS = ("center", "squash")


def open_image(image: "str | os.PathLike | Image") -> "Image":
    """Opens an image file, or takes a Pillow image, and turns it upright by its EXIF orientation, as transformers does.

    Raises:
        OSError, ValueError: there is no such file, or it is no image, or one of more than 8 bits per channel.
        ImportError: Pillow is not installed.
    """
    require("PIL", "app")
    from PIL import Image, ImageOps, UnidentifiedImageError

    opened = image
    if not isinstance(opened, Image.Image):
        if not os.path.isfile(opened):
            raise FileNotFoundError(f"There is no file {os.fspath(opened)[:200]!r}; this model reads images.")
        try:
            opened = Image.open(opened)
        except UnidentifiedImageError:
            raise ValueError(f"{str(image)!r} is not an image; this model reads images.") from None
    _check_depth(opened)
    return ImageOps.exif_transpose(opened)


def convert_image(image: "Image", num_channels: int) -> "Image":
    """Converts a Pillow image of any mode to RGB, or to gray for `num_channels=1`; transparent ones are put on white.

    Raises:
        ValueError: it has more than 8 bits per channel.
    """
    from PIL import Image

    _check_depth(image)
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("L" if num_channels == 1 else "RGB")


def _check_depth(image: "Image") -> None:
    if image.mode[0] in "IF":
        raise ValueError(
            f"The image has more than 8 bits per channel (mode {image.mode}), and nearly all of it would turn white or black: "
            "scale its values to 0 to 255 and convert it to mode L."
        )


class _StrictImageProcessor(ViTImageProcessorPil):
    """Rejects Pillow images that transformers would misread; saved as its base class, which loads without this package."""

    do_convert_rgb: bool

    def process_image(self, image, *args, **kwargs):
        if is_pil_image(image):
            _check_depth(image)
            if not self.do_convert_rgb and image.mode != "L":
                raise ValueError(f'The model is for gray images, got one of mode {image.mode}: pass image.convert("L").')
        return super().process_image(image, *args, **kwargs)


_StrictImageProcessor.__name__ = ViTImageProcessorPil.__name__  # by which transformers saves it


def make_image_processor(
    config_or_size: "ToSTVisionConfig | int | tuple[int, int]", crop: str | None = None
) -> ViTImageProcessorPil:
    """The processor that converts images of any size to `pixel_values`, normalized with ImageNet's mean and deviation.

    For RGB models it converts images of any mode with 8 bits per channel. For models of gray images, `num_channels=1`, it
    accepts gray images only, `image.convert("L")`: transformers has no setting that converts to gray. It rejects others. Once
    saved and loaded it is transformers' own class, which reads the indices of a palette and the bits of a bilevel image as
    gray values, and clips 16-bit images.

    Args:
        config_or_size: the configuration of a model, whose `image_size` and `num_channels` are used, or the side or (height,
            width) of RGB images.
        crop: "center" resizes the shorter side and crops the center, as after pre-training; "squash" resizes both sides,
            whatever the aspect ratio, as after fine-tuning. Default: "center" for square images, "squash" for others, which
            transformers cannot resize to the smallest size that covers them.

    Returns:
        A processor that works without torchvision. `save_pretrained` saves it, `AutoImageProcessor` loads it. Its
        `pixel_values` have shape (images, channels, height, width).

    Raises:
        ImportError: Pillow is not installed.
        ValueError: `crop` is neither of these or "center" for images that are not square, a side is below 1, or the model
            has neither 3 channels nor 1.

    Example:
        >>> processor = make_image_processor(model.config)
        >>> logits = model(**processor(Image.open("cat.png"), return_tensors="pt")).logits
    """
    from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, PILImageResampling

    if crop not in (None, *CROPS):
        raise ValueError(f"crop must be one of {', '.join(CROPS)}, got {crop!r}.")
    image_size = getattr(config_or_size, "image_size", config_or_size)
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if min(height, width) < 1:
        raise ValueError(f"The sides of an image must be at least 1, got {height} x {width}.")
    num_channels = getattr(config_or_size, "num_channels", 3)
    if num_channels not in (1, 3):
        raise ValueError(f"There are image processors for RGB and gray images; the model has {num_channels} channels.")
    mean, std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    if num_channels == 1:
        mean, std = ([sum(values) / 3] for values in (mean, std))
    output_size = {"height": height, "width": width}
    if crop == "center" and height != width:
        raise ValueError(
            f"There is no center crop of {height} x {width} pixels: transformers resizes the shorter side, to one size for "
            'images of any shape. Choose crop="squash".'
        )
    do_center_crop = height == width and crop != "squash"
    return _StrictImageProcessor(
        do_convert_rgb=num_channels == 3,
        size={"shortest_edge": height} if do_center_crop else output_size,
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


__all__ = ["CROPS", "convert_image", "make_image_processor", "open_image", "save_image_processor"]
