# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The image preprocessing of a page: that of the model's image processor, if the page implements it."""

from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import IMAGE_PROCESSOR_NAME, is_vision_available

from ..image_processing import make_image_processor
from ..model.configuration_tost_vision import ToSTVisionConfig


FILTERS = {2: "bilinear", 3: "bicubic"}  # of Pillow, by their numbers there


class Preprocessing(NamedTuple):
    """The steps of preprocessing, in order; sides in pixels."""

    shortest_edge: int | None  # resize the shorter side to this; None: both sides to `resized`
    resized: tuple[int, int] | None  # (height, width)
    filter: str  # "bilinear" or "bicubic"
    height: int  # of the center crop, the model's input
    width: int
    scale: float  # factor of the bytes
    mean: list[float]  # subtracted from each channel
    std: list[float]  # divisor of each channel


def read_preprocessing(config: ToSTVisionConfig, source: Path) -> Preprocessing:
    """The preprocessing of the image processor in the folder, or else of `make_image_processor`.

    Raises:
        ValueError: the page does not implement it, or the model does not accept its output.
        ImportError: Pillow is missing.
    """
    if not is_vision_available():
        raise ImportError("A page for images needs Pillow: pip install 'tost-hf[vision]'.")
    from transformers import ViTImageProcessorPil

    processor: Any = make_image_processor(config)
    if (source / IMAGE_PROCESSOR_NAME).is_file():
        try:
            processor = ViTImageProcessorPil.from_pretrained(source, local_files_only=True)
        except Exception as error:  # whatever a damaged file leads to
            raise ValueError(f"The image processor of {source} cannot be loaded: {error}") from error
    size, crop = dict(processor.size or {}), dict(processor.crop_size or {}) if processor.do_center_crop else None
    sides = {key: value for key, value in size.items() if value is not None}
    exact = (sides["height"], sides["width"]) if set(sides) == {"height", "width"} else None
    if not processor.do_resize or not (exact or set(sides) == {"shortest_edge"}) or int(processor.resample) not in FILTERS:
        raise ValueError(
            f"The page does not implement the preprocessing of the image processor of {source}: it supports resizing to a "
            f"height and width or to a shortest edge, with {' or '.join(FILTERS.values())} filters. Save "
            "make_image_processor(config) beside the model."
        )
    if crop is None and exact is None:
        raise ValueError(f"The image processor of {source} returns images of many shapes; the page needs one: crop them.")
    height, width = exact if crop is None and exact is not None else (crop["height"], crop["width"])  # type: ignore[index]
    if height % config.patch_size or width % config.patch_size or config.num_channels != 3:
        raise ValueError(
            f"The image processor of {source} returns RGB images of {height} x {width} pixels; the model takes "
            f"{config.num_channels} channels, and sides that are multiples of {config.patch_size}."
        )
    return Preprocessing(
        shortest_edge=sides.get("shortest_edge"),
        resized=exact,
        filter=FILTERS[int(processor.resample)],
        height=height,
        width=width,
        scale=processor.rescale_factor if processor.do_rescale else 1.0,
        mean=list(processor.image_mean) if processor.do_normalize else [0.0] * 3,
        std=list(processor.image_std) if processor.do_normalize else [1.0] * 3,
    )


__all__ = ["Preprocessing", "read_preprocessing"]
