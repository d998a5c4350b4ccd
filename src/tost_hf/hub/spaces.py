# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Spaces of the Hub with the page of a model (`app.py`): writes their folders and uploads them."""

import os
import shutil
from importlib.metadata import requires
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi, SpaceCardData
from packaging.requirements import Requirement

from ..extras import require
from ..files import check_folder, staged_folder
from ..version import __version__
from .loading import display_name, hub_errors, load_config, load_with_processor, resolve_model_folder
from .publishing import check_repo_id, check_texts, create_if_missing
from .results import CARD, load_metadata


MODEL = "model"  # the folder of a model that is part of the Space
APP, REQUIREMENTS = "app.py", "requirements.txt"
EXTRAS = ("app", "cpu")
TEMPLATE = '''"""The page of a ToST model, written by `tost-hf space`."""

from tost_hf.app import launch_app


launch_app({arguments})
'''


def write_space(
    model: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    title: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a Gradio Space with the page of a model: `pip install -r requirements.txt && python app.py` runs it.

    It contains the package's files, as nothing of it is on a package index, and a model from a folder. A repository of the
    Hub is loaded by the Space itself.

    ```python
    write_space("./tost-demo", "./tost-space", title="My ToST")
    ```

    Args:
        model: a folder or a repository of the Hub, as in `make_app`.
        output_dir: the folder to write to.
        title: title of the page; by default the model's name.
        revision: branch, tag or commit of the repository.
        overwrite: write to a folder that is not empty. Files of the same names are replaced, other files stay.

    Returns:
        The folder.

    Raises:
        ValueError: the model, its tokenizer or its image processor cannot be loaded, or a tokenizer is missing.
        OSError: there is no such model, or the folder cannot be written.
        ImportError: Gradio is missing.
    """
    gradio, target, is_folder = require("gradio", "app"), Path(output_dir), os.path.isdir(model)
    check_folder(target, overwrite, [model])
    source = resolve_model_folder(model, revision, only_description=not is_folder)
    config = load_config(source)
    title, card = title or display_name(model), load_metadata(source)
    with staged_folder(target) as folder:
        arguments = f"{os.fspath(model)!r}, title={title!r}, revision={revision!r}"
        if is_folder:
            arguments = f"{MODEL!r}, title={title!r}"
            for part in load_with_processor(source, config):
                part.save_pretrained(folder / MODEL)
            if (source / CARD).is_file():  # has the page's examples
                shutil.copyfile(source / CARD, folder / MODEL / CARD)
        shutil.copytree(Path(__file__).parents[1], folder / "tost_hf", ignore=shutil.ignore_patterns("__pycache__"))
        metadata = SpaceCardData(
            title=title,
            sdk="gradio",
            sdk_version=gradio.__version__,
            app_file=APP,
            license=card.get("license"),
            models=None if is_folder else [os.fspath(model)],
            emoji="📐",
            colorFrom="blue",
            colorTo="green",
            pinned=False,
            short_description="Try a ToST model and look into it",
        )
        text = f"---\n{metadata.to_yaml()}\n---\n\n# {title}\n\nA ToST model, by `tost-hf space` of tost_hf {__version__}.\n"
        contents = {APP: TEMPLATE.format(arguments=arguments), REQUIREMENTS: _list_requirements(), CARD: text}
        for name, content in contents.items():
            (folder / name).write_text(content, encoding="utf-8")
    return target


def _list_requirements() -> str:
    """What the page needs, as this package declares it."""
    lines = []
    for line in requires("tost-hf") or ():
        requirement = Requirement(line)
        marker, requirement.marker = requirement.marker, None
        if requirement.name != "tost-hf" and (marker is None or any(marker.evaluate({"extra": extra}) for extra in EXTRAS)):
            lines.append(f"{requirement}\n")
    return "".join(lines)


@hub_errors("the Space")
def publish_space(
    folder: str | os.PathLike, repo_id: str, *, private: bool | None = None, token: str | None = None
) -> CommitInfo:
    """Uploads a folder that `tost-hf space` wrote, all of it. A Space that was created for it is deleted if that fails.

    Args:
        repo_id: "owner/name". Created if it does not exist.
        private: whether a newly created Space is private.
        token: access token of a user with write access; by default that of the logged-in user.

    Returns:
        The commit; if nothing changed, the latest one.

    Raises:
        ValueError: as `check_space`; or the Space is public and not to be.
        OSError: the Hub rejected the files or could not be reached.

    Example:
        >>> publish_space("./my-space", "me/my-space").commit_url
    """
    check_space(folder)
    check_repo_id(repo_id)
    api = HfApi(token=token, library_name="tost_hf", library_version=__version__)
    is_new = create_if_missing(api, repo_id, private, "space", space_sdk="gradio")
    try:
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=os.fspath(folder),
            repo_type="space",
            commit_message=f"Publish with tost_hf {__version__}",
            ignore_patterns=["**/__pycache__/*"],
        )
    except BaseException:
        if is_new:
            api.delete_repo(repo_id, repo_type="space")
        raise


def check_space(folder: str | os.PathLike) -> None:
    """Checks a folder before it is uploaded.

    Raises:
        ValueError: `tost-hf space` did not write the folder; it contains a token of the Hub, or a link.
    """
    source = Path(folder)
    if not all((source / name).is_file() for name in (APP, REQUIREMENTS, CARD, "tost_hf/app.py")):
        raise ValueError(f"{source} is not a page that `tost-hf space` wrote; write one with `tost-hf space MODEL {source}`.")
    for path in source.rglob("*"):
        if path.is_symlink():
            raise ValueError(f"{path.relative_to(source)} is a link, perhaps out of the folder: replace it by a file.")
    check_texts(source)
