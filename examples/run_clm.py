# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Trains or fine-tunes a causal language model on text: transformers' run_clm, with ToST's presets and the authors' recipe.

    python examples/run_clm.py --config_name tost-base --tokenizer_name gpt2 --dataset_name Skylion007/openwebtext \
        --do_train --do_eval --output_dir my-tost

The arguments are those of transformers' own run_clm.py; a .json or .yaml file of them may be given instead. Options left out
are the published recipe (see `ToSTTrainingArguments`). Start it with `accelerate launch` to use several devices.
"""

import logging
import os
import sys
from dataclasses import dataclass, field
from itertools import chain

from datasets import Dataset
from scripting import (
    LOADERS,
    HubArguments,
    check_limits,
    ending,
    load_pretrained,
    load_rows,
    override_config,
    parse_args,
    run,
    set_up_logging,
    train_and_report,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    default_data_collator,
    set_seed,
)

from tost_hf import PRESETS, ToSTConfig, ToSTTrainer, ToSTTrainingArguments
from tost_hf.training.metrics import TokenAccuracy, perplexity


logger = logging.getLogger("run_clm")

DEFAULT_BLOCK_SIZE = 1024


@dataclass
class ModelArguments(HubArguments):
    """Which model, configuration and tokenizer."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "The model to fine-tune; leave it out to train one from scratch."}
    )
    model_type: str = field(default="tost", metadata={"help": "The kind of model to train from scratch by default sizes."})
    config_name: str | None = field(
        default=None,
        metadata={"help": f"The configuration to train from scratch: {', '.join(PRESETS)}, a folder or a Hub id."},
    )
    config_overrides: str | None = field(
        default=None,
        metadata={
            "help": "Changes to the configuration of a model trained from scratch, such as "
            "n_layer=4,hidden_size=128,max_position_embeddings=null."
        },
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "The tokenizer, a folder or a Hub id; the model's own if left out."}
    )
    use_fast_tokenizer: bool = field(default=True, metadata={"help": "Whether to prefer a fast tokenizer."})
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "The dtype of the weights; mixed precision is chosen with --bf16 instead.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )

    def __post_init__(self):
        if self.config_overrides is not None and self.model_name_or_path is not None:
            raise ValueError("--config_overrides is for a model trained from scratch, not for --model_name_or_path.")


