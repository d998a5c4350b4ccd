"""DeepSpeed's ZeRO-2 and ZeRO-3 on a CPU: the losses of plain training."""

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed (pip install deepspeed)"),
]

TRAINING = """
import json, os, sys
import torch
from conftest import randomize, small_config
from tost_hf import ToSTForCausalLM, ToSTTrainer, ToSTTrainingArguments

folder, stage = sys.argv[1], int(sys.argv[2])
settings = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
settings["train_micro_batch_size_per_gpu"] = "auto"
rows = [{"input_ids": (ids := torch.randint(1, 97, (16,), generator=torch.Generator().manual_seed(i))), "labels": ids}
        for i in range(16)]
options = {"deepspeed": settings} if stage else {}
arguments = ToSTTrainingArguments(folder, max_steps=4, per_device_train_batch_size=4, logging_steps=1, save_strategy="no",
    use_cpu=True, report_to="none", bf16=False, seed=0, **options)
model = randomize(ToSTForCausalLM(small_config()))
trainer = ToSTTrainer(model, arguments, train_dataset=rows)
trainer.train()
json.dump([step["loss"] for step in trainer.state.log_history if "loss" in step], open(folder + "/losses.json", "w"))
"""


def losses(folder: Path, stage: int) -> list[float]:
    """Of training in a process of its own: DeepSpeed leaves its traces in one."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = os.environ | ranks | {"DS_ACCELERATOR": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", TRAINING, str(folder), str(stage)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "losses.json").read_text())


def test_sharded_training_has_the_losses_of_plain_training(tmp_path):
    plain, *sharded = (torch.tensor(losses(tmp_path / str(stage), stage)) for stage in (0, 2, 3))
    assert len(plain) == 4 and plain[-1] != plain[0]
    for given in sharded:
        torch.testing.assert_close(given, plain, rtol=1e-4, atol=1e-4)
