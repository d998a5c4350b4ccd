"""Bad input to the training scripts gives an error message that says what to do, and nothing is lost."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import run_clm
import run_image_classification
import scripting
import text_runs
import texts
import torch
from conftest import small_config
from datasets import Dataset
from huggingface_hub.errors import StrictDataclassError
from image_runs import TINY, tiny_vision_model
from PIL import Image
from safetensors import SafetensorError
from transformers import AutoTokenizer

from tost_hf import ToSTForCausalLM, ToSTTrainingArguments


ERRORS = (ValueError, OSError, ImportError, FloatingPointError, SafetensorError, StrictDataclassError)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, text_folder) -> Path:
    """Files, data sets, configurations, tokenizers and models, each with one fault; the tests only read them."""
    folder = tmp_path_factory.mktemp("faulty")
    good = '{"text": "some words"}\n'
    for name, content in {
        "bytes.txt": b"abc \xff\xfe\x00 def \xc3" * 100,
        "lines.txt": "\n\n\n \n",
        "short.txt": "short",
        "empty.txt": "",
        "broken.jsonl": '{"text": "abc"}\n{"text": 3',
        "numbers.jsonl": '{"text": 3}\n' * 99,
        "one_number.jsonl": good * 99 + '{"text": 0}\n',
        "nulls.jsonl": '{"text": null}\n' * 99,
        "words.jsonl": good * 99,
        "words.jsonl.zst": good,
        "columns.csv": "a,b\nx,y\n",
        "header.csv": "text\n",
        "mixed/a.jsonl": good,
        "mixed/b.txt": "x",
        "later/a.jsonl": good * 1100,
        "later/b.jsonl": good * 1100 + '{"text": ',
        "wordless/a.jsonl": good * 99,
        "wordless/b.jsonl": '{"text": ""}\n',
        "only_test/test.jsonl": '{"text": "abc"}\n' * 99,
        "config/config.json": '{"model_type": "tost", ',
        "type/config.json": '{"model_type": "nobody_knows"}',
        "tok/tokenizer.json": '{"version": "1.0"',
        "tok/tokenizer_config.json": "{}",
        "texts/one/a.png": "no image",
        "args.json": '{"train_file": ',
        "list.json": "[1, 2]",
        "key.json": json.dumps({"train_file": str(text_folder / "train.txt"), "nonsense": 1}),
        "type.json": json.dumps({"train_file": str(text_folder / "train.txt"), "max_steps": "ten"}),
        "args.yaml": "a: [1, 2\nb: {",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    for name in ("folder.txt", "nothing", "images"):
        (folder / name).mkdir()
    Dataset.from_dict({"text": ["abc"] * 9}).to_parquet(folder / "cut.parquet")
    content = (folder / "cut.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(content[: len(content) // 2])
    tokenizer = AutoTokenizer.from_pretrained(text_folder / "tokenizer")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder / "no_eos")
    tiny_vision_model().config.save_pretrained(folder / "vision")
    config = small_config(vocab_size=320, num_hidden_layers=1, max_position_embeddings=32)
    for name in ("model_cut", "model_other"):
        ToSTForCausalLM(config).save_pretrained(folder / name)
    weights = folder / "model_cut/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    config.hidden_size = config.intermediate_size = 64
    config.save_pretrained(folder / "model_other")
    pictures = [Image.fromarray(np.zeros((8, 8), np.uint8))] * 4
    Dataset.from_dict({"text": ["a"] * 4, "label": ["x"] * 4}).to_parquet(folder / "texts.parquet")
    Dataset.from_dict({"image": pictures, "label": [0.5] * 4}).to_parquet(folder / "labels.parquet")
    return folder


SCRATCH = {"config_name": None, "config_overrides": None}
HUB_DATA = {"train_file": None, "validation_file": None}
FOLDERS = {"train_dir": None, "validation_dir": None}
STREAM = {"streaming": True}
# which datasets 4 does not read
ONE_NUMBER = (
    "holds no text but values such as 0"
    if int(datasets.__version__.partition(".")[0]) >= 5
    else "changed from string to number"
)
WORKERS = STREAM | {"dataloader_num_workers": 2, "max_steps": 9}


def overrides(change: str) -> dict[str, str]:
    return {"config_overrides": f"{text_runs.TINY},{change}"}


TEXT = [
    # files and data sets
    ({"train_file": None, "validation_file": None}, "no text to work on"),
    ({"train_file": "absent.txt"}, "'absent.txt' does not exist"),
    ({"train_file": "notes.docx"}, "must end in one of: .txt"),
    ({"train_file": "empty.txt"}, "is empty"),
    ({"train_file": "folder.txt"}, "folder.txt' has no text files"),
    ({"train_file": "mixed"}, "must be of one kind to be read together, not of several: json, text"),
    ({"train_file": "x*.jsonl"}, "No text file is called 'x*.jsonl'"),
    ({"train_file": "words.jsonl.zst"}, "is not installed: pip install zstandard."),
    ({"train_file": "bytes.txt"}, "bytes.txt' cannot be read: 'utf-8' codec can't decode"),
    ({"train_file": "broken.jsonl"}, "broken.jsonl' cannot be read"),
    ({"train_file": "header.csv"}, "header.csv' cannot be read: it has no examples"),
    ({"train_file": "cut.parquet"}, "cut.parquet' cannot be read"),
    ({"train_file": "http://127.0.0.1:1/x.txt"}, "'http://127.0.0.1:1/x.txt' cannot be read"),
    ({**HUB_DATA, "dataset_name": "no/such-data"}, "'no/such-data' cannot be read"),
    ({**HUB_DATA, "dataset_name": "only_test"}, "There is no train text"),
    ({"validation_file": None, "validation_split_percentage": 0, "do_eval": True}, "There is no validation text"),
    ({"train_file": "lines.txt"}, "The train text is shorter than one block of 32 tokens"),
    ({"train_file": "short.txt", "validation_file": None}, "has a single example, of which none can be held out"),
    ({"train_file": "numbers.jsonl"}, "The column 'text' of the train data holds no text but values such as 3"),
    ({"train_file": "one_number.jsonl"}, ONE_NUMBER),
    ({"train_file": "nulls.jsonl"}, "The train text is shorter than one block"),
    ({"train_file": "columns.csv"}, "has no column 'text' but a, b: name one with --text_column"),
    ({"text_column": "body"}, "has no column 'body' but: text"),
    # streams
    ({**STREAM, "max_steps": None, "num_train_epochs": 1}, "give --max_steps with --streaming"),
    ({**STREAM, "max_train_samples": 3}, "--max_steps ends a run with --streaming"),
    ({**STREAM, "dataloader_num_workers": 2}, "2 readers (--dataloader_num_workers of every process) cannot share 1 files"),
    ({**STREAM, "train_file": "numbers.jsonl"}, "holds no text but values such as 3"),
    ({**STREAM, "train_file": "one_number.jsonl"}, ONE_NUMBER),
    ({**WORKERS, "train_file": "later"}, "cannot be read further"),
    ({**WORKERS, "train_file": "wordless"}, "There is no text in 1 files of the 2"),
    # numbers
    ({"max_train_samples": 0}, "--max_train_samples must be at least 1, got 0"),
    ({"block_size": "ten"}, "invalid int value: 'ten'"),
    ({"block_size": 1}, "--block_size must be at least 2"),
    ({"block_size": 33}, "--block_size 33 is over the model's max_position_embeddings of 32"),
    ({"validation_split_percentage": 100}, "at least 0 and below 100, got 100"),
    ({"shuffle_buffer": -1}, "--shuffle_buffer must be at least 0"),
    ({"preprocessing_num_workers": -1}, "num_proc must be"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be at least 1, got 0"),
    ({"max_steps": 0}, "max_steps must be at least 1, or -1"),
    ({"max_steps": None, "num_train_epochs": 0}, "num_train_epochs must be above 0"),
    ({"learning_rate": "nan"}, "Invalid learning rate: nan"),
    ({"learning_rate": 1e30, "warmup_steps": 0, "max_steps": 9}, "became NaN or infinite after step 1, by step 2"),
    ({"optim": "magic"}, "invalid choice: 'magic'"),
    ({"logging_steps": 0}, "non-zero --logging_steps"),
    ({"output_dir": "bytes.txt"}, "is a file; name a folder"),
    ({"output_dir": "/proc/nothing/here"}, "/proc/nothing"),
    # models, configurations and tokenizers
    (overrides("n_layer=two"), "'num_hidden_layers' expected int, got str"),
    (overrides("hidden_dropout=2"), "hidden_dropout must be at least 0 and below 1"),
    (overrides("n_head=5"), "must be a multiple of num_attention_heads"),
    (overrides("hiden_size=8"), "does not understand 'hiden_size=8'"),
    (overrides("n_layer"), "does not understand 'n_layer'"),
    ({"config_name": None, "model_name_or_path": "x"}, "--config_overrides is for a model trained from scratch"),
    ({"config_name": "no-such-preset"}, "No Config can be loaded from 'no-such-preset'"),
    ({"config_name": "config"}, "is not a valid JSON file"),
    ({"config_name": "type"}, "model type `nobody_knows`"),
    ({"config_name": "vision", "config_overrides": None}, "is no language model but of the type 'tost_vision'"),
    ({"config_name": None, "model_type": "nobody_knows"}, "Unrecognized model identifier: nobody_knows"),
    ({"tokenizer_name": None}, "needs a tokenizer"),
    ({"tokenizer_name": "tok"}, "No Tokenizer can be loaded from"),
    ({"tokenizer_name": "no_eos", "train_file": "words.jsonl"}, "The tokenizer has no eos token to end a document with"),
    ({**SCRATCH, "model_name_or_path": "model_cut"}, "can be loaded from"),
    ({**SCRATCH, "model_name_or_path": "model_other"}, "No ModelForCausalLM can be loaded from"),
    ({"resume_from_checkpoint": "absent"}, "'absent' does not exist"),
    ({"resume_from_checkpoint": "nothing"}, "is incomplete: model.safetensors is missing; optimizer.pt is missing"),
    # files of arguments
    ({"nonsense": 1}, "nonsense"),
    ({"do_train": "perhaps"}, "Truthy value expected: got perhaps"),
    (["absent.json"], "absent.json"),
    (["args.json"], "args.json' cannot be read"),
    (["list.json"], "must hold names and values"),
    (["key.json"], "'--nonsense'"),
    (["type.json"], "invalid int value: 'ten'"),
    (["args.yaml"], "args.yaml' cannot be read"),
]

IMAGES = [
    (FOLDERS, "no images to work on"),
    ({"train_dir": "absent"}, "The image folder 'absent' does not exist"),
    ({**FOLDERS, "train_file": "a.csv"}, "must end in .parquet"),
    ({**FOLDERS, "train_file": "absent.parquet"}, "'absent.parquet' does not exist"),
    ({"train_dir": None}, "There are no train images"),
    ({"validation_dir": None, "train_val_split": 0, "do_eval": True}, "There are no validation images"),
    ({"train_dir": "images"}, "images/**' cannot be read: it has no examples"),
    ({"validation_dir": "texts", "do_eval": True}, "a.png) cannot be read as an image"),
    ({**FOLDERS, "train_file": "texts.parquet"}, "The train data has no column of images"),
    ({**FOLDERS, "train_file": "labels.parquet"}, "The labels are numbers without names"),
    ({"class_names": "a,b"}, "none of the 2 classes a, b"),
    ({"class_names": "a,a,b"}, "--class_names 'a,a,b' names a class twice"),
    ({"image_column_name": "absent"}, "no column 'absent'; choose one of image, label"),
    ({"label_column_name": "image"}, "cannot be both the images and their labels"),
    ({"train_val_split": 1}, "below 1, got 1"),
    ({"train_val_split": 0.999, "validation_dir": None}, "--train_val_split 0.999 leaves no image to train on"),
    ({"max_train_samples": 0}, "--max_train_samples must be at least 1"),
    ({"image_size": 0}, "--image_size must be at least 1, got 0"),
    ({"image_size": 18}, "The image size 18 must be a multiple of the patch size 4"),
    ({"config_overrides": TINY + ",patch_size=3"}, "patch_size must be a power of two"),
    ({"config_name": "tost-vision-huge-patch16"}, "There is no preset 'tost-vision-huge-patch16'"),
    ({"config_name": None, "model_type": "tost"}, "does not understand 'patch_size=4'"),
    ({"model_name_or_path": "x"}, "--config_name is for a model trained from scratch"),
    ({**SCRATCH, "model_name_or_path": "model_cut"}, "is no image classifier but of the type 'tost'"),
    ({**SCRATCH, "model_name_or_path": "vision"}, "No ModelForImageClassification can be loaded from"),
    ({"mixup": "nan"}, "mixup must be from 0 to 1000, got nan"),
    ({"recipe": "magic"}, "invalid choice: 'magic'"),
    (
        {"learning_rate": 1e30, "warmup_steps": 0, "lr_scheduler_type": "constant", "max_steps": 9},
        "NaN or infinite after step 1, by step 2",
    ),
    ({"resume_from_checkpoint": "nothing"}, "is incomplete: ema/model.safetensors is missing; model.safetensors"),
]


@pytest.fixture
def start(faulty, clm_args, image_args, monkeypatch):
    """Starts a script; a value that is the name of something faulty stands for its path."""
    monkeypatch.setattr(texts, "find_spec", lambda package: None)  # no package that decompresses
    # workers of a loader that an exception refers to end only by a timeout, of 5 seconds each
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)

    def place(value):
        return str(faulty / value) if isinstance(value, str) and value and (faulty / value).exists() else value

    def run(script, changes: dict | list) -> None:
        make = clm_args if script is run_clm else image_args
        if isinstance(changes, list):
            script.main([str(faulty / name) for name in changes])
        else:
            script.main(make(**{key: place(value) for key, value in changes.items()}))

    return run


@pytest.mark.parametrize(
    "script, changes, message",
    [(run_clm, *case) for case in TEXT] + [(run_image_classification, *case) for case in IMAGES],
    ids=[str(changes) for changes, _ in TEXT + IMAGES],
)
def test_bad_input(start, script, changes, message):
    with pytest.raises(ERRORS) as caught:
        start(script, changes)
    assert message in str(caught.value) and "Traceback" not in str(caught.value)


@pytest.mark.parametrize("capabilities, warned", [({"avx2": True}, True), ({"bf16": True}, False)])
def test_slow_bfloat16_is_warned_of(clm_args, monkeypatch, caplog, capabilities, warned):
    """And never chosen by a recipe."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    (args,) = scripting.parse_args(["--output_dir", "out", "--use_cpu", "--recipe", "paper"], ToSTTrainingArguments)
    assert not args.bf16
    args.mixed_precision = "bf16"
    scripting.set_up_logging(args, run_clm.logger)
    assert ("has no bfloat16 instructions" in caplog.text) == warned
