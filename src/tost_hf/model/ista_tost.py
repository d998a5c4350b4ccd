# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The white-box twin of the MLP: one step of ISTA towards a sparse code of each token (CRATE, arXiv 2306.01129).

    code = relu(x + step_size * dictionary^T (x - dictionary x) - step_size * threshold)

This is a proximal gradient step on 1/2 |x - dictionary code|^2 + threshold |code|_1, code >= 0, that starts from the token
itself. The code takes the place of the token: there is no residual branch around it, and no LayerScale.
"""

import torch
from torch import nn
from torch.nn import functional as F


class ISTAStep(nn.Module):
    """One step on tokens (B, T, D). `dictionary` (D, D) is all it learns: D^2 numbers, an MLP of width 4 D has 8 D^2."""

    def __init__(self, hidden_size: int, step_size: float, threshold: float):
        super().__init__()
        self.step_size, self.threshold = float(step_size), float(threshold)
        self.dictionary = nn.Parameter(torch.empty(hidden_size, hidden_size))
        nn.init.kaiming_uniform_(self.dictionary)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The codes, of the same shape, none below 0."""
        rest = hidden_states - F.linear(hidden_states, self.dictionary)
        return F.relu(hidden_states + self.step_size * (F.linear(rest, self.dictionary.t()) - self.threshold))

    def extra_repr(self) -> str:
        return f"{len(self.dictionary)}, step_size={self.step_size}, threshold={self.threshold}"


__all__ = ["ISTAStep"]
