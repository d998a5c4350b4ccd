# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Training on a stream of text. Checkpoints store its position, so that a resumed run sees the same batches.

transformers' Trainer instead reads the stream again from its beginning, from the second epoch on to a wrong position.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from ..files import staged_file
from .checkpoints import CheckpointTrainer
from .streams import POSITION, PackedStream, collate_stream


class StreamLoader(DataLoader):
    """Batches of a `PackedStream`; records the position after each batch that it yields."""

    dataset: PackedStream

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        for batch in super().__iter__():
            self.dataset.record(batch.pop(POSITION))
            yield batch


class StreamingTrainer(CheckpointTrainer):
    """`Trainer` that can train on a `PackedStream`: each worker of each data-parallel group reads different files.

    With `ignore_data_skip` a resumed run starts the stream over.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self._stream is not None:
            self.add_callback(_StreamProgressCallback())

    @property
    def _stream(self) -> PackedStream | None:
        return self.train_dataset if isinstance(self.train_dataset, PackedStream) else None

    @property
    def _group_size(self) -> int:
        """Number of processes that share a batch."""
        return self.get_tp_size() * self.get_cp_size() * self.get_sp_size()

    @property
    def _position_file(self) -> str:
        return f"stream_{self.args.process_index // self._group_size}.json"

    def required_files(self) -> list[str]:
        return super().required_files() + [self._position_file] * (self._stream is not None and not self.args.ignore_data_skip)

    def get_train_dataloader(self) -> DataLoader:
        stream, args = self._stream, self.args
        if stream is None:
            return super().get_train_dataloader()
        group, groups = args.process_index // self._group_size, args.world_size // self._group_size
        stream.shard(group, groups, args.dataloader_num_workers)
        return StreamLoader(
            stream,
            batch_size=self._train_batch_size,
            collate_fn=partial(collate_stream, self.data_collator),
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=args.dataloader_pin_memory,
            generator=torch.Generator(),  # the loader draws a seed when it starts: not from the global generator
        )

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # all batches that were yielded have been trained on
        if self._stream is not None and self.args.process_index % self._group_size == 0:
            with staged_file(Path(output_dir, self._position_file)) as file:
                file.write_text(json.dumps(self._stream.state_dict()), encoding="utf-8")

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ) -> tuple[int, int]:
        """Restores the position of the stream, so that no batches have to be skipped."""
        epochs_trained, steps_trained_in_current_epoch = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if self._stream is None:
            return epochs_trained, steps_trained_in_current_epoch
        if resume_from_checkpoint is not None and not self.args.ignore_data_skip:
            state = Path(resume_from_checkpoint, self._position_file).read_text(encoding="utf-8")
            self._stream.load_state_dict(json.loads(state))
        return epochs_trained, 0


class _StreamProgressCallback(TrainerCallback):
    """Sets the epoch to the completed fraction of the run; Trainer counts it from the last start."""

    def on_step_end(self, args, state, control, **kwargs) -> None:
        state.epoch = state.global_step / state.max_steps


__all__ = ["StreamLoader", "StreamingTrainer"]
