# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The cache of ToST language models: the layer of causal TSSA, three running sums of constant size; checks; files."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, StaticLayer

from .configuration_tost import CAUSAL_STATISTICS, FULL_ATTENTION, SLIDING_ATTENTION
from .layers_tost import left_padding_indices, permute_tokens
from .tssa_reference import TSSAState, as_state


# Layer ----------------------------------------------------------------------------------------------------------------


Tensors = TypeVar("Tensors", bound=tuple)

RECORDED_TAIL = 64  # tokens that can still be removed after a crop
STATE_NAMES = TSSAState._fields
TENSOR_NAMES = (*STATE_NAMES, "conv_state")  # of a layer, in memory and in files; the last only with a convolution


class RecordedTokens(NamedTuple):
    """What a layer records of tokens that a rollback may remove."""

    w: torch.Tensor  # projected, (B, t, H, p)
    membership: torch.Tensor  # (B, t, H), 0 at padding
    log_decay: torch.Tensor | None  # (B, t, H), with forgetting
    inputs: torch.Tensor | None  # of the layer, (B, t, D), with a convolution


class LayerState(NamedTuple):
    """The state of a layer after some token."""

    sums: TSSAState
    conv_state: torch.Tensor | None


class CausalStatisticsLayer(CacheLayerMixin):
    """Running statistics of one causal TSSA layer.

    `sum_sq` and `sum_weighted_sq` are (B, H, p), `sum_membership` is (B, H); None until the first update. They have the dtypes
    of a `TSSAState`: the last two are float64, so that a million small terms, added one by one, are not lost. In a layer with
    a convolution `conv_state` (B, conv_kernel - 1, D) holds the layer's last inputs, oldest first; otherwise None.

    With `max_cache_len` (as `StaticCache` passes it) or `static=True` the tensors keep their addresses, and so does the number
    of tokens: a compiled decoding step is neither recompiled nor skipped by CUDA graphs. The cached sums then have no
    gradient. `max_cache_len` is no limit: the state has the same size at any length.

    While recording is on (`activate_past_recording`), the tokens since the last `crop`, and up to 64 before it, can be rolled
    back exactly: the sums are recomputed from those before the recorded tokens, nothing is subtracted.

    Raises:
        ValueError, RuntimeError: `crop` is called with a number of tokens, or at a time, that it cannot remove.

    Example:

    ```python
    >>> model = ToSTModel(ToSTConfig(hidden_size=32, num_attention_heads=4))
    >>> cache = model(torch.tensor([[5, 6, 7]])).past_key_values
    >>> cache.layers[0].sum_sq.shape, cache.layers[0].get_seq_length()
    (torch.Size([1, 4, 8]), 3)
    ```
    """

    _layer_type = CAUSAL_STATISTICS
    is_croppable = True
    supports_early_init = False  # it is for the shapes of keys and values

    def __init__(self, max_cache_len: int | None = None, static: bool = False, **kwargs):
        super().__init__(max_cache_len=max_cache_len)
        self.static = static or max_cache_len is not None
        self.max_cache_len = max_cache_len
        self.is_compileable = self.static
        self.sum_sq: torch.Tensor | None = None
        self.sum_weighted_sq: torch.Tensor | None = None
        self.sum_membership: torch.Tensor | None = None
        self.conv_state: torch.Tensor | None = None
        # a tensor: a number would be a constant of an exported program
        self.cumulative_length: Any = torch.zeros((), dtype=torch.long, device="cpu")
        self.device: torch.device | None = None
        self.record_past = False
        self._base: LayerState | None = None  # before the first recorded token
        self._recorded: list[RecordedTokens] = []

    @property
    def state(self) -> TSSAState | None:
        """The three running sums, or None before the first token."""
        if not self.is_initialized:
            return None
        self.prefetch()
        state = self._stored_state()
        if self.static and torch.is_grad_enabled():  # the next step overwrites it before the backward pass
            state = TSSAState(*(x.clone() for x in state))
        return state

    @property
    def may_be_overwritten(self) -> bool:
        """Whether a step may update the tensors of `state` in place: nothing else uses them, nor will a backward pass."""
        if not self.is_initialized or self.record_past or torch.is_grad_enabled():
            return False
        state = self._stored_state()
        if any(x is not y for x, y in zip(as_state(state, state.sum_sq), state)):  # cast, for example by an exporter
            return False
        return self.static if torch.compiler.is_compiling() else all(map(_is_unshared, state))

    @property
    def batch_size(self) -> int:
        """Number of sequences; AttributeError before the first token, as in transformers' own lazy layers."""
        if self.sum_sq is None:
            raise AttributeError("The layer has seen no token yet, so its batch size is unknown.")
        return self.sum_sq.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's sums and convolution inputs in memory, without recorded tokens."""
        return sum(x.nbytes for x in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The layer's tensors by name; empty before the first token."""
        return {name: x for name in TENSOR_NAMES if (x := getattr(self, name)) is not None}

    # float64 sums take the bytes of float32 sums with float32 remainders, and need no adding and splitting at every step
    def _stored_state(self) -> TSSAState:
        assert self.sum_sq is not None and self.sum_weighted_sq is not None and self.sum_membership is not None
        return TSSAState(self.sum_sq, self.sum_weighted_sq, self.sum_membership)

    def set_state(self, state: TSSAState) -> None:
        """Stores new sums: in place if addresses are static and the batch size is the same."""
        for name, new in zip(STATE_NAMES, as_state(state, state.sum_sq)):
            self._store(name, new)

    def set_conv_state(self, conv_state: torch.Tensor | None) -> None:
        """Stores the last inputs of the convolution, as `set_state` stores sums."""
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

    def lazy_initialization(self, state: TSSAState) -> None:  # type: ignore[override]  # declared for keys and values alone
        """Allocates sums of the given state's shapes, dtypes and device."""
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
        log_decay: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
        conv_state: torch.Tensor | None = None,
    ) -> None:
        """Stores the state after new tokens.

        Args:
            state: the sums after these tokens.
            w: the projected tokens, (B, T, H, p).
            membership: their membership, (B, H, T), 0 at padding.
            log_decay: logarithm of their decay, (B, T, H), with forgetting.
            inputs: of the layer, (B, T, D), with a convolution.
            conv_state: the last of them, (B, conv_kernel - 1, D).
        """
        if not self.is_initialized:
            self.lazy_initialization(state)
        if self.record_past:
            if conv_state is None:
                inputs = None
            elif self.conv_state is None:
                self.set_conv_state(torch.zeros_like(conv_state))
            if not self._recorded:
                self._base = _map_tensors(torch.clone, LayerState(self._stored_state(), self.conv_state))
            self._recorded.append(RecordedTokens(w, membership.transpose(1, 2), log_decay, inputs))
        self.set_state(state)
        self.set_conv_state(conv_state)
        if self.static:
            self.cumulative_length.add_(w.shape[1])
        else:
            self.cumulative_length = self.cumulative_length + w.shape[1]

    def update(self, key_states, value_states, *args, **kwargs):
        raise NotImplementedError(
            f"{type(self).__name__} stores statistics, not keys and values: a ToST model calls update_state instead."
        )

    def get_seq_length(self) -> Any:
        """Tokens seen, padding included: a number; a 0-dimensional tensor where static or compiled."""
        if not self.is_initialized:
            return 0
        return self.cumulative_length if self.static or torch.compiler.is_compiling() else int(self.cumulative_length)

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    # Rollback ---------------------------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Starts to record what `crop` needs. Memory grows with the tokens between two calls of `crop`."""
        if not self.record_past:
            self._clear_records()
        self.record_past = True

    def _clear_records(self) -> None:
        self._base, self._recorded = None, []

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens, padding counted (0 removes none, and frees old records).

        Raises:
            ValueError: the number is positive, or more tokens than were recorded.
            RuntimeError: recording is not on.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}.")
        if not self.record_past:
            raise RuntimeError("Call activate_past_recording() on the cache before the tokens that crop is to remove.")
        recorded = sum(tokens.w.shape[1] for tokens in self._recorded)
        keep = recorded + tokens_to_remove
        if keep < 0:
            raise ValueError(f"Cannot remove {-tokens_to_remove} tokens: only the last {recorded} are recorded.")
        if not recorded:
            return
        tokens = RecordedTokens._make(None if x[0] is None else torch.cat(x, 1) for x in zip(*self._recorded))
        assert self._base is not None  # stored with the first record
        merged = max(keep - RECORDED_TAIL, 0)
        self._base = _add_tokens(self._base, _map_tensors(lambda x: x[:, :merged], tokens))
        tokens = _map_tensors(lambda x: x[:, merged:keep], tokens)
        self._recorded = [tokens] if keep else []
        if tokens_to_remove:
            new = _add_tokens(self._base, tokens)
            self.set_state(new.sums)
            self.set_conv_state(new.conv_state)
            self.cumulative_length += tokens_to_remove

    # Batch ------------------------------------------------------------------------------------------------------------

    def _map_batch(self, fn) -> None:
        """Applies `fn` to every tensor with a batch dimension."""
        if not self.is_initialized:
            return
        new = _map_tensors(fn, LayerState(self._stored_state(), self.conv_state))
        self.set_state(new.sums)
        self.set_conv_state(new.conv_state)
        if self._base is not None:
            self._base = _map_tensors(fn, self._base)
        self._recorded = [_map_tensors(fn, tokens) for tokens in self._recorded]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map_batch(lambda x: x[indices.to(x.device)])

    def reset(self) -> None:
        """Returns to the start of a sequence; tensors keep their addresses."""
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
        """Moves the sums to the CPU until they are used next."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Moves the sums back to the device that computed them."""
        if self.device is not None:
            self._move(self.device)


