# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A short causal convolution over the inputs of an attention layer, each channel on its own, added to them.

    y_t = x_t + sum_{j < kernel} weight_j x_{t-j}

`t - j` counts real tokens of the same sequence: padding is absent wherever it stands, packed sequences do not see each other,
and before the first token there are zeros. What a layer needs to go on are its last `kernel - 1` inputs.

Rows, here: those last inputs of the past, then the new tokens, (B, kernel - 1 + T, D).
"""

import torch
from torch import nn
from torch.nn import functional as F

from .tssa_reference import sequence_starts


class ShortConvolution(nn.Module):
    """The convolution of one layer. `weight` (D, kernel) starts at 0, where the output is the input."""

    def __init__(self, hidden_size: int, kernel: int):
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.zeros(hidden_size, kernel))

    def forward(
        self, hidden_states: torch.Tensor, taps: torch.Tensor | None = None, recent: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolves.

        Args:
            hidden_states: (B, T, D).
            taps: from `find_taps`, where tokens are padding or rows are packed.
            recent: the `kernel - 1` inputs before these tokens, (B, kernel - 1, D); None for none.

        Returns:
            The convolved tokens (B, T, D), and the last `kernel - 1` inputs after them (B, kernel - 1, D).
        """
        rows = join_rows(recent, hidden_states, self.kernel)
        T = hidden_states.shape[1]
        weights = self.weight.unbind(1)
        out = hidden_states * (1 + weights[0])
        for j in range(1, self.kernel):
            first = self.kernel - 1 - j
            earlier = rows[:, first : first + T] if taps is None else _look_up(rows, taps[:, :-1, j - 1])
            out = torch.addcmul(out, earlier, weights[j])
        return out, last_rows(rows, taps, self.kernel)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, kernel={self.kernel}"


def convolve(
    convolution: ShortConvolution,
    hidden_states: torch.Tensor,
    mask: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    *,
    taps: torch.Tensor | None = None,
    recent: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ShortConvolution.forward`, with the taps of `mask` and `seq_idx`, each (B, T), where they are left out."""
    taps = find_taps(convolution.kernel, mask, seq_idx) if taps is None else taps
    return convolution(hidden_states, taps, recent)


def join_rows(recent: torch.Tensor | None, hidden_states: torch.Tensor, kernel: int) -> torch.Tensor:
    """The rows (B, kernel - 1 + T, D), with zeros where there is no past."""
    if recent is None:
        return F.pad(hidden_states, (0, 0, kernel - 1, 0))
    return torch.cat([recent.to(hidden_states.dtype), hidden_states], 1)


def last_rows(rows: torch.Tensor, taps: torch.Tensor | None, kernel: int) -> torch.Tensor:
    """The last `kernel - 1` inputs after all rows, oldest first."""
    # a copy: a cache that held a view would hold all rows
    return rows[:, 1 - kernel :].clone() if taps is None else _look_up(rows, taps[:, -1].flip(-1))


def find_taps(kernel: int, mask: torch.Tensor | None, seq_idx: torch.Tensor | None) -> torch.Tensor | None:
    """Which rows hold the inputs before each token, and before the token that comes next.

    Args:
        mask: (B, T), true at real tokens; None where all are.
        seq_idx: (B, T), sequence numbers of packed rows, which go on from no past.

    Returns:
        (B, T + 1, kernel - 1), the nearest first; None where they are simply the rows before.
    """
    if mask is None and seq_idx is None:
        return None
    like = seq_idx if mask is None else mask
    assert like is not None
    B, T = like.shape
    last = torch.arange(kernel - 1 + T, device=like.device).expand(B, -1)  # the last real row up to each one
    if mask is not None:
        last = last.masked_fill(F.pad(~mask.bool(), (kernel - 1, 0), value=False), 0).cummax(1)[0]
    before = F.pad(last, (1, 0))  # the last real row before each one; there is none before the first, and none asks
    taps = [before[:, kernel - 1 :]]
    while len(taps) < kernel - 1:
        taps.append(before.gather(1, taps[-1]))
    found = torch.stack(taps, -1)
    if seq_idx is None:
        return found
    seq_idx = sequence_starts(seq_idx).cumsum(1)  # one number per sequence, were the given ones used again
    # a row of the past belongs to no sequence; the first one is 0 and stands for all that is absent
    tokens = (found - (kernel - 1)).clamp_min(0)
    theirs = seq_idx.gather(1, tokens.flatten(1)).view_as(tokens)
    own = torch.cat([seq_idx, seq_idx[:, -1:]], 1).unsqueeze(-1)
    return found.masked_fill((found < kernel - 1) | (theirs != own), 0)


def _look_up(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows (B, N, D) at `index` (B, n)."""
    B, N, D = rows.shape
    first = torch.arange(B, device=rows.device).unsqueeze(1) * N
    # a look-up, not an index: the gradient of an index adds up in whatever order threads come
    return F.embedding(index + first, rows.reshape(B * N, D))


__all__ = ["ShortConvolution", "convolve", "find_taps", "join_rows", "last_rows"]
