# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""ToST language models: the trunk, the causal language model and the sequence classifier."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .cache_tost import CausalStatisticsCache, CausalStatisticsLayer, check_cache
from .configuration_tost import ToSTConfig
from .modeling_tost_base import ToSTBaseModel
from .tssa import TokenStatisticsSelfAttention


@dataclass
class ToSTModelOutputWithPast(BaseModelOutputWithPast):
    """`memberships`: with `output_memberships=True`, Pi of every layer, each (B, H, T) in float32, 0 at padding."""

    memberships: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class ToSTCausalLMOutputWithPast(CausalLMOutputWithPast):
    """`memberships` as in `ToSTModelOutputWithPast`."""

    memberships: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class ToSTSequenceClassifierOutputWithPast(SequenceClassifierOutputWithPast):
    """`memberships` as in `ToSTModelOutputWithPast`."""

    memberships: tuple[torch.FloatTensor, ...] | None = None


class ToSTMLP(nn.Module):
    def __init__(self, config: ToSTConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.use_bias)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down_proj(self.act_fn(self.up_proj(hidden_states))))


class ToSTDecoderLayer(GradientCheckpointingLayer):
    """x + scale * TSSA(norm(x)), then x + scale * MLP(norm(x)); both scales are vectors (LayerScale)."""

    def __init__(self, config: ToSTConfig, layer_idx: int):
        super().__init__()
        width, bias = config.hidden_size, config.use_bias
        self.input_layernorm = nn.LayerNorm(width, eps=config.layer_norm_eps, bias=bias)
        self.self_attn = TokenStatisticsSelfAttention(
            width,
            config.num_attention_heads,
            causal=True,
            layer_idx=layer_idx,
            max_position_embeddings=config.max_position_embeddings,
            in_bias=bias,
            out_bias=bias,
            attention_dropout=config.attention_dropout,
            hidden_dropout=config.hidden_dropout,
        )
        self.attention_layer_scale = nn.Parameter(torch.full((width,), float(config.layer_scale_init_value)))
        self.post_attention_layernorm = nn.LayerNorm(width, eps=config.layer_norm_eps, bias=bias)
        self.mlp = ToSTMLP(config)
        self.mlp_layer_scale = nn.Parameter(torch.full((width,), float(config.layer_scale_init_value)))
        for projection in (self.self_attn.out_proj, self.mlp.down_proj):
            projection._writes_to_residual = True  # initialised smaller, see _init_weights

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            seq_idx=seq_idx,
            past_key_values=past_key_values,
        )
        hidden_states = hidden_states + self.attention_layer_scale * attended
        return hidden_states + self.mlp_layer_scale * self.mlp(self.post_attention_layernorm(hidden_states))


