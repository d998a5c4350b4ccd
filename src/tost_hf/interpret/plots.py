# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Quantities as matplotlib figures, 1,280 pixels wide; `layers` are the model's numbers, from 0 as are the heads'.

Numbers are drawn in cividis or viridis, which the color-blind can tell apart; heads in the colors of Okabe and Ito, which
repeat hatched past the eighth. Color scales start at 0 and are the same for all layers, as a scale from the smallest to the
largest value would draw memberships of 8.8 % to 9.3 % like ones of 0 to 1.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch


if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .quantities import CompressionTerms, EntropyByPosition

WIDTH, DPI = 6.4, 200  # inches, and pixels per inch
HEADS_PER_LINE, LAYERS_PER_LINE = 8, 6
# Okabe and Ito's palette, with a gray in place of black, on which no text can be read
COLORS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999")
HATCHES = ("", "////", "xxxx")


def head_style(head: int) -> tuple[str, int]:
    """A head's color, and its mark: 0 for the first eight heads, 1 for the next eight, then 2."""
    return COLORS[head % len(COLORS)], head // len(COLORS) % len(HATCHES)


def strongest_heads(memberships: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The strongest head of each token or patch, and by how much it leads, from memberships (H, ...).

    Returns:
        The lead, 0 where the memberships are uniform (1 / H) to 1 where the largest is at least 2 / H; and the head.
    """
    largest, strongest = memberships.max(0)
    return (largest * memberships.shape[0] - 1).clamp(0, 1), strongest


def scale_limit(values: torch.Tensor, uniform: float) -> float:
    """The upper end of a color scale from 0: the largest value, and at least twice the uniform one."""
    return max(2 * uniform, float(values.max()))


def _make_figure(height: float) -> "Figure":
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    return Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")


def _add_colorbar(figure: "Figure", mappable: Any, axes: Any, label: str = "", aspect: float = 20, shrink: float = 1) -> Any:
    bar = figure.colorbar(mappable, ax=axes, aspect=aspect, shrink=shrink, pad=0.01)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=6)
    bar.ax.locator_params(nbins=4)
    return bar


def _add_scale(figure: "Figure", mappable: Any, axes: Any, uniform: float, aspect: float = 20) -> None:
    """Adds a color bar from 0 on which the uniform value is marked."""
    bar = _add_colorbar(figure, mappable, axes, aspect=aspect)
    limit = mappable.get_clim()[1]
    bar.set_ticks([uniform, limit], labels=[f"{uniform:.2g}\nuniform", f"{limit:.2g}"])
    bar.ax.axhline(uniform, color="white", linewidth=1)


def _show_picture(axis, picture: torch.Tensor, pale: bool = False) -> Any:
    """Shows a picture (height, width, 3) with values from 0 to 1; with `pale` in light grays, as background of a map."""
    axis.axis("on")
    axis.set(xticks=[], yticks=[])
    if pale:  # one byte per pixel: every layer and head has a copy
        return axis.imshow((255 * (0.5 + 0.4 * picture.mean(-1))).byte().numpy(), cmap="gray", vmin=0, vmax=255)
    return axis.imshow(picture.numpy())


def plot_membership_maps(
    maps: torch.Tensor,
    picture: torch.Tensor,
    layers: Sequence[int],
    *,
    uniform: float | None = None,
    limit: float | None = None,
    heads_per_line: int = HEADS_PER_LINE,
) -> "Figure":
    """Pi, or the class token's attention, of each layer and head over the picture, with one color scale from 0.

    Args:
        maps: (layers, H, rows, columns), one value per patch; a patch is drawn as a square of its size in the picture.
        picture: (height, width, 3), from 0 to 1.
        uniform: the value of uniform maps, which is marked on the scale; by default the membership 1 / H.
        limit: the upper end of the scale; by default `scale_limit` of these maps.
    """
    heads = maps.shape[1]
    uniform = 1 / heads if uniform is None else uniform
    limit = scale_limit(maps, uniform) if limit is None else limit
    columns, lines = min(heads, heads_per_line), math.ceil(heads / heads_per_line)
    aspect = picture.shape[0] / picture.shape[1]
    title_height = 0.22 * (len(maps) * lines if lines > 1 else 1)
    figure = _make_figure(0.3 + title_height + len(maps) * lines * aspect * 0.92 * WIDTH / (columns + 2))
    axes = figure.subplots(len(maps) * lines, 1 + columns, squeeze=False).reshape(len(maps), lines, 1 + columns)
    for i, (panels, values, layer) in enumerate(zip(axes, maps, layers)):
        for axis in panels.flat:
            axis.axis("off")
        _show_picture(panels[0, 0], picture)
        panels[0, 0].set_ylabel(f"layer {layer}", fontsize=8)
        for head, membership in enumerate(values):
            axis = panels[head // columns, 1 + head % columns]
            extent = _show_picture(axis, picture, pale=True).get_extent()
            image = axis.imshow(membership.numpy(), cmap="viridis", vmin=0, vmax=limit, alpha=0.8, extent=extent)
            if lines > 1 or i == 0:
                axis.set_title(f"head {head}", fontsize=8)
        _add_scale(figure, image, panels.ravel().tolist(), uniform, aspect=10 * lines)
    return figure


def _layer_grid(panels: int, aspect: float) -> tuple["Figure", list]:
    """A figure with a panel for each layer, of this ratio of height to width, and the panels' axes."""
    columns = min(panels, LAYERS_PER_LINE)
    lines = math.ceil(panels / columns)
    figure = _make_figure(0.6 + lines * (0.3 + 0.9 * aspect * WIDTH / (columns + 0.4)))
    axes = figure.subplots(lines, columns, squeeze=False).ravel().tolist()
    for axis in axes[panels:]:
        axis.axis("off")
    return figure, axes[:panels]


def plot_strongest_heads(maps: torch.Tensor, picture: torch.Tensor, layers: Sequence[int]) -> "Figure":
    """The strongest head of each patch, from Pi (layers, H, rows, columns), over the picture; pale where it barely leads."""
    figure, axes = _layer_grid(1 + len(maps), picture.shape[0] / picture.shape[1])
    _show_picture(axes[0], picture)
    axes[0].set_title("input", fontsize=9)
    for axis, values, layer in zip(axes[1:], maps, layers):
        _show_strongest_heads(axis, values, picture)
        axis.set_title(f"layer {layer}", fontsize=9)
    _add_head_legend(figure, maps.shape[1])
    return figure


def plot_photographs(maps: torch.Tensor, pictures: torch.Tensor) -> "Figure":
    """Pictures (B, height, width, 3) in a row, and below them the strongest heads of one layer, from Pi (B, H, rows, columns).

    Drawn as by `plot_strongest_heads`.
    """
    width = WIDTH / len(pictures)
    figure = _make_figure(0.45 + 2 * width * pictures.shape[1] / pictures.shape[2])
    axes = figure.subplots(2, len(pictures), squeeze=False)
    for top, bottom, values, picture in zip(*axes, maps, pictures):
        _show_picture(top, picture)
        _show_strongest_heads(bottom, values, picture)
    _add_head_legend(figure, maps.shape[1])
    return figure


def _show_strongest_heads(axis: Any, values: torch.Tensor, picture: torch.Tensor) -> None:
    """Colors and hatches of the strongest heads, from Pi (H, rows, columns), over a pale picture."""
    from matplotlib.colors import to_rgba_array

    heads, rows, columns = values.shape
    colors, marks = zip(*(head_style(head) for head in range(heads)))
    lead, strongest = strongest_heads(values)
    left, right, bottom, top = extent = _show_picture(axis, picture, pale=True).get_extent()
    axis.imshow(to_rgba_array(colors)[strongest.numpy()], alpha=(0.05 + 0.8 * lead).numpy(), extent=extent)
    edges = np.linspace(left, right, columns + 1), np.linspace(top, bottom, rows + 1)
    for mark in set(marks) - {0}:
        hatch_mask = np.where((np.array(marks)[strongest.numpy()] == mark) & (lead.numpy() > 0.25), 1.0, math.nan)
        axis.pcolor(*edges, hatch_mask, hatch=HATCHES[mark], facecolor="none", edgecolor="#333", linewidth=0)


def _add_head_legend(figure: "Figure", heads: int) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=color, hatch=HATCHES[mark], edgecolor="#333", linewidth=0.5, label=f"head {head}")
        for head, (color, mark) in enumerate(map(head_style, range(heads)))
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(heads, 6), fontsize=8, frameon=False)


