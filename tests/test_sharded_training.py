"""Training over several processes, DDP, FSDP2, context and tensor parallelism: the losses of one process."""

import pytest
import sharded_cases
from accelerate import PartialState
from processes import run_cases
from text_runs import training_args
from transformers.utils import is_accelerate_available

from tost_hf import ToSTTrainer


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def trained(request, tmp_path_factory):
    """What one process has, and what each of several has."""
    folder = tmp_path_factory.mktemp("sharded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOST_TEST_MODELS", str(folder))
        sharded_cases.save_model()
        one = {dtype: sharded_cases.run(f"ddp{dtype}") for dtype in ("", ", float32")}
        return one, run_cases(sharded_cases.run, sharded_cases.PARALLELISMS + sharded_cases.FLOAT32, request.param, folder)


@pytest.mark.parametrize("parallelism", sharded_cases.PARALLELISMS + sharded_cases.FLOAT32)
def test_several_processes_train_as_one(trained, parallelism):
    if "tp" in parallelism and not is_accelerate_available("1.12"):
        pytest.skip("transformers' Trainer is tensor-parallel with accelerate 1.12 and later")
    one, several = trained[0][", float32" * ("float32" in parallelism)], trained[1]
    assert len(one["losses"]) == sharded_cases.EQUAL_STEPS and one["losses"][-1] < one["losses"][0] - 0.3
    for process in several[parallelism]:
        assert process["losses"] == pytest.approx(one["losses"], rel=0, abs=1e-5)
    held = {process["held"] / one["held"] for process in several[parallelism]}
    assert max(held) < 0.75 if parallelism.startswith(("fsdp2", "tp")) else held == {1.0}


@pytest.mark.parametrize(
    "variables, message",
    [
        ({}, "2 processes were started, but each would train alone"),
        ({"ACCELERATE_USE_FSDP": "true"}, "Accelerate shards no model on CPUs"),
    ],
)
def test_processes_that_would_share_nothing_are_rejected(tmp_path, monkeypatch, tiny_model, variables, message):
    args = training_args(tmp_path)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0", **variables}.items():
        monkeypatch.setenv(name, value)
    if variables:  # they found each other
        monkeypatch.setattr(type(args), "world_size", 2)
        monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    with pytest.raises(ValueError, match=message):
        ToSTTrainer(tiny_model, args)
