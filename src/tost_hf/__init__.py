"""ToST, the Token Statistics Transformer (arXiv 2412.17810), for Hugging Face transformers.

Importing this package registers the models with transformers' Auto classes.
"""

import importlib
from typing import TYPE_CHECKING

import torch.distributed
import transformers
from transformers import AutoConfig
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

from .cache_files import load_cache, prefill_cache, save_cache
from .model.base_tost import AUTO_MAPS
from .model.cache_tost import CausalStatisticsCache, CausalStatisticsLayer
from .model.configuration_tost import LRA_PRESETS, PRESETS, ToSTConfig
from .model.configuration_tost_vision import VISION_PRESETS, ToSTVisionConfig
from .model.layers_tost import TokenStatisticsSelfAttention
from .model.modeling_tost import (
    ToSTCausalLMOutputWithPast,
    ToSTForCausalLM,
    ToSTForMaskedLM,
    ToSTForQuestionAnswering,
    ToSTForSequenceClassification,
    ToSTForTokenClassification,
    ToSTMaskedLMOutput,
    ToSTModel,
    ToSTModelOutputWithPast,
    ToSTPreTrainedModel,
    ToSTSequenceClassifierOutputWithPast,
)
from .model.modeling_tost_vision import (
    ToSTBackbone,
    ToSTBackboneOutput,
    ToSTForImageClassification,
    ToSTImageClassifierOutput,
    ToSTVisionModel,
    ToSTVisionModelOutput,
    ToSTVisionPreTrainedModel,
)
from .model.tssa import TSSAOutput, tssa, tssa_step
from .model.tssa_reference import TSSAState
from .transformers_patches import add_class, add_class_name
from .version import __version__


if TYPE_CHECKING:
    from .convert import convert_from_original, convert_to_original
    from .exporting import export_model
    from .hub.cards import build_card, write_card
    from .hub.publishing import Publication, publish, publish_space
    from .hub.verification import verify
    from .image_processing import make_image_processor
    from .interpret import inspect_model, inspect_path, trace_model
    from .parallel import parallelize
    from .training.trainer import ToSTTrainer, ToSTTrainingArguments
    from .training.trainer_context_parallel import ContextParallelTrainer
    from .training.trainer_tensor_parallel import TensorParallelTrainer
    from .training.trainer_vision import ToSTVisionTrainer, ToSTVisionTrainingArguments

# imported when first used: the Trainer alone takes longer to import than everything else here
_LAZY = {
    "ContextParallelTrainer": "training.trainer_context_parallel",
    "TensorParallelTrainer": "training.trainer_tensor_parallel",
    "ToSTTrainer": "training.trainer",
    "ToSTTrainingArguments": "training.trainer",
    "ToSTVisionTrainer": "training.trainer_vision",
    "ToSTVisionTrainingArguments": "training.trainer_vision",
    "make_image_processor": "image_processing",
    "convert_from_original": "convert",
    "convert_to_original": "convert",
    "export_model": "exporting",
    "build_card": "hub.cards",
    "write_card": "hub.cards",
    "inspect_model": "interpret",
    "inspect_path": "interpret",
    "trace_model": "interpret",
    "Publication": "hub.publishing",
    "publish": "hub.publishing",
    "publish_space": "hub.publishing",
    "parallelize": "parallel",
    "verify": "hub.verification",
}

for config_class in (ToSTConfig, ToSTVisionConfig):
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for auto_name, reference in AUTO_MAPS[config_class.model_type].items():
        if auto_name != "AutoConfig":
            auto_class, model_class = getattr(transformers, auto_name), globals()[reference.partition(".")[2]]
            auto_class.register(config_class, model_class, exist_ok=True)
            add_class_name(auto_class, config_class.model_type, model_class)
            add_class(model_class)
# by name, as transformers' own, though it declares classes: this one needs Pillow, and is imported when it is first used
IMAGE_PROCESSOR_MAPPING.register(ToSTVisionConfig, {"pil": "ViTImageProcessorPil"}, exist_ok=True)  # type: ignore[arg-type]

if torch.distributed.is_available():  # which not every build of PyTorch has
    from .parallel import tensor as _tensor_parallel  # noqa: F401  the style of transformers' tp_plan


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])


__all__ = [
    "LRA_PRESETS",
    "PRESETS",
    "VISION_PRESETS",
    "CausalStatisticsCache",
    "CausalStatisticsLayer",
    "ContextParallelTrainer",
    "Publication",
    "TSSAOutput",
    "TSSAState",
    "TensorParallelTrainer",
    "ToSTBackbone",
    "ToSTBackboneOutput",
    "ToSTCausalLMOutputWithPast",
    "ToSTConfig",
    "ToSTForCausalLM",
    "ToSTForImageClassification",
    "ToSTForMaskedLM",
    "ToSTForQuestionAnswering",
    "ToSTForSequenceClassification",
    "ToSTForTokenClassification",
    "ToSTImageClassifierOutput",
    "ToSTMaskedLMOutput",
    "ToSTModel",
    "ToSTModelOutputWithPast",
    "ToSTPreTrainedModel",
    "ToSTSequenceClassifierOutputWithPast",
    "ToSTTrainer",
    "ToSTTrainingArguments",
    "ToSTVisionConfig",
    "ToSTVisionModel",
    "ToSTVisionModelOutput",
    "ToSTVisionPreTrainedModel",
    "ToSTVisionTrainer",
    "ToSTVisionTrainingArguments",
    "TokenStatisticsSelfAttention",
    "__version__",
    "build_card",
    "convert_from_original",
    "convert_to_original",
    "export_model",
    "inspect_model",
    "inspect_path",
    "load_cache",
    "make_image_processor",
    "parallelize",
    "prefill_cache",
    "publish",
    "publish_space",
    "save_cache",
    "trace_model",
    "tssa",
    "tssa_step",
    "verify",
    "write_card",
]
