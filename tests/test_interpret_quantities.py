"""Quantities of a trace, each compared with an independent implementation of its definition in loops."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from conftest import randomize, small_config, tiny_vision_model
from torch import nn
from transformers import GPT2Config, GPT2Model

import tost_hf
from tost_hf import interpret
from tost_hf.interpret import quantities
from tost_hf.interpret.trace import tssa_layers
from tost_hf.model import tssa_reference


@pytest.fixture(params=["language", "vision"])
def model_and_inputs(request, tiny_model, batch, images):
    if request.param == "language":
        return tiny_model.double(), batch
    return tiny_vision_model(hidden_dropout=0.5).double(), {"pixel_values": images.double()}


def compute_projections(model, **inputs):
    """Computes w of every layer, (B, T, H, p), from the hidden states."""
    hidden_states = copy.deepcopy(model)(**inputs, output_hidden_states=True).hidden_states
    norm = "attention_norm" if "pixel_values" in inputs else "input_layernorm"
    projections = []
    for layer, tssa, x in zip(model.base_model.layers, tssa_layers(model).values(), hidden_states):
        w = nn.functional.linear(getattr(layer, norm)(x), tssa.in_proj.weight, tssa.in_proj.bias)
        projections.append(w.detach().unflatten(-1, (tssa.num_heads, -1)))
    return projections


def compute_terms(w, membership, normalization):
    """Both compression terms of one image or sequence, from w (T, H, p) and Pi (H, T) without padding."""
    T, H, p = w.shape
    variational = coding_rate = 0.0
    for k in range(H):
        tokens = w[:, k].numpy().astype(np.float64)
        weights = membership[k].numpy().astype(np.float64)
        if normalization == "tokens":
            tokens, c = np.stack([token / math.sqrt((token**2).sum()) for token in tokens]), p / 0.01
        else:
            tokens, c = tokens / np.sqrt((tokens**2).sum(0)), T / 0.01
        n_k = sum(weights)
        log_sum = 0.0
        for i in range(p):
            s = sum(weights[j] * tokens[j, i] ** 2 for j in range(T)) / n_k
            log_sum += math.log(1 + c * s)
        variational += 0.5 * n_k / T * log_sum
        scatter = tokens.T @ np.diag(weights) @ tokens
        coding_rate += 0.5 * n_k / T * math.log(np.linalg.det(np.eye(p) + c / n_k * scatter))
    return variational, coding_rate


def make_trace(w, membership, mask=None):
    """A trace of one layer from w (B, T, H, p) and Pi (B, H, T)."""
    mask = torch.ones(w.shape[:2], dtype=torch.bool) if mask is None else mask
    return interpret.ModelTrace((0,), (w,), membership[:, None], mask, None, None, None)


def test_memberships(model_and_inputs):
    model, inputs = model_and_inputs
    trace = interpret.trace_model(model, **inputs)
    mask, maps = trace.mask, interpret.membership_maps(trace)
    assert maps.dtype == torch.float64 and maps.shape == ((2, 3, 4, 4, 6) if trace.grid else (3, 3, 4, 12))
    maps = maps.flatten(3)  # patches are in row-major order
    for i, (w, attention) in enumerate(zip(compute_projections(model, **inputs), tssa_layers(model).values())):
        torch.testing.assert_close(trace.projections[i][mask], w[mask], atol=1e-10, rtol=0)
        temp = attention.temp.detach().flatten().double()
        if trace.grid:
            _, membership = tssa_reference.bidirectional(w, temp)
        else:
            bias = attention.denom_bias.detach()[:, :, 0].double()[:, (mask.cumsum(1) - 1).clamp_min(0)]  # (H, B, T)
            _, membership, _ = tssa_reference.causal(w, temp, bias.permute(1, 2, 0), ~mask)
        torch.testing.assert_close(maps[:, i], membership.transpose(1, 2), atol=1e-9, rtol=0)
    torch.testing.assert_close(maps.sum(2), mask[:, None].double().expand(-1, 3, -1), atol=1e-12, rtol=0)


@pytest.fixture(params=["head", "token"])
def decaying_model(request):
    """A hybrid with a convolution; the second of its three layers is softmax attention."""
    layer_types = ["tssa", "full_attention", "tssa"]
    options = {"decay_type": request.param, "conv_kernel": 4, "position_embedding_type": "none"}
    config = small_config(num_hidden_layers=3, layer_types=layer_types, **options)
    return randomize(tost_hf.ToSTForCausalLM(config)).double().eval()


@torch.no_grad()
def test_token_decay_matches_the_reference(decaying_model, batch):
    """The reference implementation returns the model's memberships with this decay."""
    trace = interpret.trace_model(decaying_model, **batch)
    decay, padding = interpret.token_decay(trace), ~trace.mask
    assert decay.shape == trace.memberships.shape == (3, 2, 4, 12) and decay.dtype == torch.float64
    assert (decay.transpose(2, 3).transpose(1, 2)[padding] == 1).all() and padding.any()
    layers = [decaying_model.model.layers[i].self_attn for i in (0, 2)]
    for i, (layer, w) in enumerate(zip(layers, trace.projections)):
        log_decay = trace.log_decay[:, i].transpose(1, 2)
        _, membership, _ = tssa_reference.causal(w, layer.temp.flatten(), None, padding, log_decay=log_decay)
        torch.testing.assert_close(trace.memberships[:, i], membership.transpose(1, 2), atol=1e-9, rtol=0)


