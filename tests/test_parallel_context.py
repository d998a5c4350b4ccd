"""Context parallelism over 2 and 4 processes: equality, communication of constant size, errors."""

import context_cases
import pytest
from processes import run_cases


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    names = [*context_cases.CASES, "communication", "comparisons", "errors"]
    return run_cases(context_cases.run, names, processes=4, folder=tmp_path_factory.mktemp("context"))


@pytest.mark.parametrize("case", context_cases.CASES)
def test_equals_one_process(results, case):
    is_float32 = "float32" in case
    for errors in results[case]:
        # transformers computes the loss in float32 for every dtype of the logits
        assert errors.pop("loss") < 1e-6
        assert all(error < (1e-5 if is_float32 else 1e-10) for error in errors.values())


@pytest.mark.parametrize("options, collectives", [("published", 2), ("decay per token", 2), ("convolution", 3)])
def test_communication_does_not_grow_with_the_sequence_length(results, options, collectives):
    layers, heads, hidden_size = 2, 4, 32
    for counts in results["communication"]:
        short, long = counts[options]
        assert short == long
        forward_calls, sent_bytes, backward_calls, _ = short
        assert forward_calls == backward_calls == layers * collectives
        expected_bytes = 4 * (hidden_size + (heads if "decay" in options else 0)) + 8 * (hidden_size + heads)
        if "convolution" in options:
            expected_bytes += 4 * 3 * (hidden_size + 2)
        assert sent_bytes == layers * expected_bytes


def test_batches_are_compared_at_intervals(results):
    """Not at each step, because a comparison waits for the device."""
    assert results["comparisons"] == [[0, 100, 200]] * 4


def test_errors(results):
    for errors in results["errors"]:
        for error, message in errors:
            assert error.startswith(message)
