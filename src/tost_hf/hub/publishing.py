# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Publishing on the Hub in one commit: what was loaded from a model folder is saved again, and only that is uploaded."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.utils import filter_repo_objects, validate_repo_id
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..files import RESULT_FILES, SHARD_NAME, TRAINING_ARGS, check_folder, name_file_in_errors, read_json, staged_folder
from ..model.base_tost import AUTO_MAPS, code_files
from ..version import __version__
from .cards import complete_card, find_pictures
from .loading import IMAGE_PROCESSOR_FILES, TOKENIZER_FILES, hub_errors, load_config, load_model, load_processor, run_model
from .results import CARD, find_local_paths, shorten_paths


REPLACED_FILES = [  # of an earlier version: what from_pretrained would load beside, or in place of, the new files
    *(SAFE_WEIGHTS_NAME, "model-?????-of-?????.safetensors", SAFE_WEIGHTS_INDEX_NAME, "generation_config.json"),
    *("adapter_config.json", "adapter_model.safetensors", *IMAGE_PROCESSOR_FILES, *TOKENIZER_FILES, "tekken.json"),
    *("tiktoken.model", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "additional_chat_templates/*"),
    *(*RESULT_FILES, *{name for model_type in AUTO_MAPS for name in code_files(model_type)}),
]
TEXT_SUFFIXES = (".json", ".jinja", ".md", ".txt", ".py", "")
HUB_TOKEN = re.compile(r"\bhf_(?:[A-Za-z0-9]{30,}|(?:oauth|jwt)_[\w.-]{20,})")


def publish(
    folder: str | os.PathLike, repo_id: str, *, license: str | None = None, tag: str | None = None, **options: Any
) -> CommitInfo:
    """Publishes a folder that `save_pretrained`, a training script or `tost-hf` wrote.

    The files that `prepare_upload` writes are uploaded by `upload` in a single commit. The folder is never changed.

    Args:
        folder: config, safetensors weights and a model card; optionally tokenizer, image processor and so on.
        repo_id: "owner/name". Created if it does not exist.
        license: the license of the weights, for a card that names none, or for a new card.
        tag: a tag for the commit, which the card's examples then pin.
        options: others of `upload`: `private`, `revision`, `create_pr`, `token`.

    Returns and raises as `prepare_upload` and `upload`.

    Example:
        >>> publish("./my-tost", "me/my-tost", license="apache-2.0", private=True, tag="v1").commit_url
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        files = Path(temporary, "files")
        prepare_upload(folder, files, repo_id, license=license, tag=tag)
        return upload(files, repo_id, tag=tag, **options)


def prepare_upload(
    folder: str | os.PathLike,
    output_dir: str | os.PathLike,
    repo_id: str,
    *,
    license: str | None = None,
    tag: str | None = None,
) -> PreTrainedModel:
    """Writes the files that `publish` uploads to a new folder, and loads them again to compare.

    Model and tokenizer or image processor are what `from_pretrained` loads from the folder, with the dtype and the size of
    shards of its weights. The model card is completed for the repository. Pictures that it shows, the license and results of
    training and evaluation are copied, without the names of folders on this machine.

    Args:
        folder, repo_id, license, tag: as in `publish`.
        output_dir: the folder to write.

    Returns:
        The model, in evaluation mode.

    Raises:
        ImportError: an image processor needs Pillow, which is not installed.
        OSError: a file is missing, or `output_dir` is not empty.
        ValueError: the model cannot be loaded without its own code, is quantized, lacks tensors or has others or NaN; its
            output is not finite; the tokenizer does not fit; the card has no license or is an unfilled template; a text
            contains a token of the Hub or names files of this machine; or one of the files to copy is outside the folder.

    Example:
        >>> prepare_upload("./my-tost", "./to-upload", "me/my-tost", license="apache-2.0").num_parameters()
    """
    source, target = Path(folder), Path(output_dir)
    check_repo_id(repo_id)
    check_folder(target, overwrite=False, sources=[source])
    config = load_config(source)
    model, processor = load_model(source, config), load_processor(source, config)
    run_model(model, processor)
    card = complete_card(source, repo_id, license=license, revision=tag)
    with staged_folder(target) as files:
        shards = [path for path in source.iterdir() if SHARD_NAME.fullmatch(path.name)]
        is_sharded = shards and not (source / SAFE_WEIGHTS_NAME).is_file()
        options: dict[str, Any] = {"max_shard_size": max(path.stat().st_size for path in shards)} if is_sharded else {}
        model.save_pretrained(files, with_code=True, **options)
        if processor is not None:
            processor.save_pretrained(files)
        licenses = (path.name for path in source.glob("LICENSE*"))
        names = [name for name in (CARD, *licenses, *find_pictures(card), *RESULT_FILES) if os.path.isfile(source / name)]
        _copy_files(source, files, names)
        (files / CARD).write_bytes(card.encode())
        for name in RESULT_FILES:
            if name in names:
                with name_file_in_errors(source / name):
                    content = json.dumps(shorten_paths(read_json(source / name)), indent=2, ensure_ascii=False)
                (files / name).write_text(content + "\n", encoding="utf-8")
        check_texts(files, local_paths=True)
        _check_equal(files, model, processor)
    return model


def _copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copies files of a folder; ValueError if one of them is outside of it, or a link that leads out of it."""
    allowed = [root := source.resolve()]
    if root.parent.name == "snapshots":  # of the Hub's cache, which keeps the files themselves in "blobs"
        allowed.append(root.parents[1] / "blobs")
    for name in names:
        path = (source / name).resolve()
        if Path(name).is_absolute() or ".." in Path(name).parts or not any(map(path.is_relative_to, allowed)):
            raise ValueError(f"{name} is, or is a link to, {path}, out of the folder {source}: replace it by a file there.")
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)


