# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The causal TSSA layer in vLLM: the operator of tost_hf, with its running sums in the blocks of vLLM's cache.

vLLM passes the new tokens of all requests in one tensor (N, D). Projections act on all of them at once, inside the compiled
graph; the short convolution and the operator, which need to know the requests, are custom operators, at which vLLM splits the
graph.
"""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import async_tensor_h2d, direct_register_custom_op
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.linear_attn import LinearAttentionBackend, LinearAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from ..model.configuration_tost import ToSTConfig
from ..model.layers_tost import ShortConvolution
from ..model.tssa import tssa, tssa_step
from ..model.tssa_reference import TSSAState


OPERATORS = ("vllm::tost_short_convolution", "vllm::tost_causal_statistics")


# Requests -------------------------------------------------------------------------------------------------------------


class Prefill(NamedTuple):
    """A prompt, or a chunk of one, in a batch."""

    request: int
    start: int
    end: int
    has_state: bool  # False at the start of a prompt, where the block is uninitialised


@dataclass
class ToSTMetadata:
    """The requests of a forward pass. Decodes come first: one new token each."""

    blocks: torch.Tensor  # (requests,): the block of each request's state in vLLM's cache
    num_decodes: int
    new_blocks: torch.Tensor | None  # blocks of decodes without a state: prompts of one token; None if there are none
    prefills: list[Prefill]
    num_tokens: int


class ToSTMetadataBuilder(LinearAttentionMetadataBuilder):
    """Builds the metadata from CPU tensors, without GPU synchronisation."""

    _cudagraph_support = AttentionCGSupport.NEVER  # a captured graph would replay one batch's prefills

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ToSTMetadata:
        batch, mode = common_attn_metadata, self.vllm_config.cache_config.mamba_cache_mode
        blocks = mamba_get_block_table_tensor(batch.block_table_tensor, batch.seq_lens, self.kv_cache_spec, mode)[:, 0].long()
        bounds = batch.query_start_loc_cpu.tolist()
        lengths = batch.seq_lens_cpu_upper_bound.tolist()  # exact for prefills, above 1 for decodes
        num_decodes, new_requests, prefills = 0, list[int](), list[Prefill]()
        for request, (start, end, length) in enumerate(zip(bounds, bounds[1:], lengths)):
            has_state = length > end - start
            if end - start == 1 and not prefills:
                num_decodes += 1
                new_requests += [] if has_state else [request]
            elif end > start:
                prefills.append(Prefill(request, start, end, has_state))
        new_blocks = blocks[async_tensor_h2d(new_requests, dtype=torch.long, device=blocks.device)] if new_requests else None
        return ToSTMetadata(blocks, num_decodes, new_blocks, prefills, bounds[-1])


class ToSTBackend(LinearAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "TOST"

    @staticmethod
    def get_builder_cls() -> type[ToSTMetadataBuilder]:
        return ToSTMetadataBuilder


# The layer ------------------------------------------------------------------------------------------------------------


def state_size(config: ToSTConfig, dtype: torch.dtype, tp_size: int) -> int:
    """Size of a layer's state per request, in elements of 8 bytes.

    Two of the sums are float64, as in `TSSAState`; the third, in float32, and `conv_state` follow.
    """
    width, heads = config.hidden_size // tp_size, config.num_attention_heads // tp_size
    conv_bytes = ((config.conv_kernel or 1) - 1) * config.hidden_size * dtype.itemsize
    return width + heads + -(-(4 * width + conv_bytes) // 8)


def sharded_membership(score: torch.Tensor, temp: torch.Tensor, padding: None) -> torch.Tensor:
    """`tssa_reference.softmax_over_heads` with heads sharded over processes; vLLM's batches have no padding."""
    logits = tensor_model_parallel_all_gather((score * temp).contiguous(), -1)
    return logits.softmax(-1).chunk(get_tensor_model_parallel_world_size(), -1)[get_tensor_model_parallel_rank()]