class ToSTPreTrainedModel(ToSTBaseModel):
    """Weight initialisation, loading and saving of all ToST language models."""

    config: ToSTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ToSTDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _keep_in_fp32_modules_strict = ["temp", "denom_bias"]
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": ToSTDecoderLayer,
        "memberships": OutputRecorder(TokenStatisticsSelfAttention, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, TokenStatisticsSelfAttention):
            init.ones_(module.temp)
            if module.denom_bias is not None:
                init.zeros_(module.denom_bias)
        elif isinstance(module, ToSTDecoderLayer):
            init.constant_(module.attention_layer_scale, self.config.layer_scale_init_value)
            init.constant_(module.mlp_layer_scale, self.config.layer_scale_init_value)
        elif getattr(module, "_writes_to_residual", False):
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            init.normal_(module.weight, mean=0.0, std=std)

    def get_position_embeddings(self) -> nn.Embedding | None:
        """The learned table of positions, or None in the position-free variant."""
        return self.base_model.embed_positions

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Resizes the learned tables `embed_positions` and `denom_bias` (one a layer).

        A smaller size keeps the first rows. A larger size *stretches* each table by linear interpolation: the first and
        last row keep their values and the new row t is read from the old place t * (old - 1) / (new - 1). Every position
        but the first so changes its meaning; fine-tune afterwards.

        Raises:
            ValueError: the size is not a positive integer, or the model has no positions.
        """
        if self.config.max_position_embeddings is None:
            raise ValueError("This model is position-free: it has no position tables to resize, and no limit.")
        if not isinstance(new_num_position_embeddings, int) or new_num_position_embeddings < 1:
            raise ValueError(f"The number of positions must be a positive integer, got {new_num_position_embeddings!r}.")
        table = self.base_model.embed_positions
        table.weight = _resize_rows(table.weight, 0, new_num_position_embeddings)
        table.num_embeddings = new_num_position_embeddings
        for layer in self.base_model.layers:
            layer.self_attn.denom_bias = _resize_rows(layer.self_attn.denom_bias, 1, new_num_position_embeddings)
        self.config.max_position_embeddings = self.base_model.config.max_position_embeddings = new_num_position_embeddings


def _resize_rows(table: nn.Parameter, dim: int, rows: int) -> nn.Parameter:
    """Cuts the table along `dim`, or stretches it by linear interpolation with the ends fixed."""
    if rows <= table.shape[dim]:
        data = table.data.narrow(dim, 0, rows).clone()
    else:
        columns = table.data.movedim(dim, -1)
        stretched = F.interpolate(
            columns.reshape(1, -1, columns.shape[-1]).float(), size=rows, mode="linear", align_corners=True
        )
        data = stretched.view(*columns.shape[:-1], rows).movedim(-1, dim).to(table.dtype).contiguous()
    return nn.Parameter(data, requires_grad=table.requires_grad)


class ToSTModel(ToSTPreTrainedModel):
    """The ToST trunk: embeddings, TSSA blocks and a final LayerNorm."""

    def __init__(self, config: ToSTConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = None
        if config.max_position_embeddings is not None:
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(ToSTDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.use_bias)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        seq_idx: torch.LongTensor | None = None,
        cu_seq_lens_q: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ToSTModelOutputWithPast:
        """Runs the trunk.

        Args:
            input_ids: (B, T) token ids; or give `inputs_embeds`.
            attention_mask: (B, T), or (B, cached + T) with a cache: 1 at real tokens, 0 at padding, on either side.
            position_ids: (B, T) or (1, T). Without them positions count the real tokens. Restarting at 0 within a row,
                they pack several sequences into it (`DataCollatorWithFlattening`).
            past_key_values: running statistics of the tokens before these; updated.
            inputs_embeds: (B, T, D) embedded tokens in place of `input_ids`.
            use_cache: whether to return the running statistics. Packed rows have none to return.
            seq_idx: (B, T) sequence number of each token, packed rows.
            cu_seq_lens_q: (sequences + 1,) borders of the sequences packed into a batch of one row.

        Raises:
            ValueError: inputs that disagree in shape or meaning; the sentence says which.
            IndexError: a token id outside the vocabulary (checked on the CPU), or a position past the learned tables.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            self._check_token_ids(input_ids)
            inputs_embeds = self.embed_tokens(input_ids)
        elif inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"inputs_embeds must have shape (batch, tokens, {self.config.hidden_size}), got {tuple(inputs_embeds.shape)}."
            )
        B, T, _ = inputs_embeds.shape
        if B == 0 or T == 0:
            raise ValueError(f"The batch is empty: its shape is ({B}, {T}); a forward pass needs at least one token.")

        self._check_cache(past_key_values, B)
        past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
        if not torch.compiler.is_compiling():
            past_length = int(past_length)  # a static cache counts in a tensor
        full_mask = _check_mask(attention_mask, B, T, past_length)
        attention_mask = None if full_mask is None else full_mask[:, -T:]
        stated_idx = _stated_sequences(seq_idx, cu_seq_lens_q, B, T, inputs_embeds.device)
        seq_idx = self._find_sequences(stated_idx, position_ids, attention_mask, past_key_values, (B, T))
        if position_ids is None:
            position_ids = _count_positions(full_mask, stated_idx, past_length, T, inputs_embeds.device)
        position_ids = position_ids.expand(B, T)
        self._check_positions(position_ids, attention_mask, past_length)
        # a packed row has no one state; a compiler's view of position_ids does not tell whether a row is packed
        unpacked = seq_idx is None or (stated_idx is None and torch.compiler.is_compiling())
        if use_cache and past_key_values is None and unpacked:
            past_key_values = CausalStatisticsCache(self.config)

        hidden_states = inputs_embeds
        if self.embed_positions is not None:
            hidden_states = hidden_states + self.embed_positions(position_ids)
        hidden_states = self.embedding_dropout(hidden_states)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                seq_idx=seq_idx,
                past_key_values=past_key_values,
            )
        return ToSTModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states),
            past_key_values=past_key_values if use_cache else None,
        )

    def _check_token_ids(self, input_ids: torch.Tensor) -> None:
        if input_ids.ndim != 2 or input_ids.is_floating_point():
            raise ValueError(
                f"input_ids must be integers of shape (batch, tokens), got {input_ids.dtype} {tuple(input_ids.shape)}."
            )
        # elsewhere the check would wait for the device, which has an assertion of its own
        if input_ids.device.type == "cpu" and input_ids.numel() and not torch.compiler.is_compiling():
            low, high, size = int(input_ids.min()), int(input_ids.max()), self.embed_tokens.num_embeddings
            if low < 0 or high >= size:
                raise IndexError(f"input_ids must lie between 0 and {size - 1}, got values from {low} to {high}.")

    def _check_cache(self, cache: Cache | None, batch_size: int) -> None:
        if cache is None:
            return
        if isinstance(cache, Cache) and cache.layer_class_to_replicate is not None and not cache.layers:
            # DynamicCache() without a config, still empty: give it the right layers
            cache.layers = [CausalStatisticsLayer() for _ in self.layers]
            cache.layer_class_to_replicate = None
        check_cache(cache)
        if len(cache.layers) != len(self.layers):
            raise ValueError(
                f"The cache is another model's: it has {len(cache.layers)} layers, this model {len(self.layers)}."
            )
        layer = cache.layers[0]
        if not layer.is_initialized:
            return
        batch, *heads = layer.sum_sq.shape
        expected = [self.config.num_attention_heads, self.config.head_dim]
        if heads != expected:
            raise ValueError(f"The cache is another model's: its heads have shape {heads}, this model's {expected}.")
        if batch != batch_size:
            raise ValueError(f"The cache holds {batch} sequences, the batch {batch_size}; they must be the same.")

    def _find_sequences(self, stated_idx, position_ids, mask, past_key_values, shape) -> torch.Tensor | None:
        """Sequence numbers (B, T) where rows are packed, by statement or by positions that restart; else None."""
        B, T = shape
        found_idx = None
        if position_ids is not None:
            if position_ids.ndim != 2 or position_ids.shape[0] not in (1, B) or position_ids.shape[1] != T:
                raise ValueError(f"position_ids must have shape ({B}, {T}), got {tuple(position_ids.shape)}.")
            found_idx = _packed_sequences(position_ids.expand(B, T), mask, past_key_values is not None)
            if stated_idx is not None and not torch.compiler.is_compiling():
                restarts = _borders(torch.zeros_like(stated_idx) if found_idx is None else found_idx, mask)
                if not torch.equal(_borders(stated_idx, mask), restarts):
                    raise ValueError(
                        "position_ids do not restart at 0 exactly where seq_idx / cu_seq_lens_q begin a new sequence; give "
                        "position_ids that do, or leave them out."
                    )
        seq_idx = found_idx if stated_idx is None else stated_idx
        if seq_idx is not None and past_key_values is not None:
            raise ValueError(
                "Packed rows (position_ids that restart, seq_idx or cu_seq_lens_q) cannot be combined with a cache: a row "
                "would have several states; run them without past_key_values, or one sequence a row."
            )
        return seq_idx

    def _check_positions(self, position_ids, mask, past_length) -> None:
        limit = self.config.max_position_embeddings
        if limit is None or torch.compiler.is_compiling():
            return
        # a position is at most the number of tokens before it: elsewhere than on the CPU only look when that is too many
        if position_ids.device.type != "cpu" and past_length + position_ids.shape[1] <= limit:
            return
        if mask is not None:
            position_ids = position_ids.masked_fill(~mask, 0)
        low, high = int(position_ids.min()), int(position_ids.max())
        if low < 0:
            raise IndexError(f"position_ids must not be negative, got {low}.")
        if high >= limit:
            raise IndexError(
                f"Position {high} is past the end of this model's learned position tables, which hold {limit} "
                f"(max_position_embeddings): shorten the text, extend the tables with resize_position_embeddings and "
                f"fine-tune, or use a position-free model (max_position_embeddings=None)."
            )


