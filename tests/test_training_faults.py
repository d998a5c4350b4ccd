"""What goes wrong in training for reasons a user can do something about ends with a sentence, and nothing is lost."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import run_clm
import run_image_classification
import text_runs
from conftest import small_config
from datasets import Dataset
from image_runs import TINY, tiny_vision_model
from PIL import Image
from safetensors import SafetensorError
from scripts import losses

from tost_hf import ToSTForCausalLM


OVERRIDES = text_runs.TINY
SENTENCES = (ValueError, OSError, ImportError, FloatingPointError, SafetensorError)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, text_folder) -> Path:
    """Files, data sets, configurations, tokenizers and models, each with one fault; the tests only read them."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "bytes.txt").write_bytes(b"abc \xff\xfe\x00 def \xc3" * 100)
    (folder / "lines.txt").write_text("\n\n\n \n")
    (folder / "folder.txt").mkdir()
    (folder / "broken.json").write_text('{"text": "abc')
    (folder / "broken.jsonl").write_text('{"text": "abc"}\n{"text": 3')
    (folder / "columns.jsonl").write_text('{"text": "abc"}\n' * 9 + '{"other": {"a": [1]}}\n')
    (folder / "numbers.jsonl").write_text('{"text": 3}\n' * 99)
    (folder / "lists.jsonl").write_text('{"text": ["a", "b"]}\n' * 99)
    (folder / "nulls.jsonl").write_text('{"text": null}\n' * 99)
    (folder / "words.jsonl").write_text('{"text": "some words"}\n' * 99)
    (folder / "header.csv").write_text("text\n")
    (folder / "quote.csv").write_text('text\n"abc\n1,2,3,4\n')
    Dataset.from_dict({"text": ["abc"] * 9}).to_parquet(folder / "cut.parquet")
    content = (folder / "cut.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(content[: len(content) // 2])
    Dataset.from_dict({"text": []}).to_parquet(folder / "none.parquet")
    (folder / "no.parquet").write_bytes(b"PAR1 no parquet file")
    for name in (
        "nothing",
        "only_test",
        "no_config",
        "config",
        "type",
        "vision",
        "model_cut",
        "model_none",
        "model_other",
        "tok",
    ):
        (folder / name).mkdir()
    (folder / "only_test/test.jsonl").write_text('{"text": "abc"}\n' * 99)
    (folder / "config/config.json").write_text('{"model_type": "tost", ')
    (folder / "type/config.json").write_text('{"model_type": "nobody_knows"}')
    tiny_vision_model().config.save_pretrained(folder / "vision")
    config = small_config(vocab_size=320, num_hidden_layers=1, max_position_embeddings=32)
    for name in ("model_cut", "model_none", "model_other"):
        ToSTForCausalLM(config).save_pretrained(folder / name)
    weights = folder / "model_cut/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (folder / "model_none/model.safetensors").unlink()
    config.hidden_size = config.intermediate_size = 64
    config.save_pretrained(folder / "model_other")
    (folder / "tok/tokenizer.json").write_text('{"version": "1.0"')
    (folder / "tok/tokenizer_config.json").write_text("{}")
    pictures = [Image.fromarray(np.zeros((8, 8), np.uint8))] * 4
    Dataset.from_dict({"text": ["a"] * 4, "label": ["x"] * 4}).to_parquet(folder / "texts.parquet")
    Dataset.from_dict({"image": pictures, "label": [0.5] * 4}).to_parquet(folder / "labels.parquet")
    (folder / "args.json").write_text('{"train_file": ')
    (folder / "list.json").write_text("[1, 2]")
    (folder / "key.json").write_text(json.dumps({"train_file": str(text_folder / "train.txt"), "nonsense": 1}))
    (folder / "type.json").write_text(json.dumps({"train_file": str(text_folder / "train.txt"), "max_steps": "ten"}))
    (folder / "args.yaml").write_text("a: [1, 2\nb: {")
    (folder / "images").mkdir()
    (folder / "texts/one").mkdir(parents=True)
    (folder / "texts/one/a.png").write_text("no image")
    return folder


SCRATCH = {"config_name": None, "config_overrides": None}
HUB_DATA = {"train_file": None, "validation_file": None}


def overrides(change: str) -> dict[str, str]:
    return {"config_overrides": f"{text_runs.TINY},{change}"}


TEXT = [
    ({"train_file": "bytes.txt"}, "bytes.txt' cannot be read: 'utf-8' codec can't decode"),
    ({"train_file": "lines.txt"}, "The train text is shorter than one block of 32 tokens"),
    ({"train_file": "folder.txt"}, "folder.txt' has no text files"),
    ({"train_file": "broken.json"}, "broken.json' cannot be read"),
    ({"train_file": "broken.jsonl"}, "broken.jsonl' cannot be read"),
    ({"train_file": "numbers.jsonl"}, "The column 'text' of the train data holds no text but values such as 3"),
    ({"train_file": "lists.jsonl"}, "The column 'text' of the train data holds no text but values such as ['a', 'b']"),
    ({"train_file": "nulls.jsonl"}, "The train text is shorter than one block"),
    ({"train_file": "header.csv"}, "header.csv' cannot be read: it has no rows"),
    ({"train_file": "quote.csv"}, "quote.csv' cannot be read"),
    ({"train_file": "cut.parquet"}, "cut.parquet' cannot be read"),
    ({"train_file": "none.parquet"}, "none.parquet' cannot be read: it has no rows"),
    ({"train_file": "no.parquet"}, "no.parquet' cannot be read"),
    ({"validation_file": "cut.parquet", "do_eval": True}, "cut.parquet' cannot be read"),
    ({"train_file": "http://127.0.0.1:1/x.txt"}, "'http://127.0.0.1:1/x.txt' cannot be read"),
    ({**HUB_DATA, "dataset_name": "no/such-data"}, "'no/such-data' cannot be read"),
    ({**HUB_DATA, "dataset_name": "nothing"}, "nothing' cannot be read"),
    ({**HUB_DATA, "dataset_name": "only_test"}, "There is no train text"),
    ({"max_train_samples": 0}, "--max_train_samples must be at least 1, got 0"),
    ({"max_eval_samples": -3}, "--max_eval_samples must be at least 1, got -3"),
    ({"block_size": "ten"}, "invalid int value: 'ten'"),
    ({"block_size": -5}, "--block_size must be at least 2"),
    ({"validation_split_percentage": -1}, "at least 0 and below 100, got -1"),
    ({"preprocessing_num_workers": -1}, "num_proc must be"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be at least 1, got 0"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1, got 0"),
    ({"max_steps": 0}, "max_steps must be at least 1, or -1"),
    ({"max_steps": None, "num_train_epochs": 0}, "num_train_epochs must be above 0"),
    ({"learning_rate": "fast"}, "invalid float value: 'fast'"),
    ({"learning_rate": -1}, "Invalid learning rate: -1.0"),
    ({"learning_rate": "nan"}, "Invalid learning rate: nan"),
    ({"learning_rate": 1e30, "warmup_steps": 0, "max_steps": 9}, "became NaN or infinite after step 1, by step 2"),
    ({"warmup_steps": -1}, "warmup_steps"),
    ({"lr_scheduler_type": "zigzag"}, "invalid choice: 'zigzag'"),
    ({"optim": "magic"}, "invalid choice: 'magic'"),
    ({"logging_steps": 0}, "non-zero --logging_steps"),
    ({"report_to": "nobody"}, "nobody is not supported"),
    ({"eval_strategy": "steps", "validation_file": None, "validation_split_percentage": 0}, "There is no validation text"),
    ({"dtype": "int8"}, "invalid choice: 'int8'"),
    ({"seed": -1}, "Seed must be between"),
    ({"output_dir": "bytes.txt"}, "is a file; name a folder"),
    ({"output_dir": "/proc/nothing/here"}, "/proc/nothing"),
    (overrides("n_layer=two"), "'num_hidden_layers' expected int, got str"),
    (overrides("n_layer=-1"), "num_hidden_layers must be at least 1, got -1"),
    (overrides("n_layer=null"), "'num_hidden_layers' expected int"),
    (overrides("n_layer=1.5"), "'num_hidden_layers' expected int, got float"),
    (overrides("n_head=0"), "num_attention_heads must be at least 1"),
    (overrides("n_positions=0"), "max_position_embeddings must be at least 1"),
    (overrides("n_positions=many"), "'max_position_embeddings' with value 'many'"),
    (overrides("vocab_size=-3"), "vocab_size must be at least 1"),
    (overrides("vocab_size=9999999999999"), "vocab_size must be at most"),
    (overrides("hidden_dropout=2"), "hidden_dropout must be at least 0 and below 1"),
    (overrides("layer_norm_eps=small"), "'layer_norm_eps' with value 'small'"),
    (overrides("use_bias=maybe"), "'use_bias' expected bool"),
    (overrides("=3"), "does not understand '=3'"),
    ({"config_name": "no-such-preset"}, "No Config can be loaded from 'no-such-preset'"),
    ({"config_name": "no_config"}, "no_config': Unrecognized model"),
    ({"config_name": "config"}, "is not a valid JSON file"),
    ({"config_name": "type"}, "model type `nobody_knows`"),
    ({"config_name": "vision", "config_overrides": None}, "is no language model but of the type 'tost_vision'"),
    ({"config_name": None, "model_type": "nobody_knows"}, "Unrecognized model identifier: nobody_knows"),
    ({"tokenizer_name": "no/such-tokenizer"}, "No Tokenizer can be loaded from 'no/such-tokenizer'"),
    ({"tokenizer_name": "nothing"}, "No Tokenizer can be loaded from"),
    ({"tokenizer_name": "tok"}, "No Tokenizer can be loaded from"),
    ({**SCRATCH, "model_name_or_path": "model_cut"}, "are damaged or incomplete"),
    ({**SCRATCH, "model_name_or_path": "model_none"}, "no file named model.safetensors"),
    ({**SCRATCH, "model_name_or_path": "model_other"}, "No ModelForCausalLM can be loaded from"),
    ({**SCRATCH, "model_name_or_path": "no/such-model"}, "No Config can be loaded from 'no/such-model'"),
    ({"resume_from_checkpoint": "bytes.txt"}, "bytes.txt' does not exist"),
    (
        {"resume_from_checkpoint": "nothing"},
        "is incomplete: model.safetensors is missing; optimizer.pt is missing",
    ),
    ({"do_train": "perhaps"}, "Truthy value expected: got perhaps"),
    (["absent.json"], "absent.json"),
    (["args.json"], "args.json' cannot be read"),
    (["list.json"], "must hold names and values"),
    (["key.json"], "'--nonsense'"),
    (["type.json"], "invalid int value: 'ten'"),
    (["args.yaml"], "args.yaml' cannot be read"),
]

FOLDERS = {"train_dir": None, "validation_dir": None}
IMAGES = [
    ({"train_dir": "images"}, "images/**' cannot be read: it has no rows"),
    ({"train_dir": "nothing"}, "nothing/**' cannot be read: it has no rows"),
    ({"train_dir": "texts"}, "which is none of the 1 classes one"),
    ({"validation_dir": "texts", "do_eval": True}, "a.png) cannot be read as an image"),
    ({**FOLDERS, "train_file": "cut.parquet"}, "cut.parquet' cannot be read"),
    ({**FOLDERS, "train_file": "no.parquet"}, "no.parquet' cannot be read"),
    ({**FOLDERS, "train_file": "texts.parquet"}, "The train data has no column of images"),
    ({**FOLDERS, "train_file": "labels.parquet"}, "The labels are numbers without names"),
    ({**FOLDERS, "dataset_name": "no/such-images"}, "'no/such-images' cannot be read"),
    ({"class_names": "a,b"}, "none of the 2 classes a, b"),
    ({"class_names": "a,a,b"}, "--class_names 'a,a,b' names a class twice"),
    ({"image_column_name": "absent"}, "no column 'absent'; choose one of image, label"),
    ({"label_column_name": "image"}, "cannot be both the images and their labels"),
    ({"train_val_split": -1}, "at least 0 and below 1, got -1.0"),
    ({"train_val_split": 0.999, "validation_dir": None}, "--train_val_split 0.999 leaves no image to train on"),
    ({"max_train_samples": 0}, "--max_train_samples must be at least 1"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be at least 1, got 0"),
    ({"image_size": -4}, "--image_size must be at least 1, got -4"),
    ({"image_size": "big"}, "invalid int value: 'big'"),
    ({"config_overrides": TINY + ",patch_size=3"}, "patch_size must be a power of two"),
    ({"config_overrides": TINY + ",patch_size=0"}, "patch_size must be a power of two"),
    ({"config_overrides": TINY + ",hidden_size=33"}, "hidden_size (33) must be a multiple of num_attention_heads"),
    ({"config_overrides": TINY + ",num_channels=0"}, "num_channels must be at least 1"),
    ({"config_overrides": TINY + ",attention_type=magic"}, "attention_type must be one of"),
    ({"config_name": None, "model_type": "tost"}, "does not understand 'patch_size=4'"),
    ({**SCRATCH, "model_name_or_path": "model_cut"}, "is no image classifier but of the type 'tost'"),
    ({**SCRATCH, "model_name_or_path": "vision"}, "No ModelForImageClassification can be loaded from"),
    ({"mixup": "nan"}, "mixup must be from 0 to 1000, got nan"),
    ({"recipe": "magic"}, "invalid choice: 'magic'"),
    ({"min_crop_scale": 0}, "min_crop_scale must be from 0.001 to 1"),
    (
        {"learning_rate": 1e30, "warmup_steps": 0, "lr_scheduler_type": "constant", "max_steps": 9},
        "NaN or infinite after step 1, by step 2",
    ),
    (
        {"resume_from_checkpoint": "nothing"},
        "is incomplete: ema/model.safetensors is missing; model.safetensors",
    ),
    ({"dataloader_num_workers": -1}, "num_workers option should be non-negative"),
]


@pytest.fixture
def start(faulty, clm_args, image_args):
    """Starts a script; a value that is the name of something faulty stands for its path."""

    def place(value):
        return str(faulty / value) if isinstance(value, str) and value and (faulty / value).exists() else value

    def run(script, changes: dict | list) -> None:
        make = clm_args if script is run_clm else image_args
        if isinstance(changes, list):
            script.main([str(faulty / name) for name in changes])
        else:
            script.main(make(**{key: place(value) for key, value in changes.items()}))

    return run


@pytest.mark.parametrize("changes, sentence", TEXT, ids=[str(changes) for changes, _ in TEXT])
def test_text(start, changes, sentence):
    with pytest.raises(SENTENCES) as caught:
        start(run_clm, changes)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("changes, sentence", IMAGES, ids=[str(changes) for changes, _ in IMAGES])
def test_images(start, changes, sentence):
    with pytest.raises(SENTENCES) as caught:
        start(run_image_classification, changes)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("script", [run_clm, run_image_classification], ids=["text", "images"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_full_disk(start, tmp_path, caplog, script, name):
    """The second checkpoint cannot be written: the first one stays, and the run goes on from it when there is room."""
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 9}
    full = tmp_path / "out/checkpoint-2" / name
    full.parent.mkdir(parents=True)
    if name == "model.safetensors":  # is written under another name
        (full / "in the way").mkdir(parents=True)
    else:
        full.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"Saving the .*checkpoint-2 failed: .*make room on the disk"):
        start(script, saving)
    shutil.rmtree(full) if full.is_dir() else full.unlink()
    start(script, saving)
    assert len(losses(tmp_path / "out")) == 3 and "Going on from" in caplog.text and "checkpoint-1;" in caplog.text
