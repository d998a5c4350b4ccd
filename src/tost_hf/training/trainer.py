# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Training with the authors' settings: `ToSTTrainingArguments` and `ToSTTrainer` on transformers' own Trainer."""

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.utils import is_torch_bf16_gpu_available

from ..model.layers_tost import KEPT_IN_FLOAT32
from ..model.modeling_tost import ToSTForCausalLM
from .trainer_context import ContextTrainer
from .trainer_guard import GuardedTrainer
from .trainer_heads import HeadsTrainer
from .trainer_hub import PublishingTrainer
from .trainer_stream import StreamingTrainer


RECIPE_MAX_STEPS = 600_000
RECIPE_WARMUP_STEPS = 2_000
RECIPE_BATCH_SIZE = 60  # sequences of a micro-batch of tost-base
RECIPE_ACCUMULATION = 8  # micro-batches of a step, over all processes: 480 sequences
RECIPE_MIN_LR_RATE = 0.1
NOT_DECAYED = KEPT_IN_FLOAT32


def chosen_later(text: str, **metadata) -> Any:
    """A field that, left out, gets its value in `__post_init__`: its type is that value's, never None."""
    return field(default=None, metadata={"help": text} | metadata)


@dataclass
class RecipeArguments(TrainingArguments):
    """What the recipes of language and vision have in common."""

    bf16: bool = chosen_later(
        "Whether to compute in bfloat16. Default: if the device has it.",
        nargs="?",  # so that a plain --bf16 still means true
        const=True,
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "The folder of the checkpoint to go on from; the flag alone means the last one in output_dir.",
            "nargs": "?",
            "const": "true",
        },
    )
    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={"help": "Whether to log the mean of other losses in place of NaN; each step then waits for the device."},
    )

    def __post_init__(self):
        if self.bf16 is None:
            chosen = self.fp16 or os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no"
            on_cpu = self.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
            self.bf16 = not chosen and not on_cpu and is_torch_bf16_gpu_available()
        self._check_length()
        super().__post_init__()

    def _check_length(self) -> None:
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.max_steps == 0:  # which transformers takes for -1
            raise ValueError("max_steps must be at least 1, or -1 to train for num_train_epochs, got 0.")
        if self.num_train_epochs <= 0:
            raise ValueError(f"num_train_epochs must be above 0, got {self.num_train_epochs}.")
        if self.output_dir is not None and os.path.exists(self.output_dir) and not os.path.isdir(self.output_dir):
            raise FileExistsError(f"The output_dir {self.output_dir!r} is a file; name a folder.")


