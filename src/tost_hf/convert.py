# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of the authors' code to transformers folders, and back.

This is the only place where a pickle is opened, and only with `weights_only=True`: nothing in the file is run.
"""

import argparse
import json
import logging
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .configuration_tost import ToSTConfig
from .modeling_tost import ToSTForCausalLM


logger = logging.getLogger(__name__)

StateDict = dict[str, torch.Tensor]
PathLike = str | os.PathLike[str]

# The authors' name of each module or parameter, and ours; numbers between dots are carried over in their order.
LANGUAGE_NAMES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.wpe": "model.embed_positions",
    "transformer.h.{}.ln_1": "model.layers.{}.input_layernorm",
    "transformer.h.{}.attn.c_attn": "model.layers.{}.self_attn.in_proj",
    "transformer.h.{}.attn.c_proj": "model.layers.{}.self_attn.out_proj",
    "transformer.h.{}.attn.temp": "model.layers.{}.self_attn.temp",
    "transformer.h.{}.attn.denom_bias": "model.layers.{}.self_attn.denom_bias",
    "transformer.h.{}.gamma1": "model.layers.{}.attention_layer_scale",
    "transformer.h.{}.ln_2": "model.layers.{}.post_attention_layernorm",
    "transformer.h.{}.mlp.c_fc": "model.layers.{}.mlp.up_proj",
    "transformer.h.{}.mlp.c_proj": "model.layers.{}.mlp.down_proj",
    "transformer.h.{}.gamma2": "model.layers.{}.mlp_layer_scale",
    "transformer.ln_f": "model.norm",
    "lm_head": "lm_head",
}

_WRAPPERS = ("_orig_mod.", "module.")  # torch.compile's and DDP's prefixes, in either order
_VISION_MODULES = ("cls_token", "patch_embed.", "cls_attn_blocks.", "pos_embeder.")
_END_OF_TEXT = 50256  # of GPT-2's tokenizer, which the authors use
_DROPOUTS = ("hidden_dropout", "attention_dropout", "embedding_dropout")  # one number in the authors' code


def convert_from_original(checkpoint: PathLike, output_dir: PathLike, *, overwrite: bool = False) -> Path:
    """Converts a language checkpoint of the authors' code (`ckpt.pt`) to a transformers folder.

    The folder gets `config.json`, `model.safetensors` and `generation_config.json`, and loads with
    `AutoModelForCausalLM.from_pretrained`. Tensors keep their values and their dtype. The sizes are read from the tensors.
    A tokenizer is not part of a checkpoint: the authors' models use GPT-2's.

    Args:
        checkpoint: the file: a dict with `model`, the state dict, and usually `model_args`. The rest is not used.
        output_dir: the folder to write.
        overwrite: whether to replace the model in a folder that is not empty; other files in it stay.

    Returns:
        `output_dir`.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        FileExistsError: `output_dir` is a file, or is not empty and `overwrite` is false.
        ValueError: the file is not such a checkpoint (the sentence says in what), or holds more than plain data, which
            would need code named by the file to run.
    """
    checkpoint, target = Path(checkpoint), Path(output_dir)
    _check_folder(target, overwrite)
    contents = _load_pickle(checkpoint)
    state, model_args = _state_dict(contents, checkpoint), _stated_sizes(contents, checkpoint)
    _refuse_other_models(state, model_args, checkpoint)
    config = _infer_config(state, model_args, checkpoint)
    model = _empty_model(config)
    needed = {rename(name, _reversed(LANGUAGE_NAMES)): tensor.shape for name, tensor in model.state_dict().items()}
    _check_tensors(state, needed, checkpoint)
    model.load_state_dict({rename(name, LANGUAGE_NAMES): tensor for name, tensor in state.items()}, assign=True)
    model.tie_weights()
    with _staged_folder(target) as folder:
        model.save_pretrained(folder)
    return target


def convert_to_original(
    model_dir: PathLike,
    output_file: PathLike,
    *,
    overwrite: bool = False,
    iter_num: int = 0,
    best_val_loss: float = 1e9,
    config: Mapping | None = None,
) -> Path:
    """Converts a transformers folder with a `ToSTForCausalLM` to a checkpoint that the authors' code loads.

    The file holds `model`, `model_args`, `iter_num`, `best_val_loss` and `config`. It has no `optimizer`, so the authors'
    training run cannot resume from it.

    Args:
        model_dir: folder with `config.json` and `model.safetensors` (or its shards).
        output_file: the file to write, usually `ckpt.pt`.
        overwrite: whether to replace an existing file.
        iter_num, best_val_loss, config: the training state that the file records; the defaults are those of a fresh run.

    Returns:
        `output_file`.

    Raises:
        FileNotFoundError: the folder, its configuration or its weights are missing.
        FileExistsError: `output_file` exists and `overwrite` is false.
        ValueError: the folder holds no such model, or one that the authors' code has no room for (position-free, say).
    """
    source, target = Path(model_dir), Path(output_file)
    _check_file(target, overwrite)
    model_config = _read_config(source)
    model_args = _model_args(model_config, source)
    state = _load_safetensors(source)
    if "model.embed_tokens.weight" in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]  # tied: stored once by us, twice by the authors
    needed = {name: tensor.shape for name, tensor in _empty_model(model_config).state_dict().items()}
    _check_tensors(state, needed, source)
    contents = {
        "model": {rename(name, _reversed(LANGUAGE_NAMES)): state[name] for name in needed},
        "model_args": model_args,
        "iter_num": iter_num,
        "best_val_loss": torch.tensor(best_val_loss),
        "config": dict(config or {}),
    }
    with _staged_file(target) as file:
        torch.save(contents, file)
    return target


# Names


def rename(name: str, names: Mapping[str, str]) -> str | None:
    """The new name of a tensor by a table such as `LANGUAGE_NAMES`; None where the table does not have its module."""
    number = r"(?<=\.)\d+(?=\.)"
    template, numbers = re.sub(number, "{}", name), re.findall(number, name)
    if template in names:
        return names[template].format(*numbers)
    module, _, leaf = template.rpartition(".")
    return f"{names[module].format(*numbers)}.{leaf}" if module in names else None


def _reversed(names: Mapping[str, str]) -> dict[str, str]:
    return {ours: authors for authors, ours in names.items()}


def _strip_wrappers(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name


def _check_tensors(state: StateDict, needed: Mapping[str, torch.Size], source: Path) -> None:
    """Refuses tensors that are missing, unknown, not floating or of another shape than needed."""
    missing = [name for name in needed if name not in state]
    unknown = [name for name in state if name not in needed]
    problems = [f"it lacks {_listed(missing)}"] * bool(missing) + [f"it has {_listed(unknown)}"] * bool(unknown)
    if problems:
        raise ValueError(f"{source} does not hold exactly the tensors of a ToST language model: {' and '.join(problems)}.")
    for name, shape in needed.items():
        tensor = state[name]
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(
                f"{source}: {name} has shape {tuple(tensor.shape)} and {tensor.dtype}, but the model's sizes ask for "
                f"floating-point numbers of shape {tuple(shape)}."
            )


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# The authors' file


def _load_pickle(path: Path) -> object:
    with path.open("rb"):  # a missing or forbidden file gets its own error here
        pass
    try:
        # vision checkpoints hold a Namespace; with it they can be recognised
        with torch.serialization.safe_globals([argparse.Namespace]):
            # memory-mapped, the optimizer is never read
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch.load raises nearly anything on a file that is not its own
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        if code:
            raise ValueError(
                f"{path} needs {code[1]} to be loaded, which could run any code, so it is refused; save a checkpoint that "
                f"holds only tensors, numbers, strings, lists and dicts."
            ) from error
        raise ValueError(
            f"{path} is not a checkpoint that torch.load can read with weights_only=True: it is truncated, damaged or "
            f"another kind of file."
        ) from error


def _state_dict(contents: object, source: Path) -> StateDict:
    """The tensors under "model", without the prefixes of torch.compile and DDP."""
    stored = contents.get("model") if isinstance(contents, Mapping) else None
    if not isinstance(stored, Mapping) or not stored:
        raise ValueError(f"{source} is not a checkpoint of the authors' code: that is a dict with a state dict under 'model'.")
    state = {}
    for name, tensor in stored.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{source}: the entry {name!r} of 'model' is not a named tensor.")
        bare = _strip_wrappers(name)
        if bare in state:
            raise ValueError(f"{source} holds {bare} twice, under different prefixes.")
        state[bare] = tensor
    return state


def _stated_sizes(contents: Mapping, source: Path) -> Mapping:
    model_args = contents.get("model_args", {})
    if not isinstance(model_args, Mapping):
        raise ValueError(f"{source}: model_args must be a dict, got {type(model_args).__name__}.")
    return model_args


def _refuse_other_models(state: StateDict, model_args: Mapping, source: Path) -> None:
    if any(name.startswith(_VISION_MODULES) for name in state):
        raise ValueError(f"{source} is a ToST vision checkpoint; only language checkpoints can be converted.")
    c_attn = state.get("transformer.h.0.attn.c_attn.weight")
    fused_qkv = c_attn is not None and c_attn.ndim == 2 and c_attn.shape[0] == 3 * c_attn.shape[1]
    if fused_qkv or not model_args.get("TSSA", True):
        reason = "c_attn projects to q, k and v" if fused_qkv else "model_args has TSSA=False"
        raise ValueError(
            f"{source} is a GPT-2 checkpoint with softmax attention ({reason}), not a ToST model; convert it as a GPT-2 "
            f"model instead."
        )


def _infer_config(state: StateDict, model_args: Mapping, source: Path) -> ToSTConfig:
    """The configuration by the tensors' shapes, which `model_args` must not contradict."""

    def shape(name: str, ndim: int = 2) -> torch.Size:
        if name not in state:
            raise ValueError(f"{source} does not hold a ToST language model: it lacks {name}.")
        if state[name].ndim != ndim:
            raise ValueError(f"{source}: {name} must have {ndim} dimensions, got shape {tuple(state[name].shape)}.")
        return state[name].shape

    layers = {name.split(".")[2] for name in state if name.startswith("transformer.h.")}
    vocab_size, n_embd = shape("transformer.wte.weight")
    sizes = {
        "n_layer": len(layers),
        "n_head": shape("transformer.h.0.attn.temp")[0],
        "n_embd": n_embd,
        "block_size": shape("transformer.wpe.weight")[0],
        "bias": "transformer.ln_f.bias" in state,
        "vocab_size": vocab_size,
    }
    for name, size in sizes.items():
        if model_args.get(name, size) != size:
            raise ValueError(f"{source}: model_args says {name}={model_args[name]}, but the tensors say {name}={size}.")
    end_of_text = _END_OF_TEXT if vocab_size > _END_OF_TEXT else None
    try:
        return ToSTConfig(
            num_hidden_layers=sizes["n_layer"],
            num_attention_heads=sizes["n_head"],
            hidden_size=n_embd,
            max_position_embeddings=sizes["block_size"],
            use_bias=sizes["bias"],
            vocab_size=vocab_size,
            tie_word_embeddings=_tied(state, source),
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
            **dict.fromkeys(_DROPOUTS, model_args.get("dropout", 0.0)),
        )
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{source}: {_last_line(error)}") from error


