# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The cache of a causal TSSA model: three running sums per layer, of constant size, inside transformers' Cache framework.

`generate()` builds these layers by itself, from `config.layer_types`.
"""

import os
import tempfile
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin

from .configuration_tost import CAUSAL_STATISTICS
from .tssa_state import TSSAState, as_state


RECORDED_TAIL = 64  # tokens that stay removable after a crop
STATE_NAMES = TSSAState._fields
FILE_FORMAT = "tost_causal_statistics/1"


class CausalStatisticsLayer(CacheLayerMixin):
    """Running statistics of one causal TSSA layer.

    `sum_sq` and `sum_weighted_sq` are (B, H, p), `sum_membership` is (B, H); None until the first update. They have the dtypes
    of a `TSSAState`: the last two are float64, so that a million small terms, added one by one, are not lost.

    With `max_cache_len` (as `StaticCache` passes it) or `static=True` the tensors keep their addresses and the number
    of tokens seen is a tensor, so that a compiled decode step is neither recompiled nor skipped by CUDA graphs; the
    cached sums then carry no gradient. The number itself limits nothing: the state is of one size at any length.

    While recording is on (`activate_past_recording`), the tokens since the last `crop`, and up to 64 before it, can be
    taken back exactly: the sums are put together again from those before the recorded tokens, nothing is subtracted.
    """

    _layer_type = CAUSAL_STATISTICS
    is_croppable = True
    supports_early_init = False  # the key/value shapes of that path mean nothing here

    def __init__(self, max_cache_len: int | None = None, static: bool = False, **kwargs):
        super().__init__()
        self.static = static or max_cache_len is not None
        self.max_cache_len = max_cache_len
        self.sum_sq = self.sum_weighted_sq = self.sum_membership = None
        self.cumulative_length = torch.tensor(0, dtype=torch.long) if self.static else 0
        self.device = None
        self.record_past = False
        self._base: TSSAState | None = None  # the sums before the first recorded token
        self._recorded: list[tuple[torch.Tensor, torch.Tensor]] = []  # (w (B, t, H, p), membership (B, H, t))

    @property
    def is_compileable(self) -> bool:
        return self.static

    @property
    def state(self) -> TSSAState | None:
        """The three running sums, or None before the first token."""
        if not self.is_initialized:
            return None
        self.prefetch()
        state = self._stored_state()
        if self.static and torch.is_grad_enabled():  # a backward pass must not find it overwritten
            state = TSSAState(*(x.clone() for x in state))
        return state

    @property
    def nbytes(self) -> int:
        """Bytes that the layer's sums take in memory; those of recorded tokens come on top."""
        return sum(x.nbytes for x in self._stored_state()) if self.is_initialized else 0

    # float64 sums take the bytes of float32 sums with float32 remainders, and need no adding and splitting at every step
    def _stored_state(self) -> TSSAState:
        return TSSAState(self.sum_sq, self.sum_weighted_sq, self.sum_membership)

    def set_state(self, state: TSSAState) -> None:
        """Takes over new sums: in place where addresses are static, and for the same batch size."""
        for name, new in zip(STATE_NAMES, as_state(state, state.sum_sq)):
            old = getattr(self, name)
            if self.static and old is not None and old.shape == new.shape:
                old.copy_(new.detach())
            else:
                setattr(self, name, new.detach().clone() if self.static else new)
                self._mark_static(getattr(self, name))
        self.batch_size = state.sum_sq.shape[0]

    def _mark_static(self, tensor: torch.Tensor) -> None:
        if self.static and not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(tensor)

    def lazy_initialization(self, state: TSSAState) -> None:
        """Makes room for sums of the given state's shapes, dtype and device."""
        self.device = state.sum_sq.device
        if self.static:
            self.cumulative_length = self.cumulative_length.to(self.device)
            self._mark_static(self.cumulative_length)
        self.set_state(TSSAState(*(torch.zeros_like(x) for x in state)))
        self.is_initialized = True

    def update_state(self, state: TSSAState, w: torch.Tensor, membership: torch.Tensor) -> None:
        """Stores the sums after new tokens.

        Args:
            state: the sums after these tokens.
            w: the projected tokens, (B, T, H, p).
            membership: their membership, (B, H, T), 0 at padding.
        """
        if not self.is_initialized:
            self.lazy_initialization(state)
        if self.record_past:
            if not self._recorded:
                self._base = TSSAState(*(x.clone() for x in self._stored_state()))
            self._recorded.append((w, membership))
        self.set_state(state)
        if self.static:
            self.cumulative_length.add_(w.shape[1])
        else:
            self.cumulative_length += w.shape[1]

    def update(self, key_states, value_states, *args, **kwargs):
        raise NotImplementedError(
            f"{type(self).__name__} keeps statistics, not keys and values: use it with a ToST model, which calls update_state."
        )

    def get_seq_length(self) -> int:
        """Tokens seen, padding included (a 0-dimensional tensor where static)."""
        return self.cumulative_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    # Rollback ---------------------------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """From here on keeps what `crop` needs. Memory grows with the tokens between two calls of `crop`."""
        if not self.record_past:
            self._forget()
        self.record_past = True

    def _forget(self) -> None:
        self._base, self._recorded = None, []

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens, padding counted (0 removes none, and frees old records).

        Raises:
            ValueError: the number is positive, or more tokens than were recorded.
            RuntimeError: recording is not on.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}.")
        if not self.record_past:
            raise RuntimeError("Call activate_past_recording() on the cache before the tokens that crop is to take back.")
        recorded = sum(w.shape[1] for w, _ in self._recorded)
        keep = recorded + tokens_to_remove
        if keep < 0:
            raise ValueError(f"Cannot take back {-tokens_to_remove} tokens: only the last {recorded} are recorded.")
        if not recorded:
            return
        w = torch.cat([w for w, _ in self._recorded], 1)[:, :keep]
        membership = torch.cat([membership for _, membership in self._recorded], 2)[:, :, :keep]
        forgotten = max(keep - RECORDED_TAIL, 0)
        self._base = _add_tokens(self._base, w[:, :forgotten], membership[:, :, :forgotten])
        w, membership = w[:, forgotten:], membership[:, :, forgotten:]
        self._recorded = [(w, membership)] if keep else []
        if tokens_to_remove:
            self.set_state(_add_tokens(self._base, w, membership))
            self.cumulative_length += tokens_to_remove

    # Batch ------------------------------------------------------------------------------------------------------------

    def _map_batch(self, fn) -> None:
        """Applies `fn` to every tensor with a batch dimension."""
        if not self.is_initialized:
            return
        self.set_state(TSSAState(*map(fn, self._stored_state())))
        if self._base is not None:
            self._base = TSSAState(*map(fn, self._base))
        self._recorded = [(fn(w), fn(membership)) for w, membership in self._recorded]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map_batch(lambda x: x[indices.to(x.device)])

    def reset(self) -> None:
        """Back to the start of a sequence; tensors stay where they are."""
        if self.is_initialized:
            for name in STATE_NAMES:
                getattr(self, name).detach().zero_()
        self._forget()
        if self.static:
            self.cumulative_length.zero_()
        else:
            self.cumulative_length = 0

    # Devices ----------------------------------------------------------------------------------------------------------

    def _move(self, device: torch.device) -> None:
        if self.is_initialized and self.sum_sq.device != device:
            for name in STATE_NAMES:
                setattr(self, name, getattr(self, name).to(device, non_blocking=True))

    def offload(self) -> None:
        """Moves the sums to the CPU; the next use brings them back."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Moves the sums back to the device they were computed on."""
        self._move(self.device)


