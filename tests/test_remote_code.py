"""Remote code of published models, loaded without tost_hf installed; it runs only with trust_remote_code=True."""

import functools
import json
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import transformers
from hub_clients import (
    Client,
    Clients,
    equal_outputs,
    language_folder,
    language_model,
    save_tokenizer,
    save_with_card,
    vision_folder,
)
from safetensors.torch import load_file

import tost_hf
from tost_hf.model.base_tost import code_files


TRUST = {"trust_remote_code": True}
TRUST_UNCOMPILED = TRUST | {"backend": "torch"}  # of tests that need no kernels: each copy of the code compiles them again


@pytest.fixture(scope="module")
def bare_clients(hub, tmp_path_factory):
    """Client processes with all packages of this one except tost_hf.

    `-S` ignores the .pth files of editable installations; a folder of links replaces site-packages.
    """
    packages = tmp_path_factory.mktemp("site")
    for folder in (path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")):
        for entry in sorted(Path(folder).iterdir()):
            if "tost_hf" not in entry.name and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    with Clients(hub, tmp_path_factory.mktemp("bare_clients"), options=("-S",), PYTHONPATH=str(packages)) as clients:
        yield clients


def classifier_folder(folder: Path) -> Path:
    model = language_model(model_class=tost_hf.ToSTForSequenceClassification, num_labels=3, pad_token_id=0)
    return save_with_card(model, folder)


def encoder_folder(folder: Path) -> Path:
    fields = {"is_causal": False, "num_labels": 3, "pad_token_id": 0}
    return save_with_card(language_model(model_class=tost_hf.ToSTForTokenClassification, **fields), folder)


MODELS = {
    "AutoModelForCausalLM": language_folder,
    "AutoModelForTokenClassification": encoder_folder,
    "AutoModelForSequenceClassification": classifier_folder,
    "AutoModelForImageClassification": vision_folder,
}


@pytest.fixture(scope="module")
def published(clients, tmp_path_factory):
    """Publishes a model of an Auto class as tost/CLASS, once; returns the outputs of the package for it."""

    @functools.cache
    def publish(auto_class: str) -> dict[str, torch.Tensor]:
        folder = MODELS[auto_class](tmp_path_factory.mktemp("model"))
        clients.publish(folder, f"tost/{auto_class}")
        return clients.load(folder, auto_class)

    return publish


SLOW = ("AutoModelForTokenClassification", "AutoModelForSequenceClassification")  # each compiles the kernels of its copy


@pytest.mark.parametrize("auto_class", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS])
def test_remote_code_equals_the_package_bit_for_bit(clients, bare_clients, published, auto_class):
    """Logits, hidden states of AutoModel, feature maps of AutoBackbone, tokens generated with a cache."""
    expected = published(auto_class)
    actual = bare_clients.load(f"tost/{auto_class}", auto_class, **TRUST)
    assert equal_outputs(actual, expected)
    assert ("generated" in actual) == (auto_class == "AutoModelForCausalLM")
    arguments = (f"tost/{auto_class}", "AutoModel")
    assert equal_outputs(bare_clients.load(*arguments, **TRUST), clients.load(*arguments))
    if auto_class == "AutoModelForImageClassification":
        arguments = (f"tost/{auto_class}", "AutoBackbone")
        actual = bare_clients.load(*arguments, out_indices=[0, 2], **TRUST)
        assert actual.keys() == {"map 0", "map 1"}
        assert equal_outputs(actual, clients.load(*arguments, out_indices=[0, 2]))


CHECK_LANGUAGE_MODEL = """
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline
name = argv[0]
config = AutoConfig.from_pretrained(name, trust_remote_code=True)
assert type(config).__module__.startswith("transformers_modules."), type(config)  # the package is absent
assert config.model_type == "tost" and config.num_hidden_layers == 2
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules."), type(model)
tokens = torch.arange(1, 9).reshape(1, 8)
cached, uncached = (model.generate(tokens, max_new_tokens=8, do_sample=False, use_cache=x) for x in (True, False))
assert torch.equal(cached, uncached)
output = model(tokens, use_cache=True)
assert type(output.past_key_values).__name__ == "ToSTCache"
step = model(tokens[:, :1], past_key_values=output.past_key_values).logits
torch.testing.assert_close(step[:, 0], model(torch.cat([tokens, tokens[:, :1]], 1)).logits[:, -1], rtol=1e-4, atol=1e-4)
generator = pipeline("text-generation", model=name, trust_remote_code=True)
assert generator("import", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("import")
"""


def test_config_cache_and_pipeline(bare_clients, published):
    published("AutoModelForCausalLM")
    bare_clients.run(CHECK_LANGUAGE_MODEL, "tost/AutoModelForCausalLM", TOST_HF_BACKEND="torch").check()


