# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The cache of ToST language models: a layer with a recurrent state of constant size and rollback; checks of caches."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, StaticLayer

from .configuration_tost import FULL_ATTENTION, SLIDING_ATTENTION, TSSA
from .tssa_reference import TSSAState, apply_decay, as_state, left_padding_indices, mask_padding, permute_tokens


# Layer ----------------------------------------------------------------------------------------------------------------


Tensors = TypeVar("Tensors", bound=tuple)

RECORDED_TAIL = 64  # recorded tokens that a crop leaves for later crops
STATE_NAMES = TSSAState._fields
TENSOR_NAMES = (*STATE_NAMES, "conv_state")  # of a layer, in memory and in files; the last only with a convolution


class RecordedTokens(NamedTuple):
    """Tensors recorded for tokens that a rollback may remove."""

    w: torch.Tensor  # projected, (B, t, H, p)
    membership: torch.Tensor  # (B, t, H), 0 at padding
    mask: torch.Tensor  # (B, t), true at real tokens
    log_decay: torch.Tensor | None  # (B, t, H); None without decay
    inputs: torch.Tensor | None  # of the layer, (B, t, D); None without a convolution


class LayerState(NamedTuple):
    """The recurrent state of a layer, and the state of its convolution."""

    recurrent_state: TSSAState
    conv_state: torch.Tensor | None


