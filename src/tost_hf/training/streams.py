# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Streaming training text: `PackedStream` shards files, packs documents, shuffles blocks, and stores its position.

transformers' Trainer instead reads a stream again from its beginning, from the second epoch on to a wrong position.

A position consists of `datasets`' state of the current file, the tokens already read that did not fill a block, and how many
blocks of the buffer that begins there were used. On resuming the buffer is read again: `datasets`' own shuffling loses it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import TrainerCallback


POSITION = "stream_position"  # batch key of the worker's position after the batch
RECORDS_PER_BATCH = 256  # tokenized together
BLOCKS_PER_BUFFER = 64  # without shuffling


class StreamPosition(NamedTuple):
    """Where a worker's stream continues: the beginning of a buffer, and how many of its blocks were used."""

    epoch: int = 0
    file: int = 0  # index among the worker's files in this epoch
    records: dict | None = None  # state of that file's dataset; None at its beginning
    tokens: Sequence[int] = ()  # already read, but not part of a block yet
    buffer: int = 0  # index
    blocks: int = 0  # used blocks of the buffer


class StreamError(ValueError):
    """Raised when the text of a stream cannot be used."""

    def __str__(self) -> str:
        return super().__str__().rstrip().rpartition("StreamError: ")[2]  # an error from a worker includes its traceback


