# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The report of one image or text: pictures of every quantity, and a page that explains them."""

import math
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.utils import IMAGE_PROCESSOR_NAME

from ..files import staged_folder
from ..hub.checks import check_weights, load_config
from ..hub.loading import load_model, model_folder
from ..model.configuration_tost import ToSTConfig
from ..model.modeling_tost_vision import ToSTVisionPatchEmbeddings
from . import plots
from .inputs import load_image, load_text, require_extra, tokenize
from .pages import GENERATOR, ColoredText, color_text, index_page
from .quantities import (
    NORMALIZATIONS,
    CompressionTerms,
    class_attention_maps,
    compression_terms,
    entropy_by_position,
    forget_factors,
    half_life,
    membership_entropy,
    membership_maps,
    subspace_gram,
)
from .trace import ModelTrace, find_modules, pick_layer, trace_model, tssa_layers


if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image
    from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

INDEX = "index.html"


class _InputReport(NamedTuple):
    """The parts of a report that differ between images and texts."""

    trace: ModelTrace
    facts: list[tuple[str, str]]  # names and values, for the page
    pictures: dict[str, "Figure"]  # by file name
    text: ColoredText | None = None


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
    """`inspect_model` for a model folder or Hub id, with the tokenizer or image processor that is beside the model.

    ```python
    inspect_path("./tost-digits", "photo.jpg", "report", layers=range(1, 5))
    ```

    Args:
        input, out_dir, layers, image_size: as in `inspect_model`.
        processor: folder or id of another tokenizer or image processor, where the model has none. A vision model without one
            gets `make_image_processor`'s.
        trust_remote_code: whether the remote code of a tokenizer or image processor may run; there is never a prompt. The
            model itself always runs by this package's code.

    Returns:
        The files written, `index.html` first.

    Raises:
        ValueError, OSError: as `inspect_model`; or the model, tokenizer or image processor is missing or damaged, or is
            remote code and `trust_remote_code` is False.
        ImportError: matplotlib or Pillow is missing.
    """
    from transformers import AutoImageProcessor, AutoTokenizer

    require_extra("PIL")
    require_extra("matplotlib")
    folder = model_folder(model)
    config = load_config(folder)
    check_weights(folder, config)
    source, helper = os.fspath(folder if processor is None else processor), None
    if isinstance(config, ToSTConfig):
        helper = _load_processor(AutoTokenizer, "tokenizer", source, trust_remote_code)
    elif processor is not None or (folder / IMAGE_PROCESSOR_NAME).is_file():
        helper = _load_processor(AutoImageProcessor, "image processor", source, trust_remote_code)
    loaded = load_model(folder, config)
    loaded.name_or_path = os.fspath(model)
    return inspect_model(loaded, helper, input, out_dir, layers=layers, image_size=image_size)


def _load_processor(auto_class: Any, kind: str, source: str, trust_remote_code: bool):
    """`from_pretrained` of a tokenizer or image processor, without a prompt, and with errors of one line."""
    try:
        return auto_class.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises nearly anything on damaged files
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"The {kind} of {source} is remote code, which was not run; if you have read it and trust it, pass "
                "trust_remote_code=True (--trust-remote-code)."
            ) from error
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        hint = "name the one that the model uses (--processor)"
        raise ValueError(f"The {kind} of {source} cannot be loaded; {hint}: {reason[:300]}") from error


