"""torch.export of language models with a cache: one program for all batch sizes, lengths and numbers of cached tokens."""

import copy
import itertools
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
from conftest import randomize, small_config
from transformers import Cache, DynamicCache, StaticCache
from transformers.exporters.exporter_dynamo import get_auto_dynamic_shapes, register_cache_pytrees_for_model

from tost_hf import ToSTCache, ToSTForCausalLM
from tost_hf.model.configuration_tost import FULL_ATTENTION, TSSA


sys.path.append(str(Path(__file__).parents[1] / "examples" / "benchmarks"))
from exports import FORMATS, LANGUAGE_MODELS, TOLERANCE, make_case, try_case


CLOSE = {"rtol": 1e-4, "atol": 1e-4}
CACHES = {
    "transformers": lambda config: DynamicCache(config=config),
    "tost": ToSTCache,
    "static": lambda config: StaticCache(config=config, max_cache_len=64),
}
MODELS = {
    "published": {"num_hidden_layers": 1},
    "decay": {"num_hidden_layers": 1, "decay_type": "token", "conv_kernel": 4},
    "hybrid": {"position_embedding_type": "none", "layer_types": [TSSA, FULL_ATTENTION]},
}


def language_model(**fields) -> ToSTForCausalLM:
    return randomize(ToSTForCausalLM(small_config(**fields))).eval()


@torch.no_grad()
def make_inputs(model, batch: int, tokens: int, cached: int, make_cache=None) -> dict:
    """Tokens and a cache of earlier tokens; the last sequence starts with two tokens of padding."""
    mask = torch.ones(batch, cached + tokens, dtype=torch.long)
    mask[-1, : 2 if cached + tokens > 2 else 0] = 0
    kwargs = {"input_ids": torch.randint(1, 97, (batch, tokens)), "attention_mask": mask}
    if make_cache is not None:
        cache = make_cache(model.config)
        model(torch.randint(1, 97, (batch, cached)), attention_mask=mask[:, :cached], past_key_values=cache)
        kwargs["past_key_values"] = cache
    return kwargs


def export(model, inputs: dict, dynamic: bool):
    register_cache_pytrees_for_model(model)
    shapes = get_auto_dynamic_shapes(copy.deepcopy(inputs)) if dynamic else None
    return torch.export.export(model, (), copy.deepcopy(inputs), dynamic_shapes=shapes, strict=False).module()


@torch.no_grad()
def assert_same(program, model, inputs: dict) -> None:
    expected, actual = model(**copy.deepcopy(inputs)), program(**copy.deepcopy(inputs))
    torch.testing.assert_close(actual.logits, expected.logits, **CLOSE)
    for layer, expected_layer in zip(*(getattr(out.past_key_values, "layers", []) for out in (actual, expected))):
        if hasattr(expected_layer, "sum_sq"):
            torch.testing.assert_close(layer.tensors(), expected_layer.tensors(), **CLOSE)
            assert int(layer.get_seq_length()) == int(expected_layer.get_seq_length())


@pytest.mark.parametrize(
    "name, kind, tokens",
    [
        ("published", "transformers", 1),
        ("published", "tost", 5),
        ("decay", "transformers", 2),
        ("hybrid", "tost", 1),
    ],
)
def test_tokens_after_a_cache(name, kind, tokens):
    """Other batch sizes, lengths and numbers of cached tokens than at export, where batch size and length may be equal."""
    model = language_model(**MODELS[name])
    program = export(model, make_inputs(model, 2, tokens, 6, CACHES[kind]), dynamic=True)
    max_tokens = tokens + 3 * (tokens > 1)
    for batch, count, cached in ((2, tokens, 6), (3, max_tokens, 9), (2, tokens, 3)):
        assert_same(program, model, make_inputs(model, batch, count, cached, CACHES[kind]))


@pytest.mark.parametrize("name, batch, tokens", [("published", 2, 2), ("decay", 1, 1)])
def test_tokens_after_a_static_cache(name, batch, tokens):
    model = language_model(**MODELS[name])
    sample, inputs = (make_inputs(model, batch, tokens, 6, CACHES["static"]) for _ in range(2))
    assert_same(export(model, sample, dynamic=False), model, inputs)


@pytest.mark.parametrize("name", MODELS)
def test_prompts_with_equal_batch_size_and_length(name):
    """Both dimensions stay dynamic and independent, and the program runs without this package."""
    model = language_model(**MODELS[name], use_cache=False)
    program = export(model, make_inputs(model, 4, 4, 0), dynamic=True)
    operators = {node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert {operator.namespace for operator in operators} == {"aten"}
    for shape in ((4, 4), (3, 9), (5, 40)):
        assert_same(program, model, make_inputs(model, *shape, 0))


EXPORTED = [
    *itertools.product(["torch", "onnx", "openvino"], ["ToST"], ["one token"]),
    *itertools.product(["torch", "onnx", "openvino"], ["ToST hybrid"], ["prompt"]),
    *itertools.product(["torch", "onnx", "openvino"], ["ToST vision"], ["image"]),
    ("executorch", "ToST", "one token"),
    ("executorch", "ToST vision", "image, fixed shape"),
]
TOLERANCES = {"openvino": TOLERANCE}  # relative to the logits; OpenVINO computes in bfloat16 on CPUs that have it


@torch.no_grad()
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_compared_models_read_their_cache(name):
    """Its argument's name differs from model to model; under another one it would be ignored, and the exports too easy."""
    model, (inputs, _) = make_case(name, "several tokens")
    uncached = {key: x for key, x in inputs.items() if not isinstance(x, Cache)}
    uncached["attention_mask"] = torch.ones_like(inputs["input_ids"])
    assert not torch.allclose(model(**copy.deepcopy(inputs)).logits, model(**uncached).logits, atol=1e-3)


@pytest.fixture(scope="module")
def pool():
    """A separate process, because transformers' exporters leave patched functions that break torch.compile."""
    with multiprocessing.get_context("spawn").Pool(1) as process_pool:
        yield process_pool


@pytest.mark.slow
@pytest.mark.parametrize("kind, name, case", EXPORTED)
def test_transformers_exporters(kind, name, case, pool):
    pytest.importorskip(FORMATS[kind][2], reason=f"{FORMATS[kind][2]} is not installed")
    pytest.importorskip("transformers.exporters.runners", reason="this transformers has no runners for its exports")
    outcome, difference = pool.apply(try_case, (kind, name, case))
    assert outcome.startswith("works"), outcome
    assert difference < TOLERANCES.get(kind, 1e-5)
