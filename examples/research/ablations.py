# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The paper's ablations: ISTA in place of the MLP, and unnormalized scores. Trains such image classifiers:

    python examples/research/ablations.py examples/recipes/image_finetuning.yaml --config_name tost-vision-small-patch16 \
        --config_overrides mlp_type=ista,normalize_scores=false --dataset_name uoft-cs/cifar10 --do_train --do_eval \
        --output_dir my-ablation

The arguments are those of run_image_classification.py; configurations have the fields of `AblationFields` as well. The models
are loaded by `ToSTAblationForImageClassification.from_pretrained`.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForImageClassification


sys.path.append(str(Path(__file__).parents[1]))

import run_image_classification
from scripting import run

from tost_hf import (
    TokenStatisticsSelfAttention,
    ToSTForImageClassification,
    ToSTPreTrainedModel,
    ToSTVisionConfig,
    ToSTVisionPreTrainedModel,
    TSSAOutput,
    tssa,
    tssa_step,
)
from tost_hf.model.modeling_tost import ToSTDecoderLayer
from tost_hf.model.modeling_tost_vision import ToSTVisionLayer
from tost_hf.model.tssa_reference import mask_padding, select_bias, softmax_over_heads


MLP_TYPES = ("mlp", "ista")


@dataclass
class AblationFields:
    """Fields of configurations.

    Args:
        mlp_type: "mlp", as published, or "ista", an `ISTAStep`, which replaces the MLP together with its residual connection
            and LayerScale. Class-attention blocks have MLPs in both cases.
        ista_step_size: step size of the ISTA step.
        ista_threshold: threshold of the ISTA step.
        normalize_scores: whether memberships are computed from squares that are normalized per channel over the tokens, as
            published, or from unnormalized squares, for which the reference implementation runs.
    """

    mlp_type: str = "mlp"
    ista_step_size: float | int = 0.1
    ista_threshold: float | int = 0.1
    normalize_scores: bool = True

    def get_option_defaults(self) -> dict[str, Any]:
        defaults = {field.name: field.default for field in dataclasses.fields(AblationFields)}
        return super().get_option_defaults() | defaults  # type: ignore[misc]  # of the configuration

    def ablations(self) -> dict[str, Any]:
        """Arguments of `ablate`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(AblationFields)}

    def validate_architecture(self):
        super().validate_architecture()  # type: ignore[misc]  # of the configuration
        if self.mlp_type not in MLP_TYPES:
            raise ValueError(f"mlp_type must be one of {', '.join(MLP_TYPES)}, got {self.mlp_type!r}.")
        if not (self.ista_step_size > 0 and self.ista_threshold >= 0):
            raise ValueError("ista_step_size must be above 0 and ista_threshold must not be negative.")


# Layers ---------------------------------------------------------------------------------------------------------------


class ISTAStep(nn.Module):
    """One ISTA step towards a sparse code of each token (CRATE, arXiv 2306.01129), in place of an MLP.

        code = relu(x + step_size * dictionary^T (x - dictionary x) - step_size * threshold)

    This is a proximal gradient step on 1/2 |x - dictionary code|^2 + threshold |code|_1, code >= 0, from code = x. The code
    replaces the token: there is no residual connection and no LayerScale. The only parameter is `dictionary` (D, D); an MLP
    of width 4 D has 8 D^2 weights.
    """

    def __init__(self, hidden_size: int, step_size: float, threshold: float):
        super().__init__()
        self.step_size, self.threshold = float(step_size), float(threshold)
        self.dictionary = nn.Parameter(torch.empty(hidden_size, hidden_size))
        nn.init.kaiming_uniform_(self.dictionary)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The codes of tokens (B, T, D), of the same shape and non-negative."""
        residual = hidden_states - F.linear(hidden_states, self.dictionary)
        return F.relu(hidden_states + self.step_size * (F.linear(residual, self.dictionary.t()) - self.threshold))

    def extra_repr(self) -> str:
        return f"{len(self.dictionary)}, step_size={self.step_size}, threshold={self.threshold}"


def tssa_unnormalized(
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    positions: torch.Tensor | None = None,
    operator: Callable[..., TSSAOutput] = tssa,
    **options,
) -> TSSAOutput:
    """TSSA with the scores sum_i w_i^2 (plus p bias), in which S has no effect.

    Args:
        operator: `tssa`, or `tssa_step` for one token.
        options: as the others, arguments of the operator.
    """

    def softmax(score, temp, padding):
        score = mask_padding(w, padding, temp.dtype).square().sum(-1)
        if bias is not None:
            score = score + w.shape[-1] * select_bias(bias, positions, temp.dtype)
        return softmax_over_heads(score, temp, padding)

    return operator(w, temp, bias, positions=positions, softmax=softmax, **options)


