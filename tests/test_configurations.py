"""Configurations: invalid values are rejected with the field's name; unusual values and copies preserve every field."""

import copy
import dataclasses
import json
import math
import pickle

import pytest
from conftest import small_config, small_vision_config
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, PreTrainedConfig

from tost_hf import ToSTConfig, ToSTModel, ToSTVisionConfig
from tost_hf.model.configuration_tost import PRESETS
from tost_hf.model.configuration_tost_vision import VISION_PRESETS


TSSA, FULL, SLIDING = "tssa", "full_attention", "sliding_attention"
HYBRID = {"layer_types": [TSSA, FULL], "position_embedding_type": "none"}
BASE = {"tost": small_config(), "tost_vision": small_vision_config()}


def load_changed(folder, model_type, fields):
    """The configuration that `AutoConfig` reads from a file with other fields."""
    (folder / "config.json").write_text(json.dumps(BASE[model_type].to_dict() | fields))
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


INVALID_FIELDS = [  # of both model types; the error message contains the field's name
    *({"hidden_size": value} for value in ("wide", None, -8, 1e3)),
    {"hidden_act": "__import__"},
    *({"num_hidden_layers": value} for value in (-1, 2.5)),
    *({"num_attention_heads": value} for value in (0, 5)),
    {"intermediate_size": -4},
    {"mlp_type": "ista"},
    {"normalize_scores": False},
    {"pre_norm": False},
    {"layer_norm_eps": 0.0},
    {"initializer_range": -1.0},
    {"hidden_dropout": 1.5},
    {"attention_dropout": -0.1},
]
INVALID_FIELDS_OF_ONE = [
    ("tost", {"bos_token_id": -1}),
    ("tost", {"eos_token_id": [3, -2]}),
    ("tost", {"pad_token_id": "pad"}),
    ("tost", {"vocab_size": 0}),
    *(("tost", {"max_position_embeddings": value}) for value in (0, 3.5, math.nan, "8")),
    ("tost", {"decay_type": "always"}),
    ("tost", {"conv_kernel": 1}),
    ("tost", {"layer_types": ["conv", FULL]}),
    *(("tost", {"layer_types": [TSSA] * number}) for number in (1, 3)),
    ("tost", {"layer_types": [FULL] * 2}),
    ("tost", {"sliding_window": 1, "layer_types": [SLIDING, TSSA]}),
    ("tost", {"num_key_value_heads": 3, "layer_types": [FULL, TSSA]}),
    ("tost", {"rope_parameters": {"rope_theta": 5e4}}),
    ("tost", {"rope_parameters": {"rope_type": "yarn"}} | HYBRID),
    ("tost", {"pooling": "first"}),
    ("tost", {"pooling": "max"}),
    ("tost", {"conv_kernel": 4, "is_causal": False}),
    ("tost", {"decay_type": "head", "is_causal": False}),
    ("tost", {"layer_types": [TSSA, FULL], "is_causal": False}),
    *(("tost_vision", {"image_size": value}) for value in (0, [16, 16, 16], "large")),
    *(("tost_vision", {"patch_size": value}) for value in ("16", 12)),
    ("tost_vision", {"hidden_size": 36, "patch_size": 16}),
    ("tost_vision", {"attention_type": "linear"}),
    ("tost_vision", {"num_class_attention_layers": 0}),
    ("tost_vision", {"drop_path_rate": 1.0}),
    ("tost_vision", {"out_features": []}),
]
REJECTED = [(model_type, fields) for fields in INVALID_FIELDS for model_type in BASE] + INVALID_FIELDS_OF_ONE


@pytest.mark.parametrize("model_type, fields", REJECTED, ids=[f"{case[0]}-{next(iter(case[1]))}" for case in REJECTED])
def test_invalid_fields_are_rejected(model_type, fields, tmp_path):
    with pytest.raises((ValueError, KeyError, StrictDataclassFieldValidationError), match=next(iter(fields))):
        load_changed(tmp_path, model_type, fields)


def test_invalid_arguments_are_rejected():
    for config_class in (ToSTConfig, ToSTVisionConfig):
        with pytest.raises(StrictDataclassFieldValidationError, match="hidden_size"):
            config_class(hidden_size="768")
        with pytest.raises(ValueError, match="preset"):
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
def test_unusual_values_are_accepted(model_type, fields, tmp_path):
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
    # `dataclasses` reads every field, but only models with rotary positions have this one
    rope = {"rope_parameters": getattr(config, "rope_parameters", None)} if isinstance(config, ToSTConfig) else {}
    clones = (
        dataclasses.replace(config, **rope),
        copy.copy(config),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
    )
    for clone in clones:
        assert clone == config and clone.to_dict() == config.to_dict()
    clones = [type(config).from_dict(fields) for fields in (config.to_dict(), config.to_diff_dict())]
    config.save_pretrained(tmp_path)
    for clone in (*clones, AutoConfig.from_pretrained(tmp_path)):
        assert clone.to_diff_dict() == config.to_diff_dict()
    wider = dataclasses.replace(config, hidden_size=2 * config.hidden_size, **rope)
    assert wider.hidden_size == 2 * config.hidden_size and wider.to_diff_dict() == config.to_diff_dict() | {
        "hidden_size": wider.hidden_size
    }


