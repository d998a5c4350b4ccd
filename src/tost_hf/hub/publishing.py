# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Publishing a model folder on the Hub in one commit: all of it becomes visible at once, or nothing does."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from ..files import RECORDS, is_weights_name
from ..model.base_tost import AUTO_MAPS, CODE_FILES, code_files
from ..version import __version__
from .checks import check_card, check_code_references, check_space, check_texts, check_weights, load_config
from .connection import TIME_LIMIT, hub_calls
from .loading import TOKENIZER_FILES, check_loading
from .records import CARD, IMAGE_PROCESSOR_FILES


MODEL_FILES = (  # patterns of what is sent, besides the weights, the pictures that the card shows and ToST's source files
    *(CONFIG_NAME, GENERATION_CONFIG_NAME, CARD, "LICENSE*"),
    *(*TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("additional_chat_templates/*.jinja", *IMAGE_PROCESSOR_FILES, *RECORDS),
)
SPACE_FILES = (CARD, "space.json", "index.html", "tost.js", "vendor/*", "model/*")  # as `tost-hf space` writes them
PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp")
CODE_NAMES = {name for names in CODE_FILES.values() for name in names}
COMMIT_ATTEMPTS = 10  # when others commit to the same repository first


@dataclass(frozen=True)
class Publication:
    """What `publish` did, or with `dry_run` would do.

    Attributes:
        repo_id: "owner/name".
        commit_hash: of the published version; None after a dry run.
        url: of the commit, or of the pull request; None where nothing was sent.
        uploaded: names of the version's files, sorted; those that the repository had already were not sent again.
        deleted: weights and code of an earlier version that this one does not have.
        left_out: files and folders (with a slash) that are not of the kinds that are published.
        num_parameters: of the model; None of a Space.

    Example:
        >>> publish("./my-tost", "me/my-tost", dry_run=True).uploaded
    """

    repo_id: str
    commit_hash: str | None
    url: str | None
    uploaded: tuple[str, ...]
    deleted: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    num_parameters: int | None = None


def publish(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    tag: str | None = None,
    create_pr: bool = False,
    dry_run: bool = False,
    with_code: bool = True,
    token: str | None = None,
    commit_message: str | None = None,
) -> Publication:
    """Publishes a folder that `save_pretrained`, a training script or `tost-hf` wrote.

    Sent are, of the kinds that belong to a model: configuration, weights, tokenizer or image processor, chat templates, model
    card with its pictures, licence and evaluation records, and this package's source files. The folder is checked first and
    never changed. One commit brings it all; an interrupted or rejected publication leaves the repository at its old commit.
    Files of the repository that this folder lacks stay, but for weights and ToST's own code of an earlier version.

    Args:
        folder: config, safetensors weights and a model card with a licence; tokenizer, image processor and so on are sent too.
        repo_id: "owner/name", or "name" in the token's own namespace. Created if it is not there.
        private: whether a repository that is created here is private.
        revision: the branch to commit to, created from main if it is not there.
        tag: a tag to put on the commit.
        create_pr: propose the commit as a pull request.
        dry_run: check, and say what would be sent; no request is made.
        with_code: whether the repository holds the remote code, for `trust_remote_code=True` without this package.
        token: of a user with write access; the logged-in one by default.
        commit_message: "Publish with tost_hf VERSION" by default.

    Raises:
        ValueError: the folder is not a complete model, holds a token of the Hub or leads to foreign code.
        OSError: a file is missing, or the Hub rejected the commit or could not be reached. Nothing became visible.

    Example:
        >>> publish("./my-tost", "me/my-tost", private=True, tag="v1").url
    """
    folder = Path(folder)
    _check_target(repo_id, revision, tag, create_pr)
    config = load_config(folder)
    files = model_files(folder)
    check_texts(files)
    check_code_references(files)
    num_parameters = check_weights(folder, config)
    check_card(folder)
    check_loading(folder, config)

    content = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    content.pop("auto_map", None)
    if with_code:
        content["auto_map"] = AUTO_MAPS[config.model_type]
        files |= code_files(config.model_type)
    config_json = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    done = _send(
        files | {CONFIG_NAME: config_json}, repo_id, private, revision, tag, create_pr, dry_run, token, commit_message
    )
    return replace(done, left_out=_left_out(folder, files), num_parameters=num_parameters)


def publish_space(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    tag: str | None = None,
    create_pr: bool = False,
    dry_run: bool = False,
    token: str | None = None,
    commit_message: str | None = None,
) -> Publication:
    """Publishes a folder that `tost-hf space` wrote as a static Space, in one commit; arguments are those of `publish`.

    Raises:
        ValueError: the folder is not such a page, or holds a token of the Hub.
        OSError: the Hub rejected the commit, or could not be reached. Nothing became visible.

    Example:
        >>> publish_space("./my-page", "me/my-page").url
    """
    folder = Path(folder)
    _check_target(repo_id, revision, tag, create_pr)
    check_space(folder)
    files = _matching_files(folder, SPACE_FILES)
    check_texts(files)
    done = _send(files, repo_id, private, revision, tag, create_pr, dry_run, token, commit_message, repo_type="space")
    return replace(done, left_out=_left_out(folder, files))


def _check_target(repo_id: str, revision: str | None, tag: str | None, create_pr: bool) -> None:
    """Raises ValueError for an invalid repository name, and for a pull request with a branch or a tag."""
    if create_pr and (tag or revision):
        raise ValueError("A pull request (create_pr) is opened against main and not tagged; leave out revision and tag.")
    validate_repo_id(repo_id)


def model_files(folder: Path) -> dict[str, Path]:
    """The files of a model folder that are published, name -> path, without ToST's source files."""
    files = _matching_files(folder, MODEL_FILES)
    files |= {path.name: path for path in sorted(folder.iterdir()) if is_weights_name(path.name)}
    card = files[CARD].read_text(encoding="utf-8") if CARD in files else ""
    pictures = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.suffix.lower() in PICTURES}
    return files | {name: path for name, path in pictures.items() if f"({name})" in card or f'"{name}"' in card}