class TSSACacheLayer(CacheLayerMixin):
    """The recurrent state of one causal TSSA layer.

    `sum_sq` and `sum_weighted_sq` are (B, H, p), `sum_membership` is (B, H); None until the first update. They have the dtypes
    of a `TSSAState`: the last two are float64, so that a million small terms, added one by one, are not lost. In a layer with
    a convolution `conv_state` (B, conv_kernel - 1, D) stores the layer's last inputs, oldest first; otherwise None.

    With `max_cache_len`, which `StaticCache` passes, the addresses of all tensors are static, including the token count: a
    compiled decoding step is neither recompiled nor skipped by CUDA graphs. The cached state then has no gradient.
    `max_cache_len` does not limit the sequence: the state has the same size at any length.

    While recording is on (`activate_past_recording`), the tokens since the last `crop`, and up to 64 before it, can be rolled
    back exactly: the state is recomputed from that before the recorded tokens, never by subtraction.

    Raises:
        ValueError: `crop` is called with a positive number, or to remove more tokens than were recorded.
        RuntimeError: `crop` is called while recording is off.

    Example:

    ```python
    >>> model = ToSTModel(ToSTConfig(hidden_size=32, num_attention_heads=4))
    >>> cache = model(torch.tensor([[5, 6, 7]])).past_key_values
    >>> cache.layers[0].sum_sq.shape, cache.layers[0].get_seq_length()
    (torch.Size([1, 4, 8]), 3)
    ```
    """

    _layer_type = TSSA
    is_croppable = True
    supports_early_init = False  # early initialization assumes the shapes of keys and values

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        super().__init__(max_cache_len=max_cache_len)
        self.static = max_cache_len is not None
        self.max_cache_len = max_cache_len
        self.is_compileable = self.static
        self.sum_sq: torch.Tensor | None = None
        self.sum_weighted_sq: torch.Tensor | None = None
        self.sum_membership: torch.Tensor | None = None
        self.conv_state: torch.Tensor | None = None
        # a tensor, since an int would become a constant of an exported program
        self.cumulative_length: Any = torch.zeros((), dtype=torch.long, device="cpu")
        self.device: torch.device | None = None
        self.record_past = False
        self._base_state: LayerState | None = None  # before the first recorded token
        self._recorded_tokens: list[RecordedTokens] = []

    @property
    def state(self) -> TSSAState | None:
        """A copy of the recurrent state, which later tokens do not change; None before the first token."""
        state = self.current_state()
        return None if state is None else TSSAState(*(x.clone() for x in state))

    def current_state(self) -> TSSAState | None:
        """The recurrent state for the next tokens, which may update it in place; None before the first token."""
        if not self.is_initialized:
            return None
        self.prefetch()
        state = self._stored_state()
        if self.static and torch.is_grad_enabled():  # the next step overwrites it before the backward pass
            state = TSSAState(*(x.clone() for x in state))
        return state

    @property
    def can_update_in_place(self) -> bool:
        """Whether a step may update the recurrent state in place: neither other tensors nor a backward pass use it."""
        if not self.is_initialized or self.record_past or torch.is_grad_enabled():
            return False
        state = self._stored_state()
        if as_state(state, state.sum_sq) is not state:  # cast, for example by an exporter
            return False
        return self.static if torch.compiler.is_compiling() else all(map(_can_update_in_place, state))

    @property
    def batch_size(self) -> int:
        """Number of sequences; AttributeError before the first token, as in transformers' lazily initialized layers."""
        if self.sum_sq is None:
            raise AttributeError("The layer is empty, so its batch size is unknown.")
        return self.sum_sq.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's recurrent and convolution state in memory, without recorded tokens."""
        return sum(x.nbytes for x in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The layer's tensors by name; empty before the first token."""
        return {name: x for name in TENSOR_NAMES if (x := getattr(self, name)) is not None}

    # float64 sums are as large as compensated float32 sums (sum and remainder), without the extra operations of every step
    def _stored_state(self) -> TSSAState:
        assert self.sum_sq is not None and self.sum_weighted_sq is not None and self.sum_membership is not None
        return TSSAState(self.sum_sq, self.sum_weighted_sq, self.sum_membership)

    def set_state(self, state: TSSAState) -> None:
        """Stores a new recurrent state: in place if addresses are static and the batch size does not change."""
        for name, new in zip(STATE_NAMES, as_state(state, state.sum_sq)):
            self._store(name, new)

    def set_conv_state(self, conv_state: torch.Tensor | None) -> None:
        """Stores the last inputs of the convolution in the same manner as `set_state`."""
        if conv_state is not None:
            self._store("conv_state", conv_state)

    def _store(self, name: str, new: torch.Tensor) -> None:
        old = getattr(self, name)
        if new is old:  # updated in place
            return
        if self.static and old is not None and old.shape == new.shape:
            old.copy_(new.detach())
        else:
            setattr(self, name, new.detach().clone() if self.static else new)
            self._mark_static(getattr(self, name))

    def _mark_static(self, tensor: torch.Tensor) -> None:
        if self.static and not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(tensor)

    def lazy_initialization(self, state: TSSAState) -> None:  # type: ignore[override]  # declared for keys and values
        """Allocates a zero recurrent state with the shapes, dtypes and device of `state`."""
        self.device = state.sum_sq.device
        if self.static or torch.compiler.is_compiling():  # else on the CPU, where reading it does not synchronize
            self.cumulative_length = self.cumulative_length.to(self.device)
            self._mark_static(self.cumulative_length)
        self.set_state(TSSAState(*(torch.zeros_like(x) for x in state)))
        self.is_initialized = True

    def update_state(
        self,
        state: TSSAState,
        w: torch.Tensor,
        membership: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        log_decay: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
        conv_state: torch.Tensor | None = None,
    ) -> None:
        """Stores the state after new tokens.

        Args:
            state: the recurrent state after these tokens.
            w: the projected tokens, (B, T, H, p).
            membership: their membership, (B, H, T), 0 at padding.
            mask: (B, T), true or 1 at real tokens; None if all are.
            log_decay: logarithm of their decay, (B, T, H); None without decay.
            inputs: the layer's inputs, (B, T, D); required with a convolution.
            conv_state: the last of the inputs, (B, conv_kernel - 1, D); None without a convolution.
        """
        if not self.is_initialized:
            self.lazy_initialization(state)
        if self.record_past:
            if conv_state is None:
                inputs = None
            elif self.conv_state is None:
                self.set_conv_state(torch.zeros_like(conv_state))
            if not self._recorded_tokens:
                self._base_state = _map_tensors(torch.clone, LayerState(self._stored_state(), self.conv_state))
            mask = torch.ones(w.shape[:2], dtype=torch.bool, device=w.device) if mask is None else mask.bool()
            self._recorded_tokens.append(RecordedTokens(w, membership.transpose(1, 2), mask, log_decay, inputs))
        self.set_state(state)
        self.set_conv_state(conv_state)
        if self.static:
            self.cumulative_length.add_(w.shape[1])
        else:
            self.cumulative_length = self.cumulative_length + w.shape[1]

    def update(self, key_states, value_states, *args, **kwargs):
        raise NotImplementedError(
            f"{type(self).__name__} stores a recurrent state, not keys and values: a ToST model calls update_state instead."
        )

    def get_seq_length(self) -> Any:
        """Number of tokens, padding included: an int, or a 0-dimensional tensor if static or compiled."""
        if not self.is_initialized:
            return 0
        return self.cumulative_length if self.static or torch.compiler.is_compiling() else int(self.cumulative_length)

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    # Rollback ---------------------------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Starts to record tokens for `crop`. Memory grows with the tokens between two calls of `crop`."""
        if not self.record_past:
            self._clear_records()
        self.record_past = True

    def _clear_records(self) -> None:
        self._base_state, self._recorded_tokens = None, []

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens, padding included (0 removes none, and frees old records).

        Raises:
            ValueError: the number is positive, or more tokens would be removed than were recorded.
            RuntimeError: recording is off.
        """
        if not self.is_initialized:
            return
        if tokens_to_remove > 0:
            raise ValueError(f"crop expects the number of tokens to remove as a negative number, got {tokens_to_remove}.")
        if not self.record_past:
            raise RuntimeError(
                "Call activate_past_recording() on the cache before the model processes tokens that crop removes."
            )
        num_recorded = sum(tokens.w.shape[1] for tokens in self._recorded_tokens)
        num_remaining = num_recorded + tokens_to_remove
        if num_remaining < 0:
            raise ValueError(f"Cannot remove {-tokens_to_remove} tokens: only the last {num_recorded} are recorded.")
        if not num_recorded:
            return
        tokens = RecordedTokens._make(None if x[0] is None else torch.cat(x, 1) for x in zip(*self._recorded_tokens))
        assert self._base_state is not None  # stored with the first record
        num_merged = max(num_remaining - RECORDED_TAIL, 0)
        self._base_state = _add_tokens(self._base_state, _map_tensors(lambda x: x[:, :num_merged], tokens))
        tokens = _map_tensors(lambda x: x[:, num_merged:num_remaining], tokens)
        self._recorded_tokens = [tokens] if num_remaining else []
        if tokens_to_remove:
            layer_state = _add_tokens(self._base_state, tokens)
            self.set_state(layer_state.recurrent_state)
            self.set_conv_state(layer_state.conv_state)
            self.cumulative_length += tokens_to_remove

    # Batch ------------------------------------------------------------------------------------------------------------

    def _map_batch(self, fn) -> None:
        """Applies `fn` to every tensor with a batch dimension."""
        if not self.is_initialized:
            return
        layer_state = _map_tensors(fn, LayerState(self._stored_state(), self.conv_state))
        self.set_state(layer_state.recurrent_state)
        self.set_conv_state(layer_state.conv_state)
        if self._base_state is not None:
            self._base_state = _map_tensors(fn, self._base_state)
        self._recorded_tokens = [_map_tensors(fn, tokens) for tokens in self._recorded_tokens]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map_batch(lambda x: x[indices.to(x.device)])

    def reset(self) -> None:
        """Resets the state to the start of a sequence, in place."""
        for x in self.tensors().values():
            x.detach().zero_()
        self._clear_records()
        self.cumulative_length.zero_()

    # Devices ----------------------------------------------------------------------------------------------------------

    def _move(self, device: torch.device) -> None:
        if self.sum_sq is not None and self.sum_sq.device != device:
            for name, x in self.tensors().items():
                setattr(self, name, x.to(device, non_blocking=True))

    def offload(self) -> None:
        """Moves the tensors to the CPU until they are used next."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Moves the tensors back to the device that computed them."""
        if self.device is not None:
            self._move(self.device)


class StaticTSSACacheLayer(TSSACacheLayer, StaticLayer):  # type: ignore[override, misc]
    """`TSSACacheLayer` in a `StaticCache`; no method of `StaticLayer` is used.

    `CacheLayerMixin` registers subclasses that have a `_layer_type`: subclasses of `StaticLayer` for static caches, others for
    dynamic caches.
    """


def _map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tensors: Tensors) -> Tensors:
    """Applies `fn` to every tensor of a NamedTuple of tensors, None and nested NamedTuples."""
    tuple_type: Any = type(tensors)
    return tuple_type(*(x if x is None else _map_tensors(fn, x) if isinstance(x, tuple) else fn(x) for x in tensors))


