# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""ToST language models in vLLM: the modules of modeling_tost.py, with vLLM's parallel layers."""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsLoRA, SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    extract_layer_index,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from ..model.configuration_tost import SLIDING_ATTENTION, TSSA, ToSTConfig
from ..model.modeling_tost import ToSTRotaryEmbedding
from .tssa import TokenStatisticsSelfAttention, state_size


class SoftmaxAttention(nn.Module):
    """`ToSTAttention` of hybrid models, with keys and values in vLLM's cache."""

    def __init__(self, config: ToSTConfig, vllm_config: VllmConfig, layer_type: str, prefix: str):
        super().__init__()
        width, options = config.hidden_size, {"bias": config.use_bias, "quant_config": vllm_config.quant_config}
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            width,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            prefix=f"{prefix}.qkv_proj",
            **options,
        )
        self.out_proj = RowParallelLinear(width, width, prefix=f"{prefix}.out_proj", **options)
        self.attn = Attention(
            self.qkv_proj.num_heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            per_layer_sliding_window=config.sliding_window if layer_type == SLIDING_ATTENTION else None,
            prefix=f"{prefix}.attn",
        )

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        qkv = self.qkv_proj(hidden_states)[0].unflatten(-1, (-1, self.head_dim))
        query, key, value = qkv.split((heads, kv_heads, kv_heads), 1)
        if position_embeddings is not None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        return self.out_proj(self.attn(*(x.flatten(1) for x in (query, key, value))))[0]


class MLP(nn.Module):
    def __init__(self, config: ToSTConfig, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        options = {"bias": config.use_bias, "quant_config": vllm_config.quant_config}
        width, inner = config.hidden_size, config.intermediate_size
        self.up_proj = ColumnParallelLinear(width, inner, prefix=f"{prefix}.up_proj", **options)
        self.act_fn = ACT2FN[config.hidden_act]
        self.down_proj = RowParallelLinear(inner, width, prefix=f"{prefix}.down_proj", **options)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)[0]))[0]


class ToSTDecoderLayer(nn.Module):
    def __init__(self, config: ToSTConfig, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        assert config.layer_types is not None
        width, layer_type = config.hidden_size, config.layer_types[extract_layer_index(prefix)]
        self.is_softmax_attention = layer_type != TSSA
        self.input_layernorm = nn.LayerNorm(width, config.layer_norm_eps, bias=config.use_bias)
        self.self_attn: nn.Module
        if self.is_softmax_attention:
            self.self_attn = SoftmaxAttention(config, vllm_config, layer_type, f"{prefix}.self_attn")
        else:
            self.self_attn = TokenStatisticsSelfAttention(config, vllm_config, f"{prefix}.self_attn")
        self.attention_layer_scale = nn.Parameter(torch.empty(width))
        self.post_attention_layernorm = nn.LayerNorm(width, config.layer_norm_eps, bias=config.use_bias)
        self.mlp = MLP(config, vllm_config, f"{prefix}.mlp")
        self.mlp_layer_scale = nn.Parameter(torch.empty(width))

    def forward(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        attn_output = self.self_attn(normed, position_embeddings if self.is_softmax_attention else positions)
        hidden_states = torch.addcmul(hidden_states, self.attention_layer_scale, attn_output)
        mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))
        return torch.addcmul(hidden_states, self.mlp_layer_scale, mlp_output)


@support_torch_compile
class ToSTModel(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.embed_tokens: nn.Module = PPMissingLayer()
        self.embed_positions = None
        if get_pp_group().is_first_rank or (get_pp_group().is_last_rank and config.tie_word_embeddings):
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens")
        if config.position_embedding_type == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.rotary_emb = ToSTRotaryEmbedding(config) if config.uses_rope else None
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: ToSTDecoderLayer(config, vllm_config, prefix),
            prefix=f"{prefix}.layers",
        )
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps, bias=config.use_bias)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(["hidden_states"], config.hidden_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        if get_pp_group().is_first_rank:
            if inputs_embeds is None:
                assert input_ids is not None
                inputs_embeds = self.embed_input_ids(input_ids)
            hidden_states = inputs_embeds
            if self.embed_positions is not None:
                hidden_states = hidden_states + self.embed_positions(positions)
        else:
            assert intermediate_tensors is not None
            hidden_states = intermediate_tensors["hidden_states"]
        position_embeddings = None if self.rotary_emb is None else self.rotary_emb(hidden_states, positions)
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden_states = layer(hidden_states, positions, position_embeddings)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states})
        return self.norm(hidden_states)


class ToSTForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsPP, SupportsLoRA):
    """vLLM's model for the architecture ToSTForCausalLM.

    Every ToST model is declared hybrid: vLLM allocates state blocks for any architecture only in hybrid models.
    """

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_stacked={f".{name}_proj": (".qkv_proj", name) for name in "qkv"})
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return (torch.float64,)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        model, tp_size = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
        return ((state_size(model.hf_config, model.dtype, tp_size),),)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple:
        return (get_temporal_copy_spec,)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.model = ToSTModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head: nn.Module = PPMissingLayer()
        if get_pp_group().is_last_rank:
            head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
            self.lm_head = head.tie_weights(self.model.embed_tokens) if config.tie_word_embeddings else head
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
