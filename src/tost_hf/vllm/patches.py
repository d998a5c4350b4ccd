# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Faults of vLLM that ToST models meet on CPUs, a function for each. tests/vllm/test_engine.py tells when one can go."""

import functools
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform


BLOCK_SIZE = 32  # tokens between the states that the prefix cache keeps


def apply_patches() -> None:
    """All but `set_block_size`, which needs the configuration of an engine."""
    if current_platform.is_cpu():
        allow_seeds_of_split_prompts()


def set_block_size(vllm_config: VllmConfig) -> None:
    """vLLM 0.32 on CPUs: over HTTP the prefix cache of a model without attention layers hardly ever hits.

    `VllmConfig.__post_init__`, which runs again after the engine's start, sets `block_size` to 128, where the scheduler then
    splits prompts, while states are looked up every 16 tokens, the default without attention layers. Here both are one size:
    the user's, or 32. With attention layers vLLM chooses a size by itself, at which their blocks hold a state.
    """
    cache, layer_types = vllm_config.cache_config, vllm_config.model_config.hf_config.layer_types
    if not current_platform.is_cpu() or not cache.enable_prefix_caching or len(set(layer_types)) > 1:
        return
    size = cache.mamba_block_size or (cache.block_size if cache.user_specified_block_size else BLOCK_SIZE)
    cache.block_size = cache.mamba_block_size = size
    cache.user_specified_block_size = True


def allow_seeds_of_split_prompts() -> None:
    """vLLM 0.32 and 0.33 on CPUs: a request with a seed whose prompt is split ends the engine.

    "CPU Generator does not use offset": after each part of a prompt but the last, the token that was sampled for nothing is
    taken back by `generator.set_offset`. Here such requests have no generator while these two methods run. Model runner V2,
    which needs Triton, has no generators.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    for name in ("_sample", "_bookkeeping_sync"):
        method = getattr(CPUModelRunner, name)
        if not hasattr(method, "_before_tost_hf"):
            setattr(CPUModelRunner, name, _without_generators_of_split_prompts(method))


def _without_generators_of_split_prompts(method: Callable) -> Callable:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, is_split = self.input_batch.generators, self.discard_request_mask.np[: self.input_batch.num_reqs]
        unused = {i: generators.pop(i) for i in is_split.nonzero()[0].tolist() if i in generators}
        try:
            return method(self, *args, **kwargs)
        finally:
            generators.update(unused)

    wrapper._before_tost_hf = method  # type: ignore[attr-defined]
    return wrapper
