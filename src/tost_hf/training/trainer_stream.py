# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Training on a stream of text, whose position every checkpoint stores, so that a resumed run sees the same batches.

transformers' own Trainer reads the stream again from its beginning to find that position, and finds another one from the
second epoch on.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from ..files import staged_file
from .streams import POSITION, PackedStream, StreamCollator
from .trainer import ToSTTrainer


class StreamLoader(DataLoader):
    """Batches of a `PackedStream`, which records the position after each one that it returns."""

    dataset: PackedStream

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        for batch in super().__iter__():
            self.dataset.record(batch.pop(POSITION))
            yield batch


class StreamingTrainer(ToSTTrainer):
    """`ToSTTrainer` that can train on a `PackedStream`: each process and each of its workers reads its own files.

    With `ignore_data_skip` a resumed run starts the stream over.

    ```python
    from tost_hf.training.streams import PackedStream

    stream = PackedStream(texts, encode, "text", block_size=1024)  # texts: a streaming dataset; encode: texts to token ids
    StreamingTrainer(model, ToSTTrainingArguments("out", max_steps=1000), train_dataset=stream).train()
    ```
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self._stream is not None:
            self.add_callback(_StreamProgress())

    @property
    def _stream(self) -> PackedStream | None:
        return self.train_dataset if isinstance(self.train_dataset, PackedStream) else None

    @property
    def _position_file(self) -> str:
        return f"stream_{self.args.process_index}.json"

    def required_files(self) -> list[str]:
        return super().required_files() + [self._position_file] * (self._stream is not None and not self.args.ignore_data_skip)

    def get_train_dataloader(self) -> DataLoader:
        stream, args = self._stream, self.args
        if stream is None:
            return super().get_train_dataloader()
        sharing = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()  # processes that have the same batch
        stream.shard(args.process_index // sharing, args.world_size // sharing, args.dataloader_num_workers)
        return StreamLoader(
            stream,
            batch_size=self._train_batch_size,
            collate_fn=StreamCollator(self.data_collator),
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=args.dataloader_pin_memory,
            generator=torch.Generator(),  # the loader draws a number when it starts: not one of the model's
        )

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._stream is not None:  # a step has trained on every batch that was returned
            with staged_file(Path(output_dir, self._position_file)) as file:
                file.write_text(json.dumps(self._stream.state_dict()), encoding="utf-8")

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ) -> tuple[int, int]:
        """Resumes the stream at its position, so that no batch is read only to be skipped."""
        epochs_trained, skipped_batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if self._stream is None:
            return epochs_trained, skipped_batches
        if resume_from_checkpoint is not None and not self.args.ignore_data_skip:
            position = Path(resume_from_checkpoint, self._position_file).read_text(encoding="utf-8")
            self._stream.load_state_dict(json.loads(position))
        return epochs_trained, 0


class _StreamProgress(TrainerCallback):
    """Reports the share of the run that is done as its epoch, which Trainer counts from the last start."""

    def on_step_end(self, args, state, control, **kwargs) -> None:
        state.epoch = state.global_step / state.max_steps


__all__ = ["StreamLoader", "StreamingTrainer"]
