"""Training killed at random moments, most of them while it saves, resumes bit for bit."""

import os
import random
import signal
import time
from pathlib import Path

import image_runs
import pytest
import text_runs
import torch
from hub_clients import Client, Clients
from scripts import losses


STEPS, KILLS = 24, 4
DROPOUT = "hidden_dropout=0.1,attention_dropout=0.1,embedding_dropout=0.1"
TRAIN = "torch.set_num_threads(1); __import__(argv[0]).main(argv[1:])"


@pytest.fixture(scope="module")
def clients(hub, tmp_path_factory):
    preload = "import run_clm, run_image_classification"
    folder = tmp_path_factory.mktemp("clients")
    with Clients(hub, folder, preload, PYTHONPATH=os.pathsep.join(pythonpath()), HF_HUB_OFFLINE="1") as forks:
        yield forks


def pythonpath() -> list[str]:
    return [str(Path(__file__).parents[1] / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]


def kill_after(clients: Clients, run: Client, checkpoint: Path, delay: float) -> None:
    """Kills a run `delay` seconds after it begins to write a checkpoint."""
    deadline = time.monotonic() + 120
    while not checkpoint.exists():
        assert time.monotonic() < deadline, run.output
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(run.pid, signal.SIGKILL)
    assert clients.wait(run).status == -signal.SIGKILL, run.output


def read_results(folder: Path) -> dict:
    """The final weights, EMA weights, optimizer state, random state and losses of a run."""
    weight_files = [*folder.glob("*.safetensors"), *folder.glob("ema/*.safetensors")]
    checkpoint = folder / f"checkpoint-{STEPS}"
    weights = {str(path.relative_to(folder)): path.read_bytes() for path in weight_files}
    return weights | {
        "losses": losses(folder),
        "state": torch.load(checkpoint / "optimizer.pt"),
        "rng": read_rng_state(checkpoint),
    }


def read_rng_state(checkpoint: Path) -> bytes:
    return torch.load(checkpoint / "rng_state.pth", weights_only=False)["cpu"].numpy().tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("data, kills", [("text", KILLS), ("stream", 2), ("images", KILLS)])
def test_killed_at_random_moments(clients, clm_args, image_args, text_parts, tmp_path, data, kills):
    """Runs with dropout and gradient accumulation, over several epochs, that save every step and delete old checkpoints."""
    script = "run_image_classification" if data == "images" else "run_clm"
    arguments = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
    arguments |= {"gradient_accumulation_steps": 2, "disable_tqdm": "true"}
    if data != "images":
        sizes = f"{text_runs.TINY},{DROPOUT}"
        make_args, arguments = clm_args, arguments | {"config_overrides": sizes, "max_train_samples": 60}
        if data == "stream":
            arguments |= {"max_train_samples": None, "train_file": text_parts, "streaming": True}
            arguments |= {"shuffle_buffer": 10, "dataloader_num_workers": 2}
    else:
        sizes = f"{image_runs.TINY},{DROPOUT},drop_path_rate=0.1"
        make_args, arguments = image_args, arguments | {"config_overrides": sizes, "max_train_samples": 60, "ema_decay": 0.9}
        arguments |= {"dataloader_num_workers": 1, "total_batch_size": 16}

    def start(folder: Path) -> Client:
        return clients.start(TRAIN, script, *make_args(**arguments, output_dir=folder))

    clients.wait(start(tmp_path / "whole")).check()
    expected = read_results(tmp_path / "whole")
    assert len(expected["losses"]) == STEPS and len(expected) == (5 if data == "images" else 4)
    rng = random.Random(0)
    for index in range(kills):
        folder = tmp_path / f"killed-{index}"
        for max_step in [STEPS // 2, STEPS - 2][index % 2 :]:  # every second run is killed twice
            last_step = max([int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*")], default=0)
            checkpoint = folder / f"checkpoint-{rng.randint(last_step + 1, max_step)}"
            kill_after(clients, start(folder), checkpoint, rng.uniform(0, 0.04))
        clients.wait(start(folder)).check()
        actual = read_results(folder)
        torch.testing.assert_close(actual.pop("state"), expected["state"], rtol=0, atol=0)
        assert actual == {name: value for name, value in expected.items() if name != "state"}, f"kill {index}"
