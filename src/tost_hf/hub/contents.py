# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The files of a model folder or page that are published, and what they must not contain.

The checks load what `model_files` returns and nothing else, so what is published was checked.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..files import RECORDS, SHARD_NAME, is_weights_name, name_file_in_errors, open_safetensors, read_json
from ..model.base_tost import AUTO_MAPS
from .records import CARD, IMAGE_PROCESSOR_FILES


TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
MODEL_FILES = (  # patterns of published files, besides the weights, the card's images and ToST's source files
    *(CONFIG_NAME, GENERATION_CONFIG_NAME, CARD, "LICENSE*"),
    *(*TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("additional_chat_templates/*.jinja", *IMAGE_PROCESSOR_FILES, *RECORDS),
)
SPACE_FILES = (CARD, "space.json", "index.html", "tost.js", "samples/*", "vendor/*", "model/*")  # of `tost-hf space`
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp")
TEXT_SUFFIXES = (".json", ".jinja", ".md", ".txt", ".py", ".js", ".html")
HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}")
REFERENCE_KEYS = (  # keys that make transformers or PEFT load code, another repository or files of other names
    *("auto_map", "custom_pipelines", "custom_generate", "base_model_name_or_path", "audio_tokenizer_name_or_path"),
    *("transformers_weights", "configuration_files", "fast_tokenizer_files"),
    # generation modes whose code moved from transformers to repositories
    *("constraints", "dola_layers", "force_words_ids", "num_beam_groups", "penalty_alpha"),
)
CLASS_REFERENCE = re.compile(r"[\w./-]+--\w+\.\w+")  # as in "owner/repository--module.Class"


# Selection ------------------------------------------------------------------------------------------------------------


def model_files(folder: Path) -> dict[str, Path]:
    """The published files of a model folder, name -> path, without ToST's source files.

    Raises:
        FileNotFoundError, ValueError: as `weights_files`.
        ValueError: one of the files is a link that leads out of the folder.
    """
    files = _match_files(folder, MODEL_FILES) | weights_files(folder)
    card = files[CARD].read_text(encoding="utf-8", errors="replace") if CARD in files else ""
    image_paths = [path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES]
    images = {path.relative_to(folder).as_posix(): path for path in image_paths}
    files |= {name: path for name, path in images.items() if f"({name})" in card or f'"{name}"' in card}
    _check_links(folder, files)
    return files


def space_files(folder: Path) -> dict[str, Path]:
    """The published files of a folder that `tost-hf space` wrote, name -> path.

    Raises:
        ValueError: `tost-hf space` did not write the folder, or one of the files is a link that leads out of it.
    """
    files = _match_files(folder, SPACE_FILES)
    if not files.keys() >= {CARD, "space.json", "model/export.json"}:
        raise ValueError(f"{folder} is not a page that `tost-hf space` wrote; write one with `tost-hf space MODEL {folder}`.")
    _check_links(folder, files)
    return files


def weights_files(folder: Path) -> dict[str, Path]:
    """The files of a model's weights, name -> path: `model.safetensors`, or the index and all shards that it names.

    Raises:
        FileNotFoundError: one of them is missing.
        ValueError: the index is damaged, or differs from the shards; or there are weights besides these.
    """
    files = {path.name: path for path in sorted(folder.iterdir()) if is_weights_name(path.name) and path.is_file()}
    index, names = folder / SAFE_WEIGHTS_INDEX_NAME, {SAFE_WEIGHTS_NAME}
    if index.name in files and SAFE_WEIGHTS_NAME not in files:
        with name_file_in_errors(index):
            names = {index.name, *_read_shard_names(index)}
    if missing := sorted(names - files.keys()):
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}: save the model again with save_pretrained.")
    if extra := sorted(files.keys() - names):
        raise ValueError(
            f"{folder} has the weights of more than one model: {', '.join(extra)} besides {', '.join(sorted(names))}. "
            "Remove those that are old."
        )
    return files


