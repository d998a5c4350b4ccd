# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Quantities of a trace, in float64: membership maps, entropies, decay, compression terms, subspaces, clusters.

Symbols: B batch, L TSSA layers, H heads, T tokens (patches, line by line, for an image), p head dimension, w the projected
tokens, Pi the membership. Layers and heads count from 0, as in the names of the weights (`layers.0`); `trace.layers` has the
numbers of the L layers, which a hybrid's layers of softmax attention are not among.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ..extras import require
from .trace import ModelTrace, check_layer, trace_model, tssa_layers


if TYPE_CHECKING:
    from transformers import PreTrainedModel

NORMALIZATIONS = ("tokens", "channels")
"""The values of `normalization` of `compression_terms`."""
NO_DECAY = "This model has no decay (decay_type='none')."
PRECISION = 0.01  # the squared epsilon of the published compression terms: c = p / 0.01 or n / 0.01


def membership_maps(trace: ModelTrace) -> torch.Tensor:
    """Pi of every head (Fig. 4b, 9): (B, L, H, rows, columns) over the patches of images, (B, L, H, T) over tokens.

    The memberships of a token sum to 1 over the heads; at padding they are 0.

    ```python
    maps = membership_maps(trace_model(model, pixel_values=pixel_values))
    maps[0, 3].argmax(0)  # the strongest head of each patch in layer 3
    ```
    """
    return trace.memberships if trace.grid is None else trace.memberships.unflatten(-1, trace.grid)


def class_attention_maps(trace: ModelTrace) -> torch.Tensor:
    """The class token's attention to the patches, (B, class-attention layers, H, rows, columns).

    The weights of a head sum to 1 together with the weight of the class token itself, which is omitted. The paper shows the
    last head of the first of two layers (Fig. 5, 10).

    ```python
    class_attention_maps(trace)[0, 0, -1]  # (rows, columns), as in the paper
    ```

    Raises:
        ValueError: the trace is of a language model or a backbone.
    """
    if trace.class_attentions is None:
        raise ValueError("This model has no class-attention layers, which only vision models with a class token have.")
    return trace.class_attentions.unflatten(-1, trace.grid)


def membership_entropy(trace: ModelTrace) -> torch.Tensor:
    """Entropy of each token's membership, -sum_k Pi_k ln Pi_k in nats: (B, L, T), NaN at padding.

    0 where a token belongs to one head, ln H where it belongs to all equally.

    ```python
    membership_entropy(trace).nanmean(-1)  # (B, L): means over the real tokens
    ```
    """
    entropy = -torch.xlogy(trace.memberships, trace.memberships).sum(2)
    return entropy.masked_fill(~trace.mask[:, None], math.nan)


class EntropyByPosition(NamedTuple):
    """Mean entropy of the memberships of tokens from position `starts[i]` to the next start or the end of the sequence.

    Attributes:
        starts: the first position of each bucket.
        entropy: (L, buckets), nats.
    """

    starts: list[int]
    entropy: torch.Tensor


def entropy_by_position(trace: ModelTrace) -> EntropyByPosition:
    """`membership_entropy` averaged over sequences and positions 0, 1, 2-3, 4-7, 8-15, ...; padding has no position.

    ```python
    entropy_by_position(trace).entropy[0]  # of layer 0, from the first position to the last
    ```
    """
    entropy = membership_entropy(trace)
    positions = trace.mask.cumsum(1) - 1
    starts = [0, *(2**i for i in range(int(positions.max()).bit_length()))]
    bucket = torch.bucketize(positions, torch.tensor(starts), right=True) - 1
    means = [entropy.transpose(1, 2)[(bucket == i) & trace.mask].mean(0) for i in range(len(starts))]
    return EntropyByPosition(starts, torch.stack(means, 1))


def token_decay(trace: ModelTrace) -> torch.Tensor:
    """The decay of each head's sums at each token, before the token is added: (B, L, H, T), 0 to 1; 1 at padding.

    ```python
    token_decay(trace)[0, 0].argmin(-1)  # of strongest decay, for each head of layer 0
    ```

    Raises:
        ValueError: the trace is of a model without decay, such as the published one.
    """
    return _log_decay(trace).exp()


