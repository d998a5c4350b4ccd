# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Requests to the Hub: each has a time limit, and network failures raise OSError with a message."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, get_session, snapshot_download
from huggingface_hub.errors import HTTPError


TIME_LIMIT = 60.0  # seconds without an answer, or without progress, of one request


@contextmanager
def hub_calls() -> Iterator[None]:
    """Within it, requests of huggingface_hub have a time limit.

    Raises:
        OSError: the Hub could not be reached, timed out or closed the connection.
    """
    before = get_session().timeout
    get_session().timeout = TIME_LIMIT
    try:
        yield
    except (HTTPError, RuntimeError) as error:  # an upload's HTTP error comes as the cause of a RuntimeError
        if isinstance(error, OSError) or not any(isinstance(e, HTTPError) for e in (error, error.__cause__)):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise OSError(
            f"The Hub could not be reached, timed out or closed the connection ({reason}); run the command again."
        ) from error
    finally:
        get_session().timeout = before  # a connection error makes huggingface_hub replace the session


def download(
    repo_id: str, revision: str | None = None, token: str | None = None, patterns: list[str] | None = None
) -> tuple[Path, ModelInfo]:
    """A model repository at a revision, or its files that match patterns: the folder in the cache, and what the Hub lists."""
    with hub_calls():
        found = HfApi(token=token).model_info(repo_id, revision=revision, files_metadata=True, timeout=TIME_LIMIT)
        return Path(snapshot_download(repo_id, revision=found.sha, token=token, allow_patterns=patterns)), found


__all__ = ["TIME_LIMIT", "download", "hub_calls"]
