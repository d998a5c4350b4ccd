"""Runs test cases in several processes connected by gloo and collects what each process returns."""

import gc
import json
import os
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


# imports of the cases and conftest, except the modules of this folder, which the fork server does not find
IMPORTS = ["tost_hf.parallel", "torch.distributed.fsdp", "tokenizers", "pytest", "sklearn.datasets"]
IMPORTS += ["tost_hf.training.trainer_vision"]


def run_cases(cases, names: list[str], processes: int, folder) -> dict[str, list]:
    """Calls `cases(name)` for every name in every process.

    Returns:
        For each name the list of what the processes returned; "Type: message" where one raised an error.
    """
    # the fork server has imported everything once and computed nothing
    mp.get_context("forkserver").set_forkserver_preload(IMPORTS)
    mp.start_processes(_run_process, args=(cases, names, processes, str(folder)), nprocs=processes, start_method="forkserver")
    answers = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    return {name: [answer[name] for answer in answers] for name in names}


def _run_process(rank: int, cases, names: list[str], processes: int, folder: str) -> None:
    gc.freeze()  # or each run of Trainer would look for garbage in all that is imported
    torch.set_num_threads(1)
    os.environ["TOST_TEST_MODELS"] = folder  # the fork server may have started before it was set
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
