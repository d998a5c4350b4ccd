"""The plan on paper against what two and four CPU processes hold and send in a step."""

import plan_cases
import pytest
from processes import run_cases

from tost_hf import ToSTForCausalLM


plan = plan_cases.plan
SINGLE = plan.Precision(sharded=4, activations=4)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def measured(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOST_TEST_MODELS", str(folder))
        plan_cases.save_model()
        model = ToSTForCausalLM.from_pretrained(plan_cases.folder_of("plan"))
        return request.param, model, run_cases(plan_cases.run, list(plan.STRATEGIES), request.param, folder)


@pytest.mark.parametrize("strategy", plan.STRATEGIES)
def test_processes_hold_and_send_what_is_planned(measured, strategy):
    processes, model, answers = measured
    parameters = model.num_parameters()
    sent = plan.bytes_sent(model.config, parameters, strategy, processes, plan_cases.TOKENS, SINGLE)
    loss = 4 * (processes - 1) * 2 if strategy == "cp" else 0  # gathered, and its gradient
    for process in answers[strategy]:
        assert process["sent"] == sent + loss
        assert process["held"] == pytest.approx(plan.state_bytes(parameters, strategy, processes), rel=0.05)


def test_kept_tensors_are_those_of_the_plan(measured):
    processes, model, answers = measured
    ids = plan_cases.make_ids()
    whole = plan.saved_tensor_bytes(model.model, input_ids=ids, use_cache=False)
    assert (
        whole == plan.activation_bytes(model.config, layers=2, tokens=plan_cases.TOKENS, dtype=model.dtype) * plan_cases.TOKENS
    )
    kept = plan.saved_tensor_bytes(model, input_ids=ids, use_cache=False)
    for process in answers["cp"]:
        assert process["kept"] == pytest.approx(kept / processes, rel=0.1)
