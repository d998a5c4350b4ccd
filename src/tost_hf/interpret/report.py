# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Looking inside a ToST model: what its heads hold, and what its layers compress (arXiv 2412.17810, section 5, appendix).

`trace_model` runs a model once and keeps what its TSSA layers saw; the other functions compute from that trace, in float64:

```python
>>> from tost_hf.interpret import compression_terms, membership_maps, trace_model

>>> trace = trace_model(model, pixel_values=pixel_values)
>>> membership_maps(trace)  # (B, L, H, rows, columns): each head's share of each patch
>>> compression_terms(trace).variational  # (B, L): the term that each layer lowers
```

`inspect_model` and `inspect_path` compute all of it for one image or text, and write pictures with a page that explains them.

Symbols: B batch, L TSSA layers, H heads, T tokens (patches, row by row, for an image), p head dimension, w the projected
tokens, Pi the membership. Indices into L count from 0; `layers` arguments and captions count from 1, as the paper does.
"""

import contextlib
import importlib
import math
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ..model.modeling_tost_vision import ToSTVisionClassAttention, ToSTVisionPatchEmbeddings
from ..model.tssa import TokenStatisticsSelfAttention


if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

NORMALIZATIONS = ("tokens", "channels")
PRECISION = 0.01  # the squared epsilon of the published compression terms: c = p / 0.01 or n / 0.01


@dataclass(frozen=True)
class ModelTrace:
    """What `trace_model` saw, on the CPU."""

    projections: tuple[torch.Tensor, ...]  # w of each TSSA layer, (B, T, H, p), in the model's dtype
    memberships: torch.Tensor  # Pi, (B, L, H, T), float64; 0 at padding
    mask: torch.Tensor  # (B, T), true at real tokens
    grid: tuple[int, int] | None  # rows and columns of patches; None for a text
    class_attentions: torch.Tensor | None  # (B, class-attention layers, H, T), float64; None for a text
    logits: torch.Tensor | None  # (B, labels), float64, of a classifier


# Running the model ---------------------------------------------------------------------------------------------------


def trace_model(
    model: "PreTrainedModel",
    *,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    pixel_values: torch.Tensor | None = None,
) -> ModelTrace:
    """Runs a ToST model in evaluation mode, without gradients, and keeps what its TSSA layers compute.

    The model is left as it was: the hooks are taken off again and every module's training flag is restored, also after an
    error.

    Args:
        model: any model with TSSA layers, language or vision, on any device and of any dtype.
        input_ids: (B, T) tokens of a language model, one sequence a row.
        attention_mask: (B, T), 1 at real tokens, 0 at padding on either side.
        pixel_values: (B, C, height, width) images of a vision model.

    Raises:
        ValueError: the model has no TSSA layers (the "xca" and "softmax" baselines have no memberships), a row has no real
            token, or the model refuses the inputs.
    """
    attentions = _tssa_layers(model)
    embeddings = _find_modules(model, ToSTVisionPatchEmbeddings)
    inputs = {"pixel_values": pixel_values} if embeddings else {"input_ids": input_ids, "attention_mask": attention_mask}
    given = {name for name, x in (("input_ids", input_ids), ("pixel_values", pixel_values)) if x is not None}
    wanted = "pixel_values" if embeddings else "input_ids"
    if given != {wanted} or (embeddings and attention_mask is not None):
        raise ValueError(f"Give {wanted} to this model and nothing of the other kind, not {sorted(given) or 'nothing'}.")
    device = next(model.parameters()).device
    inputs = {name: torch.as_tensor(x).to(device) for name, x in inputs.items() if x is not None}
    if attention_mask is not None and not inputs["attention_mask"].bool().any(1).all():
        raise ValueError("attention_mask masks a whole row: each row needs at least one real token.")

    projections, memberships, class_attentions = [], [], []
    hooks = [(layer.in_proj, lambda output: projections.append(output.cpu())) for layer in attentions]
    hooks += [(layer, lambda output: memberships.append(output[1].cpu().double())) for layer in attentions]
    for layer in _find_modules(model, ToSTVisionClassAttention):
        hooks.append((layer, lambda output: class_attentions.append(output[1][:, :, 0, 1:].cpu().double())))
    with _hooked(hooks), _evaluating(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        outputs = model(**inputs)

    heads = attentions[0].num_heads
    logits = getattr(outputs, "logits", None)
    grid = None
    if embeddings:
        grid = tuple(side // embeddings[0].patch_size for side in pixel_values.shape[-2:])
    B, _, T = memberships[0].shape
    return ModelTrace(
        projections=tuple(w.view(B, T, heads, -1) for w in projections),
        memberships=torch.stack(memberships, 1),
        mask=torch.ones(B, T, dtype=torch.bool) if attention_mask is None else inputs["attention_mask"].bool().cpu(),
        grid=grid,
        class_attentions=torch.stack(class_attentions, 1) if class_attentions else None,
        logits=logits.cpu().double() if logits is not None and logits.ndim == 2 else None,
    )


def _tssa_layers(model: nn.Module) -> list[TokenStatisticsSelfAttention]:
    """The TSSA layers of a model, first to last.

    Raises:
        ValueError: it has none.
    """
    layers = _find_modules(model, TokenStatisticsSelfAttention)
    if not layers:
        kind = getattr(getattr(model, "config", None), "attention_type", None)
        reason = f"its attention_type is {kind!r}, and only 'tssa' has any" if kind else "it is not a ToST model"
        raise ValueError(f"This {type(model).__name__} has no memberships to look at: {reason}.")
    return layers


def _find_modules(model: nn.Module, kind: type) -> list:
    return [module for module in model.modules() if isinstance(module, kind)]


@contextlib.contextmanager
def _hooked(hooks) -> Iterator[None]:
    """Hands each module's output to its function while it lasts."""
    handles = []
    try:
        for module, keep in hooks:
            handles.append(module.register_forward_hook(lambda _module, _args, output, keep=keep: keep(output)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module's own flag again, as parts may be frozen in evaluation mode."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in flags:
            module.training = training


# Quantities ----------------------------------------------------------------------------------------------------------


def membership_maps(trace: ModelTrace) -> torch.Tensor:
    """Pi of every head (Fig. 4b, 9): (B, L, H, rows, columns) over the patches of images, (B, L, H, T) over a text's tokens.

    The heads' shares of a token add up to 1; at padding they are 0.
    """
    return trace.memberships if trace.grid is None else trace.memberships.unflatten(-1, trace.grid)


def class_attention_maps(trace: ModelTrace) -> torch.Tensor:
    """The class token's attention to the patches, (B, class-attention layers, H, rows, columns).

    The weights of a head add up to 1 together with the one on the class token itself, which is left out. The paper shows the
    last head of the first of two layers (Fig. 5, 10).

    Raises:
        ValueError: the trace is of a language model.
    """
    if trace.class_attentions is None:
        raise ValueError("Only vision models have class-attention layers; this trace is of a text.")
    return trace.class_attentions.unflatten(-1, trace.grid)


def membership_entropy(trace: ModelTrace) -> torch.Tensor:
    """Entropy of each token's membership, -sum_k Pi_k ln Pi_k in nats: (B, L, T), NaN at padding.

    0 where a token belongs to one head, ln H where it belongs to all alike.
    """
    entropy = -torch.xlogy(trace.memberships, trace.memberships).sum(2)
    return entropy.masked_fill(~trace.mask[:, None], math.nan)


class EntropyByPosition(NamedTuple):
    """Mean entropy of the memberships of tokens at positions `starts[i]` up to the next start, or the end of the text."""

    starts: list[int]
    entropy: torch.Tensor  # (L, buckets), nats


def entropy_by_position(trace: ModelTrace) -> EntropyByPosition:
    """`membership_entropy` averaged over rows and positions 0, 1, 2-3, 4-7, 8-15, ...; positions count real tokens only."""
    entropy = membership_entropy(trace)
    positions = trace.mask.cumsum(1) - 1
    starts = [0, *(2**i for i in range(int(positions.max()).bit_length()))]
    bucket = torch.bucketize(positions, torch.tensor(starts), right=True) - 1
    means = [entropy.transpose(1, 2)[(bucket == i) & trace.mask].mean(0) for i in range(len(starts))]
    return EntropyByPosition(starts, torch.stack(means, 1))


class CompressionTerms(NamedTuple):
    """The two compression terms of every layer, in nats, each (B, L)."""

    variational: torch.Tensor  # what TSSA lowers: second moments of the single channels
    coding_rate: torch.Tensor  # what it stands for: the log-determinant of the whole second-moment matrix

    @property
    def gap(self) -> torch.Tensor:
        """How much the variational form lies above the coding rate, (B, L): 0 where channels are uncorrelated."""
        return self.variational - self.coding_rate


def compression_terms(trace: ModelTrace, normalization: str = "tokens", c: float | None = None) -> CompressionTerms:
    """The compression term of every layer (Fig. 4a) beside the MCR2 term that it bounds from above.

    With M_k = sum_j Pi_kj w_kj w_kj^T / n_k the second-moment matrix of head k, and n_k = sum_j Pi_kj:

        variational = 1/2 sum_k (n_k / n) sum_i ln(1 + c (M_k)_ii)        s_{k,i} = (M_k)_ii
        coding_rate = 1/2 sum_k (n_k / n) ln det(I + c M_k)

    The two are equal where every M_k is diagonal (Hadamard's inequality). Padding counts in neither, nor in n.

    Args:
        normalization: the paper states neither it nor c; both of these give its plateau of 24 ln 101 = 110.76 at p = 48.
            "tokens": each head's projected token at unit norm. "channels": each channel at unit norm over the tokens, as
            inside Pi of the bidirectional form (for a text: over all its tokens).
        c: the factor; p / 0.01 with "tokens" and n / 0.01 with "channels", n the tokens of the image or text, if None.
    """
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization must be one of {', '.join(NORMALIZATIONS)}, got {normalization!r}.")
    if c is not None and not c > 0:
        raise ValueError(f"c must be above 0, got {c}.")
    n = trace.mask.sum(1).double()
    terms = []
    for w, membership in zip(trace.projections, trace.memberships.unbind(1)):
        w = w.double().transpose(1, 2).masked_fill(~trace.mask[:, None, :, None], 0)  # (B, H, T, p)
        p = w.shape[-1]
        w = F.normalize(w, dim=-1 if normalization == "tokens" else -2)
        default = n.new_full(n.shape, p) if normalization == "tokens" else n
        factor = (default / PRECISION if c is None else n.new_full(n.shape, c))[:, None, None, None]
        count = membership.sum(-1)
        # a head's share may underflow to nothing: it then weighs nothing either
        moment = (w * membership[..., None]).transpose(-1, -2) @ w / count.clamp_min(1e-300)[..., None, None]
        variational = (factor * moment).diagonal(dim1=-2, dim2=-1).log1p().sum(-1)
        coding_rate = torch.linalg.slogdet(torch.eye(p, dtype=w.dtype) + factor * moment).logabsdet
        share = count / n[:, None]
        terms.append((0.5 * (share * variational).sum(-1), 0.5 * (share * coding_rate).sum(-1)))
    return CompressionTerms(*(torch.stack(term, 1) for term in zip(*terms)))


def subspace_gram(model: nn.Module, layer: int) -> torch.Tensor:
    """|U^T U| of a layer's input projections U = [U_1 ... U_H], every column at unit norm (Fig. 11): (H p, H p).

    The identity where the subspaces are orthogonal to each other and their bases orthogonal. `layer` counts from 1.
    """
    columns = F.normalize(_pick(_tssa_layers(model), layer).in_proj.weight.detach().cpu().double(), dim=1)
    return (columns @ columns.T).abs()


def _pick(layers: list, layer: int):
    if not 1 <= layer <= len(layers):
        raise ValueError(f"There is no layer {layer}: the model's TSSA layers count from 1 to {len(layers)}.")
    return layers[layer - 1]


class ClustersScore(NamedTuple):
    """Adjusted mutual information between patch clusters and strongest heads, each (B, L); 1 if the same, 0 if unrelated."""

    score: torch.Tensor  # with the image's own memberships
    shuffled: torch.Tensor  # with its memberships dealt to its patches at random
    other_image: torch.Tensor  # with those of the next image of the batch: what place alone explains; NaN for one image


def membership_clusters_score(model: "PreTrainedModel", pixel_values: torch.Tensor, seed: int = 0) -> ClustersScore:
    """Whether memberships group patches by what they show.

    Per image, the patches are clustered by k-means (k = H) on their mean colour and their row and column, all standardised
    over the image; per layer, they are also divided by their strongest head. The adjusted mutual information of the two
    divisions is compared with two controls: the memberships shuffled over the patches, and those of another image.

    Args:
        model: a vision model with TSSA.
        pixel_values: (B, C, height, width), as the image processor makes them.
        seed: of k-means and of the shuffles.
    """
    cluster, metrics = _require("sklearn.cluster"), _require("sklearn.metrics")
    trace = trace_model(model, pixel_values=pixel_values)
    if trace.grid is None:
        raise ValueError("Patches are clustered by colour: this needs a vision model.")
    B, layers, heads, N = trace.memberships.shape
    places = torch.cartesian_prod(*(torch.arange(side, dtype=torch.float64) for side in trace.grid))
    patch_size = pixel_values.shape[-2] // trace.grid[0]
    colours = F.avg_pool2d(pixel_values.detach().cpu().double(), patch_size).flatten(2).transpose(1, 2)
    features = torch.cat([colours, places.expand(B, -1, -1)], -1)
    features = features - features.mean(1, keepdim=True)
    features = features / features.std(1, keepdim=True).clamp_min(1e-6)  # a constant column stays 0
    strongest = trace.memberships.argmax(2)
    shuffles = torch.rand(B, layers, N, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    partitions = strongest, strongest.gather(-1, shuffles), strongest.roll(-1, 0)
    scores = torch.empty(3, B, layers, dtype=torch.float64)
    for image in range(B):
        clusters = cluster.KMeans(heads, n_init=4, random_state=seed).fit_predict(features[image].numpy())
        for control, partition in enumerate(partitions):
            for layer in range(layers):
                score = metrics.adjusted_mutual_info_score(clusters, partition[image, layer].numpy())
                scores[control, image, layer] = score
    if B == 1:
        scores[2] = math.nan
    return ClustersScore(*scores)


def _require(module: str):
    """Imports what only looking inside needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"Looking inside a model needs {module.split('.')[0]}, which is missing: pip install 'tost-hf[vision]'."
        ) from error


# One input, everything: pictures and a page ----------------------------------------------------------------------------


def inspect_path(
    model: str | os.PathLike,
    input: "str | os.PathLike | Image",
    out_dir: str | os.PathLike,
    *,
    layers: Sequence[int] | None = None,
    image_size: int | None = None,
    processor: str | os.PathLike | None = None,
) -> list[Path]:
    """`inspect_model` for a model folder or Hub id, with the tokenizer or image processor that is beside the model.

    Args:
        processor: folder or id of another tokenizer or image processor, where the model has none. A vision model without one
            gets `make_image_processor`'s.
    """
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification, AutoTokenizer

    config = AutoConfig.from_pretrained(model)
    source = model if processor is None else processor
    if config.model_type == "tost_vision":
        _require("PIL")
        classifies = any(name.endswith("ForImageClassification") for name in config.architectures or ())
        loaded = (AutoModelForImageClassification if classifies else AutoModel).from_pretrained(model)
        has_processor = processor is not None or not os.path.isdir(model) or _is_file(Path(model, "preprocessor_config.json"))
        helper = AutoImageProcessor.from_pretrained(source) if has_processor else None
    else:
        loaded = AutoModel.from_pretrained(model)
        try:
            helper = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise ValueError(f"There is no tokenizer at {os.fspath(source)!r}: name the one that the model uses.") from error
    return inspect_model(loaded, helper, input, out_dir, layers=layers, image_size=image_size)


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
        out_dir: the folder to write to; made if missing. Other files in it stay.
        layers: the layers to draw, counted from 1; up to six, evenly spaced, if None. The numbers are of all layers.
        image_size: the shorter side, in pixels, to which an image is scaled whole (sides rounded to multiples of the patch
            size), instead of what the processor does. ToST takes images larger than those it was trained on.

    Returns:
        The files written, `index.html` first.

    Raises:
        ValueError, OSError: the model has no TSSA, the input is no image or text, a layer does not exist, or `out_dir`
            holds an index.html that is not ours.
        ImportError: matplotlib or Pillow is missing.
    """
    from . import plots

    _require("matplotlib")
    numbers = _chosen_layers(layers, len(_tssa_layers(model)))
    out_dir = Path(out_dir)
    index = out_dir / "index.html"
    if out_dir.exists() and not out_dir.is_dir():
        raise FileExistsError(f"{out_dir} is a file; name a folder to write to.")
    if index.exists() and plots.GENERATOR not in index.read_text(encoding="utf-8", errors="replace"):
        raise FileExistsError(f"{index} is not a page of this command; name another folder, or move it away.")
    if _find_modules(model, ToSTVisionPatchEmbeddings):
        trace, facts, drawn = _inspect_image(model, processor_or_tokenizer, input, numbers, image_size)
    elif image_size is not None:
        raise ValueError("image_size is for images; this is a language model.")
    else:
        trace, facts, drawn = _inspect_text(model, processor_or_tokenizer, input, numbers)
    terms = {name: compression_terms(trace, name) for name in NORMALIZATIONS}
    heads = trace.memberships.shape[2]
    drawn["compression.png"] = plots.plot_compression(terms)
    chosen = numbers if len(numbers) <= 3 else [numbers[0], numbers[len(numbers) // 2], numbers[-1]]
    drawn["subspaces.png"] = plots.plot_subspace_grams([subspace_gram(model, layer) for layer in chosen], heads, chosen)

    out_dir.mkdir(parents=True, exist_ok=True)
    page = plots.index_page(facts, drawn, _table(model, trace, terms))
    with tempfile.TemporaryDirectory(prefix=".inspect-", dir=out_dir) as staging:
        for name, content in (drawn | {"index.html": page}).items():
            if isinstance(content, str):
                Path(staging, name).write_text(content, encoding="utf-8")
            else:
                content.savefig(Path(staging, name))
        for name in drawn:
            os.replace(Path(staging, name), out_dir / name)
        os.replace(Path(staging, "index.html"), index)  # last: a page never shows pictures that are not there
    return [index, *(out_dir / name for name in drawn)]


def _chosen_layers(layers: Sequence[int] | None, total: int) -> list[int]:
    if layers is None:
        return sorted({round(x) for x in torch.linspace(1, total, min(total, 6)).tolist()})
    if not layers:
        raise ValueError("layers is empty: name at least one layer, or leave it out.")
    return sorted({_pick(list(range(1, total + 1)), layer) for layer in layers})


def _is_file(path) -> bool:
    return os.path.isfile(path)  # False, not an error, for a text too long for a name


def _inspect_image(model, processor, input, layers, image_size):
    from . import plots

    pixel_values, picture, source = _load_image(model, processor, input, image_size)
    trace = trace_model(model, pixel_values=pixel_values)
    kept = [layer - 1 for layer in layers]
    maps = membership_maps(trace)[0, kept]
    entropy = membership_entropy(trace).unflatten(-1, trace.grid)[0, kept]
    facts = [
        ("Input", source),
        ("Pixels", f"{pixel_values.shape[-2]} x {pixel_values.shape[-1]}, as the model sees them"),
        ("Patches", f"{trace.grid[0]} x {trace.grid[1]}"),
    ]
    if trace.logits is not None:
        probability, label = trace.logits[0].softmax(-1).max(-1)
        facts.append(("Predicted class", f"{model.config.id2label[int(label)]} ({probability:.1%})"))
    return (
        trace,
        _model_facts(model, trace) + facts,
        {
            "memberships.png": plots.plot_membership_maps(maps, picture, layers),
            "strongest_heads.png": plots.plot_strongest_heads(maps, picture, layers),
            "entropy.png": plots.plot_entropy_maps(entropy, maps.shape[1], layers),
            "class_attention.png": plots.plot_class_attention_maps(class_attention_maps(trace)[0], picture),
        },
    )


def _load_image(model, processor, input, image_size) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Pixel values (1, C, height, width), the same as a picture (height, width, 3) from 0 to 1, and the input's name."""
    _require("PIL")
    from PIL import Image, ImageOps

    from ..image_processing import make_image_processor

    source = "an image in memory"
    if not isinstance(input, Image.Image):
        source = os.fspath(input)
        if not _is_file(source):
            raise FileNotFoundError(f"There is no file {source[:200]!r}: a vision model takes an image file.")
        try:
            input = Image.open(source)
            input.load()
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"{source} is not an image that can be read ({error}).") from error
    image = ImageOps.exif_transpose(input).convert("RGB")
    processor = processor or make_image_processor(model.config)
    patch_size = _find_modules(model, ToSTVisionPatchEmbeddings)[0].patch_size
    if image_size is not None:
        if image_size < patch_size:
            raise ValueError(f"image_size must be at least one patch ({patch_size} pixels), got {image_size}.")
        scale = image_size / min(image.size)
        image = image.resize([_nearest_multiple(side * scale, patch_size) for side in image.size], Image.Resampling.BICUBIC)
        pixel_values = processor(image, do_resize=False, do_center_crop=False, return_tensors="pt")["pixel_values"]
    else:
        pixel_values = processor(image, return_tensors="pt")["pixel_values"]
    sides = [_nearest_multiple(side, patch_size) for side in pixel_values.shape[-2:]]
    if sides != list(pixel_values.shape[-2:]):
        pixel_values = F.interpolate(pixel_values, sides, mode="bicubic", antialias=True)
    picture = pixel_values[0].double()
    if getattr(processor, "do_normalize", False):
        mean, std = torch.tensor([processor.image_mean, processor.image_std])[:, :, None, None]
        picture = picture * std + mean
    return pixel_values, picture.clamp(0, 1).permute(1, 2, 0), source


def _nearest_multiple(side: float, patch_size: int) -> int:
    return max(patch_size, round(side / patch_size) * patch_size)


def _inspect_text(model, tokenizer, input, layers):
    from . import plots

    if tokenizer is None:
        raise ValueError("A language model needs its tokenizer.")
    text, source = _load_text(input)
    input_ids, tokens = _tokenize(tokenizer, text)
    if input_ids.max() >= model.config.vocab_size:
        raise ValueError(
            f"The tokenizer is another model's: it gives token {int(input_ids.max())}, and the model has "
            f"{model.config.vocab_size}."
        )
    facts = [("Input", source)]
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and len(tokens) > limit:
        sentence = f"The text has {len(tokens)} tokens; the model has positions for {limit}, so the rest was cut off."
        warnings.warn(sentence, stacklevel=3)
        facts.append(("Warning", sentence))
        input_ids, tokens = input_ids[:, :limit], tokens[:limit]
    trace = trace_model(model, input_ids=input_ids)
    maps = membership_maps(trace)[0, [layer - 1 for layer in layers]]
    facts.append(("Tokens", str(len(tokens))))
    return (
        trace,
        _model_facts(model, trace) + facts,
        {
            "tokens.png": plots.plot_strongest_head_tokens(tokens, maps[-1], layers[-1]),
            "tokens.html": plots.strongest_head_page(tokens, maps, layers),
            "memberships.png": plots.plot_membership_tokens(maps, layers),
            "entropy.png": plots.plot_entropy_by_position(entropy_by_position(trace), maps.shape[1]),
        },
    )


def _load_text(input) -> tuple[str, str]:
    """The text, and where it is from."""
    text, source = os.fspath(input), "a text given as such"
    if _is_file(text):
        source = text
        try:
            text = Path(source).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{source} is not UTF-8 text; a language model takes a text.") from error
    elif isinstance(input, os.PathLike) or (len(text.split()) == 1 and (os.sep in text or Path(text).suffix)):
        raise FileNotFoundError(f"There is no file {text[:200]!r}.")
    if not text.strip():
        raise ValueError("The text is empty: there is nothing to look at.")
    return text, source


def _tokenize(tokenizer, text: str) -> tuple[torch.Tensor, list[str]]:
    """Token ids (1, T), and the piece of the text that each stands for: together, with special tokens, the whole text."""
    if not tokenizer.is_fast:
        ids = tokenizer(text, verbose=False)["input_ids"]
        return torch.tensor([ids]), [tokenizer.decode([i]) for i in ids]
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    pieces, end = [], 0
    for token, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"]):
        if start == stop:  # special tokens stand for no part of the text
            pieces.append(tokenizer.decode([token]))
        else:  # from the last one's end: some tokenizers leave out spaces; "" where a token holds the rest of a character
            pieces.append(text[end:stop])
            end = stop
    return torch.tensor([encoded["input_ids"]]), pieces


def _model_facts(model, trace: ModelTrace) -> list[tuple[str, str]]:
    _, layers, heads, _ = trace.memberships.shape
    name = getattr(model.config, "_name_or_path", "") or "built in memory"
    p = trace.projections[0].shape[-1]
    return [("Model", f"{type(model).__name__}, {name}"), ("Layers, heads", f"{layers} layers of {heads} heads of width {p}")]


def _table(model, trace: ModelTrace, terms: dict[str, CompressionTerms]) -> list[list[str]]:
    """The numbers of each layer, under a row of headings."""
    headings = ["layer", "entropy of Pi", "share of ln H", "R, tokens", "R_c, tokens", "R, channels", "R_c, channels"]
    rows = [[*headings, "overlap within", "overlap between"]]
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
        rows.append([str(i + 1), *cells])
    return rows


__all__ = [
    "ClustersScore",
    "CompressionTerms",
    "EntropyByPosition",
    "ModelTrace",
    "class_attention_maps",
    "compression_terms",
    "entropy_by_position",
    "inspect_model",
    "inspect_path",
    "membership_clusters_score",
    "membership_entropy",
    "membership_maps",
    "subspace_gram",
    "trace_model",
]