@dataclass
class DataTrainingArguments:
    """Which text, and how it is cut into blocks."""

    dataset_name: str | None = field(default=None, metadata={"help": "The dataset, a Hub id or a folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "The configuration of the dataset."})
    train_file: str | None = field(default=None, metadata={"help": f"The training text ({', '.join(LOADERS)})."})
    validation_file: str | None = field(default=None, metadata={"help": f"The validation text ({', '.join(LOADERS)})."})
    validation_split_percentage: int = field(
        default=5, metadata={"help": "The part of the training rows held out where there is no validation text."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Use so many training blocks only."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use so many validation blocks only."})
    streaming: bool = field(default=False, metadata={"help": "Read the data while training, without preparing all of it."})
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens of one block. Default: what the model can take, up to 1,024."}
    )
    add_eos_token: bool | None = field(
        default=None,
        metadata={
            "help": "Whether to end each row with the tokenizer's eos token. Default: yes, as a row is a document, but not "
            "for txt, where a row is a line; there, write the eos token's text between documents yourself.",
            "nargs": "?",
            "const": True,
        },
    )
    keep_linebreaks: bool = field(default=True, metadata={"help": "Whether to keep the line breaks of txt files."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again even if the result is cached."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})

    def __post_init__(self):
        if self.dataset_name is None and self.train_file is None and self.validation_file is None:
            raise ValueError("There is no text to work on: give --dataset_name, --train_file or --validation_file.")
        check_limits(self)
        if not 0 <= self.validation_split_percentage < 100:
            raise ValueError(
                f"--validation_split_percentage must be at least 0 and below 100, got {self.validation_split_percentage}."
            )
        for file in filter(None, (self.train_file, self.validation_file)):
            if ending(file) not in LOADERS:
                raise ValueError(f"The text file {file!r} must end in one of: {', '.join('.' + x for x in LOADERS)}.")
            if "://" in file:  # a URL, which datasets fetches
                continue
            if not os.path.isfile(file):
                raise FileNotFoundError(f"The text file {file!r} does not exist.")
            if os.path.getsize(file) == 0:
                raise ValueError(f"The text file {file!r} is empty.")


def load_texts(model_args: ModelArguments, data_args: DataTrainingArguments) -> dict:
    """The rows of text of "train" and "validation", each a `Dataset` or, streaming, an `IterableDataset`."""
    options = {"cache_dir": model_args.cache_dir, "token": model_args.token, "streaming": data_args.streaming}
    if data_args.dataset_name is not None:
        texts = dict(load_rows(data_args.dataset_name, data_args.dataset_config_name, **options))
    else:
        texts = {}
        for split, file in (("train", data_args.train_file), ("validation", data_args.validation_file)):
            if file is not None:
                lines = {"keep_linebreaks": data_args.keep_linebreaks} if ending(file) == "txt" else {}
                texts[split] = load_rows(LOADERS[ending(file)], data_files=file, split="train", **options, **lines)
    percentage = data_args.validation_split_percentage
    if "validation" not in texts and "train" in texts and percentage > 0:
        texts["train"], texts["validation"] = hold_out(texts["train"], percentage)
    return texts


def hold_out(rows, percentage: int) -> tuple:
    """Splits rows into those to train on and those to validate on: the first ones, or those of every 100 in a stream."""
    if not isinstance(rows, Dataset):
        return (
            rows.filter(lambda _, index: index % 100 >= percentage, with_indices=True),
            rows.filter(lambda _, index: index % 100 < percentage, with_indices=True),
        )
    if len(rows) < 2:
        raise ValueError(
            "The training text has a single row, of which none can be held out: give --validation_file, or "
            "--validation_split_percentage 0."
        )
    held_out = max(1, len(rows) * percentage // 100)
    return rows.select(range(held_out, len(rows))), rows.select(range(held_out))


def load_config(model_args: ModelArguments) -> PreTrainedConfig:
    """The configuration of the model to fine-tune, or of the one to train from scratch."""
    name = model_args.config_name or model_args.model_name_or_path
    if name is None:
        config = AutoConfig.for_model(model_args.model_type)
    elif name in PRESETS and not os.path.isdir(name) and model_args.config_name is not None:
        config = ToSTConfig.from_preset(name)
    else:
        config = load_pretrained(AutoConfig, name, **model_args.hub_options)
    if getattr(config, "vocab_size", None) is None:
        raise ValueError(f"{name!r} is no language model but of the type {config.model_type!r}.")
    return override_config(config, model_args.config_overrides)


def load_tokenizer(model_args: ModelArguments) -> PreTrainedTokenizerBase:
    name = model_args.tokenizer_name or model_args.model_name_or_path
    if name is None:
        raise ValueError("A model trained from scratch needs a tokenizer: give --tokenizer_name, a folder or a Hub id.")
    return load_pretrained(AutoTokenizer, name, use_fast=model_args.use_fast_tokenizer, **model_args.hub_options)


def load_model(model_args: ModelArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model to fine-tune, or a new one, with room for all of the tokenizer's tokens."""
    options = {"dtype": model_args.dtype} if model_args.dtype is not None else {}
    if model_args.model_name_or_path is None:
        if len(tokenizer) > config.vocab_size:
            config.vocab_size = -(-len(tokenizer) // 64) * 64  # as GPT-2's 50,257 become 50,304
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, key, getattr(tokenizer, key))
        if options.get("dtype") == "auto":
            del options["dtype"]
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=model_args.trust_remote_code, **options)
        logger.info(f"A new model of {model.num_parameters():,} parameters")
        return model
    options |= model_args.hub_options
    model = load_pretrained(AutoModelForCausalLM, model_args.model_name_or_path, config=config, **options)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
    return model


def choose_block_size(block_size: int | None, config: PreTrainedConfig) -> int:
    """The block size asked for, if the model can take it, or else the largest one up to 1,024."""
    limit = getattr(config, "max_position_embeddings", None)
    if block_size is None:
        return min(limit or DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE)
    if block_size < 2:
        raise ValueError(f"--block_size must be at least 2, one token to see and one to predict, got {block_size}.")
    if limit is not None and block_size > limit:
        raise ValueError(
            f"--block_size {block_size} is over the model's max_position_embeddings of {limit}; shorten the blocks, or train "
            "a model with --config_overrides max_position_embeddings=null, which has no limit."
        )
    return block_size


def cut_into_blocks(
    rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, column: str, block_size: int, eos_token_id: int | None
) -> dict[str, list[list[int]]]:
    """Tokenizes rows, joins them, and cuts the result into blocks; what is left over, less than a block, is dropped."""
    texts = [text for text in rows[column] if text]
    token_lists = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"] if texts else []
    if eos_token_id is not None:
        token_lists = [ids if ids[-1:] == [eos_token_id] else [*ids, eos_token_id] for ids in token_lists]
    tokens = list(chain.from_iterable(token_lists))
    blocks = [tokens[i : i + block_size] for i in range(0, len(tokens) - block_size + 1, block_size)]
    return {"input_ids": blocks, "labels": [list(block) for block in blocks]}


def prepare_blocks(split: str, rows, tokenizer: PreTrainedTokenizerBase, block_size: int, max_samples: int | None, data_args):
    """Blocks of tokens to train on or to evaluate."""
    columns = rows.column_names or list(next(iter(rows)))
    column = "text" if "text" in columns else columns[0]
    first = next(iter(rows), {}).get(column)
    if not isinstance(first, str | None):
        raise ValueError(f"The column {column!r} of the {split} data holds no text but values such as {first!r}.")
    file = data_args.train_file if split == "train" else data_args.validation_file or data_args.train_file
    rows_are_lines = data_args.dataset_name is None and ending(file) == "txt"
    add_eos = data_args.add_eos_token if data_args.add_eos_token is not None else not rows_are_lines
    if add_eos and tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no eos token to end a document with; set one, or use --add_eos_token false.")
    options = {}
    if not data_args.streaming:  # a stream has no workers, cache or length
        options["num_proc"] = data_args.preprocessing_num_workers
        options["load_from_cache_file"] = not data_args.overwrite_cache
        options["desc"] = f"Cutting the {split} text into blocks of {block_size}"
    blocks = rows.map(
        cut_into_blocks,
        batched=True,
        batch_size=10_000 if rows_are_lines else 1_000,  # each such batch loses less than a block
        remove_columns=columns,
        fn_kwargs={
            "tokenizer": tokenizer,
            "column": column,
            "block_size": block_size,
            "eos_token_id": tokenizer.eos_token_id if add_eos else None,
        },
        **options,
    )
    if next(iter(blocks), None) is None:
        raise ValueError(f"The {split} text is shorter than one block of {block_size} tokens; choose a smaller --block_size.")
    if max_samples is not None:
        blocks = blocks.take(max_samples)
    return blocks


def most_likely(logits, labels):
    """The predicted tokens, kept in place of the logits, which would not fit in memory."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits.argmax(dim=-1)


def compute_metrics(evaluated: EvalPrediction) -> dict[str, float]:
    predictions, labels = evaluated.predictions[:, :-1], evaluated.label_ids[:, 1:]
    accuracy = TokenAccuracy().compute(predictions=predictions.ravel(), references=labels.ravel())
    return accuracy | {"perplexity": perplexity(float(evaluated.losses.mean()))}


def load_blocks(model_args, data_args, training_args, tokenizer: PreTrainedTokenizerBase, block_size: int) -> dict:
    """The blocks of "train" and "validation" that are wanted."""
    blocks = {}
    with training_args.main_process_first(desc="preparing the text"):
        texts = load_texts(model_args, data_args)
        for split, wanted, max_samples in (
            ("train", training_args.do_train, data_args.max_train_samples),
            ("validation", training_args.do_eval, data_args.max_eval_samples),
        ):
            if wanted and split not in texts:
                raise ValueError(f"There is no {split} text; give --{split}_file, or a dataset that has one.")
            if wanted:
                blocks[split] = prepare_blocks(split, texts[split], tokenizer, block_size, max_samples, data_args)
    return blocks


def main(args: list[str] | None = None) -> None:
    args = sys.argv[1:] if args is None else args
    model_args, data_args, training_args = parse_args(
        args, ModelArguments, DataTrainingArguments, ToSTTrainingArguments, description=__doc__
    )
    set_up_logging(training_args, logger)
    set_seed(training_args.seed)

    config = load_config(model_args)
    block_size = choose_block_size(data_args.block_size, config)
    tokenizer = load_tokenizer(model_args)
    model = load_model(model_args, config, tokenizer)
    blocks = load_blocks(model_args, data_args, training_args, tokenizer, block_size)

    training_args.include_for_metrics = ["loss"]  # for the perplexity
    trainer_class = ToSTTrainer if model.config.model_type == ToSTConfig.model_type else Trainer
    trainer = trainer_class(
        model=model,
        args=training_args,
        train_dataset=blocks.get("train"),
        eval_dataset=blocks.get("validation"),
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=most_likely,
    )
    limits = {"train": data_args.max_train_samples, "validation": data_args.max_eval_samples}
    counts = {name: len(rows) if isinstance(rows, Dataset) else limits[name] for name, rows in blocks.items()}
    samples = {"train": counts.get("train"), "eval": counts.get("validation")}
    train_and_report(trainer, model_args, data_args, "text-generation", samples)


if __name__ == "__main__":
    run(main)
