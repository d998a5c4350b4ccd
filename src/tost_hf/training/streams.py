# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Text that is read during training: `PackedStream` shards files, packs, shuffles, and stores its position.

A position in the stream is the state of a file's records, as `datasets` has it, the tokens read before it that did not fill a
block, and how many blocks of the buffer that begins there were used. The buffer is read again on resuming: `datasets`' own
shuffling loses it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


POSITION = "stream_position"  # the key of a batch under which it says where its worker continues after it
RECORDS_PER_BATCH = 256  # that are tokenized at once
BLOCKS_PER_BUFFER = 64  # without shuffling


class StreamPosition(NamedTuple):
    """Where the stream of a worker continues: the beginning of a buffer, and how many of its blocks were used."""

    epoch: int = 0
    file: int = 0  # counted among those which the worker has in this epoch
    records: dict | None = None  # the state of that file's records; None at its beginning
    tokens: Sequence[int] = ()  # read before them and not yet part of a block
    buffer: int = 0  # its number
    blocks: int = 0  # used of it


class StreamError(ValueError):
    """The text of a stream cannot be used."""

    def __str__(self) -> str:
        return super().__str__().rstrip().rpartition("StreamError: ")[2]  # a worker's comes with its traceback


class PackedStream(IterableDataset):
    """Blocks of tokens from files of text, epoch after epoch, the same ones after every start.

    The files are sharded over the workers of all processes, anew in every epoch if they are shuffled. A worker reads every
    document of its files once per epoch. The texts are tokenized and concatenated, and the tokens cut into blocks; those that
    remain at the end of an epoch begin the next one, so that none is dropped. The files of an epoch and the blocks of a buffer
    are shuffled. It has no end.

    Args:
        dataset: a `datasets.IterableDataset`; its `num_shards` are its files.
        encode: tokenizes texts; returns their tokens concatenated.
        column: the column with the text, a string or None.
        block_size: tokens of a block.
        shuffle_buffer: how many blocks, at least, are shuffled at a time in each worker; 0 for the order of the files.
        seed: of the order.
        settings: what must be the same when a run resumes, names and values for JSON.

    Its items are dicts: "input_ids", (block_size,) int32, and `POSITION`.
    """

    def __init__(
        self,
        dataset,
        encode: Callable[[list[str]], list[int]],
        column: str,
        block_size: int,
        *,
        shuffle_buffer: int = 0,
        seed: int = 0,
        settings: dict[str, Any] | None = None,
    ):
        self.dataset, self.encode, self.column, self.block_size = dataset, encode, column, block_size
        self.shuffle_buffer, self.seed = shuffle_buffer, seed
        self.settings = {"block_size": block_size, "shuffle_buffer": shuffle_buffer, "seed": seed, "files": dataset.num_shards}
        self.settings |= settings or {}
        self.shard(process=0, processes=1, workers=0)

    def shard(self, process: int, processes: int, workers: int) -> None:
        """Assigns this process its files, from their beginning.

        Args:
            process: its index.
            processes: how many read the stream.
            workers: of each process; 0 to read in the process.

        Raises:
            ValueError: there are fewer files than workers.
        """
        workers = max(1, workers)
        if self.dataset.num_shards < processes * workers:
            raise ValueError(
                f"{processes * workers} readers (--dataloader_num_workers of every process) cannot share "
                f"{self.dataset.num_shards} files of a stream: each needs at least one. Give more files, fewer workers or "
                "processes, or prepare the tokens first (examples/prepare_tokens.py) and train without --streaming."
            )
        self.process, self.settings = process, self.settings | {"processes": processes, "workers": workers}
        self._positions = [StreamPosition()] * workers
        self._next_worker = 0  # the one whose batch comes next

    def record(self, position: str) -> None:
        """Stores the `POSITION` of a batch that was used."""
        worker, *values = json.loads(position)
        self._positions[worker] = StreamPosition(*values)
        self._next_worker = (worker + 1) % len(self._positions)

    def state_dict(self) -> dict[str, Any]:
        """Where this process continues after the recorded batches, for JSON."""
        return {"settings": self.settings, "next_worker": self._next_worker, "positions": self._positions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state of `state_dict`.

        Raises:
            ValueError: the stream was another one.
        """
        saved = state["settings"]
        changed = [
            f"{name} was {saved.get(name)!r} and is {now!r}" for name, now in self.settings.items() if saved.get(name) != now
        ]
        if changed:
            raise ValueError(
                f"The stream of text that was saved is not this one: {', '.join(changed)}. Resume with what it was, or start "
                "the data over with --ignore_data_skip."
            )
        self._positions = [StreamPosition(*values) for values in state["positions"]]
        self._next_worker = state["next_worker"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        if info is None and len(self._positions) > 1:
            raise RuntimeError(f"This stream is sharded over {len(self._positions)} workers; read it with as many.")
        # a loader takes a batch from each worker in turn, beginning with the first
        worker = (self._next_worker + (0 if info is None else info.id)) % len(self._positions)
        reader = self.process * self.settings["workers"] + worker
        for blocks, position in self._buffers(reader, self._positions[worker]):
            order = np.arange(len(blocks))
            if self.shuffle_buffer:
                order = self._random(1, reader, position.buffer).permutation(order)
            for number in range(position.blocks, len(blocks)):
                yield {"input_ids": blocks[order[number]], POSITION: (worker, *position._replace(blocks=number + 1))}

    def _random(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *numbers])

    def _buffers(self, reader: int, start: StreamPosition) -> Iterator[tuple[np.ndarray, StreamPosition]]:
        """Buffers of blocks (blocks, block_size), and where each begins. One ends with its epoch."""
        size = (self.shuffle_buffer or BLOCKS_PER_BUFFER) * self.block_size
        chunks = [np.asarray(start.tokens, np.int32)]
        for tokens, position in self._read_files(reader, start):
            chunks.append(tokens)
            if sum(map(len, chunks)) >= size or position.epoch > start.epoch:
                tokens = np.concatenate(chunks)
                used = len(tokens) // self.block_size * self.block_size
                yield tokens[:used].reshape(-1, self.block_size), start
                chunks = [tokens[used:]]
                start = position._replace(tokens=chunks[0].tolist(), buffer=start.buffer + 1)

    def _read_files(self, reader: int, start: StreamPosition) -> Iterator[tuple[np.ndarray, StreamPosition]]:
        """A worker's tokens from a position on, epoch after epoch, and the position after them; none at an epoch's end."""
        epoch, first, state = start.epoch, start.file, start.records
        while True:
            files = np.arange(self.dataset.num_shards)
            if self.shuffle_buffer:
                files = self._random(0, epoch).permutation(files)
            files = files[reader :: self.settings["processes"] * self.settings["workers"]]
            whole, count = (first, state) == (0, None), 0
            for number in range(first, len(files)):
                records = self.dataset.shard(num_shards=self.dataset.num_shards, index=int(files[number]))
                if state is not None:
                    records.load_state_dict(state)
                for tokens in self._read_file(records):
                    count += len(tokens)
                    yield tokens, StreamPosition(epoch, number, records.state_dict())
                state = None
            if whole and not count:
                raise StreamError(f"There is no text in {len(files)} files of the {self.dataset.num_shards} to train on.")
            first, epoch = 0, epoch + 1
            yield np.empty(0, np.int32), StreamPosition(epoch)

    def _read_file(self, records) -> Iterator[np.ndarray]:
        try:
            for batch in records.iter(batch_size=RECORDS_PER_BATCH):  # in a worker, iter(records) would shard them again
                yield np.asarray(self.encode(select_texts(batch, self.column)), dtype=np.int32)
        except StreamError:
            raise
        except Exception as error:  # datasets raises whatever the readers of many formats raise
            raise StreamError(f"The training text cannot be read further: {error.__cause__ or error}") from error


def select_texts(batch: dict[str, list], column: str) -> list[str]:
    """The texts of a batch of examples that are not empty or missing.

    Raises:
        StreamError: one is no text.
    """
    texts = [text for text in batch.get(column, ()) if text is not None and text != ""]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise StreamError(f"The column {column!r} holds no text but values such as {wrong[0]!r}.")
    return texts


class StreamCollator:
    """A collator that removes `POSITION` from the blocks and adds that of the last one, as JSON, to the batch."""

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, Any]]):
        self.collator = collator

    def __call__(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        contents = [{key: value for key, value in block.items() if key != POSITION} for block in blocks]
        return {**self.collator(contents), POSITION: json.dumps(blocks[-1][POSITION])}


def collate_blocks(blocks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch to train a language model on: "input_ids" and, the same, "labels", (batch, block_size)."""
    ids = torch.from_numpy(np.array([block["input_ids"] for block in blocks], dtype=np.int64))
    return {"input_ids": ids, "labels": ids.clone()}


__all__ = ["POSITION", "PackedStream", "StreamCollator", "StreamError", "StreamPosition", "collate_blocks", "select_texts"]
