# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Context parallelism: each process computes one shard of the tokens of every sequence.

The statistics of causal TSSA are sums: a shard needs only three sums per head over the previous shards. Two all-gathers per
layer provide them: first the sums of squares, which determine the memberships, then the sums weighted by these. A layer with
a convolution also exchanges its last inputs. The size of an exchange does not depend on the number of tokens, except in the
softmax attention layers of hybrid models, which gather the keys and values of all shards.

Within the layers of a process, `seq_idx` numbers the packed sequences of its shard. Number 0 is the sequence that continues
from the previous shard; if the first token starts a sequence, its number is 1.
"""

import functools
import inspect
from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..model.configuration_tost import BATCH_DEPENDENT_ROPE_TYPES, TSSA, ToSTConfig
from ..model.inputs_tost import create_causal_mask_mapping, resolve_inputs
from ..model.layers_tost import LayerOperators, ShortConvolution, TokenStatisticsSelfAttention
from ..model.modeling_tost import ToSTAttention, ToSTForCausalLM, ToSTModel
from ..model.tssa import TSSAOutput, tssa
from ..model.tssa_reference import (
    TSSAState,
    apply_decay,
    compute_dtype,
    left_padding_indices,
    mask_padding,
    permute_tokens,
    sequence_starts,
    zero_state,
)
from .collectives import gather


Model = TypeVar("Model", bound=nn.Module)
IGNORE_INDEX = -100  # the label of a token without a target
CHECK_INTERVAL = 100  # forward passes between comparisons of the processes' batches
# inputs that must be the same on all processes
COMPARED_INPUTS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "seq_idx",
    "cu_seq_lens_q",
    "labels",
    "shift_labels",
)


def parallelize(model: Model, device_mesh: DeviceMesh) -> Model:
    """Shards the sequences of a model along their tokens over the processes of a mesh; in place.

    All processes of `device_mesh` receive the same full batch. Each computes its shard of the tokens, `local_tokens`, and
    returns the hidden states and logits of this shard. Positions, padding, packed sequences and labels refer to the full
    sequences, and the loss is that of the full batch on every process. The first forward pass and every hundredth after it, in
    training and in evaluation, compare the batches of the processes, and raise a ValueError on all of them if they differ.

    Gradients have to be averaged over these processes as well as over those with other batches, as DistributedDataParallel
    and fully_shard do: wrap the model afterwards.

    Args:
        model: a `ToSTModel` or `ToSTForCausalLM`; a hybrid one with attn_implementation "sdpa" or "eager".
        device_mesh: a mesh of one dimension, such as `mesh["cp"]`.

    Returns:
        The model.

    Raises:
        TypeError: `model` is of another class, or `device_mesh` is not a `DeviceMesh`.
        ValueError: the model is an encoder, has unnormalized scores, another attention implementation or rotary positions that
            depend on the longest sequence, is already parallel, or the mesh has several dimensions.

    Example, in each of four processes:

    ```python
    >>> mesh = torch.distributed.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    >>> model = parallelize(model, mesh["cp"])
    >>> model(input_ids, labels=input_ids).loss.backward()  # the full batch everywhere
    ```
    """
    if not isinstance(model, ToSTModel | ToSTForCausalLM):
        model_type = f"{type(model).__module__}.{type(model).__name__}"
        raise TypeError(f"parallelize expects a ToSTModel or a ToSTForCausalLM of the package tost_hf, got a {model_type}.")
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f'parallelize expects a torch DeviceMesh, such as mesh["cp"], got a {type(device_mesh).__name__}.')
    if device_mesh.ndim != 1:
        raise ValueError(f'parallelize expects a mesh of one dimension, got {device_mesh.ndim}: name one, such as mesh["cp"].')
    if not model.config.is_causal:
        raise ValueError("parallelize does not support encoders (is_causal=False): their sums are over all tokens.")
    if model.config.has_attention:
        _check_attention(model.config)
    layers = [layer for layer in model.modules() if isinstance(layer, TokenStatisticsSelfAttention)]
    if any(layer.operators != LayerOperators() for layer in layers):
        raise ValueError("The model is context-parallel or tensor-parallel already.")
    operators = LayerOperators(
        tssa=functools.partial(tssa_context_parallel, device_mesh),
        step=_raise_on_step,
        convolve=functools.partial(convolve_context_parallel, device_mesh),
    )
    for layer in layers:
        layer.operators = operators
    for module in model.modules():
        if isinstance(module, ToSTAttention):
            module.register_forward_pre_hook(_use_earlier_key_values, with_kwargs=True)
    model.register_forward_pre_hook(functools.partial(_check_same_batch, device_mesh, Counter()), with_kwargs=True)
    base_model = model.model if isinstance(model, ToSTForCausalLM) else model
    base_model.register_forward_pre_hook(functools.partial(_shard_inputs, device_mesh), with_kwargs=True)
    if isinstance(model, ToSTForCausalLM):
        model.register_forward_pre_hook(functools.partial(_shard_labels, device_mesh), with_kwargs=True)
        model.register_forward_hook(functools.partial(_sum_loss, device_mesh), with_kwargs=True)
    return model


def _check_attention(config: ToSTConfig) -> None:
    """Raises a ValueError for softmax attention that cannot be sharded."""
    if config._attn_implementation not in ("sdpa", "eager", None):
        raise ValueError(
            f"parallelize does not support attn_implementation={config._attn_implementation!r}: load the model with "
            "attn_implementation='sdpa'."
        )
    if config.uses_rope and (rope_type := cast(dict, config.rope_parameters)["rope_type"]) in BATCH_DEPENDENT_ROPE_TYPES:
        raise ValueError(
            f"parallelize does not support rope_type {rope_type!r}: it depends on the longest sequence of a batch."
        )


def local_tokens(length: int, device_mesh: DeviceMesh) -> slice:
    """This process's shard of a sequence of `length` tokens. The lengths of shards differ by at most one token.

    Raises:
        ValueError: there are more processes than tokens.
    """
    return _list_shards(length, device_mesh.size())[device_mesh.get_local_rank()]


def _list_shards(length: int, num_shards: int) -> list[slice]:
    """The shards of a sequence of `length` tokens, longer ones first."""
    if length < num_shards:
        raise ValueError(
            f"A sequence of {length} tokens cannot be sharded over {num_shards} processes: each needs at least one token."
        )
    shard_length, num_longer = divmod(length, num_shards)
    starts = [rank * shard_length + min(rank, num_longer) for rank in range(num_shards + 1)]
    return [slice(start, end) for start, end in pairwise(starts)]


# Inputs and outputs of the model -----------------------------------------------------------------------------------------


def _bind_arguments(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """A call's arguments by name."""
    return dict(zip(inspect.signature(module.forward).parameters, args)) | kwargs