def _read_shard_names(index: Path) -> set[str]:
    """The shards that an index names, after comparing it with their tensors."""
    weight_map = read_json(index)["weight_map"]
    shards: dict[str, set[str]] = {name: set() for name in weight_map.values()}
    for tensor_name, name in weight_map.items():
        shards[name].add(tensor_name)
    for name, tensor_names in shards.items():
        if not SHARD_NAME.fullmatch(name):
            raise ValueError(f"it names {name!r}; shards are named like model-00001-of-00002.safetensors")
        if (index.parent / name).is_file():
            with open_safetensors(index.parent / name) as file:
                if different := tensor_names ^ set(file.keys()):
                    raise ValueError(f"it differs from {name} in {', '.join(sorted(different)[:5])}")
    return set(shards)


def _match_files(folder: Path, patterns: tuple[str, ...]) -> dict[str, Path]:
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _check_links(folder: Path, files: Mapping[str, Path]) -> None:
    """Raises ValueError if one of the files is a link that leads out of the folder."""
    allowed = [root := folder.resolve()]
    if root.parent.name == "snapshots":  # of the Hub's cache, which keeps the files themselves in "blobs"
        allowed.append(root.parents[1] / "blobs")
    for name, path in files.items():
        if not any(path.resolve().is_relative_to(directory) for directory in allowed):
            raise ValueError(f"{name} is a link to {path.resolve()}, out of the folder {folder}: replace it by a file.")


@contextmanager
def linked_folder(folder: Path, files: Mapping[str, Path]) -> Iterator[Path]:
    """Yields a temporary folder with links to these files of a folder, so that nothing else of it can be loaded.

    A ValueError raised within names `folder` in place of the temporary one.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        for name, path in files.items():
            link = Path(temporary, name)
            link.parent.mkdir(parents=True, exist_ok=True)
            try:
                link.symlink_to(path.resolve())
            except OSError:  # on Windows links need a permission
                shutil.copyfile(path, link)
        try:
            yield Path(temporary)
        except ValueError as error:
            raise ValueError(str(error).replace(temporary, os.fspath(folder))) from error


# Contents -------------------------------------------------------------------------------------------------------------


def check_no_hub_token(files: Mapping[str, Path]) -> None:
    """Raises ValueError if one of the text files (name -> path) contains an access token of the Hub."""
    text_files = [name for name in files if Path(name).suffix in TEXT_SUFFIXES or "LICENSE" in name]
    matches = [name for name in text_files if HUB_TOKEN.search(files[name].read_text(encoding="utf-8", errors="replace"))]
    if matches:
        raise ValueError(f"{', '.join(matches)} contains a token of the Hub (hf_...): remove it, and revoke it on the Hub.")


def check_references(files: Mapping[str, Path]) -> None:
    """Raises ValueError if a configuration among the files (name -> path) refers to foreign code or to other files."""
    for name, path in files.items():
        if name.endswith(".json") and "config" in name:
            content = read_json(path)
            if name == CONFIG_NAME and _is_tost_auto_map(content.get("auto_map")):
                del content["auto_map"]
            if references := list(_find_references("", content)):
                raise ValueError(
                    f"{path} refers to code that is not ToST's, or to other files, by {', '.join(references)}. Remove it: "
                    "transformers would run or load these."
                )


def _find_references(key: str, value: Any) -> Iterator[str]:
    """The keys and values, at any depth, that refer to code or to other files."""
    is_kernel = key.endswith("attn_implementation") and "/" in json.dumps(value)
    if is_kernel or (key in REFERENCE_KEYS and value and value != 1):  # num_beam_groups=1 is ordinary beam search
        yield key
    elif isinstance(value, str) and CLASS_REFERENCE.fullmatch(value):
        yield value
    elif isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else (("", item) for item in value):
            yield from _find_references(name, item)


def _is_tost_auto_map(auto_map: Any) -> bool:
    """Whether all entries of an `auto_map` are ToST's; older versions wrote fewer entries."""
    tost_entries = [entry for tost_map in AUTO_MAPS.values() for entry in tost_map.items()]
    return isinstance(auto_map, dict) and all(entry in tost_entries for entry in auto_map.items())
