# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Exported programs as functions of arrays, in ONNX Runtime.

A copy of this file is written beside every program, for `generate.py` and `classify.py`; it does not import this package.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np


Arrays = dict[str, np.ndarray]
Run = Callable[[Arrays], Arrays]  # inputs by name to outputs by name


def load(folder: Path, facts: dict) -> Run:
    """The program of a folder; `facts` are the contents of its `export.json`."""
    import onnxruntime  # which the package does without

    session = onnxruntime.InferenceSession(folder / facts["model"], providers=["CPUExecutionProvider"])
    names = [output["name"] for output in facts["outputs"]]
    return lambda given: dict(zip(names, session.run(names, given)))


class LanguageModel:
    """Reads texts in chunks; `state` is the program's state after the tokens so far.

    Args:
        run: the program, as `load` returns it.
        facts: the contents of `export.json`.
        batch: the number of texts.
    """

    def __init__(self, run: Run, facts: dict, batch: int = 1):
        self.run, self.facts = run, facts
        shapes = {spec["name"]: spec["shape"] for spec in facts["inputs"]}
        self.inputs = [name for name in ("input_ids", "attention_mask", "position_ids") if name in shapes]
        self.has_attention = shapes["attention_mask"] != shapes["input_ids"]  # the mask covers the cached tokens as well
        sizes = {"batch": batch, "cached": 0}  # before the first token
        self.state = {
            spec["input"]: np.zeros([sizes.get(n, n) for n in spec["shape"]], spec["dtype"]) for spec in facts["state"]
        }
        self.mask = np.zeros((batch, 0), np.int64)
        self.length = np.zeros((batch, 1), np.int64)  # tokens so far, without padding

    def read(self, tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """The logits (batch, tokens, vocabulary) of the next tokens (batch, tokens), which `mask` marks by 1, padding by 0."""
        mask = np.ones_like(tokens) if mask is None else mask
        positions = (self.length + mask.cumsum(1) - 1).clip(0)
        self.length += mask.sum(1, keepdims=True)
        if self.has_attention:
            self.mask = mask = np.concatenate([self.mask, mask], 1)
        given = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        given = {name: np.ascontiguousarray(given[name]) for name in self.inputs}
        found = self.run(given | self.state)
        self.state = {spec["input"]: found[spec["output"]] for spec in self.facts["state"]}
        return found["logits"]
