# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A static Space: a folder with a page that runs one model in the browser, online or offline."""

import json
import os
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ..exporting import export_model
from ..files import check_folder, staged_folder
from ..hub.checks import load_config, parameter_count
from ..hub.loading import TOKENIZER_FILES, model_folder
from ..hub.markdown import escape
from ..hub.records import CARD, load_card
from ..interpret.colors import head_style
from ..model.configuration_tost_vision import ToSTVisionConfig
from ..version import __version__
from .packages import RUNTIME, TOKENIZERS, unpack
from .pictures import read_preprocessing


PAGE_FILES = ("index.html", "tost.js")
VENDOR = "vendor"
MODEL = "model"  # the folder of what `export_model` writes
FACTS = "space.json"  # the page's description of its model, besides export.json
KINDS = {"ToSTForCausalLM": "language", "ToSTForImageClassification": "vision"}


def write_space(
    model: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    dtype: str = "float32",
    tokenizer: str | None = None,
    title: str | None = None,
    npm: str | os.PathLike | None = None,
    revision: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a folder with a page that runs the model in the browser: `python -m http.server` shows it, the Hub as a Space.

    ```python
    write_space("./tost-demo", "./tost-page", dtype="int8", title="My ToST")
    ```

    Args:
        model: a folder or a repository of the Hub, with a causal language model or an image classifier.
        output_dir: the folder to write to.
        dtype: of the weights, as in `export_model`: "int8" makes the smallest folder.
        tokenizer: folder or repository of its tokenizer, where it is not beside the model.
        title: of the page; the model's name by default.
        npm: a folder with the tarballs of the JavaScript libraries; by default the npm client fetches them.
        revision: branch, tag or commit of the repository.
        overwrite: write into a folder that is not empty.

    Returns:
        The folder.

    Raises:
        ValueError: the page does not support the model, its tokenizer or its image processor, or a library has another hash.
        OSError: a file or library is missing, or the folder cannot be written. Nothing was written then.
        ImportError: the packages that write ONNX files are missing.
    """
    target = Path(output_dir)
    check_folder(target, overwrite, [model, *([] if tokenizer is None else [tokenizer])], subfolders=(VENDOR, MODEL))
    source = model_folder(model, revision)
    config = load_config(source)
    architecture = (config.architectures or ["model without a head"])[0]
    if architecture not in KINDS:
        raise ValueError(f"{model} is a {architecture}; the page runs {' and '.join(KINDS)}.")
    facts: dict[str, Any] = {
        "title": title or Path(model).resolve().name,
        "about": f"{architecture}, {parameter_count(config):,} parameters, {dtype}",
        "kind": KINDS[architecture],
        "version": __version__,
        "depth": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": [dict(zip(("color", "mark"), head_style(head))) for head in range(config.num_attention_heads)],
    }
    if isinstance(config, ToSTVisionConfig):
        facts["image"] = read_preprocessing(config, source)._asdict()
    elif tokenizer is None and not any((source / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{source} has no tokenizer, which the page needs: name the model's (--tokenizer).")
    with staged_folder(target) as folder:
        (folder / VENDOR).mkdir()
        unpack((RUNTIME,) if "image" in facts else (RUNTIME, TOKENIZERS), folder / VENDOR, npm)
        export_model(source, folder / MODEL, dtype=dtype, tokenizer=tokenizer)
        _check_files(folder / MODEL, facts["kind"])
        (folder / FACTS).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for name in PAGE_FILES:
            shutil.copyfile(str(resources.files(__package__) / "page" / name), folder / name)
        (folder / CARD).write_text(_card(facts["title"], os.fspath(model), source), encoding="utf-8")
    return target


def _check_files(folder: Path, kind: str) -> None:
    """Rejects an exported model that a browser cannot load."""
    if kind == "language" and not (folder / "tokenizer.json").is_file():
        raise ValueError("The tokenizer has no tokenizer.json, which the page needs: name a fast one (--tokenizer).")
    if len(list(folder.glob("*.onnx*"))) > 1:
        raise ValueError("The model takes more than 2 GB, which a browser cannot hold; write it in int8 (--dtype int8).")


def _card(title: str, model: str, source: Path) -> str:
    """README.md of the Space, with the metadata that the Hub requires."""
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
        f"---\n{head}---\n\n# {escape(title)}\n\nA ToST model that runs in the browser, written by `tost-hf space` "
        f"({__version__}). Nothing leaves the browser. To see it without the Hub: `python -m http.server` in this folder.\n"
    )


__all__ = ["FACTS", "write_space"]