def test_loading_with_other_fields(tmp_path):
    """Fields that depend on them are derived, and all are validated, as if the file had them."""
    small_config(layer_types=[TSSA, FULL]).save_pretrained(tmp_path)
    config = ToSTConfig.from_pretrained(tmp_path, position_embedding_type="none", num_hidden_layers=3)
    assert config.layer_types == [TSSA, FULL, TSSA] and config.rope_parameters["rope_type"] == "default"
    config.save_pretrained(tmp_path)
    for fields, name in (
        ({"n_head": 5}, "num_attention_heads"),
        ({"position_embedding_type": "sine"}, "_type"),
    ):
        with pytest.raises(ValueError, match=name):
            AutoConfig.from_pretrained(tmp_path, **fields)
    _, unused = ToSTConfig.from_pretrained(tmp_path, hidden_size=64, dtype="auto", nonsense=1, return_unused_kwargs=True)
    assert unused == {"nonsense": 1}


ROPE = {"rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "fields, length",
    [
        ({}, 8192),
        ({"layer_types": [TSSA, FULL]}, 8192),
        ({"layer_types": [TSSA, FULL], "rope_parameters": ROPE | {"rope_type": "yarn"}}, 256),
        ({"layer_types": [TSSA, FULL], "rope_parameters": ROPE | {"rope_type": "dynamic"}}, 64),
    ],
)
def test_null_in_files_of_earlier_versions(fields, length, tmp_path):
    """There it stood for a model without position tables; scaled rotary positions had their length elsewhere."""
    config = load_changed(tmp_path, "tost", fields | {"max_position_embeddings": None})
    assert config.position_embedding_type == "none" and config.max_position_embeddings == config.n_positions == length
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["max_position_embeddings"] == length and saved["position_embedding_type"] == "none"
    assert AutoConfig.from_pretrained(tmp_path) == config
    assert small_config(**fields | {"n_positions": None}).to_diff_dict() == config.to_diff_dict()
    assert "position_embedding_type" not in small_config().to_dict()
    config.max_position_embeddings = None
    with pytest.raises(ValueError, match="max_position_embeddings must be an integer"):
        ToSTModel(config)


def test_files_of_earlier_versions_with_other_fields(tmp_path):
    """Fields given in loading take precedence, whatever their names in the file are, and change nothing else."""
    old_fields = {"max_position_embeddings": None, "forgetting": "token"}
    assert load_changed(tmp_path, "tost", old_fields).decay_type == "token"
    config = AutoConfig.from_pretrained(tmp_path, max_position_embeddings=100_000, decay_type="head")
    assert (config.max_position_embeddings, config.position_embedding_type) == (100_000, "none")
    assert config.decay_type == config.forgetting == "head"
    config = AutoConfig.from_pretrained(tmp_path, n_positions=64, position_embedding_type="learned", forgetting="none")
    assert (config.n_positions, config.position_embedding_type, config.decay_type) == (64, "learned", "none")


@pytest.mark.parametrize("preset", [*PRESETS, *VISION_PRESETS])
def test_saved_configuration_is_valid_without_this_package(preset, tmp_path):
    """Tokenizers of a folder, and Trainer when it resumes, read its `config.json` as a `PreTrainedConfig`."""
    config_class = ToSTVisionConfig if preset in VISION_PRESETS else ToSTConfig
    config = config_class.from_preset(preset)
    config.save_pretrained(tmp_path)
    plain = PreTrainedConfig.from_pretrained(tmp_path)
    assert plain.num_hidden_layers == config.num_hidden_layers and plain.model_type == config.model_type


@pytest.mark.parametrize("model_type", BASE)
def test_dropout_aliases(model_type, tmp_path):
    aliases = {"resid_pdrop": 0.1, "attention_probs_dropout_prob": 0.2, "embd_pdrop": 0.3}
    config = load_changed(tmp_path, model_type, aliases)
    assert (config.hidden_dropout, config.attention_dropout, config.embedding_dropout) == (0.1, 0.2, 0.3)
    config.save_pretrained(tmp_path)
    assert not aliases.keys() & json.loads((tmp_path / "config.json").read_text()).keys()
    assert type(config).from_pretrained(tmp_path, embd_pdrop=0.5).embedding_dropout == 0.5


def test_computed_fields_are_filled_but_not_saved(tmp_path):
    """Their values follow from other fields of the file, also from overridden ones."""
    ToSTConfig().save_pretrained(tmp_path)
    config = ToSTConfig.from_pretrained(tmp_path, num_attention_heads=6, num_hidden_layers=3, is_causal=False)
    assert (config.num_key_value_heads, config.layer_types, config.pooling, config.use_cache) == (6, [TSSA] * 3, "mean", False)
    assert not {"num_key_value_heads", "layer_types"} & config.to_dict().keys() and "pooling" not in ToSTConfig().to_dict()
    config = small_config(**HYBRID)
    config.num_hidden_layers = 1
    assert len(ToSTModel(config).layers) == 1
    config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="names 2 of 3"):
        ToSTModel(config)
    assert ToSTConfig(num_key_value_heads=3, pooling="mean").options() == {"num_key_value_heads": 3, "pooling": "mean"}


def test_layer_types_of_earlier_versions_load(tmp_path):
    loaded = load_changed(tmp_path, "tost", {"layer_types": [TSSA, FULL]})
    assert loaded.layer_types == [TSSA, FULL] == small_config(layer_types=["linear_attention", FULL]).layer_types
    loaded.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["layer_types"] == ["linear_attention", FULL]
