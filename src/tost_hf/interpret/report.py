# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""`tost-hf inspect`: plots of every quantity of one image or text, and an HTML page that shows them."""

import html
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.utils import IMAGE_PROCESSOR_NAME

from ..files import name_file_in_errors, staged_folder
from ..hub.checks import load_config
from ..hub.loading import load_model, resolve_model_folder
from ..image_processing import convert_image, make_image_processor
from ..model.configuration_tost import ToSTConfig
from ..model.modeling_tost_vision import ToSTVisionPatchEmbeddings
from . import plots, quantities
from .trace import ModelTrace, find_modules, pick_layer, require_extra, trace_model, tssa_layers


if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image
    from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

INDEX = "index.html"
GENERATOR = '<meta name="generator" content="tost-hf inspect">'
STYLE = "body { font-family: sans-serif; max-width: 820px; margin: auto } img { width: 100% } td, th { padding: 0 0.8em }"
CAPTIONS = {
    "memberships.png": "Membership Pi of each patch or token in each head; each layer has its own scale.",
    "strongest_heads.png": "The head with the largest membership; the paler, the less it exceeds the uniform value 1 / H.",
    "entropy.png": "Entropy of Pi over the heads in nats: 0 where a token belongs to one head, ln H where to all equally.",
    "class_attention.png": "The class token's attention over the patches, by class-attention layer and head.",
    "decay.png": "Decay of the heads' sums at each token, from 0 (reset) to 1 (none), and each head's half-life.",
    "compression.png": "Compression terms by layer in nats: the variational form R, and the coding rate R_c, never above R.",
    "subspaces.png": "|U^T U| of the input projection, its columns at unit norm: the identity where subspaces are orthogonal.",
}


def inspect_path(
    model: str | os.PathLike,
    input: "str | os.PathLike | Image",
    out_dir: str | os.PathLike,
    *,
    layers: Sequence[int] | None = None,
    image_size: int | None = None,
    processor: str | os.PathLike | None = None,
    trust_remote_code: bool = False,
) -> list[Path]:
    """`inspect_model` for a model folder or Hub id, with the tokenizer or image processor stored with the model.

    ```python
    inspect_path("./tost-digits", "photo.jpg", "report", layers=range(1, 5))
    ```

    Args:
        input, out_dir, layers, image_size: as in `inspect_model`.
        processor: folder or id of a tokenizer or image processor, in place of the model's. Vision models without either use
            `make_image_processor`.
        trust_remote_code: whether the remote code of a tokenizer or image processor may run; there is never a prompt. The
            model itself always runs this package's code.

    Returns and raises as `inspect_model`, and what transformers raises for a missing tokenizer or image processor.
    """
    folder = resolve_model_folder(model)
    config = load_config(folder, trust_remote_code)
    source, processor_or_tokenizer = os.fspath(folder if processor is None else processor), None
    with name_file_in_errors(Path(source)):
        if isinstance(config, ToSTConfig):
            processor_or_tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        elif processor is not None or (folder / IMAGE_PROCESSOR_NAME).is_file():
            processor_or_tokenizer = AutoImageProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
    loaded_model = load_model(folder, config)
    loaded_model.config.name_or_path = os.fspath(model)
    return inspect_model(loaded_model, processor_or_tokenizer, input, out_dir, layers=layers, image_size=image_size)


