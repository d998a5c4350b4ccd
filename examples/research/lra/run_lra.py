# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a model on a task of Long Range Arena with the paper's settings (examples/recipes/lra_*.yaml), and tests it.

    python examples/research/lra/make_data.py listops --output_dir data/listops
    python examples/research/lra/run_lra.py examples/recipes/lra_listops.yaml --dataset_name data/listops --do_train \
        --output_dir my-listops
    python examples/research/lra/run_lra.py examples/recipes/lra_text.yaml --dataset_name stanfordnlp/imdb --attention linear \
        --do_train --output_dir my-text

Arguments after the file take precedence; others are the Trainer's. Start it with `accelerate launch` to use several devices.
The training curve is drawn at every evaluation (course.png), and an interrupted run resumes when the command is given again.
"""

import logging
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from transformers import EvalPrediction, Trainer, TrainerCallback, set_seed


sys.path.append(str(Path(__file__).parents[2]))

from curves import plot_curves
from evaluation import Measurement, Source, make_results, write_results
from lra_models import ATTENTION, LRAConfig, make_config, make_model
from lra_tasks import TASKS, Examples, collate, load_splits
from scripting import (
    check_limits,
    override_config,
    parse_args,
    recorded_command,
    report,
    run,
    set_up_logging,
    train_and_report,
)

from tost_hf import ToSTTrainer, ToSTTrainingArguments
from tost_hf.files import EVALUATION
from tost_hf.model.configuration_tost import LRA_PRESETS
from tost_hf.training.metrics import TokenAccuracy


logger = logging.getLogger("run_lra")


@dataclass
class ModelArguments:
    """Which model."""

    model_name_or_path = None  # all are trained from scratch

    attention: str = field(
        default="tost", metadata={"help": "What the trunk mixes its tokens with.", "choices": list(ATTENTION)}
    )
    config_overrides: str | None = field(
        default=None,
        metadata={
            "help": "Changes to the task's configuration (LRA_PRESETS), such as hidden_size=64,mlp_type=ista. "
            "Forgetting and the convolution are for causal models: is_causal=true,forgetting=token,conv_kernel=4."
        },
    )


@dataclass
class DataArguments:
    """Which data, and how much of it."""

    dataset_name: str = field(
        metadata={
            "help": "A folder or a Hub id with training and test data: Source and Target, text and label, image and label, or "
            "label, text1 and text2 (also a folder of AAN's own .tsv files)."
        }
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "The configuration of the data set."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where prepared data is kept."})
    max_length: int | None = field(
        default=None,
        metadata={"help": "Tokens at which a text is cut; pixels to which a picture is scaled. Default: the paper's."},
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Use so many training examples only."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use so many validation and test examples only."})

    def __post_init__(self):
        check_limits(self)
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"--max_length must be at least 1, got {self.max_length}.")


@dataclass
class LRATrainingArguments(ToSTTrainingArguments):
    """With the task, and evaluations and checkpoints fifty times a run."""

    task: str = field(default="listops", metadata={"help": "The task.", "choices": list(TASKS)})
    eval_strategy: str = field(default="steps", metadata={"help": "When to evaluate: no, steps or epoch."})
    eval_steps: float = field(default=0.02, metadata={"help": "Steps between evaluations, or a share of the run if below 1."})
    save_steps: float = field(default=0.02, metadata={"help": "Steps between checkpoints, or a share of the run if below 1."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints to keep."})
    logging_steps: float = field(default=0.002, metadata={"help": "Steps between losses in the log, or a share of the run."})


class LRATrainer(ToSTTrainer):
    """`ToSTTrainer`, for the other models of the arena as well."""

    def create_model_card(self, *args, **kwargs) -> None:
        """ToST's card for ToST, transformers' own for models that only this folder knows."""
        if isinstance(self.model.config, LRAConfig):
            Trainer.create_model_card(self, *args, **kwargs)
        else:
            super().create_model_card(*args, **kwargs)


class PlotCurves(TrainerCallback):
    """Draws the losses and accuracies so far at every evaluation."""

    def on_evaluate(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            plot_curves(state.log_history, Path(args.output_dir, "course.png"))


def most_likely(logits, labels):
    return logits.argmax(-1)


def compute_metrics(evaluated: EvalPrediction) -> dict[str, float]:
    return TokenAccuracy().compute(predictions=evaluated.predictions, references=evaluated.label_ids)


def load_examples(data_args: DataArguments, name: str, length: int, classes: int) -> dict[str, Examples]:
    """What each split holds, cut to the numbers asked for."""
    task = TASKS[name]
    splits = load_splits(data_args.dataset_name, task, data_args.dataset_config_name, cache_dir=data_args.cache_dir)
    examples = {}
    for split, data in splits.items():
        limit = data_args.max_train_samples if split == "train" else data_args.max_eval_samples
        data = data if limit is None else data.select(range(min(limit, len(data))))
        examples[split] = Examples(data, task, length, f"The {split} data of {data_args.dataset_name!r}")
        examples[split].check_labels(classes)
    return examples


def test(trainer: Trainer, examples: Examples, args: LRATrainingArguments, data_args: DataArguments) -> None:
    """The accuracy on the test data, for the log, the records and the card."""
    metrics = trainer.evaluate(examples, metric_key_prefix="test")
    report(trainer, "test", metrics, len(examples))
    if not trainer.is_world_process_zero():
        return
    folder = Path(data_args.dataset_name)
    source = Source(
        examples.dataset, folder.name if folder.exists() else data_args.dataset_name, data_args.dataset_config_name, "test"
    )
    protocol = f"Long Range Arena, {args.task}, texts of up to {examples.length} tokens"
    measured = Measurement("accuracy", "accuracy", metrics["test_accuracy"], len(examples), protocol)
    results = make_results("text-classification", args.task, source, [measured], recorded_command(sys.argv), args.seed)
    write_results(Path(args.output_dir, EVALUATION), results)


def main(args: list[str] | None = None) -> None:
    args = sys.argv[1:] if args is None else args
    model_args, data_args, training_args = parse_args(
        args, ModelArguments, DataArguments, LRATrainingArguments, description=__doc__
    )
    set_up_logging(training_args, logger)
    set_seed(training_args.seed)

    preset = f"tost-lra-{training_args.task}"
    length = data_args.max_length or LRA_PRESETS[preset]["max_position_embeddings"]
    if training_args.task in ("image", "pathfinder") and math.isqrt(length) ** 2 != length:
        raise ValueError(f"--max_length {length} is no square, so no picture has as many pixels.")
    config = make_config(preset, model_args.attention)
    config = override_config(config, model_args.config_overrides, max_position_embeddings=length)
    positions = config.max_position_embeddings
    if positions is not None and positions < length:
        raise ValueError(
            f"The model has {positions} positions and texts are up to {length} tokens long: set --max_length {positions}, or "
            "leave max_position_embeddings to it."
        )
    if training_args.push_to_hub and isinstance(config, LRAConfig):
        raise ValueError("--push_to_hub is for ToST alone: only the code of this folder could load the other models.")
    model = make_model(config)
    logger.info(f"A new model of {model.num_parameters():,} parameters")
    with training_args.main_process_first(desc="preparing the data"):
        examples = load_examples(data_args, training_args.task, length, config.num_labels)

    trainer = LRATrainer(
        model=model,
        args=training_args,
        train_dataset=examples["train"],
        eval_dataset=examples["validation"],
        data_collator=collate,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=most_likely,
        callbacks=[PlotCurves()],
    )
    samples = {"train": len(examples["train"]), "eval": len(examples["validation"])}
    train_and_report(
        trainer,
        model_args,
        data_args,
        "text-classification",
        samples,
        before_card=lambda: test(trainer, examples["test"], training_args, data_args),
    )


if __name__ == "__main__":
    run(main)
