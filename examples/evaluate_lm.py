# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Evaluates a causal language model, ToST or any other of transformers: loss, LAMBADA and Children's Book Test accuracy.

    python examples/evaluate_lm.py --model my-tost --tasks wikitext lambada cbt_cn cbt_ne
    python examples/evaluate_lm.py --model gpt2 --tasks ptb text --datasets ptb=ptb.test.txt text=notes.txt \
        --protocols sweep windows --output_file gpt2.json

Results are written to the model's `evaluation.json`, from which its card is made. Every result names its protocol:

    sweep      all examples as one stream, end-of-text after each; a sliding window scores every token once
    windows    the ToST authors' protocol: random windows of the same stream, sampled with replacement
    documents  each document independently, nothing appended: as lm-evaluation-harness if the stride is the context

lm-evaluation-harness itself runs on ToST models with

    python -c "import tost_hf; from lm_eval.__main__ import cli_evaluate; cli_evaluate()" \
        run --model hf --model_args pretrained=my-tost --tasks lambada_openai

or, for a repository with remote code, with `lm_eval run ... --model_args pretrained=NAME,trust_remote_code=True`. Its context
is `config.max_position_embeddings`; for a model without learned positions set max_length=1024 or the like.
"""

import logging
import math
import sys
from dataclasses import dataclass
from itertools import chain

import script_setup  # noqa: F401
import torch
from datasets import Dataset
from evaluation import (
    EvaluationArguments,
    Measurement,
    Source,
    load_source,
    make_results,
    print_results,
    results_file,
    write_results,
)
from reading_tasks import cbt_accuracy, lambada_exact, lambada_lenient, load_cbt
from scoring import prefix_token, sweep, tokenize, windows_loss
from scripting import load_pretrained, parse_args, recorded_command, run
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

import tost_hf  # noqa: F401  registers the models with the Auto classes
from tost_hf.training.metrics import perplexity


MAX_CONTEXT = 1024  # by default
TEXT_COLUMNS = ("text", "sentence", "page")
PROTOCOLS = ("sweep", "windows", "documents")


@dataclass(frozen=True)
class Task:
    """An evaluation task: its title, its default Hub dataset, and whether the examples are lines of one document."""

    title: str
    dataset: str | None
    examples_are_lines: bool = False


TASKS = {
    "wikitext": Task("WikiText", "Salesforce/wikitext:wikitext-2-v1", examples_are_lines=True),
    "lambada": Task("LAMBADA", "EleutherAI/lambada_openai"),
    "ptb": Task("Penn Treebank", None, examples_are_lines=True),
    "cbt_cn": Task("Children's Book Test, common nouns", "cam-cst/cbt:CN"),
    "cbt_ne": Task("Children's Book Test, named entities", "cam-cst/cbt:NE"),
    "text": Task("Text", None),
}


@dataclass(kw_only=True)
class LMEvaluationArguments(EvaluationArguments):
    """The tasks, their data, and the protocols."""

    tasks: list[str] = HfArg(help="What to evaluate.", metadata={"choices": list(TASKS)})
    datasets: list[str] = HfArg(
        default_factory=list,
        help=(
            "The data of a task, as TASK=SOURCE: a file (txt, json, jsonl, csv, parquet), a folder, or a Hub "
            "dataset NAME or NAME:CONFIG. Defaults: "
            + ", ".join(f"{name}={task.dataset}" for name, task in TASKS.items() if task.dataset)
        ),
    )
    text_column_name: str | None = HfArg(
        default=None, help="The column of text. Default: text, sentence, page, or else the first."
    )
    protocols: list[str] = HfArg(
        default_factory=lambda: ["sweep"],
        help="How the loss is measured, as described above.",
        metadata={"choices": list(PROTOCOLS)},
    )
    context: int | None = HfArg(default=None, help="Input tokens of a window. Default: the model's maximum, up to 1,024.")
    stride: int | None = HfArg(
        default=None, help="Tokens scored by each window of a sweep but the first. Default: half the context."
    )
    num_windows: int = HfArg(default=16_000, help="Random windows of `windows`; the authors drew 1,000 x 16.")
    seed: int = HfArg(default=0, help="The seed of the random windows.")
    tokenizer_name: str | None = HfArg(default=None, help="The tokenizer, if not the model's own.")

    def __post_init__(self):
        for task in self.tasks:
            if task not in self.sources:
                raise ValueError(f"There is no default data for {task!r}: give --datasets {task}=SOURCE.")

    @property
    def sources(self) -> dict[str, str]:
        """The data of each task: a file, a folder or a Hub dataset."""
        defaults = {name: task.dataset for name, task in TASKS.items() if task.dataset is not None}
        return defaults | dict(assignment.split("=", 1) for assignment in self.datasets)


# Loss ----------------------------------------------------------------------------------------------------------------


def select_texts(examples: Dataset, column: str | None) -> list[str]:
    """The values of the text column."""
    columns = examples.column_names
    column = column or next(name for name in (*TEXT_COLUMNS, *columns) if name in columns)
    if column not in columns:
        raise ValueError(f"There is no column {column!r}: choose one of {', '.join(columns)} by --text_column_name.")
    return examples[column][:]


def measure_loss(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    args: LMEvaluationArguments,
    context: int,
    examples_are_lines: bool = False,
) -> list[Measurement]:
    """Loss, perplexity, bits per byte and word-level perplexity of texts, by each of `args.protocols`."""
    stride = args.stride or max(1, context // 2)
    prefix, eos_token_id = prefix_token(tokenizer), tokenizer.eos_token_id
    if eos_token_id is None and set(args.protocols) != {"documents"}:
        raise ValueError("The tokenizer has no eos token to put after each example; set one, or use --protocols documents.")
    measurements = []
    for protocol in args.protocols:
        examples = texts
        if protocol == "documents" and examples_are_lines:
            examples = ["".join(text if text.endswith("\n") else text + "\n" for text in texts)]
        num_bytes = sum(len(example.encode()) for example in examples)
        num_words = sum(len(example.split()) for example in examples)
        documents = [[prefix, *ids] for ids in tokenize(tokenizer, examples)]
        if protocol != "documents":
            documents = [[prefix, *chain.from_iterable([*ids[1:], eos_token_id] for ids in documents)]]
            num_words += len(examples)
        documents = [torch.tensor(ids) for ids in documents]

        num_examples, label = len(examples), f"{protocol}, context {context}"
        if protocol == "windows":
            num_examples, window_options = args.num_windows, {"context": context, "num_windows": args.num_windows}
            nats, num_scored = windows_loss(
                model, documents[0][1:], **window_options, batch_size=args.batch_size, seed=args.seed
            )
            description = (
                f"{args.num_windows:,} windows of {context:,} tokens drawn with replacement, end-of-text after each example"
            )
        else:
            nats, num_scored = sweep(model, documents, context, stride, args.batch_size)
            label += f", stride {stride}"
            stream = "all examples as one stream, end-of-text after each"
            description = stream if protocol == "sweep" else "each document independently"
            description += f"; every token scored once, in windows of {context:,} tokens, {stride:,} apart"

        num_tokens = sum(len(ids) - 1 for ids in documents)
        description += f"; {num_tokens:,} tokens, {num_bytes:,} bytes, {num_words:,} words"
        mean_loss = nats / num_scored
        for metric_type, name, value in (
            ("loss", "Loss, nats per token", mean_loss),
            ("perplexity", "Perplexity per token", perplexity(mean_loss)),
            ("bits_per_byte", "Bits per byte", mean_loss * num_tokens / (num_bytes * math.log(2))),
            (
                "word_perplexity",
                "Perplexity per word",
                perplexity(mean_loss * num_tokens / num_words) if num_words else math.nan,
            ),
        ):
            measurements.append(Measurement(metric_type, f"{name} ({label})", value, num_examples, description))
    return measurements


# The command ---------------------------------------------------------------------------------------------------------


def evaluate_task(name: str, model, tokenizer, args: LMEvaluationArguments, context: int) -> tuple[Source, list[Measurement]]:
    """The data of a task, and all measurements on it."""
    task, location = TASKS[name], args.sources[name]
    if name.startswith("cbt_"):
        source = load_cbt(location, args)
        return source, [cbt_accuracy(model, tokenizer, source.examples, context, args.batch_size)]
    source = load_source(location, args, sample_by="line" if task.examples_are_lines else "document")
    texts = select_texts(source.examples, args.text_column_name)
    measurements = measure_loss(model, tokenizer, texts, args, context, task.examples_are_lines)
    if name == "lambada":
        measurements += [
            measure(model, tokenizer, texts, context, args.batch_size) for measure in (lambada_exact, lambada_lenient)
        ]
    return source, measurements


def main(args: list[str] | None = None) -> None:
    argv = sys.argv[1:] if args is None else args
    (args,) = parse_args(argv, LMEvaluationArguments, description=__doc__)
    command = recorded_command([__file__, *argv])
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    file = results_file(args)
    model = args.load_model(AutoModelForCausalLM)
    tokenizer = load_pretrained(AutoTokenizer, args.tokenizer_name or args.model, **args.hub_options)
    positions = getattr(model.config, "max_position_embeddings", None)
    context = args.context or min(positions or MAX_CONTEXT, MAX_CONTEXT)
    all_results = []
    for name in args.tasks:
        source, measurements = evaluate_task(name, model, tokenizer, args, context)
        for measurement in measurements:
            measurement.name = f"{measurement.name.removesuffix(')')}{args.limit})"
            measurement.protocol += f"; {model.dtype}"
        title = f"{TASKS[name].title} ({source.config or source.name})"
        results = make_results("text-generation", title, source, measurements, command, args.seed)
        write_results(file, results)  # after each task, because the next one may fail
        all_results += results
    print_results(all_results)
    print(f"Written to {file}")


if __name__ == "__main__":
    run(main)
