# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The authors' observations on small models: what TSSA's layers compress and group (`observations`), and how tight the bound
that they lower is during training (`tightness`).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from compare_lm import SIZES, Data, prepare_data
from compare_vision import BATCH, WIDTH, count_patches, load_images, make_classifier, normalize, train_classifier
from compare_vision import add_arguments as add_image_arguments
from language_models import make_language_model
from registry import benchmark
from training import Results, train
from transformers import PreTrainedModel, TrainerCallback, set_seed

from tost_hf.interpret import (
    NORMALIZATIONS,
    ModelTrace,
    compression_terms,
    entropy_by_position,
    membership_clusters_score,
    trace_model,
)


OBSERVATIONS = """What TSSA's layers compress and group, before and after training.

An image model and a language model of four layers are trained as in compare_vision and compare_lm, and measured on held-out
images and text by `tost_hf.interpret`:

- *Does the compression term fall with depth?* Its variational form under both normalizations, and the coding rate that it
  bounds, in nats, layer by layer.
- *Do memberships group patches by content?* The adjusted mutual information of each patch's strongest head with k-means of
  colors and places: of the image's own memberships, of shuffled ones, and of another image's (what place alone explains).
- *Does the membership flatten with position?* Its distance from uniform, 1 - entropy / ln H, by position in the text.
"""
CONTEXT = 256  # tokens of an example
LAYERS, TEXT_BATCH, TEXT_LEARNING_RATE = 4, 8, 1e-2


def compression_by_layer(trace: ModelTrace) -> dict[str, float]:
    """Means over images or sequences."""
    metrics = {}
    for normalization in NORMALIZATIONS:
        terms = compression_terms(trace, normalization)
        for name, values in (("variational", terms.variational), ("coding rate", terms.coding_rate)):
            means = values.mean(0).tolist()
            metrics |= {f"{name}, unit {normalization}, layer {i}": x for i, x in enumerate(means)}
    return metrics


def mutual_information(model: PreTrainedModel, pixels: torch.Tensor, kind: str) -> dict[str, float]:
    """Means over images of a `kind`."""
    metrics, names = {}, {"score": "own", "other_image": f"another {kind}'s"}
    for name, values in membership_clusters_score(model, pixels)._asdict().items():
        layers = enumerate(values.mean(0).tolist())
        metrics |= {f"mutual information, {names.get(name, name)}, layer {i}": x for i, x in layers}
    return metrics


def measure(model: PreTrainedModel, **inputs) -> dict[str, float]:
    trace = trace_model(model, **inputs)
    metrics = compression_by_layer(trace)
    if "pixel_values" in inputs:
        return metrics | mutual_information(model, inputs["pixel_values"], "image")
    starts, entropy = entropy_by_position(trace)
    for start, by_layer in zip(starts, entropy.T.tolist()):
        distances = {i: 1 - x / math.log(trace.memberships.shape[2]) for i, x in enumerate(by_layer)}
        metrics |= {f"distance from uniform, position {start} on, layer {i}": x for i, x in distances.items()}
    return metrics


def load_text(args) -> tuple[Data, torch.Tensor]:
    """Data in examples of `CONTEXT` bytes, and the held-out token ids (examples, CONTEXT) to measure on."""
    characters = CONTEXT * (args.test_texts + 1)
    data = prepare_data(args.text, replace(SIZES["small"], context=CONTEXT, validation_characters=characters))
    return data, torch.stack([example["input_ids"] for example in data.held_out[: args.test_texts]])


def make_text_model(data: Data, layers: int = LAYERS, name: str = "ToST") -> PreTrainedModel:
    """A new language model."""
    sizes = {"width": SIZES["small"].width, "layers": layers, "head_dim": SIZES["small"].head_dim}
    return make_language_model(name, vocab_size=data.vocab_size, context=CONTEXT, **sizes)


def train_text_model(model, data: Data, steps: int, *, seed: int, callbacks=()) -> None:
    options = {"learning_rate": TEXT_LEARNING_RATE, "batch_size": TEXT_BATCH, "callbacks": callbacks}
    train(model, data.examples, steps=steps, seed=seed, **options)


