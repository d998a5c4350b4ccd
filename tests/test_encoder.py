"""Text encoders (`is_causal=False`) and heads: reference, padding, packing, saving, training, pipelines."""

import pytest
import torch
from conftest import randomize, small_config
from test_options import packed_inputs
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    pipeline,
)

from tost_hf import (
    ToSTCache,
    ToSTConfig,
    ToSTForCausalLM,
    ToSTForMaskedLM,
    ToSTForQuestionAnswering,
    ToSTForSequenceClassification,
    ToSTForTokenClassification,
    ToSTModel,
)
from tost_hf.hub import verify
from tost_hf.hub.cards import build_card
from tost_hf.hub.verification import info
from tost_hf.interpret import trace_model
from tost_hf.model.tssa_reference import bidirectional


F64 = {"rtol": 1e-10, "atol": 1e-10}
HEADS = {
    AutoModel: ToSTModel,
    AutoModelForMaskedLM: ToSTForMaskedLM,
    AutoModelForQuestionAnswering: ToSTForQuestionAnswering,
    AutoModelForSequenceClassification: ToSTForSequenceClassification,
    AutoModelForTokenClassification: ToSTForTokenClassification,
}
LABELS = {
    ToSTForMaskedLM: {"labels": torch.randint(0, 97, (3, 12))},
    ToSTForQuestionAnswering: {"start_positions": torch.tensor([1, 4, 2]), "end_positions": torch.tensor([3, 4, 6])},
    ToSTForSequenceClassification: {"labels": torch.tensor([0, 2, 1])},
    ToSTForTokenClassification: {"labels": torch.randint(0, 3, (3, 12))},
}


def make_model(model_class=ToSTModel, dtype=torch.float64, **fields):
    fields = {"is_causal": False, "pad_token_id": 0, "num_labels": 3} | fields
    return randomize(model_class(small_config(**fields))).eval().to(dtype)


def reference_encoder(model: ToSTModel, tokens: torch.Tensor, pre_norm: bool = True) -> torch.Tensor:
    """Reference implementation of the base model for one sequence (T,); returns (T, D)."""
    config = model.config
    x = model.embed_tokens.weight[tokens] + model.embed_positions.weight[: len(tokens)]
    for layer in model.layers:
        input_norm, post_norm = (
            lambda x, norm=norm: F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, config.layer_norm_eps)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        attention, mlp = layer.self_attn, layer.mlp

        def attend(x, attention=attention):
            w = (x @ attention.in_proj.weight.T).view(1, len(tokens), config.num_attention_heads, -1)
            out, _ = bidirectional(w, attention.temp.flatten())
            return out.flatten(2)[0] @ attention.out_proj.weight.T

        def transform(x, mlp=mlp):
            return F.gelu(x @ mlp.up_proj.weight.T) @ mlp.down_proj.weight.T

        if pre_norm:
            x = x + layer.attention_layer_scale * attend(input_norm(x))
            x = x + layer.mlp_layer_scale * transform(post_norm(x))
        else:
            x = input_norm(x + layer.attention_layer_scale * attend(x))
            x = post_norm(x + layer.mlp_layer_scale * transform(x))
    return F.layer_norm(x, x.shape[-1:], model.norm.weight, None, config.layer_norm_eps) if pre_norm else x


@torch.no_grad()
def test_padded_encoder_equals_reference():
    model = make_model()
    tokens, mask = torch.randint(1, 97, (5, 12)), torch.ones(5, 12, dtype=torch.long)
    mask[0, :5] = mask[1, 8:] = mask[2, :2] = mask[2, 9:] = mask[3, 4:6] = 0
    out = model(tokens, attention_mask=mask, output_hidden_states=True, output_memberships=True)
    assert out.past_key_values is None and len(out.hidden_states) == 3 and len(out.memberships) == 2
    for i, is_token in enumerate(mask.bool()):
        torch.testing.assert_close(out.last_hidden_state[i][is_token], reference_encoder(model, tokens[i][is_token]), **F64)
        torch.testing.assert_close(out.memberships[0][i].sum(0), is_token.double())


