# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Writes a static Space: a folder with a page that runs a model in the browser."""

import json
import os
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import SpaceCardData
from transformers.utils import IMAGE_PROCESSOR_NAME

from ..export import export_model
from ..extras import require
from ..files import check_folder, staged_folder
from ..hub.loading import TOKENIZER_FILES, empty_model, has_file, load_config, resolve_model_folder
from ..hub.results import CARD, load_card
from ..image_processing import make_image_processor
from ..interpret.plots import head_style
from ..model.configuration_tost_vision import ToSTVisionConfig
from ..version import __version__
from .packages import RUNTIME, TOKENIZERS, unpack


PAGE_FILES = ("index.html", "tost.js")
SAMPLES = ("cat.jpg", "coffee.jpg", "rocket.jpg")  # of examples/photos, which names their licenses
PROMPT = "Once upon a time"
VENDOR = "vendor"
MODEL = "model"  # the output folder of `export_model`
SPACE_DESCRIPTION = "space.json"  # metadata for the page, in addition to export.json
FILTERS = {2: "bilinear", 3: "bicubic"}  # by Pillow's numbers
MODEL_KINDS = {"ToSTForCausalLM": "language", "ToSTForImageClassification": "vision"}


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
    """Writes a folder with a page that runs the model in the browser.

    View it with `python -m http.server`, or publish it as a Space of the Hub.

    ```python
    write_space("./tost-demo", "./tost-page", dtype="int8", title="My ToST")
    ```

    Args:
        model: a folder or a repository of the Hub, with a causal language model or an image classifier.
        output_dir: the folder to write to.
        dtype: dtype of the weights, as in `export_model`; "int8" makes the smallest folder.
        tokenizer: folder or repository of the tokenizer, if the model's folder does not contain it.
        title: title of the page; by default the model's name.
        npm: a folder with the tarballs of the JavaScript libraries; by default npm downloads them.
        revision: branch, tag or commit of the repository.
        overwrite: write to a folder that is not empty.

    Returns:
        The folder.

    Raises:
        ValueError: the page does not support the model, its tokenizer or its image processor, or a library has a wrong hash.
        OSError: a file or library is missing, or the folder cannot be written. Partial output is removed.
        ImportError: the packages that write ONNX files are missing.
    """
    target = Path(output_dir)
    check_folder(target, overwrite, [model, *([] if tokenizer is None else [tokenizer])])
    source = resolve_model_folder(model, revision)
    config = load_config(source)
    architecture = (config.architectures or ["model without a head"])[0]
    if architecture not in MODEL_KINDS:
        raise ValueError(f"{model} is a {architecture}; the page runs {' and '.join(MODEL_KINDS)}.")
    metadata: dict[str, Any] = {
        "title": title or Path(model).resolve().name,
        "about": f"{architecture}, {empty_model(config).num_parameters():,} parameters, {dtype}",
        "kind": MODEL_KINDS[architecture],
        "version": __version__,
        "depth": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": [dict(zip(("color", "mark"), head_style(head))) for head in range(config.num_attention_heads)],
    }
    if isinstance(config, ToSTVisionConfig):
        metadata |= {"image": _read_preprocessing(config, source), "samples": SAMPLES}
    elif tokenizer is None and not has_file(source, TOKENIZER_FILES):
        raise ValueError(f"{source} has no tokenizer, which the page needs: name one (--tokenizer).")
    else:
        metadata["prompt"] = _find_prompt(source)
    with staged_folder(target) as folder:
        (folder / VENDOR).mkdir()
        unpack((RUNTIME,) if "image" in metadata else (RUNTIME, TOKENIZERS), folder / VENDOR, npm)
        export_model(source, folder / MODEL, dtype=dtype, tokenizer=tokenizer)
        if "image" not in metadata and not (folder / MODEL / "tokenizer.json").is_file():
            raise ValueError("The tokenizer has no tokenizer.json, which the page needs: name a fast tokenizer (--tokenizer).")
        content = json.dumps(metadata, indent=1, ensure_ascii=False) + "\n"
        (folder / SPACE_DESCRIPTION).write_text(content, encoding="utf-8")
        targets = {name: folder / name for name in PAGE_FILES}
        targets |= {name: folder / "samples" / name for name in metadata.get("samples", ())}
        for name, path in targets.items():
            path.parent.mkdir(exist_ok=True)
            shutil.copyfile(str(resources.files(__package__) / "page" / name), path)
        (folder / CARD).write_text(_make_card(metadata["title"], os.fspath(model), source), encoding="utf-8")
    return target


