# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""ToST language models in vLLM (0.32).

With both packages installed nothing needs to be imported: vLLM calls `register` in each of its processes (the entry point
`vllm.general_plugins`), after which `vllm serve` and `vllm.LLM` load causal ToST models.

vLLM 0.33 is untested. According to its source, the names and arguments used here are unchanged. It requires torch 2.14 and
transformers below 5.21, and chooses a single block size, so that `patches.set_block_size` can be removed. On CPUs, chunked
prefill with seeds still crashes, pipeline parallelism without the compiler still fails an assertion, and a distribution called
vllm is required.
"""

import logging


logger = logging.getLogger(__name__)


def register() -> None:
    """Registers the ToST models with vLLM. With an unsupported vLLM it only logs an error, so that other models still work.

    vLLM derives embedding and classification models (ToSTModel, ToSTForSequenceClassification) from the language model.
    """
    try:
        from vllm import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from .patches import apply_patches
        from .verification import UNSUPPORTED, ToSTVerification

        apply_patches()
    except (ImportError, AttributeError) as error:
        logger.error("This version of vLLM is not one that tost_hf supports (0.32), so it cannot load ToST models: %s", error)
        return
    for architecture in ("ToSTForCausalLM", *UNSUPPORTED):
        ModelRegistry.register_model(architecture, f"{__name__}.model:ToSTForCausalLM")
        MODELS_CONFIG_MAP[architecture] = ToSTVerification
