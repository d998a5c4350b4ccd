# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""`tost-hf inspect`: plots of every quantity of one image or text, and an HTML page that shows them."""

import html
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.utils import IMAGE_PROCESSOR_NAME

from ..extras import require
from ..files import name_file_in_errors, staged_folder
from ..hub.loading import load_config, load_model, resolve_model_folder
from ..image_processing import convert_image, make_image_processor
from ..model.configuration_tost import ToSTConfig
from ..model.modeling_tost_vision import ToSTVisionPatchEmbeddings
from . import plots, quantities
from .trace import ModelTrace, check_layer, find_modules, trace_model, tssa_layers


if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image
    from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

INDEX = "index.html"
GENERATOR = '<meta name="generator" content="tost-hf inspect">'
MAX_TOKENS = 256  # of a text, unless `max_tokens` says otherwise
MIN_PATCHES = 8  # rows and columns below which a map shows little
STYLE = """
:root { --page: #fff; --ink: #1b1b1f; --quiet: #5b5b66; --line: #cfcfd8; --max-mix: 0.65 }
@media (prefers-color-scheme: dark) {
  :root { --page: #131316; --ink: #ececf1; --quiet: #a9a9b5; --line: #43434d; --max-mix: 0.35 }
}
body { margin: 0 auto; max-width: 52rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.35rem; margin: 0 } h2 { font-size: 1.05rem; margin: 1.6rem 0 0 } p { margin: 0.3rem 0 0.6rem }
.quiet, th, summary { color: var(--quiet); font-size: 0.9rem } th { font-weight: 400; text-align: left; vertical-align: top }
img { width: 100%; display: block; border-radius: 0.4rem; background: #fff }
table { border-collapse: collapse } td, th { padding: 0.1rem 0.8rem 0.1rem 0; overflow-wrap: normal }
.description td { overflow-wrap: anywhere } .numbers { width: 100%; font-variant-numeric: tabular-nums }
details { border: 1px solid var(--line); border-radius: 0.4rem; padding: 0.3rem 0.7rem; margin: 0.4rem 0 }
.text { white-space: pre-wrap; line-height: 1.9 }
[class^=head] { padding: 0.1em 0 0.2em; background: color-mix(in srgb, var(--head)
  calc(100% * (0.1 + var(--max-mix) * var(--strength, 1))), var(--page)) }
.legend span { display: inline-block; padding: 0.1em 0.4em 0.2em; margin-right: 0.3em }
.mark1 { border-bottom: 1px solid var(--ink) } .mark2 { border-bottom: 3px double var(--ink) }
@media (max-width: 30rem) { .numbers { font-size: 0.8rem } .numbers * { padding-right: 0.3rem; font-size: inherit } }
"""
CAPTIONS = {  # title, and what the figure shows of each unit: token or patch
    "memberships.png": (
        "Memberships",
        "How far each {unit} belongs to each head: its memberships add up to 1, and each layer has its own color scale.",
    ),
    "strongest_heads.png": (
        "Strongest heads",
        "The head with the largest membership of each {unit}; the paler, the less it exceeds the uniform value 1 / H.",
    ),
    "entropy.png": (
        "Entropy of the memberships",
        "In nats: 0 where a {unit} belongs to one head, ln H where it belongs to all H heads equally.",
    ),
    "class_attention.png": (
        "Class attention",
        "The class token's attention to each {unit}, by head and class-attention layer (class_attention_layers.0 ...).",
    ),
    "decay.png": (
        "Decay",
        "The fraction of each head's sums that remains at each {unit}, and the {unit}s after which half remains (half-life).",
    ),
    "compression.png": (
        "Compression",
        "In nats: the term that each layer lowers (variational, R), and the coding rate (R_c), which R bounds from above.",
    ),
    "subspaces.png": (
        "Overlap of the subspaces",
        "|cosine| of the columns of the heads' projections, |U^T U|: the identity where the subspaces are orthogonal.",
    ),
}


