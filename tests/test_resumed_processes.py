"""Distributed runs: one process is killed at a random moment; runs resume with more or fewer processes."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import sharded_cases
import torch
from hub_clients import Client, Clients
from scripts import losses

from tost_hf import ToSTForCausalLM


pytestmark = pytest.mark.slow
STEPS = sharded_cases.STEPS
LAUNCH_SAVING_EVERY_STEP = "sharded_cases.launch(*argv, save_steps=1)"
LAUNCH_SAVING_ONCE = f"sharded_cases.launch(*argv, save_steps={STEPS // 2})"


@pytest.fixture(scope="module")
def clients(hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        for name, dropout in (("plain", 0.0), ("dropout", 0.1)):
            patch.setenv("TOST_TEST_MODELS", str(folder / name))
            sharded_cases.save_models(hidden_dropout=dropout, embedding_dropout=dropout)
        with Clients(hub, folder, "import sharded_cases", PYTHONPATH=path, OMP_NUM_THREADS="1") as clients:
            yield clients


def start_run(clients: Clients, code: str, parallelism: str, processes: int, folder: Path) -> Client:
    model = clients.folder / ("dropout" if code == LAUNCH_SAVING_EVERY_STEP else "plain")
    return clients.start(code, parallelism, processes, folder, TOST_TEST_MODELS=str(model))


def list_children(pid: int) -> list[int]:
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for children in lists for child in children]


def kill_one_process(clients: Clients, run: Client, checkpoint: Path, delay: float, rng: random.Random) -> None:
    """Kills one process `delay` seconds after it begins to write a checkpoint; the launcher and the other processes end."""
    deadline = time.monotonic() + 60
    while not checkpoint.exists():
        assert time.monotonic() < deadline, run.output
        time.sleep(0.001)
    time.sleep(delay)
    processes = list_children(run.pid)
    os.kill(rng.choice(processes), signal.SIGKILL)
    assert clients.wait(run).status == 1, run.output
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


@pytest.mark.parametrize(
    "parallelism, processes", [("ddp, grouped", 2), ("fsdp2", 2), ("tp, stream", 2), ("ddp and cp, hybrid", 4)]
)
def test_run_with_a_killed_process_resumes_bit_for_bit(clients, tmp_path, parallelism, processes):
    """With dropout, and a checkpoint at every step."""
    seed = random.randrange(1_000_000)
    print(f"The moment of the kill depends on seed {seed}.")
    rng = random.Random(seed)
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    clients.wait(start_run(clients, LAUNCH_SAVING_EVERY_STEP, parallelism, processes, uninterrupted)).check()
    run = start_run(clients, LAUNCH_SAVING_EVERY_STEP, parallelism, processes, killed)
    kill_one_process(clients, run, killed / f"checkpoint-{rng.randint(1, STEPS - 8)}", rng.uniform(0, 0.1), rng)
    assert not (killed / "trainer_state.json").exists()
    clients.wait(start_run(clients, LAUNCH_SAVING_EVERY_STEP, parallelism, processes, killed)).check()
    assert losses(killed) == losses(uninterrupted) and len(losses(uninterrupted)) == STEPS
    assert (killed / "model.safetensors").read_bytes() == (uninterrupted / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def first_half(clients, tmp_path_factory):
    """Trains two processes with a parallelism, once; returns the folder with their checkpoint after half of the steps."""
    folders = {}

    def train(parallelism: str) -> Path:
        if parallelism not in folders:
            folders[parallelism] = tmp_path_factory.mktemp("first_half")
            clients.wait(start_run(clients, LAUNCH_SAVING_ONCE, parallelism, 2, folders[parallelism])).check()
            shutil.rmtree(folders[parallelism] / f"checkpoint-{STEPS}")
        return folders[parallelism]

    return train


def resume(clients: Clients, source: Path, parallelism: str, processes: int, folder: Path) -> Client:
    shutil.copytree(source / f"checkpoint-{STEPS // 2}", folder / f"checkpoint-{STEPS // 2}")
    return clients.wait(start_run(clients, LAUNCH_SAVING_ONCE, parallelism, processes, folder))


@pytest.mark.parametrize(
    "previous, parallelism, processes",
    [
        ("ddp", "ddp", 1),
        ("ddp", "ddp", 4),
        ("cp", "cp", 4),
        ("cp", "ddp", 2),
        ("fsdp2", "fsdp2", 4),
        ("tp, stream", "tp, stream", 4),
    ],
)
def test_resuming_with_another_number_of_processes(clients, first_half, tmp_path, previous, parallelism, processes):
    run = resume(clients, first_half(previous), parallelism, processes, tmp_path).check()
    assert "was saved by another number of processes" in run.output or processes == 2
    expected_losses = losses(first_half(previous))
    assert losses(tmp_path) == pytest.approx(expected_losses, rel=0, abs=1e-5) and len(expected_losses) == STEPS
    weights, expected_weights = (
        ToSTForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path, first_half(previous))
    )
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "previous, parallelism, message",
    [
        ("ddp", "tp", "different number of parameter groups"),
        ("tp", "ddp", "different number of parameter groups"),
        ("ddp", "fsdp2", "None of the checkpoints can be resumed from"),
        ("fsdp2", "ddp", "None of the checkpoints can be resumed from"),
    ],
)
def test_another_parallelism_is_rejected(clients, first_half, tmp_path, previous, parallelism, message):
    run = resume(clients, first_half(previous), parallelism, 2, tmp_path)
    assert run.status == 1 and "ValueError: " in run.output and message in run.output, run.output
