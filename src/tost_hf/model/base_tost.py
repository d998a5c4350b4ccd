# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Base classes of ToST configurations and models, source files published with the weights, validation of fields."""

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.dynamic_module_utils import custom_object_save, get_class_from_dynamic_module, get_relative_import_files
from transformers.utils import logging


logger = logging.get_logger(__name__)


# Source files ---------------------------------------------------------------------------------------------------------


AUTO_MAPS = {  # by model type; the package registers the same classes
    "tost": {
        "AutoConfig": "configuration_tost.ToSTConfig",
        "AutoModel": "modeling_tost.ToSTModel",
        "AutoModelForCausalLM": "modeling_tost.ToSTForCausalLM",
        "AutoModelForMaskedLM": "modeling_tost.ToSTForMaskedLM",
        "AutoModelForQuestionAnswering": "modeling_tost.ToSTForQuestionAnswering",
        "AutoModelForSequenceClassification": "modeling_tost.ToSTForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_tost.ToSTForTokenClassification",
    },
    "tost_vision": {
        "AutoConfig": "configuration_tost_vision.ToSTVisionConfig",
        "AutoBackbone": "modeling_tost_vision.ToSTBackbone",
        "AutoModel": "modeling_tost_vision.ToSTVisionModel",
        "AutoModelForImageClassification": "modeling_tost_vision.ToSTForImageClassification",
    },
}


def add_class_names(model_type: str) -> None:
    """Adds the classes of a model type to the Auto classes' tables of class names, which list transformers' own models.

    `auto_class.register` does not update these tables, and remote code is not registered. Trainer's label smoothing looks in
    one whether to shift labels, pipelines whether a model supports their task, and lm-evaluation-harness whether a model
    generates text.
    """
    for auto_name, reference in AUTO_MAPS[model_type].items():
        if auto_name != "AutoConfig":
            class_names = getattr(transformers, auto_name)._model_mapping._model_mapping
            class_names[model_type] = reference.partition(".")[2]


def code_files(model_type: str) -> dict[str, Path]:
    """Name and path of each source file that is published with a model of this type: its module and all it imports."""
    module = AUTO_MAPS[model_type]["AutoModel"].partition(".")[0]
    path = Path(__file__).with_name(f"{module}.py")
    return {Path(file).name: Path(file) for file in (str(path), *get_relative_import_files(path))}


# Configurations -------------------------------------------------------------------------------------------------------


FIELD_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {  # rule: (check, names of fields)
    "be at least 1": (
        lambda x: x >= 1,
        "vocab_size max_position_embeddings num_hidden_layers num_class_attention_layers num_attention_heads num_channels",
    ),
    # 0 is valid: transformers' tools create such configurations to test the fields
    "be at least 0": (lambda x: x >= 0, "hidden_size intermediate_size"),
    "be at least 0 and below 1": (
        lambda x: 0 <= x < 1,
        "hidden_dropout attention_dropout embedding_dropout drop_path_rate",
    ),
    "be above 0": (lambda x: x > 0, "layer_norm_eps"),
    "not be negative": (lambda x: not x < 0, "initializer_range"),
}
RESEARCH_OPTIONS = {"mlp_type": "mlp", "normalize_scores": True, "pre_norm": True}  # with the values of all ToST models