def inspect_path(
    model: str | os.PathLike,
    input: "str | os.PathLike | Image",
    out_dir: str | os.PathLike,
    *,
    layers: Sequence[int] | None = None,
    image_size: int | None = None,
    max_tokens: int | None = None,
    processor: str | os.PathLike | None = None,
    trust_remote_code: bool = False,
) -> list[Path]:
    """`inspect_model` for a model folder or Hub id, with the tokenizer or image processor stored with the model.

    ```python
    inspect_path("./tost-digits", "photo.jpg", "report", layers=range(4))
    ```

    Args:
        input, out_dir, layers, image_size, max_tokens: as in `inspect_model`.
        processor: folder or id of a tokenizer or image processor, in place of the model's. Vision models without either use
            `make_image_processor`.
        trust_remote_code: whether the remote code of a tokenizer or image processor may run; there is never a prompt. The
            model itself always runs this package's code.

    Returns and raises as `inspect_model`, and what transformers raises for a missing tokenizer or image processor. The input
    is checked before the model is loaded.
    """
    folder = resolve_model_folder(model)
    config = load_config(folder)
    content = _read_input(config, input, image_size, max_tokens)
    source, processor_or_tokenizer = os.fspath(folder if processor is None else processor), None
    with name_file_in_errors(Path(source)):
        if isinstance(config, ToSTConfig):
            processor_or_tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        elif processor is not None or (folder / IMAGE_PROCESSOR_NAME).is_file():
            processor_or_tokenizer = AutoImageProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
    loaded_model = load_model(folder, config)
    loaded_model.config.name_or_path = os.fspath(model)
    return _write_report(loaded_model, processor_or_tokenizer, content, out_dir, layers, image_size, max_tokens)


def inspect_model(
    model: "PreTrainedModel",
    processor_or_tokenizer: "BaseImageProcessor | PreTrainedTokenizerBase | None",
    input: "str | os.PathLike | Image",
    out_dir: str | os.PathLike,
    *,
    layers: Sequence[int] | None = None,
    image_size: int | None = None,
    max_tokens: int | None = None,
) -> list[Path]:
    """Writes plots of what the model computes for one image or text, and `index.html`, which shows them.

    For an image: memberships of each layer and head over the image, the strongest head of each patch, their entropy, the
    class token's attention. For a text: the text in the colors of its strongest heads, memberships and entropy by position,
    decay of models that have it. For both: compression terms by layer, and the overlap of the subspaces.

    ```python
    inspect_model(model, processor, "photo.jpg", "report", layers=range(12), image_size=448)
    ```

    Args:
        model: a ToST model with TSSA, language or vision.
        processor_or_tokenizer: the model's tokenizer, or its image processor (None for `make_image_processor`).
        input: for a vision model an image or an image file; for a language model a text, or a text file (UTF-8).
        out_dir: the folder to write to; created if missing. Files of an earlier run are replaced.
        layers: the layers to draw, by their numbers in the model, from 0; up to six, evenly spaced, if None. The table of
            numbers has all layers.
        image_size: the shorter side, in pixels, to which the whole image is scaled (sides rounded to multiples of the patch
            size), in place of the processor's resizing and cropping. ToST accepts images larger than its training images.
        max_tokens: how many tokens of a text are used, the first ones; 256 if None. The page says how many the text has.

    Returns:
        The files written, `index.html` first.

    Raises:
        ValueError: the model has no TSSA layers, the input is not an image or text, or a layer does not exist.
        OSError: the input or output cannot be read or written, or `out_dir` contains files of these names that are
            not of an earlier run. Nothing is written.
        ImportError: matplotlib or Pillow is missing.
    """
    tssa_layers(model)  # the baselines have none
    content = _read_input(model.config, input, image_size, max_tokens)
    return _write_report(model, processor_or_tokenizer, content, out_dir, layers, image_size, max_tokens)


def _read_input(config, input, image_size: int | None, max_tokens: int | None) -> "str | Image":
    """Reads the text or image that a model of this configuration accepts.

    Raises:
        ValueError, OSError: it is none, or there is no such file, or an option does not apply to it.
    """
    if not isinstance(config, ToSTConfig):
        if max_tokens is not None:
            raise ValueError("max_tokens is for texts; this model reads images.")
        return _open_image(input)
    if image_size is not None:
        raise ValueError("image_size is for images; this model reads texts.")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
    if not isinstance(input, str | os.PathLike):
        raise ValueError("This model reads texts, not images.")
    name = text = os.fspath(input)
    if os.path.isfile(name):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{name!r} is not a text in UTF-8; this model reads texts.") from None
    elif isinstance(input, os.PathLike) or re.fullmatch(r"\S*([/\\]\S*|\.[A-Za-z]\w*)", name):
        raise FileNotFoundError(f"There is no file {name!r}.")
    if not text:
        raise ValueError(f"{name!r} is empty.")
    return text


def _open_image(input: "str | os.PathLike | Image") -> "Image":
    require("PIL", "vision")
    from PIL import Image, UnidentifiedImageError

    if isinstance(input, Image.Image):
        return input
    if not os.path.isfile(input):
        raise FileNotFoundError(f"There is no file {os.fspath(input)[:200]!r}; this model reads images.")
    try:
        return Image.open(input)
    except UnidentifiedImageError:
        raise ValueError(f"{os.fspath(input)!r} is not an image; this model reads images.") from None


