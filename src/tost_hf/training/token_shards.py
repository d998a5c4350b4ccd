# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Tokens that were packed into blocks once, for runs of many epochs: a folder of memory-mapped Arrow files.

`tokens.json` tells how they were made. The folder gets its name when it is complete; until then it is called `NAME.partial`,
and only the missing files are written when it is prepared again.
"""

import hashlib
import json
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, List, Value, concatenate_datasets
from datasets.arrow_writer import ArrowWriter
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..files import staged_file
from .streams import PackedStream, changed_terms


SETTINGS = "tokens.json"
BLOCKS_PER_BATCH = 256  # that are written at once
PROBE = "  Tokens, 1 2 34:\n\tÄpfel & def f(x): # tost\n"


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the vocabulary and of how a text of many kinds of characters is tokenized."""
    content = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer(PROBE)["input_ids"]])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def is_prepared(folder: str | Path) -> bool:
    return Path(folder, SETTINGS).is_file()


def load_prepared(folder: str | Path) -> Dataset:
    """The blocks of a folder, "input_ids" as arrays of (block_size,) integers; nothing is read yet.

    Raises:
        ValueError: files are missing or damaged.
    """
    try:
        shards = [Dataset.from_file(str(file)) for file in shard_files(Path(folder), _settings(folder)["shards"])]
        return concatenate_datasets([shard for shard in shards if len(shard)]).with_format("numpy")
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"The tokens of {str(folder)!r} are damaged: {error}; prepare them again.") from error


def check_prepared(folder: str | Path, tokenizer: PreTrainedTokenizerBase, block_size: int) -> None:
    """Raises a ValueError for tokens of another tokenizer, or in blocks of another size."""
    settings = _settings(folder)
    if (size := settings["block_size"]) != block_size:
        raise ValueError(f"The tokens of {str(folder)!r} are in blocks of {size}, not {block_size}: use --block_size {size}.")
    if settings["tokenizer"] != tokenizer_fingerprint(tokenizer):
        raise ValueError(f"The tokens of {str(folder)!r} were made by another tokenizer; use that one, or prepare them again.")


def _settings(folder: str | Path) -> dict[str, Any]:
    try:
        settings = json.loads(Path(folder, SETTINGS).read_text(encoding="utf-8"))
        return settings | {name: settings[name] for name in ("shards", "tokenizer", "block_size")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{Path(folder, SETTINGS)} is damaged ({error!r}); prepare the tokens again.") from error


def shard_files(folder: Path, shards: int) -> list[Path]:
    return [folder / f"tokens-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]


def write_shards(stream: PackedStream, folder: Path, shards: int, processes: int, vocab_size: int) -> int:
    """Writes the blocks of a stream of one epoch, with a progress bar.

    Args:
        stream: with `epochs` of 1; its terms are stored in `tokens.json`.
        folder: to be created.
        shards: number of files; each has the text of some of the stream's, and loses less than a block.
        processes: that tokenize.
        vocab_size: tokens below 65,536 take two bytes.

    Returns:
        The number of blocks.

    Raises:
        FileExistsError: the folder exists.
        ValueError: there is no block, or the files of an earlier start were made with other settings.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists; name another folder, or delete it.")
    unfinished = folder.with_name(f"{folder.name}.partial")
    settings = stream.terms | {"shards": shards}
    changed = changed_terms(_settings(unfinished), settings) if is_prepared(unfinished) else ""
    if changed:
        raise ValueError(f"{unfinished} was begun with other settings ({changed}). Use those again, or delete that folder.")
    _write_settings(unfinished, settings)
    files = shard_files(unfinished, shards)
    missing = [(number, file) for number, file in enumerate(files) if not file.exists()]
    write = partial(_write_shard, stream=stream, shards=shards, dtype="uint16" if vocab_size <= 1 << 16 else "int32")
    with Pool(processes) as pool, tqdm(total=shards, initial=shards - len(missing), desc=folder.name, unit=" files") as bar:
        for _ in pool.imap_unordered(write, missing) if processes > 1 else map(write, missing):
            bar.update()
    blocks = sum(len(Dataset.from_file(str(file))) for file in files)
    if not blocks:
        raise ValueError(f"The text is shorter than one block of {stream.block_size} tokens; choose a smaller --block_size.")
    _write_settings(unfinished, settings | {"blocks": blocks})
    unfinished.rename(folder)
    return blocks


def _write_settings(folder: Path, settings: dict[str, Any]) -> None:
    with staged_file(folder / SETTINGS) as file:
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _write_shard(shard: tuple[int, Path], stream: PackedStream, shards: int, dtype: str) -> None:
    number, file = shard
    stream.deal(number, shards, workers=0)
    features = Features({"input_ids": List(Value(dtype), length=stream.block_size)})
    options = {"features": features, "writer_batch_size": BLOCKS_PER_BATCH}
    with staged_file(file) as staged, ArrowWriter(path=str(staged), **options) as writer:
        for block in tqdm(stream, desc=file.name, unit=" blocks", leave=False):
            writer.write({"input_ids": block["input_ids"]})
        writer.finalize()


__all__ = ["check_prepared", "is_prepared", "load_prepared", "shard_files", "tokenizer_fingerprint", "write_shards"]
