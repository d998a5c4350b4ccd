"""Tracing a model: it is left unchanged, and invalid inputs are rejected."""

import copy

import pytest
import torch
from conftest import tiny_vision_model
from transformers import GPT2Config, GPT2Model

from tost_hf import interpret


def count_hooks(model):
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


@pytest.mark.parametrize("kind", ["language", "vision"])
def test_model_is_unchanged(kind, tiny_model, texts, images):
    model, inputs = (
        (tiny_model, texts) if kind == "language" else (tiny_vision_model(hidden_dropout=0.5), {"pixel_values": images})
    )
    before = model(**inputs).logits
    state, hooks = copy.deepcopy(model.state_dict()), count_hooks(model)
    trunk = model.base_model
    model.train()
    trunk.layers[1].eval()  # frozen in evaluation mode by its owner
    flags = [module.training for module in model.modules()]
    first = interpret.trace_model(model, **inputs)
    assert [module.training for module in model.modules()] == flags and True in flags and False in flags
    assert torch.equal(first.memberships, interpret.trace_model(model, **inputs).memberships)  # no dropout
    assert not any(w.requires_grad for w in first.projections)

    wrong = {"pixel_values": images[..., :-1]} if kind == "vision" else {"input_ids": texts["input_ids"] + 1000}
    with pytest.raises((ValueError, IndexError), match=r"multiples of the patch size|input_ids must lie"):
        interpret.trace_model(model, **wrong)
    assert [module.training for module in model.modules()] == flags
    assert count_hooks(model) == hooks
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values()))
    assert torch.equal(model.eval()(**inputs).logits, before)


def test_compiled_models_are_traced(tiny_model, texts):
    plain = interpret.trace_model(tiny_model, **texts)
    compiled = torch.compile(tiny_model, backend="eager")
    with torch.no_grad():
        compiled(**texts)
    assert torch.equal(interpret.trace_model(compiled, **texts).memberships, plain.memberships)


@pytest.mark.parametrize("attention_type", ["xca", "softmax"])
def test_baselines_are_rejected(attention_type, images, tmp_path):
    model = tiny_vision_model(attention_type=attention_type)
    with pytest.raises(ValueError, match=f"attention_type is '{attention_type}', and only 'tssa'"):
        interpret.trace_model(model, pixel_values=images)
    with pytest.raises(ValueError, match="only 'tssa'"):
        interpret.inspect_model(model, None, tmp_path / "photo.png", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_invalid_inputs_are_rejected(tiny_model, texts, images):
    with pytest.raises(ValueError, match="not a ToST model"):
        interpret.trace_model(GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9)), input_ids=texts["input_ids"])
    with pytest.raises(ValueError, match="This model takes input_ids and attention_mask, got \\['pixel_values'\\]"):
        interpret.trace_model(tiny_model, pixel_values=images)
    with pytest.raises(ValueError, match="This model takes pixel_values, got nothing"):
        interpret.trace_model(tiny_vision_model())
    texts["attention_mask"][1] = 0
    with pytest.raises(ValueError, match="masks a whole sequence"):
        interpret.trace_model(tiny_model, **texts)
