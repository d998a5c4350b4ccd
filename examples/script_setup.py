# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Imported first by every script: what a missing package is answered with, how characters are printed that the encoding of
stdout lacks, what a library logs needlessly on import, and how memory is allocated on CPUs."""

import ctypes
import logging
import os
import platform
import sys
from types import TracebackType


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
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


def keep_freed_memory() -> None:
    """Lets glibc keep what a step frees, as the next step needs it again: the system would clear each page before.

    On CPUs only, unless the environment variable TOST_KEEP_FREED_MEMORY is 0.
    """
    import torch  # here, so that `show_exception` answers if it is missing

    is_wanted = os.environ.get("TOST_KEEP_FREED_MEMORY") != "0" and not torch.accelerator.is_available()
    if is_wanted and platform.libc_ver()[0] == "glibc":
        for parameter, value in ((M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1)):  # bytes
            ctypes.CDLL(None).mallopt(parameter, value)


keep_freed_memory()
