# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Tokens that were cut into blocks once, for runs of many epochs: a folder of Arrow files, which are mapped into memory.

`tokens.json` tells how they were made. The folder has its name once it is complete; until then it is called `NAME.partial`,
and what was begun goes on with the files that are missing.
"""

import hashlib
import json
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..files import staged_file
from .streams import PackedStream, changed_terms


SETTINGS = "tokens.json"
BLOCKS_AT_ONCE = 256  # of a file's parts
PROBE = "  Tokens, 1 2 34:\n\tÄpfel & def f(x): # tost\n"


class _Shard(NamedTuple):
    stream: PackedStream
    number: int
    shards: int
    file: Path
    dtype: str


def tokenizer_mark(tokenizer: PreTrainedTokenizerBase) -> str:
    """The same for tokenizers that have the same tokens and cut a sentence of many kinds of characters alike."""
    made = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer(PROBE)["input_ids"]])
    return hashlib.sha256(made.encode()).hexdigest()[:16]


def is_prepared(folder: str | Path) -> bool:
    return Path(folder, SETTINGS).is_file()


def load_prepared(folder: str | Path) -> Dataset:
    """The blocks of a folder, "input_ids" as arrays of (block_size,) integers; nothing is read yet.

    Raises:
        ValueError: files are missing or damaged.
    """
    try:
        parts = [Dataset.from_file(str(file)) for file in shard_files(Path(folder), _settings(folder)["shards"])]
        return concatenate_datasets([part for part in parts if len(part)]).with_format("numpy")
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"The tokens of {str(folder)!r} are damaged: {error}; prepare them again.") from error


def check_prepared(folder: str | Path, tokenizer: PreTrainedTokenizerBase, block_size: int) -> None:
    """Refuses (ValueError) tokens that were made by another tokenizer, or that are in blocks of another size."""
    settings = _settings(folder)
    if (size := settings["block_size"]) != block_size:
        raise ValueError(f"The tokens of {str(folder)!r} are in blocks of {size}, not {block_size}: use --block_size {size}.")
    if settings["tokenizer"] != tokenizer_mark(tokenizer):
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
    """Writes the blocks of a stream of one epoch, and shows how far it is.

    Args:
        stream: with `epochs` of 1; what its terms tell goes into `tokens.json`.
        folder: to be made.
        shards: how many files; each has the text of some of the stream's, and loses less than a block.
        processes: that tokenize.
        vocab_size: tokens below 65,536 take two bytes.

    Returns:
        The number of blocks.

    Raises:
        FileExistsError: the folder exists.
        ValueError: there is no block, or what was begun was begun with other settings.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists; name another folder, or delete it.")
    partial = folder.with_name(f"{folder.name}.partial")
    settings = stream.terms | {"shards": shards}
    _begin(partial, settings)
    files = shard_files(partial, shards)
    dtype = "uint16" if vocab_size <= 1 << 16 else "int32"
    missing = [_Shard(stream, number, shards, file, dtype) for number, file in enumerate(files) if not file.exists()]
    with tqdm(total=shards, initial=shards - len(missing), desc=folder.name, unit=" files") as bar:
        for _ in _each(missing, processes):
            bar.update()
    blocks = sum(len(Dataset.from_file(str(file))) for file in files)
    if not blocks:
        raise ValueError(f"The text is shorter than one block of {stream.block_size} tokens; choose a smaller --block_size.")
    _write_settings(partial, settings | {"blocks": blocks})
    partial.rename(folder)
    return blocks


def _begin(partial: Path, settings: dict[str, Any]) -> None:
    """Makes the folder, or makes sure that it was begun with the same settings."""
    if not is_prepared(partial):
        _write_settings(partial, settings)
        return
    begun = _settings(partial)
    changed = changed_terms(begun, settings)
    if changed:
        raise ValueError(f"{partial} was begun with other settings ({changed}). Use those again, or delete that folder.")


def _write_settings(folder: Path, settings: dict[str, Any]) -> None:
    with staged_file(folder / SETTINGS) as file:
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _each(shards: list[_Shard], processes: int) -> Iterator[None]:
    if processes == 1:
        yield from map(_write_shard, shards)
    else:
        with Pool(processes) as pool:
            yield from pool.imap_unordered(_write_shard, shards)


def _write_shard(shard: _Shard) -> None:
    stream = shard.stream
    stream.deal(shard.number, shard.shards, workers=0)
    kind = pa.list_(pa.from_numpy_dtype(shard.dtype), stream.block_size)
    schema = pa.schema([("input_ids", kind)])
    blocks = tqdm((block["input_ids"] for block in stream), desc=shard.file.name, unit=" blocks", leave=False)
    with staged_file(shard.file) as staged, pa.OSFile(str(staged), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for part in _parts(blocks):
            tokens = pa.array(np.concatenate(part).astype(shard.dtype))
            writer.write_batch(pa.record_batch([pa.FixedSizeListArray.from_arrays(tokens, type=kind)], schema))


def _parts(blocks) -> Iterator[list[np.ndarray]]:
    part = []
    for block in blocks:
        part.append(block)
        if len(part) == BLOCKS_AT_ONCE:
            yield part
            part = []
    if part:
        yield part


__all__ = ["check_prepared", "is_prepared", "load_prepared", "shard_files", "tokenizer_mark", "write_shards"]
