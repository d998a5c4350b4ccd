# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a text classifier: transformers' run_classification plus texts of any length, resuming, a confusion matrix, a card.

    python examples/run_classification.py --model_name_or_path model_cards/trained/tost-imdb-2m \
        --train_file documents.csv --do_train --do_eval --output_dir my-classifier    # a small model, on a CPU
    python examples/run_classification.py --config_name tost-plus-base --config_overrides pooling=mean \
        --tokenizer_vocab_size 8192 --dataset_name stanfordnlp/imdb --do_train --do_eval --output_dir my-classifier
    python examples/run_classification.py --model_name_or_path my-classifier --test_file more.csv --do_predict \
        --output_dir evaluated

It has the arguments of `ToSTTrainingArguments`. The first argument may be a .yaml or .json file of arguments; those after it
take precedence. The data is a Hub dataset, a folder that `datasets` reads, or files (csv, json, parquet) with a column of
texts and one of labels. --do_eval evaluates on the validation data, by default a part of the training data, also during
training, and --do_predict on the test data, once, at the end. Texts are read whole, unless the model has fewer positions or
--max_seq_length cuts them; batches are of texts of similar length. After ten steps the time of the training is estimated.
Accuracy, confusion matrix, training curves and card are written to the output folder. The model may be any sequence classifier
of transformers.
"""

import logging
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import script_setup  # noqa: F401
import numpy as np
import scripting
import torch
from classification import (
    class_section,
    compute_metrics,
    find_column,
    label_candidates,
    label_names,
    load_classifier,
    prepare_splits,
    preprocess_logits_for_metrics,
    pretrained_names,
)
from datasets import Dataset
from evaluation import Measurement, Source, make_results, write_results
from huggingface_hub import ModelCard
from scripting import (
    LOADERS,
    check_actions,
    check_limits,
    file_extension,
    load_pretrained,
    override_config,
    parse_args,
    position_limit,
    read_dataset,
    recorded_command,
    run,
    save_with_section,
    set_up_logging,
)
from texts import choose_batch_size, train_bpe
from tokenizers import processors
from training_runs import TimeEstimateCallback, report_final_metrics, train_and_report
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.hf_argparser import HfArg
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from transformers.trainer_utils import EvalLoopOutput

from tost_hf import ToSTTrainer, ToSTTrainingArguments
from tost_hf.files import EVALUATION
from tost_hf.hub.results import CARD
from tost_hf.training.checkpoints import output_folder


logger = logging.getLogger("run_classification")

VALIDATION_SPLITS = ("validation", "valid", "val", "dev")
TEXT_COLUMNS = ("text", "sentence", "content", "review")
PAD, CLS, MASK = "[PAD]", "[CLS]", "[MASK]"


@dataclass
class ModelArguments(scripting.ModelArguments):
    """Which model, configuration and tokenizer."""

    model_type: str = HfArg(default="tost", help="The type of model to train from scratch with default sizes.")
    tokenizer_name: str | None = HfArg(default=None, help="The tokenizer, a folder or a Hub id. Default: the model's.")
    tokenizer_vocab_size: int | None = HfArg(
        default=None,
        help="For a model from scratch: train a tokenizer of this size, lowercase byte-level BPE, on the training texts.",
    )


@dataclass
class DataTrainingArguments:
    """Which texts, and their labels."""

    dataset_name: str | None = HfArg(default=None, help="The dataset, a Hub id or a folder.")
    dataset_config_name: str | None = HfArg(default=None, help="The configuration of the dataset.")
    train_file: str | None = HfArg(default=None, help="A csv, json or parquet file of training texts.")
    validation_file: str | None = HfArg(default=None, help="A file of validation texts.")
    test_file: str | None = HfArg(default=None, help="A file of test texts.")
    text_column_name: str | None = HfArg(default=None, help="The column of texts. Default: the only one.")
    label_column_name: str | None = HfArg(default=None, help="The column of labels. Default: the only one.")
    class_names: str | None = HfArg(
        default=None,
        help="The names of the labels 0, 1, ..., separated by commas. Default: labels are names themselves.",
    )
    train_val_split: float | None = HfArg(
        default=None,
        help="The fraction of training texts to hold out if there are no validation texts. Default: 5 %%, but at least 100 "
        "texts, and at most a quarter.",
    )
    max_seq_length: int | None = HfArg(
        default=None, help="Texts are cut to this many tokens. Default: the model's maximum; some have none."
    )
    max_train_samples: int | None = HfArg(default=None, help="The maximum number of training texts.")
    max_eval_samples: int | None = HfArg(default=None, help="The maximum number of validation texts.")
    max_predict_samples: int | None = HfArg(default=None, help="The maximum number of test texts.")

    def __post_init__(self):
        if not any((self.dataset_name, self.train_file, self.validation_file, self.test_file)):
            raise ValueError(
                "There are no texts to work on: give --dataset_name, --train_file, --validation_file or --test_file."
            )
        check_limits(self)
        if self.train_val_split is not None and not 0 <= self.train_val_split < 1:
            raise ValueError(f"--train_val_split must be at least 0 and below 1, got {self.train_val_split}.")


@dataclass
class ClassificationTrainingArguments(ToSTTrainingArguments):
    """`ToSTTrainingArguments` with masked tokens; batches are of texts of similar length."""

    ranges = ToSTTrainingArguments.ranges | {"token_masking": (0, 1)}

    train_sampling_strategy: str = field(default="group_by_length", metadata={"help": "How the training texts are ordered."})
    include_num_input_tokens_seen: str = field(
        default="non_padding",
        metadata={"help": "Which tokens are counted, for the estimate of the time: all, non_padding, no."},
    )
    token_masking: float = field(
        default=0.0, metadata={"help": "Fraction of a text's tokens that are masked at random in each training step."}
    )


# Data ----------------------------------------------------------------------------------------------------------------


def load_texts(
    model_args: ModelArguments, data_args: DataTrainingArguments, training_args
) -> tuple[dict[str, Dataset], list[str]]:
    """The requested ones of "train", "validation" and "test", with "text" and "label", a class index; and the classes."""
    options = {"cache_dir": model_args.cache_dir, "token": model_args.token}
    if data_args.dataset_name is not None:
        splits = dict(read_dataset(data_args.dataset_name, data_args.dataset_config_name, **options))
        validation_split = next((name for name in VALIDATION_SPLITS if name in splits), None)
        if validation_split is not None:
            splits["validation"] = splits[validation_split]
    else:
        files = {"train": data_args.train_file, "validation": data_args.validation_file, "test": data_args.test_file}
        splits = {}
        for split, file in files.items():
            if file is not None:
                if file_extension(file) not in LOADERS:
                    raise ValueError(f"{file!r} is none of the kinds of files that can be read: {', '.join(LOADERS)}.")
                loader = LOADERS[file_extension(file)]
                splits[split] = read_dataset(loader, data_files=file, split="train", **options)
    flags = {"train": training_args.do_train, "validation": training_args.do_eval, "test": training_args.do_predict}
    requested = [split for split in flags if flags[split]]
    holds_out = training_args.do_eval and "validation" not in splits and data_args.train_val_split != 0
    names = pretrained_names(model_args)
    return prepare_splits(splits, choose_columns, data_args, requested, holds_out, names, "Text", training_args.seed)


def choose_columns(split: str, dataset: Dataset, data_args: DataTrainingArguments) -> Dataset:
    """Selects the columns of texts and labels and renames them to "text" and "label".

    Raises:
        ValueError: there are no such columns, or an example has no text.
    """
    texts = [column for column in TEXT_COLUMNS if column in dataset.column_names]
    columns = {
        "text": find_column(split, dataset, "text", data_args.text_column_name, texts),
        "label": find_column(split, dataset, "label", data_args.label_column_name, label_candidates(dataset)),
    }
    dataset = dataset.select_columns(list(columns.values()))
    dataset = dataset.rename_columns({old: new for new, old in columns.items() if old != new})
    for index, text in enumerate(dataset["text"]):
        if not isinstance(text, str | None):
            raise ValueError(f"Text {index} of the {split} split is no string but {text!r}.")
        if not (text or "").strip():
            raise ValueError(f"Text {index} of the {split} split is empty.")
    return dataset


def tokenize(split: str, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Dataset:
    """The examples of a split with "input_ids", "labels" and "length", their number of tokens; logs what is cut."""

    def encode(examples: dict) -> dict:
        texts, options = examples["text"], {"return_attention_mask": False, "verbose": False}
        input_ids = tokenizer(texts, **options)["input_ids"]
        full_lengths = [len(ids) for ids in input_ids]
        for i, ids in enumerate(input_ids):
            if max_length is not None and len(ids) > max_length:  # again, as the last token may be a special one
                input_ids[i] = tokenizer(texts[i], truncation=True, max_length=max_length, **options)["input_ids"]
        return {"input_ids": input_ids, "length": [len(ids) for ids in input_ids], "full_length": full_lengths}

    encoded = dataset.map(
        encode,
        batched=True,
        batch_size=choose_batch_size(split, dataset),
        remove_columns=dataset.column_names,
        desc=f"Tokenizing the {split} texts",
    )
    logger.info(describe_lengths(split, encoded["full_length"][:], encoded["length"][:]))
    return encoded.remove_columns("full_length").add_column("labels", dataset["label"][:])


def describe_lengths(split: str, full_lengths: list[int], lengths: list[int]) -> str:
    """Describes the tokens of a split's texts before and after truncation."""
    median, high, longest = np.quantile(full_lengths, (0.5, 0.95, 1), method="higher")
    sentence = f"Tokens of the {len(lengths):,} {split} texts: median {median:,}, 95 % up to {high:,}, at most {longest:,}; "
    if lengths == full_lengths:
        return sentence + "all are read whole."
    num_cut = sum(x < y for x, y in zip(lengths, full_lengths))
    fraction = 1 - sum(lengths) / sum(full_lengths)
    return sentence + f"{num_cut:,} are cut to {max(lengths):,}, which drops {fraction:.0%} of all tokens."


