# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Text that is read while training goes on: `PackedStream` shards files, packs, shuffles, and stores its place.

A place in the stream is a few small numbers (`Place`): the record of a file before which a buffer of blocks begins, and how
many of its blocks were used. What follows a place is computed again from the records, the same tokens in the same order, so
that neither the buffer nor the remaining tokens are saved, and `datasets`' own shuffling, which loses its buffer, is not used.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


PLACE = "stream_place"  # the key of a batch under which it says how its worker goes on after it
RECORDS_PER_BATCH = 256  # that are tokenized at once
BLOCKS_PER_BUFFER = 64  # without shuffling


class Place(NamedTuple):
    """Where the stream of a worker goes on."""

    epoch: int = 0
    file: int = 0  # counted among those which the worker has in this epoch
    records: dict | None = None  # the state of that file's records; None at its beginning
    tokens: int = 0  # used of those that come from there on: there the buffer begins
    buffer: int = 0  # its number
    blocks: int = 0  # used of it


class _Piece(NamedTuple):
    """The tokens of some records, and the place before them."""

    place: Place
    tokens: np.ndarray
    ends_epoch: bool = False


class StreamError(ValueError):
    """The text of a stream cannot be used."""

    def __str__(self) -> str:
        return super().__str__().rstrip().rpartition("StreamError: ")[2]  # a worker's comes with its traceback