def _tied(state: StateDict, source: Path) -> bool:
    """Whether lm_head is the token embedding, as it is in every model of the authors' code."""
    embedding, head = state["transformer.wte.weight"], state.get("lm_head.weight")
    tied = head is None or (head.dtype == embedding.dtype and torch.equal(head, embedding))
    if not tied:
        logger.warning("%s: lm_head differs from wte; the model is converted with tie_word_embeddings=False.", source)
    return tied


# The transformers folder


def _empty_model(config: ToSTConfig) -> ToSTForCausalLM:
    with torch.device("meta"):
        return ToSTForCausalLM(config)


def _read_config(folder: Path) -> ToSTConfig:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is not a folder with a transformers model: there is no config.json in it.")
    fields, _ = ToSTConfig.get_config_dict(folder, local_files_only=True)
    if fields.get("model_type") != ToSTConfig.model_type:
        raise ValueError(f"{folder} holds a model of type {fields.get('model_type')!r}, not {ToSTConfig.model_type!r}.")
    try:
        return ToSTConfig.from_dict(fields)
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{folder / 'config.json'}: {_last_line(error)}") from error


def _model_args(config: ToSTConfig, source: Path) -> dict:
    """`model_args` of the authors' code; refuses what that code has no setting for."""
    if config.max_position_embeddings is None:
        raise ValueError(f"{source} is position-free (max_position_embeddings=None); the authors' format has no such model.")
    fixed = {
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "intermediate_size": 4 * config.hidden_size,
        **dict.fromkeys(_DROPOUTS, config.hidden_dropout),
    }
    for name, value in fixed.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{source} has {name}={getattr(config, name)!r}, but a model in the authors' format has {name}={value!r}."
            )
    return {
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_embd": config.hidden_size,
        "block_size": config.max_position_embeddings,
        "bias": config.use_bias,
        "vocab_size": config.vocab_size,
        "dropout": config.hidden_dropout,
        "TSSA": True,
    }


