"""What `publish` and `verify` reject, with one case for each kind of fault, and which files `publish` uploads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hub_clients import language_folder
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tost_hf.hub import publish, verify
from tost_hf.model.base_tost import CODE_FILES


EVIL = "evil/repo--module.Evil"


def write_file(name: str, data: bytes):
    return lambda folder: (folder / name).write_bytes(data)


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


def test_missing_shard(tmp_path):
    folder = language_folder(tmp_path / "model", max_shard_size="40KB")
    next(folder.glob("model-00002*")).unlink()
    check_rejected(folder, "model-00002")


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
    assert set(result.uploaded) == extra_files | model_files | set(CODE_FILES["tost"])
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