def _write_report(
    model, processor_or_tokenizer, content: "str | Image", out_dir, layers, image_size: int | None, max_tokens: int | None
) -> list[Path]:
    require("matplotlib", "vision")
    index, tssa_numbers = Path(out_dir, INDEX), list(tssa_layers(model))
    is_report = index.exists() and GENERATOR in index.read_text(encoding="utf-8", errors="replace")
    for file in (Path(out_dir, name) for name in (INDEX, *CAPTIONS)):
        if file.exists() and not is_report:
            raise FileExistsError(f"{file} is not of an earlier report; name another folder, or move it away.")
    total = len(tssa_numbers)
    spaced_numbers = [tssa_numbers[round(x)] for x in torch.linspace(0, total - 1, min(total, 6)).tolist()]
    numbers = spaced_numbers if layers is None else sorted(set(layers))
    for number in numbers:
        check_layer(tssa_numbers, number)
    if not numbers:
        raise ValueError("layers is empty: name at least one layer, or leave it out.")
    if isinstance(content, str):
        unit = "token"
        trace, description, body, figures = _inspect_text(
            model, processor_or_tokenizer, content, numbers, max_tokens or MAX_TOKENS
        )
    else:
        unit, body = "patch", ""
        trace, description, figures = _inspect_image(model, processor_or_tokenizer, content, numbers, image_size)
    terms = {name: quantities.compression_terms(trace, name) for name in quantities.NORMALIZATIONS}
    gram_layers = sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]})
    grams = [quantities.subspace_gram(model, layer) for layer in gram_layers]
    figures["compression.png"] = plots.plot_compression(terms, trace.layers)
    figures["subspaces.png"] = plots.plot_subspace_grams(grams, trace.memberships.shape[2], gram_layers)
    heads, width = trace.memberships.shape[2], trace.projections[0].shape[-1]
    description["Layers, heads"] = f"{total} TSSA layers of {heads} heads of width {width}"
    others = [str(i) for i in range(model.config.num_hidden_layers) if i not in tssa_numbers]
    if others:
        description["Without memberships"] = f"layers {', '.join(others)}: softmax attention"
    description = {"Model": f"{type(model).__name__}, {model.config.name_or_path or 'built in memory'}"} | description
    with staged_folder(Path(out_dir)) as folder:
        for name, figure in figures.items():
            figure.savefig(folder / name)
        page = _render_page(description, body, figures, _make_layer_table(trace, terms), unit)
        (folder / INDEX).write_text(page, encoding="utf-8")
    return [index, *(Path(out_dir, name) for name in figures)]


def _inspect_image(
    model, processor, image: "Image", layers: list[int], image_size: int | None
) -> tuple[ModelTrace, dict[str, str], dict[str, "Figure"]]:
    pixel_values, picture = load_image(model, processor, image, image_size)
    trace = trace_model(model, pixel_values=pixel_values)
    indices = [trace.layers.index(layer) for layer in layers]
    maps = quantities.membership_maps(trace)[0, indices]
    rows, columns = maps.shape[-2:]
    entropy = quantities.membership_entropy(trace)[0, indices].unflatten(-1, (rows, columns))
    height, width = pixel_values.shape[-2:]
    description = {"Pixels": f"{height} x {width}, as the model sees them", "Patches": f"{rows} x {columns}"}
    if min(rows, columns) < MIN_PATCHES:
        size = 4 * MIN_PATCHES * height // rows
        description["Patches"] += f", too few for maps with details; --image-size {size} draws them of a larger image"
    if trace.logits is not None:
        probability, label = trace.logits[0].softmax(-1).max(-1)
        description["Predicted class"] = f"{model.config.id2label[int(label)]} ({probability:.1%})"
    figures = {
        "memberships.png": plots.plot_membership_maps(maps, picture, layers),
        "strongest_heads.png": plots.plot_strongest_heads(maps, picture, layers),
        "entropy.png": plots.plot_entropy_maps(entropy, maps.shape[1], layers),
    }
    if trace.class_attentions is not None:  # a backbone has none
        weights = quantities.class_attention_maps(trace)[0]
        figures["class_attention.png"] = plots.plot_membership_maps(weights, picture, range(len(weights)))
    return trace, description, figures


