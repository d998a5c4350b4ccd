# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Models for other runtimes: a folder with the program, what it takes and gives, and a script that runs it."""

from .writing import DTYPES, FORMATS, export_model


__all__ = ["DTYPES", "FORMATS", "export_model"]
