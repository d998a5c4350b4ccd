"""What `publish` and `verify` reject, with one case for each kind of fault, and which files `publish` uploads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hub_clients import language_folder
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tost_hf.cli import main
from tost_hf.hub import publish, publish_space, verify
from tost_hf.hub.contents import model_files
from tost_hf.model.base_tost import code_files


EVIL = "evil/repo--module.Evil"


def write_file(name: str, data: bytes):
    return lambda folder: (folder / name).write_bytes(data)


def copy_file(source: str, target: str):
    return lambda folder: shutil.copy(folder / source, folder / target)


def remove_file(name: str):
    return lambda folder: (folder / name).unlink()


def edit_json(name: str, **changes):
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


def edit_weights(change):
    def edit(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def edit_weight(key: str, compute):
    def edit(weights):
        name = next(name for name in weights if key in name)
        weights[name] = compute(weights[name])

    return edit_weights(edit)


def rename_weights(folder):
    (folder / "model.safetensors").rename(folder / "w.safetensors")
    edit_json("config.json", transformers_weights="w.safetensors")(folder)


def enlarge_tokenizer(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<{i}>" for i in range(321 - len(tokenizer))])
    tokenizer.save_pretrained(folder)


FAULTS = {  # an edit of the folder, and a word of the error message
    "token": (write_file("README.md", b"---\nlicense: mit\n---\nhf_" + b"aB3" * 12), "token"),
    "no-card": (remove_file("README.md"), "card"),
    "card-metadata": (write_file("README.md", b"---\nlicense: [apache\n---\n"), "README.md"),
    "no-licence": (write_file("README.md", b"no metadata"), "licence"),
    "unfilled-card": (write_file("README.md", b"---\nlicense: mit\n---\n[More Information Needed]"), "unfilled"),
    "no-config": (remove_file("config.json"), "config.json"),
    "config-garbage": (write_file("config.json", b"{"), "JSON"),
    "another-model": (edit_json("config.json", model_type="gpt2"), "gpt2"),
    "another-class": (edit_json("config.json", architectures=["GPT2Model"]), "GPT2Model"),
    "wrong-size": (edit_json("config.json", hidden_size="abc"), "hidden_size"),
    "no-weights": (remove_file("model.safetensors"), "model.safetensors"),
    "truncated-weights": (write_file("model.safetensors", b"\x08"), "loaded"),
    # at a position that the test run does not reach
    "nan": (edit_weight("embed_positions", lambda x: x.index_fill(0, torch.tensor(len(x) - 1), float("nan"))), "NaN"),
    "overflow": (edit_weight("in_proj", lambda x: x * 1e37), "output"),
    "tensor-missing": (edit_weights(lambda weights: weights.popitem()), "lacks"),
    "extra-tensor": (edit_weights(lambda weights: weights.update(more=torch.ones(2))), "more"),
    "other-shape": (edit_json("config.json", vocab_size=321), "shape"),
    "tokenizer-garbage": (write_file("tokenizer.json", b"garbage"), "tokenizer"),
    "tokenizer-missing": (remove_file("tokenizer.json"), "tokenizer"),
    "tokenizer-too-large": (enlarge_tokenizer, "320"),
    "generation-garbage": (write_file("generation_config.json", b"{"), "generation_config"),
    "auto-map-of-another-repository": (edit_json("config.json", auto_map={"AutoModelForCausalLM": EVIL}), "auto_map"),
    "auto-map-of-a-tokenizer": (edit_json("tokenizer_config.json", auto_map={"AutoTokenizer": [EVIL, None]}), "auto_map"),
    "pipeline": (edit_json("config.json", custom_pipelines={"text-generation": {"impl": "a.B"}}), "custom_pipelines"),
    "generate": (edit_json("generation_config.json", custom_generate="evil/repo"), "custom_generate"),
    "generation-mode": (edit_json("generation_config.json", penalty_alpha=0.6), "penalty_alpha"),
    "kernel": (edit_json("config.json", _attn_implementation={"": "evil/kernel"}), "attn_implementation"),
    "weights-of-another-name": (rename_weights, "transformers_weights"),
    "configuration-of-another-name": (
        edit_json("config.json", configuration_files=["config.4.0.0.json"]),
        "configuration_files",
    ),
    "tokenizer-of-another-name": (edit_json("tokenizer_config.json", fast_tokenizer_files=["a.json"]), "fast_tokenizer_files"),
    "adapter": (write_file("adapter_config.json", b'{"base_model_name_or_path": "a/b"}'), "base_model_name_or_path"),
    "old-shard": (copy_file("model.safetensors", "model-00001-of-00001.safetensors"), "model-00001-of-00001"),
    "index-and-model": (write_file("model.safetensors.index.json", b"{}"), "more than one model"),
    "integers": (edit_weight("in_proj", lambda x: x.to(torch.int8)), "I8"),
    "booleans": (edit_weight("in_proj", lambda x: x.to(torch.bool)), "BOOL"),
    "complex-numbers": (edit_weight("in_proj", lambda x: x.to(torch.complex64)), "C64"),
    "8-bit-floats": (edit_weight("in_proj", lambda x: x.to(torch.float8_e4m3fn)), "F8_E4M3"),
    "a-later-key": (edit_json("tokenizer_config.json", a_later_key=[{"b": EVIL}]), "Evil"),
}


@pytest.fixture(scope="module")
def valid_folder(tmp_path_factory):
    return language_folder(tmp_path_factory.mktemp("valid") / "model")


@pytest.fixture
def folder(valid_folder, tmp_path):
    return Path(shutil.copytree(valid_folder, tmp_path / "model"))


def check_rejected(folder, word):
    """The error of `publish` and a failed check of `verify` contain the word."""
    with pytest.raises((ValueError, OSError), match=word):
        publish(folder, "tost/rejected", dry_run=True)
    details = [check.detail for check in verify(folder) if not check.passed]
    assert any(word in detail for detail in details), details


@pytest.mark.parametrize(("introduce_fault", "word"), FAULTS.values(), ids=FAULTS)
def test_rejected_folders(folder, introduce_fault, word):
    introduce_fault(folder)
    check_rejected(folder, word)


def rename_shard(folder, name):
    """Renames the first of the shards, also in the index: transformers loads the same model."""
    index, shard = folder / "model.safetensors.index.json", min(folder.glob("model-*"))
    index.write_text(index.read_text().replace(shard.name, name))
    shard.rename(folder / name)


def store_twice(folder):
    """Stores a tensor, with another value, in a second shard; the index names the first."""
    first, second = sorted(folder.glob("model-*"))[:2]
    name, tensor = load_file(first).popitem()
    save_file(load_file(second) | {name: 2 * tensor}, second, metadata={"format": "pt"})


SHARD_FAULTS = {
    "missing": (lambda folder: next(folder.glob("model-00002*")).unlink(), "model-00002"),
    "of-another-name": (lambda folder: rename_shard(folder, "part.safetensors"), "names 'part"),
    "out-of-the-folder": (lambda folder: rename_shard(folder, "../model-00001-of-00004.safetensors"), "names '../model"),
    "pickle": (lambda folder: rename_shard(folder, "shard.bin"), "names 'shard"),
    "tensor-twice": (store_twice, "differs from model-00002"),
    "old": (copy_file("model-00001-of-00004.safetensors", "model-00009-of-00009.safetensors"), "model-00009"),
    "index-garbage": (write_file("model.safetensors.index.json", b'{"metadata": {}, "weight_map": 1}'), "index.json"),
}


@pytest.mark.parametrize(("introduce_fault", "word"), SHARD_FAULTS.values(), ids=SHARD_FAULTS)
def test_rejected_shards(tmp_path, introduce_fault, word):
    folder = language_folder(tmp_path / "model", max_shard_size="40KB")
    introduce_fault(folder)
    check_rejected(folder, word)


@pytest.mark.parametrize("name", ["LICENSE", "chat_template.jinja", "curve.png", "model.safetensors"])
def test_links_out_of_the_folder_are_rejected(folder, name):
    (folder / "README.md").write_text("---\nlicense: mit\n---\n![loss](curve.png)\n")
    target = folder.with_name("target")
    if (folder / name).exists():
        (folder / name).rename(target)
    else:
        target.write_text("private")
    (folder / name).symlink_to(target)
    check_rejected(folder, name)


def test_space_with_a_link_out_of_the_folder_is_rejected(tmp_path):
    for name in ("README.md", "space.json", "model/export.json"):
        (tmp_path / "page" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "page" / name).write_text("{}")
    (tmp_path / "page/index.html").symlink_to(tmp_path)
    publish_space(tmp_path / "page", "tost/page", dry_run=True)  # folders are left out
    (tmp_path / "page/tost.js").symlink_to(__file__)
    with pytest.raises(ValueError, match=r"tost\.js is a link"):
        publish_space(tmp_path / "page", "tost/page", dry_run=True)


def test_links_of_the_hub_cache(folder):
    """A downloaded snapshot, whose files are links to blobs, can be published; so can links within the folder."""
    snapshot, blobs = folder.with_name("snapshots") / "0123", folder.with_name("blobs")
    snapshot.parent.mkdir()
    blobs.mkdir()
    folder.rename(snapshot)
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    (snapshot / "LICENSE").symlink_to("README.md")
    assert {"LICENSE", "model.safetensors"} <= set(publish(snapshot, "tost/valid", dry_run=True).uploaded)
    assert all(check.passed for check in verify(snapshot)), verify(snapshot)


def test_checks_load_only_published_files(folder):
    """A tokenizer that loads from the folder, but whose vocabulary is in a file that is not published, is rejected."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ProphetNetTokenizer"}')
    (folder / "prophetnet.tokenizer").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "few", "words"]))
    assert AutoTokenizer.from_pretrained(folder)("few words")["input_ids"] == [5, 6, 3]
    assert "prophetnet.tokenizer" not in model_files(folder)
    check_rejected(folder, "tokenizer")


