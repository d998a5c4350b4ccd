"""run_clm.py with context parallelism has the losses of one process; bad sizes are rejected."""

import json

import pytest
from accelerate import ParallelismConfig
from scripts import EXAMPLES, launch, losses
from transformers import default_data_collator

import tost_hf


RUN_CLM = EXAMPLES / "run_clm.py"


@pytest.mark.slow
def test_context_parallel_training_equals_one_process(tmp_path, clm_args):
    """Two sequences at a time, each sharded over two of four processes, accumulated twice, against eight on one process."""
    common = {"max_steps": 10, "use_cpu": None, "do_eval": True, "max_eval_samples": 8, "per_device_eval_batch_size": 2}
    one = clm_args(**common, output_dir=tmp_path / "one", per_device_train_batch_size=8)
    parallel = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "context_parallel_size": 2}
    four = clm_args(**common, **parallel, output_dir=tmp_path / "four")
    launch(RUN_CLM, tmp_path, one, processes=1)
    launch(RUN_CLM, tmp_path, four, processes=4)
    expected, actual = losses(tmp_path / "one"), losses(tmp_path / "four")
    assert len(expected) == 10 and expected[-1] < expected[0] - 0.5
    assert actual == pytest.approx(expected, rel=0, abs=1e-4)
    eval_losses = [json.loads((tmp_path / name / "eval_results.json").read_text())["eval_loss"] for name in ("one", "four")]
    assert eval_losses[1] == pytest.approx(eval_losses[0], abs=1e-4)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"context_parallel_size": 2}, "context_parallel_size 2 must divide the number of processes, 1"),
        ({"context_parallel_size": 0}, "context_parallel_size must be at least 1, got 0"),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, "context_parallel_size 2 must divide"),
        ({"parallelism_config": ParallelismConfig(cp_size=2), "context_parallel_size": 4}, "cannot be combined"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}, "context_parallel_size 2 must"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, "needs a model that was loaded tensor-parallel"),
    ],
)
def test_bad_sizes(tmp_path, monkeypatch, text_model, sizes, message):
    variables = {name: value for name, value in sizes.items() if name.isupper()}  # as `accelerate launch` sets them
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sizes = {name: value for name, value in sizes.items() if name not in variables}
    with pytest.raises(ValueError, match=message):
        args = tost_hf.ToSTTrainingArguments(tmp_path, use_cpu=True, report_to="none", **sizes)
        tost_hf.ToSTTrainer(text_model, args, data_collator=default_data_collator)
