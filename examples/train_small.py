# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A small ToST that can be used: trained on a folder of books in about 40 minutes by two CPU cores, or larger on a GPU.

    python examples/train_small.py --text TEXT_FOLDER --output_dir tost-books
    python examples/train_small.py --text TEXT_FOLDER --output_dir tost-books --size gpu  # 25 M parameters

The folder holds parquet or JSON files with a column "text", a document per row, and a validation split. A byte-level BPE
tokenizer is trained on the training text; `run_clm.py` trains a model without positions whose statistics forget, with a short
convolution, and writes its card. To the card it adds what the model wrote after three prompts, the first try each, unedited. A
run that was stopped goes on from its last checkpoint.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import load_dataset
from demo import run_clm, train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import tost_hf  # noqa: F401  registers the models with the Auto classes
from tost_hf.files import staged_file
from tost_hf.hub.markdown import code_block


PROMPTS = ("It was a dark night, and", '"What do you mean?" said', "The nature of man is")
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "max_new_tokens": 120}
TITLE = "## What it writes"
TOKENIZER_CHARACTERS = 8_000_000


@dataclass(frozen=True)
class Size:
    """A model and its training."""

    model: str  # changes to the configuration of tost-base
    vocab_size: int
    block_size: int
    batch: int
    steps: int
    learning_rate: float


SIZES = {
    "cpu": Size("n_layer=6,n_head=8,hidden_size=256", 4096, 256, 16, 2000, 2e-3),
    "gpu": Size("n_layer=12,n_head=6,hidden_size=384,intermediate_size=1664", 16_384, 1024, 32, 1600, 1e-3),
}
# LayerScale starts at 1e-5 in the published recipe, for 600,000 steps; a run of minutes has no time to grow from there
KIND = "n_positions=null,forgetting=token,conv_kernel=4,layer_scale_init_value=0.3"


def train(text: str, output_dir: str, size: Size, steps: int) -> None:
    """Trains tokenizer and model; a checkpoint is kept ten times in a run."""
    documents = load_dataset(text, split="train")["text"]
    with tempfile.TemporaryDirectory() as scratch:
        characters = TOKENIZER_CHARACTERS // len(documents)
        train_tokenizer((document[:characters] for document in documents), Path(scratch), size.vocab_size, size.block_size)
        run_clm(
            config_name="tost-base",
            config_overrides=f"{size.model},vocab_size={size.vocab_size},{KIND}",
            tokenizer_name=scratch,
            dataset_name=text,
            block_size=size.block_size,
            recipe="paper",
            do_train=True,
            do_eval=True,
            max_steps=steps,
            max_eval_samples=200,
            learning_rate=size.learning_rate,
            per_device_train_batch_size=size.batch,
            logging_steps=max(1, steps // 50),
            save_steps=max(1, steps // 10),
            save_total_limit=1,
            output_dir=output_dir,
            report_to="none",
        )


@torch.no_grad()
def write_samples(output_dir: str) -> str:
    """What the model writes after each prompt, as a section of its card."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(output_dir).eval(), AutoTokenizer.from_pretrained(output_dir)
    torch.manual_seed(0)
    texts = []
    for prompt in PROMPTS:
        tokens = model.generate(**tokenizer(prompt, return_tensors="pt"), **SAMPLED, pad_token_id=tokenizer.eos_token_id)
        texts.append(code_block(tokenizer.decode(tokens[0], skip_special_tokens=True), "text"))
    said = f"Sampled with temperature {SAMPLED['temperature']} and top-p {SAMPLED['top_p']}, seed 0: the first try, unedited."
    return "\n\n".join([TITLE, said, *texts])


def add_section(card: Path, section: str) -> None:
    """The section at the end of a card, in place of an earlier one."""
    text = card.read_text(encoding="utf-8").partition(TITLE)[0].rstrip()
    with staged_file(card) as staged:
        staged.write_text(f"{text}\n\n{section}\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, metavar="TEXT_FOLDER", help="a folder of text, or a dataset's Hub id")
    parser.add_argument("--output_dir", default="tost-books", help="the folder of the trained model")
    parser.add_argument("--size", choices=SIZES, default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="optimizer steps; default: those of the size")
    args = parser.parse_args(arguments)
    size = SIZES[args.size]
    train(args.text, args.output_dir, size, args.steps or size.steps)
    section = write_samples(args.output_dir)
    add_section(Path(args.output_dir) / "README.md", section)
    print(section)


if __name__ == "__main__":
    main()
