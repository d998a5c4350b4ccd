# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The formats that programs are written in, and what each needs."""

import importlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from .executorch_files import save_executorch
from .onnx_files import save_onnx
from .programs import ModelProgram
from .tracing import exporting_by, trace


class Format(NamedTuple):
    """One kind of program file."""

    runtime: str  # which runs it, by its name
    packages: str  # of pip, which the runtime needs
    file: str
    needs: tuple[str, ...]  # modules that write it
    dtypes: tuple[str, ...]
    save: Callable[[ModelProgram, Path, str], None]  # to this file, in this dtype; ValueError if the exporter cannot


def _save_torch(program: ModelProgram, path: Path, dtype: str) -> None:
    traced = trace(program)
    content = io.BytesIO()  # a file that cannot be written would end the process: PyTorch's writer raises in its destructor
    with exporting_by("PyTorch"):
        torch.export.save(traced, content)
    path.write_bytes(content.getbuffer())


def _save_openvino(program: ModelProgram, path: Path, dtype: str) -> None:
    """Writes the graph and, beside it in a .bin file, the weights, from an ONNX file."""
    import openvino

    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        save_onnx(program, Path(scratch, "model.onnx"), "float32")
        openvino.save_model(openvino.convert_model(Path(scratch, "model.onnx")), path, compress_to_fp16=dtype == "float16")


DTYPES = ("float32", "float16", "int8")
ONNX = ("onnx", "onnxscript", "onnxruntime")
FORMATS = {
    "onnx": Format("ONNX Runtime", "onnxruntime", "model.onnx", ONNX, DTYPES, save_onnx),
    "openvino": Format("OpenVINO", "openvino", "model.xml", (*ONNX, "openvino"), DTYPES[:2], _save_openvino),
    "executorch": Format("ExecuTorch", "executorch torch", "model.pte", ("executorch",), DTYPES[:1], save_executorch),
    "torch": Format("torch.export", "torch", "model.pt2", (), DTYPES[:2], _save_torch),
}


def check_format(format: str, dtype: str) -> None:
    """Raises ValueError if there is no such format or it has no such dtype, ImportError if its packages are missing."""
    if format not in FORMATS:
        raise ValueError(f"There is no export format {format!r}; choose one of {', '.join(FORMATS)}.")
    needs, dtypes = FORMATS[format].needs, FORMATS[format].dtypes
    if dtype not in dtypes:
        raise ValueError(f"The format {format} is written in {', '.join(dtypes)}, not in {dtype!r}.")
    others = [module for module in needs if module not in ONNX]
    packages = " ".join((["'tost-hf[export]'"] if len(others) < len(needs) else []) + others)
    for module in needs:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ImportError(f"Exporting to {format} needs {module}, which is missing: pip install {packages}.") from error


__all__ = ["DTYPES", "FORMATS", "check_format"]
