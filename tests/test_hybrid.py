"""Hybrid models: softmax attention layers among TSSA layers, with their caches, masks and rotary positions."""

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
from test_options import F64, build, four_layers
from transformers import DynamicCache, StaticCache

from tost_hf import (
    CausalStatisticsCache,
    ToSTConfig,
    ToSTForCausalLM,
    ToSTForSequenceClassification,
    load_cache,
    save_cache,
)
from tost_hf.cache_files import state_bytes
from tost_hf.model.modeling_tost import rotary_embedding


TSSA, FULL, SLIDING = "tost_causal_statistics", "full_attention", "sliding_attention"
LAYERS = {
    "sliding": {"layer_types": [SLIDING, TSSA, TSSA, SLIDING], "sliding_window": 5},
    "mixed": {"layer_types": [FULL, TSSA, SLIDING, TSSA], "sliding_window": 3, "forgetting": "token", "conv_kernel": 3},
    "rope": {"layer_types": [TSSA, SLIDING, FULL, FULL], "sliding_window": 8, "max_position_embeddings": None},
}


@pytest.fixture(params=LAYERS)
def model(request):
    return build(**LAYERS[request.param])


@pytest.fixture
def tokens():
    return torch.randint(2, 97, (2, 23))


@torch.no_grad()
def test_padding_and_packing(model, tokens):
    """A window counts real tokens."""
    alone = torch.cat([model(piece).logits for piece in tokens[:1].split([9, 14], 1)], 1)
    seq_idx = torch.cat([torch.full((1, 9), 7), torch.full((1, 14), 3)], 1)
    torch.testing.assert_close(model(tokens[:1], seq_idx=seq_idx).logits, alone, **F64)
    for places in ([0, 1, 2], [23, 24, 25], [0, 5, 6, 7, 13, 25]):
        mask = torch.ones(1, 23 + len(places), dtype=torch.long)
        mask[0, places] = 0
        spread = (mask.cumsum(1) - 1).clamp_min(0)
        padded = {"attention_mask": mask}
        logits = model(tokens[:1].gather(1, spread), **padded).logits[mask == 1]
        torch.testing.assert_close(logits, model(tokens[:1]).logits[0], **F64)
        torch.testing.assert_close(logits, model(tokens[:1].gather(1, spread), use_cache=False, **padded).logits[mask == 1])
        packed = model(tokens[:1].gather(1, spread), seq_idx=seq_idx.gather(1, spread), **padded).logits
        torch.testing.assert_close(packed[mask == 1], alone[0], **F64)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_nonfinite_tokens_stay_in_their_packed_sequence(model, attention):
    """And do not reach earlier tokens: attention multiplies masked values by 0, and 0 times NaN is NaN."""
    model.set_attn_implementation(attention)
    embeds, places = torch.randn(1, 23, model.config.hidden_size, dtype=torch.float64), torch.arange(23)
    for borders in ([9, 17], []):
        seq_idx = torch.searchsorted(torch.tensor(borders), places, right=True)[None] if borders else None
        expected = model(inputs_embeds=embeds, seq_idx=seq_idx).logits
        for at in (4, 12, 19):
            spoiled = embeds.clone()
            spoiled[0, at] = torch.nan
            logits = model(inputs_embeds=spoiled, seq_idx=seq_idx).logits
            sound = (places < at) | (places >= min([23, *(border for border in borders if border > at)]))
            torch.testing.assert_close(logits[0, sound], expected[0, sound], **F64)
            assert logits[0, ~sound].isnan().all()


@torch.no_grad()
def test_nonfinite_keys_stay_nonfinite_in_the_cache(model):
    embeds = torch.randn(2, 9, model.config.hidden_size, dtype=torch.float64)
    embeds[1, 4] = torch.nan
    for make in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=12)):
        first = model(inputs_embeds=embeds[:, :6], past_key_values=make).logits
        then = model(inputs_embeds=embeds[:, 6:], past_key_values=make).logits
        assert first[1, 4:].isnan().all() and then[1].isnan().all()
        assert first[0].isfinite().all() and then[0].isfinite().all() and first[1, :4].isfinite().all()


