# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What a model folder has to satisfy to be published, and what `tost-hf verify` looks at. Nothing here changes a file."""

import base64
import contextlib
import io
import json
import pickletools
import re
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path, PureWindowsPath

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..model import modeling_tost, modeling_tost_vision
from ..model.base_tost import AUTO_MAPS
from .records import CARD, Card, load_card, open_safetensors, read_json
from .secrets import holds_hub_token, is_secret_name, redact, secrets_in_file


PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz", ".h5", ".msgpack")
TRAINER_STATE = re.compile(r"((optimizer|scheduler|scaler|rng_state|random_states)[\w.-]*|.*\.distcp)$", re.IGNORECASE)
PICKLE_START = re.compile(rb"\x80[\x02-\x05]")  # of protocols 2 to 5; the older ones have no mark
PICKLE_BYTES = 2**18  # at the start of a file, which are looked at
ARCHIVES = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, 7z, zstd
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def forbidden_file(name: str, path: Path) -> str | None:
    """Why a file must not be in a published repository, or None.

    Args:
        name: its path in the repository, with forward slashes.
        path: where it lies.
    """
    base = name.rsplit("/", 1)[-1]
    if holds_hub_token(name):
        return f"{redact(name)} has a secret in its name (Hugging Face Token)"
    if "\\" in name or any(PureWindowsPath(part).drive for part in name.split("/")):
        return f"{name!r} has a drive letter or a backslash in its name, so that downloads of it are refused; rename it"
    if TRAINER_STATE.match(base):
        return f"{name} is state of a training run (optimizer, scheduler, random numbers)"
    if base.lower().endswith(PICKLES):
        return f"{name} may be a pickle, which runs code when it is opened; publish safetensors"
    if is_secret_name(base):
        return f"{name} has the name of a file that holds secrets"
    if base.endswith(".safetensors"):
        return _check_safetensors(name, path)
    with open(path, "rb") as file:
        head = file.read(PICKLE_BYTES)
    if head.startswith(ARCHIVES) or zipfile.is_zipfile(path):  # a zip may start anywhere
        return f"{name} is an archive or compressed, as torch.save writes; publish safetensors, and other files unpacked"
    if _starts_pickle(head):
        return f"{name} is a pickle, whatever its name says; publish safetensors"
    if kinds := secrets_in_file(path):
        return f"{name} holds a secret ({', '.join(kinds)})"
    return None


def _check_safetensors(name: str, path: Path) -> str | None:
    """What is wrong in a safetensors file, its numbers aside: its kind, its metadata."""
    try:
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
    except SafetensorError as error:
        return f"{name} is named like safetensors, but it is not a readable safetensors file ({error})"
    if any(_is_pickle_text(value) for value in metadata.values()):
        return f"{name} holds a pickle in its metadata"
    with open(path, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    if holds_hub_token(header):
        return f"{name} holds a secret (Hugging Face Token) in its metadata"
    return None


def _starts_pickle(data: bytes) -> bool:
    """Whether bytes start with a pickle, of any protocol; none of it is loaded."""
    if PICKLE_START.match(data):
        return True
    try:
        pickletools.dis(data, io.StringIO())  # follows the stack, so no text passes by chance
    except Exception:  # whatever its reading of arbitrary bytes leads to
        return False
    return True


def _is_pickle_text(text: str) -> bool:
    """Whether text is a pickle, or one in base64."""
    with contextlib.suppress(ValueError):
        if _starts_pickle(base64.b64decode(text, validate=True)):
            return True
    return _starts_pickle(text.encode("latin-1", "replace"))


def load_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a ToST model folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or belongs to another kind of model.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; give a folder that save_pretrained wrote.")
    read_json(path)  # for its error messages
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a wrong kind of value leads to in transformers
        reason = " ".join(str(error).split())[:400]
        raise ValueError(f"{path} is not the configuration of a model: {reason}") from error
    if config.model_type not in ("tost", "tost_vision"):
        raise ValueError(f"{folder} holds a model of type {config.model_type!r}, not a ToST model.")
    return config


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class named in the configuration's `architectures` (the base model where it names none)."""
    references = {name: reference.rpartition(".")[2] for name, reference in AUTO_MAPS[config.model_type].items()}
    del references["AutoConfig"]
    name = config.architectures[0] if config.architectures else references["AutoModel"]
    if name not in list(references.values()):
        raise ValueError(f"config.json names the architecture {name!r}, which is no ToST model of type {config.model_type!r}.")
    modeling = modeling_tost_vision if config.model_type == "tost_vision" else modeling_tost
    return getattr(modeling, name)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files a folder's weights are made of: the one file, or the shards its index names.

    Raises:
        FileNotFoundError: there are none, or one is missing.
        ValueError: the index is damaged, or there are two sets of weights.
    """
    whole, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if whole.is_file() and index.is_file():
        raise ValueError(f"{folder} has both {whole.name} and {index.name}; delete the one that is out of date.")
    if not index.is_file():
        if not whole.is_file():
            raise FileNotFoundError(f"{whole} is missing; the weights must be in safetensors files.")
        return [whole]
    names = sorted(set(_shard_of_each_tensor(index).values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing, which {index.name} names.")
    return [folder / name for name in names]


def _shard_of_each_tensor(index: Path) -> dict[str, str]:
    """What an index of shards says: tensor's name -> file's name."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        shards = dict(content["weight_map"])
        if not isinstance(content["metadata"], dict) or not shards or "\0" in "".join(shards.values()):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{index} is not an index of safetensors files, with metadata and the file of each tensor. Save the model again."
        ) from error
    return shards


def tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of some safetensors files, one in memory at a time.

    Raises:
        ValueError: a file is damaged or cut short.
    """
    for file in files:
        with open_safetensors(file) as opened:
            for name in opened.keys():
                yield name, opened.get_tensor(name)


def check_weights(folder: Path, config: PreTrainedConfig) -> int:
    """Compares the weights with what the configuration describes.

    Returns:
        The number of parameters of the model (a tied weight counts once).

    Raises:
        ValueError: tensors are missing, superfluous, of another shape or kind, not finite, or tied but not equal.
    """
    if getattr(config, "transformers_weights", None) is not None:
        raise ValueError("config.json names its weights by transformers_weights; remove that entry, and name them as usual.")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "config.json has a quantization_config, but a published ToST model holds floating-point weights: remove that "
            "entry, or save the model after model.dequantize()."
        )
    files = weight_files(folder)
    shard_of = {name: file.name for file in files for name in _tensor_names(file)}
    if config.num_hidden_layers > len(shard_of):  # not built then: it may be any number
        raise ValueError(f"config.json describes {config.num_hidden_layers} layers; the weights lack most of their tensors.")
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file() and _shard_of_each_tensor(index) != shard_of:
        raise ValueError(f"{index} does not say in which file each tensor is; save the model again.")
    model = empty_model(config)
    expected = model.state_dict()
    tied: dict[str, str] = model.all_tied_weights_keys
    check_names(shard_of, expected, folder, optional=tied)
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in tensors(files):
        check_tensor(name, tensor, expected[name], folder)
        if name in tied or name in tied.values():
            kept[name] = tensor
    for name, source in tied.items():
        if name in kept and source in kept and not bool((kept[name] == kept[source]).all()):
            raise ValueError(f"{name} differs from {source} in the weights, but config.json ties them: they must be equal.")
    return model.num_parameters()


def _tensor_names(file: Path) -> list[str]:
    with open_safetensors(file) as opened:
        return list(opened.keys())


def check_names(found: Collection[str], expected: Collection[str], source: Path, optional: Collection[str] = ()) -> None:
    """Raises ValueError unless these are the names of the model's tensors."""
    missing = [name for name in expected if name not in found and name not in optional]
    unknown = [name for name in found if name not in expected]
    problems = [f"it lacks {list_names(missing)}"] * bool(missing) + [f"it has {list_names(unknown)}"] * bool(unknown)
    if problems:
        raise ValueError(f"{source} does not hold exactly the tensors of a ToST model of its sizes: {' and '.join(problems)}.")


def list_names(names: list[str], most: int = 5) -> str:
    """The first of some names, which may be of any length, and how many more there are."""
    shown = (name if name.isprintable() and len(name) < 100 else f"{name[:100]!r}..." for name in names[:most])
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_tensor(name: str, tensor: torch.Tensor, expected: torch.Tensor, source: Path) -> None:
    """Raises ValueError for a tensor of another shape or kind of dtype than the model's, or that is not finite."""
    allowed = WEIGHT_DTYPES if expected.is_floating_point() else (expected.dtype,)
    if tensor.shape != expected.shape or tensor.dtype not in allowed:
        dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(
            f"{source}: {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; the model's sizes ask for shape "
            f"{tuple(expected.shape)} and dtype {dtypes}."
        )
    if not tensor.isfinite().all():
        raise ValueError(f"{source}: {name} holds NaN or infinite numbers; take weights from before training diverged.")


def check_card(folder: Path) -> Card:
    """The folder's model card.

    Raises:
        ValueError: there is none, its metadata does not parse, it names no licence, or it is an unfilled form.
    """
    path = folder / CARD
    if not path.is_file():
        raise ValueError(f"{folder} has no model card; write one with `tost-hf card {folder} --license LICENSE`.")
    card = load_card(path)
    if not card.data.license:
        raise ValueError(
            f"The card {path} names no licence: add the line `license: apache-2.0` (or whichever it is) to its metadata, or "
            f"write it again with `tost-hf card {folder} --license apache-2.0 --overwrite`."
        )
    if "[More Information Needed]" in card.content:
        raise ValueError(
            f"The card {path} is an unfilled form: complete it by hand, or write one from what is known with `tost-hf card "
            f"{folder} --license LICENSE --overwrite`."
        )
    return card


def check_space(folder: Path) -> None:
    """Raises ValueError for a folder that is not a complete page as `tost-hf space` writes it."""
    card = load_card(folder / CARD) if (folder / CARD).is_file() else None
    if card is None or card.data.to_dict().get("sdk") != "static" or not (folder / "space.json").is_file():
        raise ValueError(f"{folder} is not a page that `tost-hf space` wrote; write one with `tost-hf space MODEL {folder}`.")
    needed = ["index.html", "tost.js", "vendor/ort.wasm.bundle.min.mjs", "vendor/ort-wasm-simd-threaded.wasm"]
    missing = [name for name in [*needed, "model/export.json", "model/model.onnx"] if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}; write the page again with `tost-hf space`.")


def parameter_count(config: PreTrainedConfig) -> int:
    """Number of parameters of the configuration's model; nothing is allocated."""
    return empty_model(config).num_parameters()


def empty_model(config: PreTrainedConfig, kind: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """The configuration's model without memory for its weights (on the meta device), of the class it names or of this one."""
    with torch.device("meta"):
        return (kind or model_class(config))(config)
