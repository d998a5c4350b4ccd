# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""How tight the bound that TSSA lowers is while a model learns: the compression term over the coding rate, layer by layer.

    python examples/benchmarks/run.py tightness --images CIFAR10_FOLDER --text TEXT_FOLDER

The variational form bounds the coding rate from above and equals it where the channels of a head are uncorrelated, so that
their ratio is 1 where the bound is tight. The models, the data and both quantities are those of observations, measured on
held-out images and text before training and at regular steps. Seeds that have records are not run again.
"""

from collections.abc import Callable

import observations
from compare_lm import SIZES
from compare_vision import load_images, make_classifier, normalize, train_classifier
from observations import CONTEXT, check_one_rate, load_text, make_reader, train_reader
from registry import benchmark
from training import Results
from transformers import PreTrainedModel, TrainerCallback

from tost_hf.interpret import NORMALIZATIONS, compression_terms, trace_model


def ratio_by_layer(model: PreTrainedModel, **inputs) -> dict[str, float]:
    """Means over images or texts of the compression term over the coding rate; layers count from 1."""
    trace, metrics = trace_model(model, **inputs), {}
    for normalization in NORMALIZATIONS:
        terms = compression_terms(trace, normalization)
        ratios = (terms.variational / terms.coding_rate).mean(0).tolist()
        metrics |= {f"unit {normalization}, layer {i}": ratio for i, ratio in enumerate(ratios, 1)}
    return metrics


class Watch(TrainerCallback):
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
        watch = Watch(lambda model: ratio_by_layer(model, pixel_values=pixels), args.every)
        model = make_classifier(args, training.names, training.pixels.shape[-1])
        model, _ = train_classifier(model, training, args, learning_rate=learning_rate, seed=seed, callbacks=[watch])
        return model, watch.found

    patches = (pixels.shape[-1] // args.patch_size) ** 2
    case = {"task": "images", "model": "ToST", "batch": args.batch, "context": patches}
    results.add_missing(run, width=args.width, **case)


def watch_text(args, results: Results) -> None:
    text = load_text(args)

    def run(seed, _):
        watch = Watch(lambda model: ratio_by_layer(model, input_ids=text.input_ids), args.every)
        model = make_reader(args, text.vocab_size)
        train_reader(model, text, args, seed=seed, callbacks=[watch])
        return model, watch.found

    case = {"task": "text", "model": "ToST", "batch": args.text_batch, "context": CONTEXT}
    results.add_missing(run, width=SIZES["small"].width, learning_rate=args.text_learning_rate, **case)


def add_arguments(parser) -> None:
    observations.add_arguments(parser)
    parser.add_argument("--every", type=int, default=50, help="measure after every so many steps")


@benchmark("tightness", __doc__, add_arguments, trains=True, steps=400, learning_rates=(1e-3,))
def run(args, results: Results) -> None:
    check_one_rate(args)
    watch_images(args, results)
    watch_text(args, results)
    results.print_means()
