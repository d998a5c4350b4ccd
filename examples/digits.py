# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a tiny ToST on scikit-learn's handwritten digits, real images of 8 x 8 pixels that need no download.

    python examples/digits.py --output_dir tost-digits

Takes about a minute of one CPU core. Prints the accuracy on digits kept aside, saves the model with its image processor, and
draws which head each patch of some digits belongs to (membership_maps.png).
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import TrainingArguments, set_seed

from tost_hf import ToSTForImageClassification, ToSTTrainer, ToSTVisionConfig
from tost_hf.image_processing import make_image_processor


matplotlib.use("Agg")
import matplotlib.pyplot as plt


SIZE = 16  # the digits are enlarged to 16 x 16 pixels, 8 x 8 patches of 2
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="tost-digits", help="where the model and the picture go")
    parser.add_argument("--num_train_epochs", type=float, default=30)
    parser.add_argument("--max_steps", type=int, default=-1, help="stop after so many steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    set_seed(args.seed)

    config = ToSTVisionConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        patch_size=2,
        image_size=SIZE,
        id2label=dict(enumerate(NAMES)),
        label2id={name: number for number, name in enumerate(NAMES)},
    )
    model = ToSTForImageClassification(config)
    processor = make_image_processor(config)

    digits = load_digits()
    pictures = (digits.images * (255 / 16)).round().astype(np.uint8)  # 1,797 of them, grey
    pixels = processor([Image.fromarray(picture) for picture in pictures], return_tensors="pt")["pixel_values"]
    examples = [{"pixel_values": image, "labels": int(label)} for image, label in zip(pixels, digits.target)]
    chosen, kept_aside = train_test_split(range(len(examples)), test_size=0.2, stratify=digits.target, random_state=args.seed)

    trainer = ToSTTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.output_dir,
            num_train_epochs=args.num_train_epochs,
            max_steps=args.max_steps,
            per_device_train_batch_size=64,
            per_device_eval_batch_size=360,
            learning_rate=2e-3,
            weight_decay=0.05,
            warmup_steps=0.1,
            lr_scheduler_type="cosine",
            logging_steps=50,
            save_strategy="no",
            seed=args.seed,
        ),
        train_dataset=[examples[i] for i in chosen],
        eval_dataset=[examples[i] for i in kept_aside],
        processing_class=processor,
        compute_metrics=lambda evaluated: {"accuracy": (evaluated.predictions.argmax(-1) == evaluated.label_ids).mean()},
    )
    trainer.train()
    trainer.save_model()
    accuracy = trainer.evaluate()["eval_accuracy"]
    print(f"Test accuracy on {len(kept_aside)} digits: {accuracy:.1%}")

    shown = kept_aside[:6]
    with torch.no_grad():
        outputs = model.eval()(pixels[shown].to(model.device), output_memberships=True)
    guesses = [NAMES[number] for number in outputs.logits.argmax(-1).tolist()]
    file = Path(args.output_dir) / "membership_maps.png"
    draw(pictures[shown], guesses, outputs.memberships[-1].cpu(), file)
    print(f"Membership maps: {file}")


def draw(pictures: np.ndarray, guesses: list[str], memberships: torch.Tensor, file: Path) -> None:
    """A row for each picture: itself, then each head's share of every patch in the last block."""
    side = SIZE // 2
    heads = memberships.shape[1]
    maps = memberships.unflatten(-1, (side, side))
    figure, axes = plt.subplots(
        len(pictures),
        1 + heads,
        figsize=(1.5 * (1 + heads) + 1, 1.5 * len(pictures) + 0.6),
        squeeze=False,
        layout="constrained",
    )
    for row, picture, guess, shares in zip(axes, pictures, guesses, maps):
        row[0].imshow(picture, cmap="gray")
        row[0].set_ylabel(guess)
        for axis, share in zip(row[1:], shares):
            drawn = axis.imshow(share, cmap="cividis", vmin=0, vmax=1)  # a colour map for the colour-blind, too
        for axis in row:
            axis.set(xticks=[], yticks=[])
    for axis, title in zip(axes[0], ["image", *(f"head {head + 1}" for head in range(heads))]):
        axis.set_title(title)
    figure.colorbar(drawn, ax=axes, label="membership", shrink=0.5)
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