# CacheLayerMixin enters subclasses in the dynamic table only
STATIC_LAYER_TYPE_MAPPING[CAUSAL_STATISTICS] = CausalStatisticsLayer


def _add_tokens(state: TSSAState, w: torch.Tensor, membership: torch.Tensor) -> TSSAState:
    """The sums after tokens w (B, t, H, p) with membership (B, H, t), 0 at padding."""
    membership = membership.transpose(1, 2)
    # padding is recognised by its membership, which is 0 in every head, and only there
    x = w.to(state.sum_sq.dtype).masked_fill((membership.sum(-1) == 0)[..., None, None], 0)
    sq = x * x
    return TSSAState(
        state.sum_sq + sq.sum(1),
        state.sum_weighted_sq + (sq * membership.unsqueeze(-1)).sum(1),
        state.sum_membership + membership.sum(1),
    )


class StateBytes(NamedTuple):
    """Size of a sequence's running sums, at every length."""

    saved: int  # as `save_cache` writes them, in float32
    in_memory: int  # where two of the three are float64


def state_bytes(config: PreTrainedConfig) -> StateBytes:
    """Bytes of the running sums of one sequence, for a float32 or narrower model of this configuration."""
    layers, width, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    return StateBytes(saved=4 * layers * (2 * width + heads), in_memory=4 * layers * (3 * width + 2 * heads))


class CausalStatisticsCache(Cache):
    """The running statistics of all layers of a ToST language model.

    Args:
        config: the model's configuration.
        static: keep the tensors' addresses, for `torch.compile` and CUDA graphs.

    Size: num_hidden_layers * (2 * hidden_size + num_attention_heads) numbers per sequence, whatever its length: for tost-base
    74,304 bytes as `save_cache` writes them, in float32, and 111,744 in memory, where two of the three sums are float64.
    """

    def __init__(self, config: PreTrainedConfig, static: bool = False):
        super().__init__(layers=[CausalStatisticsLayer(static=static) for _ in range(config.num_hidden_layers)])