def _check_mask(mask: torch.Tensor | None, B: int, T: int, past_length) -> torch.Tensor | None:
    """The padding mask as booleans, (B, T) or (B, past_length + T); None where it is known to mask nothing."""
    if mask is None:
        return None
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask must have shape (batch, tokens), got {tuple(mask.shape)}: TSSA has no token-by-token mask."
        )
    known = isinstance(past_length, int)
    if mask.shape[0] != B or mask.shape[1] < T or (known and mask.shape[1] not in (T, past_length + T)):
        wanted = f"({B}, {T})" if known and not past_length else f"({B}, cached tokens + {T})"
        raise ValueError(f"attention_mask must have shape {wanted}, got {tuple(mask.shape)}.")
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("attention_mask must hold 1 at real tokens and 0 at padding, and nothing else.")
        if mask.shape[1] == past_length + T and mask.all():
            return None
    return mask.bool()


def _stated_sequences(seq_idx, cu_seq_lens_q, B: int, T: int, device) -> torch.Tensor | None:
    """Sequence numbers (B, T) from `seq_idx` or `cu_seq_lens_q`."""
    if seq_idx is not None and seq_idx.shape not in ((1, T), (B, T)):
        raise ValueError(f"seq_idx must have shape ({B}, {T}), got {tuple(seq_idx.shape)}.")
    if seq_idx is not None:
        seq_idx = seq_idx.to(device).expand(B, T)
    if cu_seq_lens_q is None:
        return seq_idx
    if B != 1:
        raise ValueError(f"cu_seq_lens_q describes one packed row, but the batch has {B}; use seq_idx for several rows.")
    t = torch.arange(T, device=device)
    borders = cu_seq_lens_q.to(device)
    from_borders = torch.searchsorted(borders.long().contiguous(), t, right=True).unsqueeze(0)
    if not torch.compiler.is_compiling():
        valid = borders.ndim == 1 and borders.numel() > 1 and borders[0] == 0 and borders[-1] == T
        if not valid or (borders.diff() < 0).any():
            raise ValueError(f"cu_seq_lens_q must rise from 0 to the number of tokens ({T}), got {borders.tolist()}.")
        if seq_idx is not None and not torch.equal(_borders(seq_idx, None), _borders(from_borders, None)):
            raise ValueError("seq_idx and cu_seq_lens_q begin their sequences at different tokens; give one of them.")
    return from_borders


