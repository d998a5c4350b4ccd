# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Colours of heads and the text of tokens, the same in figures and on pages.

Heads have the colours of Okabe and Ito, which the colour-blind can tell apart. Past the eighth head the colours repeat,
hatched or underlined.
"""

import torch


# Okabe and Ito's palette, with a grey in place of black, on which no text can be read
COLORS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999")
HATCHES = ("", "////", "xxxx")


def head_style(head: int) -> tuple[str, int]:
    """A head's colour, and its mark: 0 for the first eight heads, 1 for the next eight, then 2."""
    return COLORS[head % len(COLORS)], head // len(COLORS) % len(HATCHES)


def strongest_heads(memberships: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The strength of each token or patch, and its strongest head, from memberships (H, ...).

    Strength is how far the largest membership exceeds an even share 1 / H, scaled so that the largest is 1.
    """
    largest, strongest = memberships.max(0)
    above = (largest - 1 / memberships.shape[0]).clamp_min(0)
    return above / above.max().clamp_min(1e-12), strongest


def rgb(color: str) -> list[float]:
    """Red, green and blue of "#rrggbb", from 0 to 1."""
    return [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def tint(color: str, strength: float) -> str:
    """The colour mixed with white, light enough for black text."""
    share = 0.15 + 0.65 * strength
    return "#" + "".join(f"{round(255 * (1 - share + share * x)):02x}" for x in rgb(color))


def visible(token: str) -> str:
    """A token as it is displayed: ↵ before line breaks, tabs as spaces, and a dot for unprintable characters."""
    shown = token.replace("\r\n", "\n").replace("\t", "    ")
    shown = "".join(character if character.isprintable() or character == "\n" else "·" for character in shown)
    return shown.replace("\n", "↵\n") or "·"


__all__ = ["COLORS", "HATCHES", "head_style", "rgb", "strongest_heads", "tint", "visible"]
