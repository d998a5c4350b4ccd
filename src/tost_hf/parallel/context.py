# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Context parallelism: each process computes one shard of the tokens of every text.

The statistics of causal TSSA are sums, so a shard needs three sums per head of the shards before it, and nothing else. Two
all-gathers per layer provide them: first the sums of squares, from which the memberships follow, then the sums weighted by
these. A layer with a convolution exchanges its last inputs as well. No exchange grows with the number of tokens.

Within the layers of a process, `seq_idx` numbers the packed sequences of its shard. Number 0 is the sequence that
continues from the shard before; a first token that begins a sequence has number 1.
"""

import functools
import inspect
from collections import Counter
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from ..model.configuration_tost import CAUSAL_STATISTICS
from ..model.inputs_tost import resolve_inputs
from ..model.layers_tost import (
    LayerOperators,
    ShortConvolution,
    TokenStatisticsSelfAttention,
    left_padding_indices,
    permute_tokens,
)
from ..model.modeling_tost import ToSTForCausalLM, ToSTModel
from ..model.tssa import TSSAOutput, tssa
from ..model.tssa_reference import TSSAState, compute_dtype, real_tokens, sequence_starts, zero_state
from .collectives import gather


Model = TypeVar("Model", bound=nn.Module)
IGNORED = -100  # the label of a token without a target
CHECK_INTERVAL = 100  # forward passes from one comparison of the processes' batches to the next
# what all processes must be given alike
COMPARED = (
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
    """Shards every text that the model reads over the processes of a mesh, along its tokens; in place.

    Each process of `device_mesh` is given the same whole batch and computes its own shard of the tokens, `local_tokens`: the
    hidden states and logits are those of this shard. Positions, padding, packed sequences and labels are those of the whole
    text, and the loss is that of the whole batch on every process. The first forward pass and every hundredth after it, in
    training and in evaluation, compare the batches of the processes, and raise a ValueError on all of them if they differ.

    The gradients of the processes have to be averaged, as DistributedDataParallel and fully_shard do, over these processes
    and over those that read other batches alike: wrap the model afterwards.

    Args:
        model: a `ToSTModel` or `ToSTForCausalLM` whose layers all keep statistics.
        device_mesh: of one dimension, such as `mesh["cp"]`.

    Returns:
        The model.

    Raises:
        TypeError: another kind of model, or no `DeviceMesh`.
        ValueError: the model is an encoder, has layers of softmax attention or scores that are not normalised, is parallel
            already, or the mesh has several dimensions.

    Example, in each of four processes:

    ```python
    >>> mesh = torch.distributed.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    >>> model = parallelize(model, mesh["cp"])
    >>> model(input_ids, labels=input_ids).loss.backward()  # the whole batch in every process
    ```
    """
    if not isinstance(model, ToSTModel | ToSTForCausalLM):
        got = f"{type(model).__module__}.{type(model).__name__}"
        raise TypeError(f"parallelize takes a ToSTModel or a ToSTForCausalLM of the package tost_hf, got a {got}.")
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f'parallelize takes a torch DeviceMesh, such as mesh["cp"], got a {type(device_mesh).__name__}.')
    if device_mesh.ndim != 1:
        raise ValueError(f'parallelize takes a mesh of one dimension, got {device_mesh.ndim}: name one, such as mesh["cp"].')
    if not model.config.is_causal:
        raise ValueError("parallelize does not support encoders (is_causal=False): their sums are over all tokens.")
    if not model.config.normalize_scores:
        raise ValueError("parallelize does not support normalize_scores=False; train such a model whole on each process.")
    kinds = set(model.config.all_layer_types) - {CAUSAL_STATISTICS}
    if kinds:
        raise ValueError(
            f"parallelize does not support layers of {' and '.join(sorted(kinds))}: they need all tokens, not sums over "
            "them. Train hybrid models with fully_shard or DistributedDataParallel."
        )
    layers = [layer for layer in model.modules() if isinstance(layer, TokenStatisticsSelfAttention)]
    if any(layer.operators != LayerOperators() for layer in layers):
        raise ValueError("The model is context-parallel or tensor-parallel already.")
    operators = LayerOperators(
        tssa=functools.partial(tssa_context_parallel, device_mesh),
        step=_reject_step,
        convolve=functools.partial(convolve_context_parallel, device_mesh),
    )
    for layer in layers:
        layer.operators = operators
    model.register_forward_pre_hook(functools.partial(_check_same_batch, device_mesh, Counter()), with_kwargs=True)
    trunk = model.model if isinstance(model, ToSTForCausalLM) else model
    trunk.register_forward_pre_hook(functools.partial(_shard_inputs, device_mesh), with_kwargs=True)
    if isinstance(model, ToSTForCausalLM):
        model.register_forward_pre_hook(functools.partial(_shard_labels, device_mesh), with_kwargs=True)
        model.register_forward_hook(functools.partial(_sum_loss, device_mesh), with_kwargs=True)
    return model


def local_tokens(length: int, device_mesh: DeviceMesh) -> slice:
    """The tokens of a text of `length` tokens that this process computes. Shards differ by at most one token.

    Raises:
        ValueError: there are more processes than tokens.
    """
    parts, rank = device_mesh.size(), device_mesh.get_local_rank()
    if length < parts:
        raise ValueError(f"A text of {length} tokens cannot be sharded over {parts} processes: each needs at least one token.")
    size, longer = divmod(length, parts)
    start = rank * size + min(rank, longer)
    return slice(start, start + size + (rank < longer))


# Inputs and outputs of the model -----------------------------------------------------------------------------------------


def _bind_arguments(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """A call's arguments by name."""
    return dict(zip(inspect.signature(module.forward).parameters, args)) | kwargs


