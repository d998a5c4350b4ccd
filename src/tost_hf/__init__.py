"""ToST, the Token Statistics Transformer (arXiv 2412.17810), for Hugging Face transformers.

Importing this package registers the models with transformers' Auto classes.
"""

import functools
import importlib
import sys
from typing import TYPE_CHECKING

import torch.distributed
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationMixin,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

from .cache_files import CachedPrefix, load_cache, load_prefix, prefill_cache, save_cache
from .model.cache_tost import CausalStatisticsCache, CausalStatisticsLayer
from .model.configuration_tost import LRA_PRESETS, PRESETS, ToSTConfig
from .model.configuration_tost_vision import VISION_PRESETS, ToSTVisionConfig
from .model.layers_tost import TokenStatisticsSelfAttention
from .model.modeling_tost import (
    ToSTForCausalLM,
    ToSTForMaskedLM,
    ToSTForQuestionAnswering,
    ToSTForSequenceClassification,
    ToSTForTokenClassification,
    ToSTModel,
    ToSTPreTrainedModel,
)
from .model.modeling_tost_vision import ToSTBackbone, ToSTForImageClassification, ToSTVisionModel, ToSTVisionPreTrainedModel
from .model.tssa import TSSAOutput, tssa, tssa_step
from .model.tssa_reference import TSSAState
from .version import __version__


if TYPE_CHECKING:
    from .convert import convert_from_original, convert_to_original
    from .exporting import export_model
    from .hub.cards import build_card, write_card
    from .hub.publishing import Publication, publish
    from .hub.verification import verify
    from .image_processing import make_image_processor
    from .interpret import inspect_model, inspect_path, trace_model
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
    "verify": "hub.verification",
}

transformers_module = sys.modules["transformers"]  # transformers replaces itself while it is imported
for config_class in (ToSTConfig, ToSTVisionConfig):
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
for auto_class, class_names, config_class, model_class in (
    (AutoModel, "MODEL_MAPPING_NAMES", ToSTConfig, ToSTModel),
    (AutoModelForCausalLM, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", ToSTConfig, ToSTForCausalLM),
    (AutoModelForMaskedLM, "MODEL_FOR_MASKED_LM_MAPPING_NAMES", ToSTConfig, ToSTForMaskedLM),
    (AutoModelForQuestionAnswering, "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", ToSTConfig, ToSTForQuestionAnswering),
    (
        AutoModelForTokenClassification,
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        ToSTConfig,
        ToSTForTokenClassification,
    ),
    (
        AutoModelForSequenceClassification,
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        ToSTConfig,
        ToSTForSequenceClassification,
    ),
    (AutoModel, "MODEL_MAPPING_NAMES", ToSTVisionConfig, ToSTVisionModel),
    (AutoBackbone, "MODEL_FOR_BACKBONE_MAPPING_NAMES", ToSTVisionConfig, ToSTBackbone),
    (
        AutoModelForImageClassification,
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        ToSTVisionConfig,
        ToSTForImageClassification,
    ),
):
    auto_class.register(config_class, model_class, exist_ok=True)
    # register() leaves out the tables of class names, by which Trainer's label smoothing tells that labels are to be shifted
    getattr(modeling_auto, class_names)[config_class.model_type] = model_class.__name__
    # where libraries such as TRL look for the class that config.json names; what transformers has under that name stays
    if not hasattr(transformers_module, model_class.__name__):
        setattr(transformers_module, model_class.__name__, model_class)
# by name, as transformers' own, though it declares classes: this one needs Pillow, and is imported when it is first used
IMAGE_PROCESSOR_MAPPING.register(ToSTVisionConfig, {"pil": "ViTImageProcessorPil"}, exist_ok=True)  # type: ignore[arg-type]

if torch.distributed.is_available():  # which not every build of PyTorch has
    from .parallel import tensor as _tensor_parallel  # noqa: F401  the style of transformers' tp_plan


def _bind_batching(name: str) -> None:
    """Makes a function of serving/generation.py a method of `ToSTForCausalLM`; it is imported when first called."""

    @functools.wraps(getattr(GenerationMixin, name))  # transformers' own, with the same signature
    def method(self, *args, **kwargs):
        return getattr(importlib.import_module(".serving.generation", __name__), name)(self, *args, **kwargs)

    setattr(ToSTForCausalLM, name, method)


for method_name in ("init_continuous_batching", "continuous_batching_context_manager", "generate_batch"):
    _bind_batching(method_name)


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
    "CachedPrefix",
    "CausalStatisticsCache",
    "CausalStatisticsLayer",
    "ContextParallelTrainer",
    "Publication",
    "TSSAOutput",
    "TSSAState",
    "TensorParallelTrainer",
    "ToSTBackbone",
    "ToSTConfig",
    "ToSTForCausalLM",
    "ToSTForImageClassification",
    "ToSTForMaskedLM",
    "ToSTForQuestionAnswering",
    "ToSTForSequenceClassification",
    "ToSTForTokenClassification",
    "ToSTModel",
    "ToSTPreTrainedModel",
    "ToSTTrainer",
    "ToSTTrainingArguments",
    "ToSTVisionConfig",
    "ToSTVisionModel",
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
    "load_prefix",
    "make_image_processor",
    "prefill_cache",
    "publish",
    "save_cache",
    "trace_model",
    "tssa",
    "tssa_step",
    "verify",
    "write_card",
]
