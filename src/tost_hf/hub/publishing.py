# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Publishing a model folder on the Hub in one commit: all of it becomes visible at once, or nothing does."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.utils import validate_repo_id
from transformers.utils import CONFIG_NAME

from ..files import is_weights_name
from ..model.base_tost import AUTO_MAPS, code_files
from ..version import __version__
from .checks import check_card, load_config
from .contents import check_no_hub_token, model_files, space_files
from .loading import check_loading, translate_hub_errors


CODE_NAMES = {name for model_type in AUTO_MAPS for name in code_files(model_type)}


@dataclass(frozen=True)
class Publication:
    """Result of `publish`, or of its dry run.

    Attributes:
        repo_id: "owner/name".
        commit_hash: commit of the published version; None after a dry run.
        url: URL of the commit or pull request; None if nothing was uploaded.
        uploaded: names of the version's files, sorted; files that the repository already had are not uploaded again.
        deleted: weights and code of an earlier version that this version does not have.
        left_out: files and folders (with a slash) of the model folder that are not published.
        num_parameters: number of parameters of the model; None for a Space.

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
) -> Publication:
    """Publishes a folder that `save_pretrained`, a training script or `tost-hf` wrote.

    Uploaded are the configuration, weights, tokenizer or image processor, chat templates, model card with its images, license
    and evaluation records, and this package's source files. The folder is checked first and never changed. There is a single
    commit; an interrupted or rejected publication leaves the repository at its old commit. Files of the repository that the
    folder lacks stay, except weights and ToST code of an earlier version.

    Args:
        folder: config, safetensors weights and a model card with a license; optionally tokenizer, image processor and so on.
        repo_id: "owner/name", or "name" in the namespace of the token's user. Created if it does not exist.
        private: whether a newly created repository is private.
        revision: the branch to commit to, created from main if it does not exist.
        tag: a tag for the commit.
        create_pr: open a pull request with the commit.
        dry_run: check the folder and return what would be uploaded, without any request.
        with_code: whether to publish the remote code, for `trust_remote_code=True` without this package.
        token: access token of a user with write access; by default that of the logged-in user.

    Raises:
        ValueError: the folder is not a complete model, contains a token of the Hub, a link out of the folder or old weights
            beside the model's, or refers to foreign code.
        OSError: the Hub rejected the commit or could not be reached, and nothing became visible; or it rejected the tag, which
            publishing again sets.

    Example:
        >>> publish("./my-tost", "me/my-tost", private=True, tag="v1").url
    """
    folder = Path(folder)
    config = load_config(folder)
    files = model_files(folder)
    check_no_hub_token(files)
    check_card(folder)
    model, _ = check_loading(folder, files, config)
    content = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    content.pop("auto_map", None)
    if with_code:
        content["auto_map"] = AUTO_MAPS[config.model_type]
        files |= code_files(config.model_type)
    config_json = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    return _upload(
        folder,
        files | {CONFIG_NAME: config_json},
        repo_id,
        private=private,
        revision=revision,
        tag=tag,
        create_pr=create_pr,
        dry_run=dry_run,
        token=token,
        num_parameters=model.num_parameters(),
    )


def publish_space(folder: str | os.PathLike, repo_id: str, **options: Any) -> Publication:
    """Publishes a folder that `tost-hf space` wrote as a static Space, in one commit.

    Args:
        folder: the page.
        repo_id, options: as in `publish`, without `with_code`.

    Raises:
        ValueError: the folder is not such a page, or contains a token of the Hub or a link out of the folder.
        OSError: as in `publish`.

    Example:
        >>> publish_space("./my-page", "me/my-page").url
    """
    folder = Path(folder)
    files = space_files(folder)
    check_no_hub_token(files)
    return _upload(folder, files, repo_id, "space", **options)


@translate_hub_errors()
def _upload(
    folder: Path,
    files: Mapping[str, Path | bytes],
    repo_id: str,
    repo_type: str = "model",
    *,
    private: bool | None = None,
    revision: str | None = None,
    tag: str | None = None,
    create_pr: bool = False,
    dry_run: bool = False,
    token: str | None = None,
    num_parameters: int | None = None,
) -> Publication:
    """Creates the repository if it does not exist, commits the files (`HfApi` uploads only changed ones) and sets the tag."""
    if create_pr and (tag or revision):
        raise ValueError("A pull request (create_pr) is opened against main and not tagged; leave out revision and tag.")
    validate_repo_id(repo_id)
    uploaded, top_level_names = tuple(sorted(files)), {name.partition("/")[0] for name in files}
    left_out = tuple(sorted(path.name + "/" * path.is_dir() for path in folder.iterdir() if path.name not in top_level_names))
    if dry_run:
        return Publication(repo_id, None, None, uploaded, (), left_out, num_parameters)
    api = HfApi(token=token, library_name="tost_hf", library_version=__version__)
    space_sdk = "static" if repo_type == "space" else None
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True, repo_type=repo_type, space_sdk=space_sdk).repo_id
    if tag is not None and api.revision_exists(repo_id, tag, repo_type=repo_type):
        raise ValueError(f"{repo_id} already has the tag {tag!r}; choose another tag, or delete it first.")
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True, repo_type=repo_type)
    old_info = api.repo_info(repo_id, revision=revision, repo_type=repo_type)
    old_names = {sibling.rfilename for sibling in getattr(old_info, "siblings", None) or []}
    deleted = sorted(name for name in old_names - files.keys() if name in CODE_NAMES or is_weights_name(name))
    commit = api.create_commit(
        repo_id,
        [*(CommitOperationAdd(name, files[name]) for name in uploaded), *map(CommitOperationDelete, deleted)],
        commit_message=f"Publish with tost_hf {__version__}",
        revision=revision,
        create_pr=create_pr,
        repo_type=repo_type,
    )
    if tag is not None:
        api.create_tag(repo_id, tag=tag, revision=commit.oid, repo_type=repo_type)
    url = commit.pr_url or (commit.commit_url if commit.oid != old_info.sha else None)
    return Publication(repo_id, commit.oid, url, uploaded, tuple(deleted), left_out, num_parameters)
