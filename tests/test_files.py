"""Folders that are written again: what goes, what stays, and what is left when the writer is killed."""

import os
import shutil

import pytest
from hub_clients import contents, language_folder
from transformers import AutoModelForCausalLM

from tost_hf.files import check_folder, is_weights_name, staged_folder


WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors")
OTHERS = (
    "model_old.safetensors",
    "model-old.safetensors",
    "model.fp16.safetensors",
    "model-1-of-2.safetensors",
    "adapter_model.safetensors",
    "notes.safetensors.txt",
    "notes.txt",
)


def test_weights_names():
    assert tuple(filter(is_weights_name, WEIGHTS + OTHERS)) == WEIGHTS


def test_files_kept_by_overwrite(tmp_path):
    target = tmp_path / "model"
    new = contents(language_folder(tmp_path / "new", seed=1))
    target.mkdir()
    for name in (*WEIGHTS, *OTHERS, "config.json", "evaluation.json", "eval_results.json"):
        (target / name).write_bytes(b"old")
    with staged_folder(target) as folder:
        shutil.copytree(tmp_path / "new", folder, dirs_exist_ok=True)
    assert contents(target) == new | dict.fromkeys(OTHERS, b"old")


def test_subfolders_kept_by_overwrite(tmp_path):
    """Their files are replaced one by one; of an earlier export only the program goes."""
    target = tmp_path / "page"
    program = ("model/export.json", "model/model.onnx.data")
    for name in (*program, "model/notes.txt", "other/model.onnx", "model.onnx"):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(b"old")
    with staged_folder(target) as folder:
        (folder / "model").mkdir()
        for name in ("model/export.json", "model/model.onnx", "README.md"):
            (folder / name).write_bytes(b"new")
    new = dict.fromkeys(("model/export.json", "model/model.onnx", "README.md"), b"new")
    assert contents(target) == new | dict.fromkeys(("model/notes.txt", "other/model.onnx", "model.onnx"), b"old")


def test_output_overlaps_source(tmp_path):
    (tmp_path / "model/parts").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "model")
    for output in ("model", "model/parts", "model/new", ".", "link", "link/new"):
        for source in ("model", "link"):
            with pytest.raises(ValueError, match="choose a folder outside it"):
                check_folder(tmp_path / output, True, sources=["owner/name", tmp_path / source])
    check_folder(tmp_path / "models", False, sources=["owner/name", tmp_path / "model"])


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", range(12))
def test_killed_between_two_moves(tmp_path, monkeypatch, step):
    """The folder holds the old model, the new one, or one that cannot be loaded: never a mixture."""
    target = language_folder(tmp_path / "model", max_shard_size="40KB")
    language_folder(tmp_path / "new", seed=1)
    weights = {name: data for name, data in contents(target).items() if "safetensors" in name}
    new = contents(tmp_path / "new")["model.safetensors"]
    steps = iter(range(100))
    unlink, replace = type(target).unlink, os.replace

    def killing(function):
        def call(*args, **kwargs):
            if next(steps) == step:
                raise Killed
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patched, pytest.raises((Killed, StopIteration)):
        with staged_folder(target) as folder:
            shutil.copytree(tmp_path / "new", folder, dirs_exist_ok=True)
            patched.setattr(type(target), "unlink", killing(unlink))
            patched.setattr(os, "replace", killing(replace))
        patched.undo()
        raise StopIteration
    left = contents(target)
    if "config.json" in left:
        stored = {name: data for name, data in left.items() if "safetensors" in name}
        assert stored in (weights, {"model.safetensors": new})
        AutoModelForCausalLM.from_pretrained(target)
    else:
        with pytest.raises((OSError, ValueError)):
            AutoModelForCausalLM.from_pretrained(target)
    with staged_folder(target) as folder:  # doing it again completes it
        shutil.copytree(tmp_path / "new", folder, dirs_exist_ok=True)
    assert contents(target) == contents(tmp_path / "new")
