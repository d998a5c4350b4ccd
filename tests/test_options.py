"""The options beyond the paper: off by default, and exact with padding, packing, caches, rollback and compilation."""

import itertools
import logging

import pytest
import torch
from conftest import make_cache, randomize, small_config
from safetensors import safe_open
from safetensors.torch import save_file
from test_compile import make_counting_backend
from transformers import CompileConfig, DynamicCache, StaticCache

from tost_hf import (
    TokenStatisticsSelfAttention,
    ToSTCache,
    ToSTConfig,
    ToSTForCausalLM,
    ToSTTrainer,
    ToSTTrainingArguments,
    load_cache,
    save_cache,
)
from tost_hf.cache_files import state_bytes
from tost_hf.convert import convert_to_original
from tost_hf.hub.cards import build_card
from tost_hf.hub.verification import info
from tost_hf.interpret import trace_model
from tost_hf.model.configuration_tost import OPTION_DEFAULTS
from tost_hf.model.layers_tost import ShortConvolution


F64 = {"rtol": 1e-9, "atol": 1e-9}
TSSA, FULL, SLIDING = "tssa", "full_attention", "sliding_attention"
OPTIONS = {
    "conv": {"conv_kernel": 4},
    "head": {"decay_type": "head"},
    "token": {"decay_type": "token"},
    "hybrid": {"layer_types": [TSSA, FULL], "position_embedding_type": "none", "num_key_value_heads": 2},
    "sliding": {"layer_types": [SLIDING, TSSA, TSSA, SLIDING], "sliding_window": 5},
    "mixed": {"layer_types": [FULL, TSSA, SLIDING, TSSA], "sliding_window": 3, "decay_type": "token", "conv_kernel": 3},
    "rope": {"layer_types": [TSSA, SLIDING, FULL, FULL], "sliding_window": 8, "position_embedding_type": "none"},
}
HYBRIDS = [("sliding",), ("mixed",), ("rope",)]
COMPILED = [(), ("token", "conv", "hybrid"), ("head", "conv")]
COMBINATIONS = [*COMPILED, ("head", "hybrid"), *HYBRIDS]


def build(names=(), dtype=torch.float64) -> ToSTForCausalLM:
    options = {key: value for name in names for key, value in OPTIONS[name].items()}
    num_layers = len(options.get("layer_types", range(2)))
    return randomize(ToSTForCausalLM(small_config(pad_token_id=0, num_hidden_layers=num_layers, **options))).eval().to(dtype)


def name_options(names: tuple[str, ...]) -> str:
    return "+".join(names) or "none"


@pytest.fixture(params=COMBINATIONS, ids=name_options)
def model(request):
    return build(request.param)


@pytest.fixture
def tokens():
    return torch.randint(2, 97, (2, 23))


def padding_positions(model) -> list[int]:
    """Positions to pad; a cached sliding window does not support padding between tokens."""
    return [0, 1, 2] if SLIDING in model.config.layer_types else [0, 1, 2, 7, 11, 12, 20]


@torch.no_grad()
def test_padding_equals_the_unpadded_sequence(model, tokens):
    """Left, right and inside, alone and in a batch, with and without position_ids."""
    expected = model(tokens[:1]).logits
    for pad_positions in ([0, 1, 2], [23, 24, 25], [0, 5, 6, 7, 13, 25], [3], [1, 3, 5, 7, 9, 11]):
        mask = torch.ones(2, 23 + len(pad_positions), dtype=torch.long)
        mask[0, pad_positions] = 0
        padded = torch.randint(2, 97, mask.shape)
        padded[0, mask[0] == 1] = tokens[0]
        logits = model(padded, attention_mask=mask).logits
        torch.testing.assert_close(logits[:1, mask[0] == 1], expected, **F64)
        torch.testing.assert_close(logits[1:], model(padded[1:]).logits, **F64)
        position_ids = (mask.cumsum(1) - 1).clamp_min(0)
        assert torch.equal(model(padded, attention_mask=mask, position_ids=position_ids).logits, logits)
        torch.testing.assert_close(model(padded, attention_mask=mask, use_cache=False).logits, logits, **F64)


def packed_inputs(style: str, lengths: list[int]) -> dict[str, torch.Tensor]:
    """Inputs that describe packed sequences of these lengths."""
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    if style == "position_ids":
        return {"position_ids": position_ids}
    if style == "seq_idx":
        numbers = torch.arange(len(lengths)) % 2  # they may repeat
        return {"seq_idx": torch.repeat_interleave(numbers, torch.tensor(lengths))[None]}
    cu_seq_lens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return {"cu_seq_lens_q": cu_seq_lens} | ({"position_ids": position_ids} if style == "both" else {})


