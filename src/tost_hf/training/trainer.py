# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Training with the authors' settings: `ToSTTrainingArguments` and `ToSTTrainer`, based on transformers' Trainer."""

import math
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from accelerate.utils import recursively_apply
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from ..model.layers_tost import FLOAT32_PARAMETERS
from ..model.modeling_tost import ToSTForCausalLM
from .callbacks import FiniteLossCallback
from .trainer_hub import PublishingTrainer
from .trainer_parallel import ParallelTrainer
from .trainer_stream import StreamingTrainer


NO_WEIGHT_DECAY = FLOAT32_PARAMETERS


@dataclass
class BaseTrainingArguments(TrainingArguments):
    """`TrainingArguments` with `total_batch_size`: base class of the arguments for language and vision models.

    Raises:
        ValueError: a value is outside its range.
    """

    ranges: ClassVar[dict[str, tuple[float, float]]] = {  # the smallest and the largest value
        "per_device_train_batch_size": (1, math.inf),
        "per_device_eval_batch_size": (1, math.inf),
        "gradient_accumulation_steps": (1, math.inf),
        "total_batch_size": (1, math.inf),
        "num_train_epochs": (0, math.inf),
        "learning_rate": (0, math.inf),
        "weight_decay": (0, math.inf),
        "label_smoothing_factor": (0, 1),
    }

    total_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Examples per optimizer step, over all devices; sets gradient_accumulation_steps. A multiple of "
            "per_device_train_batch_size times the number of data-parallel devices."
        },
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "The checkpoint folder to resume from; the flag alone means the newest one in output_dir.",
            "nargs": "?",
            "const": "true",
        },
    )
    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={"help": "Whether to log the mean of other losses in place of NaN; each step then waits for the device."},
    )

    def __post_init__(self):
        for name, (low, high) in self.ranges.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                valid_range = f"at least {low}" if high == math.inf else f"from {low} to {high}"
                raise ValueError(f"{name} must be {valid_range}, got {value}.")
        if self.total_batch_size is not None:
            if self.auto_find_batch_size:
                raise ValueError("auto_find_batch_size and total_batch_size exclude each other: leave one of them out.")
            if self.deepspeed is not None or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
                # its configuration is built from the arguments; otherwise ToSTTrainer sets it, which knows the parallelism
                self.set_gradient_accumulation(int(os.environ.get("WORLD_SIZE", 1)))
        if hasattr(self, "activation_checkpointing"):  # the new name, which the lowest supported transformers does not know
            for suffix in ("", "_kwargs"):
                old, new = f"gradient_checkpointing{suffix}", f"activation_checkpointing{suffix}"
                if getattr(self, new) is None:
                    setattr(self, new, getattr(self, old))
        super().__post_init__()
        if not torch.accelerator.is_available():  # PyTorch warns of pinned memory on a CPU
            self.dataloader_pin_memory = False

    def set_gradient_accumulation(self, num_devices: int) -> None:
        """Sets `gradient_accumulation_steps` so that a step has `total_batch_size` examples.

        Args:
            num_devices: devices that read different examples; a tensor- or context-parallel group counts as one.

        Raises:
            ValueError: it is not a multiple of the micro-batch size, or contradicts `gradient_accumulation_steps`.
        """
        assert self.total_batch_size is not None
        micro_batch_size = self.per_device_train_batch_size * num_devices
        steps, remainder = divmod(self.total_batch_size, micro_batch_size)
        if remainder:
            raise ValueError(
                f"total_batch_size {self.total_batch_size} is not a multiple of per_device_train_batch_size "
                f"{self.per_device_train_batch_size} on {num_devices} data-parallel devices: change one of the three."
            )
        if self.gradient_accumulation_steps not in (1, steps):
            raise ValueError(
                f"gradient_accumulation_steps {self.gradient_accumulation_steps} contradicts total_batch_size "
                f"{self.total_batch_size}, which makes it {steps}: leave one of them out."
            )
        self.gradient_accumulation_steps = steps