def _previous_real(mask: torch.Tensor) -> torch.Tensor:
    """Index (B, T) of the last real token before each token; -1 where there is none."""
    t = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    return F.pad(t.masked_fill(~mask, -1).cummax(1).values[:, :-1], (1, 0), value=-1)


def _borders(seq_idx: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Whether each real token begins another sequence than the real token before it, (B, T)."""
    mask = torch.ones_like(seq_idx, dtype=torch.bool) if mask is None else mask
    previous = _previous_real(mask)
    return mask & (previous >= 0) & (seq_idx != seq_idx.gather(1, previous.clamp_min(0)))


def _packed_sequences(position_ids: torch.Tensor, mask: torch.Tensor | None, cached: bool) -> torch.Tensor | None:
    """Sequence numbers (B, T) where the positions of real tokens restart at 0, or None where no row does.

    A compiler cannot look: then the numbers are returned whatever they are, except with a cache, which rules packing out.
    """
    compiling = torch.compiler.is_compiling()
    if position_ids.shape[1] == 1 or (compiling and cached):
        return None
    padded = mask is not None
    mask = mask if padded else torch.ones_like(position_ids, dtype=torch.bool)
    previous = _previous_real(mask)
    follows = mask & (previous >= 0)
    restarts = follows & (position_ids == 0)
    if compiling:
        return restarts.cumsum(1)
    # with padding, generate's own positions may repeat: it counts on from a padding token's 0
    if not padded and (follows & ~restarts & (position_ids <= position_ids.gather(1, previous.clamp_min(0)))).any():
        raise ValueError(
            "position_ids fall or repeat within a row without restarting at 0: they describe neither one sequence nor packed "
            "ones."
        )
    return restarts.cumsum(1) if restarts.any() else None


def _count_positions(full_mask, seq_idx, past_length, T: int, device) -> torch.Tensor:
    """Positions (B or 1, T) that count real tokens, from 0 in each packed sequence."""
    if full_mask is None and seq_idx is None:
        return (torch.arange(T, device=device) + past_length).unsqueeze(0)
    continues = not (isinstance(past_length, int) and past_length == 0)
    if continues and full_mask.shape[1] == T:
        raise ValueError(
            "With a cache, give position_ids, or an attention_mask that covers the cached tokens as well as the new ones: "
            "positions count real tokens, and those in the cache are unknown from this mask."
        )
    real = torch.ones_like(seq_idx, dtype=torch.bool) if full_mask is None else full_mask
    count = real.long().cumsum(1)
    if seq_idx is not None:
        begins = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)
        count = count - (count - real.long()).masked_fill(~begins, 0).cummax(1).values
    return (count - 1).clamp_min(0)[:, -T:]


class ToSTForCausalLM(ToSTPreTrainedModel, GenerationMixin):
    """ToST with a language-model head, tied to the token embedding by default.

    With the attribute `fuse_linear_cross_entropy` set (see `ToSTTrainingArguments`), training with labels gives the loss and
    no logits.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: ToSTConfig):
        super().__init__(config)
        self.model = ToSTModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.fuse_linear_cross_entropy = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ToSTCausalLMOutputWithPast:
        """Next-token logits, and the loss where labels are given. Arguments not named here are `ToSTModel.forward`'s.

        Args:
            labels: (B, T) token ids, -100 where there is no target; shifted inside.
            logits_to_keep: how many of the last tokens get logits (0 for all), or the indices of those that do.
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
        logits = loss = None
        if labels is not None and self.training and self.fuse_linear_cross_entropy:
            loss = self._fused_loss(outputs.last_hidden_state, labels, kwargs.get("num_items_in_batch"))
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(outputs.last_hidden_state[:, kept])
        if labels is not None and logits is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return ToSTCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            memberships=outputs.memberships,
        )

    def _fused_loss(
        self, hidden_states: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        """transformers' ForCausalLM loss, in chunks of tokens: the logits (B, T, vocabulary) are never there as a whole."""
        loss = F.linear_cross_entropy(
            hidden_states[:, :-1].flatten(0, 1),
            self.lm_head.weight,
            labels[:, 1:].flatten().to(hidden_states.device),
            reduction="mean" if num_items_in_batch is None else "sum",
            options=nn.LinearCrossEntropyOptions(),
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    @staticmethod
    def create_masks_for_generate(
        config: ToSTConfig, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs
    ) -> torch.Tensor | None:
        """The padding mask (B, T) of the tokens at hand.

        `generate` calls this for compiled decoding, where a mask that grew with the text would compile every step anew.
        """
        return None if attention_mask is None else attention_mask[:, -inputs_embeds.shape[1] :]


class ToSTForSequenceClassification(ToSTPreTrainedModel):
    """ToST with a linear head on the last real token of each sequence."""

    def __init__(self, config: ToSTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ToSTModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
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

        The last real token is the last one of the attention mask; without a mask, the last one that is not
        `config.pad_token_id`; without both, the last one.
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
        B, T, _ = logits.shape
        real = None
        if attention_mask is not None:
            real = attention_mask[:, -T:] != 0
        elif input_ids is not None and self.config.pad_token_id is not None:
            real = input_ids != self.config.pad_token_id
        last = T - 1
        if real is not None:
            last = (torch.arange(T, device=logits.device) * real.to(logits.device)).argmax(-1)
        pooled_logits = logits[torch.arange(B, device=logits.device), last]
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


__all__ = ["ToSTForCausalLM", "ToSTForSequenceClassification", "ToSTModel", "ToSTPreTrainedModel"]