@pytest.mark.parametrize("style", ["position_ids", "seq_idx", "cu_seq_lens_q", "both"])
@torch.no_grad()
def test_packing_equals_separate_sequences(model, style):
    lengths = [7, 1, 2, 3, 18]
    packed, inputs = torch.randint(2, 97, (1, 31)), packed_inputs(style, lengths)
    separate_logits = torch.cat([model(sequence).logits for sequence in packed.split(lengths, 1)], 1)
    out = model(packed, **inputs)
    assert out.past_key_values is None
    torch.testing.assert_close(out.logits, separate_logits, **F64)
    if "cu_seq_lens_q" in inputs:  # describes one batch element, padding included
        return
    other_tokens, other_inputs = torch.randint(2, 97, (1, 31)), packed_inputs(style, [31])
    batch_inputs = {name: torch.cat([x, other_inputs[name]]) for name, x in inputs.items()}
    expected = torch.cat([separate_logits, model(other_tokens).logits])
    torch.testing.assert_close(model(torch.cat([packed, other_tokens]), **batch_inputs).logits, expected, **F64)
    # padding between the packed sequences and within them
    token_mask = torch.ones(40, dtype=torch.bool)
    token_mask[[0, 3, 4, 8, 12, 20, 21, 30, 39]] = False
    indices = token_mask.long().cumsum(0).sub(1).clamp_min(0)
    inputs = {name: x[:, indices] for name, x in inputs.items()}
    logits = model(packed[:, indices], attention_mask=token_mask[None].long(), **inputs).logits
    torch.testing.assert_close(logits[:, token_mask], separate_logits, **F64)


@torch.no_grad()
def test_chunked_prefill_and_decoding_equal_the_full_forward(model, tokens):
    """With every kind of cache, with and without padding."""
    caches = [
        lambda: None,
        lambda: DynamicCache(config=model.config),
        DynamicCache,
        lambda: StaticCache(model.config, max_cache_len=30),
        lambda: ToSTCache(model.config),
    ]
    for padding in ([], padding_positions(model)):
        mask = torch.ones_like(tokens)
        mask[1, padding] = 0
        expected = model(tokens, attention_mask=mask, use_cache=False).logits
        for make_empty_cache in caches:
            cache, end, logits = make_empty_cache(), 0, []
            for size in (1, 1, 5, 2, 7, 1, 1, 5):
                end += size
                mask_inputs = {"attention_mask": mask[:, :end]} if padding else {}
                out = model(tokens[:, end - size : end], past_key_values=cache, use_cache=True, **mask_inputs)
                cache = out.past_key_values
                logits.append(out.logits)
            torch.testing.assert_close(torch.cat(logits, 1)[mask == 1], expected[mask == 1], **F64)
            assert cache.get_seq_length() == 23


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("num_removed, num_chunks", [(1, 1), (9, 1), (9, 9)])
@torch.no_grad()
def test_rollback_and_batch_operations(model, tokens, num_removed, num_chunks, static):
    """Batch operations also apply to the tokens recorded for rollback."""
    if (static and set(model.config.layer_types) != {TSSA}) or (SLIDING in model.config.layer_types and num_chunks > 1):
        pytest.skip("static keys and values are not cropped, and a window stores the tokens of one forward pass")
    rejected_tokens, next_tokens = torch.randint(2, 97, (2, num_removed)), torch.randint(2, 97, (2, 6))
    mask = torch.ones(2, 29, dtype=torch.long)
    mask[1, padding_positions(model)] = 0
    cache = make_cache(model.config, static)
    cache.activate_past_recording()
    assert cache.is_croppable
    model(tokens, attention_mask=mask[:, :23], past_key_values=cache)
    for i, chunk in enumerate(rejected_tokens.split(num_removed // num_chunks, 1)):
        chunk_mask = torch.cat([mask[:, :23], torch.ones(2, (i + 1) * chunk.shape[1], dtype=torch.long)], 1)
        model(chunk, attention_mask=chunk_mask, past_key_values=cache)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.crop(-num_removed)
    assert cache.get_seq_length() == 23
    tokens, mask = torch.cat([tokens[[1, 0]], next_tokens], 1), mask[[1, 0]]
    logits = model(next_tokens, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(logits, model(tokens, attention_mask=mask).logits[:, 23:], **F64)


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 5}], ids=str)
def test_generate_is_the_same_without_a_cache(model, tokens, kwargs):
    greedy = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(tokens[:1], use_cache=False, num_beams=kwargs.get("num_beams", 1), **greedy)
    assert torch.equal(model.generate(tokens[:1], **greedy, **kwargs), expected)


