# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Sizes of the Triton kernels' tiles and programs on the GPUs where they were measured, best first found.

`python examples/benchmarks/kernel_times.py --sweep --write` adds the GPU that it runs on. Elsewhere the sizes are those that
the kernels are built for: 4 tokens in a tile, and a warp for each 256 channels.
"""

from typing import NamedTuple


class Sizes(NamedTuple):
    tile: int  # tokens that a thread holds at once: a power of 2, at most 8
    warps: int  # of a program: a power of 2


# by the device's name, then by the kernel's
TUNED: dict[str, dict[str, Sizes]] = {}