def test_missing_quantities_are_rejected(tiny_model, batch):
    trace = interpret.trace_model(tiny_model, **batch)
    assert trace.log_decay is None
    for function, source in (
        (interpret.token_decay, trace),
        (interpret.half_life, trace),
        (interpret.half_life, tiny_model),
    ):
        with pytest.raises(ValueError, match="no decay"):
            function(source)
    with pytest.raises(ValueError, match="no class-attention layers"):
        interpret.class_attention_maps(trace)


def test_class_attention_has_the_class_token_as_query(images):
    model = tiny_vision_model().double()
    maps = interpret.class_attention_maps(interpret.trace_model(model, pixel_values=images.double()))
    assert maps.shape == (2, 2, 4, 4, 6) and maps.dtype == torch.float64
    patches = copy.deepcopy(model)(pixel_values=images.double(), output_hidden_states=True).hidden_states[-1]
    block = model.tost.class_attention_layers[0]
    x = block.attention_norm(torch.cat([model.tost.class_token.expand(2, 1, -1), patches], 1))
    query, key, _ = (x @ block.attention.qkv.weight.T + block.attention.qkv.bias).split(32, -1)
    for head in range(4):
        q, k = query[:, 0, 8 * head : 8 * head + 8], key[:, :, 8 * head : 8 * head + 8]
        weights = torch.stack([(q * k[:, j]).sum(-1) for j in range(25)], -1).div(math.sqrt(8)).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        torch.testing.assert_close(maps[:, 0, head].flatten(1), weights[:, 1:], atol=1e-10, rtol=0)


@pytest.mark.parametrize("normalization", interpret.NORMALIZATIONS)
def test_compression_terms(model_and_inputs, normalization):
    model, inputs = model_and_inputs
    trace = interpret.trace_model(model, **inputs)
    terms = interpret.compression_terms(trace, normalization)
    assert terms.variational.shape == terms.coding_rate.shape == (len(trace.mask), 3)
    for layer, w in enumerate(compute_projections(model, **inputs)):
        for i, mask in enumerate(trace.mask):
            expected = compute_terms(w[i, mask], trace.memberships[i, layer][:, mask], normalization)
            actual = terms.variational[i, layer].item(), terms.coding_rate[i, layer].item()
            assert actual == pytest.approx(expected, rel=1e-9)
    assert (terms.variational > terms.coding_rate).all()


