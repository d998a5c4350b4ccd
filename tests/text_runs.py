"""Small runs of ToSTTrainer and run_clm.py on real text."""

import os
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from scripts import command_line
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from tost_hf import ToSTTrainingArguments


EOS = "<|endoftext|>"
TINY = "n_layer=2,n_embd=32,n_head=4,n_positions=32,vocab_size=320"


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """Text files from the standard library's sources, and a byte-level BPE tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("text")
    library = Path(os.__file__).parent
    train, validation = ((library / name).read_text(encoding="utf-8")[:40_000] for name in ("argparse.py", "tarfile.py"))
    (folder / "train.txt").write_text(train, encoding="utf-8")
    (folder / "validation.txt").write_text(validation[:8_000], encoding="utf-8")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([train], vocab_size=300, special_tokens=[EOS], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=EOS, eos_token=EOS)
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture(scope="session")
def text_parts(text_folder):
    """A folder of four compressed files of 400 characters, each with a few documents."""
    folder = text_folder / "parts"
    folder.mkdir()
    text = (text_folder / "train.txt").read_text(encoding="utf-8")
    for number in range(4):
        shard = text[400 * number : 400 * (number + 1)]
        Dataset.from_dict({"text": shard.split("\n\n")}).to_json(folder / f"{number}.jsonl.gz", compression="gzip")
    return folder


@pytest.fixture
def clm_args(text_folder, tmp_path):
    """Arguments of a small run of run_clm.py; keywords replace or add, None omits, True is a flag without a value."""

    def make(**changes) -> list[str]:
        values = {
            "config_name": "tost-base",
            "config_overrides": TINY,
            "tokenizer_name": text_folder / "tokenizer",
            "train_file": text_folder / "train.txt",
            "validation_file": text_folder / "validation.txt",
            "cache_dir": tmp_path / "cache",
            "output_dir": tmp_path / "out",
            "block_size": 32,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}',
            "per_device_train_batch_size": 4,
            "max_steps": 3,
            "learning_rate": 0.01,
            "logging_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
            "do_train": True,
        } | changes
        return command_line(values)

    return make


def token_ids(count: int, length: int = 16, vocab_size: int = 97) -> Dataset:
    ids = torch.randint(vocab_size, (count, length), generator=torch.Generator().manual_seed(3)).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def training_args(tmp_path, **changes) -> ToSTTrainingArguments:
    values = {
        "output_dir": str(tmp_path / "out"),
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "max_steps": 5,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return ToSTTrainingArguments(**(values | changes))


def train(trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
