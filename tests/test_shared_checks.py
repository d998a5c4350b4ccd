"""What transformers' shared model tests (test_modeling_common.py, causal_lm_tester.py; not in the wheel) ask of a model."""

import re

import pytest
import torch
from conftest import small_config, small_vision_config
from transformers import AutoConfig

from tost_hf import ToSTBackbone, ToSTForCausalLM, ToSTForImageClassification, ToSTForSequenceClassification, ToSTModel


ROTATING = {"layer_types": ["tost_causal_statistics", "full_attention"], "max_position_embeddings": None}
MODELS = {
    "trunk": (ToSTModel, {}, {"temp", "denom_bias"}),
    "language model": (ToSTForCausalLM, {}, {"temp", "denom_bias"}),
    "classifier": (ToSTForSequenceClassification, {"is_causal": False}, {"temp"}),
    "forgetting": (ToSTForCausalLM, ROTATING | {"forgetting": "head"}, {"temp", "forget_bias"}),
    "vision": (ToSTForImageClassification, {}, {"temp"}),
    "backbone": (ToSTBackbone, {}, {"temp"}),
    "xca": (ToSTForImageClassification, {"attention_type": "xca"}, set()),
}


@pytest.mark.parametrize("name", MODELS)
def test_keep_in_fp32_modules_exist(name):
    """Every name in `_keep_in_fp32_modules_strict` is that of a parameter, and every float32 parameter is named."""
    model_class, fields, expected = MODELS[name]
    make_config = small_vision_config if model_class in (ToSTForImageClassification, ToSTBackbone) else small_config
    model = model_class(make_config(**fields))
    assert model._keep_in_fp32_modules_strict == expected and not model._keep_in_fp32_modules
    names = model.state_dict().keys()
    assert all(any(re.search(rf"(?:^|\.){kept}(?:\.|$)", name) for name in names) for kept in expected)


def test_rope_parameters_only_where_a_layer_rotates():
    """`rope_parameters` is a dict in models with rotary positions; None in others, and then not saved."""
    for fields in ({}, {"layer_types": ROTATING["layer_types"]}, {"max_position_embeddings": None}, {"is_causal": False}):
        config = small_config(**fields)
        assert config.rope_parameters is None and "rope_parameters" not in config.to_dict()
        assert config == small_config(**fields)
    config = small_config(**ROTATING)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert config == small_config(**ROTATING) != small_config(**ROTATING, rope_parameters={"rope_theta": 5e5})
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    model = ToSTModel(config).eval()
    config.rope_parameters = config.rope_parameters | {"factor": 1.0}
    tokens, places = torch.arange(1, 7)[None], torch.arange(1, 7)[None]
    halved = model(tokens, position_ids=places).last_hidden_state
    config.rope_parameters = config.rope_parameters | {"factor": 2.0}
    torch.testing.assert_close(model(tokens, position_ids=2 * places).last_hidden_state, halved)
    loaded = AutoConfig.for_model(**config.to_dict())
    assert loaded.rope_parameters == config.rope_parameters and loaded.options()["rope_parameters"]["factor"] == 2.0
    older = small_config(**ROTATING, rope_theta=300.0)  # as configurations before transformers 5 give it
    assert older.rope_parameters["rope_theta"] == 300.0
