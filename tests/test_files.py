"""Overwriting a folder: which files are replaced, which stay, and what an interrupted write leaves behind."""

import contextlib
import os
import shutil

import pytest
import torch
from hub_clients import contents, language_folder
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tost_hf.files import check_folder, staged_file, staged_folder


WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors")
OTHER_FILES = (
    *("model_old.safetensors", "model-old.safetensors", "model.fp16.safetensors", "model-1-of-2.safetensors"),
    *("adapter_model.safetensors", "notes.safetensors.txt", "notes.txt"),
)


def write_files(folder, names, content):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


MODEL_FILES = ("config.json", "model.safetensors")
EXPORT_FILES = ("model/export.json", "model/model.onnx", "README.md")


@pytest.mark.parametrize(
    "new_files, replaced, preserved",
    [
        (MODEL_FILES, (*WEIGHTS, "config.json", "evaluation.json", "eval_results.json"), OTHER_FILES),
        # in subfolders files are replaced one by one; of an earlier export, only the program files are deleted
        (EXPORT_FILES, ("model/export.json", "model/model.onnx.data"), ("model/notes.txt", "other/model.onnx", "model.onnx")),
    ],
    ids=["model", "export"],
)
def test_overwrite_preserves_other_files(tmp_path, new_files, replaced, preserved):
    write_files(tmp_path / "target", (*replaced, *preserved), b"old")
    with staged_folder(tmp_path / "target") as folder:
        write_files(folder, new_files, b"new")
    assert contents(tmp_path / "target") == dict.fromkeys(new_files, b"new") | dict.fromkeys(preserved, b"old")


def test_output_overlaps_source(tmp_path):
    (tmp_path / "model/parts").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "model")
    for output in ("model", "model/parts", "model/new", ".", "link", "link/new"):
        for source in ("model", "link"):
            with pytest.raises(ValueError, match="choose a folder outside it"):
                check_folder(tmp_path / output, True, sources=["owner/name", tmp_path / source])
    check_folder(tmp_path / "models", False, sources=["owner/name", tmp_path / "model"])


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("step", range(12))
def test_killed_between_two_moves(tmp_path, monkeypatch, step):
    """The folder contains the old model, the new one or one that cannot be loaded, but never a mixture of both."""
    target = language_folder(tmp_path / "model", max_shard_size="40KB")
    new_files = contents(language_folder(tmp_path / "new", seed=1))
    old_weights = {name: data for name, data in contents(target).items() if "safetensors" in name}
    steps = iter(range(100))

    def fail_at_step(function):
        def call(*args, **kwargs):
            if next(steps) == step:
                raise KilledError
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch, contextlib.suppress(KilledError), staged_folder(target) as folder:
        shutil.copytree(tmp_path / "new", folder, dirs_exist_ok=True)
        patch.setattr(type(target), "unlink", fail_at_step(type(target).unlink))
        patch.setattr(os, "replace", fail_at_step(os.replace))
    files = contents(target)
    if "config.json" in files:
        weights = {name: data for name, data in files.items() if "safetensors" in name}
        assert weights in (old_weights, {"model.safetensors": new_files["model.safetensors"]})
        AutoModelForCausalLM.from_pretrained(target)
    else:
        with pytest.raises((OSError, ValueError)):
            AutoModelForCausalLM.from_pretrained(target)
    with staged_folder(target) as folder:  # a second attempt completes the write
        shutil.copytree(tmp_path / "new", folder, dirs_exist_ok=True)
    assert contents(target) == new_files


def test_two_writers_of_one_file(tmp_path):
    """Each writes its own temporary file, the last one's stays, and nothing else; so in threads."""
    target = tmp_path / "cache"
    with staged_file(target) as first:
        with staged_file(target) as second:
            first.write_bytes(b"first")
            second.write_bytes(b"second")
        assert target.read_bytes() == b"second"
    assert contents(tmp_path) == {"cache": b"first"}


def test_permissions_of_a_file(tmp_path):
    """Those of a new file, not those of a temporary one or of an old one."""
    old_umask = os.umask(0o026)
    try:
        for _ in range(2):
            with staged_file(tmp_path / "cache") as staged:
                save_file({"x": torch.zeros(1)}, staged)
            assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o640
            (tmp_path / "cache").chmod(0o600)
    finally:
        os.umask(old_umask)
