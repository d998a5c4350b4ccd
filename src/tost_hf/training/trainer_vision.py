# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Training on images with the authors' settings: `ToSTVisionTrainingArguments` and `ToSTVisionTrainer`."""

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.utils import SAFE_WEIGHTS_NAME

from .checkpoints import output_folder
from .trainer import RecipeArguments, ToSTTrainer, recipe_field


RECIPES = {
    "pretrain": {  # XCiT's of ImageNet, which the authors follow
        "total_batch_size": 2048,
        "per_device_train_batch_size": 128,
        "lr_scheduler_type": SchedulerType.COSINE_WARMUP_WITH_MIN_LR,
        "num_train_epochs": 400,
        "weight_decay": 0.05,
        "label_smoothing_factor": 0.1,
        "ema_decay": 0.99996,
        "mixup": 0.8,
        "cutmix": 1.0,
        "random_erasing": 0.25,
        "repeated_augmentation": 3,
        "rand_augment_magnitude": 27.0,  # timm's rand-m9-mstd0.5-inc1, whose magnitudes end at 10
        "rand_augment_std": 1.5,
        "rand_augment_probability": 0.5,
    },
    "finetune": {  # the paper's transfer to CIFAR, Flowers and Pets
        "total_batch_size": 256,
        "per_device_train_batch_size": 128,
        "lr_scheduler_type": SchedulerType.COSINE,
        "learning_rate": 1e-4,
        "num_train_epochs": 200,
        "weight_decay": 0.01,
        "label_smoothing_factor": 0.0,
        "ema_decay": 0.0,
        "mixup": 0.0,
        "cutmix": 0.0,
        "random_erasing": 0.0,
        "repeated_augmentation": 1,
        "rand_augment_magnitude": 14.0,
        "rand_augment_std": 0.0,
        "rand_augment_probability": 1.0,
    },
}
PRETRAIN_LR_PER_IMAGE = 5e-4 / 512  # for each image of a step
MIN_LR, WARMUP_LR = 1e-5, 1e-6  # where pre-training's learning rate ends and starts
WARMUP_EPOCHS = 5
NO_WEIGHT_DECAY = ("class_token", "temperature")
EMA_FOLDER = "ema"


def _by_recipe(text: str) -> Any:
    """A field that the recipe fills where it is left out."""
    return recipe_field(f"{text} Default: the recipe's.")