@pytest.mark.parametrize("normalization", interpret.NORMALIZATIONS)
def test_published_plateau(normalization):
    """Channels of equal variance give the paper's 24 ln 101 = 110.76, whatever the memberships."""
    w = torch.randint(0, 2, (2, 30, 8, 48)).double() * 2 - 1
    membership = torch.rand(2, 8, 30).double().softmax(1)
    terms = interpret.compression_terms(make_trace(7 * w, membership), normalization)
    torch.testing.assert_close(terms.variational, torch.full((2, 1), 24 * math.log(101), dtype=torch.float64))
    assert 24 * math.log(101) == pytest.approx(110.76, abs=0.005)


def test_head_without_members_is_ignored():
    w = torch.randn(1, 6, 2, 4)
    membership = torch.zeros(1, 2, 6, dtype=torch.float64)
    membership[:, 0] = 1
    two_heads = interpret.compression_terms(make_trace(w, membership))
    one_head = interpret.compression_terms(make_trace(w[:, :, :1], membership[:, :1]))
    torch.testing.assert_close(two_heads.variational, one_head.variational)
    torch.testing.assert_close(two_heads.coding_rate, one_head.coding_rate)


def test_subspace_gram(tiny_model):
    gram = interpret.subspace_gram(tiny_model, 1)
    weight = tiny_model.model.layers[1].self_attn.in_proj.weight.detach().double()
    assert gram.shape == (32, 32) and gram.dtype == torch.float64
    for (i, u), (j, v) in itertools.product(enumerate(weight), repeat=2):  # w = x W^T: columns of U are rows of the weight
        assert gram[i, j].item() == pytest.approx(abs(u @ v).item() / (u.norm() * v.norm()).item())
    nn.init.orthogonal_(tiny_model.model.layers[1].self_attn.in_proj.weight, gain=3)
    torch.testing.assert_close(interpret.subspace_gram(tiny_model, 1), torch.eye(32).double(), atol=1e-6, rtol=0)
    for layer in (3, -1):
        with pytest.raises(ValueError, match=f"There is no TSSA layer {layer}: the model's are 0, 1, 2, counted from 0"):
            interpret.subspace_gram(tiny_model, layer)


def test_layers_have_the_numbers_of_their_weights(decaying_model, batch):
    """Layer 1 of this hybrid is softmax attention."""
    assert interpret.trace_model(decaying_model, **batch).layers == (0, 2)
    weight = decaying_model.state_dict()["model.layers.2.self_attn.in_proj.weight"]
    columns = nn.functional.normalize(weight, dim=1)
    torch.testing.assert_close(interpret.subspace_gram(decaying_model, 2), (columns @ columns.T).abs())
    with pytest.raises(ValueError, match="There is no TSSA layer 1: the model's are 0, 2,"):
        interpret.subspace_gram(decaying_model, 1)


def test_entropy(tiny_model, batch):
    trace = interpret.trace_model(tiny_model, **batch)
    entropy = interpret.membership_entropy(trace)
    assert entropy.shape == (3, 3, 12)
    buckets = interpret.entropy_by_position(trace)
    assert buckets.starts == [0, 1, 2, 4, 8] and buckets.entropy.shape == (3, 5)
    for layer in range(3):
        expected_buckets = [[], [], [], [], []]
        for i, mask in enumerate(trace.mask):
            assert entropy[i, layer, ~mask].isnan().all()
            for position, t in enumerate(mask.nonzero().flatten()):
                expected = -sum(x * math.log(x) for x in trace.memberships[i, layer, :, t].tolist())
                assert entropy[i, layer, t].item() == pytest.approx(expected, abs=1e-12)
                expected_buckets[position.bit_length()].append(expected)
        expected = [sum(values) / len(values) for values in expected_buckets]
        assert buckets.entropy[layer].tolist() == pytest.approx(expected)
    uniform = make_trace(torch.ones(1, 3, 4, 2), torch.full((1, 4, 3), 0.25, dtype=torch.float64))
    torch.testing.assert_close(interpret.membership_entropy(uniform), torch.full((1, 1, 3), math.log(4)).double())
    one_hot = make_trace(torch.ones(1, 3, 4, 2), torch.eye(4, 3, dtype=torch.float64)[None])
    assert (interpret.membership_entropy(one_hot) == 0).all()


