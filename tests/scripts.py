"""Running the example scripts as a user does: command lines, environments, `accelerate launch`."""

import json
import os
import socket
import subprocess
import sys
from itertools import chain
from pathlib import Path


EXAMPLES = Path(__file__).parents[1] / "examples"


def command_line(values: dict) -> list[str]:
    """Flags from a dict of arguments: None omits one, True is a flag without a value."""
    flags = ([f"--{key}"] if value is True else [f"--{key}", str(value)] for key, value in values.items() if value is not None)
    return list(chain.from_iterable(flags))


def environment(tmp_path) -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
    }


def launch_command(script: Path, args: list[str], processes: int) -> list[str]:
    """The command line of `accelerate launch`."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    # without --multi_gpu one process starts; with ACCELERATE_USE_CPU several are connected by gloo
    multi_process_flags = ["--multi_gpu", "--main_process_port", str(port)] if processes > 1 else []
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes), *multi_process_flags]
    return [*command, "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", str(script), *args]


def launch(script: Path, tmp_path, args: list[str], processes: int, fails: bool = False, stderr: bool = False) -> str:
    """Runs `accelerate launch` and returns its output, with `fails` or `stderr` also that to stderr.

    `fails` says whether it must exit with an error.
    """
    command = launch_command(script, args, processes)
    completed = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=300)
    assert (completed.returncode != 0) == fails, completed.stdout[-3000:] + completed.stderr[-3000:]
    return completed.stdout + completed.stderr * (fails or stderr)


def losses(output_dir) -> list[float]:
    history = json.loads((Path(output_dir) / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]
