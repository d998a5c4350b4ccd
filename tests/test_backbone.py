# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The vision trunk as a backbone: maps of chosen blocks, saved and loaded, inside a model for dense tasks, bad input."""

import copy
import json

import pytest
import torch
from conftest import randomize, small_vision_config, tiny_vision_model
from transformers import AutoBackbone, UperNetConfig, UperNetForSemanticSegmentation

from tost_hf import ToSTBackbone, ToSTForImageClassification, ToSTVisionConfig


@pytest.fixture
def saved(tmp_path):
    """A classifier of three blocks and its folder."""
    model = tiny_vision_model()
    model.save_pretrained(tmp_path / "classifier")
    return model, tmp_path / "classifier"


@pytest.mark.parametrize(
    ("choice", "stages"),
    [
        ({}, [3]),
        ({"out_features": ["stem", "stage2"]}, [0, 2]),
        ({"out_indices": (0, 1, 3)}, [0, 1, 3]),
        ({"out_indices": [-2]}, [2]),
        ({"num_hidden_layers": 2}, [2]),
    ],
)
@torch.no_grad()
def test_maps_are_the_patches_after_the_chosen_blocks(saved, images, choice, stages):
    model, folder = saved
    backbone, loaded = ToSTBackbone.from_pretrained(folder, output_loading_info=True, **choice)
    assert not loaded["missing_keys"] and bool(loaded["unexpected_keys"]) == ("num_hidden_layers" in choice)
    expected = model.tost(images, output_hidden_states=True).hidden_states
    output = backbone(images, output_hidden_states=True, output_memberships=True)
    assert [backbone.stage_names.index(name) for name in backbone.out_features] == stages
    assert backbone.channels == [32] * len(stages)
    for stage, found in zip(stages, output.feature_maps, strict=True):
        assert found.shape == (2, 32, 4, 6) and torch.equal(found[..., 1, 2], expected[stage][:, 8])
        assert torch.equal(found.flatten(2).transpose(1, 2), expected[stage])
    assert len(output.memberships) == stages[-1]  # later blocks are not run
    assert all(torch.equal(a, b) for a, b in zip(output.hidden_states, expected))
    assert backbone(images).keys() == {"feature_maps"}
    assert torch.equal(backbone(images, return_dict=False)[0][0], output.feature_maps[0])


@pytest.mark.parametrize("attention_type", ["tssa", "xca", "softmax"])
@torch.no_grad()
def test_saved_and_loaded_with_its_choice(tmp_path, images, attention_type):
    backbone = ToSTBackbone(small_vision_config(attention_type=attention_type, out_features=["stem", "stage1"]))
    randomize(backbone).eval().save_pretrained(tmp_path)
    again = ToSTBackbone.from_pretrained(tmp_path)
    assert again.out_indices == [0, 1] and again.config.architectures == ["ToSTBackbone"]
    assert all(torch.equal(a, b) for a, b in zip(again(images).feature_maps, backbone(images).feature_maps, strict=True))
    half = ToSTBackbone.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = [param.dtype for name, param in half.named_parameters() if name.endswith("attention.temp")]
    assert half(images).feature_maps[0].dtype == torch.bfloat16 and set(kept) <= {torch.float32}


def test_a_configuration_without_a_choice_is_as_it_was(saved, tmp_path):
    model, folder = saved
    assert not {"out_features", "out_indices", "stage_names"} & json.loads((folder / "config.json").read_text()).keys()
    assert type(AutoBackbone.from_config(model.config)) is ToSTBackbone
    chosen = ToSTVisionConfig.from_pretrained(folder, out_indices=[1])
    ToSTForImageClassification(chosen).save_pretrained(tmp_path / "chosen")
    assert ToSTBackbone.from_pretrained(tmp_path / "chosen").out_features == ["stage1"]


def test_a_segmentation_model_of_transformers_trains_on_it(images):
    """UPerNet, whose heads take four maps."""
    config = small_vision_config(num_hidden_layers=4, out_indices=[1, 2, 3, 4])
    heads = {"hidden_size": 16, "pool_scales": [1, 2], "auxiliary_in_channels": 32, "auxiliary_channels": 8}
    model = UperNetForSemanticSegmentation(UperNetConfig(backbone_config=config, num_labels=3, **heads)).train()
    labels = (images.mean(1) > 0.5).long()
    output = model(pixel_values=images, labels=labels)
    output.loss.backward()
    assert output.logits.shape == (2, 3, 16, 24)
    assert all(param.grad is not None for param in model.backbone.parameters())


def test_gradient_checkpointing_changes_nothing(images):
    model = randomize(ToSTBackbone(small_vision_config(out_indices=[1, 2]))).train()
    again = copy.deepcopy(model)
    again.gradient_checkpointing_enable({"use_reentrant": False})
    assert again.is_gradient_checkpointing
    for one in (model, again):
        sum(x.square().mean() for x in one(images).feature_maps).backward()
    for param, other in zip(model.parameters(), again.parameters()):
        assert torch.equal(param.grad, other.grad)


@pytest.mark.parametrize(
    ("pixels", "message"), [(None, "Give pixel_values"), (torch.zeros(1, 3, 15, 16), "multiples of the patch size")]
)
def test_bad_images(pixels, message):
    with pytest.raises(ValueError, match=message):
        ToSTBackbone(small_vision_config())(pixels)
