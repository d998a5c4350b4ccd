"""train_small.py and train_small_images.py with tiny models and data."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification


sys.path.append(str(Path(__file__).parents[1] / "examples"))

import train_small
import train_small_images
from scripting import override_config

from tost_hf import ToSTConfig, ToSTForCausalLM, ToSTForImageClassification, ToSTVisionConfig


@pytest.mark.parametrize(("size", "text_parameters", "image_parameters"), [("cpu", 2.87e6, 1.49e6), ("gpu", 25e6, 22.2e6)])
def test_sizes(size, text_parameters, image_parameters):
    language_preset, image_preset = train_small.SIZES[size], train_small_images.SIZES[size]
    overrides = f"{language_preset.model},vocab_size={language_preset.vocab_size},{train_small.COMMON_OVERRIDES}"
    with torch.device("meta"):
        model = ToSTForCausalLM(override_config(ToSTConfig.from_preset("tost-base"), overrides))
        options = {"patch_size": image_preset.patch_size, "image_size": image_preset.image_size}
        classifier = ToSTForImageClassification(override_config(ToSTVisionConfig(), image_preset.model, **options))
    assert model.num_parameters() == pytest.approx(text_parameters, rel=0.02)
    assert classifier.num_parameters() == pytest.approx(image_parameters, rel=0.02)


def check_published_files(output: Path, hub: Path) -> None:
    """The weights are those of the last checkpoint in bfloat16; the copy has the files that publishing would upload."""
    stored, float32 = (load_file(folder / "model.safetensors") for folder in (output, next(output.glob("checkpoint-*"))))
    assert {weight.dtype for weight in float32.values() if weight.is_floating_point()} == {torch.float32}
    assert torch.bfloat16 in {weight.dtype for weight in stored.values()}
    for name, weight in stored.items():
        torch.testing.assert_close(weight, float32[name].to(weight.dtype), rtol=0, atol=0)
    names = {file.name for file in hub.rglob("*")}
    assert {"config.json", "model.safetensors", "README.md", "evaluation.json"} <= names
    assert not {"training_args.bin", "optimizer.pt"} & names
    assert (hub / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()


LOSS = "Loss, nats per token (sweep, context 32, stride 16)"


def read_results(folder: Path) -> dict[str, float]:
    results = json.loads((folder / "evaluation.json").read_text())["results"]
    return {result["metric_name"]: result["metric_value"] for result in results}


@pytest.mark.slow
def test_training_a_language_model(tmp_path, monkeypatch, capsys):
    books = tmp_path / "books"
    books.mkdir()
    for split in ("train", "validation", "test"):
        documents = [f"{split} {i}: the night was dark and the man was old. " * 40 for i in range(4)]
        Dataset.from_dict({"text": documents}).to_parquet(books / f"{split}.parquet")
    monkeypatch.setitem(train_small.SIZES, "cpu", train_small.Size("n_layer=1,n_head=2,hidden_size=16", 300, 32, 2, 2, 1e-3))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    output, hub = tmp_path / "model", tmp_path / "hub"
    for _ in range(2):  # the second run trains no steps and replaces the section
        train_small.main(["--text", str(books), "--output_dir", str(output), "--size", "cpu", "--hub_dir", str(hub)])
    card = (output / "README.md").read_text()
    assert card.count(train_small.TITLE) == 1 and card.count("seed 0: the first try, unedited") == 1
    assert all(prompt in card for prompt in train_small.PROMPTS)
    section = card[card.index(train_small.TITLE) :].strip()
    assert section in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(output).config.forgetting == "token"
    assert json.loads((output / "eval_results.json").read_text())["eval_loss"] > 0
    check_published_files(output, hub)
    results = read_results(output)
    baseline, loss = (results[name] for name in ("Baseline: loss of bigrams, nats per token", LOSS))
    assert 0 < baseline < loss  # two steps are too few to beat bigrams


def test_training_an_image_classifier(digit_folder, tmp_path, monkeypatch, capsys):
    tiny = "hidden_size=32,num_hidden_layers=1,num_class_attention_layers=1,num_attention_heads=4"
    size = replace(train_small_images.SIZES["cpu"], model=tiny, image_size=16, patch_size=4, batch=8, steps=4)
    monkeypatch.setitem(train_small_images.SIZES, "cpu", size)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    output, hub = tmp_path / "model", tmp_path / "hub"
    command = ["--images", str(digit_folder), "--output_dir", str(output), "--hub_dir", str(hub), "--size", "cpu"]
    for _ in range(2):  # the second run trains no steps
        train_small_images.main(command)
    check_published_files(output, hub)
    card = (output / "README.md").read_text()
    assert card.count(train_small_images.TITLE) == 1
    section = card[card.index(train_small_images.TITLE) :].strip()
    assert section in capsys.readouterr().out and section.count("| 10 |") == 3
    results = read_results(output)
    assert results["Baseline: accuracy of the most frequent class"] == pytest.approx(1 / 3)
    accuracies = [float(line.split("|")[3].strip(" %")) for line in section.splitlines() if "| 10 |" in line]
    assert results["Accuracy (top-1)"] == pytest.approx(sum(accuracies) / 300)
    for name in (train_small_images.CURVES, train_small_images.CONFUSION):
        assert (hub / name).read_bytes().startswith(b"\x89PNG") and name in section
    assert (tmp_path / "model-memberships/index.html").is_file()

    softmax = tmp_path / "softmax"
    train_small_images.main(
        ["--images", str(digit_folder), "--output_dir", str(softmax), "--trunk", "softmax", "--size", "cpu"]
    )
    assert AutoModelForImageClassification.from_pretrained(softmax).config.attention_type == "softmax"
