# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Callbacks for any `Trainer`."""

import math
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import reduce
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..files import sha256
from .checkpoints import checkpoints, is_finished


MAX_HASHED_BYTES = 4 * 2**30  # of training files, about three seconds


class FiniteLossCallback(TrainerCallback):
    """Stops training with a FloatingPointError when the loss, its gradient or the weights become NaN or infinite.

    The loss and the gradient's norm are checked whenever they are logged; the weights before every evaluation and save and at
    the end, so that nothing is saved of a run that failed. All processes stop together.
    """

    def __init__(self) -> None:
        self.last_finite_step = 0  # a step

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.last_finite_step = state.global_step

    def on_log(self, args, state, control, logs=None, optimizer=None, **kwargs) -> None:
        skipped = getattr(optimizer, "step_was_skipped", False)  # by a loss scaler, whose gradients may be infinite
        names = ("loss",) if skipped else ("loss", "grad_norm")
        seen = [float(logs[name]) for name in names if name in (logs or {})]  # the same for all processes
        if seen:
            self._check_finite(all(map(math.isfinite, seen)), args, state)
            self.last_finite_step = state.global_step

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        if control.should_save or control.should_evaluate:
            self._check_weights(model, args, state)

    on_epoch_end = on_step_end

    def on_train_end(self, args, state, control, model=None, **kwargs) -> None:
        self._check_weights(model, args, state)

    def _check_weights(self, model: nn.Module, args, state) -> None:
        parameters = [getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in model.parameters()]
        held = [parameter.detach() for parameter in parameters if parameter.is_floating_point() and parameter.numel()]
        largest = nn.utils.get_total_norm(held, norm_type=math.inf) if held else torch.tensor(0.0)
        failed = reduce((~largest.isfinite()).float().to(args.device), "sum")  # over the processes, which hold other shards
        self._check_finite(failed.item() == 0, args, state)
        self.last_finite_step = max(self.last_finite_step, state.global_step - 1)  # the loss of this step is logged later

    def _check_finite(self, finite: bool, args, state) -> None:
        if not finite:
            finished = [str(path) for path in checkpoints(args.output_dir).values() if is_finished(path)]
            last = f"the last checkpoint is {finished[0]}" if finished else "there is no checkpoint"
            raise FloatingPointError(
                f"The loss or its gradient became NaN or infinite after step {self.last_finite_step}, by step "
                f"{state.global_step}. Training has stopped, and nothing was saved since: {last}. Lower the learning rate, or "
                "look for bad values in the data and in the model trained from."
            )


class TrainingFilesCallback(TrainerCallback, ExportableState):
    """Rejects a resumed run whose training files are not those it was started with.

    Each file's name, size and SHA-256 sum are stored in every checkpoint's `trainer_state.json`; above 4 GiB of files, the
    time of the last change in place of the sum. With `ignore_data_skip` the data starts over, so that other files are
    accepted. Checkpoints without a record are accepted.

    Args:
        paths: local files, or folders of them; anything else (a URL, an id) counts by its name.
    """

    def __init__(self, paths: list[str]):
        candidates = [file for path in map(Path, paths) for file in (path.rglob("*") if path.is_dir() else [path])]
        stats = {file: file.stat() for file in candidates if file.is_file()}
        hashed = sum(stat.st_size for stat in stats.values()) <= MAX_HASHED_BYTES
        self.files = [[str(file)] for file in candidates if file not in stats and not file.is_dir()]
        for file, stat in stats.items():
            self.files.append([file.name, str(stat.st_size), sha256(file) if hashed else str(stat.st_mtime_ns)])
        self.files.sort()

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"files": self.files}}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Raises a ValueError that names the files that differ."""
        name = type(self).__name__
        saved = state.stateful_callbacks.get(name)
        if saved is not None and not args.ignore_data_skip:
            before, now = ({tuple(file) for file in files} for files in (saved["attributes"]["files"], self.files))
            if changed := sorted({file[0] for file in before ^ now}):
                raise ValueError(
                    f"The training files are not those that the checkpoint was trained on: {', '.join(changed[:5])}"
                    f"{f' and {len(changed) - 5} more' if len(changed) > 5 else ''} differ. Restore them, start the data over "
                    "with --ignore_data_skip, or train into another --output_dir."
                )
        state.stateful_callbacks[name] = self.state()  # Trainer expects an entry of every callback that has a state


__all__ = ["FiniteLossCallback", "TrainingFilesCallback"]
