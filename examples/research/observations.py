# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The authors' observations on small models: what TSSA's layers compress and group (`observations`), and how tight the
bound is that they lower while a model learns (`tightness`).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from compare_lm import SIZES, Data, prepare
from compare_vision import add_arguments as add_image_arguments
from compare_vision import load_images, make_classifier, normalize, train_classifier
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

An image model and a language model are trained as by compare_vision and compare_lm, with as many layers as here, and measured
on held-out images and text by `tost_hf.interpret`:

- *Does the compression term fall with depth?* Its variational form under both normalisations, and the coding rate that it
  bounds, in nats, layer by layer.
- *Do memberships group patches by content?* The adjusted mutual information of each patch's strongest head with k-means of
  colours and places: of the image's own memberships, of shuffled ones, and of another image's (what place alone explains).
- *Does the membership flatten with position?* Its distance from uniform, 1 - entropy / ln H, by position in the text.
"""
CONTEXT = 256  # tokens of a text
STATES = ("untrained", "trained")


def compression_by_layer(trace: ModelTrace) -> dict[str, float]:
    """Means over images or texts; layers count from 1."""
    metrics = {}
    for normalization in NORMALIZATIONS:
        terms = compression_terms(trace, normalization)
        for name, values in (("variational", terms.variational), ("coding rate", terms.coding_rate)):
            means = values.mean(0).tolist()
            metrics |= {f"{name}, unit {normalization}, layer {i}": x for i, x in enumerate(means, 1)}
    return metrics


def measure_images(model: PreTrainedModel, pixels: torch.Tensor) -> dict[str, float]:
    found = membership_clusters_score(model, pixels)
    metrics = compression_by_layer(trace_model(model, pixel_values=pixels))
    for name, values in found._asdict().items():
        name = {"score": "own", "other_image": "another image's"}.get(name, name)
        metrics |= {f"mutual information, {name}, layer {i}": x for i, x in enumerate(values.mean(0).tolist(), 1)}
    return metrics


def measure_text(model: PreTrainedModel, input_ids: torch.Tensor) -> dict[str, float]:
    trace = trace_model(model, input_ids=input_ids)
    starts, entropy = entropy_by_position(trace)
    heads = trace.memberships.shape[2]
    metrics = compression_by_layer(trace)
    for start, by_layer in zip(starts, entropy.T.tolist()):
        distances = {i: 1 - x / math.log(heads) for i, x in enumerate(by_layer, 1)}
        metrics |= {f"distance from uniform, position {start} on, layer {i}": x for i, x in distances.items()}
    return metrics


def observe_images(args, results: Results) -> None:
    training, test = load_images(args.images, args.test_images)
    pixels = normalize(test.pixels)
    patches = (pixels.shape[-1] // args.patch_size) ** 2
    for seed in args.seeds:
        set_seed(seed)
        model = make_classifier(args, training.names, training.pixels.shape[-1])
        report(results, "images", "untrained", model, measure_images(model, pixels), args, patches, seed)
        model, _ = train_classifier(model, training, args, learning_rate=args.learning_rates[0], seed=seed)
        report(results, "images", "trained", model, measure_images(model, pixels), args, patches, seed)


def load_text(args) -> tuple[Data, torch.Tensor]:
    """Data in examples of `CONTEXT` bytes, and the held-out token ids (examples, CONTEXT) to measure on."""
    characters = CONTEXT * (args.test_texts + 1)
    data = prepare(args.text, replace(SIZES["small"], context=CONTEXT, validation_characters=characters))
    return data, torch.stack([example["input_ids"] for example in data.held_out[: args.test_texts]])


def make_text_model(args, vocab_size: int, name: str = "ToST") -> PreTrainedModel:
    """A new language model, with as many layers as the image model."""
    size = SIZES["small"]
    sizes = {"width": size.width, "layers": args.layers, "head_dim": size.head_dim}
    return make_language_model(name, vocab_size=vocab_size, context=CONTEXT, **sizes)


def train_text_model(model, data: Data, args, *, seed: int, callbacks=()) -> None:
    train(
        model,
        data.examples,
        steps=args.steps,
        learning_rate=args.text_learning_rate,
        seed=seed,
        batch_size=args.text_batch,
        callbacks=callbacks,
    )


def observe_text(args, results: Results) -> None:
    data, input_ids = load_text(args)
    for seed in args.seeds:
        set_seed(seed)
        model = make_text_model(args, data.vocab_size)
        report(results, "text", "untrained", model, measure_text(model, input_ids), args, CONTEXT, seed)
        train_text_model(model, data, args, seed=seed)
        report(results, "text", "trained", model, measure_text(model, input_ids), args, CONTEXT, seed)


def report(results, task, state, network, metrics, args, context, seed) -> None:
    batch = args.batch if task == "images" else args.text_batch
    steps = 0 if state == "untrained" else args.steps
    results.add(metrics, task=task, model=state, network=network, steps=steps, batch=batch, context=context, seed=seed)
    print(f"{task}, {state}, seed {seed}: done", flush=True)


def add_arguments(parser) -> None:
    """Those of the benchmarks with images and text."""
    add_image_arguments(parser)
    parser.set_defaults(layers=4, test_images=200)
    parser.add_argument("--text", required=True, metavar="TEXT_FOLDER", help="a folder of text, or a dataset's Hub id")
    parser.add_argument("--test_texts", type=int, default=100, help=f"examples of {CONTEXT} bytes to measure on")
    parser.add_argument("--text_learning_rate", type=float, default=1e-2)
    parser.add_argument("--text_batch", type=int, default=8)


def check_one_rate(args) -> None:
    if len(args.learning_rates) > 1:
        raise SystemExit("--learning_rates accepts one value here: nothing is chosen.")


@benchmark("observations", OBSERVATIONS, add_arguments, trains=True, steps=400, learning_rates=(1e-3,))
def run(args, results: Results) -> None:
    check_one_rate(args)
    observe_images(args, results)
    observe_text(args, results)
    results.print_means()


# Tightness of the bound ------------------------------------------------------------------------------------------------

TIGHTNESS = """How tight the bound that TSSA lowers is in training: the compression term over the coding rate, by layer.