def save_cache(cache: Cache, filename: str | os.PathLike) -> None:
    """Writes a cache of a ToST model (from `generate`, a forward pass, or your own) to a safetensors file.

    The file is written under a temporary name and then moved, so an interrupted call leaves an older file whole.

    Raises:
        ValueError: the cache is empty, or not a ToST model's.
        OSError: the file cannot be written.
    """
    check_cache_kind(cache)
    if not cache.layers or not all(layer.is_initialized for layer in cache.layers):
        raise ValueError("The cache is empty: run the model on the text that is to be cached first.")
    tensors = {
        f"layers.{i}.{name}": x.detach().to("cpu", layer.sum_sq.dtype).contiguous()
        for i, layer in enumerate(cache.layers)
        for name, x in zip(STATE_NAMES, layer.state)
    }
    metadata = {"format": FILE_FORMAT, "seq_length": str(int(cache.get_seq_length()))}
    folder = os.path.dirname(os.path.abspath(filename))
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, filename)
    except SafetensorError as error:  # a full disk comes as one
        raise OSError(f"{os.fspath(filename)!r} could not be written; is the disk full? ({error})") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def load_cache(
    filename: str | os.PathLike,
    config: PreTrainedConfig,
    device: torch.device | str = "cpu",
    static: bool = False,
) -> CausalStatisticsCache:
    """Reads a cache that `save_cache` wrote, for a model of configuration `config`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, is not a cache, or belongs to a model of other sizes.
    """
    if not os.path.isfile(filename):
        raise FileNotFoundError(f"There is no cache file {os.fspath(filename)!r}.")
    try:
        with safe_open(filename, "pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except Exception as error:  # safetensors raises one class of its own for every kind of damage
        raise ValueError(f"{os.fspath(filename)!r} is not a readable safetensors file: {error}") from error
    if metadata.get("format") != FILE_FORMAT:
        raise ValueError(f"{os.fspath(filename)!r} was not written by save_cache (its format is {metadata.get('format')!r}).")
    length = metadata.get("seq_length", "")
    if not length.isascii() or not length.isdecimal():
        raise ValueError(f"{os.fspath(filename)!r} is damaged: its metadata gives {length!r} as the number of cached tokens.")
    H, p = config.num_attention_heads, config.head_dim
    shapes = dict(zip(STATE_NAMES, ((H, p), (H, p), (H,))))
    expected = {f"layers.{i}.{name}": shapes[name] for i in range(config.num_hidden_layers) for name in STATE_NAMES}
    found = {key: tuple(x.shape[1:]) for key, x in tensors.items()}
    if found != expected:
        raise ValueError(
            f"{os.fspath(filename)!r} belongs to another model: this one has {config.num_hidden_layers} layers of {H} heads "
            f"with {p} channels."
        )
    if len({len(x) for x in tensors.values()}) > 1 or not all(x.is_floating_point() for x in tensors.values()):
        raise ValueError(f"{os.fspath(filename)!r} is damaged: its sums are not of one batch, or no floating-point numbers.")
    cache = CausalStatisticsCache(config, static=static)
    for i, layer in enumerate(cache.layers):
        state = TSSAState(*(tensors[f"layers.{i}.{name}"] for name in STATE_NAMES))
        layer.lazy_initialization(state)
        layer.set_state(state)
        layer.cumulative_length += int(length)
    return cache


def check_cache_kind(cache: Cache) -> None:
    """Refuses a cache that is not a ToST model's.

    Layers are told by their type's name: code loaded from the Hub has a class of its own.
    """
    if not isinstance(cache, Cache):
        raise TypeError(
            f"past_key_values must be a transformers Cache such as CausalStatisticsCache, got {type(cache).__name__}."
        )
    for layer in cache.layers:
        if getattr(layer, "_layer_type", None) != CAUSAL_STATISTICS:
            raise ValueError(
                f"past_key_values holds {type(layer).__name__}s of another kind of model; a ToST model needs "
                "CausalStatisticsCache(config) or DynamicCache(config=model.config)."
            )


def check_cache(cache: Cache, config: PreTrainedConfig, batch_size: int) -> None:
    """Refuses a cache that a model of this configuration cannot go on from with this batch; fills an empty `DynamicCache()`.

    Raises:
        TypeError: it is no transformers Cache.
        ValueError: it is another model's, or holds another number of sequences.
    """
    if isinstance(cache, Cache) and cache.layer_class_to_replicate is not None and not cache.layers:
        # DynamicCache() without a config, still empty: give it the right layers
        cache.layers = CausalStatisticsCache(config).layers
        cache.layer_class_to_replicate = None
    check_cache_kind(cache)
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(
            f"The cache is another model's: it has {len(cache.layers)} layers, this model {config.num_hidden_layers}."
        )
    layer = cache.layers[0]
    if not layer.is_initialized:
        return
    batch, *heads = layer.sum_sq.shape
    expected = [config.num_attention_heads, config.head_dim]
    if heads != expected:
        raise ValueError(f"The cache is another model's: its heads have shape {heads}, this model's {expected}.")
    if batch != batch_size:
        raise ValueError(f"The cache holds {batch} sequences, the batch {batch_size}; they must be the same.")
