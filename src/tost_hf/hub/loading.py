# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Loads models, tokenizers and image processors of a folder or repository, without running any of its code."""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

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
    BaseImageProcessor,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from ..extras import require
from ..files import is_path, name_file_in_errors, read_json
from ..image_processing import make_image_processor
from ..model import modeling_tost, modeling_tost_vision
from ..model.base_tost import AUTO_MAPS
from ..model.configuration_tost import PRESETS, ToSTConfig
from ..model.configuration_tost_vision import VISION_PRESETS, ToSTVisionConfig
from .results import CARD


logger = logging.getLogger(__name__)

CONFIG_CLASSES = {cls.model_type: cls for cls in (ToSTConfig, ToSTVisionConfig)}
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
WITHOUT_CODE = {"trust_remote_code": False, "local_files_only": True}
LOADING_OPTIONS = ("auto_map", "fast_tokenizer_files", "is_local", "local_files_only")  # transformers saves them in tokenizers
NUM_TOKENS = 16
T = TypeVar("T")


# Repositories ---------------------------------------------------------------------------------------------------------


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Raises OSError with a message about `name` in place of many errors of huggingface_hub."""
    try:
        yield
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(f"{name} is neither a folder nor a repository of the Hub that you may use.") from error
    except (HfHubHTTPError, IncompleteSnapshotError):  # of a revision that does not exist, for example; they name it
        raise
    except (HTTPError, OfflineModeIsEnabled, LocalEntryNotFoundError, RuntimeError) as error:  # RuntimeError of uploads
        raise OSError(f"The Hub could not be asked for {name}: {error!r}.") from error


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
            with hub_errors(repr(name)):
                HfApi(token=token).model_info(name, revision=revision)


def _check_repository_name(name: str) -> None:
    """Raises a FileNotFoundError for what is meant to be a folder, or a preset."""
    if "/" not in name and name.startswith("tost-"):  # the Hub has no such repository
        presets = [*PRESETS, *VISION_PRESETS]
        if name in presets:
            advice = f"`tost-hf init {name} {name}` writes one with random weights"
        else:
            advice = f"The presets, of which `tost-hf init` makes one, are {', '.join(presets)}"
        raise FileNotFoundError(f"There is no model folder {name!r}. {advice}.")
    if is_path(name) or os.path.exists(name) or os.path.isdir(os.path.dirname(name)):
        raise FileNotFoundError(f"There is no model folder {name!r}.")


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
    with hub_errors(repr(name)):
        if not only_description:
            return Path(snapshot_download(name, revision=revision, token=token))
        folder = Path(hf_hub_download(name, CONFIG_NAME, revision=revision, token=token)).parent
        with suppress(EntryNotFoundError):
            hf_hub_download(name, CARD, revision=folder.name, token=token)
        return folder


def display_name(source: str | os.PathLike) -> str:
    """How a page names a model: by its folder or repository."""
    return Path(source).resolve().name if os.path.isdir(source) else os.fspath(source)


# Models ---------------------------------------------------------------------------------------------------------------


def load_config(folder: Path, *, strict: bool = False) -> PreTrainedConfig:
    """The configuration of a ToST model folder.

    Keys of `config.json` that its class does not know are dropped, with a warning that names them: transformers would follow
    some of them to code, kernels or other files.

    Args:
        strict: raise an error for unknown keys.

    Raises:
        FileNotFoundError: the folder has no `config.json`.
        ValueError: it is damaged, or belongs to another type of model.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; name a folder that save_pretrained wrote.")
    with name_file_in_errors(path):
        fields = read_json(path)
        if fields.get("model_type") not in AUTO_MAPS:
            raise ValueError(f"the model is of type {fields.get('model_type')!r}, not a ToST model")
        config_class = CONFIG_CLASSES[fields["model_type"]]
        config: Any = config_class.from_dict(fields)
        known = {field.name for field in dataclasses.fields(config)} | vars(config_class()).keys()
        unknown = sorted(vars(config).keys() - known - {"auto_map", "model_type", "quantization_config"})
        for name in unknown:
            delattr(config, name)
        if config._attn_implementation is not None:  # never saved by transformers; it may name a kernel of the Hub
            unknown.append("attn_implementation")
            config._attn_implementation = None
        model_class(config), config.to_dict()  # transformers does not check all types
    if unknown:
        message = f"{path}: {config_class.__name__} does not know {', '.join(unknown)}"
        if strict:
            raise ValueError(f"{message}, by which transformers may load code or files. Publishing drops them.")
        logger.warning(f"{message}: dropped.")
    return config


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class named in the configuration's `architectures`, by default the base model."""
    classes = {reference.rpartition(".")[2] for reference in AUTO_MAPS[config.model_type].values()}
    name = config.architectures[0] if config.architectures else AUTO_MAPS[config.model_type]["AutoModel"].rpartition(".")[2]
    if name not in classes:
        raise ValueError(f"config.json names the architecture {name!r}, not a ToST model of type {config.model_type!r}.")
    return getattr(modeling_tost_vision if config.model_type == "tost_vision" else modeling_tost, name)


