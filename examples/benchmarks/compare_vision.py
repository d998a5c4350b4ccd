# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The three trunks of the vision model trained alike on CIFAR-10: TSSA, cross-covariance (XCA) and softmax attention.

    python examples/benchmarks/compare_vision.py --images CIFAR10_FOLDER
    python examples/benchmarks/compare_vision.py --images CIFAR10_FOLDER --steps 2400 --every 300 --seeds 0

Same stem, positions, class attention, width, depth, data and steps; only the attention over the patches differs. The folder
(or Hub id, uoft-cs/cifar10) holds a training and a test split with an image and a label column. Pictures are flipped and
shifted by up to four pixels, nothing else. A comparison of minutes, far from convergence.
"""

from dataclasses import dataclass

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Image, load_dataset
from experiments import Results, make_parser, train
from rows import parse_arguments
from torch.nn import functional as F
from transformers import TrainerCallback
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from tost_hf import ToSTForImageClassification, ToSTVisionConfig


ATTENTION_TYPES = {"TSSA": "tssa", "XCA": "xca", "softmax": "softmax"}
SHIFT = 4  # pixels


@dataclass
class Images:
    """A split, all in memory: `pixels` (N, 3, height, width) as bytes, `labels` (N,) and the classes' names."""

    pixels: torch.Tensor
    labels: torch.Tensor
    names: list[str]

    def examples(self, augmented: bool) -> list[dict]:
        return [{"pixels": x, "labels": int(y), "augmented": augmented} for x, y in zip(self.pixels, self.labels)]


def load_images(name: str, limit: int | None = None) -> tuple[Images, Images]:
    """Training and test images of a folder or a Hub dataset; `limit` takes the first test images only."""
    splits = load_dataset(name)
    return read_split(splits["train"]), read_split(splits["test"].select(range(min(limit or 10**9, len(splits["test"])))))


def read_split(rows: Dataset) -> Images:
    image = next(column for column, feature in rows.features.items() if isinstance(feature, Image))
    label = next(column for column, feature in rows.features.items() if isinstance(feature, ClassLabel))
    pixels = np.stack([np.asarray(picture.convert("RGB")) for picture in rows[image]])
    return Images(torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.tensor(rows[label]), rows.features[label].names)


def normalize(pixels: torch.Tensor) -> torch.Tensor:
    """What the image processor makes of pictures that have the right size."""
    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    return (pixels.float() / 255 - mean) / std


def collate(items: list[dict]) -> dict[str, torch.Tensor]:
    """A batch; training pictures are shifted, with edges repeated, and half of them flipped."""
    pixels = torch.stack([item["pixels"] for item in items])
    if items[0]["augmented"]:
        side = pixels.shape[-1]
        padded = F.pad(pixels.float(), [SHIFT] * 4, mode="replicate")
        corners = torch.randint(2 * SHIFT + 1, (len(items), 2)).tolist()
        pixels = torch.stack([x[:, top : top + side, left : left + side] for x, (top, left) in zip(padded, corners)])
        flipped = torch.rand(len(items), 1, 1, 1) < 0.5
        pixels = torch.where(flipped, pixels.flip(-1), pixels)
    return {"pixel_values": normalize(pixels), "labels": torch.tensor([item["labels"] for item in items])}


def make_parser_of_images(description: str, steps: int):
    """A parser of what the experiments with images take."""
    parser = make_parser(description, steps=steps, learning_rates=(1e-3, 3e-3))
    parser.add_argument("--images", required=True, metavar="CIFAR10_FOLDER", help="a folder of images, or a dataset's Hub id")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--patch_size", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--test_images", type=int, default=None, help="test on the first ones only")
    parser.add_argument("--every", type=int, default=None, help="measure after every so many steps as well, for the curve")
    return parser


def make_classifier(args, names: list[str], side: int, **overrides) -> ToSTForImageClassification:
    """A new classifier of the size that the arguments say."""
    fields = {
        "hidden_size": args.width,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "patch_size": args.patch_size,
        "image_size": side,
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }
    return ToSTForImageClassification(ToSTVisionConfig(**(fields | overrides)))


@torch.no_grad()
def accuracy(model: ToSTForImageClassification, images: Images, batch: int = 250) -> float:
    model.eval()
    right = 0
    for pixels, labels in zip(images.pixels.split(batch), images.labels.split(batch)):
        right += int((model(normalize(pixels).to(model.device)).logits.argmax(-1).cpu() == labels).sum())
    return right / len(images.labels)


class Curve(TrainerCallback):
    """The accuracy on the images after every so many steps, {steps: accuracy}."""

    def __init__(self, images: Images, every: int):
        self.images, self.every, self.points = images, every, {}

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step % self.every == 0:
            self.points[state.global_step] = accuracy(model, self.images)
            model.train()


def train_classifier(model, training: Images, args, *, learning_rate: float, seed: int, callbacks=()):
    """The trained model, and the mean loss of its last tenth of steps."""
    trainer = train(
        model,
        training.examples(augmented=True),
        steps=args.steps,
        learning_rate=learning_rate,
        seed=seed,
        batch_size=args.batch,
        data_collator=collate,
        weight_decay=0.05,
        remove_unused_columns=False,
        logging_steps=max(1, args.steps // 10),
        callbacks=callbacks,
    )
    return trainer.model, next(log["loss"] for log in reversed(trainer.state.log_history) if "loss" in log)


def compare(args, results: Results, task: str, makers: dict) -> None:
    """Trains what each maker makes with every seed that has no rows yet, and adds its test accuracy to the results.

    Args:
        makers: name to a function of (names of the classes, side of the images) that returns a new model.
    """
    training, test = load_images(args.images, args.test_images)
    for name, make in makers.items():

        def run(seed, learning_rate, name=name, make=make):
            curve = Curve(test, args.every) if args.every else None
            model, loss = train_classifier(
                make(training.names, training.pixels.shape[-1]),
                training,
                args,
                learning_rate=learning_rate,
                seed=seed,
                callbacks=[curve] if curve else [],
            )
            metrics = {"accuracy": accuracy(model, test), "training_loss": loss}
            if curve:
                metrics |= {f"accuracy after {steps} steps": value for steps, value in curve.points.items()}
            print(f"{name}, seed {seed}, learning rate {learning_rate}: {metrics}", flush=True)
            return model, metrics

        patches = (training.pixels.shape[-1] // args.patch_size) ** 2
        case = {"task": task, "model": name, "steps": args.steps, "batch": args.batch, "context": patches}
        # by the training loss: the test images choose nothing
        results.add_missing(run, args, lambda metrics: -metrics["training_loss"], width=args.width, **case)
    results.print_means()


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser_of_images(__doc__, steps=300)
    args = parse_arguments(parser, arguments, __file__)
    makers = {
        name: lambda names, side, kind=kind: make_classifier(args, names, side, attention_type=kind)
        for name, kind in ATTENTION_TYPES.items()
    }
    compare(args, Results(args), "CIFAR-10", makers)


if __name__ == "__main__":
    main()
