# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Images and texts that a user names, as model inputs and as the report shows them."""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F

from ..model.modeling_tost_vision import ToSTVisionPatchEmbeddings, ToSTVisionPreTrainedModel
from .trace import find_modules


if TYPE_CHECKING:
    from PIL import Image
    from transformers import BaseImageProcessor, PreTrainedTokenizerBase


MAX_SIDE = 2**13  # pixels


def require_extra(module: str):
    """Imports an optional module; the ImportError of a missing one says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"Looking inside a model needs {module.split('.')[0]}, which is missing: pip install 'tost-hf[vision]'."
        ) from error


class LoadedImage(NamedTuple):
    """An image as a model input, and as it is shown."""

    pixel_values: torch.Tensor  # (1, C, height, width); the sides are multiples of the patch size
    picture: torch.Tensor  # the same, (height, width, 3), float64 from 0 to 1
    source: str


def load_image(
    model: ToSTVisionPreTrainedModel,
    processor: "BaseImageProcessor | None",
    input: "str | os.PathLike | Image.Image",
    image_size: int | None = None,
) -> LoadedImage:
    """An image, or an image file, prepared by the processor (None: `make_image_processor`'s).

    Args:
        image_size: the shorter side to scale the whole image to, in place of the processor's resizing and cropping.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not an image, or it would become too small or too large.
        ImportError: Pillow is missing.
    """
    require_extra("PIL")
    from PIL import Image, ImageOps

    from ..image_processing import make_image_processor

    source = "an image in memory"
    if not isinstance(input, Image.Image):
        source = os.fspath(input)
        input = _open_image(source)
    image = ImageOps.exif_transpose(input).convert("L" if model.config.num_channels == 1 else "RGB")
    processor = processor or make_image_processor(model.config)
    patch_size = find_modules(model, ToSTVisionPatchEmbeddings)[0].patch_size
    options: dict[str, Any] = {}
    if image_size is not None:
        if image_size < patch_size:
            raise ValueError(f"image_size must be at least one patch ({patch_size} pixels), got {image_size}.")
        width, height = (_nearest_multiple(side * image_size / min(image.size), patch_size) for side in image.size)
        options = {"size": {"height": height, "width": width}, "do_resize": True, "do_center_crop": False}
    for name in ("size", "crop_size"):  # read from a file, and may ask for more memory than there is
        size = dict(options.get(name) or getattr(processor, name, None) or {})
        if not all(isinstance(side, int) and side <= MAX_SIDE for side in size.values()):
            raise ValueError(f"The image would be processed with {name} {size}; a side may have up to {MAX_SIDE:,} pixels.")
    try:
        pixel_values = processor(image, return_tensors="pt", **options)["pixel_values"]
        sides = [_nearest_multiple(side, patch_size) for side in pixel_values.shape[-2:]]
        if sides != list(pixel_values.shape[-2:]):
            pixel_values = F.interpolate(pixel_values, sides, mode="bicubic", antialias=True)
        picture = pixel_values[0].double()
        if getattr(processor, "do_normalize", False):
            mean, std = (torch.tensor(getattr(processor, name))[:, None, None] for name in ("image_mean", "image_std"))
            picture = picture * std + mean
    except Exception as error:  # the processor's settings are read from a file and may be anything
        raise ValueError(f"The image processor cannot prepare {source}; its settings may be wrong: {error}") from error
    return LoadedImage(pixel_values, picture.clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0), source)


def _open_image(source: str) -> "Image.Image":
    from PIL import Image

    if not os.path.isfile(source):
        raise FileNotFoundError(f"There is no file {source[:200]!r}: a vision model takes an image file.")
    try:
        image = Image.open(source)
        image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{source} is not an image that can be read ({error}).") from error
    return image


def _nearest_multiple(side: float, patch_size: int) -> int:
    return max(patch_size, round(side / patch_size) * patch_size)


def load_text(input: str | os.PathLike) -> tuple[str, str]:
    """The text, and its source.

    Args:
        input: a text, or a UTF-8 text file. A single word with a suffix or a path separator is read as a file name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not UTF-8, or the text is empty.
    """
    text, source = os.fspath(input), "a text, given directly"
    if os.path.isfile(text):  # False, not an error, for a text that is too long for a file name
        source = text
        try:
            text = Path(source).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{source} is not UTF-8 text; a language model takes a text.") from error
    elif isinstance(input, os.PathLike) or (len(text.split()) == 1 and (os.sep in text or Path(text).suffix)):
        raise FileNotFoundError(f"There is no file {text[:200]!r}.")
    if not text.strip():
        raise ValueError("The text is empty: there is nothing to inspect.")
    return text, source


def tokenize(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[torch.Tensor, list[str]]:
    """Token ids (1, T), and the piece of text of each token; joined, they are the whole text with its special tokens."""
    if not tokenizer.is_fast:
        ids = tokenizer(text, verbose=False)["input_ids"]
        return torch.tensor([ids]), [str(tokenizer.decode([i])) for i in ids]
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    pieces, end = [], 0
    for token, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"]):
        if start == stop:  # a special token, which is no part of the text
            pieces.append(str(tokenizer.decode([token])))
        else:  # from the previous end, as some offsets leave out spaces; "" for a token that completes a character
            pieces.append(text[end:stop])
            end = stop
    return torch.tensor([encoded["input_ids"]]), pieces


__all__ = ["LoadedImage", "load_image", "load_text", "require_extra", "tokenize"]
