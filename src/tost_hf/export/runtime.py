# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Runs exported programs on NumPy arrays with ONNX Runtime.

`tost-hf export` copies this file beside every program, for `generate.py` and `classify.py`; it does not import this package.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np


Arrays = dict[str, np.ndarray]
Run = Callable[[Arrays], Arrays]  # inputs by name to outputs by name


def load(folder: Path, metadata: dict) -> Run:
    """Loads the program of a folder; `metadata` is the content of its `export.json`."""
    import onnxruntime  # an optional dependency of this package

    session = onnxruntime.InferenceSession(folder / metadata["model"], providers=["CPUExecutionProvider"])
    names = [output["name"] for output in metadata["outputs"]]
    return lambda inputs: dict(zip(names, session.run(names, inputs)))


class LanguageModel:
    """A language model with its state, for chunked prefill and decoding.

    Args:
        run: the program, as `load` returns it.
        metadata: the content of `export.json`.
        batch: the batch size.
    """

    def __init__(self, run: Run, metadata: dict, batch: int = 1):
        self.run, self.metadata = run, metadata
        shapes = {spec["name"]: spec["shape"] for spec in metadata["inputs"]}
        self.input_names = [name for name in ("input_ids", "attention_mask", "position_ids") if name in shapes]
        self.has_attention = shapes["attention_mask"] != shapes["input_ids"]  # attention layers also mask the cached tokens
        self.window = metadata["window"]
        sizes = {"batch": batch, "cached": self.window}
        self.state = {
            spec["input"]: np.zeros([sizes.get(n, n) for n in spec["shape"]], spec["dtype"]) for spec in metadata["state"]
        }
        self.grows = any("cached" in spec["shape"] for spec in metadata["state"])
        self.mask = np.zeros((batch, self.window), np.int64)  # of the cached tokens; the first ones are padding
        self.length = np.zeros((batch, 1), np.int64)  # number of processed tokens, without padding

    def forward(self, input_ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Processes the next tokens (batch, tokens) and updates the state; returns logits (batch, tokens, vocabulary).

        Args:
            mask: 1 at tokens and 0 at padding, (batch, tokens).
        """
        mask = np.ones_like(input_ids) if mask is None else mask
        position_ids = (self.length + mask.cumsum(1) - 1).clip(0)
        self.length += mask.sum(1, keepdims=True)
        if self.has_attention:
            mask = np.concatenate([self.mask, mask], 1)
            self.mask = mask if self.grows else mask[:, mask.shape[1] - self.window :]
        inputs = {"input_ids": input_ids, "attention_mask": mask, "position_ids": position_ids}
        inputs = {name: np.ascontiguousarray(inputs[name]) for name in self.input_names}
        outputs = self.run(inputs | self.state)
        self.state = {spec["input"]: outputs[spec["output"]] for spec in self.metadata["state"]}
        return outputs["logits"]
