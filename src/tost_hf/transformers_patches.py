# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""All changes that importing tost_hf makes in transformers beyond those of its `register` functions and base classes.

tests/test_transformers_patches.py compares transformers before and after the import, and shows when a patch is obsolete.
"""

import sys
from typing import Any

from transformers import PreTrainedModel, configuration_utils


def add_class_name(auto_class: Any, model_type: str, model_class: type[PreTrainedModel]) -> None:
    """Adds the class to an Auto class's table of class names, which lists transformers' own models.

    `auto_class.register` does not update this table. Trainer's label smoothing looks in it whether to shift labels, pipelines
    whether a model supports their task, and lm-evaluation-harness whether a model generates text.
    """
    auto_class._model_mapping._model_mapping[model_type] = model_class.__name__


def add_class(model_class: type[PreTrainedModel]) -> None:
    """Adds the class to the module transformers, as `transformers.ToSTModel`, unless it has an attribute of that name.

    TRL's trainers, if they load a model by its name, and `transformers serve` get the class that the configuration names from
    there.
    """
    transformers = sys.modules["transformers"]  # the module replaces itself during its import
    if not hasattr(transformers, model_class.__name__):
        setattr(transformers, model_class.__name__, model_class)


def add_layer_type(layer_type: str) -> None:
    """Adds a layer type to those that `PreTrainedConfig` accepts in a hybrid's `layer_types`.

    Trainer reads a checkpoint's `config.json` as a `PreTrainedConfig` when it resumes, without `ToSTConfig`'s own check.
    """
    types = configuration_utils.ALLOWED_ATTN_LAYER_TYPES
    if layer_type not in types:
        configuration_utils.ALLOWED_ATTN_LAYER_TYPES = (*types, layer_type)  # type: ignore[assignment]