def check_texts(folder: Path, *, local_paths: bool = False) -> None:
    """Raises ValueError if a text in the folder contains an access token of the Hub, or names files of this machine.

    Args:
        local_paths: whether to look for files, other than in source files and vocabularies.
    """
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in TEXT_SUFFIXES):
        text = path.read_text(encoding="utf-8", errors="replace")
        if HUB_TOKEN.search(text):
            raise ValueError(f"{path.name} contains a token of the Hub (hf_...): remove it, and revoke it on the Hub.")
        is_checked = local_paths and path.suffix != ".py" and path.name not in TOKENIZER_FILES[1:]
        if is_checked and (paths := find_local_paths(text)):
            raise ValueError(f"{path.name} names files of this machine, {', '.join(paths)}: leave out their folders.")


def _check_equal(folder: Path, model: PreTrainedModel, processor: Any) -> None:
    """Raises ValueError if what is loaded from the folder differs from the model, tokenizer or image processor saved there."""
    config = load_config(folder)
    loaded_model = load_model(folder, config)
    loaded, saved = loaded_model.state_dict(), model.state_dict()
    is_equal = all(x.dtype == saved[name].dtype and x.equal(saved[name]) for name, x in loaded.items())
    if not is_equal or loaded.keys() != saved.keys() or _describe_configs(loaded_model) != _describe_configs(model):
        raise ValueError("The model is another one after saving and loading it: this version of transformers may not suit it.")
    if processor is not None and _describe_processor(load_processor(folder, config)) != _describe_processor(processor):
        raise ValueError("The tokenizer or image processor is another one after saving and loading it.")


def _describe_configs(model: Any) -> tuple:
    """What must be equal of a model's configurations after saving and loading it."""
    fields = {name: value for name, value in model.config.to_dict().items() if name not in ("auto_map", "_name_or_path")}
    return fields, model.can_generate() and model.generation_config.to_dict()


def _describe_processor(processor: Any) -> Any:
    """What must be equal of a tokenizer or image processor after saving and loading it."""
    if not hasattr(processor, "get_vocab"):
        return processor.to_dict()
    return processor.get_vocab(), processor.special_tokens_map, processor.chat_template, processor("A few words.")["input_ids"]


