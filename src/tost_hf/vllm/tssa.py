# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The causal TSSA layer in vLLM: the operator of tost_hf, with its recurrent state in the blocks of vLLM's cache.

vLLM passes the new tokens of all requests in one tensor (N, D). Projections act on all of them at once, inside the compiled
graph; the short convolution and the operator, which need to know the requests, are custom operators, at which vLLM splits the
graph.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
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
from ..model.tssa import choose_kernels, tssa, tssa_step
from ..model.tssa_cpu import as_array, compute_causal, convolve_sequences, parameter_array
from ..model.tssa_reference import TSSAState


OPERATORS = ("vllm::tost_short_convolution", "vllm::tost_tssa")


# Requests -------------------------------------------------------------------------------------------------------------


class Prompts(NamedTuple):
    """Prompts, or chunks of prompts, as a batch with padding on the right: for backends without sequences of any lengths."""

    blocks: torch.Tensor  # (B,)
    has_state: torch.Tensor  # (B,)
    tokens: torch.Tensor  # (B, T): indices of the tokens; 0 at padding
    mask: torch.Tensor  # (B, T)
    real_tokens: torch.Tensor  # indices into the flattened `tokens`

    def gather(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """The values of the tokens (B, T, ...) among those of all tokens."""
        return None if x is None else x[self.tokens]

    def scatter(self, values: torch.Tensor, output: torch.Tensor) -> None:
        """Writes values of the tokens (B, T, ...) to those of all tokens."""
        output[self.tokens.flatten()[self.real_tokens]] = values.flatten(0, 1)[self.real_tokens]

    def load(self, states: torch.Tensor) -> torch.Tensor:
        """The states of the sequences; 0 for new ones."""
        has_state = self.has_state.view(-1, *[1] * (states.ndim - 1))
        return states[self.blocks].masked_fill(~has_state, 0)


@dataclass
class ToSTMetadata:
    """The requests of a forward pass with at least one new token. Decodes come first: one new token each."""

    starts: np.ndarray  # (requests + 1,): index of each request's first token, and the number of tokens
    has_state: np.ndarray  # (requests,): false at the start of a prompt, where the block is uninitialized
    blocks: torch.Tensor  # (requests,): the block of each request's state in vLLM's cache

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """`blocks` as an array, on a CPU."""
        return self.blocks.numpy()

    @functools.cached_property
    def mask(self) -> np.ndarray:
        return np.ones(self.num_tokens, np.bool_)

    @functools.cached_property
    def decodes(self) -> torch.Tensor:
        """Blocks of the requests with one new token and a state that precede all others."""
        is_decode = (np.diff(self.starts) == 1) & self.has_state
        return self.blocks[: int(np.cumprod(is_decode).sum())]

    @functools.cached_property
    def prompts(self) -> list[Prompts]:
        """The other requests, in groups that padding at most doubles."""
        lengths, groups = np.diff(self.starts), list[list[int]]()
        for request in sorted(range(len(self.decodes), len(lengths)), key=lambda i: -lengths[i]):
            group = [*groups[-1], request] if groups else []
            if group and len(group) * lengths[group[0]] <= 2 * lengths[group].sum():
                groups[-1] = group
            else:
                groups.append([request])
        return [self._pad(np.array(group)) for group in groups]

    def _pad(self, requests: np.ndarray) -> Prompts:
        starts, lengths = self.starts[requests, None], np.diff(self.starts)[requests, None]
        positions = np.arange(lengths.max())
        mask = positions < lengths
        arrays = requests, self.has_state[requests], np.where(mask, starts + positions, 0), mask, np.flatnonzero(mask)
        requests_on_device, *others = (
            async_tensor_h2d(x.tolist(), dtype=_DTYPES[x.dtype.kind], device=self.blocks.device) for x in arrays
        )
        return Prompts(self.blocks[requests_on_device], *others)


_DTYPES = {"i": torch.long, "b": torch.bool}


class ToSTMetadataBuilder(LinearAttentionMetadataBuilder):
    """Builds the metadata from CPU tensors, without GPU synchronization."""

    _cudagraph_support = AttentionCGSupport.NEVER  # a captured graph would replay one batch's prompts

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ToSTMetadata:
        batch, mode = common_attn_metadata, self.vllm_config.cache_config.mamba_cache_mode
        blocks = mamba_get_block_table_tensor(batch.block_table_tensor, batch.seq_lens, self.kv_cache_spec, mode)[:, 0].long()
        starts = batch.query_start_loc_cpu.numpy().astype(np.int64)
        lengths = np.diff(starts)
        # vLLM's lengths are exact for prompts, and above 1 for decodes
        has_state = batch.seq_lens_cpu_upper_bound.numpy()[: len(lengths)] > lengths
        if not lengths.all():
            requests = np.flatnonzero(lengths)
            starts, has_state = np.append(starts[requests], starts[-1]), has_state[requests]
            blocks = blocks[async_tensor_h2d(requests.tolist(), dtype=torch.long, device=blocks.device)]
        return ToSTMetadata(starts, has_state, blocks[: len(has_state)])


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


def sharded_membership(score: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """`tssa_reference.softmax_over_heads` with heads sharded over processes."""
    logits = tensor_model_parallel_all_gather((score * temp).contiguous(), -1)
    membership = logits.softmax(-1).chunk(get_tensor_model_parallel_world_size(), -1)[get_tensor_model_parallel_rank()]
    return membership if padding is None else membership.masked_fill(padding.unsqueeze(-1), 0)


class TokenStatisticsSelfAttention(MambaBase, nn.Module):
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
        if config.position_embedding_type == "learned":
            self.denom_bias = self._per_head_parameter(cast(int, config.max_position_embeddings), 1)
        if config.decay_type != "none":
            self.forget_bias = self._per_head_parameter()
        if config.decay_type == "token":
            self.forget_proj = ColumnParallelLinear(
                width, config.num_attention_heads, bias=False, prefix=f"{prefix}.forget_proj"
            )
        self.softmax = sharded_membership if self.tp_size > 1 else None
        tokens = torch.empty(0, self.num_heads, self.head_dim, dtype=self.dtype)
        kernels = None if self.dtype == torch.float16 else choose_kernels(tokens, None, "causal")
        self.runs_on_cpu_kernels = kernels == "numba"
        self.kv_cache = (torch.tensor([]),)
        self.no_bias = np.zeros((self.num_heads, 1), np.float32)
        self._parameter_arrays: dict[str, tuple[int, np.ndarray]] = {}
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

    @property
    def kv_cache(self) -> tuple[torch.Tensor, ...] | list[torch.Tensor]:
        """vLLM's blocks. vLLM frees them by replacing this attribute, so that no view may stay."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, kv_cache: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> None:
        self._kv_cache = kv_cache
        self._state_arrays: list[np.ndarray] = []

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
        """The last inputs of the convolution in all blocks, (blocks, conv_kernel - 1, D)."""
        assert self.convolution is not None
        state_len, conv_state = self.convolution.conv_kernel - 1, self._split_state()[-1].view(self.dtype)
        return conv_state[:, : state_len * self.config.hidden_size].unflatten(1, (state_len, -1))

    # Arrays for the kernels on CPUs, stored, as to make them takes longer than to decode a token

    def state_arrays(self) -> list[np.ndarray]:
        """Arrays of `sums` and, with a convolution, `conv_state`."""
        if not self._state_arrays:
            states = [*self.sums, *([] if self.convolution is None else [self.conv_state])]
            self._state_arrays = [as_array(x) for x in states]
        return self._state_arrays

    def parameter_array(self, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None:
            return None
        address, array = self._parameter_arrays.get(name, (None, None))
        if address != parameter.data_ptr():
            array = parameter_array(parameter if name == "weight" else parameter.squeeze(-1))
            self._parameter_arrays[name] = parameter.data_ptr(), array
        return array

    # Tokens

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens (N, D), at `positions` (N,), of all requests."""
        if self.convolution is not None:
            convolved = torch.empty_like(hidden_states)
            torch.ops.vllm.tost_short_convolution(hidden_states, convolved, self.prefix)
            hidden_states = convolved
        w = self.in_proj(hidden_states)[0]
        log_decay = None
        if self.forget_bias is not None:
            logit = self.forget_bias.expand(len(w), -1)
            if self.forget_proj is not None:
                logit = logit + self.forget_proj(hidden_states)[0]
            log_decay = F.logsigmoid(logit)
        output = torch.empty_like(w)
        torch.ops.vllm.tost_tssa(w, log_decay, positions, output, self.prefix)
        return self.out_proj(output)[0]

    def convolve(self, hidden_states: torch.Tensor, output: torch.Tensor, batch: ToSTMetadata) -> None:
        """Fills `output` (N, D) with the convolved tokens."""
        assert self.convolution is not None
        if self.runs_on_cpu_kernels:
            weight = self.parameter_array("weight", self.convolution.weight)
            sequences, tokens = (batch.starts, batch.rows, batch.has_state), as_array(hidden_states)
            convolve_sequences(*sequences, tokens, weight, batch.mask, None, self.state_arrays()[3], as_array(output))
        else:
            conv_states = self.conv_state
            if n := len(batch.decodes):
                convolved, states = self.convolution(hidden_states[:n].unsqueeze(1), conv_state=conv_states[batch.decodes])
                output[:n], conv_states[batch.decodes] = convolved.squeeze(1), states
            for prompts in batch.prompts:
                inputs = prompts.gather(hidden_states), prompts.mask, None, prompts.load(conv_states)
                convolved, conv_states[prompts.blocks] = self.convolution(*inputs)
                prompts.scatter(convolved, output)
        if batch.num_tokens < len(output):
            output[batch.num_tokens :] = 0

    def compute_statistics(
        self,
        w: torch.Tensor,
        log_decay: torch.Tensor | None,
        positions: torch.Tensor,
        output: torch.Tensor,
        batch: ToSTMetadata | None,
    ) -> None:
        """Fills `output` (N, H p) with the operator's output for projected tokens `w` (N, H p).

        Without a batch, in vLLM's profiling run, all tokens are computed as one prompt.
        """
        if batch is not None and self.runs_on_cpu_kernels and self.softmax is None:
            shape = len(w), self.num_heads, self.head_dim
            temp, bias = (self.parameter_array(name, self._parameters.get(name)) for name in ("temp", "denom_bias"))
            compute_causal(
                *(batch.starts, batch.rows, batch.has_state),
                as_array(w).reshape(shape),
                temp,
                self.no_bias if bias is None else bias,
                None if bias is None else as_array(positions),
                batch.mask,
                None if log_decay is None else as_array(log_decay),
                self.state_arrays()[:3],
                as_array(output).reshape(shape),
                np.empty(shape[:2], np.float32),
            )
        else:
            self._compute_by_form(w, log_decay, positions, output, batch)
        if batch is not None and batch.num_tokens < len(output):
            output[batch.num_tokens :] = 0

    def _compute_by_form(self, w, log_decay, positions, output, batch) -> None:
        """`compute_statistics` by one-token steps and padded prompts."""
        w, output = (x.unflatten(-1, (self.num_heads, -1)) for x in (w, output))
        bias = None if self.denom_bias is None else self.denom_bias.squeeze(-1).t()
        inputs: dict[str, Any] = {"positions": None if bias is None else positions, "log_decay": log_decay}
        if batch is None:
            inputs = {name: None if x is None else x[None] for name, x in inputs.items()}
            output.copy_(tssa(w[None], self.temp, bias, softmax=self.softmax, **inputs).output[0])
            return
        sums = self.sums
        if n := len(batch.decodes):
            decode_inputs: dict[str, Any] = {name: None if x is None else x[:n] for name, x in inputs.items()}
            state = TSSAState(*(x[batch.decodes] for x in sums))
            decode_inputs |= {"initial_state": state, "softmax": self.softmax}
            result = tssa_step(w[:n], self.temp, bias, in_place=True, **decode_inputs)
            output[:n] = result.output
            _store_state(sums, batch.decodes, result.final_state)
        for prompts in batch.prompts:
            prompt_inputs = {name: prompts.gather(x) for name, x in inputs.items()}
            initial_state = TSSAState(*map(prompts.load, sums))
            result = tssa(
                prompts.gather(w),
                self.temp,
                bias,
                mask=prompts.mask,
                initial_state=initial_state,
                softmax=self.softmax,
                **prompt_inputs,
            )
            prompts.scatter(result.output, output)
            _store_state(sums, prompts.blocks, result.final_state)


def _store_state(sums: TSSAState, blocks: torch.Tensor, state: TSSAState | None) -> None:
    assert state is not None  # the causal form returns one
    for cached_sum, new_sum in zip(sums, state):
        cached_sum[blocks] = new_sum


# Operators ------------------------------------------------------------------------------------------------------------


def _get_layer_and_batch(layer_name: str) -> tuple[TokenStatisticsSelfAttention, ToSTMetadata | None]:
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
def _tssa(
    w: torch.Tensor,
    log_decay: torch.Tensor | None,
    positions: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    layer, batch = _get_layer_and_batch(layer_name)
    layer.compute_statistics(w, log_decay, positions, output, batch)


direct_register_custom_op("tost_short_convolution", _short_convolution, mutates_args=["output"])
direct_register_custom_op("tost_tssa", _tssa, mutates_args=["output"])
