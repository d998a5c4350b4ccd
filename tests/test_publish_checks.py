"""What `publish` and `verify` reject, with one case for each kind of fault, and which files `publish` uploads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hub_clients import contents, language_folder
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tost_hf.cli import main
from tost_hf.hub import publish, publish_space, verify
from tost_hf.hub.contents import model_files
from tost_hf.model.base_tost import code_files


EVIL = "evil/repo--module.Evil"


def edit_file(path: Path, content) -> None:
    """Deletes a file (None), writes a text, changes fields of a JSON file (a dict), or calls a function with the path."""
    if content is None:
        path.unlink()
    elif isinstance(content, str):
        path.write_text(content)
    elif isinstance(content, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    else:
        content(path)


def edit_weights(change):
    def edit(path):
        weights = load_file(path)
        change(weights)
        save_file(weights, path, metadata={"format": "pt"})

    return edit


def edit_weight(compute, name: str = "model.layers.0.self_attn.in_proj.weight"):
    return edit_weights(lambda weights: weights.update({name: compute(weights[name])}))


def set_last_position_to_nan(weights):
    weights["model.embed_positions.weight"][-1] = float("nan")  # the test run does not reach it


def rename_weights(path):
    path.rename(path.with_name("w.safetensors"))
    edit_file(path.with_name("config.json"), {"transformers_weights": "w.safetensors"})


def enlarge_tokenizer(path):
    tokenizer = AutoTokenizer.from_pretrained(path.parent)
    tokenizer.add_tokens([f"<{i}>" for i in range(321 - len(tokenizer))])
    tokenizer.save_pretrained(path.parent)


def link_out_of_folder(path):
    target = path.parent.with_name("target")
    target.write_text("private")
    if path.exists():
        path.replace(target)
    path.symlink_to(target)
    path.with_name("README.md").write_text("---\nlicense: mit\n---\n![loss](curve.png)\n")


WEIGHTS = "model.safetensors"
FAULTS = {  # a file, the argument of `edit_file`, and a word of the error message
    "token": ("README.md", "---\nlicense: mit\n---\nhf_" + "aB3" * 12, "token"),
    "no-card": ("README.md", None, "card"),
    "card-metadata": ("README.md", "---\nlicense: [apache\n---\n", "README.md"),
    "no-license": ("README.md", "no metadata", "license"),
    "unfilled-card": ("README.md", "---\nlicense: mit\n---\n[More Information Needed]", "unfilled"),
    "no-config": ("config.json", None, "config.json"),
    "config-garbage": ("config.json", "{", "JSON"),
    "another-model": ("config.json", {"model_type": "gpt2"}, "gpt2"),
    "another-class": ("config.json", {"architectures": ["GPT2Model"]}, "GPT2Model"),
    "wrong-size": ("config.json", {"hidden_size": "abc"}, "hidden_size"),
    "no-weights": (WEIGHTS, None, WEIGHTS),
    "truncated-weights": (WEIGHTS, "\x08", "loaded"),
    "nan": (WEIGHTS, edit_weights(set_last_position_to_nan), "NaN"),
    "overflow": (WEIGHTS, edit_weight(lambda x: x * 1e37), "output"),
    "tensor-missing": (WEIGHTS, edit_weights(lambda weights: weights.popitem()), "lacks"),
    "extra-tensor": (WEIGHTS, edit_weights(lambda weights: weights.update(more=torch.ones(2))), "more"),
    "integers": (WEIGHTS, edit_weight(lambda x: x.to(torch.int8)), "I8"),
    "booleans": (WEIGHTS, edit_weight(lambda x: x.to(torch.bool)), "BOOL"),
    "complex-numbers": (WEIGHTS, edit_weight(lambda x: x.to(torch.complex64)), "C64"),
    "8-bit-floats": (WEIGHTS, edit_weight(lambda x: x.to(torch.float8_e4m3fn)), "F8_E4M3"),
    "old-shard": (WEIGHTS, lambda path: shutil.copy(path, path.with_stem("model-00001-of-00001")), "model-00001-of-00001"),
    "index-and-model": ("model.safetensors.index.json", "{}", "more than one model"),
    "other-shape": ("config.json", {"vocab_size": 321}, "shape"),
    "tokenizer-garbage": ("tokenizer.json", "garbage", "tokenizer"),
    "tokenizer-missing": ("tokenizer.json", None, "tokenizer"),
    "tokenizer-too-large": ("tokenizer.json", enlarge_tokenizer, "320"),
    "generation-garbage": ("generation_config.json", "{", "generation_config"),
    "auto-map-of-another-repository": ("config.json", {"auto_map": {"AutoModelForCausalLM": EVIL}}, "auto_map"),
    "auto-map-of-a-tokenizer": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [EVIL, None]}}, "auto_map"),
    "pipeline": ("config.json", {"custom_pipelines": {"text-generation": {"impl": "a.B"}}}, "custom_pipelines"),
    "generate": ("generation_config.json", {"custom_generate": "evil/repo"}, "custom_generate"),
    "generation-mode": ("generation_config.json", {"penalty_alpha": 0.6}, "penalty_alpha"),
    "kernel": ("config.json", {"_attn_implementation": {"": "evil/kernel"}}, "attn_implementation"),
    "weights-of-another-name": (WEIGHTS, rename_weights, "transformers_weights"),
    "configuration-of-another-name": ("config.json", {"configuration_files": ["config.4.0.0.json"]}, "configuration_files"),
    "tokenizer-of-another-name": ("tokenizer_config.json", {"fast_tokenizer_files": ["a.json"]}, "fast_tokenizer_files"),
    "a-later-key": ("tokenizer_config.json", {"a_later_key": [{"b": EVIL}]}, "Evil"),
    "adapter": ("adapter_config.json", '{"base_model_name_or_path": "a/b"}', "base_model_name_or_path"),
    **{
        f"link-{x}": (x, link_out_of_folder, f"{x} is a link")
        for x in ("LICENSE", "chat_template.jinja", "curve.png", WEIGHTS)
    },
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


@pytest.mark.parametrize(("name", "content", "word"), FAULTS.values(), ids=FAULTS)
def test_rejected_folders(folder, name, content, word):
    edit_file(folder / name, content)
    check_rejected(folder, word)


def rename_to(name):
    """Renames a shard, also in the index: transformers loads the same model."""

    def rename(shard):
        edit_file(index := shard.with_name(INDEX), index.read_text().replace(shard.name, name))
        shard.rename(shard.parent / name)

    return rename


def store_twice(shard):
    """Stores a tensor, with another value, in the next shard; the index names the first."""
    name, tensor = load_file(shard).popitem()
    second = shard.with_name(SHARD.replace("00001", "00002"))
    save_file(load_file(second) | {name: 2 * tensor}, second, metadata={"format": "pt"})


INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-00004.safetensors"
SHARD_FAULTS = {
    "missing": (SHARD, None, "model-00001"),
    "of-another-name": (SHARD, rename_to("part.safetensors"), "names 'part"),
    "out-of-the-folder": (SHARD, rename_to(f"../{SHARD}"), "names '../model"),
    "pickle": (SHARD, rename_to("shard.bin"), "names 'shard"),
    "tensor-twice": (SHARD, store_twice, "differs from model-00002"),
    "old": (SHARD, lambda path: shutil.copy(path, path.with_stem("model-00009-of-00009")), "model-00009"),
    "index-garbage": (INDEX, {"weight_map": 1}, "index.json"),
}


@pytest.mark.parametrize(("name", "content", "word"), SHARD_FAULTS.values(), ids=SHARD_FAULTS)
def test_rejected_shards(tmp_path, name, content, word):
    folder = language_folder(tmp_path / "model", max_shard_size="40KB")
    edit_file(folder / name, content)
    check_rejected(folder, word)


def test_spaces_that_are_incomplete_or_have_a_link_out_of_the_folder(tmp_path):
    (tmp_path / "README.md").write_text("{}")
    with pytest.raises(ValueError, match="is not a page that `tost-hf space` wrote"):
        publish_space(tmp_path, "tost/page", dry_run=True)
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
    edit_file(folder / "config.json", {"_attn_implementation": {"": "evil/kernel"}})
    monkeypatch.chdir(folder.parent)
    assert main([command[0], str(folder), *command[1:]]) == 1
    assert "attn_implementation" in capsys.readouterr().err and not Path("out").exists()


def test_harmless_occurrences_of_code_keys(folder):
    """Keys that could load code, as words of a vocabulary and of run records; generation options at their defaults."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"auto_map": 300, "a--b.c": 302}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "run_arguments.json").write_text(json.dumps({"command": "a--b.c", "auto_map": "x"}))
    changes = {"num_beam_groups": 1, "penalty_alpha": 0.0, "num_beams": 20000, "max_new_tokens": 10**9}
    edit_file(folder / "generation_config.json", changes)
    publish(folder, "tost/valid", dry_run=True)
    assert all(check.passed for check in verify(folder)), verify(folder)  # with generation settings of its own, not these


def test_uploaded_and_left_out_files(valid_folder, folder):
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
    model_files = set(contents(valid_folder))
    assert set(result.uploaded) == extra_files | model_files | set(code_files("tost"))
    assert set(result.left_out) == {name.split("/")[0] + "/" * ("/" in name) for name in left_out}
    without_code = publish(folder, "tost/valid", dry_run=True, with_code=False)
    assert set(without_code.uploaded) == extra_files | model_files and "modeling_tost.py" in without_code.left_out
    assert {path.name for path in folder.iterdir()} == names_before


def test_verify_fails_for_modified_code(tmp_path):
    """Without running it; `publish` uploads the package's files instead."""
    folder = language_folder(tmp_path / "model", with_code=True)
    assert all(check.passed for check in verify(folder)), verify(folder)
    code = (folder / "modeling_tost.py").read_text()
    (folder / "modeling_tost.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n{code}")
    assert [check.name for check in verify(folder) if not check.passed] == ["code"]
    assert publish(folder, "tost/valid", dry_run=True).num_parameters > 0
    assert not (tmp_path / "marker").exists()
