# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""`tost-hf serve`: transformers' own OpenAI-compatible server, with ToST in it and guards around it.

The guards replace three names that `transformers serve` imports: the holder of the models (models.py), the state of
generation (generation.py) and the builder of the application (requests.py). Nothing else of it is touched.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from transformers.utils.import_utils import is_serve_available


def serve(arguments: Sequence[str]) -> None:
    """Runs `transformers serve` with these arguments, guarded; ends with SystemExit when the server stops.

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
    with guards_in_place():
        try:
            app(list(arguments), prog_name="tost-hf serve")
        except KeyError as error:
            raise ValueError(f"An option has the unknown value {error}; see `tost-hf serve --help`.") from error


@contextmanager
def guards_in_place() -> Iterator[None]:
    """Meanwhile `transformers serve` is built of the guarded parts.

    Raises:
        ImportError: transformers' server has no longer the parts to guard.
    """
    from .generation import BoundedGenerationState
    from .models import ServedModels
    from .requests import build_guarded_server

    guards = {
        ("model_manager", "ModelManager"): ServedModels,
        ("utils", "GenerationState"): BoundedGenerationState,
        ("server", "build_server"): build_guarded_server,
    }
    replaced = []
    try:
        for (module_name, name), guard in guards.items():
            module = import_module(f"transformers.cli.serving.{module_name}")
            if not hasattr(module, name):
                raise ImportError(f"The server of this transformers has no {module_name}.{name}, which tost-hf must guard.")
            replaced.append((module, name, getattr(module, name)))
            setattr(module, name, guard)
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)