class ToSTBaseConfig(PreTrainedConfig):
    """Base configuration; saved with the source files of its models if its `auto_map` is set."""

    attribute_map = {  # names of dropout in BERT, ViT and GPT-2
        "attention_probs_dropout_prob": "attention_dropout",
        "attn_pdrop": "attention_dropout",
        "dropout": "hidden_dropout",
        "embd_pdrop": "embedding_dropout",
        "hidden_dropout_prob": "hidden_dropout",
        "resid_pdrop": "hidden_dropout",
    }

    def __post_init__(self, **kwargs):
        self._set_aliases(kwargs)
        for name, default in RESEARCH_OPTIONS.items():
            if (value := kwargs.pop(name, default)) != default:
                raise ValueError(
                    f"{name}={value!r} is an experiment: the models with this option are in examples/research/ablations.py of "
                    "tost_hf's repository."
                )
        config: Any = self
        if config.intermediate_size is None:
            config.intermediate_size = 4 * config.hidden_size
        super().__post_init__(**kwargs)

    def _set_aliases(self, kwargs: dict[str, Any]) -> None:
        """Moves arguments with names of `attribute_map` to their fields, whose types are checked."""
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As `PreTrainedConfig.from_dict`, but fields in `kwargs` are set before others are derived and all are validated."""
        names = ({field.name for field in dataclasses.fields(cls)} | cls.attribute_map.keys()) - {"dtype"}  # may be "auto"
        overrides = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        return super().from_dict(cls._merge_fields(config_dict, overrides), **kwargs)

    @classmethod
    def _merge_fields(cls, fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
        # by the fields' own names, so that none is set twice
        fields, overrides = ({cls.attribute_map.get(name, name): x for name, x in d.items()} for d in (fields, overrides))
        return fields | overrides

    def get_option_defaults(self) -> dict[str, Any]:
        """The options and their values in published models."""
        return {}

    def options(self) -> dict[str, object]:
        """The options whose values differ from those of the published models."""
        defaults = self.get_option_defaults()
        return {name: value for name, value in self.to_dict().items() if name in defaults}

    def to_dict(self) -> dict:
        """As `PreTrainedConfig.to_dict`, without options at their defaults, so that published files do not change."""
        fields, defaults = super().to_dict(), self.get_option_defaults()
        return {name: value for name, value in fields.items() if name not in defaults or value != defaults[name]}

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Has no effect: `auto_map` decides whether the source files are saved. transformers calls it for remote code."""

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs):
        """As `PreTrainedConfig.save_pretrained`, with the source files beside `config.json` where `auto_map` is set."""
        if getattr(self, "auto_map", None):
            self.auto_map = dict(AUTO_MAPS[self.model_type])  # a loaded auto_map may name older files, or their repository
            os.makedirs(save_directory, exist_ok=True)
            custom_object_save(self._load_model_class(), save_directory)
        super().save_pretrained(save_directory)
        if push_to_hub:  # the base class would upload config.json alone
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    def _load_model_class(self) -> type[PreTrainedModel]:
        """The base model's class, whose module imports all source files.

        transformers copies remote code of a local folder into one module folder per class, with only the files that the class
        imports: those of a configuration lack the models.
        """
        reference = AUTO_MAPS[self.model_type]["AutoModel"]
        module, _, class_name = reference.partition(".")
        if Path(__file__).with_name(f"{module}.py").is_file():
            return getattr(importlib.import_module(f".{module}", __package__), class_name)
        return get_class_from_dynamic_module(reference, self._name_or_path)


def check_fields(config: PreTrainedConfig) -> None:
    """Raises ValueError for an invalid value in a field of a text or vision configuration."""
    for rule, (is_valid, names) in FIELD_RULES.items():
        for name in names.split():
            value = getattr(config, name, None)
            if value is not None and not is_valid(value):
                raise ValueError(f"{name} must {rule}, got {value}.")
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size ({config.hidden_size}) must be a multiple of num_attention_heads ({config.num_attention_heads})."
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = getattr(config, name, None)
        if any(i < 0 for i in (ids if isinstance(ids, list) else [ids or 0])):
            raise ValueError(f"{name} must not be negative, got {ids}; write null for none.")
    if config.hidden_act not in ACT2FN:
        raise ValueError(f"hidden_act {config.hidden_act!r} is not an activation that transformers knows, such as 'gelu'.")


# Models ---------------------------------------------------------------------------------------------------------------


