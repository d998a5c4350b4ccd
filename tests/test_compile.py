"""torch.compile of the language model: full graphs, few recompilations, the outputs of eager mode."""

import shutil

import pytest
import torch
from conftest import make_cache, randomize, small_config

from tost_hf import ToSTForCausalLM


CLOSE = {"rtol": 1e-4, "atol": 1e-5}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler (g++)")


@pytest.fixture(autouse=True)
def reset_compiler():
    torch._dynamo.reset()


@pytest.fixture
def tiny_model():
    return randomize(ToSTForCausalLM(small_config(num_hidden_layers=1))).eval()


def make_counting_backend(name):
    """A compiler backend that counts its graphs. It is a function, because generate copies objects."""

    def backend(graph, example_inputs):
        backend.graphs += 1
        return torch._dynamo.lookup_backend(name)(graph, example_inputs)

    backend.graphs = 0
    return backend


def ids(*shape):
    return torch.randint(2, 97, shape)


def loss_and_gradients(model, tokens, **inputs):
    loss = model(tokens, labels=tokens, use_cache=False, **inputs).loss
    return loss, torch.autograd.grad(loss, list(model.parameters()))


def test_training_compiles_twice_for_all_lengths(tiny_model):
    counter = make_counting_backend("aot_eager")
    compiled = torch.compile(tiny_model, fullgraph=True, backend=counter)
    graphs = []
    for length in (40, 30, 51):
        tokens = ids(2, length)
        torch.testing.assert_close(loss_and_gradients(compiled, tokens), loss_and_gradients(tiny_model, tokens), **CLOSE)
        graphs.append(counter.graphs)
    assert graphs == [1, 2, 2]  # the second length recompiles with dynamic shapes


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("options", [{}, {"decay_type": "token"}], ids=str)
def test_default_compiler(options):
    """Outputs and gradients equal those of eager mode, first with static and then with dynamic shapes."""
    model = randomize(ToSTForCausalLM(small_config(num_hidden_layers=1, **options))).eval()
    compiled = torch.compile(model, fullgraph=True)
    for length in (40, 30):
        tokens = ids(2, length)
        torch.testing.assert_close(loss_and_gradients(compiled, tokens), loss_and_gradients(model, tokens), **CLOSE)
        with torch.no_grad():
            torch.testing.assert_close(compiled(tokens).logits, model(tokens).logits, **CLOSE)


INPUTS = {
    "attention_mask": lambda: {"attention_mask": (torch.arange(70) >= torch.tensor([[0], [6]])).long()},
    "position_ids": lambda: {"position_ids": (torch.arange(70) % 33)[None].expand(2, -1)},
    "seq_idx": lambda: {"seq_idx": (torch.arange(70) // 33).expand(2, -1)},
}


@pytest.mark.parametrize(
    "inputs, checkpointing, autocast",
    [("attention_mask", False, False), ("position_ids", False, True), ("seq_idx", True, True)],
)
def test_training_options(tiny_model, inputs, checkpointing, autocast):
    """Padding, packing, gradient checkpointing and autocast in one graph, with the gradients of eager mode."""
    tokens, inputs = ids(2, 70), INPUTS[inputs]()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = loss_and_gradients(tiny_model, tokens, **inputs)
        if checkpointing:
            tiny_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            tiny_model.train()
        compiled = torch.compile(tiny_model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(loss_and_gradients(compiled, tokens, **inputs), expected, **CLOSE)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, needs_compiler])])
@torch.no_grad()
def test_decoding_compiles_once(tiny_model, backend):
    """20 steps after each of two prompts; the addresses of the cache do not change."""
    counter = make_counting_backend(backend)
    step = torch.compile(tiny_model, fullgraph=True, backend=counter)
    cache = make_cache(tiny_model.config, static=True)
    for prompt_length in (8, 13):
        tokens = ids(2, prompt_length + 20)
        cache.reset()
        tiny_model(tokens[:, :prompt_length], past_key_values=cache)
        addresses = [x.data_ptr() for layer in cache.layers for x in layer.tensors().values()]
        expected = tiny_model(tokens).logits
        for t in range(prompt_length, tokens.shape[1]):
            out = step(tokens[:, t : t + 1].clone(), position_ids=torch.full((2, 1), t), past_key_values=cache)
            torch.testing.assert_close(out.logits[:, 0], expected[:, t], **CLOSE)
        assert addresses == [x.data_ptr() for layer in cache.layers for x in layer.tensors().values()]
    assert counter.graphs == 1
