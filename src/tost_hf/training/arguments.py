# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The arguments of the trainers: `TrainingArguments` with the authors' settings, checked."""

import math
import os
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.nn import functional as F
from transformers import TrainingArguments


DISTILLATION_TYPES = ("none", "soft", "hard")


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

    >>> args = ToSTTrainingArguments("out", max_steps=1000, lr_scheduler_type="cosine")
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


@dataclass
class ToSTVisionTrainingArguments(BaseTrainingArguments):
    """`TrainingArguments` with augmentation, EMA weights, BatchNorm options and distillation, all off by default.

    The authors' settings (paper, arXiv 2412.17810, and XCiT's code) are in `examples/recipes/image_pretraining.yaml` and
    `image_finetuning.yaml`.

    Raises:
        ValueError: a value is outside its range.

    Example, with the augmentation of the paper's fine-tuning:

    ```python
    >>> from tost_hf import ToSTVisionTrainingArguments

    >>> args = ToSTVisionTrainingArguments("out", rand_augment_operations=2)
    >>> args.rand_augment_magnitude, args.mixup
    (14.0, 0.0)
    ```
    """

    ranges = BaseTrainingArguments.ranges | {
        "ema_decay": (0, 1),
        "random_erasing": (0, 1),
        "min_crop_scale": (0.001, 1),
        "crop_padding": (0, 1000),
        "rand_augment_probability": (0, 1),
        "rand_augment_magnitude": (0, 30),
        "rand_augment_std": (0, 30),
        "rand_augment_operations": (0, 100),
        "repeated_augmentation": (1, 1000),
        "mixup": (0, 1000),
        "cutmix": (0, 1000),
        "distillation_alpha": (0, 1),
        "distillation_tau": (0.001, 1000),
    }

    ema_decay: float = field(default=0.0, metadata={"help": "Decay of the EMA weights; 0 for none."})
    mixup: float = field(default=0.0, metadata={"help": "Mixup's alpha; 0 for none."})
    cutmix: float = field(default=0.0, metadata={"help": "CutMix's alpha; 0 for none."})
    random_erasing: float = field(default=0.0, metadata={"help": "Probability of erasing a rectangle."})
    repeated_augmentation: int = field(
        default=1, metadata={"help": "Views of an image per epoch, in place of views of other images."}
    )
    min_crop_scale: float = field(
        default=0.08, metadata={"help": "The smallest fraction of an image's area that RandomResizedCrop crops."}
    )
    crop_padding: int = field(
        default=0,
        metadata={
            "help": "Pixels of reflected padding from which a window of the image's size is cropped, in place of "
            "RandomResizedCrop; 0 for none. Usual for small images."
        },
    )
    rand_augment_operations: int = field(default=0, metadata={"help": "RandAugment's number of operations; 0 for none."})
    rand_augment_magnitude: float = field(default=14.0, metadata={"help": "RandAugment's magnitude, from 0 to 30."})
    rand_augment_std: float = field(default=0.0, metadata={"help": "Standard deviation of RandAugment's magnitude."})
    rand_augment_probability: float = field(
        default=1.0, metadata={"help": "Probability of applying an operation that RandAugment chose."}
    )
    sync_batch_norm: bool = field(
        default=False, metadata={"help": "Synchronize the stem's BatchNorm over all processes (SyncBatchNorm)."}
    )
    freeze_batch_norm: bool = field(
        default=False,
        metadata={"help": "Normalize by BatchNorm's running statistics in training, too, without updating them."},
    )
    distillation_type: str = field(
        default="none",
        metadata={
            "help": "How the teacher's logits are used (DeiT, arXiv 2012.12877): soft for its distribution, hard for its most "
            "likely class.",
            "choices": ["none", "soft", "hard"],
        },
    )
    distillation_alpha: float = field(
        default=0.5, metadata={"help": "Weight of the teacher's part of the loss; the rest is that of the labels."}
    )
    distillation_tau: float = field(default=1.0, metadata={"help": "Temperature of soft distillation."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Whether to drop columns that the model's forward does not accept."}
    )

    def __post_init__(self):
        if self.distillation_type not in DISTILLATION_TYPES:
            choices = ", ".join(DISTILLATION_TYPES)
            raise ValueError(f"distillation_type must be one of {choices}, got {self.distillation_type!r}.")
        super().__post_init__()


__all__ = ["BaseTrainingArguments", "ToSTTrainingArguments", "ToSTVisionTrainingArguments"]
