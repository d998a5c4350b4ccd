"""The scripts that train a small model for people to use, at toy size."""

import json
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM


sys.path.append(str(Path(__file__).parents[1] / "examples"))

import train_small


def test_the_gpu_size_has_25_million_parameters():
    import torch
    from scripting import override_config

    from tost_hf import ToSTConfig, ToSTForCausalLM

    size = train_small.SIZES["gpu"]
    overrides = f"{size.model},vocab_size={size.vocab_size},{train_small.KIND}"
    with torch.device("meta"):
        model = ToSTForCausalLM(override_config(ToSTConfig.from_preset("tost-base"), overrides))
    assert model.num_parameters() == pytest.approx(25e6, rel=0.02)
    assert (model.config.forgetting, model.config.conv_kernel, model.config.max_position_embeddings) == ("token", 4, None)


@pytest.mark.slow
def test_a_model_is_trained_and_its_card_shows_what_it_writes(tmp_path, monkeypatch, capsys):
    books = tmp_path / "books"
    books.mkdir()
    for split in ("train", "validation"):
        texts = [f"{split} {i}: the night was dark and the man was old. " * 40 for i in range(4)]
        Dataset.from_dict({"text": texts}).to_parquet(books / f"{split}.parquet")
    monkeypatch.setitem(train_small.SIZES, "cpu", train_small.Size("n_layer=1,n_head=2,hidden_size=16", 300, 32, 2, 2, 1e-3))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    output = tmp_path / "model"
    for _ in range(2):  # the second run has nothing to train, and writes the section anew
        train_small.main(["--text", str(books), "--output_dir", str(output), "--size", "cpu"])
    card = (output / "README.md").read_text()
    assert card.count(train_small.TITLE) == 1 and card.count("seed 0: the first try, unedited") == 1
    assert all(prompt in card for prompt in train_small.PROMPTS)
    section = card[card.index(train_small.TITLE) :].strip()
    assert section in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(output).config.forgetting == "token"
    assert json.loads((output / "eval_results.json").read_text())["eval_loss"] > 0