def _can_update_in_place(x: torch.Tensor) -> bool:
    """Whether autograd allows an in-place update, and no other tensor shares the storage."""
    if x.requires_grad or (x.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    return x.is_contiguous() and x.nbytes == x.untyped_storage().nbytes()


def _add_tokens(layer_state: LayerState, tokens: RecordedTokens) -> LayerState:
    """The state of a layer after more tokens."""
    state, membership, conv_state = layer_state.recurrent_state, tokens.membership, layer_state.conv_state
    mask = tokens.mask  # not inferred from memberships, which may underflow to 0 in the heads of a tensor-parallel process
    x = mask_padding(tokens.w, ~mask, state.sum_sq.dtype)
    terms = TSSAState(sq := x * x, sq * membership.unsqueeze(-1), membership)
    if tokens.log_decay is not None:
        log_decay = tokens.log_decay.masked_fill(~mask.unsqueeze(-1), 0)
        reverse_cumsum = log_decay.flip(1).cumsum(1).flip(1)  # of each token and all later ones
        decay = (reverse_cumsum - log_decay).exp()  # of each token's terms, by all later tokens
        terms = TSSAState(*(apply_decay(term, decay) for term in terms))
        total_decay = reverse_cumsum[:, :1].sum(1).exp()  # 1 if there are no tokens
        state = TSSAState(*(apply_decay(old, total_decay) for old in state))
    sums = TSSAState(*(old + term.sum(1) for old, term in zip(state, terms)))
    if conv_state is not None:
        assert tokens.inputs is not None  # recorded with the state of the convolution
        length = conv_state.shape[1]
        indices = left_padding_indices(F.pad(mask, (length, 0), value=True))
        conv_state = permute_tokens(torch.cat([conv_state, tokens.inputs], 1), indices)[:, -length:]
    return LayerState(sums, conv_state)


# Cache ----------------------------------------------------------------------------------------------------------------


class ToSTCache(Cache):
    """The recurrent states of all TSSA layers of a ToST language model; in hybrid models, keys and values as well.

    Args:
        config: the model's configuration.

    `torch.compile` and CUDA graphs need tensors with static addresses: use `StaticCache(config, max_cache_len=...)` there.

    Size: num_hidden_layers * (2 * hidden_size + num_attention_heads) numbers per sequence, at any length: for tost-base
    74,304 bytes in files, in float32, and 111,744 in memory, where two of the three sums are float64.

    Raises:
        ValueError: the configuration is an encoder's.

    Example:

    ```python
    >>> model = ToSTForCausalLM(ToSTConfig(hidden_size=32, num_attention_heads=4))
    >>> cache = ToSTCache(model.config)
    >>> prefix = model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
    >>> step = model(torch.tensor([[8]]), past_key_values=cache)
    >>> cache.get_seq_length()
    4
    ```
    """

    def __init__(self, config: PreTrainedConfig):
        if not config.is_causal:
            raise ValueError("An encoder (is_causal=False) processes the whole sequence at once, so it has no cache.")
        layers = DynamicCache(config=config).layers
        # of this module's class: the registered one may be that of remote code
        layers = [TSSACacheLayer() if get_layer_type(layer) == TSSA else layer for layer in layers]
        super().__init__(layers)


def get_layer_type(layer: object) -> str | None:
    """The type of a cache layer as in a configuration's `layer_types`; None for layers of other models."""
    if getattr(layer, "_layer_type", None) == TSSA:
        return TSSA
    if isinstance(layer, DynamicLayer | StaticLayer):
        return SLIDING_ATTENTION if layer.is_sliding else FULL_ATTENTION
    return None


def check_layer_types(cache: Cache, expected: list[str] | None = None) -> None:
    """Rejects a cache that is not for ToST models, or whose layers have other types (`get_layer_type`) than the expected ones.

    Types are compared, not classes: remote code has a different class of the same name.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"past_key_values must be a transformers Cache such as ToSTCache, got {type(cache).__name__}.")
    layer_types = [get_layer_type(layer) for layer in cache.layers]
    has_tssa = expected is None or TSSA in expected
    for layer_type, layer in zip(layer_types, cache.layers):
        if layer_type is None or (has_tssa and TSSA not in layer_types):
            raise ValueError(
                f"past_key_values contains {type(layer).__name__}s of another kind of model; a ToST model needs "
                "ToSTCache(config) or DynamicCache(config=model.config)."
            )
    if expected is not None and layer_types != expected:
        raise ValueError(
            f"The cache is another model's: its {len(layer_types)} layers are {', '.join(map(str, layer_types))}, "
            f"this model's {len(expected)} layers are {', '.join(expected)}."
        )


def check_cache(cache: Cache, config: PreTrainedConfig, batch_size: int) -> None:
    """Rejects a cache that does not fit the model or the batch; adds the layers to an empty `DynamicCache()`.

    Raises:
        TypeError: it is not a transformers Cache.
        ValueError: it belongs to another model, or has another batch size.
    """
    if isinstance(cache, Cache) and cache.layer_class_to_replicate is not None and not cache.layers:
        # an empty DynamicCache() without a configuration
        cache.layers = ToSTCache(config).layers
        cache.layer_class_to_replicate = None
    # `assistant_early_exit` lowers the number of the model's layers, and in older versions of transformers not the cache's
    check_layer_types(cache, config.layer_types[: max(config.num_hidden_layers, len(getattr(cache, "layers", ())))])
    tssa_layers = (cast(TSSACacheLayer, layer) for layer in cache.layers if get_layer_type(layer) == TSSA)
    layer = next(tssa_layers, None)  # there may be none before an early exit
    if layer is None or not layer.is_initialized:
        return
    cached_batch_size, *actual = layer.tensors()["sum_sq"].shape
    expected = [config.num_attention_heads // _tensor_parallel_size(config), config.head_dim]
    if actual != expected:
        raise ValueError(f"The cache is another model's: its heads have shape {actual}, this model's {expected}.")
    num_conv_inputs = 0 if layer.conv_state is None else layer.conv_state.shape[1]
    if num_conv_inputs != (config.conv_kernel or 1) - 1:
        raise ValueError(
            f"The cache is another model's: it stores {num_conv_inputs} inputs of a convolution per layer, this model's has "
            f"conv_kernel={config.conv_kernel}."
        )
    if cached_batch_size != batch_size:
        raise ValueError(f"The cache holds {cached_batch_size} sequences, the batch {batch_size}; they must be the same.")


def _tensor_parallel_size(config: PreTrainedConfig) -> int:
    """Number of processes over which transformers' tensor parallelism shards the heads."""
    return getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1
