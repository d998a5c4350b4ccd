"""`tost-hf export`: programs with the outputs of their models that run without this package, and rejected models."""

import importlib
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
from hub_clients import image_folder, image_pipeline, save_picture
from PIL import Image
from transformers import GenerationConfig, LogitsProcessorList, generation, pipeline

import tost_hf
from tost_hf.cli import main
from tost_hf.export import export_model, writing
from tost_hf.export.comparing import Agreement, compare_script
from tost_hf.export.runtime import LanguageModel, load
from tost_hf.model.configuration_tost import FULL_ATTENTION, SLIDING_ATTENTION, TSSA


for module in ("onnxscript", "onnxruntime"):
    pytest.importorskip(module, reason="an export to ONNX needs the extra `export`")
onnx = pytest.importorskip("onnx", reason="an export to ONNX needs the extra `export`")

DECAY = {"num_hidden_layers": 1, "decay_type": "token", "conv_kernel": 4, "position_embedding_type": "none"}
HYBRID = {**DECAY, "num_hidden_layers": 2, "layer_types": [TSSA, FULL_ATTENTION]}
WINDOW = {**HYBRID, "layer_types": [TSSA, SLIDING_ATTENTION], "sliding_window": 4}
MIXED = {**WINDOW, "num_hidden_layers": 3, "layer_types": [TSSA, SLIDING_ATTENTION, FULL_ATTENTION]}
LANGUAGE = {"published": {"num_hidden_layers": 1}, "decay": DECAY, "hybrid": HYBRID, "window": WINDOW, "mixed": MIXED}


def language_folder(folder: Path, **changes) -> Path:
    make_model(**changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Runs a script of an exported folder as if these packages were not installed."""
    code = "import runpy, sys; sys.modules.update(torch=None, torchvision=None, tost_hf=None); del sys.argv[0]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-sEc", code, str(folder / arguments[0]), *arguments[1:]]
    return subprocess.run(command, capture_output=True, encoding="utf-8", cwd=folder)


def assert_same_text(source: Path, folder: Path, prompt: str = "To be") -> None:
    """Asserts that the script of an exported folder prints the text of transformers' pipeline."""
    generator = pipeline("text-generation", tost_hf.ToSTForCausalLM.from_pretrained(source), tokenizer=byte_tokenizer())
    expected = generator(prompt, max_new_tokens=20, do_sample=False)[0]["generated_text"]
    result = run_script(folder, "generate.py", prompt, "--tokens", "20")
    assert (result.stdout, result.stderr) == (f"{expected}\n", "")


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("published", "float32"),
        pytest.param("decay", "float32", marks=pytest.mark.slow),
        pytest.param("hybrid", "float32", marks=pytest.mark.slow),
        pytest.param("window", "float32", marks=pytest.mark.slow),
        pytest.param("mixed", "float32", marks=pytest.mark.slow),
        pytest.param("decay", "float16", marks=pytest.mark.slow),
    ],
)
def test_language_models(tmp_path, name, dtype):
    """`export_model` itself compares logits, and the text of the script in an interpreter with PyTorch."""
    source = language_folder(tmp_path / "model", **LANGUAGE[name])
    result = export_model(source, tmp_path / "onnx", dtype=dtype)
    assert result.agreement.difference < {"float32": 1e-5, "float16": 1e-2}[dtype]
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
        # without a position limit, longer than one chunk of a program with fixed shapes
        text = "To be" if facts["max_position_embeddings"] else "To be, or not to be, that is the question:"
        assert_same_text(source, tmp_path / "onnx", text)


@pytest.mark.slow
def test_generation_settings(tmp_path):
    """The script stops at each of several end tokens and samples as generation_config.json says."""
    source, out = language_folder(tmp_path / "model", num_hidden_layers=1), tmp_path / "onnx"
    model, prompt = tost_hf.ToSTForCausalLM.from_pretrained(source), byte_tokenizer()("To be", return_tensors="pt")
    new_ids = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, 5:].tolist()
    settings = {"bos_token_id": 0, "eos_token_id": [new_ids[9], 0], "do_sample": True, "top_k": 1}  # greedy decoding
    GenerationConfig(**settings).save_pretrained(source)
    export_model(source, out)
    assert_same_text(source, out)
    assert_same_text(source, out, "")
    greedy_text = run_script(out, "generate.py", "To be", "--temperature", "0").stdout
    (out / "generation_config.json").write_text(json.dumps(settings | {"top_k": 0}))
    assert run_script(out, "generate.py", "To be").stdout != greedy_text
    (out / "generate.py").write_text((out / "generate.py").read_text().replace(".argmax()", ".argmin()"))
    metadata = json.loads((out / "export.json").read_text())
    with pytest.raises(ValueError, match="the pipeline"):
        compare_script(out / "generate.py", model, LanguageModel(load(out, metadata), metadata), 1e-4)


