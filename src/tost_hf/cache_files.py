# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Caches of ToST language models: chunked prefill, saving and loading, and the size of the state."""

import os
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, StaticCache, StaticLayer
from transformers.utils import logging

from .files import name_file_in_errors, open_safetensors, staged_file
from .model.cache_tost import (
    STATE_NAMES,
    ToSTCache,
    check_layer_types,
    get_layer_type,
)
from .model.configuration_tost import FULL_ATTENTION, SLIDING_ATTENTION, TSSA
from .model.modeling_tost import PREFILL_CHUNK_SIZE
from .model.tssa import TSSAState


FILE_FORMAT = "tost_causal_statistics/1"


class StateBytes(NamedTuple):
    """Size of a sequence's state: recurrent states, last inputs of convolutions, keys and values of softmax attention."""

    saved: int  # at any length, as `save_cache` writes it, in float32; with full sliding windows
    in_memory: int  # at any length, in a cache, where two of the three sums are float64
    per_token: int = 0  # of each token in addition, in layers of full attention


def state_bytes(config: PreTrainedConfig) -> StateBytes:
    """Bytes of the state of one sequence, for a float32 model of this configuration."""
    hidden_size, num_heads = config.hidden_size, config.num_attention_heads
    num_layers = config.layer_types.count(TSSA)
    conv_size = hidden_size * ((config.conv_kernel or 1) - 1)
    key_value_bytes = 4 * 2 * config.num_key_value_heads * config.head_dim  # per token and layer
    window_bytes = config.layer_types.count(SLIDING_ATTENTION) * ((config.sliding_window or 1) - 1) * key_value_bytes
    return StateBytes(
        saved=4 * num_layers * (2 * hidden_size + num_heads + conv_size) + window_bytes,
        in_memory=4 * num_layers * (3 * hidden_size + 2 * num_heads + conv_size) + window_bytes,
        per_token=config.layer_types.count(FULL_ATTENTION) * key_value_bytes,
    )