@dataclass
class ToSTTrainingArguments(RecipeArguments):
    """`TrainingArguments` whose defaults are the authors' language pre-training (paper, arXiv 2412.17810, and their code).

    AdamW with betas (0.9, 0.95) and weight decay 0.1, learning rate 6e-4 with 2,000 steps of warm-up and a cosine down to a
    tenth, gradients clipped at 1.0, 600,000 steps of 480 sequences, bf16. Where the released tost-base configuration
    differs from the paper (weight decay 0.01), the paper's value is used.

    A default steps aside when it would contradict what was asked for:

    - `num_train_epochs` alone decides the length of training; `max_steps`, given too, wins as in transformers.
    - A batch size given without `gradient_accumulation_steps` is not accumulated. With neither, a step has 60 x 8 sequences
      whatever the number of processes (the authors used 30 x 16 for tost-medium, 20 x 24 for tost-large).
    - Warm-up takes 2,000 steps, or a tenth of a shorter run.
    - The floor of the learning rate belongs to the default schedule; another `lr_scheduler_type` has its own arguments.
    - bf16 is used where the device has it, unless fp16 or Accelerate's `mixed_precision` says otherwise.
    """

    learning_rate: float = field(default=6e-4, metadata={"help": "The peak learning rate of AdamW."})
    weight_decay: float = field(
        default=0.1,
        metadata={"help": "Weight decay of the tensors of two or more dimensions, other than temp and denom_bias."},
    )
    adam_beta2: float = field(default=0.95, metadata={"help": "The second beta of AdamW."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "The norm gradients are clipped to."})
    lr_scheduler_type: SchedulerType | str = field(
        default="cosine_with_min_lr", metadata={"help": "The learning rate's schedule; the default ends at a tenth."}
    )
    warmup_steps: float = chosen_later(
        "Steps of linear warm-up, or a share of the run if below 1. Default: 2,000, or a tenth if fewer."
    )
    max_steps: int = chosen_later(
        "Number of optimizer steps; wins over num_train_epochs. Default: 600,000 if neither is given."
    )
    num_train_epochs: float = chosen_later("Number of passes over the training data, in place of max_steps.")
    per_device_train_batch_size: int = chosen_later("Sequences of one device's micro-batch. Default: 60.")
    gradient_accumulation_steps: int = chosen_later(
        "Micro-batches of a step. Default: 1, or 8 shared by the processes if no batch size is given."
    )
    fuse_linear_cross_entropy: bool = field(
        default=False,
        metadata={
            "help": "In training, compute the loss from the hidden states in chunks (PyTorch's linear_cross_entropy), so that "
            "the logits are never in memory as a whole. Equal up to rounding; a bfloat16 model's loss is rounded to bfloat16."
        },
    )
    context_parallel_size: int = field(
        default=1,
        metadata={"help": "Processes that share each text, cut along its tokens; must divide the number of processes."},
    )

    def __post_init__(self):
        if self.fuse_linear_cross_entropy:
            self._check_fused_loss()
        if self.context_parallel_size < 1:
            raise ValueError(f"context_parallel_size must be at least 1, got {self.context_parallel_size}.")
        if self.max_steps is None:
            self.max_steps = RECIPE_MAX_STEPS if self.num_train_epochs is None else -1
        if self.num_train_epochs is None:
            self.num_train_epochs = 3.0  # as in transformers; has an effect with max_steps=-1 only
        if self.gradient_accumulation_steps is None:
            processes = int(os.environ.get("WORLD_SIZE", 1)) // self.context_parallel_size or 1
            default_batch = self.per_device_train_batch_size is None
            self.gradient_accumulation_steps = max(1, RECIPE_ACCUMULATION // processes) if default_batch else 1
        if self.per_device_train_batch_size is None:
            self.per_device_train_batch_size = RECIPE_BATCH_SIZE
        self._shorten_warmup = self.warmup_steps is None
        if self.warmup_steps is None:
            self.warmup_steps = RECIPE_WARMUP_STEPS
        if self.lr_scheduler_kwargs is None and SchedulerType(self.lr_scheduler_type) == SchedulerType.COSINE_WITH_MIN_LR:
            self.lr_scheduler_kwargs = {"min_lr_rate": RECIPE_MIN_LR_RATE}
        super().__post_init__()

    def _check_fused_loss(self) -> None:
        if not hasattr(F, "linear_cross_entropy"):
            raise ValueError(
                f"fuse_linear_cross_entropy needs a PyTorch that has linear_cross_entropy; {torch.__version__} lacks it."
            )
        if self.label_smoothing_factor:
            raise ValueError("fuse_linear_cross_entropy has no logits to smooth; leave label_smoothing_factor at 0.")

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Number of warm-up steps in a run of `num_training_steps`."""
        steps = super().get_warmup_steps(num_training_steps)
        return min(steps, num_training_steps // 10) if self._shorten_warmup else steps


class ToSTTrainer(ContextTrainer, HeadsTrainer, GuardedTrainer, StreamingTrainer, PublishingTrainer):
    """transformers' `Trainer` with the authors' parameter groups; without `args`, with their settings too.

    It resumes from complete checkpoints only, stops when the loss becomes NaN (see `GuardedTrainer`), and goes on with a
    stream of text where it was (see `StreamingTrainer`).

    Weight decay applies to tensors of two or more dimensions except `temp` and `denom_bias`, which set the sharpness and the
    bias of a membership. Tensors of one dimension (norms, biases, LayerScale) are not decayed. The embeddings are.
    """

    model: nn.Module  # made by then, from `model_init` if need be

    def __init__(self, model=None, args: TrainingArguments | None = None, **kwargs):
        super().__init__(model, ToSTTrainingArguments() if args is None else args, **kwargs)
        if getattr(self.args, "fuse_linear_cross_entropy", False):
            fused = [m for m in self.model.modules() if isinstance(m, ToSTForCausalLM)]
            if not fused:
                raise ValueError("fuse_linear_cross_entropy is for ToSTForCausalLM.")
            fused[0].fuse_linear_cross_entropy = True

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that are decayed; what `Trainer.create_optimizer` builds its two groups from."""
        return [
            name
            for name, parameter in model.named_parameters()
            # DeepSpeed's ZeRO-3 flattens parameters and keeps their shape aside
            if len(getattr(parameter, "ds_shape", parameter.shape)) >= 2 and name.rpartition(".")[2] not in NOT_DECAYED
        ]


__all__ = ["RecipeArguments", "ToSTTrainer", "ToSTTrainingArguments"]