class CausalStatistics(MambaBase, nn.Module):
    """`TokenStatisticsSelfAttention` of a causal model; its `denom_bias` and other per-head parameters are sharded by heads.

    vLLM expects the same number of state tensors in every model, with a copy function for each. The state is therefore one
    float64 vector, of which the sums and `conv_state` are views.
    """

    def __init__(self, config: ToSTConfig, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        self.prefix, self.config, self.dtype = prefix, config, vllm_config.model_config.dtype
        self.tp_size = get_tensor_model_parallel_world_size()
        self.num_heads, self.head_dim = config.num_attention_heads // self.tp_size, config.head_dim
        width, options = config.hidden_size, {"bias": config.use_bias, "quant_config": vllm_config.quant_config}
        self.in_proj = ColumnParallelLinear(width, width, prefix=f"{prefix}.in_proj", **options)
        self.out_proj = RowParallelLinear(width, width, prefix=f"{prefix}.out_proj", **options)
        self.convolution = None if config.conv_kernel is None else ShortConvolution(width, config.conv_kernel)
        self.temp = self._per_head_parameter(1)
        self.denom_bias = self.forget_bias = self.forget_proj = None
        if not config.is_position_free:
            self.denom_bias = self._per_head_parameter(cast(int, config.max_position_embeddings), 1)
        if config.forgetting != "none":
            self.forget_bias = self._per_head_parameter()
        if config.forgetting == "token":
            self.forget_proj = ColumnParallelLinear(
                width, config.num_attention_heads, bias=False, prefix=f"{prefix}.forget_proj"
            )
        self.softmax = sharded_membership if self.tp_size > 1 else None
        self.kv_cache = (torch.tensor([]),)
        compilation = vllm_config.compilation_config
        if prefix in compilation.static_forward_context:
            raise ValueError(f"Duplicate layer name: {prefix}")
        compilation.static_forward_context[prefix] = self
        if compilation.splitting_ops is not None:  # CUDA graphs are captured between these operators
            compilation.splitting_ops += [op for op in OPERATORS if op not in compilation.splitting_ops]

    def _per_head_parameter(self, *shape: int) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(self.num_heads, *shape, dtype=torch.float32), requires_grad=False)
        set_weight_attrs(parameter, {"weight_loader": sharded_weight_loader(0)})
        return parameter

    # Cache

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[ToSTBackend]:
        return ToSTBackend

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((state_size(self.config, self.dtype, self.tp_size),),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.float64,)

    # Views are created on each access: vLLM frees a cache by replacing `kv_cache`.

    def _split_state(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of all blocks: two sums in float64, one in float32, and the remainder, which contains `conv_state`."""
        heads, width, state = self.num_heads, self.num_heads * self.head_dim, self.kv_cache[0]
        weighted, membership, remainder = state.tensor_split((width, width + heads), 1)
        sum_sq, conv_state = remainder.view(torch.float32).tensor_split((width,), 1)
        return weighted, membership, sum_sq, conv_state

    @property
    def sums(self) -> TSSAState:
        """The sums of all blocks, (blocks, H, p), (blocks, H, p) and (blocks, H)."""
        weighted, membership, sum_sq, _ = self._split_state()
        shape = self.num_heads, self.head_dim
        return TSSAState(sum_sq.unflatten(1, shape), weighted.unflatten(1, shape), membership)

    @property
    def conv_state(self) -> torch.Tensor:
        """The last inputs of the convolution in all blocks, (blocks, kernel_size - 1, D)."""
        assert self.convolution is not None
        state_len, conv_state = self.convolution.kernel_size - 1, self._split_state()[-1].view(self.dtype)
        return conv_state[:, : state_len * self.config.hidden_size].unflatten(1, (state_len, -1))

    # Tokens

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens (N, D), at `positions` (N,), of all requests."""
        if self.convolution is not None:
            convolved = torch.empty_like(hidden_states)
            torch.ops.vllm.tost_short_convolution(hidden_states, convolved, self.prefix)
            hidden_states = convolved
        w = self.in_proj(hidden_states)[0]
        forget_logit = None
        if self.forget_bias is not None:
            forget_logit = self.forget_bias.expand(len(w), -1)
            if self.forget_proj is not None:
                forget_logit = forget_logit + self.forget_proj(hidden_states)[0]
        output = torch.empty_like(w)
        torch.ops.vllm.tost_causal_statistics(w, forget_logit, positions, output, self.prefix)
        return self.out_proj(output)[0]

    def convolve(self, hidden_states: torch.Tensor, output: torch.Tensor, batch: ToSTMetadata) -> None:
        """Fills `output` (N, D) with the convolved tokens."""
        assert self.convolution is not None
        conv_states = self.conv_state
        if batch.new_blocks is not None:
            conv_states[batch.new_blocks] = 0
        if n := batch.num_decodes:
            blocks = batch.blocks[:n]
            convolved, conv_states[blocks] = self.convolution(hidden_states[:n].unsqueeze(1), conv_state=conv_states[blocks])
            output[:n] = convolved.squeeze(1)
        for request, start, end, has_state in batch.prefills:
            block = batch.blocks[request : request + 1]
            conv_state = conv_states[block] if has_state else None
            convolved, conv_states[block] = self.convolution(hidden_states[None, start:end], conv_state=conv_state)
            output[start:end] = convolved[0]
        output[batch.num_tokens :] = 0

    def compute_statistics(
        self,
        w: torch.Tensor,
        forget_logit: torch.Tensor | None,
        positions: torch.Tensor,
        output: torch.Tensor,
        batch: ToSTMetadata | None,
    ) -> None:
        """Fills `output` (N, H p) with the operator's output for projected tokens `w` (N, H p).

        Without a batch, in vLLM's profiling run, all tokens are computed as one prompt.
        """
        w, output = (x.unflatten(-1, (self.num_heads, -1)) for x in (w, output))
        log_decay = None if forget_logit is None else F.logsigmoid(forget_logit)
        bias = None if self.denom_bias is None else self.denom_bias.squeeze(-1).t()

        def prefill(tokens: slice, state: TSSAState | None) -> TSSAState | None:
            attended, _, state = tssa(
                w[None, tokens],
                self.temp,
                bias,
                positions=None if bias is None else positions[None, tokens],
                initial_state=state,
                log_decay=None if log_decay is None else log_decay[None, tokens],
                normalize_scores=self.config.normalize_scores,
                softmax=self.softmax,
            )
            output[tokens] = attended[0]
            return state

        if batch is None:
            prefill(slice(None), None)
            return
        sums = self.sums
        if batch.new_blocks is not None:
            for cached_sum in sums:
                cached_sum[batch.new_blocks] = 0
        if n := batch.num_decodes:
            blocks = batch.blocks[:n]
            output[:n], _, state = tssa_step(
                w[:n],
                self.temp,
                bias,
                TSSAState(*(cached_sum[blocks] for cached_sum in sums)),
                positions=None if bias is None else positions[:n],
                log_decay=None if log_decay is None else log_decay[:n],
                normalize_scores=self.config.normalize_scores,
                softmax=self.softmax,
                in_place=True,
            )
            _store_state(sums, blocks, state)
        for request, start, end, has_state in batch.prefills:
            block = batch.blocks[request : request + 1]
            state = TSSAState(*(cached_sum[block] for cached_sum in sums)) if has_state else None
            _store_state(sums, block, prefill(slice(start, end), state))
        output[batch.num_tokens :] = 0


def _store_state(sums: TSSAState, blocks: torch.Tensor, state: TSSAState | None) -> None:
    assert state is not None  # the causal form returns one
    for cached_sum, new_sum in zip(sums, state):
        cached_sum[blocks] = new_sum


# Operators ------------------------------------------------------------------------------------------------------------


def _get_layer_and_batch(layer_name: str) -> tuple[CausalStatistics, ToSTMetadata | None]:
    """The layer, and the requests of the batch; None in a profiling run."""
    context = get_forward_context()
    metadata = context.attn_metadata
    return context.no_compile_layers[layer_name], None if metadata is None else metadata[layer_name]


@eager_break_during_capture
def _short_convolution(hidden_states: torch.Tensor, output: torch.Tensor, layer_name: str) -> None:
    layer, batch = _get_layer_and_batch(layer_name)
    if batch is None:
        output.zero_()
    else:
        layer.convolve(hidden_states, output, batch)


@eager_break_during_capture
def _causal_statistics(
    w: torch.Tensor,
    forget_logit: torch.Tensor | None,
    positions: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    layer, batch = _get_layer_and_batch(layer_name)
    layer.compute_statistics(w, forget_logit, positions, output, batch)


direct_register_custom_op("tost_short_convolution", _short_convolution, mutates_args=["output"])
direct_register_custom_op("tost_causal_statistics", _causal_statistics, mutates_args=["output"])