class PackedStream(IterableDataset):
    """Blocks of tokens from text files, epoch after epoch, in a reproducible order.

    The files are sharded over the workers of all processes, differently in each epoch if they are shuffled. A worker reads
    every document of its files once per epoch. Documents are tokenized and concatenated, and the tokens split into blocks;
    tokens that remain at the end of an epoch begin the next one, so that none is dropped. The files of an epoch and the blocks
    of a buffer are shuffled. The stream is infinite.

    Args:
        dataset: a `datasets.IterableDataset`, each shard of which is a file.
        encode: tokenizes documents; returns their concatenated token ids.
        column: the column with the text (strings or None).
        block_size: tokens per block.
        shuffle_buffer: minimum number of blocks that a worker shuffles together; 0 for the order of the files.
        seed: of the order.
        settings: further settings, serialisable as JSON, that must be the same when a run resumes.

    Yields dicts with "input_ids", (block_size,) int32, and `POSITION`.
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
        """Assigns this process its files, and starts at their beginning.

        Args:
            process: index of this process.
            processes: number of processes that read the stream.
            workers: loader workers per process; 0 to read in the process itself.

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
        self._next_worker = 0  # whose batch comes next

    def record(self, position: str) -> None:
        """Stores the `POSITION` of a batch that was used."""
        worker, *values = json.loads(position)
        self._positions[worker] = StreamPosition(*values)
        self._next_worker = (worker + 1) % len(self._positions)

    def state_dict(self) -> dict[str, Any]:
        """Where this process continues after the recorded batches, serialisable as JSON."""
        return {"settings": self.settings, "next_worker": self._next_worker, "positions": self._positions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that `state_dict` returned.

        Raises:
            ValueError: the state belongs to a stream with other settings.
        """
        previous = state["settings"]
        changes = [
            f"{name} was {previous.get(name)!r} and is {value!r}"
            for name, value in self.settings.items()
            if previous.get(name) != value
        ]
        if changes:
            raise ValueError(
                f"The checkpoint's stream had other settings: {', '.join(changes)}. Restore them, or start the data over with "
                "--ignore_data_skip."
            )
        self._positions = [StreamPosition(*values) for values in state["positions"]]
        self._next_worker = state["next_worker"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        if info is None and len(self._positions) > 1:
            raise RuntimeError(f"This stream is sharded over {len(self._positions)} workers; read it with as many.")
        # DataLoader returns a batch of each worker in turn, always starting with worker 0
        worker = (self._next_worker + (0 if info is None else info.id)) % len(self._positions)
        global_worker = self.process * self.settings["workers"] + worker
        for blocks, position in self._read_buffers(global_worker, self._positions[worker]):
            order = np.arange(len(blocks))
            if self.shuffle_buffer:
                order = self._make_rng(1, global_worker, position.buffer).permutation(order)
            for index in range(position.blocks, len(blocks)):
                yield {"input_ids": blocks[order[index]], POSITION: (worker, *position._replace(blocks=index + 1))}

    def _make_rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])

    def _read_buffers(self, global_worker: int, start: StreamPosition) -> Iterator[tuple[np.ndarray, StreamPosition]]:
        """Yields buffers of blocks (blocks, block_size), each with its start; no buffer extends past the end of an epoch."""
        size = (self.shuffle_buffer or BLOCKS_PER_BUFFER) * self.block_size
        chunks = [np.asarray(start.tokens, np.int32)]
        for tokens, position in self._read_files(global_worker, start):
            chunks.append(tokens)
            if sum(map(len, chunks)) >= size or position.epoch > start.epoch:
                tokens = np.concatenate(chunks)
                end = len(tokens) // self.block_size * self.block_size
                yield tokens[:end].reshape(-1, self.block_size), start
                chunks = [tokens[end:]]
                start = position._replace(tokens=chunks[0].tolist(), buffer=start.buffer + 1)

    def _read_files(self, global_worker: int, start: StreamPosition) -> Iterator[tuple[np.ndarray, StreamPosition]]:
        """Yields a worker's tokens from `start` on with the position after them, and an empty array after each epoch."""
        epoch, first_file, state = start.epoch, start.file, start.records
        while True:
            files = np.arange(self.dataset.num_shards)
            if self.shuffle_buffer:
                files = self._make_rng(0, epoch).permutation(files)
            files = files[global_worker :: self.settings["processes"] * self.settings["workers"]]
            is_full_epoch, num_tokens = (first_file, state) == (0, None), 0
            for file_index in range(first_file, len(files)):
                records = self.dataset.shard(num_shards=self.dataset.num_shards, index=int(files[file_index]))
                if state is not None:
                    records.load_state_dict(state)
                for tokens in self._read_file(records):
                    num_tokens += len(tokens)
                    yield tokens, StreamPosition(epoch, file_index, records.state_dict())
                state = None
            if is_full_epoch and not num_tokens:
                raise StreamError(f"There is no text in {len(files)} files of the {self.dataset.num_shards} to train on.")
            first_file, epoch = 0, epoch + 1
            yield np.empty(0, np.int32), StreamPosition(epoch)

    def _read_file(self, records) -> Iterator[np.ndarray]:
        try:
            for batch in records.iter(batch_size=RECORDS_PER_BATCH):  # in a worker, iter(records) would shard them again
                yield np.asarray(self.encode(select_texts(batch, self.column)), dtype=np.int32)
        except StreamError:
            raise
        except Exception as error:  # datasets passes on the errors of each format's reader
            raise StreamError(f"The training text cannot be read further: {error.__cause__ or error}") from error


def select_texts(batch: dict[str, list], column: str) -> list[str]:
    """The texts of a batch of examples, without empty and missing ones.

    Raises:
        StreamError: a value is not a string.
    """
    texts = [text for text in batch.get(column, ()) if text is not None and text != ""]
    if invalid := [text for text in texts if not isinstance(text, str)]:
        raise StreamError(f"The column {column!r} holds no text but values such as {invalid[0]!r}.")
    return texts


class StreamLoader(DataLoader):
    """Batches of a `PackedStream`; records the position after each batch that it yields."""

    dataset: PackedStream

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        for batch in super().__iter__():
            self.dataset.record(batch.pop(POSITION))
            yield batch


class StreamProgressCallback(TrainerCallback):
    """Sets the epoch to the completed fraction of the run; Trainer counts it from the last start."""

    def on_step_end(self, args, state, control, **kwargs) -> None:
        state.epoch = state.global_step / state.max_steps


def collate_stream(collator: Callable[[list[dict[str, Any]]], dict[str, Any]], blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Collates blocks without their `POSITION`, and adds that of the last one, as JSON, to the batch."""
    positions = [block.pop(POSITION) for block in blocks]
    return collator(blocks) | {POSITION: json.dumps(positions[-1])}


def collate_blocks(blocks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collates blocks into a batch with "input_ids" and equal "labels", (batch, block_size)."""
    input_ids = torch.from_numpy(np.array([block["input_ids"] for block in blocks], dtype=np.int64))
    return {"input_ids": input_ids, "labels": input_ids.clone()}


__all__ = [
    "POSITION",
    "PackedStream",
    "StreamError",
    "StreamLoader",
    "StreamPosition",
    "StreamProgressCallback",
    "collate_blocks",
    "collate_stream",
    "select_texts",
]
