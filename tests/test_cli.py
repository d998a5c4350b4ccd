"""The `tost-hf` command: arguments, output and exit status. Conversion and the Hub are tested in other files."""

import io
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hub_clients import language_folder
from huggingface_hub import ModelCard
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageClassification, pipeline

import tost_hf
from tost_hf.cli import main
from tost_hf.hub.loading import check_model_exists
from tost_hf.model.configuration_tost import PRESETS
from tost_hf.model.configuration_tost_vision import VISION_PRESETS


COMMANDS = ("init", "convert", "card", "publish", "verify", "info", "inspect", "serve", "export", "app", "space")


@pytest.fixture
def small_presets(monkeypatch):
    """Replaces two presets by small models."""
    fields = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    monkeypatch.setitem(PRESETS, "tost-base", fields)
    monkeypatch.setitem(VISION_PRESETS, "tost-vision-tiny-patch16", fields | {"patch_size": 16})


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help(capsys, command):
    with pytest.raises(SystemExit) as exc_info:
        main([*([command] if command else []), "--help"])
    assert exc_info.value.code == 0
    out = capsys.readouterr().out
    assert (f"tost-hf {command} " in out) if command else tuple(re.findall(r"^    ([a-z-]+)", out, re.MULTILINE)) == COMMANDS


@pytest.mark.parametrize(
    "argv, status, words",
    [
        (["--version"], 0, tost_hf.__version__),
        ([], 2, "required: COMMAND"),
        (["nonsense"], 2, "invalid choice: 'nonsense'"),
        (["info", ".", "--nonsense"], 2, "unrecognized arguments: --nonsense"),
        (["publish", "."], 2, "required: REPO_ID"),
    ],
)
def test_version_and_usage_errors(capsys, argv, status, words):
    with pytest.raises(SystemExit) as exc_info:
        main(argv)
    assert exc_info.value.code == status and words in "".join(capsys.readouterr())


def test_cached_repositories_are_not_asked_for(tmp_path):
    """Whatever is cached of them, such as a tokenizer alone, in any cache; there is no network here."""
    (tmp_path / "models--me--words").mkdir()
    check_model_exists("me/words", cache_dir=tmp_path)
    for name, options in (("me/words", {}), ("me/others", {"cache_dir": tmp_path})):
        with pytest.raises(OSError, match=f"could not be asked for '{name}'"):
            check_model_exists(name, **options)


def test_closed_pipe_ends_silently(tmp_path):
    command = shlex.join([sys.executable, "-m", "tost_hf.cli", "info", str(language_folder(tmp_path / "tiny"))])
    result = subprocess.run(f"{command} | true", shell=True, capture_output=True, text=True)
    assert result.stdout == result.stderr == ""


def test_characters_that_the_encoding_lacks(tmp_path, monkeypatch):
    """Files are written in UTF-8 all the same."""
    folder, buffer = language_folder(tmp_path / "модель"), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, "cp1252"))
    assert main(["card", str(folder), "--overwrite"]) == 0
    assert buffer.getvalue().split() == [b"Wrote", str(folder / "README.md").replace("модель", "??????").encode()]
    assert "модель" in (folder / "README.md").read_text(encoding="utf-8")


def test_scripts_print_characters_that_the_encoding_lacks(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer := io.BytesIO(), "cp1252"))
    runpy.run_path(str(Path(__file__).parents[1] / "examples/script_setup.py"))
    print("модель", flush=True)
    assert buffer.getvalue().strip() == b"??????"


@pytest.mark.parametrize("value, calls", [("1", [(-3, 2**30), (-1, 2**31 - 1)]), ("0", [])])
def test_scripts_keep_freed_memory_on_cpus_with_glibc(monkeypatch, value, calls):
    actual = []
    monkeypatch.setenv("TOST_KEEP_FREED_MEMORY", value)
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(mallopt=lambda *args: actual.append(args)))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    runpy.run_path(str(Path(__file__).parents[1] / "examples/script_setup.py"))
    assert actual == calls


