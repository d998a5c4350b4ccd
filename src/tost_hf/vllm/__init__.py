# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""ToST language models in vLLM (0.32).

With both packages installed nothing needs to be imported: vLLM calls `register` in each of its processes (the entry point
`vllm.general_plugins`), after which `vllm serve` and `vllm.LLM` take causal ToST models.
"""


def register() -> None:
    """Makes ToST models known to vLLM.

    Models for embeddings (ToSTModel) and classification (ToSTForSequenceClassification) vLLM makes of the language model.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .repairs import apply_repairs
    from .verification import UNSUPPORTED, ToSTVerification

    for architecture in ("ToSTForCausalLM", *UNSUPPORTED):
        ModelRegistry.register_model(architecture, f"{__name__}.model:ToSTForCausalLM")
        MODELS_CONFIG_MAP[architecture] = ToSTVerification
    apply_repairs()
