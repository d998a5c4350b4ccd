"""generate() and the cache: every decoding mode returns the same tokens as the model without a cache."""

import copy
import re

import pytest
import torch
import transformers
from conftest import make_cache, randomize, small_config
from packaging.version import Version
from transformers import DynamicCache, GenerationMixin, StaticCache

from tost_hf import ToSTCache, ToSTForCausalLM, TSSAState, load_cache, prefill_cache, save_cache
from tost_hf.model import modeling_tost
from tost_hf.model.cache_tost import TSSACacheLayer
from tost_hf.model.configuration_tost import FULL_ATTENTION, SLIDING_ATTENTION, TSSA
from tost_hf.model.tssa_reference import zero_state


MAX_NEW_TOKENS = 24
F32 = {"rtol": 1e-5, "atol": 1e-5}  # float64 sums of float32 terms


@pytest.fixture
def prompt():
    return torch.randint(2, 97, (2, 11))


def generate(model, tokens, **kwargs):
    return model.generate(tokens, **{"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False} | kwargs)


def greedy_without_cache(model, tokens):
    for _ in range(MAX_NEW_TOKENS):
        tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return tokens


@pytest.mark.parametrize("kwargs", [{}, {"cache_implementation": "static"}, {"cache_implementation": "dynamic"}], ids=str)
def test_greedy(tiny_model, prompt, kwargs):
    assert torch.equal(generate(tiny_model, prompt, **kwargs), greedy_without_cache(tiny_model, prompt))


@pytest.mark.parametrize("kwargs", [{}, {"cache_implementation": "static"}], ids=str)
def test_left_padded_batch(tiny_model, prompt, kwargs):
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    sequences = generate(tiny_model, prompt, attention_mask=mask, **kwargs)
    assert torch.equal(sequences[1, 11:], generate(tiny_model, prompt[1:, 5:])[0, 6:])
    assert torch.equal(sequences[0], generate(tiny_model, prompt[:1])[0])


def test_continuous_batching_is_rejected(tiny_model, prompt):
    message = "call generate with a padded batch.*vLLM"
    with pytest.raises(NotImplementedError, match=message):
        tiny_model.generate_batch(prompt.tolist(), max_new_tokens=MAX_NEW_TOKENS)
    with pytest.raises(NotImplementedError, match=message), tiny_model.continuous_batching_context_manager():
        pass


def test_beam_search_with_and_without_cache(tiny_model, prompt):
    kwargs = {"num_beams": 4, "num_return_sequences": 2, "output_scores": True, "return_dict_in_generate": True}
    with_cache = generate(tiny_model, prompt, **kwargs)
    without_cache = generate(tiny_model, prompt, use_cache=False, **kwargs)
    assert torch.equal(with_cache.sequences, without_cache.sequences)
    torch.testing.assert_close(with_cache.sequences_scores, without_cache.sequences_scores)
    assert with_cache.beam_indices[:, 1:].unique().numel() > 1  # beams were reordered, and the cache with them


@pytest.mark.parametrize("same_model", [True, False])
def test_assisted_decoding_is_greedy(tiny_model, prompt, same_model):
    assistant = tiny_model
    if not same_model:  # agrees sometimes, so that some candidates are accepted and some rejected
        assistant = copy.deepcopy(tiny_model)
        with torch.no_grad():
            assistant.model.embed_tokens.weight += 0.02 * torch.randn(97, 32)
    for count in (1, 30):
        assistant.generation_config.num_assistant_tokens = count
        for kwargs in ({}, {"attention_mask": torch.tensor([[0, 0] + [1] * 9])}):
            assisted = generate(tiny_model, prompt[:1], assistant_model=assistant, **kwargs)
            assert torch.equal(assisted, generate(tiny_model, prompt[:1], **kwargs))


HYBRID = {"position_embedding_type": "none", "layer_types": [TSSA, FULL_ATTENTION, TSSA]}
MODEL_OPTIONS = {"published": {}, "decay": {"decay_type": "token", "conv_kernel": 4}, "hybrid": HYBRID}
EARLY_EXITS = [*zip(MODEL_OPTIONS.values(), (1, 2, 3))]
EARLY_EXITS += [  # drafts of attention layers alone
    ({"layer_types": [FULL_ATTENTION, TSSA, FULL_ATTENTION], "position_embedding_type": "none"}, 1),
    ({"layer_types": [SLIDING_ATTENTION, FULL_ATTENTION, TSSA], "sliding_window": 4}, 2),
]


@pytest.mark.parametrize("options, exit_layer", EARLY_EXITS, ids=[*MODEL_OPTIONS, "attention", "sliding attention"])
def test_early_exit_is_greedy_and_does_not_change_the_model(prompt, options, exit_layer):
    model = randomize(ToSTForCausalLM(small_config(num_hidden_layers=3, **options))).eval()
    if FULL_ATTENTION in model.config.layer_types[exit_layer:] and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("this transformers fails when it crops an attention layer that the early exit left empty")
    greedy = generate(model, prompt[:1])
    assert torch.equal(generate(model, prompt[:1], assistant_early_exit=exit_layer), greedy)
    assert model.config.num_hidden_layers == 3 and len(model.config.layer_types) == 3


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache, ToSTCache])
def test_continuation_from_a_returned_cache(tiny_model, prompt, cache_class):
    cache = cache_class(config=tiny_model.config, **({"max_cache_len": 99} if cache_class is StaticCache else {}))
    first = generate(tiny_model, prompt, past_key_values=cache, max_new_tokens=7, return_dict_in_generate=True)
    second = generate(tiny_model, first.sequences, past_key_values=first.past_key_values, max_new_tokens=MAX_NEW_TOKENS - 7)
    assert torch.equal(second, generate(tiny_model, prompt))


