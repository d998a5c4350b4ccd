"""Training runs of several processes: one model on the same sequences, with every kind of parallelism."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import randomize, small_config
from cpus_as_devices import treat_cpus_as_devices
from text_runs import token_ids, train, training_args
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers.distributed import DistributedConfig

from tost_hf import ContextParallelTrainer, TensorParallelTrainer, ToSTForCausalLM
from tost_hf.training.checkpoints import choose_checkpoint


STEPS, EQUAL_STEPS, BATCH = 20, 10, 8
ON_CPUS = ["ddp", "cp", "ddp and cp"]
PARALLELISMS = [*ON_CPUS, "fsdp2", "tp"]
FLOAT32 = [f"{parallelism}, float32" for parallelism in ("ddp and cp", "fsdp2", "tp")]
# At the default rate of training_args, a channel of a first token comes within 1e-6 of 0 in step 7. There its square is
# divided by EPS_SUM_SQ, with a gradient of 1e6, or by itself, with none: rounding decides which, and the losses diverge.
FLOAT32_RATE = 0.003
LAYERS = {"transformer_layer_cls_to_wrap": ToSTForCausalLM._no_split_modules}


class ParallelTrainer(ContextParallelTrainer, TensorParallelTrainer):
    """A trainer that supports every kind of parallelism."""


def model_folder() -> Path:
    return Path(os.environ["TOST_TEST_MODELS"], "model")


def save_model(**options) -> None:
    config = small_config(vocab_size=100, forgetting="token", conv_kernel=3, **options)
    randomize(ToSTForCausalLM(config)).save_pretrained(model_folder())


def make_trainer(parallelism: str, processes: int, output_dir: Path, dtype=torch.float64, **changes) -> ParallelTrainer:
    """A trainer whose global batch of 8 sequences is split over the processes."""
    if processes > 1:
        treat_cpus_as_devices()
    groups = {"tp": 1, "cp": 1, "ddp and cp": processes // 2 or 1}.get(parallelism, processes)  # data-parallel groups
    changes = {"max_steps": STEPS, "per_device_train_batch_size": BATCH // groups} | changes
    changes |= {"output_dir": str(output_dir), "total_batch_size": BATCH}
    changes["use_cpu"] = parallelism in ON_CPUS
    if "cp" in parallelism:
        changes["context_parallel_size"] = {"cp": processes, "ddp and cp": 2}[parallelism]
    if parallelism == "fsdp2":
        changes |= {"fsdp": True, "fsdp_config": LAYERS}
    load_options = {"distributed_config": DistributedConfig(tp_plan="auto")} if parallelism == "tp" else {}
    model = ToSTForCausalLM.from_pretrained(model_folder(), dtype=dtype, **load_options)
    return ParallelTrainer(model, training_args(output_dir.parent, bf16=False, **changes), train_dataset=token_ids(64))


def count_processes() -> int:
    """The number of processes; also sets the environment variables that Trainer reads."""
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if processes > 1:
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
        os.environ |= dict(zip(names, [str(dist.get_rank())] * 2 + [str(processes)] * 2))
    return processes


def train_ddp(name: str) -> list[int]:
    """Trains with DDP and returns the steps: resumed from a checkpoint, or with a NaN loss of one process in step 4."""
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer("ddp", count_processes(), model_folder().parent, **options)
    compute_loss, steps = trainer.compute_loss, []

    def compute_faulty_loss(*args, **kwargs):  # the value is NaN, the gradient is not
        steps.append(trainer.state.global_step + 1)
        is_faulty = name == "nan" and steps[-1] == 4 and trainer.args.process_index == 1
        return compute_loss(*args, **kwargs) + (float("nan") if is_faulty else 0.0)

    trainer.compute_loss = compute_faulty_loss
    trainer.train(name == "resume")
    return steps


def run(parallelism: str) -> dict:
    """The losses, and the number of parameters that this process stores."""
    processes = count_processes()
    parallelism, _, float32 = parallelism.partition(", ")
    dtype, changes = (torch.float32, {"learning_rate": FLOAT32_RATE}) if float32 else (torch.float64, {})
    changes["max_steps"] = EQUAL_STEPS
    trainer = make_trainer(parallelism, processes, model_folder().parent / f"{parallelism} {processes}", dtype, **changes)
    losses = train(trainer)
    local_parameters = [getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in trainer.model.parameters()]
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # set by Accelerate
    return {"losses": losses, "numel": sum(parameter.numel() for parameter in local_parameters)}


def launch(parallelism: str, processes: str, output_dir: str, **changes) -> None:
    """Trains in processes started like those of `accelerate launch` and torchrun, resuming from the newest checkpoint."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(processes),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",  # this process has imported everything and computed nothing
    )
    elastic_launch(config, train_launched)(parallelism, output_dir, changes)


def train_launched(parallelism: str, output_dir: str, changes: dict) -> None:
    torch.set_num_threads(1)
    trainer = make_trainer(parallelism, int(os.environ["WORLD_SIZE"]), Path(output_dir), save_strategy="steps", **changes)
    trainer.train(choose_checkpoint(trainer, None))
    trainer.save_model()
    trainer.save_state()
