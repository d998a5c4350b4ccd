# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Checks before vLLM loads a ToST model, in the process that the user started."""

import logging

from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from ..model.configuration_tost import BATCH_DEPENDENT_ROPE_TYPES
from .patches import set_block_size


logger = logging.getLogger(__name__)

UNSUPPORTED = (  # registered to be rejected with a clear message
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
        """Raises a ValueError for unsupported models and options."""
        model, lora = vllm_config.model_config, vllm_config.lora_config
        config, architecture = model.hf_config, (model.hf_config.architectures or [model.architecture])[0]
        is_encoder = not getattr(config, "is_causal", True)  # an option that vision models do not have
        if architecture in UNSUPPORTED or is_encoder:
            raise ValueError(
                "vLLM serves causal ToST models (text, embeddings, classification by the last token). This is a "
                f"{architecture}{', an encoder (is_causal=False)' if is_encoder else ''}: use transformers."
            )
        if model.runner_type == "pooling" and config.pooling != "last":
            raise ValueError(f"vLLM pools the last token, but this classifier was trained with pooling={config.pooling!r}.")
        if (rope_type := (getattr(config, "rope_parameters", None) or {}).get("rope_type")) in BATCH_DEPENDENT_ROPE_TYPES:
            raise ValueError(
                f"vLLM cannot serve a ToST model with rope_type {rope_type!r}, which depends on the longest position of a "
                "batch: use yarn, or generate with transformers."
            )
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "ToST models have no speculative decoding in vLLM: a rejected token cannot be removed from the recurrent "
                "state. Start without --speculative-config."
            )
        if current_platform.is_cpu():
            if vllm_config.parallel_config.pipeline_parallel_size > 1 and (model.enforce_eager or lora is not None):
                raise ValueError("On CPUs vLLM's pipeline parallelism needs its compiler: no --enforce-eager, no LoRA.")
            if lora is not None:
                logger.warning(
                    "On CPUs vLLM computes requests without an adapter, in a batch with others, by the adapter in the last "
                    "of %d slots: set --max-loras above the number of adapters.",
                    lora.max_loras,
                )
        set_block_size(vllm_config)
