"""Context parallelism over 2 and 4 processes: equality, communication of constant size, errors."""

import context_cases
import pytest
from processes import run_cases

from tost_hf import ToSTForCausalLM


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    names = [*context_cases.CASES, "communication", "errors"]
    return run_cases(context_cases.run, names, processes=4, folder=tmp_path_factory.mktemp("context"))


@pytest.mark.parametrize("case", context_cases.CASES)
def test_equals_one_process(answers, case):
    single = "float32" in case
    for errors in answers[case]:
        # transformers computes the loss in float32, whatever comes in
        assert errors.pop("loss") < 1e-6
        assert all(error < (1e-5 if single else 1e-10) for error in errors.values())


@pytest.mark.parametrize("options, collectives", [("published", 2), ("decay per token", 2), ("convolution", 3)])
def test_communication_does_not_grow_with_the_text(answers, options, collectives):
    layers, heads, width = 2, 4, 32
    for answer in answers["communication"]:
        short, long = answer[options]
        assert short == long
        calls, sent, backward_calls, _ = short
        assert calls == backward_calls == layers * collectives
        expected = 4 * (width + (heads if "decay" in options else 0)) + 8 * (width + heads)
        if "convolution" in options:
            expected += 4 * 3 * (width + 2)
        assert sent == layers * expected


@pytest.mark.slow
def test_million_tokens_take_a_quarter_of_the_memory_on_four_processes(tmp_path):
    grown = {}
    for processes in (1, 4):
        folder = tmp_path / str(processes)
        folder.mkdir()
        answers = run_cases(context_cases.run, ["million"], processes, folder)["million"]
        grown[processes] = max(answer["grown"] for answer in answers)
    assert all(answer["sent"] < 4096 for answer in answers)
    assert grown[1] > 1e9
    assert grown[4] < 0.25 * grown[1] + 3.5e8  # what autograd and gloo allocate once, whatever the number of tokens


DIFFERENT = "ValueError: The processes that share a text were given different batches"
MESSAGES = {
    "hybrid": "ValueError: parallelize does not support layers of full_attention",
    "encoder": "ValueError: parallelize does not support encoders",
    "classifier": "TypeError: parallelize takes a ToSTModel or a ToSTForCausalLM",
    "twice": "ValueError: The model is context-parallel or tensor-parallel already",
    "two dimensions": "ValueError: parallelize takes a mesh of one dimension, got 2",
    "few tokens": "ValueError: A text of 3 tokens cannot be sharded over 4 processes",
    "cache": "ValueError: A context-parallel model has no cache",
    "use_cache": "ValueError: A context-parallel model has no cache",
    "generate": "ValueError: A context-parallel model has no cache",
    "last logits": "ValueError: A context-parallel model computes the logits of all tokens",
    "too long": "IndexError: Position 128 is past the end",
    "wrong mask": "ValueError: attention_mask must have shape (1, 9)",
    "no tokens": "ValueError: Give exactly one of input_ids and inputs_embeds",
    "one dimension": "ValueError: input_ids must be integers of shape (batch, tokens)",
    "unequal labels": "ValueError: labels must have the shape of the tokens",
    "no mesh": "TypeError: parallelize takes a torch DeviceMesh",
    "different texts": f"{DIFFERENT}: input_ids differ in shape or content between the 4 processes",
    "different lengths": f"{DIFFERENT}: input_ids differ",
    "different labels": f"{DIFFERENT}: labels differ",
    "different masks": f"{DIFFERENT}: attention_mask differ",
    "different order": f"{DIFFERENT}: input_ids differ",
    "torch's own": "ValueError: torch's context_parallel shards texts for softmax attention",
}


@pytest.mark.parametrize("case", MESSAGES)
def test_errors(answers, case):
    for answer in answers["errors"]:
        assert answer[case].startswith(MESSAGES[case])


def test_other_models_have_no_hooks(tiny_model):
    assert isinstance(tiny_model, ToSTForCausalLM)
    assert not tiny_model._forward_pre_hooks and not tiny_model.model._forward_pre_hooks
