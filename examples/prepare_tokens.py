# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Tokenizes text once and packs it into blocks, for runs of many epochs: writes a folder that run_clm.py takes.

    python examples/prepare_tokens.py --tokenizer_name gpt2 --train_file data/ --block_size 1024 --output_dir tokens
    python examples/run_clm.py --tokenizer_name gpt2 --train_file tokens --block_size 1024 ...

Interrupted, it resumes with the missing files when the command is given again.
"""

import logging
import os
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from scripting import HubArguments, load_pretrained, parse_args, read_dataset, run
from texts import TextArguments, choose_eos, encode, load_files, text_column
from transformers import AutoTokenizer

from tost_hf.training.streams import PackedStream
from tost_hf.training.token_shards import is_prepared, tokenizer_fingerprint, write_shards


DEFAULT_BLOCK_SIZE = 1024


@dataclass
class PreparationArguments(HubArguments):
    """Which tokenizer, and where to."""

    tokenizer_name: str | None = field(default=None, metadata={"help": "The tokenizer, a folder or a Hub id."})
    output_dir: str | None = field(default=None, metadata={"help": "The folder to write."})
    dataset_split: str = field(default="train", metadata={"help": "Which split of --dataset_name."})
    num_proc: int = field(default=1, metadata={"help": "Processes that tokenize."})
    num_shards: int | None = field(
        default=None, metadata={"help": "Files to write, at most as many as there are to read. Default: up to 8 per process."}
    )

    def __post_init__(self):
        for name in ("tokenizer_name", "output_dir"):
            if getattr(self, name) is None:
                raise ValueError(f"Give --{name}.")
        for name in ("num_proc", "num_shards"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}.")


def load_text(own_args: PreparationArguments, text_args: TextArguments):
    """The examples to read, as a stream."""
    options = {"cache_dir": own_args.cache_dir, "token": own_args.token, "streaming": True}
    if text_args.dataset_name is not None:
        return read_dataset(text_args.dataset_name, text_args.dataset_config_name, split=own_args.dataset_split, **options)
    if text_args.train_file is None:
        raise ValueError("There is no text to work on: give --dataset_name or --train_file.")
    if is_prepared(text_args.train_file[0]):
        raise ValueError(f"{text_args.train_file[0]!r} is prepared already.")
    return load_files(text_args.train_file, text_args, **options)


def main(args: list[str] | None = None) -> None:
    args = sys.argv[1:] if args is None else args
    own_args, text_args = parse_args(args, PreparationArguments, TextArguments, description=__doc__)
    block_size = text_args.block_size or DEFAULT_BLOCK_SIZE
    if block_size < 2:
        raise ValueError(f"--block_size must be at least 2, one token to see and one to predict, got {block_size}.")
    tokenizer = load_pretrained(AutoTokenizer, own_args.tokenizer_name, **own_args.hub_options)
    dataset = load_text(own_args, text_args)
    files = None if text_args.dataset_name is not None else text_args.train_file
    eos = choose_eos(files, tokenizer, text_args)
    column = text_column("training", dataset, text_args.text_column)
    names = text_args.dataset_name or [[os.path.basename(file), os.path.getsize(file)] for file in files]
    terms = {"tokenizer": tokenizer_fingerprint(tokenizer), "eos_token": eos, "column": column, "names": names}
    stream = PackedStream(
        dataset, partial(encode, tokenizer=tokenizer, eos_token_id=eos), column, block_size, epochs=1, terms=terms
    )
    shards = min(own_args.num_shards or 8 * own_args.num_proc, dataset.num_shards)
    blocks = write_shards(stream, Path(own_args.output_dir), shards, min(own_args.num_proc, shards), len(tokenizer))
    print(f"{blocks:,} blocks of {block_size:,} tokens are in {own_args.output_dir}")


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    run(main)
