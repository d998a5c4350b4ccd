# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""ToST text models: the base model (causal or bidirectional), the language model and the other heads."""

import copy
import functools
import math
from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb, eager_attention_forward
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .base_tost import ToSTBaseModel, add_class_names
from .configuration_tost import SLIDING_ATTENTION, TSSA, ToSTConfig
from .inputs_tost import CACHE_NAME, accept_cache, check_prompt, create_causal_mask_mapping, rename_cache, resolve_inputs
from .layers_tost import (
    MLP,
    MembershipsMixin,
    ShortConvolution,
    TokenStatisticsSelfAttention,
    initial_decay_bias,
    make_dropout,
)
from .tssa_reference import is_traced


logger = logging.get_logger(__name__)

PREFILL_CHUNK_SIZE = 1024  # tokens per forward pass over a prompt in `generate`
PROGRESS_DELAY = 5  # seconds before a prefill shows a progress bar


@dataclass
class ToSTModelOutputWithPast(MembershipsMixin, BaseModelOutputWithPast):
    """Output of `ToSTModel`: features (B, T, D), and the cache.

    With `output_attentions=True` and attn_implementation="eager", `attentions` contains the weights of every softmax attention
    layer of a hybrid model, each (B, H, T, cached + T).
    """


@dataclass
class ToSTCausalLMOutputWithPast(MembershipsMixin, CausalLMOutputWithPast):
    """Output of `ToSTForCausalLM`: logits (B, T, vocab_size), the loss, and the cache."""


@dataclass
class ToSTMaskedLMOutput(MembershipsMixin, MaskedLMOutput):
    """Output of `ToSTForMaskedLM`: logits (B, T, vocab_size), and the loss."""


@dataclass
class ToSTSequenceClassifierOutputWithPast(MembershipsMixin, SequenceClassifierOutputWithPast):
    """Output of `ToSTForSequenceClassification`: logits (B, num_labels), the loss, and the cache."""


@dataclass
class ToSTTokenClassifierOutput(MembershipsMixin, TokenClassifierOutput):
    """Output of `ToSTForTokenClassification`: logits (B, T, num_labels), and the loss."""


@dataclass
class ToSTQuestionAnsweringModelOutput(MembershipsMixin, QuestionAnsweringModelOutput):
    """Output of `ToSTForQuestionAnswering`: start and end logits, each (B, T), and the loss."""


# Softmax attention of hybrid models --------------------------------------------------------------------------------------


class ToSTRotaryEmbedding(LlamaRotaryEmbedding):
    """transformers' rotary position embeddings, whose frequencies stay in float32."""

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:  # cast by model.to(dtype) or model.half(), which would round it
            with self.inv_freq.device:
                self.inv_freq.data = type(self)(self.config).inv_freq
            self.original_inv_freq.data = self.inv_freq.clone()
        return self


