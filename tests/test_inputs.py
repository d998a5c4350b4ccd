"""Bad input to language models and their configurations: errors with a message that says what was wrong."""

import shutil

import pytest
import torch
from conftest import small_config
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import DynamicCache, GPT2Config

from tost_hf import (
    ToSTConfig,
    ToSTForCausalLM,
    ToSTModel,
)


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler (g++)")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def ids(*shape):
    return torch.randint(2, 97, shape)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_attention_heads": 5}, "multiple of num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({"hidden_size": -8}, "hidden_size must be at least 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be at least 1"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"intermediate_size": -4}, "intermediate_size must be at least 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be at least 1"),
        ({"hidden_dropout": 1.5}, "hidden_dropout"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps"),
        ({"initializer_range": -1.0}, "initializer_range"),
        ({"hidden_act": "nonsense"}, "hidden_act 'nonsense'"),
        ({"hidden_size": "768"}, "hidden_size"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
    ],
)
def test_impossible_configurations(fields, message):
    wrong_type = isinstance(fields.get("hidden_size"), str) or fields.get("num_hidden_layers") == 2.5
    with pytest.raises(StrictDataclassFieldValidationError if wrong_type else ValueError, match=message):
        ToSTConfig(**fields)


def test_unknown_preset():
    with pytest.raises(ValueError, match="no preset 'tost-huge'; choose one of tost-base"):
        ToSTConfig.from_preset("tost-huge")


def other_cache(**changes):
    config = small_config(**({"num_hidden_layers": 3} | changes))
    return ToSTModel(config)(ids(1, 3)).past_key_values


def foreign_cache():
    cache = DynamicCache()
    cache.update(torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8), 0)
    return cache


