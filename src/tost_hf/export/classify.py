# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Prints the five most probable classes of an image, without tost_hf: python classify.py picture.png"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image
from runtime import load


FOLDER = Path(__file__).parent
DEFAULTS = {  # of ViTImageProcessor in transformers, whose settings these are
    "do_resize": True,
    "resample": Image.Resampling.BILINEAR,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": 0.5,
    "image_std": 0.5,
}


def prepare(picture: Image.Image, facts: dict, settings: dict) -> np.ndarray:
    """Pixel values (1, channels, height, width), by the settings of the image processor and as that computes them.

    The picture may have any mode: it is converted to the channels of the program, transparent parts becoming white.
    """
    settings = DEFAULTS | {name: value for name, value in settings.items() if value is not None}
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    picture = picture.convert("L" if facts["inputs"][0]["shape"][1] == 1 else "RGB")
    if settings["do_resize"]:
        picture = picture.resize(_sides(settings.get("size", facts["image_size"]), picture), settings["resample"])
    if settings.get("do_center_crop"):
        width, height = _sides(settings["crop_size"], picture)
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        picture = picture.crop((left, top, left + width, top + height))  # black where the picture is smaller
    pixels = np.atleast_3d(np.asarray(picture)).transpose(2, 0, 1)
    if settings["do_rescale"]:
        pixels = pixels.astype(np.float64) * settings["rescale_factor"]
    pixels = pixels.astype(np.float32)
    if settings["do_normalize"]:
        mean, std = (np.array(settings[name], np.float32).reshape(-1, 1, 1) for name in ("image_mean", "image_std"))
        pixels = (pixels - mean) / std
    return pixels[None]


def _sides(size: dict | list[int] | int, picture: Image.Image) -> tuple[int, int]:
    """Width and height that a setting asks for: a side, height and width, or the shortest edge of the picture resized."""
    if isinstance(size, dict) and size.get("shortest_edge"):
        width, height = (int(size["shortest_edge"] * side / min(picture.size)) for side in picture.size)
    elif isinstance(size, dict):
        height, width = size["height"], size["width"]
    else:
        height, width = (size, size) if isinstance(size, int) else size
    return width, height


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture")
    args = parser.parse_args()
    facts = json.loads((FOLDER / "export.json").read_text(encoding="utf-8"))
    processor = FOLDER / "preprocessor_config.json"
    settings = json.loads(processor.read_text(encoding="utf-8")) if processor.is_file() else {}
    logits = load(FOLDER, facts)({"pixel_values": prepare(Image.open(args.picture), facts, settings)})["logits"][0]
    weights = np.exp(logits - logits.max())
    for label in np.argsort(-weights)[:5]:
        print(f"{weights[label] / weights.sum():6.1%}  {facts['labels'][label]}")


if __name__ == "__main__":
    main()
