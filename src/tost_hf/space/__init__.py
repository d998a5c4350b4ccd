# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A page that runs a model in the browser (`tost-hf space`): its files, ONNX program and JavaScript libraries."""

from .writing import write_space


__all__ = ["write_space"]
