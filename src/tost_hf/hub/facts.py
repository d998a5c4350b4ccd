# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Facts about a model's configuration, for model cards and `tost-hf info`."""

from typing import Any

from ..cache_files import state_bytes
from ..model.configuration_tost import CAUSAL_STATISTICS
from .checks import parameter_count


def describe(config: Any) -> dict[str, str]:
    """The facts of a configuration, from displayed names to displayed values."""
    heads, width = config.num_attention_heads, config.hidden_size
    facts = {
        "parameters": f"{parameter_count(config):,}",
        "layers": str(config.num_hidden_layers),
        "heads": f"{heads} of {width // heads} channels",
        "width": f"{width:,}" + (f", of the MLP {config.intermediate_size:,}" if config.mlp_type == "mlp" else ""),
    }
    if config.dtype is not None:
        facts["dtype"] = str(config.dtype).removeprefix("torch.")
    options = dict(config.options())
    if config.model_type == "tost_vision":
        height, image_width = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
        facts["images"] = f"{height} x {image_width} pixels, patches of {config.patch_size}, attention {config.attention_type}"
    else:
        facts["vocabulary"] = f"{config.vocab_size:,}"
        facts["positions"] = "no limit (position-free)" if config.is_position_free else f"{config.max_position_embeddings:,}"
        facts["state"] = _describe_state(config)
        if options.pop("layer_types", None):
            layer_types = enumerate(config.layer_types, start=1)
            attention_types = {i: layer_type for i, layer_type in layer_types if layer_type != CAUSAL_STATISTICS}
            facts["layers"] += "; " + ", ".join(f"{layer_type} in {i}" for i, layer_type in attention_types.items())
    if (config.architectures or [""])[0].endswith("Classification"):
        names = [str(config.id2label[i]) for i in sorted(config.id2label)]
        show_names = 0 < len(names) <= 20 and not names[0].startswith("LABEL_")
        facts["classes"] = f"{len(names):,}" + (f": {', '.join(names)}" if show_names else "")
    if options:
        facts["options"] = ", ".join(f"{name} {value}" for name, value in options.items())
    return facts


def _describe_state(config: Any) -> str:
    """The size of the state of one sequence."""
    if not config.is_causal:
        return "none: an encoder processes the whole sequence at once"
    state = state_bytes(config)
    growth = f", and {state.per_token:,} with every token" if state.per_token else ""
    return f"{state.saved:,} bytes per sequence at any length ({state.in_memory:,} in memory){growth}"