def _matching_files(folder: Path, patterns: tuple[str, ...]) -> dict[str, Path]:
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    # the slashes are compared, too: "LICENSE*" is for the folder itself
    return {
        name: path
        for name, path in paths.items()
        if any(fnmatch(name, pattern) and name.count("/") <= pattern.count("/") for pattern in patterns)
    }


def _left_out(folder: Path, files: Mapping[str, object]) -> tuple[str, ...]:
    """The files of a folder that are not among `files`, and the folders of which none is."""
    sent = {name.partition("/")[0] for name in files}
    return tuple(sorted(path.name + "/" * path.is_dir() for path in folder.iterdir() if path.name not in sent))


@hub_calls()
def _send(
    files: Mapping[str, Path | bytes],
    repo_id: str,
    private: bool | None,
    revision: str | None,
    tag: str | None,
    create_pr: bool,
    dry_run: bool,
    token: str | None,
    commit_message: str | None,
    repo_type: str = "model",
) -> Publication:
    """Makes the repository unless it is there, and commits and tags the files; arguments are those of `publish`."""
    if dry_run:
        return Publication(repo_id, None, None, tuple(sorted(files)))
    api = HfApi(token=token, library_name="tost_hf", library_version=__version__)
    space_sdk = "static" if repo_type == "space" else None
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True, repo_type=repo_type, space_sdk=space_sdk).repo_id
    if tag is not None:
        _check_tag(api, repo_id, repo_type, tag)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True, repo_type=repo_type)
    message = commit_message or f"Publish with tost_hf {__version__}"
    done = _commit(api, repo_id, repo_type, files, message, revision, create_pr)
    if tag is not None:
        try:
            api.create_tag(repo_id, tag=tag, revision=done.commit_hash, repo_type=repo_type)
        except HfHubHTTPError as error:
            visible = f"The version is visible in {repo_id} as {done.commit_hash}, but not tagged {tag!r}"
            raise OSError(f"{visible}: {error} Run it again to set the tag alone.") from error
    return done


def _check_tag(api: HfApi, repo_id: str, repo_type: str, tag: str) -> None:
    """A tag that is there already stays at its version, so nothing is sent."""
    try:
        taken = api.repo_info(repo_id, revision=tag, repo_type=repo_type)
    except RevisionNotFoundError:
        return
    raise ValueError(f"{repo_id} already has the tag {tag!r} at {taken.sha}; choose another tag, or delete it first.")


def _commit(
    api: HfApi,
    repo_id: str,
    repo_type: str,
    files: Mapping[str, Path | bytes],
    message: str,
    revision: str | None,
    create_pr: bool,
) -> Publication:
    """Brings files to a repository in one commit, by `HfApi`, which sends only what differs."""
    get_info = api.space_info if repo_type == "space" else api.model_info
    attempts = 0
    while True:
        there = get_info(repo_id, revision=revision, timeout=TIME_LIMIT)
        names = [sibling.rfilename for sibling in there.siblings or []]
        deleted = [name for name in names if name not in files and (name in CODE_NAMES or is_weights_name(name))]
        additions = [CommitOperationAdd(name, content) for name, content in sorted(files.items())]
        try:
            done = api.create_commit(
                repo_id,
                [*additions, *map(CommitOperationDelete, deleted)],
                commit_message=message,
                revision=revision,
                create_pr=create_pr,
                parent_commit=there.sha,
                repo_type=repo_type,
            )
        except HfHubHTTPError as error:
            attempts += 1
            if error.response.status_code != 412 or attempts == COMMIT_ATTEMPTS:
                raise
        else:
            url = done.pr_url or (done.commit_url if done.oid != there.sha else None)
            return Publication(repo_id, done.oid, url, tuple(sorted(files)), tuple(sorted(deleted)))
