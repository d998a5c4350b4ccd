# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Trains ToST, its options beyond the paper, GPT-2 and Mamba-2 with equal numbers of parameters on a folder of text.

    python examples/benchmarks/run.py compare_lm --text TEXT_FOLDER
    python examples/benchmarks/run.py compare_lm --text TEXT_FOLDER --models "ToST conv token" GPT-2 --jobs 2
    python examples/benchmarks/run.py compare_lm --text TEXT_FOLDER --size large  # about 25 M parameters: for a GPU

TEXT_FOLDER has .txt files, or parquet or JSON files with one document per record in the column "text"; it may be a dataset's
Hub id. Without a validation split the last tenth of the characters is held out. A byte-level BPE tokenizer is trained on the
training text; that of the small size has no merges, so that each token is one byte. The number of layers and the width of the
MLP of each model are chosen to match the parameters of a GPT-2 within 1 % (`match_gpt2_size`). The records also have the loss
of a bigram model of the training text: a model that is not better makes no use of its context.

The records have the loss at ten steps of a run with one learning-rate schedule: "loss at step 400" is an intermediate loss of
a run of 2,000 steps. Seeds that have records are not run again, so that an interrupted run resumes.
"""

import functools
import multiprocessing
import statistics
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import DatasetDict, load_dataset
from language_models import MODELS, make_language_model, match_gpt2_size
from records import read_records, select
from registry import benchmark
from scoring import bigram_loss
from texts import END_OF_TEXT, train_bpe
from tokenizers import Tokenizer
from training import Results, StepTimer, train


NUM_EVALUATIONS = 10  # of a run
LOSS_AT_STEP = "loss at step "  # prefix of metrics


@dataclass(frozen=True)
class Size:
    """Sizes of a comparison; `layers` is the number of layers of GPT-2, a multiple of five."""

    width: int
    layers: int
    head_dim: int
    vocab_size: int
    context: int
    batch: int
    steps: int
    train_characters: int | None  # of the training text; None: all
    validation_characters: int


SIZES = {
    "small": Size(64, 5, 16, 257, 128, 8, 2000, 4_000_000, 16_384),  # 257: bytes and the end of the text
    "toy": Size(32, 5, 16, 300, 16, 2, 2, 20_000, 64),  # to try the script
    "large": Size(448, 10, 64, 4096, 1024, 32, 4000, None, 2_000_000),
}


def load_documents(name: str) -> tuple[list[str], list[str]]:
    """Training and validation documents of a folder or a Hub dataset."""
    if any(Path(name).glob("*.txt")):
        splits = load_dataset("text", data_dir=name, sample_by="document")
    else:
        splits = load_dataset(name)
    assert isinstance(splits, DatasetDict)
    documents = splits["train"]["text"]
    if "validation" in splits:
        return list(documents), list(splits["validation"]["text"])
    text = "\n".join(documents)
    boundary = len(text) * 9 // 10
    return [text[:boundary]], [text[boundary:]]


def shorten(documents: list[str], characters: int | None) -> list[str]:
    """Truncates every document, to about `characters` in total."""
    return documents if characters is None else [document[: characters // len(documents)] for document in documents]


def encode(tokenizer: Tokenizer, documents: list[str]) -> torch.Tensor:
    """The concatenated tokens of all documents, each followed by the end-of-text token."""
    tokens = []
    for document in documents:
        for encoding in tokenizer.encode_batch(document.splitlines(keepends=True)):  # encoding a long document at once is slow
            tokens += encoding.ids
        tokens.append(tokenizer.token_to_id(END_OF_TEXT))
    return torch.tensor(tokens)


def split_into_examples(tokens: torch.Tensor, context: int) -> list[dict[str, torch.Tensor]]:
    """Examples of `context` tokens each."""
    blocks = tokens[: len(tokens) // context * context].view(-1, context)
    return [{"input_ids": block, "labels": block} for block in blocks]


@dataclass(frozen=True)
class Data:
    """Training examples of `context` tokens, held-out documents and examples, and the loss of bigrams on these."""

    tokenizer: Tokenizer
    examples: list[dict[str, torch.Tensor]]
    held_out_documents: list[str]
    held_out: list[dict[str, torch.Tensor]]
    bigram_loss: float

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size()


@functools.cache
def prepare_data(name: str, size: Size) -> Data:
    """Loads documents, trains a tokenizer, and splits the tokens into examples."""
    training, validation = load_documents(name)
    training, validation = shorten(training, size.train_characters), shorten(validation, size.validation_characters)
    tokenizer = train_bpe(shorten(training, 4_000_000), size.vocab_size)
    tokens = encode(tokenizer, training)
    held_out = split_into_examples(encode(tokenizer, validation), size.context)
    loss_of_bigrams = bigram_loss([tokens], [example["input_ids"] for example in held_out], tokenizer.get_vocab_size())
    print(
        f"{len(tokens):,} training tokens, {len(held_out) * size.context:,} to validate; bigram {loss_of_bigrams:.3f}",
        flush=True,
    )
    return Data(tokenizer, split_into_examples(tokens, size.context), validation, held_out, loss_of_bigrams)


def train_language_model(name: str, data: Data, size: Size, *, steps: int, learning_rate: float, seed: int) -> tuple:
    """The trained model and its metrics."""
    sizes = {"vocab_size": data.vocab_size, "head_dim": size.head_dim, "context": size.context}
    model = make_language_model(name, **match_gpt2_size(name, width=size.width, layers=size.layers, **sizes))
    timer = StepTimer()
    trainer = train(
        model,
        data.examples,
        steps=steps,
        learning_rate=learning_rate,
        seed=seed,
        batch_size=size.batch,
        eval_dataset=data.held_out,
        eval_strategy="steps",
        eval_steps=max(1, steps // NUM_EVALUATIONS),
        per_device_eval_batch_size=size.batch,
        prediction_loss_only=True,
        callbacks=[timer],
    )
    intermediate_losses = {
        f"{LOSS_AT_STEP}{log['step']}": log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log
    }
    speed = size.batch * size.context / statistics.median(timer.seconds)
    final_metrics = {"loss": trainer.evaluate()["eval_loss"], "bigram_loss": data.bigram_loss, "tokens/s": speed}
    return trainer.model, intermediate_losses | final_metrics


def add_missing_records(name: str, args: Namespace) -> None:
    """Runs the seeds of one model that have no records."""
    size = SIZES[args.size]
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    data = prepare_data(args.text, size)
    loss_by_rate = {}

    def run(seed, learning_rate):
        model, metrics = train_language_model(name, data, size, steps=args.steps, learning_rate=learning_rate, seed=seed)
        loss_by_rate[learning_rate] = metrics["loss"]
        return model, metrics | {f"loss with learning rate {rate:g}": loss for rate, loss in loss_by_rate.items()}

    case = {"task": args.name, "model": name, "batch": size.batch, "context": size.context}
    Results(args).add_missing(run, lambda metrics: -metrics["loss"], width=size.width, **case)


def add_arguments(parser) -> None:
    parser.add_argument("--text", required=True, metavar="TEXT_FOLDER", help="a folder of text, or a dataset's Hub id")
    parser.add_argument("--name", default="text", help="name of the text in the records")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="in this order")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--jobs", type=int, default=1, help="models trained at the same time, on a CPU with one thread each")


@benchmark("compare_lm", __doc__, add_arguments, trains=True, learning_rates=(3e-3, 1e-2))
def run(args: Namespace, results: Results) -> None:
    size = SIZES[args.size]
    args.steps = args.steps or size.steps
    if args.jobs == 1:
        for name in args.models:
            add_missing_records(name, args)
    else:
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as processes:
            for job in [processes.submit(add_missing_records, name, args) for name in args.models]:
                job.result()
    case = {"script": "compare_lm.py", "task": args.name, "steps": args.steps, "width": size.width, "context": size.context}
    results.records = select(read_records(results.path), **case, model=args.models)  # from this run or earlier ones
    results.print_means()
