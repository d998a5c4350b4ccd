# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Models, tokenizers and image processors of a folder or repository; none of its code runs."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import HfApi, ModelInfo, snapshot_download
from huggingface_hub.errors import HTTPError
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .checks import model_class
from .records import IMAGE_PROCESSOR_FILES


NUM_TOKENS = 16
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
Loaded = TypeVar("Loaded")


@contextmanager
def hub_errors() -> Iterator[None]:
    """Raises OSError where huggingface_hub lets errors of its HTTP client through, or raises RuntimeError for an upload."""
    try:
        yield
    except (HTTPError, RuntimeError) as error:
        if isinstance(error, OSError):
            raise
        raise OSError(f"The Hub could not be reached, or closed the connection ({error!r}); run the command again.") from error


@hub_errors()
def download(
    repo_id: str, revision: str | None = None, token: str | None = None, patterns: list[str] | None = None
) -> tuple[Path, ModelInfo]:
    """A model repository at a revision, or its files that match patterns: the folder in the cache, and what the Hub lists."""
    info = HfApi(token=token).model_info(repo_id, revision=revision, files_metadata=True)
    return Path(snapshot_download(repo_id, revision=info.sha, token=token, allow_patterns=patterns)), info


def model_folder(source: str | os.PathLike, revision: str | None = None) -> Path:
    """The folder of a model, downloaded where `source` is a repository.

    Raises:
        OSError: there is no such folder or repository, or the Hub cannot be reached.
    """
    if os.path.isdir(source):
        return Path(source)
    if os.path.isabs(source) or os.fspath(source).startswith(".") or os.path.exists(source):
        raise FileNotFoundError(f"There is no model folder {os.fspath(source)!r}.")
    return download(os.fspath(source), revision)[0]


def load_model(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a folder, by this package's code, for evaluation.

    Raises:
        ValueError: it cannot be loaded; its tensors are not those of the configuration's model, or not finite.
    """
    kind: Any = model_class(config)
    options = {"local_files_only": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, info = _load(f"The model in {folder}", lambda: kind.from_pretrained(folder, **options))
    problems = {"lacks": info["missing_keys"], "has, too,": info["unexpected_keys"]}
    problems["has other shapes for"] = [f"{name} {list(stored)}" for name, stored, _ in info["mismatched_keys"]]
    problems["has NaN or infinite numbers in"] = [name for name, x in model.state_dict().items() if not x.isfinite().all()]
    for problem, names in problems.items():
        if names:
            raise ValueError(f"The model in {folder} {problem} {', '.join(sorted(names)[:5])}, {len(names)} in all.")
    return model.eval()


def check_loading(folder: Path, config: PreTrainedConfig) -> tuple[PreTrainedModel, str]:
    """Loads the model, and the tokenizer or image processor where there are their files, and runs the model.

    Returns:
        The model, and in a few words what its output is.

    Raises:
        ValueError: transformers cannot load one of them without running the folder's code, or the output is not finite.
    """
    model = load_model(folder, config)
    output = _run(model, config)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        _load("generation_config.json", lambda: GenerationConfig.from_pretrained(folder, local_files_only=True))
    if config.model_type == "tost":
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            tokenizer = load_fitting_tokenizer(str(folder), config)
            _load("The tokenizer", lambda: tokenizer("A few words."))
    elif any((folder / name).is_file() for name in IMAGE_PROCESSOR_FILES) and not hasattr(AutoImageProcessor, "_backends"):
        # with "_backends" it is a placeholder: this transformers asks for torchvision, which is not installed
        options = {"trust_remote_code": False, "local_files_only": True}
        _load("The image processor", lambda: AutoImageProcessor.from_pretrained(folder, **options))
    return model, output


@torch.no_grad()
def _run(model: PreTrainedModel, config: PreTrainedConfig) -> str:
    """Runs the model on a few tokens or one image; ValueError if its output holds NaN or infinite numbers."""
    if config.model_type == "tost_vision":
        side = 4 * config.patch_size
        inputs = torch.linspace(-2, 2, config.num_channels * side * side).view(1, -1, side, side).to(model.dtype)
    else:
        count = min(NUM_TOKENS, config.max_position_embeddings or NUM_TOKENS)
        inputs = torch.linspace(0, config.vocab_size - 1, count).long()[None]
    output = model(inputs)
    if not output[0].isfinite().all():
        raise ValueError("The model's output holds NaN or infinite numbers, though its weights are finite; do not publish it.")
    return f"gives finite {'logits' if 'logits' in output else 'features'} of shape {tuple(output[0].shape)}"


def load_fitting_tokenizer(source: str, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or repository, for a language model of this configuration.

    Raises:
        ValueError: it cannot be loaded, has no vocabulary, or has more tokens than the model.
    """
    options = {"trust_remote_code": False, "local_files_only": os.path.isdir(source)}
    tokenizer = _load(f"The tokenizer of {source}", lambda: AutoTokenizer.from_pretrained(source, **options))
    if len(tokenizer) == len(tokenizer.get_added_vocab()):
        raise ValueError(f"The tokenizer in {source} has no vocabulary, whose files are missing. Save the tokenizer again.")
    last = max(tokenizer.get_vocab().values())
    if last >= config.vocab_size:
        raise ValueError(
            f"The tokenizer of {source} does not fit: its last token is number {last}, and the model has {config.vocab_size} "
            f"tokens. Take another, build the model with vocab_size={-(-(last + 1) // 64) * 64}, or resize a trained one with "
            "model.resize_token_embeddings."
        )
    return tokenizer


def _load(what: str, load: Callable[[], Loaded]) -> Loaded:
    try:
        return load()
    except Exception as error:  # transformers and tokenizers raise whatever a damaged file leads to
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"{what} cannot be loaded: {reason}. Save it again with save_pretrained.") from error