class ToSTAttention(nn.Module):
    """Causal softmax attention of one layer, with grouped keys and values.

    Args:
        config: a `ToSTConfig` whose `layer_types` has an attention layer at `layer_idx`.
        layer_idx: index of the layer in the model and in a cache.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.layer_type = config.layer_types[layer_idx]
        self.head_dim = config.head_dim
        num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = config.num_attention_heads // num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.sliding_window = config.sliding_window if self.layer_type == SLIDING_ATTENTION else None
        hidden_size, bias = config.hidden_size, config.use_bias
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_key_value_heads * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.out_dropout = make_dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        causal_mask_mapping: dict,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes the layer.

        Args:
            hidden_states: (B, T, D).
            attention_mask: (B, T), true at real tokens; without the cached tokens.
            causal_mask_mapping: masks by layer type, from `create_causal_mask_mapping`.
            position_embeddings: from `ToSTRotaryEmbedding`; None in models with learned positions.
            past_key_values: a cache with an attention layer at `layer_idx`; updated in place.
            kwargs: `position_ids` (B, T), from which flash attention infers packed sequences.

        Returns:
            The output (B, T, D), and the attention weights if the attention implementation returns them.
        """
        B, T, _ = hidden_states.shape
        if attention_mask is not None:  # masked scores do not suffice: padding may contain NaN, and 0 * NaN is NaN
            hidden_states = hidden_states.masked_fill(~attention_mask.bool().unsqueeze(-1), 0)
        query, key, value = (
            projection(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if position_embeddings is not None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attn_output, attn_weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask=causal_mask_mapping[self.layer_type],
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.out_dropout(self.out_proj(attn_output.reshape(B, T, -1))), attn_weights


# Blocks ----------------------------------------------------------------------------------------------------------------


def _make_tssa(config: ToSTConfig, layer_idx: int) -> TokenStatisticsSelfAttention:
    has_denom_bias = config.is_causal and config.position_embedding_type == "learned"
    return TokenStatisticsSelfAttention(
        config.hidden_size,
        config.num_attention_heads,
        causal=config.is_causal,
        layer_idx=layer_idx,
        max_position_embeddings=config.max_position_embeddings if has_denom_bias else None,
        in_bias=config.use_bias,
        out_bias=config.use_bias,
        attention_dropout=config.attention_dropout,
        hidden_dropout=config.hidden_dropout,
        decay_type=config.decay_type,
        conv_kernel=config.conv_kernel,
    )


class ToSTDecoderLayer(GradientCheckpointingLayer):
    """x + scale * TSSA(norm(x)), then x + scale * MLP(norm(x)); both scales are vectors (LayerScale).

    In hybrid models some layers have softmax attention instead of TSSA.
    """

    def __init__(self, config: ToSTConfig, layer_idx: int):
        super().__init__()
        hidden_size, bias = config.hidden_size, config.use_bias
        self.input_layernorm = nn.LayerNorm(hidden_size, eps=config.layer_norm_eps, bias=bias)
        self.is_softmax_attention = cast(list, config.layer_types)[layer_idx] != TSSA
        self.self_attn = ToSTAttention(config, layer_idx) if self.is_softmax_attention else _make_tssa(config, layer_idx)
        self.attention_layer_scale = nn.Parameter(torch.full((hidden_size,), float(config.layer_scale_init_value)))
        self.post_attention_layernorm = nn.LayerNorm(hidden_size, eps=config.layer_norm_eps, bias=bias)
        self.mlp = MLP(config, bias=bias)
        self.mlp_layer_scale = nn.Parameter(torch.full((hidden_size,), float(config.layer_scale_init_value)))
        residual_projections: tuple[Any, ...] = self.self_attn.out_proj, self.mlp.down_proj
        for projection in residual_projections:  # initialized with a smaller standard deviation
            projection._writes_to_residual = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        causal_mask_mapping: dict | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if self.is_softmax_attention:
            options: dict[str, Any] = {
                "causal_mask_mapping": causal_mask_mapping,
                "position_embeddings": position_embeddings,
            }
        else:
            options = {"seq_idx": seq_idx}
        attn_output, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **options,
        )
        hidden_states = torch.addcmul(hidden_states, self.attention_layer_scale, attn_output)
        mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))
        return torch.addcmul(hidden_states, self.mlp_layer_scale, mlp_output)


