# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Context parallelism, which shards sequences (`parallelize`), and tensor parallelism, which shards heads (`tp_plan`)."""

from .context import local_tokens, parallelize


__all__ = ["local_tokens", "parallelize"]
