"""train_small.py and train_small_images.py with tiny models and data."""

import io
import json
import re
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from hub_clients import contents
from safetensors.torch import load, load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer


sys.path.append(str(Path(__file__).parents[1] / "examples"))

import classification
import run_clm
import run_image_classification
import train_small
import train_small_images
import training_runs
from scripting import parse_args

from tost_hf.hub import prepare_upload


IMAGE_ARGUMENTS = (
    run_image_classification.ModelArguments,
    run_image_classification.DataTrainingArguments,
    run_image_classification.ToSTVisionTrainingArguments,
)


@pytest.mark.parametrize(("size", "text_parameters", "image_parameters"), [("cpu", 2.82e6, 2.81e6), ("gpu", 24.7e6, 22.2e6)])
def test_models_of_a_size_have_as_many_parameters(size, text_parameters, image_parameters):
    text_size = train_small.SIZES[size]
    for name in train_small.MODELS:
        config = run_clm.load_config(run_clm.ModelArguments(**train_small.model_options(name, text_size)))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert model.num_parameters() == pytest.approx(text_parameters, rel=0.03)
    for trunk in train_small_images.TRUNKS:
        unset = dict.fromkeys(("steps", "teacher", "model_name_or_path", "learning_rate", "patch_size"))
        args = Namespace(images="images", output_dir="out", size=size, trunk=trunk, seed=0, **unset)
        model_args, *_ = parse_args(train_small_images.make_arguments(args), *IMAGE_ARGUMENTS)
        config = run_image_classification.load_config(model_args)
        with torch.device("meta"):
            classifier = AutoModelForImageClassification.from_config(config)
        assert getattr(config, "attention_type", config.model_type) == trunk
        assert classifier.num_parameters() == pytest.approx(image_parameters, rel=0.04)


def check_published_files(output: Path) -> dict[str, bytes]:
    """The weights are those of the last checkpoint in bfloat16; what is published names no folder of this machine."""
    stored, float32 = (load_file(folder / "model.safetensors") for folder in (output, next(output.glob("checkpoint-*"))))
    assert {weight.dtype for weight in float32.values() if weight.is_floating_point()} == {torch.float32}
    assert torch.bfloat16 in {weight.dtype for weight in stored.values()}
    for name, weight in stored.items():
        torch.testing.assert_close(weight, float32[name].to(weight.dtype), rtol=0, atol=0)
    prepare_upload(output, output.with_name("upload"), "me/model", license="mit")
    files = contents(output.with_name("upload"))
    published = load(files["model.safetensors"])  # in the dtype of config.json, with the values of the stored weights
    assert published.keys() == stored.keys()
    for name, weight in published.items():
        assert weight.dtype == float32[name].dtype and weight.equal(stored[name].to(weight.dtype)), name
    assert {"run_arguments.json", "evaluation.json", "trainer_state.json", training_runs.CURVES} <= files.keys()
    assert not [name for name, data in files.items() if str(output.parent).encode() in data]
    return files


def check_training_further(script, command: list[str], new_model: list[str], capsys) -> None:
    """A run from the weights of the run `command`, at a tiny rate, keeps them; it rejects the options of a new model."""
    output = command[command.index("--output_dir") + 1]
    arguments = [*command[:2], "--size", "cpu", "--model_name_or_path", output, "--output_dir", f"{output}-further"]
    script.main([*arguments, "--learning_rate", "1e-9"])
    weights, others = (load_file(f"{folder}/model.safetensors") for folder in (output, f"{output}-further"))
    for name in weights:
        if "running" not in name and "num_batches" not in name:  # BatchNorm's statistics
            torch.testing.assert_close(others[name], weights[name], atol=1e-5, rtol=0)
    with pytest.raises(SystemExit):
        script.main([*arguments, *new_model])
    assert re.search(f"{new_model[0]} .*(is|are) for a new model", capsys.readouterr().err)


LOSS = "Loss, nats per token (sweep, context 128, stride 64)"


def read_results(folder: Path) -> dict[str, float]:
    results = json.loads((folder / "evaluation.json").read_text())["results"]
    return {result["metric_name"]: result["metric_value"] for result in results}


class PeriodicModel(torch.nn.Module):
    """Predicts each token to be the one 128 tokens earlier."""

    device = torch.device("cpu")

    def forward(self, input_ids, attention_mask, use_cache):
        predictions = input_ids.roll(128 - 1, dims=1)
        return SimpleNamespace(logits=20 * torch.nn.functional.one_hot(predictions, 50).float())


def test_copying_is_measured_by_distance():
    tokens = torch.randint(50, (4000,), generator=torch.Generator().manual_seed(0))
    results = train_small.measure_copying(PeriodicModel(), tokens, context=300)
    values = {result.name.removeprefix("Copying: predicted tokens of a passage read "): result.value for result in results}
    assert list(values) == ["the first time", "32 tokens before", "128 tokens before", "200 tokens before"]
    assert values.pop("128 tokens before") == 1 and max(values.values()) < 0.05