class ToSTPreTrainedModel(ToSTBaseModel):
    """Base class of all ToST text models, and of no vision model: weight initialization, loading and saving.

    Example:

    ```python
    >>> model = ToSTModel(ToSTConfig(hidden_size=32, num_attention_heads=4))
    >>> isinstance(model, ToSTPreTrainedModel)
    True
    >>> model.resize_position_embeddings(2048)
    ```
    """

    config: ToSTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ToSTDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _can_compile_fullgraph = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": ToSTDecoderLayer,
        "attentions": OutputRecorder(ToSTAttention, index=1),  # of hybrid models, with attn_implementation="eager"
        "memberships": OutputRecorder(TokenStatisticsSelfAttention, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, TokenStatisticsSelfAttention):
            init.ones_(module.temp)
            if module.denom_bias is not None:
                init.zeros_(module.denom_bias)
            if module.forget_bias is not None:
                init.copy_(module.forget_bias, initial_decay_bias(module.num_heads))
            if module.forget_proj is not None:
                init.zeros_(module.forget_proj.weight)
        elif isinstance(module, ShortConvolution):
            init.zeros_(module.weight)
        elif isinstance(module, ToSTDecoderLayer):
            init.constant_(module.attention_layer_scale, self.config.layer_scale_init_value)
            init.constant_(module.mlp_layer_scale, self.config.layer_scale_init_value)
        elif getattr(module, "_writes_to_residual", False):
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            init.normal_(module.weight, mean=0.0, std=std)

    # transformers does not declare None, and raises for models without a table
    def get_position_embeddings(self) -> nn.Embedding | None:  # type: ignore[override]
        """The learned position table, or None in a model without one."""
        return cast("ToSTModel", self.base_model).embed_positions

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Resizes the learned tables `embed_positions` and `denom_bias` (one per layer).

        A smaller size truncates each table. A larger size *stretches* it by linear interpolation: the first and the last
        position do not change, and the new position t is interpolated at the old position t * (old - 1) / (new - 1). Every
        position but the first changes its meaning, so fine-tune afterwards.

        Raises:
            ValueError: the size is not a positive integer, or the model has no positions.
        """
        if self.config.position_embedding_type == "none":
            raise ValueError("This model has no position tables to resize, and no limit.")
        if not isinstance(new_num_position_embeddings, int) or new_num_position_embeddings < 1:
            raise ValueError(f"The number of positions must be a positive integer, got {new_num_position_embeddings!r}.")
        base_model = cast("ToSTModel", self.base_model)
        table = cast(nn.Embedding, base_model.embed_positions)
        table.weight = _resize_positions(cast(nn.Parameter, table.weight), 0, new_num_position_embeddings)
        table.num_embeddings = new_num_position_embeddings
        for layer in base_model.modules():
            if isinstance(layer, TokenStatisticsSelfAttention) and layer.denom_bias is not None:
                layer.denom_bias = _resize_positions(layer.denom_bias, 1, new_num_position_embeddings)
        self.config.max_position_embeddings = base_model.config.max_position_embeddings = new_num_position_embeddings


def _resize_positions(table: nn.Parameter, dim: int, size: int) -> nn.Parameter:
    """Truncates the table along `dim`, or stretches it by linear interpolation between fixed ends."""
    if size <= table.shape[dim]:
        data = table.data.narrow(dim, 0, size).clone()
    else:
        values = table.data.movedim(dim, -1)
        interpolated = F.interpolate(
            values.reshape(1, -1, values.shape[-1]).float(), size=size, mode="linear", align_corners=True
        )
        data = interpolated.view(*values.shape[:-1], size).movedim(-1, dim).to(table.dtype).contiguous()
    return nn.Parameter(data, requires_grad=table.requires_grad)


class ToSTModel(ToSTPreTrainedModel):
    """The ToST model without a head: embeddings, TSSA blocks, a final LayerNorm.

    Example:

    ```python
    >>> model = ToSTModel(ToSTConfig(hidden_size=32, num_attention_heads=4))
    >>> model(torch.tensor([[5, 6, 7]])).last_hidden_state.shape
    torch.Size([1, 3, 32])
    ```
    """

    def __init__(self, config: ToSTConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = None
        if config.position_embedding_type == "learned":
            self.embed_positions = nn.Embedding(cast(int, config.max_position_embeddings), config.hidden_size)
        self.rotary_emb = ToSTRotaryEmbedding(cast(Any, config)) if config.uses_rope else None
        self.embedding_dropout = make_dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(ToSTDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.use_bias)
        self.gradient_checkpointing = False
        self.post_init()

    @accept_cache
    @merge_with_config_defaults
    @capture_outputs
    def forward(  # type: ignore[misc]  # TransformersKwargs names some of these, too
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
        """Runs the base model.

        Args:
            input_ids: (B, T) token ids; required without `inputs_embeds`.
            attention_mask: (B, T), or (B, cached + T) with a cache: 1 at real tokens, 0 at padding, on either side.
            position_ids: (B, T) or (1, T). By default they count the real tokens. Where they restart at 0, another packed
                sequence begins (`DataCollatorWithFlattening`).
            past_key_values: recurrent states, keys and values of the preceding tokens; updated in place.
            inputs_embeds: (B, T, D) embedded tokens instead of `input_ids`.
            use_cache: whether to create and return a cache without `past_key_values`, which is returned in any case. Packed
                sequences and encoders have none. In compiled programs the values of `position_ids` are not read: sequences
                packed by these alone return the state of the last one.
            seq_idx: (B, T) sequence number of each token of packed sequences. If given, it decides where they begin, not the
                position_ids.
            cu_seq_lens_q: (sequences + 1,) cumulative lengths of the sequences packed into a batch of size 1, without
                `seq_idx`. It decides as that does.

        Raises:
            TypeError: a cache is passed by an unknown name.
            ValueError: inputs contradict each other in shape or meaning.
            IndexError: a token id is outside the vocabulary (checked on the CPU), or a sequence is longer than the learned
                tables.
        """
        self._check_tokens(input_ids, inputs_embeds)
        if not self.config.is_causal and (past_key_values is not None or use_cache):
            raise ValueError(
                "An encoder (is_causal=False) processes the whole sequence at once, so it has no cache: omit past_key_values "
                "and use_cache."
            )
        self._check_output_attentions(kwargs.get("output_attentions"), self.config.has_attention)
        if past_key_values is not None and self.gradient_checkpointing and self.training:
            raise ValueError(
                "A cache and gradient checkpointing cannot be used together: transformers would ignore the cache. Call "
                "gradient_checkpointing_disable(), or train without past_key_values."
            )
        if not self.config.is_causal and input_ids is not None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        inputs = resolve_inputs(
            self.config,
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            seq_idx=seq_idx,
            cu_seq_lens_q=cu_seq_lens_q,
            use_cache=bool(use_cache),
        )
        if self.embed_positions is not None:
            hidden_states = hidden_states + self.embed_positions(inputs.position_ids)
        position_embeddings = None
        if self.rotary_emb is not None:
            position_embeddings = self.rotary_emb(hidden_states, inputs.position_ids)
        hidden_states = self.embedding_dropout(hidden_states)
        for layer in self.layers[: self.config.num_hidden_layers]:  # `assistant_early_exit` lowers it temporarily
            hidden_states = layer(hidden_states, position_embeddings=position_embeddings, **inputs._asdict())
        outputs: dict[str, Any] = {"last_hidden_state": self.norm(hidden_states), CACHE_NAME: inputs.past_key_values}
        return ToSTModelOutputWithPast(**outputs)

    def _check_tokens(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> None:
        """Raises an error for tokens of a wrong shape, dtype or value."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        if input_ids is None:
            inputs_embeds = cast(torch.Tensor, inputs_embeds)
            if inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != self.config.hidden_size:
                expected, actual = f"(batch, tokens, {self.config.hidden_size})", tuple(inputs_embeds.shape)
                raise ValueError(f"inputs_embeds must have shape {expected}, got {actual}.")
            return
        if input_ids.ndim != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"input_ids must be integers of shape (batch, tokens), int64 or int32, got {input_ids.dtype} "
                f"{tuple(input_ids.shape)}."
            )
        # on other devices the check would synchronize, and their embedding kernels have an assertion
        if input_ids.device.type == "cpu" and input_ids.numel() and not is_traced():
            low, high, size = int(input_ids.min()), int(input_ids.max()), self.config.vocab_size
            if low < 0 or high >= size:
                raise IndexError(f"input_ids must lie between 0 and {size - 1}, got values from {low} to {high}.")


