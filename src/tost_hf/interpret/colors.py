# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Colours of heads, the same in figures and on pages.

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


__all__ = ["COLORS", "HATCHES", "head_style", "strongest_heads"]
