# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Multi-query associative recall (Zoology, arXiv 2312.04927): what a model can look up in its context, by number of pairs.

    python examples/benchmarks/recall.py                                             # 4 to 64 pairs: for a GPU
    python examples/benchmarks/recall.py --pairs 4 8 --vocab_size 32 --steps 1200    # two minutes or more per run on one core

A sequence lists n pairs of a key and a value, then asks for every key once, in any order (Zoology's power_a = 1); between two
questions stands a random token. The model is to name the value right after a key it has seen before. The models, of
equal width, depth and steps, are trained on fresh sequences of all numbers of pairs mixed, and tested on held-out ones of each
number. Whoever knows which values occurred, but not with which key, is right in 1 of n cases. Models that learn the task
stay at that for long before they do: a run that ends there may have been too short.
"""

from functools import partial

import numpy as np
import torch
from experiments import (
    Batches,
    Results,
    first,
    label_accuracy,
    make_parser,
    over_seeds,
    train,
)
from language_models import MODELS, make_language_model
from rows import parse_arguments


PAIRS = (4, 8, 16, 32, 64)
TOKENS = 4096  # of a batch
TEST_SEED = 1_000_000


def make_recall_batch(rng: np.random.Generator, pairs: int, batch: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Sequences of 4 * `pairs` tokens and their labels.

    Keys are the tokens from 1 to vocab_size / 2 - 1, values those from vocab_size / 2 on; neither repeats among the pairs.
    The first half of a sequence is key, value, key, value, ...; the second half is key, random token, ... A label stands
    one place after its key, where models shift it back, and is -100 elsewhere.

    Returns:
        `input_ids` and `labels`, each (batch, 4 * pairs).
    """
    half = vocab_size // 2
    if pairs > half - 1:
        raise ValueError(f"{pairs} pairs need {pairs} keys, but a vocabulary of {vocab_size} has {half - 1}.")
    keys = rng.random((batch, half - 1)).argsort(1)[:, :pairs] + 1
    values = rng.random((batch, half)).argsort(1)[:, :pairs] + half
    slots = rng.random((batch, pairs)).argsort(1)  # the place in the second half where each key is asked for
    input_ids = rng.integers(vocab_size, size=(batch, 4 * pairs))
    labels = np.full((batch, 4 * pairs), -100)
    input_ids[:, 0 : 2 * pairs : 2], input_ids[:, 1 : 2 * pairs : 2] = keys, values
    places = 2 * pairs + 2 * slots
    np.put_along_axis(input_ids, places, keys, 1)
    np.put_along_axis(labels, places + 1, values, 1)
    return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, steps=20_000, learning_rates=(1e-3,))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["ToST", "GPT-2", "Mamba-2"])
    parser.add_argument("--pairs", type=int, nargs="+", default=list(PAIRS))
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--test_batches", type=int, default=16, help=f"of {TOKENS:,} tokens, for each number of pairs")
    parser.add_argument("--vocab_size", type=int, default=256, help="half of it are keys, half values")
    args = parse_arguments(parser, arguments, __file__)
    results = Results(args)

    def make_batch_of(rng, pairs):
        return make_recall_batch(rng, pairs, TOKENS // (4 * pairs), args.vocab_size)

    def make_batch(rng):
        return make_batch_of(rng, int(rng.choice(args.pairs)))

    for name in args.models:

        def run(seed, learning_rate, name=name):
            model = make_language_model(
                name,
                vocab_size=args.vocab_size,
                width=args.width,
                layers=args.layers,
                head_dim=16,
                context=4 * max(args.pairs),
            )
            data = Batches(make_batch, args.steps, seed)
            train(model, data, steps=args.steps, learning_rate=learning_rate, seed=seed, data_collator=first)
            metrics = {}
            for pairs in args.pairs:
                held_out = Batches(partial(make_batch_of, pairs=pairs), args.test_batches, TEST_SEED + pairs)
                metrics[str(pairs)] = label_accuracy(model, held_out)
            print(f"{name}, seed {seed}, learning rate {learning_rate}: {metrics}", flush=True)
            return model, metrics

        found = over_seeds(run, args.seeds, args.learning_rates, lambda metrics: sum(metrics[str(n)] for n in args.pairs))
        for seed, (model, metrics) in found.items():
            for pairs in args.pairs:
                results.add(
                    {"accuracy": metrics[str(pairs)], "learning_rate": metrics["learning_rate"]},
                    task=f"{pairs} pairs",
                    model=name,
                    network=model,
                    steps=args.steps,
                    batch=TOKENS // (4 * pairs),
                    context=4 * pairs,
                    seed=seed,
                )
    results.print_means()


if __name__ == "__main__":
    main()