class ToSTForCausalLM(ToSTPreTrainedModel, GenerationMixin):
    """ToST with a language-model head, tied to the token embedding by default.

    With the attribute `fuse_linear_cross_entropy` set (see `ToSTTrainingArguments`), training with labels returns the loss and
    no logits, unless `lm_head` is wrapped (by an adapter, quantization or hooks): then the logits are computed as usual.

    Raises:
        ValueError: the configuration is an encoder's (`is_causal=False`).

    Example:

    ```python
    >>> model = ToSTForCausalLM(ToSTConfig(hidden_size=32, num_attention_heads=4))
    >>> model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False).shape
    torch.Size([1, 7])
    ```
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: ToSTConfig):
        if not getattr(config, "is_causal", True):
            raise ValueError(
                "This is the configuration of an encoder (is_causal=False), which cannot generate text: load it with "
                "AutoModelForMaskedLM or AutoModel, or set is_causal=True and train a causal model."
            )
        super().__init__(config)
        self.model = ToSTModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.fuse_linear_cross_entropy = False
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
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ToSTCausalLMOutputWithPast:
        """Next-token logits, and the loss if labels are given. The other arguments are those of `ToSTModel.forward`.

        Args:
            labels: (B, T) token ids, -100 where there is no target; shifted by the loss.
            logits_to_keep: number of last tokens to compute logits for (0 for all), or indices of tokens.
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
        if labels is not None and self.training and self.fuse_linear_cross_entropy and self._can_fuse_loss():
            options = {name: kwargs[name] for name in ("num_items_in_batch", "ignore_index", "shift_labels") if name in kwargs}
            loss = self._fused_loss(outputs.last_hidden_state, labels, **options)
        else:
            slice_indices = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(outputs.last_hidden_state[:, slice_indices])
        if labels is not None and logits is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return ToSTCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            memberships=outputs.memberships,
        )

    def _can_fuse_loss(self) -> bool:
        """Whether `lm_head` is a plain Linear layer without hooks, as the fused loss requires; warns once if not."""
        head = self.lm_head
        is_wrapped = type(head) is not nn.Linear or type(head.weight) not in (nn.Parameter, torch.Tensor)
        has_hooks = bool(head._forward_hooks or head._forward_pre_hooks) or "forward" in head.__dict__  # set by Accelerate
        if (is_wrapped or has_hooks) and not torch.compiler.is_compiling():
            logger.warning_once(
                f"fuse_linear_cross_entropy is ignored: lm_head is a {type(head).__name__} or has hooks, but the fused loss "
                "needs a plain Linear layer, whose weight alone determines the logits."
            )
        return not (is_wrapped or has_hooks)

    def _fused_loss(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """transformers' ForCausalLM loss in chunks of tokens: the full logits (B, T, vocab_size) are never materialized."""
        if shift_labels is None:
            hidden_states, shift_labels = hidden_states[:, :-1], labels[:, 1:]
        loss = F.linear_cross_entropy(
            hidden_states.flatten(0, 1),
            self.lm_head.weight,
            shift_labels.flatten().to(hidden_states.device),
            linear_bias=self.lm_head.bias,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            options=nn.LinearCrossEntropyOptions(),
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def generate(self, inputs: torch.Tensor | None = None, generation_config: GenerationConfig | None = None, *args, **kwargs):
        """As `GenerationMixin.generate`; in training with gradient checkpointing without a cache, which that would ignore.

        Raises:
            ValueError: `past_key_values` already covers the whole prompt, so there is no new token to process.
        """
        rename_cache(kwargs)
        if self.training and self.model.gradient_checkpointing and kwargs.get(CACHE_NAME) is None:
            logger.warning_once("generate runs without a cache, as gradient checkpointing is on; call eval() for faster text.")
            kwargs["use_cache"] = False
        check_prompt(inputs, kwargs)
        return super().generate(inputs, generation_config, *args, **kwargs)

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # `generate` reads the names of the arguments
    def prepare_inputs_for_generation(self, input_ids, *args, **kwargs):
        # without this check, a version of transformers that passes the cache in a way that this code does not know would
        # generate each token without a state
        model_inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        tokens, cache = model_inputs.get("input_ids"), model_inputs.get(CACHE_NAME)
        is_continued = tokens is not None and tokens.shape[1] < input_ids.shape[1]
        if is_continued and not (isinstance(cache, Cache) and any(getattr(x, "is_initialized", True) for x in cache.layers)):
            raise RuntimeError(
                f"generate continues from a cache that {type(self).__name__} has not filled: transformers "
                f"{transformers.__version__} is newer than this model's code. Update tost_hf (or the model's repository), or "
                "pass use_cache=False."
            )
        return model_inputs

    def _prefill(self, input_ids: torch.LongTensor, generation_config: GenerationConfig, model_kwargs: dict, *args, **kwargs):
        """transformers' prefill, chunked and with a progress bar for prompts of more than 1,024 tokens.

        The memory of the activations then does not grow with the prompt. `prefill_chunk_size` sets another chunk size.
        """
        cache, config = model_kwargs.get(CACHE_NAME), generation_config
        num_cached = int(cache.get_seq_length()) if isinstance(cache, Cache) and not cache.is_compileable else None
        if (
            num_cached is None
            or input_ids.shape[1] - num_cached <= PREFILL_CHUNK_SIZE
            or model_kwargs.get("inputs_embeds") is not None
        ):
            return super()._prefill(input_ids, config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        if config.prefill_chunk_size is None and not (config.output_hidden_states or config.output_attentions):
            config = copy.copy(config)
            config.prefill_chunk_size = PREFILL_CHUNK_SIZE
        num_tokens = input_ids.shape[1] - num_cached
        with logging.tqdm(total=num_tokens, unit="token", desc="Prefill", delay=PROGRESS_DELAY) as progress_bar:

            def update_progress(module, inputs, output) -> None:  # a return value would replace the output
                progress_bar.update(output.shape[1])

            handle = self.model.embed_tokens.register_forward_hook(update_progress)
            try:
                return super()._prefill(input_ids, config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
            finally:
                handle.remove()

    def init_continuous_batching(self, *args, **kwargs):
        """Not supported: `generate_batch` and `continuous_batching_context_manager`, which call this, page keys and values.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "ToST models do not support generate_batch (continuous batching): call generate with a padded batch (padding does "
            "not change the results), or serve many requests with vLLM (`vllm serve MODEL`, with tost-hf installed)."
        )

    @staticmethod
    def create_masks_for_generate(
        config: ToSTConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor | dict | None:
        """The padding mask (B, T) of the new tokens; for hybrid models a dict with the masks of all layer types.

        `generate` calls this for compiled decoding, where a mask that grows with the sequence would recompile every step. It
        passes the cache by its name in this version of transformers.
        """
        past_key_values = cache if past_key_values is None else past_key_values
        new_mask = None if attention_mask is None else attention_mask[:, -inputs_embeds.shape[1] :]
        if not config.has_attention:
            return new_mask
        past_length = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        mask = None if attention_mask is None else attention_mask.bool()
        masks = create_causal_mask_mapping(config, inputs_embeds, mask, None, past_key_values, past_length)
        return {TSSA: new_mask, **masks}


# Other heads ----------------------------------------------------------------------------------------------------------


class ToSTForSequenceClassification(ToSTPreTrainedModel):
    """ToST with a linear head on the features of each sequence, pooled according to `config.pooling`.

    Example:

    ```python
    >>> config = ToSTConfig(hidden_size=32, num_attention_heads=4, num_labels=3)
    >>> model = ToSTForSequenceClassification(config)
    >>> tokens, labels = torch.tensor([[5, 6, 7]]), torch.tensor([2])
    >>> model(tokens, labels=labels).loss.backward()
    ```
    """

    accepts_loss_kwargs = False  # read by Trainer: the loss is the mean over a micro-batch

    def __init__(self, config: ToSTConfig):
        super().__init__(config)
        self.num_labels = cast(int, config.num_labels)
        self.model = ToSTModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
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
        """Logits (B, num_labels), and the loss of `config.problem_type` if labels are given.

        The attention mask determines which tokens are pooled. Without it a causal model pools all tokens that are not
        `config.pad_token_id`, an encoder all tokens: it needs the mask, since its statistics would include padding as well.
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
        mask = None
        if attention_mask is not None:
            mask = attention_mask[:, -logits.shape[1] :] != 0
        elif self.config.is_causal and input_ids is not None and self.config.pad_token_id is not None:
            mask = input_ids != self.config.pad_token_id
        pooled_logits = _pool(logits, mask, cast(str, self.config.pooling))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=pooled_logits, config=self.config, logits=logits)
        return ToSTSequenceClassifierOutputWithPast(
            loss=loss,
            logits=pooled_logits,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            memberships=outputs.memberships,
        )


def _pool(x: torch.Tensor, mask: torch.Tensor | None, pooling: str) -> torch.Tensor:
    """Pools x (B, T, C) to (B, C): the first, last or mean of its real tokens, where `mask` (B, T) is true (None: all)."""
    B, T, _ = x.shape
    mask = x.new_ones(B, T, dtype=torch.bool) if mask is None else mask.to(x.device)
    if pooling == "mean":
        num_tokens = mask.sum(1, keepdim=True).clamp_min(1)
        return x.masked_fill(~mask.unsqueeze(-1), 0).sum(1) / num_tokens
    position = torch.arange(T, device=x.device)
    index = (position * mask).argmax(-1) if pooling == "last" else mask.long().argmax(-1)
    return x[torch.arange(B, device=x.device), index]


class ToSTForMaskedLM(ToSTPreTrainedModel):
    """A ToST encoder with a language-model head, tied to the token embedding by default, that fills in masked tokens.

    Raises:
        ValueError: the configuration is a causal model's (`is_causal=True`).

    Example:

    ```python
    >>> config = ToSTConfig(hidden_size=32, num_attention_heads=4, is_causal=False)
    >>> model = ToSTForMaskedLM(config)
    >>> tokens, labels = torch.tensor([[5, 99, 7]]), torch.tensor([[-100, 6, -100]])
    >>> model(tokens, labels=labels).loss.backward()
    ```
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: ToSTConfig):
        if getattr(config, "is_causal", False):
            raise ValueError(
                "A masked language model is an encoder, and this is the configuration of a causal model: set is_causal=False, "
                "or load it with AutoModelForCausalLM."
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
        """Logits (B, T, vocab_size), and the loss if labels are given. The other arguments are those of `ToSTModel.forward`.

        Args:
            labels: (B, T), the original ids of masked tokens; -100 where there is no target.
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


class ToSTForTokenClassification(ToSTPreTrainedModel):
    """ToST with a linear head on each token.

    Example:

    ```python
    >>> config = ToSTConfig(hidden_size=32, num_attention_heads=4, num_labels=3)
    >>> model = ToSTForTokenClassification(config)
    >>> model(torch.tensor([[5, 6, 7]])).logits.shape
    torch.Size([1, 3, 3])
    ```
    """

    def __init__(self, config: ToSTConfig):
        super().__init__(config)
        self.num_labels = cast(int, config.num_labels)
        self.model = ToSTModel(config)
        self.dropout = make_dropout(config.hidden_dropout)
        self.score = nn.Linear(config.hidden_size, self.num_labels)
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
    ) -> ToSTTokenClassifierOutput:
        """Logits (B, T, num_labels), and the loss if labels are given. The other arguments are those of `ToSTModel.forward`.

        Args:
            labels: (B, T), the class of each token; -100 where there is none. The loss is the mean over the others or, with
                `num_items_in_batch`, their sum divided by it.
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
        logits = self.score(self.dropout(outputs.last_hidden_state))
        loss = None if labels is None else self.loss_function(logits, labels, self.config, **kwargs)
        return ToSTTokenClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            memberships=outputs.memberships,
        )


class ToSTForQuestionAnswering(ToSTPreTrainedModel):
    """ToST with a linear head for an answer's first and last token.

    Example:

    ```python
    >>> model = ToSTForQuestionAnswering(ToSTConfig(hidden_size=32, num_attention_heads=4))
    >>> model(torch.tensor([[5, 6, 7]])).end_logits.shape
    torch.Size([1, 3])
    ```
    """

    accepts_loss_kwargs = False  # read by Trainer: the loss is the mean over a micro-batch

    def __init__(self, config: ToSTConfig):
        super().__init__(config)
        self.model = ToSTModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(  # type: ignore[misc]  # TransformersKwargs names some of these, too
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ToSTQuestionAnsweringModelOutput:
        """Logits (B, T) of an answer's first and last token, the dtype's minimum at padding, which answers nothing.

        The other arguments are those of `ToSTModel.forward`.

        Args:
            start_positions: (B,), index of the first token of the answer in the batch; ignored if not below T.
            end_positions: (B,), the same for the last token. With both, the mean of the two losses is returned.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.qa_outputs(outputs.last_hidden_state)
        if attention_mask is not None:  # otherwise the loss would depend on the length to which a batch is padded
            is_padding = attention_mask[:, -logits.shape[1] :] == 0
            logits = logits.masked_fill(is_padding.unsqueeze(-1).to(logits.device), torch.finfo(logits.dtype).min)
        start_logits, end_logits = (x.contiguous() for x in logits.unbind(-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return ToSTQuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            memberships=outputs.memberships,
        )


add_class_names("tost")


__all__ = [
    "ToSTForCausalLM",
    "ToSTForMaskedLM",
    "ToSTForQuestionAnswering",
    "ToSTForSequenceClassification",
    "ToSTForTokenClassification",
    "ToSTModel",
    "ToSTPreTrainedModel",
]
