# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A program as OpenVINO's two files, made of its ONNX file."""

import tempfile
from pathlib import Path
from typing import Any

from . import onnx_files


MODEL_FILE = "model.xml"
trace = onnx_files.trace


def write(traced: Any, folder: Path, dtype: str) -> Path:
    """Writes `model.xml` and `model.bin`, whose weights are float32 or float16."""
    import openvino

    path = folder / MODEL_FILE
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        model = openvino.convert_model(onnx_files.write(traced, Path(scratch), "float32"))
        openvino.save_model(model, path, compress_to_fp16=dtype == "float16")
    return path


__all__ = ["MODEL_FILE", "trace", "write"]
