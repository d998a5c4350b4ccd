"""What `publish` and `verify` reject: damaged, foreign and secret content of a folder, before any request is made."""

import base64
import gzip
import json
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import needs_auto_processor
from hub_clients import language_folder, vision_folder
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tost_hf.cli import main
from tost_hf.hub.publishing import publish
from tost_hf.hub.verification import verify


def put(name: str, data: bytes):
    return lambda folder: (folder / name).write_bytes(data)


def edit_weights(change, metadata=None):
    def edit(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"} | (metadata or {}))

    return edit


def edit_json(name: str, **changes):
    def edit(folder):
        content = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return edit


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def change(key: str, value):
    def edit(weights):
        name = next(name for name in weights if key in name)
        weights[name] = value(weights[name])

    return edit_weights(edit)


def link(name: str, target: str):
    def make(folder):
        (folder.parent / "elsewhere").mkdir()
        (folder.parent / "elsewhere" / "secret.txt").write_text("mine")
        (folder / name).symlink_to(folder.parent / target)

    return make


def separate_head(weights):
    weights["lm_head.weight"] = next(x for name, x in weights.items() if "embed" in name and x.shape[0] == 320) + 1


def index(**changes):
    def edit(folder):
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        content = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
        content |= changes
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({key: value for key, value in content.items() if value is not None})
        )

    return edit


def zipped(folder):
    with zipfile.ZipFile(folder / "weights.zip", "w") as archive:
        archive.writestr("a.txt", "text")