def make_subjects(args) -> dict[str, tuple]:
    """For images and text: functions that make and train a model, the inputs to measure on, batch size and context."""
    training, test = load_images(args.images, args.test_images)
    data, input_ids = load_text(args)

    def train_on_images(model, seed, **options):
        train_classifier(model, training, args, learning_rate=args.learning_rates[0], seed=seed, **options)

    def train_on_text(model, seed, **options):
        train_text_model(model, data, args.steps, seed=seed, **options)

    make_images, pixels = lambda: make_classifier(training, num_hidden_layers=LAYERS), {"pixel_values": normalize(test.pixels)}
    return {
        "images": (make_images, train_on_images, pixels, BATCH, count_patches(training)),
        "text": (lambda: make_text_model(data), train_on_text, {"input_ids": input_ids}, TEXT_BATCH, CONTEXT),
    }


def add_arguments(parser) -> None:
    """Adds the arguments of the benchmarks with images and text."""
    add_image_arguments(parser)
    parser.set_defaults(test_images=200)
    parser.add_argument("--text", required=True, metavar="TEXT_FOLDER", help="a folder of text, or a dataset's Hub id")
    parser.add_argument("--test_texts", type=int, default=100, help=f"examples of {CONTEXT} bytes to measure on")


@benchmark("observations", OBSERVATIONS, add_arguments, trains=True, steps=400, learning_rates=(1e-3,))
def run(args, results: Results) -> None:
    for task, (make, train_model, inputs, batch, context) in make_subjects(args).items():
        for seed in args.seeds:
            set_seed(seed)
            model, case = make(), {"task": task, "batch": batch, "context": context, "seed": seed}
            results.add(measure(model, **inputs), model="untrained", network=model, steps=0, **case)
            train_model(model, seed)
            results.add(measure(model, **inputs), model="trained", network=model, steps=args.steps, **case)
    results.print_means()


# Tightness of the bound ------------------------------------------------------------------------------------------------

TIGHTNESS = """Tightness of the bound that TSSA lowers, during training: the compression term over the coding rate, by layer.

The variational form is an upper bound of the coding rate and equals it if the channels of a head are uncorrelated: a ratio of
1 is a tight bound. Models, data and both quantities are those of observations, measured on held-out images and text before
training and at regular steps. Seeds that have records are not run again.
"""


def ratio_by_layer(model: PreTrainedModel, **inputs) -> dict[str, float]:
    """Means over images or sequences of the compression term over the coding rate."""
    trace, metrics = trace_model(model, **inputs), {}
    for normalization in NORMALIZATIONS:
        terms = compression_terms(trace, normalization)
        ratios = (terms.variational / terms.coding_rate).mean(0).tolist()
        metrics |= {f"unit {normalization}, layer {i}": ratio for i, ratio in enumerate(ratios)}
    return metrics


class MeasureCallback(TrainerCallback):
    """Measures a model before training and every `every` steps; `metrics` maps "step N, ..." to the values."""

    def __init__(self, measure: Callable[[PreTrainedModel], dict[str, float]], every: int):
        self.measure, self.every, self.metrics = measure, every, {}

    def record(self, step: int, model: PreTrainedModel) -> None:
        was_training = model.training
        self.metrics |= {f"step {step}, {name}": value for name, value in self.measure(model.eval()).items()}
        model.train(was_training)

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.record(0, model)

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step % self.every == 0:
            self.record(state.global_step, model)


def add_tightness_arguments(parser) -> None:
    add_arguments(parser)
    parser.add_argument("--every", type=int, default=50, help="measure after every so many steps")


@benchmark("tightness", TIGHTNESS, add_tightness_arguments, trains=True, steps=400, learning_rates=(1e-3,))
def run_tightness(args, results: Results) -> None:
    for task, (make, train_model, inputs, batch, context) in make_subjects(args).items():

        def run(seed, _, make=make, train_model=train_model, inputs=inputs):
            callback, model = MeasureCallback(lambda model: ratio_by_layer(model, **inputs), args.every), make()
            train_model(model, seed, callbacks=[callback])
            return model, callback.metrics

        width, learning_rate = (WIDTH, None) if task == "images" else (SIZES["small"].width, TEXT_LEARNING_RATE)
        results.add_missing(
            run, width=width, learning_rate=learning_rate, task=task, model="ToST", batch=batch, context=context
        )
    results.print_means()
