"""What is published of odd folders: what `from_pretrained` loads from them, or nothing, with an error that says why."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hub_clients import contents, language_folder, language_model, save_with_card, vision_folder
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer, PreTrainedTokenizerFast

import tost_hf
from tost_hf.hub import prepare_upload, verify
from tost_hf.hub.results import find_local_paths, shorten_paths
from tost_hf.model.base_tost import code_files


EVIL = "evil/repo--module.Evil"
WEIGHTS, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-00001-of-00004.safetensors"
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
TOKEN = "hf_" + "aB3" * 12
PICTURE = "---\nlicense: mit\n---\n![loss](curve.png)\n"


def edit_file(path: Path, content) -> None:
    """Deletes a file (None), writes a text, changes fields of a JSON file (a dict), or calls a function with the path."""
    if content is None:
        path.unlink()
    elif isinstance(content, str):
        path.write_text(content, newline="")
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


def convert_weights(dtype):
    return edit_weights(lambda weights: weights.update({name: x.to(dtype) for name, x in weights.items()}))


def set_last_position_to_nan(weights):
    weights["model.embed_positions.weight"][-1] = float("nan")  # the test run does not reach it


def rename_weights(path):
    path.rename(path.with_name("w.safetensors"))
    edit_file(path.with_name(CONFIG), {"transformers_weights": "w.safetensors"})


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


def pickle_weights(path):
    torch.save(load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()


def replace_by_folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


def enlarge_tokenizer(path):
    tokenizer = AutoTokenizer.from_pretrained(path.parent)
    tokenizer.add_tokens([f"<{i}>" for i in range(321 - len(tokenizer))])
    tokenizer.save_pretrained(path.parent)


def link_out_of_folder(path):
    target = path.parent.with_name("target")
    target.write_text("{}")
    if path.exists():
        path.replace(target)
    path.symlink_to(target)
    if path.name != "README.md":
        path.with_name("README.md").write_text(PICTURE)


def link_picture(name):
    """A card that shows a file in place of curve.png, which exists; config.json has a key that ToST does not know."""

    def link(path):
        path.write_text(PICTURE.replace("curve.png", name))
        path.with_name("curve.png").write_bytes(b"")
        edit_file(path.with_name(CONFIG), {"evil": 1})

    return link


def write_foreign_module(path):
    path.with_name("evil.py").write_text("raise SystemExit('foreign code ran')")
    edit_file(path, {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}})


def vocabulary_in_another_file(path):
    path.unlink()
    path.with_name(TOKENIZER).write_text('{"tokenizer_class": "ProphetNetTokenizer"}')
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "few", "words"]
    path.with_name("prophetnet.tokenizer").write_text("\n".join(words))


FOLDERS = {  # a file, the argument of `edit_file`, and a word of the error; None if the model is published
    "token": ("README.md", f"---\nlicense: mit\n---\n{TOKEN}", "token"),
    "token-in-a-chat-template": ("chat_template.jinja", "{{ '" + TOKEN + "' }}", "token"),
    "no-card": ("README.md", None, "card"),
    "card-metadata": ("README.md", "---\nlicense: [apache\n---\n", "README.md"),
    "no-license": ("README.md", "no metadata", "license"),
    "unfilled-card": ("README.md", "---\nlicense: mit\n---\n[More Information Needed]", "unfilled"),
    "picture-above-the-folder": ("README.md", link_picture("../model/curve.png"), "out of the folder"),
    "picture-absolute": ("README.md", link_picture(__file__.replace(".py", ".png")), None),
    "picture-of-the-configuration": ("README.md", link_picture("config.json"), None),
    "picture-missing": ("README.md", PICTURE, None),
    "no-config": (CONFIG, None, CONFIG),
    "config-garbage": (CONFIG, "{", "JSON"),
    "config-list": (CONFIG, "[]", "JSON object"),
    "config-empty": (CONFIG, "{}", "type None"),
    "another-model": (CONFIG, {"model_type": "gpt2"}, "gpt2"),
    "another-class": (CONFIG, {"architectures": ["GPT2Model"]}, "GPT2Model"),
    "class-with-another-head": (CONFIG, {"architectures": ["ToSTForSequenceClassification"]}, "lacks score.weight"),
    "no-class": (CONFIG, {"architectures": []}, None),
    "wrong-size": (CONFIG, {"hidden_size": "abc"}, "hidden_size"),
    "other-shape": (CONFIG, {"vocab_size": 321}, "shape"),
    "quantized": (
        CONFIG,
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        "is a quantized model or an adapter",
    ),
    "other-dtype": (CONFIG, {"dtype": "bfloat16"}, None),
    "dtype-of-version-4": (CONFIG, {"dtype": None, "torch_dtype": "float32"}, None),
    "no-weights": (WEIGHTS, None, WEIGHTS),
    "pickle": (WEIGHTS, pickle_weights, WEIGHTS),
    "truncated-weights": (WEIGHTS, "\x08", "loaded"),
    "weights-folder": (WEIGHTS, replace_by_folder, WEIGHTS),
    "nan": (WEIGHTS, edit_weights(set_last_position_to_nan), "NaN"),
    "overflow": (WEIGHTS, edit_weight(lambda x: x * 1e37), "output"),
    "tensor-missing": (WEIGHTS, edit_weights(lambda weights: weights.popitem()), "lacks"),
    "extra-tensor": (WEIGHTS, edit_weights(lambda weights: weights.update(more=torch.ones(2))), "more"),
    "untied-head": (WEIGHTS, edit_weights(lambda x: x.update({"lm_head.weight": torch.ones(320, 32)})), None),
    "integers": (WEIGHTS, edit_weight(lambda x: x.to(torch.int8)), None),
    "booleans": (WEIGHTS, edit_weight(lambda x: x.to(torch.bool)), None),
    "complex-numbers": (WEIGHTS, edit_weight(lambda x: x.to(torch.complex64)), None),
    "8-bit-floats": (WEIGHTS, edit_weight(lambda x: x.to(torch.float8_e4m3fn)), None),
    "float64": (WEIGHTS, convert_weights(torch.float64), None),
    "old-shard": (WEIGHTS, lambda path: shutil.copy(path, path.with_stem("model-00001-of-00001")), None),
    "index-and-model": (INDEX, "{}", None),
    "shard-missing": (SHARD, None, "model-00001"),
    "shard-of-another-name": (SHARD, rename_to("part.safetensors"), None),
    "shard-out-of-the-folder": (SHARD, rename_to(f"../{SHARD}"), None),
    "shard-pickle": (SHARD, rename_to("shard.bin"), "shard.bin"),
    "tensor-twice": (SHARD, store_twice, None),
    "shard-old": (SHARD, lambda path: shutil.copy(path, path.with_stem("model-00009-of-00009")), None),
    "index-garbage": (INDEX, {"weight_map": 1}, "cannot be loaded"),
    "tokenizer-garbage": ("tokenizer.json", "garbage", "tokenizer"),
    "tokenizer-missing": ("tokenizer.json", None, "tokenizer"),
    "tokenizer-too-large": ("tokenizer.json", enlarge_tokenizer, "320"),
    "tokenizer-of-no-class": (TOKENIZER, {"tokenizer_class": "EvilTokenizer"}, None),
    "vocabulary-in-another-file": ("tokenizer.json", vocabulary_in_another_file, None),
    "generation-garbage": (GENERATION, "{", "generation_config"),
    "very-long-generation": (GENERATION, {"num_beams": 20000, "max_new_tokens": 10**9}, None),
    "auto-map-of-another-repository": (CONFIG, {"auto_map": {"AutoModelForCausalLM": EVIL}}, None),
    "auto-map-of-the-folder": (CONFIG, write_foreign_module, None),
    "auto-map-of-a-tokenizer": (TOKENIZER, {"auto_map": {"AutoTokenizer": [EVIL, None]}}, None),
    "pipeline": (CONFIG, {"custom_pipelines": {"text-generation": {"impl": "evil.B"}}}, None),
    "generate": (GENERATION, {"custom_generate": "evil/repo"}, None),
    "generation-mode": (GENERATION, {"penalty_alpha": 0.6}, None),
    "weights-of-another-name": (WEIGHTS, rename_weights, WEIGHTS),
    "configuration-of-another-name": (CONFIG, {"configuration_files": ["evil.4.0.0.json"]}, None),
    "tokenizer-of-another-name": (TOKENIZER, {"fast_tokenizer_files": ["evil.json"]}, None),
    "a-later-key": (CONFIG, {"a_later_key": [{"b": EVIL}]}, None),
    "adapter": ("adapter_config.json", '{"base_model_name_or_path": "a/b"}', "is a quantized model or an adapter"),
    "license-folder": ("LICENSE", replace_by_folder, None),
    "results-garbage": ("evaluation.json", "{", "evaluation.json"),
    **{f"link-{x}": (x, link_out_of_folder, f"{x} is") for x in ("LICENSE", "curve.png", "README.md", "eval_results.json")},
    **{f"link-{x}": (x, link_out_of_folder, None) for x in ("chat_template.jinja", WEIGHTS)},
}


@pytest.fixture(scope="module")
def valid_folder(tmp_path_factory):
    return language_folder(tmp_path_factory.mktemp("valid") / "model")


@pytest.fixture(scope="module")
def sharded_folder(tmp_path_factory):
    return language_folder(tmp_path_factory.mktemp("valid") / "model", max_shard_size="40KB")


@pytest.fixture
def folder(valid_folder, tmp_path):
    return Path(shutil.copytree(valid_folder, tmp_path / "model"))


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return tost_hf.ToSTForCausalLM.from_pretrained(folder).state_dict()


def check_equal(folder: Path, published: Path) -> None:
    """Plain `from_pretrained` loads the same tensors from both, with the same dtypes."""
    expected, actual = load_tensors(folder), load_tensors(published)
    assert actual.keys() == expected.keys()
    assert all(x.dtype == actual[name].dtype and x.equal(actual[name]) for name, x in expected.items())


@pytest.mark.parametrize(("name", "content", "word"), FOLDERS.values(), ids=FOLDERS)
def test_odd_folders(valid_folder, sharded_folder, tmp_path, name, content, word):
    is_sharded = name in (SHARD, INDEX) and content != "{}"
    folder = Path(shutil.copytree(sharded_folder if is_sharded else valid_folder, tmp_path / "model"))
    edit_file(folder / name, content)
    before, output = contents(folder), tmp_path / "upload"
    if word is not None:
        with pytest.raises((ValueError, OSError), match=word):
            prepare_upload(folder, output, "me/model")
        assert not output.exists()
        if name not in ("LICENSE", "curve.png", "README.md", "eval_results.json", "evaluation.json"):
            assert not all(check.passed for check in verify(folder))
    else:
        prepare_upload(folder, output, "me/model")
        check_equal(folder, output)
        assert all(check.passed for check in verify(output)), verify(output)
        assert not any(b"evil" in data.lower() for file, data in contents(output).items() if file != "tokenizer.json")
        assert not any(path.is_symlink() or path.suffix == ".bin" for path in output.iterdir())
        assert is_sharded == (output / INDEX).is_file() and (output / WEIGHTS).is_file() != is_sharded
    assert contents(folder) == before


def test_unknown_keys_are_dropped_with_a_warning(folder, tmp_path, caplog):
    """A kernel of the Hub, which transformers would load, by all commands; `verify` fails and loads it neither."""
    edit_file(folder / CONFIG, {"_attn_implementation": {"": "evil/kernel"}, "a_later_key": 3})
    prepare_upload(folder, tmp_path / "upload", "me/model")
    assert "does not know a_later_key, attn_implementation: dropped" in caplog.text
    assert "evil" not in (tmp_path / "upload/config.json").read_text()
    edit_file(folder / CONFIG, {"_attn_implementation": "evil/kernel"})
    assert [check.name for check in verify(folder) if not check.passed] == ["model"]


def test_files_that_are_published(valid_folder, folder, tmp_path):
    """The card's pictures, results and the package's source files, but no by-products of training."""
    extra_files = {"LICENSE", "curve.png", "trainer_state.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"}
    left_out = {"other.png", "training_args.bin", "notes.txt", ".env", "checkpoint-10/config.json", "runs/events", "evil.py"}
    for name in extra_files | left_out:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "modeling_tost.py").write_text("raise SystemExit")
    (folder / "README.md").write_text(PICTURE)
    model_files = set(contents(valid_folder))
    prepare_upload(folder, tmp_path / "upload", "me/model")
    assert set(contents(tmp_path / "upload")) == extra_files | model_files | set(code_files("tost"))
    with pytest.raises(OSError, match="not empty"):
        prepare_upload(folder, tmp_path / "upload", "me/model")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_and_size_of_shards(tmp_path, dtype):
    for write, auto_class in ((language_folder, AutoModelForCausalLM), (vision_folder, AutoModelForImageClassification)):
        source, output = write(tmp_path / auto_class.__name__), tmp_path / f"{auto_class.__name__}-upload"
        model = auto_class.from_pretrained(source, dtype=dtype)
        model.save_pretrained(source, with_code=True)
        prepare_upload(source, output, "me/model")
        assert contents(output) == contents(source)

        (source / WEIGHTS).unlink()
        model.save_pretrained(source, max_shard_size="20KB")
        prepare_upload(source, tmp_path / f"{auto_class.__name__}-shards", "me/model")
        sizes, old_sizes = (
            [path.stat().st_size for path in folder.glob("model-*.safetensors")]
            for folder in (tmp_path / f"{auto_class.__name__}-shards", source)
        )
        assert len(old_sizes) <= len(sizes) <= len(old_sizes) + 1 and max(sizes) < 1.05 * max(old_sizes)


HYBRID = {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "none", "rope_parameters": {}}


@pytest.mark.parametrize("fields", [HYBRID, {"decay_type": "token", "conv_kernel": 4}, {"tie_word_embeddings": False}])
def test_options_are_published(tmp_path, fields):
    source, output = tmp_path / "model", tmp_path / "upload"
    save_with_card(language_model(**fields), source, with_code=True)
    prepare_upload(source, output, "me/model")
    assert contents(output) == contents(source) and all(check.passed for check in verify(output)), verify(output)


def test_nothing_local_is_published(folder, tmp_path, monkeypatch):
    """Commands in results and on the card name files by their last part; a card written by hand is rejected."""
    monkeypatch.setenv("HOME", "/home/me")
    command = (
        f"python examples/run_clm.py --train_file '/home/me/my texts/a.txt' --output_dir {folder} --config_name tost-base"
    )
    result = {
        "task_type": "text-generation",
        "dataset_type": "a",
        "dataset_name": "A",
        "metric_type": "loss",
        "metric_value": 1.0,
    }
    results = {
        "run_arguments.json": {"command": f"{command}\n{command}", "model_name_or_path": "/home/me/my models/first"},
        "evaluation.json": {"results": [result | {"command": command, "protocol": "the model's own; see https://a.b/c"}]},
        "trainer_state.json": {
            "best_model_checkpoint": "/home/me/out/checkpoint-5",
            "log_history": [{"loss": 1.5, "step": 5}],
        },
    }
    for name, content in results.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "README.md").unlink()
    prepare_upload(folder, tmp_path / "upload", "me/model", license="mit")
    published = {
        name: data.decode() for name, data in contents(tmp_path / "upload").items() if name.endswith((".md", ".json"))
    }
    for word in ("/home/me", "my texts", "my models", str(tmp_path), folder.parent.name):
        assert not [name for name, text in published.items() if word in text], word
    expected = "python examples/run_clm.py --train_file 'a.txt' --output_dir model --config_name tost-base"
    run_arguments = json.loads(published["run_arguments.json"])
    assert run_arguments == {"command": f"{expected}\n{expected}", "model_name_or_path": "first"}
    assert json.loads(published["trainer_state.json"])["best_model_checkpoint"] == "checkpoint-5"
    card = published["README.md"].replace(" \\\n   ", "")
    assert expected in card and "the model's own; see https://a.b/c" in card
    for name, path in (("README.md", "/home/me/a.txt"), ("README.md", folder), ("LICENSE", folder)):
        (folder / "README.md").write_text("---\nlicense: mit\n---\n")
        (folder / name).write_text(f"---\nlicense: mit\n---\nFrom {path}.\n")
        with pytest.raises(ValueError, match=f"{name} names files of this machine, {path}:"):
            prepare_upload(folder, tmp_path / "again", "me/model")


TEXTS = {  # with paths, and what is published
    "--train_file /home/me/a.txt --output_dir ../out/b": "--train_file a.txt --output_dir b",
    "--a=/home/me/b.txt '--c=/home/me/my texts/d.txt' \"/home/me/e f\"": "--a=b.txt '--c=d.txt' \"e f\"",
    "--files /d/a.txt,/d/b.txt text=/data/books/": "--files a.txt,b.txt text=books",
    "it's --f '/home/me/a b/c' and host:/home/me/x": "it's --f 'c' and host:x",
    "file:///home/me/b.txt C:\\Users\\me\\x.txt \\\\srv\\me\\y ~/z": "b.txt x.txt y z",
    "/home/me/my models/first": "first",
    "--train_file=/home/me/it's mine/d.txt": "--train_file=d.txt",
    **{
        text: text
        for text in (
            "python examples/run_clm.py --model me/my-tost https://a.b/c/d?e=/f",
            "--eos_token '</s>' '[/INST]' 90 /100, and/or 3/4, 2026/11/27, $a$/$b$, km / h, r'\\d+', x.\\alpha, \\frac{a}{b}",
        )
    },
}


def test_paths_in_texts(monkeypatch):
    assert {text: shorten_paths(text) for text in TEXTS} == TEXTS
    monkeypatch.setenv("HOME", "/home/me")
    texts = "From /home/me/x. /usr/bin/env </div> data:image/png;base64,/a/" + "b" * 5000, f"({__file__}) file:///home/me/y"
    assert [find_local_paths(text) for text in texts] == [["/home/me/x"], [__file__, "/home/me/y"]]
    monkeypatch.setenv("HOME", "/")
    assert find_local_paths("/or /100 /home/me/x </div>") == []


@pytest.mark.parametrize(
    "saved_class, name, content, message",
    [
        (tost_hf.ToSTForCausalLM, WEIGHTS, edit_weight(lambda x: 2 * x), "The model is another one"),
        (tost_hf.ToSTForCausalLM, CONFIG, {"layer_norm_eps": 1e-3}, "The model is another one"),
        (tost_hf.ToSTForCausalLM, GENERATION, {"max_new_tokens": 3}, "The model is another one"),
        (PreTrainedTokenizerFast, "chat_template.jinja", "{{ 1 }}", "The tokenizer or image processor is another one"),
    ],
)
def test_what_is_saved_is_compared(folder, tmp_path, monkeypatch, saved_class, name, content, message):
    """A `save_pretrained` that changes what it saves is noticed."""
    save = saved_class.save_pretrained

    def save_and_edit(self, target, **options):
        save(self, target, **options)
        edit_file(Path(target, name), content)

    monkeypatch.setattr(saved_class, "save_pretrained", save_and_edit)
    with pytest.raises(ValueError, match=message):
        prepare_upload(folder, tmp_path / "upload", "me/model")


def test_links_of_the_hub_cache(folder, tmp_path):
    """A downloaded snapshot, whose files are links to blobs, can be published; so can links within the folder."""
    snapshot, blobs = folder.with_name("snapshots") / "0123", folder.with_name("blobs")
    snapshot.parent.mkdir()
    blobs.mkdir()
    folder.rename(snapshot)
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    (snapshot / "LICENSE").symlink_to("README.md")
    prepare_upload(snapshot, tmp_path / "upload", "me/model")
    files = contents(tmp_path / "upload")
    assert all(files[name] == data for name, data in contents(snapshot).items() if name != CONFIG)
    assert all(check.passed for check in verify(snapshot)), verify(snapshot)


def test_verify_fails_for_modified_code(tmp_path):
    """Without running it; `publish` uploads the package's files instead."""
    folder = language_folder(tmp_path / "model", with_code=True)
    assert all(check.passed for check in verify(folder)), verify(folder)
    code = (folder / "modeling_tost.py").read_text()
    (folder / "modeling_tost.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n{code}")
    assert [check.name for check in verify(folder) if not check.passed] == ["code"]
    prepare_upload(folder, tmp_path / "upload", "me/model")
    assert (tmp_path / "upload/modeling_tost.py").read_text() == code and not (tmp_path / "marker").exists()