def test_init(small_presets, tmp_path, capsys):
    assert main(["init", "tost-base", str(tmp_path / "a")]) == 0
    assert main(["init", "tost-base", str(tmp_path / "b"), "--seed", "0"]) == 0
    assert main(["init", "tost-base", str(tmp_path / "c"), "--seed", "1"]) == 0
    assert str(tmp_path / "a") in capsys.readouterr().out
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"] != weights["c"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.config.hidden_size == 32 and model.dtype == torch.float32
    assert model.generation_config.eos_token_id == 50256
    assert main(["init", "tost-base", str(tmp_path / "a")]) == 1
    assert "not empty" in capsys.readouterr().err
    for name in ("evaluation.json", "tokenizer.json"):  # results of the old weights are deleted, other files are not
        (tmp_path / "a" / name).write_text("{}")
    assert main(["init", "tost-base", str(tmp_path / "a"), "--seed", "1", "--overwrite"]) == 0
    assert (tmp_path / "a/model.safetensors").read_bytes() == weights["c"]
    assert not (tmp_path / "a/evaluation.json").exists() and (tmp_path / "a/tokenizer.json").exists()
    assert main(["init", "tost-huge", str(tmp_path / "d")]) == 1
    assert "tost-base, tost-medium" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_init_with_a_tokenizer(small_presets, tmp_path):
    tokenizer = language_folder(tmp_path / "other")
    assert main(["init", "tost-base", str(tmp_path / "model"), "--tokenizer", str(tokenizer)]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (0, 0)
    generate = pipeline("text-generation", model=str(tmp_path / "model"))
    assert generate("import os", max_new_tokens=3)[0]["generated_text"].startswith("import os")


@pytest.mark.parametrize(
    "changes, message, vocab_size",
    [
        ({}, "its last token is number 256, and the model has 200 tokens", 200),
        ({"tokenizer.json": "{"}, "cannot be loaded", 50304),
        (
            {"tokenizer.json": None, "tokenizer_config.json": '{"tokenizer_class": "GPT2Tokenizer"}'},
            "has no vocabulary",
            50304,
        ),
        (None, "cannot be loaded", 50304),
    ],
    ids=["too many tokens", "damaged", "empty", "missing"],
)
def test_init_with_an_invalid_tokenizer(small_presets, tmp_path, capsys, changes, message, vocab_size):
    PRESETS["tost-base"]["vocab_size"] = vocab_size
    tokenizer = language_folder(tmp_path / "other")
    if changes is None:
        shutil.rmtree(tokenizer)
    for name, text in (changes or {}).items():
        (tokenizer / name).unlink() if text is None else (tokenizer / name).write_text(text)
    assert main(["init", "tost-base", str(tmp_path / "model"), "--tokenizer", str(tokenizer)]) == 1
    assert message in capsys.readouterr().err and not (tmp_path / "model").exists()
    assert main(["init", "tost-vision-tiny-patch16", str(tmp_path / "model"), "--tokenizer", str(tokenizer)]) == 1
    assert "reads images" in capsys.readouterr().err and not (tmp_path / "model").exists()


def test_init_vision(small_presets, tmp_path):
    assert main(["init", "tost-vision-tiny-patch16", str(tmp_path / "model")]) == 0
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    assert model.num_labels == 1000
    assert AutoImageProcessor.from_pretrained(tmp_path / "model").crop_size["height"] == model.config.image_size


def test_card_verify_and_info(tmp_path, capsys):
    folder = language_folder(tmp_path / "model")
    (folder / "README.md").unlink()
    assert main(["verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "FAILED  card" in out and "1 of 4 checks failed" in out
    assert main(["card", str(folder), "--license", "mit", "--repo-id", "me/tiny"]) == 0
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "mit" and "me/tiny" in card.content
    assert main(["verify", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "generates 16 tokens, with the logits that it has without its cache" in out and "all checks passed" in out
    assert main(["info", str(folder)]) == 0
    out = capsys.readouterr().out
    state = 4 * 2 * (2 * 32 + 4)  # bytes of float32, layers, two sums per channel and one per head
    assert f"{state:,} bytes" in out and "mit" in out and "ToSTForCausalLM" in out
    assert f"{sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters()):,}" in out
    assert main(["info", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
