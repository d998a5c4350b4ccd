# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The package's extras: what to run if one is not installed."""

import importlib
import shlex
from pathlib import Path
from types import ModuleType


def install_command(extra: str) -> str:
    """The `pip install` of an extra, in a clone of the repository from the clone."""
    clone = Path(__file__).resolve().parents[2]
    if not (clone / "pyproject.toml").is_file():
        return f'pip install "tost-hf[{extra}]"'
    return f'pip install -e ".[{extra}]"' if clone == Path.cwd() else f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"


def require(module: str, extra: str) -> ModuleType:
    """Imports a module of an extra.

    Raises:
        ImportError: it is missing; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"This needs {module}, which is missing: {install_command(extra)}") from error
