"""Hybrid models: softmax attention layers among TSSA layers, with their caches, masks and rotary positions."""

import dataclasses

import pytest
import torch
from test_options import F64, FULL, HYBRIDS, OPTIONS, TSSA, build, four_layers, name_options

from tost_hf import (
    ToSTCache,
    ToSTConfig,
    ToSTForCausalLM,
    save_cache,
)
from tost_hf.cache_files import state_bytes
from tost_hf.model.modeling_tost import rotary_embedding


@pytest.fixture(params=HYBRIDS, ids=name_options)
def model(request):
    return build(request.param)


@pytest.fixture
def tokens():
    return torch.randint(2, 97, (2, 23))


@torch.no_grad()
def test_repeated_sequence_numbers():
    model = build(["conv", "hybrid", "token"])
    tokens, seq_idx = torch.randint(2, 97, (1, 6)), torch.tensor([[0, 0, 1, 1, 0, 0]])
    alone = torch.cat([model(piece).logits for piece in tokens.split(2, 1)], 1)
    torch.testing.assert_close(model(tokens, seq_idx=seq_idx).logits, alone, **F64)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)])
@torch.no_grad()
def test_attention_implementations_agree(model, tokens, implementation):
    if implementation == "flex_attention" and FULL not in model.config.layer_types:
        pytest.skip("compiled for one model")
    model = model.float()
    mask = torch.ones_like(tokens)
    mask[1, [0, 1, 2, 9]] = 0
    expected = [model(tokens, attention_mask=mask).logits, model(tokens, seq_idx=tokens.gt(40).long()).logits]
    model.set_attn_implementation(implementation)
    assert all(layer.self_attn.config._attn_implementation == implementation for layer in model.model.layers if layer.attends)
    got = [model(tokens, attention_mask=mask).logits, model(tokens, seq_idx=tokens.gt(40).long()).logits]
    torch.testing.assert_close(got[0][mask == 1], expected[0][mask == 1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-4)


def test_ambiguous_sliding_windows_are_rejected(tokens):
    model = build(["sliding"])
    cache = model(tokens).past_key_values
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, 20] = 0
    with pytest.raises(ValueError, match="padding between real tokens"):
        model(tokens[:, :1], attention_mask=mask, past_key_values=cache)
    positions = torch.full((2, 1), 23)
    with pytest.raises(ValueError, match="covers the cached tokens"):
        model(tokens[:, :1], attention_mask=torch.tensor([[1], [0]]), position_ids=positions, past_key_values=cache)
    with pytest.raises(ValueError, match="StaticCache"):
        ToSTCache(model.config, static=True)
    with pytest.raises(ValueError, match="its layers are"):
        build(["mixed"])(tokens, past_key_values=cache)


def test_default_layer_types_follow_num_hidden_layers():
    config = ToSTConfig(layer_types=[TSSA] * 12)
    config.num_hidden_layers = 3
    assert config.layer_types == [TSSA] * 3 and "layer_types" not in config.to_dict()


def test_default_key_value_heads_follow_num_attention_heads(tmp_path):
    """A number whenever it is read, which vLLM does; files are written as they were."""
    ToSTConfig().save_pretrained(tmp_path)
    config = ToSTConfig.from_pretrained(tmp_path, num_attention_heads=6)
    assert config.num_key_value_heads == 6 and "num_key_value_heads" not in config.to_dict()
    config.num_key_value_heads = 3
    assert config.to_dict()["num_key_value_heads"] == 3
    config.num_key_value_heads = None
    assert config.num_key_value_heads == 6
    for causal in (True, False):
        config = ToSTConfig(is_causal=causal)
        assert dataclasses.replace(config, vocab_size=97).to_dict() == config.to_dict() | {"vocab_size": 97}


def test_rotary_positions_keep_their_precision():
    model = ToSTForCausalLM(four_layers(**OPTIONS["rope"]))
    assert model.config.rope_parameters == {"rope_theta": 10_000.0, "rope_type": "default"}
    position_ids = torch.tensor([[0, 1, 1000]])
    exact = torch.cat([position_ids[..., None].double() / 1e4 ** (torch.arange(0, 8, 2).double() / 8)] * 2, -1)
    for dtype, tolerance in ((torch.float64, 1e-4), (torch.bfloat16, 4e-3)):  # angles in bfloat16 would be off by radians
        cos, sin = rotary_embedding(model.config, torch.zeros((), dtype=dtype), position_ids)
        assert (
            cos.dtype == dtype and (cos - exact.cos()).abs().max() < tolerance and (sin - exact.sin()).abs().max() < tolerance
        )


def test_attentions_are_those_of_the_softmax_layers(model, tokens):
    assert model(tokens).attentions is None
    model.set_attn_implementation("eager")
    attentions = model(tokens, output_attentions=True).attentions
    assert len(attentions) == sum(layer.attends for layer in model.model.layers)
    for weights in attentions:
        assert weights.shape == (2, 4, 23, 23) and (weights.triu(1) == 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 23, dtype=weights.dtype))


def test_state_bytes_count_keys_and_values(tokens, tmp_path):
    model = build(["mixed"], torch.float32)
    sizes = []
    for length in (10, 15):
        cache = model(tokens[:1, :length]).past_key_values
        save_cache(cache, tmp_path / "cache.safetensors")
        with open(tmp_path / "cache.safetensors", "rb") as file:
            sizes.append((tmp_path / "cache.safetensors").stat().st_size - 8 - int.from_bytes(file.read(8), "little"))
    state = state_bytes(model.config)
    assert sizes == [state.saved + length * state.per_token for length in (10, 15)] and state.per_token == 2 * 32 * 4