@pytest.mark.parametrize("conv_state", ["conv_state", "recent_inputs"])
@torch.no_grad()
def test_saved_cache_resumes(tokens, model, tmp_path, conv_state):
    """Also from files of version 0.2.0, where the state of a convolution has another name."""
    file = tmp_path / "cache.safetensors"
    save_cache(model(tokens).past_key_values, file)
    if conv_state != "conv_state":
        with safe_open(file, "pt") as opened:
            tensors = {name.replace("conv_state", conv_state): opened.get_tensor(name) for name in opened.keys()}
            save_file(tensors, file, metadata=opened.metadata())
    next_tokens = torch.randint(2, 97, (2, 4))
    expected = model(torch.cat([tokens, next_tokens], 1)).logits[:, 23:]
    for max_cache_len in (None, 40):
        cache = load_cache(file, model.config, max_cache_len=max_cache_len)
        assert type(cache) is (ToSTCache if max_cache_len is None else StaticCache)
        torch.testing.assert_close(model(next_tokens, past_key_values=cache).logits, expected, **F64)


def test_gradient_checkpointing_gives_the_same_gradients(model, tokens):
    gradients, mask = [], torch.ones_like(tokens)
    mask[0, [0, 5]] = 0
    for reentrant in (None, True, False):
        model.train().zero_grad()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(tokens, attention_mask=mask, labels=tokens).loss.backward()
        gradients.append([param.grad for param in model.parameters()])
        assert all((gradient != 0).any() for gradient in gradients[-1])
        torch.testing.assert_close(gradients[-1], gradients[0], **F64)


def test_save_and_load(model, tokens, tmp_path):
    model = model.float()
    model.save_pretrained(tmp_path)
    loaded, loading_info = ToSTForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading_info.values())
    assert loaded.config.options() == model.config.options()
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_trained_attention_takes_windows(tokens, tmp_path):
    model = build(["hybrid"])
    model.save_pretrained(tmp_path)
    expected = model(tokens).logits
    for window in (5, tokens.shape[1]):
        windowed = ToSTForCausalLM.from_pretrained(tmp_path, layer_types=[TSSA, SLIDING], sliding_window=window).eval()
        difference = (windowed(tokens).logits - expected).abs()
        assert difference[:, :5].max() < 1e-9 and (difference.max() < 1e-9) == (window > 5)


@pytest.mark.parametrize("model", [*COMPILED, ("sliding",)], ids=name_options, indirect=True)
def test_generate_compiles_decoding_once(model, tokens):
    """transformers' compiled decoding with the static cache, for prompts of two lengths."""
    torch._dynamo.reset()
    counter = make_counting_backend("eager")
    config = CompileConfig(fullgraph=True, backend=counter, mode=None)
    config._compile_all_devices = True  # else transformers compiles on accelerators only
    for length in (9, 23):
        prompt = tokens[:, :length]
        kwargs = {"max_new_tokens": 43 - length, "do_sample": False}  # so that keys and values have the same size
        mask = torch.ones_like(prompt)
        mask[1, :3] = 0
        expected = model.generate(prompt, attention_mask=mask, **kwargs)
        actual = model.generate(prompt, attention_mask=mask, cache_implementation="static", compile_config=config, **kwargs)
        assert torch.equal(actual, expected)
    assert counter.graphs == 1 + (SLIDING in model.config.layer_types)  # transformers has another one for a full window


@pytest.mark.parametrize(
    "model", [COMPILED[1], pytest.param(COMPILED[2], marks=pytest.mark.slow)], ids=name_options, indirect=True
)
def test_compiled_training_gives_the_same_gradients(model, tokens):
    torch._dynamo.reset()
    gradients = []
    for forward in (model, torch.compile(model, backend="aot_eager")):
        loss = forward(tokens, labels=tokens, use_cache=False).loss
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(*gradients, **F64)


@pytest.mark.parametrize("name, grows", [("conv", False), ("hybrid", True), ("sliding", False)])
def test_card_info_trace_and_conversion(name, grows, tokens, tmp_path):
    model = build(["conv", "token", name], torch.float32)
    model.save_pretrained(tmp_path)
    description, card = info(tmp_path), build_card(tmp_path, license="mit").content
    assert all(x in description["options"] and x in card for x in ("decay_type token", "conv_kernel 4"))
    assert "goes beyond the paper" in card
    assert ("128 with every token" in card) == ("128 with every token" in description["state"]) == grows
    assert ("quadratic time" in card) == grows
    trace = trace_model(model, input_ids=tokens)
    torch.testing.assert_close(trace.memberships.sum(2), torch.ones_like(trace.memberships[:, :, 0]), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="the authors' format has"):
        convert_to_original(tmp_path, tmp_path / "checkpoint.pth")


