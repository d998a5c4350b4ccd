"""The experiments' language models: parameter counts, the ablation without statistics, the baseline with convolution."""

import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))

import compare_lm
import language_models
import synthetic
import training


@pytest.mark.parametrize("name", ["ToST", "ToST conv, no statistics", "GPT-2 conv", "Mamba-2"])
def test_models_have_the_requested_size_and_learn(name):
    torch.manual_seed(0)
    model = language_models.make_language_model(name, vocab_size=16, width=32, layers=2, head_dim=16, context=16)
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (32, 2)

    def make(rng):
        return synthetic.make_locality_batch(rng, "copy 0", 8, 16)

    held_out = list(training.Batches(make, 2, 99))
    trainer = training.train(model, training.Batches(make, 40, 0), steps=40, learning_rate=2e-2, seed=0)
    assert trainer.state.global_step == 40
    assert training.label_accuracy(model, held_out) > 0.9


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("name", language_models.MODELS)
def test_compared_models_have_as_many_parameters_as_gpt2(name, size):
    size = compare_lm.SIZES[size]
    sizes = {"width": size.width, "head_dim": size.head_dim, "context": size.context, "vocab_size": size.vocab_size}
    gpt2 = language_models.count_parameters("GPT-2", layers=size.layers, **sizes)
    equal_sizes = language_models.match_gpt2_size(name, layers=size.layers, **sizes)
    assert language_models.count_parameters(name, **equal_sizes) == pytest.approx(gpt2, rel=0.01)


def test_ablation_without_statistics():
    size = {"vocab_size": 16, "width": 32, "layers": 1, "head_dim": 16, "context": 16}
    torch.manual_seed(0)
    model = language_models.make_language_model("ToST conv, no statistics", **size)
    assert not any("temp" in name or "denom_bias" in name for name, _ in model.named_parameters())
    layer = model.model.layers[0].self_attn
    torch.nn.init.normal_(layer.convolution.weight)
    x = torch.randn(1, 9, 32)
    convolved = x + sum(layer.convolution.weight[:, j] * torch.nn.functional.pad(x, (0, 0, j, 0))[:, :9] for j in range(4))
    torch.testing.assert_close(layer(x)[0], layer.out_proj(-layer.in_proj(convolved)))
    tokens = torch.randint(16, (1, 9))
    changed_tokens = tokens.clone()
    changed_tokens[0, 0] = (tokens[0, 0] + 1) % 16
    with torch.no_grad():
        logits, changed_logits = (model.eval()(ids).logits[0] for ids in (tokens, changed_tokens))
    assert torch.equal(logits[4:], changed_logits[4:])  # the kernel size is 4
    assert not torch.allclose(logits[3], changed_logits[3])


def test_gpt2_with_convolution_equals_gpt2_at_first_and_is_causal():
    size = {"vocab_size": 16, "width": 32, "layers": 2, "head_dim": 16, "context": 16}
    models = []
    for name in ("GPT-2", "GPT-2 conv"):
        torch.manual_seed(0)
        models.append(language_models.make_language_model(name, **size).eval())
    gpt2, gpt2_conv = models
    tokens = torch.randint(16, (1, 9))
    with torch.no_grad():
        torch.testing.assert_close(gpt2(tokens).logits, gpt2_conv(tokens).logits)
        for block in gpt2_conv.transformer.h:
            torch.nn.init.normal_(block.attn.c_attn.convolution.weight)
        logits = gpt2_conv(tokens).logits
        torch.testing.assert_close(gpt2_conv(tokens[:, :5]).logits, logits[:, :5])
    assert not torch.allclose(gpt2(tokens).logits, logits)
