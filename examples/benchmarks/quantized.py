# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Quantization on a CPU: loss on text and images, size of the weights, time per token.

    make demo && python examples/digits.py                # trains the two models
    python examples/benchmarks/run.py quantized           # their losses and bytes, saved and reloaded
    python examples/benchmarks/run.py quantized --speed   # a token of tost-base

`tost-demo` is evaluated on the demo's validation text (the interpreter's standard library), `tost-digits` on held-out digits.
Each method loads the model by `from_pretrained`. "saved" states whether `save_pretrained` and `from_pretrained` reproduce the
loss. Speed is that of one-token steps at batch 1 from a cache of 64 tokens, with random weights, in interleaved rounds.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode import DynamicSteps
from demo import write_dataset
from PIL import Image
from records import read_records, select
from registry import benchmark
from scoring import score, tokenize
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timing import Report, attempt, describe_error, measure, ratio, spread
from torch.nn import functional as F
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    QuantoConfig,
    TorchAoConfig,
)

import tost_hf


WINDOW_TOKENS, NUM_WINDOWS = 256, 64  # of the validation text
POSITION = 64


def torchao_config(name: str) -> TorchAoConfig:
    import torchao.quantization

    return TorchAoConfig(getattr(torchao.quantization, name)())


METHODS: dict[str, Callable[[], dict[str, Any]]] = {
    "float32": lambda: {"dtype": torch.float32},
    "bfloat16": lambda: {"dtype": torch.bfloat16},
    "torchao int8": lambda: {"quantization_config": torchao_config("Int8DynamicActivationInt8WeightConfig")},
    "torchao int8 weights": lambda: {"quantization_config": torchao_config("Int8WeightOnlyConfig")},
    "bitsandbytes 8 bits": lambda: {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
    "bitsandbytes 4 bits": lambda: {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")},
    "quanto int8 weights": lambda: {"quantization_config": QuantoConfig(weights="int8")},
    "quanto int4 weights": lambda: {"quantization_config": QuantoConfig(weights="int4")},
}


def make_text_loss(folder: Path) -> Callable[[Any], float]:
    """A function that computes a model's loss on the demo's validation text, in nats per token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as scratch:
        _, validation = write_dataset(Path(scratch))
        text = validation.read_text()
    windows = list(torch.tensor(tokenize(tokenizer, [text])[0][: WINDOW_TOKENS * NUM_WINDOWS]).split(WINDOW_TOKENS))
    return lambda model: torch.cat([x for x, _ in score(model, windows, 8)]).mean().item()


def make_image_loss(folder: Path) -> Callable[[Any], float]:
    """A function that computes a model's loss on the held-out digits, in nats per image."""
    processor, digits = AutoImageProcessor.from_pretrained(folder), load_digits()
    _, held_out = train_test_split(range(len(digits.target)), test_size=0.2, stratify=digits.target, random_state=0)
    images = [Image.fromarray((digits.images[i] * (255 / 16)).round().astype(np.uint8)) for i in held_out]
    pixels, labels = processor(images, return_tensors="pt")["pixel_values"], torch.tensor(digits.target[held_out])
    return lambda model: F.cross_entropy(model(pixels.to(model.dtype)).logits.float(), labels).item()


def try_saving(auto_class, model, compute_loss: Callable[[Any], float], expected: float) -> tuple[str, float | None]:
    """Whether the reloaded model has the same loss, and the MiB of its files of weights."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            model.save_pretrained(scratch)
            reloaded = auto_class.from_pretrained(scratch).eval()
            size = sum(file.stat().st_size for file in Path(scratch).iterdir() if "model" in file.name) / 2**20
            difference = abs(compute_loss(reloaded) - expected)
        except Exception as error:  # of any type; it is the recorded outcome
            return f"no: {describe_error(error)}", None
    return ("yes" if difference < 1e-4 else f"no: the loss differs by {difference:.2g}"), size


@torch.inference_mode()
def report_losses(args, report: Report) -> None:
    models = {
        "tost-demo": (AutoModelForCausalLM, make_text_loss),
        "tost-digits": (AutoModelForImageClassification, make_image_loss),
    }
    existing_records = read_records(report.path)
    for name, (auto_class, make_loss) in models.items():
        folder = Path(args.models) / name
        compute_loss = make_loss(folder)
        for method, options in METHODS.items():
            if select(existing_records, model=name, method=method):
                continue
            case = {"model": name, "method": method}
            try:
                model = auto_class.from_pretrained(folder, **({"dtype": torch.float32} | options())).eval()
                loss = compute_loss(model)
            except Exception as error:
                report.add(case | {"saved": f"no: {describe_error(error)}"}, {"loss": float("inf")})
                continue
            outcome, size = try_saving(auto_class, model, compute_loss, loss)
            report.add(case | {"saved": outcome}, {"loss": loss, "saved MiB": size})


def start_steps(folder: str, options: Callable[[], dict[str, Any]]) -> DynamicSteps:
    """One-token steps of a quantized model, after a warm-up step."""
    model = AutoModelForCausalLM.from_pretrained(folder, **({"dtype": torch.float32} | options())).eval()
    steps = DynamicSteps(model, torch.ones(1, 1, dtype=torch.long), POSITION, 1, compiled=False)
    steps()
    return steps


@torch.inference_mode()
def report_speed(args, report: Report) -> None:
    torch.manual_seed(0)
    runs = {}
    with tempfile.TemporaryDirectory() as scratch:
        tost_hf.ToSTForCausalLM(tost_hf.ToSTConfig.from_preset("tost-base")).save_pretrained(scratch)
        for method, options in METHODS.items():
            steps = attempt(method, start_steps, scratch, options)
            if steps is not None:
                runs[method] = steps
    seconds = measure(runs, args.repeats, warm_up=1, reset=lambda method: runs[method].reset())
    for method, times in seconds.items():
        metrics = {"ms a token": spread(times) * 1e3, "float32 / this": ratio(seconds["float32"], times)}
        report.add({"model": "tost-base", "method": method, "saved": ""}, metrics)


def add_arguments(parser) -> None:
    parser.add_argument("--models", default=".", metavar="FOLDER", help="the folder with tost-demo and tost-digits")
    parser.add_argument("--speed", action="store_true", help="time tost-base instead of measuring losses")


@benchmark("quantized", __doc__, add_arguments)
def run(args, report: Report) -> None:
    (report_speed if args.speed else report_losses)(args, report)
