# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Packages that only looking inside needs."""

import importlib


def require_extra(module: str):
    """Imports a module; the ImportError of one that is missing says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"Looking inside a model needs {module.split('.')[0]}, which is missing: pip install 'tost-hf[vision]'."
        ) from error


__all__ = ["require_extra"]
