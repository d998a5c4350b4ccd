# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Training on images: `ToSTVisionTrainer`."""

from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME

from .arguments import ToSTVisionTrainingArguments
from .checkpoints import output_folder
from .distillation import ImageTeacher, distillation_loss
from .trainer import ToSTTrainer


NO_WEIGHT_DECAY = ("class_token", "temperature")
EMA_FOLDER = "ema"


class _EMACallback(TrainerCallback):
    """Restores the EMA weights, updates them after each step, and loads those of the best model."""

    def __init__(self, trainer: "ToSTVisionTrainer"):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if self.trainer.checkpoint is not None:
            self.trainer.load_ema(self.trainer.checkpoint)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        assert self.trainer.ema is not None
        self.trainer.ema.update_parameters(self.trainer.model)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:  # Trainer has loaded its weights
            self.trainer.load_ema(state.best_model_checkpoint)


class ToSTVisionTrainer(ToSTTrainer):
    """`ToSTTrainer` for images: soft labels of Mixup and CutMix, a teacher, EMA weights, BatchNorm options.

    Where the model's `problem_type` is "multi_label_classification" or "regression" (also the default for `num_labels=1`), the
    loss is the model's.

    With `ema_decay` above 0 an exponential moving average of the weights is stored as `ema`. Every checkpoint and the final
    model contain it as a model in the folder `ema` (`from_pretrained(folder, subfolder="ema")`); it is restored on resuming
    and with `load_best_model_at_end`, and evaluated in addition to the weights (`eval_ema_...`).

    The class token and XCA's `temperature` have no weight decay, either.

    With a teacher the loss is (1 - `distillation_alpha`) of the cross-entropy with the labels, and `distillation_alpha` of
    `tost_hf.training.distillation.distillation_loss` (DeiT, arXiv 2012.12877, eq. 2 and 3). The teacher sees the augmented and
    mixed images of the student; it is not trained, wrapped or saved, and evaluation is without it.

    An example has "pixel_values" (3, height, width) and "labels": a class or soft labels (classes,), or what the model's
    `problem_type` needs.

    Args:
        model, args, kwargs: as of `Trainer`.
        teacher_model: an image classifier with the labels of `model`, for `distillation_type` "soft" or "hard".
        teacher_processor: its image processor, if it normalizes or resizes other than that of `model` (`processing_class`).

    Raises:
        TypeError: `args` are not `ToSTVisionTrainingArguments`.
        ValueError: EMA weights with FSDP or DeepSpeed; `sync_batch_norm` on several CPUs; label smoothing, Mixup, CutMix or
            distillation without classes; a teacher without `distillation_type` or vice versa, or with other labels.

    Example:

    ```python
    >>> args = ToSTVisionTrainingArguments("out", ema_decay=0.999)
    >>> trainer = ToSTVisionTrainer(model, args, train_dataset=images, eval_dataset=others)
    >>> trainer.train()
    >>> trainer.save_model()  # and the EMA weights in out/ema
    ```
    """

    args: ToSTVisionTrainingArguments
    ema: AveragedModel | None = None

    def __init__(
        self,
        model=None,
        args: TrainingArguments | None = None,
        teacher_model: PreTrainedModel | None = None,
        teacher_processor=None,
        **kwargs,
    ):
        args = ToSTVisionTrainingArguments() if args is None else args
        if not isinstance(args, ToSTVisionTrainingArguments):
            raise TypeError(
                f"args must be ToSTVisionTrainingArguments, not {type(args).__name__}; use ToSTTrainer for others."
            )
        if (teacher_model is None) != (args.distillation_type == "none"):
            raise ValueError(
                f"distillation_type {args.distillation_type!r} does not suit {'no' if teacher_model is None else 'a'} "
                'teacher_model: give both "soft" or "hard" and a teacher, or neither.'
            )
        super().__init__(model, args, **kwargs)
        self.teacher: ImageTeacher | None = None
        if teacher_model is not None:
            self.teacher = ImageTeacher(teacher_model, self.model.config, teacher_processor, self.processing_class)
            self.teacher.model.to(args.device)
        self.label_smoother = None  # compute_loss applies label smoothing, in training only
        self.model_accepts_loss_kwargs = False  # the loss is the mean of a micro-batch
        if args.ema_decay > 0:  # before other callbacks, which may evaluate
            self.callback_handler.callbacks.insert(0, _EMACallback(self))

    def prepare_model(self, model: nn.Module) -> nn.Module:
        model = super().prepare_model(model)
        config: Any = getattr(model, "config", None)
        default = "regression" if getattr(config, "num_labels", None) == 1 else None
        problem_type = getattr(config, "problem_type", None) or default
        self.has_classes = problem_type in (None, "single_label_classification")
        for name in ("label_smoothing_factor", "mixup", "cutmix", "distillation_type"):
            if not self.has_classes and getattr(self.args, name) not in (0, "none"):
                raise ValueError(f"{name} is for images of one class each; this model's problem_type is {problem_type!r}.")
        if self.args.sync_batch_norm:
            if self.args.world_size > 1 and self.args.device.type == "cpu":
                raise ValueError("sync_batch_norm needs an accelerator: torch's SyncBatchNorm does not run on several CPUs.")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if self.args.ema_decay > 0:
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise ValueError("EMA of sharded weights is not supported; use ema_decay 0 with FSDP and DeepSpeed.")
            device = None if self.model_init is None else self.args.device  # `model_init`'s model is moved to it later
            ema_fn = get_ema_multi_avg_fn(self.args.ema_decay)
            self.ema = AveragedModel(model, device=device, multi_avg_fn=ema_fn, use_buffers=True)
        return model

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        names = super().get_decay_parameter_names(model)
        return [name for name in names if name.rpartition(".")[2] not in NO_WEIGHT_DECAY]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if model.training and self.args.freeze_batch_norm:
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        if not model.training or not self.has_classes:
            return super().compute_loss(model, inputs, return_outputs)
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits.float(), labels, label_smoothing=self.args.label_smoothing_factor)
        if self.teacher is not None:
            args = self.args
            with self.accelerator.autocast():  # which wraps the forward method of the student
                teacher_logits = self.teacher(inputs["pixel_values"])
            teacher_loss = distillation_loss(outputs.logits, teacher_logits, args.distillation_type, args.distillation_tau)
            loss = (1 - args.distillation_alpha) * loss + args.distillation_alpha * teacher_loss
        return (loss, outputs) if return_outputs else loss

    @contextmanager
    def averaged_weights(self):
        """Context in which the model has the EMA weights."""
        self._swap_weights()
        try:
            yield
        finally:
            self._swap_weights()

    @torch.no_grad()
    def _swap_weights(self):
        assert self.ema is not None
        pairs = (chain(m.parameters(), m.buffers()) for m in (self.model, self.ema.module))
        for tensor, ema_tensor in zip(*pairs):
            original = tensor.clone()
            tensor.copy_(ema_tensor)
            ema_tensor.copy_(original)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        has_several_datasets = isinstance(self.eval_dataset if eval_dataset is None else eval_dataset, dict)
        if self.ema is not None and not has_several_datasets:  # Trainer then calls evaluate for each
            with self.averaged_weights():
                metrics |= super().evaluate(eval_dataset, ignore_keys, f"{metric_key_prefix}_{EMA_FOLDER}")
        return metrics

    def checkpoint_files(self) -> list[str]:
        return super().checkpoint_files() + [f"{EMA_FOLDER}/{SAFE_WEIGHTS_NAME}"] * (self.ema is not None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)  # a push calls this method again, before it uploads
        if self.ema is not None:
            with self.averaged_weights():
                super().save_model(str(Path(output_dir or output_folder(self), EMA_FOLDER)), _internal_call=True)

    def load_ema(self, checkpoint: str) -> None:
        """Loads the EMA weights of a checkpoint folder."""
        assert self.ema is not None
        self.ema.module.load_state_dict(load_file(Path(checkpoint, EMA_FOLDER, SAFE_WEIGHTS_NAME)))
        self.ema.n_averaged.fill_(1)


__all__ = ["ToSTVisionTrainer", "ToSTVisionTrainingArguments"]
