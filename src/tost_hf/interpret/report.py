# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""One image or one text, and all that can be said of it: pictures, and a page that explains them."""

import math
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..model.configuration_tost import ToSTConfig
from ..model.configuration_tost_vision import ToSTVisionConfig
from ..model.modeling_tost_vision import ToSTVisionPatchEmbeddings
from .inputs import is_file, load_image, load_text, require_extra, tokenize
from .pages import colored_text, index_page, is_own_page, names_file
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
    from transformers import BaseImageProcessor, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

INDEX = "index.html"


class _Findings(NamedTuple):
    """What is specific to images, or to texts."""

    trace: ModelTrace
    facts: list[tuple[str, str]]  # names and values, for the page
    pictures: dict[str, "Figure"]  # by file name
    text: str = ""  # HTML of a text's tokens, coloured


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

    Args:
        processor: folder or id of another tokenizer or image processor, where the model has none. A vision model without one
            gets `make_image_processor`'s.
        trust_remote_code: whether a tokenizer or image processor that is code in its repository may run. This alone decides;
            nothing ever asks. The model itself is always run by this package.

    Raises:
        ValueError, OSError: as `inspect_model`; or the model, tokenizer or image processor is missing or damaged, or is code
            that was not trusted.
        ImportError: matplotlib or Pillow is missing.
    """
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification, AutoTokenizer

    require_extra("PIL")
    require_extra("matplotlib")
    config = _load(AutoConfig, "configuration", model, trust_remote_code)
    if not isinstance(config, ToSTConfig | ToSTVisionConfig):
        raise ValueError(f"{os.fspath(model)} holds a model of type {config.model_type!r}, not a ToST model.")
    _check_memory(config)
    source = model if processor is None else processor
    if isinstance(config, ToSTConfig):
        loaded = _load(AutoModel, "model", model, trust_remote_code)
        helper = _load(AutoTokenizer, "tokenizer", source, trust_remote_code)
        return inspect_model(loaded, helper, input, out_dir, layers=layers, image_size=image_size)
    classifies = any(name.endswith("ForImageClassification") for name in config.architectures or ())
    loaded = _load(AutoModelForImageClassification if classifies else AutoModel, "model", model, trust_remote_code)
    alone = processor is None and os.path.isdir(model) and not is_file(Path(model, "preprocessor_config.json"))
    helper = None if alone else _load(AutoImageProcessor, "image processor", source, trust_remote_code)
    return inspect_model(loaded, helper, input, out_dir, layers=layers, image_size=image_size)


def _check_memory(config: "PreTrainedConfig") -> None:
    """Rejects a model larger than this machine's memory: weights that a file lacks would be allocated, however many."""
    from transformers import AutoModel

    with torch.device("meta"):
        size = AutoModel.from_config(config, trust_remote_code=False).num_parameters() * 2  # bytes, at the least
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf
    if size > memory:
        raise ValueError(f"The configuration asks for at least {size:,} bytes of weights; this machine has {memory:,}.")


def _load(auto_class: Any, what: str, source: str | os.PathLike, trust_remote_code: bool):
    """`from_pretrained` that never asks anything, and whose errors have one line."""
    try:
        return auto_class.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises nearly anything on damaged files
        name = os.fspath(source)
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"The {what} of {name} is code, which is not run; if you have read it and trust it, pass "
                "trust_remote_code=True (--trust-remote-code)."
            ) from error
        hint = "; name the one that the model uses (--processor)" if what in ("tokenizer", "image processor") else ""
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(f"The {what} of {name} cannot be loaded{hint}: {reason[:300]}") from error


