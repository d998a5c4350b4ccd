# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Pictures of what `interpret` computes: matplotlib figures 8 inches (1,280 pixels) wide, and a page of coloured tokens.

Numbers are drawn in cividis or viridis, heads in the colours of Okabe and Ito: both can be told apart by the colour-blind.
Past the eighth head the colours repeat, hatched or underlined. `layers` are the numbers that label rows, counted from 1.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .report import CompressionTerms, EntropyByPosition

GENERATOR = '<meta name="generator" content="tost-hf inspect">'  # tells our index.html from a stranger's
WIDTH, DPI = 8, 160  # inches, and pixels an inch
# Okabe and Ito's palette, with a grey in place of black, on which no text can be read
COLORS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999")
HATCHES = ("", "////", "xxxx")
UNDERLINES = ("none", "1px solid #333", "3px double #333")
LINE_LETTERS, PICTURE_LINES = 104, 40  # characters a line, and lines, of a picture of tokens


def _figure(height: float) -> "Figure":
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    return Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")


def _style(head: int) -> tuple[str, int]:
    """A head's colour and, past the eighth, which mark it wears."""
    return COLORS[head % len(COLORS)], head // len(COLORS) % len(HATCHES)


def _show_picture(axis, picture: torch.Tensor, grey: bool = False) -> None:
    """A picture (height, width, 3) with values from 0 to 1; or, under a map, in light greys that leave the colours theirs."""
    shown = 0.5 + 0.4 * picture.mean(-1, keepdim=True).expand_as(picture) if grey else picture
    axis.imshow(shown.numpy())
    axis.set(xticks=[], yticks=[])


def _extent(picture: torch.Tensor) -> tuple[float, float, float, float]:
    """Where a map lies that covers the whole picture."""
    height, width = picture.shape[:2]
    return -0.5, width - 0.5, height - 0.5, -0.5


