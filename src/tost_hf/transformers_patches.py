# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""All that importing tost_hf changes in transformers beyond what its `register` functions and base classes do.

tests/test_transformers_patches.py compares transformers before and after the import, and tells when a patch can go.
"""

import sys
from typing import Any

from transformers import PreTrainedModel


def add_class_name(auto_class: Any, model_type: str, model_class: type[PreTrainedModel]) -> None:
    """Adds the class to the table of class names of an Auto class, as those of transformers' own models are.

    `auto_class.register` leaves this table out, though by it Trainer's label smoothing tells that labels are to be shifted,
    pipelines that a model suits their task, and lm-evaluation-harness that a model generates text.
    """
    auto_class._model_mapping._model_mapping[model_type] = model_class.__name__


def add_class(model_class: type[PreTrainedModel]) -> None:
    """Makes `transformers.ToSTModel` of a class, unless transformers has something of that name.

    Trainers of TRL that are given the name of a model, and `transformers serve`, look in transformers for the class that its
    configuration names.
    """
    transformers = sys.modules["transformers"]  # which replaces itself while it is imported
    if not hasattr(transformers, model_class.__name__):
        setattr(transformers, model_class.__name__, model_class)
