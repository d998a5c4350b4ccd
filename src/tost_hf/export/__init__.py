# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Export to ONNX: a folder with the program, a description of its inputs and outputs, and a script that runs it."""

from .writing import export_model


__all__ = ["export_model"]
