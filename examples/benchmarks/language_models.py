# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The small causal language models of the experiments: ToST, each of its options beyond the paper, and its rivals."""

from functools import partial

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Mamba2Config, Mamba2ForCausalLM, PreTrainedModel

from tost_hf import ToSTConfig, ToSTForCausalLM
from tost_hf.model.layers_tost import ShortConvolution, TokenStatisticsSelfAttention


KERNEL = 4  # tokens of a convolution
NO_STATISTICS = "ToST conv, no statistics"
HYBRID = "ToST hybrid"
OPTIONS = {  # name of a ToST to its options beyond the paper
    "ToST": {},
    "ToST head": {"forgetting": "head"},
    "ToST token": {"forgetting": "token"},
    "ToST conv": {"conv_kernel": KERNEL},
    "ToST conv head": {"conv_kernel": KERNEL, "forgetting": "head"},
    "ToST conv token": {"conv_kernel": KERNEL, "forgetting": "token"},
    NO_STATISTICS: {"conv_kernel": KERNEL},
    HYBRID: {"conv_kernel": KERNEL, "forgetting": "token"},
}
RIVALS = ("GPT-2", "GPT-2 conv", "Mamba-2")
MODELS = (*OPTIONS, *RIVALS)
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def make_language_model(
    name: str,
    *,
    vocab_size: int,
    width: int,
    layers: int,
    head_dim: int,
    context: int | None,
    inner: int | None = None,
    chunk_size: int = 32,
) -> PreTrainedModel:
    """A small causal language model to be trained from scratch.

    Args:
        name: one of `MODELS`.
        context: length of the learned position tables (Mamba-2 has none); None is the position-free ToST.
        inner: the size inside a block that can be chosen freely: the MLP's width (default 4 * `width`), in Mamba-2, which
            has no MLP, the size of the state (default 32).
        chunk_size: of Mamba-2, whose fallback without kernels is quadratic within a chunk.
    """
    if name in OPTIONS:
        config = ToSTConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // head_dim,
            intermediate_size=inner,
            max_position_embeddings=context,
            layer_scale_init_value=1.0,  # the published 1e-5 takes longer to grow than these runs last
            **OPTIONS[name],
            layer_types=hybrid_layers(layers) if name == HYBRID else None,
            **NO_IDS,
        )
        model = ToSTForCausalLM(config)
        return without_statistics(model) if name == NO_STATISTICS else model
    if name in ("GPT-2", "GPT-2 conv"):
        config = GPT2Config(
            vocab_size=vocab_size,
            n_embd=width,
            n_layer=layers,
            n_head=width // head_dim,
            n_inner=inner,
            n_positions=context,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **NO_IDS,
        )
        model = GPT2LMHeadModel(config)
        return with_convolution(model) if name == "GPT-2 conv" else model
    config = Mamba2Config(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_heads=2 * width // head_dim,
        head_dim=head_dim,
        state_size=inner or 32,
        n_groups=1,
        chunk_size=chunk_size,
        initializer_range=0.02,
        tie_word_embeddings=True,
        **NO_IDS,
    )
    return Mamba2ForCausalLM(config)


def hybrid_layers(layers: int) -> list[str]:
    """Every fourth layer is attention; every third in less than twelve layers; the last of one or two."""
    every = 4 if layers >= 12 else min(3, layers)
    return ["tost_causal_statistics" if (i + 1) % every else "full_attention" for i in range(layers)]


# The ablation, and a rival with the convolution ----------------------------------------------------------------------


class LayerWithoutStatistics(TokenStatisticsSelfAttention):
    """What is left of a TSSA layer when memberships and moments are 1: the convolution and two projections."""

    def forward(self, hidden_states: torch.Tensor, **_) -> tuple[torch.Tensor, None]:
        hidden_states, _ = self.convolution(hidden_states)
        return self.out_proj(-self.in_proj(hidden_states)), None


def without_statistics(model: nn.Module) -> nn.Module:
    """The same model without what its layers know of other tokens by statistics, nor the parameters of that."""
    for module in model.modules():
        if type(module) is TokenStatisticsSelfAttention:
            module.__class__ = LayerWithoutStatistics
            module.temp = module.denom_bias = None
    return model


class ConvolvedProjection(nn.Module):
    """A projection of convolved tokens."""

    def __init__(self, projection: nn.Module, width: int):
        super().__init__()
        self.convolution, self.projection = ShortConvolution(width, KERNEL), projection

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states, _ = self.convolution(hidden_states)
        return self.projection(hidden_states)


def with_convolution(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """The same model with ToST's convolution on the normalised input of each attention. Only for whole, unpadded texts."""
    for block in model.transformer.h:
        block.attn.c_attn = ConvolvedProjection(block.attn.c_attn, model.config.hidden_size)
    return model


# Equal parameters -----------------------------------------------------------------------------------------------------


def count_parameters(name: str, **size) -> int:
    """The number of parameters of `make_language_model(name, **size)`, which is not built."""
    with torch.device("meta"):
        return make_language_model(name, **size).num_parameters()


def equal_size(name: str, *, width: int, layers: int, **size) -> dict[str, int]:
    """Sizes for `make_language_model` with which a model has about as many parameters as a GPT-2 of so many layers.

    A block of ToST has about five sixths of the parameters of one of GPT-2, one of Mamba-2 about five eighths, so that six and
    eight of them stand beside five; `inner` (in steps of 4, Mamba-2's in steps of 1) makes good what is left.
    """
    blocks = {"GPT-2": 5, "GPT-2 conv": 5, "Mamba-2": 8}.get(name, 6)
    step, usual = (1, 32) if name == "Mamba-2" else (4, 4 * width)
    found = {"width": width, "layers": layers * blocks // 5, **size}
    count = partial(count_parameters, name, **found)
    at_usual = count(inner=usual)
    slope = count(inner=usual + step) - at_usual
    missing = count_parameters("GPT-2", width=width, layers=layers, **size) - at_usual
    return found | {"inner": usual + step * round(missing / slope)}
