# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The page that `inspect_model` writes, as HTML: every picture with its explanation, and a text coloured by its heads."""

from collections.abc import Iterable, Sequence
from html import escape

import torch

from .colors import head_style, strongest_heads, tint, visible


UNDERLINES = ("none", "1px solid #333", "3px double #333")
GENERATOR = '<meta name="generator" content="tost-hf inspect">'  # marks our index.html


def colored_text(tokens: Sequence[str], memberships: torch.Tensor, layers: Sequence[int]) -> str:
    """HTML of the text for each layer, tokens coloured by their strongest head, from Pi (layers, H, T)."""
    heads = memberships.shape[1]
    legend = "".join(_span(f" head {head + 1} ", head, 1.0, f"head {head + 1}") + "\n" for head in range(heads))
    sections = ""
    for values, layer in zip(memberships, layers):
        strength, strongest = strongest_heads(values)
        spans = ""
        for t, (token, head) in enumerate(zip(tokens, strongest.tolist())):
            share = float(values[head, t])
            spans += _span(token, head, float(strength[t]), f"token {t}, head {head + 1}: {share:.3f}")
        most = float(values.max())
        sections += f"<h3>Layer {layer}</h3>\n<p>Full colour: a membership of {most:.3f}.</p>\n<p class='text'>{spans}</p>\n"
    return f"""<h2>Strongest head of each token</h2>
<p>Each token has the colour of the head with the largest membership; the paler, the less it exceeds an even share 1 / H =
{1 / heads:.3f}. Rest the pointer on a token for its number.</p>
<p class="legend">{legend}</p>
{sections}"""


def _span(token: str, head: int, strength: float, title: str) -> str:
    color, mark = head_style(head)
    underline = f";border-bottom:{UNDERLINES[mark]}" if mark else ""
    style = f"background:{tint(color, strength)}{underline}"
    return f"<span style='{style}' title='{title}'>{escape(visible(token))}</span>"


CAPTIONS = {  # of each picture: its title and what it shows
    "memberships.png": (
        "Membership of each head",
        "Pi, the share of a patch or token that belongs to each head; the heads' shares add up to 1. Each layer has its own "
        "colour scale, as shares differ less in some layers than in others.",
    ),
    "strongest_heads.png": (
        "Strongest head of each patch",
        "The head with the largest membership. The paler the colour, the less that membership exceeds an even share 1 / H; "
        "full colour is the largest membership of the layer.",
    ),
    "entropy.png": (
        "Entropy of the membership",
        "Entropy over the heads, -sum_k Pi_k ln Pi_k in nats. It is 0 where a token belongs to one head and ln H where it "
        "belongs to all equally.",
    ),
    "forgetting.png": (
        "Forget factor of each head",
        "The decay of the heads' sums at each token, from 0 (reset) to 1 (no decay). Each layer has its own colour scale. "
        "Right: the half-life of each head, the tokens after which half of a sum is left, ln 2 / -ln(factor), with the "
        "logarithm averaged over the text.",
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
.legend { line-height: 1.8; } .text { font-family: ui-monospace, monospace; font-size: 0.9em; line-height: 1.8;
  white-space: pre-wrap; overflow-wrap: anywhere; } .text span, .legend span { padding: 0.1em 0 0.2em; color: #000; }
"""


def index_page(facts: list[tuple[str, str]], names: Iterable[str], table: list[list[str]], text: str = "") -> str:
    """The page.

    Args:
        facts: names and values of the model and its input.
        names: the pictures beside the page, each one of `CAPTIONS`.
        table: cells by line, the headings first.
        text: HTML of `colored_text`, for a language model.
    """
    about = "".join(f"<tr><th scope='row'>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in table[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>\n" for cells in table[1:])
    figures = ""
    for name in names:
        title, caption = CAPTIONS[name]
        alt = f"{title}. {caption.split('. ')[0].rstrip('.')}."  # the caption's first sentence
        figures += (
            f"<h2>{title}</h2>\n<figure><a href='{name}'><img src='{name}' alt='{escape(alt)}'></a>"
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
{text}{figures}<h2>Numbers of each layer</h2>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>
{body}</tbody></table></div>
<p>Entropy: mean over the tokens, in nats. R: the variational compression term, R_c: the coding rate, in nats, with tokens or
channels at unit norm; all tokens have equal weight in both, also in a layer with decay. Half-life: the tokens after which half
of a head's sum is left, of the heads with the strongest and the weakest decay.
Overlap: mean of |U<sup>T</sup>U| off the diagonal, within a head and between heads.</p>
</body>
</html>
"""


__all__ = ["GENERATOR", "colored_text", "index_page"]