def inspect_model(
    model: "PreTrainedModel",
    processor_or_tokenizer: "BaseImageProcessor | PreTrainedTokenizerBase | None",
    input: "str | os.PathLike | Image",
    out_dir: str | os.PathLike,
    *,
    layers: Sequence[int] | None = None,
    image_size: int | None = None,
) -> list[Path]:
    """Writes pictures of what the model computes for one image or text, and `index.html`, which shows and explains them.

    For an image: memberships of each layer and head over the image, the strongest head of each patch, their entropy, the
    class token's attention. For a text: memberships and entropy by position, forget factors of models with decay, and the
    text coloured by its heads. For both: compression terms by layer, and the overlap of the subspaces.

    ```python
    inspect_model(model, processor, "photo.jpg", "report", layers=range(1, 13), image_size=448)
    ```

    Args:
        model: a ToST model with TSSA, language or vision.
        processor_or_tokenizer: the model's tokenizer, or its image processor (None: `make_image_processor`'s).
        input: for a vision model an image or an image file; for a language model a text, or a text file (UTF-8).
        out_dir: the folder to write to; made if missing. Only files that an earlier run wrote there are replaced.
        layers: the layers to draw, counted from 1; up to six, evenly spaced, if None. The table of numbers has all layers.
        image_size: the shorter side, in pixels, to which the whole image is scaled (sides rounded to multiples of the patch
            size), in place of the processor's resizing and cropping. ToST accepts images larger than its training images.

    Returns:
        The files written, `index.html` first.

    Raises:
        ValueError: the model has no TSSA layers or has weights that are not finite, the input is not an image or text, or a
            layer does not exist.
        OSError: the input or output cannot be read or written, or `out_dir` has files of these names that are not from an
            earlier run. Nothing was written.
        ImportError: matplotlib or Pillow is missing.
    """
    require_extra("matplotlib")
    numbers = _select_layers(layers, len(tssa_layers(model)))
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"The weights of the model are damaged: {name} has NaN or infinite values.")
    out_dir = Path(out_dir)
    if find_modules(model, ToSTVisionPatchEmbeddings):
        trace, facts, pictures, text = _inspect_image(model, processor_or_tokenizer, input, numbers, image_size)
    elif image_size is not None:
        raise ValueError("image_size is for images; this is a language model.")
    else:
        trace, facts, pictures, text = _inspect_text(model, processor_or_tokenizer, input, numbers)
    terms = {name: compression_terms(trace, name) for name in NORMALIZATIONS}
    chosen = numbers if len(numbers) <= 3 else [numbers[0], numbers[len(numbers) // 2], numbers[-1]]
    grams = [subspace_gram(model, layer) for layer in chosen]
    pictures["compression.png"] = plots.plot_compression(terms)
    pictures["subspaces.png"] = plots.plot_subspace_grams(grams, trace.memberships.shape[2], chosen)
    _check_targets(out_dir, pictures)
    with staged_folder(out_dir) as folder:
        for name, picture in pictures.items():
            picture.savefig(folder / name)
        (folder / INDEX).write_text(index_page(facts, pictures, _layer_table(model, trace, terms), text), encoding="utf-8")
    return [out_dir / INDEX, *(out_dir / name for name in pictures)]


def _select_layers(layers: Sequence[int] | None, total: int) -> list[int]:
    if layers is None:
        return sorted({round(x) for x in torch.linspace(1, total, min(total, 6)).tolist()})
    if not layers:
        raise ValueError("layers is empty: name at least one layer, or leave it out.")
    return sorted({pick_layer(list(range(1, total + 1)), layer) for layer in layers})


def _check_targets(out_dir: Path, pictures: Iterable[str]) -> None:
    """Rejects the replacement of files that are not from an earlier run, which its page tells."""
    if out_dir.exists() and not out_dir.is_dir():
        raise FileExistsError(f"{out_dir} is a file; name a folder to write to.")
    index = out_dir / INDEX
    page = index.read_text(encoding="utf-8", errors="replace") if index.is_file() else ""
    foreign = [name for name in (INDEX, *pictures) if os.path.lexists(out_dir / name)]
    if foreign and GENERATOR not in page:
        raise FileExistsError(
            f"{out_dir} contains {', '.join(foreign)}, not written by this command; name another folder, or move them away."
        )


# Images and texts ----------------------------------------------------------------------------------------------------


def _inspect_image(model, processor, input, layers: list[int], image_size: int | None) -> _InputReport:
    image = load_image(model, processor, input, image_size)
    trace = trace_model(model, pixel_values=image.pixel_values)
    assert trace.grid is not None
    indices = [layer - 1 for layer in layers]
    maps = membership_maps(trace)[0, indices]
    entropy = membership_entropy(trace).unflatten(-1, trace.grid)[0, indices]
    height, width = image.pixel_values.shape[-2:]
    facts = [
        *_model_facts(model, trace),
        ("Input", image.source),
        ("Pixels", f"{height} x {width}, as the model sees them"),
        ("Patches", f"{trace.grid[0]} x {trace.grid[1]}"),
    ]
    if trace.logits is not None:
        probability, label = trace.logits[0].softmax(-1).max(-1)
        facts.append(("Predicted class", f"{model.config.id2label[int(label)]} ({probability:.1%})"))
    pictures: dict[str, Figure] = {
        "memberships.png": plots.plot_membership_maps(maps, image.picture, layers),
        "strongest_heads.png": plots.plot_strongest_heads(maps, image.picture, layers),
        "entropy.png": plots.plot_entropy_maps(entropy, maps.shape[1], layers),
    }
    if trace.class_attentions is not None:  # a backbone has none
        weights = class_attention_maps(trace)[0]
        pictures["class_attention.png"] = plots.plot_membership_maps(weights, image.picture, range(1, len(weights) + 1))
    return _InputReport(trace, facts, pictures)


def _inspect_text(model, tokenizer, input, layers: list[int]) -> _InputReport:
    if tokenizer is None:
        raise ValueError("A language model needs its tokenizer.")
    text, source = load_text(input)
    input_ids, tokens = tokenize(tokenizer, text)
    if input_ids.max() >= model.config.vocab_size:
        raise ValueError(
            f"The tokenizer belongs to another model: it gives token id {int(input_ids.max())}, and the model's "
            f"vocabulary has {model.config.vocab_size} tokens."
        )
    notes = []
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and len(tokens) > limit:
        message = f"The text has {len(tokens)} tokens; the model has {limit} positions, so the text was truncated."
        warnings.warn(message, stacklevel=3)
        notes = [("Warning", message)]
        input_ids, tokens = input_ids[:, :limit], tokens[:limit]
    trace = trace_model(model, input_ids=input_ids)
    indices = [layer - 1 for layer in layers]
    maps = membership_maps(trace)[0, indices]
    facts = [*_model_facts(model, trace), ("Input", source), *notes, ("Tokens", str(len(tokens)))]
    pictures: dict[str, Figure] = {
        "memberships.png": plots.plot_membership_tokens(maps, layers),
        "entropy.png": plots.plot_entropy_by_position(entropy_by_position(trace), maps.shape[1]),
    }
    if trace.log_forget_factors is not None:
        factors, half_lives = forget_factors(trace)[0, indices], half_life(trace)[0, indices]
        pictures["forgetting.png"] = plots.plot_forget_factors(factors, half_lives, layers)
    return _InputReport(trace, facts, pictures, color_text(tokens, maps, layers))


def _model_facts(model, trace: ModelTrace) -> list[tuple[str, str]]:
    _, layers, heads, _ = trace.memberships.shape
    name = getattr(model.config, "_name_or_path", "") or "built in memory"
    p = trace.projections[0].shape[-1]
    facts = [("Model", f"{type(model).__name__}, {name}"), ("Layers, heads", f"{layers} layers of {heads} heads of width {p}")]
    if others := model.config.num_hidden_layers - layers:
        facts.append(("Attention layers", f"{others}, which have no memberships; the numbers of layers leave them out"))
    return facts


def _layer_table(model, trace: ModelTrace, terms: dict[str, CompressionTerms]) -> list[list[str]]:
    """The numbers of each layer, after the headings."""
    headings = ["layer", "entropy of Pi", "share of ln H", "R, tokens", "R_c, tokens", "R, channels", "R_c, channels"]
    headings += ["overlap within", "overlap between"]
    half_lives = None if trace.log_forget_factors is None else half_life(trace)[0]
    if half_lives is not None:
        headings += ["half-life, min", "half-life, max"]
    table = [headings]
    heads = trace.memberships.shape[2]
    entropy = membership_entropy(trace)[0].nanmean(-1)
    for i in range(len(trace.projections)):
        gram = subspace_gram(model, i + 1)
        head = torch.arange(len(gram)) * heads // len(gram)
        same_head = head == head[:, None]
        overlaps = gram[same_head & ~torch.eye(len(gram), dtype=torch.bool)].mean(), gram[~same_head].mean()
        rates = [x[0, i] for name in NORMALIZATIONS for x in terms[name]]
        shares = entropy[i], entropy[i] / math.log(heads) if heads > 1 else math.nan
        cells = [*(f"{x:.3f}" for x in shares), *(f"{x:.2f}" for x in rates), *(f"{x:.3f}" for x in overlaps)]
        if half_lives is not None:
            cells += [f"{x:.1f}" for x in half_lives[i].aminmax()]
        table.append([str(i + 1), *cells])
    return table


__all__ = ["inspect_model", "inspect_path"]