@pytest.mark.parametrize("style", ["position_ids", "seq_idx", "cu_seq_lens_q", "both"])
@pytest.mark.parametrize("max_position_embeddings", [128, None])
@torch.no_grad()
def test_packing_equals_separate_sequences(style, max_position_embeddings):
    model = make_model(max_position_embeddings=max_position_embeddings)
    lengths = (5, 1, 17, 9)
    tokens = torch.randint(1, 97, (1, 32))
    packed = model(tokens, **packed_inputs(style, lengths)).last_hidden_state
    expected = torch.cat([model(sequence).last_hidden_state for sequence in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, expected, **F64)


@pytest.mark.parametrize("pooling", [None, "mean", "first", "last"])
@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_pooling_ignores_padding(is_causal, pooling, batch):
    if is_causal and pooling == "first":
        pytest.skip("the first token of a causal model attends to no other")
    model = make_model(ToSTForSequenceClassification, is_causal=is_causal, pooling=pooling)
    out = model(**batch).logits
    effective_pooling = pooling or ("last" if is_causal else "mean")
    for i, is_token in enumerate(batch["attention_mask"].bool()):
        features = model.model(batch["input_ids"][i][is_token][None]).last_hidden_state[0]
        pooled = {"mean": features.mean(0), "first": features[0], "last": features[-1]}[effective_pooling]
        torch.testing.assert_close(out[i], model.score(pooled), **F64)


@pytest.mark.parametrize("auto_class", HEADS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_are_saved_loaded_and_trained(auto_class, is_causal, batch, tmp_path):
    """The Auto class loads all weights; every weight has a gradient, the same with gradient checkpointing."""
    model_class = HEADS[auto_class]
    if is_causal and model_class is ToSTForMaskedLM:
        pytest.skip("masked language models are encoders")
    model = make_model(model_class, torch.float32, is_causal=is_causal)
    model.save_pretrained(tmp_path)
    loaded, loading_info = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is model_class and not any(loading_info.values()) and loaded.config.is_causal == is_causal
    out = model(**batch, output_memberships=True)
    assert [x.shape for x in out.memberships] == [(3, 4, 12)] * model.config.num_hidden_layers
    assert torch.equal(loaded.eval()(**batch)[0], out[0])
    for i, is_token in enumerate(batch["attention_mask"].bool()):
        expected = model(batch["input_ids"][i][is_token][None])[0][0]
        is_pooled = model_class is ToSTForSequenceClassification
        torch.testing.assert_close(out[0][i] if is_pooled else out[0][i][is_token], expected, rtol=1e-4, atol=1e-4)
    if model_class is ToSTModel:
        return
    gradients = []
    for _ in range(2):
        model.train().zero_grad()
        model(**batch, **LABELS[model_class]).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        assert all((gradient != 0).any() for gradient in gradients[-1])
        model.gradient_checkpointing_enable()
    torch.testing.assert_close(*gradients)


def test_masked_labels_are_not_shifted(batch):
    model = make_model(ToSTForMaskedLM)
    labels = batch["input_ids"].masked_fill(torch.rand(3, 12) < 0.8, -100)
    out = model(**batch, labels=labels)
    expected = F.cross_entropy(out.logits.float().flatten(0, 1), labels.flatten())  # transformers' losses are in float32
    torch.testing.assert_close(out.loss, expected)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("model_class", [ToSTForMaskedLM, ToSTForSequenceClassification])
def test_causal_model_loaded_as_encoder(tmp_path, model_class):
    """`use_cache` follows `is_causal`, and options of causal models are rejected."""
    tokens = torch.tensor([[5, 6, 7]])
    ToSTForCausalLM(small_config()).save_pretrained(tmp_path)
    model = model_class.from_pretrained(tmp_path, is_causal=False)
    config = ToSTConfig.from_pretrained(tmp_path, is_causal=False)
    for encoder in (model, model_class(config)):
        assert "past_key_values" not in encoder(tokens) and not encoder.config.to_dict()["use_cache"]
    hybrid = small_config(layer_types=["full_attention", "linear_attention"])
    ToSTForCausalLM(hybrid).save_pretrained(tmp_path)
    hybrid.is_causal = False
    for load in (lambda: model_class.from_pretrained(tmp_path, is_causal=False), lambda: model_class(hybrid)):
        with pytest.raises(ValueError, match="layer_types is for causal models"):
            load()


@pytest.mark.parametrize(
    "attempt, message",
    [
        (lambda config, tokens: ToSTForCausalLM(config), "encoder .*cannot generate text"),
        (lambda config, tokens: ToSTCache(config), "encoder .*has no cache"),
        (lambda config, tokens: ToSTModel(config)(tokens, use_cache=True), "encoder .*has no cache"),
        (lambda config, tokens: ToSTModel(config)(tokens, past_key_values=DynamicCache(config=config)), "has no cache"),
        (lambda config, tokens: ToSTForMaskedLM(small_config()), "of a causal model: set is_causal=False"),
        (lambda config, tokens: ToSTConfig.from_preset("tost-lra-text"), "no preset 'tost-lra-text'.*tost-plus-base"),
    ],
)
def test_unsupported_uses_of_encoders_are_rejected(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt(small_config(is_causal=False), torch.ones(1, 4, dtype=torch.long))


@pytest.mark.parametrize(
    "task, model_class",
    [
        ("fill-mask", ToSTForMaskedLM),
        ("token-classification", ToSTForTokenClassification),
        ("text-classification", ToSTForSequenceClassification),
        ("feature-extraction", ToSTModel),
    ],
)
def test_pipelines_do_not_depend_on_the_batch_size(task, model_class, tokenizer):
    tokenizer.add_special_tokens({"mask_token": "<mask>", "pad_token": "<pad>"})
    model = make_model(model_class, torch.float32, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    run_pipeline = pipeline(task, model=model, tokenizer=tokenizer)
    texts = ["the <mask>", "the heads of <mask> model"] if task == "fill-mask" else ["the heads", "the heads of the model"]
    batched, unbatched = run_pipeline(texts, batch_size=2), run_pipeline(texts, batch_size=1)
    if task == "feature-extraction":  # includes the features of padding
        features = batched[0][0][: len(unbatched[0][0])]
        torch.testing.assert_close(torch.tensor(features), torch.tensor(unbatched[0][0]), rtol=1e-4, atol=1e-4)
        return
    for actual, expected in zip(batched, unbatched, strict=True):
        pairs = [(actual, expected)] if isinstance(actual, dict) else zip(actual, expected, strict=True)
        assert all(x["score"] == pytest.approx(y["score"], rel=1e-4) for x, y in pairs)


# Cards ------------------------------------------------------------------------------------------------------------------


def test_card_info_and_trace_of_encoders(tmp_path):
    folder = tmp_path / "model"
    make_model(ToSTForSequenceClassification, torch.float32, use_bias=True).save_pretrained(folder)
    facts = info(folder)
    assert facts["state"].startswith("none") and "is_causal False" in facts["options"]
    card = build_card(folder, license="mit").content
    for words in ("A text encoder", "is_causal False", "pooling mean"):
        assert words in card
    assert "goes beyond" not in card and "bytes per sequence" not in card and "Quality at equal width" not in card
    (folder / "README.md").write_text(card)
    assert all(check.passed for check in verify(folder))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert trace_model(model, input_ids=torch.ones(2, 9, dtype=torch.long)).memberships.shape == (2, 2, 4, 9)


@pytest.mark.parametrize("model_class", list(HEADS.values()))
def test_card_examples_run(model_class, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_model(model_class, torch.float32).save_pretrained("model")
    example = build_card("model", license="mit").content.split("```python\n", 1)[1].split("```", 1)[0]
    exec(compile(example, "card", "exec"), {})