def test_presets_beyond_the_paper():
    for name in ("tost-base", "tost-medium", "tost-large"):
        config = ToSTConfig.from_preset(name)
        assert config.options() == {}
        assert not {*OPTION_DEFAULTS, "is_causal", "pooling"} & config.to_diff_dict().keys()
    plus = ToSTConfig.from_preset("tost-plus-base")
    assert plus.options() == {"decay_type": "token", "conv_kernel": 4, "position_embedding_type": "none"}
    hybrid = ToSTConfig.from_preset("tost-hybrid-base", num_hidden_layers=6)
    assert hybrid.layer_types == [TSSA, TSSA, TSSA, SLIDING, TSSA, TSSA] and hybrid.sliding_window == 256
    state = state_bytes(ToSTConfig.from_preset("tost-base"))
    assert (state.saved, state.in_memory) == (74_304, 111_744)
    # 9 layers of sums and 3 inputs of the convolution; 3 layers of keys and values, of a window or of all tokens
    sums, key_value_bytes = 9 * 4 * (2 * 768 + 12 + 3 * 768), 3 * 4 * 2 * 768
    state = state_bytes(ToSTConfig.from_preset("tost-hybrid-base"))
    assert (state.saved, state.per_token) == (sums + 255 * key_value_bytes, 0)
    state = state_bytes(ToSTConfig.from_preset("tost-hybrid-base", layer_types=([TSSA] * 3 + [FULL]) * 3))
    assert (state.saved, state.per_token) == (sums, key_value_bytes)


# Decay and convolution --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 12])
@pytest.mark.parametrize("decay_type", ["head", "token"])
def test_initial_decay_spans_4_to_1024_tokens(heads, decay_type, tmp_path):
    """Also where the loaded weights have no forget gate."""
    config = small_config(hidden_size=48, num_attention_heads=heads)
    ToSTForCausalLM(config).save_pretrained(tmp_path)
    loaded = ToSTForCausalLM.from_pretrained(tmp_path, decay_type=decay_type)
    tau = torch.logspace(torch.log10(torch.tensor(4.0)), torch.log10(torch.tensor(1024.0)), heads)
    for layer in (*loaded.model.layers, *ToSTForCausalLM(loaded.config).model.layers):
        decay = layer.self_attn.log_decay(torch.randn(2, 3, 48)).exp()
        torch.testing.assert_close(decay, (1 - 1 / tau).expand(2, 3, -1))


def test_forget_bias_stays_float32_and_has_no_weight_decay(tmp_path):
    model = build(["token"], torch.float32)
    model.save_pretrained(tmp_path)
    half_models = [build(["token"], dtype) for dtype in (torch.bfloat16, torch.float16)]
    for half_model in (*half_models, ToSTForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)):
        attention = half_model.model.layers[1].self_attn
        assert attention.forget_bias.dtype == torch.float32 and attention.forget_proj.weight.dtype != torch.float32
        assert torch.equal(attention.forget_bias, model.model.layers[1].self_attn.forget_bias)
    decay_names = ToSTTrainer(model, ToSTTrainingArguments(tmp_path / "run", use_cpu=True)).get_decay_parameter_names(model)
    assert "model.layers.0.self_attn.forget_proj.weight" in decay_names
    assert not [name for name in decay_names if name.endswith("forget_bias")]


def test_decay_requires_the_causal_form():
    with pytest.raises(ValueError, match="causal form"):
        TokenStatisticsSelfAttention(8, 2, causal=False, decay_type="head")


