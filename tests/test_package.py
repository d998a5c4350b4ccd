"""Importing the package; the files of the remote code."""

import ast
import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_relative_import_files

import tost_hf
from tost_hf.model.base_tost import AUTO_MAPS, code_files


ROOT = Path(__file__).parents[1]
REMOTE_CODE = sorted(set(chain(*map(code_files, AUTO_MAPS))))


def test_public_names_exist():
    assert all(getattr(tost_hf, name) is not None for name in tost_hf.__all__)
    assert set(tost_hf.__all__) <= set(dir(tost_hf))
    assert tost_hf.__version__ == importlib.metadata.version("tost-hf")
    with pytest.raises(AttributeError, match="nonsense"):
        tost_hf.nonsense  # noqa: B018


def test_reference_page_names_exist():
    pages = (ROOT / "examples/guides/reference").glob("*.md")
    names = [name for page in pages for name in re.findall(r"^::: (tost_hf\S+)$", page.read_text(), re.MULTILINE)]
    assert len(names) > 40
    for name in names:
        pkgutil.resolve_name(name)


def test_import_loads_no_optional_library_and_opens_no_connection():
    code = """
import importlib.util, socket, sys
def reject(*args, **kwargs): raise AssertionError("network")
socket.socket.connect = socket.getaddrinfo = reject
missing = {"triton", "PIL", "torchvision"}
sys.modules |= dict.fromkeys(missing)  # as if they were not installed
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name.split(".")[0] in missing else find_spec(name, *args)
sys.modules["tost_hf.parallel"] = None  # which imports a private module of torch
import tost_hf, tost_hf.hub
training_only = {"datasets", "evaluate", "kornia", "tensorboard", "transformers.trainer"} & set(sys.modules)
assert not training_only, training_only
assert tost_hf.AutoConfig.for_model("tost").hidden_size == 768
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("model_type", AUTO_MAPS)
def test_code_files_are_the_imported_files(model_type):
    """By the function with which transformers collects the files of remote code: none is missing, none is unused."""
    modules = {reference.partition(".")[0] for reference in AUTO_MAPS[model_type].values()}
    imported_files = {f"{name}.py" for name in modules}
    for name in modules:
        imported_files |= {Path(path).name for path in get_relative_import_files(ROOT / f"src/tost_hf/model/{name}.py")}
    assert imported_files == set(code_files(model_type))
    for reference in AUTO_MAPS[model_type].values():
        module, _, class_name = reference.partition(".")
        assert hasattr(importlib.import_module(f"tost_hf.model.{module}"), class_name)


# The modules of transformers that remote code imports at the top level: every published model depends on them. Other modules
# are imported where they are used (masking_utils, by attention layers) or reimplemented (eager attention).
TOP_LEVEL_IMPORTS = {
    "transformers": "documented names",
    "transformers.activations": "ACT2FN, as documented for custom models",
    "transformers.backbone_utils": "backbone mixins, as in every backbone of transformers",
    "transformers.cache_utils": "Cache and its layers, as documented for custom caches",
    "transformers.conversion_mapping": "register_checkpoint_conversion_mapping, as documented for loading of weights",
    "transformers.core_model_loading": "WeightRenaming, as documented for loading of weights",
    "transformers.dynamic_module_utils": "custom_object_save, as in every save_pretrained of transformers",
    "transformers.modeling_rope_utils": "ROPE_INIT_FUNCTIONS, to name the types of rotary positions",
    "transformers.models.llama.modeling_llama": "rotary positions and eager attention, as in the field's hybrid models",
    "transformers.modeling_layers": "GradientCheckpointingLayer and generic heads, as in every model of transformers",
    "transformers.modeling_outputs": "documented output classes",
    "transformers.modeling_utils": "ALL_ATTENTION_FUNCTIONS, as documented for custom attention",
    "transformers.utils": "cached_file, can_return_tuple, TransformersKwargs",
    "transformers.utils.generic": "merge_with_config_defaults, on the forward pass of every model of transformers",
    "transformers.utils.output_capturing": "capture_outputs, on the forward pass of every model of transformers",
}


def test_imports_of_remote_code():
    """Published models have these files in one folder, without the package and possibly without Triton."""
    own_modules, top_level_modules = {name.removesuffix(".py") for name in REMOTE_CODE}, set()
    for name in REMOTE_CODE:
        tree = ast.parse((ROOT / "src/tost_hf/model" / name).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module in own_modules, name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                modules = {node.module} if isinstance(node, ast.ImportFrom) else {alias.name for alias in node.names}
                assert not any(module.partition(".")[0] == "tost_hf" for module in modules), name
                if node in tree.body:  # not inside functions or `try`
                    top_level_modules |= modules
    assert not any(module.partition(".")[0] == "triton" for module in top_level_modules)
    assert {name for name in top_level_modules if name.partition(".")[0] == "transformers"} == set(TOP_LEVEL_IMPORTS)


def test_only_the_converter_reads_pickles():
    """Trainer itself pickles optimizer states and training_args.bin; that cannot be changed here."""
    calls = re.compile(r"torch\.(load|save)\(|\bpickle\.(load|dump)|import (pickle|joblib|dill)\b")
    for folder in ("src", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            matches = calls.findall(path.read_text())
            assert not matches or path.name == "convert.py", path
    loads = re.findall(r"torch\.load\(.*", (ROOT / "src/tost_hf/convert.py").read_text())
    assert len(loads) == 1 and "weights_only=True" in loads[0]
