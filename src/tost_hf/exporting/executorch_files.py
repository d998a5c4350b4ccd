# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A program as a file of ExecuTorch, for XNNPACK. All of its dimensions are fixed, as those of ExecuTorch have to be here."""

from pathlib import Path
from typing import Any

import torch

from .programs import (
    BATCH,
    CACHED,
    HEIGHT,
    MASKED,
    TOKENS,
    WIDTH,
    LanguageProgram,
    ModelProgram,
    Sizes,
    VisionProgram,
)
from .tracing import exporting_by, trace, without_cummax


PROMPT_TOKENS = 32  # that one call reads of a prompt
MAX_TOKENS = 1024  # of a text, in models with layers of attention


def fixed_sizes(program: ModelProgram, tokens: int = 1) -> Sizes:
    """The sizes of the dimensions that are free in other formats.

    Raises:
        ValueError: the program reads whole texts, whose length is not fixed.
    """
    config: Any = program.model.config
    if isinstance(program, LanguageProgram):
        cached = min(config.max_position_embeddings or MAX_TOKENS, MAX_TOKENS) - 1 if program.attends else 0
        return {BATCH: 1, TOKENS: tokens, CACHED: cached, MASKED: cached + tokens}
    if isinstance(program, VisionProgram):
        sides = [config.image_size] * 2 if isinstance(config.image_size, int) else config.image_size
        height, width = (-(-side // config.patch_size) for side in sides)
        patches = height * width
        sizes = {HEIGHT: height * config.patch_size, WIDTH: width * config.patch_size}
        return {BATCH: 1, **sizes, "patches": patches, "1+patches": 1 + patches}
    kind = type(program.model).__name__
    raise ValueError(f"An ExecuTorch program has fixed shapes, and a {kind} reads whole texts: choose another format.")


def methods(program: ModelProgram) -> dict[str, int]:
    """The file's methods, with the number of tokens that each reads."""
    if not isinstance(program, LanguageProgram):
        return {"forward": 1}
    limit = program.model.config.max_position_embeddings
    return {"forward": 1} | ({"prompt": PROMPT_TOKENS} if limit is None or limit > PROMPT_TOKENS else {})


def save_executorch(program: ModelProgram, path: Path, dtype: str) -> None:
    """Writes the program's methods, lowered to XNNPACK.

    Raises:
        ValueError: PyTorch or ExecuTorch cannot export it.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    with exporting_by("ExecuTorch"), torch.no_grad():
        traced = {
            name: without_cummax(trace(program, fixed_sizes(program, count))) for name, count in methods(program).items()
        }
        lowered: Any = to_edge_transform_and_lower(traced, partitioner=[XnnpackPartitioner()]).to_executorch()
    with open(path, "wb") as file:
        lowered.write_to_file(file)


__all__ = ["fixed_sizes", "methods", "save_executorch"]
