"""Saving and loading through transformers: equality, dtypes, shards, Auto classes, damaged folders, resizing."""

import math

import pytest
import torch
from conftest import randomize, small_config, small_vision_config
from hub_clients import language_folder, language_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    GPT2Config,
    pipeline,
)

from tost_hf import ToSTForCausalLM, ToSTModel


def random_ids(*shape):
    return torch.randint(2, 97, shape)


def assert_equal_states(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


@pytest.fixture
def saved(tiny_model, tmp_path):
    tiny_model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# Round trips (those of whole models are in test_options.py) ----------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_weights(tiny_config, tmp_path, tied):
    tiny_config.tie_word_embeddings = tied
    model = randomize(ToSTForCausalLM(tiny_config)).eval()
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tied)  # a tied weight is stored once
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert_equal_states(loaded.state_dict(), model.state_dict())


def is_statistics(name):
    return name.endswith(("temp", "denom_bias"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_round_trip(tiny_model, tmp_path, dtype):
    float32_state = {name: tensor.clone() for name, tensor in tiny_model.state_dict().items()}
    tiny_model.to(dtype).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for options in ({}, {"dtype": dtype}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        assert loaded.dtype == dtype
        assert_equal_states(loaded.state_dict(), tiny_model.state_dict())
        for name, tensor in loaded.state_dict().items():
            if is_statistics(name):  # they are stored in float32
                assert stored[name].dtype == tensor.dtype == torch.float32 and torch.equal(tensor, float32_state[name])
            else:
                assert torch.equal(tensor, float32_state[name].to(dtype))
        tokens = random_ids(2, 20)
        assert torch.equal(loaded(tokens).logits, tiny_model(tokens).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, AutoModelForImageClassification])
def test_statistics_parameters_are_float32_in_a_model_of_another_dtype(tiny_config, auto_class, dtype):
    vision_config = small_vision_config()
    model = auto_class.from_config(tiny_config if auto_class is AutoModelForCausalLM else vision_config, dtype=dtype)
    for name, tensor in model.named_parameters():
        assert tensor.dtype == (torch.float32 if is_statistics(name) else dtype), name


def test_loading_between_base_model_and_heads(tiny_model, saved, tmp_path):
    base_state = tiny_model.model.state_dict()
    loaded = AutoModel.from_pretrained(saved)
    assert type(loaded) is ToSTModel
    assert_equal_states(loaded.state_dict(), base_state)
    classifier, info = AutoModelForSequenceClassification.from_pretrained(saved, num_labels=50, output_loading_info=True)
    assert_equal_states(classifier.model.state_dict(), base_state)
    assert info["missing_keys"] == {"score.weight"} and classifier.score.weight.shape == (50, 32)
    assert classifier.score.weight.std().item() == pytest.approx(0.02, rel=0.1)
    # the other direction: a language model from the folder of a base model
    loaded.save_pretrained(tmp_path / "base")
    assert_equal_states(AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict(), tiny_model.state_dict())


def test_text_generation_pipeline(tmp_path):
    generate = pipeline("text-generation", model=str(language_folder(tmp_path)), device="cpu")
    prompt = generate.tokenizer("a b c", return_tensors="pt").input_ids
    settings = {"max_new_tokens": 6, "do_sample": False}
    expected = language_model().generate(prompt, **settings)[0].tolist()
    assert generate("a b c", return_tensors=True, **settings) == [{"generated_token_ids": expected}]
    # each prompt of a padded batch has the same continuation as alone
    generate.tokenizer.pad_token, generate.tokenizer.padding_side = generate.tokenizer.eos_token, "left"
    batch = generate(["a b c", "d"], batch_size=2, **settings)
    assert batch == [generate("a b c", **settings), generate("d", **settings)]


# Incomplete folders ------------------------------------------------------------------------------------------


def test_pickled_weights_are_rejected(saved, tiny_model):
    """Even harmless ones, because only the converter reads pickles."""
    (saved / "model.safetensors").unlink()
    torch.save(tiny_model.state_dict(), saved / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(saved)
    with pytest.raises(ValueError, match="tost-hf convert"):
        AutoModelForCausalLM.from_pretrained(saved, use_safetensors=False)


@pytest.mark.parametrize("first", [0, -1])
def test_index_of_pickled_weights_is_rejected(tiny_model, tmp_path, monkeypatch, first):
    """transformers opens the files of an index as safetensors or as pickles, depending on the first."""
    tiny_model.save_pretrained(tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    for shard in sorted(tmp_path.glob("model-*"))[first:]:
        torch.save(load_file(shard), shard.with_suffix(".bin"))
        index.write_text(index.read_text().replace(shard.name, shard.with_suffix(".bin").name))
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(ValueError, match=r"names .*\.bin"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_config_of_another_model(tmp_path):
    GPT2Config(n_embd=8, n_layer=1, n_head=2).save_pretrained(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"needs a ToSTConfig.*'gpt2'"):
        ToSTForCausalLM.from_pretrained(tmp_path)


# Missing weights are initialized, loaded ones are not ----------------------------------------------------------------

MISSING = (
    *(f"layers.1.self_attn.{name}" for name in ("out_proj.weight", "in_proj.weight", "in_proj.bias", "temp", "denom_bias")),
    *(f"layers.1.mlp.{name}" for name in ("up_proj.weight", "down_proj.weight", "down_proj.bias")),
    *("layers.1.attention_layer_scale", "layers.1.mlp_layer_scale", "embed_positions.weight"),
)


def test_missing_weights_get_their_initial_values(tmp_path):
    # wide enough to measure the standard deviation of its weights
    config = small_config(hidden_size=128, max_position_embeddings=32, layer_scale_init_value=0.25, use_bias=True)
    model = randomize(ToSTForCausalLM(config))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith(MISSING)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {f"model.{name}" for name in MISSING}
    layer = loaded.model.layers[1]
    residual_std = 0.02 / math.sqrt(2 * 2)
    for weight, std in (
        (layer.self_attn.out_proj.weight, residual_std),
        (layer.mlp.down_proj.weight, residual_std),
        (layer.self_attn.in_proj.weight, 0.02),
        (layer.mlp.up_proj.weight, 0.02),
        (loaded.model.embed_positions.weight, 0.02),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert (layer.self_attn.temp == 1).all() and (layer.self_attn.denom_bias == 0).all()
    assert (layer.self_attn.in_proj.bias == 0).all() and (layer.mlp.down_proj.bias == 0).all()
    assert (layer.attention_layer_scale == 0.25).all() and (layer.mlp_layer_scale == 0.25).all()
    expected = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        if name not in info["missing_keys"]:
            assert torch.equal(tensor, expected[name]), name


# Resizing ------------------------------------------------------------------------------------------------------------


def test_resize_token_embeddings(tiny_model, tmp_path):
    tokens = torch.randint(2, 50, (2, 9))
    old_logits = tiny_model(tokens).logits
    tiny_model.resize_token_embeddings(120)
    logits = tiny_model(tokens).logits
    assert tiny_model.config.vocab_size == 120 and logits.shape == (2, 9, 120)
    torch.testing.assert_close(logits[..., :97], old_logits)
    tiny_model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, logits)


def position_tables(model):
    """The position tables with positions first."""
    return [model.model.embed_positions.weight, *(layer.self_attn.denom_bias[..., 0].T for layer in model.model.layers)]


def test_truncate_position_embeddings(tiny_model, tmp_path):
    tokens = random_ids(2, 16)
    logits, old_tables = tiny_model(tokens).logits, [table.clone() for table in position_tables(tiny_model)]
    tiny_model.resize_position_embeddings(16)
    for table, old_table in zip(position_tables(tiny_model), old_tables):
        assert torch.equal(table, old_table[:16])
    assert torch.equal(tiny_model(tokens).logits, logits)
    with pytest.raises(IndexError, match="Position 16 "):
        tiny_model(random_ids(1, 17))
    tiny_model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.max_position_embeddings == 16 and torch.equal(loaded(tokens).logits, logits)


def test_extend_position_embeddings(tiny_model, tmp_path):
    old_tables = [table.detach().clone() for table in position_tables(tiny_model)]
    tiny_model.resize_position_embeddings(300)
    position = torch.arange(300, dtype=torch.float64) * 127 / 299
    low = position.long().clamp_max(126)
    fraction = (position - low).unsqueeze(1)
    for table, old_table in zip(position_tables(tiny_model), old_tables):
        expected = (1 - fraction) * old_table[low] + fraction * old_table[low + 1]
        torch.testing.assert_close(table.double(), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(table[0], old_table[0])
        torch.testing.assert_close(table[-1], old_table[-1])
    tokens = random_ids(1, 300)
    logits = tiny_model(tokens).logits
    tiny_model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, logits)