@torch.no_grad()
def test_repeated_sequence_numbers():
    model = build(["conv", "hybrid", "token"])
    tokens, seq_idx = torch.randint(2, 97, (1, 6)), torch.tensor([[0, 0, 1, 1, 0, 0]])
    alone = torch.cat([model(piece).logits for piece in tokens.split(2, 1)], 1)
    torch.testing.assert_close(model(tokens, seq_idx=seq_idx).logits, alone, **F64)


@pytest.mark.parametrize("make", ["dynamic", "static", "saved"])
@pytest.mark.parametrize("sizes", [[1] * 23, [3, 1, 1, 6, 12], [20, 1, 1, 1]], ids=str)
@torch.no_grad()
def test_chunked_prefill_equals_the_full_forward(model, tokens, sizes, make, tmp_path):
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    cache = StaticCache(model.config, max_cache_len=30) if make == "static" else DynamicCache(config=model.config)
    full, at, chunks = model(tokens, attention_mask=mask, use_cache=False).logits, 0, []
    for size in sizes:
        at += size
        chunks.append(model(tokens[:, at - size : at], attention_mask=mask[:, :at], past_key_values=cache).logits)
        if make == "saved":
            save_cache(cache, tmp_path / "cache.safetensors")
            cache = load_cache(tmp_path / "cache.safetensors", model.config)
    torch.testing.assert_close(torch.cat(chunks, 1)[mask == 1], full[mask == 1], **F64)
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded, more = load_cache(tmp_path / "cache.safetensors", model.config), torch.randint(2, 97, (2, 3))
    mask = torch.cat([mask, torch.ones_like(more)], 1)
    whole = model(torch.cat([tokens, more], 1), attention_mask=mask).logits[:, 23:]
    torch.testing.assert_close(model(more, attention_mask=mask, past_key_values=loaded).logits, whole, **F64)


@pytest.mark.parametrize("removed", [0, 1, 4, 9])
@torch.no_grad()
def test_crop_equals_never_having_seen(model, tokens, removed):
    cache, more = CausalStatisticsCache(model.config), torch.randint(2, 97, (2, 6))
    cache.activate_past_recording()
    model(tokens, past_key_values=cache)
    cache.crop(0)
    if removed:
        model(torch.randint(2, 97, (2, removed)), past_key_values=cache)
        cache.crop(-removed)
    whole = model(torch.cat([tokens, more], 1)).logits[:, 23:]
    torch.testing.assert_close(model(more, past_key_values=cache).logits, whole, **F64)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)])
@torch.no_grad()
def test_attention_implementations_agree(model, tokens, implementation):
    model = model.float()
    mask = torch.ones_like(tokens)
    mask[1, [0, 1, 2, 9]] = 0
    expected = [model(tokens, attention_mask=mask).logits, model(tokens, seq_idx=tokens.gt(40).long()).logits]
    model.set_attn_implementation(implementation)
    assert all(layer.self_attn.config._attn_implementation == implementation for layer in model.model.layers if layer.attends)
    got = [model(tokens, attention_mask=mask).logits, model(tokens, seq_idx=tokens.gt(40).long()).logits]
    torch.testing.assert_close(got[0][mask == 1], expected[0][mask == 1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_generate_is_the_same_without_a_cache(model, tokens, kwargs):
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": kwargs.get("num_beams", 1)}
    expected = model.generate(tokens[:1], use_cache=False, **settings)
    assert torch.equal(model.generate(tokens[:1], **settings | kwargs), expected)


def test_ambiguous_sliding_windows_are_rejected(tokens):
    model = build(**LAYERS["sliding"])
    cache = model(tokens).past_key_values
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, 20] = 0
    with pytest.raises(ValueError, match="padding between real tokens"):
        model(tokens[:, :1], attention_mask=mask, past_key_values=cache)
    positions = torch.full((2, 1), 23)
    with pytest.raises(ValueError, match="covers the cached tokens"):
        model(tokens[:, :1], attention_mask=torch.tensor([[1], [0]]), position_ids=positions, past_key_values=cache)
    with pytest.raises(ValueError, match="StaticCache"):
        CausalStatisticsCache(model.config, static=True)
    with pytest.raises(ValueError, match="its layers are"):
        build(**LAYERS["mixed"])(tokens, past_key_values=cache)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types must hold .* nothing else, got 'linear_attention'"),
        ({"layer_types": [TSSA, FULL]}, "layer_types must name every layer: it names 2 of 4"),
        ({"layer_types": [FULL] * 4}, "at least once"),
        ({"layer_types": [SLIDING, TSSA] * 2}, "sliding_window of at least 2 tokens"),
        ({"layer_types": [SLIDING, TSSA] * 2, "sliding_window": 1}, "sliding_window of at least 2 tokens"),
        ({"layer_types": [FULL, TSSA] * 2, "num_key_value_heads": 3}, "divide num_attention_heads"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "for attention layers of position-free models"),
        (
            {"layer_types": [FULL, TSSA] * 2, "max_position_embeddings": None, "rope_parameters": {"rope_type": "yarn"}},
            "rope_type 'default' or 'linear'",
        ),
    ],
)
def test_impossible_layers_are_rejected(fields, message):
    with pytest.raises(ValueError, match=message):
        four_layers(**fields)


