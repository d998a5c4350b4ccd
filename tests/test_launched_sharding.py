"""`accelerate launch` with the configurations of examples/accelerate, on CPUs: saving, resuming, loading in one process."""

import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from conftest import randomize
from scripts import EXAMPLES, environment, launch_command, losses

from tost_hf import ToSTConfig, ToSTForCausalLM


pytestmark = pytest.mark.slow
RUN_CLM = EXAMPLES / "run_clm.py"
STEPS = 4


@pytest.fixture
def arguments(clm_args, tmp_path):
    """Makes arguments of run_clm.py: 8 sequences per batch in all processes together, and the same initial weights."""
    sizes = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"decay_type": "token", "conv_kernel": 3}
    randomize(ToSTForCausalLM(ToSTConfig(**sizes, max_position_embeddings=32))).save_pretrained(tmp_path / "start")
    defaults = {"config_name": None, "config_overrides": None, "model_name_or_path": tmp_path / "start", "max_steps": STEPS}

    def make(folder, processes: int, **changes) -> list[str]:
        changes |= {"output_dir": folder, "per_device_train_batch_size": 8 // processes}
        return clm_args(**(defaults | {"use_cpu": None, "save_strategy": "steps", "save_steps": 2} | changes))

    return make


def launch(file: str, tmp_path, args: list[str], processes: int, *flags: str) -> None:
    script = [str(EXAMPLES.parent / "tests" / "cpus_as_devices.py"), str(RUN_CLM)]
    default_command = launch_command(RUN_CLM, [], 2)
    port = default_command[default_command.index("--main_process_port") + 1]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(EXAMPLES / "accelerate" / file)]
    command += ["--num_processes", str(processes), "--main_process_port", port, "--mixed_precision", "no", *flags]
    env = environment(tmp_path) | {"ACCELERATE_USE_CPU": "false", "DS_ACCELERATOR": "cpu"}
    result = subprocess.run([*command, *script, *args], env=env, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def train_in_one_process(tmp_path, arguments) -> list[float]:
    command = [sys.executable, str(RUN_CLM), *arguments(tmp_path / "one", 1, use_cpu=True, save_strategy="no")]
    result = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return losses(tmp_path / "one")


def test_sharded_runs_resume_on_more_processes_and_load_in_one(tmp_path, arguments):
    expected_losses = train_in_one_process(tmp_path, arguments)
    two, four = tmp_path / "two", tmp_path / "four"
    launch("fsdp2.yaml", tmp_path, arguments(two, 2), 2)
    four.mkdir()
    shutil.copytree(two / "checkpoint-2", four / "checkpoint-2")
    launch("fsdp2.yaml", tmp_path, arguments(four, 4), 4)
    for folder in (two, four):
        assert losses(folder) == pytest.approx(expected_losses, rel=0, abs=1e-4) and len(expected_losses) == STEPS
        actual, expected = (ToSTForCausalLM.from_pretrained(path).state_dict() for path in (folder, tmp_path / "one"))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed (pip install deepspeed)")
def test_deepspeed_has_the_losses_of_one_process(tmp_path, arguments):
    expected_losses = train_in_one_process(tmp_path, arguments)
    for stage in ("2", "3"):
        launch("deepspeed_zero2.yaml", tmp_path, arguments(tmp_path / stage, 2), 2, "--zero_stage", stage)
        assert losses(tmp_path / stage) == pytest.approx(expected_losses, rel=0, abs=1e-4)
        actual, expected = (ToSTForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in (stage, "one"))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)
