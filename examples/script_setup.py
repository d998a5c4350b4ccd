# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Imported first by every script: what a missing package is answered with, how characters are printed that the encoding of
stdout lacks, and what a library logs needlessly on import."""

import logging
import sys
from types import TracebackType


EXTRAS = {"PIL": "vision", "kornia": "vision", "sklearn": "vision"}  # others are in train


def show_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Says how to install a missing package; prints the traceback of any other exception."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        extra = EXTRAS.get(package, "train")
        print(f'{sys.argv[0]}: error: {package} is not installed: pip install -e ".[{extra}]" in the clone', file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = show_exception
if sys.stdout.errors == "strict":  # its encoding may lack characters of texts and labels
    sys.stdout.reconfigure(errors="replace")
# PEFT imports bitsandbytes, if it is installed (extra dev), which warns of a missing kernel for 4-bit weights on a CPU
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
