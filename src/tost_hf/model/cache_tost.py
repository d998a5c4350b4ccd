# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The cache of ToST language models: the layer of causal TSSA, three running sums of constant size; checks; files."""

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin, DynamicCache, DynamicLayer, StaticLayer

from .configuration_tost import CAUSAL_STATISTICS, FULL_ATTENTION, SLIDING_ATTENTION
from .layers_tost import find_taps, input_window, last_inputs
from .tssa_state import TSSAState, as_state


# Layer ----------------------------------------------------------------------------------------------------------------


Tensors = TypeVar("Tensors", bound=tuple)

RECORDED_TAIL = 64  # tokens that stay removable after a crop
STATE_NAMES = TSSAState._fields
SAVED_NAMES = (*STATE_NAMES, "recent_inputs")  # of a layer, in memory and in files; the last only with a convolution


class RecordedTokens(NamedTuple):
    """What a layer keeps of tokens that may be taken back."""

    w: torch.Tensor  # projected, (B, t, H, p)
    membership: torch.Tensor  # (B, t, H), 0 at padding
    log_decay: torch.Tensor | None  # (B, t, H), where the layer forgets
    inputs: torch.Tensor | None  # of the layer, (B, t, D), where it has a convolution


class LayerPast(NamedTuple):
    """What a layer knows of the tokens up to one of them."""

    state: TSSAState
    recent_inputs: torch.Tensor | None


