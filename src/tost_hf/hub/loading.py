# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Loads models, tokenizers and image processors of a folder or repository, without running any of its code."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from ..files import is_path, open_safetensors
from ..model.configuration_tost import LRA_PRESETS, PRESETS
from ..model.configuration_tost_vision import VISION_PRESETS
from .checks import model_class
from .contents import TOKENIZER_FILES, linked_folder, weights_files
from .records import CARD, IMAGE_PROCESSOR_FILES


NUM_TOKENS = 16
WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names
T = TypeVar("T")


@contextmanager
def translate_hub_errors() -> Iterator[None]:
    """Raises OSError in place of HTTP client errors and upload RuntimeErrors of huggingface_hub."""
    try:
        yield
    except (HTTPError, RuntimeError) as error:
        if isinstance(error, OSError):
            raise
        raise OSError(f"The Hub could not be reached, or closed the connection ({error!r}); run the command again.") from error


def check_model_exists(
    source: str | os.PathLike,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> None:
    """Checks that `source` is a folder, or a model repository that is in the cache or on the Hub.

    Raises:
        OSError: it is neither, or the Hub cannot be reached.
    """
    name = os.fspath(source)
    if not os.path.isdir(name):
        _check_repository_name(name)
        cached_folder = repo_folder_name(repo_id=name, repo_type="model")  # also of a tokenizer alone
        if not Path(cache_dir or HF_HUB_CACHE, cached_folder).is_dir():
            with _name_repository_in_errors(name):
                HfApi(token=token).model_info(name, revision=revision)


def _check_repository_name(name: str) -> None:
    """Raises a FileNotFoundError for what is meant to be a folder, or a preset."""
    if "/" not in name and name.startswith("tost-"):  # the Hub has no such repository
        presets = [*PRESETS, *LRA_PRESETS, *VISION_PRESETS]
        if name in presets:
            advice = f"`tost-hf init {name} {name}` writes one with random weights"
        else:
            advice = f"The presets, of which `tost-hf init` makes one, are {', '.join(presets)}"
        raise FileNotFoundError(f"There is no model folder {name!r}. {advice}.")
    if is_path(name) or os.path.exists(name) or os.path.isdir(os.path.dirname(name)):
        raise FileNotFoundError(f"There is no model folder {name!r}.")


@contextmanager
def _name_repository_in_errors(name: str) -> Iterator[None]:
    """Raises an OSError that says what `name` is not, where a repository is neither in the cache nor obtained from the Hub."""
    try:
        yield
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(f"{name!r} is neither a folder nor a repository of the Hub that you may read.") from error
    except (HfHubHTTPError, IncompleteSnapshotError):  # of a revision that does not exist, for example; they name it
        raise
    except (HTTPError, OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        raise OSError(f"There is no folder {name!r}, and the Hub cannot be asked for a repository ({error!r}).") from error


@translate_hub_errors()
def resolve_model_folder(
    source: str | os.PathLike, revision: str | None = None, token: str | None = None, *, only_description: bool = False
) -> Path:
    """Returns the folder of a model: of a repository the one in the cache, which is named by the commit, after downloading it.

    Without access to the Hub, it is what the cache contains of the revision.

    Args:
        only_description: download the configuration and the card only.

    Raises:
        OSError: there is no such folder or repository, the Hub cannot be reached, or a file is missing from the cache.
    """
    name = os.fspath(source)
    if os.path.isdir(name):
        return Path(name)
    _check_repository_name(name)
    with _name_repository_in_errors(name):
        if not only_description:
            return Path(snapshot_download(name, revision=revision, token=token))
        folder = Path(hf_hub_download(name, CONFIG_NAME, revision=revision, token=token)).parent
        with suppress(EntryNotFoundError):
            hf_hub_download(name, CARD, revision=folder.name, token=token)
        return folder


def load_model(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Loads the model of a folder from `weights_files`, with this package's code, in evaluation mode.

    Raises:
        FileNotFoundError, ValueError: as `weights_files`.
        ValueError: it cannot be loaded; its tensors are not those of the configuration's model, or not finite.
    """
    configs = {name: folder / name for name in (CONFIG_NAME, GENERATION_CONFIG_NAME) if (folder / name).is_file()}
    with linked_folder(folder, weights_files(folder) | configs) as links:
        model = _load_links(links, config)
    model.name_or_path = model.config.name_or_path = os.fspath(folder)
    return model


def _load_links(links: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Loads and checks the model of a `linked_folder`, in evaluation mode."""
    cls: Any = model_class(config)
    options = {"local_files_only": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, info = _load(f"The model in {links}", lambda: cls.from_pretrained(links, **options))
    problems = {"lacks": info["missing_keys"], "has unexpected": info["unexpected_keys"]}
    problems["has other shapes for"] = [f"{name} {list(stored)}" for name, stored, _ in info["mismatched_keys"]]
    problems["has numbers of other types than floating point in"] = list(_find_other_dtypes(links, model))
    problems["has NaN or infinite values in"] = [name for name, x in model.state_dict().items() if not x.isfinite().all()]
    for problem, names in problems.items():
        if names:
            raise ValueError(f"The model in {links} {problem} {', '.join(sorted(names)[:5])}, {len(names)} in all.")
    return model.eval()


def _find_other_dtypes(folder: Path, model: PreTrainedModel) -> Iterator[str]:
    """Stored tensors that are not floating point, although the model's are, and that loading would convert."""
    integers = {name for name, x in model.state_dict().items() if not x.is_floating_point()}  # BatchNorm's counters
    for path in sorted(folder.glob("*.safetensors")):
        with open_safetensors(path) as file:
            dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}
        yield from (f"{name} ({x})" for name, x in dtypes.items() if x not in WEIGHT_DTYPES and name not in integers)


def check_loading(folder: Path, files: Mapping[str, Path], config: PreTrainedConfig) -> tuple[PreTrainedModel, str]:
    """Loads and runs the model, and loads its tokenizer or image processor, from `files`, those that are published.

    Args:
        folder: the model folder, which errors name.
        files: its `model_files`.

    Returns:
        The model, and a short description of its output.

    Raises:
        ValueError: one of them cannot be loaded without running the folder's code, or the output is not finite.
    """
    with linked_folder(folder, files) as links:
        model = _load_links(links, config)
        output = _run(model, config)
        if model.can_generate() and GENERATION_CONFIG_NAME in files:
            _load(GENERATION_CONFIG_NAME, lambda: GenerationConfig.from_pretrained(links, local_files_only=True))
        if config.model_type == "tost":
            if not files.keys().isdisjoint(TOKENIZER_FILES):
                tokenizer = load_fitting_tokenizer(str(links), config)
                _load("The tokenizer", lambda: tokenizer("A few words."))
        # with "_backends" it is a placeholder, as Pillow is not installed
        elif not files.keys().isdisjoint(IMAGE_PROCESSOR_FILES) and not hasattr(AutoImageProcessor, "_backends"):
            options = {"trust_remote_code": False, "local_files_only": True}
            _load("The image processor", lambda: AutoImageProcessor.from_pretrained(links, **options))
    return model, output


@torch.no_grad()
def _run(model: PreTrainedModel, config: PreTrainedConfig) -> str:
    """Runs the model on a few tokens or one image; ValueError if its output has NaN or infinite values."""
    if config.model_type == "tost_vision":
        image_size = 4 * config.patch_size
        inputs = torch.linspace(-2, 2, config.num_channels * image_size**2).view(1, -1, image_size, image_size).to(model.dtype)
    else:
        num_tokens = min(NUM_TOKENS, config.max_position_embeddings)
        inputs = torch.linspace(0, config.vocab_size - 1, num_tokens).long()[None]
    output = model(inputs)
    if not output[0].isfinite().all():
        raise ValueError("The model's output has NaN or infinite values, although its weights are finite; do not publish it.")
    return f"returns finite {'logits' if 'logits' in output else 'features'} of shape {tuple(output[0].shape)}"


def load_fitting_tokenizer(source: str, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a folder or repository for a language model of this configuration.

    Raises:
        ValueError: it cannot be loaded, has no vocabulary, or has token ids outside the model's vocabulary.
    """
    options = {"trust_remote_code": False, "local_files_only": os.path.isdir(source)}
    tokenizer = _load(f"The tokenizer of {source}", lambda: AutoTokenizer.from_pretrained(source, **options))
    if len(tokenizer) == len(tokenizer.get_added_vocab()):
        raise ValueError(f"The tokenizer in {source} has no vocabulary: its files are missing. Save the tokenizer again.")
    last_id = max(tokenizer.get_vocab().values())
    if last_id >= config.vocab_size:
        vocab_size = -(-(last_id + 1) // 64) * 64
        raise ValueError(
            f"The tokenizer of {source} does not fit: its last token is number {last_id}, and the model has "
            f"{config.vocab_size} tokens. Use another, build the model with {vocab_size=}, or resize a trained one with "
            "model.resize_token_embeddings."
        )
    return tokenizer


def _load(name: str, load: Callable[[], T]) -> T:
    try:
        return load()
    except Exception as error:  # on a damaged file transformers and tokenizers raise exceptions of any type
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"{name} cannot be loaded: {reason}. Save it again with save_pretrained.") from error
