"""Checkpoints in the authors' format for tests: reading them, comparing tensors, and writing changed copies."""

import argparse
from pathlib import Path

import torch


FIXTURES = Path(__file__).parent / "fixtures"


def read_checkpoint(path):
    with torch.serialization.safe_globals([argparse.Namespace]):  # vision checkpoints store one under "args"
        return torch.load(path, weights_only=True)


def write_changed(path, change, source):
    """Writes a copy of a checkpoint after `change(contents)`, which changes it in place or returns another object."""
    contents = read_checkpoint(source)
    torch.save(change(contents) or contents, path)
    return path


def remove(name):
    def change(contents):
        del contents["model"][name]

    return change


def replace(name, tensor):
    return lambda contents: contents["model"].update({name: tensor})


def add_prefix(contents, prefix):
    return {prefix + name: tensor for name, tensor in contents["model"].items()}


def to_dtype(dtype):
    def change(contents):
        state = contents["model"]
        contents["model"] = {name: x.to(dtype) if x.is_floating_point() else x for name, x in state.items()}

    return change


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


def relative_error(actual, expected):
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()
