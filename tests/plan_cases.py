"""What each process of test_plan.py holds and sends in a step, counted."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import randomize, small_config
from tensor_parallel_cases import folder_of, load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from tost_hf import ToSTForCausalLM
from tost_hf.parallel import parallelize


sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))
import plan


TOKENS = 64
SIZES = {"vocab_size": 128, "hidden_size": 64, "max_position_embeddings": None}


def save_model() -> None:
    randomize(ToSTForCausalLM(small_config(**SIZES))).save_pretrained(folder_of("plan"))


class CountSent(TorchDispatchMode):
    """Sums the bytes that a process sends, with ring algorithms."""

    def __init__(self):
        super().__init__()
        self.sent = 0.0
        self.processes = dist.get_world_size()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.sent += self._sent_by(func.__name__, args)
        return func(*args, **(kwargs or {}))

    def _sent_by(self, name: str, args) -> float:
        others = self.processes - 1
        given = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        if name.startswith(("all_reduce", "allreduce")):
            return 2 * others / self.processes * given.nbytes
        if name.startswith("_allgather_base"):  # (output, input)
            return others * args[1].nbytes
        if name.startswith("all_gather_into_tensor"):
            return others * given.nbytes
        if name.startswith("_reduce_scatter_base"):
            return others / self.processes * args[1].nbytes
        if name.startswith("reduce_scatter_tensor"):
            return others / self.processes * given.nbytes
        assert name.startswith(("wait", "_wrap", "broadcast", "barrier", "allgather_")), name
        return 0.0


def parallel_model(strategy: str):
    model = load("plan", tp=strategy == "tp", dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if strategy == "FSDP2":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh, reshard_after_forward=True)
    if strategy == "tp":
        return model
    return DistributedDataParallel(parallelize(model, mesh) if strategy == "cp" else model)


def make_ids() -> torch.Tensor:
    return torch.arange(TOKENS).remainder(SIZES["vocab_size"]).unsqueeze(0)


def size_of(x: torch.Tensor) -> int:
    return (x.to_local() if hasattr(x, "to_local") else x).nbytes


def run(strategy: str) -> dict:
    """Bytes sent in a step, held after it, and kept by a forward pass."""
    model = parallel_model(strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = make_ids()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()  # DDP forms its buckets
    with CountSent() as counted:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    parameters = list(model.parameters())
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    held = sum(size_of(x) for x in [*parameters, *(parameter.grad for parameter in parameters), *moments])
    kept = plan.saved_tensor_bytes(model, input_ids=ids, use_cache=False)
    return {"sent": counted.sent, "held": held, "kept": kept}
