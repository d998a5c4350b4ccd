"""Configurations from damaged or hostile files: rejected with a message, no code run, no memory allocated."""

import json
import math

import pytest
from conftest import small_config, small_vision_config
from transformers import AutoConfig


BASE = {"tost": small_config(), "tost_vision": small_vision_config()}


def load_changed(folder, model_type, fields):
    """The configuration that `AutoConfig` reads from a file with other fields."""
    (folder / "config.json").write_text(json.dumps(BASE[model_type].to_dict() | fields))
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


OF_BOTH = [
    ({"hidden_size": "wide"}, "'hidden_size' expected int, got str"),
    ({"hidden_size": None}, "'hidden_size' expected int, got NoneType"),
    ({"hidden_size": 1e3}, "'hidden_size' expected int, got float"),
    ({"hidden_size": 10**12}, "hidden_size must be at most 1,048,576"),
    ({"hidden_act": []}, "'hidden_act' expected str, got list"),
    ({"hidden_act": "__import__"}, "hidden_act '__import__' is not an activation"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 1,024, got 1000000000000"),
    ({"num_labels": 10**12, "id2label": None}, "num_labels must be a whole number from 0 to 1,048,576, got 1000000000000"),
    ({"num_labels": "many"}, "num_labels must be a whole number from 0 to 1,048,576, got 'many'"),
    ({"num_labels": -1}, "num_labels must be a whole number"),
    ({"id2label": {"zero": "cat"}}, "id2label must name labels by number"),
    ({"id2label": ["cat"]}, "id2label must be a dict"),
    ({"layer_norm_eps": math.nan}, "layer_norm_eps must be above 0, got nan"),
    ({"layer_norm_eps": math.inf}, "layer_norm_eps must be a finite number"),
    ({"layer_norm_eps": 10**400}, "layer_norm_eps must be a finite number"),
    ({"layer_scale_init_value": math.nan}, "layer_scale_init_value must be a finite number"),
    ({"initializer_range": math.nan}, "initializer_range must be a finite number"),
    ({"hidden_dropout": math.nan}, "hidden_dropout must be at least 0 and below 1, got nan"),
    ({"to_dict": 5}, "'to_dict' is not a field of a configuration but the name of a method"),
    ({"__class__": "os.system"}, "'__class__' is not a field"),
    ({"attn_implementation": "stranger/kernel"}, "attn_implementation is 'stranger/kernel', code on the Hub"),
    ({"_attn_implementation": "stranger/kernel"}, "_attn_implementation is 'stranger/kernel', code on the Hub"),
    ({"attn_implementation": 5}, "attn_implementation must be a str, got 5"),
    ({"text_config": {}}, "text_config belongs to models composed of several"),
    ({"architectures": 5}, "architectures must be a list, got 5"),
    ({"architectures": [5]}, "architectures must be names of classes"),
    ({"dtype": "nn"}, "dtype must be one of floating-point numbers, such as 'float32', got 'nn'"),
    ({"dtype": "int8"}, "dtype must be one of floating-point numbers"),
    ({"dtype": None, "torch_dtype": 7}, "torch_dtype must be a str, got 7"),
]
OF_ONE = [
    ("tost", {"bos_token_id": -1}, "bos_token_id must not be negative, got -1; write null for none"),
    ("tost", {"eos_token_id": [3, -2]}, r"eos_token_id must not be negative, got \[3, -2\]"),
    ("tost", {"pad_token_id": "pad"}, "Field 'pad_token_id' expected int, got str"),
    ("tost", {"vocab_size": 2**31}, "vocab_size must be at most 2,147,483,647"),
    ("tost", {"max_position_embeddings": 10**15}, "max_position_embeddings must be at most 2,147,483,647"),
    ("tost", {"n_layer": "2"}, "'num_hidden_layers' expected int, got str"),
    ("tost", {"n_layer": 10**12}, "num_hidden_layers must be at most 1,024"),
    ("tost", {"layer_types": ["linear_attention"]}, "layer_types must hold tost_causal_statistics"),
    ("tost_vision", {"image_size": 0}, "image_size must be one side, or height and width, from 1 to 65,536"),
    ("tost_vision", {"image_size": 10**9}, "image_size must be one side"),
    ("tost_vision", {"image_size": []}, "image_size must be one side"),
    ("tost_vision", {"image_size": [16, 16, 16]}, "image_size must be one side"),
    ("tost_vision", {"image_size": ["a"]}, "image_size"),
    ("tost_vision", {"num_channels": 10**6}, "num_channels must be at most 1,024"),
    ("tost_vision", {"initializer_factor": math.inf}, "initializer_factor must be a finite number"),
]
REJECTED = [(model_type, *case) for case in OF_BOTH for model_type in BASE] + OF_ONE


@pytest.mark.parametrize(
    "model_type, fields, message", REJECTED, ids=[f"{case[0]}-{next(iter(case[1]))}" for case in REJECTED]
)
def test_rejected_with_a_message(model_type, fields, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        load_changed(tmp_path, model_type, fields)
    assert type(caught.value) is ValueError and "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "model_type, fields",
    [
        ("tost", {"bos_token_id": None, "eos_token_id": [1, 2], "unknown": {"nested": [1]}}),
        ("tost", {"n_embd": 64, "n_head": 2}),
        ("tost", {"num_labels": 3, "id2label": None}),
        ("tost_vision", {"image_size": [32, 64]}),
        ("tost_vision", {"id2label": {"0": "日本", "1": "<b>"}, "label2id": {"日本": 0, "<b>": 1}}),
    ],
)
def test_unusual_but_right(model_type, fields, tmp_path):
    loaded = load_changed(tmp_path, model_type, fields)
    loaded.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.to_dict()
    for name in fields.keys() - {"id2label", "num_labels"}:
        assert getattr(loaded, name) == fields[name]
