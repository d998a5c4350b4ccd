"""Runs cases in several processes at once, joined by gloo; what each returns comes back, one place per process."""

import json
import os
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


# what the cases and conftest import, but for modules of this folder, which the fork server does not find
IMPORTS = ["tost_hf.parallel", "torch.distributed.fsdp", "tokenizers", "pytest", "sklearn.datasets"]
IMPORTS += [f"tost_hf.training.trainer_{name}" for name in ("context_parallel", "tensor_parallel", "vision")]


def run_cases(cases, names: list[str], processes: int, folder) -> dict[str, list]:
    """Calls `cases(name)` for every name in every process.

    Returns:
        For each name a list with what each process's case returned, or "Type: message" of what it raised.
    """
    # forked from a process that has imported everything once, and never computed anything
    mp.get_context("forkserver").set_forkserver_preload(IMPORTS)
    mp.start_processes(_run, args=(cases, names, processes, str(folder)), nprocs=processes, start_method="forkserver")
    answers = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    return {name: [answer[name] for answer in answers] for name in names}


def _run(rank: int, cases, names: list[str], processes: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["TOST_TEST_MODELS"] = folder  # the process forked from may be older
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    answers = {}
    for name in names:
        torch.manual_seed(0)
        try:
            answers[name] = cases(name)
        except Exception as error:
            traceback.print_exc()
            answers[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(answers, file)
    dist.destroy_process_group()
