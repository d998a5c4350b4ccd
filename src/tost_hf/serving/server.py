# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""`tost-hf serve`: transformers' own OpenAI-compatible server with ToST models, continuous batching and validated requests.

Names that `transformers serve` imports are replaced while it runs: the manager of models (server_models.py), the state of
generation and what counts tokens (server_generation.py), and the builder of the application (application.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from transformers.utils.import_utils import is_serve_available

from ..cache_files import CachedPrefix


def serve(
    arguments: Sequence[str], prefix_files: Mapping[str, str] | None = None, prefix_cache_bytes: int | None = None
) -> None:
    """Runs `transformers serve` with these arguments; ends with SystemExit when the server stops.

    `prefix_files` are files of `load_prefix` by name; `prefix_cache_bytes` is the size of each model's prefix cache.

    A repository's code runs only with `--trust-remote-code`, which needs a MODEL. With a MODEL the server answers for that
    one alone. Without, a request may name any folder or repository, so let only clients in that may read them.

    Raises:
        ValueError, OSError: an option is wrong, or the model cannot be loaded.
        ImportError: the server's packages are not installed, or this transformers has another server.
    """
    if not is_serve_available():
        raise ImportError("The server needs more packages: pip install 'tost-hf[serve]'.")
    import typer
    from transformers.cli.serve import Serve

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(Serve)
    with patch_server(prefix_files, prefix_cache_bytes):
        try:
            app(list(arguments), prog_name="tost-hf serve")
        except KeyError as error:
            raise ValueError(f"An option has the unknown value {error}; see `tost-hf serve --help`.") from error


@contextmanager
def patch_server(prefix_files: Mapping[str, str] | None = None, prefix_cache_bytes: int | None = None) -> Iterator[None]:
    """Within the context, `transformers serve` is built of this package's parts.

    Raises:
        ImportError: transformers' server no longer has the parts to replace.
    """
    from .application import build_validated_server
    from .server_generation import BoundedGenerationState, chat_usage, response_usage
    from .server_models import ServedModels

    bytes_option: dict[str, Any] = {} if prefix_cache_bytes is None else {"prefix_cache_bytes": prefix_cache_bytes}
    prefixes: dict[str, CachedPrefix] = {}  # filled as the model is loaded
    replacements = {
        ("model_manager", "ModelManager"): partial(ServedModels, prefix_files=prefix_files or {}, prefixes=prefixes),
        ("utils", "GenerationState"): partial(BoundedGenerationState, prefixes=prefixes, **bytes_option),
        ("server", "build_server"): build_validated_server,
        ("chat_completion", "CompletionUsage"): chat_usage,
        ("completion", "CompletionUsage"): chat_usage,
        ("response", "compute_usage"): response_usage,
    }
    originals = []
    try:
        for (module_name, name), replacement in replacements.items():
            module = import_module(f"transformers.cli.serving.{module_name}")
            if not hasattr(module, name):
                raise ImportError(f"The server of this transformers has no {module_name}.{name}, which tost-hf replaces.")
            originals.append((module, name, getattr(module, name)))
            setattr(module, name, replacement)
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
