# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Publishing a model folder on the Hub in one commit: all of it becomes visible at once, or nothing does."""

import hashlib
import json
import os
import random
import tempfile
import time
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id

from ..files import is_weights_name, sha256
from ..model.base_tost import AUTO_MAPS, code_files
from ..version import __version__
from .checks import check_card, check_space, check_weights, forbidden_file, load_config
from .code_references import CODE_NAMES, foreign_code
from .connection import get_repo_info, hub_calls
from .loading import check_loading
from .secrets import check_detect_secrets


STAGED = "_push-"  # how folders begin that hold a checkpoint while the Trainer sends it
# by-products of training and of tools
EXCLUDED_FOLDERS = ("checkpoint-*", "last-checkpoint", f"{STAGED}*", "runs", "__pycache__", ".*")
EXCLUDED_FILES = ("training_args.bin", ".gitattributes", ".gitignore", ".DS_Store")
MAX_COMMIT_RETRIES = 30  # when others commit to the same repository first


@dataclass(frozen=True)
class Publication:
    """What `publish` did, or with `dry_run` would do.

    Attributes:
        repo_id: "owner/name".
        commit_hash: of the published version; None after a dry run.
        url: of the commit, or of the pull request; None where nothing was sent.
        uploaded: names of the files that were sent, sorted.
        deleted: weights and code of an earlier version that this one does not have.
        unchanged: names of the files that the repository had already.
        num_parameters: of the model; None of a Space, and of a push during training.

    Example:
        >>> publish("./my-tost", "me/my-tost", dry_run=True).uploaded
    """

    repo_id: str
    commit_hash: str | None
    url: str | None
    uploaded: tuple[str, ...]
    deleted: tuple[str, ...]
    unchanged: tuple[str, ...]
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

    The folder is checked first and never changed. Then one commit brings all that differs from the repository; an interrupted
    or rejected publication leaves the repository at its old commit, and running it again sends only what is missing. When
    somebody else commits in the meantime, the comparison is made again, so that the head is always one whole version.

    Training by-products (`training_args.bin`, `checkpoint-*`, `runs`, hidden folders) are left out. Files of the repository
    that this folder lacks stay, but for weights and ToST's own code of an earlier version.

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
        ValueError: the folder holds something that must not be published, or is not a complete model; the message says what.
        ImportError: detect-secrets (the extra `publish`) is not installed.
        OSError: a file is missing, or the Hub rejected the commit or could not be reached. Nothing became visible.

    Example:
        >>> publish("./my-tost", "me/my-tost", private=True, tag="v1").url
    """
    folder = Path(folder)
    check_detect_secrets()
    _check_target(repo_id, revision, tag, create_pr)
    config = load_config(folder)
    if foreign := foreign_code(model_files(folder)):  # before a model is built, which may load what the configuration names
        raise ValueError(
            f"{'; '.join(foreign)}. Whoever loads the model with trust_remote_code=True would run it: remove what names it, "
            "and move Python files out of the folder."
        )
    num_parameters = check_weights(folder, config)
    check_card(folder)
    with tempfile.TemporaryDirectory() as scratch:
        files = _files(folder, Path(scratch), config.model_type, with_code)
        check_loading(folder, config)
        done = _send(files, repo_id, "model", private, revision, tag, create_pr, dry_run, token, commit_message)
    return replace(done, num_parameters=num_parameters)


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
        ValueError: the folder is not such a page, or holds something that must not be published.
        OSError: the Hub rejected the commit, or could not be reached. Nothing became visible.

    Example:
        >>> publish_space("./my-page", "me/my-page").url
    """
    folder = Path(folder)
    check_detect_secrets()
    _check_target(repo_id, revision, tag, create_pr)
    check_space(folder)
    files = model_files(folder)
    _check_files(folder, files)
    return _send(files, repo_id, "space", private, revision, tag, create_pr, dry_run, token, commit_message)


def _check_target(repo_id: str, revision: str | None, tag: str | None, create_pr: bool) -> None:
    """Raises ValueError for an invalid repository name, and for a pull request with a branch or a tag."""
    if create_pr and (tag or revision):
        raise ValueError("A pull request (create_pr) is opened against main and not tagged; leave out revision and tag.")
    validate_repo_id(repo_id)


def _files(folder: Path, scratch: Path, model_type: str, with_code: bool) -> dict[str, Path]:
    """What the repository will hold: name -> file. Raises ValueError for what must not be published."""
    files = {name: path for name, path in model_files(folder).items() if name not in CODE_NAMES}
    _check_files(folder, files)
    content = json.loads((folder / "config.json").read_text())
    content.pop("auto_map", None)
    if with_code:
        content["auto_map"] = AUTO_MAPS[model_type]
        files |= code_files(model_type)
    files["config.json"] = scratch / "config.json"
    files["config.json"].write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return files


def _check_files(folder: Path, files: dict[str, Path]) -> None:
    if reasons := forbidden_content(folder, files):
        raise ValueError(f"{folder} is not published: {'; '.join(reasons)}. Move it out of the folder.")


def forbidden_content(folder: Path, files: dict[str, Path]) -> list[str]:
    """Why files of a folder (name -> path), and links in it, must not be published."""
    reasons = [reason for name, path in files.items() if (reason := forbidden_file(name, path))]
    links = [name for name, path in _published_paths(folder).items() if path.is_symlink() and not _is_file_of(folder, path)]
    return [*reasons, *(f"{name} is a link to something that is not a file of the folder" for name in links)]


def model_files(folder: Path) -> dict[str, Path]:
    """The files of a model folder, name -> path, without by-products of training and tools, and links that lead out."""
    return {name: path for name, path in _published_paths(folder).items() if _is_file_of(folder, path)}