def _get_tokens(given: dict[str, Any]) -> torch.Tensor | None:
    return given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]


def _reject_cache(given: dict[str, Any]) -> None:
    if given.get("past_key_values") is not None or given.get("use_cache"):
        raise ValueError(
            "A context-parallel model has no cache, as each process knows its own shard only: leave past_key_values and "
            "use_cache out, and generate with a model on one process."
        )


def _shard_inputs(mesh: DeviceMesh, trunk: ToSTModel, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Before `ToSTModel.forward`: resolves masks and positions of whole texts, then takes this process's shard."""
    given = _bind_arguments(trunk, args, kwargs)
    _reject_cache(given)
    tokens = _get_tokens(given)
    if tokens is None or tokens.ndim < 2:
        return args, kwargs  # which forward rejects
    length = tokens.shape[1]
    shard = local_tokens(length, mesh)
    names = ("attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q")
    whole = resolve_inputs(
        trunk.config,
        tokens.new_empty(()).expand(*tokens.shape[:2], 1),  # for its shape and device
        past_key_values=None,
        use_cache=False,
        **{name: given.pop(name, None) for name in names},
    )
    own: dict[str, Any] = {"attention_mask": whole.attention_mask, "position_ids": whole.position_ids}
    own |= {name: given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None}
    own = {name: None if x is None else x[:, shard] for name, x in own.items()}
    if whole.seq_idx is not None:
        starts = sequence_starts(whole.seq_idx).cumsum(1)
        before = starts[:, shard.start - 1, None] if shard.start else 1
        own["seq_idx"] = starts[:, shard] - before
    return (), given | own | {"use_cache": False}


def _shard_labels(mesh: DeviceMesh, model: ToSTForCausalLM, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Before `ToSTForCausalLM.forward`: shifts and counts the labels of whole texts, then takes this process's shard."""
    given = _bind_arguments(model, args, kwargs)
    _reject_cache(given)
    kept = given.get("logits_to_keep", 0)
    if not isinstance(kept, int) or kept != 0:
        raise ValueError("A context-parallel model computes the logits of all tokens: leave logits_to_keep out.")
    labels, tokens = given.get("labels"), _get_tokens(given)
    if labels is None or tokens is None:
        return args, kwargs
    targets = given.get("shift_labels")
    if targets is None:
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if targets.shape != tokens.shape[:2]:
        raise ValueError(f"labels must have the shape of the tokens, {tuple(tokens.shape[:2])}, got {tuple(targets.shape)}.")
    if given.get("num_items_in_batch") is None:
        given["num_items_in_batch"] = (targets != given.get("ignore_index", IGNORED)).sum()
    own = targets[:, local_tokens(targets.shape[1], mesh)].contiguous()
    return (), given | {"labels": own, "shift_labels": own}


def _sum_loss(mesh: DeviceMesh, model: ToSTForCausalLM, args: tuple, kwargs: dict, output):
    """After `ToSTForCausalLM.forward`: the sum of the losses of all shards."""
    if kwargs.get("labels") is None:
        return output
    # the gradient is summed, too: its mean over the processes is that of one loss
    loss = gather(output[0], mesh).sum(0)
    if isinstance(output, tuple):
        return (loss, *output[1:])
    output.loss = loss
    return output


@torch.compiler.disable  # the answer decides what is run
def _check_same_batch(mesh: DeviceMesh, calls: Counter, module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Before forward: a ValueError on every process of the mesh unless all were given tensors of the same shapes and contents.

    Each comparison waits for the other processes and for the device. When one is due is counted, in `calls` by mode, and not
    decided by the shapes: had these changed for some processes only, they would wait for the others.
    """
    is_due = calls[module.training] % CHECK_INTERVAL == 0
    if is_due:
        inputs = _bind_arguments(module, args, kwargs)
        tensors = [inputs.get(name) for name in COMPARED]
        device = next((x.device for x in tensors if isinstance(x, torch.Tensor)), torch.device(mesh.device_type))
        checksums = torch.stack([_checksum(x, device) for x in tensors])
        gathered = [torch.empty_like(checksums) for _ in range(mesh.size())]
        dist.all_gather(gathered, checksums, group=mesh.get_group())
        differs = (torch.stack(gathered) != checksums).any(0).tolist()
        if any(differs):
            names = ", ".join(name for name, is_different in zip(COMPARED, differs) if is_different)
            raise ValueError(
                f"The processes that share a text were given different batches: {names} differ in shape or content between "
                f"the {mesh.size()} processes of the mesh. Give all of them the same batch: shard data by the rank of the "
                "group (its data-parallel rank), not by that of the process."
            )
    calls[module.training] += 1


def _checksum(x: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """A checksum of a tensor's shape, values and their order, a scalar on the device; 0 for no tensor."""
    if not isinstance(x, torch.Tensor):
        return torch.zeros((), dtype=torch.long, device=device)
    bits = x.detach().contiguous()
    if bits.is_floating_point():
        bits = bits.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()])
    bits = torch.cat([torch.tensor(x.shape, device=device), bits.flatten().long().to(device)])
    return (bits * torch.arange(1, len(bits) + 1, device=device) ** 2).sum()  # modulo 2**64


# The layers ------------------------------------------------------------------------------------------------------------


class PrefixStates(NamedTuple):
    """Sums over the tokens before this process's shard, from gathered sums of each shard."""

    own: int  # this process's rank in the group
    log_decay: torch.Tensor | None  # (shards, B, H), of a whole shard
    continues: torch.Tensor | None  # (B,), whether the first token continues the sequence before it; None for always

    def sum_before(self, sums: torch.Tensor) -> torch.Tensor:
        """The sums before this shard, (B, H, n), from those of each shard alone, (shards, B, H, n)."""
        later = torch.arange(len(sums), device=sums.device) >= self.own
        # all of them stay in the graph: every process has to take part in the all-gather of their gradients
        sums = sums.masked_fill(later.view(-1, 1, 1, 1), 0)
        if self.log_decay is not None:
            log_decay = self.log_decay.masked_fill(later.view(-1, 1, 1), 0)
            following = F.pad(log_decay[1:], (0, 0, 0, 0, 0, 1)).flip(0).cumsum(0).flip(0)
            sums = sums * following.exp().unsqueeze(-1).to(sums.dtype)
        before = sums.sum(0)
        return before if self.continues is None else before.masked_fill(~self.continues.view(-1, 1, 1), 0)


def tssa_context_parallel(
    mesh: DeviceMesh,
    w: torch.Tensor,
    temp: torch.Tensor,
    denom_bias: torch.Tensor | None = None,
    *,
    mask: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    log_decay: torch.Tensor | None = None,
    **kwargs,
) -> TSSAOutput:
    """`tssa` of one shard of the tokens, (B, own tokens, H, p), from the sums of the shards before it.

    The operator runs twice: first for the memberships and, with them, this shard's own sums, then for the output.
    """
    kwargs |= {"mask": mask, "seq_idx": seq_idx, "log_decay": log_decay}
    kwargs.pop("initial_state", None)  # there is no cache
    p = w.shape[-1]
    padding = None if mask is None else ~mask.bool()
    sum_sq, log_product = _sum_of_squares(w, padding, seq_idx, log_decay)
    if log_product is None:
        gathered, logs = gather(sum_sq, mesh), None
    else:
        gathered, logs = gather(torch.cat([sum_sq, log_product.unsqueeze(-1)], -1), mesh).split([p, 1], -1)
        logs = logs.squeeze(-1)
    prefix = PrefixStates(mesh.get_local_rank(), logs, None if seq_idx is None else seq_idx[:, 0] == 0)
    zero = zero_state(w)
    state = zero._replace(sum_sq=prefix.sum_before(gathered))
    own = tssa(w, temp, denom_bias, initial_state=state, **kwargs).final_state
    assert own is not None  # of the causal form
    gathered = gather(torch.cat([own.sum_weighted_sq, own.sum_membership.unsqueeze(-1)], -1), mesh)
    sum_weighted_sq, sum_membership = prefix.sum_before(gathered).split([p, 1], -1)
    state = TSSAState(state.sum_sq, sum_weighted_sq, sum_membership.squeeze(-1))
    return tssa(w, temp, denom_bias, initial_state=state, **kwargs)


def _sum_of_squares(
    w: torch.Tensor, padding: torch.Tensor | None, seq_idx: torch.Tensor | None, log_decay: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum of squares (B, H, p) after a shard alone, and the log decay (B, H) of sums before it."""
    x = real_tokens(w, padding, compute_dtype(w.dtype))
    if log_decay is None and seq_idx is None:
        return (x * x).sum(1), None
    B, T, H, _ = w.shape
    logs = x.new_zeros(B, T, H) if log_decay is None else log_decay.to(x.dtype).expand(B, T, H)
    if padding is not None:
        logs = logs.masked_fill(padding.unsqueeze(-1), 0)
    if seq_idx is not None:  # only the last sequence counts; none before it is left
        starts = torch.cat([seq_idx[:, :1] != 0, sequence_starts(seq_idx)[:, 1:]], 1)
        logs = logs.masked_fill(starts.unsqueeze(-1), float("-inf"))
    later = F.pad(logs[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1)  # of all tokens after each one
    scaled = x * (later / 2).exp().unsqueeze(-1)
    return (scaled * scaled).sum(1), logs.sum(1)


def convolve_context_parallel(
    mesh: DeviceMesh,
    convolution: ShortConvolution,
    hidden_states: torch.Tensor,
    mask: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    conv_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ShortConvolution` of one shard of the tokens, (B, own tokens, D), after the last inputs of the shards before it."""
    B, T, D = hidden_states.shape
    past = convolution.kernel_size - 1
    mask = hidden_states.new_ones(B, T, dtype=torch.bool) if mask is None else mask.bool()
    number = mask.new_zeros(B, T, dtype=torch.long) if seq_idx is None else seq_idx
    # the last inputs of this shard's last sequence, whether each exists, and whether a sequence begins in this shard
    found = F.pad(mask & (number == number[:, -1:]), (past, 0))
    begins = (number[:, -1:] != 0).expand_as(found)
    notes = torch.stack([found, begins], -1).to(hidden_states.dtype)
    inputs = F.pad(hidden_states, (0, 0, past, 0)).masked_fill(~found.unsqueeze(-1), 0)
    last = permute_tokens(torch.cat([inputs, notes], -1), left_padding_indices(found))[:, -past:]
    gathered = gather(last, mesh)
    # tokens before this shard's own, padding where there is none; those of this shard and later ones are padding too
    notes = gathered[..., D:].detach() != 0
    is_earlier = torch.arange(len(notes), device=notes.device) < mesh.get_local_rank()
    found, begins = (notes & is_earlier.view(-1, 1, 1, 1)).unbind(-1)
    count = begins.long().cumsum(0)
    before = [x.transpose(0, 1).flatten(1, 2) for x in (gathered[..., :D], found, count)]
    number = number + count[-1, :, :1]
    window, mask, number = (torch.cat(pair, 1) for pair in zip(before, (hidden_states, mask, number)))
    out, conv_state = convolution(window, mask, number)
    return out[:, -T:], conv_state


def _reject_step(*args, **kwargs):
    raise ValueError("A context-parallel model has no cache to continue from.")
