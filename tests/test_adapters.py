"""PEFT adapters on ToST: linear layers, embeddings, single tokens; training, saving, loading, merging; new heads."""

import copy

import pytest
import torch
from conftest import randomize, small_config, tiny_vision_model
from safetensors.torch import load_model, save_model

from tost_hf import ToSTForCausalLM, ToSTForSequenceClassification


peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")

TOKENS = torch.arange(1, 25).reshape(2, 12)
PROJECTIONS = ["in_proj", "out_proj"]


def language_model(**fields) -> torch.nn.Module:
    return randomize(ToSTForCausalLM(small_config(**fields))).eval()


def train(model: torch.nn.Module, steps: int = 5) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


CASES = {
    "projections": ({}, {"target_modules": PROJECTIONS}),
    "all linear layers": ({}, {"target_modules": "all-linear"}),
    "tokens of the vocabulary": ({}, {"target_modules": ["in_proj"], "trainable_token_indices": [1, 2, 3]}),
    "embeddings": ({"tie_word_embeddings": False}, {"target_modules": ["embed_tokens", "embed_positions", "in_proj"]}),
    "decay and convolution": ({"decay_type": "token", "conv_kernel": 4}, {"target_modules": "all-linear"}),
}


@pytest.mark.parametrize("fields, options", CASES.values(), ids=CASES)
def test_train_save_load_and_merge(tmp_path, fields, options):
    base = language_model(**fields)
    base_logits = base(TOKENS).logits.detach()
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options)).eval()
    torch.testing.assert_close(adapted(TOKENS).logits, base_logits)
    initial_loss = adapted(TOKENS, labels=TOKENS).loss.item()
    train(adapted)
    assert adapted(TOKENS, labels=TOKENS).loss.item() < initial_loss - 0.3
    trained_logits = adapted(TOKENS).logits.detach()
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(language_model(**fields), tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(TOKENS).logits, trained_logits)
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = ToSTForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(TOKENS).logits, trained_logits, rtol=1e-4, atol=1e-4)


CLASSIFIERS = {
    "text": (
        lambda: ToSTForSequenceClassification(small_config(num_labels=10, pad_token_id=0)),
        torch.randint(1, 97, (32, 12)),
    ),
    "images": (lambda: tiny_vision_model(num_labels=10), 3 * torch.rand(32, 3, 16, 16) + 1),
}
TRAINED_PARTS = {
    "LoRA": {},
    "LoRA and head": {"modules_to_save": ["classifier", "score"]},
    "LoRA and biases": {"bias": "all"},
    "LoRA and embeddings": {"modules_to_save": ["patch_embeddings", "embed_tokens"]},
    "LoRA and one normalization": {"modules_to_save": ["norms.0", "layers.0.input_layernorm"]},
    "new head": None,
}


@pytest.mark.parametrize("make_model, inputs", CLASSIFIERS.values(), ids=CLASSIFIERS)
@pytest.mark.parametrize("options", TRAINED_PARTS.values(), ids=TRAINED_PARTS)
def test_reloaded_classifiers_predict_the_same(tmp_path, make_model, inputs, options):
    """Training changes nothing that is not saved, such as BatchNorm's running statistics."""
    model = randomize(make_model())
    loaded, labels = copy.deepcopy(model), torch.arange(32) % 10
    if options is None:
        model.base_model.requires_grad_(False)
    else:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=PROJECTIONS, **options))
    optimizer = torch.optim.AdamW([p for p in model.train().parameters() if p.requires_grad], lr=0.02)
    for _ in range(5):
        model(inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if options is None:
        head = "classifier" if hasattr(model, "classifier") else "score"
        save_model(getattr(model, head), tmp_path / "head.safetensors")
        load_model(getattr(loaded, head), tmp_path / "head.safetensors")
    else:
        model.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(loaded, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(inputs).logits, model.eval()(inputs).logits)


@pytest.mark.parametrize("options", [{}, {"use_dora": True, "exclude_modules": ["forget_proj"]}], ids=["LoRA", "DoRA"])
def test_all_linear_layers_of_a_new_model(options):
    """DoRA divides by the norm of a weight, which is 0 in a new forget_proj."""
    fields = {"decay_type": "token", "layer_types": ["linear_attention", "full_attention"]}
    model = ToSTForCausalLM(small_config(**fields))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", **options))
    train(adapted)
    assert adapted(TOKENS).logits.isfinite().all()
    names = {name.split(".")[-4] for name, _ in adapted.named_parameters() if "lora_A" in name}
    excluded = {"forget_proj"} if options else set()
    assert names == {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "up_proj", "down_proj", "forget_proj"} - excluded
