# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Prints the five most probable classes of an image, without tost_hf: python classify.py picture.png"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image
from runtime import load


FOLDER = Path(__file__).parent


def prepare(picture: Image.Image, facts: dict, settings: dict) -> np.ndarray:
    """Pixel values (1, channels, height, width), by the settings of the image processor."""
    sizes = settings.get("size") or {}
    side = facts["image_size"] if isinstance(facts["image_size"], int) else max(facts["image_size"])
    picture = picture.convert("L" if facts["inputs"][0]["shape"][1] == 1 else "RGB")
    shortest = sizes.get("shortest_edge")
    if shortest is None:
        picture = picture.resize((sizes.get("width", side), sizes.get("height", side)), Image.Resampling.BICUBIC)
    else:
        scale = shortest / min(picture.size)
        picture = picture.resize([round(n * scale) for n in picture.size], Image.Resampling.BICUBIC)
    if settings.get("do_center_crop"):
        crop = settings["crop_size"]
        left, top = (picture.width - crop["width"]) // 2, (picture.height - crop["height"]) // 2
        picture = picture.crop((left, top, left + crop["width"], top + crop["height"]))
    pixels = np.asarray(picture, np.float32)
    pixels = pixels.reshape(*pixels.shape[:2], -1) * settings.get("rescale_factor", 1 / 255)
    if settings.get("do_normalize", True):
        pixels = (pixels - np.array(settings.get("image_mean", 0.5))) / np.array(settings.get("image_std", 0.5))
    return pixels.transpose(2, 0, 1)[None].astype(np.float32)


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
