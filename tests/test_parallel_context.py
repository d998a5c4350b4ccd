"""Context parallelism over 2 and 4 processes: equality, communication of constant size, errors."""

import context_cases
import pytest
from processes import run_cases


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


def test_errors(answers):
    for answer in answers["errors"]:
        for found, message in answer:
            assert found.startswith(message)
