# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""All changes that importing tost_hf makes in transformers beyond those of its `register` functions and base classes.

tests/test_transformers_patches.py compares transformers before and after the import, and shows when a patch is obsolete.
"""

import sys

from transformers import PreTrainedModel


# heads that TRL's trainers, if they load a model by its name, and `transformers serve` load
LOADED_BY_NAME = ("AutoModelForCausalLM", "AutoModelForSequenceClassification")


def add_class(model_class: type[PreTrainedModel]) -> None:
    """Adds the class to the module transformers, as `transformers.ToSTForCausalLM`, unless it has an attribute of that name.

    TRL and `transformers serve` get the class that a configuration names from there, not by an Auto class.
    """
    transformers = sys.modules["transformers"]  # the module replaces itself during its import
    if not hasattr(transformers, model_class.__name__):
        setattr(transformers, model_class.__name__, model_class)