def _is_file_of(folder: Path, path: Path) -> bool:
    """Whether a path in a folder is a file, or a link to one of the folder or of the Hub's cache, which links to its blobs."""
    target, folder = Path(os.path.realpath(path)), folder.resolve()  # Path.resolve raises for a link to itself
    is_cache = folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--")
    is_blob = is_cache and target.parent == folder.parents[1] / "blobs"
    return path.is_file() and (target.is_relative_to(folder) or is_blob)


def _published_paths(folder: Path) -> dict[str, Path]:
    """All in a folder but by-products: name -> path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        by_product = name.name in EXCLUDED_FILES or any(
            fnmatch(part, pattern)
            for part in (name.parts if path.is_dir() else name.parts[:-1])
            for pattern in EXCLUDED_FOLDERS
        )
        if not by_product:
            found[name.as_posix()] = path
    return found


@hub_calls()
def _send(
    files: dict[str, Path],
    repo_id: str,
    repo_type: str,
    private: bool | None,
    revision: str | None,
    tag: str | None,
    create_pr: bool,
    dry_run: bool,
    token: str | None,
    commit_message: str | None,
) -> Publication:
    """Creates the repository unless it is there, and commits and tags the files; arguments are those of `publish`."""
    if dry_run:
        return Publication(repo_id, None, None, tuple(sorted(files)), (), ())
    api = HfApi(token=token, library_name="tost_hf", library_version=__version__)
    space_sdk = "static" if repo_type == "space" else None
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True, repo_type=repo_type, space_sdk=space_sdk).repo_id
    if tag is not None:
        _check_tag(api, repo_id, repo_type, tag, files)
    message = commit_message or f"Publish with tost_hf {__version__}"
    done = commit_files(api, repo_id, files, message, revision=revision, create_pr=create_pr, repo_type=repo_type)
    if tag is not None:
        _set_tag(api, repo_id, repo_type, tag, done.commit_hash)
    return done


@hub_calls()
def commit_files(
    api: HfApi,
    repo_id: str,
    files: dict[str, Path],
    message: str,
    *,
    revision: str | None = None,
    create_pr: bool = False,
    repo_type: str = "model",
) -> Publication:
    """Brings files (name in the repository -> path) to a repository, in one commit.

    Only what differs is sent. When another commit comes in between, the comparison is made again.
    """
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True, repo_type=repo_type)
    attempt = 0
    while True:
        there = get_repo_info(api, repo_id, revision, repo_type)
        uploaded, deleted = _difference(files, there.siblings or [])
        unchanged = tuple(sorted(set(files) - set(uploaded)))
        if not uploaded and not deleted:
            return Publication(repo_id, there.sha, None, (), (), unchanged)
        additions = [CommitOperationAdd(name, str(files[name])) for name in uploaded]
        deletions = [CommitOperationDelete(name) for name in deleted]
        try:
            done = api.create_commit(
                repo_id,
                [*additions, *deletions],
                commit_message=message,
                revision=revision,
                create_pr=create_pr,
                parent_commit=there.sha,
                repo_type=repo_type,
            )
            return Publication(repo_id, done.oid, done.pr_url or done.commit_url, uploaded, deleted, unchanged)
        except HfHubHTTPError as error:
            if error.response is None or error.response.status_code != 412 or attempt == MAX_COMMIT_RETRIES:
                raise
            attempt += 1
            time.sleep(random.uniform(0, 0.2 * attempt))


def _check_tag(api: HfApi, repo_id: str, repo_type: str, tag: str, files: dict[str, Path]) -> None:
    """A tag that is there already must not silently stay at another version, so nothing is sent."""
    try:
        taken = get_repo_info(api, repo_id, tag, repo_type)
    except RevisionNotFoundError:
        return
    if any(_difference(files, taken.siblings or [])):  # else it is this very version, tagged by a run whose answer was lost
        raise ValueError(f"{repo_id} already has {tag!r} at {taken.sha}; choose another tag, or delete it first.")


def _set_tag(api: HfApi, repo_id: str, repo_type: str, tag: str, commit: str | None) -> None:
    """Puts the tag on the commit, and reads it back: somebody else may have set it in the meantime."""
    visible = f"The version is visible in {repo_id} as {commit}, but not tagged {tag!r}"
    try:
        api.create_tag(repo_id, tag=tag, revision=commit, exist_ok=True, repo_type=repo_type)
        tagged = get_repo_info(api, repo_id, tag, repo_type).sha
    except (HTTPError, OSError) as error:
        raise OSError(f"{visible}: {error} Run it again to set the tag alone.") from error
    if tagged != commit:
        raise OSError(f"{visible}: somebody else has just set this tag on {tagged}. Choose another tag, and run it again.")


def _difference(files: dict[str, Path], siblings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(names to upload, names to delete) that turn the repository's files into these."""
    there = {sibling.rfilename: sibling for sibling in siblings}
    uploaded = tuple(name for name, path in sorted(files.items()) if name not in there or not same_content(there[name], path))
    replaced = (name for name in there if name in CODE_NAMES or is_weights_name(name))
    return uploaded, tuple(sorted(name for name in replaced if name not in files))


def same_content(sibling, path: Path) -> bool:
    """Whether a file has the content that the Hub's listing (with `files_metadata`) names by its hash."""
    if sibling.size is not None and sibling.size != path.stat().st_size:
        return False
    if sibling.lfs is not None:
        return sha256(path) == sibling.lfs.sha256
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == sibling.blob_id  # git's own naming
