# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Checks of a model folder, for publishing and for `tost-hf verify`. They change no files."""

from pathlib import Path

import torch
from huggingface_hub import ModelCard
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from ..files import name_file_in_errors, read_json
from ..model import modeling_tost, modeling_tost_vision
from ..model.base_tost import AUTO_MAPS
from .contents import check_references
from .records import CARD, load_card


# The model ------------------------------------------------------------------------------------------------------------


def load_config(folder: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a ToST model folder.

    Args:
        trust_remote_code: whether the tokenizer or image processor may refer to code; the model itself never may.

    Raises:
        FileNotFoundError: the folder has no `config.json`.
        ValueError: it is damaged, or belongs to another type of model; or the folder's configurations refer to foreign code.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; name a folder that save_pretrained wrote.")
    fields = read_json(path)
    configs = {file.name: file for file in sorted(folder.glob("*config.json"))}
    if trust_remote_code:
        configs = {name: file for name, file in configs.items() if name in (CONFIG_NAME, GENERATION_CONFIG_NAME)}
    check_references(configs)
    with name_file_in_errors(path):
        if fields.get("model_type") not in AUTO_MAPS:
            raise ValueError(f"the model is of type {fields.get('model_type')!r}, not a ToST model")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        model_class(config), config.to_dict()  # transformers does not check all types
    return config


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class named in the configuration's `architectures`, by default the base model."""
    classes = {reference.rpartition(".")[2] for reference in AUTO_MAPS[config.model_type].values()}
    name = config.architectures[0] if config.architectures else AUTO_MAPS[config.model_type]["AutoModel"].rpartition(".")[2]
    if name not in classes:
        raise ValueError(f"config.json names the architecture {name!r}, not a ToST model of type {config.model_type!r}.")
    return getattr(modeling_tost_vision if config.model_type == "tost_vision" else modeling_tost, name)


def parameter_count(config: PreTrainedConfig) -> int:
    """Number of parameters of the configuration's model, computed without allocating them."""
    return empty_model(config).num_parameters()


def empty_model(config: PreTrainedConfig, cls: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """The configuration's model on the meta device; `cls` is by default the class that the configuration names."""
    with torch.device("meta"):
        return (cls or model_class(config))(config)


# Cards ----------------------------------------------------------------------------------------------------------------


def check_card(folder: Path) -> ModelCard:
    """Loads and checks the folder's model card.

    Raises:
        ValueError: there is no card, its metadata does not parse, it names no license, or it is an unfilled template.
    """
    path = folder / CARD
    if not path.is_file():
        raise ValueError(f"{folder} has no model card; publish with --license, which writes one.")
    card = load_card(path)
    if not card.data.get("license"):
        raise ValueError(
            f"The card {path} names no license: --license apache-2.0 (or whichever it is) adds it, or a line in its metadata."
        )
    if "[More Information Needed]" in card.content:
        raise ValueError(f"The card {path} is an unfilled template: complete it by hand.")
    return card