def _get_tokens(inputs: dict[str, Any]) -> torch.Tensor | None:
    return inputs.get("input_ids") if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]


def _reject_cache(inputs: dict[str, Any]) -> None:
    if any(inputs.get(name) is not None for name in ("past_key_values", "cache")) or inputs.get("use_cache"):
        raise ValueError(
            "A context-parallel model has no cache, as each process has only its shard of the tokens: leave past_key_values "
            "and use_cache out, and generate with a model that is not parallel."
        )


def _shard_inputs(mesh: DeviceMesh, base_model: ToSTModel, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Before `ToSTModel.forward`: resolves masks and positions of full sequences, then selects this process's shard."""
    inputs = _bind_arguments(base_model, args, kwargs)
    _reject_cache(inputs)
    tokens = _get_tokens(inputs)
    if tokens is None or tokens.ndim < 2:
        return args, kwargs  # forward rejects them
    length = tokens.shape[1]
    shard = local_tokens(length, mesh)
    embeds = torch.empty((), dtype=base_model.dtype, device=tokens.device).expand(*tokens.shape[:2], 1)  # for its shape
    full_inputs = resolve_inputs(
        base_model.config,
        embeds,
        attention_mask={TSSA: inputs.pop("attention_mask", None)},  # a dict, so that no other masks are built
        past_key_values=None,
        use_cache=False,
        **{name: inputs.pop(name, None) for name in ("position_ids", "seq_idx", "cu_seq_lens_q")},
    )
    shard_inputs: dict[str, Any] = {"attention_mask": full_inputs.attention_mask, "position_ids": full_inputs.position_ids}
    shard_inputs |= {name: inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None}
    shard_inputs = {name: None if x is None else x[:, shard] for name, x in shard_inputs.items()}
    if full_inputs.seq_idx is not None:
        sequence_number = sequence_starts(full_inputs.seq_idx).cumsum(1)
        previous_number = sequence_number[:, shard.start - 1, None] if shard.start else 1
        shard_inputs["seq_idx"] = sequence_number[:, shard] - previous_number
    if base_model.config.has_attention:
        key_values, mask = EarlierKeyValues(mesh, length), full_inputs.attention_mask
        masks = create_causal_mask_mapping(
            base_model.config,
            embeds[:, shard],
            None if mask is None else mask[:, : shard.stop],
            None if full_inputs.seq_idx is None else full_inputs.seq_idx[:, : shard.stop],
            cast(Cache, key_values),
            past_length=0,
        )
        masks |= {TSSA: shard_inputs["attention_mask"], "key_values": key_values}
        shard_inputs["attention_mask"] = masks
    return (), inputs | shard_inputs | {"use_cache": False}


def _shard_labels(mesh: DeviceMesh, model: ToSTForCausalLM, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Before `ToSTForCausalLM.forward`: shifts and counts the labels of full sequences, then selects this process's shard."""
    inputs = _bind_arguments(model, args, kwargs)
    _reject_cache(inputs)
    logits_to_keep = inputs.get("logits_to_keep", 0)
    if not isinstance(logits_to_keep, int) or logits_to_keep != 0:
        raise ValueError("A context-parallel model computes the logits of all tokens: leave logits_to_keep out.")
    labels, tokens = inputs.get("labels"), _get_tokens(inputs)
    if labels is None or tokens is None:
        return args, kwargs
    targets = inputs.get("shift_labels")
    if targets is None:
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if targets.shape != tokens.shape[:2]:
        raise ValueError(f"labels must have the shape of the tokens, {tuple(tokens.shape[:2])}, got {tuple(targets.shape)}.")
    if inputs.get("num_items_in_batch") is None:
        inputs["num_items_in_batch"] = (targets != inputs.get("ignore_index", IGNORE_INDEX)).sum()
    shard_labels = targets[:, local_tokens(targets.shape[1], mesh)].contiguous()
    return (), inputs | {"labels": shard_labels, "shift_labels": shard_labels}


def _sum_loss(mesh: DeviceMesh, model: ToSTForCausalLM, args: tuple, kwargs: dict, output):
    """After `ToSTForCausalLM.forward`: sums the losses of all shards."""
    if kwargs.get("labels") is None:
        return output
    # gradients are summed too; their mean over the processes is the gradient of the loss
    loss = gather(output[0], mesh).sum(0)
    if isinstance(output, tuple):
        return (loss, *output[1:])
    output.loss = loss
    return output


@torch.compiler.disable  # data-dependent control flow
def _check_same_batch(mesh: DeviceMesh, calls: Counter, module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Before forward: raises a ValueError on every process of the mesh if their inputs differ in shape or content.

    A comparison synchronizes processes and devices. It runs at every `CHECK_INTERVAL`th call (`calls` counts them by mode) and
    not when shapes change: if those of some processes changed, only these would compare, and wait forever.
    """
    is_due = calls[module.training] % CHECK_INTERVAL == 0
    if is_due:
        inputs = _bind_arguments(module, args, kwargs)
        tensors = [inputs.get(name) for name in COMPARED_INPUTS]
        device = next((x.device for x in tensors if isinstance(x, torch.Tensor)), torch.device(mesh.device_type))
        checksums = torch.stack([_checksum(x, device) for x in tensors])
        gathered_checksums = [torch.empty_like(checksums) for _ in range(mesh.size())]
        dist.all_gather(gathered_checksums, checksums, group=mesh.get_group())
        mismatches = (torch.stack(gathered_checksums) != checksums).any(0).tolist()
        if any(mismatches):
            names = ", ".join(name for name, is_mismatch in zip(COMPARED_INPUTS, mismatches) if is_mismatch)
            raise ValueError(
                f"The processes that share a sequence received different batches: {names} differ in shape or content between "
                f"the {mesh.size()} processes of the mesh. Give all of them the same batch: shard data by the rank of the "
                "group (its data-parallel rank), not by that of the process."
            )
    calls[module.training] += 1


def _checksum(x: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """A checksum of a tensor's shape, values and their order, a scalar on the device; 0 if x is not a tensor."""
    if not isinstance(x, torch.Tensor):
        return torch.zeros((), dtype=torch.long, device=device)
    bits = x.detach().contiguous()
    if bits.is_floating_point():
        bits = bits.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()])
    bits = torch.cat([torch.tensor(x.shape, device=device), bits.flatten().long().to(device)])
    return (bits * torch.arange(1, len(bits) + 1, device=device) ** 2).sum()  # modulo 2**64


# The layers ------------------------------------------------------------------------------------------------------------


class EarlierKeyValues:
    """Stands in for a cache in softmax attention: the keys and values of the previous shards, gathered from their processes.

    Args:
        length: number of tokens in all shards.
    """

    def __init__(self, mesh: DeviceMesh, length: int):
        self.mesh, self.shards = mesh, _list_shards(length, mesh.size())
        self.shard = self.shards[mesh.get_local_rank()]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.shard.start

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.shard.stop, 0

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (B, heads, tokens, p) up to the end of this shard, from those of this shard."""
        max_length = self.shards[0].stop
        local = F.pad(torch.cat([key, value], -1), (0, 0, 0, max_length - key.shape[2]))
        gathered = zip(gather(local, self.mesh), self.shards)
        key_value = torch.cat([x[:, :, : shard.stop - shard.start] for x, shard in gathered], 2)[:, :, : self.shard.stop]
        key, value = key_value.chunk(2, -1)
        return key, value


def _use_earlier_key_values(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Before `ToSTAttention.forward`: gradient checkpointing would drop an argument `past_key_values` of the layers."""
    return args, kwargs | {"past_key_values": kwargs["causal_mask_mapping"]["key_values"]}


class PrefixStates(NamedTuple):
    """Computes the recurrent state before this process's shard from the sums of each shard."""

    rank: int  # this process's rank in the group
    log_decay: torch.Tensor | None  # (shards, B, H), summed over the tokens of each shard
    continues: torch.Tensor | None  # (B,), whether the first token continues the previous shard's sequence; None for always

    def compute_prefix_sum(self, sums: torch.Tensor) -> torch.Tensor:
        """The sums before this shard, (B, H, n), from those of each shard, (shards, B, H, n)."""
        is_not_earlier = torch.arange(len(sums), device=sums.device) >= self.rank
        # masked and not sliced: every process has to take part in the backward of the all-gather
        sums = sums.masked_fill(is_not_earlier.view(-1, 1, 1, 1), 0)
        if self.log_decay is not None:
            log_decay = self.log_decay.masked_fill(is_not_earlier.view(-1, 1, 1), 0)
            log_decay_after = F.pad(log_decay[1:], (0, 0, 0, 0, 0, 1)).flip(0).cumsum(0).flip(0)
            sums = apply_decay(sums, log_decay_after.exp().to(sums.dtype))
        prefix_sum = sums.sum(0)
        return prefix_sum if self.continues is None else prefix_sum.masked_fill(~self.continues.view(-1, 1, 1), 0)


def tssa_context_parallel(
    mesh: DeviceMesh,
    w: torch.Tensor,
    temp: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    mask: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    log_decay: torch.Tensor | None = None,
    **kwargs,
) -> TSSAOutput:
    """`tssa` of one shard of the tokens, (B, shard length, H, p), with the recurrent state after the previous shards.

    The operator runs twice: first for the memberships and this shard's sums, then for the output.
    """
    kwargs |= {"mask": mask, "seq_idx": seq_idx, "log_decay": log_decay}
    kwargs.pop("initial_state", None)  # there is no cache
    p = w.shape[-1]
    padding = None if mask is None else ~mask.bool()
    sum_sq, log_decay_sum = _compute_sum_sq(w, padding, seq_idx, log_decay)
    if log_decay_sum is None:
        gathered, shard_log_decay = gather(sum_sq, mesh), None
    else:
        gathered, shard_log_decay = gather(torch.cat([sum_sq, log_decay_sum.unsqueeze(-1)], -1), mesh).split([p, 1], -1)
        shard_log_decay = shard_log_decay.squeeze(-1)
    prefix = PrefixStates(mesh.get_local_rank(), shard_log_decay, None if seq_idx is None else seq_idx[:, 0] == 0)
    zero = zero_state(w)
    state = zero._replace(sum_sq=prefix.compute_prefix_sum(gathered))
    shard_state = tssa(w, temp, bias, initial_state=state, **kwargs).final_state
    assert shard_state is not None  # the causal form has one
    gathered = gather(torch.cat([shard_state.sum_weighted_sq, shard_state.sum_membership.unsqueeze(-1)], -1), mesh)
    sum_weighted_sq, sum_membership = prefix.compute_prefix_sum(gathered).split([p, 1], -1)
    state = TSSAState(state.sum_sq, sum_weighted_sq, sum_membership.squeeze(-1))
    return tssa(w, temp, bias, initial_state=state, **kwargs)


def _compute_sum_sq(
    w: torch.Tensor, padding: torch.Tensor | None, seq_idx: torch.Tensor | None, log_decay: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum of squares (B, H, p) of a shard, and the log decay (B, H) of the sums before it."""
    x = mask_padding(w, padding, compute_dtype(w.dtype))
    if log_decay is None and seq_idx is None:
        return (x * x).sum(1), None
    B, T, H, _ = w.shape
    log_a = x.new_zeros(B, T, H) if log_decay is None else log_decay.to(x.dtype).expand(B, T, H)
    if padding is not None:
        log_a = log_a.masked_fill(padding.unsqueeze(-1), 0)
    if seq_idx is not None:  # only the last sequence contributes to the sums after the shard
        starts = torch.cat([seq_idx[:, :1] != 0, sequence_starts(seq_idx)[:, 1:]], 1)
        log_a = log_a.masked_fill(starts.unsqueeze(-1), float("-inf"))
    log_decay_after = F.pad(log_a[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1)  # summed over all tokens after each one
    decayed_x = apply_decay(x, (log_decay_after / 2).exp())
    return (decayed_x * decayed_x).sum(1), log_a.sum(1)


def convolve_context_parallel(
    mesh: DeviceMesh,
    convolution: ShortConvolution,
    hidden_states: torch.Tensor,
    mask: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    conv_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ShortConvolution` of one shard of the tokens, (B, shard length, D), with the last inputs of the previous shards."""
    B, T, D = hidden_states.shape
    state_len = convolution.conv_kernel - 1
    mask = hidden_states.new_ones(B, T, dtype=torch.bool) if mask is None else mask.bool()
    sequence_number = mask.new_zeros(B, T, dtype=torch.long) if seq_idx is None else seq_idx
    # the last inputs of this shard's last sequence, a mask of these, and whether a sequence starts in this shard
    is_input = F.pad(mask & (sequence_number == sequence_number[:, -1:]), (state_len, 0))
    has_start = (sequence_number[:, -1:] != 0).expand_as(is_input)
    flags = torch.stack([is_input, has_start], -1).to(hidden_states.dtype)
    inputs = F.pad(hidden_states, (0, 0, state_len, 0)).masked_fill(~is_input.unsqueeze(-1), 0)
    last_inputs = permute_tokens(torch.cat([inputs, flags], -1), left_padding_indices(is_input))[:, -state_len:]
    gathered = gather(last_inputs, mesh)
    # the inputs of previous shards; missing ones, and those of this and later shards, are padding
    flags = gathered[..., D:].detach() != 0
    is_earlier = torch.arange(len(flags), device=flags.device) < mesh.get_local_rank()
    is_input, has_start = (flags & is_earlier.view(-1, 1, 1, 1)).unbind(-1)
    num_starts = has_start.long().cumsum(0)
    prefix = [x.transpose(0, 1).flatten(1, 2) for x in (gathered[..., :D], is_input, num_starts)]
    sequence_number = sequence_number + num_starts[-1, :, :1]
    window, mask, sequence_number = (torch.cat(pair, 1) for pair in zip(prefix, (hidden_states, mask, sequence_number)))
    output, conv_state = convolution(window, mask, sequence_number)
    return output[:, -T:], conv_state


def _raise_on_step(*args, **kwargs):
    raise ValueError("A context-parallel model has no cache to continue from.")
