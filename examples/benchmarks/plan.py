# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A plan of training on 1 to 1,024 GPUs: memory per GPU, bytes sent per step, and the share of time for communication.

    python examples/benchmarks/plan.py

Parameters and activations saved for the backward pass are counted on models of the real sizes on torch's meta device, the
collectives of the code as ring algorithms send them. tests/test_plan.py compares both with processes.
"""

from functools import cache
from typing import NamedTuple

import torch
from records import markdown

from tost_hf import ToSTConfig, ToSTForCausalLM, ToSTModel
from tost_hf.model.configuration_tost import PRESETS


SIZES = {name: PRESETS[name] for name in ("tost-base", "tost-medium", "tost-large")}
SIZES["7 B"] = {"num_hidden_layers": 38, "num_attention_heads": 32, "hidden_size": 4096, "tie_word_embeddings": False}
GPUS = (1, 8, 64, 1024)
TOKENS = {"4k": 2**12, "128k": 2**17, "1M": 2**20}
SPEEDS = (25, 50, 400)  # GB/s that a GPU sends
FLOPS = 400e12  # per second, that a GPU attains: an assumption
STRATEGIES = ("DDP", "FSDP2", "tp", "cp")
TRAINED_BYTES = 16  # per parameter in float32: itself, its gradient, two moments of AdamW


class ModelSize(NamedTuple):
    """Parameters, and bytes of saved activations per token."""

    parameters: int
    activations_per_token: float


class Precision(NamedTuple):
    """Bytes of a number, of weights and gradients as FSDP2 sends them, and of activations."""

    sharded: int = 2
    activations: int = 2


MIXED = Precision()


def make_config(name: str) -> ToSTConfig:
    """Without learned positions, so that texts may have any length."""
    return ToSTConfig(**SIZES[name], max_position_embeddings=None)


@cache
def count(name: str) -> ModelSize:
    config = make_config(name)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in ToSTForCausalLM(config).parameters())
    one, two = (activation_bytes(config, layers=layers) for layers in (1, 2))
    return ModelSize(parameters, one + (config.num_hidden_layers - 1) * (two - one))


def activation_bytes(config: ToSTConfig, layers: int, tokens: int = 64, dtype: torch.dtype = torch.bfloat16) -> float:
    """Bytes per token that a trunk of so many layers saves for its backward pass, parameters excluded."""
    fields = config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}
    with torch.device("meta"):
        trunk = ToSTModel(ToSTConfig.from_dict(fields)).to(dtype)
        ids = torch.zeros(1, tokens, dtype=torch.long)
    return saved_tensor_bytes(trunk, input_ids=ids, use_cache=False) / tokens


def saved_tensor_bytes(model: torch.nn.Module, **inputs) -> int:
    """Bytes that a forward pass saves for backward, each storage once, parameters excluded."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # which stays alive, so that no other one gets its address
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        model(**inputs)
    return sum(storage.nbytes() for storage in kept.values())


def state_bytes(parameters: int, strategy: str, gpus: int) -> float:
    """Bytes of parameters, gradients and optimizer state of each GPU; norms, which tp replicates, are counted as sharded."""
    return parameters * TRAINED_BYTES / (gpus if strategy in ("FSDP2", "tp") else 1)


def bytes_sent(
    config: ToSTConfig, parameters: int, strategy: str, gpus: int, tokens: int, precision: Precision = MIXED
) -> float:
    """Bytes that each GPU sends in a step on one text per group of GPUs, or on one each.

    Args:
        tokens: of a text.
    """
    layers, width, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    others, ring = gpus - 1, (gpus - 1) / gpus
    if strategy == "FSDP2":  # the weights twice, gradients once
        return 3 * ring * parameters * precision.sharded
    if strategy == "tp":
        hidden = 2 * ring * tokens * width * precision.activations  # of one sum over all GPUs
        softmax = others * tokens * 8  # a logarithm per token in float64; its gradient likewise
        logits = ring * tokens * config.vocab_size * precision.activations
        return (4 * layers + 2) * hidden + 2 * layers * softmax + logits
    gradients = 2 * ring * parameters * 4
    if strategy == "cp":  # sums of squares; sums weighted with memberships, and of these, in float64; their gradients likewise
        gradients += 2 * layers * others * (4 * width + 8 * (width + heads))
    return gradients


def compute_seconds(parameters: int, strategy: str, gpus: int, tokens: int) -> float:
    """Of one GPU in a step: six operations per parameter and token, at `FLOPS`."""
    return 6 * parameters * tokens / FLOPS / (gpus if strategy in ("tp", "cp") else 1)


# Tables ----------------------------------------------------------------------------------------------------------------


def format_bytes(size: float) -> str:
    """Bytes in words: 3.2 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.3g} {unit}" if size < 999.5 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size:.0f} B"


def memory_table(_=None) -> str:
    """Memory per GPU, of a sequence on one GPU or sharded along its tokens (cp)."""
    head = ["model, parameters", "GPUs", "DDP, cp", "FSDP2, tp", *(f"kept, {length}" for length in TOKENS)]
    lines = []
    for name in SIZES:
        parameters, per_token = count(name)
        for gpus in GPUS:
            trained = [format_bytes(state_bytes(parameters, strategy, gpus)) for strategy in ("DDP", "FSDP2")]
            kept = [format_bytes(per_token * tokens / gpus) for tokens in TOKENS.values()]
            lines.append([f"{name}, {parameters / 1e6:,.0f} M" if gpus == 1 else "", f"{gpus:,}", *trained, *kept])
    return markdown(head, lines)


def communication_table(_=None, gpus: int = 8) -> str:
    """Bytes that each of 8 GPUs sends in a step, and the share of time at each speed if nothing overlaps."""
    head = ["model", "strategy", *(f"{length}: sent; share at {', '.join(map(str, SPEEDS))} GB/s" for length in TOKENS)]
    lines = []
    for name in SIZES:
        config, parameters = make_config(name), count(name).parameters
        for strategy in STRATEGIES:
            cells = []
            for tokens in TOKENS.values():
                if strategy == "tp" and config.num_attention_heads % gpus:
                    cells.append("heads do not divide")
                    continue
                sent = bytes_sent(config, parameters, strategy, gpus, tokens)
                compute = compute_seconds(parameters, strategy, gpus, tokens)
                shares = [sent / speed / 1e9 / (sent / speed / 1e9 + compute) for speed in SPEEDS]
                cells.append(f"{format_bytes(sent)}; {', '.join(f'{share:.0%}' for share in shares)}")
            lines.append([name if strategy == STRATEGIES[0] else "", strategy, *cells])
    return markdown(head, lines)


TABLES = {"plan memory": memory_table, "plan exchange": communication_table}

if __name__ == "__main__":
    print(*(make() for make in TABLES.values()), sep="\n\n")
