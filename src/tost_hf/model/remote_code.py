# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Source files in published folders: which ones travel, and how a configuration carries them.

A configuration whose `auto_map` is set is always saved together with the flat source files it names, so that
`from_pretrained(..., trust_remote_code=True)` works where this package is not installed. Where it is installed, its own
classes are used and nobody needs the flag.
"""

import contextlib
import os
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedConfig
from transformers.utils import cached_file


# The operator and the attention layer alone: what an exported kernel holds.
KERNEL_FILES = (
    "tssa_state.py",
    "tssa_formulas.py",
    "tssa_sums.py",
    "tssa_chunks.py",
    "tssa_compiled.py",
    "tssa_bidirectional.py",
    "tssa_triton.py",
    "convolution_tost.py",
    "tssa.py",
    "tssa_layer.py",
)
_SHARED_FILES = ("remote_code.py", "configuration_tost.py", *KERNEL_FILES, "ista_tost.py", "modeling_tost_base.py")
CODE_FILES = {  # by model type; siblings of this file, here and in every published folder
    "tost": (
        *_SHARED_FILES,
        "cache_layer_tost.py",
        "cache_tost.py",
        "attention_tost.py",
        "inputs_tost.py",
        "batch_requests_tost.py",
        "batch_scheduler_tost.py",
        "batching_tost.py",
        "modeling_tost.py",
        "modeling_tost_heads.py",
    ),
    "tost_vision": (
        *_SHARED_FILES,
        "configuration_tost_vision.py",
        "modeling_tost_vision.py",
        "modeling_tost_vision_backbone.py",
    ),
}
AUTO_MAPS = {
    "tost": {
        "AutoConfig": "configuration_tost.ToSTConfig",
        "AutoModel": "modeling_tost.ToSTModel",
        "AutoModelForCausalLM": "modeling_tost.ToSTForCausalLM",
        "AutoModelForMaskedLM": "modeling_tost_heads.ToSTForMaskedLM",
        "AutoModelForQuestionAnswering": "modeling_tost_heads.ToSTForQuestionAnswering",
        "AutoModelForSequenceClassification": "modeling_tost_heads.ToSTForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_tost_heads.ToSTForTokenClassification",
    },
    "tost_vision": {
        "AutoConfig": "configuration_tost_vision.ToSTVisionConfig",
        "AutoBackbone": "modeling_tost_vision_backbone.ToSTBackbone",
        "AutoModel": "modeling_tost_vision.ToSTVisionModel",
        "AutoModelForImageClassification": "modeling_tost_vision.ToSTForImageClassification",
    },
}


_MODEL_FOLDER = "_model_folder"  # tells a configuration, while it is saved, where its model's code lies


def source_file(name: str) -> Path:
    """Where one of the files that travel lies."""
    return Path(__file__).with_name(name)


def code_files(model_type: str, folder: Path | None = None, origin: str | None = None) -> dict[str, Path]:
    """Name and path of each source file that a published model of this type carries.

    Args:
        folder: where the model's class lies, if elsewhere: transformers copies the code of a local folder into one folder per
            class, with only the files that the class needs.
        origin: folder or repository that a configuration was loaded from, where no model was: it has the rest.

    Raises:
        OSError: a file is in none of these places.
    """
    files = {}
    for name in CODE_FILES[model_type]:
        places = [source_file(name), *([] if folder is None else [folder / name])]
        found = next((place for place in places if place.is_file()), None)
        if found is None and origin:
            fetched = cached_file(origin, name, _raise_exceptions_for_missing_entries=False)
            found = None if fetched is None else Path(fetched)
        if found is None:
            raise OSError(
                f"The model's source file {name} is not at hand, so it cannot be saved with the others: load the model from a "
                "folder or repository that has it, or save with with_code=False."
            )
        files[name] = found
    return files


INHERITED_FIELDS = {  # of every configuration in transformers, which does not check their types
    "architectures": (list, tuple),
    "attn_implementation": (str,),
    "auto_map": (dict,),
    "dtype": (str, torch.dtype),
    "id2label": (dict,),
    "label2id": (dict,),
    "quantization_config": (dict,),
    "torch_dtype": (str, torch.dtype),
}
MOST_LABELS = 2**20  # transformers makes a name for each of them, whatever a file asks for


class CodeCarryingConfig(PreTrainedConfig):
    """A configuration that, where its `auto_map` is set, is saved with the source files of its models.

    Read from a file, it runs nothing that the file names, and whatever is wrong in the file is a ValueError of one sentence.
    """

    def __post_init__(self, **kwargs):
        labels = kwargs.get("num_labels")
        if labels is not None and not (isinstance(labels, int) and 0 <= labels <= MOST_LABELS):
            raise ValueError(f"num_labels must be a whole number from 0 to {MOST_LABELS:,}, got {_shown(labels)}.")
        for alias, name in self.attribute_map.items():
            if alias in kwargs:  # set here by its own name, under which its type is checked
                setattr(self, name, kwargs.pop(alias))
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """As `PreTrainedConfig.from_dict`; ValueError, naming the field, for any value that is impossible."""
        _check_inherited_fields(cls, config_dict)
        try:
            return super().from_dict(config_dict, **kwargs)
        except Exception as error:  # transformers raises nearly anything on fields of a wrong type
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            reason = f"{kind}{error}".splitlines()[-1].strip()
            raise ValueError(f"The configuration of this {cls.model_type} model is wrong: {reason[:300]}") from error

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Has no effect: `auto_map` decides. transformers calls it for remote code, and would then always save the files."""

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs):
        """As `PreTrainedConfig.save_pretrained`, with the source files beside `config.json` where `auto_map` is set."""
        folder = self.__dict__.pop(_MODEL_FOLDER, None)
        if getattr(self, "auto_map", None):
            self.auto_map = dict(AUTO_MAPS[self.model_type])  # one that was loaded may name the repository it came from
            os.makedirs(save_directory, exist_ok=True)
            for name, source in code_files(self.model_type, folder, self._name_or_path).items():
                target = Path(save_directory, name)
                if source.resolve() != target.resolve():
                    shutil.copyfile(source, target)
        super().save_pretrained(save_directory)
        if push_to_hub:  # not left to the base class, which would upload config.json alone
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)


