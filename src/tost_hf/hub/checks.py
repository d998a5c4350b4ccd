# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What a model folder has to satisfy to be published, and what `tost-hf verify` looks at. Nothing here changes a file."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from ..model import modeling_tost, modeling_tost_vision
from ..model.base_tost import AUTO_MAPS
from .records import CARD, load_card, read_json


TEXT_FILES = (".json", ".jinja", ".md", ".txt", ".py", ".js", ".html")
HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}")
CODE_KEYS = (  # by which transformers or PEFT load code or another repository
    *("auto_map", "custom_pipelines", "custom_generate", "base_model_name_or_path", "audio_tokenizer_name_or_path"),
    # generation modes that were moved to repositories
    *("constraints", "dola_layers", "force_words_ids", "num_beam_groups", "penalty_alpha"),
)
CLASS_REFERENCE = re.compile(r"[\w./-]+--\w+\.\w+")  # as in "owner/repository--module.Class"


# Texts ----------------------------------------------------------------------------------------------------------------


def check_texts(files: Mapping[str, Path]) -> None:
    """Raises ValueError for a token of the Hub in one of the text files."""
    texts = [name for name in files if Path(name).suffix in TEXT_FILES or "LICENSE" in name]
    found = [name for name in texts if HUB_TOKEN.search(files[name].read_text(encoding="utf-8", errors="replace"))]
    if found:
        raise ValueError(f"{', '.join(found)} holds a token of the Hub (hf_...): remove it, and revoke it on the Hub.")


def check_code_references(files: Mapping[str, Path]) -> None:
    """Raises ValueError where a configuration among the files (name -> path) leads to code other than ToST's."""
    for name, path in files.items():
        if name.endswith(".json") and "config" in name:
            content = read_json(path)
            if name == CONFIG_NAME and _is_own_auto_map(content.get("auto_map")):
                del content["auto_map"]
            if found := list(_code_references("", content)):
                raise ValueError(
                    f"{name} leads to code that is not ToST's by {', '.join(found)}. Whoever sets trust_remote_code=True "
                    "for it would run that code; remove it."
                )


def _code_references(key: str, value: Any) -> Iterator[str]:
    """The keys and values, at any depth, that name code."""
    is_kernel = key.endswith("attn_implementation") and "/" in json.dumps(value)
    if is_kernel or (key in CODE_KEYS and value and value != 1):  # one group of beams is none
        yield key
    elif isinstance(value, str) and CLASS_REFERENCE.fullmatch(value):
        yield value
    elif isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else (("", item) for item in value):
            yield from _code_references(name, item)


def _is_own_auto_map(auto_map: Any) -> bool:
    """Whether each entry of an `auto_map` is ToST's; an older version's may have fewer."""
    ours = [item for own in AUTO_MAPS.values() for item in own.items()]
    return isinstance(auto_map, dict) and all(item in ours for item in auto_map.items())


# The model ------------------------------------------------------------------------------------------------------------


def load_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a ToST model folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or belongs to another kind of model.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; give a folder that save_pretrained wrote.")
    model_type = read_json(path).get("model_type")
    if model_type not in AUTO_MAPS:
        raise ValueError(f"{folder} holds a model of type {model_type!r}, not a ToST model.")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except StrictDataclassError as error:  # which is no ValueError
        raise ValueError(f"{path} is not the configuration of a ToST model: {str(error).splitlines()[-1].strip()}") from error


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class named in the configuration's `architectures` (the base model where it names none)."""
    classes = {reference.rpartition(".")[2] for reference in AUTO_MAPS[config.model_type].values()}
    name = config.architectures[0] if config.architectures else AUTO_MAPS[config.model_type]["AutoModel"].rpartition(".")[2]
    if name not in classes:
        raise ValueError(f"config.json names the architecture {name!r}, which is no ToST model of type {config.model_type!r}.")
    return getattr(modeling_tost_vision if config.model_type == "tost_vision" else modeling_tost, name)


def parameter_count(config: PreTrainedConfig) -> int:
    """Number of parameters of the configuration's model; nothing is allocated."""
    return empty_model(config).num_parameters()


def empty_model(config: PreTrainedConfig, kind: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """The configuration's model without memory for its weights (on the meta device), of the class it names or of this one."""
    with torch.device("meta"):
        return (kind or model_class(config))(config)


# Cards ----------------------------------------------------------------------------------------------------------------


def check_card(folder: Path) -> ModelCard:
    """The folder's model card.

    Raises:
        ValueError: there is none, its metadata does not parse, it names no licence, or it is an unfilled form.
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
        raise ValueError(f"The card {path} is an unfilled form: complete it by hand.")
    return card


def check_space(folder: Path) -> None:
    """Raises ValueError for a folder that `tost-hf space` did not write."""
    if not all((folder / name).is_file() for name in (CARD, "space.json", "model/export.json")):
        raise ValueError(f"{folder} is not a page that `tost-hf space` wrote; write one with `tost-hf space MODEL {folder}`.")