def larger_tokenizer(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<{i}>" for i in range(321 - len(tokenizer))])
    tokenizer.save_pretrained(folder)


PICKLE = pickle.dumps({"a": 1}, protocol=4)
TOKEN = b"hf_" + b"aB3" * 12
LANGUAGE = {
    "card-metadata": (put("README.md", b"---\nlicense: [apache\n---\n"), "metadata"),
    "scheduler": (put("scheduler.safetensors", b""), "scheduler.safetensors"),
    "env": (put(".env", b"A=1"), r"\.env"),
    "token": (put("run.log", b"login with " + TOKEN), "run.log holds a secret .Hugging Face Token"),
    "private-key": (put("notes.txt", b"-----BEGIN OPENSSH PRIVATE" + b" KEY-----"), "notes.txt holds a secret .Private Key"),
    "no-licence": (put("README.md", b"no metadata"), "licence"),
    "no-card": (remove("README.md"), "no model card"),
    "no-config": (remove("config.json"), "no config.json"),
    "no-weights": (remove("model.safetensors"), "model.safetensors is missing|no config"),
    "cut-weights": (put("model.safetensors", b"\x08"), "truncated or damaged"),
    "nan": (change("norm", lambda x: x * float("nan")), "NaN"),
    "tensor-missing": (edit_weights(lambda weights: weights.popitem()), "lack"),
    "tensor-more": (edit_weights(lambda weights: weights.update(more=torch.ones(2))), "more"),
    "more-layers": (edit_json("config.json", num_hidden_layers=3), "lack"),
    "size-text": (edit_json("config.json", hidden_size="abc"), "not the configuration"),
    "dtype-unknown": (edit_json("config.json", dtype="foo"), "not the configuration|config.json"),
    "another-model": (edit_json("config.json", model_type="gpt2", architectures=["GPT2LMHeadModel"]), "not a ToST model"),
    "link-to-a-file": (link("notes.txt", "elsewhere/secret.txt"), "notes.txt is a link"),
    "float8": (change("norm", lambda x: x.to(torch.float8_e4m3fn)), "torch.float8"),
    "overflow": (change("in_proj", lambda x: x * 1e37), "output holds NaN or infinite"),
    "head-differs": (edit_weights(separate_head), "differs from"),
    "pickle-in-metadata": (edit_weights(dict, {"extra": PICKLE.decode("latin-1")}), "pickle in its metadata"),
    "encoded-pickle": (edit_weights(dict, {"extra": base64.b64encode(PICKLE).decode()}), "pickle in its metadata"),
    "token-in-metadata": (edit_weights(dict, {"extra": TOKEN.decode()}), "holds a secret .* in its metadata"),
    "index-without-metadata": (index(metadata=None), "not an index of safetensors files"),
    "index-without-files": (index(weight_map={}), "not an index of safetensors files"),
    "index-of-others": (index(weight_map={"a": "model-00001-of-00001.safetensors"}), "in which file each tensor is"),
    "index-deep": (put("model.safetensors.index.json", b"[" * 100_000), "both|not an index"),
    "layers": (edit_json("config.json", num_hidden_layers=10**9), "layers|not the configuration"),
    "tokenizer-garbage": (put("tokenizer.json", b"garbage"), "tokenizer of .* cannot be loaded"),
    "tokenizer-config-garbage": (put("tokenizer_config.json", b"{"), "tokenizer of .* cannot be loaded"),
    "tokenizer-missing": (remove("tokenizer.json"), "tokenizer"),
    "tokenizer-of-foreign-code": (
        edit_json("tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": [None, "evil.Evil"]}),
        "tokenizer",
    ),
    "generation-garbage": (put("generation_config.json", b"{"), "cannot load the generation settings"),
    "secret-in-utf-16": (put("notes.txt", TOKEN.decode().encode("utf-16")), "notes.txt holds a secret"),
    "secret-in-a-large-file": (put("log.txt", b"\xff" * 33 * 2**20 + TOKEN), "log.txt holds a secret"),
    "token-as-a-name": (put(f"{TOKEN.decode()}.txt", b""), "has a secret in its name .Hugging Face Token"),
    "drive": (put("C:notes.txt", b""), "'C:notes.txt' has a drive letter or a b"),
    "share": (put(r"\\server\notes", b""), r"server.*notes' has a drive letter or a b"),
    "backslash": (put(r"..\notes.txt", b""), "has a drive letter or a b"),
    "bin": (put("pytorch_model.bin", b""), "pytorch_model.bin .*pickle"),
    "pickle-0": (put("data.dat", pickle.dumps({"a": os.getcwd}, protocol=0)), "data.dat is a pickle"),
    "zip": (zipped, "weights.zip is an archive"),
    "torch-named-otherwise": (lambda folder: torch.save([1], folder / "more.dat"), "more.dat is an archive"),
    "pickle-gzipped": (put("data.gz", gzip.compress(PICKLE)), "data.gz is an archive or compressed"),
    "looped-link": (lambda folder: (folder / "loop").symlink_to("loop"), "loop is a link to something that is not a file"),
    "link-to-the-folder": (lambda folder: (folder / "loop").symlink_to("."), "loop is a link to something that is not a file"),
    "quantization": (
        edit_json("config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "config.json has a quantization_config, but",
    ),
    "other-weights": (
        edit_json("config.json", transformers_weights="other.safetensors"),
        "names its weights by transformers_w",
    ),
    "tokenizer-too-large": (larger_tokenizer, "does not fit: its last token is number 320, and the model has 320 tokens"),
}
VISION = {
    "preprocessor-garbage": (put("preprocessor_config.json", b"garbage"), "image processor"),
    "preprocessor-list": (put("preprocessor_config.json", b"[]"), "image processor"),
    "preprocessor-unknown": (edit_json("preprocessor_config.json", image_processor_type="Nothing"), "image processor"),
}


@pytest.fixture(scope="module")
def sound_folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    return {"language": language_folder(folder / "language"), "vision": vision_folder(folder / "vision")}


@pytest.fixture
def language(sound_folders, tmp_path):
    return Path(shutil.copytree(sound_folders["language"], tmp_path / "model"))


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [pytest.param("language", *case, id=name) for name, case in LANGUAGE.items()]
    + [pytest.param("vision", *case, id=name, marks=needs_auto_processor) for name, case in VISION.items()],
)
def test_rejected_folders(sound_folders, tmp_path, kind, damage, message):
    """`publish` raises with the message, and `verify` fails with it, too."""
    folder = Path(shutil.copytree(sound_folders[kind], tmp_path / "model"))
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError)) as rejection:
        publish(folder, "tost/rejected", dry_run=True)
    assert re.search(message, str(rejection.value)), str(rejection.value)
    failed = [check.detail for check in verify(folder) if not check.passed]
    assert any(re.search(message, detail) for detail in failed), failed
    assert TOKEN.decode() not in str(rejection.value) + str(failed)


def from_the_cache(folder):
    """As the Hub's cache keeps a repository: links into its blobs."""
    cache = folder.parent / "models--tost--x"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    snapshot = folder.rename(cache / "snapshots" / "0123abc")
    for path in list(snapshot.iterdir()):
        path.rename(cache / "blobs" / path.name)
        path.symlink_to(os.path.join("..", "..", "blobs", path.name))
    return snapshot


def without_a_tokenizer(folder):
    for path in folder.glob("*token*"):
        path.unlink()
    return folder


def linked_inside(folder):
    (folder / "LICENSE.txt").write_text("Apache")
    (folder / "LICENSE").symlink_to("LICENSE.txt")
    return folder


@pytest.mark.parametrize("change", [from_the_cache, without_a_tokenizer, linked_inside])
def test_accepted_folders(language, change):
    folder = change(language)
    assert set(publish(folder, "tost/good", dry_run=True).uploaded) >= {path.name for path in folder.iterdir()}
    assert [check for check in verify(folder) if not check.passed] == []


def test_invalid_repo_id(language, capsys):
    before = (language / "README.md").read_bytes()
    assert main(["publish", str(language), "bad id!", "--card"]) == 1
    assert (language / "README.md").read_bytes() == before and "bad id!" in capsys.readouterr().err
