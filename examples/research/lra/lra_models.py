# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The models of Long Range Arena: ToST's encoder, the same with softmax or linear attention or ablations, a head for pairs."""

import sys
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_outputs import SequenceClassifierOutput


sys.path.append(str(Path(__file__).parents[1]))

from ablations import AblationFields, ablate

from tost_hf import ToSTConfig, ToSTForSequenceClassification
from tost_hf.model.configuration_tost import OPTION_DEFAULTS


ATTENTION = ("tost", "softmax", "linear")

# The paper specifies layers, widths, heads, dropout and norm placement of its models. The rest is our choice: one token per
# byte or grey level and four special ones, the task's longest sequence, biases, LayerScale at 1, mean pooling.
_FIELDS = {"is_causal": False, "pooling": "mean", "use_bias": True, "layer_scale_init_value": 1.0, "hidden_dropout": 0.1}
_FIELDS |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
PRESETS: dict[str, dict[str, Any]] = {  # by task
    task: _FIELDS
    | dict(zip(("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"), sizes))
    | {"vocab_size": vocab_size, "max_position_embeddings": max_length, "num_labels": num_labels}
    for task, sizes, vocab_size, max_length, num_labels in (
        ("listops", (6, 512, 8, 2048), 32, 2048, 10),
        ("text", (4, 256, 4, 1024), 260, 4096, 2),
        ("retrieval", (6, 128, 4, 512), 260, 4096, 2),
        ("image", (8, 64, 8, 128), 260, 1024, 10),
        ("pathfinder", (2, 64, 2, 128), 260, 1024, 2),
    )
}
PRESETS["retrieval"]["reads_pairs"] = True
PRESETS["image"]["hidden_dropout"] = 0.0
PRESETS["pathfinder"]["pre_norm"] = False


@strict
class LRAConfig(AblationFields, ToSTConfig):
    """A ToST encoder's configuration with the paper's ablations, a choice of attention, and of the place of the norms.

    Args:
        attention: "tost", "softmax", or "linear" (Katharopoulos et al., 2020, with elu + 1).
        pre_norm: as in `ablate`.
        reads_pairs: whether an example is a pair of sequences, for `LRAForPairClassification`.
    """

    model_type = "tost_lra"

    attention: str = "tost"
    pre_norm: bool = True
    reads_pairs: bool = False

    def get_option_defaults(self):
        return super().get_option_defaults() | {"attention": "tost", "pre_norm": True, "reads_pairs": False}

    def validate_architecture(self):
        super().validate_architecture()
        if self.attention not in ATTENTION:
            raise ValueError(f"attention must be one of {', '.join(ATTENTION)}, got {self.attention[:40]!r}.")
        if self.attention != "tost" and self.is_causal:
            raise ValueError("softmax and linear attention are encoders here: set is_causal=False.")


class Attention(nn.Module):
    """Attention of every token to all real tokens, softmax or linear, with TSSA's arguments."""

    def __init__(self, config: LRAConfig):
        super().__init__()
        width, bias = config.hidden_size, config.use_bias
        self.linear, self.heads = config.attention == "linear", config.num_attention_heads
        self.dropout = config.attention_dropout
        self.qkv_proj = nn.Linear(width, 3 * width, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)
        self.out_dropout = nn.Dropout(config.hidden_dropout)
        self.out_proj._writes_to_residual = True  # initialized like TSSA's

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_):
        """(B, T, D) to (B, T, D) and None; `attention_mask` (B, T) is true at real tokens; each sequence has at least one."""
        B, T, D = hidden_states.shape
        query, key, value = self.qkv_proj(hidden_states).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        key_mask = None if attention_mask is None else attention_mask.bool().view(B, 1, 1, T)
        if self.linear:
            query, key = F.elu(query) + 1, F.elu(key) + 1
            if key_mask is not None:
                key = key * key_mask.transpose(-1, -2)
            summary = key.transpose(-1, -2) @ value  # (B, H, p, p)
            output = (query @ summary) / (query @ key.sum(-2).unsqueeze(-1)).clamp_min(1e-6)
        else:
            dropout = self.dropout if self.training else 0.0
            output = F.scaled_dot_product_attention(query, key, value, attn_mask=key_mask, dropout_p=dropout)
        return self.out_dropout(self.out_proj(output.transpose(1, 2).reshape(B, T, D))), None


class LRAForSequenceClassification(ToSTForSequenceClassification):
    """`ToSTForSequenceClassification` with the attention and the ablations of its configuration."""

    config: LRAConfig

    def __init__(self, config: LRAConfig):
        super().__init__(config)
        if config.attention != "tost":
            for layer in self.model.layers:
                layer.self_attn = Attention(config)
        ablate(self, **config.ablations(), pre_norm=config.pre_norm)
        self.post_init()


class LRAForPairClassification(LRAForSequenceClassification):
    """Encodes and pools both sequences by one model; an MLP classifies [a, b, a * b, |a - b|]."""

    def __init__(self, config: LRAConfig):
        super().__init__(config)
        self.score = nn.Identity()  # so that the base class returns the pooled features
        width = config.hidden_size
        self.head = nn.Sequential(nn.Linear(4 * width, width), nn.ReLU(), nn.Linear(width, config.num_labels))
        for layer in (self.head[0], self.head[2]):
            layer._is_in_head = True
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if getattr(module, "_is_in_head", False):  # the base model's small weights would keep pairs at chance for many steps
            init.normal_(module.weight, mean=0.0, std=module.in_features**-0.5)

    def forward(self, input_ids, other_input_ids, attention_mask=None, other_attention_mask=None, labels=None, **kwargs):
        """Logits (B, num_labels) of pairs of sequences (B, T) with their masks, and the loss if there are labels."""
        first = super().forward(input_ids, attention_mask=attention_mask, **kwargs).logits
        second = super().forward(other_input_ids, attention_mask=other_attention_mask, **kwargs).logits
        logits = self.head(torch.cat([first, second, first * second, (first - second).abs()], -1))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def make_config(task: str, **fields) -> LRAConfig:
    """The configuration of a task's model in the paper (`PRESETS`), with any field overridden."""
    return LRAConfig(**PRESETS[task] | fields)


def make_model(config: LRAConfig) -> ToSTForSequenceClassification:
    """A new model; an ordinary ToST if the configuration is that of one."""
    if config.reads_pairs:
        return LRAForPairClassification(config)
    if config.options().keys() - OPTION_DEFAULTS.keys():
        return LRAForSequenceClassification(config)
    return ToSTForSequenceClassification(ToSTConfig.from_dict(config.to_dict() | {"model_type": ToSTConfig.model_type}))
