# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Where running second moments are enough, and where not: tasks whose distance is a dial.

    python examples/benchmarks/locality.py
    python examples/benchmarks/locality.py --models "ToST conv token" "ToST hybrid"  # with options beyond the paper

`copy d`: random tokens, and at every place the model is to name the token d places before (d = 0: the token itself). Nothing
but that one token helps, so that a wrong guess is as good as any other: chance is 1 in 16. `majority`: at every place, whether
the lower or the upper half of the vocabulary has been more frequent so far, a question about statistics of the whole past in
which the order plays no part. Places without an answer (the first d, or a tie) do not count. Rows
that are there are not measured again.
"""

import numpy as np
import torch
from experiments import Batches, Results, first, label_accuracy, make_parser, train
from language_models import MODELS, make_language_model
from rows import parse_arguments


TASKS = ("copy 0", "copy 1", "copy 4", "copy 16", "copy 64", "majority")
VOCAB_SIZE = 16
TEST_SEED = 1_000_000


def make_locality_batch(rng: np.random.Generator, task: str, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Random tokens and the answers.

    A label stands one place after the token it belongs to, where models shift it back; it is -100 where there is none.

    Returns:
        `input_ids` and `labels`, each (batch, length).
    """
    input_ids = rng.integers(VOCAB_SIZE, size=(batch, length))
    answers = np.full((batch, length), -100)
    kind, _, distance = task.partition(" ")
    if kind == "copy":
        distance = int(distance)
        if not 0 <= distance < length - 1:
            raise ValueError(f"'{task}' needs sequences of more than {distance + 1} tokens, got {length}.")
        answers[:, distance:] = input_ids[:, : length - distance]
    elif kind == "majority":
        lead = np.where(input_ids < VOCAB_SIZE // 2, -1, 1).cumsum(1)
        answers[lead != 0] = (lead > 0)[lead != 0]
    else:
        raise ValueError(f"There is no task {task!r}; choose 'majority' or 'copy d' with a distance d.")
    labels = np.full((batch, length), -100)
    labels[:, 1:] = answers[:, :-1]
    return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, steps=300, learning_rates=(3e-3, 1e-2))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["ToST", "GPT-2", "Mamba-2"])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="'majority', or 'copy d' with a distance d")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--length", type=int, default=96, help="tokens of a sequence")
    args = parse_arguments(parser, arguments, __file__)
    results = Results(args)

    for task in args.tasks:
        for name in args.models:

            def run(seed, learning_rate, task=task, name=name):
                model = make_language_model(
                    name, vocab_size=VOCAB_SIZE, width=args.width, layers=args.layers, head_dim=16, context=args.length
                )

                def make(rng):
                    return make_locality_batch(rng, task, args.batch, args.length)

                data = Batches(make, args.steps, seed)
                train(model, data, steps=args.steps, learning_rate=learning_rate, seed=seed, data_collator=first)
                accuracy = label_accuracy(model, Batches(make, 16, TEST_SEED))
                print(f"{task}, {name}, seed {seed}, learning rate {learning_rate}: {accuracy:.1%}", flush=True)
                return model, {"accuracy": accuracy}

            case = {"task": task, "model": name, "steps": args.steps, "batch": args.batch, "context": args.length}
            results.add_missing(run, args, lambda metrics: metrics["accuracy"], width=args.width, **case)
    results.print_means()


if __name__ == "__main__":
    main()
