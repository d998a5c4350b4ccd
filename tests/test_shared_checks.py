"""Checks of transformers' shared model tests (test_modeling_common.py, causal_lm_tester.py), which its wheel lacks."""

import re

import pytest
import torch
from conftest import small_config, small_vision_config
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tost_hf import ToSTBackbone, ToSTForCausalLM, ToSTForImageClassification, ToSTForSequenceClassification, ToSTModel


ROTARY = {"layer_types": ["tssa", "full_attention"], "position_embedding_type": "none"}
MODELS = {
    "base model": (ToSTModel, {}, {"temp", "denom_bias"}),
    "language model": (ToSTForCausalLM, {}, {"temp", "denom_bias"}),
    "classifier": (ToSTForSequenceClassification, {"is_causal": False}, {"temp"}),
    "decay": (ToSTForCausalLM, ROTARY | {"decay_type": "head"}, {"temp", "forget_bias"}),
    "vision": (ToSTForImageClassification, {}, {"temp"}),
    "backbone": (ToSTBackbone, {}, {"temp"}),
    "xca": (ToSTForImageClassification, {"attention_type": "xca"}, set()),
}


@pytest.mark.parametrize("name", MODELS)
def test_keep_in_fp32_modules_exist(name):
    """`_keep_in_fp32_modules_strict` lists the float32 parameters, and every name in it matches a parameter."""
    model_class, fields, expected = MODELS[name]
    make_config = small_vision_config if model_class in (ToSTForImageClassification, ToSTBackbone) else small_config
    model = model_class(make_config(**fields))
    assert model._keep_in_fp32_modules_strict == expected and not model._keep_in_fp32_modules
    names = model.state_dict().keys()
    assert all(any(re.search(rf"(?:^|\.){module}(?:\.|$)", name) for name in names) for module in expected)


def test_rope_parameters_only_with_rotary_layers():
    """Models without rotary positions have no `rope_parameters`, so that the shared tests of scaling skip them."""
    for fields in ({}, {"layer_types": ROTARY["layer_types"]}, {"position_embedding_type": "none"}, {"is_causal": False}):
        config = small_config(**fields)
        assert "rope_parameters" not in config.to_dict()
        assert config == small_config(**fields)
    config = small_config(**ROTARY)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert config == small_config(**ROTARY) != small_config(**ROTARY, rope_parameters={"rope_theta": 5e5})
    legacy_config = small_config(**ROTARY, rope_theta=300.0)  # as in configurations before transformers 5
    assert legacy_config.rope_parameters["rope_theta"] == 300.0


ROPE_TYPES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "longrope": {
        "factor": 2.0,
        "original_max_position_embeddings": 8,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0],
    },
    "llama3": {"factor": 2.0, "original_max_position_embeddings": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "default": {},
}


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("length", [6, 20])
def test_rotary_positions_of_every_type(rope_type, length, tmp_path):
    """Equal to those of a Llama model with the same parameters, also after loading."""
    rope = {"rope_type": rope_type, "rope_theta": 500.0} | ROPE_TYPES[rope_type]
    fields = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 8, "rope_parameters": dict(rope)}
    model, llama_config = ToSTModel(small_config(**ROTARY | fields)), LlamaConfig(**fields)
    position_ids = torch.arange(length)[None]
    expected = LlamaRotaryEmbedding(llama_config)(torch.zeros(1), position_ids)
    model.save_pretrained(tmp_path)
    loaded = ToSTModel.from_pretrained(tmp_path)
    assert loaded.config == model.config or loaded.config.rope_parameters == rope
    for rotary_embedding in (model.rotary_emb, loaded.rotary_emb, model.to(torch.bfloat16).rotary_emb):
        for actual, value in zip(rotary_embedding(torch.zeros(1), position_ids), expected):
            torch.testing.assert_close(actual, value)
    tokens = torch.arange(1, length + 1)[None]
    hidden_states = loaded(tokens).last_hidden_state
    loaded.rotary_emb.attention_scaling = 0.0  # the layers use it
    assert not torch.equal(loaded(tokens).last_hidden_state, hidden_states)


def test_invalid_rotary_positions():
    for rope, message in (
        ({"rope_type": "yarn"}, "factor"),
        ({"rope_type": "spiral"}, "rope_type"),
        ({"full_attention": {"rope_type": "default"}}, "rope_type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ):
        with pytest.raises((ValueError, KeyError), match=message):
            small_config(**ROTARY, rope_parameters=rope)
    config = small_config()
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    with pytest.raises(ValueError, match="rope_parameters"):
        ToSTModel(config)
