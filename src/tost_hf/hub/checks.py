# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Checks of a model folder, for publishing and for `tost-hf verify`. They change no files."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from ..files import name_file_in_errors, read_json
from ..model import modeling_tost, modeling_tost_vision
from ..model.base_tost import AUTO_MAPS
from .records import CARD, load_card


TEXT_SUFFIXES = (".json", ".jinja", ".md", ".txt", ".py", ".js", ".html")
HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}")
CODE_KEYS = (  # keys that make transformers or PEFT load code or another repository
    *("auto_map", "custom_pipelines", "custom_generate", "base_model_name_or_path", "audio_tokenizer_name_or_path"),
    # generation modes whose code moved from transformers to repositories
    *("constraints", "dola_layers", "force_words_ids", "num_beam_groups", "penalty_alpha"),
)
CLASS_REFERENCE = re.compile(r"[\w./-]+--\w+\.\w+")  # as in "owner/repository--module.Class"


# Files ----------------------------------------------------------------------------------------------------------------


def check_no_hub_token(files: Mapping[str, Path]) -> None:
    """Raises ValueError if one of the text files (name -> path) contains an access token of the Hub."""
    text_files = [name for name in files if Path(name).suffix in TEXT_SUFFIXES or "LICENSE" in name]
    matches = [name for name in text_files if HUB_TOKEN.search(files[name].read_text(encoding="utf-8", errors="replace"))]
    if matches:
        raise ValueError(f"{', '.join(matches)} contains a token of the Hub (hf_...): remove it, and revoke it on the Hub.")


def check_code_references(files: Mapping[str, Path]) -> None:
    """Raises ValueError if a configuration among the files (name -> path) refers to code other than ToST's."""
    for name, path in files.items():
        if name.endswith(".json") and "config" in name:
            content = read_json(path)
            if name == CONFIG_NAME and _is_tost_auto_map(content.get("auto_map")):
                del content["auto_map"]
            if references := list(_find_code_references("", content)):
                raise ValueError(
                    f"{name} refers to code that is not ToST's by {', '.join(references)}. Remove it: "
                    "trust_remote_code=True would run that code."
                )


def _find_code_references(key: str, value: Any) -> Iterator[str]:
    """The keys and values, at any depth, that refer to code."""
    is_kernel = key.endswith("attn_implementation") and "/" in json.dumps(value)
    if is_kernel or (key in CODE_KEYS and value and value != 1):  # num_beam_groups=1 is ordinary beam search
        yield key
    elif isinstance(value, str) and CLASS_REFERENCE.fullmatch(value):
        yield value
    elif isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else (("", item) for item in value):
            yield from _find_code_references(name, item)


def _is_tost_auto_map(auto_map: Any) -> bool:
    """Whether all entries of an `auto_map` are ToST's; older versions wrote fewer entries."""
    tost_entries = [entry for tost_map in AUTO_MAPS.values() for entry in tost_map.items()]
    return isinstance(auto_map, dict) and all(entry in tost_entries for entry in auto_map.items())


# The model ------------------------------------------------------------------------------------------------------------


def load_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a ToST model folder.

    Raises:
        FileNotFoundError: the folder has no `config.json`.
        ValueError: it is damaged, or belongs to another type of model.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; name a folder that save_pretrained wrote.")
    fields = read_json(path)
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
        ValueError: there is no card, its metadata does not parse, it names no licence, or it is an unfilled template.
    """
    path = folder / CARD
    if not path.is_file():
        raise ValueError(f"{folder} has no model card; write one with `tost-hf card {folder} --license LICENSE`.")
    card = load_card(path)
    if not card.data.get("license"):
        raise ValueError(
            f"The card {path} names no licence: add the line `license: apache-2.0` (or whichever it is) to its metadata, or "
            f"write it again with `tost-hf card {folder} --license apache-2.0 --overwrite`."
        )
    if "[More Information Needed]" in card.content:
        raise ValueError(f"The card {path} is an unfilled template: complete it by hand.")
    return card


def check_space(folder: Path) -> None:
    """Raises ValueError if `tost-hf space` did not write the folder."""
    if not all((folder / name).is_file() for name in (CARD, "space.json", "model/export.json")):
        raise ValueError(f"{folder} is not a page that `tost-hf space` wrote; write one with `tost-hf space MODEL {folder}`.")