class AblatedDecoderLayer(ToSTDecoderLayer):
    """`ToSTDecoderLayer` with TSSA, and an MLP or ISTA step.

    With `pre_norm` false the norms are applied after the residual connections: norm(x + scale * TSSA(x)), then
    norm(x + scale * MLP(x)), or norm(ISTA(x)).
    """

    pre_norm = True

    def forward(  # type: ignore[override]  # the others are arguments of softmax attention
        self, hidden_states, attention_mask=None, position_ids=None, seq_idx=None, past_key_values=None, **_
    ) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states) if self.pre_norm else hidden_states
        attn_output, _ = self.self_attn(
            normed,
            attention_mask=attention_mask,
            position_ids=position_ids,
            seq_idx=seq_idx,
            past_key_values=past_key_values,
        )
        hidden_states = torch.addcmul(hidden_states, self.attention_layer_scale, attn_output)
        hidden_states = hidden_states if self.pre_norm else self.input_layernorm(hidden_states)
        output = self.mlp(self.post_attention_layernorm(hidden_states) if self.pre_norm else hidden_states)
        if not isinstance(self.mlp, ISTAStep):
            output = torch.addcmul(hidden_states, self.mlp_layer_scale, output)
        return output if self.pre_norm else self.post_attention_layernorm(output)


class ISTAVisionLayer(ToSTVisionLayer):
    """`ToSTVisionLayer` with an ISTA step."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        attn_output, _ = self.attention(self.attention_norm(hidden_states))
        hidden_states = hidden_states + self.drop_path(self.attention_layer_scale * attn_output)
        return self.mlp(self.mlp_norm(hidden_states))


def ablate(
    model: ToSTPreTrainedModel | ToSTVisionPreTrainedModel,
    mlp_type: str = "mlp",
    ista_step_size: float = 0.1,
    ista_threshold: float = 0.1,
    normalize_scores: bool = True,
    pre_norm: bool = True,
) -> None:
    """Replaces the MLPs, scores and places of the norms in a ToST model by those of an ablation.

    Args:
        model: a text model without softmax attention, or a vision model; changed in place.
        mlp_type, ista_step_size, ista_threshold, normalize_scores: as in `AblationFields`.
        pre_norm: text models only: whether each norm is applied before attention and MLP, as published, or after the residual
            connections; then there is no final norm.
    """
    for module in model.modules():
        if isinstance(module, TokenStatisticsSelfAttention) and not normalize_scores:
            step = functools.partial(tssa_unnormalized, operator=tssa_step)
            module.operators = module.operators._replace(tssa=tssa_unnormalized, step=step)
        elif isinstance(module, ToSTDecoderLayer) and not (pre_norm and mlp_type == "mlp"):
            if module.is_softmax_attention:
                raise ValueError("A hybrid model has no ablations: leave out layer_types.")
            module.__class__ = AblatedDecoderLayer
            module.pre_norm = pre_norm
        elif isinstance(module, ToSTVisionLayer) and mlp_type == "ista":
            module.__class__ = ISTAVisionLayer
        if isinstance(module, AblatedDecoderLayer | ISTAVisionLayer) and mlp_type == "ista":
            module.mlp = ISTAStep(model.config.hidden_size, ista_step_size, ista_threshold)
            del module.mlp_layer_scale
            module.mlp_layer_scale = torch.empty(0)  # which _init_weights of the model fills, is no parameter
    if not pre_norm:
        model.base_model.norm = nn.Identity()


# Image classifiers ----------------------------------------------------------------------------------------------------


@strict
class ToSTVisionAblationConfig(AblationFields, ToSTVisionConfig):
    """As `ToSTVisionConfig`, with `AblationFields`."""

    model_type = "tost_vision_ablation"


class ToSTAblationForImageClassification(ToSTForImageClassification):
    """`ToSTForImageClassification` with the ablations of its configuration.

    Example:

    ```python
    >>> model = ToSTAblationForImageClassification(ToSTVisionAblationConfig(mlp_type="ista", normalize_scores=False))
    ```
    """

    config: ToSTVisionAblationConfig

    def __init__(self, config: ToSTVisionAblationConfig):
        super().__init__(config)
        ablate(self, **config.ablations())
        self.post_init()


AutoConfig.register(ToSTVisionAblationConfig.model_type, ToSTVisionAblationConfig, exist_ok=True)
AutoModelForImageClassification.register(ToSTVisionAblationConfig, ToSTAblationForImageClassification, exist_ok=True)


@dataclass
class ModelArguments(run_image_classification.ModelArguments):
    """As in run_image_classification.py, for models of this file."""

    def load_config(self) -> ToSTVisionAblationConfig:
        fields = super().load_config().to_dict()
        return ToSTVisionAblationConfig.from_dict(fields | {"model_type": ToSTVisionAblationConfig.model_type})


if __name__ == "__main__":
    run(functools.partial(run_image_classification.main, model_arguments=ModelArguments))