def test_sampling(monkeypatch):
    """Settings apply in transformers' order."""
    monkeypatch.syspath_prepend(Path(writing.__file__).parent)
    sample_token, rng = importlib.import_module("generate").sample_token, np.random.default_rng(0)
    logits = torch.randn(1, 12) * 2
    warpers = [generation.TemperatureLogitsWarper(1.5), generation.TopKLogitsWarper(6), generation.TopPLogitsWarper(0.8)]
    expected = LogitsProcessorList(warpers)(None, logits).softmax(-1)[0].numpy()
    counts = np.bincount([sample_token(logits[0].numpy(), 1.5, 6, 0.8, rng) for _ in range(4000)], minlength=12)
    assert ((counts > 0) == (expected > 0)).all() and 1 < (expected > 0).sum() < 6
    np.testing.assert_allclose(counts / 4000, expected, atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    "processor_file, changes, mode",
    [
        ("processor_config.json", {"problem_type": "multi_label_classification"}, "RGB"),
        ("preprocessor_config.json", {}, "L"),
        ("", {"id2label": {0: "птица"}}, "P"),  # one output
        ("", {"problem_type": "regression", "num_channels": 1}, "RGB"),
    ],
)
def test_image_classifiers(tmp_path, processor_file, changes, mode):
    model, processor = image_folder(tmp_path / "model", processor_file, **changes)
    assert export_model(tmp_path / "model", tmp_path / "out").agreement.difference < 1e-5
    path = save_picture(tmp_path / "picture.png", mode)
    number_format = "8.4g" if model.config.problem_type == "regression" else "6.1%"
    expected = "".join(f"{x['score']:{number_format}}  {x['label']}\n" for x in image_pipeline(model, processor)(path))
    result = run_script(tmp_path / "out", "classify.py", path)
    assert (result.stdout, result.stderr) == (expected, "")


@pytest.mark.slow
def test_rejected_pictures_and_scripts(tmp_path):
    (model, _), out = image_folder(tmp_path / "model"), tmp_path / "out"
    export_model(tmp_path / "model", out)
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(tmp_path / "deep.png")
    for name, message in [("absent.jpg", "cannot be read"), ("deep.png", "more than 8 bits")]:
        result = run_script(out, "classify.py", str(tmp_path / name))
        assert result.returncode == 2 and f"{name} " in result.stderr and message in result.stderr
    command, limited = [sys.executable, str(out / "classify.py")], os.environ | {"PYTHONIOENCODING": "cp1252"}
    assert b"  ?????" in subprocess.check_output([*command, save_picture(tmp_path / "picture.png")], env=limited)
    script, no_exif = (out / "classify.py").read_text(), ("load_image(source)", 'source.convert("RGB")')
    for change, message in [(no_exif, "the pipeline returns"), (("import json", "import jso"), "fails: Traceback")]:
        (out / "classify.py").write_text(script.replace(*change))
        with pytest.raises(ValueError, match=message):
            compare_script(out / "classify.py", model, None, 1e-4)


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


def save_nothing(program, path):
    pass


def save_partially(program, path):
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


def test_other_output_of_the_script_leaves_no_files(tmp_path, capsys, monkeypatch):
    def reject(script, model, exported, tolerance):
        raise ValueError(f"{script.name} prints something else")

    for name, stub in (("save_onnx", save_nothing), ("load", load_constant_program), ("compare_script", reject)):
        monkeypatch.setattr(writing, name, stub)
    monkeypatch.setattr(writing, "compare", lambda *arguments: Agreement(0.0))
    language_folder(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out")]) == 1
    assert "generate.py prints something else" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_missing_packages_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out")]) == 1
    assert "onnxruntime" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, options, message",
    [
        ({}, ["--dtype", "int8"], "int8"),
        ({"vocab_size": 257}, ["--tokenizer", "{large}"], "repetition_penalty"),
        ({}, ["--tokenizer", "{large}"], "tokenizer"),
        (None, [], "folder"),
    ],
)
def test_rejected_arguments(tmp_path, capsys, changes, options, message):
    if changes is not None:
        model = tost_hf.ToSTForCausalLM(small_config(**changes))
        model.generation_config.repetition_penalty = 1.2
        model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "large")
    options = [option.format(large=tmp_path / "large") for option in options]
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