@dataclass
class ToSTTrainingArguments(BaseTrainingArguments):
    """`TrainingArguments` with the authors' optimizer (paper, arXiv 2412.17810, and their code) by default.

    AdamW with betas (0.9, 0.95), weight decay 0.1 and learning rate 6e-4, gradients clipped at 1.0. Where the released
    tost-base configuration differs from the paper (weight decay 0.01), the paper's value is used. The batch, length and
    schedule of the published pre-training are in `examples/recipes/text_pretraining.yaml`.

    Raises:
        ValueError: a value is outside its range, or a fused loss with label smoothing or a PyTorch without it.

    Example:

    ```python
    >>> from tost_hf import ToSTTrainingArguments

    >>> args = ToSTTrainingArguments("out", max_steps=1000, warmup_steps=100, lr_scheduler_type="cosine")
    >>> args.learning_rate, args.weight_decay, args.adam_beta2
    (0.0006, 0.1, 0.95)
    ```
    """

    ranges = BaseTrainingArguments.ranges | {"context_parallel_size": (1, math.inf)}

    learning_rate: float = field(default=6e-4, metadata={"help": "The peak learning rate of AdamW."})
    weight_decay: float = field(
        default=0.1,
        metadata={"help": "Weight decay of the tensors of two or more dimensions, except temp and denom_bias."},
    )
    adam_beta2: float = field(default=0.95, metadata={"help": "The second beta of AdamW."})
    fuse_linear_cross_entropy: bool = field(
        default=False,
        metadata={
            "help": "In training, compute the loss from the hidden states in chunks (PyTorch's linear_cross_entropy), so that "
            "the full logits are never in memory. Equal up to rounding; a bfloat16 model's loss is rounded to bfloat16."
        },
    )
    context_parallel_size: int = field(
        default=1, metadata={"help": "Processes that share each sequence; must divide the number of processes."}
    )

    def __post_init__(self):
        if self.fuse_linear_cross_entropy:
            self._check_fused_loss()
        super().__post_init__()

    def _check_fused_loss(self) -> None:
        if not hasattr(F, "linear_cross_entropy"):
            raise ValueError(
                f"fuse_linear_cross_entropy needs a PyTorch that has linear_cross_entropy; {torch.__version__} lacks it."
            )
        if self.label_smoothing_factor:
            raise ValueError("fuse_linear_cross_entropy has no logits to smooth; leave label_smoothing_factor at 0.")