@pytest.mark.parametrize(
    "inputs, error, message",
    [
        (lambda: {}, ValueError, "exactly one"),
        (lambda: {"input_ids": ids(1, 3), "inputs_embeds": torch.zeros(1, 3, 32)}, ValueError, "exactly one"),
        (lambda: {"input_ids": torch.tensor([[3, 97]])}, IndexError, "between 0 and 96"),
        (lambda: {"input_ids": torch.tensor([[3, -1]])}, IndexError, "between 0 and 96"),
        (lambda: {"input_ids": torch.rand(1, 3)}, ValueError, "integers"),
        (lambda: {"input_ids": ids(1, 3).bool()}, ValueError, "integers.* got torch.bool"),
        (lambda: {"input_ids": ids(1, 3).to(torch.uint8)}, ValueError, "integers.* got torch.uint8"),
        (lambda: {"input_ids": ids(3)}, ValueError, r"shape \(batch, tokens\)"),
        (lambda: {"input_ids": ids(0, 3)}, ValueError, "empty"),
        (lambda: {"input_ids": ids(2, 0)}, ValueError, "empty"),
        (lambda: {"inputs_embeds": torch.zeros(1, 3, 31)}, ValueError, "inputs_embeds must have shape"),
        (lambda: {"input_ids": ids(2, 3), "attention_mask": torch.ones(2, 4)}, ValueError, r"must have shape \(2, 3\)"),
        (lambda: {"input_ids": ids(2, 3), "attention_mask": torch.ones(1, 3)}, ValueError, r"must have shape \(2, 3\)"),
        (lambda: {"input_ids": ids(1, 3), "attention_mask": torch.ones(1, 1, 3, 3)}, ValueError, "no token-by-token"),
        (lambda: {"input_ids": ids(1, 3), "attention_mask": torch.tensor([[1, 1, 2]])}, ValueError, "must hold 1"),
        (lambda: {"input_ids": ids(1, 3), "position_ids": torch.arange(4)[None]}, ValueError, "position_ids must have"),
        (lambda: {"input_ids": ids(1, 4), "position_ids": torch.tensor([[0, 1, 1, 2]])}, ValueError, "fall or repeat"),
        (lambda: {"input_ids": ids(1, 3), "past_key_values": ((1, 2),)}, TypeError, "must be a transformers Cache"),
        (lambda: {"input_ids": ids(1, 3), "past_key_values": foreign_cache()}, ValueError, "another kind of model"),
        (lambda: {"input_ids": ids(1, 3), "past_key_values": other_cache(num_hidden_layers=2)}, ValueError, "2 layers"),
        (lambda: {"input_ids": ids(1, 3), "past_key_values": other_cache(num_attention_heads=8)}, ValueError, "heads"),
        (lambda: {"input_ids": ids(2, 3), "past_key_values": other_cache()}, ValueError, "holds 1 sequences"),
        (
            lambda: {"input_ids": ids(1, 3), "past_key_values": other_cache(), "attention_mask": torch.ones(1, 3)},
            ValueError,
            "covers the cached tokens",
        ),
        (
            lambda: {"input_ids": ids(1, 3), "past_key_values": other_cache(), "attention_mask": torch.ones(1, 5)},
            ValueError,
            "cached tokens",
        ),
        (
            lambda: {
                "input_ids": ids(1, 4),
                "past_key_values": other_cache(),
                "position_ids": torch.tensor([[0, 1, 0, 1]]),
            },
            ValueError,
            "cannot be combined with a cache",
        ),
        (
            lambda: {"input_ids": ids(1, 4), "seq_idx": torch.tensor([[0, 0, 1, 1]]), "position_ids": torch.arange(4)[None]},
            ValueError,
            "do not restart at 0",
        ),
        (
            lambda: {
                "input_ids": ids(1, 4),
                "seq_idx": torch.tensor([[0, 0, 1, 1]]),
                "cu_seq_lens_q": torch.tensor([0, 3, 4]),
            },
            ValueError,
            "begin their sequences at different tokens",
        ),
        (lambda: {"input_ids": ids(2, 4), "cu_seq_lens_q": torch.tensor([0, 2, 4])}, ValueError, "batch of size 1"),
        (lambda: {"input_ids": ids(1, 4), "cu_seq_lens_q": torch.tensor([0, 2, 5])}, ValueError, "must rise from 0"),
        (lambda: {"input_ids": ids(1, 4), "cu_seq_lens_q": torch.tensor([[0, 2, 4]])}, ValueError, "must rise from 0"),
        (lambda: {"input_ids": ids(1, 4), "cu_seq_lens_q": [0, 2, 4]}, TypeError, "cu_seq_lens_q must be a tensor, got list"),
        (lambda: {"input_ids": ids(1, 4), "seq_idx": [[0, 0, 1, 1]]}, TypeError, "seq_idx must be a tensor, got list"),
        (lambda: {"input_ids": ids(1, 4), "seq_idx": torch.tensor([[0, 0, 1]])}, ValueError, "seq_idx must have shape"),
        (lambda: {"input_ids": ids(1, 4), "seq_idx": torch.full((1, 4), float("nan"))}, ValueError, "must hold integers"),
        (lambda: {"input_ids": ids(1, 4), "cu_seq_lens_q": torch.tensor([0, 2.5, 4])}, ValueError, "must hold integers"),
        (lambda: {"input_ids": ids(1, 3), "position_ids": torch.rand(1, 3)}, ValueError, "must hold integers"),
        (
            lambda: {
                "input_ids": ids(1, 5),
                "attention_mask": torch.tensor([[0, 1, 1, 1, 1]]),
                "position_ids": torch.tensor([[0, 0, 3, 2, 4]]),
            },
            ValueError,
            "fall or repeat",
        ),
        (
            lambda: {"input_ids": ids(1, 2), "past_key_values": other_cache(), "position_ids": torch.arange(2)[None]},
            ValueError,
            "start at 0, but the cache holds 3 tokens",
        ),
        (
            lambda: {
                "input_ids": ids(1, 2),
                "past_key_values": other_cache(),
                "position_ids": torch.arange(2)[None],
                "attention_mask": torch.tensor([[0, 0, 1, 1, 1]]),
            },
            ValueError,
            "start at 0, but the cache holds 3 tokens",
        ),
        (
            lambda: {"input_ids": ids(1, 3), "attention_mask": torch.tensor([[0.0, 0.0, float("-inf")]])},
            ValueError,
            "must hold 1",
        ),
    ],
)
def test_bad_model_input(tiny_model, inputs, error, message):
    with pytest.raises(error, match=message):
        tiny_model(**inputs())


def test_models_reject_a_width_of_zero():
    for name in ("hidden_size", "intermediate_size"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            ToSTModel(ToSTConfig(**{name: 0}))


def test_models_reject_another_models_config():
    with pytest.raises(ValueError, match=r"ToSTForCausalLM needs a ToSTConfig .*, got a GPT2Config"):
        ToSTForCausalLM(GPT2Config())
