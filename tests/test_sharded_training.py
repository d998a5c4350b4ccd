"""Training over several processes with DDP, FSDP2, context and tensor parallelism has the losses of one process."""

import pytest
import sharded_cases
import torch
from accelerate import PartialState
from processes import run_cases
from text_runs import token_ids, training_args
from transformers.utils import is_accelerate_available

from tost_hf import ToSTForCausalLM, ToSTTrainer


NAMES = sharded_cases.PARALLELISMS + sharded_cases.COMBINATIONS
FAST = [*sharded_cases.PARALLELISMS, "cp, hybrid stream", "cp, hybrid accumulation", "tp, stream", "config cp, hybrid"]
FAST += ["ddp, evaluated"]
SINGLE = ("", "float32", "hybrid", "stream", "hybrid stream")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def trained(request, tmp_path_factory):
    """The results of one process by variant, and those of each of several processes by kind of parallelism and variant."""
    folder = tmp_path_factory.mktemp("sharded")
    items = [
        item.callspec.params for item in request.session.items if item.originalname == "test_losses_equal_those_of_one_process"
    ]
    names = [params["name"] for params in items if params["trained"] == request.param]  # without slow ones, if deselected
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOST_TEST_MODELS", str(folder))
        sharded_cases.save_models()
        single = {variant: sharded_cases.run(f"ddp, {variant}") for variant in SINGLE}
        return single, run_cases(sharded_cases.run, names, request.param, folder)


def skip_unsupported(parallelism: str) -> None:
    if parallelism == "tp" and not is_accelerate_available("1.12"):
        pytest.skip("transformers' Trainer is tensor-parallel with accelerate 1.12 and later")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in NAMES])
def test_losses_equal_those_of_one_process(trained, name):
    """Without gradient checkpointing and accumulation, and without an evaluation before."""
    parallelism, _, variant = name.partition(", ")
    skip_unsupported(parallelism)
    for option in ("checkpointing", "accumulation", "evaluated"):
        variant = variant.replace(option, "").strip()
    single, distributed = trained[0][variant], trained[1][name]
    assert len(single["losses"]) == sharded_cases.EQUAL_STEPS and single["losses"][-1] < single["losses"][0] - 0.3
    for process in distributed:
        assert process["losses"] == pytest.approx(single["losses"], rel=0, abs=1e-5)
    fractions = {process["numel"] / single["numel"] for process in distributed}
    assert max(fractions) < 0.75 if parallelism.startswith(("fsdp2", "tp")) else fractions == {1.0}


@pytest.mark.parametrize("parallelism", ["cp", "tp"])
def test_processes_that_share_examples_count_them_once(tmp_path, monkeypatch, parallelism):
    """In an evaluation whose last batch is smaller, as one process does."""
    skip_unsupported(parallelism)
    monkeypatch.setenv("TOST_TEST_MODELS", str(tmp_path))
    sharded_cases.save_models()
    model = ToSTForCausalLM.from_pretrained(sharded_cases.model_folder(), dtype=torch.float64)
    ids = torch.tensor(token_ids(5)["input_ids"])
    expected = {"loss": pytest.approx(model(ids, labels=ids).loss.item(), abs=1e-5), "predictions": 5}
    assert run_cases(sharded_cases.predict, [parallelism], 2, tmp_path)[parallelism] == [expected] * 2


@pytest.mark.parametrize(
    "variables, message",
    [
        ({}, "2 processes were started, but each would train alone"),
        ({"ACCELERATE_USE_FSDP": "true"}, "Accelerate shards no model on CPUs"),
    ],
)
def test_processes_without_parallelism_are_rejected(tmp_path, monkeypatch, tiny_model, variables, message):
    args = training_args(tmp_path)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0", **variables}.items():
        monkeypatch.setenv(name, value)
    if variables:  # a process group exists
        monkeypatch.setattr(type(args), "world_size", 2)
        monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    with pytest.raises(ValueError, match=message):
        ToSTTrainer(tiny_model, args)
