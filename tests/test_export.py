"""torch.export of language models with a cache: one program for every batch, length and number of cached tokens."""

import copy
import itertools
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
from conftest import randomize, small_config
from transformers import DynamicCache, StaticCache
from transformers.exporters.exporter_dynamo import get_auto_dynamic_shapes, register_cache_pytrees_for_model

from tost_hf import ToSTCache, ToSTForCausalLM
from tost_hf.model.configuration_tost import CAUSAL_STATISTICS, FULL_ATTENTION


sys.path.append(str(Path(__file__).parents[1] / "examples" / "benchmarks"))
from exports import ALLOWED, FORMATS, try_case


CLOSE = {"rtol": 1e-4, "atol": 1e-4}
CACHES = {
    "transformers": lambda config: DynamicCache(config=config),
    "own": ToSTCache,
    "static": lambda config: StaticCache(config=config, max_cache_len=64),
}
MODELS = {
    "published": {"num_hidden_layers": 1},
    "decay": {"num_hidden_layers": 1, "forgetting": "token", "conv_kernel": 4},
    "hybrid": {"max_position_embeddings": None, "layer_types": [CAUSAL_STATISTICS, FULL_ATTENTION]},
}


def language_model(**fields) -> ToSTForCausalLM:
    return randomize(ToSTForCausalLM(small_config(**fields))).eval()


@torch.no_grad()
def inputs(model, batch: int, tokens: int, cached: int, make_cache=None) -> dict:
    """Tokens, and a cache of those before them; the last sequence starts with two tokens of padding."""
    mask = torch.ones(batch, cached + tokens, dtype=torch.long)
    mask[-1, : 2 if cached + tokens > 2 else 0] = 0
    given = {"input_ids": torch.randint(1, 97, (batch, tokens)), "attention_mask": mask}
    if make_cache is not None:
        cache = make_cache(model.config)
        model(torch.randint(1, 97, (batch, cached)), attention_mask=mask[:, :cached], past_key_values=cache)
        given["past_key_values"] = cache
    return given


def exported(model, given: dict, dynamic: bool):
    register_cache_pytrees_for_model(model)
    shapes = get_auto_dynamic_shapes(copy.deepcopy(given)) if dynamic else None
    return torch.export.export(model, (), copy.deepcopy(given), dynamic_shapes=shapes, strict=False).module()


@torch.no_grad()
def assert_same(program, model, given: dict) -> None:
    expected, got = model(**copy.deepcopy(given)), program(**copy.deepcopy(given))
    torch.testing.assert_close(got.logits, expected.logits, **CLOSE)
    if "past_key_values" in given:
        for theirs, ours in zip(got.past_key_values.layers, expected.past_key_values.layers):
            if hasattr(ours, "sum_sq"):
                torch.testing.assert_close(theirs.tensors(), ours.tensors(), **CLOSE)
                assert int(theirs.get_seq_length()) == int(ours.get_seq_length())


@pytest.mark.parametrize(
    "name, kind, tokens",
    [
        ("published", "transformers", 1),
        ("published", "own", 5),
        ("decay", "transformers", 2),
        ("hybrid", "own", 1),
    ],
)
def test_tokens_after_a_cache(name, kind, tokens):
    """As many tokens as sequences among them; then other batch sizes, lengths and numbers of cached tokens."""
    model = language_model(**MODELS[name])
    program = exported(model, inputs(model, 2, tokens, 6, CACHES[kind]), dynamic=True)
    more = tokens + 3 * (tokens > 1)
    for batch, count, cached in ((2, tokens, 6), (3, more, 9), (2, tokens, 3)):
        assert_same(program, model, inputs(model, batch, count, cached, CACHES[kind]))


@pytest.mark.parametrize("name, batch, tokens", [("published", 2, 2), ("decay", 1, 1)])
def test_tokens_after_a_static_cache(name, batch, tokens):
    model = language_model(**MODELS[name])
    program = exported(model, inputs(model, batch, tokens, 6, CACHES["static"]), dynamic=False)
    assert_same(program, model, inputs(model, batch, tokens, 6, CACHES["static"]))


@pytest.mark.parametrize("name", MODELS)
def test_prompts_with_as_many_tokens_as_sequences(name):
    """The dimensions stay independent."""
    model = language_model(**MODELS[name], use_cache=False)
    program = exported(model, inputs(model, 4, 4, 0), dynamic=True)
    for shape in ((4, 4), (3, 9), (5, 40)):
        assert_same(program, model, inputs(model, *shape, 0))


EXPORTED = [
    *itertools.product(["torch", "onnx", "openvino"], ["ToST"], ["one token"]),
    *itertools.product(["torch", "onnx", "openvino"], ["ToST hybrid"], ["prompt"]),
    *itertools.product(["torch", "onnx", "openvino"], ["ToST vision"], ["image"]),
    ("executorch", "ToST", "one token"),
    ("executorch", "ToST vision", "image, fixed shape"),
]
TOLERANCES = {"openvino": ALLOWED}  # relative to the logits; OpenVINO computes in bfloat16 on CPUs that have it


@pytest.fixture(scope="module")
def pool():
    """A separate process: transformers' exporters leave patched functions behind, which break torch.compile."""
    with multiprocessing.get_context("spawn").Pool(1) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("kind, name, case", EXPORTED)
def test_transformers_exporters(kind, name, case, pool):
    pytest.importorskip(FORMATS[kind][2], reason=f"{FORMATS[kind][2]} is not installed")
    pytest.importorskip("transformers.exporters.runners", reason="this transformers has no runners for its exports")
    outcome, difference = pool.apply(try_case, (kind, name, case))
    assert outcome.startswith("works"), outcome
    assert difference < TOLERANCES.get(kind, 1e-5)
