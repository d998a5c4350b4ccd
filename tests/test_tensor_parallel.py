"""Tensor parallelism over 2 processes by transformers' tp_plan: numbers, texts, files and errors."""

import pytest
import tensor_parallel_cases
import transformers
from packaging.version import Version
from processes import run_cases
from transformers.distributed import DistributedConfig

import tost_hf


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    names = [*tensor_parallel_cases.NAMES, *(f"error, {model}" for model in tensor_parallel_cases.INDIVISIBLE)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOST_TEST_MODELS", str(folder))
        tensor_parallel_cases.save_models()
        return run_cases(tensor_parallel_cases.run, names, processes=2, folder=folder)


@pytest.mark.parametrize("case", tensor_parallel_cases.EQUAL)
def test_equals_one_process(answers, case):
    if "uneven MLP" in case and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("this transformers shards the activations of an uneven MLP unlike its weights")
    for errors in answers[case]:
        assert errors.pop("heads") == 2
        assert errors.pop("loss") < 1e-6  # transformers computes it in float32
        assert all(error < (1e-5 if "float32" in case else 1e-10) for error in errors.values())


@pytest.mark.parametrize("model", ["published", "all", "hybrid"])
def test_generated_texts_are_equal(answers, model):
    for answer in answers[f"generated, {model}"]:
        assert answer.pop("logits") < 1e-10
        assert answer == {"greedy": True, "beams": True}


def test_saved_whole(answers):
    assert all(answer == {"same": True, "config": True} for answer in answers["saved, all"])


@pytest.mark.parametrize("model", tensor_parallel_cases.INDIVISIBLE)
def test_indivisible_heads_are_rejected(answers, model):
    assert all("cannot be sharded over 2 processes" in answer for answer in answers[f"error, {model}"])


@pytest.mark.parametrize("config", [{"pp_size": 2}, DistributedConfig(pp_size=2)], ids=["a dict", "an object"])
def test_pipeline_parallelism_is_rejected(tmp_path, tiny_model, config):
    tiny_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be cut by layers"):
        tost_hf.ToSTForCausalLM.from_pretrained(tmp_path, distributed_config=config)
