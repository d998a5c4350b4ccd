"""Conversion of the authors' vision checkpoints: equal outputs, round trips, baselines, command."""

import argparse
import json

import pytest
import torch
from authors_checkpoints import (
    FIXTURES,
    assert_same_bits,
    read_checkpoint,
    relative_error,
    write_changed,
)
from conftest import randomize, small_vision_config
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, ViTImageProcessorPil

from tost_hf import ToSTForImageClassification, ToSTVisionConfig
from tost_hf.cli import main
from tost_hf.convert import convert_from_original as to_folder
from tost_hf.convert import convert_to_original as to_file


P16, P8 = FIXTURES / "vision_p16.pth", FIXTURES / "vision_p8_tokensnorm_off.pth"
NORMALIZED = {P16: None, P8: False}  # tokens_norm, which the files do not store


@pytest.fixture(scope="module", params=NORMALIZED, ids=lambda path: path.stem)
def converted_folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / request.param.stem
    assert to_folder(request.param, folder, normalize_patch_tokens=NORMALIZED[request.param]) == folder
    return request.param, folder


# Equality with the authors' code --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@torch.no_grad()
def test_logits_features_and_memberships(converted_folder, dtype, tolerance):
    path, folder = converted_folder
    expected = load_file(path.with_suffix(".golden.safetensors"))
    model = AutoModelForImageClassification.from_pretrained(folder, dtype=dtype).eval()
    pixels = expected["pixel_values"].to(dtype)
    output = model(pixels, output_memberships=True)
    assert relative_error(output.logits, expected["logits"]) < tolerance
    assert relative_error(torch.stack(output.memberships), expected["membership"]) < tolerance
    assert relative_error(model.tost(pixels).pooler_output, expected["features_cls"]) < tolerance
    if path == P16:
        assert relative_error(model(expected["pixel_values_2"].to(dtype)).logits, expected["logits_2"]) < tolerance


def test_folder(converted_folder):
    path, folder = converted_folder
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors", "preprocessor_config.json"}
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]  # no temporary files are left
    config, image_size = ToSTVisionConfig.from_pretrained(folder), read_checkpoint(path)["args"].input_size
    assert config.normalize_patch_tokens == (path == P16) and config.image_size == image_size
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    assert processor["crop_size"] == {"height": image_size, "width": image_size}


# Round trips ----------------------------------------------------------------------------------------------------------


def test_round_trip(converted_folder, tmp_path):
    path, folder = converted_folder
    original = read_checkpoint(path)
    assert to_file(folder, tmp_path / "back.pth") == tmp_path / "back.pth"
    contents = torch.load(tmp_path / "back.pth", weights_only=True)
    assert_same_bits(contents["model"], original["model"])
    assert contents["model"]["patch_embed.proj.0.1.num_batches_tracked"].dtype == torch.int64
    assert contents["args"]["input_size"] == original["args"].input_size
    assert contents["args"]["tokens_norm"] == (path == P16)
    # the file stores the settings that the tensors do not determine, so no options are needed
    reloaded_folder = to_folder(tmp_path / "back.pth", tmp_path / "again")
    assert (reloaded_folder / "config.json").read_text() == (folder / "config.json").read_text()
    assert_same_bits(load_file(reloaded_folder / "model.safetensors"), load_file(folder / "model.safetensors"))


def test_ema_weights(tmp_path):
    folder = to_folder(P16, tmp_path / "model", ema=True)
    to_file(folder, tmp_path / "back.pth")
    contents = read_checkpoint(P16)
    assert_same_bits(read_checkpoint(tmp_path / "back.pth")["model"], contents["model_ema"])
    assert not torch.equal(contents["model_ema"]["norm.weight"], contents["model"]["norm.weight"])


def test_settings_of_the_run(tmp_path):
    def change(contents):
        contents["args"].drop, contents["args"].drop_path = 0.1, 0.05

    config = ToSTVisionConfig.from_pretrained(to_folder(write_changed(tmp_path / "c.pth", change, P8), tmp_path / "model"))
    assert (config.hidden_dropout, config.embedding_dropout, config.drop_path_rate) == (0.1, 0.1, 0.05)
    assert config.attention_dropout == 0
    args = read_checkpoint(to_file(tmp_path / "model", tmp_path / "back.pth"))["args"]
    assert (args["drop"], args["drop_path"], args["nb_classes"]) == (0.1, 0.05, 5)


