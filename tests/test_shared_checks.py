"""Checks of transformers' shared model tests (test_modeling_common.py, causal_lm_tester.py), which its wheel lacks."""

import re

import pytest
import torch
from conftest import small_config, small_vision_config
from transformers import AutoConfig

from tost_hf import ToSTBackbone, ToSTForCausalLM, ToSTForImageClassification, ToSTForSequenceClassification, ToSTModel


ROTARY = {"layer_types": ["tost_causal_statistics", "full_attention"], "max_position_embeddings": None}
MODELS = {
    "trunk": (ToSTModel, {}, {"temp", "denom_bias"}),
    "language model": (ToSTForCausalLM, {}, {"temp", "denom_bias"}),
    "classifier": (ToSTForSequenceClassification, {"is_causal": False}, {"temp"}),
    "decay": (ToSTForCausalLM, ROTARY | {"forgetting": "head"}, {"temp", "forget_bias"}),
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
    """`rope_parameters` is a dict in models with rotary positions; in others it is None and not saved."""
    for fields in ({}, {"layer_types": ROTARY["layer_types"]}, {"max_position_embeddings": None}, {"is_causal": False}):
        config = small_config(**fields)
        assert config.rope_parameters is None and "rope_parameters" not in config.to_dict()
        assert config == small_config(**fields)
    config = small_config(**ROTARY)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert config == small_config(**ROTARY) != small_config(**ROTARY, rope_parameters={"rope_theta": 5e5})
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    model = ToSTModel(config).eval()
    config.rope_parameters = config.rope_parameters | {"factor": 1.0}
    tokens, position_ids = torch.arange(1, 7)[None], torch.arange(1, 7)[None]
    expected = model(tokens, position_ids=position_ids).last_hidden_state
    config.rope_parameters = config.rope_parameters | {"factor": 2.0}
    torch.testing.assert_close(model(tokens, position_ids=2 * position_ids).last_hidden_state, expected)
    loaded = AutoConfig.for_model(**config.to_dict())
    assert loaded.rope_parameters == config.rope_parameters and loaded.options()["rope_parameters"]["factor"] == 2.0
    legacy_config = small_config(**ROTARY, rope_theta=300.0)  # as in configurations before transformers 5
    assert legacy_config.rope_parameters["rope_theta"] == 300.0
