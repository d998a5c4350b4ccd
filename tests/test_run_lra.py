"""run_lra.py: every task and model end to end, the paper's recipes, resuming, bad input; attention of the baselines."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as PILImage
from scripts import EXAMPLES, command_line, losses
from transformers import AutoModelForSequenceClassification


sys.path.append(str(Path(__file__).parents[1] / "examples" / "benchmarks"))

import run as runner  # isort: skip  (adds the folder of lra.py to sys.path)

import lra
import lra_models
import lra_tasks
import run_lra
from records import read_records, select

from tost_hf import ToSTForSequenceClassification


TINY = "num_hidden_layers=1,hidden_size=16,num_attention_heads=2,intermediate_size=32"
README = Path(lra.__file__).with_name("README.md").read_text(encoding="utf-8")
DOCUMENTS = ["good and short", "bad", "a longer one, good as well", "é, bad"]


def make_examples(task: str) -> Dataset:
    labels = [0, 1, 0, 1]
    if task == "listops":
        return Dataset.from_dict(
            {"Source": ["( ( ( [MAX 2 ) 9 ) ] )", "7", "3", "( ( ( [MIN 2 ) 9 ) ] )"], "Target": [9, 7, 3, 2]}
        )
    if task == "text":
        return Dataset.from_dict({"text": DOCUMENTS, "label": labels})
    if task == "retrieval":
        return Dataset.from_dict({"label": labels, "text1": DOCUMENTS, "text2": DOCUMENTS[::-1]})
    pictures = [PILImage.fromarray(np.full((8, 8, 3), 40 * number, dtype=np.uint8)) for number in range(4)]
    features = Features({"img": Image(), "label": ClassLabel(names=["a", "b"]), "fine": Value("int64")})
    return Dataset.from_dict({"img": pictures, "label": labels, "fine": labels}, features)


@pytest.fixture
def lra_args(tmp_path):
    """Arguments of a small run on four examples; keywords replace and add, None leaves out, True is a bare flag."""

    def make(task: str = "text", **changes) -> list[str]:
        for split in ("train", "test"):
            make_examples(task).to_parquet(tmp_path / task / f"{split}.parquet")
        values = {
            "task": task,
            "dataset_name": tmp_path / task,
            "cache_dir": tmp_path / "cache",
            "config_overrides": TINY,
            "max_length": 16,
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "do_train": True,
            "output_dir": tmp_path / "out",
            "disable_tqdm": "true",
            "use_cpu": True,
        } | changes
        return command_line(values)

    return make


# Models ---------------------------------------------------------------------------------------------------------------


def make_model(attention: str, task: str = "text", **fields):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return lra_models.make_model(lra_models.make_config(task, attention=attention, **sizes | fields)).eval()


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_attention_of_the_baselines(attention):
    layer = make_model(attention).model.layers[0].self_attn.double()
    x, mask = torch.randn(2, 7, 16, dtype=torch.float64), torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    actual, _ = layer(x, attention_mask=mask)
    query, key, value = (states.view(2, 7, 2, 8).transpose(1, 2) for states in layer.qkv_proj(x).split(16, -1))
    if attention == "softmax":
        weights = (query @ key.mT / 8**0.5).exp()
    else:
        weights = (torch.nn.functional.elu(query) + 1) @ (torch.nn.functional.elu(key) + 1).mT
    weights = weights * mask[:, None, None]
    expected = (weights / weights.sum(-1, keepdim=True)) @ value
    torch.testing.assert_close(actual, layer.out_proj(expected.transpose(1, 2).reshape(2, 7, 16)))


@pytest.mark.parametrize(
    ("attention", "task"),
    [
        *((kind, "text") for kind in lra_models.ATTENTION),
        ("tost", "retrieval"),
        ("tost", "pathfinder"),
        ("linear", "pathfinder"),
    ],
)
def test_padding_does_not_change_logits_and_models_load(tmp_path, attention, task):
    model = make_model(attention, task)
    pairs = task == "retrieval"
    items = [{"input_ids": [5, 6, 7], "labels": 0}, {"input_ids": [8, 9, 10, 11, 12], "labels": 1}]
    items = [item | ({"other_input_ids": item["input_ids"][::-1][:4]} if pairs else {}) for item in items]
    with torch.no_grad():
        padded_logits = model(**lra_tasks.collate(items)).logits
        logits = torch.cat([model(**lra_tasks.collate([item])).logits for item in items])
        torch.testing.assert_close(padded_logits, logits)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        assert torch.equal(loaded(**lra_tasks.collate(items)).logits, padded_logits)
    assert (type(model) is ToSTForSequenceClassification) == (attention == "tost" and task == "text")
    assert isinstance(model.model.norm, torch.nn.Identity) == (task == "pathfinder")


def test_parameter_counts_of_the_page():
    """Those of retrieval are without a head."""
    rows = re.findall(r"^\| (\w+)[^|]*\|(?:[^|]*\|){3} ([\d,]+) \|$", README, re.MULTILINE)
    assert {task for task, _ in rows} == lra_models.PRESETS.keys()
    for task, count in rows:
        with torch.device("meta"):
            model = lra_models.make_model(lra_models.make_config(task))
        assert (model.model if task == "retrieval" else model).num_parameters() == int(count.replace(",", "")), task


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "attention"),
    [("text", "tost"), ("pathfinder", "tost"), ("retrieval", "softmax")],
)
def test_training_on_the_tasks(tmp_path, lra_args, task, attention):
    """One of them with the options beyond the paper."""
    options = ",is_causal=true,decay_type=token,conv_kernel=4" if task == "text" else ""
    run_lra.main(lra_args(task, attention=attention, config_overrides=TINY + options, max_steps=3))
    out = tmp_path / "out"
    assert len(losses(out)) == 3
    metrics = json.loads((out / "all_results.json").read_text())
    assert {"eval_accuracy", "test_accuracy", "train_loss"} <= set(metrics) and metrics["test_samples"] == 4
    (result,) = json.loads((out / "evaluation.json").read_text())["results"]
    assert result["metric_value"] == metrics["test_accuracy"] and result["dataset_name"] == task
    assert (out / "curves.png").stat().st_size > 1000 and (out / "README.md").is_file()
    assert "python examples/" in json.loads((out / "run_arguments.json").read_text())["command"]
    if attention == "tost" and task != "pathfinder":
        model = AutoModelForSequenceClassification.from_pretrained(out)
        assert type(model) is ToSTForSequenceClassification and model.config.max_position_embeddings == 16
        assert (model.config.decay_type, model.config.pooling) == ("token" if options else "none", "mean")


def test_run_resumes(tmp_path, lra_args):
    """From its last checkpoint, with the same losses, for a baseline model, which is defined in this folder only."""
    args = lra_args(attention="linear", max_steps=4, save_steps=2, eval_strategy="no")
    run_lra.main(args)
    expected, out = losses(tmp_path / "out"), tmp_path / "out"
    shutil.rmtree(out / "checkpoint-4")
    run_lra.main(args)
    assert len(expected) == 4 and losses(out) == expected
    assert json.loads((out / "train_results.json").read_text())["train_loss"] < sum(expected) / 4  # of the last two steps


@pytest.mark.parametrize("task", lra_models.PRESETS)
def test_recipes_of_the_full_runs(task):
    classes = run_lra.ModelArguments, run_lra.DataArguments, run_lra.LRATrainingArguments
    recipe, words = f"lra_{task}.yaml", ["--dataset_name", "data", "--do_train", "--output_dir", "out"]
    model, data, training = run_lra.parse_args([str(EXAMPLES / "recipes" / recipe), *words], *classes)
    assert training.task == task and data.max_length is None and model.attention == "tost"
    assert training.max_steps >= 25_000 and recipe in README


def test_small_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lra, "EXAMPLES", {"train": 20, "test": 10})
    folders = ["--data", str(tmp_path / "data"), "--results", str(tmp_path / "results")]
    arguments = ["--tasks", "listops", "--steps", "2", "--seeds", "0", *folders]
    runner.main(["lra", *arguments])
    stdout = capsys.readouterr().out
    assert stdout.count("seed 0") == 3
    runner.main(["lra", *arguments])
    assert "seed 0" not in capsys.readouterr().out  # recorded seeds are not run again
    assert len(select(read_records(tmp_path / "results/lra.csv"), metric="accuracy")) == 3


# Data -----------------------------------------------------------------------------------------------------------------


def test_token_ids():
    assert lra_tasks.encode_bytes("aé", 9) == [98, 196, 170] and lra_tasks.encode_bytes("aé", 2) == [98, 196]
    assert lra_tasks.encode_listops("( ( ( [MAX 2 ) 9 ) ] )", 9) == [2, 8, 15, 5]
    picture = PILImage.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4))
    assert lra_tasks.encode_pixels(picture, 16) == list(range(1, 17))
    assert lra_tasks.encode_pixels(picture, 4) == [4, 6, 12, 14]  # means of 2 x 2, rounded


def test_reading_the_tsv_files_of_aan(tmp_path):
    for name, count in (("train", 3), ("eval", 2), ("test", 1)):
        lines = [f'{i % 2}.0\tA{i}\tB{i}\tone "quoted {i}\tother' for i in range(count)]
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("\n".join(lines) + "\n")
    task = lra_tasks.TASKS["retrieval"]
    splits = lra_tasks.load_splits(str(tmp_path), task, cache_dir=str(tmp_path / "cache"))
    assert {split: len(examples) for split, examples in splits.items()} == {"train": 3, "validation": 2, "test": 1}
    example = lra_tasks.Examples(splits["train"], task, 100)[1]
    assert example["labels"] == 1 and bytes(x - 1 for x in example["input_ids"]) == b'one "quoted 1'


def test_source_of_validation_examples(tmp_path, caplog):
    for name in ("train", "test"):
        make_examples("image").to_parquet(tmp_path / "data" / f"{name}.parquet")
    options = {"cache_dir": str(tmp_path / "cache")}
    image = lra_tasks.load_splits(str(tmp_path / "data"), lra_tasks.TASKS["image"], **options)
    assert {split: len(examples) for split, examples in image.items()} == {"train": 3, "validation": 1, "test": 4}
    pathfinder = lra_tasks.load_splits(str(tmp_path / "data"), lra_tasks.TASKS["pathfinder"], **options)
    assert len(pathfinder["train"]) == len(pathfinder["validation"]) == 4 and "test examples are used instead" in caplog.text


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("image", {"max_length": 15}, "no square"),
        ("text", {"attention": "linear", "push_to_hub": True}, "--push_to_hub"),
        ("text", {"attention": "linear", "config_overrides": "is_causal=true"}, "is_causal=False"),
        ("text", {"max_length": 0}, "--max_length"),
        ("text", {"config_overrides": f"{TINY},max_position_embeddings=8"}, "8 positions"),
    ],
)
def test_bad_input_is_rejected(tmp_path, lra_args, task, changes, message):
    with pytest.raises(ValueError, match=message):
        run_lra.main(lra_args(task, **changes))
    assert not (tmp_path / "out" / "config.json").exists()
