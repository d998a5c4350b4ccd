"""The paper's ablations as options: ISTA in place of the MLP, unnormalized scores; language and vision models."""

import itertools
import json
from unittest.mock import Mock

import pytest
import torch
from conftest import randomize, small_config, small_vision_config
from torch.distributed.device_mesh import DeviceMesh

from tost_hf import (
    TokenStatisticsSelfAttention,
    ToSTConfig,
    ToSTForCausalLM,
    ToSTForImageClassification,
    ToSTModel,
    ToSTVisionConfig,
)
from tost_hf.convert import convert_to_original
from tost_hf.hub.cards import build_card
from tost_hf.hub.loading import empty_model
from tost_hf.hub.verification import info
from tost_hf.interpret import trace_model
from tost_hf.model.layers_tost import ISTAStep
from tost_hf.parallel import parallelize


F64 = {"rtol": 1e-9, "atol": 1e-9}
ISTA_UNNORMALIZED = {"mlp_type": "ista", "normalize_scores": False}


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


def test_unnormalised_scores_are_sums_of_squares():
    layer = randomize(TokenStatisticsSelfAttention(16, 2, causal=False, normalize_scores=False)).double()
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


@pytest.mark.parametrize("pre_norm", [True, False])
@torch.no_grad()
def test_ablated_encoder_ignores_padding(pre_norm, batch):
    model = randomize(ToSTModel(small_config(is_causal=False, pre_norm=pre_norm, **ISTA_UNNORMALIZED))).eval().double()
    out = model(**batch).last_hidden_state
    for index, mask in enumerate(batch["attention_mask"].bool()):
        torch.testing.assert_close(out[index][mask], model(batch["input_ids"][index][mask][None])[0][0], **F64)


@pytest.mark.parametrize("mlp_type, normalize_scores", list(itertools.product(["mlp", "ista"], [True, False])))
def test_vision_models_save_load_and_learn(mlp_type, normalize_scores, images, tmp_path):
    """Only the published variant equals the published model; all load again, and every weight has a gradient."""
    published_model = randomize(ToSTForImageClassification(small_vision_config()))
    model = randomize(ToSTForImageClassification(small_vision_config(mlp_type=mlp_type, normalize_scores=normalize_scores)))
    is_published = mlp_type == "mlp" and normalize_scores
    assert torch.equal(model.eval()(images).logits, published_model.eval()(images).logits) == is_published
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert ("mlp_type" in fields) == (mlp_type == "ista") and ("normalize_scores" in fields) == (not normalize_scores)
    loaded, loading_info = ToSTForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
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
    config = config_class.from_preset(name, mlp_type="ista", **fields)
    assert empty_model(config, model_class).num_parameters() == count
    published_count = empty_model(config_class.from_preset(name, **fields), model_class).num_parameters()
    use_bias, width = config_class is ToSTVisionConfig, config.hidden_size
    difference = 8 * width**2 + 5 * width * use_bias + width - width**2  # an MLP with its LayerScale, minus a dictionary
    assert published_count - count == config.num_hidden_layers * difference


BEYOND = {"forgetting": "token", "conv_kernel": 4}
HYBRID = BEYOND | {"layer_types": ["tost_causal_statistics", "full_attention"], "max_position_embeddings": None}


@pytest.mark.parametrize(
    "options, is_vision, words",
    [
        (ISTA_UNNORMALIZED, False, ["mlp_type ista", "normalize_scores False"]),
        (ISTA_UNNORMALIZED, True, ["mlp_type ista", "normalize_scores False"]),
        (BEYOND, False, ["forgetting token", "conv_kernel 4"]),
        (HYBRID, False, ["forgetting token", "conv_kernel 4"]),
    ],
    ids=["ablations", "vision ablations", "decay", "hybrid"],
)
def test_card_info_trace_and_conversion(options, is_vision, words, images, tmp_path):
    if is_vision:
        model, inputs = ToSTForImageClassification(small_vision_config(**options)), {"pixel_values": images}
    else:
        model, inputs = ToSTForCausalLM(small_config(**options)), {"input_ids": torch.randint(1, 97, (2, 9))}
    randomize(model).save_pretrained(tmp_path)
    description, card = info(tmp_path), build_card(tmp_path, license="mit").content
    assert all(word in description["options"] and word in card for word in words)
    assert ("of the MLP" in card) == ("mlp_type" not in options) and ("goes beyond the paper" in card) == (
        "forgetting" in options
    )
    assert (
        ("256 with every token" in card)
        == ("256 with every token" in description.get("state", ""))
        == ("layer_types" in options)
    )
    trace = trace_model(model, **inputs)
    torch.testing.assert_close(trace.memberships.sum(2), torch.ones_like(trace.memberships[:, :, 0]), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"the authors' format has|a model in the authors' format has mlp_type='mlp'"):
        convert_to_original(tmp_path, tmp_path / "checkpoint.pth")


def test_context_parallel_rejects_unnormalised_scores():
    with pytest.raises(ValueError, match="does not support normalize_scores=False"):
        parallelize(ToSTModel(small_config(normalize_scores=False)), Mock(spec=DeviceMesh, ndim=1))


def test_tensor_parallel_does_not_shard_dictionaries():
    plan = small_config(mlp_type="ista").base_model_tp_plan
    assert not [name for name in plan if "mlp" in name] and "layers.*.mlp.down_proj" in small_config().base_model_tp_plan
