# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Prints the five best classes of an image, without PyTorch and tost_hf: python classify.py picture.png"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from runtime import load


FOLDER = Path(__file__).parent


def compute_scores(logits: np.ndarray, function_to_apply: str) -> np.ndarray:
    """The scores of transformers' image classification pipeline; `function_to_apply` is "softmax", "sigmoid" or "none"."""
    if function_to_apply == "softmax":
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()
    return np.exp(-np.logaddexp(0, -logits)) if function_to_apply == "sigmoid" else logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture")
    args = parser.parse_args()
    if sys.stdout.errors == "strict":  # its encoding may lack characters of the output
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # before its import, which warns if there is no PyTorch
    from transformers import AutoImageProcessor
    from transformers.image_utils import load_image

    try:
        source = Image.open(args.picture)
        image = load_image(source)  # in RGB, with its EXIF orientation
    except OSError as error:  # there is no such file, or it is no image
        parser.error(f"{args.picture} cannot be read: {error}")
    if source.mode[0] in "IF":
        parser.error(f"{args.picture} has more than 8 bits per channel (mode {source.mode}): scale its values to 0 to 255.")
    metadata = json.loads((FOLDER / "export.json").read_text(encoding="utf-8"))
    if metadata["inputs"][0]["shape"][1] == 1:
        image = image.convert("L")
    processor = AutoImageProcessor.from_pretrained(FOLDER, backend="pil")
    inputs = {"pixel_values": processor(image, return_tensors="np")["pixel_values"]}
    function_to_apply = metadata["function_to_apply"]
    scores = compute_scores(load(FOLDER, metadata)(inputs)["logits"][0], function_to_apply)
    number_format = "8.4g" if function_to_apply == "none" else "6.1%"
    for label in np.argsort(-scores)[:5]:
        print(f"{scores[label]:{number_format}}  {metadata['labels'][label]}")


if __name__ == "__main__":
    main()