The variational form bounds the coding rate from above and equals it where the channels of a head are uncorrelated, so that
their ratio is 1 where the bound is tight. The models, the data and both quantities are those of observations, measured on
held-out images and text before training and at regular steps. Seeds that have records are not run again.
"""


def ratio_by_layer(model: PreTrainedModel, **inputs) -> dict[str, float]:
    """Means over images or texts of the compression term over the coding rate; layers count from 1."""
    trace, metrics = trace_model(model, **inputs), {}
    for normalization in NORMALIZATIONS:
        terms = compression_terms(trace, normalization)
        ratios = (terms.variational / terms.coding_rate).mean(0).tolist()
        metrics |= {f"unit {normalization}, layer {i}": ratio for i, ratio in enumerate(ratios, 1)}
    return metrics


class MeasureCallback(TrainerCallback):
    """Measures a model before training and after every so many steps; `found` maps "step N, ..." to what was measured."""

    def __init__(self, measure: Callable[[PreTrainedModel], dict[str, float]], every: int):
        self.measure, self.every, self.found = measure, every, {}

    def record(self, step: int, model: PreTrainedModel) -> None:
        training = model.training
        self.found |= {f"step {step}, {name}": value for name, value in self.measure(model.eval()).items()}
        model.train(training)

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.record(0, model)

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step % self.every == 0:
            self.record(state.global_step, model)


def watch_images(args, results: Results) -> None:
    training, test = load_images(args.images, args.test_images)
    pixels = normalize(test.pixels)

    def run(seed, learning_rate):
        watch = MeasureCallback(lambda model: ratio_by_layer(model, pixel_values=pixels), args.every)
        model = make_classifier(args, training.names, training.pixels.shape[-1])
        model, _ = train_classifier(model, training, args, learning_rate=learning_rate, seed=seed, callbacks=[watch])
        return model, watch.found

    patches = (pixels.shape[-1] // args.patch_size) ** 2
    case = {"task": "images", "model": "ToST", "batch": args.batch, "context": patches}
    results.add_missing(run, width=args.width, **case)


def watch_text(args, results: Results) -> None:
    data, input_ids = load_text(args)

    def run(seed, _):
        watch = MeasureCallback(lambda model: ratio_by_layer(model, input_ids=input_ids), args.every)
        model = make_text_model(args, data.vocab_size)
        train_text_model(model, data, args, seed=seed, callbacks=[watch])
        return model, watch.found

    case = {"task": "text", "model": "ToST", "batch": args.text_batch, "context": CONTEXT}
    results.add_missing(run, width=SIZES["small"].width, learning_rate=args.text_learning_rate, **case)


def add_tightness_arguments(parser) -> None:
    add_arguments(parser)
    parser.add_argument("--every", type=int, default=50, help="measure after every so many steps")


@benchmark("tightness", TIGHTNESS, add_tightness_arguments, trains=True, steps=400, learning_rates=(1e-3,))
def run_tightness(args, results: Results) -> None:
    check_one_rate(args)
    watch_images(args, results)
    watch_text(args, results)
    results.print_means()
