"""Training runs of several processes: one model on the same sequences, with every kind of parallelism."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from conftest import randomize, small_config
from cpus_as_devices import treat_cpus_as_devices
from datasets import Dataset
from text_runs import token_ids, train, training_args
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers.distributed import DistributedConfig

from tost_hf import ToSTForCausalLM, ToSTTrainer
from tost_hf.training.checkpoints import choose_checkpoint
from tost_hf.training.streams import PackedStream, collate_blocks


STEPS, EQUAL_STEPS, BATCH = 20, 10, 8
ON_CPUS = ["ddp", "cp", "ddp and cp"]
PARALLELISMS = [*ON_CPUS, "fsdp2", "tp"]
# combinations with another model, kind of data or way to compute: "PARALLELISM, VARIANT"
COMBINATIONS = [f"{parallelism}, float32" for parallelism in ("ddp and cp", "fsdp2", "tp")]
COMBINATIONS += [
    f"cp, {variant}" for variant in ("hybrid", "stream", "hybrid stream", "checkpointing", "hybrid checkpointing")
]
COMBINATIONS += ["tp, hybrid", "tp, stream", "tp, checkpointing"]
COMBINATIONS += [f"{parallelism}, accumulation" for parallelism in ("ddp", "ddp and cp", "fsdp2", "tp")]
COMBINATIONS += ["ddp, evaluated", "ddp and cp, evaluated", "tp, evaluated"]  # before training
COMBINATIONS += ["cp, hybrid accumulation", "cp, stream accumulation", "tp, stream accumulation", "config cp, hybrid"]
# At the default rate of training_args, a channel of a first token comes within 1e-6 of 0 in step 7. There its square is
# divided by EPS_SUM_SQ, with a gradient of 1e6, or by itself, with none: rounding decides which, and the losses diverge.
FLOAT32_RATE = 0.003
LAYERS = {"transformer_layer_cls_to_wrap": ToSTForCausalLM._no_split_modules}


def model_folder(variant: str = "") -> Path:
    return Path(os.environ["TOST_TEST_MODELS"], "hybrid" if "hybrid" in variant else "model")


def save_models(**options) -> None:
    """A model with TSSA in all layers, and a hybrid."""
    config = small_config(vocab_size=100, decay_type="token", conv_kernel=3, **options)
    randomize(ToSTForCausalLM(config)).save_pretrained(model_folder())
    options |= {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "none"}
    config = small_config(vocab_size=100, decay_type="token", **options)
    randomize(ToSTForCausalLM(config)).save_pretrained(model_folder("hybrid"))


def make_stream() -> PackedStream:
    """Blocks of 16 tokens from two shards of documents."""
    documents = Dataset.from_dict({"text": [" ".join(map(str, range(number, 60))) for number in range(40)]})
    stream = documents.to_iterable_dataset(num_shards=2)
    return PackedStream(stream, lambda texts: [b % 97 for text in texts for b in text.encode()], "text", 16, shuffle_buffer=8)


def make_trainer(name: str, processes: int, output_dir: Path, **changes) -> ToSTTrainer:
    """A trainer whose global batch of 8 sequences is split over the processes, of "PARALLELISM, VARIANT"."""
    parallelism, _, variant = name.partition(", ")
    if processes > 1:
        treat_cpus_as_devices()
    groups = {"tp": 1, "cp": 1, "config cp": 1, "ddp and cp": processes // 2 or 1}.get(
        parallelism, processes
    )  # data-parallel groups
    accumulation_steps = 2 if "accumulation" in variant else 1
    changes = {"max_steps": STEPS, "per_device_train_batch_size": BATCH // groups // accumulation_steps} | changes
    changes |= {"output_dir": str(output_dir), "total_batch_size": BATCH, "gradient_checkpointing": "checkpointing" in variant}
    changes["use_cpu"] = parallelism in (*ON_CPUS, "config cp")
    if "grouped" in variant:
        changes["train_sampling_strategy"] = "group_by_length"
    if "float32" in variant:
        changes["learning_rate"] = FLOAT32_RATE
    if parallelism == "config cp" and processes > 1:
        changes["parallelism_config"] = ParallelismConfig(cp_size=processes)
    elif "cp" in parallelism:
        changes["context_parallel_size"] = {"ddp and cp": 2}.get(parallelism, processes)
    if parallelism == "fsdp2":
        changes |= {"fsdp": True, "fsdp_config": LAYERS}
    load_options = {"distributed_config": DistributedConfig(tp_plan="auto")} if parallelism == "tp" else {}
    dtype = torch.float32 if "float32" in variant else torch.float64
    model = ToSTForCausalLM.from_pretrained(model_folder(variant), dtype=dtype, **load_options)
    data = {"train_dataset": make_stream(), "data_collator": collate_blocks} if "stream" in variant else {}
    args = training_args(output_dir.parent, bf16=False, **changes)
    return ToSTTrainer(model, args, **({"train_dataset": token_ids(64)} | data))


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


def run(name: str) -> dict:
    """The losses, and the number of parameters that this process stores."""
    processes = count_processes()
    trainer = make_trainer(name, processes, model_folder().parent / f"{name} {processes}", max_steps=EQUAL_STEPS)
    if "evaluated" in name:
        trainer.evaluate(token_ids(BATCH))
    losses = train(trainer)
    local_parameters = [getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in trainer.model.parameters()]
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # set by Accelerate
    return {"losses": losses, "numel": sum(parameter.numel() for parameter in local_parameters)}


def predict(name: str) -> dict:
    """The loss of five examples in batches of two, and the number of predictions, which context parallelism lacks."""
    output_dir = model_folder().parent / name
    trainer = make_trainer(name, count_processes(), output_dir, per_device_eval_batch_size=2)
    output = trainer.predict(token_ids(5))
    return {"loss": output.metrics["test_loss"], "predictions": len(output.predictions) if name == "tp" else 5}


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