class CausalStatisticsLayer(CacheLayerMixin):
    """Running statistics of one causal TSSA layer.

    `sum_sq` and `sum_weighted_sq` are (B, H, p), `sum_membership` is (B, H); None until the first update. They have the dtypes
    of a `TSSAState`: the last two are float64, so that a million small terms, added one by one, are not lost. In a layer with
    a convolution `recent_inputs` (B, conv_kernel - 1, D) holds the layer's last inputs, oldest first; else it is None.

    With `max_cache_len` (as `StaticCache` passes it) or `static=True` the tensors keep their addresses, the number of tokens
    seen included, so that a compiled decode step is neither recompiled nor skipped by CUDA graphs; the
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
        self.is_compileable = self.static
        self.sum_sq: torch.Tensor | None = None
        self.sum_weighted_sq: torch.Tensor | None = None
        self.sum_membership: torch.Tensor | None = None
        self.recent_inputs: torch.Tensor | None = None
        # a tensor, not a number: a number is part of an exported program, which would then be one for caches of that length
        self.cumulative_length: Any = torch.zeros((), dtype=torch.long, device="cpu")
        self.device: torch.device | None = None
        self.record_past = False
        self._base: LayerPast | None = None  # before the first recorded token
        self._recorded: list[RecordedTokens] = []

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
    def may_be_overwritten(self) -> bool:
        """Whether a step may add to the tensors of `state` themselves: nobody else looks at them, now or in a backward."""
        if not self.is_initialized or self.record_past or torch.is_grad_enabled():
            return False
        state = self._stored_state()
        if any(x is not y for x, y in zip(as_state(state, state.sum_sq), state)):  # cast by others, such as an exporter
            return False
        return self.static if torch.compiler.is_compiling() else all(map(_is_its_own, state))

    @property
    def past_inputs(self) -> torch.Tensor | None:
        """`recent_inputs`, on the device they were computed on."""
        self.prefetch()
        return self.recent_inputs

    @property
    def batch_size(self) -> int:
        """Number of sequences; AttributeError before the first token, as in transformers' own lazy layers."""
        if self.sum_sq is None:
            raise AttributeError("The layer has seen no token yet, so its batch size is unknown.")
        return self.sum_sq.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that the layer's sums and recent inputs take in memory; those of recorded tokens come on top."""
        return sum(x.nbytes for x in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the layer holds, by name; none before the first token."""
        held = {name: getattr(self, name) for name in SAVED_NAMES}
        return {name: x for name, x in held.items() if x is not None}

    # float64 sums take the bytes of float32 sums with float32 remainders, and need no adding and splitting at every step
    def _stored_state(self) -> TSSAState:
        assert self.sum_sq is not None and self.sum_weighted_sq is not None and self.sum_membership is not None
        return TSSAState(self.sum_sq, self.sum_weighted_sq, self.sum_membership)

    def set_state(self, state: TSSAState) -> None:
        """Takes over new sums: in place where addresses are static, and for the same batch size."""
        for name, new in zip(STATE_NAMES, as_state(state, state.sum_sq)):
            self._store(name, new)

    def set_recent_inputs(self, recent_inputs: torch.Tensor | None) -> None:
        """Takes over new last inputs, as `set_state` does with sums."""
        if recent_inputs is not None:
            self._store("recent_inputs", recent_inputs)

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
        """Makes room for sums of the given state's shapes, dtype and device."""
        self.device = state.sum_sq.device
        if self.static or torch.compiler.is_compiling():  # else on the CPU, where reading it waits for no device
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
        recent_inputs: torch.Tensor | None = None,
    ) -> None:
        """Stores what is known after new tokens.

        Args:
            state: the sums after these tokens.
            w: the projected tokens, (B, T, H, p).
            membership: their membership, (B, H, T), 0 at padding.
            log_decay: logarithm of their forget factors, (B, T, H), where the layer forgets.
            inputs: of the layer, (B, T, D), where it has a convolution.
            recent_inputs: the last of them, (B, conv_kernel - 1, D).
        """
        if not self.is_initialized:
            self.lazy_initialization(state)
        if self.record_past:
            if recent_inputs is None:
                inputs = None
            elif self.recent_inputs is None:
                self.set_recent_inputs(torch.zeros_like(recent_inputs))
            if not self._recorded:
                self._base = _map_tensors(torch.clone, LayerPast(self._stored_state(), self.recent_inputs))
            self._recorded.append(RecordedTokens(w, membership.transpose(1, 2), log_decay, inputs))
        self.set_state(state)
        self.set_recent_inputs(recent_inputs)
        if self.static:
            self.cumulative_length.add_(w.shape[1])
        else:
            self.cumulative_length = self.cumulative_length + w.shape[1]

    def update(self, key_states, value_states, *args, **kwargs):
        raise NotImplementedError(
            f"{type(self).__name__} keeps statistics, not keys and values: use it with a ToST model, which calls update_state."
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
        recorded = sum(tokens.w.shape[1] for tokens in self._recorded)
        keep = recorded + tokens_to_remove
        if keep < 0:
            raise ValueError(f"Cannot take back {-tokens_to_remove} tokens: only the last {recorded} are recorded.")
        if not recorded:
            return
        tokens = RecordedTokens._make(None if x[0] is None else torch.cat(x, 1) for x in zip(*self._recorded))
        assert self._base is not None  # kept with the first record
        forgotten = max(keep - RECORDED_TAIL, 0)
        self._base = _add_tokens(self._base, _map_tensors(lambda x: x[:, :forgotten], tokens))
        tokens = _map_tensors(lambda x: x[:, forgotten:keep], tokens)
        self._recorded = [tokens] if keep else []
        if tokens_to_remove:
            past = _add_tokens(self._base, tokens)
            self.set_state(past.state)
            self.set_recent_inputs(past.recent_inputs)
            self.cumulative_length += tokens_to_remove

    # Batch ------------------------------------------------------------------------------------------------------------

    def _map_batch(self, fn) -> None:
        """Applies `fn` to every tensor with a batch dimension."""
        if not self.is_initialized:
            return
        past = _map_tensors(fn, LayerPast(self._stored_state(), self.recent_inputs))
        self.set_state(past.state)
        self.set_recent_inputs(past.recent_inputs)
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
        """Back to the start of a sequence; tensors stay where they are."""
        for x in self.tensors().values():
            x.detach().zero_()
        self._forget()
        self.cumulative_length.zero_()

    # Devices ----------------------------------------------------------------------------------------------------------

    def _move(self, device: torch.device) -> None:
        if self.sum_sq is not None and self.sum_sq.device != device:
            for name, x in self.tensors().items():
                setattr(self, name, x.to(device, non_blocking=True))

    def offload(self) -> None:
        """Moves the sums to the CPU; the next use brings them back."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Moves the sums back to the device they were computed on."""
        if self.device is not None:
            self._move(self.device)


# CacheLayerMixin enters subclasses in the dynamic table only
STATIC_LAYER_TYPE_MAPPING[CAUSAL_STATISTICS] = CausalStatisticsLayer


def _map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], values: Tensors) -> Tensors:
    """A NamedTuple of tensors, None and more such tuples, with `fn` applied to every tensor."""
    kind: Any = type(values)
    return kind(*(x if x is None else _map_tensors(fn, x) if isinstance(x, tuple) else fn(x) for x in values))


