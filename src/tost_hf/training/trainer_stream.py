# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A Trainer whose checkpoints hold the place in a stream of text, so that a run goes on with the same batches.

transformers' own reads the stream again from its beginning to find that place, and finds another one once the stream has
begun anew.
"""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from ..files import staged_file
from .checkpoints import stream_file_name, stream_state_name
from .streams import PLACE, PackedStream, StreamCollator


class StreamingTrainer(Trainer):
    """`Trainer` that can train on a `PackedStream`: each process and each of its workers reads files of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self._stream is not None:
            self.add_callback(_EpochOfStream())

    @property
    def _stream(self) -> PackedStream | None:
        return self.train_dataset if isinstance(self.train_dataset, PackedStream) else None

    def get_train_dataloader(self) -> DataLoader:
        stream, args = self._stream, self.args
        if stream is None:
            return super().get_train_dataloader()
        sharing = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()  # processes that have the same batch
        stream.deal(args.process_index // sharing, args.world_size // sharing, args.dataloader_num_workers)
        loader: DataLoader = DataLoader(
            stream,
            batch_size=self._train_batch_size,
            collate_fn=StreamCollator(self.data_collator),
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=args.dataloader_pin_memory,
            generator=torch.Generator(),  # the loader draws a number when it starts: not one of the model's
        )
        return prepare_data_loader(
            loader, self.accelerator.device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False
        )

    def set_initial_training_values(self, *args, **kwargs):
        values = super().set_initial_training_values(*args, **kwargs)
        return (1, *values[1:]) if self._stream is not None else values  # one epoch, without end

    def training_step(self, model, inputs: dict[str, Any], *args, **kwargs) -> torch.Tensor:
        if self._stream is not None:
            self._stream.record(inputs.pop(PLACE))
        return super().training_step(model, inputs, *args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._stream is not None:
            with staged_file(Path(output_dir, stream_file_name(self))) as file:
                file.write_text(json.dumps(self._stream.state_dict()), encoding="utf-8")

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ) -> tuple[int, int]:
        """Resumes the stream at its place, so that no batch is to be read and thrown away."""
        epochs_trained, skipped_batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if self._stream is None:
            return epochs_trained, skipped_batches
        name = stream_state_name(self)
        if resume_from_checkpoint is not None and name is not None:
            file = Path(resume_from_checkpoint, name)
            if not file.is_file():
                raise ValueError(
                    f"The checkpoint {resume_from_checkpoint} has no {name}: it was saved by another number of processes or "
                    "without a stream. Go on as it was, or begin the data anew with --ignore_data_skip."
                )
            self._stream.load_state_dict(json.loads(file.read_text(encoding="utf-8")))
        return epochs_trained, 0


class _EpochOfStream(TrainerCallback):
    """Tells the share of the run that is done, which Trainer counts from the last start on where it skips no batches."""

    def on_step_end(self, args, state, control, **kwargs) -> None:
        state.epoch = state.global_step / state.max_steps


__all__ = ["StreamingTrainer"]