@torch.no_grad()
def prefill_cache(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    chunk_size: int = PREFILL_CHUNK_SIZE,
    progress_bar: bool = False,
) -> ToSTCache:
    """Processes prompts (B, T) of any length by chunked prefill: activations take the memory of `chunk_size` tokens.

    Args:
        attention_mask: (B, T), 1 at tokens and 0 at padding on either side.

    Raises:
        ValueError: there are no tokens, a prompt is longer than the model's position table, or `chunk_size` is below 1.

    Example:
        >>> cache = prefill_cache(model, input_ids, progress_bar=True)
        >>> save_cache(cache, "manual.safetensors")
    """
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids must be (B, T) with at least one token, got {tuple(input_ids.shape)}.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
    num_tokens, mask = input_ids.shape[1], attention_mask
    if mask is not None:
        if mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask must have shape {tuple(input_ids.shape)}, got {tuple(mask.shape)}.")
        num_tokens, mask = int(mask.sum(1).max()), mask.to(model.device)
    config = model.config
    if config.position_embedding_type == "learned" and num_tokens > (limit := config.max_position_embeddings):
        raise ValueError(
            f"The prompt has {num_tokens:,} tokens, the model positions for {limit:,}: use a shorter prompt, or a model "
            "without a position table."
        )
    cache, end = ToSTCache(model.config), 0
    with logging.tqdm(total=input_ids.shape[1], unit="token", disable=not progress_bar) as bar:
        for chunk in input_ids.to(model.device).split(chunk_size, 1):
            end += chunk.shape[1]
            chunk_mask = None if mask is None else mask[:, :end]  # also of the cached tokens
            model(chunk, attention_mask=chunk_mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
            bar.update(chunk.shape[1])
    return cache


def save_cache(cache: Cache, filename: str | os.PathLike) -> None:
    """Writes a cache of a ToST model (from `generate`, a forward pass or `prefill_cache`) to a safetensors file.

    The write is atomic: an interrupted call leaves an existing file intact.

    Raises:
        ValueError: the cache is empty, or not a ToST model's.
        OSError: the file cannot be written.

    Example:
        >>> outputs = model(input_ids, use_cache=True)
        >>> save_cache(outputs.past_key_values, "prompt.safetensors")
    """
    check_layer_types(cache)
    if not cache.layers or not all(cast(Any, layer).is_initialized for layer in cache.layers):
        raise ValueError("The cache is empty: run the model on the tokens to be cached first.")
    length = int(cache.get_seq_length())
    tensors = {
        f"layers.{i}.{name}": x.detach().cpu().contiguous()
        for i, layer in enumerate(cache.layers)
        for name, x in _collect_tensors(layer, length).items()
    }
    with staged_file(Path(filename)) as staged:
        save_file(tensors, staged, metadata={"format": FILE_FORMAT, "seq_length": str(length)})


def load_cache(
    filename: str | os.PathLike,
    config: PreTrainedConfig,
    device: torch.device | str = "cpu",
    max_cache_len: int | None = None,
) -> Cache:
    """Reads a cache that `save_cache` wrote, for a model with configuration `config`.

    With `max_cache_len` the result is a `StaticCache` for compiled decoding, else a `ToSTCache`. Only the model's sizes are
    compared, not its weights.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is truncated, is not a cache, or belongs to a model of other sizes.

    Example:
        >>> cache = load_cache("prompt.safetensors", model.config)
        >>> model.generate(torch.cat([input_ids, new_input_ids], 1), past_key_values=cache)
    """
    if not os.path.isfile(filename):
        raise FileNotFoundError(f"There is no cache file {os.fspath(filename)!r}.")
    with open_safetensors(filename, str(device)) as file:
        metadata = file.metadata() or {}
        # version 0.2.0 wrote conv_state as recent_inputs
        tensors = {key.replace("recent_inputs", "conv_state"): file.get_tensor(key) for key in file.keys()}
    if metadata.get("format") != FILE_FORMAT:
        raise ValueError(f"{os.fspath(filename)!r} was not written by save_cache (its format is {metadata.get('format')!r}).")
    with name_file_in_errors(Path(filename)):
        length = int(metadata["seq_length"])
    shapes_by_layer = [layer_shapes(config, layer_type, length) for layer_type in config.layer_types]
    expected = {f"layers.{i}.{name}": shape for i, shapes in enumerate(shapes_by_layer) for name, shape in shapes.items()}
    if {key: tuple(x.shape[1:]) for key, x in tensors.items()} != expected:
        raise ValueError(
            f"{os.fspath(filename)!r} belongs to another model: this one has {config.num_hidden_layers} layers of "
            f"{config.num_attention_heads} heads with {config.head_dim} channels."
        )
    cache: Cache = ToSTCache(config) if max_cache_len is None else StaticCache(config, max_cache_len=max_cache_len)
    for i, layer in enumerate(cache.layers):
        _fill_layer(layer, {name: tensors[f"layers.{i}.{name}"] for name in shapes_by_layer[i]}, length)
    return cache


def _collect_tensors(layer: Any, length: int) -> dict[str, torch.Tensor]:
    """The tensors to save of a layer after `length` tokens."""
    layer_type = get_layer_type(layer)
    if layer_type == TSSA:
        # sums are saved in the dtype of sum_sq, although the other two are float64 in memory
        return {name: x.to(layer.sum_sq.dtype) if name in STATE_NAMES else x for name, x in layer.tensors().items()}
    start, end = 0, length
    if layer_type == SLIDING_ATTENTION:  # a static layer stores one more token than a dynamic one
        window = getattr(layer, "sliding_window", None) or layer.max_cache_len
        end = min(length, layer.keys.shape[2])
        start = max(end - window + 1, 0)
    return {"keys": layer.keys[:, :, start:end], "values": layer.values[:, :, start:end]}


def layer_shapes(config: PreTrainedConfig, layer_type: str, length: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes, without the batch dimension, of a layer's tensors after `length` tokens."""
    num_heads, head_dim = config.num_attention_heads, config.head_dim
    if layer_type == TSSA:
        conv_state = {} if config.conv_kernel is None else {"conv_state": (config.conv_kernel - 1, config.hidden_size)}
        return dict(zip(STATE_NAMES, ((num_heads, head_dim), (num_heads, head_dim), (num_heads,)))) | conv_state
    num_tokens = min(length, config.sliding_window - 1) if layer_type == SLIDING_ATTENTION else length
    return dict.fromkeys(("keys", "values"), (config.num_key_value_heads, num_tokens, head_dim))


def _fill_layer(layer: Any, tensors: dict[str, torch.Tensor], length: int) -> None:
    """Sets the tensors of an empty layer, named as in `layer_shapes`, and its number of tokens."""
    if get_layer_type(layer) == TSSA:
        state = TSSAState(*(tensors[name] for name in STATE_NAMES))
        layer.lazy_initialization(state)
        layer.set_state(state)
        layer.set_conv_state(tensors.get("conv_state"))
    else:
        keys, values = tensors["keys"], tensors["values"]
        if isinstance(layer, StaticLayer) and layer.is_sliding:  # stores one token more, which no new token attends to
            num_missing = min(length, layer.max_cache_len) - keys.shape[2]
            keys, values = (F.pad(x, (0, 0, num_missing, 0)) for x in (keys, values))
        layer.update(keys, values)
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length += length - int(layer.cumulative_length)  # in place if it is a tensor
    if hasattr(layer, "cumulative_length_int"):  # static sliding windows have both
        layer.cumulative_length_int = length
