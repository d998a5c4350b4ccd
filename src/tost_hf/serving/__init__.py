# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Continuous batching (`generate_batch` and its manager of requests) and the HTTP server; imported when first used."""