class StaticCausalStatisticsLayer(CausalStatisticsLayer, StaticLayer):  # type: ignore[override, misc]
    """`CausalStatisticsLayer` in a `StaticCache`, with every method of `StaticLayer` overridden.

    `CacheLayerMixin` registers subclasses that have a `_layer_type`: those of `StaticLayer` for static caches, others for
    dynamic ones.
    """


def _map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], values: Tensors) -> Tensors:
    """Applies `fn` to every tensor of a NamedTuple of tensors, None and more such tuples."""
    kind: Any = type(values)
    return kind(*(x if x is None else _map_tensors(fn, x) if isinstance(x, tuple) else fn(x) for x in values))


def _is_unshared(x: torch.Tensor) -> bool:
    """Whether a tensor may be updated in place, without a change to another one."""
    if x.requires_grad or (x.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    return x.is_contiguous() and x.nbytes == x.untyped_storage().nbytes()


def _add_tokens(before: LayerState, tokens: RecordedTokens) -> LayerState:
    """The state of a layer after more tokens."""
    state, membership, conv_state = before.sums, tokens.membership, before.conv_state
    # the membership is 0 in every head at padding, and only there
    real = membership.sum(-1) != 0
    x = tokens.w.to(state.sum_sq.dtype).masked_fill(~real[..., None, None], 0)
    terms = TSSAState(sq := x * x, sq * membership.unsqueeze(-1), membership)
    if tokens.log_decay is not None:
        log_decay = tokens.log_decay.masked_fill(~real.unsqueeze(-1), 0)
        up_to = log_decay.flip(1).cumsum(1).flip(1)  # of each token and all later ones
        later = (up_to - log_decay).exp()  # decay of each token's terms by later ones
        terms = TSSAState(*(term * later.view(*later.shape, *[1] * (term.ndim - 3)) for term in terms))
        total = up_to[:, :1].sum(1).exp()  # 1 where there are no tokens
        state = TSSAState(*(old * total.view(*total.shape, *[1] * (old.ndim - 2)) for old in state))
    sums = TSSAState(*(old + term.sum(1) for old, term in zip(state, terms)))
    if conv_state is not None:
        assert tokens.inputs is not None  # recorded with the state of the convolution
        length = conv_state.shape[1]
        indices = left_padding_indices(F.pad(real, (length, 0), value=True))
        conv_state = permute_tokens(torch.cat([conv_state, tokens.inputs], 1), indices)[:, -length:]
    return LayerState(sums, conv_state)


# Cache ----------------------------------------------------------------------------------------------------------------


class ToSTCache(Cache):
    """The running statistics of all layers of a ToST language model; keys and values of softmax attention layers.

    Args:
        config: the model's configuration.
        static: keep the tensors' addresses, for `torch.compile` and CUDA graphs; for hybrid models use `StaticCache`.

    Size: num_hidden_layers * (2 * hidden_size + num_attention_heads) numbers per sequence, at any length: for tost-base
    74,304 bytes in files, in float32, and 111,744 in memory, where two of the three sums are float64.

    Raises:
        ValueError: the configuration is an encoder's, or a hybrid's with `static=True`.

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

    def __init__(self, config: PreTrainedConfig, static: bool = False):
        if not config.is_causal:
            raise ValueError("An encoder (is_causal=False) sees the whole text at once, so it has no cache.")
        layers = DynamicCache(config=config).layers
        if static and any(layer_type_of(layer) != CAUSAL_STATISTICS for layer in layers):
            raise ValueError(
                "Keys and values need a length to be static: use StaticCache(config=model.config, max_cache_len=...)."
            )
        own = [layer_type_of(layer) == CAUSAL_STATISTICS for layer in layers]
        super().__init__([CausalStatisticsLayer(static=static) if is_own else x for x, is_own in zip(layers, own)])


def layer_type_of(layer: object) -> str | None:
    """The type in a configuration's `layer_types` that a cache layer is for; None for any other layer."""
    if getattr(layer, "_layer_type", None) == CAUSAL_STATISTICS:
        return CAUSAL_STATISTICS
    if isinstance(layer, DynamicLayer | StaticLayer):
        return SLIDING_ATTENTION if layer.is_sliding else FULL_ATTENTION
    return None


def cached_length(cache: Cache) -> int | torch.Tensor:
    """Tokens seen by a cache of a ToST model, padding included (a 0-dimensional tensor where static or compiled)."""
    return _first_statistics_layer(cache).get_seq_length()


def _first_statistics_layer(cache: Cache) -> CausalStatisticsLayer:
    return cast(CausalStatisticsLayer, next(layer for layer in cache.layers if layer_type_of(layer) == CAUSAL_STATISTICS))


def check_cache_kind(cache: Cache) -> list[str | None]:
    """Rejects a cache that is not for ToST models; returns the `layer_type_of` its layers.

    Layers are compared by their type's name: remote code has another class of the same name.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"past_key_values must be a transformers Cache such as ToSTCache, got {type(cache).__name__}.")
    kinds = [layer_type_of(layer) for layer in cache.layers]
    for kind, layer in zip(kinds, cache.layers):
        if kind is None or CAUSAL_STATISTICS not in kinds:
            raise ValueError(
                f"past_key_values holds {type(layer).__name__}s of another kind of model; a ToST model needs "
                "ToSTCache(config) or DynamicCache(config=model.config)."
            )
    return kinds


def check_cache(cache: Cache, config: PreTrainedConfig, batch_size: int) -> None:
    """Rejects a cache that does not fit the model or the batch; adds the layers to an empty `DynamicCache()`.

    Raises:
        TypeError: it is no transformers Cache.
        ValueError: it is of another model or another batch size.
    """
    if isinstance(cache, Cache) and cache.layer_class_to_replicate is not None and not cache.layers:
        # an empty DynamicCache() without a configuration
        cache.layers = ToSTCache(config).layers
        cache.layer_class_to_replicate = None
    kinds = check_cache_kind(cache)
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(
            f"The cache is another model's: it has {len(cache.layers)} layers, this model {config.num_hidden_layers}."
        )
    if kinds != config.layer_types:
        raise ValueError(
            f"The cache is another model's: its layers are {', '.join(map(str, kinds))}, "
            f"this model's {', '.join(config.layer_types)}."
        )
    layer = _first_statistics_layer(cache)
    if not layer.is_initialized:
        return
    batch, *heads = layer.tensors()["sum_sq"].shape
    expected = [config.num_attention_heads // _processes_sharing_heads(config), config.head_dim]
    if heads != expected:
        raise ValueError(f"The cache is another model's: its heads have shape {heads}, this model's {expected}.")
    conv_inputs = 0 if layer.conv_state is None else layer.conv_state.shape[1]
    if conv_inputs != (config.conv_kernel or 1) - 1:
        raise ValueError(
            f"The cache is another model's: it holds {conv_inputs} inputs of a convolution per layer, this model's has "
            f"conv_kernel={config.conv_kernel}."
        )
    if batch != batch_size:
        raise ValueError(f"The cache holds {batch} sequences, the batch {batch_size}; they must be the same.")


def _processes_sharing_heads(config: PreTrainedConfig) -> int:
    """Number of processes over which transformers' tensor parallelism shards the heads."""
    return getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1


def set_cached_length(layer: Any, length: int) -> None:
    """Sets the number of tokens that a layer has seen, if it stores that in a number or a tensor."""
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length += length - int(layer.cumulative_length)
