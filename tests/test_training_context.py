"""Bad sizes of context parallelism are rejected; test_sharded_training.py trains with good ones."""

import pytest
from accelerate import ParallelismConfig
from transformers import default_data_collator

import tost_hf


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
