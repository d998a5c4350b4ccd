"""The contract between Trainer and a loss: a step's loss and gradient do not depend on how its batch is divided."""

import loss_cases
import pytest
from processes import run_cases


@pytest.fixture(scope="module")
def steps_of_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("losses")
    return run_cases(loss_cases.step_of_process, loss_cases.CASES, 2, folder)


@pytest.mark.parametrize("case", loss_cases.CASES)
def test_step_is_equal_however_the_batch_is_divided(tmp_path, monkeypatch, steps_of_two_processes, case):
    monkeypatch.setenv("TOST_TEST_MODELS", str(tmp_path))
    whole, accumulated = (loss_cases.train_one_step(case, size) for size in (8, 2))
    assert accumulated == pytest.approx(whole, rel=1e-4)
    for of_process in steps_of_two_processes[case]:
        assert of_process == pytest.approx(whole, rel=1e-4)
