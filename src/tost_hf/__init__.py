"""ToST, the Token Statistics Transformer (arXiv 2412.17810), for Hugging Face transformers.

Importing this package registers the models with transformers' Auto classes.
"""

import importlib
from typing import TYPE_CHECKING

import transformers
from transformers import AutoConfig
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

from .cache_files import load_cache, prefill_cache, save_cache
from .model.base_tost import AUTO_MAPS
from .model.cache_tost import ToSTCache
from .model.configuration_tost import ToSTConfig
from .model.configuration_tost_vision import ToSTVisionConfig
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
from .model.modeling_tost_vision import (
    ToSTBackbone,
    ToSTForImageClassification,
    ToSTVisionModel,
    ToSTVisionPreTrainedModel,
)
from .model.tssa import TSSAOutput, tssa, tssa_step
from .model.tssa_reference import TSSAState
from .transformers_patches import LOADED_BY_NAME, add_class
from .version import __version__


if TYPE_CHECKING:
    from .training.arguments import ToSTTrainingArguments, ToSTVisionTrainingArguments
    from .training.trainer import ToSTTrainer
    from .training.trainer_vision import ToSTVisionTrainer

# imported lazily: importing Trainer takes longer than everything else here
_TRAINER_MODULES = {
    "ToSTTrainer": "trainer",
    "ToSTTrainingArguments": "arguments",
    "ToSTVisionTrainer": "trainer_vision",
    "ToSTVisionTrainingArguments": "arguments",
}

for config_class in (ToSTConfig, ToSTVisionConfig):
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for auto_name, reference in AUTO_MAPS[config_class.model_type].items():
        if auto_name != "AutoConfig":
            auto_class, model_class = getattr(transformers, auto_name), globals()[reference.partition(".")[2]]
            auto_class.register(config_class, model_class, exist_ok=True)
            if auto_name in LOADED_BY_NAME:
                add_class(model_class)
# by name, as transformers registers its own, although classes are declared: importing the class needs Pillow
IMAGE_PROCESSOR_MAPPING.register(ToSTVisionConfig, {"pil": "ViTImageProcessorPil"}, exist_ok=True)  # type: ignore[arg-type]


def __getattr__(name: str):
    if name in _TRAINER_MODULES:
        return getattr(importlib.import_module(f".training.{_TRAINER_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_TRAINER_MODULES})


__all__ = [
    "TSSAOutput",
    "TSSAState",
    "ToSTBackbone",
    "ToSTCache",
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
    "load_cache",
    "prefill_cache",
    "save_cache",
    "tssa",
    "tssa_step",
]
