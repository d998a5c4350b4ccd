"""Fixtures of folders to make cards from, and helpers that read a card."""

import json
import re

import pytest
from conftest import small_vision_config
from huggingface_hub import ModelCard
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tost_hf
from tost_hf.image_processing import make_image_processor


RESULT = {
    "task_type": "text-generation",
    "dataset_type": "me/letters",
    "dataset_name": "Letters",
    "dataset_split": "test",
    "metric_type": "perplexity",
    "metric_name": "perplexity (sweep, stride 64)",
    "metric_value": 12.34567891,
    "protocol": "every token once | stride 64",
    "command": "python examples/evaluate_lm.py --model me/tiny",
    "seed": 7,
    "date": "2026-11-21",
    "num_examples": 1234,
}


def write_json(path, content):
    path.write_text(json.dumps(content))


def headings(card):
    return re.findall(r"^## (.*)", card.text, re.MULTILINE)


def section(card, title):
    return card.text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def code_blocks(card):
    return re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)


def metadata(card):
    """The metadata parsed from the card's text, as after saving and loading."""
    return ModelCard(str(card)).data.to_dict()


TRAINING = {"train_runtime": 3725.4, "train_samples": 8765, "train_loss": 2.125, "epoch": 2.5}
EVAL_RESULTS = {
    "eval_ema_loss": 1.75,
    "eval_loss": 1.53125,
    "eval_accuracy": 0.4375,
    "perplexity": 4.625,
    "eval_samples": 2048,
    "eval_runtime": 77.7,
}
RECORDS = {
    "trainer_state.json": {
        "global_step": 4321,
        "epoch": 2.5,
        "train_batch_size": 6,
        "log_history": [{"eval_loss": 9.9, "step": 10}],
    },
    "train_results.json": TRAINING,
    "eval_results.json": EVAL_RESULTS,
    "evaluation.json": {"results": [RESULT]},
    "run_arguments.json": {
        "command": "python examples/run_clm.py --do_train",
        "dataset_name": "me/letters",
        "dataset_config_name": "small",
        "model_name_or_path": "me/parent",
    },
}


@pytest.fixture
def bare_folder(tiny_model, tmp_path):
    """A folder with a model only."""
    tiny_model.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def trained_folder(bare_folder, tiny_model):
    """A folder with a model, its source files, a tokenizer, and the records of training and evaluation."""
    tiny_model.save_pretrained(bare_folder, with_code=True)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "A": 1, "text": 2, "<unk>": 3}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")
    fast_tokenizer.save_pretrained(bare_folder)
    for name, content in RECORDS.items():
        write_json(bare_folder / name, content)
    return bare_folder


@pytest.fixture
def labelled_folder(tmp_path):
    config = small_vision_config(patch_size=2, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1})
    tost_hf.ToSTForImageClassification(config).save_pretrained(tmp_path / "images", with_code=True)
    make_image_processor(config).save_pretrained(tmp_path / "images")
    return tmp_path / "images"
