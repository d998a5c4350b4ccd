# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Running a model once and recording what its TSSA layers compute."""

import contextlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from ..model.layers_tost import TokenStatisticsSelfAttention
from ..model.modeling_tost_vision import ToSTVisionClassAttention, ToSTVisionPatchEmbeddings


if TYPE_CHECKING:
    from transformers import PreTrainedModel

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class ModelTrace:
    """What `trace_model` recorded, on the CPU. B batch, T tokens or patches, L TSSA layers, H heads, p head dimension.

    Attributes:
        layers: the number of each TSSA layer in the model, from 0 as in the names of its weights (`layers.0`).
        projections: w of each TSSA layer, (B, T, H, p), in the model's dtype.
        memberships: Pi, (B, L, H, T), float64; 0 at padding.
        mask: (B, T), true at real tokens.
        grid: height and width of an image in patches; None for language models.
        class_attentions: (B, class-attention layers, H, T), float64; None for language models.
        logits: (B, labels), float64, of a classifier.
        log_decay: (B, L, H, T), float64; 0 at padding; None without decay.
    """

    layers: tuple[int, ...]
    projections: tuple[torch.Tensor, ...]
    memberships: torch.Tensor
    mask: torch.Tensor
    grid: tuple[int, int] | None
    class_attentions: torch.Tensor | None
    logits: torch.Tensor | None
    log_decay: torch.Tensor | None = None


def trace_model(
    model: "PreTrainedModel",
    *,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    pixel_values: torch.Tensor | None = None,
) -> ModelTrace:
    """Runs a ToST model in evaluation mode, without gradients, and records what its TSSA layers compute.

    The model is left unchanged: hooks are removed and every module's training flag is restored, also after an error.

    ```python
    trace = trace_model(model, **tokenizer("import os", return_tensors="pt"))
    trace.memberships.shape  # (batch, layers, heads, tokens)
    ```

    Args:
        model: any model with TSSA layers, language or vision, on any device and of any dtype.
        input_ids: (B, T) tokens of a language model, one sequence per batch element.
        attention_mask: (B, T), 1 at real tokens, 0 at padding on either side.
        pixel_values: (B, C, height, width) images of a vision model.

    Raises:
        ValueError: the model has no TSSA layers (the "xca" and "softmax" baselines have no memberships), a sequence has no
            real token, the model rejects the inputs, or memberships are NaN.
    """
    layers = tssa_layers(model)
    device = next(model.parameters()).device
    arguments = {"input_ids": input_ids, "attention_mask": attention_mask, "pixel_values": pixel_values}
    inputs = {name: torch.as_tensor(x).to(device) for name, x in arguments.items() if x is not None}
    patch_embeddings = find_modules(model, ToSTVisionPatchEmbeddings)
    if attention_mask is not None and not inputs["attention_mask"].bool().any(1).all():
        raise ValueError("attention_mask masks a whole sequence: each sequence needs at least one real token.")
    projections: list[torch.Tensor] = []
    memberships: list[torch.Tensor] = []
    log_decays: list[torch.Tensor] = []
    class_attentions: list[torch.Tensor] = []

    def record_layer(layer, args, output):
        memberships.append(output[1].cpu().double())

    def record_class_attention(layer, args, output):
        class_attentions.append(output[1][:, :, 0, 1:].cpu().double())  # without the class token

    with _evaluation_mode(model), contextlib.ExitStack() as hooks:
        for layer in layers.values():

            def record_projection(in_proj, args, output, layer=layer):
                projections.append(output.cpu())
                if (log_decay := layer.log_decay(args[0])) is not None:  # depends on the projection's inputs
                    log_decays.append(log_decay.cpu().double())

            hooks.enter_context(layer.in_proj.register_forward_hook(record_projection))
            hooks.enter_context(layer.register_forward_hook(record_layer))
        for class_attention in find_modules(model, ToSTVisionClassAttention):
            hooks.enter_context(class_attention.register_forward_hook(record_class_attention))
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            logits = getattr(model(**inputs), "logits", None)

    if not all(x.isfinite().all() for x in memberships):
        raise ValueError("The model's memberships are NaN: its weights overflow, or its inputs are not finite.")
    grid = None
    if patch_embeddings:
        height, width = (side // patch_embeddings[0].patch_size for side in inputs["pixel_values"].shape[-2:])
        grid = height, width
    B, heads, T = memberships[0].shape
    mask = inputs.get("attention_mask", torch.ones(B, T)).bool().cpu()
    log_decay = torch.stack(log_decays, 1).transpose(2, 3).masked_fill(~mask[:, None, None], 0) if log_decays else None
    return ModelTrace(
        layers=tuple(layers),
        projections=tuple(w.view(B, T, heads, -1) for w in projections),
        memberships=torch.stack(memberships, 1),
        mask=mask,
        grid=grid,
        class_attentions=torch.stack(class_attentions, 1) if class_attentions else None,
        logits=logits.cpu().double() if logits is not None and logits.ndim == 2 else None,
        log_decay=log_decay,
    )


def tssa_layers(model: nn.Module) -> dict[int, TokenStatisticsSelfAttention]:
    """The TSSA layers of a model, first to last, by the layer's number in the model: from 0, as in the names of its weights.

    A hybrid has none in its layers of softmax attention.

    Raises:
        ValueError: the model has none.
    """
    layers: dict[int, TokenStatisticsSelfAttention] = {}
    for name, module in model.named_modules():
        if isinstance(module, TokenStatisticsSelfAttention):
            number = re.search(r"\blayers\.(\d+)\.", name)
            layers[int(number[1]) if number else len(layers)] = module
    if not layers:
        raise ValueError(f"This {type(model).__name__} has no memberships, which only TSSA layers have.")
    return layers


def find_modules(model: nn.Module, module_class: type[Module]) -> list[Module]:
    """The modules of this class, in the model's order."""
    return [module for module in model.modules() if isinstance(module, module_class)]


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switches to evaluation mode; restores the flag of each module, as some may be frozen in evaluation mode."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in flags:
            module.training = training


def check_layer(layers: Collection[int], layer: int) -> None:
    """Raises a ValueError if this is none of the numbers of the model's TSSA layers."""
    if layer not in layers:
        raise ValueError(f"There is no TSSA layer {layer}: the model's are {', '.join(map(str, layers))}, counted from 0.")
