# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A program as a file of ExecuTorch, for XNNPACK. All of its dimensions are fixed, as those of ExecuTorch have to be here."""

from pathlib import Path
from typing import Any

import torch

from .onnx_files import quiet
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


MODEL_FILE = "model.pte"
PROMPT_TOKENS = 32  # that one call reads of a prompt
MOST_TOKENS = 1024  # of a text that layers of attention remember


def fixed_sizes(program: ModelProgram, tokens: int = 1) -> Sizes:
    """The sizes of a program that would be free elsewhere.

    Raises:
        ValueError: the program reads whole texts, whose length is not fixed.
    """
    config: Any = program.model.config
    if isinstance(program, LanguageProgram):
        cached = min(config.max_position_embeddings or MOST_TOKENS, MOST_TOKENS) - 1 if program.attends else 0
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
    """Of each method of the file, how many tokens it takes."""
    if not isinstance(program, LanguageProgram):
        return {"forward": 1}
    most = program.model.config.max_position_embeddings
    return {"forward": 1} | ({"prompt": PROMPT_TOKENS} if most is None or most > PROMPT_TOKENS else {})


def trace(program: ModelProgram) -> Any:
    """The program's methods, lowered.

    Raises:
        ValueError: PyTorch or ExecuTorch cannot export it.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    with quiet(), torch.no_grad():
        try:
            traced = {name: _trace(program, fixed_sizes(program, count)) for name, count in methods(program).items()}
            return to_edge_transform_and_lower(traced, partitioner=[XnnpackPartitioner()]).to_executorch()
        except RuntimeError as error:
            raise ValueError(f"ExecuTorch cannot export this model: {str(error).strip().splitlines()[0]}") from error


def _trace(program: ModelProgram, sizes: Sizes) -> torch.export.ExportedProgram:
    traced = torch.export.export(program, program.sample(sizes), strict=False)
    return traced.run_decompositions({torch.ops.aten.cummax.default: _cummax})


def _cummax(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """aten.cummax of (rows, n) along dimension 1, which ExecuTorch lacks: of each place the greatest of those up to it."""
    assert dim in (1, -1)
    place = torch.arange(x.shape[1])
    later = place[None] > place[:, None]
    seen = torch.where(later, x.amin((0, 1)), x[:, None])
    return seen.amax(2), seen.argmax(2)


def write(traced: Any, folder: Path, dtype: str) -> Path:
    """Writes `model.pte`."""
    with open(folder / MODEL_FILE, "wb") as file:
        traced.write_to_file(file)
    return folder / MODEL_FILE


__all__ = ["MODEL_FILE", "fixed_sizes", "methods", "trace", "write"]
