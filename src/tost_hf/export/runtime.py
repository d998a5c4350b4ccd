# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Exported programs as functions of arrays, each in its format's runtime.

A copy of this file is written beside every program, for `generate.py` and `classify.py`; it does not import this package.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np


Arrays = dict[str, np.ndarray]
Run = Callable[[Arrays], Arrays]  # inputs by name to outputs by name


def load(folder: Path, facts: dict) -> Run:
    """The program of a folder; `facts` are the contents of its `export.json`."""
    return LOADERS[facts["format"]](folder / facts["model"], facts)


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
        self.chunk_sizes = facts.get("methods", {}).values()  # of a program of fixed shapes
        self.has_attention = shapes["attention_mask"] != shapes["input_ids"]  # the mask covers the cached tokens as well
        sizes = {"batch": batch, "cached": 0}  # before the first token
        self.state = {
            spec["input"]: np.zeros([sizes.get(n, n) for n in spec["shape"]], spec["dtype"]) for spec in facts["state"]
        }
        self.mask = np.zeros((batch, 0), np.int64)
        self.length = np.zeros((batch, 1), np.int64)  # tokens so far, without padding

    def read(self, tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """The logits (batch, tokens, vocabulary) of the next tokens (batch, tokens), which `mask` marks by 1, padding by 0."""
        mask, logits = np.ones_like(tokens) if mask is None else mask, []
        while tokens.shape[1]:
            size = max((n for n in self.chunk_sizes if n <= tokens.shape[1]), default=tokens.shape[1])
            logits.append(self._read_chunk(tokens[:, :size], mask[:, :size]))
            tokens, mask = tokens[:, size:], mask[:, size:]
        return np.concatenate(logits, 1)

    def _read_chunk(self, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        positions = (self.length + mask.cumsum(1) - 1).clip(0)
        self.length += mask.sum(1, keepdims=True)
        if self.has_attention:
            self.mask = mask = np.concatenate([self.mask, mask], 1)
        given = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        given = {name: np.ascontiguousarray(given[name]) for name in self.inputs}
        found = self.run(given | self.state)
        self.state = {spec["input"]: found[spec["output"]] for spec in self.facts["state"]}
        return found["logits"]


def _load_onnx(path: Path, facts: dict) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output["name"] for output in facts["outputs"]]
    return lambda given: dict(zip(names, session.run(names, given)))


def _load_openvino(path: Path, facts: dict) -> Run:
    import openvino

    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    request, names = compiled.create_infer_request(), [output["name"] for output in facts["outputs"]]

    def run(given: Arrays) -> Arrays:
        found = request.infer(given)
        return {name: found[i].copy() for i, name in enumerate(names)}

    return run


def _load_torch(path: Path, facts: dict) -> Run:
    import torch

    # the guards of the traced sample would reject other shapes
    module = torch.export.load(path).module(check_guards=False)

    @torch.no_grad()
    def run(given: Arrays) -> Arrays:
        found = module(*(torch.from_numpy(given[spec["name"]]) for spec in facts["inputs"]))
        return {spec["name"]: x.numpy() for spec, x in zip(facts["outputs"], found)}

    return run


class FixedProgram:
    """An ExecuTorch program, of fixed shapes: one image, or a chunk of one text of as many tokens as one of its methods reads.

    Keys, values and mask are padded with zeros on the left to their fixed length.
    """

    def __init__(self, path: Path, facts: dict):
        from executorch.runtime import Runtime

        self.facts, program = facts, Runtime.get().load_program(path)
        self.methods = {count: program.load_method(name) for name, count in facts["methods"].items()}

    def __call__(self, given: Arrays) -> Arrays:
        import torch

        count = given["input_ids"].shape[1] if "input_ids" in given else 1
        inputs = [self._fit(given[spec["name"]], spec, count) for spec in self.facts["inputs"]]
        found = self.methods[count].execute([torch.from_numpy(np.ascontiguousarray(x)) for x in inputs])
        outputs = {}
        for spec, x in zip(self.facts["outputs"], found):
            array = x.numpy().copy()  # the next call overwrites it
            outputs[spec["name"]] = array[:, :, -given["attention_mask"].shape[1] :] if _is_key_value(spec) else array
        return outputs

    def _fit(self, x: np.ndarray, spec: dict, count: int) -> np.ndarray:
        shape = list(spec["shape"])  # for one token
        if _is_key_value(spec) and x.shape[2] > shape[2]:
            raise ValueError(f"This program reads texts of at most {shape[2] + 1} tokens.")
        if spec["dtype"] == "int64":  # tokens, positions and the mask
            shape[1] += count - 1
            x = x[:, -shape[1] :]
        return np.pad(x, [(size - n, 0) for n, size in zip(x.shape, shape)])


def _is_key_value(spec: dict) -> bool:
    return spec["name"].endswith((".keys", ".values"))


LOADERS: dict[str, Callable[[Path, dict], Run]] = {
    "onnx": _load_onnx,
    "openvino": _load_openvino,
    "executorch": FixedProgram,
    "torch": _load_torch,
}


__all__ = ["Arrays", "LanguageModel", "Run", "load"]