def plot_entropy_maps(entropy: torch.Tensor, heads: int, layers: Sequence[int]) -> "Figure":
    """Entropy of each patch's membership (layers, rows, columns), in nats; one scale, from 0 to ln H, for all layers."""
    figure, axes = _layer_grid(len(entropy), entropy.shape[1] / entropy.shape[2])
    for axis, values, layer in zip(axes, entropy, layers):
        image = axis.imshow(values.numpy(), cmap="cividis", vmin=0, vmax=math.log(heads))
        axis.set(xticks=[], yticks=[])
        axis.set_title(f"layer {layer}\nmean {values.mean():.3f}", fontsize=8)
    _add_colorbar(figure, image, axes, "nats", aspect=12)
    return figure


def plot_entropy_by_position(buckets: "EntropyByPosition", heads: int, layers: Sequence[int]) -> "Figure":
    """Mean entropy by position, a line for each layer, and ln H as a dashed line."""
    from matplotlib import colormaps

    figure = _make_figure(2.9)
    axis = figure.subplots()
    names = [str(start) for start in buckets.starts]
    ticks = range(0, len(names), 1 + len(names) // 14)
    for i, (values, layer) in enumerate(zip(buckets.entropy, layers)):
        color = colormaps["viridis"](0.9 * i / max(1, len(layers) - 1))
        axis.plot(names, values.numpy(), marker="o", markersize=4, color=color, label=f"layer {layer}")
    axis.axhline(math.log(heads), color="#555", linestyle="--", linewidth=1, label="ln H")
    axis.set_xticks(ticks, [names[i] for i in ticks], fontsize=8)
    axis.set(xlabel="position in the sequence, from this one to the next", ylabel="entropy of the membership, nats")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, ncols=1 + len(layers) // 16)
    return figure


def plot_membership_tokens(maps: torch.Tensor, layers: Sequence[int]) -> "Figure":
    """Pi (layers, H, T) along a sequence: a strip for each layer, heads from top to bottom, with one color scale from 0."""
    uniform = 1 / maps.shape[1]
    figure, images = _plot_strips(maps, layers, scale_limit(maps, uniform), line=0.09)
    for image in images:
        _add_scale(figure, image, image.axes, uniform)
    return figure


def _plot_strips(values: torch.Tensor, layers: Sequence[int], limit: float, line: float) -> tuple["Figure", list]:
    """Values (layers, H, T) from 0 to `limit`; each head's line is `line` inches high. Returns the figure and its images."""
    num_layers, heads, _ = values.shape
    figure = _make_figure(0.7 + num_layers * max(0.7, line * heads))
    axes = figure.subplots(num_layers, 1, squeeze=False, sharex=True)[:, 0]
    ticks = range(0, heads, 1 + heads // 8)
    images = []
    for axis, strip, layer in zip(axes, values, layers):
        images.append(axis.imshow(strip.numpy(), cmap="viridis", vmin=0, vmax=limit, aspect="auto", interpolation="nearest"))
        axis.set_yticks(ticks, [str(head) for head in ticks], fontsize=7)
        axis.set_ylabel(f"layer {layer}\nhead", fontsize=8)
    axes[-1].tick_params(axis="x", labelsize=7)
    axes[-1].set_xlabel("position in the sequence", fontsize=8)
    return figure, images


def plot_decay(decay: torch.Tensor, half_lives: torch.Tensor, layers: Sequence[int]) -> "Figure":
    """Decay (layers, H, T), from 0 to 1, along a sequence, beside each head's half-life (layers, H)."""
    figure, images = _plot_strips(decay, layers, 1.0, line=0.14)
    for image, half_life in zip(images, half_lives.tolist()):
        _add_colorbar(figure, image, image.axes)
        half_life_axis = image.axes.secondary_yaxis("right")
        half_life_axis.set_yticks(range(len(half_life)), [f"{x:.2g}" if x < 10 else f"{x:.0f}" for x in half_life], fontsize=7)
        half_life_axis.set_ylabel("half-life,\ntokens", fontsize=7)
    return figure


def plot_compression(terms: "dict[str, CompressionTerms]", layers: Sequence[int]) -> "Figure":
    """Both compression terms by layer, a panel for each normalization; of several images, mean and standard deviation."""
    figure = _make_figure(2.5)
    for axis, (name, layer_terms) in zip(figure.subplots(1, len(terms), squeeze=False)[0], terms.items()):
        lines = (
            (layer_terms.variational, "variational (R)", COLORS[4], "o"),
            (layer_terms.coding_rate, "coding rate", COLORS[5], "s"),
        )
        for values, label, color, marker in lines:
            mean, deviation = values.mean(0).numpy(), values.std(0, correction=0).numpy()
            axis.plot(layers, mean, label=label, color=color, marker=marker, markersize=4)
            if len(values) > 1:
                axis.fill_between(layers, mean - deviation, mean + deviation, color=color, alpha=0.2)
        axis.set(xlabel="layer", ylabel="nats")
        axis.set_title(f"{name} at unit norm", fontsize=10)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, frameon=False)
    return figure


def plot_subspace_grams(grams: list[torch.Tensor], heads: int, layers: Sequence[int]) -> "Figure":
    """|U^T U| of some layers, (H p, H p) each."""
    figure = _make_figure(0.7 + 0.92 * WIDTH / (len(grams) + 0.3) if len(grams) > 1 else 5)
    axes = figure.subplots(1, len(grams), squeeze=False)[0]
    for axis, gram, layer in zip(axes, grams, layers):
        image = axis.imshow(gram.numpy(), cmap="viridis", vmin=0, vmax=1)
        p = gram.shape[0] // heads
        for boundary in range(p, gram.shape[0], p):
            axis.axhline(boundary - 0.5, color="white", linewidth=0.4)
            axis.axvline(boundary - 0.5, color="white", linewidth=0.4)
        tick_heads = range(0, heads, 1 + heads // 9)
        for set_ticks in (axis.set_xticks, axis.set_yticks):
            set_ticks([head * p + (p - 1) / 2 for head in tick_heads], [str(head) for head in tick_heads], fontsize=7)
        axis.set_xlabel("head", fontsize=8)
        axis.set_title(f"layer {layer}", fontsize=9)
    _add_colorbar(figure, image, axes.tolist(), "|cosine|", shrink=0.7)
    return figure