COMMANDS = (["info"], ["card", "--overwrite"], ["inspect", "text", "--out", "out"], ["export", "out"], ["space", "out"])


@pytest.mark.parametrize("command", COMMANDS, ids=[command[0] for command in COMMANDS])
def test_all_commands_reject_foreign_code(folder, command, capsys, monkeypatch):
    if command[0] == "export":
        pytest.importorskip("onnxscript", reason="an export to ONNX needs the extra `export`")
    edit_json("config.json", _attn_implementation={"": "evil/kernel"})(folder)
    monkeypatch.chdir(folder.parent)
    assert main([command[0], str(folder), *command[1:]]) == 1
    assert "attn_implementation" in capsys.readouterr().err and not Path("out").exists()


def test_harmless_occurrences_of_code_keys(folder):
    """Keys that could load code, as words of a vocabulary and of run records; generation options at their defaults."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"auto_map": 300, "a--b.c": 302}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "run_arguments.json").write_text(json.dumps({"command": "a--b.c", "auto_map": "x"}))
    edit_json("generation_config.json", num_beam_groups=1, penalty_alpha=0.0, num_beams=20000, max_new_tokens=10**9)(folder)
    publish(folder, "tost/valid", dry_run=True)
    assert all(check.passed for check in verify(folder)), verify(folder)  # with generation settings of its own, not these


def test_uploaded_and_left_out_files(folder):
    """Uploads the card's pictures, records and the package's source files, but no by-products of training."""
    extra_files = {"LICENSE", "curve.png", "trainer_state.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"}
    left_out = {"other.png", "training_args.bin", "notes.txt", ".env", "checkpoint-10/config.json", "runs/events", "evil.py"}
    for name in extra_files | left_out:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "modeling_tost.py").write_text("raise SystemExit")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n![loss](curve.png)\n")
    names_before = {path.name for path in folder.iterdir()}
    result = publish(folder, "tost/valid", dry_run=True)
    model_files = {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert set(result.uploaded) == extra_files | model_files | set(code_files("tost"))
    assert set(result.left_out) == {name.split("/")[0] + "/" * ("/" in name) for name in left_out}
    without_code = publish(folder, "tost/valid", dry_run=True, with_code=False)
    assert set(without_code.uploaded) == extra_files | model_files and "modeling_tost.py" in without_code.left_out
    assert {path.name for path in folder.iterdir()} == names_before


def test_verify_fails_for_modified_code(tmp_path):
    folder = language_folder(tmp_path / "model", with_code=True)
    assert all(check.passed for check in verify(folder)), verify(folder)
    (folder / "tssa_reference.py").write_text("# an older version")
    assert [check.name for check in verify(folder) if not check.passed] == ["code"]
    assert publish(folder, "tost/valid", dry_run=True).num_parameters > 0  # it uploads the package's files
