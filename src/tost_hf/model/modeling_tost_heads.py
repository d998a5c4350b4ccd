# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Heads on the ToST trunk for texts: masked language model, classifiers of texts and of tokens, question answering."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GenericForQuestionAnswering, GenericForTokenClassification
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from .configuration_tost import ToSTConfig
from .modeling_tost import ToSTModel, ToSTPreTrainedModel


@dataclass
class ToSTSequenceClassifierOutputWithPast(SequenceClassifierOutputWithPast):
    """`memberships` as in `ToSTModelOutputWithPast`."""

    memberships: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class ToSTMaskedLMOutput(MaskedLMOutput):
    """`memberships` as in `ToSTModelOutputWithPast`."""

    memberships: tuple[torch.FloatTensor, ...] | None = None


class ToSTForSequenceClassification(ToSTPreTrainedModel):
    """ToST with a linear head on the features of each sequence, pooled as `config.pooling` says."""

    def __init__(self, config: ToSTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ToSTModel(config)
        assert config.num_labels is not None  # transformers counts the labels
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(  # type: ignore[misc]  # TransformersKwargs names some of these, too
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ToSTSequenceClassifierOutputWithPast:
        """Logits (B, num_labels), and the loss of `config.problem_type` where labels are given.

        The real tokens are those of the attention mask. Without a mask they are all tokens or, in a causal model, those that
        are not `config.pad_token_id`; an encoder needs the mask, as its sums would count padding as text.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.score(outputs.last_hidden_state)
        real = None
        if attention_mask is not None:
            real = attention_mask[:, -logits.shape[1] :] != 0
        elif self.config.is_causal and input_ids is not None and self.config.pad_token_id is not None:
            real = input_ids != self.config.pad_token_id
        pooled_logits = _pool(logits, real, self.config.pooling_in_use)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=pooled_logits, config=self.config, logits=logits)
        return ToSTSequenceClassifierOutputWithPast(
            loss=loss,
            logits=pooled_logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            memberships=outputs.memberships,
        )


def _pool(x: torch.Tensor, real: torch.Tensor | None, pooling: str) -> torch.Tensor:
    """The first or the last of the real tokens of x (B, T, C), or their mean, (B, C); `real` (B, T), None where all are."""
    B, T, _ = x.shape
    real = x.new_ones(B, T, dtype=torch.bool) if real is None else real.to(x.device)
    if pooling == "mean":
        count = real.sum(1, keepdim=True).clamp_min(1)
        return x.masked_fill(~real.unsqueeze(-1), 0).sum(1) / count
    place = torch.arange(T, device=x.device)
    index = (place * real).argmax(-1) if pooling == "last" else real.long().argmax(-1)
    return x[torch.arange(B, device=x.device), index]


class ToSTForMaskedLM(ToSTPreTrainedModel):
    """A ToST encoder with a language-model head, tied to the token embedding by default, that fills in masked tokens."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: ToSTConfig):
        if getattr(config, "is_causal", False):
            raise ValueError(
                "A masked language model sees the whole text, and this configuration is of a causal model: set "
                "is_causal=False, or load it with AutoModelForCausalLM."
            )
        super().__init__(config)
        self.model = ToSTModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(  # type: ignore[misc]  # TransformersKwargs names some of these, too
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ToSTMaskedLMOutput:
        """Logits (B, T, vocab_size), and the loss where labels are given. Other arguments are `ToSTModel.forward`'s.

        Args:
            labels: (B, T), the tokens that stood there before masking; -100 where there is nothing to tell.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return ToSTMaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, memberships=outputs.memberships
        )


# transformers' own heads, but for their `__init__`: it has AutoModel make the trunk, which knows nothing of remote code


class ToSTForTokenClassification(GenericForTokenClassification, ToSTPreTrainedModel):
    """ToST with a linear head on each token: transformers' own, so memberships are the trunk's alone (`self.model`)."""

    def __init__(self, config: ToSTConfig):
        ToSTPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = ToSTModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        assert config.num_labels is not None  # transformers counts the labels
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class ToSTForQuestionAnswering(GenericForQuestionAnswering, ToSTPreTrainedModel):
    """ToST that marks where an answer starts and ends: transformers' own head, as in `ToSTForTokenClassification`."""

    def __init__(self, config: ToSTConfig):
        ToSTPreTrainedModel.__init__(self, config)
        self.model = ToSTModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


__all__ = ["ToSTForMaskedLM", "ToSTForQuestionAnswering", "ToSTForSequenceClassification", "ToSTForTokenClassification"]
