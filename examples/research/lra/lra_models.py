# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The models of Long Range Arena: ToST's encoder, the same trunk with softmax or linear attention, and a head for pairs."""

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_outputs import SequenceClassifierOutput

from tost_hf import ToSTConfig, ToSTForSequenceClassification, ToSTModel
from tost_hf.model.modeling_tost import ToSTPreTrainedModel


ATTENTION = ("tost", "softmax", "linear")


@strict
class LRAConfig(ToSTConfig):
    """A ToST encoder's configuration, with a choice of attention.

    Args:
        attention: "tost", "softmax", or "linear" (Katharopoulos et al., 2020, with elu + 1).
        reads_pairs: whether an example is a pair of sequences, for `LRAForPairClassification`.
    """

    model_type = "tost_lra"

    attention: str = "tost"
    reads_pairs: bool = False

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


class LRAModel(ToSTModel):
    """ToST's trunk with the configuration's attention in every layer."""

    config: LRAConfig

    def __init__(self, config: LRAConfig):
        super().__init__(config)
        if config.attention != "tost":
            for layer in self.layers:
                layer.self_attn = Attention(config)
        self.post_init()


class LRAForSequenceClassification(ToSTForSequenceClassification):
    """`ToSTForSequenceClassification` with the configuration's attention in its trunk."""

    config: LRAConfig

    def __init__(self, config: LRAConfig):
        ToSTPreTrainedModel.__init__(self, config)  # the base class would build ToST's trunk
        self.num_labels = config.num_labels
        self.model = LRAModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class LRAForPairClassification(LRAForSequenceClassification):
    """Encodes and pools both sequences by one trunk; an MLP classifies [a, b, a * b, |a - b|]."""

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
        if getattr(module, "_is_in_head", False):  # the trunk's small weights would keep pairs at chance for many steps
            init.normal_(module.weight, mean=0.0, std=module.in_features**-0.5)

    def forward(self, input_ids, other_input_ids, attention_mask=None, other_attention_mask=None, labels=None, **kwargs):
        """Logits (B, num_labels) of pairs of sequences (B, T) with their masks, and the loss if there are labels."""
        first = super().forward(input_ids, attention_mask=attention_mask, **kwargs).logits
        second = super().forward(other_input_ids, attention_mask=other_attention_mask, **kwargs).logits
        logits = self.head(torch.cat([first, second, first * second, (first - second).abs()], -1))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def make_config(preset: str, attention: str = "tost") -> ToSTConfig:
    """The configuration of a task's model, for `make_model`.

    Args:
        preset: one of `LRA_PRESETS`.
        attention: one of `ATTENTION`. TSSA with single sequences is an ordinary ToST configuration.
    """
    reads_pairs = preset == "tost-lra-retrieval"
    if attention == "tost" and not reads_pairs:
        return ToSTConfig.from_preset(preset)
    return LRAConfig.from_preset(preset, attention=attention, reads_pairs=reads_pairs, architectures=None)


def make_model(config: ToSTConfig) -> ToSTForSequenceClassification:
    """A new model."""
    if not isinstance(config, LRAConfig):
        return ToSTForSequenceClassification(config)
    return (LRAForPairClassification if config.reads_pairs else LRAForSequenceClassification)(config)
