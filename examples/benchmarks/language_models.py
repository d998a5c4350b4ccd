# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The small causal language models of the benchmarks: ToST, its options beyond the paper, and baselines."""

import inspect
from functools import partial

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Mamba2Config, Mamba2ForCausalLM, PreTrainedModel

from tost_hf import ToSTConfig, ToSTForCausalLM
from tost_hf.model.layers_tost import ShortConvolution, TokenStatisticsSelfAttention


CONV_KERNEL_SIZE = 4
MAX_WINDOW = 256  # tokens of a sliding window; a quarter of shorter contexts
NO_STATISTICS = "ToST conv, no statistics"
HYBRID, WINDOW = "ToST hybrid", "ToST window"
ATTENTION_TYPES = {HYBRID: "full_attention", WINDOW: "sliding_attention"}
OPTIONS = {  # model name to options beyond the paper
    "ToST": {},
    "ToST head": {"decay_type": "head"},
    "ToST token": {"decay_type": "token"},
    "ToST conv": {"conv_kernel": CONV_KERNEL_SIZE},
    "ToST conv head": {"conv_kernel": CONV_KERNEL_SIZE, "decay_type": "head"},
    "ToST conv token": {"conv_kernel": CONV_KERNEL_SIZE, "decay_type": "token"},
    NO_STATISTICS: {"conv_kernel": CONV_KERNEL_SIZE},
    **{name: {"conv_kernel": CONV_KERNEL_SIZE, "decay_type": "token"} for name in ATTENTION_TYPES},
}
BASELINES = ("GPT-2", "GPT-2 conv", "Mamba-2")
MODELS = (*OPTIONS, *BASELINES)
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def find_cache_name(model: PreTrainedModel) -> str:
    """The name of the cache in this model and this version of transformers; by another one it would be ignored."""
    return next(x for x in inspect.signature(model.forward).parameters if x in ("cache", "past_key_values", "cache_params"))


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
        inner: the size inside a block: the MLP's width (default 4 * `width`), or the state size of Mamba-2 (default 32), which
            has no MLP.
        chunk_size: of Mamba-2, whose fallback without kernels has quadratic cost within a chunk.
    """
    if name in OPTIONS:
        config = ToSTConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // head_dim,
            intermediate_size=inner,
            max_position_embeddings=context,
            layer_scale_init_value=1.0,  # the published 1e-5 is too small for such short runs
            **OPTIONS[name],
            layer_types=hybrid_layer_types(layers, ATTENTION_TYPES[name]) if name in ATTENTION_TYPES else None,
            sliding_window=min(MAX_WINDOW, (context or 4 * MAX_WINDOW) // 4) if name == WINDOW else None,
            **NO_SPECIAL_TOKENS,
        )
        model = ToSTForCausalLM(config)
        return remove_statistics(model) if name == NO_STATISTICS else model
    if name in ("GPT-2", "GPT-2 conv"):
        config = GPT2Config(
            vocab_size=vocab_size,
            n_embd=width,
            n_layer=layers,
            n_head=width // head_dim,
            n_inner=inner,
            n_positions=context,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            **NO_SPECIAL_TOKENS,
        )
        model = GPT2LMHeadModel(config)
        return add_convolution(model) if name == "GPT-2 conv" else model
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
        **NO_SPECIAL_TOKENS,
    )
    return Mamba2ForCausalLM(config)


def hybrid_layer_types(layers: int, attention_type: str) -> list[str]:
    """Every fourth layer is attention; every third of fewer than twelve; the last of one or two."""
    interval = 4 if layers >= 12 else min(3, layers)
    return ["linear_attention" if (i + 1) % interval else attention_type for i in range(layers)]


# The ablation, and a baseline with the convolution --------------------------------------------------------------------


class LayerWithoutStatistics(TokenStatisticsSelfAttention):
    """A TSSA layer whose memberships and moments are 1: the convolution and two projections."""

    def forward(self, hidden_states: torch.Tensor, **_) -> tuple[torch.Tensor, None]:
        hidden_states, _ = self.convolution(hidden_states)
        return self.out_proj(-self.in_proj(hidden_states)), None


def remove_statistics(model: nn.Module) -> nn.Module:
    """Removes the statistics over tokens and their parameters from all layers."""
    for module in model.modules():
        if type(module) is TokenStatisticsSelfAttention:
            module.__class__ = LayerWithoutStatistics
            module.temp = module.denom_bias = None
    return model


class ConvolvedProjection(nn.Module):
    """A convolution followed by a projection."""

    def __init__(self, projection: nn.Module, width: int):
        super().__init__()
        self.convolution, self.projection = ShortConvolution(width, CONV_KERNEL_SIZE), projection

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states, _ = self.convolution(hidden_states)
        return self.projection(hidden_states)


def add_convolution(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """Adds ToST's convolution to the normalized input of each attention, for whole, unpadded sequences only."""
    for block in model.transformer.h:
        block.attn.c_attn = ConvolvedProjection(block.attn.c_attn, model.config.hidden_size)
    return model


# Equal parameters -----------------------------------------------------------------------------------------------------


def count_parameters(name: str, **size) -> int:
    """The number of parameters of `make_language_model(name, **size)`, without allocating them."""
    with torch.device("meta"):
        return make_language_model(name, **size).num_parameters()


def match_gpt2_size(name: str, *, width: int, layers: int, **size) -> dict[str, int]:
    """Sizes for `make_language_model` that give a model about as many parameters as a GPT-2 with `layers` layers.

    Five blocks of GPT-2 have about as many parameters as six of ToST or eight of Mamba-2. `inner` (in steps of 4, for Mamba-2
    of 1) compensates the remaining difference.
    """
    blocks = {"GPT-2": 5, "GPT-2 conv": 5, "Mamba-2": 8}.get(name, 6)
    step, default_inner = (1, 32) if name == "Mamba-2" else (4, 4 * width)
    sizes = {"width": width, "layers": layers * blocks // 5, **size}
    count = partial(count_parameters, name, **sizes)
    default_count = count(inner=default_inner)
    slope = count(inner=default_inner + step) - default_count
    difference = count_parameters("GPT-2", width=width, layers=layers, **size) - default_count
    return sizes | {"inner": default_inner + step * round(difference / slope)}
