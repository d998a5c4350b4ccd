# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The cache of a ToST language model: its layers, its checks, its files."""

import os
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticLayer

from .cache_layer_tost import STATE_NAMES, CausalStatisticsLayer
from .configuration_tost import CAUSAL_STATISTICS, FULL_ATTENTION, SLIDING_ATTENTION
from .tssa_reference import TSSAState


FILE_FORMAT = "tost_causal_statistics/1"


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
    if not stated.isascii() or not stated.isdecimal():
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
