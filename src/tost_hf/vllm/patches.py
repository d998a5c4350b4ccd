# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Workarounds for bugs of vLLM on CPUs. A test in tests/vllm/test_engine.py fails when one is no longer needed."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform


BLOCK_SIZE = 32  # tokens between the states in the prefix cache


def apply_patches() -> None:
    """Applies all patches but `set_block_size`, which needs an engine's configuration."""
    if current_platform.is_cpu():
        allow_seeds_in_chunked_prefill()
        allow_llvmlite()


def set_block_size(vllm_config: VllmConfig) -> None:
    """vLLM 0.32 on CPUs: over HTTP the prefix cache of a model without attention layers hardly ever hits.

    `VllmConfig.__post_init__`, which runs again after the engine's start, sets `block_size` to 128. The scheduler then splits
    prompts at multiples of 128 tokens, but states are looked up every 16 tokens, the default without attention layers. Here
    both sizes are the user's, or 32. With attention layers vLLM chooses a size at which their blocks can store a state.
    """
    cache, layer_types = vllm_config.cache_config, vllm_config.model_config.hf_config.layer_types
    if not current_platform.is_cpu() or not cache.enable_prefix_caching or len(set(layer_types)) > 1:
        return
    size = cache.mamba_block_size or (cache.block_size if cache.user_specified_block_size else BLOCK_SIZE)
    cache.block_size = cache.mamba_block_size = size
    cache.user_specified_block_size = True


def allow_seeds_in_chunked_prefill() -> None:
    """vLLM 0.32 and 0.33 on CPUs: chunked prefill of a request with a seed crashes the engine.

    After each chunk but the last, vLLM discards the sampled token and rewinds the generator by `set_offset`, which raises "CPU
    Generator does not use offset". Here such requests have no generator while these two methods run. Model runner V2, which
    needs Triton, has no generators.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    for name in ("_sample", "_bookkeeping_sync"):
        method = getattr(CPUModelRunner, name)
        if not hasattr(method, "_before_tost_hf"):
            setattr(CPUModelRunner, name, _hide_generators_in_chunked_prefill(method))


def _hide_generators_in_chunked_prefill(method: Callable) -> Callable:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, is_partial = self.input_batch.generators, self.discard_request_mask.np[: self.input_batch.num_reqs]
        removed_generators = {i: generators.pop(i) for i in is_partial.nonzero()[0].tolist() if i in generators}
        try:
            return method(self, *args, **kwargs)
        finally:
            generators.update(removed_generators)

    wrapper._before_tost_hf = method  # type: ignore[attr-defined]
    return wrapper


def allow_llvmlite() -> None:
    """vLLM 0.32 on CPUs: an engine does not start in a process that has imported numba.

    To replace its Triton kernels vLLM reads `__dict__` of all objects in all modules; for the library of llvmlite, numba's
    compiler, that is no dict. Here the module with this object is hidden meanwhile.
    """
    from vllm.triton_utils import dispatcher

    rebind, module_name = dispatcher._rebind_kernels, "llvmlite.binding.ffi"
    if hasattr(rebind, "_before_tost_hf"):
        return

    @functools.wraps(rebind)
    def wrapper(*args: Any) -> None:
        module = sys.modules.pop(module_name, None)
        try:
            rebind(*args)
        finally:
            if module is not None:
                sys.modules[module_name] = module

    wrapper._before_tost_hf = rebind  # type: ignore[attr-defined]
    dispatcher._rebind_kernels = wrapper
