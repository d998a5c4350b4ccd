# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Trains and tests a model on a task of Long Range Arena with the paper's settings (examples/recipes/lra_*.yaml).

    python examples/research/lra/make_data.py listops --output_dir data/listops
    python examples/research/lra/run_lra.py examples/recipes/lra_listops.yaml --dataset_name data/listops --do_train \
        --output_dir my-listops
    python examples/research/lra/run_lra.py examples/recipes/lra_text.yaml --dataset_name stanfordnlp/imdb --attention linear \
        --do_train --output_dir my-text

Arguments after the file take precedence; all other arguments are those of Trainer. Start it with `accelerate launch` to use
several devices. The training curves are plotted at every evaluation (curves.png). If a run is interrupted, the same
command resumes it.
"""

import logging
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from transformers import Trainer, set_seed
from transformers.hf_argparser import HfArg


sys.path.append(str(Path(__file__).parents[2]))

from classification import compute_metrics, preprocess_logits_for_metrics
from evaluation import Measurement, Source, make_results, write_results
from lra_models import ATTENTION, LRAConfig, make_config, make_model
from lra_tasks import TASKS, Examples, collate, load_splits
from scripting import (
    check_limits,
    override_config,
    parse_args,
    recorded_command,
    run,
    set_up_logging,
)
from training_runs import report_final_metrics, train_and_report

from tost_hf import ToSTTrainer, ToSTTrainingArguments
from tost_hf.files import EVALUATION


logger = logging.getLogger("run_lra")


@dataclass
class ModelArguments:
    """The attention of the model, and changes to its configuration."""

    model_name_or_path = save_dtype = None  # all are trained from scratch and stored as trained

    attention: str = HfArg(default="tost", help="The attention of the model.", metadata={"choices": list(ATTENTION)})
    config_overrides: str | None = HfArg(
        default=None,
        help="Changes to the task's configuration, such as hidden_size=64,mlp_type=ista. "
        "Decay and the convolution are for causal models: is_causal=true,decay_type=token,conv_kernel=4.",
    )


@dataclass
class DataArguments:
    """The data set, and limits of its size."""

    dataset_name: str = HfArg(
        help="A folder or a Hub id with training and test data: Source and Target, text and label, image and label, or "
        "label, text1 and text2 (also a folder of AAN's own .tsv files)."
    )
    dataset_config_name: str | None = HfArg(default=None, help="The configuration of the data set.")
    cache_dir: str | None = HfArg(default=None, help="Where prepared data is stored.")
    max_length: int | None = HfArg(
        default=None,
        help="Tokens to which a sequence is truncated; pixels to which an image is resized. Default: the paper's.",
    )
    max_train_samples: int | None = HfArg(default=None, help="The maximum number of training examples.")
    max_eval_samples: int | None = HfArg(default=None, help="The maximum number of validation and test examples.")

    def __post_init__(self):
        check_limits(self)
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"--max_length must be at least 1, got {self.max_length}.")


@dataclass
class LRATrainingArguments(ToSTTrainingArguments):
    """Adds the task; by default a run has fifty evaluations and checkpoints."""

    task: str = HfArg(default="listops", help="The task.", metadata={"choices": list(TASKS)})
    eval_strategy: str = HfArg(default="steps", help="When to evaluate: no, steps or epoch.")
    eval_steps: float = HfArg(default=0.02, help="Steps between evaluations, or a fraction of the run if below 1.")
    save_steps: float = HfArg(default=0.02, help="Steps between checkpoints, or a fraction of the run if below 1.")
    logging_steps: float = HfArg(default=0.002, help="Steps between losses in the log, or a fraction of the run.")


def load_examples(data_args: DataArguments, name: str, length: int, classes: int) -> dict[str, Examples]:
    """The examples of each split, limited to the requested numbers."""
    task = TASKS[name]
    splits = load_splits(data_args.dataset_name, task, data_args.dataset_config_name, cache_dir=data_args.cache_dir)
    examples = {}
    for split, dataset in splits.items():
        limit = data_args.max_train_samples if split == "train" else data_args.max_eval_samples
        dataset = dataset if limit is None else dataset.select(range(min(limit, len(dataset))))
        examples[split] = Examples(dataset, task, length, f"The {split} data of {data_args.dataset_name!r}")
        examples[split].check_labels(classes)
    return examples


def evaluate_test_split(trainer: Trainer, examples: Examples, args: LRATrainingArguments, data_args: DataArguments) -> None:
    """Evaluates on the test data; writes the accuracy to the log, the results and the card."""
    metrics = trainer.evaluate(examples, metric_key_prefix="test")
    report_final_metrics(trainer, "test", metrics, len(examples))
    if not trainer.is_world_process_zero():
        return
    folder = Path(data_args.dataset_name)
    source = Source(
        examples.dataset, folder.name if folder.exists() else data_args.dataset_name, data_args.dataset_config_name, "test"
    )
    protocol = f"Long Range Arena, {args.task}, texts of up to {examples.length} tokens"
    measurement = Measurement("accuracy", "accuracy", metrics["test_accuracy"], len(examples), protocol)
    results = make_results("text-classification", args.task, source, [measurement], recorded_command(sys.argv), args.seed)
    write_results(Path(args.output_dir, EVALUATION), results)


def main(args: list[str] | None = None) -> None:
    args = sys.argv[1:] if args is None else args
    model_args, data_args, training_args = parse_args(
        args, ModelArguments, DataArguments, LRATrainingArguments, description=__doc__
    )
    set_up_logging(training_args, logger)
    set_seed(training_args.seed)

    config = make_config(training_args.task, attention=model_args.attention)
    length = data_args.max_length or config.max_position_embeddings
    if training_args.task in ("image", "pathfinder") and math.isqrt(length) ** 2 != length:
        raise ValueError(f"--max_length {length} is no square, so no picture has as many pixels.")
    config = override_config(config, model_args.config_overrides, max_position_embeddings=length)
    positions = config.max_position_embeddings
    if positions is not None and positions < length:
        raise ValueError(
            f"The model has {positions} positions and texts are up to {length} tokens long: set --max_length {positions}, or "
            "leave max_position_embeddings to it."
        )
    model = make_model(config)
    if training_args.push_to_hub and isinstance(model.config, LRAConfig):
        raise ValueError("--push_to_hub is for ToST alone: only the code of this folder could load the other models.")
    with training_args.main_process_first(desc="preparing the data"):
        examples = load_examples(data_args, training_args.task, length, config.num_labels)

    trainer = ToSTTrainer(
        model=model,
        args=training_args,
        train_dataset=examples["train"],
        eval_dataset=examples["validation"],
        data_collator=collate,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    samples = {"train": len(examples["train"]), "eval": len(examples["validation"])}
    train_and_report(
        trainer,
        model_args,
        data_args,
        "text-classification",
        "texts",
        samples,
        before_card=lambda: evaluate_test_split(trainer, examples["test"], training_args, data_args),
    )


if __name__ == "__main__":
    run(main)