def inspect_model(
    model: "PreTrainedModel",
    processor_or_tokenizer: "BaseImageProcessor | PreTrainedTokenizerBase | None",
    input: "str | os.PathLike | Image",
    out_dir: str | os.PathLike,
    *,
    layers: Sequence[int] | None = None,
    image_size: int | None = None,
) -> list[Path]:
    """Writes plots of what the model computes for one image or text, and `index.html`, which shows them.

    For an image: memberships of each layer and head over the image, the strongest head of each patch, their entropy, the
    class token's attention. For a text: memberships and entropy by position, decay of models that have it. For both:
    compression terms by layer, and the overlap of the subspaces.

    ```python
    inspect_model(model, processor, "photo.jpg", "report", layers=range(1, 13), image_size=448)
    ```

    Args:
        model: a ToST model with TSSA, language or vision.
        processor_or_tokenizer: the model's tokenizer, or its image processor (None for `make_image_processor`).
        input: for a vision model an image or an image file; for a language model a text, or a text file (UTF-8).
        out_dir: the folder to write to; created if missing. Files of an earlier run are replaced.
        layers: the layers to draw, counted from 1; up to six, evenly spaced, if None. The table of numbers has all layers.
        image_size: the shorter side, in pixels, to which the whole image is scaled (sides rounded to multiples of the patch
            size), in place of the processor's resizing and cropping. ToST accepts images larger than its training images.

    Returns:
        The files written, `index.html` first.

    Raises:
        ValueError: the model has no TSSA layers, the input is not an image or text, or a layer does not exist.
        OSError: the input or output cannot be read or written, or `out_dir` contains files of these names that are
            not of an earlier run. Nothing is written.
        ImportError: matplotlib or Pillow is missing.
    """
    require_extra("matplotlib")
    index, total = Path(out_dir, INDEX), len(tssa_layers(model))
    is_report = index.exists() and GENERATOR in index.read_text(encoding="utf-8", errors="replace")
    for file in (Path(out_dir, name) for name in (INDEX, *CAPTIONS)):
        if file.exists() and not is_report:
            raise FileExistsError(f"{file} is not of an earlier report; name another folder, or move it away.")
    numbers = [round(x) for x in torch.linspace(1, total, min(total, 6)).tolist()] if layers is None else layers
    numbers = sorted({pick_layer(list(range(1, total + 1)), number) for number in numbers})
    if not numbers:
        raise ValueError("layers is empty: name at least one layer, or leave it out.")
    if find_modules(model, ToSTVisionPatchEmbeddings):
        trace, facts, figures = _inspect_image(model, processor_or_tokenizer, input, numbers, image_size)
    elif image_size is not None:
        raise ValueError("image_size is for images; this is a language model.")
    else:
        trace, facts, figures = _inspect_text(model, processor_or_tokenizer, input, numbers)
    terms = {name: quantities.compression_terms(trace, name) for name in quantities.NORMALIZATIONS}
    gram_layers = sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]})
    grams = [quantities.subspace_gram(model, layer) for layer in gram_layers]
    figures["compression.png"] = plots.plot_compression(terms)
    figures["subspaces.png"] = plots.plot_subspace_grams(grams, trace.memberships.shape[2], gram_layers)
    facts["Layers, heads"] = f"{total} layers of {trace.memberships.shape[2]} heads of width {trace.projections[0].shape[-1]}"
    facts = {"Model": f"{type(model).__name__}, {model.config.name_or_path or 'built in memory'}"} | facts
    with staged_folder(Path(out_dir)) as folder:
        for name, figure in figures.items():
            figure.savefig(folder / name)
        page = _render_page(facts, figures, _make_layer_table(trace, terms))
        (folder / INDEX).write_text(page, encoding="utf-8")
    return [index, *(Path(out_dir, name) for name in figures)]


def _inspect_image(
    model, processor, input, layers: list[int], image_size: int | None
) -> tuple[ModelTrace, dict[str, str], dict[str, "Figure"]]:
    pixel_values, picture = load_image(model, processor, input, image_size)
    trace = trace_model(model, pixel_values=pixel_values)
    indices = [layer - 1 for layer in layers]
    maps = quantities.membership_maps(trace)[0, indices]
    rows, columns = maps.shape[-2:]
    entropy = quantities.membership_entropy(trace)[0, indices].unflatten(-1, (rows, columns))
    height, width = pixel_values.shape[-2:]
    facts = {"Pixels": f"{height} x {width}, as the model sees them", "Patches": f"{rows} x {columns}"}
    if trace.logits is not None:
        probability, label = trace.logits[0].softmax(-1).max(-1)
        facts["Predicted class"] = f"{model.config.id2label[int(label)]} ({probability:.1%})"
    figures = {
        "memberships.png": plots.plot_membership_maps(maps, picture, layers),
        "strongest_heads.png": plots.plot_strongest_heads(maps, picture, layers),
        "entropy.png": plots.plot_entropy_maps(entropy, maps.shape[1], layers),
    }
    if trace.class_attentions is not None:  # a backbone has none
        weights = quantities.class_attention_maps(trace)[0]
        figures["class_attention.png"] = plots.plot_membership_maps(weights, picture, range(1, len(weights) + 1))
    return trace, facts, figures