SAVE_AND_PUSH = """
auto_class, name, folder, second, third = argv
model = getattr(transformers, auto_class).from_pretrained(name, trust_remote_code=True)
model.save_pretrained(folder)
model.push_to_hub(second)
model.push_to_hub(third, with_code=False)
"""


@pytest.mark.parametrize("auto_class", ["AutoModelForCausalLM", "AutoModelForImageClassification"])
def test_saving_and_pushing_a_loaded_model(hub, clients, bare_clients, published, tmp_path, auto_class):
    """In a process without the package: the copies have the same files and refer to no other repository."""
    published(auto_class)
    first, second, third = (f"tost/{auto_class}{number}" for number in ("", "-2", "-3"))
    expected = clients.load(first, auto_class, backend="torch")
    bare_clients.run(SAVE_AND_PUSH, auto_class, first, tmp_path / "saved", second, third, token=hub.token).check()
    files = hub.files(second)
    assert {name for name in files if name.endswith(".py")} == set(code_files(json.loads(files["config.json"])["model_type"]))
    for name in files.keys() - {"config.json", "README.md"}:
        assert files[name] == hub.files(first)[name] == (tmp_path / "saved" / name).read_bytes()
    assert json.loads(files["config.json"])["auto_map"] == json.loads(hub.files(first)["config.json"])["auto_map"]
    assert len(hub.commits(second)) == 2  # the initial commit and one push
    for source in (second, tmp_path / "saved"):
        assert equal_outputs(bare_clients.load(source, auto_class, **TRUST_UNCOMPILED), expected)
        assert equal_outputs(clients.load(source, auto_class, backend="torch"), expected)
    assert not any(name.endswith(".py") for name in hub.files(third))
    assert equal_outputs(clients.load(third, auto_class, backend="torch"), expected)
    assert isinstance(bare_clients.load(third, auto_class, **TRUST), Client)  # it cannot be loaded


SAVE_CALLS = {
    "model": "model_class.from_pretrained(folder, **trust).save_pretrained(target)",
    "configuration": "transformers.AutoConfig.from_pretrained(folder, **trust).save_pretrained(target)",
    "pipeline": "pipeline(model=folder, task=task, **trust).save_pretrained(target)",
}


@pytest.mark.parametrize("saved_object", SAVE_CALLS)
@pytest.mark.parametrize("auto_class", ["AutoModelForCausalLM", "AutoModelForImageClassification"])
def test_saving_a_model_of_a_local_folder(bare_clients, tmp_path, saved_object, auto_class):
    """In a process without the package: the copy has all source files.

    transformers copies a local folder's code into one folder per class, each with only the files that the class imports.
    """
    MODELS[auto_class](tmp_path / "model")
    getattr(transformers, auto_class).from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model", with_code=True)
    code = f"""
auto_class, folder, target = argv
model_class = getattr(transformers, auto_class)
trust = {{"trust_remote_code": True}}
task = "text-generation" if auto_class == "AutoModelForCausalLM" else "image-classification"
{SAVE_CALLS[saved_object]}
"""
    bare_clients.run(code, auto_class, tmp_path / "model", tmp_path / "copy").check()
    files = {path.name for path in (tmp_path / "copy").glob("*.py")}
    assert files == set(code_files("tost" if auto_class == "AutoModelForCausalLM" else "tost_vision"))
    if saved_object in ("model", "pipeline"):
        expected = bare_clients.load(tmp_path / "model", auto_class, **TRUST_UNCOMPILED)
        assert equal_outputs(bare_clients.load(tmp_path / "copy", auto_class, **TRUST_UNCOMPILED), expected)


PUBLISHED = Path(__file__).parent / "fixtures" / "published_0.2.0.tar.xz"
COMPUTE_LOGITS = """
import json
from safetensors.torch import load_file, save_file
auto_class, folder, options, inputs, output = argv
torch.set_num_threads(1)
inputs = {name: x for name, x in load_file(inputs).items() if not name.startswith("logits")}
logits = {}
for name in ("float32", "float64"):
    dtype = getattr(torch, name)
    model = getattr(transformers, auto_class).from_pretrained(folder, dtype=dtype, **json.loads(options)).eval()
    with torch.no_grad():
        logits[f"logits_{name}"] = model(**{k: x.to(dtype) if x.is_floating_point() else x for k, x in inputs.items()}).logits
save_file(logits, output)
"""


