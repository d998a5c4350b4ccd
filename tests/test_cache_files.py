"""Documents that are read once: chunked prefill, files of their state."""

import pytest
import torch
from conftest import randomize, small_config
from hub_clients import save_tokenizer
from transformers import GenerationMixin, pipeline

from tost_hf import ToSTCache, ToSTForCausalLM, load_cache, prefill_cache, save_cache
from tost_hf.model import modeling_tost


OPTIONS = {"vocab_size": 320, "max_position_embeddings": None, "bos_token_id": 0, "eos_token_id": None, "conv_kernel": 3}
LAYERS = ["tost_causal_statistics", "full_attention", "sliding_attention"]
HYBRID = {"layer_types": LAYERS, "num_hidden_layers": 3, "sliding_window": 8}
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def model():
    return randomize(ToSTForCausalLM(small_config(**OPTIONS))).eval()


@pytest.fixture
def tokens():
    return torch.randint(1, 320, (1, 150), generator=torch.Generator().manual_seed(0))


def test_a_saved_document_is_continued_as_if_it_had_been_read(model, tokens, tmp_path):
    save_cache(prefill_cache(model, tokens, chunk_size=40), tmp_path / "x")
    cache = load_cache(tmp_path / "x", model.config)
    assert cache.get_seq_length() == 150
    whole = torch.cat([tokens, torch.tensor([[5, 6]])], 1)
    assert torch.equal(model.generate(whole, past_key_values=cache, **GREEDY), model.generate(whole, **GREEDY))


def test_documents_that_cannot_be_read(model, tokens):
    with pytest.raises(ValueError, match="at least one token"):
        prefill_cache(model, tokens[:, :0])
    with pytest.raises(ValueError, match="positions for 16: use a shorter text"):
        prefill_cache(ToSTForCausalLM(small_config(vocab_size=320, max_position_embeddings=16)), tokens)


# Long prompts in generate ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "tiny")
    save_tokenizer(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize("options", [{}, HYBRID], ids=["ToST", "hybrid"])
@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 2}], ids=str)
def test_long_prompts_are_read_in_chunks(options, kwargs, monkeypatch):
    assert hasattr(GenerationMixin, "_prefill"), "transformers has renamed the hook that chunks long prompts."
    monkeypatch.setattr(modeling_tost, "PREFILL_CHUNK_SIZE", 64)
    model = randomize(ToSTForCausalLM(small_config(**OPTIONS | options))).eval()
    prompt = torch.randint(1, 320, (2 if not kwargs else 1, 200))
    mask = torch.ones_like(prompt)
    mask[0, :70] = 0
    sizes = []
    model.register_forward_pre_hook(lambda _, args, inputs: sizes.append(inputs["input_ids"].shape[1]), with_kwargs=True)
    chunked = model.generate(prompt, attention_mask=mask, **GREEDY, **kwargs)
    assert sizes[:4] == [64, 64, 64, 8] and max(sizes[4:]) <= 3
    sizes.clear()
    whole = model.generate(prompt, attention_mask=mask, prefill_chunk_size=1000, **GREEDY, **kwargs)
    assert sizes[0] == 200 and torch.equal(chunked, whole)


def test_a_long_prompt_of_the_pipeline(folder, monkeypatch):
    monkeypatch.setattr(modeling_tost, "PREFILL_CHUNK_SIZE", 64)
    generator, sizes = pipeline("text-generation", str(folder)), []
    generator.model.register_forward_pre_hook(
        lambda _, args, inputs: sizes.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    (answer,) = generator("import os\n" * 20, max_new_tokens=3, do_sample=False)
    assert sizes[:4] == [64, 64, 64, 8] and answer["generated_text"].startswith("import os\n" * 20)


def test_long_prompts_show_a_progress_bar(model, tokens, monkeypatch, capsys):
    monkeypatch.setattr(modeling_tost, "PREFILL_CHUNK_SIZE", 64)
    monkeypatch.setattr(modeling_tost, "PROGRESS_DELAY", 0)
    model.generate(tokens, **GREEDY)
    assert "Prefill" in (shown := capsys.readouterr().err) and "150/150" in shown
    model.generate(tokens[:, :60], past_key_values=ToSTCache(model.config), **GREEDY)
    assert capsys.readouterr().err == ""
