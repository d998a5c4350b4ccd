# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Imported before transformers, keeps quiet what a library logs on import and a user need not know."""

import logging


# PEFT imports bitsandbytes, if it is installed (extra dev), which warns of a missing kernel for 4-bit weights on a CPU
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
