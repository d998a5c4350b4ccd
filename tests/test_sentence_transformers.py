"""sentence-transformers: embeddings and scores of texts, with and without position tables."""

import pytest
import torch
from conftest import randomize
from hub_clients import save_tokenizer
from transformers import AutoTokenizer

from tost_hf import ToSTConfig, ToSTForSequenceClassification, ToSTModel


sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

KINDS = {  # presets, of which larger ones differ in size alone, and encoders
    "tost-base": {},
    "tost-plus-base": {},
    "tost-hybrid-base": {},
    "encoder": {"is_causal": False, "use_bias": True, "max_position_embeddings": 2048},
}
TEXTS = [("a few words. " * 300)[:3000], "a few words."]  # a token is a byte
PAIRS = [(TEXTS[0][:1600], TEXTS[0][:1400]), ("a few", "words")]


def save_model(model_class, kind: str, folder, **options):
    """Saves a small model of a kind, and a tokenizer of bytes."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 320}
    options |= sizes | {"bos_token_id": 0, "eos_token_id": 0} | KINDS[kind]
    config = ToSTConfig(**options) if kind == "encoder" else ToSTConfig.from_preset(kind, **options)
    model = randomize(model_class(config)).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_sentence_transformer(tmp_path, kind):
    """Embeddings of 3,000 tokens are the mean of the features, of as many tokens as the model has positions for."""
    model = save_model(ToSTModel, kind, tmp_path / "model")
    encoder = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    embeddings = encoder.encode(TEXTS, convert_to_tensor=True)
    for text, embedding in zip(TEXTS, embeddings):
        tokens = encoder.tokenizer(text, return_tensors="pt")["input_ids"]
        assert tokens.shape[1] == len(text)
        with torch.no_grad():
            features = model(tokens[:, : min(3000, model.config.max_position_embeddings)]).last_hidden_state
        torch.testing.assert_close(embedding, features[0].mean(0), rtol=1e-4, atol=1e-5)
    encoder.save(str(tmp_path / "saved"))
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert torch.equal(loaded.encode(TEXTS, convert_to_tensor=True), embeddings)


@pytest.mark.parametrize("kind", KINDS)
def test_cross_encoder(tmp_path, kind):
    model = save_model(ToSTForSequenceClassification, kind, tmp_path / "model", num_labels=1, pad_token_id=0)
    scorer = sentence_transformers.CrossEncoder(str(tmp_path / "model"), device="cpu")
    scores = scorer.predict(PAIRS, convert_to_tensor=True)
    with torch.no_grad():
        expected = model(**scorer.tokenizer(*PAIRS[1], return_tensors="pt")).logits[0].sigmoid()
    torch.testing.assert_close(scores[1:], expected, rtol=1e-4, atol=1e-5)
    scorer.save_pretrained(str(tmp_path / "saved"))
    loaded = sentence_transformers.CrossEncoder(str(tmp_path / "saved"), device="cpu")
    assert torch.equal(loaded.predict(PAIRS, convert_to_tensor=True), scores)
