# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Hub integration: model cards, checks, publishing in one commit, verification."""

from .cards import build_card, write_card
from .publishing import Publication, publish, publish_space
from .verification import verify


__all__ = ["Publication", "build_card", "publish", "publish_space", "verify", "write_card"]