def compute_logits(clients: Clients, folder: Path, auto_class: str, inputs: Path, backend="auto", **options) -> dict:
    output = clients.folder / f"logits-{clients.number}.safetensors"
    clients.run(COMPUTE_LOGITS, auto_class, folder, json.dumps(options), inputs, output, TOST_HF_BACKEND=backend).check()
    return load_file(output)


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tolerance in (("logits_float32", 1e-5), ("logits_float64", 1e-12)):
        error = (actual[name] - expected[name]).abs().max() / expected[name].abs().max()
        assert error <= tolerance, f"{name}: relative error {error:.2g}"


@pytest.mark.parametrize("kind", ["language", "vision"])
def test_models_published_by_an_earlier_version(clients, bare_clients, tmp_path, kind):
    """Version 0.2.0: equal logits up to rounding with its remote code, with this package, and saved again with its code.

    The language model has every option beyond the paper: decay, convolution, a layer of softmax attention.
    """
    auto_class = "AutoModelForCausalLM" if kind == "language" else "AutoModelForImageClassification"
    with tarfile.open(PUBLISHED) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "0.2.0" / kind
    inputs = folder / "expected.safetensors"
    expected, remote_logits = load_file(inputs), compute_logits(bare_clients, folder, auto_class, inputs, **TRUST)
    assert_close(remote_logits, expected)
    assert_close(compute_logits(clients, folder, auto_class, inputs), expected)
    code = "getattr(transformers, argv[0]).from_pretrained(argv[1]).save_pretrained(argv[2], with_code=True)"
    clients.run(code, auto_class, folder, tmp_path / "copy").check()
    assert_close(compute_logits(bare_clients, tmp_path / "copy", auto_class, inputs, **TRUST_UNCOMPILED), expected)
    saved = {path.name for path in (tmp_path / "copy").glob("*.py")}
    assert saved == set(code_files("tost" if kind == "language" else "tost_vision"))


# argv: folder of a hybrid with code, output folder; Trainer's losses of the same batch with and without smoothing, and resumed
TRAIN = """
import os
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
folder, output = argv
assert AutoTokenizer.from_pretrained(folder, trust_remote_code=False).vocab_size  # it has no code
ids = list(range(1, 13))
losses = []
for smoothing, steps, resume in ((0.0, 1, None), (1e-9, 1, None), (0.0, 2, True)):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    args = TrainingArguments(
        output if smoothing == 0 else f"{output}-smoothed", max_steps=steps, save_steps=1, logging_steps=1, use_cpu=True,
        label_smoothing_factor=smoothing, report_to="none",
    )
    trainer = Trainer(model, args, train_dataset=[{"input_ids": ids, "labels": ids}] * 16)
    trainer.train(resume)
    losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
assert abs(losses[0][0] - losses[1][0]) < 1e-5 * losses[0][0], losses  # labels were shifted
assert len(losses[2]) == 2 and losses[2][0] == losses[0][0], losses  # the first step is the checkpoint's
"""


def test_training_a_hybrid_without_the_package(bare_clients, tmp_path):
    layers = {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "none"}
    language_model(**layers).save_pretrained(tmp_path / "model", with_code=True)
    save_tokenizer(tmp_path / "model")
    bare_clients.run(TRAIN, tmp_path / "model", tmp_path / "trained", TOST_HF_BACKEND="torch").check()


def test_code_runs_only_with_trust_remote_code(hub, clients, bare_clients, published, tmp_path):
    """With a repository whose source files write a marker file when they run."""
    published("AutoModelForCausalLM")
    expected = clients.load("tost/AutoModelForCausalLM", backend="torch")
    files = hub.files("tost/AutoModelForCausalLM")
    marker = tmp_path / "marker"
    write_marker = f"open({str(marker)!r}, 'w')\n".encode()
    hub.create("tost/marked", {name: write_marker * name.endswith(".py") + data for name, data in files.items()})
    for options in ({}, {"trust_remote_code": False}, {"trust_remote_code": None}):
        outcome = bare_clients.load("tost/marked", **options)
        assert isinstance(outcome, Client) and "trust_remote_code" in outcome.output
        assert not marker.exists()

    # with the package installed the code is not needed, so it does not run even if trusted
    for options in ({}, {"trust_remote_code": False}, TRUST):
        assert equal_outputs(clients.load("tost/marked", backend="torch", **options), expected)
    code = "assert type(transformers.AutoModelForCausalLM.from_pretrained(argv[0])) is tost_hf.ToSTForCausalLM"
    clients.run(code, "tost/marked").check()
    verified = clients.command("verify", "tost/marked")
    assert verified.status == 1 and "1 of 5 checks failed" in verified.output and "code" in verified.output
    assert not marker.exists()

    assert equal_outputs(bare_clients.load("tost/marked", **TRUST_UNCOMPILED), expected)
    assert marker.exists()
