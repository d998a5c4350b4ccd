# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""`tost-hf inspect`: plots of every quantity of one image or text, and a table of the layers' numbers."""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoTokenizer

from ..extras import require
from ..files import check_folder, name_file_in_errors, staged_folder
from ..hub.loading import IMAGE_PROCESSOR_FILES, has_file, load_config, load_model, resolve_model_folder
from ..image_processing import convert_image, make_image_processor, open_image
from ..model.configuration_tost import ToSTConfig
from ..model.modeling_tost_vision import ToSTVisionPatchEmbeddings
from . import plots, quantities
from .trace import ModelTrace, check_layer, find_modules, trace_model, tssa_layers


if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image
    from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

TABLE = "layers.md"
MAX_TOKENS = 256  # of a text, unless `max_tokens` says otherwise
MIN_PATCHES = 8  # rows and columns below which a map shows little


def inspect_path(
    model: str | os.PathLike,
    input: "str | os.PathLike | Image",
    out_dir: str | os.PathLike,
    *,
    processor: str | os.PathLike | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> list[Path]:
    """`inspect_model` for a model folder or Hub id, with the tokenizer or image processor stored with the model.

    ```python
    inspect_path("./tost-digits", "photo.jpg", "inside", layers=range(4))
    ```

    Args:
        input, out_dir, options: as in `inspect_model`.
        processor: folder or id of a tokenizer or image processor, in place of the model's. Vision models without either use
            `make_image_processor`.
        trust_remote_code: whether the remote code of a tokenizer or image processor may run; there is never a prompt. The
            model itself always runs this package's code.

    Returns and raises as `inspect_model`, and what transformers raises for a missing tokenizer or image processor.
    """
    folder = resolve_model_folder(model)
    config = load_config(folder)
    source, processor_or_tokenizer = os.fspath(folder if processor is None else processor), None
    with name_file_in_errors(Path(source)):
        if isinstance(config, ToSTConfig):
            processor_or_tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        elif processor is not None or has_file(folder, IMAGE_PROCESSOR_FILES):
            processor_or_tokenizer = AutoImageProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
    loaded_model = load_model(folder, config)
    loaded_model.config.name_or_path = os.fspath(model)
    return inspect_model(loaded_model, processor_or_tokenizer, input, out_dir, **options)


def inspect_model(
    model: "PreTrainedModel",
    processor_or_tokenizer: "BaseImageProcessor | PreTrainedTokenizerBase | None",
    input: "str | os.PathLike | Image",
    out_dir: str | os.PathLike,
    *,
    layers: Sequence[int] | None = None,
    image_size: int | None = None,
    max_tokens: int | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Writes plots of what the model computes for one image or text, and `layers.md`, a table of the layers' numbers.

    For an image: memberships of each layer and head over the image, the strongest head of each patch, their entropy, the
    class token's attention. For a text: memberships and entropy by position, decay of models that have it. For both:
    compression terms by layer, and the overlap of the subspaces.

    ```python
    inspect_model(model, processor, "photo.jpg", "inside", layers=range(12), image_size=448)
    ```

    Args:
        model: a ToST model with TSSA, language or vision.
        processor_or_tokenizer: the model's tokenizer, or its image processor (None for `make_image_processor`).
        input: for a vision model an image or an image file; for a language model a text, or a text file (UTF-8).
        out_dir: the folder to write to; created if missing.
        layers: the layers to draw, by their numbers in the model, from 0; up to six, evenly spaced, if None. The table of
            numbers has all layers.
        image_size: the shorter side, in pixels, to which the whole image is scaled (sides rounded to multiples of the patch
            size), in place of the processor's resizing and cropping. ToST accepts images larger than its training images.
        max_tokens: how many tokens of a text are used, the first ones; 256 if None. The table says how many the text has.
        overwrite: write to a folder that is not empty; other files stay.

    Returns:
        The files written, `layers.md` first.

    Raises:
        ValueError: the model has no TSSA layers, the input is not an image or text, or a layer does not exist.
        OSError: the input or output cannot be read or written, or `out_dir` is not empty. Nothing is written.
        ImportError: matplotlib or Pillow is missing.
    """
    require("matplotlib", "app")
    target, tssa_numbers = Path(out_dir), list(tssa_layers(model))  # the baselines have none
    check_folder(target, overwrite)
    content = _read_input(model.config, input, image_size, max_tokens)
    total = len(tssa_numbers)
    spaced_numbers = [tssa_numbers[round(x)] for x in torch.linspace(0, total - 1, min(total, 6)).tolist()]
    numbers = spaced_numbers if layers is None else sorted(set(layers))
    for number in numbers:
        check_layer(tssa_numbers, number)
    if not numbers:
        raise ValueError("layers is empty: name at least one layer, or leave it out.")
    if isinstance(content, str):
        trace, facts, figures = _inspect_text(model, processor_or_tokenizer, content, numbers, max_tokens or MAX_TOKENS)
    else:
        trace, facts, figures = _inspect_image(model, processor_or_tokenizer, content, numbers, image_size)
    terms = {name: quantities.compression_terms(trace, name) for name in quantities.NORMALIZATIONS}
    gram_layers = sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]})
    grams = [quantities.subspace_gram(model, layer) for layer in gram_layers]
    figures["compression.png"] = plots.plot_compression(terms, trace.layers)
    figures["subspaces.png"] = plots.plot_subspace_grams(grams, trace.memberships.shape[2], gram_layers)
    heads, width = trace.memberships.shape[2], trace.projections[0].shape[-1]
    name = model.config.name_or_path or "a model built in memory"
    facts = [f"{type(model).__name__}, {name}", f"{total} TSSA layers of {heads} heads of width {width}", *facts]
    others = [str(i) for i in range(model.config.num_hidden_layers) if i not in tssa_numbers]
    if others:
        facts.append(f"without memberships: layers {', '.join(others)} (softmax attention)")
    with staged_folder(target) as folder:
        for name, figure in figures.items():
            figure.savefig(folder / name)
        lines = [*(f"- {fact}" for fact in facts), "", *_make_layer_table(trace, terms)]
        (folder / TABLE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [target / name for name in (TABLE, *figures)]


def _read_input(config, input, image_size: int | None, max_tokens: int | None) -> "str | Image":
    """Reads the text or image that a model of this configuration accepts.

    Raises:
        ValueError, OSError: it is none, or there is no such file, or an option does not apply to it.
    """
    if not isinstance(config, ToSTConfig):
        if max_tokens is not None:
            raise ValueError("max_tokens is for texts; this model reads images.")
        return open_image(input)
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


def _inspect_image(
    model, processor, image: "Image", layers: list[int], image_size: int | None
) -> tuple[ModelTrace, list[str], dict[str, "Figure"]]:
    pixel_values, picture = prepare_image(model, processor, image, image_size)
    trace = trace_model(model, pixel_values=pixel_values)
    indices = [trace.layers.index(layer) for layer in layers]
    maps = quantities.membership_maps(trace)[0, indices]
    rows, columns = maps.shape[-2:]
    entropy = quantities.membership_entropy(trace)[0, indices].unflatten(-1, (rows, columns))
    height, width = pixel_values.shape[-2:]
    facts = [f"{height} x {width} pixels, as the model sees them, in {rows} x {columns} patches"]
    if min(rows, columns) < MIN_PATCHES:
        size = 4 * MIN_PATCHES * height // rows
        facts[0] += f", too few for maps with details; --image-size {size} draws them of a larger image"
    figures = {
        "memberships.png": plots.plot_membership_maps(maps, picture, layers),
        "strongest_heads.png": plots.plot_strongest_heads(maps, picture, layers),
        "entropy.png": plots.plot_entropy_maps(entropy, maps.shape[1], layers),
    }
    if trace.class_attentions is not None:  # a backbone has none
        figures["class_attention.png"] = plot_class_attention(trace, picture)
    return trace, facts, figures


def plot_class_attention(trace: ModelTrace, picture: torch.Tensor, **options: Any) -> "Figure":
    """The class token's attention in each class-attention layer and head; `options` are those of `plot_membership_maps`."""
    maps = quantities.class_attention_maps(trace)[0]
    uniform = 1 / (1 + maps[0, 0].numel())  # of the patches and the class token itself
    return plots.plot_membership_maps(maps, picture, range(len(maps)), uniform=uniform, **options)


def prepare_image(model, processor, image: "Image", image_size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """An image as model input (1, C, height, width) and as picture for plots (height, width, 3), from 0 to 1.

    Args:
        image_size: as in `inspect_model`.
    """
    image = convert_image(image, model.config.num_channels)
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


def prepare_text(model, tokenizer, text: str, max_tokens: int = MAX_TOKENS) -> tuple[torch.Tensor, int]:
    """The first tokens of a text (1, T), as many as the model has positions for, and the number of all."""
    input_ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]  # verbose: warns of long texts
    return input_ids[:, : min(max_tokens, model.config.max_position_embeddings)], input_ids.shape[1]


def _inspect_text(
    model, tokenizer, text: str, layers: list[int], max_tokens: int
) -> tuple[ModelTrace, list[str], dict[str, "Figure"]]:
    if tokenizer is None:
        raise ValueError("A language model needs its tokenizer.")
    input_ids, total = prepare_text(model, tokenizer, text, max_tokens)
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
    return trace, [f"{shown:,} tokens" if shown == total else f"the first {shown:,} of {total:,} tokens"], figures


def _make_layer_table(trace: ModelTrace, terms: dict) -> list[str]:
    """Lines of a Markdown table: mean entropies of the memberships, and both compression terms in both normalizations."""
    header = ["layer", "entropy, nats", "of ln H", *(f"{rate}, {name}" for name in terms for rate in ("R", "R_c"))]
    rows, heads, entropy = [header, ["---:"] * len(header)], trace.memberships.shape[2], quantities.membership_entropy(trace)
    for i, (layer, value) in enumerate(zip(trace.layers, entropy[0].nanmean(-1).tolist())):
        rates = [x[0, i] for name in terms for x in terms[name]]
        fraction = f"{value / math.log(heads):.0%}" if heads > 1 else "-"
        rows.append([str(layer), f"{value:.3f}", fraction, *(f"{x:.2f}" for x in rates)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [f"| {' | '.join(cell.rjust(width) for cell, width in zip(row, widths))} |" for row in rows]