def _check_inherited_fields(config_class: type, fields: dict) -> None:
    """Refuses what transformers lets pass in the fields that every model has, and what would name code to run."""
    for name, value in fields.items():
        if name.startswith("__") or callable(getattr(config_class, name, None)):
            raise ValueError(f"{_shown(name)} is not a field of a configuration but the name of a method.")
        if isinstance(derived := getattr(config_class, name, None), property) and derived.fset is None:
            raise ValueError(f"{name} follows from other fields, so it cannot be given.")
        if value is not None and not isinstance(value, INHERITED_FIELDS.get(name, object)):
            raise ValueError(f"{name} must be a {INHERITED_FIELDS[name][0].__name__}, got {_shown(value)}.")
    parts = [name for name in ("decoder", "generator", "text_config", "text_encoder") if fields.get(name) is not None]
    if parts:
        raise ValueError(f"{parts[0]} belongs to models that are made of several models; a ToST model is not.")
    if not all(isinstance(name, str) for name in fields.get("architectures") or ()):
        raise ValueError(f"architectures must be names of classes, got {_shown(fields['architectures'])}.")
    if not all(str(key).isdecimal() for key in fields.get("id2label") or ()):
        raise ValueError(f"id2label must name labels by number, got {_shown(fields['id2label'])}.")
    if "/" in (fields.get("attn_implementation") or ""):
        raise ValueError(
            f"attn_implementation is {_shown(fields['attn_implementation'])}, code on the Hub, which ToST does not need; "
            "remove that field."
        )
    for dtype in (fields.get("dtype"), fields.get("torch_dtype")):
        named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if dtype is not None and not (isinstance(named, torch.dtype) and named.is_floating_point):
            raise ValueError(f"dtype must be one of floating-point numbers, such as 'float32', got {_shown(dtype)}.")


def _shown(value: object) -> str:
    return repr(value)[:100]


@contextlib.contextmanager
def carrying_code(config: CodeCarryingConfig, with_code: bool | None, folder: Path):
    """Within it, saving `config` takes the source files along (True), leaves them out (False), or as it was set (None).

    Args:
        folder: where the code of the saved model lies.
    """
    before = getattr(config, "auto_map", None)
    setattr(config, _MODEL_FOLDER, folder)
    if with_code is not None:
        _set_auto_map(config, AUTO_MAPS[config.model_type] if with_code else None)
    try:
        yield
    finally:
        config.__dict__.pop(_MODEL_FOLDER, None)
        _set_auto_map(config, before)


def _set_auto_map(config: CodeCarryingConfig, auto_map: dict[str, str] | None) -> None:
    if auto_map:
        config.auto_map = dict(auto_map)
    elif hasattr(config, "auto_map"):  # transformers asks for the attribute, so it must not be there as None
        del config.auto_map


__all__ = ["AUTO_MAPS", "CODE_FILES", "KERNEL_FILES", "CodeCarryingConfig", "carrying_code", "code_files", "source_file"]
