"""Impossible configurations, from damaged or hostile files too: rejected with a message, no code run, no memory allocated."""

import copy
import dataclasses
import json
import math
import pickle

import pytest
from conftest import small_config, small_vision_config
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig

from tost_hf import ToSTConfig, ToSTVisionConfig


TSSA, FULL, SLIDING = "tost_causal_statistics", "full_attention", "sliding_attention"
ROTATING = {"layer_types": [TSSA, FULL], "max_position_embeddings": None}
BASE = {"tost": small_config(), "tost_vision": small_vision_config()}


def load_changed(folder, model_type, fields):
    """The configuration that `AutoConfig` reads from a file with other fields."""
    (folder / "config.json").write_text(json.dumps(BASE[model_type].to_dict() | fields))
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


OF_BOTH = [
    ({"hidden_size": "wide"}, "'hidden_size' expected int, got str"),
    ({"hidden_size": None}, "'hidden_size' expected int, got NoneType"),
    ({"hidden_size": -8}, "hidden_size must be at least 0"),
    ({"hidden_size": 1e3}, "'hidden_size' expected int, got float"),
    ({"hidden_size": 10**12}, "hidden_size must be at most 1,048,576"),
    ({"hidden_act": []}, "'hidden_act' expected str, got list"),
    ({"hidden_act": "__import__"}, "hidden_act '__import__' is not an activation"),
    ({"num_hidden_layers": -1}, "num_hidden_layers must be at least 1"),
    ({"num_hidden_layers": 2.5}, "'num_hidden_layers' expected int, got float"),
    ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
    ({"num_attention_heads": 5}, "multiple of num_attention_heads"),
    ({"intermediate_size": -4}, "intermediate_size must be at least 0"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 1,024, got 1000000000000"),
    ({"num_labels": 10**12, "id2label": None}, "num_labels must be a whole number from 0 to 1,048,576, got 1000000000000"),
    ({"num_labels": "many"}, "num_labels must be a whole number from 0 to 1,048,576, got 'many'"),
    ({"num_labels": -1}, "num_labels must be a whole number"),
    ({"id2label": {"zero": "cat"}}, "id2label must name labels by number"),
    ({"id2label": ["cat"]}, "id2label must be a dict"),
    ({"mlp_type": "swiglu"}, "mlp_type must be one of mlp, ista, got 'swiglu'"),
    ({"ista_step_size": 0}, "ista_step_size must be above 0"),
    ({"ista_step_size": math.nan}, "ista_step_size must be above 0"),
    ({"ista_threshold": -1.0}, "ista_threshold must not be negative"),
    ({"ista_threshold": math.inf}, "ista_threshold must be a finite number"),
    ({"layer_norm_eps": 0.0}, "layer_norm_eps must be above 0, got 0"),
    ({"layer_norm_eps": math.nan}, "layer_norm_eps must be above 0, got nan"),
    ({"layer_norm_eps": math.inf}, "layer_norm_eps must be a finite number"),
    ({"layer_norm_eps": 10**400}, "layer_norm_eps must be a finite number"),
    ({"layer_scale_init_value": math.nan}, "layer_scale_init_value must be a finite number"),
    ({"initializer_range": math.nan}, "initializer_range must be a finite number"),
    ({"initializer_range": -1.0}, "initializer_range must not be negative"),
    ({"hidden_dropout": 1.5}, "hidden_dropout must be at least 0 and below 1"),
    ({"attention_dropout": -0.1}, "attention_dropout must be at least 0 and below 1"),
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
    ("tost", {"vocab_size": 0}, "vocab_size must be at least 1"),
    ("tost", {"vocab_size": 2**31}, "vocab_size must be at most 2,147,483,647"),
    ("tost", {"max_position_embeddings": 0}, "max_position_embeddings must be at least 1"),
    ("tost", {"max_position_embeddings": 10**15}, "max_position_embeddings must be at most 2,147,483,647"),
    ("tost", {"n_layer": "2"}, "'num_hidden_layers' expected int, got str"),
    ("tost", {"n_layer": 10**12}, "num_hidden_layers must be at most 1,024"),
    ("tost", {"forgetting": "always"}, "forgetting must be one of none, head, token, got 'always'"),
    ("tost", {"conv_kernel": 1}, "conv_kernel must be from 2 to 64"),
    ("tost", {"conv_kernel": 65}, "conv_kernel must be from 2 to 64"),
    ("tost", {"layer_types": ["linear_attention"]}, "layer_types must hold .* nothing else, got 'linear_attention'"),
    ("tost", {"layer_types": [TSSA]}, "layer_types must name every layer: it names 1 of 2"),
    ("tost", {"layer_types": [FULL] * 2}, "at least once"),
    ("tost", {"layer_types": [SLIDING, TSSA]}, "sliding_window of at least 2 tokens"),
    ("tost", {"layer_types": [SLIDING, TSSA], "sliding_window": 1}, "sliding_window of at least 2 tokens"),
    ("tost", {"layer_types": [FULL, TSSA], "num_key_value_heads": 3}, "divide num_attention_heads"),
    ("tost", {"rope_parameters": {"rope_theta": 1e4}}, "for attention layers of position-free models"),
    ("tost", ROTATING | {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'default' or 'linear'"),
    ("tost", ROTATING | {"hidden_size": 20}, "even width of heads, got 5"),
    ("tost", {"pooling": "first"}, "pooling='first' needs is_causal=False"),
    ("tost", {"pooling": "max"}, "pooling must be one of mean, first, last"),
    ("tost", {"is_causal": False, "conv_kernel": 4}, "conv_kernel is for causal models"),
    ("tost", {"is_causal": False, "forgetting": "head"}, "forgetting is for causal models"),
    ("tost", {"is_causal": False, "layer_types": [TSSA, FULL]}, "layer_types is for causal models"),
    ("tost_vision", {"image_size": 0}, "image_size must be one side, or height and width, from 1 to 65,536"),
    ("tost_vision", {"image_size": 10**9}, "image_size must be one side"),
    ("tost_vision", {"image_size": []}, "image_size must be one side"),
    ("tost_vision", {"image_size": [16, 16, 16]}, "image_size must be one side"),
    ("tost_vision", {"image_size": ["a"]}, "image_size"),
    ("tost_vision", {"image_size": "large"}, "image_size"),
    ("tost_vision", {"patch_size": "16"}, "'patch_size' expected int, got str"),
    ("tost_vision", {"patch_size": 12}, "patch_size must be a power of two from 2 to 32, got 12"),
    ("tost_vision", {"patch_size": 64}, "patch_size must be a power of two"),
    ("tost_vision", {"hidden_size": 36, "patch_size": 16}, r"hidden_size \(36\) must be a multiple of half the patch_size"),
    ("tost_vision", {"attention_type": "linear"}, "attention_type must be one of tssa, xca, softmax, got 'linear'"),
    ("tost_vision", {"attention_type": "xca", "normalize_scores": False}, "is for TSSA; attention_type 'xca'"),
    ("tost_vision", {"num_class_attention_layers": 0}, "num_class_attention_layers must be at least 1"),
    ("tost_vision", {"drop_path_rate": 1.0}, "drop_path_rate must be at least 0 and below 1"),
    ("tost_vision", {"out_features": ["stage3"]}, "subset of stage_names"),
    ("tost_vision", {"out_features": ["stage2", "stem"]}, "same order as stage_names"),
    ("tost_vision", {"out_features": []}, "at least one of stage_names"),
    ("tost_vision", {"out_indices": []}, "at least one of stage_names"),
    ("tost_vision", {"out_indices": [3]}, "valid indices for stage_names"),
    ("tost_vision", {"out_indices": [1], "out_features": ["stage2"]}, "same stages"),
    ("tost_vision", {"_out_features": ["nonsense"]}, "subset of stage_names"),
    ("tost_vision", {"stage_names": ["stem"]}, "stage_names follows from other fields"),
    ("tost_vision", {"num_channels": 0}, "num_channels must be at least 1"),
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


def test_rejected_without_a_file():
    for config_class in (ToSTConfig, ToSTVisionConfig):
        with pytest.raises(StrictDataclassFieldValidationError, match="hidden_size"):
            config_class(hidden_size="768")
        with pytest.raises(ValueError, match=r"hidden_dropout must be at least 0 and below 1, got 1\.5"):
            config_class(hidden_dropout=1.5)
        with pytest.raises(ValueError, match=r"no (vision )?preset 'tost-huge'; choose one of tost-"):
            config_class.from_preset("tost-huge")


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


@pytest.mark.parametrize(
    "config",
    [
        ToSTConfig(),
        ToSTConfig(is_causal=False),
        ToSTConfig.from_preset("tost-plus-base"),
        ToSTConfig.from_preset("tost-hybrid-base", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
        ToSTVisionConfig(),
        ToSTVisionConfig(image_size=(32, 64), out_features=["stem", "stage3"], num_labels=10),
    ],
    ids=["text", "encoder", "plus", "hybrid", "vision", "backbone"],
)
def test_copies(config, tmp_path):
    """By `dataclasses`, `copy`, `pickle`, dicts and files."""
    for twin in (dataclasses.replace(config), copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config and twin.to_dict() == config.to_dict()
    twins = [type(config).from_dict(fields) for fields in (config.to_dict(), config.to_diff_dict())]
    config.save_pretrained(tmp_path)
    for twin in (*twins, AutoConfig.from_pretrained(tmp_path)):
        assert twin.to_diff_dict() == config.to_diff_dict()
    wider = dataclasses.replace(config, hidden_size=2 * config.hidden_size)
    assert wider.hidden_size == 2 * config.hidden_size and wider.to_diff_dict() == config.to_diff_dict() | {
        "hidden_size": wider.hidden_size
    }