class ToSTBaseModel(PreTrainedModel):
    """Base class of ToST models: loads weights from safetensors files only, and saves source files with them on request."""

    _save_code = False  # default of `with_code`

    def __init__(self, config, *inputs, **kwargs):
        config_class = type(self).config_class
        assert config_class is not None  # transformers sets it from the annotation of `config`
        # a subclass, or remote code's class of this name
        is_subclass = isinstance(config, config_class) and type(config) is not config_class
        if not is_subclass and getattr(config, "model_type", None) != config_class.model_type:
            raise ValueError(
                f"{type(self).__name__} needs a {config_class.__name__} (model type {config_class.model_type!r}), got a "
                f"{type(config).__name__} of model type {getattr(config, 'model_type', None)!r}."
            )
        config.validate_architecture()  # fields may have been assigned since it was built
        super().__init__(config, *inputs, **kwargs)

    def _check_output_attentions(self, output_attentions: bool | None, has_attention: bool) -> None:
        """Warns once that no attention weights are returned, without softmax attention or by most of its implementations."""
        requested = self.config.output_attentions if output_attentions is None else output_attentions
        if not requested or torch.compiler.is_compiling():
            return
        if has_attention and self.config._attn_implementation != "eager":
            logger.warning_once(
                f"output_attentions=True returns no weights with attn_implementation={self.config._attn_implementation!r}: "
                'load the model with attn_implementation="eager".'
            )
        if not has_attention:
            logger.warning_once(
                "output_attentions=True returns no weights, as this model has no softmax attention between tokens; "
                "output_memberships=True returns the memberships of TSSA layers."
            )

    def post_init(self):
        # only parameters that this model has: transformers' common tests look up each name
        names = (getattr(module, "float32_parameters", ()) for module in self.modules())
        self._keep_in_fp32_modules_strict = set(chain(*names))
        super().post_init()

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Makes `save_pretrained` of this class write the source files by default.

        transformers calls it for models that it loads by remote code. `auto_map` names all of ToST's Auto classes.
        """
        cls._save_code = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, use_safetensors: bool | None = None, **kwargs):
        """As `PreTrainedModel.from_pretrained`, from safetensors files only: weights are never unpickled.

        Raises:
            ImportError: a `distributed_config`, and tost_hf is not installed (remote code).
            ValueError: `use_safetensors=False`, an index that names other files, or a `distributed_config` with pipeline
                parallelism.
            OSError: there are no safetensors weights.
        """
        if use_safetensors is False:
            raise ValueError("ToST models load safetensors weights only; convert pickled ones with `tost-hf convert`.")
        distributed_config = kwargs.get("distributed_config")
        _reject_pipeline_parallelism(distributed_config)
        if distributed_config is not None or kwargs.get("tp_plan") is not None:
            _register_parallel_style()
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, use_safetensors=True, **kwargs)

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs):
        """transformers calls it with the files to load: those of an index may be pickles despite `use_safetensors=True`."""
        other_files = [file for file in checkpoint_files or () if not file.endswith(".safetensors")]
        if state_dict is None and other_files:
            raise ValueError(
                f"The weights' index names {other_files[0]}, which is not a safetensors file: save the model again."
            )
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)

    def save_pretrained(self, save_directory, *args, with_code: bool | None = None, **kwargs):
        """As `PreTrainedModel.save_pretrained`.

        Args:
            with_code: whether source files and `auto_map` are saved with the weights, so that the folder loads with
                `trust_remote_code=True` where this package is not installed. None: only if the model was loaded from a folder
                that has them.
        """
        fields = self.config.__dict__
        auto_map, origin = fields.pop("auto_map", None), fields["_name_or_path"]
        if with_code if with_code is not None else (auto_map or self._save_code):
            fields["auto_map"] = AUTO_MAPS[self.config.model_type]
            fields["_name_or_path"] = str(Path(__file__).parent)  # this folder has every file, the configuration's may not
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            fields.pop("auto_map", None)  # removed, not set to None, which transformers does not expect
            fields |= {"_name_or_path": origin} | ({"auto_map": auto_map} if auto_map else {})

    def push_to_hub(self, repo_id: str, *, with_code: bool | None = None, **kwargs) -> str:  # type: ignore[override]
        """As `PreTrainedModel.push_to_hub`, in one commit, with `with_code` as in `save_pretrained`.

        The repository's model card is preserved. `tost-hf publish` checks what it uploads; this does not.
        """
        # transformers calls save_pretrained without `with_code`
        self.save_pretrained = functools.partial(self.save_pretrained, with_code=with_code)  # type: ignore[method-assign]
        try:
            return super().push_to_hub(repo_id, **kwargs)  # type: ignore[arg-type]  # its decorator hides `self`
        finally:
            del self.save_pretrained


def _register_parallel_style() -> None:
    """Registers "tost_heads", a style of ToST's tensor-parallel plans, which only the package tost_hf has, not remote code."""
    try:
        importlib.import_module("tost_hf.parallel.tensor")
    except ModuleNotFoundError as error:
        raise ImportError("ToST models are distributed by the package tost_hf, which is not installed.") from error


def _reject_pipeline_parallelism(distributed_config) -> None:
    """Rejects transformers' pipeline parallelism: later stages would embed hidden states and add positions to them."""
    is_dict = isinstance(distributed_config, dict)  # transformers accepts both
    size = distributed_config.get("pp_size") if is_dict else getattr(distributed_config, "pp_size", None)
    if (size or 1) > 1:
        raise ValueError(
            "ToST models do not support pipeline parallelism (pp_size of distributed_config): use tp_size, which shards the "
            "heads, or fully_shard."
        )


__all__ = [
    "AUTO_MAPS",
    "RESEARCH_OPTIONS",
    "ToSTBaseConfig",
    "ToSTBaseModel",
    "add_class_names",
    "check_fields",
    "code_files",
]