# Model ---------------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A lowercase byte-level BPE tokenizer that begins texts with a class token, as BERT's does."""
    tokenizer = train_bpe(texts, vocab_size, (PAD, CLS, MASK), lowercase=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A", pair=f"{CLS} $A {CLS} $B", special_tokens=[(CLS, tokenizer.token_to_id(CLS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, cls_token=CLS, mask_token=MASK)


def load_tokenizer(model_args: ModelArguments, splits: dict[str, Dataset]) -> PreTrainedTokenizerBase:
    """The tokenizer, trained on the training texts with `--tokenizer_vocab_size`; with a token for padding."""
    name = model_args.tokenizer_name or model_args.model_name_or_path
    if model_args.tokenizer_vocab_size is not None:
        if name is not None or "train" not in splits:
            raise ValueError("--tokenizer_vocab_size is for a new model of training texts, without --tokenizer_name.")
        logger.info(f"Training a tokenizer of {model_args.tokenizer_vocab_size:,} tokens on the training texts ...")
        return train_tokenizer(splits["train"]["text"], model_args.tokenizer_vocab_size)
    if name is None:
        raise ValueError("A model from scratch needs --tokenizer_name, a folder or a Hub id, or --tokenizer_vocab_size.")
    tokenizer = load_pretrained(AutoTokenizer, name, **model_args.hub_options)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The configuration of the model to fine-tune, or of the one to train from scratch, for the tokenizer."""
    config = model_args.load_config()
    defaults = {"pad_token_id": tokenizer.pad_token_id}
    if model_args.model_name_or_path is None:
        defaults |= {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": None}
    config = override_config(config, model_args.config_overrides, **defaults)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(f"The tokenizer has {len(tokenizer)} tokens, and the model {config.vocab_size}: use the model's own.")
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(f"A model of the type {config.model_type!r} is no text classifier.")
    return config


def choose_max_length(max_seq_length: int | None, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The number of tokens that texts are cut to, None for no limit."""
    # of RoBERTa's positions two are not for tokens, which only its tokenizer says
    limit = min(position_limit(config) or math.inf, tokenizer.model_max_length)
    if max_seq_length is not None and max_seq_length > limit:
        raise ValueError(f"--max_seq_length {max_seq_length} is over the model's maximum of {limit} tokens.")
    return max_seq_length or (int(limit) if limit < VERY_LARGE_INTEGER else None)


# Training ------------------------------------------------------------------------------------------------------------


class ClassificationTrainer(ToSTTrainer):
    """`ToSTTrainer` that masks tokens in training, and whose card has a section at its end."""

    section = ""
    output: EvalLoopOutput | None = None  # of the last evaluation

    def evaluation_loop(self, *args, **kwargs) -> EvalLoopOutput:
        self.output = super().evaluation_loop(*args, **kwargs)
        return self.output

    def compute_loss(self, model, inputs, *args, **kwargs):
        if model.training and self.args.token_masking > 0:
            tokenizer, input_ids = self.processing_class, inputs["input_ids"]
            # drawn here and not by the collator, whose batches are ahead of the steps: so a resumed run repeats them
            masked = torch.rand(input_ids.shape, device=input_ids.device) < self.args.token_masking
            masked &= ~torch.isin(input_ids, torch.tensor(tokenizer.all_special_ids, device=input_ids.device))
            inputs = inputs | {"input_ids": input_ids.masked_fill(masked, tokenizer.mask_token_id)}
        return super().compute_loss(model, inputs, *args, **kwargs)

    def create_model_card(self, *args, **kwargs) -> None:
        super().create_model_card(*args, **kwargs)
        card_file = output_folder(self) / CARD
        if self.section and self.is_world_process_zero() and card_file.is_file():
            save_with_section(ModelCard.load(card_file), self.section, card_file)


def report_results(trainer: ClassificationTrainer, examples: Dataset, split: str, data_args: DataTrainingArguments) -> None:
    """Writes accuracy and confusion matrix of the last evaluation, and the section of the card.

    Args:
        trainer: evaluated on the split.
        examples, split: the examples and the name of the split.
        data_args: name the data.
    """
    output = trainer.output
    assert output is not None and output.metrics is not None and output.label_ids is not None
    if not trainer.is_world_process_zero():
        return
    folder, config = trainer.args.output_dir, trainer.model.config
    predictions, labels = output.predictions.tolist(), output.label_ids.tolist()
    names = label_names(config)
    data = data_args.dataset_name or getattr(data_args, f"{split}_file") or data_args.train_file
    title = Path(data).name if Path(data).exists() else data
    precision = trainer.args.mixed_precision if trainer.args.mixed_precision != "no" else trainer.model.dtype
    protocol = f"texts of up to {max(examples['length'])} tokens, {len(names)} classes, computed in {precision}"
    accuracy = next(value for name, value in output.metrics.items() if name.endswith("_accuracy"))
    share = max(map(labels.count, set(labels))) / len(labels)
    measurements = [
        Measurement("accuracy", "Accuracy", accuracy, len(labels), protocol),
        Measurement("accuracy", "Baseline: accuracy of the most frequent class", share, len(labels), "always the same class"),
    ]
    source = Source(examples, title, data_args.dataset_config_name, split)
    results = make_results("text-classification", title, source, measurements, recorded_command(sys.argv), trainer.args.seed)
    write_results(Path(folder, EVALUATION), results)
    trainer.section = class_section(labels, predictions, names, folder)


def main(args: list[str] | None = None) -> None:
    args = sys.argv[1:] if args is None else args
    model_args, data_args, training_args = parse_args(
        args, ModelArguments, DataTrainingArguments, ClassificationTrainingArguments, description=__doc__
    )
    check_actions(training_args, "do_train", "do_eval", "do_predict")
    set_up_logging(training_args, logger)
    set_seed(training_args.seed)

    with training_args.main_process_first(desc="preparing the texts"):
        splits, names = load_texts(model_args, data_args, training_args)
        tokenizer = load_tokenizer(model_args, splits)
    if training_args.token_masking > 0 and tokenizer.mask_token is None:
        raise ValueError("--token_masking needs a tokenizer with a mask token.")
    config = load_config(model_args, tokenizer)
    max_length = choose_max_length(data_args.max_seq_length, config, tokenizer)
    examples = {split: tokenize(split, dataset, tokenizer, max_length) for split, dataset in splits.items()}
    trainer = ClassificationTrainer(
        model=load_classifier(AutoModelForSequenceClassification, model_args, config, names, training_args.do_train),
        args=training_args,
        train_dataset=examples.get("train"),
        eval_dataset=examples.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        callbacks=[TimeEstimateCallback(sum(examples["train"]["length"]))] if "train" in examples else None,
    )
    samples = {"train": len(examples.get("train", ())), "eval": len(examples.get("validation", ()))}

    def report_final_split() -> None:
        if training_args.do_predict:
            metrics = trainer.predict(examples["test"], metric_key_prefix="predict").metrics
            report_final_metrics(trainer, "predict", metrics, len(examples["test"]))
        if training_args.do_predict or training_args.do_eval:
            split = "test" if training_args.do_predict else "validation"
            report_results(trainer, examples[split], split, data_args)

    longest = max(examples["train"]["length"]) if "train" in examples else None
    train_and_report(trainer, model_args, data_args, "text-classification", "texts", samples, longest, report_final_split)


if __name__ == "__main__":
    run(main)