def _is_its_own(x: torch.Tensor) -> bool:
    """Whether adding to a tensor in place is allowed, and changes no other tensor."""
    if x.requires_grad or (x.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    return x.is_contiguous() and x.nbytes == x.untyped_storage().nbytes()


def _add_tokens(past: LayerPast, tokens: RecordedTokens) -> LayerPast:
    """What is known after more tokens."""
    state, membership, recent = past.state, tokens.membership, past.recent_inputs
    # padding is recognised by its membership, which is 0 in every head, and only there
    real = membership.sum(-1) != 0
    x = tokens.w.to(state.sum_sq.dtype).masked_fill(~real[..., None, None], 0)
    terms = TSSAState(sq := x * x, sq * membership.unsqueeze(-1), membership)
    if tokens.log_decay is not None:
        log_decay = tokens.log_decay.masked_fill(~real.unsqueeze(-1), 0)
        up_to = log_decay.flip(1).cumsum(1).flip(1)  # of each token and all later ones
        later = (up_to - log_decay).exp()  # what later tokens leave of each one
        terms = TSSAState(*(term * later.view(*later.shape, *[1] * (term.ndim - 3)) for term in terms))
        total = up_to[:, :1].sum(1).exp()  # 1 where there are no tokens
        state = TSSAState(*(old * total.view(*total.shape, *[1] * (old.ndim - 2)) for old in state))
    sums = TSSAState(*(old + term.sum(1) for old, term in zip(state, terms)))
    if recent is not None:
        assert tokens.inputs is not None  # recorded with recent inputs
        kernel = recent.shape[1] + 1
        recent = last_inputs(input_window(recent, tokens.inputs, kernel), find_taps(kernel, real, None), kernel)
    return LayerPast(sums, recent)


# Cache ----------------------------------------------------------------------------------------------------------------


FILE_FORMAT = "tost_causal_statistics/1"
MAX_LENGTH_DIGITS = 18  # of a number of tokens; an int64 holds it


class StateBytes(NamedTuple):
    """Size of what a sequence is remembered by: running sums, recent inputs of convolutions, keys and values of attention."""

    saved: int  # at every length, as `save_cache` writes it, in float32; with sliding windows once they are full
    in_memory: int  # the same where two of the three sums are float64
    per_token: int = 0  # what each token adds, in layers of full attention


def state_bytes(config: PreTrainedConfig) -> StateBytes:
    """Bytes of the state of one sequence, for a float32 model of this configuration."""
    width, heads = config.hidden_size, config.num_attention_heads
    layers = config.layer_types.count(CAUSAL_STATISTICS)
    recent = width * ((config.conv_kernel or 1) - 1)
    key_value = 4 * 2 * (config.num_key_value_heads or heads) * config.head_dim  # of a token in a layer
    windows = config.layer_types.count(SLIDING_ATTENTION) * ((config.sliding_window or 1) - 1) * key_value
    return StateBytes(
        saved=4 * layers * (2 * width + heads + recent) + windows,
        in_memory=4 * layers * (3 * width + 2 * heads + recent) + windows,
        per_token=config.layer_types.count(FULL_ATTENTION) * key_value,
    )


class CausalStatisticsCache(Cache):
    """The running statistics of all layers of a ToST language model; keys and values where a layer has attention.

    Args:
        config: the model's configuration.
        static: keep the tensors' addresses, for `torch.compile` and CUDA graphs; not for hybrid models (see `StaticCache`).

    Size: num_hidden_layers * (2 * hidden_size + num_attention_heads) numbers per sequence, whatever its length: for tost-base
    74,304 bytes as `save_cache` writes them, in float32, and 111,744 in memory, where two of the three sums are float64.
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
    """Which of a configuration's `layer_types` a cache layer serves; None for any other."""
    if getattr(layer, "_layer_type", None) == CAUSAL_STATISTICS:
        return CAUSAL_STATISTICS
    if isinstance(layer, DynamicLayer | StaticLayer):
        return SLIDING_ATTENTION if layer.is_sliding else FULL_ATTENTION
    return None


def cached_length(cache: Cache) -> int | torch.Tensor:
    """Tokens seen by a cache of a ToST model, padding included (a 0-dimensional tensor where static or compiled)."""
    return _statistics_layer(cache).get_seq_length()


def _statistics_layer(cache: Cache) -> CausalStatisticsLayer:
    return cast(CausalStatisticsLayer, next(layer for layer in cache.layers if layer_type_of(layer) == CAUSAL_STATISTICS))


def check_cache_kind(cache: Cache) -> list[str | None]:
    """Refuses a cache that is not a ToST model's; returns what `layer_type_of` says of its layers.

    Layers are told by their type's name: code loaded from the Hub has a class of its own.
    """
    if not isinstance(cache, Cache):
        raise TypeError(
            f"past_key_values must be a transformers Cache such as CausalStatisticsCache, got {type(cache).__name__}."
        )
    kinds = [layer_type_of(layer) for layer in cache.layers]
    for kind, layer in zip(kinds, cache.layers):
        if kind is None or CAUSAL_STATISTICS not in kinds:
            raise ValueError(
                f"past_key_values holds {type(layer).__name__}s of another kind of model; a ToST model needs "
                "CausalStatisticsCache(config) or DynamicCache(config=model.config)."
            )
    return kinds


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
    layer = _statistics_layer(cache)
    if not layer.is_initialized:
        return
    batch, *heads = layer.tensors()["sum_sq"].shape
    expected = [config.num_attention_heads // _processes_sharing_heads(config), config.head_dim]
    if heads != expected:
        raise ValueError(f"The cache is another model's: its heads have shape {heads}, this model's {expected}.")
    recent = 0 if layer.recent_inputs is None else layer.recent_inputs.shape[1]
    if recent != (config.conv_kernel or 1) - 1:
        raise ValueError(
            f"The cache is another model's: it holds {recent} inputs of a convolution per layer, this model's has "
            f"conv_kernel={config.conv_kernel}."
        )
    if batch != batch_size:
        raise ValueError(f"The cache holds {batch} sequences, the batch {batch_size}; they must be the same.")


def _processes_sharing_heads(config: PreTrainedConfig) -> int:
    """How many processes each have some of the heads, by transformers' tensor parallelism."""
    return getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1


# Rows ----------------------------------------------------------------------------------------------------------------


def join_rows(caches: Sequence[Cache], longest: int) -> Cache:
    """One dynamic cache with the rows of several of one model, put into the first of them; the others may not be used again.

    Keys and values are aligned at their ends: rows with fewer tokens have padding before them, which the attention mask has to
    leave out. Statistics need none.

    Args:
        longest: number of tokens that the longest row has seen.
    """
    for layers in zip(*(cache.layers for cache in caches)):
        joined = cast(Any, layers[0])
        if layer_type_of(joined) == CAUSAL_STATISTICS:
            joined.set_state(TSSAState(*map(torch.cat, zip(*(layer.state for layer in layers)))))
            if joined.recent_inputs is not None:
                joined.set_recent_inputs(torch.cat([layer.past_inputs for layer in layers]))
        else:
            kept = min(longest, joined.sliding_window - 1) if joined.is_sliding else longest
            for name in ("keys", "values"):
                setattr(joined, name, torch.cat([_last_tokens(getattr(layer, name), kept) for layer in layers]))
        _set_length(joined, longest)
    return caches[0]


def _set_length(layer: Any, length: int) -> None:
    """Says how many tokens a layer has seen, where it does not tell that from its tensors: in a number or a tensor."""
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length += length - int(layer.cumulative_length)


def _last_tokens(x: torch.Tensor, count: int) -> torch.Tensor:
    """The last tokens of keys or values (B, heads, tokens, width), with zeros before them where there are fewer."""
    missing = count - x.shape[2]
    return F.pad(x, (0, 0, missing, 0)) if missing >= 0 else x[:, :, -missing:]


# Files ---------------------------------------------------------------------------------------------------------------


def save_cache(cache: Cache, filename: str | os.PathLike) -> None:
    """Writes a cache of a ToST model (from `generate`, a forward pass, or your own) to a safetensors file.

    The file is written under a temporary name and then moved, so an interrupted call leaves an older file whole.

    Raises:
        ValueError: the cache is empty, or not a ToST model's.
        OSError: the file cannot be written.
    """
    check_cache_kind(cache)
    if not cache.layers or not all(cast(Any, layer).is_initialized for layer in cache.layers):
        raise ValueError("The cache is empty: run the model on the text that is to be cached first.")
    length = int(cached_length(cache))
    tensors = {
        f"layers.{i}.{name}": x.detach().cpu().contiguous()
        for i, layer in enumerate(cache.layers)
        for name, x in _tensors_of(layer, length).items()
    }
    metadata = {"format": FILE_FORMAT, "seq_length": str(length)}
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
    stated = metadata.get("seq_length", "")
    if not stated.isascii() or not stated.isdecimal() or len(stated) > MAX_LENGTH_DIGITS:
        raise ValueError(f"{os.fspath(filename)!r} is damaged: its metadata gives {stated!r} as the number of cached tokens.")
    length = int(stated)
    layers = [layer_shapes(config, kind, length) for kind in config.layer_types]
    expected = {f"layers.{i}.{name}": shape for i, shapes in enumerate(layers) for name, shape in shapes.items()}
    if {key: tuple(x.shape[1:]) for key, x in tensors.items()} != expected:
        raise ValueError(
            f"{os.fspath(filename)!r} belongs to another model: this one has {config.num_hidden_layers} layers of "
            f"{config.num_attention_heads} heads with {config.head_dim} channels."
        )
    if len({len(x) for x in tensors.values()}) > 1 or not all(x.is_floating_point() for x in tensors.values()):
        raise ValueError(f"{os.fspath(filename)!r} is damaged: its sums are not of one batch, or no floating-point numbers.")
    cache = CausalStatisticsCache(config, static=static)
    for i, layer in enumerate(cache.layers):
        _fill(layer, {name: tensors[f"layers.{i}.{name}"] for name in layers[i]}, length)
    return cache


def _tensors_of(layer: Any, length: int) -> dict[str, torch.Tensor]:
    """What is written of a layer that has seen `length` tokens."""
    kind = layer_type_of(layer)
    if kind == CAUSAL_STATISTICS:
        # the sums in the narrower one of their dtypes, inputs as they are
        return {name: x.to(layer.sum_sq.dtype) if name in STATE_NAMES else x for name, x in layer.tensors().items()}
    first = 0
    if kind == SLIDING_ATTENTION:  # a static one keeps one token more
        window = getattr(layer, "sliding_window", None) or layer.max_cache_len
        first, length = max(min(length, layer.keys.shape[2]) - window + 1, 0), min(length, layer.keys.shape[2])
    return {"keys": layer.keys[:, :, first:length], "values": layer.values[:, :, first:length]}


def layer_shapes(config: PreTrainedConfig, kind: str, length: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes, without the batch, of what a layer holds after `length` tokens."""
    heads, width = config.num_attention_heads, config.head_dim
    if kind == CAUSAL_STATISTICS:
        recent = {} if config.conv_kernel is None else {"recent_inputs": (config.conv_kernel - 1, config.hidden_size)}
        return dict(zip(STATE_NAMES, ((heads, width), (heads, width), (heads,)))) | recent
    kept = min(length, config.sliding_window - 1) if kind == SLIDING_ATTENTION else length
    return dict.fromkeys(("keys", "values"), (config.num_key_value_heads or heads, kept, width))


def _fill(layer: Any, tensors: dict[str, torch.Tensor], length: int) -> None:
    if layer_type_of(layer) == CAUSAL_STATISTICS:
        state = TSSAState(*(tensors[name] for name in STATE_NAMES))
        layer.lazy_initialization(state)
        layer.set_state(state)
        layer.set_recent_inputs(tensors.get("recent_inputs"))
    else:
        layer.update(tensors["keys"], tensors["values"])
    _set_length(layer, length)
