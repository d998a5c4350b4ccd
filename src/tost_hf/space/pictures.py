# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""How a model's image processor prepares a picture, in the few steps that the page knows as well."""

from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import IMAGE_PROCESSOR_NAME, is_vision_available

from ..image_processing import make_image_processor
from ..model.configuration_tost_vision import ToSTVisionConfig


FILTERS = {2: "bilinear", 3: "bicubic"}  # of Pillow, by their numbers there


class Preparation(NamedTuple):
    """What is done to a picture, in this order; sides are pixels."""

    shortest_edge: int | None  # scale the shorter side to this; None: both sides to `resized`
    resized: tuple[int, int] | None  # (height, width)
    filter: str  # "bilinear" or "bicubic"
    height: int  # of the centre that is cut out, which the model sees
    width: int
    scale: float  # what the bytes are multiplied by
    mean: list[float]  # of each channel, taken off
    std: list[float]  # of each channel, divided by


def read_preparation(config: ToSTVisionConfig, source: Path) -> Preparation:
    """What the image processor in the folder does, or else the one of `make_image_processor`.

    Raises:
        ValueError: the page cannot do the same, or the model cannot take what comes out.
        ImportError: Pillow is missing.
    """
    if not is_vision_available():
        raise ImportError("A page for pictures needs Pillow: pip install 'tost-hf[vision]'.")
    from transformers import ViTImageProcessorPil

    processor: Any = make_image_processor(config)
    if (source / IMAGE_PROCESSOR_NAME).is_file():
        try:
            processor = ViTImageProcessorPil.from_pretrained(source, local_files_only=True)
        except Exception as error:  # of a file that may hold anything
            raise ValueError(f"The image processor of {source} cannot be loaded: {error}") from error
    size, crop = dict(processor.size or {}), dict(processor.crop_size or {}) if processor.do_center_crop else None
    sides = {key: value for key, value in size.items() if value is not None}
    exact = (sides["height"], sides["width"]) if set(sides) == {"height", "width"} else None
    if not processor.do_resize or not (exact or set(sides) == {"shortest_edge"}) or int(processor.resample) not in FILTERS:
        raise ValueError(
            f"The page cannot prepare pictures as the image processor of {source} does: it knows resizing to a height and "
            f"width or to a shortest edge, by {' or '.join(FILTERS.values())} filters. Save make_image_processor(config) "
            "beside the model."
        )
    if crop is None and exact is None:
        raise ValueError(f"The image processor of {source} gives pictures of many shapes; the page needs one: crop them.")
    height, width = exact if crop is None and exact is not None else (crop["height"], crop["width"])  # type: ignore[index]
    if height % config.patch_size or width % config.patch_size or config.num_channels != 3:
        raise ValueError(
            f"The image processor of {source} gives RGB pictures of {height} x {width} pixels; the model takes "
            f"{config.num_channels} channels, and sides that are multiples of {config.patch_size}."
        )
    return Preparation(
        shortest_edge=sides.get("shortest_edge"),
        resized=exact,
        filter=FILTERS[int(processor.resample)],
        height=height,
        width=width,
        scale=processor.rescale_factor if processor.do_rescale else 1.0,
        mean=list(processor.image_mean) if processor.do_normalize else [0.0] * 3,
        std=list(processor.image_std) if processor.do_normalize else [1.0] * 3,
    )


__all__ = ["Preparation", "read_preparation"]
