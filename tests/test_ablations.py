"""examples/research/ablations.py: ISTA in place of the MLP, unnormalized scores, norms after the residual connections."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import randomize, small_config, small_vision_config
from test_encoder import reference_encoder


sys.path.append(str(Path(__file__).parents[1] / "examples" / "research"))

from ablations import (
    AblatedDecoderLayer,
    ISTAStep,
    ToSTAblationForImageClassification,
    ToSTVisionAblationConfig,
    ablate,
    tssa_unnormalized,
)

from tost_hf import (
    TokenStatisticsSelfAttention,
    ToSTCache,
    ToSTConfig,
    ToSTForCausalLM,
    ToSTForImageClassification,
    ToSTModel,
    ToSTVisionConfig,
    tssa,
)
from tost_hf.hub.loading import empty_model


F64 = {"rtol": 1e-9, "atol": 1e-9}


def test_ista_is_a_proximal_gradient_step():
    """Of 1/2 |x - D a|^2 + threshold |a|_1 over a >= 0, starting from a = x, in closed form."""
    step = ISTAStep(12, step_size=0.05, threshold=0.3).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    code = x.clone().requires_grad_()
    objective = 0.5 * (x - code @ step.dictionary.T).square().sum()
    (gradient,) = torch.autograd.grad(objective, code)
    expected = (x - 0.05 * gradient - 0.05 * 0.3).clamp_min(0)
    torch.testing.assert_close(step(x), expected)
    assert sum(p.numel() for p in step.parameters()) == 12 * 12


def test_unnormalized_scores_are_sums_of_squares():
    layer = randomize(TokenStatisticsSelfAttention(16, 2, causal=False)).double()
    layer.operators = layer.operators._replace(tssa=tssa_unnormalized)
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    w, temp = layer.in_proj(x).view(5, 2, 8), layer.temp.flatten()
    pi = torch.stack([(temp * (w[t] ** 2).sum(-1)).softmax(0) for t in range(5)])
    expected = torch.empty_like(w)
    for h in range(2):
        moment = sum(pi[t, h] * w[t, h] ** 2 for t in range(5)) / (pi[:, h].sum() + 1e-8)
        expected[:, h] = -pi[:, h, None] * w[:, h] / (1 + moment)
    output, membership = layer(x)
    torch.testing.assert_close(membership[0], pi.T)
    torch.testing.assert_close(output[0], layer.out_proj(expected.flatten(1)))


@torch.no_grad()
def test_unnormalized_scores_have_the_bias_of_positions():
    w, temp, bias = torch.randn(1, 6, 2, 4), torch.ones(2), torch.randn(9, 2)
    positions, mask = torch.tensor([[7, 0, 1, 2, 3, 8]]), torch.tensor([[False, True, True, True, True, True]])
    out = tssa_unnormalized(w, temp, bias, positions=positions, mask=mask)
    expected = (w.square().sum(-1) + 4 * bias[positions]).softmax(-1)[0, 1:]
    torch.testing.assert_close(out.membership[0, :, 1:].t(), expected)
    assert not out.membership[0, :, 0].any() and not out.output[0, 0].any()
    assert not torch.allclose(out.membership, tssa(w, temp, bias, positions=positions, mask=mask).membership)


@pytest.mark.parametrize("pre_norm", [True, False])
@torch.no_grad()
def test_place_of_the_norms(pre_norm):
    model = ToSTModel(small_config(is_causal=False))
    ablate(model, pre_norm=pre_norm)
    model, tokens = randomize(model).eval().double(), torch.randint(1, 97, (1, 12))
    expected = reference_encoder(model, tokens[0], pre_norm)
    torch.testing.assert_close(model(tokens).last_hidden_state[0], expected, **F64)
    assert isinstance(model.layers[0], AblatedDecoderLayer) == (not pre_norm)


@pytest.mark.parametrize("pre_norm", [True, False])
@torch.no_grad()
def test_ablated_encoder_ignores_padding(pre_norm, batch):
    model = ToSTModel(small_config(is_causal=False))
    ablate(model, "ista", normalize_scores=False, pre_norm=pre_norm)
    model = randomize(model).eval().double()
    out = model(**batch).last_hidden_state
    for index, mask in enumerate(batch["attention_mask"].bool()):
        torch.testing.assert_close(out[index][mask], model(batch["input_ids"][index][mask][None])[0][0], **F64)


@pytest.mark.parametrize("fields", [{}, {"decay_type": "token", "conv_kernel": 4}], ids=["published", "decay"])
@torch.no_grad()
def test_decoding_equals_the_full_forward(fields):
    model = ToSTForCausalLM(small_config(**fields))
    ablate(model, "ista", ista_step_size=0.2, normalize_scores=False)
    model, tokens = randomize(model).eval().double(), torch.randint(1, 97, (2, 9))
    cache = ToSTCache(model.config)
    model(tokens[:, :6], past_key_values=cache)
    steps = [model(tokens[:, t : t + 1], past_key_values=cache).logits for t in range(6, 9)]
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens).logits[:, 6:], **F64)
    assert model.model.layers[0].mlp.step_size == 0.2


def test_hybrid_models_are_rejected():
    model = ToSTModel(small_config(layer_types=["full_attention", "linear_attention"]))
    with pytest.raises(ValueError, match="hybrid"):
        ablate(model, "ista")


@pytest.mark.parametrize("mlp_type, normalize_scores", list(itertools.product(["mlp", "ista"], [True, False])))
def test_image_classifiers_save_load_and_learn(mlp_type, normalize_scores, images, tmp_path):
    """Only the published variant equals the published model; all load again, and every weight has a gradient."""
    published_model = randomize(ToSTForImageClassification(small_vision_config()))
    fields = {"mlp_type": mlp_type, "normalize_scores": normalize_scores}
    sizes = {name: x for name, x in small_vision_config().to_dict().items() if name != "model_type"}
    config = ToSTVisionAblationConfig(**sizes | fields)
    model = randomize(ToSTAblationForImageClassification(config))
    is_published = mlp_type == "mlp" and normalize_scores
    assert torch.equal(model.eval()(images).logits, published_model.eval()(images).logits) == is_published
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert ("mlp_type" in fields) == (mlp_type == "ista") and ("normalize_scores" in fields) == (not normalize_scores)
    loaded, loading_info = ToSTAblationForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading_info.values()) and torch.equal(loaded(images).logits, model(images).logits)
    model.train()(images, labels=torch.tensor([0, 1])).loss.backward()
    assert all((p.grad != 0).any() for p in model.parameters())


@pytest.mark.parametrize(
    "config_class, model_class, name, fields, count",
    [
        (ToSTVisionConfig, ToSTForImageClassification, "tost-vision-small-patch16", {"num_labels": 10}, 9_794_842),
        (ToSTVisionConfig, ToSTForImageClassification, "tost-vision-small-patch16", {"num_labels": 1000}, 10_175_992),
        (ToSTConfig, ToSTForCausalLM, "tost-base", {}, 60_829_584),
    ],
)
def test_parameter_counts_with_ista(config_class, model_class, name, fields, count):
    config = config_class.from_preset(name, **fields)
    model = empty_model(config, model_class)
    published_count = model.num_parameters()
    with torch.device("meta"):
        ablate(model, "ista")
    assert model.num_parameters() == count
    use_bias, width = config_class is ToSTVisionConfig, config.hidden_size
    difference = 8 * width**2 + 5 * width * use_bias + width - width**2  # an MLP with its LayerScale, minus a dictionary
    assert published_count - count == config.num_hidden_layers * difference


@pytest.mark.parametrize("fields", [{"mlp_type": "swiglu"}, {"ista_step_size": 0.0}, {"ista_threshold": -1.0}], ids=str)
def test_invalid_fields(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        ToSTVisionAblationConfig(**fields)