def half_life(source: "ModelTrace | PreTrainedModel") -> torch.Tensor:
    """Tokens after which a head's sum has decayed to half, ln 2 / -ln(decay): (B, L, H) of a trace, (L, H) of a model.

    With decay_type="token" the logarithm is averaged over the real tokens of a sequence, so that a sum halves in this number
    of tokens on average. With decay_type="head" the model can be passed in place of a trace.

    ```python
    half_life(trace)[0].amax(-1)  # (L,): tokens, of the head with the longest memory
    ```

    Raises:
        ValueError: the model has no decay; or a model with decay_type="token" is passed, whose decay depends on the tokens.
    """
    if isinstance(source, ModelTrace):
        num_tokens = source.mask.sum(1)[:, None, None]
        return math.log(2) * num_tokens / _log_decay(source).sum(-1).abs()
    layers = list(tssa_layers(source).values())
    biases = [layer.forget_bias for layer in layers if layer.forget_bias is not None]
    if not biases:
        raise ValueError(NO_DECAY)
    if layers[0].forget_proj is not None:
        raise ValueError("This model computes its decay from each token (decay_type='token'): pass a trace of a sequence.")
    logits = torch.stack([bias.detach().cpu().double() for bias in biases])
    return math.log(2) / F.logsigmoid(logits).abs()


def _log_decay(trace: ModelTrace) -> torch.Tensor:
    if trace.log_decay is None:
        raise ValueError(NO_DECAY)
    return trace.log_decay


class CompressionTerms(NamedTuple):
    """The two compression terms of every layer, in nats, each (B, L).

    Attributes:
        variational: the objective that TSSA descends: second moments of single channels.
        coding_rate: lower bound of `variational`: log-determinant of the full second-moment matrix.
    """

    variational: torch.Tensor
    coding_rate: torch.Tensor


def compression_terms(trace: ModelTrace, normalization: str = "tokens") -> CompressionTerms:
    """The compression term of every layer (Fig. 4a) beside the MCR2 term that it bounds from above.

    With M_k = sum_j Pi_kj w_kj w_kj^T / n_k the second-moment matrix of head k, and n_k = sum_j Pi_kj:

        variational = 1/2 sum_k (n_k / n) sum_i ln(1 + c (M_k)_ii)        s_{k,i} = (M_k)_ii
        coding_rate = 1/2 sum_k (n_k / n) ln det(I + c M_k)

    where c is p / 0.01 with normalization "tokens" and n / 0.01 with "channels", n the tokens of the image or sequence. The
    two are equal where every M_k is diagonal (Hadamard's inequality). Padding is excluded from both, and from n. All
    tokens of a sequence have equal weight, even if the decay of the model gives recent tokens more weight.

    Args:
        normalization: "tokens": each head's projected token at unit norm. "channels": each channel at unit norm over all
            tokens, as inside Pi of the bidirectional form. The paper states neither the normalization nor c; both values
            reproduce its plateau of 24 ln 101 = 110.76 at p = 48.

    Raises:
        ValueError: an unknown normalization.

    ```python
    variational, coding_rate = compression_terms(trace)
    (variational - coding_rate).mean(0)  # (L,): how loose the bound is, by layer
    ```
    """
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization must be one of {', '.join(NORMALIZATIONS)}, got {normalization!r}.")
    n = trace.mask.sum(1).double()
    terms = []
    for w, membership in zip(trace.projections, trace.memberships.unbind(1)):
        w = w.double().transpose(1, 2).masked_fill(~trace.mask[:, None, :, None], 0)  # (B, H, T, p)
        p = w.shape[-1]
        w = F.normalize(w, dim=-1 if normalization == "tokens" else -2)
        c = (torch.full_like(n, p) if normalization == "tokens" else n)[:, None, None, None] / PRECISION
        count = membership.sum(-1)
        # n_k may underflow to 0; the head's weight is then 0, too
        moment = (w * membership[..., None]).transpose(-1, -2) @ w / count.clamp_min(1e-300)[..., None, None]
        variational = (c * moment).diagonal(dim1=-2, dim2=-1).log1p().sum(-1)
        coding_rate = torch.linalg.slogdet(torch.eye(p, dtype=w.dtype) + c * moment).logabsdet
        weight = count / n[:, None]
        terms.append((0.5 * (weight * variational).sum(-1), 0.5 * (weight * coding_rate).sum(-1)))
    return CompressionTerms(*(torch.stack(term, 1) for term in zip(*terms)))


