# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a language model: minimal_clm.py plus every option, exact resuming, streams, several processes, curves and a card.

    python examples/run_clm.py examples/recipes/text_pretraining.yaml --config_name tost-base --tokenizer_name gpt2 \
        --dataset_name Skylion007/openwebtext --do_train --do_eval --output_dir my-tost

It has the arguments and defaults of transformers' run_clm.py, except for the optimizer's defaults, which are the authors'. The
first argument may be a .yaml or .json file of arguments, such as that of the published pre-training; those after it take
precedence. Start it with `accelerate launch` to use several devices.
"""

import logging
import sys
from dataclasses import dataclass

import script_setup  # noqa: F401
import scripting
from datasets import Dataset
from scripting import check_actions, load_pretrained, override_config, parse_args, position_limit, run, set_up_logging
from texts import DataTrainingArguments, load_blocks
from training_runs import train_and_report
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.hf_argparser import HfArg

from tost_hf import ToSTTrainer, ToSTTrainingArguments
from tost_hf.training.callbacks import TrainingFilesCallback
from tost_hf.training.metrics import Accuracy, perplexity
from tost_hf.training.streams import collate_blocks


logger = logging.getLogger("run_clm")

DEFAULT_BLOCK_SIZE = 1024


@dataclass
class ModelArguments(scripting.ModelArguments):
    """Which model, configuration and tokenizer."""

    model_type: str = HfArg(default="tost", help="The type of model to train from scratch with default sizes.")
    tokenizer_name: str | None = HfArg(default=None, help="The tokenizer, a folder or a Hub id. Default: the model's.")
    use_fast_tokenizer: bool = HfArg(default=True, help="Whether to prefer a fast tokenizer.")

    def __post_init__(self):
        if self.config_overrides is not None and self.model_name_or_path is not None:
            raise ValueError("--config_overrides is for a model trained from scratch, not for --model_name_or_path.")


def load_config(model_args: ModelArguments) -> PreTrainedConfig:
    """The configuration of the model to fine-tune, or of the one to train from scratch."""
    config = model_args.load_config()
    if getattr(config, "vocab_size", None) is None:
        name = model_args.config_name or model_args.model_name_or_path
        raise ValueError(f"{name!r} is no language model but of the type {config.model_type!r}.")
    # a new model gets the special tokens of the tokenizer: others may lie outside an overridden vocabulary
    defaults = {} if model_args.model_name_or_path else {"bos_token_id": None, "eos_token_id": None}
    return override_config(config, model_args.config_overrides, **defaults)


def load_tokenizer(model_args: ModelArguments) -> PreTrainedTokenizerBase:
    name = model_args.tokenizer_name or model_args.model_name_or_path
    if name is None:
        raise ValueError("A model trained from scratch needs a tokenizer: give --tokenizer_name, a folder or a Hub id.")
    return load_pretrained(AutoTokenizer, name, use_fast=model_args.use_fast_tokenizer, **model_args.hub_options)


def load_model(model_args: ModelArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model to fine-tune, or a new one, with embeddings for all of the tokenizer's tokens."""
    if model_args.model_name_or_path is None:
        if len(tokenizer) > config.vocab_size:
            config.vocab_size = -(-len(tokenizer) // 64) * 64  # a multiple of 64, as GPT-2's 50,304
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, key, getattr(tokenizer, key))
        model = AutoModelForCausalLM.from_config(config, **model_args.new_model_options)
        return model
    model = load_pretrained(
        AutoModelForCausalLM, model_args.model_name_or_path, config=config, **model_args.pretrained_options
    )
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
    return model


def choose_block_size(block_size: int | None, config: PreTrainedConfig) -> int:
    """Checks the requested block size; by default the model's maximum, up to 1,024."""
    limit = position_limit(config)
    if block_size is None:
        return min(limit or DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE)
    if block_size < 2:
        raise ValueError(f"--block_size must be at least 2, one token to see and one to predict, got {block_size}.")
    if limit is not None and block_size > limit:
        raise ValueError(
            f"--block_size {block_size} is over the model's max_position_embeddings of {limit}; shorten the blocks, or train "
            "a model with --config_overrides position_embedding_type=none, which has no limit."
        )
    return block_size


def preprocess_logits_for_metrics(logits, labels):
    """The predicted tokens; the logits of all batches would not fit in memory."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits.argmax(dim=-1)


def compute_metrics(eval_prediction: EvalPrediction) -> dict[str, float]:
    predictions, labels = eval_prediction.predictions[:, :-1], eval_prediction.label_ids[:, 1:]
    accuracy = Accuracy().compute(predictions=predictions.ravel(), references=labels.ravel())
    return accuracy | {"perplexity": perplexity(float(eval_prediction.losses.mean()))}


def main(args: list[str] | None = None) -> None:
    args = sys.argv[1:] if args is None else args
    model_args, data_args, training_args = parse_args(
        args, ModelArguments, DataTrainingArguments, ToSTTrainingArguments, description=__doc__
    )
    if data_args.streaming and training_args.do_train and training_args.max_steps < 0:
        raise ValueError("The length of a stream's epoch is unknown: give --max_steps with --streaming.")
    check_actions(training_args, "do_train", "do_eval")
    set_up_logging(training_args, logger)
    set_seed(training_args.seed)

    config = load_config(model_args)
    block_size = choose_block_size(data_args.block_size, config)
    tokenizer = load_tokenizer(model_args)
    model = load_model(model_args, config, tokenizer)
    blocks = load_blocks(model_args, data_args, training_args, tokenizer, block_size)

    train_files = [data_args.dataset_name] if data_args.dataset_name else data_args.train_file or []
    training_args.include_for_metrics = ["loss"]  # for the perplexity
    trainer = ToSTTrainer(
        model=model,
        args=training_args,
        train_dataset=blocks.get("train"),
        eval_dataset=blocks.get("validation"),
        processing_class=tokenizer,
        data_collator=collate_blocks,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        callbacks=[TrainingFilesCallback(train_files, training_args.ignore_data_skip)] if training_args.do_train else None,
    )
    limits = {"train": data_args.max_train_samples, "validation": data_args.max_eval_samples}
    counts = {name: len(dataset) if isinstance(dataset, Dataset) else limits[name] for name, dataset in blocks.items()}
    samples = {"train": counts.get("train"), "eval": counts.get("validation")}
    train_and_report(trainer, model_args, data_args, "text-generation", f"blocks of {block_size} tokens", samples, block_size)


if __name__ == "__main__":
    run(main)
