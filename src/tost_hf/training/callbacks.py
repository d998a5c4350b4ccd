# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Callbacks for any `Trainer`."""

import hashlib
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


SAMPLE = 1 << 16  # bytes that are hashed at either end of a file


class TrainingFilesCallback(TrainerCallback, ExportableState):
    """Rejects a resumed run whose training files are not those it was started with.

    A file's name, its size and a hash of its first and last 64 KiB are stored in every checkpoint's `trainer_state.json`. With
    `ignore_data_skip` the data starts over, so that other files are accepted. Checkpoints without a record are accepted.

    Args:
        paths: local files, or folders of them; anything else (a URL, an id) counts by its name.
    """

    def __init__(self, paths: list[str]):
        self.files = sorted(map(_fingerprint, _list_files(paths)))

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"files": self.files}}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Raises a ValueError that names the files that differ."""
        name = type(self).__name__
        saved = state.stateful_callbacks.get(name)
        if saved is not None and not args.ignore_data_skip:
            before, now = ({tuple(file) for file in files} for files in (saved["attributes"]["files"], self.files))
            changed = sorted({file[0] for file in before ^ now})
            if changed:
                raise ValueError(
                    f"The training files are not those that the checkpoint was trained on: {', '.join(changed[:5])}"
                    f"{f' and {len(changed) - 5} more' if len(changed) > 5 else ''} differ. Restore them, start the data over "
                    "with --ignore_data_skip, or train into another --output_dir."
                )
        state.stateful_callbacks[name] = self.state()  # Trainer expects an entry of every callback that has a state


def _list_files(paths: list[str]) -> list[Path]:
    found = []
    for path in map(Path, paths):
        found += sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return found


def _fingerprint(file: Path) -> list[str]:
    """Name, size and hash; the name alone of what is no local file."""
    if not file.is_file():
        return [str(file)]
    size = file.stat().st_size
    with open(file, "rb") as content:
        sample = content.read(SAMPLE)
        content.seek(max(0, size - SAMPLE))
        sample += content.read(SAMPLE)
    return [file.name, str(size), hashlib.sha256(sample).hexdigest()[:16]]


__all__ = ["TrainingFilesCallback"]
