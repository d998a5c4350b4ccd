# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Hub integration: model cards, publishing in one commit, verification."""

from .cards import build_card
from .publishing import prepare_upload, publish, upload
from .spaces import publish_space, write_space
from .verification import verify


__all__ = ["build_card", "prepare_upload", "publish", "publish_space", "upload", "verify", "write_space"]
