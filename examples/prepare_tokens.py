# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Tokenizes text once and packs it into blocks, for runs of many epochs: writes a folder that run_clm.py reads.

    python examples/prepare_tokens.py --tokenizer_name gpt2 --train_file data/ --block_size 1024 --output_dir tokens
    python examples/run_clm.py --tokenizer_name gpt2 --train_file tokens --block_size 1024 ...

If it is interrupted, the same command resumes: finished shards are in the cache of `datasets`.
"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import script_setup  # noqa: F401
from datasets import concatenate_datasets
from scripting import HubArguments, load_pretrained, parse_args, read_dataset, run
from texts import TextArguments, load_files, pack, tokenizer_fingerprint
from transformers import AutoTokenizer
from transformers.hf_argparser import HfArg

from tost_hf.files import staged_folder


DEFAULT_BLOCK_SIZE = 1024
EXAMPLES_PER_SHARD, MAX_SHARDS = 10_000, 16  # each shard is cached once it is tokenized


@dataclass
class PreparationArguments(HubArguments):
    """The tokenizer, the split, and the folder to write."""

    tokenizer_name: str | None = HfArg(default=None, help="The tokenizer, a folder or a Hub id.")
    output_dir: str | None = HfArg(default=None, help="The folder to write.")
    dataset_split: str = HfArg(default="train", help="Which split of --dataset_name.")
    num_proc: int = HfArg(default=1, help="Processes that tokenize.")
    num_shards: int | None = HfArg(default=None, help="Files to write. Default: 8 per process.")

    def __post_init__(self):
        for name in ("tokenizer_name", "output_dir"):
            if getattr(self, name) is None:
                raise ValueError(f"Give --{name}.")


def load_text(preparation_args: PreparationArguments, text_args: TextArguments):
    options = {"cache_dir": preparation_args.cache_dir, "token": preparation_args.token}
    if text_args.dataset_name is not None:
        return read_dataset(
            text_args.dataset_name, text_args.dataset_config_name, split=preparation_args.dataset_split, **options
        )
    if text_args.train_file is None:
        raise ValueError("There is no text to work on: give --dataset_name or --train_file.")
    return load_files(text_args.train_file, text_args, **options)


def main(args: list[str] | None = None) -> None:
    args = sys.argv[1:] if args is None else args
    preparation_args, text_args = parse_args(args, PreparationArguments, TextArguments, description=__doc__)
    block_size = text_args.block_size or DEFAULT_BLOCK_SIZE
    folder = Path(preparation_args.output_dir)
    if folder.exists():
        raise FileExistsError(f"{folder} exists; name another folder, or delete it.")
    tokenizer = load_pretrained(AutoTokenizer, preparation_args.tokenizer_name, **preparation_args.hub_options)
    dataset = load_text(preparation_args, text_args)
    files = None if text_args.dataset_name is not None else text_args.train_file
    num_input_shards, packed_shards = min(MAX_SHARDS, -(-len(dataset) // EXAMPLES_PER_SHARD)), []
    for index in range(num_input_shards):
        options = {"num_proc": preparation_args.num_proc, "desc": f"Packing shard {index + 1} of {num_input_shards}"}
        shard = dataset.shard(num_input_shards, index)
        packed_shards.append(pack("training", shard, files, tokenizer, block_size, text_args, **options))
    blocks = concatenate_datasets(packed_shards)
    if not len(blocks):
        raise ValueError(f"The text is shorter than one block of {block_size} tokens; choose a smaller --block_size.")
    blocks.info.description = tokenizer_fingerprint(tokenizer)
    with staged_folder(folder) as staging_folder:
        blocks.save_to_disk(
            staging_folder, num_shards=min(preparation_args.num_shards or 8 * preparation_args.num_proc, len(blocks))
        )
    print(f"{len(blocks):,} blocks of {block_size:,} tokens are in {folder}")


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    run(main)
