"""run_clm.py with texts that several processes share: the losses of one process, and what is refused."""

import json

import pytest
from scripts import EXAMPLES, launch, losses
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


@pytest.mark.parametrize(
    "arguments,sentence",
    [
        ({"context_parallel_size": 2}, "context_parallel_size 2 must divide the number of processes, 1"),
        ({"context_parallel_size": 0}, "context_parallel_size must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_shared_is_rejected(tmp_path, text_model, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        args = tost_hf.ToSTTrainingArguments(output_dir=tmp_path, use_cpu=True, report_to="none", **arguments)
        tost_hf.ContextParallelTrainer(text_model, args, data_collator=default_data_collator)


def test_the_plain_trainer_shares_no_texts(tmp_path, text_model):
    args = tost_hf.ToSTTrainingArguments(output_dir=tmp_path, use_cpu=True, report_to="none", context_parallel_size=2)
    with pytest.raises(ValueError, match=r"context_parallel_size is for tost_hf\.ContextParallelTrainer"):
        tost_hf.ToSTTrainer(text_model, args)
