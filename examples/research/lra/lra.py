# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Shortened tasks of Long Range Arena, trained in minutes: ToST, softmax and linear attention in one model.

    python examples/benchmarks/run.py lra --imdb IMDB_FOLDER --wikitext WIKITEXT_FOLDER --images CIFAR10_FOLDER

ListOps has expressions of fewer than 64 tokens, Text the first 128 bytes of a review, Image 10 x 10 gray pixels, and
Pathfinder 12 x 12 pixels with paths of 2 dashes; Retrieval asks whether two excerpts of 64 characters are from the same data
set, WikiText-2 or reviews. This checks that all parts work and shows nothing about long ranges: README.md has the commands for
the full tasks. Seeds that have records are not run again.
"""

import statistics
from collections import Counter
from pathlib import Path

import make_data
from lra_models import ATTENTION, make_config, make_model
from lra_tasks import TASKS, Examples, collate, load_splits
from registry import benchmark
from training import Results, train


LENGTHS = {"listops": 64, "text": 128, "retrieval": 64, "image": 100, "pathfinder": 144}
WIDTH, BATCH = 64, 32
EXAMPLES = {"train": 10_000, "test": 2_000}
GENERATOR_OPTIONS = {  # options of make_data.py for the generated data
    "listops": "--min_length 3 --max_length 64 --max_depth 4 --max_arguments 5",
    "pathfinder": "--side 12 --dashes 2 --seed_distance 2.5 --distractors 1 --distractor_dashes 2",
    "retrieval": "--excerpt 64",
}


def load(task: str, args) -> dict[str, Examples]:
    """Training and test examples of a shortened task; generated ones are made first if they are missing."""
    folders = {"text": args.imdb, "image": args.images}
    folder = Path(folders.get(task) or args.data / task)
    if task in GENERATOR_OPTIONS and not (folder / "test.parquet").exists():
        texts = ["--texts", args.wikitext, args.imdb] if task == "retrieval" else []
        counts = [f"--{split}_examples={EXAMPLES.get(split, 0)}" for split in make_data.SPLITS]
        make_data.main([task, "--output_dir", str(folder), *texts, *counts, *GENERATOR_OPTIONS[task].split()])
    splits = load_splits(str(folder), TASKS[task])
    subsets = {split: splits[split].select(range(min(count, len(splits[split])))) for split, count in EXAMPLES.items()}
    return {
        split: Examples(subset, TASKS[task], LENGTHS[task], f"The {split} data of {task}") for split, subset in subsets.items()
    }


def add_arguments(parser) -> None:
    parser.add_argument("--imdb", metavar="IMDB_FOLDER", help="a data set of reviews, for text and retrieval")
    parser.add_argument("--wikitext", metavar="WIKITEXT_FOLDER", help="a data set of articles, for the task retrieval")
    parser.add_argument("--images", metavar="CIFAR10_FOLDER", help="a data set of pictures, for the task image")
    parser.add_argument("--data", type=Path, default=Path("lra-data"), metavar="FOLDER", help="where generated data is stored")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))


@benchmark("lra", __doc__, add_arguments, trains=True, steps=300, learning_rates=(1e-3,), file="lra")
def run(args, results: Results) -> None:
    for task in args.tasks:
        examples = load(task, args)
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH}
        sizes |= {"hidden_dropout": 0.0, "max_position_embeddings": LENGTHS[task]}
        for name in ATTENTION:

            def train_one(seed, learning_rate, task=task, name=name, examples=examples, sizes=sizes):
                model = make_model(make_config(task, attention=name, **sizes))
                options = {"batch_size": BATCH, "data_collator": collate, "per_device_eval_batch_size": 100}
                options |= {"learning_rate": learning_rate, "seed": seed}
                trainer = train(model, examples["train"], steps=args.steps, **options)
                output = trainer.predict(examples["test"])
                loss = statistics.mean([log["loss"] for log in trainer.state.log_history if "loss" in log][-5:])
                accuracy = (output.predictions.argmax(-1) == output.label_ids).mean()
                chance = max(Counter(examples["test"].labels).values()) / len(examples["test"])
                return model, {"accuracy": accuracy, "chance": chance, "training_loss": loss}

            case = {"task": task, "model": name, "batch": BATCH, "context": LENGTHS[task]}
            # the learning rate is selected by the training loss, not by the test examples
            results.add_missing(train_one, lambda metrics: -metrics["training_loss"], width=WIDTH, **case)
    results.print_means()
