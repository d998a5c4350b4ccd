# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a tiny ToST on scikit-learn's handwritten digits, real images of 8 x 8 pixels that need no download.

    python examples/digits.py --output_dir tost-digits

It takes about a minute on one CPU core. It prints the accuracy on held-out digits, saves the model with its image processor,
and plots the memberships of a digit's patches in every layer and head (membership_maps.png).
"""

import argparse
from pathlib import Path

import script_setup  # noqa: F401
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import TrainingArguments, set_seed

from tost_hf import ToSTForImageClassification, ToSTTrainer, ToSTVisionConfig
from tost_hf.image_processing import make_image_processor
from tost_hf.interpret import membership_maps, trace_model
from tost_hf.interpret.plots import plot_membership_maps


SIZE = 16  # the digits are enlarged to 16 x 16 pixels, 8 x 8 patches of 2
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="tost-digits", help="folder of the model and the picture")
    parser.add_argument("--num_train_epochs", type=float, default=30)
    parser.add_argument("--max_steps", type=int, default=-1, help="maximum number of steps")
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
    images = (digits.images * (255 / 16)).round().astype(np.uint8)  # 1,797, grayscale
    pixels = processor([Image.fromarray(image) for image in images], return_tensors="pt")["pixel_values"]
    examples = [{"pixel_values": pixel_values, "labels": int(label)} for pixel_values, label in zip(pixels, digits.target)]
    train, test = train_test_split(range(len(examples)), test_size=0.2, stratify=digits.target, random_state=args.seed)

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
        train_dataset=[examples[i] for i in train],
        eval_dataset=[examples[i] for i in test],
        processing_class=processor,
        compute_metrics=lambda result: {"accuracy": (result.predictions.argmax(-1) == result.label_ids).mean()},
    )
    trainer.train()
    trainer.save_model()
    accuracy = trainer.evaluate()["eval_accuracy"]
    print(f"Test accuracy on {len(test)} digits: {accuracy:.1%}")

    index = test[0]
    maps = membership_maps(trace_model(model, pixel_values=pixels[[index]]))[0]
    image = torch.tensor(digits.images[index] / 16)[..., None].expand(-1, -1, 3)  # one pixel for each patch
    file = Path(args.output_dir) / "membership_maps.png"
    plot_membership_maps(maps, image, range(len(maps))).savefig(file)
    print(f"Membership maps of a digit ({NAMES[digits.target[index]]}): {file}")


if __name__ == "__main__":
    main()
