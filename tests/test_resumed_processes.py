"""Runs of several processes of which one is killed at a random moment, or that resume with more or fewer processes."""

import os
import random
import re
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
KILLED = "sharded_cases.launch(*argv, save_steps=1, dtype=torch.float32)"
RESUMES = f"sharded_cases.launch(*argv, save_steps={STEPS // 2})"


@pytest.fixture(scope="module")
def clients(hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        for name, dropout in (("plain", 0.0), ("dropout", 0.1)):
            patch.setenv("TOST_TEST_MODELS", str(folder / name))
            sharded_cases.save_model(hidden_dropout=dropout, embedding_dropout=dropout)
        with Clients(hub, folder, "import sharded_cases", PYTHONPATH=path, OMP_NUM_THREADS="1") as forks:
            yield forks


def start(clients: Clients, code: str, parallelism: str, processes: int, folder: Path) -> Client:
    model = clients.folder / ("dropout" if code == KILLED else "plain")
    return clients.start(code, parallelism, processes, folder, TOST_TEST_MODELS=str(model))


def children(pid: int) -> list[int]:
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for each in found for child in each]


def kill_one(clients: Clients, run: Client, checkpoint: Path, delay: float, chance: random.Random) -> None:
    """Kills one of the processes a moment after a checkpoint is begun; the launcher and the others end."""
    deadline = time.monotonic() + 60
    while not checkpoint.exists():
        assert time.monotonic() < deadline, run.output
        time.sleep(0.001)
    time.sleep(delay)
    processes = children(run.pid)
    os.kill(chance.choice(processes), signal.SIGKILL)
    assert clients.wait(run).status == 1, run.output
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


@pytest.mark.parametrize("parallelism, processes", [("ddp", 2), ("fsdp2", 2), ("tp", 2), ("ddp and cp", 4)])
def test_killed_process_ends_the_run_which_resumes_bit_for_bit(clients, tmp_path, parallelism, processes):
    """With dropout, and a save at every step."""
    seed = random.randrange(1_000_000)
    print(f"The moment is that of seed {seed}.")
    chance = random.Random(seed)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    clients.wait(start(clients, KILLED, parallelism, processes, whole)).check()
    run = start(clients, KILLED, parallelism, processes, killed)
    kill_one(clients, run, killed / f"checkpoint-{chance.randint(1, STEPS - 8)}", chance.uniform(0, 0.1), chance)
    assert not (killed / "trainer_state.json").exists()
    clients.wait(start(clients, KILLED, parallelism, processes, killed)).check()
    assert losses(killed) == losses(whole) and len(losses(whole)) == STEPS
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def begun(clients, tmp_path_factory):
    """Trains two processes with a parallelism; the folder keeps their checkpoint of half the steps."""
    folders = {}

    def begin(parallelism: str) -> Path:
        if parallelism not in folders:
            folders[parallelism] = tmp_path_factory.mktemp("begun")
            clients.wait(start(clients, RESUMES, parallelism, 2, folders[parallelism])).check()
            shutil.rmtree(folders[parallelism] / f"checkpoint-{STEPS}")
        return folders[parallelism]

    return begin


def resume(clients: Clients, begun: Path, parallelism: str, processes: int, folder: Path) -> Client:
    shutil.copytree(begun / f"checkpoint-{STEPS // 2}", folder / f"checkpoint-{STEPS // 2}")
    return clients.wait(start(clients, RESUMES, parallelism, processes, folder))


@pytest.mark.parametrize(
    "before, parallelism, processes",
    [("ddp", "ddp", 1), ("ddp", "ddp", 4), ("cp", "cp", 4), ("cp", "ddp", 2), ("fsdp2", "fsdp2", 4), ("tp", "tp", 4)],
)
def test_other_numbers_of_processes_resume_with_the_same_losses(clients, begun, tmp_path, before, parallelism, processes):
    run = resume(clients, begun(before), parallelism, processes, tmp_path).check()
    assert "was saved by another number of processes" in run.output or processes == 2
    expected = losses(begun(before))
    assert losses(tmp_path) == pytest.approx(expected, rel=0, abs=1e-5) and len(expected) == STEPS
    found, whole = (ToSTForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path, begun(before)))
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "before, parallelism, message",
    [
        ("ddp", "tp", "was not tensor-parallel and now is:"),
        ("tp", "ddp", "was tensor-parallel and now is not"),
        ("ddp", "fsdp2", "None of the checkpoints can be resumed from"),
        ("fsdp2", "ddp", "None of the checkpoints can be resumed from"),
    ],
)
def test_another_parallelism_is_rejected(clients, begun, tmp_path, before, parallelism, message):
    run = resume(clients, begun(before), parallelism, 2, tmp_path)
    assert run.status == 1 and re.search(f"ValueError: .*{message}", run.output), run.output
