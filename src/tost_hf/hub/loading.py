# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Whether transformers loads back what a folder holds, and whether the model computes numbers. No code of the folder runs."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .checks import model_class
from .connection import download
from .records import IMAGE_PROCESSOR_FILES


NUM_TOKENS = 16
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
Loaded = TypeVar("Loaded")


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


def check_loading(folder: Path, config: PreTrainedConfig) -> tuple[PreTrainedModel, str]:
    """Loads the model, and the tokenizer or image processor where there are their files, and runs the model.

    Returns:
        The model, and in a few words what its output is.

    Raises:
        ValueError: transformers cannot load one of them without running the folder's code, or the output is not finite.
    """
    model = load_model(folder, config)
    output = _check_output(model, config)
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


def load_model(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The folder's model, whose weights passed `check_weights`, by this package's code, for evaluation."""

    def load() -> PreTrainedModel:
        return model_class(config).from_pretrained(folder, trust_remote_code=False, local_files_only=True).eval()

    return _load(f"The model in {folder}", load)


def _check_output(model: PreTrainedModel, config: PreTrainedConfig) -> str:
    """Runs the model on a few tokens or one image.

    Raises:
        ValueError: its output holds NaN or infinite numbers.
    """
    if config.model_type == "tost_vision":
        side = 4 * config.patch_size
        inputs = torch.linspace(-2, 2, config.num_channels * side * side).view(1, config.num_channels, side, side)
        inputs = inputs.to(model.dtype)
    else:
        inputs = torch.linspace(0, config.vocab_size - 1, min(NUM_TOKENS, config.max_position_embeddings or NUM_TOKENS))
        inputs = inputs.long()[None]
    with torch.no_grad():
        output = model(inputs)
    if not output[0].isfinite().all():
        raise ValueError("The model's output holds NaN or infinite numbers, though its weights are finite; do not publish it.")
    return f"gives finite {'logits' if 'logits' in output else 'features'} of shape {tuple(output[0].shape)}"


def load_fitting_tokenizer(source: str, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or repository, none of whose code runs, for a language model of this configuration.

    Raises:
        ValueError: it cannot be loaded, has no vocabulary, or has more tokens than the model.
    """
    options = {"trust_remote_code": False, "local_files_only": os.path.isdir(source)}
    tokenizer = _load(f"The tokenizer of {source}", lambda: AutoTokenizer.from_pretrained(source, **options))
    if len(tokenizer) == len(tokenizer.get_added_vocab()):
        raise ValueError(f"The tokenizer in {source} has no vocabulary, whose files are missing. Save the tokenizer again.")
    last, most = max(tokenizer.get_vocab().values()), config.vocab_size
    if last >= most:
        raise ValueError(
            f"The tokenizer of {source} does not fit: its last token is number {last}, and the model has {most} tokens, the "
            f"last one number {most - 1}. Take another tokenizer, build the model with "
            f"ToSTConfig.from_preset(..., vocab_size={-(-(last + 1) // 64) * 64}), or resize a trained one with "
            "model.resize_token_embeddings."
        )
    return tokenizer


def _load(what: str, load: Callable[[], Loaded]) -> Loaded:
    try:
        return load()
    except Exception as error:  # transformers and tokenizers raise whatever a damaged file leads to
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"{what} cannot be loaded: {reason}. Save it again with save_pretrained.") from error


__all__ = ["check_loading", "load_fitting_tokenizer", "load_model", "model_folder"]