@pytest.mark.parametrize("kernel", [2, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_convolution_equals_its_definition(kernel, length):
    convolution = randomize(ShortConvolution(5, kernel)).double()
    x, conv_state = torch.randn(2, length, 5, dtype=torch.float64), torch.randn(2, kernel - 1, 5, dtype=torch.float64)
    for initial_state, mask in itertools.product((None, conv_state), (None, torch.rand(2, length) > 0.4)):
        out, final_state = convolution(x, mask, conv_state=initial_state)
        for b in range(2):
            tokens = slice(None) if mask is None else mask[b]
            history = torch.cat([torch.zeros_like(conv_state[b]) if initial_state is None else initial_state[b], x[b, tokens]])
            shifted = (history[kernel - 1 - j : len(history) - j] for j in range(kernel))
            expected = x[b, tokens] + sum(weight * inputs for weight, inputs in zip(convolution.weight.T, shifted))
            torch.testing.assert_close(out[b, tokens], expected)
            torch.testing.assert_close(final_state[b], history[1 - kernel :])


def test_new_convolutions_do_not_change_the_logits(tokens):
    plain, model = ToSTForCausalLM(small_config()), ToSTForCausalLM(small_config(conv_kernel=4))
    model.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    assert model.num_parameters() - plain.num_parameters() == 2 * 32 * 4


# Hybrid models: softmax attention layers among TSSA layers ----------------------------------------------------------------


@pytest.mark.parametrize(
    "model, implementation",
    [*((names, "eager") for names in HYBRIDS), pytest.param(("mixed",), "flex_attention", marks=pytest.mark.slow)],
    indirect=["model"],
    ids=str,
)
@torch.no_grad()
def test_attention_implementations_agree(model, tokens, implementation, caplog):
    """With padding and packing; "eager" returns the weights of the softmax layers, the others warn."""
    model, mask = model.float(), torch.ones_like(tokens)
    mask[1, [0, 1, 2, 9]] = 0

    def compute_logits():
        return model(tokens, attention_mask=mask).logits[mask == 1], model(tokens, seq_idx=tokens.gt(40).long()).logits

    expected = compute_logits()
    assert model(tokens).attentions is None
    model.set_attn_implementation(implementation)
    assert all(
        layer.self_attn.config._attn_implementation == implementation
        for layer in model.model.layers
        if layer.is_softmax_attention
    )
    torch.testing.assert_close(compute_logits(), expected, rtol=1e-4, atol=1e-4)
    if implementation == "eager":
        attentions = model(tokens, output_attentions=True).attentions
        assert len(attentions) == sum(layer.is_softmax_attention for layer in model.model.layers)
        for weights in attentions:
            assert weights.shape == (2, 4, 23, 23) and (weights.triu(1) == 0).all()
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 23))
    else:
        logging.Logger.warning_once.cache_clear()  # transformers adds the method
        assert not model(tokens, output_attentions=True).attentions
        assert f"returns no weights with attn_implementation={implementation!r}" in caplog.text


def test_ambiguous_sliding_windows_are_rejected(tokens):
    model, mask = build(["sliding"]), torch.ones(2, 24, dtype=torch.long)
    cache = model(tokens).past_key_values
    mask[0, 20] = 0
    step = {"input_ids": tokens[:, :1], "position_ids": torch.full((2, 1), 23), "past_key_values": cache}
    with pytest.raises(ValueError, match="padding between real tokens"):
        model(**step, attention_mask=mask)
    with pytest.raises(ValueError, match="covers the cached tokens"):
        model(**step, attention_mask=torch.tensor([[1], [0]]))


def test_rotary_positions_keep_their_precision():
    model = build(["rope"])
    assert model.config.rope_parameters == {"rope_theta": 10_000.0, "rope_type": "default"}
    position_ids = torch.tensor([[0, 1, 1000]])
    angles = torch.cat([position_ids[..., None].double() / 1e4 ** (torch.arange(0, 8, 2).double() / 8)] * 2, -1)
    for dtype, tolerance in ((torch.float64, 1e-4), (torch.bfloat16, 4e-3)):  # angles in bfloat16 would be off by radians
        cos, sin = model.model.rotary_emb.to(dtype)(torch.zeros((), dtype=dtype), position_ids)
        assert cos.dtype == dtype
        assert (cos - angles.cos()).abs().max() < tolerance and (sin - angles.sin()).abs().max() < tolerance


def test_state_bytes_count_keys_and_values(tokens, tmp_path):
    model, file, sizes = build(["mixed"], torch.float32), tmp_path / "cache.safetensors", []
    for length in (10, 15):
        save_cache(model(tokens[:1, :length]).past_key_values, file)
        sizes.append(len(content := file.read_bytes()) - 8 - int.from_bytes(content[:8], "little"))  # without the header
    state = state_bytes(model.config)
    assert sizes == [state.saved + length * state.per_token for length in (10, 15)] and state.per_token == 2 * 32 * 4


@torch.no_grad()
def test_mixed_precision(tokens):
    model, mask = build(["token", "conv", "rope"], torch.float32), torch.ones_like(tokens)
    mask[0, :3] = 0
    expected = model(tokens, attention_mask=mask).logits[mask == 1]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens, attention_mask=mask).logits[mask == 1]
    torch.testing.assert_close(logits.float(), expected, rtol=0.1, atol=0.1)
