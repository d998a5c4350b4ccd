# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Models over several processes: texts cut along their tokens (`parallelize`), layers cut by their heads (`tp_plan`)."""

from .context import local_tokens, parallelize


__all__ = ["local_tokens", "parallelize"]
