# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What is checked before vLLM loads a ToST model, in the process that the user started."""

from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from .repairs import set_block_size


UNSUPPORTED = (  # registered for the sake of a clear message
    "ToSTForMaskedLM",
    "ToSTForQuestionAnswering",
    "ToSTForTokenClassification",
    "ToSTForImageClassification",
    "ToSTVisionModel",
    "ToSTBackbone",
)


class ToSTVerification(VerifyAndUpdateConfig):
    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Raises a ValueError for what cannot work."""
        model = vllm_config.model_config
        config, architecture = model.hf_config, model.architecture
        if architecture in UNSUPPORTED or not getattr(config, "is_causal", False):
            raise ValueError(
                f"vLLM serves causal ToST models (text, embeddings, classification); this is a {architecture}"
                f"{'' if getattr(config, 'is_causal', True) else ', an encoder (is_causal=False)'}. Use it in transformers."
            )
        if model.runner_type == "pooling" and config.pooling_in_use != "last":
            raise ValueError(f"vLLM pools the last token; this classifier was trained with pooling={config.pooling!r}.")
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "ToST models have no speculative decoding in vLLM: a rejected token cannot be taken out of the running sums. "
                "Start without --speculative-config."
            )
        if vllm_config.parallel_config.pipeline_parallel_size > 1 and current_platform.is_cpu():
            if model.enforce_eager or vllm_config.lora_config is not None:
                raise ValueError("On CPUs vLLM's pipeline parallelism needs its compiler: no --enforce-eager, no LoRA.")
        set_block_size(vllm_config)