def load_image(model, processor, input, image_size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Loads an image as model input (1, C, height, width) and as picture for plots (height, width, 3), from 0 to 1."""
    image = _open_image(input)
    from PIL import ImageOps

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


def _inspect_text(
    model, tokenizer, text: str, layers: list[int], max_tokens: int
) -> tuple[ModelTrace, dict[str, str], str, dict[str, "Figure"]]:
    if tokenizer is None:
        raise ValueError("A language model needs its tokenizer.")
    input_ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]  # verbose: warns of long texts
    total = input_ids.shape[1]
    input_ids = input_ids[:, : min(max_tokens, model.config.max_position_embeddings)]
    shown = input_ids.shape[1]
    trace = trace_model(model, input_ids=input_ids)
    indices = [trace.layers.index(layer) for layer in layers]
    maps = quantities.membership_maps(trace)[0, indices]
    figures = {
        "memberships.png": plots.plot_membership_tokens(maps, layers),
        "entropy.png": plots.plot_entropy_by_position(quantities.entropy_by_position(trace), maps.shape[1], trace.layers),
    }
    if trace.log_decay is not None:
        decay, half_lives = quantities.token_decay(trace)[0, indices], quantities.half_life(trace)[0, indices]
        figures["decay.png"] = plots.plot_decay(decay, half_lives, layers)
    description = {"Tokens": f"{shown:,}" if shown == total else f"the first {shown:,} of {total:,}"}
    return trace, description, _render_text(_split_text(tokenizer, input_ids[0].tolist()), maps, layers), figures


def _split_text(tokenizer, ids: list[int]) -> list[str]:
    """The part of the text that each token adds; "" for a token that ends within a character."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    pieces, text = [], ""
    for end in range(1, len(ids) + 1):
        longer_text = tokenizer.decode(ids[:end], **options)
        is_complete = not longer_text.endswith("\ufffd") or end == len(ids)
        pieces.append(longer_text[len(text) :] if is_complete else "")
        text = longer_text if is_complete else text
    return pieces


def _render_text(pieces: list[str], maps: torch.Tensor, layers: list[int]) -> str:
    """The text in the colors of the strongest heads, once for each layer of `maps` (layers, H, T)."""
    heads = maps.shape[1]
    styles = [plots.head_style(head) for head in range(heads)]
    css = "".join(f".head{head} {{ --head: {color} }} " for head, (color, _) in enumerate(styles))
    classes = [f"head{head}" + (f" mark{mark}" if mark else "") for head, (_, mark) in enumerate(styles)]
    sections = []
    for layer, values in zip(layers, maps):
        strength, strongest = plots.strongest_heads(values)
        spans = (
            f'<span class="{classes[head]}" style="--strength: {share:.2f}" '
            f'title="token {i}: head {head}, {values[head, i]:.2f}">{html.escape(piece)}</span>'
            for i, (piece, head, share) in enumerate(zip(pieces, strongest.tolist(), strength.tolist()))
        )
        is_open = " open" if layer == layers[-1] else ""
        sections.append(f'<details{is_open}><summary>Layer {layer}</summary><p class="text">{"".join(spans)}</p></details>')
    legend = " ".join(f'<span class="{name}">head {head}</span>' for head, name in enumerate(classes))
    return f"""<style>{css}</style>
<h2>The text and its strongest heads</h2>
<p>Each token has the color of the head with its largest membership; the paler, the less it
exceeds the uniform value 1 / H.</p>
<p class="legend">{legend}</p>
{"".join(sections)}"""


def _make_layer_table(trace: ModelTrace, terms: dict) -> list[list[str]]:
    table = [["layer", "entropy", "of ln H", "R, tokens", "R_c, tokens", "R, channels", "R_c, channels"]]
    heads, entropy = trace.memberships.shape[2], quantities.membership_entropy(trace)[0].nanmean(-1)
    for i, (layer, value) in enumerate(zip(trace.layers, entropy.tolist())):
        rates = [x[0, i] for name in quantities.NORMALIZATIONS for x in terms[name]]
        fraction = f"{value / math.log(heads):.0%}" if heads > 1 else "-"
        table.append([str(layer), f"{value:.3f}", fraction, *(f"{x:.2f}" for x in rates)])
    return table


def _render_page(
    description: dict[str, str], body: str, figures: dict[str, "Figure"], table: list[list[str]], unit: str
) -> str:
    description_html = "\n".join(
        f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in description.items()
    )
    header, *rows = table
    table_html = "\n".join(
        "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in row) + "</tr>"
        for tag, row in [("th", header), *(("td", row) for row in rows)]
    )
    captions = {name: [text.format(unit=unit) for text in CAPTIONS[name]] for name in figures}
    figures_html = "\n".join(
        f"<h2>{title}</h2>\n<p>{caption}</p>\n<a href='{name}'><img src='{name}' alt='{title}'></a>"
        for name, (title, caption) in captions.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">{GENERATOR}<title>Inside a ToST model</title><style>{STYLE}</style></head>
<body><h1>Inside a ToST model</h1>
<p class="quiet">Layers and heads are counted from 0, as in the names of the weights (layers.0).
Select a figure to enlarge it.</p>
<table class="description">{description_html}</table>
{body}
{figures_html}
<h2>Numbers of each layer</h2>
<p>Mean entropy of the memberships, in nats and as a fraction of ln H; R and R_c with each token, or each
channel, at unit norm.</p>
<table class="numbers">{table_html}</table></body></html>
"""
