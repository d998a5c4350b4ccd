# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Synthetic tasks: the copy task and majority (`locality`), and multi-query associative recall (`recall`)."""

from functools import partial

import numpy as np
import torch
from language_models import MODELS, make_language_model
from registry import benchmark
from training import Batches, Results, label_accuracy, run_seeds, train


SIZES = {"width": 64, "layers": 2, "head_dim": 16}
NO_LABEL = -100
TEST_SEED, TEST_BATCHES = 1_000_000, 16


def add_arguments(parser) -> None:
    """Adds the arguments of both benchmarks."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["ToST", "GPT-2", "Mamba-2"])


# Locality -------------------------------------------------------------------------------------------------------------

LOCALITY = """Tasks that depend on a token at a given distance, and one that depends on statistics of all past tokens.

`copy d`: at every position of a sequence of random tokens, the model predicts the token d positions before (d = 0: the token
itself). Other tokens carry no information about it, so that chance is 1 in 16. `majority`: at every position, the model
predicts whether the lower or the upper half of the vocabulary has been more frequent so far, which running statistics can
answer. Positions without an answer (the first d, or a tie) do not count. Seeds that have records are not run again.
"""
TASKS = ("copy 0", "copy 1", "copy 4", "copy 16", "copy 64", "majority")
VOCAB_SIZE = 16


def make_locality_batch(rng: np.random.Generator, task: str, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Random tokens and their labels.

    Returns:
        `input_ids` and `labels`, each (batch, length). A label is one position after its token, because models shift labels
        back; it is -100 where there is no answer.
    """
    input_ids = rng.integers(VOCAB_SIZE, size=(batch, length))
    answers = np.full((batch, length), NO_LABEL)
    if task == "majority":
        lead = np.where(input_ids < VOCAB_SIZE // 2, -1, 1).cumsum(1)
        answers[lead != 0] = (lead > 0)[lead != 0]
    else:
        distance = int(task.removeprefix("copy "))
        answers[:, distance:] = input_ids[:, : length - distance]
    labels = np.full((batch, length), NO_LABEL)
    labels[:, 1:] = answers[:, :-1]
    return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


def add_locality_arguments(parser) -> None:
    add_arguments(parser)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="'majority', or 'copy d' with a distance d")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--length", type=int, default=96, help="tokens of a sequence")


@benchmark("locality", LOCALITY, add_locality_arguments, trains=True, steps=300, learning_rates=(3e-3, 1e-2))
def run_locality(args, results: Results) -> None:
    for task in args.tasks:
        make = partial(make_locality_batch, task=task, batch=args.batch, length=args.length)
        for name in args.models:

            def run(seed, learning_rate, make=make, name=name):
                model = make_language_model(name, vocab_size=VOCAB_SIZE, context=args.length, **SIZES)
                train(model, Batches(make, args.steps, seed), steps=args.steps, learning_rate=learning_rate, seed=seed)
                return model, {"accuracy": label_accuracy(model, Batches(make, TEST_BATCHES, TEST_SEED))}

            case = {"task": task, "model": name, "batch": args.batch, "context": args.length}
            results.add_missing(run, lambda metrics: metrics["accuracy"], width=SIZES["width"], **case)
    results.print_means()


# Recall ---------------------------------------------------------------------------------------------------------------

RECALL = """Multi-query associative recall (Zoology, arXiv 2312.04927): whether a model can look up values in its context.

A sequence has n pairs of a key and a value, then queries every key once, in random order (Zoology's power_a = 1), with a
random token between queries. The model predicts the value after each query. Models of equal width and depth train for the same
steps on new sequences of all numbers of pairs, and are tested on held-out sequences of each number. A model that only knows
which values occurred has an accuracy of 1 / n; models that learn the task stay at this accuracy for many steps first.

The default is for a GPU; `--pairs 4 8 --vocab_size 32 --steps 1200` takes two minutes or more per run on one core.
"""
TOKENS = 4096  # of a batch


def make_recall_batch(rng: np.random.Generator, pairs: int, batch: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Sequences of 4 * `pairs` tokens and their labels.

    Keys are the tokens from 1 to vocab_size / 2 - 1, values those from vocab_size / 2 on; a sequence repeats neither.
    The first half of a sequence is key, value, key, value, ...; the second half is key, random token, ...

    Returns:
        `input_ids` and `labels`, each (batch, 4 * pairs); a label is one position after its key; -100 elsewhere.
    """
    half = vocab_size // 2
    keys = rng.random((batch, half - 1)).argsort(1)[:, :pairs] + 1
    values = rng.random((batch, half)).argsort(1)[:, :pairs] + half
    query_order = rng.random((batch, pairs)).argsort(1)  # position of each key among the queries
    input_ids = rng.integers(vocab_size, size=(batch, 4 * pairs))
    labels = np.full((batch, 4 * pairs), NO_LABEL)
    input_ids[:, 0 : 2 * pairs : 2], input_ids[:, 1 : 2 * pairs : 2] = keys, values
    queries = 2 * pairs + 2 * query_order
    np.put_along_axis(input_ids, queries, keys, 1)
    np.put_along_axis(labels, queries + 1, values, 1)
    return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


def add_recall_arguments(parser) -> None:
    add_arguments(parser)
    parser.add_argument("--pairs", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--vocab_size", type=int, default=256, help="half of it are keys, half values")


@benchmark("recall", RECALL, add_recall_arguments, trains=True, steps=20_000, learning_rates=(1e-3,))
def run_recall(args, results: Results) -> None:
    def make_batch(rng, pairs=None):
        pairs = pairs or int(rng.choice(args.pairs))
        return make_recall_batch(rng, pairs, TOKENS // (4 * pairs), args.vocab_size)

    for name in args.models:

        def run(seed, learning_rate, name=name):
            model = make_language_model(name, vocab_size=args.vocab_size, context=4 * max(args.pairs), **SIZES)
            train(model, Batches(make_batch, args.steps, seed), steps=args.steps, learning_rate=learning_rate, seed=seed)
            held_out = {n: Batches(partial(make_batch, pairs=n), TEST_BATCHES, TEST_SEED + n) for n in args.pairs}
            return model, {str(pairs): label_accuracy(model, batches) for pairs, batches in held_out.items()}

        runs = run_seeds(run, args.seeds, args.learning_rates, lambda metrics: sum(metrics[str(n)] for n in args.pairs), name)
        for seed, (model, metrics) in runs.items():
            for pairs in args.pairs:
                case = {"task": f"{pairs} pairs", "model": name, "steps": args.steps, "batch": TOKENS // (4 * pairs)}
                accuracy = {"accuracy": metrics[str(pairs)], "learning_rate": metrics["learning_rate"]}
                results.add(accuracy, network=model, context=4 * pairs, seed=seed, **case)
    results.print_means()