@pytest.mark.parametrize("num_cached", [11, 15])
def test_prompt_already_in_the_cache_is_rejected(tiny_model, prompt, num_cached):
    cache = fill_cache(tiny_model, torch.randint(2, 97, (2, num_cached)))
    with pytest.raises(ValueError, match=f"holds {num_cached} tokens already, and the prompt has 11"):
        generate(tiny_model, prompt, past_key_values=cache)
    mask = torch.ones(2, num_cached + 11, dtype=torch.long)
    generate(tiny_model, prompt, past_key_values=cache, attention_mask=mask, max_new_tokens=2)  # only new tokens: accepted


# Cache ---------------------------------------------------------------------------------------------------------------


def fill_cache(model, tokens, static=False, record=False):
    cache = make_cache(model.config, static)
    if record:
        cache.activate_past_recording()
    model(tokens, past_key_values=cache)
    return cache


def state_tensors(cache):
    return [x for layer in cache.layers for x in layer.current_state()]


def test_generate_with_gradient_checkpointing(tiny_model, prompt):
    expected = tiny_model.generate(prompt, max_new_tokens=5, do_sample=False)
    tiny_model.gradient_checkpointing_enable()
    tiny_model.train()  # without dropout
    assert torch.equal(tiny_model.generate(prompt, max_new_tokens=5, do_sample=False), expected)
    with pytest.raises(ValueError, match="cache and gradient checkpointing"):
        tiny_model.generate(prompt, max_new_tokens=5, past_key_values=ToSTCache(tiny_model.config))


