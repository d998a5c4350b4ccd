# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Requests to the Hub: each has a time limit, and network failures raise OSError with a message."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from huggingface_hub import HfApi, ModelInfo, SpaceInfo, get_session, snapshot_download
from huggingface_hub.errors import HTTPError


TIME_LIMIT = 60.0  # seconds without an answer, or without progress, of one request

_lock = Lock()  # all threads share one session
_replaced_timeouts: list = []  # of the session, one for each call within `hub_calls`; the first is the session's default


@contextmanager
def hub_calls() -> Iterator[None]:
    """Within it, requests of huggingface_hub have a time limit.

    Raises:
        OSError: the Hub could not be reached, timed out or closed the connection.
    """
    with _lock:
        session = get_session()
        _replaced_timeouts.append(session.timeout)
        session.timeout = TIME_LIMIT
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
        with _lock:
            get_session().timeout = _replaced_timeouts.pop()  # a connection error makes huggingface_hub replace the session


def get_repo_info(api: HfApi, repo_id: str, revision: str | None = None, repo_type: str = "model") -> ModelInfo | SpaceInfo:
    """The commit of a model or Space at a revision, and the names, sizes and hashes of its files."""
    ask = api.space_info if repo_type == "space" else api.model_info
    return ask(repo_id, revision=revision, files_metadata=True, timeout=TIME_LIMIT)


def download(
    repo_id: str, revision: str | None = None, token: str | None = None, patterns: list[str] | None = None
) -> tuple[Path, ModelInfo]:
    """A model repository at a revision, or its files that match patterns: the folder in the cache, and what the Hub lists."""
    with hub_calls():
        found = HfApi(token=token).model_info(repo_id, revision=revision, files_metadata=True, timeout=TIME_LIMIT)
        return Path(snapshot_download(repo_id, revision=found.sha, token=token, allow_patterns=patterns)), found


__all__ = ["download", "get_repo_info", "hub_calls"]