def _plot_maps(maps: torch.Tensor, picture: torch.Tensor, labels: Sequence[str]) -> "Figure":
    """Maps (layers, H, rows, columns) over the picture; eight heads a row, and one colour scale a layer."""
    layers, heads = maps.shape[:2]
    columns, bands = min(heads, 8), math.ceil(heads / 8)
    aspect = picture.shape[0] / picture.shape[1]
    titles = 0.22 * (layers * bands if bands > 1 else 1)
    figure = _figure(0.3 + titles + layers * bands * aspect * 0.92 * WIDTH / (columns + 2))
    axes = figure.subplots(layers * bands, 1 + columns, squeeze=False).reshape(layers, bands, 1 + columns)
    for layer, (block, values, label) in enumerate(zip(axes, maps, labels)):
        for axis in block.flat:
            axis.axis("off")
        _show_picture(block[0, 0], picture)
        block[0, 0].axis("on")
        block[0, 0].set_ylabel(label, fontsize=8)
        for head, shares in enumerate(values):
            axis = block[head // columns, 1 + head % columns]
            _show_picture(axis, picture, grey=True)
            low, high = float(values.min()), float(values.max())
            drawn = axis.imshow(shares.numpy(), cmap="viridis", vmin=low, vmax=high, alpha=0.8, extent=_extent(picture))
            axis.axis("on")
            if bands > 1 or layer == 0:
                axis.set_title(f"head {head + 1}", fontsize=8)
        bar = figure.colorbar(drawn, ax=block.ravel().tolist(), aspect=10 * bands, pad=0.01)
        bar.ax.tick_params(labelsize=6)
        bar.ax.locator_params(nbins=4)
        bar.formatter.set_useOffset(False)
    return figure


def plot_membership_maps(maps: torch.Tensor, picture: torch.Tensor, layers: Sequence[int]) -> "Figure":
    """Pi (layers, H, rows, columns) over the picture (height, width, 3): a row for each layer, a column for each head."""
    return _plot_maps(maps, picture, [f"layer {layer}" for layer in layers])


def plot_class_attention_maps(maps: torch.Tensor, picture: torch.Tensor) -> "Figure":
    """The class token's attention (class-attention layers, H, rows, columns) over the picture (height, width, 3)."""
    labels = [f"layer {layer + 1}" for layer in range(len(maps))]
    return _plot_maps(maps, picture, labels)


def plot_strongest_heads(maps: torch.Tensor, picture: torch.Tensor, layers: Sequence[int]) -> "Figure":
    """The strongest head of each patch, from Pi (layers, H, rows, columns), over the picture; paler where it is weaker."""
    from matplotlib.patches import Patch

    count, heads, rows, columns = maps.shape
    aspect = picture.shape[0] / picture.shape[1]
    figure = _figure(0.5 + 0.95 * aspect * WIDTH / (count + 1) + 0.2 * math.ceil(heads / 8))
    axes = figure.subplots(1, 1 + count, squeeze=False)[0]
    _show_picture(axes[0], picture)
    axes[0].set_title("input", fontsize=9)
    colors = torch.tensor([_rgb(_style(head)[0]) for head in range(heads)])
    across = torch.linspace(-0.5, picture.shape[1] - 0.5, columns + 1)
    down = torch.linspace(-0.5, picture.shape[0] - 0.5, rows + 1)
    for axis, values, layer in zip(axes[1:], maps, layers):
        strength, strongest = _strength(values)
        opacity = 0.25 + 0.6 * strength
        _show_picture(axis, picture, grey=True)
        axis.imshow(torch.cat([colors[strongest], opacity[..., None]], -1).numpy(), extent=_extent(picture))
        for mark in range(1, len(HATCHES)):
            marked = torch.where(strongest // len(COLORS) % len(HATCHES) == mark, 1.0, math.nan)
            if not marked.isnan().all():
                axis.pcolor(
                    across.numpy(),
                    down.numpy(),
                    marked.numpy(),
                    hatch=HATCHES[mark],
                    facecolor="none",
                    edgecolor="#333",
                    linewidth=0,
                )
        axis.set_title(f"layer {layer}", fontsize=9)
    patches = []
    for head in range(heads):
        color, mark = _style(head)
        patches.append(Patch(facecolor=color, hatch=HATCHES[mark], edgecolor="#333", linewidth=0.5, label=f"head {head + 1}"))
    figure.legend(handles=patches, loc="outside lower center", ncols=min(heads, 8), fontsize=8, frameon=False)
    return figure


def plot_entropy_maps(entropy: torch.Tensor, heads: int, layers: Sequence[int]) -> "Figure":
    """Entropy of each patch's membership (layers, rows, columns), in nats; one scale, up to ln H, for all layers."""
    aspect = entropy.shape[1] / entropy.shape[2]
    figure = _figure(0.6 + 0.9 * aspect * WIDTH / (len(layers) + 0.4))
    axes = figure.subplots(1, len(layers), squeeze=False)[0]
    for axis, values, layer in zip(axes, entropy, layers):
        drawn = axis.imshow(values.numpy(), cmap="cividis", vmin=float(entropy.min()), vmax=math.log(heads))
        axis.set(xticks=[], yticks=[])
        axis.set_title(f"layer {layer}\nmean {values.mean():.3f}", fontsize=8)
    bar = figure.colorbar(drawn, ax=axes.tolist(), aspect=12, pad=0.01)
    bar.set_label("nats", fontsize=8)
    bar.formatter.set_useOffset(False)
    bar.ax.tick_params(labelsize=7)
    return figure


def plot_entropy_by_position(buckets: "EntropyByPosition", heads: int) -> "Figure":
    """Mean entropy by position, a line for each layer, with ln H above."""
    from matplotlib import colormaps

    figure = _figure(3.6)
    axis = figure.subplots()
    stops = [*(start - 1 for start in buckets.starts[1:]), None]
    names = [str(a) if a == b else f"{a}+" if b is None else f"{a}-{b}" for a, b in zip(buckets.starts, stops)]
    total = len(buckets.entropy)
    for i, values in enumerate(buckets.entropy):
        color = colormaps["viridis"](0.9 * i / max(1, total - 1))
        axis.plot(names, values.numpy(), marker="o", markersize=4, color=color, label=f"layer {i + 1}")
    axis.axhline(math.log(heads), color="#555", linestyle="--", linewidth=1, label="ln H")
    axis.set(xlabel="position in the text", ylabel="entropy of the membership, nats")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, ncols=1 + total // 16)
    return figure


def plot_membership_tokens(maps: torch.Tensor, layers: Sequence[int]) -> "Figure":
    """Pi (layers, H, T) along a text: a strip for each layer, heads from top to bottom, tokens from left to right."""
    count, heads, _ = maps.shape
    figure = _figure(0.7 + count * max(0.7, 0.09 * heads))
    axes = figure.subplots(count, 1, squeeze=False, sharex=True)[:, 0]
    ticks = range(0, heads, 1 + heads // 8)
    for axis, values, layer in zip(axes, maps, layers):
        drawn = axis.imshow(values.numpy(), cmap="viridis", aspect="auto", interpolation="nearest")
        axis.set_yticks(ticks, [str(head + 1) for head in ticks], fontsize=6)
        axis.set_ylabel(f"layer {layer}\nhead", fontsize=8)
        bar = figure.colorbar(drawn, ax=axis, pad=0.01)
        bar.ax.tick_params(labelsize=6)
    axes[-1].tick_params(axis="x", labelsize=7)
    axes[-1].set_xlabel("position in the text", fontsize=8)
    return figure


def plot_compression(terms: "dict[str, CompressionTerms]") -> "Figure":
    """Both compression terms by layer, a panel for each normalisation; of several images, mean and standard deviation."""
    figure = _figure(3.2)
    for axis, (name, both) in zip(figure.subplots(1, len(terms), squeeze=False)[0], terms.items()):
        numbers = range(1, both.variational.shape[1] + 1)
        lines = (both.variational, "variational (R)", COLORS[4], "o"), (both.coding_rate, "coding rate", COLORS[5], "s")
        for values, label, color, marker in lines:
            mean, deviation = values.mean(0).numpy(), values.std(0, correction=0).numpy()
            axis.plot(numbers, mean, label=label, color=color, marker=marker, markersize=4)
            if len(values) > 1:
                axis.fill_between(numbers, mean - deviation, mean + deviation, color=color, alpha=0.2)
        axis.set(xlabel="layer", ylabel="nats")
        axis.set_title(f"{name} at unit norm", fontsize=10)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, frameon=False)
    return figure


def plot_subspace_grams(grams: list[torch.Tensor], heads: int, layers: Sequence[int]) -> "Figure":
    """|U^T U| of some layers, (H p, H p) each."""
    figure = _figure(0.7 + 0.92 * WIDTH / (len(grams) + 0.3) if len(grams) > 1 else 5)
    axes = figure.subplots(1, len(grams), squeeze=False)[0]
    for axis, gram, layer in zip(axes, grams, layers):
        drawn = axis.imshow(gram.numpy(), cmap="viridis", vmin=0, vmax=1)
        p = gram.shape[0] // heads
        for border in range(p, gram.shape[0], p):
            axis.axhline(border - 0.5, color="white", linewidth=0.4)
            axis.axvline(border - 0.5, color="white", linewidth=0.4)
        every = 1 + heads // 9
        ticks = [head * p + (p - 1) / 2 for head in range(0, heads, every)]
        names = [str(head + 1) for head in range(0, heads, every)]
        axis.set_xticks(ticks, names, fontsize=7)
        axis.set_yticks(ticks, names, fontsize=7)
        axis.set_xlabel("head", fontsize=8)
        axis.set_title(f"layer {layer}", fontsize=9)
    bar = figure.colorbar(drawn, ax=axes.tolist(), shrink=0.7, pad=0.01)
    bar.set_label("|cosine|", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure


# Tokens of a text ----------------------------------------------------------------------------------------------------


def _strength(memberships: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How far the strongest head of each place exceeds an even share, 1 where that is most; and which head it is.

    `memberships` (H, ...), heads first.
    """
    largest, strongest = memberships.max(0)
    above = (largest - 1 / memberships.shape[0]).clamp_min(0)
    return above / above.max().clamp_min(1e-12), strongest


def _rgb(color: str) -> list[float]:
    return [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def _tint(color: str, strength: float) -> str:
    """The colour mixed with white, never so dark that black text on it is hard to read."""
    share = 0.15 + 0.65 * strength
    return "#" + "".join(f"{round(255 * (1 - share + share * x)):02x}" for x in _rgb(color))


def _visible(token: str) -> str:
    """A token as it is drawn: a sign before line breaks, tabs as spaces, and a dot for what would not show."""
    shown = token.replace("\r\n", "\n").replace("\t", "    ")
    shown = "".join(character if character.isprintable() or character == "\n" else "·" for character in shown)
    return shown.replace("\n", "↵\n") or "·"


def plot_strongest_head_tokens(tokens: Sequence[str], memberships: torch.Tensor, layer: int) -> "Figure":
    """Tokens of a text coloured by their strongest head, from Pi (H, T) of one layer; the first lines of a long text."""
    from matplotlib.font_manager import findfont, get_font
    from matplotlib.patches import Rectangle

    heads = len(memberships)
    strength, strongest = _strength(memberships)
    legend = [(f" head {head + 1} ", head, 1.0) for head in range(heads)]
    placed, below = _lay_out(legend, 1, PICTURE_LINES)
    body = [(_visible(token), head, x) for token, head, x in zip(tokens, strongest.tolist(), strength.tolist())]
    in_text, below = _lay_out(body, below + 1, PICTURE_LINES)
    shown = 1 + in_text[-1][0]
    placed += in_text
    lines = placed[-1][1] + 1
    figure = _figure(0.165 * lines + 0.1)
    figure.set_layout_engine("none")  # the axes fill the figure
    axis = figure.add_axes((0.01, 0, 0.98, 1))
    axis.set(xlim=(0, LINE_LETTERS), ylim=(lines + 0.2, -0.2))
    axis.axis("off")
    # a monospace letter of DejaVu is 0.602 of its size wide; a literal $ is no formula
    size = 72 * 0.98 * WIDTH / LINE_LETTERS / 0.602
    style = {"fontsize": size, "va": "center", "parse_math": False}
    more = "" if shown == len(tokens) else f", first {shown} of {len(tokens)} tokens"
    axis.text(0, 0.45, f"layer {layer}{more}; full colour: membership {float(memberships.max()):.3f}", **style)
    fonts = ["DejaVu Sans Mono", "DejaVu Sans"]  # come with matplotlib
    known = set().union(*(get_font(findfont(font)).get_charmap() for font in fonts))
    for _, line, column, text, head, x in placed:
        color, mark = _style(head)
        axis.add_patch(Rectangle((column, line), len(text), 0.92, facecolor=_tint(color, x), linewidth=0))
        for stroke in range(mark):
            y = line + 0.9 - 0.12 * stroke
            axis.plot([column + 0.1, column + len(text) - 0.1], [y, y], color="#333", linewidth=0.5)
        for place, character in enumerate(text):
            if character != " ":  # one by one: letters from another font are of another width
                character = character if ord(character) in known else "□"
                axis.text(column + place + 0.5, line + 0.48, character, ha="center", family=fonts, **style)
    return figure


def _lay_out(tokens: list[tuple[str, int, float]], line: int, last: int) -> tuple[list[tuple], int]:
    """Places (text, head, strength) from `line` on, down to the line `last`.

    Returns:
        Of each piece that stands on one line: number of the token, line, column, text, head, strength; and the next free line.
    """
    placed, column = [], 0
    for i, (token, head, strength) in enumerate(tokens):
        for piece in token.splitlines(keepends=True):
            text = piece.rstrip("\n")[:LINE_LETTERS]
            if column + len(text) > LINE_LETTERS:
                line, column = line + 1, 0
            if line > last:
                return placed, line
            placed.append((i, line, column, text, head, strength))
            column += len(text)
            if piece.endswith("\n"):
                line, column = line + 1, 0
    return placed, line + (column > 0)


def strongest_head_page(tokens: Sequence[str], memberships: torch.Tensor, layers: Sequence[int]) -> str:
    """An HTML page of the text for each layer, tokens coloured by their strongest head, from Pi (layers, H, T)."""
    heads = memberships.shape[1]
    legend = "".join(_span(f" head {head + 1} ", head, 1.0, f"head {head + 1}") + "\n" for head in range(heads))
    sections = ""
    for values, layer in zip(memberships, layers):
        strength, strongest = _strength(values)
        spans = ""
        for t, (token, head) in enumerate(zip(tokens, strongest.tolist())):
            share = float(values[head, t])
            spans += _span(token, head, float(strength[t]), f"token {t}, head {head + 1}: {share:.3f}")
        most = float(values.max())
        sections += f"<h2>Layer {layer}</h2>\n<p>Full colour: a membership of {most:.3f}.</p>\n<p class='text'>{spans}</p>\n"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Strongest head of each token</title>
<style>
body {{ font-family: system-ui, sans-serif; color: #222; background: #fff; max-width: 820px; margin: 2em auto;
  padding: 0 1em; }}
.legend {{ line-height: 1.8; }}
.text {{ font-family: ui-monospace, monospace; font-size: 0.9em; line-height: 1.8; white-space: pre-wrap;
  overflow-wrap: anywhere; }}
.text span, .legend span {{ padding: 0.1em 0 0.2em; color: #000; }}
</style>
</head>
<body>
<h1>Strongest head of each token</h1>
<p>Each token has the colour of the head with the largest membership; the paler, the less it exceeds an even share 1 / H =
{1 / heads:.3f}. Rest the pointer on a token for its number. <a href="index.html">Back</a></p>
<p class="legend">{legend}</p>
{sections}</body>
</html>
"""


def _span(token: str, head: int, strength: float, title: str) -> str:
    color, mark = _style(head)
    underline = f";border-bottom:{UNDERLINES[mark]}" if mark else ""
    style = f"background:{_tint(color, strength)}{underline}"
    return f"<span style='{style}' title='{title}'>{escape(_visible(token))}</span>"


# The page -------------------------------------------------------------------------------------------------------------

CAPTIONS = {  # of each picture: its title and what it shows
    "memberships.png": (
        "Membership of each head",
        "Pi, the share of a patch or token that belongs to each head; the heads' shares add up to 1. One row a layer; each "
        "row has its own colour scale, as shares differ less in some layers than in others.",
    ),
    "strongest_heads.png": (
        "Strongest head of each patch",
        "The head with the largest membership. The paler the colour, the less that membership exceeds an even share 1 / H; "
        "full colour is the largest membership of the layer.",
    ),
    "tokens.png": (
        "Strongest head of each token",
        "Tokens coloured by the head with the largest membership in the last layer drawn; the paler, the less it exceeds an "
        "even share 1 / H. <a href='tokens.html'>tokens.html</a> has every layer drawn, with the numbers of each token.",
    ),
    "entropy.png": (
        "Entropy of the membership",
        "Entropy over the heads, -sum_k Pi_k ln Pi_k in nats. It is 0 where a token belongs to one head and ln H where it "
        "belongs to all alike.",
    ),
    "class_attention.png": (
        "Attention of the class token",
        "The class token's attention weights over the patches, by class-attention layer and head. The paper shows the last "
        "head of the first layer.",
    ),
    "compression.png": (
        "Compression term by layer",
        "The compression terms of each layer, in nats. Variational: R = 1/2 sum_k (n_k / n) sum_i ln(1 + c s_ki), with s_ki "
        "the mean square of channel i of head k under its memberships and n_k their sum. Coding rate: R_c = 1/2 sum_k "
        "(n_k / n) ln det(I + c M_k), with M_k the whole second-moment matrix; it is never above R. Left: tokens at unit "
        "norm, c = p / 0.01. Right: channels at unit norm over the tokens, c = n / 0.01.",
    ),
    "subspaces.png": (
        "Overlap of the subspaces",
        "|U^T U| of the input projection U with every column at unit norm; lines divide the heads. It is the identity where "
        "the subspaces and their bases are orthogonal.",
    ),
}

STYLE = """
body { font-family: system-ui, sans-serif; color: #222; background: #fff; max-width: 820px; margin: 2em auto; padding: 0 1em;
  line-height: 1.45; }
figure { margin: 2em 0; } figure img { width: 100%; height: auto; } figcaption { font-size: 0.92em; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.92em; }
th, td { padding: 0.2em 0.8em; border-bottom: 1px solid #ddd; text-align: right; }
table.facts th, table.facts td { text-align: left; vertical-align: top; }
table.facts th { white-space: nowrap; } table.facts td { overflow-wrap: anywhere; }
"""


def index_page(facts: list[tuple[str, str]], names, table: list[list[str]]) -> str:
    """The page as HTML; `names` are the files beside it."""
    about = "".join(f"<tr><th scope='row'>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in table[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in table[1:])
    figures = ""
    for name in names:
        if name in CAPTIONS:
            title, caption = CAPTIONS[name]
            figures += (
                f"<h2>{title}</h2>\n<figure><a href='{name}'><img src='{name}' alt='{title}. {escape(_plain(caption))}'></a>"
                f"<figcaption>{caption}</figcaption></figure>\n"
            )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{GENERATOR}
<title>Inside a ToST model</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Inside a ToST model</h1>
<table class="facts">{about}</table>
{figures}<h2>Numbers of each layer</h2>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>
{body}</tbody></table></div>
<p>Entropy: mean over the tokens, in nats. R: the variational compression term, R_c: the coding rate, in nats, with tokens or
channels at unit norm. Overlap: mean of |U<sup>T</sup>U| off the diagonal, within a head and between heads.</p>
</body>
</html>
"""


def _plain(caption: str) -> str:
    """A caption's first sentence, for those who cannot see the picture."""
    return caption.split(". ")[0].rstrip(".") + "."


__all__ = [
    "GENERATOR",
    "index_page",
    "plot_class_attention_maps",
    "plot_compression",
    "plot_entropy_by_position",
    "plot_entropy_maps",
    "plot_membership_maps",
    "plot_membership_tokens",
    "plot_strongest_head_tokens",
    "plot_strongest_heads",
    "plot_subspace_grams",
    "strongest_head_page",
]