def check_repo_id(repo_id: str) -> None:
    """Raises ValueError for what cannot be the name of a repository, or has no owner."""
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"Name the repository OWNER/NAME, with the user or organization that it belongs to, not {repo_id!r}.")


def create_if_missing(
    api: HfApi, repo_id: str, private: bool | None, repo_type: str = "model", space_sdk: str | None = None
) -> bool:
    """Creates a repository that does not exist, and returns whether it did; ValueError for a public one not to be."""
    if not api.repo_exists(repo_id, repo_type=repo_type):
        api.create_repo(repo_id, repo_type=repo_type, private=private, space_sdk=space_sdk)
        return True
    if private and not api.repo_info(repo_id, repo_type=repo_type).private:
        raise ValueError(f"{repo_id} exists and is public: make it private in its settings, or leave out --private.")
    return False


@hub_errors("the repository")
def upload(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    tag: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
) -> CommitInfo:
    """Uploads a folder in one commit, which also deletes a model's weights, tokenizer, source files and so on that it lacks.

    An upload that is interrupted or rejected leaves a repository or branch as it was, and deletes one that was created for
    it, unless the Hub's answer is lost.

    Args:
        tag: a tag for the commit.
        private: whether a newly created repository is private.
        revision: the branch to commit to, created from main if it does not exist.
        create_pr: open a pull request with the commit.
        token: access token of a user with write access; by default that of the logged-in user.

    Returns:
        The commit: its `oid`, `commit_url` and, of a pull request, `pr_url`. If nothing changed, the latest one.

    Raises:
        OSError: the Hub rejected the commit or could not be reached, and nothing became visible; or it rejected the tag.
        ValueError: the tag exists, or the repository is public and not to be; a pull request can have no tag.
    """
    check_repo_id(repo_id)
    if create_pr and (tag or revision):
        raise ValueError("A pull request (create_pr) is opened against main and not tagged; leave out revision and tag.")
    api = HfApi(token=token, library_name="tost_hf", library_version=__version__)
    created = ""  # what exists for this commit only; `delete` deletes it
    delete: Callable[[], object]
    if create_if_missing(api, repo_id, private):
        created, delete = "repository", partial(api.delete_repo, repo_id)
    elif tag and api.revision_exists(repo_id, tag):
        raise ValueError(f"{repo_id} already has the tag {tag!r}; choose another tag, or delete it first.")
    try:
        if revision is not None and not api.revision_exists(repo_id, revision):
            api.create_branch(repo_id, branch=revision)
            if not created:
                created = f"branch {revision}"
                delete = partial(api.delete_branch, repo_id, branch=revision)
        new_files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        paths: dict[str, Path | bytes] = {path.relative_to(folder).as_posix(): path for path in new_files}
        old_names = sorted(set(api.list_repo_files(repo_id, revision=revision)) - paths.keys())
        deleted = filter_repo_objects(old_names, allow_patterns=REPLACED_FILES)
        if ".gitignore" in old_names:  # the Hub would leave out, without an error, the files that it names
            paths[".gitignore"] = f"{TRAINING_ARGS}\n".encode()
        # not by upload_folder, which makes several commits of one folder where the upload takes minutes (with Xet)
        commit = api.create_commit(
            repo_id,
            [*(CommitOperationAdd(name, path) for name, path in paths.items()), *map(CommitOperationDelete, deleted)],
            revision=revision,
            commit_message=f"Publish with tost_hf {__version__}",
            create_pr=create_pr,
        )
    except BaseException as error:
        if not created:
            raise
        outcome = f"The {created} that was created for it is deleted again."
        try:
            delete()
        except Exception as second_error:  # the Hub's client raises many types
            outcome = f"The {created} that was created for it is still there ({second_error!r})."
        raise OSError(f"{error!r}: {repo_id} was not published. {outcome}") from error
    if tag:
        try:
            api.create_tag(repo_id, tag=tag, revision=commit.oid)
        except Exception as error:
            raise OSError(f"{commit.commit_url} is published, without its tag ({error!r}): run it again.") from error
    return commit