@dataclass
class ToSTVisionTrainingArguments(RecipeArguments):
    """`TrainingArguments` whose defaults are the authors' recipes for images (paper, arXiv 2412.17810, and XCiT's code).

    `recipe="pretrain"` is ImageNet pre-training: 400 epochs of AdamW, weight decay 0.05, learning rate 5e-4 x batch / 512
    with 5 epochs of warm-up from 1e-6 and a cosine down to 1e-5, RandAugment m9-mstd0.5-inc1, random erasing, Mixup, CutMix,
    label smoothing, repeated augmentation, an exponential moving average of the weights. `recipe="finetune"` is the
    transfer to a smaller data set: 200 epochs, weight decay 0.01, learning rate 1e-4 with a cosine, RandAugment(2, 14),
    plain cross-entropy. Neither clips gradients.

    A default steps aside when it would contradict what was asked for:

    - A batch size given without `gradient_accumulation_steps` is not accumulated. With neither, `total_batch_size` is 2,048
      (256 with "finetune"), of which a device computes at most 128 images at a time.
    - Warm-up takes 5 epochs, or a tenth of a shorter run.
    - The ends of the learning rate belong to the default schedule; another `lr_scheduler_type` has its own arguments.
    - bf16 is used where the device has it, unless fp16 or Accelerate's `mixed_precision` says otherwise.

    Raises:
        ValueError: an unknown recipe, or a value outside its range; the message names both.

    Example:

    ```python
    >>> from tost_hf import ToSTVisionTrainingArguments

    >>> args = ToSTVisionTrainingArguments("out", recipe="finetune", per_device_train_batch_size=32)
    >>> args.learning_rate, args.num_train_epochs, args.gradient_accumulation_steps
    (0.0001, 200, 1)
    ```
    """

    recipes = RECIPES
    recipe: str = field(default="pretrain", metadata={"help": "What the defaults are for.", "choices": list(RECIPES)})
    learning_rate: float = _by_recipe("The peak learning rate of AdamW.")
    weight_decay: float = _by_recipe("Weight decay of the tensors of two or more dimensions, other than temp.")
    num_train_epochs: float = _by_recipe("Number of passes over the training data.")
    per_device_train_batch_size: int = _by_recipe("Images of one device's micro-batch.")
    gradient_accumulation_steps: int = _by_recipe("Micro-batches of a step.")
    warmup_steps: float = _by_recipe("Steps of linear warm-up, or a share of the run if below 1.")
    lr_scheduler_type: str = _by_recipe("The learning rate's schedule.")
    max_grad_norm: float = field(default=0.0, metadata={"help": "The norm gradients are clipped to; 0 for no clipping."})
    label_smoothing_factor: float = _by_recipe("Label smoothing, in training only.")
    ema_decay: float = _by_recipe("Decay of the moving average of the weights; 0 for none.")
    mixup: float = _by_recipe("Mixup's alpha; 0 for none.")
    cutmix: float = _by_recipe("CutMix's alpha; 0 for none.")
    random_erasing: float = _by_recipe("Probability of erasing a rectangle.")
    repeated_augmentation: int = _by_recipe("How many times an epoch shows one image, in place of others.")
    min_crop_scale: float = field(
        default=0.08, metadata={"help": "The smallest share of a picture's area that RandomResizedCrop cuts out."}
    )
    rand_augment_operations: int = field(default=2, metadata={"help": "RandAugment's number of operations; 0 for none."})
    rand_augment_magnitude: float = _by_recipe("RandAugment's magnitude, from 0 to 30.")
    rand_augment_std: float = _by_recipe("Spread of RandAugment's magnitude.")
    rand_augment_probability: float = _by_recipe("Probability of applying an operation that RandAugment chose.")
    sync_batch_norm: bool = field(
        default=False, metadata={"help": "Let the stem's BatchNorm see the batches of all processes (SyncBatchNorm)."}
    )
    freeze_batch_norm: bool = field(
        default=False, metadata={"help": "Normalise by BatchNorm's running statistics in training too, and leave them as is."}
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Whether to drop columns that the model's forward does not take."}
    )

    def __post_init__(self):
        self._apply_recipe()
        self._check_augmentation()
        if self.learning_rate is None:
            device_images = self.per_device_train_batch_size * (self.gradient_accumulation_steps or 1)
            images = self.total_batch_size or device_images * int(os.environ.get("WORLD_SIZE", 1))
            self.learning_rate = PRETRAIN_LR_PER_IMAGE * images
        if self.lr_scheduler_kwargs is None and self.lr_scheduler_type == SchedulerType.COSINE_WARMUP_WITH_MIN_LR:
            ends = {"min_lr_rate": MIN_LR, "warmup_lr_rate": WARMUP_LR}
            self.lr_scheduler_kwargs = {name: rate / max(rate, self.learning_rate) for name, rate in ends.items()}
        self._default_warmup = self.warmup_steps is None
        if self.warmup_steps is None:
            self.warmup_steps = 0
        super().__post_init__()

    def _check_augmentation(self) -> None:
        for name, low, high in (
            ("ema_decay", 0, 1),
            ("label_smoothing_factor", 0, 1),
            ("random_erasing", 0, 1),
            ("min_crop_scale", 0.001, 1),
            ("rand_augment_probability", 0, 1),
            ("rand_augment_magnitude", 0, 30),
            ("rand_augment_std", 0, 30),
            ("rand_augment_operations", 0, 100),
            ("repeated_augmentation", 1, 1000),
            ("mixup", 0, 1000),
            ("cutmix", 0, 1000),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be from {low} to {high}, got {getattr(self, name)}.")

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Number of warm-up steps in a run of `num_training_steps`."""
        if not self._default_warmup:
            return super().get_warmup_steps(num_training_steps)
        if self.recipe == "finetune":
            return 0
        epochs = self.num_train_epochs if self.max_steps <= 0 else 10 * WARMUP_EPOCHS
        return int(num_training_steps * min(WARMUP_EPOCHS / epochs, 0.1))


class _VisionCallback(TrainerCallback):
    """Sets the sampler's epoch, and updates the EMA weights after each step."""

    def __init__(self, trainer: "ToSTVisionTrainer"):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **kwargs):
        sampler = getattr(self.trainer.train_dataset, "sampler", None)
        if sampler is not None:
            sampler.epoch = int(state.epoch)  # Accelerate does not reach it in a run resumed on several processes

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.ema is not None:
            self.trainer.ema.update_parameters(self.trainer.model)


