# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Prints the five most probable classes of an image, without tost_hf: python classify.py picture.png"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from runtime import load


FOLDER = Path(__file__).parent
DEFAULTS = {  # of transformers' ViTImageProcessor
    "do_resize": True,
    "resample": Image.Resampling.BILINEAR,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": 0.5,
    "image_std": 0.5,
}


def preprocess(image: Image.Image, metadata: dict, settings: dict) -> np.ndarray:
    """Pixel values (1, channels, height, width), computed like the image processor with these settings.

    The image may have any mode of 8 bits per channel: it is converted to the channels of the program, with a white background.
    """
    if image.mode[0] in "IF":
        raise ValueError(f"The image has more than 8 bits per channel (mode {image.mode}): scale its values to 0 to 255.")
    settings = DEFAULTS | {name: value for name, value in settings.items() if value is not None}
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    image = image.convert("L" if metadata["inputs"][0]["shape"][1] == 1 else "RGB")
    if settings["do_resize"]:
        image = image.resize(_output_size(settings.get("size", metadata["image_size"]), image), settings["resample"])
    if settings.get("do_center_crop"):
        width, height = _output_size(settings["crop_size"], image)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))  # pads smaller images with black
    pixels = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
    if settings["do_rescale"]:
        pixels = pixels.astype(np.float64) * settings["rescale_factor"]
    pixels = pixels.astype(np.float32)
    if settings["do_normalize"]:
        mean, std = (np.array(settings[name], np.float32).reshape(-1, 1, 1) for name in ("image_mean", "image_std"))
        pixels = (pixels - mean) / std
    return pixels[None]


def _output_size(size: dict | list[int] | int, image: Image.Image) -> tuple[int, int]:
    """Width and height for a `size` setting: a number, [height, width], or a dict of height and width or shortest edge."""
    if isinstance(size, dict) and size.get("shortest_edge"):
        width, height = (int(size["shortest_edge"] * side / min(image.size)) for side in image.size)
    elif isinstance(size, dict):
        height, width = size["height"], size["width"]
    else:
        height, width = (size, size) if isinstance(size, int) else size
    return width, height


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture")
    args = parser.parse_args()
    if sys.stdout.errors == "strict":  # its encoding may lack characters of the output
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        image = Image.open(args.picture)
    except OSError as error:  # there is no such file, or it is no image
        parser.error(f"{args.picture} cannot be read: {error}")
    metadata = json.loads((FOLDER / "export.json").read_text(encoding="utf-8"))
    processor = FOLDER / "preprocessor_config.json"
    settings = json.loads(processor.read_text(encoding="utf-8")) if processor.is_file() else {}
    pixel_values = preprocess(image, metadata, settings)
    logits = load(FOLDER, metadata)({"pixel_values": pixel_values})["logits"][0]
    weights = np.exp(logits - logits.max())
    for label in np.argsort(-weights)[:5]:
        print(f"{weights[label] / weights.sum():6.1%}  {metadata['labels'][label]}")


if __name__ == "__main__":
    main()