def test_trained_tokenizers_pad_batches(tmp_path):
    train_small.train_tokenizer(["a dark night"] * 3, str(tmp_path), 260)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["a dark night", "a"]
    mask = tokenizer(texts, padding=True)["attention_mask"]
    assert [sum(row) for row in mask] == [len(tokenizer(text)["input_ids"]) for text in texts]
    assert tokenizer.pad_token == tokenizer.eos_token


@pytest.mark.slow
@pytest.mark.parametrize("model", train_small.MODELS)
def test_training_a_language_model(tmp_path, monkeypatch, capsys, model):
    books = tmp_path / "books"
    books.mkdir()
    for split in ("train", "validation", "test"):
        documents = [f"{split} {i}: the night was dark and the man was old. " * 40 for i in range(4)]
        Dataset.from_dict({"text": documents}).to_parquet(books / f"{split}.parquet")
    monkeypatch.setitem(train_small.SIZES, "cpu", train_small.Size(64, 4, 2, 300, 128, 2, 3, 1e-3))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    output = tmp_path / "model"
    command = ["--text", str(books), "--output_dir", str(output), "--model", model, "--size", "cpu"]
    for _ in range(2):  # the second run trains no steps and replaces the section
        train_small.main(command)
    assert json.loads((output / "eval_results.json").read_text())["eval_loss"] > 0
    results = read_results(output)
    baseline, loss = (results[name] for name in ("Baseline: loss of bigrams, nats per token", LOSS))
    assert 0 < baseline < loss  # two steps are too few to beat bigrams
    copying = [name for name in results if "tokens before" in name]
    assert copying == ["Copying: predicted tokens of a passage read 32 tokens before"]  # others are over the block size
    trained = AutoModelForCausalLM.from_pretrained(output)
    config = trained.config
    assert trained.generation_config.do_sample
    assert config.model_type == {"gpt2": "gpt2", "mamba2": "mamba2"}.get(model, "tost")
    if config.model_type == "tost":
        assert ("sliding_attention" in config.layer_types) == (model == "hybrid")
        assert config.decay_type == ("none" if model == "published" else "token")
        card = (output / "README.md").read_text()
        assert card.count(train_small.TITLE) == 1 and card.count("seeds 0 to 9: none left out, unedited") == 1
        assert card.count(train_small.PROMPT) == 10
        section = card[card.index(train_small.TITLE) :].strip()
        printed = io.StringIO(capsys.readouterr().out, newline=None).read()  # with the newlines that reading a file gives
        assert section in printed
        check_published_files(output)

    check_training_further(train_small, command, ["--model", "mamba2" if model == "gpt2" else "gpt2"], capsys)
    assert (tmp_path / "model-further/tokenizer.json").read_bytes() == (output / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_training_an_image_classifier(digit_folder, tmp_path, monkeypatch, capsys):
    sizes = {"width": 32, "heads": 4, "layers": 1, "image_size": 16, "batch": 8, "steps": 4}
    size = replace(train_small_images.SIZES["cpu"], **sizes)
    monkeypatch.setitem(train_small_images.SIZES, "cpu", size)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    output = tmp_path / "model"
    command = ["--images", str(digit_folder), "--output_dir", str(output), "--size", "cpu", "--image_size", "24"]
    for _ in range(2):  # the second run trains no steps
        train_small_images.main(command)
    published = check_published_files(output)
    card = (output / "README.md").read_text()
    assert card.count(classification.TITLE) == 1
    section = card[card.index(classification.TITLE) :].strip()
    assert section in capsys.readouterr().out and section.count("| 10 |") == 3
    results = read_results(output)
    assert results["Baseline: accuracy of the most frequent class"] == pytest.approx(1 / 3)
    accuracies = [float(line.split("|")[3].strip(" %")) for line in section.splitlines() if "| 10 |" in line]
    assert results["Accuracy (top-1)"] == pytest.approx(sum(accuracies) / 300)
    for name in (training_runs.CURVES, classification.CONFUSION):
        assert published[name].startswith(b"\x89PNG") and f"({name})" in card
    assert (tmp_path / "model-memberships/layers.md").is_file()
    assert AutoConfig.from_pretrained(output).image_size == 24  # an argument of run_image_classification.py
    with pytest.raises(ValueError, match="--no_such_argument"):
        train_small_images.main([*command, "--no_such_argument", "1"])

    check_training_further(train_small_images, command, ["--trunk", "xca"], capsys)


@pytest.mark.slow
def test_training_a_vit(digit_folder, tmp_path, monkeypatch):
    size = replace(train_small_images.SIZES["cpu"], width=64, heads=4, layers=1, image_size=16, batch=8, steps=4)
    monkeypatch.setitem(train_small_images.SIZES, "cpu", size)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    command = ["--images", str(digit_folder), "--output_dir", str(tmp_path / "vit"), "--size", "cpu", "--trunk", "vit"]
    train_small_images.main(command)
    assert AutoConfig.from_pretrained(tmp_path / "vit").model_type == "vit"
    assert 0 <= read_results(tmp_path / "vit")["Accuracy (top-1)"] <= 1