def load_image(model, processor, input, image_size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Loads an image as model input (1, C, height, width) and as picture for plots (height, width, 3), from 0 to 1."""
    require_extra("PIL")
    from PIL import Image, ImageOps

    image = input if isinstance(input, Image.Image) else Image.open(input)
    image = convert_image(ImageOps.exif_transpose(image), model.config.num_channels)
    processor = processor or make_image_processor(model.config)
    patch_size = find_modules(model, ToSTVisionPatchEmbeddings)[0].patch_size

    def round_side(side: float) -> int:
        return max(1, round(side / patch_size)) * patch_size

    options: dict[str, Any] = {}
    if image_size is not None:
        width, height = (round_side(side * image_size / min(image.size)) for side in image.size)
        options = {"size": {"height": height, "width": width}, "do_resize": True, "do_center_crop": False}
    pixel_values = processor(image, return_tensors="pt", **options)["pixel_values"]
    sides = [round_side(side) for side in pixel_values.shape[-2:]]
    if sides != list(pixel_values.shape[-2:]):
        pixel_values = F.interpolate(pixel_values, sides, mode="bicubic", antialias=True)
    picture = pixel_values[0].double()
    if getattr(processor, "do_normalize", False):
        mean, std = (torch.tensor(getattr(processor, name))[:, None, None] for name in ("image_mean", "image_std"))
        picture = picture * std + mean
    return pixel_values, picture.clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0)


def _inspect_text(model, tokenizer, input, layers: list[int]) -> tuple[ModelTrace, dict[str, str], dict[str, "Figure"]]:
    if tokenizer is None:
        raise ValueError("A language model needs its tokenizer.")
    is_file = isinstance(input, os.PathLike) or os.path.isfile(input)
    input_ids = tokenizer(Path(input).read_text(encoding="utf-8") if is_file else input, return_tensors="pt")["input_ids"]
    limit = model.config.max_position_embeddings
    if input_ids.shape[1] > limit:
        warnings.warn(f"The text has {input_ids.shape[1]} tokens; only the first {limit} are shown.", stacklevel=3)
        input_ids = input_ids[:, :limit]
    trace = trace_model(model, input_ids=input_ids)
    indices = [layer - 1 for layer in layers]
    maps = quantities.membership_maps(trace)[0, indices]
    figures = {
        "memberships.png": plots.plot_membership_tokens(maps, layers),
        "entropy.png": plots.plot_entropy_by_position(quantities.entropy_by_position(trace), maps.shape[1]),
    }
    if trace.log_decay is not None:
        decay, half_lives = quantities.token_decay(trace)[0, indices], quantities.half_life(trace)[0, indices]
        figures["decay.png"] = plots.plot_decay(decay, half_lives, layers)
    return trace, {"Tokens": str(input_ids.shape[1])}, figures


def _make_layer_table(trace: ModelTrace, terms: dict) -> list[list[str]]:
    table = [["layer", "entropy of Pi", "fraction of ln H", "R, tokens", "R_c, tokens", "R, channels", "R_c, channels"]]
    heads, entropy = trace.memberships.shape[2], quantities.membership_entropy(trace)[0].nanmean(-1)
    for i, value in enumerate(entropy.tolist()):
        rates = [x[0, i] for name in quantities.NORMALIZATIONS for x in terms[name]]
        fraction = value / math.log(heads) if heads > 1 else math.nan
        table.append([str(i + 1), f"{value:.3f}", f"{fraction:.3f}", *(f"{x:.2f}" for x in rates)])
    return table


def _render_page(facts: dict[str, str], figures: dict[str, "Figure"], table: list[list[str]]) -> str:
    facts_table, layer_table = (
        "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        for rows in (facts.items(), table)
    )
    images_html = "\n".join(f"<p><img src='{name}' alt=''><br>{html.escape(CAPTIONS[name])}</p>" for name in figures)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">{GENERATOR}<title>Inside a ToST model</title><style>{STYLE}</style></head>
<body><h1>Inside a ToST model</h1><table>{facts_table}</table>
{images_html}
<h2>Numbers of each layer</h2><table>{layer_table}</table></body></html>
"""
