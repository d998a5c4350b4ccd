# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The vision model as a backbone: feature maps of selected blocks, saving and loading, dense tasks, invalid input."""

import json
from itertools import chain

import pytest
import torch
import transformers
from conftest import randomize, small_vision_config, tiny_vision_model
from safetensors import safe_open
from transformers import AutoBackbone, GPT2Config, LlamaConfig

from tost_hf import ToSTBackbone, ToSTForImageClassification, ToSTVisionConfig


ENCODER = {"encoder_layers": 1, "encoder_ffn_dim": 32, "encoder_attention_heads": 2}
DECODER = {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 32, "decoder_attention_heads": 2, "num_queries": 3}
RT_ENCODER = {"encoder_hidden_dim": 32, "encoder_in_channels": [32] * 4, "encode_proj_layers": [3], "feat_strides": [4] * 4}
RT_DETR = ENCODER | DECODER | RT_ENCODER | {"decoder_in_channels": [32] * 4, "num_feature_levels": 4}
UPERNET = {"hidden_size": 16, "pool_scales": [1, 2], "auxiliary_in_channels": 32, "auxiliary_channels": 8, "num_labels": 3}
MASK_DECODER = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "dim_feedforward": 32, "decoder_layers": 2}
MASK2FORMER = MASK_DECODER | {"encoder_layers": 1, "encoder_feedforward_dim": 32, "num_attention_heads": 2, "num_queries": 3}
LLAMA = LlamaConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=50)
GPT2 = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50, is_decoder=True, add_cross_attention=True)
HOSTS = {  # name in transformers: the field for ToST's configuration, and the other fields
    "DetrForObjectDetection": ("backbone_config", ENCODER | DECODER),
    "DetrModel": ("backbone_config", ENCODER | DECODER),
    "RTDetrForObjectDetection": ("backbone_config", RT_DETR),
    "DFineForObjectDetection": ("backbone_config", RT_DETR),
    "UperNetForSemanticSegmentation": ("backbone_config", UPERNET),
    "Mask2FormerForUniversalSegmentation": ("backbone_config", MASK2FORMER),
    "LlavaForConditionalGeneration": ("vision_config", {"text_config": LLAMA}),
    "VisionEncoderDecoderModel": ("encoder", {"decoder": GPT2.to_dict()}),
}


def make_host(name: str) -> transformers.PreTrainedModel:
    """A model of transformers that has a ToST of four blocks as its backbone or encoder."""
    field, fields = HOSTS[name]
    model_class = getattr(transformers, name)
    tost = small_vision_config(num_hidden_layers=4, out_indices=[1, 2, 3, 4])
    part = tost.to_dict() if field == "encoder" else tost  # what transformers 5.19 accepts
    return randomize(model_class(model_class.config_class(**{field: part}, **fields)))


@pytest.fixture
def saved_classifier(tmp_path):
    """A classifier of three blocks and its folder."""
    model = tiny_vision_model()
    model.save_pretrained(tmp_path / "classifier")
    return model, tmp_path / "classifier"


@pytest.mark.parametrize(
    ("selection", "stages"),
    [
        ({}, [3]),
        ({"out_features": ["stem", "stage2"]}, [0, 2]),
        ({"out_indices": (0, 1, 3)}, [0, 1, 3]),
        ({"out_indices": [-2]}, [2]),
        ({"num_hidden_layers": 2}, [2]),
    ],
)
@torch.no_grad()
def test_feature_maps_are_hidden_states_of_the_selected_blocks(saved_classifier, images, selection, stages):
    model, folder = saved_classifier
    backbone, loading_info = ToSTBackbone.from_pretrained(folder, output_loading_info=True, **selection)
    assert not loading_info["missing_keys"] and bool(loading_info["unexpected_keys"]) == ("num_hidden_layers" in selection)
    expected = model.tost(images, output_hidden_states=True).hidden_states
    output = backbone(images, output_hidden_states=True, output_memberships=True)
    assert [backbone.stage_names.index(name) for name in backbone.out_features] == stages
    assert backbone.channels == [32] * len(stages)
    for stage, feature_map in zip(stages, output.feature_maps, strict=True):
        assert feature_map.shape == (2, 32, 4, 6) and torch.equal(feature_map[..., 1, 2], expected[stage][:, 8])
        assert torch.equal(feature_map.flatten(2).transpose(1, 2), expected[stage])
    assert len(output.memberships) == stages[-1]  # later blocks are not run
    assert all(torch.equal(a, b) for a, b in zip(output.hidden_states, expected))
    assert backbone(images).keys() == {"feature_maps"}
    assert torch.equal(backbone(images, return_dict=False)[0][0], output.feature_maps[0])


@pytest.mark.parametrize("attention_type", ["tssa", "xca", "softmax"])
@torch.no_grad()
def test_saving_and_loading_with_out_features(tmp_path, images, attention_type):
    backbone = ToSTBackbone(small_vision_config(attention_type=attention_type, out_features=["stem", "stage1"]))
    randomize(backbone).eval().save_pretrained(tmp_path)
    loaded = ToSTBackbone.from_pretrained(tmp_path)
    assert loaded.out_indices == [0, 1] and loaded.config.architectures == ["ToSTBackbone"]
    assert all(torch.equal(a, b) for a, b in zip(loaded(images).feature_maps, backbone(images).feature_maps, strict=True))
    bf16_backbone = ToSTBackbone.from_pretrained(tmp_path, dtype=torch.bfloat16)
    temp_dtypes = [param.dtype for name, param in bf16_backbone.named_parameters() if name.endswith("attention.temp")]
    assert bf16_backbone(images).feature_maps[0].dtype == torch.bfloat16 and set(temp_dtypes) <= {torch.float32}


def test_config_without_out_features_is_unchanged(saved_classifier, tmp_path):
    model, folder = saved_classifier
    assert not {"out_features", "out_indices", "stage_names"} & json.loads((folder / "config.json").read_text()).keys()
    assert type(AutoBackbone.from_config(model.config)) is ToSTBackbone
    config = ToSTVisionConfig.from_pretrained(folder, out_indices=[1])
    ToSTForImageClassification(config).save_pretrained(tmp_path / "selected")
    assert ToSTBackbone.from_pretrained(tmp_path / "selected").out_features == ["stage1"]


def test_upernet_trains_on_the_backbone(images):
    """The heads of UPerNet require four feature maps."""
    model = make_host("UperNetForSemanticSegmentation").train()
    labels = (images.mean(1) > 0.5).long()
    output = model(pixel_values=images, labels=labels)
    output.loss.backward()
    assert output.logits.shape == (2, 3, 16, 24)
    assert all(param.grad is not None for param in model.backbone.parameters())


@pytest.mark.parametrize("name", HOSTS)
def test_other_models_save_and_load_the_backbone(tmp_path, name):
    model = make_host(name)
    for norm in (module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    model.save_pretrained(tmp_path)
    assert any(".out_proj." in name for name in safe_open(tmp_path / "model.safetensors", "pt").keys())  # as always
    loaded, loading_info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading_info.values())
    tensors, loaded_tensors = (dict(chain(m.named_parameters(), m.named_buffers())) for m in (model, loaded))
    assert tensors.keys() == loaded_tensors.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], loaded_tensors[name])] == []
