# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A static Space: a folder with a page that runs one model in the browser, and all that the page needs, offline as well."""

import json
import os
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..files import check_folder, staged_folder
from ..hub.checks import load_config
from ..hub.connection import hub_calls, listing
from ..hub.loading import load_fitting_tokenizer, load_model
from ..hub.records import CARD, load_card
from ..interpret.colors import head_style
from ..model.configuration_tost import CAUSAL_STATISTICS
from ..model.modeling_tost import ToSTForCausalLM
from ..model.modeling_tost_vision import ToSTForImageClassification
from ..version import __version__
from .graphs import write_language_graph, write_vision_graph
from .packages import RUNTIME, TOKENIZERS, unpack
from .pictures import read_preparation


PAGE_FILES = ("index.html", "tost.js")
VENDOR = "vendor"
GRAPH = "model.onnx"
FACTS = "space.json"  # what the page knows of its model


def write_space(
    model: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    tokenizer: str | None = None,
    title: str | None = None,
    npm: str | os.PathLike | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a folder with a page that runs the model in the browser: `python -m http.server` shows it, the Hub as a Space.

    Args:
        model: a folder or a repository of the Hub, with a causal language model or an image classifier.
        tokenizer: folder or repository of its tokenizer, where it is not beside the model.
        title: of the page; the model's name by default.
        npm: where the JavaScript libraries come from: a folder with their tarballs, or the address of a registry.

    Returns:
        The folder.

    Raises:
        ValueError: the model, its tokenizer or a library is not one that the page can run.
        OSError: something is missing, cannot be fetched or cannot be written. Nothing is left half written.
        ImportError: the packages that write ONNX files are missing.
    """
    target = Path(output_dir)
    check_folder(target, overwrite)
    source = _local_folder(os.fspath(model))
    config = load_config(source)
    loaded = load_model(source, config).float()
    title = title or Path(model).name or "ToST"
    with staged_folder(target) as folder:
        (folder / VENDOR).mkdir()
        if isinstance(loaded, ToSTForCausalLM):
            facts = _write_language(loaded, tokenizer or str(source), folder, npm)
        elif isinstance(loaded, ToSTForImageClassification):
            if tokenizer is not None:
                raise ValueError(f"{model} reads images; --tokenizer is for text models.")
            facts = _write_vision(loaded, source, folder, npm)
        else:
            raise ValueError(
                f"{model} is a {type(loaded).__name__}; the page runs models that write (ToSTForCausalLM) or classify "
                "pictures (ToSTForImageClassification)."
            )
        facts |= {"title": title, "about": _about(loaded), "graph": GRAPH, "version": __version__}
        (folder / FACTS).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for name in PAGE_FILES:
            shutil.copyfile(str(resources.files(__package__) / "page" / name), folder / name)
        (folder / CARD).write_text(_card(title, os.fspath(model), source), encoding="utf-8")
    return target


def _local_folder(source: str) -> Path:
    """The folder, or a repository's snapshot in the Hub's cache."""
    if os.path.isdir(source):
        return Path(source)
    if os.path.exists(source):
        raise ValueError(f"{source} is a file; name a model folder, or a repository of the Hub.")
    with hub_calls():
        validate_repo_id(source)
        return Path(snapshot_download(source, revision=listing(HfApi(), source).sha))


def _write_language(model: ToSTForCausalLM, tokenizer: str, folder: Path, npm) -> dict[str, Any]:
    """Writes what writing needs, and returns what the page has to know."""
    config = model.config
    others = sorted({kind for kind in config.all_layer_types if kind != CAUSAL_STATISTICS})
    if others:
        raise ValueError(
            f"The page runs models whose state has a constant size; this one has layers of type {', '.join(others)}, which "
            "keep every token."
        )
    _save_tokenizer(load_fitting_tokenizer(tokenizer, config), tokenizer, folder)
    unpack((RUNTIME, TOKENIZERS), folder / VENDOR, npm)
    states = write_language_graph(model, folder / GRAPH)
    ends = model.generation_config.eos_token_id if model.generation_config is not None else config.eos_token_id
    return {
        "kind": "language",
        "states": [state._asdict() for state in states],
        "positions": config.max_position_embeddings,
        "bos": config.bos_token_id,
        "eos": [] if ends is None else [ends] if isinstance(ends, int) else list(ends),
        "width": config.hidden_size,
        **_heads(config.num_hidden_layers, config.num_attention_heads),
    }


def _write_vision(model: ToSTForImageClassification, source: Path, folder: Path, npm) -> dict[str, Any]:
    """Writes what classifying needs, and returns what the page has to know."""
    config = model.config
    preparation = read_preparation(config, source)
    unpack((RUNTIME,), folder / VENDOR, npm)
    height, width = preparation.height, preparation.width
    write_vision_graph(model, folder / GRAPH, height, width)
    layers = config.num_hidden_layers if config.attention_type == "tssa" else 0
    return {
        "kind": "vision",
        "image": preparation._asdict(),
        "grid": [height // config.patch_size, width // config.patch_size],
        "labels": [str(label) for _, label in sorted((config.id2label or {}).items())],
        **_heads(layers, config.num_attention_heads),
    }


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, source: str, folder: Path) -> None:
    if not tokenizer.is_fast:
        raise ValueError(
            f"The tokenizer of {source} is a {type(tokenizer).__name__}, which has no tokenizer.json; the page needs one. "
            "Name a fast tokenizer (--tokenizer)."
        )
    tokenizer.save_pretrained(folder)


def _heads(layers: int, heads: int) -> dict[str, Any]:
    styles = [head_style(head) for head in range(heads)]
    return {"layers": layers, "heads": heads, "colors": [{"color": color, "mark": mark} for color, mark in styles]}


def _about(model: PreTrainedModel) -> str:
    config = model.config
    return (
        f"{config.num_hidden_layers} layers of {config.num_attention_heads} heads, {model.num_parameters():,} parameters, "
        "float32"
    )


def _card(title: str, model: str, source: Path) -> str:
    """README.md of the Space, with the metadata that the Hub asks for."""
    metadata: dict[str, Any] = {
        "title": title,
        "emoji": "📐",
        "colorFrom": "blue",
        "colorTo": "green",
        "sdk": "static",
        "app_file": "index.html",
        "pinned": False,
        "short_description": "A ToST model that runs in the browser",
    }
    if (source / CARD).is_file() and (license := load_card(source / CARD).data.license):
        metadata["license"] = license
    if not os.path.isdir(model):
        metadata["models"] = [model]
    head = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return (
        f"---\n{head}---\n\n# {title}\n\nA ToST model that runs in the browser, written by `tost-hf space` "
        f"({__version__}). Nothing leaves the browser. To see it without the Hub: `python -m http.server` in this folder.\n"
    )


__all__ = ["FACTS", "write_space"]
