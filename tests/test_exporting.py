"""`tost-hf export`: programs with the outputs of their models that run without this package, and rejected models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from byte_models import byte_tokenizer, make_model
from conftest import randomize, small_config, small_vision_config

import tost_hf
from tost_hf.cli import main
from tost_hf.export import export_model, writing
from tost_hf.image_processing import save_image_processor
from tost_hf.model.configuration_tost import FULL_ATTENTION, SLIDING_ATTENTION, TSSA


for module in ("onnxscript", "onnxruntime"):
    pytest.importorskip(module, reason="an export to ONNX needs the extra `export`")
onnx = pytest.importorskip("onnx", reason="an export to ONNX needs the extra `export`")

DECAY = {"num_hidden_layers": 1, "decay_type": "token", "conv_kernel": 4, "position_embedding_type": "none"}
HYBRID = {**DECAY, "num_hidden_layers": 2, "layer_types": [TSSA, FULL_ATTENTION]}
SLIDING = {**HYBRID, "layer_types": [TSSA, SLIDING_ATTENTION], "sliding_window": 4}
LANGUAGE = {"published": {"num_hidden_layers": 1}, "decay": DECAY, "hybrid": HYBRID}


def language_folder(folder: Path, **changes) -> Path:
    make_model(**changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run_script(folder: Path, *arguments: str) -> str:
    """Runs a script of an exported folder in an interpreter that ignores PYTHONPATH, and returns its output."""
    command = [sys.executable, "-sE", str(folder / arguments[0]), *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout


def assert_same_text(source: Path, folder: Path) -> None:
    """Asserts that the script of an exported folder generates the same text as `generate`."""
    model, tokenizer = tost_hf.ToSTForCausalLM.from_pretrained(source), byte_tokenizer()
    # without a position limit, longer than one chunk of a program with fixed shapes
    text = "To be, or not to be, that is the question:" if model.config.position_embedding_type == "none" else "To be"
    prompt = tokenizer(text, return_tensors="pt")
    expected = tokenizer.decode(model.generate(**prompt, max_new_tokens=20, do_sample=False)[0], skip_special_tokens=True)
    assert run_script(folder, "generate.py", text, "--tokens", "20") == f"{expected}\n"


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("published", "float32"),
        pytest.param("decay", "float32", marks=pytest.mark.slow),
        pytest.param("hybrid", "float32", marks=pytest.mark.slow),
        pytest.param("published", "int8", marks=pytest.mark.slow),
        pytest.param("decay", "float16", marks=pytest.mark.slow),
    ],
)
def test_language_models(tmp_path, name, dtype):
    """`export_model` itself compares logits and greedy tokens."""
    source = language_folder(tmp_path / "model", **LANGUAGE[name])
    result = export_model(source, tmp_path / "onnx", dtype=dtype)
    assert result.agreement.difference < {"float32": 1e-5, "float16": 1e-2, "int8": 0.1}[dtype]
    facts = json.loads((tmp_path / "onnx" / "export.json").read_text())
    assert [spec["name"] for spec in facts["inputs"]][:2] == ["input_ids", "attention_mask"]
    assert all(spec["dtype"] == "float32" and spec["shape"][0] == "batch" for spec in facts["state"])
    sizes = {"batch": 1, "cached": 0}
    state = sum(4 * np.prod([sizes.get(n, n) for n in spec["shape"]]) for spec in facts["state"])
    assert state == facts["state_bytes"]
    program = onnx.load(tmp_path / "onnx" / "model.onnx")
    tensors = [*program.graph.input, *program.graph.output, *program.graph.value_info]
    assert not any(x.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE for x in tensors)
    dims = program.graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param for dim in dims] == ["batch", "tokens"]
    content = (tmp_path / "onnx" / "model.onnx").read_bytes()
    assert os.path.dirname(tost_hf.__file__).encode() not in content  # no local path
    if dtype == "float32":
        assert result.agreement.equal_tokens == result.agreement.greedy_tokens > 20
        assert_same_text(source, tmp_path / "onnx")


def test_vision_models(tmp_path):
    config = small_vision_config(num_hidden_layers=1, num_labels=3, id2label={0: "cat", 1: "dog", 2: "птица"})
    model = randomize(tost_hf.ToSTForImageClassification(config)).eval()
    model.save_pretrained(tmp_path / "model")
    save_image_processor(config, tmp_path / "model")
    result = export_model(tmp_path / "model", tmp_path / "out")
    assert result.agreement.difference < 1e-5
    from PIL import Image
    from transformers import ViTImageProcessorPil

    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 30, 3), np.uint8))
    picture.save(tmp_path / "picture.png")
    processor = ViTImageProcessorPil.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        probabilities = model(**processor(picture, return_tensors="pt")).logits.softmax(-1)[0]
    expected = f"{probabilities.max().item():6.1%}  {config.id2label[int(probabilities.argmax())]}"
    assert run_script(tmp_path / "out", "classify.py", str(tmp_path / "picture.png")).splitlines()[0] == expected
    command = [sys.executable, str(tmp_path / "out/classify.py")]
    limited = os.environ | {"PYTHONIOENCODING": "cp1252"}
    assert b"  ?????" in subprocess.check_output([*command, str(tmp_path / "picture.png")], env=limited)
    result = subprocess.run([*command, "absent.jpg"], capture_output=True, text=True)
    assert result.returncode == 2 and "error: absent.jpg cannot be read" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "class_name, shapes",
    [
        ("ToSTForSequenceClassification", {"logits": ["batch", 2]}),
        ("ToSTForQuestionAnswering", {"start_logits": ["batch", "tokens"], "end_logits": ["batch", "tokens"]}),
        ("ToSTBackbone", {"feature_maps": ["batch", 1, 32, "rows", "columns"], "memberships": ["batch", 2, 4, "patches"]}),
    ],
)
def test_models_without_state(tmp_path, class_name, shapes):
    config = small_vision_config() if class_name == "ToSTBackbone" else small_config(is_causal=False)
    randomize(getattr(tost_hf, class_name)(config)).save_pretrained(tmp_path / "model")
    assert export_model(tmp_path / "model", tmp_path / "onnx").agreement.difference < 1e-5
    outputs = json.loads((tmp_path / "onnx" / "export.json").read_text())["outputs"]
    assert {spec["name"]: spec["shape"] for spec in outputs} == shapes


def save_nothing(program, path, dtype):
    pass


def save_partially(program, path, dtype):
    path.write_bytes(b"half")
    raise OSError(28, "No space left on device")


def load_constant_program(folder, facts):
    return lambda inputs: (
        {"logits": np.zeros((*inputs["input_ids"].shape, 97), np.float32)}
        | {name.replace("past.", "present."): x for name, x in inputs.items()}
    )


@pytest.mark.parametrize(
    "weight, dtype, save, message",
    [
        (1.0, "float32", save_partially, "space"),
        (1.0, "float32", save_nothing, "other"),
        (3e4, "float16", save_nothing, "NaN"),  # finite in float16, but its outputs are not
        (torch.nan, "float32", save_nothing, "NaN"),
    ],
)
def test_failures_leave_no_files(tmp_path, capsys, monkeypatch, weight, dtype, save, message):
    model = randomize(tost_hf.ToSTForCausalLM(small_config()))
    if weight != 1:
        torch.nn.init.constant_(model.model.layers[1].mlp.up_proj.weight, weight)
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(writing, "save_onnx", save)
    monkeypatch.setattr(writing, "load", load_constant_program)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out"), "--dtype", dtype]) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_missing_packages_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out")]) == 1
    assert "onnxruntime" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, options, message",
    [
        (SLIDING, [], "full_attention"),
        ({}, ["--dtype", "int2"], "int2"),
        ({}, ["--tokenizer", "{large}"], "tokenizer"),
        (None, [], "folder"),
    ],
)
def test_rejected_arguments(tmp_path, capsys, changes, options, message):
    if changes is not None:
        tost_hf.ToSTForCausalLM(small_config(**changes)).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "large")
    options = [option.format(large=tmp_path / "large") for option in options]
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