class ToSTTrainer(StreamingTrainer, PublishingTrainer, ParallelTrainer):
    """transformers' `Trainer` with the authors' parameter groups; without `args`, with `ToSTTrainingArguments`.

    Weight decay applies to tensors of two or more dimensions except `temp` and `denom_bias`, which set the sharpness and the
    bias of a membership. Embeddings are decayed; tensors of one dimension (norms, biases, LayerScale) are not.

    It resumes from complete checkpoints only (`CheckpointTrainer`), stops when the loss becomes NaN (`FiniteLossCallback`),
    and pushes models with their code and card (`PublishingTrainer`). The arguments, the model and the data determine the rest,
    in any combination except for that of context and tensor parallelism:

    - `context_parallel_size`, or `cp_size` of Accelerate's `ParallelismConfig`: that many processes share each sequence (see
      `tost_hf.parallel.parallelize`). Evaluation then returns only the loss, as each process has only the logits of its shard.
    - a model loaded with `distributed_config=DistributedConfig(tp_plan="auto")`: each process has some of the heads.
      Checkpoints contain the whole model and optimizer, and a run may resume with another number of processes.
    - a `tost_hf.training.streams.PackedStream` as training data: each worker reads different files, and a resumed run
      continues at the same position; with `ignore_data_skip` it starts the stream over.

    Raises:
        ValueError: the arguments do not suit the model or the processes; raised by `train`: the checkpoint is incomplete, or
            of a tensor-parallel run and the model is not, or vice versa.
        FloatingPointError: raised by `train`: the loss became NaN or infinite; nothing was saved since.

    Example, with `dataset` a `datasets.Dataset` of "input_ids" and "labels":

    ```python
    >>> from tost_hf import ToSTConfig, ToSTForCausalLM, ToSTTrainer, ToSTTrainingArguments

    >>> model = ToSTForCausalLM(ToSTConfig.from_preset("tost-base"))
    >>> trainer = ToSTTrainer(model, ToSTTrainingArguments("out", max_steps=100), train_dataset=dataset)
    >>> trainer.train()
    ```
    """

    model: nn.Module  # not None after __init__, also with `model_init`

    def __init__(self, model=None, args: TrainingArguments | None = None, **kwargs):
        self._use_cache = _get_use_cache(model)
        super().__init__(model, ToSTTrainingArguments() if args is None else args, **kwargs)
        _set_use_cache(self.model, self._use_cache)  # Trainer has set it to that of the arguments, which would be saved
        self.add_callback(FiniteLossCallback())
        if self.model_init is None:
            self.model = self.model_wrapped = self.prepare_model(self.model)

    def call_model_init(self, trial=None) -> nn.Module:
        model = super().call_model_init(trial)
        self._use_cache = _get_use_cache(model)
        return self.prepare_model(model)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Applies the arguments that concern the model, also to each model that `model_init` returns.

        Raises:
            ValueError: the arguments do not suit the model.
        """
        if getattr(self.args, "fuse_linear_cross_entropy", False):
            causal_lms = [m for m in model.modules() if isinstance(m, ToSTForCausalLM)]
            if not causal_lms:
                raise ValueError("fuse_linear_cross_entropy is for ToSTForCausalLM.")
            causal_lms[0].fuse_linear_cross_entropy = True
        tokenizer = getattr(self, "processing_class", None)  # Trainer calls `model_init` before it is set
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            for config in filter(None, (getattr(model, name, None) for name in ("config", "generation_config"))):
                if getattr(config, "pad_token_id", None) is None:  # Trainer sets it as well, with a warning
                    config.pad_token_id = tokenizer.pad_token_id
        return self.shard_sequences(model)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self._check_processes()
        if isinstance(self.args, BaseTrainingArguments) and self.args.total_batch_size is not None:
            data_parallel_size = self.args.world_size // self._group_size
            self.args.set_gradient_accumulation(data_parallel_size * max(1, self.args.n_gpu))

    def _check_processes(self) -> None:
        """Raises a ValueError if the processes are not connected, or FSDP would not shard the model."""
        num_processes = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
        if num_processes > 1 and self.args.world_size == 1:
            raise ValueError(
                f"{num_processes} processes were started, but each would train alone and write the same files: there is no "
                "device that connects them. To train on CPUs, set use_cpu=True (--use_cpu) or ACCELERATE_USE_CPU=true."
            )
        fsdp_requested = self.args.fsdp_plugin_args is not None or os.environ.get("ACCELERATE_USE_FSDP") == "true"
        if self.args.world_size > 1 and fsdp_requested and not self.is_fsdp_enabled:
            raise ValueError(
                "FSDP was requested, but Accelerate shards no model on CPUs: each process would store all of it. Train on "
                "devices that Accelerate supports, or without FSDP."
            )

    def compute_loss_context_manager(self) -> ExitStack:
        """Context of each forward pass, in which the model's configuration has the `use_cache` of the arguments."""
        stack = super().compute_loss_context_manager()
        stack.callback(_set_use_cache, self.model, _get_use_cache(self.model))
        _set_use_cache(self.model, self.args.use_cache)
        return stack

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """`Trainer.evaluate`, after which training has the random numbers that it would have without."""
        with torch.random.fork_rng(devices=[]):  # a DataLoader draws its seed on the CPU
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs) -> EvalLoopOutput:
        """`Trainer.evaluation_loop`, which counts the examples that a tensor- or context-parallel group shares once."""
        if self._group_size > 1:
            self.gather_function = self._gather_from_groups  # Trainer resets it at the end of the loop
        return super().evaluation_loop(*args, **kwargs)

    def _gather_from_groups(self, data: Any) -> Any:
        """Accelerate's `gather_for_metrics` of one process per group: it would count an uneven last batch for less."""
        group_size, state = self._group_size, self.accelerator.gradient_state
        end = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def select(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(0, (self.args.world_size // group_size, group_size, -1))[:, 0].flatten(0, 1)[:end]

        return recursively_apply(select, self.accelerator.gather(data))

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay, from which `Trainer.create_optimizer` builds its two groups."""
        return [
            name
            for name, parameter in model.named_parameters()
            # DeepSpeed's ZeRO-3 flattens parameters and stores their shape in `ds_shape`
            if len(getattr(parameter, "ds_shape", parameter.shape)) >= 2 and name.rpartition(".")[2] not in NO_WEIGHT_DECAY
        ]


def _get_use_cache(model: nn.Module | None) -> bool | None:
    """`use_cache` of a model's configuration; None if it has none."""
    return getattr(getattr(model, "config", None), "use_cache", None)


def _set_use_cache(model: nn.Module, use_cache: bool | None) -> None:
    config: Any = getattr(model, "config", None)
    if use_cache is not None and config is not None:
        config.use_cache = use_cache
    elif hasattr(config, "use_cache"):
        del config.use_cache


__all__ = ["BaseTrainingArguments", "ToSTTrainer", "ToSTTrainingArguments"]