def empty_model(config: PreTrainedConfig, cls: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """The configuration's model on the meta device; `cls` is by default the class that the configuration names."""
    with torch.device("meta"):
        return (cls or model_class(config))(config)


def load_model(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Loads the model of a folder by `from_pretrained`, with this package's code, in evaluation mode.

    Raises:
        ValueError: it cannot be loaded, is quantized or an adapter; its tensors are not those of the configuration's model, or
            not finite.
    """
    if getattr(config, "quantization_config", None) or (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder} is a quantized model or an adapter: save the whole model in float32, float16 or bfloat16.")
    cls: Any = model_class(config)
    options = {"local_files_only": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, info = _load(f"The model in {folder}", lambda: cls.from_pretrained(folder, config=config, **options))
    problems = {"lacks": info["missing_keys"], "has unexpected": info["unexpected_keys"]}
    problems["has other shapes for"] = [f"{name} {list(stored)}" for name, stored, _ in info["mismatched_keys"]]
    problems["has NaN or infinite values in"] = [name for name, x in model.state_dict().items() if not x.isfinite().all()]
    for problem, names in problems.items():
        if names:
            raise ValueError(f"The model in {folder} {problem} {', '.join(sorted(names)[:5])}, {len(names)} in all.")
    if (folder / GENERATION_CONFIG_NAME).is_file():  # from_pretrained ignores a damaged one
        _load(GENERATION_CONFIG_NAME, lambda: GenerationConfig.from_pretrained(folder, local_files_only=True))
    return model.eval()


@torch.no_grad()
def run_model(model: PreTrainedModel, processor: Any = None) -> str:
    """Runs a model on a few tokens or one image and describes its output.

    Raises:
        ValueError: it does not accept what its image processor returns, or its output has NaN or infinite values.
    """
    config: Any = model.config
    if config.model_type == "tost_vision" and processor is not None:
        from PIL import Image

        image = Image.new("L" if config.num_channels == 1 else "RGB", (48, 32), "gray")
        inputs = _load("The image processor", lambda: processor(image, return_tensors="pt").pixel_values.to(model.dtype))
    elif config.model_type == "tost_vision":
        image_size = 4 * config.patch_size
        inputs = torch.linspace(-2, 2, config.num_channels * image_size**2).view(1, -1, image_size, image_size).to(model.dtype)
    else:
        num_tokens = min(NUM_TOKENS, config.max_position_embeddings)
        inputs = torch.linspace(0, config.vocab_size - 1, num_tokens).long()[None]
    output = _load(f"The model {model.name_or_path}", lambda: model(inputs, return_dict=True))
    tensor = output.feature_maps[-1] if "feature_maps" in output else output[0]
    if not tensor.isfinite().all():
        raise ValueError("The model's output has NaN or infinite values, although its weights are finite; do not publish it.")
    return f"returns finite {'logits' if 'logits' in output else 'features'} of shape {tuple(tensor.shape)}"


# Tokenizers and image processors --------------------------------------------------------------------------------------


def load_processor(folder: Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase | BaseImageProcessor | None:
    """The tokenizer or image processor of a model folder, without running any of its code; None if it has none.

    Raises:
        ValueError: it cannot be loaded, or does not fit the model.
        ImportError: Pillow, which image processors need, is not installed.
    """
    if config.model_type == "tost":
        return load_fitting_tokenizer(str(folder), config) if has_file(folder, TOKENIZER_FILES) else None
    if not has_file(folder, IMAGE_PROCESSOR_FILES):
        return None
    require("PIL", "vision")
    processor = _load("The image processor", lambda: AutoImageProcessor.from_pretrained(folder, **WITHOUT_CODE))
    vars(processor).pop("auto_map", None)
    return processor


def load_with_processor(folder: Path, config: PreTrainedConfig) -> tuple[PreTrainedModel, Any]:
    """A model and what prepares its inputs: its tokenizer, or its image processor, by default `make_image_processor`.

    Raises:
        ValueError: as `load_model` and `load_processor`; or a text model has no tokenizer.
        ImportError: as `load_processor`.
    """
    processor: Any = load_processor(folder, config)
    if processor is None and config.model_type == "tost":
        raise ValueError(f"{folder} has no tokenizer, which the page needs: save one in its folder.")
    model = load_model(folder, config)
    return model, processor or make_image_processor(cast(ToSTVisionConfig, config))


def has_file(folder: Path, names: Iterable[str]) -> bool:
    """Whether the folder has one of the files."""
    return any((folder / name).is_file() for name in names)


def load_fitting_tokenizer(source: str, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a folder or repository for a language model of this configuration.

    Raises:
        ValueError: it cannot be loaded, has no vocabulary, or has token ids outside the model's vocabulary.
    """
    options = WITHOUT_CODE | {"local_files_only": os.path.isdir(source)}
    tokenizer = _load(f"The tokenizer of {source}", lambda: AutoTokenizer.from_pretrained(source, **options))
    for name in LOADING_OPTIONS:
        tokenizer.init_kwargs.pop(name, None)
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
    _load(f"The tokenizer of {source}", lambda: tokenizer("A few words."))
    return tokenizer


def _load(name: str, load: Callable[[], T]) -> T:
    try:
        return load()
    except Exception as error:  # on a damaged file transformers and tokenizers raise exceptions of any type
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"{name} cannot be loaded or used: {reason}. Save it again with save_pretrained.") from error
