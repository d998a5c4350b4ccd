"""What `publish` and `verify` reject, one case of each kind of damage, and what `publish` leaves behind."""

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


def put(name: str, data: bytes):
    return lambda folder: (folder / name).write_bytes(data)


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def edit_json(name: str, **changes):
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


def edit_weights(change):
    def edit(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def change(key: str, value):
    def edit(weights):
        name = next(name for name in weights if key in name)
        weights[name] = value(weights[name])

    return edit_weights(edit)


def larger_tokenizer(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<{i}>" for i in range(321 - len(tokenizer))])
    tokenizer.save_pretrained(folder)


DAMAGE = {  # what is done to a folder, and a word of the message
    "token": (put("README.md", b"---\nlicense: mit\n---\nhf_" + b"aB3" * 12), "token"),
    "no-card": (remove("README.md"), "card"),
    "card-metadata": (put("README.md", b"---\nlicense: [apache\n---\n"), "metadata"),
    "no-licence": (put("README.md", b"no metadata"), "licence"),
    "unfilled-card": (put("README.md", b"---\nlicense: mit\n---\n[More Information Needed]"), "unfilled"),
    "no-config": (remove("config.json"), "config.json"),
    "config-garbage": (put("config.json", b"{"), "JSON"),
    "another-model": (edit_json("config.json", model_type="gpt2"), "gpt2"),
    "another-class": (edit_json("config.json", architectures=["GPT2Model"]), "GPT2Model"),
    "wrong-size": (edit_json("config.json", hidden_size="abc"), "hidden_size"),
    "no-weights": (remove("model.safetensors"), "model.safetensors"),
    "cut-weights": (put("model.safetensors", b"\x08"), "loaded"),
    # where the few tokens of the test run do not reach
    "nan": (change("embed_positions", lambda x: x.index_fill(0, torch.tensor(len(x) - 1), float("nan"))), "NaN"),
    "overflow": (change("in_proj", lambda x: x * 1e37), "output"),
    "tensor-missing": (edit_weights(lambda weights: weights.popitem()), "lacks"),
    "tensor-more": (edit_weights(lambda weights: weights.update(more=torch.ones(2))), "more"),
    "other-shape": (edit_json("config.json", vocab_size=321), "shape"),
    "tokenizer-garbage": (put("tokenizer.json", b"garbage"), "tokenizer"),
    "tokenizer-missing": (remove("tokenizer.json"), "tokenizer"),
    "tokenizer-too-large": (larger_tokenizer, "320"),
    "generation-garbage": (put("generation_config.json", b"{"), "generation_config"),
    "auto-map-of-another-repository": (edit_json("config.json", auto_map={"AutoModelForCausalLM": EVIL}), "auto_map"),
    "auto-map-of-a-tokenizer": (edit_json("tokenizer_config.json", auto_map={"AutoTokenizer": [EVIL, None]}), "auto_map"),
    "pipeline": (edit_json("config.json", custom_pipelines={"text-generation": {"impl": "a.B"}}), "custom_pipelines"),
    "generate": (edit_json("generation_config.json", custom_generate="evil/repo"), "custom_generate"),
    "generation-mode": (edit_json("generation_config.json", penalty_alpha=0.6), "penalty_alpha"),
    "kernel": (edit_json("config.json", _attn_implementation={"": "evil/kernel"}), "attn_implementation"),
    "a-later-key": (edit_json("tokenizer_config.json", a_later_key=[{"b": EVIL}]), "Evil"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return language_folder(tmp_path_factory.mktemp("sound") / "model")


@pytest.fixture
def folder(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "model"))


def check_rejected(folder, word):
    """`publish` raises with the word, and `verify` fails with it, too."""
    with pytest.raises((ValueError, OSError), match=word):
        publish(folder, "tost/rejected", dry_run=True)
    failed = [check.detail for check in verify(folder) if not check.passed]
    assert any(word in detail for detail in failed), failed


@pytest.mark.parametrize(("damage", "word"), DAMAGE.values(), ids=DAMAGE)
def test_rejected_folders(folder, damage, word):
    damage(folder)
    check_rejected(folder, word)


def test_missing_shard(tmp_path):
    folder = language_folder(tmp_path / "model", max_shard_size="40KB")
    next(folder.glob("model-00002*")).unlink()
    check_rejected(folder, "model-00002")


def test_words_that_lead_to_no_code(folder):
    """Vocabularies hold any word, Trainer's records any command; one group of beams is none."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"auto_map": 300, "a--b.c": 302}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "run_arguments.json").write_text(json.dumps({"command": "a--b.c", "auto_map": "x"}))
    edit_json("generation_config.json", num_beam_groups=1, penalty_alpha=0.0, num_beams=20000, max_new_tokens=10**9)(folder)
    publish(folder, "tost/sound", dry_run=True)
    assert all(check.passed for check in verify(folder)), verify(folder)  # which generates by its own settings


def test_what_is_sent_and_what_is_left_out(folder):
    """Pictures of the card, records and the package's own source files are; by-products of training are not."""
    sent = {"LICENSE", "curve.png", "trainer_state.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"}
    left_out = {"other.png", "training_args.bin", "notes.txt", ".env", "checkpoint-10/config.json", "runs/events", "evil.py"}
    for name in sent | left_out:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "modeling_tost.py").write_text("raise SystemExit")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n![loss](curve.png)\n")
    before = {path.name for path in folder.iterdir()}
    done = publish(folder, "tost/sound", dry_run=True)
    own = {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert set(done.uploaded) == sent | own | set(CODE_FILES["tost"])
    assert set(done.left_out) == {name.split("/")[0] + "/" * ("/" in name) for name in left_out}
    without = publish(folder, "tost/sound", dry_run=True, with_code=False)
    assert set(without.uploaded) == sent | own and "modeling_tost.py" in without.left_out
    assert {path.name for path in folder.iterdir()} == before


def test_code_that_differs_fails_verify(tmp_path):
    folder = language_folder(tmp_path / "model", with_code=True)
    assert all(check.passed for check in verify(folder)), verify(folder)
    (folder / "tssa_reference.py").write_text("# as it was")
    assert [check.name for check in verify(folder) if not check.passed] == ["code"]
    assert publish(folder, "tost/sound", dry_run=True).num_parameters > 0  # which sends the package's files