# Other types of attention ------------------------------------------------------------------------------------------


def make_model(**fields):
    config = small_vision_config(**({"num_attention_heads": 2} | fields))
    return randomize(ToSTForImageClassification(config)).eval()


@pytest.mark.parametrize(
    "fields",
    [
        {"attention_type": "xca"},
        {"attention_type": "softmax"},
        {"attention_type": "xca", "qkv_bias": False},
        {"patch_size": 2, "num_channels": 1},
        {"patch_size": 32, "image_size": 32, "num_class_attention_layers": 3, "num_labels": 7},
        {"num_hidden_layers": 12, "intermediate_size": 48, "drop_path_rate": 0.1},
    ],
)
def test_round_trip_of_other_types_of_attention(tmp_path, fields):
    model = make_model(**fields)
    model.save_pretrained(tmp_path / "model")
    reloaded_folder = to_folder(to_file(tmp_path / "model", tmp_path / "c.pth"), tmp_path / "again")
    loaded = AutoModelForImageClassification.from_pretrained(reloaded_folder)
    assert loaded.config.to_dict() | {"_name_or_path": ""} == model.config.to_dict() | {
        "_name_or_path": "",
        "dtype": "float32",
    }
    assert_same_bits(loaded.state_dict(), model.state_dict())
    processor = ViTImageProcessorPil.from_pretrained(reloaded_folder)
    pixels = processor(Image.linear_gradient("L"), return_tensors="pt")["pixel_values"]
    assert loaded(pixels).logits.shape == (1, model.config.num_labels)


def save_authors_baseline(tmp_path, attention_type, width=192, **args):
    """Saves a checkpoint of a baseline with the arguments of the authors' run."""
    make_model(attention_type=attention_type, hidden_size=width, num_attention_heads=4).save_pretrained(tmp_path / "source")
    contents = read_checkpoint(to_file(tmp_path / "source", tmp_path / "checkpoint.pth"))
    contents["args"] = argparse.Namespace(**args)
    torch.save(contents, tmp_path / "checkpoint.pth")
    return tmp_path / "checkpoint.pth"


@pytest.mark.parametrize("attention_type", ["xca", "softmax"])
def test_baselines_are_recognized(tmp_path, attention_type):
    source = save_authors_baseline(tmp_path, attention_type, model="vit_tiny_12_p4", input_size=16)
    names = {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"} | ({"temperature"} if attention_type == "xca" else set())
    prefix = "blocks.1.attn."
    assert {x.removeprefix(prefix) for x in read_checkpoint(source)["model"] if x.startswith(prefix)} == names
    config = ToSTVisionConfig.from_pretrained(to_folder(source, tmp_path / "model"))
    assert (config.attention_type, config.num_attention_heads) == (attention_type, 4)
    assert config.patch_size == 4 and config.hidden_size == 192


def test_heads_of_a_softmax_baseline(tmp_path):
    source = save_authors_baseline(tmp_path, "softmax", width=32, model="vit_tiny_12_p4")  # named tiny, but of another width
    with pytest.raises(ValueError, match=r"'vit_tiny_12_p4'.*give num_attention_heads"):
        to_folder(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    folder = to_folder(source, tmp_path / "model", num_attention_heads=8)
    assert ToSTVisionConfig.from_pretrained(folder).num_attention_heads == 8


# The command ----------------------------------------------------------------------------------------------------------


def test_command(tmp_path, capsys):
    folder, back = str(tmp_path / "model"), str(tmp_path / "back.pth")
    assert main(["convert", str(P8), folder, "--ema", "--no-normalize-patch-tokens", "--num-attention-heads", "3"]) == 0
    assert not ToSTVisionConfig.from_pretrained(folder).normalize_patch_tokens
    assert main(["convert", folder, back]) == 0
    assert capsys.readouterr().out == f"Wrote {folder}\nWrote {back}\n"
    assert_same_bits(read_checkpoint(back)["model"], read_checkpoint(P8)["model_ema"])
    assert main(["convert", folder, back]) == 1
    assert main(["convert", folder, back, "--overwrite"]) == 0
    assert main(["convert", folder, str(tmp_path / "other.pth"), "--ema"]) == 1
    assert "is a folder, which is converted back" in capsys.readouterr().err and not (tmp_path / "other.pth").exists()