def subspace_gram(model: nn.Module, layer: int) -> torch.Tensor:
    """|U^T U| of a layer's input projections U = [U_1 ... U_H], every column at unit norm (Fig. 11): (H p, H p).

    The identity if the subspaces are orthogonal to each other and their bases are orthogonal. `layer` is the layer's number
    in the model, from 0.

    ```python
    gram = subspace_gram(model, 0)  # gram[:p, p : 2 * p]: |cosine|, heads 0 and 1
    ```

    Raises:
        ValueError: the model has no TSSA layers, or none of this number.
    """
    layers = tssa_layers(model)
    check_layer(layers, layer)
    columns = F.normalize(layers[layer].in_proj.weight.detach().cpu().double(), dim=1)
    return (columns @ columns.T).abs()


class ClustersScore(NamedTuple):
    """Adjusted mutual information between patch clusters and strongest heads, each (B, L); 1 if equal, 0 if unrelated.

    Attributes:
        score: with the image's own memberships.
        shuffled: with its memberships randomly permuted over its patches.
        other_image: with those of the next image of the batch: what position alone explains; NaN for a single image.
    """

    score: torch.Tensor
    shuffled: torch.Tensor
    other_image: torch.Tensor


def membership_clusters_score(model: "PreTrainedModel", pixel_values: torch.Tensor, seed: int = 0) -> ClustersScore:
    """Whether memberships group patches by what they show.

    Per image, the patches are clustered by k-means (k = H) on their mean color and their position, all standardized over the
    image; per layer, they are also partitioned by their strongest head. The adjusted mutual information of the two partitions
    is compared with two controls: the memberships shuffled over the patches, and those of another image.

    ```python
    scores = membership_clusters_score(model, pixel_values)
    (scores.score - scores.other_image).mean(0)  # (L,): beyond the position
    ```

    Args:
        model: a vision model with TSSA.
        pixel_values: (B, C, height, width), as the image processor returns them.
        seed: of k-means and of the shuffles.

    Raises:
        ValueError: it is not a vision model with TSSA.
        ImportError: scikit-learn is missing.
    """
    metrics = require("sklearn.metrics", "vision")
    trace = trace_model(model, pixel_values=pixel_values)
    if trace.grid is None:
        raise ValueError("Patches are clustered by color: this needs a vision model.")
    B, layers, heads, N = trace.memberships.shape
    clusters = cluster_patches(pixel_values, trace.grid, heads, seed).numpy()
    strongest = trace.memberships.argmax(2)
    shuffles = torch.rand(B, layers, N, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    partitions = strongest, strongest.gather(-1, shuffles), strongest.roll(-1, 0)
    score = metrics.adjusted_mutual_info_score
    scores = torch.tensor(
        [[[score(*x) for x in zip([c] * layers, labels)] for c, labels in zip(clusters, p.numpy())] for p in partitions]
    ).double()
    if B == 1:
        scores[2] = math.nan
    return ClustersScore(*scores)


def cluster_patches(pixel_values: torch.Tensor, grid: tuple[int, int], clusters: int, seed: int = 0) -> torch.Tensor:
    """The k-means cluster of each patch by its mean color, row and column, standardized over the image: (B, T)."""
    cluster = require("sklearn.cluster", "vision")
    positions = torch.cartesian_prod(*(torch.arange(side, dtype=torch.float64) for side in grid))
    colors = F.avg_pool2d(pixel_values.detach().cpu().double(), pixel_values.shape[-2] // grid[0]).flatten(2).transpose(1, 2)
    features = torch.cat([colors, positions.expand(len(colors), -1, -1)], -1)
    features = features - features.mean(1, keepdim=True)
    features = features / features.std(1, keepdim=True).clamp_min(1e-6)  # a constant feature stays 0
    fits = (cluster.KMeans(clusters, n_init=4, random_state=seed).fit(image.numpy()) for image in features)
    return torch.stack([torch.from_numpy(fit.labels_) for fit in fits])