def test_repeated_crops(tiny_model):
    tokens = torch.randint(2, 97, (1, 100))
    cache = fill_cache(tiny_model, tokens, record=True)
    cache.crop(-10)
    cache.crop(-5)
    torch.testing.assert_close(state_tensors(cache), state_tensors(fill_cache(tiny_model, tokens[:, :85])), **F32)
    cache.crop(-59)  # 64 tokens stay recorded after a crop
    torch.testing.assert_close(state_tensors(cache), state_tensors(fill_cache(tiny_model, tokens[:, :26])), **F32)
    with pytest.raises(ValueError, match="only the last 0 are recorded"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        fill_cache(tiny_model, tokens).crop(-1)
    empty = fill_cache(tiny_model, tokens[:, :5], record=True)
    empty.crop(-5)
    assert all((x == 0).all() for x in state_tensors(empty))


def test_crop_keeps_tokens_without_membership():
    """Under tensor parallelism a real token's memberships can underflow to 0 in all heads of a process."""
    layer = TSSACacheLayer()
    layer.activate_past_recording()
    w, membership = torch.randn(1, 4, 2, 8), torch.rand(1, 2, 4)
    membership[..., 1] = membership[..., 2] = 0
    mask = torch.tensor([[True, True, False, True]])
    layer.update_state(zero_state(w), w, membership, mask=mask)
    layer.crop(-1)
    expected = w[0, 0].square() + w[0, 1].square()
    torch.testing.assert_close(layer.state.sum_sq[0], expected)
    torch.testing.assert_close(layer.state.sum_membership[0].float(), membership[0, :, 0])


@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_reset_deepcopy_and_offload(tiny_model, prompt, static):
    cache = fill_cache(tiny_model, prompt, static)
    addresses = [x.data_ptr() for x in state_tensors(cache)]
    cache_copy = copy.deepcopy(cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and all((x == 0).all() for x in state_tensors(cache))
    assert [x.data_ptr() for x in state_tensors(cache)] == addresses
    tiny_model(prompt, past_key_values=cache)
    torch.testing.assert_close(state_tensors(cache), state_tensors(cache_copy), rtol=0, atol=0)
    for layer in cache_copy.layers:
        layer.offload()
        layer.prefetch()
    torch.testing.assert_close(state_tensors(cache), state_tensors(cache_copy), rtol=0, atol=0)
    assert [tuple(item[:2]) for item in DynamicCache(config=tiny_model.config)] == [(None, None)] * 3


def cache_tensors(cache):
    return [x for layer in cache.layers for x in layer.tensors().values()]


@pytest.mark.parametrize("options", [{}, {"decay_type": "token"}], ids=str)
@pytest.mark.parametrize("static", [False, True])
def test_decoding_updates_the_cache_in_place(options, static, prompt):
    """But not the states that were read from it."""
    model = randomize(ToSTForCausalLM(small_config(**options))).eval()
    with torch.no_grad():
        reference_cache, updated_cache = (fill_cache(model, prompt, static) for _ in range(2))
        addresses = [x.data_ptr() for x in cache_tensors(updated_cache)]
        state = updated_cache.layers[0].state
        initial_state = [x.clone() for x in state]
        output = model(prompt[:, :1], past_key_values=updated_cache)
    assert [x.data_ptr() for x in cache_tensors(updated_cache)] == addresses
    assert all(map(torch.equal, state, initial_state)) and not torch.equal(updated_cache.layers[0].state[0], state[0])
    expected = model(prompt[:, :1], past_key_values=reference_cache)  # with gradients, so not updated in place
    assert torch.equal(output.logits, expected.logits)
    assert all(map(torch.equal, cache_tensors(updated_cache), cache_tensors(reference_cache)))


def test_shared_tensors_are_not_updated_in_place(tiny_model, prompt):
    """Tensors that a backward pass needs, that were created in inference mode, or that share memory."""
    cache = ToSTCache(tiny_model.config)
    loss = tiny_model(prompt, past_key_values=cache).logits.sum() + sum(x.sum() for x in cache_tensors(cache))
    with torch.no_grad():
        tiny_model(prompt[:, :1], past_key_values=cache)
    loss.backward()
    with torch.inference_mode():
        tiny_model(prompt, past_key_values=(cache := ToSTCache(tiny_model.config)))
    with torch.no_grad():
        tiny_model(prompt[:, :1], past_key_values=cache)
        base_tensors = [x.repeat(2, *[1] * (x.ndim - 1)) for x in cache_tensors(cache)]
        original_tensors = [x.clone() for x in base_tensors]
        for layer, start in zip(cache.layers, range(0, len(base_tensors), 3)):
            layer.set_state(TSSAState(*(x[: len(prompt)] for x in base_tensors[start : start + 3])))
        tiny_model(prompt[:, :1], past_key_values=cache)
    assert all(map(torch.equal, base_tensors, original_tensors))
    assert not torch.equal(cache_tensors(cache)[0], original_tensors[0][: len(prompt)])


def test_static_cache_has_no_gradient(tiny_model, prompt):
    """Otherwise a second forward would write into tensors that the first one's backward needs."""
    cache = make_cache(tiny_model.config, static=True)
    for _ in range(2):
        loss = tiny_model(prompt, labels=prompt, past_key_values=cache).loss
    loss.backward()
    assert not any(x.requires_grad for x in state_tensors(cache))


# Saved caches --------------------------------------------------------------------------------------------------------


def test_bad_cache_files(tiny_model, prompt, tmp_path):
    file = tmp_path / "prefix.safetensors"
    with pytest.raises(ValueError, match="empty"):
        save_cache(ToSTCache(tiny_model.config), file)
    with pytest.raises(FileNotFoundError, match="no cache file"):
        load_cache(file, tiny_model.config)
    save_cache(fill_cache(tiny_model, prompt), file)
    for other in (small_config(hidden_size=64, num_hidden_layers=3), small_config(num_hidden_layers=3, conv_kernel=4)):
        with pytest.raises(ValueError, match="another model"):
            load_cache(file, other)
    data = file.read_bytes()
    for damaged_data in (data.replace(b"seq_length", b"seq_lengtH"), re.sub(rb'(length":")\d', rb"\1u", data)):
        file.write_bytes(damaged_data)
        with pytest.raises(ValueError, match=r"prefix\.safetensors' is damaged"):
            load_cache(file, tiny_model.config)
    file.write_bytes(data[:-100])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_cache(file, tiny_model.config)
    tiny_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not written by save_cache"):
        load_cache(tmp_path / "model.safetensors", tiny_model.config)


def test_failed_save_preserves_the_old_file(tiny_model, prompt, tmp_path, monkeypatch):
    file = tmp_path / "prefix.safetensors"
    save_cache(fill_cache(tiny_model, prompt), file)
    saved_bytes = file.read_bytes()
    monkeypatch.setattr("tost_hf.cache_files.save_file", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_cache(fill_cache(tiny_model, prompt[:, :3]), file)
    assert file.read_bytes() == saved_bytes and list(tmp_path.iterdir()) == [file]


# Prefilled documents ---------------------------------------------------------------------------------------------------

LONG_CONTEXT = {
    "vocab_size": 320,
    "position_embedding_type": "none",
    "bos_token_id": 0,
    "eos_token_id": None,
    "conv_kernel": 3,
}
LAYER_TYPES = ["tssa", "full_attention", "sliding_attention"]
MIXED = {"layer_types": LAYER_TYPES, "num_hidden_layers": 3, "sliding_window": 8}
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def long_model():
    return randomize(ToSTForCausalLM(small_config(**LONG_CONTEXT))).eval()


@pytest.fixture
def tokens():
    return torch.randint(1, 320, (1, 150), generator=torch.Generator().manual_seed(0))


def test_generate_from_a_saved_document(long_model, tokens, tmp_path):
    masks = []  # none is made, as layers compute more with a mask
    hook = long_model.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    save_cache(prefill_cache(long_model, tokens, chunk_size=40), tmp_path / "x")
    hook.remove()
    assert masks == [None] * 4
    cache = load_cache(tmp_path / "x", long_model.config)
    assert cache.get_seq_length() == 150
    prompt = torch.cat([tokens, torch.tensor([[5, 6]])], 1)
    assert torch.equal(long_model.generate(prompt, past_key_values=cache, **GREEDY), long_model.generate(prompt, **GREEDY))


@pytest.mark.parametrize(
    "options, real_tokens",
    [({}, slice(None)), ({}, slice(20, None)), ({}, slice(30)), (MIXED, slice(20, None))],
    ids=["unpadded", "left padding", "right padding", "left padding, hybrid"],
)
@torch.no_grad()
def test_prefill_of_a_batch_equals_a_single_forward_pass(options, real_tokens):
    """The next tokens have the same logits after both, also with more padding than a chunk."""
    model = randomize(ToSTForCausalLM(small_config(**LONG_CONTEXT | options))).eval()
    prompt, mask = torch.randint(1, 320, (2, 50)), torch.zeros(2, 50, dtype=torch.long)
    mask[0] = mask[1, real_tokens] = 1
    caches = prefill_cache(model, prompt, mask, chunk_size=16), model(prompt, attention_mask=mask).past_key_values
    next_mask = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1)
    actual, expected = (model(prompt[:, :3], attention_mask=next_mask, past_key_values=cache).logits for cache in caches)
    torch.testing.assert_close(actual, expected, **F32)


def test_prefill_cache_rejects_bad_documents(long_model, tokens):
    with pytest.raises(ValueError, match="at least one token"):
        prefill_cache(long_model, tokens[:, :0])
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        prefill_cache(long_model, tokens, chunk_size=0)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(1, 150\), got \(1, 9\)"):
        prefill_cache(long_model, tokens, torch.ones(1, 9))
    with pytest.raises(ValueError, match="positions for 16: use a shorter prompt"):
        prefill_cache(ToSTForCausalLM(small_config(vocab_size=320, max_position_embeddings=16)), tokens)


# Long prompts in generate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, MIXED], ids=["ToST", "hybrid"])
@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 2}], ids=str)
def test_long_prompts_are_prefilled_in_chunks(options, kwargs, monkeypatch):
    assert hasattr(GenerationMixin, "_prefill"), "transformers has renamed the hook that chunks long prompts."
    monkeypatch.setattr(modeling_tost, "PREFILL_CHUNK_SIZE", 64)
    model = randomize(ToSTForCausalLM(small_config(**LONG_CONTEXT | options))).eval()
    prompt = torch.randint(1, 320, (2 if not kwargs else 1, 200))
    mask = torch.ones_like(prompt)
    mask[0, :70] = 0
    input_lengths = []
    model.register_forward_pre_hook(
        lambda _, args, inputs: input_lengths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    chunked = model.generate(prompt, attention_mask=mask, **GREEDY, **kwargs)
    assert input_lengths[:4] == [64, 64, 64, 8] and max(input_lengths[4:]) <= 3
    input_lengths.clear()
    unchunked = model.generate(prompt, attention_mask=mask, prefill_chunk_size=1000, **GREEDY, **kwargs)
    assert input_lengths[0] == 200 and torch.equal(chunked, unchunked)


def test_long_prompts_show_a_progress_bar(long_model, tokens, monkeypatch, capsys):
    monkeypatch.setattr(modeling_tost, "PREFILL_CHUNK_SIZE", 64)
    monkeypatch.setattr(modeling_tost, "PROGRESS_DELAY", 0)
    transformers.logging.enable_progress_bar()  # which the scripts disable
    long_model.generate(tokens, **GREEDY)
    assert "Prefill" in (progress := capsys.readouterr().err) and "150/150" in progress
    long_model.generate(tokens[:, :60], past_key_values=ToSTCache(long_model.config), **GREEDY)
    assert capsys.readouterr().err == ""


def test_cache_has_two_names(tiny_model, tokens):
    """transformers 5.24 renamed `past_key_values` to `cache`: both are accepted in every version, and passed on by its own."""
    tokens = tokens[:, :32] % tiny_model.config.vocab_size
    expected = tiny_model(tokens).logits[:, 8:]
    for name in ("past_key_values", "cache"):
        cache = ToSTCache(tiny_model.config)
        tiny_model(tokens[:, :8], **{name: cache})
        torch.testing.assert_close(tiny_model(tokens[:, 8:], **{name: cache}).logits, expected)
        cache = ToSTCache(tiny_model.config)
        output = tiny_model.generate(tokens, **{name: cache}, max_new_tokens=3, do_sample=False)
        assert cache.get_seq_length() == output.shape[1] - 1
    with pytest.raises(ValueError, match="two names of one argument"):
        tiny_model(tokens, past_key_values=cache, cache=cache)


@pytest.mark.parametrize("name, error", [("kv_cache", TypeError), (None, RuntimeError)])
def test_cache_that_does_not_arrive_is_noticed(tiny_model, prompt, name, error, monkeypatch):
    """A later version of transformers could pass it by another name, which models would ignore, or in another way."""
    prepare_inputs = GenerationMixin.prepare_inputs_for_generation

    def prepare_inputs_of_a_later_version(self, *args, **kwargs):
        inputs = prepare_inputs(self, *args, **kwargs)
        cache = inputs.pop(modeling_tost.CACHE_NAME, None)
        return inputs if name is None else inputs | {name: cache}

    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", prepare_inputs_of_a_later_version)
    with pytest.raises(error, match=rf"transformers {transformers.__version__} is newer"):
        generate(tiny_model, prompt)
    assert generate(tiny_model, prompt, use_cache=False).shape == (2, 11 + MAX_NEW_TOKENS)


def test_given_cache_is_returned(tiny_model, tokens):
    """Also where `use_cache` is off, as in configurations that Trainer saved; none is created there."""
    tokens = tokens[:, :9] % tiny_model.config.vocab_size
    expected = tiny_model(tokens).logits[:, -1]
    tiny_model.config.use_cache = False
    cache = ToSTCache(tiny_model.config)
    for token in tokens.split(1, 1):
        output = tiny_model(token, past_key_values=cache)
        cache = output[modeling_tost.CACHE_NAME]
    torch.testing.assert_close(output.logits[:, -1], expected)
    assert modeling_tost.CACHE_NAME not in tiny_model(tokens)


def test_positions_of_padding_may_be_negative(tiny_model, tokens):
    tokens = tokens[:, :9] % tiny_model.config.vocab_size
    mask = torch.ones_like(tokens)
    mask[:, :4] = 0
    output = tiny_model(tokens, attention_mask=mask, position_ids=mask.cumsum(1) - 1)
    torch.testing.assert_close(output.logits[:, 4:], tiny_model(tokens[:, 4:]).logits)
