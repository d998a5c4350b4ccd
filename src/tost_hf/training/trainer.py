# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Training with the authors' settings: `ToSTTrainingArguments` and `ToSTTrainer` on transformers' own Trainer."""

import os
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.utils import is_torch_bf16_gpu_available

from ..model.layers_tost import KEPT_IN_FLOAT32
from ..model.modeling_tost import ToSTForCausalLM
from .callbacks import FiniteLossCallback
from .checkpoints import CheckpointTrainer
from .trainer_hub import PublishingTrainer


RECIPES = {
    "paper": {
        "total_batch_size": 480,
        "per_device_train_batch_size": 60,
        "max_steps": 600_000,
        "warmup_steps": 2_000,
        "lr_scheduler_type": SchedulerType.COSINE_WITH_MIN_LR,
    },
}
MIN_LR_RATE = 0.1  # of the learning rate, at the end of the recipe's schedule
NO_WEIGHT_DECAY = KEPT_IN_FLOAT32


def recipe_field(text: str, **metadata) -> Any:
    """A field that gets its default in `__post_init__`: its type is that of the value, never None."""
    return field(default=None, metadata={"help": text} | metadata)


@dataclass
class RecipeArguments(TrainingArguments):
    """`TrainingArguments` with a `recipe` for what is left out: what the arguments for text and for images have in common.

    `recipes` has the values of each. A recipe's `total_batch_size` applies where neither a batch size nor an accumulation is
    given.
    """

    recipes: ClassVar[dict[str, dict[str, Any]]]
    recipe: str | None = None
    total_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Examples of an optimizer step, over all devices. Sets gradient_accumulation_steps, and lowers "
            "per_device_train_batch_size where that does not divide a process's share. Default: the recipe's."
        },
    )
    bf16: bool = recipe_field(
        "Whether to compute in bfloat16. Default: with a recipe, if the device has it; otherwise no.",
        nargs="?",  # so that a plain --bf16 still means true
        const=True,
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
        if self.bf16 is None:
            chosen = self.fp16 or os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no"
            on_cpu = self.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
            self.bf16 = self.recipe is not None and not chosen and not on_cpu and is_torch_bf16_gpu_available()
        requested_steps = self.gradient_accumulation_steps
        for argument in fields(TrainingArguments):
            if getattr(self, argument.name) is None and argument.default is not MISSING:
                setattr(self, argument.name, argument.default)
        self._check_length()
        if self.total_batch_size is not None:
            self._max_device_batch_size = self.per_device_train_batch_size
            self.divide_total_batch(int(os.environ.get("WORLD_SIZE", 1)) // getattr(self, "context_parallel_size", 1) or 1)
            if self.auto_find_batch_size:
                raise ValueError(
                    "auto_find_batch_size lowers the batch size without accumulating more, against total_batch_size "
                    f"{self.total_batch_size}: leave it out, or give per_device_train_batch_size."
                )
            if requested_steps not in (None, self.gradient_accumulation_steps):
                raise ValueError(
                    f"gradient_accumulation_steps {requested_steps} contradicts total_batch_size {self.total_batch_size}, "
                    f"which makes it {self.gradient_accumulation_steps}: leave one of them out."
                )
        super().__post_init__()

    def _apply_recipe(self) -> None:
        """Fills in what is left out."""
        if self.recipe not in self.recipes:
            raise ValueError(f"recipe must be one of {', '.join(self.recipes)}, got {self.recipe!r}.")
        values = dict(self.recipes[self.recipe])
        if self.per_device_train_batch_size is not None or self.gradient_accumulation_steps is not None:
            del values["total_batch_size"]
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def divide_total_batch(self, num_devices: int) -> None:
        """Sets the accumulation, and the per-device batch size where needed, so that a step has `total_batch_size` examples.

        Args:
            num_devices: those that read different examples; tensor- and context-parallel processes count as one.

        Raises:
            ValueError: it is no multiple of that number; the message says which numbers fit.
        """
        total = self.total_batch_size
        assert total is not None
        device_total, remainder = divmod(total, num_devices)
        if remainder:
            divisors = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
            raise ValueError(
                f"total_batch_size {total} cannot be divided among {num_devices} data-parallel processes: start one of "
                f"{divisors}, or give per_device_train_batch_size and gradient_accumulation_steps."
            )
        sizes = range(min(self._max_device_batch_size, device_total), 0, -1)
        size = next(size for size in sizes if device_total % size == 0)
        self.per_device_train_batch_size, self.gradient_accumulation_steps = size, device_total // size

    def _check_length(self) -> None:
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "total_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.max_steps == 0:  # which transformers takes for -1
            raise ValueError("max_steps must be at least 1, or -1 to train for num_train_epochs, got 0.")
        if self.num_train_epochs <= 0:
            raise ValueError(f"num_train_epochs must be above 0, got {self.num_train_epochs}.")
        if self.output_dir is not None and os.path.exists(self.output_dir) and not os.path.isdir(self.output_dir):
            raise FileExistsError(f"The output_dir {self.output_dir!r} is a file; name a folder.")


@dataclass
class ToSTTrainingArguments(RecipeArguments):
    """`TrainingArguments` with the authors' optimizer (paper, arXiv 2412.17810, and their code); the rest is transformers'.

    AdamW with betas (0.9, 0.95), weight decay 0.1 and learning rate 6e-4, gradients clipped at 1.0. Where the released
    tost-base configuration differs from the paper (weight decay 0.01), the paper's value is used.

    `recipe="paper"` is their pre-training: 600,000 steps of 480 sequences, 2,000 steps of warm-up, a cosine down to a tenth of
    the learning rate, bf16 where the device has it. It fills in what is left out, and steps aside where it would contradict
    what was asked for:

    - `num_train_epochs` alone decides the length of training; `max_steps`, given too, wins as in transformers.
    - A batch size given without `gradient_accumulation_steps` is not accumulated. With neither, `total_batch_size` is 480:
      8 x 60 sequences on one process, and 480 on any number of data-parallel processes that divides it. With
      `total_batch_size` given, `per_device_train_batch_size` is the largest one that is used (the authors used 30 for
      tost-medium, 20 for tost-large).
    - Warm-up takes 2,000 steps, or a tenth of a shorter run.
    - The minimum learning rate belongs to the recipe's schedule; another `lr_scheduler_type` has none.
    - fp16 or Accelerate's `mixed_precision` replace bf16.

    Raises:
        ValueError: an unknown recipe, a size or length below 1, a `total_batch_size` that the processes cannot share, or a
            fused loss that this PyTorch or label smoothing excludes.
        FileExistsError: `output_dir` is a file.

    Example:

    ```python
    >>> from tost_hf import ToSTTrainingArguments

    >>> args = ToSTTrainingArguments("out", recipe="paper", max_steps=1000)
    >>> args.learning_rate, args.per_device_train_batch_size, args.get_warmup_steps(1000)
    (0.0006, 60, 100)
    ```
    """

    recipes = RECIPES
    recipe: str | None = field(
        default=None, metadata={"help": 'What is left out: "paper" for the authors\' pre-training.', "choices": list(RECIPES)}
    )
    learning_rate: float = field(default=6e-4, metadata={"help": "The peak learning rate of AdamW."})
    weight_decay: float = field(
        default=0.1,
        metadata={"help": "Weight decay of the tensors of two or more dimensions, other than temp and denom_bias."},
    )
    adam_beta2: float = field(default=0.95, metadata={"help": "The second beta of AdamW."})
    lr_scheduler_type: SchedulerType | str = recipe_field(  # noqa: RUF009  immutable, whatever ruff makes of the union
        "The learning rate's schedule. Default: linear; with the paper's recipe a cosine that ends at a tenth."
    )
    warmup_steps: float = recipe_field(
        "Steps of linear warm-up, or a share of the run if below 1. Default: 0; with the paper's recipe 2,000 or a tenth."
    )
    max_steps: int = recipe_field(
        "Number of optimizer steps; wins over num_train_epochs. Default: -1; with the paper's recipe 600,000."
    )
    num_train_epochs: float = recipe_field("Number of passes over the training data, in place of max_steps. Default: 3.")
    per_device_train_batch_size: int = recipe_field(
        "Sequences of one device's micro-batch. Default: 8; with the paper's recipe 60."
    )
    gradient_accumulation_steps: int = recipe_field("Micro-batches of a step. Default: 1, or what total_batch_size leaves.")
    fuse_linear_cross_entropy: bool = field(
        default=False,
        metadata={
            "help": "In training, compute the loss from the hidden states in chunks (PyTorch's linear_cross_entropy), so that "
            "the logits are never in memory as a whole. Equal up to rounding; a bfloat16 model's loss is rounded to bfloat16."
        },
    )
    context_parallel_size: int = field(
        default=1,
        metadata={"help": "Processes that share each text (ContextParallelTrainer); must divide the number of processes."},
    )

    def __post_init__(self):
        if self.fuse_linear_cross_entropy:
            self._check_fused_loss()
        if self.context_parallel_size < 1:
            raise ValueError(f"context_parallel_size must be at least 1, got {self.context_parallel_size}.")
        self._shorten_warmup = self.recipe is not None and self.warmup_steps is None
        if self.recipe is not None:
            if self.num_train_epochs is not None and self.max_steps is None:
                self.max_steps = -1
            self._apply_recipe()
            if self.lr_scheduler_kwargs is None and self.lr_scheduler_type == SchedulerType.COSINE_WITH_MIN_LR:
                self.lr_scheduler_kwargs = {"min_lr_rate": MIN_LR_RATE}
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


class ToSTTrainer(CheckpointTrainer, PublishingTrainer):
    """transformers' `Trainer` with the authors' parameter groups; without `args`, with `ToSTTrainingArguments`.

    Weight decay applies to tensors of two or more dimensions except `temp` and `denom_bias`, which set the sharpness and the
    bias of a membership. Tensors of one dimension (norms, biases, LayerScale) are not decayed. The embeddings are.

    It resumes from complete checkpoints only (`CheckpointTrainer`), stops when the loss becomes NaN (`FiniteLossCallback`),
    and pushes models with their code and card (`PublishingTrainer`). Subclasses train on a stream of text
    (`StreamingTrainer`) and on several processes that share each text (`ContextParallelTrainer`) or each layer
    (`TensorParallelTrainer`); derive from several of them to combine them.

    Raises:
        ValueError: the arguments do not suit the model or the processes.
        FloatingPointError: of `train`; the loss became NaN or infinite, and nothing was saved since.

    Example, with `dataset` a `datasets.Dataset` of "input_ids" and "labels":

    ```python
    >>> from tost_hf import ToSTConfig, ToSTForCausalLM, ToSTTrainer, ToSTTrainingArguments

    >>> model = ToSTForCausalLM(ToSTConfig.from_preset("tost-base"))
    >>> trainer = ToSTTrainer(model, ToSTTrainingArguments("out", max_steps=100), train_dataset=dataset)
    >>> trainer.train()
    ```
    """

    model: nn.Module  # set by then, also with `model_init`
    context_mesh: Any = None  # of ContextParallelTrainer

    def __init__(self, model=None, args: TrainingArguments | None = None, **kwargs):
        super().__init__(model, ToSTTrainingArguments() if args is None else args, **kwargs)
        self.add_callback(FiniteLossCallback())
        if getattr(self.args, "context_parallel_size", 1) > 1 and self.context_mesh is None:
            raise ValueError(
                "context_parallel_size is for tost_hf.ContextParallelTrainer; a "
                f"{type(self).__name__} gives each process other texts."
            )
        if self.model_init is None:
            self.model = self.model_wrapped = self.prepare_model(self.model)

    def call_model_init(self, trial=None) -> nn.Module:
        return self.prepare_model(super().call_model_init(trial))

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Applies the arguments that concern the model: to the one passed, and to each that `model_init` returns.

        Raises:
            ValueError: they do not suit the model.
        """
        if getattr(self.args, "fuse_linear_cross_entropy", False):
            fused = [m for m in model.modules() if isinstance(m, ToSTForCausalLM)]
            if not fused:
                raise ValueError("fuse_linear_cross_entropy is for ToSTForCausalLM.")
            fused[0].fuse_linear_cross_entropy = True
        return model

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self._check_processes()
        if isinstance(self.args, RecipeArguments) and self.args.total_batch_size is not None:
            # again, since the arguments do not know of tensor parallelism
            cp_size = max(self.get_cp_size(), getattr(self.args, "context_parallel_size", 1))  # the mesh is not made yet
            data_parallel_size = self.args.world_size // (self.get_tp_size() * self.get_sp_size() * cp_size)
            self.args.divide_total_batch(data_parallel_size * max(1, self.args.n_gpu))

    def _check_processes(self) -> None:
        """Raises a ValueError for processes that would each train alone, or hold what they were asked to share."""
        started = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
        if started > 1 and self.args.world_size == 1:
            raise ValueError(
                f"{started} processes were started, but each would train alone and write the same files: there is no device "
                "that joins them. To train on CPUs, set use_cpu=True (--use_cpu) or ACCELERATE_USE_CPU=true."
            )
        asked = self.args.fsdp_plugin_args is not None or os.environ.get("ACCELERATE_USE_FSDP") == "true"
        if self.args.world_size > 1 and asked and not self.is_fsdp_enabled:
            raise ValueError(
                "FSDP was asked for, but Accelerate shards no model on CPUs: each process would hold all of it. Train on "
                "devices that Accelerate knows, or without FSDP."
            )

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that are decayed; what `Trainer.create_optimizer` builds its two groups from."""
        return [
            name
            for name, parameter in model.named_parameters()
            # DeepSpeed's ZeRO-3 flattens parameters and keeps their shape aside
            if len(getattr(parameter, "ds_shape", parameter.shape)) >= 2 and name.rpartition(".")[2] not in NO_WEIGHT_DECAY
        ]


__all__ = ["RecipeArguments", "ToSTTrainer", "ToSTTrainingArguments"]
