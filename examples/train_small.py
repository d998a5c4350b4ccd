# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a small ToST language model on a folder of books: 2.9 M parameters in an hour of one CPU core, or 25 M on a GPU.

    python examples/train_small.py --text TEXT_FOLDER --output_dir tost-books-3m
    python examples/train_small.py --text TEXT_FOLDER --output_dir tost-books --size gpu  # the default where there is a GPU

TEXT_FOLDER has parquet or JSON files with a column "text", one document per record, and a validation split. A byte-level BPE
tokenizer is trained on the training text; `run_clm.py` trains a position-free model with decay per token and a short
convolution. The weights are then stored in bfloat16 and evaluated on the test split, or else the validation split, beside a
bigram model of the same training tokens. The model card shows the results and three sampled continuations, unselected and
unedited. An interrupted run resumes from its last checkpoint. `--hub_dir` copies the files that publishing would upload.
"""

import argparse
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import evaluate_lm
import run_clm
import torch
from datasets import load_dataset
from demo import train_tokenizer
from evaluation import EvaluationArguments, Measurement, load_source, make_results, print_results, write_results
from scoring import bigram_loss
from scripting import recorded_command
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import is_torch_bf16_gpu_available

import tost_hf  # noqa: F401  registers the models with the Auto classes
from tost_hf.files import EVALUATION
from tost_hf.hub.cards import build_card, save_card
from tost_hf.hub.publishing import model_files
from tost_hf.hub.records import CARD
from tost_hf.training.metrics import perplexity


PROMPTS = ("It was a dark night, and", '"What do you mean?" said', "The nature of man is")
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "max_new_tokens": 120}
TITLE = "## Sampled text"
TOKENIZER_CHARACTERS = 8_000_000


@dataclass(frozen=True)
class Size:
    """The sizes of a model and its training."""

    model: str  # changes to the configuration of tost-base
    vocab_size: int
    block_size: int
    batch: int
    steps: int
    learning_rate: float


SIZES = {
    "cpu": Size("n_layer=6,n_head=6,hidden_size=192,intermediate_size=704", 4096, 256, 8, 3000, 3e-3),
    "gpu": Size("n_layer=12,n_head=6,hidden_size=384,intermediate_size=1664", 16_384, 1024, 32, 1600, 1e-3),
}
# the published models start LayerScale at 1e-5, for 600,000 steps; short runs need a larger value
COMMON_OVERRIDES = "n_positions=null,forgetting=token,conv_kernel=4,layer_scale_init_value=0.3"


def train(dataset_name: str, output_dir: str, size: Size, steps: int) -> None:
    """Trains tokenizer and model, with a checkpoint after every tenth of the run."""
    documents = load_dataset(dataset_name, split="train")["text"]
    with tempfile.TemporaryDirectory() as scratch:
        max_characters = TOKENIZER_CHARACTERS // len(documents)
        train_tokenizer((document[:max_characters] for document in documents), Path(scratch), size.vocab_size, None)
        options = {
            "config_name": "tost-base",
            "config_overrides": f"{size.model},vocab_size={size.vocab_size},{COMMON_OVERRIDES}",
            "tokenizer_name": scratch,
            "dataset_name": dataset_name,
            "block_size": size.block_size,
            "max_steps": steps,
            "warmup_steps": min(2000, steps // 10),
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}',
            "bf16": is_torch_bf16_gpu_available(),
            "max_eval_samples": 200,
            "learning_rate": size.learning_rate,
            "per_device_train_batch_size": size.batch,
            "logging_steps": max(1, steps // 50),
            "save_steps": max(1, steps // 10),
            "save_total_limit": 1,
            "output_dir": output_dir,
            "report_to": "none",
        }
        run_clm.main(["--do_train", "--do_eval", *command_line(options)])


def command_line(options: dict[str, object]) -> list[str]:
    """Options and their values in the form of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def store_as_bfloat16(auto_class, folder: str | os.PathLike) -> None:
    """Stores the weights of a model folder in bfloat16; the run's last checkpoint still has them in float32."""
    model = auto_class.from_pretrained(folder, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=folder) as staging:
        model.save_pretrained(staging)
        for file in Path(staging).iterdir():
            os.replace(file, Path(folder, file.name))


def evaluate(dataset_name: str, folder: str, context: int) -> None:
    """Adds the held-out loss of the stored weights, and of a bigram model, to the folder's `evaluation.json`."""
    evaluate_lm.main(["--model", folder, "--tasks", "text", "--datasets", f"text={dataset_name}", "--context", str(context)])
    source = load_source(dataset_name, EvaluationArguments(model=folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loss = bigram_loss(
        tokenize(load_dataset(dataset_name, split="train")["text"], tokenizer),
        [list(itertools.chain.from_iterable(tokenize(source.examples["text"], tokenizer)))],
        len(tokenizer),
    )
    protocol = "bigrams of the training tokens, interpolated with unigrams (Witten-Bell); no neural network"
    measurements = [
        Measurement("loss", "Baseline: loss of bigrams, nats per token", loss, len(source.examples), protocol),
        Measurement(
            "perplexity", "Baseline: perplexity of bigrams, per token", perplexity(loss), len(source.examples), protocol
        ),
    ]
    results = make_results("text-generation", f"Text ({source.name})", source, measurements, recorded_command(sys.argv))
    write_results(Path(folder, EVALUATION), results)
    print_results(results)


def tokenize(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterable[list[int]]:
    """The tokens of each document, with end-of-text before and after it."""
    for document in documents:
        yield [tokenizer.eos_token_id, *tokenizer(document)["input_ids"], tokenizer.eos_token_id]


@torch.no_grad()
def sample_section(folder: str) -> str:
    """A section for the card: the model's continuation of each prompt."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    samples = []
    for prompt in PROMPTS:
        tokens = model.generate(**tokenizer(prompt, return_tensors="pt"), **SAMPLING, pad_token_id=tokenizer.eos_token_id)
        samples.append(f"```text\n{tokenizer.decode(tokens[0], skip_special_tokens=True)}\n```")
    note = (
        f"Sampled with temperature {SAMPLING['temperature']} and top-p {SAMPLING['top_p']}, seed 0: the first try, unedited."
    )
    return "\n\n".join([TITLE, note, *samples])


def finish_card(folder: str, section: str) -> None:
    """Replaces Trainer's card by one with the evaluation and a section at its end."""
    card = build_card(folder)
    card.text += f"\n{section}\n"
    save_card(card, Path(folder, CARD))


def copy_published_files(folder: str, hub_dir: str | None) -> None:
    """Copies to `hub_dir`, if given, the files of a model folder that publishing would upload."""
    if hub_dir is None:
        return
    for name, path in model_files(Path(folder)).items():
        Path(hub_dir, name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, Path(hub_dir, name))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, metavar="TEXT_FOLDER", help="a folder of text, or a dataset's Hub id")
    parser.add_argument("--output_dir", default="tost-books-3m", help="the folder of the trained model")
    parser.add_argument("--hub_dir", help="a folder to copy the files to that publishing would upload")
    parser.add_argument("--size", choices=SIZES, default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="optimizer steps; default: those of the size")
    args = parser.parse_args(arguments)
    size = SIZES[args.size]
    train(args.text, args.output_dir, size, args.steps or size.steps)
    store_as_bfloat16(AutoModelForCausalLM, args.output_dir)
    evaluate(args.text, args.output_dir, size.block_size)
    section = sample_section(args.output_dir)
    finish_card(args.output_dir, section)
    copy_published_files(args.output_dir, args.hub_dir)
    print(section)


if __name__ == "__main__":
    main()
