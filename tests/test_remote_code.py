"""Published models where tost_hf is not installed: their remote code, which runs only with trust_remote_code=True."""

import functools
import json
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import transformers
from hub_clients import CARD, Client, Clients, language_folder, language_model, vision_folder
from safetensors.torch import load_file

import tost_hf
from tost_hf.model.base_tost import CODE_FILES


TRUST = {"trust_remote_code": True}


@pytest.fixture(scope="module")
def clients(hub, tmp_path_factory):
    """Processes with the package."""
    with Clients(hub, tmp_path_factory.mktemp("clients")) as forks:
        yield forks


@pytest.fixture(scope="module")
def without_package(tmp_path_factory):
    """What makes a Python that has all of this one's packages but tost_hf: options and environment.

    `-S` leaves out the .pth files by which editable installations work, links to all else take the place of site-packages.
    """
    site = tmp_path_factory.mktemp("site")
    for folder in (path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")):
        for entry in sorted(Path(folder).iterdir()):
            if "tost_hf" not in entry.name and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    return {"preload": "", "options": ("-S",), "PYTHONPATH": str(site)}


@pytest.fixture(scope="module")
def bare_clients(hub, tmp_path_factory, without_package):
    """Clients without the package."""
    with Clients(hub, tmp_path_factory.mktemp("bare_clients"), **without_package) as forks:
        yield forks


def classifier_folder(folder: Path) -> Path:
    language_model(model_class=tost_hf.ToSTForSequenceClassification, num_labels=3, pad_token_id=0).save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    return folder


def encoder_folder(folder: Path) -> Path:
    fields = {"is_causal": False, "num_labels": 3, "pad_token_id": 0}
    language_model(model_class=tost_hf.ToSTForTokenClassification, **fields).save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    return folder


MODELS = {
    "AutoModelForCausalLM": language_folder,
    "AutoModelForTokenClassification": encoder_folder,
    "AutoModelForSequenceClassification": classifier_folder,
    "AutoModelForImageClassification": vision_folder,
}


@pytest.fixture(scope="module")
def published(hub, clients, tmp_path_factory):
    """Publishes a model of an Auto class as tost/CLASS, once; returns what the package computes with it."""

    @functools.cache
    def publish(auto_class: str) -> dict[str, torch.Tensor]:
        folder = MODELS[auto_class](tmp_path_factory.mktemp("model"))
        clients.command("publish", folder, f"tost/{auto_class}", token=hub.token).check()
        return clients.load(folder, auto_class)

    return publish


@pytest.fixture(scope="module")
def computed(published):
    """tost/AutoModelForCausalLM, the repository of most tests, and what the package computes with it."""
    return published("AutoModelForCausalLM")


def same(left, right) -> bool:
    """Equal to the last bit; fails with the client's output if it could not load."""
    for results in (left, right):
        assert isinstance(results, dict), results.output
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def rejected(outcome) -> bool:
    return isinstance(outcome, Client) and outcome.status == 1


@pytest.mark.parametrize("auto_class", MODELS)
def test_remote_code_and_package_agree_bit_for_bit(clients, bare_clients, published, auto_class):
    """In logits, in the features of AutoModel, in the tokens generated with a cache."""
    expected = published(auto_class)
    found = bare_clients.load(f"tost/{auto_class}", auto_class, **TRUST)
    assert same(found, expected)
    assert ("generated" in found) == (auto_class == "AutoModelForCausalLM")
    assert same(bare_clients.load(f"tost/{auto_class}", "AutoModel", **TRUST), clients.load(f"tost/{auto_class}", "AutoModel"))


def test_a_published_classifier_is_a_backbone(clients, bare_clients, published):
    published("AutoModelForImageClassification")
    case = ("tost/AutoModelForImageClassification", "AutoBackbone")
    found = bare_clients.load(*case, out_indices=[0, 2], **TRUST)
    assert found.keys() == {"map 0", "map 1"} and same(found, clients.load(*case, out_indices=[0, 2]))


IN_DETAIL = """
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline
name = argv[0]
config = AutoConfig.from_pretrained(name, trust_remote_code=True)
assert type(config).__module__.startswith("transformers_modules."), type(config)  # the package is absent
assert config.model_type == "tost" and config.num_hidden_layers == 2
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules."), type(model)
tokens = torch.arange(1, 9).reshape(1, 8)
cached, anew = (model.generate(tokens, max_new_tokens=8, do_sample=False, use_cache=use) for use in (True, False))
assert torch.equal(cached, anew)
output = model(tokens, use_cache=True)
assert type(output.past_key_values).__name__ == "ToSTCache"
step = model(tokens[:, :1], past_key_values=output.past_key_values).logits
torch.testing.assert_close(step[:, 0], model(torch.cat([tokens, tokens[:, :1]], 1)).logits[:, -1], rtol=1e-4, atol=1e-4)
writer = pipeline("text-generation", model=name, trust_remote_code=True)
assert writer("import", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("import")
"""


def test_config_cache_and_pipeline(bare_clients, computed):
    bare_clients.run(IN_DETAIL, "tost/AutoModelForCausalLM").check()


AGAIN = """
auto_class, name, folder, second, third = argv
model = getattr(transformers, auto_class).from_pretrained(name, trust_remote_code=True)
model.save_pretrained(folder)
model.push_to_hub(second)
model.push_to_hub(third, with_code=False)
"""


@pytest.mark.parametrize("auto_class", ["AutoModelForCausalLM", "AutoModelForImageClassification"])
def test_saved_and_published_again(hub, clients, bare_clients, published, tmp_path, auto_class):
    """By a process without the package: the copy has the same files and refers to no other repository."""
    expected = published(auto_class)
    first, second, third = (f"tost/{auto_class}{number}" for number in ("", "-2", "-3"))
    bare_clients.run(AGAIN, auto_class, first, tmp_path / "saved", second, third, token=hub.token).check()
    files = hub.files(second)
    assert {name for name in files if name.endswith(".py")} == set(CODE_FILES[json.loads(files["config.json"])["model_type"]])
    for name in files.keys() - {"config.json", "README.md"}:
        assert files[name] == hub.files(first)[name] == (tmp_path / "saved" / name).read_bytes()
    assert json.loads(files["config.json"])["auto_map"] == json.loads(hub.files(first)["config.json"])["auto_map"]
    assert len(hub.commits(second)) == 2  # the server's and one
    for source in (second, tmp_path / "saved"):
        assert same(bare_clients.load(source, auto_class, **TRUST), expected)
        assert same(clients.load(source, auto_class), expected)
    assert not any(name.endswith(".py") for name in hub.files(third))
    assert same(clients.load(third, auto_class), expected)
    assert rejected(bare_clients.load(third, auto_class, **TRUST))


SAVED_AGAIN = {
    "model": "model_class.from_pretrained(folder, **trust).save_pretrained(target)",
    "configuration": "transformers.AutoConfig.from_pretrained(folder, **trust).save_pretrained(target)",
    "pipeline": "pipeline(model=folder, task=task, **trust).save_pretrained(target)",
}


@pytest.mark.parametrize("way", SAVED_AGAIN)
@pytest.mark.parametrize("auto_class", ["AutoModelForCausalLM", "AutoModelForImageClassification"])
def test_saved_again_from_a_local_folder(bare_clients, tmp_path, way, auto_class):
    """By a process without the package: transformers splits a local folder's code, the copy has all of it."""
    MODELS[auto_class](tmp_path / "model")
    getattr(transformers, auto_class).from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model", with_code=True)
    again = f"""
auto_class, folder, target = argv
model_class = getattr(transformers, auto_class)
trust = {{"trust_remote_code": True}}
task = "text-generation" if auto_class == "AutoModelForCausalLM" else "image-classification"
{SAVED_AGAIN[way]}
"""
    bare_clients.run(again, auto_class, tmp_path / "model", tmp_path / "again").check()
    files = {path.name for path in (tmp_path / "again").glob("*.py")}
    assert files == set(CODE_FILES["tost" if auto_class == "AutoModelForCausalLM" else "tost_vision"])
    if way in ("model", "pipeline"):
        expected = bare_clients.load(tmp_path / "model", auto_class, **TRUST)
        assert same(bare_clients.load(tmp_path / "again", auto_class, **TRUST), expected)


PUBLISHED = Path(__file__).parent / "fixtures" / "published_0.2.0.tar.xz"
LOGITS = """
import json
from safetensors.torch import load_file, save_file
auto_class, folder, options, inputs, output = argv
torch.set_num_threads(1)
inputs = {name: x for name, x in load_file(inputs).items() if not name.startswith("logits")}
found = {}
for name in ("float32", "float64"):
    dtype = getattr(torch, name)
    model = getattr(transformers, auto_class).from_pretrained(folder, dtype=dtype, **json.loads(options)).eval()
    with torch.no_grad():
        found[f"logits_{name}"] = model(**{k: x.to(dtype) if x.is_floating_point() else x for k, x in inputs.items()}).logits
save_file(found, output)
"""


def compute_logits(worker: Clients, folder: Path, auto_class: str, inputs: Path, **options) -> dict[str, torch.Tensor]:
    output = worker.folder / f"logits-{worker.number}.safetensors"
    worker.run(LOGITS, auto_class, folder, json.dumps(options), inputs, output).check()
    return load_file(output)


def assert_equal_to_rounding(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tolerance in (("logits_float32", 1e-5), ("logits_float64", 1e-12)):
        error = (found[name] - expected[name]).abs().max() / expected[name].abs().max()
        assert error <= tolerance, f"{name}: relative error {error:.2g}"


@pytest.mark.parametrize("kind", ["language", "vision"])
def test_folders_published_before(clients, bare_clients, tmp_path, kind):
    """By 0.2.0: with their own remote code, with this package, and saved again with its code: the same logits, to rounding.

    The language model has every option beyond the paper: forgetting, convolution, a layer of softmax attention.
    """
    auto_class = "AutoModelForCausalLM" if kind == "language" else "AutoModelForImageClassification"
    with tarfile.open(PUBLISHED) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "0.2.0" / kind
    inputs = folder / "expected.safetensors"
    expected, with_its_code = load_file(inputs), compute_logits(bare_clients, folder, auto_class, inputs, **TRUST)
    assert_equal_to_rounding(with_its_code, expected)
    assert_equal_to_rounding(compute_logits(clients, folder, auto_class, inputs), expected)
    again = "getattr(transformers, argv[0]).from_pretrained(argv[1]).save_pretrained(argv[2], with_code=True)"
    clients.run(again, auto_class, folder, tmp_path / "again").check()
    assert_equal_to_rounding(compute_logits(bare_clients, tmp_path / "again", auto_class, inputs, **TRUST), expected)
    saved = {path.name for path in (tmp_path / "again").glob("*.py")}
    assert saved == set(CODE_FILES["tost" if kind == "language" else "tost_vision"])


def test_code_runs_only_where_it_is_trusted(hub, clients, bare_clients, computed, tmp_path):
    """A repository whose source files leave a mark when they run."""
    files = hub.files("tost/AutoModelForCausalLM")
    mark = tmp_path / "mark"
    marking = f"open({str(mark)!r}, 'w')\n".encode()
    hub.create("tost/mark", {name: marking * name.endswith(".py") + data for name, data in files.items()})
    for options in ({}, {"trust_remote_code": False}, {"trust_remote_code": None}):
        outcome = bare_clients.load("tost/mark", **options)
        assert rejected(outcome) and "trust_remote_code" in outcome.output
        assert not mark.exists()

    # with the package it is not needed, and not run even if trusted
    for options in ({}, {"trust_remote_code": False}, TRUST):
        assert same(clients.load("tost/mark", **options), computed)
    own = "assert type(transformers.AutoModelForCausalLM.from_pretrained(argv[0])) is tost_hf.ToSTForCausalLM"
    clients.run(own, "tost/mark").check()
    verified = clients.command("verify", "tost/mark")
    assert verified.status == 1 and "1 of 6 checks failed" in verified.output and "code" in verified.output
    assert not mark.exists()

    assert same(bare_clients.load("tost/mark", **TRUST), computed)
    assert mark.exists()
