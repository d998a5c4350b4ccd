# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What every TSSA engine shares: the state and its dtypes, the floors, the softmax over heads, where packed sequences start.

Symbols, here and in the other tssa files: B batch, T tokens, H heads, p head dimension, w the projected tokens (B, T, H, p),
Pi the membership.
"""

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F


USUAL_CACHE_BYTES = 2**20
LEAST_CACHE_BYTES, MOST_CACHE_BYTES = 2**18, 2**22  # beyond which a reading is no guide

VECTOR_NUMBERS = 16  # of the widest vectors that a CPU computes with

EPS_SUM_SQ = 1e-12  # floor of a causal running sum of squares
EPS_NORM = 1e-12  # floor of a channel's norm over the tokens (bidirectional)
EPS_MEMBERSHIP = 1e-8  # keeps the mean over memberships finite when nothing has been counted yet


class TSSAState(NamedTuple):
    """The whole causal state of one layer: 2 * H * p + H numbers per sequence, whatever the length of its past.

        sum_sq          = sum_i w_i^2             (B, H, p)
        sum_weighted_sq = sum_i Pi_i * w_i^2      (B, H, p)
        sum_membership  = sum_i Pi_i              (B, H)

    The two sums whose quotient scales the output are float64: a float32 sum of a million terms, added one by one, is off by
    1e-3. The same error in `sum_sq` does not show, since it hardly moves the score of a late token.
    """

    sum_sq: torch.Tensor  # (B, H, p), float32 (float64 for float64 tokens)
    sum_weighted_sq: torch.Tensor  # (B, H, p), float64
    sum_membership: torch.Tensor  # (B, H), float64


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics of `dtype` inputs are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def state_shapes(w: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """The shapes of a state's three sums, for tokens w (B, T, H, p)."""
    B, _, H, p = w.shape
    return (B, H, p), (B, H, p), (B, H)


def state_dtypes(w: torch.Tensor) -> tuple[torch.dtype, ...]:
    """The dtypes of a state's three sums, for tokens like `w`."""
    wide = torch.float32 if w.device.type == "mps" else torch.float64  # Apple's devices have no float64
    return compute_dtype(w.dtype), wide, wide


def zero_state(w: torch.Tensor) -> TSSAState:
    """The state before the first of the tokens w (B, T, H, p)."""
    return TSSAState(*(w.new_zeros(shape, dtype=dtype) for shape, dtype in zip(state_shapes(w), state_dtypes(w))))


def as_state(sums: Iterable[torch.Tensor], w: torch.Tensor) -> TSSAState:
    """Three sums in the dtypes of a state for tokens like `w`."""
    return TSSAState(*(x.to(dtype) for x, dtype in zip(sums, state_dtypes(w))))


def membership_of(score: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """Pi, the softmax over heads of `temp` times the score (..., H); 0 where `padding` (...) is true."""
    membership = (score * temp).softmax(-1)
    return membership if padding is None else membership.masked_fill(padding.unsqueeze(-1), 0)


def quick_membership_of(score: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """`membership_of` but for rounding: torch's softmax on CPUs is quick over whole vectors only, of 16 numbers, not 12."""
    *tokens, H = score.shape
    logits = score.new_full((*tokens, -(-H // VECTOR_NUMBERS) * VECTOR_NUMBERS), -math.inf)
    torch.mul(score, temp, out=logits[..., :H])
    membership = logits.softmax(-1)[..., :H]
    return membership if padding is None else membership.masked_fill_(padding.unsqueeze(-1), 0)


def bias_of_tokens(denom_bias: torch.Tensor | None, positions: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The score bias of tokens in `dtype`: as it is, or where it is one of positions, its rows at those of the tokens."""
    if denom_bias is None:
        return None
    # a look-up, not an index: the gradient of an index adds up in whatever order threads come
    return (denom_bias if positions is None else F.embedding(positions, denom_bias)).to(dtype)


def real_tokens(w: torch.Tensor, padding: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Tokens (..., H, p) in `dtype`, 0 where `padding` (...) is true (not multiplied by 0: padding may hold NaN)."""
    return w.to(dtype) if padding is None else w.to(dtype).masked_fill(padding[..., None, None], 0)


def per_head(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Numbers of each head (..., H) with as many dimensions as `like`, (..., H) or (..., H, p)."""
    return x.view(*x.shape, *[1] * (like.ndim - x.ndim))


def sequence_starts(seq_idx: torch.Tensor) -> torch.Tensor:
    """Whether a packed sequence starts at a token, (B, T), by the tokens' sequence numbers (B, T)."""
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)


def cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of a core's second-level cache, to which engines on CPUs fit their chunks; 1 MiB where Linux does not tell it."""
    try:
        level = next(index for index in sorted(folder.glob("index*")) if (index / "level").read_text().strip() == "2")
        size = 1024 * int((level / "size").read_text().strip().removesuffix("K"))
    except (OSError, StopIteration, ValueError):
        return USUAL_CACHE_BYTES
    return min(max(size, LEAST_CACHE_BYTES), MOST_CACHE_BYTES)


def _operator_namespace(package: str) -> str:
    # The installed package's is fixed wherever its files move: compiled and exported programs name it. Code loaded beside it
    # (a model's own, an exported kernel) gets one of its own.
    return "tost_hf" if package == "tost_hf.model" else re.sub(r"\W", "_", package or __name__, flags=re.ASCII)


OPERATOR_NAMESPACE = _operator_namespace(__name__.rpartition(".")[0])


def custom_operator(name: str, mutates_args: tuple[str, ...] = ()) -> Callable:
    """A decorator that makes a function a `torch.library` operator, which compilers do not look into."""
    return torch.library.custom_op(f"{OPERATOR_NAMESPACE}::{name}", mutates_args=mutates_args)