class PackedStream(IterableDataset):
    """Blocks of tokens from files of text, epoch after epoch, the same ones after every start.

    The files are sharded over the workers of all processes, anew in every epoch if they are shuffled. A worker reads every
    document of its files once per epoch. The texts are tokenized and concatenated, and the tokens cut into blocks; those that
    remain at the end of an epoch begin the next one, so that none is dropped. The files of an epoch and the blocks of a buffer
    are shuffled.

    Args:
        dataset: a `datasets.IterableDataset`; its `num_shards` are its files.
        encode: tokenizes texts; returns their tokens concatenated.
        column: the column with the text, a string or None.
        block_size: tokens of a block.
        shuffle_buffer: how many blocks are shuffled at a time, in each worker; 0 for the order of the files.
        seed: of the order.
        epochs: after how many to end, dropping what is left over then; None for no end.
        terms: what must be the same when a run resumes, names and values for JSON.

    Its items are dicts: "input_ids", (block_size,) int32, and `PLACE`.
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
        epochs: int | None = None,
        terms: dict[str, Any] | None = None,
    ):
        self.dataset, self.encode, self.column, self.block_size = dataset, encode, column, block_size
        self.shuffle_buffer, self.seed, self.epochs = shuffle_buffer, seed, epochs
        self.terms = {"block_size": block_size, "shuffle_buffer": shuffle_buffer, "seed": seed, "files": dataset.num_shards}
        self.terms |= terms or {}
        self.deal(process=0, processes=1, workers=0)

    def deal(self, process: int, processes: int, workers: int) -> None:
        """Assigns this process, one of so many with so many workers each (0: none), its files, from their beginning.

        Raises:
            ValueError: there are fewer files than workers.
        """
        workers = max(1, workers)
        if self.dataset.num_shards < processes * workers:
            raise ValueError(
                f"{processes * workers} readers (--dataloader_num_workers of every process) cannot share "
                f"{self.dataset.num_shards} files of a stream: each needs one of its own. Give more files, fewer workers or "
                "processes, or prepare the tokens first (examples/prepare_tokens.py) and train without --streaming."
            )
        self.process, self.terms = process, self.terms | {"processes": processes, "workers": workers}
        self._places = [Place()] * workers
        self._next_worker = 0  # the one whose batch comes next

    def record(self, place: str) -> None:
        """Stores the `PLACE` of a batch that was used."""
        worker, *values = json.loads(place)
        self._places[worker] = Place(*values)
        self._next_worker = (worker + 1) % len(self._places)

    def state_dict(self) -> dict[str, Any]:
        """Where this process continues after the recorded batches, for JSON."""
        return {"terms": self.terms, "next_worker": self._next_worker, "places": self._places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state of `state_dict`.

        Raises:
            ValueError: the stream was another one.
        """
        changed = changed_terms(state["terms"], self.terms)
        if changed:
            raise ValueError(
                f"The stream of text that was saved is not this one: {changed}. Resume with what it was, or start the data "
                "over with --ignore_data_skip."
            )
        self._places = [Place(*values) for values in state["places"]]
        self._next_worker = state["next_worker"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        if info is None and len(self._places) > 1:
            raise RuntimeError(f"This stream was dealt out to {len(self._places)} workers; read it with as many.")
        # a loader takes a batch from each worker in turn, beginning with the first
        worker = (self._next_worker + (0 if info is None else info.id)) % len(self._places)
        for buffer, place in self._buffers(worker):
            blocks = buffer.reshape(-1, self.block_size)
            order = np.arange(len(blocks))
            if self.shuffle_buffer:
                order = self._random(1, self._reader(worker), place.buffer).permutation(len(blocks))
            for number in range(place.blocks, len(blocks)):
                yield {"input_ids": blocks[order[number]], PLACE: (worker, *place._replace(blocks=number + 1))}

    def _reader(self, worker: int) -> int:
        return self.process * self.terms["workers"] + worker

    def _random(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *numbers])

    def _buffers(self, worker: int) -> Iterator[tuple[np.ndarray, Place]]:
        """Tokens of whole blocks, and their place, before which some of the blocks may have been used."""
        start = self._places[worker]
        full = (self.shuffle_buffer or BLOCKS_PER_BUFFER) * self.block_size
        pieces: deque[_Piece] = deque()  # the first `used` of their tokens are done with
        held, used, number, blocks = 0, start.tokens, start.buffer, start.blocks
        for piece in self._pieces(self._reader(worker), start):
            pieces.append(piece)
            held += len(piece.tokens)
            while held - used >= (full if not piece.ends_epoch else self.block_size):
                size = min(full, (held - used) // self.block_size * self.block_size)
                tokens = np.concatenate([piece.tokens for piece in pieces])
                yield tokens[used : used + size], pieces[0].place._replace(tokens=used, buffer=number, blocks=blocks)
                used, number, blocks = used + size, number + 1, 0
                while pieces and used >= len(pieces[0].tokens):
                    done = len(pieces.popleft().tokens)
                    held, used = held - done, used - done

    def _pieces(self, reader: int, start: Place) -> Iterator[_Piece]:
        """The tokens of a worker's files from a place on, epoch after epoch; an empty piece ends each."""
        epoch, first, state = start.epoch, start.file, start.records
        while self.epochs is None or epoch < self.epochs:
            files = np.arange(self.dataset.num_shards)
            if self.shuffle_buffer:
                files = self._random(0, epoch).permutation(files)
            files = files[reader :: self.terms["processes"] * self.terms["workers"]]
            whole, count = (first, state) == (0, None), 0
            for number in range(first, len(files)):
                records = self.dataset.shard(num_shards=self.dataset.num_shards, index=int(files[number]))
                for piece in self._pieces_of_file(records, Place(epoch, number, state)):
                    count += len(piece.tokens)
                    yield piece
                state = None
            if whole and not count:
                raise StreamError(f"There is no text in {len(files)} files of the {self.dataset.num_shards} to train on.")
            first, epoch = 0, epoch + 1
            yield _Piece(Place(epoch), np.empty(0, np.int32), ends_epoch=True)

    def _pieces_of_file(self, records, place: Place) -> Iterator[_Piece]:
        if place.records is not None:
            records.load_state_dict(place.records)
        try:
            for batch in records.iter(batch_size=RECORDS_PER_BATCH):  # in a worker, iter(records) would shard them again
                texts = [text for text in batch.get(self.column, ()) if text]
                if wrong := [text for text in texts if not isinstance(text, str)]:
                    raise StreamError(f"The column {self.column!r} holds no text but values such as {wrong[0]!r}.")
                yield _Piece(place, np.asarray(self.encode(texts), dtype=np.int32))
                place = place._replace(records=records.state_dict())
        except StreamError:
            raise
        except Exception as error:  # datasets raises whatever the readers of many formats raise
            raise StreamError(f"The training text cannot be read on: {error.__cause__ or error}") from error


def changed_terms(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs, for an error message; of the texts' names, which may be many, that they do."""
    changed = {name: f"{name} was {before.get(name)!r} and is {now[name]!r}" for name in now if before.get(name) != now[name]}
    if "names" in changed:
        changed["names"] = "the text files differ"
    return ", ".join(changed.values())


class StreamCollator:
    """A collator that removes `PLACE` from the blocks and adds that of the last one, as JSON, to the batch."""

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, Any]]):
        self.collator = collator

    def __call__(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        contents = [{key: value for key, value in block.items() if key != PLACE} for block in blocks]
        return {**self.collator(contents), PLACE: json.dumps(blocks[-1][PLACE])}


def collate_blocks(blocks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch to train a language model on: "input_ids" and, the same, "labels", (batch, block_size)."""
    ids = torch.from_numpy(np.array([block["input_ids"] for block in blocks], dtype=np.int64))
    return {"input_ids": ids, "labels": ids.clone()}


__all__ = ["PLACE", "PackedStream", "Place", "StreamCollator", "StreamError", "collate_blocks"]
