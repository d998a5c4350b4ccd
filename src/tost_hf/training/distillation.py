# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Distillation of an image classifier from a teacher (DeiT, arXiv 2012.12877), without a distillation token."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, ViTImageProcessorPil


def distillation_loss(
    logits: torch.Tensor, teacher_logits: torch.Tensor, distillation_type: str, tau: float = 1.0
) -> torch.Tensor:
    """The teacher's part of the loss, the mean of a batch.

    Args:
        logits, teacher_logits: (B, K).
        distillation_type: "soft" for tau^2 KL(teacher || student) of the distributions at temperature `tau` (DeiT, eq. 2),
            "hard" for the cross-entropy with the teacher's most likely class (eq. 3).
        tau: temperature of "soft".
    """
    logits, teacher_logits = logits.float(), teacher_logits.float()
    if distillation_type == "hard":
        return F.cross_entropy(logits, teacher_logits.argmax(-1))
    log_probs, teacher_log_probs = ((x / tau).log_softmax(-1) for x in (logits, teacher_logits))
    # the mean over images, as in the equation; the authors' code divides by the number of classes, too
    return tau**2 * F.kl_div(log_probs, teacher_log_probs, reduction="batchmean", log_target=True)


@dataclass(frozen=True)
class _PixelFormat:
    """The `pixel_values` that an image processor returns: `(x * scale - mean) / std` of pixels x from 0 to 1.

    Raises:
        ValueError: the processor does not state its normalization.
    """

    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def from_processor(cls, processor) -> "_PixelFormat":
        if not hasattr(processor, "image_mean"):
            raise ValueError(f"{type(processor).__name__} states no image_mean: give an image processor of transformers.")
        normalizes = getattr(processor, "do_normalize", True)
        return cls(
            scale=255 * (processor.rescale_factor if getattr(processor, "do_rescale", True) else 1),
            mean=tuple(processor.image_mean) if normalizes else (0.0,),
            std=tuple(processor.image_std) if normalizes else (1.0,),
        )

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        mean, std = (x.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (x * self.scale - mean) / std

    def denormalize(self, pixel_values: torch.Tensor) -> torch.Tensor:
        mean, std = (pixel_values.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (pixel_values * std + mean) / self.scale


class ImageTeacher:
    """A frozen image classifier that returns logits for a student's input, in the order of the student's labels.

    It is not a module, so that it is part of no optimizer, checkpoint or wrapper of a trainer that has it.

    Args:
        model: the teacher; set to evaluation mode, its parameters are frozen.
        student_config: the configuration of the student, whose labels are matched by name.
        processor: the teacher's image processor. Where it normalizes or resizes other than the student's, the teacher's input
            is computed from the student's; images are resized on the CPU, by Pillow. None: the teacher gets the student's
            input.
        student_processor: the student's image processor; only None if `processor` is.

    Raises:
        ValueError: the labels are not the same, or a processor is missing or does not state its normalization.
    """

    def __init__(self, model: PreTrainedModel, student_config: Any, processor=None, student_processor=None):
        self.model = model.eval().requires_grad_(False)
        labels, teacher_labels = (_list_labels(config) for config in (student_config, model.config))
        if sorted(labels) != sorted(teacher_labels):
            missing, unknown = sorted(set(labels) - set(teacher_labels)), sorted(set(teacher_labels) - set(labels))
            raise ValueError(
                f"The teacher must have the student's labels. It lacks {_quote(missing)} and has in addition "
                f"{_quote(unknown)}: choose a teacher of the same classes, or name them alike in its config.json (id2label)."
            )
        self.order = [teacher_labels.index(label) for label in labels]
        self.format = self.student_format = self.resizer = None
        if processor is not None:
            if student_processor is None:
                raise ValueError("The teacher's image processor is given, but not the student's (processing_class).")
            self.format, self.student_format = map(_PixelFormat.from_processor, (processor, student_processor))
            self.resizer = _make_resizer(processor)

    @torch.no_grad()
    def __call__(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """The teacher's logits (B, K) for the student's `pixel_values` (B, C, height, width)."""
        # in channels-last layout convolutions are faster
        pixel_values = self.convert(pixel_values).to(self.model.dtype, memory_format=torch.channels_last)
        return self.model(pixel_values=pixel_values).logits[:, self.order]

    def convert(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """The teacher's `pixel_values`: the same crops, resized and normalized as by the teacher's processor."""
        if self.format is None or self.student_format is None:
            return pixel_values
        resizer = self.resizer if self._changes_size(pixel_values) else None
        if resizer is None and self.format == self.student_format:
            return pixel_values
        x = self.student_format.denormalize(pixel_values)
        if resizer is not None:  # of bytes, on the CPU
            pixels = (255 * x).round().clamp(0, 255).to("cpu", torch.uint8).numpy()
            x = resizer(list(pixels), input_data_format="channels_first", return_tensors="pt")["pixel_values"].to(x) / 255
        return self.format.normalize(x)

    def _changes_size(self, pixel_values: torch.Tensor) -> bool:
        if self.resizer is None:
            return False
        size = dict(self.resizer.size)
        sides = [size.get(name) or size.get("shortest_edge") for name in ("height", "width")]
        return sides != list(pixel_values.shape[-2:])


def _make_resizer(processor) -> ViTImageProcessorPil | None:
    """The resizing of an image processor alone, to the size of its crop if it crops; None if it does not resize."""
    if not getattr(processor, "do_resize", True):
        return None
    size = processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size
    return ViTImageProcessorPil(size=size, resample=processor.resample, do_rescale=False, do_normalize=False)


def _list_labels(config: Any) -> list[str]:
    return [config.id2label[i] for i in range(config.num_labels)]


def _quote(names: list[str]) -> str:
    return (", ".join(map(repr, names[:5])) + ", ..." * (len(names) > 5)) or "none"


__all__ = ["ImageTeacher", "distillation_loss"]
