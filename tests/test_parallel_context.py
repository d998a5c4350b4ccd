"""Context parallelism over 2 and 4 processes: equality, communication of constant size, errors."""

import context_cases
import pytest
from processes import run_cases

from tost_hf import ToSTForCausalLM


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    names = [*context_cases.CASES, "communication", "comparisons", "errors"]
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


def test_batches_are_compared_at_intervals(answers):
    """Each comparison waits for the device."""
    assert answers["comparisons"] == [[0, 100, 200]] * 4


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


def test_errors(answers):
    for answer in answers["errors"]:
        for found, word in answer:
            assert found.startswith(("ValueError", "TypeError")) and word in found


def test_other_models_have_no_hooks(tiny_model):
    assert isinstance(tiny_model, ToSTForCausalLM)
    assert not tiny_model._forward_pre_hooks and not tiny_model.model._forward_pre_hooks
