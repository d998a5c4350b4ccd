# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""`tost-hf serve`: transformers' own OpenAI-compatible server with ToST models, continuous batching and validated requests.

Names that `transformers serve` imports are replaced while it runs: the manager of models, the state of generation and what
counts tokens (server_generation.py), and the builder of the application (application.py).
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import transformers
from huggingface_hub.errors import CacheNotFound
from transformers import AutoModelForCausalLM
from transformers.cli.serving.model_manager import ModelManager
from transformers.utils.import_utils import is_serve_available

from ..cache_files import CachedPrefix, hash_weights, load_prefix
from ..model.modeling_tost import ToSTForCausalLM
from .scheduler import PREFIX_CACHE_BYTES


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
    from .server_generation import ServedGeneration, chat_usage, response_usage

    cache_bytes = PREFIX_CACHE_BYTES if prefix_cache_bytes is None else prefix_cache_bytes
    prefixes: dict[str, CachedPrefix] = {}  # filled as the model is loaded
    replacements = {
        ("model_manager", "ModelManager"): partial(ServedModels, prefix_files=prefix_files or {}, prefixes=prefixes),
        ("model_manager", "transformers"): _ModelClasses(),
        ("utils", "GenerationState"): partial(ServedGeneration, prefixes=prefixes, prefix_cache_bytes=cache_bytes),
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


class ServedModels(ModelManager):
    """The models of the server."""

    def __init__(
        self,
        *,
        force_model: str | None = None,
        trust_remote_code: bool = False,
        prefix_files: Mapping[str, str] | None = None,
        prefixes: dict[str, CachedPrefix] | None = None,
        **options,
    ):
        """Loads `force_model`, if there is one, and its `prefix_files` into `prefixes`.

        Raises:
            ValueError, OSError: it or a file cannot be loaded; or code is trusted without saying whose.
        """
        if force_model is None and prefix_files:
            raise ValueError("--prefix needs a MODEL: a file of save_cache(..., model=model, input_ids=ids) belongs to one.")
        if force_model is None and trust_remote_code:
            raise ValueError(
                "--trust-remote-code needs a MODEL: without one, any client could have any repository's code run here."
            )
        if force_model is not None and _is_path(force_model) and not os.path.isdir(force_model):
            raise FileNotFoundError(f"There is no folder {force_model!r}.")
        super().__init__(force_model=force_model, trust_remote_code=trust_remote_code, **options)
        for loaded in self.loaded_models.values():
            if prefix_files and not isinstance(loaded.model, ToSTForCausalLM):
                raise ValueError(f"--prefix is for ToST models, not {type(loaded.model).__name__}.")
            if prefix_files and prefixes is not None:
                weights = hash_weights(loaded.model)
                prefixes |= {name: load_prefix(file, loaded.model, weights) for name, file in prefix_files.items()}
            if getattr(loaded.processor, "chat_template", None) is None:
                print(
                    f"tost-hf: {force_model} has no chat template, so /v1/completions works and chat does not; put a "
                    "chat_template.jinja beside its tokenizer to chat.",
                    file=sys.stderr,
                )

    def load_model_and_processor(self, model_id_and_revision, *args, **options):
        """As transformers' own.

        Raises:
            ValueError, OSError, ImportError: the model cannot be loaded.
        """
        try:
            return super().load_model_and_processor(model_id_and_revision, *args, **options)
        except (ValueError, OSError, ImportError):
            raise
        except Exception as error:
            raise ValueError(f"{model_id_and_revision} cannot be loaded: {type(error).__name__}: {error}") from error

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict]:  # type: ignore[override]  # theirs is static
        """The model that the server holds; else those of the Hub's cache."""
        if self.force_model is not None:
            return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": ""}]
        try:
            return super().get_gen_models(cache_dir)
        except CacheNotFound:
            return []


class _ModelClasses:
    """`transformers` where its server looks for a model's class: of one that is not its own it finds the auto class."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(transformers, name, None)
        return found if getattr(found, "__module__", "").startswith("transformers.") else AutoModelForCausalLM


def _is_path(model: str) -> bool:
    """Whether this can only be a folder: repositories are called NAME or OWNER/NAME."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or (os.sep != "/" and os.sep in model)