def _load_safetensors(folder: Path) -> StateDict:
    """All tensors of `model.safetensors`, or of the shards that its index names."""
    state = {}
    for file in _weight_files(folder):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing; the weights must be in safetensors files.")
        try:
            state |= load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} is not a readable safetensors file: it is truncated or damaged ({error}).") from error
    return state


def _weight_files(folder: Path) -> list[Path]:
    whole, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if whole.is_file() or not index.is_file():
        return [whole]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files.") from error
    return [folder / name for name in sorted(names)]


def _last_line(error: Exception) -> str:
    return str(error).splitlines()[-1].strip()


# Outputs: written under a temporary name beside the target, moved when complete


def _check_folder(target: Path, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; name a folder for the converted model.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise FileExistsError(f"The folder {target} is not empty; choose another, or overwrite it (--overwrite).")


def _check_file(target: Path, overwrite: bool) -> None:
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder; name a file for the converted checkpoint, such as ckpt.pt.")
    if target.exists() and not overwrite:
        raise FileExistsError(f"The file {target} exists; choose another, or overwrite it (--overwrite).")


@contextmanager
def _staged_folder(target: Path) -> Iterator[Path]:
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as private:
        folder = Path(private, "model")  # with ordinary permissions, which the temporary folder has not
        folder.mkdir()
        yield folder
        if not target.exists():
            folder.rename(target)
            return
        written = {file.name for file in folder.iterdir()}
        for name in sorted(written, key="config.json".__eq__):  # the configuration last
            os.replace(folder / name, target / name)
        for old in [*target.glob("model*.safetensors"), target / SAFE_WEIGHTS_INDEX_NAME]:
            if old.name not in written:  # weights of the model that was overwritten
                old.unlink(missing_ok=True)


@contextmanager
def _staged_file(target: Path) -> Iterator[Path]:
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield staged
        os.replace(staged, target)
    finally:
        staged.unlink(missing_ok=True)


__all__ = ["LANGUAGE_NAMES", "convert_from_original", "convert_to_original", "rename"]