def test_membership_clusters_score(monkeypatch):
    """Two images of 6 x 6 patches: alternating colors with a head for each; one color with a head for each quarter."""
    pytest.importorskip("sklearn")
    y, x = torch.arange(6)[:, None], torch.arange(6)[None]
    checkerboard, quarters = 2 * (y % 2) + x % 2, 2 * (y // 3) + x // 3
    colors = torch.tensor([[3.0, 0, 0], [0, 3, 0], [0, 0, 3], [-3, -3, -3]])
    image = colors[checkerboard].permute(2, 0, 1).repeat_interleave(4, 1).repeat_interleave(4, 2)
    pixel_values = torch.stack([image, torch.ones(3, 24, 24)])
    heads = torch.stack([checkerboard, quarters]).flatten(1)
    membership = nn.functional.one_hot(heads, 4).double().transpose(1, 2)[:, None].expand(2, 3, 4, 36)
    trace = interpret.trace_model(tiny_vision_model(), pixel_values=pixel_values)
    fake_trace = interpret.ModelTrace(trace.layers, trace.projections, membership, trace.mask, trace.grid, None, None)
    monkeypatch.setattr(quantities, "trace_model", lambda *_, **__: fake_trace)
    scores = interpret.membership_clusters_score(None, pixel_values)
    assert all(score.shape == (2, 3) for score in scores)
    assert (scores.score > 0.6).all()  # the first by color alone, the second by position alone
    assert (scores.shuffled.abs() < 0.3).all() and scores.shuffled.mean().abs() < 0.1
    assert (scores.other_image.abs() < 0.1).all()


# Tracing: the model is left unchanged, and invalid inputs are rejected ------------------------------------------------------


def count_hooks(model):
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


def test_model_is_unchanged(model_and_inputs):
    model, inputs = model_and_inputs
    expected = model(**inputs).logits
    state, hooks = copy.deepcopy(model.state_dict()), count_hooks(model)
    model.train()
    model.base_model.layers[1].eval()  # a layer frozen in evaluation mode
    flags = [module.training for module in model.modules()]
    trace = interpret.trace_model(model, **inputs)
    assert [module.training for module in model.modules()] == flags and True in flags and False in flags
    assert torch.equal(trace.memberships, interpret.trace_model(model, **inputs).memberships)  # no dropout
    assert not any(w.requires_grad for w in trace.projections)

    invalid_inputs = {name: x[..., :-1] if name == "pixel_values" else x + 1000 for name, x in inputs.items()}
    with pytest.raises((ValueError, IndexError), match=r"multiples of the patch size|input_ids must lie"):
        interpret.trace_model(model, **invalid_inputs)
    assert [module.training for module in model.modules()] == flags
    assert count_hooks(model) == hooks
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values()))
    assert torch.equal(model.eval()(**inputs).logits, expected)


def test_compiled_models_are_traced(tiny_model, batch):
    expected = interpret.trace_model(tiny_model, **batch)
    compiled = torch.compile(tiny_model, backend="eager")
    with torch.no_grad():
        compiled(**batch)
    assert torch.equal(interpret.trace_model(compiled, **batch).memberships, expected.memberships)


@pytest.mark.parametrize("attention_type", ["xca", "softmax"])
def test_baselines_are_rejected(attention_type, images, tmp_path):
    model = tiny_vision_model(attention_type=attention_type)
    with pytest.raises(ValueError, match="no memberships"):
        interpret.trace_model(model, pixel_values=images)
    with pytest.raises(ValueError, match="no memberships"):
        interpret.inspect_model(model, None, tmp_path / "photo.png", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_invalid_inputs_are_rejected(tiny_model, batch, images):
    with pytest.raises(ValueError, match="no memberships"):
        interpret.trace_model(GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9)), input_ids=batch["input_ids"])
    batch["attention_mask"][1] = 0
    with pytest.raises(ValueError, match="masks a whole sequence"):
        interpret.trace_model(tiny_model, **batch)
