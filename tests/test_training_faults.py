"""Bad input to the training scripts raises an error whose message says what is wrong."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import run_clm
import run_image_classification
import scripting
import text_runs
import torch
from conftest import small_config
from datasets import Dataset
from huggingface_hub.errors import StrictDataclassError
from image_runs import tiny_vision_model
from PIL import Image
from safetensors import SafetensorError
from transformers import AutoTokenizer

from tost_hf import ToSTForCausalLM, ToSTTrainingArguments


ERRORS = (ValueError, OSError, ImportError, FloatingPointError, SafetensorError, StrictDataclassError)


@pytest.fixture(scope="module")
def faulty_inputs(tmp_path_factory, text_folder) -> Path:
    """Files, datasets, configurations, tokenizers and models, each with one fault; the tests only read them."""
    folder = tmp_path_factory.mktemp("faulty")
    record = '{"text": "some words"}\n'
    for name, content in {
        "bytes.txt": b"abc \xff\xfe\x00 def \xc3" * 100,
        "lines.txt": "\n\n\n \n",
        "short.txt": "short",
        "numbers.jsonl": '{"text": 3}\n' * 99,
        "one_number.jsonl": record * 99 + '{"text": 0}\n',
        "nulls.jsonl": '{"text": null}\n' * 99,
        "words.jsonl": record * 99,
        "columns.csv": "a,b\nx,y\n",
        "header.csv": "text\n",
        "mixed/a.jsonl": record,
        "mixed/b.txt": "x",
        "later/a.jsonl": record * 1100,
        "later/b.jsonl": record * 1100 + '{"text": ',
        "wordless/a.jsonl": record * 99,
        "wordless/b.jsonl": '{"text": ""}\n',
        "only_test/test.jsonl": '{"text": "abc"}\n' * 99,
        "tok/tokenizer.json": '{"version": "1.0"',
        "tok/tokenizer_config.json": "{}",
        "texts/one/a.png": "no image",
        "loose/a.png": "no image",
        "args.json": '{"train_file": ',
        "list.json": "[1, 2]",
        "key.json": json.dumps({"train_file": str(text_folder / "train.txt"), "nonsense": 1}),
        "args.yaml": "a: [1, 2\nb: {",
        "abbreviation.yaml": f"train_file: {text_folder / 'train.txt'}\noutput_dir: out\nlearning_rat: 1\n",
        "twice.yaml": "lr_scheduler_kwargs: {min_lr: 0.1}\nlearning_rate: 1\nseed: 3\nlearning_rate: 2\n",
        "twice.json": '{"lr_scheduler_kwargs": {"min_lr": 0.1, "min_lr": 0.2}}',
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    for name in ("folder.txt", "nothing", "images"):
        (folder / name).mkdir()
    tokenizer = AutoTokenizer.from_pretrained(text_folder / "tokenizer")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder / "no_eos")
    tiny_vision_model().config.save_pretrained(folder / "vision")
    config = small_config(vocab_size=320, num_hidden_layers=1, max_position_embeddings=32)
    ToSTForCausalLM(config).save_pretrained(folder / "model_other")
    config.hidden_size = config.intermediate_size = 64
    config.save_pretrained(folder / "model_other")
    pictures = [Image.fromarray(np.zeros((8, 8), np.uint8))] * 4
    (folder / "one_class/cat").mkdir(parents=True)
    for number, picture in enumerate(pictures):
        picture.save(folder / "one_class/cat" / f"{number}.png")
    Dataset.from_dict({"text": ["a"] * 4, "label": ["x"] * 4}).to_parquet(folder / "texts.parquet")
    Dataset.from_dict({"image": pictures, "label": [0.5] * 4}).to_parquet(folder / "labels.parquet")
    return folder


SCRATCH = {"config_name": None, "config_overrides": None}
HUB_DATA = {"train_file": None, "validation_file": None}
FOLDERS = {"train_dir": None, "validation_dir": None}
STREAM = {"streaming": True}
ONE_NUMBER = "values such as 0" if int(datasets.__version__.partition(".")[0]) >= 5 else "number"  # datasets 4 cannot read it
WORKERS = STREAM | {"dataloader_num_workers": 2, "max_steps": 9}


def overrides(change: str) -> dict[str, str]:
    return {"config_overrides": f"{text_runs.TINY},{change}"}


TEXT = [
    ({"do_train": None}, "nothing to do"),
    # files and datasets
    (HUB_DATA, "no text"),
    ({"train_file": "absent.txt"}, "exist"),
    ({"train_file": "notes.docx"}, "end in"),
    ({"train_file": "folder.txt"}, "has no text files"),
    ({"train_file": "mixed"}, "kind"),
    ({"train_file": "x*.jsonl"}, "x*.jsonl"),
    ({"train_file": "bytes.txt"}, "bytes.txt"),
    ({"train_file": "header.csv"}, "no examples"),
    ({**HUB_DATA, "dataset_name": "no/such-data"}, "no/such-data"),
    ({**HUB_DATA, "dataset_name": "only_test"}, "no train"),
    ({"validation_file": None, "validation_split_percentage": 0, "do_eval": True}, "no validation"),
    ({"train_file": "lines.txt"}, "shorter"),
    ({"train_file": "short.txt", "validation_file": None}, "single"),
    ({"train_file": "numbers.jsonl"}, "values such as 3"),
    ({"train_file": "one_number.jsonl"}, ONE_NUMBER),
    ({"train_file": "nulls.jsonl"}, "shorter"),
    ({"train_file": "columns.csv"}, "text_column"),
    ({"text_column": "body"}, "body"),
    # streams
    ({**STREAM, "max_steps": None, "num_train_epochs": 1}, "max_steps"),
    ({**STREAM, "max_train_samples": 3}, "max_steps"),
    ({**STREAM, "dataloader_num_workers": 2}, "readers"),
    ({**STREAM, "train_file": "numbers.jsonl"}, "values such as 3"),
    ({**STREAM, "train_file": "one_number.jsonl"}, ONE_NUMBER),
    ({**WORKERS, "train_file": "later"}, "further"),
    ({**WORKERS, "train_file": "wordless"}, "no text"),
    # numbers
    ({"max_train_samples": 0}, "max_train_samples"),
    ({"block_size": 1}, "block_size"),
    ({"block_size": 33}, "max_position_embeddings"),
    ({"validation_split_percentage": 100}, "below 100"),
    ({"shuffle_buffer": -1}, "shuffle_buffer"),
    ({"label_smoothing_factor": 2}, "label_smoothing_factor must be from 0 to 1"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be at least 1"),
    ({"learning_rate": 1e30, "warmup_steps": 0, "max_steps": 9}, "NaN"),
    # models, configurations and tokenizers
    (overrides("n_layer=two"), "num_hidden_layers"),
    (overrides("n_head=5"), "num_attention_heads"),
    (overrides("hiden_size=8"), "hiden_size"),
    (overrides("n_layer"), "understand"),
    (overrides("num_hidden_layers=2"), "num_hidden_layers twice"),
    ({"config_name": None, "model_name_or_path": "x"}, "config_overrides"),
    ({"config_name": "no-such-preset"}, "no-such-preset"),
    ({"config_name": "tost-bse"}, "The presets, of which `tost-hf init` makes one, are tost-base, "),
    ({**SCRATCH, "model_name_or_path": "tost-base"}, "`tost-hf init tost-base tost-base` writes one"),
    ({**SCRATCH, "model_name_or_path": "./absent"}, "There is no model folder './absent'"),
    ({**SCRATCH, "model_name_or_path": "absent/model"}, "could not be asked for 'absent/model'"),
    ({"config_name": "vision", "config_overrides": None}, "tost_vision"),
    ({"tokenizer_name": None}, "tokenizer"),
    ({"tokenizer_name": "tok"}, "Tokenizer"),
    ({"tokenizer_name": "no_eos", "train_file": "words.jsonl"}, "eos"),
    ({**SCRATCH, "model_name_or_path": "model_other"}, "ModelForCausalLM"),
    ({**HUB_DATA, "dataset_name": "./absent"}, "There is no file or folder './absent'"),
    ({"resume_from_checkpoint": "absent"}, "exist"),
    ({"resume_from_checkpoint": "nothing"}, "incomplete"),
    # files of arguments
    ({"nonsense": 1}, "nonsense"),
    ({"train_fil": "x.txt"}, "no argument --train_fil, but --train_file"),
    (["args.json"], "args.json"),
    (["list.json"], "values"),
    (["key.json"], "nonsense"),
    (["args.yaml"], "args.yaml"),
    (["abbreviation.yaml"], "--learning_rat"),
    (["twice.yaml"], "learning_rate is given twice"),
    (["twice.json"], "min_lr is given twice"),
]

IMAGES = [
    ({"do_train": None}, "nothing to do"),
    ({"train_dir": "loose"}, "move 'a.png' to "),
    ({"train_dir": "one_class"}, "All examples are of one class, 'cat'"),
    (FOLDERS, "no images"),
    ({"train_dir": "absent"}, "absent"),
    ({**FOLDERS, "train_file": "absent.parquet"}, "absent"),
    ({"train_dir": None}, "no train"),
    ({"validation_dir": None, "train_val_split": 0, "do_eval": True}, "no validation"),
    ({"train_dir": "images"}, "no examples"),
    ({"validation_dir": "texts", "do_eval": True}, "a.png"),
    ({**FOLDERS, "train_file": "texts.parquet"}, "no column"),
    ({**FOLDERS, "train_file": "labels.parquet"}, "whole number"),
    ({"class_names": "a,b"}, "classes a, b"),
    ({"image_column_name": "absent"}, "absent"),
    ({"train_val_split": 1}, "below 1"),
    ({"image_size": 18}, "multiple"),
    ({"config_name": "tost-vision-huge-patch16"}, "tost-vision-huge"),
    ({"model_name_or_path": "x"}, "config_name"),
    ({**SCRATCH, "model_name_or_path": "model_other"}, "'tost'"),
    ({**SCRATCH, "model_name_or_path": "vision"}, "ModelForImageClassification"),
    ({"mixup": "nan"}, "mixup"),
    ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
    ({"resume_from_checkpoint": "nothing"}, "ema/model.safetensors"),
]


@pytest.fixture
def start(faulty_inputs, clm_args, image_args, tmp_path, monkeypatch):
    """Runs a script in an empty folder; a value that names a faulty input is replaced by its path."""
    monkeypatch.chdir(tmp_path)
    # workers of a DataLoader that an exception references end only after a timeout of 5 seconds each
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)

    def resolve(value):
        return str(faulty_inputs / value) if isinstance(value, str) and value and (faulty_inputs / value).exists() else value

    def run(script, changes: dict | list) -> None:
        make_args = clm_args if script is run_clm else image_args
        if isinstance(changes, list):
            script.main([str(faulty_inputs / name) for name in changes])
        else:
            script.main(make_args(**{key: resolve(value) for key, value in changes.items()}))

    return run


@pytest.mark.parametrize(
    "script, changes, message",
    [(run_clm, *case) for case in TEXT] + [(run_image_classification, *case) for case in IMAGES],
    ids=[str(changes) for changes, _ in TEXT + IMAGES],
)
def test_bad_input(start, script, changes, message):
    with pytest.raises(ERRORS) as error_info:
        start(script, changes)
    assert message in str(error_info.value) and "Traceback" not in str(error_info.value)


@pytest.mark.parametrize("capabilities, warns", [({"avx2": True}, True), ({"bf16": True}, False)])
def test_warning_of_slow_bfloat16(clm_args, monkeypatch, caplog, capabilities, warns):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    (args,) = scripting.parse_args(["--output_dir", "out", "--use_cpu"], ToSTTrainingArguments)
    args.mixed_precision = "bf16"
    scripting.set_up_logging(args, run_clm.logger)
    assert ("has no bfloat16 instructions" in caplog.text) == warns