def inspect_model(
    model: "PreTrainedModel",
    processor_or_tokenizer: "BaseImageProcessor | PreTrainedTokenizerBase | None",
    input: "str | os.PathLike | Image",
    out_dir: str | os.PathLike,
    *,
    layers: Sequence[int] | None = None,
    image_size: int | None = None,
) -> list[Path]:
    """Writes pictures of what the model does with one image or text, and `index.html`, which shows and explains them.

    Args:
        model: a ToST model with TSSA, language or vision.
        processor_or_tokenizer: the model's tokenizer, or its image processor (None: `make_image_processor`'s).
        input: for a vision model an image or an image file; for a language model a text, or a text file (UTF-8).
        out_dir: the folder to write to; made if missing. Only files that an earlier run wrote there are replaced.
        layers: the layers to draw, counted from 1; up to six, evenly spaced, if None. The numbers are of all layers.
        image_size: the shorter side, in pixels, to which an image is scaled whole (sides rounded to multiples of the patch
            size), instead of what the processor does. ToST takes images larger than those it was trained on.

    Returns:
        The files written, `index.html` first.

    Raises:
        ValueError, OSError: the model has no TSSA or weights that are not finite, the input is no image or text, a layer does
            not exist, or `out_dir` holds files of these names that are not from an earlier run.
        ImportError: matplotlib or Pillow is missing.
    """
    from . import plots

    require_extra("matplotlib")
    numbers = _chosen_layers(layers, len(tssa_layers(model)))
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"The weights of the model are damaged: {name} holds NaN or infinite numbers.")
    out_dir = Path(out_dir)
    page = _earlier_page(out_dir)
    if find_modules(model, ToSTVisionPatchEmbeddings):
        trace, facts, pictures, text = _inspect_image(model, processor_or_tokenizer, input, numbers, image_size)
    elif image_size is not None:
        raise ValueError("image_size is for images; this is a language model.")
    else:
        trace, facts, pictures, text = _inspect_text(model, processor_or_tokenizer, input, numbers)
    if not trace.memberships.isfinite().all():
        raise ValueError("The model's memberships are NaN: its weights overflow, or the image processor's settings are wrong.")
    terms = {name: compression_terms(trace, name) for name in NORMALIZATIONS}
    chosen = numbers if len(numbers) <= 3 else [numbers[0], numbers[len(numbers) // 2], numbers[-1]]
    grams = [subspace_gram(model, layer) for layer in chosen]
    pictures["compression.png"] = plots.plot_compression(terms)
    pictures["subspaces.png"] = plots.plot_subspace_grams(grams, trace.memberships.shape[2], chosen)
    _check_targets(out_dir, pictures, page)
    return _write(out_dir, pictures, index_page(facts, pictures, _table(model, trace, terms), text))


def _chosen_layers(layers: Sequence[int] | None, total: int) -> list[int]:
    if layers is None:
        return sorted({round(x) for x in torch.linspace(1, total, min(total, 6)).tolist()})
    if not layers:
        raise ValueError("layers is empty: name at least one layer, or leave it out.")
    return sorted({pick_layer(list(range(1, total + 1)), layer) for layer in layers})


# Writing -------------------------------------------------------------------------------------------------------------


def _earlier_page(out_dir: Path) -> str:
    """The page that an earlier run wrote to the folder, "" if there is none; rejects any other page."""
    if out_dir.exists() and not out_dir.is_dir():
        raise FileExistsError(f"{out_dir} is a file; name a folder to write to.")
    index = out_dir / INDEX
    if not os.path.lexists(index):
        return ""
    page = index.read_text(encoding="utf-8", errors="replace") if index.is_file() else ""
    if not is_own_page(page):
        raise FileExistsError(f"{index} is not a page of this command; name another folder, or move it away.")
    return page


def _check_targets(out_dir: Path, names, page: str) -> None:
    """Rejects the replacement of files that the earlier page does not name."""
    foreign = [name for name in names if os.path.lexists(out_dir / name) and not names_file(page, name)]
    foreign += [name for name in names if (out_dir / name).is_dir() and name not in foreign]
    if foreign:
        raise FileExistsError(
            f"{out_dir} holds {', '.join(foreign)}, which this command did not write; name another folder, or move them away."
        )


def _write(out_dir: Path, pictures: dict[str, "Figure"], page: str) -> list[Path]:
    """Writes all files, or none if one cannot be written; returns their paths, the page first."""
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".inspect-", dir=out_dir) as staging:
        for name, picture in pictures.items():
            picture.savefig(Path(staging, name))
        Path(staging, INDEX).write_text(page, encoding="utf-8")
        for name in (*pictures, INDEX):  # the page last: it never shows pictures that are not there
            os.replace(Path(staging, name), out_dir / name)
    return [out_dir / INDEX, *(out_dir / name for name in pictures)]


# Images and texts ----------------------------------------------------------------------------------------------------


def _inspect_image(model, processor, input, layers: list[int], image_size: int | None) -> _Findings:
    from . import plots

    image = load_image(model, processor, input, image_size)
    trace = trace_model(model, pixel_values=image.pixel_values)
    assert trace.grid is not None  # as of all images
    maps = membership_maps(trace)[0, [layer - 1 for layer in layers]]
    entropy = membership_entropy(trace).unflatten(-1, trace.grid)[0, [layer - 1 for layer in layers]]
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
        "class_attention.png": plots.plot_class_attention_maps(class_attention_maps(trace)[0], image.picture),
    }
    return _Findings(trace, facts, pictures)


def _inspect_text(model, tokenizer, input, layers: list[int]) -> _Findings:
    from . import plots

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
        message = f"The text has {len(tokens)} tokens; the model has positions for {limit}, so the rest was cut off."
        warnings.warn(message, stacklevel=3)
        notes = [("Warning", message)]
        input_ids, tokens = input_ids[:, :limit], tokens[:limit]
    trace = trace_model(model, input_ids=input_ids)
    maps = membership_maps(trace)[0, [layer - 1 for layer in layers]]
    facts = [*_model_facts(model, trace), ("Input", source), *notes, ("Tokens", str(len(tokens)))]
    pictures: dict[str, Figure] = {
        "memberships.png": plots.plot_membership_tokens(maps, layers),
        "entropy.png": plots.plot_entropy_by_position(entropy_by_position(trace), maps.shape[1]),
    }
    if trace.log_forget_factors is not None:
        rows = [layer - 1 for layer in layers]
        pictures["forgetting.png"] = plots.plot_forget_factors(
            forget_factors(trace)[0, rows], half_life(trace)[0, rows], layers
        )
    return _Findings(trace, facts, pictures, colored_text(tokens, maps, layers))


def _model_facts(model, trace: ModelTrace) -> list[tuple[str, str]]:
    _, layers, heads, _ = trace.memberships.shape
    name = getattr(model.config, "_name_or_path", "") or "built in memory"
    p = trace.projections[0].shape[-1]
    facts = [("Model", f"{type(model).__name__}, {name}"), ("Layers, heads", f"{layers} layers of {heads} heads of width {p}")]
    if others := model.config.num_hidden_layers - layers:
        facts.append(("Attention layers", f"{others}, which have no memberships; the numbers of layers leave them out"))
    return facts


def _table(model, trace: ModelTrace, terms: dict[str, CompressionTerms]) -> list[list[str]]:
    """The numbers of each layer, under a row of headings."""
    headings = ["layer", "entropy of Pi", "share of ln H", "R, tokens", "R_c, tokens", "R, channels", "R_c, channels"]
    rows = [[*headings, "overlap within", "overlap between"]]
    half_lives = None if trace.log_forget_factors is None else half_life(trace)[0]
    if half_lives is not None:
        rows[0] += ["half-life, least", "half-life, most"]
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
        rows.append([str(i + 1), *cells])
    return rows


__all__ = ["inspect_model", "inspect_path"]
