# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A program as OpenVINO's two files, made of its ONNX file."""

import tempfile
from pathlib import Path
from typing import Any

from . import onnx_files
from .comparing import Arrays, Run


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


def run_of(path: Path, traced: Any) -> Run:
    """Runs a file in OpenVINO, on the CPU and in float32."""
    import openvino

    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    request, names = compiled.create_infer_request(), [output.any_name for output in compiled.outputs]

    def run(inputs: Arrays) -> Arrays:
        found = request.infer(inputs)
        return {name: found[i].copy() for i, name in enumerate(names)}

    return run


__all__ = ["MODEL_FILE", "run_of", "trace", "write"]
