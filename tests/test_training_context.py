"""run_clm.py with texts that several processes share: the losses of one process, and what is refused."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from scripts import EXAMPLES, environment, launch, launch_command, losses
from transformers import default_data_collator

import tost_hf


RUN_CLM = EXAMPLES / "run_clm.py"


@pytest.mark.slow
def test_shared_texts_train_as_whole_ones(tmp_path, clm_args):
    """Two texts at a time, each shared by two of four processes, and accumulated twice, against eight on one."""
    common = {"max_steps": 10, "use_cpu": None, "do_eval": True, "max_eval_samples": 8, "per_device_eval_batch_size": 2}
    one = clm_args(**common, output_dir=tmp_path / "one", per_device_train_batch_size=8)
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "context_parallel_size": 2}
    four = clm_args(**common, **split, output_dir=tmp_path / "four")
    launch(RUN_CLM, tmp_path, one, processes=1)
    launch(RUN_CLM, tmp_path, four, processes=4)
    single, shared = losses(tmp_path / "one"), losses(tmp_path / "four")
    assert len(single) == 10 and single[-1] < single[0] - 0.5
    assert shared == pytest.approx(single, rel=0, abs=1e-4)
    evaluated = [json.loads((tmp_path / name / "eval_results.json").read_text())["eval_loss"] for name in ("one", "four")]
    assert evaluated[1] == pytest.approx(evaluated[0], abs=1e-4)


@pytest.mark.slow
def test_a_killed_process_ends_the_run_which_goes_on_bit_for_bit(tmp_path, clm_args):
    common = {"max_steps": 6, "use_cpu": None, "save_strategy": "steps", "save_steps": 2, "context_parallel_size": 2}
    broken = clm_args(**common, output_dir=tmp_path / "broken")
    with open(tmp_path / "log.txt", "w") as log:
        run = subprocess.Popen(launch_command(RUN_CLM, broken, 2), env=environment(tmp_path), stdout=log, stderr=log)
    while not (tmp_path / "broken" / "checkpoint-2" / "trainer_state.json").exists():
        assert run.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
        time.sleep(0.01)
    one, *_ = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(one), signal.SIGKILL)
    assert run.wait(timeout=120) != 0

    launch(RUN_CLM, tmp_path, broken, processes=2)
    launch(RUN_CLM, tmp_path, clm_args(**common, output_dir=tmp_path / "whole"), processes=2)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    "arguments,sentence",
    [
        ({"context_parallel_size": 2}, "context_parallel_size 2 must divide the number of processes, 1"),
        ({"context_parallel_size": 0}, "context_parallel_size must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path, text_model, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        args = tost_hf.ToSTTrainingArguments(output_dir=tmp_path, use_cpu=True, report_to="none", **arguments)
        tost_hf.ToSTTrainer(text_model, args, data_collator=default_data_collator)
