# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What the experiments share: one way to train, one table of results (results/results.csv), one choice of learning rates.

The experiments are recall.py, locality.py, compare_lm.py, compare_vision.py, ablations.py, and those of ../research. Every
model of an experiment gets the same steps, batches, optimizer and learning rates to choose from.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import transformers
from rows import RESULTS, append_rows, markdown, origin, plus_minus, read_rows, select
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, set_seed

from tost_hf import ToSTTrainer, ToSTTrainingArguments


Trained = TypeVar("Trained")  # a model or its trainer


# Arguments and results -----------------------------------------------------------------------------------------------


def make_parser(description: str, steps: int, learning_rates: Iterable[float], seeds: Iterable[int] = (0, 1, 2)):
    """A parser of what all experiments take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds), help="one run for each")
    parser.add_argument(
        "--learning_rates",
        type=float,
        nargs="+",
        default=list(learning_rates),
        help="tried with the first seed; the best one serves the other seeds",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results.csv and of plots")
    return parser


class Results:
    """The rows of one run of a script, added to `<results>/<name>.csv` as they come."""

    def __init__(self, args: argparse.Namespace, name: str = "results"):
        self.file, self.rows = args.results / f"{name}.csv", []
        self.origin = origin(args)

    def add(
        self, metrics: dict[str, float], *, task: str, model: str, network: nn.Module, steps, batch, context, seed
    ) -> None:
        """Adds one row per metric; width and layers are read from the network's configuration."""
        case = {
            "task": task,
            "model": model,
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            "width": network.config.hidden_size,
            "layers": network.config.num_hidden_layers,
            "steps": steps,
            "batch": batch,
            "context": context,
            "seed": seed,
        }
        rows = [self.origin | case | {"metric": metric, "value": f"{value:.6g}"} for metric, value in metrics.items()]
        self.rows.extend(rows)
        append_rows(self.file, rows)

    def add_seeds(self, found: dict[int, tuple[nn.Module, dict[str, float]]], **case) -> None:
        """Adds what `over_seeds` found, {seed: (network, metrics)}; `case` is `add`'s other arguments."""
        for seed, (network, metrics) in found.items():
            self.add(metrics, network=network, seed=seed, **case)

    def add_missing(self, run, args: argparse.Namespace, score=None, *, width: int, learning_rate=None, **case) -> None:
        """Runs the seeds that have no rows of this case yet, as `over_seeds` does, and adds the rows of each as it ends.

        Args:
            run, score: as in `over_seeds`; what `run` trained is the network. Without a score there is one learning rate.
            args: with `seeds` and `learning_rates`.
            learning_rate: in place of those of `args`.
            width, case: what tells the rows of the case; `case` is `add`'s other arguments.
        """
        wanted = {"script": args.script, "width": width, **case}
        there = select(read_rows(self.file), **wanted) if self.file.exists() else []
        self.rows += there
        for seed in args.seeds:
            if any(row["seed"] == str(seed) for row in there):
                continue
            chosen = self.values(**wanted, seed=args.seeds[0], metric="learning_rate")
            rates = chosen or ([learning_rate] if learning_rate else args.learning_rates)
            self.add_seeds(over_seeds(run, [seed], rates, score or (lambda _: 0.0)), **case)

    def values(self, **wanted) -> list[float]:
        """The values of the rows that have the wanted entries."""
        return [float(row["value"]) for row in select(self.rows, **wanted)]

    def print_means(self) -> None:
        """Prints the mean ± standard deviation over the seeds of every metric, as a Markdown table."""
        found: dict[tuple[str, str, str], list[float]] = {}
        for row in self.rows:
            found.setdefault((str(row["task"]), str(row["model"]), str(row["metric"])), []).append(float(row["value"]))
        print(markdown(["task", "model", "metric", "mean"], [[*case, plus_minus(x, ".4g")] for case, x in found.items()]))