def test_default_layer_types_follow_num_hidden_layers():
    config = ToSTConfig(layer_types=[TSSA] * 12)
    config.num_hidden_layers = 3
    assert config.layer_types == [TSSA] * 3 and "layer_types" not in config.to_dict()


def test_rotary_positions_keep_their_precision():
    model = ToSTForCausalLM(four_layers(**LAYERS["rope"]))
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
    model = build(dtype=torch.float32, **LAYERS["mixed"])
    sizes = []
    for length in (10, 15):
        cache = model(tokens[:1, :length]).past_key_values
        save_cache(cache, tmp_path / "cache.safetensors")
        with open(tmp_path / "cache.safetensors", "rb") as file:
            sizes.append((tmp_path / "cache.safetensors").stat().st_size - 8 - int.from_bytes(file.read(8), "little"))
    state = state_bytes(model.config)
    assert sizes == [state.saved + length * state.per_token for length in (10, 15)] and state.per_token == 2 * 32 * 4


WITHOUT_PACKAGE = """
import sys, torch
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tost_hf":
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
torch.save(model.generate(torch.arange(2, 20)[None], max_new_tokens=9, do_sample=False), sys.argv[1] + "/generated.pt")
model.save_pretrained(sys.argv[1] + "/again")
"""


@pytest.mark.slow
def test_remote_code_runs_without_the_package(tmp_path):
    model = build(["token", "conv"], torch.float32, **LAYERS["rope"])
    model.save_pretrained(tmp_path / "model", with_code=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HOME": str(tmp_path / "hf")}
    folder = str(tmp_path / "model")
    subprocess.run([sys.executable, "-c", WITHOUT_PACKAGE, folder], env=environment, check=True, capture_output=True)
    expected = model.generate(torch.arange(2, 20)[None], max_new_tokens=9, do_sample=False)
    assert torch.equal(torch.load(f"{folder}/generated.pt", weights_only=True), expected)
    again = ToSTForCausalLM.from_pretrained(f"{folder}/again")
    assert again.config.options() == model.config.options()
    assert torch.equal(again(expected).logits, model(expected).logits)


def test_copies_of_a_configuration():
    config = ToSTConfig.from_preset("tost-hybrid-base")
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), ToSTConfig.from_dict(config.to_dict())):
        assert twin.to_dict() == config.to_dict() and twin.layer_types == config.layer_types
    assert "full_attention" in repr(config) and "_layer_types" not in repr(config)
    assert "full_attention" in config.to_json_string(use_diff=False)


@torch.no_grad()
def test_mixed_precision_and_classifiers(tokens):
    model = build(["token", "conv"], torch.float32, **LAYERS["rope"])
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(
        logits[mask == 1].float(), model(tokens, attention_mask=mask).logits[mask == 1], rtol=0.1, atol=0.1
    )
    classifier = ToSTForSequenceClassification(model.config).eval()
    torch.testing.assert_close(classifier(tokens, attention_mask=mask).logits[:1], classifier(tokens[:1, 3:]).logits)
