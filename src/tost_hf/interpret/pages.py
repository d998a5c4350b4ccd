# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The page that `inspect_model` writes, from `page.html`: every picture with its explanation, a text coloured by its heads."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import torch
from markupsafe import Markup

from .colors import head_style, strongest_heads


TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
GENERATOR = '<meta name="generator" content="tost-hf inspect">'  # marks our index.html


class ColoredText(NamedTuple):
    """A text whose tokens have the colours of their strongest heads, for the template."""

    legend: list[dict[str, Any]]  # a span for each head
    layers: list[dict[str, Any]]  # number, largest membership, and a span for each token


def color_text(tokens: Sequence[str], memberships: torch.Tensor, layers: Sequence[int]) -> ColoredText:
    """Colours tokens by Pi (layers, H, T); the strongest are coloured fully."""

    def span(text: str, head: int, strength: float, title: str) -> dict[str, Any]:
        color, mark = head_style(head)
        share = round(15 + 65 * strength)  # % of the colour, the rest white: light enough for black text
        return {"text": text, "color": color, "mark": mark, "share": share, "title": title}

    sections = []
    for values, layer in zip(memberships, layers):
        strength, strongest = strongest_heads(values)
        spans = [
            span(visible(token), head, float(strength[t]), f"token {t}, head {head + 1}: {values[head, t]:.3f}")
            for t, (token, head) in enumerate(zip(tokens, strongest.tolist()))
        ]
        sections.append({"number": layer, "largest": float(values.max()), "tokens": spans})
    names = [f"head {head + 1}" for head in range(memberships.shape[1])]
    return ColoredText([span(f" {name} ", head, 1.0, name) for head, name in enumerate(names)], sections)


def visible(token: str) -> str:
    """A token as it is displayed: ↵ before line breaks, tabs as spaces, and a dot for unprintable characters."""
    shown = token.replace("\r\n", "\n").replace("\t", "    ")
    shown = "".join(character if character.isprintable() or character == "\n" else "·" for character in shown)
    return shown.replace("\n", "↵\n") or "·"


def index_page(
    facts: list[tuple[str, str]], pictures: Iterable[str], table: list[list[str]], text: ColoredText | None = None
) -> str:
    """The page.

    Args:
        facts: names and values of the model and its input.
        pictures: their file names, beside the page.
        table: cells by line, the headings first.
        text: for a language model.
    """
    legend, layers = text or ([], [])
    fields = {"facts": facts, "pictures": set(pictures), "table": table, "legend": legend, "text": layers}
    return TEMPLATES.get_template("page.html").render(fields, generator=Markup(GENERATOR))


__all__ = ["GENERATOR", "ColoredText", "color_text", "index_page"]
