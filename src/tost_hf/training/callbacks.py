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

from ..files import TRAINER_STATE
from .checkpoints import list_checkpoints


class FiniteLossCallback(TrainerCallback):
    """Stops training with a FloatingPointError when the loss, its gradient or the weights become NaN or infinite.

    The loss and the gradient norm are checked whenever they are logged; the weights before every evaluation and save and at
    the end, so that a failed run saves nothing. All processes stop together.
    """

    def __init__(self) -> None:
        self.last_finite_step = 0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.last_finite_step = state.global_step

    def on_log(self, args, state, control, logs=None, optimizer=None, **kwargs) -> None:
        step_was_skipped = getattr(optimizer, "step_was_skipped", False)  # by a loss scaler: gradients may be infinite
        names = ("loss",) if step_was_skipped else ("loss", "grad_norm")
        values = [float(logs[name]) for name in names if name in (logs or {})]  # the same on all processes
        if values:
            self._check_finite(all(map(math.isfinite, values)), args, state)
            self.last_finite_step = state.global_step

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        if control.should_save or control.should_evaluate:
            self._check_weights(model, args, state)

    on_epoch_end = on_step_end

    def on_train_end(self, args, state, control, model=None, **kwargs) -> None:
        self._check_weights(model, args, state)

    def _check_weights(self, model: nn.Module, args, state) -> None:
        parameters = [getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in model.parameters()]
        weights = [parameter.detach() for parameter in parameters if parameter.is_floating_point() and parameter.numel()]
        max_norm = nn.utils.get_total_norm(weights, norm_type=math.inf) if weights else torch.tensor(0.0)
        num_failed = reduce((~max_norm.isfinite()).float().to(args.device), "sum")  # each process has other shards
        self._check_finite(num_failed.item() == 0, args, state)
        self.last_finite_step = max(self.last_finite_step, state.global_step - 1)  # the loss of this step is not logged yet

    def _check_finite(self, finite: bool, args, state) -> None:
        if not finite:
            folders = [str(path) for path in list_checkpoints(args.output_dir).values() if (path / TRAINER_STATE).is_file()]
            checkpoint = f"the last checkpoint is {folders[0]}" if folders else "there is no checkpoint"
            raise FloatingPointError(
                f"The loss or its gradient became NaN or infinite after step {self.last_finite_step}, by step "
                f"{state.global_step}. Training has stopped, and nothing was saved since: {checkpoint}. Lower the learning "
                "rate, or look for bad values in the data and in the initial model."
            )


class TrainingFilesCallback(TrainerCallback, ExportableState):
    """Rejects a resumed run whose training files differ from those it was started with.

    Each file's name, size and modification time are stored in every checkpoint's `trainer_state.json`. With `ignore_data_skip`
    the data starts over, so that other files are accepted. Checkpoints without this record are accepted.

    Args:
        paths: local files, or folders of them; anything else (a URL, an id) is compared by name.
        ignore_data_skip: that of the training arguments.
    """

    def __init__(self, paths: list[str], ignore_data_skip: bool = False):
        self.ignore_data_skip = ignore_data_skip
        candidates = [file for path in map(Path, paths) for file in (path.rglob("*") if path.is_dir() else [path])]
        stats = {file: file.stat() for file in candidates if file.is_file()}
        self.files = [[str(file)] for file in candidates if file not in stats and not file.is_dir()]
        self.files += [[file.name, str(stat.st_size), str(stat.st_mtime_ns)] for file, stat in stats.items()]
        self.files.sort()

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"files": self.files}}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Raises a ValueError that names the files that differ."""
        name = type(self).__name__
        saved_state = state.stateful_callbacks.get(name)
        if saved_state is not None and not self.ignore_data_skip:
            saved, current = ({tuple(file) for file in files} for files in (saved_state["attributes"]["files"], self.files))
            if names := sorted({file[0] for file in saved ^ current}):
                raise ValueError(
                    "The training files are not those that the checkpoint was trained on (different name, size or time of "
                    f"modification: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}). Restore "
                    "them (`cp -p` keeps the times), start the data over with --ignore_data_skip, or train into another "
                    "--output_dir."
                )
        state.stateful_callbacks[name] = self.state()  # Trainer expects an entry for every stateful callback


__all__ = ["FiniteLossCallback", "TrainingFilesCallback"]
