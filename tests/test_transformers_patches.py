"""What importing tost_hf changes in transformers; a test fails when a patch or a registration is no longer needed."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import small_config
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import LinearAttentionLayer
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)

from tost_hf import ToSTForCausalLM
from tost_hf.model.configuration_tost import TSSA


COMPARE = """
import importlib, json, os, sys
import torch, transformers
reader, writer = os.pipe()
if not os.fork():  # a child process reports which modules the import loads
    import tost_hf
    os.write(writer, json.dumps([name for name in sys.modules if name.startswith("transformers")]).encode())
    os._exit(0)
os.close(writer)
names = json.loads(os.fdopen(reader).read())
for name in names:
    importlib.import_module(name)
modules = {name: sys.modules[name] for name in names}  # transformers replaces itself while it is imported
modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("")  # creates the table

def snapshot():
    # by path: attributes of modules and of their classes and objects, and the entries of containers
    state = {}
    def add(path, value, depth=0):
        state[path] = value
        if isinstance(value, dict):
            state.update((f"{path}[{key!r}]", item) for key, item in dict.items(value))
        elif isinstance(value, (list, set)):
            state.update((f"{path}[{item!r}]", True) for item in value)
        value_class = value if isinstance(value, type) else type(value)
        if depth < 3 and not isinstance(value, type(os)) and value_class.__module__ in modules:
            for name, item in list(getattr(value, "__dict__", {}).items()):
                if not name.startswith(("_abc", "__")):
                    add(f"{path}.{name}", item, depth + 1)
    for name, module in modules.items():
        for attribute, value in list(vars(module).items()):
            if not attribute.startswith("__"):
                add(f"{name}.{attribute}", value)
    return state

def module_of(value):
    return value.__module__ if isinstance(value, type) else type(value).__module__

before = snapshot()
import tost_hf
after = snapshot()
json.dump({
    "changed": [path for path in before if path not in after or after[path] is not before[path]],
    # lazy modules load more of transformers; additions of this package contain its name
    "added": [path for path in after if path not in before and "tost" in f"{path} {module_of(after[path])}".lower()],
}, sys.stdout)
"""
REGISTRATIONS = {
    r"\._extra_content\[": "register of the Auto classes",
    r"generic\._registered_model_output_types\[": "ModelOutput, which registers its subclasses",
    r"_checkpoint_conversion_mapping_cache\[|USER_REGISTERED_MAPPINGS\[": "register_checkpoint_conversion_mapping",
    r"_LAYER_TYPE_MAPPING\['tssa'\]": "CacheLayerMixin, which registers its subclasses",
}
PATCHES = {
    r"_MAPPING_NAMES\[|\._model_mapping\._model_mapping\[|MAPPING\._model_mapping\[": "add_class_names",
    r"^transformers\.ToST\w+": "add_class",
}


def test_import_makes_only_the_known_changes():
    result = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True, check=True)
    difference = json.loads(result.stdout)
    assert difference["changed"] == []
    known = {re.compile(pattern): reason for pattern, reason in (REGISTRATIONS | PATCHES).items()}
    reasons_of = {path: [reason for pattern, reason in known.items() if pattern.search(path)] for path in difference["added"]}
    assert [path for path, reasons in reasons_of.items() if not reasons] == []
    assert {reason for reasons in reasons_of.values() for reason in reasons} == set(known.values())


def test_register_still_omits_class_names():
    """`add_class_names` can be removed when this fails."""

    class OtherConfig(PreTrainedConfig):
        model_type = "tost_other"

    class OtherModel(ToSTForCausalLM):
        config_class = OtherConfig

    AutoModelForCausalLM.register(OtherConfig, OtherModel)
    del AutoModelForCausalLM._model_mapping._extra_content[OtherConfig]
    assert "tost_other" not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and "tost" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert "tost_vision" in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES


def test_trl_still_looks_for_classes_in_transformers():
    """`add_class` can be removed when this fails."""
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("TRL is not installed (pip install trl)")
    source = Path(spec.origin).with_name("trainer").joinpath("utils.py").read_text()
    assert "getattr(transformers, config.architectures[0]" in source


def test_layer_type_is_still_needed():
    """`TSSA` can become "linear_attention" when the cache layer of that type has a length and rollback."""
    # a tuple, so there is no way to register types
    assert TSSA not in ALLOWED_LAYER_TYPES and isinstance(ALLOWED_LAYER_TYPES, tuple)
    layer = LinearAttentionLayer()
    layer.activate_past_recording()
    layer.update_recurrent_state(torch.zeros(1, 2, 3))
    assert not layer.is_croppable and not hasattr(layer, "get_seq_length")
    config = small_config()
    for cache in (DynamicCache(config=config), StaticCache(config, max_cache_len=4)):
        # compares types because the registered class may be that of remote code
        assert all(layer._layer_type == TSSA for layer in cache.layers)
        assert [layer.static for layer in cache.layers] == [isinstance(cache, StaticCache)] * len(cache.layers)