class ToSTVisionTrainer(ToSTTrainer):
    """`ToSTTrainer` for images: cross-entropy with the shares of Mixup and CutMix, EMA weights, BatchNorm's switches.

    With `ema_decay` above 0 an exponential moving average of the weights is kept as `ema`. Every checkpoint and the final
    model store it as a model in the folder `ema` (`from_pretrained(folder, subfolder="ema")`); it is restored on resuming, and
    evaluated beside the weights themselves (`eval_ema_...`).

    Weight decay leaves out the class token and XCA's `temperature`, too. Where the training data set has a `sampler`
    (see `tost_hf.training.augmentation.RepeatedSampler`), it chooses the order.

    An example has "pixel_values" (3, height, width) and "labels", a class or, mixed, the shares (classes,) of all.

    Raises:
        TypeError: `args` are not `ToSTVisionTrainingArguments`.
        ValueError: EMA weights with FSDP or DeepSpeed, or `sync_batch_norm` on several CPUs.

    Example:

    ```python
    >>> args = ToSTVisionTrainingArguments("out", recipe="finetune", ema_decay=0.999)
    >>> trainer = ToSTVisionTrainer(model, args, train_dataset=images, eval_dataset=validation_images)
    >>> trainer.train()
    >>> trainer.save_model()  # and the EMA weights in out/ema
    ```
    """

    args: ToSTVisionTrainingArguments
    ema: AveragedModel | None = None

    def __init__(self, model=None, args: TrainingArguments | None = None, **kwargs):
        args = ToSTVisionTrainingArguments() if args is None else args
        if not isinstance(args, ToSTVisionTrainingArguments):
            raise TypeError(
                f"args must be ToSTVisionTrainingArguments, not {type(args).__name__}; use ToSTTrainer for others."
            )
        super().__init__(model, args, **kwargs)
        self.label_smoother = None  # compute_loss smooths, in training only
        self.model_accepts_loss_kwargs = False  # the loss is the mean of a micro-batch
        self.add_callback(_VisionCallback(self))

    def prepare_model(self, model: nn.Module) -> nn.Module:
        model = super().prepare_model(model)
        if self.args.sync_batch_norm:
            if self.args.world_size > 1 and self.args.device.type == "cpu":
                raise ValueError("sync_batch_norm needs an accelerator: torch's SyncBatchNorm does not run on several CPUs.")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if self.args.ema_decay > 0:
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise ValueError("An average of sharded weights is not supported; use ema_decay 0 with FSDP and DeepSpeed.")
            device = None if self.model_init is None else self.args.device  # a model of `model_init` is moved there later
            average = get_ema_multi_avg_fn(self.args.ema_decay)
            self.ema = AveragedModel(model, device=device, multi_avg_fn=average, use_buffers=True)
        return model

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        names = super().get_decay_parameter_names(model)
        return [name for name in names if name.rpartition(".")[2] not in NO_WEIGHT_DECAY]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs)
        if self.args.freeze_batch_norm:
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits.float(), labels, label_smoothing=self.args.label_smoothing_factor)
        return (loss, outputs) if return_outputs else loss

    def _get_train_sampler(self, train_dataset=None):
        train_dataset = self.train_dataset if train_dataset is None else train_dataset
        return getattr(train_dataset, "sampler", None) or super()._get_train_sampler(train_dataset)

    @contextmanager
    def averaged_weights(self):
        """Within it the model has the EMA weights."""
        self._swap_weights()
        try:
            yield
        finally:
            self._swap_weights()

    @torch.no_grad()
    def _swap_weights(self):
        assert self.ema is not None
        pairs = (chain(m.parameters(), m.buffers()) for m in (self.model, self.ema.module))
        for mine, averaged in zip(*pairs):
            kept = mine.clone()
            mine.copy_(averaged)
            averaged.copy_(kept)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        several = isinstance(self.eval_dataset if eval_dataset is None else eval_dataset, dict)
        if self.ema is not None and not several:  # of several, each comes back here
            with self.averaged_weights():
                metrics |= super().evaluate(eval_dataset, ignore_keys, f"{metric_key_prefix}_{EMA_FOLDER}")
        return metrics

    def required_files(self) -> list[str]:
        return super().required_files() + [f"{EMA_FOLDER}/{SAFE_WEIGHTS_NAME}"] * (self.ema is not None)

    def _save(self, output_dir: str | None = None, state_dict=None):
        super()._save(output_dir, state_dict)
        if self.ema is not None and self.args.should_save:
            with self.averaged_weights():
                super()._save(os.path.join(output_dir or output_folder(self), EMA_FOLDER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.ema is not None:
            file = os.path.join(resume_from_checkpoint, EMA_FOLDER, SAFE_WEIGHTS_NAME)
            self.ema.module.load_state_dict(load_file(file))
            self.ema.n_averaged.fill_(1)


__all__ = ["ToSTVisionTrainer", "ToSTVisionTrainingArguments"]