def _find_prompt(source: Path) -> str:
    """The prompt that the page starts with: the first example of the model card (`widget`), if it has any."""
    widget = load_card(source / CARD).data.get("widget") if (source / CARD).is_file() else None
    texts = [example["text"] for example in widget or () if isinstance(example, dict) and isinstance(example.get("text"), str)]
    return texts[0] if texts else PROMPT


def _read_preprocessing(config: ToSTVisionConfig, source: Path) -> dict[str, Any]:
    """The page's preprocessing of images: that of the folder's image processor, by default of `make_image_processor`.

    Raises:
        ValueError: the page does not implement it, or the model does not accept its output.
        ImportError: Pillow is missing.
    """
    require("PIL", "vision")
    from transformers import ViTImageProcessorPil

    processor: Any = make_image_processor(config)
    if (source / IMAGE_PROCESSOR_NAME).is_file():
        try:
            processor = ViTImageProcessorPil.from_pretrained(source, local_files_only=True)
        except Exception as error:  # a damaged file raises exceptions of any type
            raise ValueError(f"The image processor of {source} cannot be loaded: {error}") from error
    size = {key: value for key, value in dict(processor.size or {}).items() if value is not None}
    resized = (size["height"], size["width"]) if set(size) == {"height", "width"} else None
    crop = dict(processor.crop_size) if processor.do_center_crop else dict(zip(("height", "width"), resized or (1, 1)))
    height, width = crop["height"], crop["width"]
    is_supported = processor.do_resize and (resized or "shortest_edge" in size) and int(processor.resample) in FILTERS
    if not is_supported or config.num_channels != 3 or height % config.patch_size or width % config.patch_size:
        raise ValueError(
            f"The page does not implement the image processor of {source} with this model: it resizes RGB images to a height "
            f"and width or a shortest edge, with {' or '.join(FILTERS.values())} filters, and crops them to multiples of the "
            "patch size. Save make_image_processor(config) beside the model."
        )
    return {  # in the order of the steps; sizes in pixels
        "shortest_edge": size.get("shortest_edge"),  # size of the shorter side; None: resize to `resized`
        "resized": resized,  # (height, width)
        "filter": FILTERS[int(processor.resample)],
        "height": height,  # of the center crop, which is the model's input
        "width": width,
        "scale": processor.rescale_factor if processor.do_rescale else 1.0,  # multiplies the bytes
        "mean": list(processor.image_mean) if processor.do_normalize else [0.0] * 3,  # subtracted from each channel
        "std": list(processor.image_std) if processor.do_normalize else [1.0] * 3,  # divisor of each channel
    }


def _make_card(title: str, model: str, source: Path) -> str:
    """README.md of the Space, with the metadata that the Hub requires."""
    metadata = SpaceCardData(
        title=title,
        sdk="static",
        app_file="index.html",
        license=load_card(source / CARD).data.get("license") if (source / CARD).is_file() else None,
        models=None if os.path.isdir(model) else [model],
        emoji="📐",
        colorFrom="blue",
        colorTo="green",
        pinned=False,
        short_description="A ToST model that runs in the browser",
    )
    return (
        f"---\n{metadata.to_yaml()}\n---\n\n# {title}\n\nA ToST model that runs in the browser, written by `tost-hf space` "
        f"({__version__}). Nothing leaves the browser. To see it without the Hub: `python -m http.server` in this folder.\n"
    )