# Training ------------------------------------------------------------------------------------------------------------


class Batches(torch.utils.data.Dataset):
    """Ready batches of a synthetic task, each made from (seed, its number): fresh in every step, the same in every run."""

    def __init__(self, make: Callable[[np.random.Generator], dict[str, torch.Tensor]], count: int, seed: int):
        self.make, self.count, self.seed = make, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if not 0 <= number < self.count:
            raise IndexError(number)
        return self.make(np.random.default_rng((self.seed, number)))


def first(items: list) -> dict:
    """The collator of `Batches`, read one at a time."""
    return items[0]


class _Stop(TrainerCallback):
    """Ends training as soon as the loss is not a number: the learning rate was too high."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and not math.isfinite(logs.get("loss", 0.0)):
            control.should_training_stop = True


class Clock(TrainerCallback):
    """The seconds of each step: forward, backward, the optimizer; no evaluation, no loading."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.began)


def train(model: PreTrainedModel, data, *, steps: int, learning_rate: float, seed: int, batch_size: int = 1, **options):
    """Trains with `ToSTTrainer` (AdamW, a tenth of warm-up, cosine to a tenth, clipping at 1), whatever the model.

    Args:
        data: a dataset for the trainer; `Batches` go with `batch_size` 1.
        options: `eval_dataset`, `callbacks` and the like for the trainer; any other is one of its arguments.

    Returns:
        The trainer, for its `evaluate()` and the history of its losses.
    """
    for_trainer = ("eval_dataset", "data_collator", "compute_metrics", "preprocess_logits_for_metrics", "processing_class")
    for_trainer = {name: options.pop(name) for name in for_trainer if name in options}
    callbacks = [_Stop(), *options.pop("callbacks", [])]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ToSTTrainingArguments(
            output_dir=folder,
            recipe="paper",
            max_steps=steps,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            seed=seed,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
            **({"logging_steps": max(1, steps // 50)} | options),
        )
        transformers.utils.logging.set_verbosity_error()
        trainer = ToSTTrainer(model, arguments, train_dataset=data, callbacks=callbacks, **for_trainer)
        trainer.pop_callback(transformers.PrinterCallback)
        trainer.train()
    return trainer


@torch.no_grad()
def label_accuracy(model: PreTrainedModel, batches: Iterable[dict[str, torch.Tensor]]) -> float:
    """The share of labelled positions whose most likely token is the label; labels are shifted, as in training."""
    model.eval()
    right = total = 0
    for batch in batches:
        guesses = model(input_ids=batch["input_ids"].to(model.device), use_cache=False).logits[:, :-1].argmax(-1).cpu()
        labels = batch["labels"][:, 1:]
        counted = labels != -100
        right += int((guesses == labels)[counted].sum())
        total += int(counted.sum())
    return right / total


def over_seeds(
    run: Callable[[int, float], tuple[Trained, dict[str, float]]],
    seeds: list[int],
    learning_rates: list[float],
    score: Callable[[dict], float],
) -> dict[int, tuple[Trained, dict[str, float]]]:
    """Runs every seed, with the learning rate that gave the highest score on the first one.

    Args:
        run: takes a seed and a learning rate, builds a model, and returns what it trained and its metrics.
        score: the metrics' quality; NaN counts as the worst.

    Returns:
        What each seed's run returned, with "learning_rate" among the metrics.
    """

    def run_seeded(seed, rate):
        set_seed(seed)
        trained, metrics = run(seed, rate)
        return trained, metrics | {"learning_rate": rate}

    tried = {rate: run_seeded(seeds[0], rate) for rate in learning_rates}
    scores = {rate: score(metrics) for rate, (_, metrics) in tried.items()}
    best = max(scores, key=lambda rate: scores[rate] if math.isfinite(scores[rate]) else -math.inf)
    return {seeds[0]: tried[best]} | {seed: run_seeded(seed, best) for seed in seeds[1:]}
