# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Shared by the benchmarks that train: the training run, its records, the selection of learning rates.

Every model of a comparison has the same steps, batches, optimizer and candidate learning rates.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
import transformers
from records import append_records, format_mean, format_table, make_origin, read_records, select
from transformers import PreTrainedModel, TrainerCallback, set_seed
from transformers.utils import is_torch_bf16_gpu_available

from tost_hf import ToSTTrainer, ToSTTrainingArguments


# from a seed and a learning rate to the model and its metrics
Run = Callable[[int, float], tuple[PreTrainedModel, dict[str, float]]]


# Records --------------------------------------------------------------------------------------------------------------


class Results:
    """The records of a run, appended to `<results>/<file>.csv` as they come."""

    def __init__(self, args: argparse.Namespace, file: str = "results"):
        self.args, self.path, self.records = args, args.results / f"{file}.csv", []
        self.origin = make_origin(args)

    def add(
        self, metrics: dict[str, float], *, task: str, model: str, network: PreTrainedModel, steps, batch, context, seed
    ) -> None:
        """Adds one record per metric; width and layers are those of the network's configuration."""
        case = {
            "task": task,
            "model": model,
            "parameters": network.num_parameters(),
            "width": network.config.hidden_size,
            "layers": network.config.num_hidden_layers,
            "steps": steps,
            "batch": batch,
            "context": context,
            "seed": seed,
        }
        records = [self.origin | case | {"metric": metric, "value": f"{value:.6g}"} for metric, value in metrics.items()]
        self.records.extend(records)
        append_records(self.path, records)

    def add_missing(
        self,
        run: Run,
        score: Callable[[dict[str, float]], float] = lambda metrics: 0.0,
        *,
        width: int,
        learning_rate: float | None = None,
        **case,
    ) -> None:
        """Runs the seeds of this case that have no records yet, and adds the records of each when it ends.

        Args:
            run, score: as in `run_seeds`.
            learning_rate: replaces those of the arguments.
            width, case: identify the case; `case` has `add`'s other arguments, `steps` by default those of the run.
        """
        args, case = self.args, {"steps": self.args.steps, **case}
        columns = {"script": f"{args.benchmark}.py", "width": width, **case}
        existing_records = select(read_records(self.path), **columns)
        self.records += existing_records
        for seed in args.seeds:
            if any(record["seed"] == str(seed) for record in existing_records):
                continue
            first_seed_records = select(self.records, **columns, seed=args.seeds[0], metric="learning_rate")
            rates = [float(record["value"]) for record in first_seed_records] or (
                [learning_rate] if learning_rate else args.learning_rates
            )
            ((network, metrics),) = run_seeds(run, [seed], rates, score, f"{case['task']}, {case['model']}").values()
            self.add(metrics, network=network, seed=seed, **case)

    def print_means(self) -> None:
        """Prints the mean ± standard deviation over the seeds of every metric, as a Markdown table."""
        values: dict[tuple[str, ...], list[float]] = {}
        for record in self.records:
            case = tuple(str(record[name]) for name in ("task", "model", "metric"))
            values.setdefault(case, []).append(float(record["value"]))
        print(
            format_table(["task", "model", "metric", "mean"], [[*case, format_mean(x, ".4g")] for case, x in values.items()])
        )


# Training ------------------------------------------------------------------------------------------------------------


class Batches(torch.utils.data.Dataset):
    """Batches of a synthetic task, generated from (seed, index): different in every step, equal in every run."""

    def __init__(self, make: Callable[[np.random.Generator], dict[str, torch.Tensor]], count: int, seed: int):
        self.make, self.count, self.seed = make, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self.count:
            raise IndexError(index)
        return self.make(np.random.default_rng((self.seed, index)))


class StepTimer(TrainerCallback):
    """The seconds of each step: forward, backward and optimizer, without evaluation and data loading."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.start)


def train(
    model: PreTrainedModel, data, *, steps: int, learning_rate: float, seed: int, batch_size: int = 1, callbacks=(), **options
):
    """Trains with `ToSTTrainer` (AdamW, warm-up for a tenth of the steps, cosine decay to a tenth, clipping at 1).

    Args:
        data: a dataset for the trainer, or `Batches`.
        options: `eval_dataset` and `data_collator` of the trainer; all others are training arguments.

    Returns:
        The trainer, for its `evaluate()` and the history of its losses.
    """
    if isinstance(data, Batches):
        options = {"data_collator": lambda items: items[0]} | options
    trainer_options = {name: options.pop(name) for name in ("eval_dataset", "data_collator") if name in options}
    with tempfile.TemporaryDirectory() as output_dir:
        arguments = ToSTTrainingArguments(
            output_dir=output_dir,
            max_steps=steps,
            warmup_steps=min(2000, steps // 10),
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            bf16=is_torch_bf16_gpu_available(),
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            seed=seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **({"logging_steps": max(1, steps // 50)} | options),
        )
        trainer = ToSTTrainer(model, arguments, train_dataset=data, callbacks=list(callbacks), **trainer_options)
        trainer.pop_callback(transformers.PrinterCallback)
        trainer.train()
    return trainer


@torch.no_grad()
def label_accuracy(model: PreTrainedModel, batches: Iterable[dict[str, torch.Tensor]]) -> float:
    """The fraction of labeled positions whose most likely token is the label; labels are shifted, as in training."""
    model.eval()
    num_correct = num_labels = 0
    for batch in batches:
        predictions = model(input_ids=batch["input_ids"].to(model.device), use_cache=False).logits[:, :-1].argmax(-1).cpu()
        labels = batch["labels"][:, 1:]
        has_label = labels != -100
        num_correct += int((predictions == labels)[has_label].sum())
        num_labels += int(has_label.sum())
    return num_correct / num_labels


def run_seeds(
    run: Run, seeds: list[int], learning_rates: list[float], score: Callable[[dict[str, float]], float], label: str
) -> dict[int, tuple[PreTrainedModel, dict[str, float]]]:
    """Runs every seed, with the learning rate that had the highest score with the first seed.

    Args:
        run: accepts a seed and a learning rate, builds a model, and returns the trained model and its metrics.
        score: of the metrics; higher is better.
        label: printed before each run's metrics.

    Returns:
        What each seed's run returned, with "learning_rate" among the metrics.
    """

    def run_seeded(seed, rate):
        set_seed(seed)
        model, metrics = run(seed, rate)
        print(f"{label}, seed {seed}, learning rate {rate}: {metrics}", flush=True)
        return model, metrics | {"learning_rate": rate}

    first_seed_runs = {rate: run_seeded(seeds[0], rate) for rate in learning_rates}
    best_rate = max(first_seed_runs, key=lambda rate: score(first_seed_runs[rate][1]))
    return {seeds[0]: first_seed_runs[best_rate]} | {seed: run_seeded(seed, best_rate) for seed in seeds[1:]}
