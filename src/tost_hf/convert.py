# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of the authors' code to transformers folders, and back.

This is the only place where a pickle is opened, and only with `weights_only=True`: nothing in the file is run.
"""

import argparse
import logging
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel

from .files import check_file, check_folder, staged_file, staged_folder
from .hub.checks import check_names, check_tensor, empty_model, list_names, load_config, tensors, weight_files
from .image_processing import save_image_processor
from .model.configuration_tost import ToSTConfig
from .model.configuration_tost_vision import VISION_PRESETS, ToSTVisionConfig
from .model.modeling_tost import ToSTForCausalLM
from .model.modeling_tost_vision import ToSTForImageClassification


logger = logging.getLogger(__name__)

Config = ToSTConfig | ToSTVisionConfig
StateDict = dict[str, torch.Tensor]
PathLike = str | os.PathLike[str]

# The authors' name of each module or parameter, and ours; {} is the number of a layer.
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
VISION_NAMES = {
    "cls_token": "tost.class_token",
    # the authors' stem is a sequence with an activation after each convolution but the last
    **{f"patch_embed.proj.{2 * i}.0": f"tost.embeddings.patch_embeddings.convolutions.{i}" for i in range(5)},
    **{f"patch_embed.proj.{2 * i}.1": f"tost.embeddings.patch_embeddings.norms.{i}" for i in range(5)},
    "pos_embeder.token_projection": "tost.embeddings.position_embeddings.projection",
    "blocks.{}.norm1": "tost.layers.{}.attention_norm",
    "blocks.{}.gamma1": "tost.layers.{}.attention_layer_scale",
    "blocks.{}.norm2": "tost.layers.{}.mlp_norm",
    "blocks.{}.mlp.fc1": "tost.layers.{}.mlp.up_proj",
    "blocks.{}.mlp.fc2": "tost.layers.{}.mlp.down_proj",
    "blocks.{}.gamma2": "tost.layers.{}.mlp_layer_scale",
    "cls_attn_blocks.{}.norm1": "tost.class_attention_layers.{}.attention_norm",
    "cls_attn_blocks.{}.attn.qkv": "tost.class_attention_layers.{}.attention.qkv",
    "cls_attn_blocks.{}.attn.proj": "tost.class_attention_layers.{}.attention.out_proj",
    "cls_attn_blocks.{}.gamma1": "tost.class_attention_layers.{}.attention_layer_scale",
    "cls_attn_blocks.{}.norm2": "tost.class_attention_layers.{}.mlp_norm",
    "cls_attn_blocks.{}.mlp.fc1": "tost.class_attention_layers.{}.mlp.up_proj",
    "cls_attn_blocks.{}.mlp.fc2": "tost.class_attention_layers.{}.mlp.down_proj",
    "cls_attn_blocks.{}.gamma2": "tost.class_attention_layers.{}.mlp_layer_scale",
    "norm": "tost.norm",
    "head": "classifier",
}
VISION_ATTENTION_NAMES = {  # by attention_type, beside VISION_NAMES
    "tssa": {
        "blocks.{}.attn.qkv": "tost.layers.{}.attention.in_proj",  # one projection, in spite of its name
        "blocks.{}.attn.temp": "tost.layers.{}.attention.temp",
        "blocks.{}.attn.to_out.0": "tost.layers.{}.attention.out_proj",
    },
    "xca": {
        "blocks.{}.attn.qkv": "tost.layers.{}.attention.qkv",
        "blocks.{}.attn.temperature": "tost.layers.{}.attention.temperature",
        "blocks.{}.attn.proj": "tost.layers.{}.attention.out_proj",
    },
    "softmax": {
        "blocks.{}.attn.qkv": "tost.layers.{}.attention.qkv",
        "blocks.{}.attn.proj": "tost.layers.{}.attention.out_proj",
    },
}

_WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+")  # prefixes by torch.compile and DDP
_VISION_MODULES = ("cls_token", "patch_embed.", "cls_attn_blocks.", "pos_embeder.")
_XCIT_MODULES = (".local_mp.", ".norm3.", ".gamma3")  # XCiT's local patch interaction
_POSITION_PROJECTION = "pos_embeder.token_projection.weight"  # a 1x1 convolution in the authors' code, a Linear here
_LANGUAGE_SETTINGS = {  # the authors' name of each setting in `model_args`, and ours
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "block_size": "max_position_embeddings",
    "bias": "use_bias",
    "vocab_size": "vocab_size",
    "dropout": "hidden_dropout",
}
_VISION_SETTINGS = {  # likewise in `args`
    "input_size": "image_size",
    "nb_classes": "num_labels",
    "drop": "hidden_dropout",
    "drop_path": "drop_path_rate",
    # in the authors' code these two belong to the model that a name chooses; `convert_from_original` reads them
    "num_heads": "num_attention_heads",
    "tokens_norm": "normalize_patch_tokens",
}
_END_OF_TEXT = 50256  # of GPT-2's tokenizer, which the authors use
_DROPOUTS = ("hidden_dropout", "attention_dropout", "embedding_dropout")  # one number in the authors' code


def convert_from_original(
    checkpoint: PathLike,
    output_dir: PathLike,
    *,
    overwrite: bool = False,
    ema: bool = False,
    num_attention_heads: int | None = None,
    normalize_patch_tokens: bool | None = None,
) -> Path:
    """Converts a checkpoint of the authors' code, language (`ckpt.pt`) or vision (`checkpoint.pth`), to a transformers folder.

    The folder gets `config.json`, `model.safetensors` and, by kind, `generation_config.json` or `preprocessor_config.json`. It
    loads with `AutoModelForCausalLM` or `AutoModelForImageClassification`. Tensors keep their values and their dtype. Which
    model it is, and its sizes, is read from the tensors; among vision models these are ToST and its baselines of the same
    trunk with cross-covariance or softmax attention. A tokenizer is not part of a checkpoint: the authors' models use GPT-2's.

    Args:
        checkpoint: the file: a dict with `model`, the state dict, and usually `model_args` (language) or `args` (vision). The
            rest is not used.
        output_dir: the folder to write.
        overwrite: whether to replace the model in a folder that is not empty; other files in it stay.
        ema: whether to take the EMA weights, `model_ema`. Vision only, as are the next two.
        num_attention_heads: the heads of a softmax baseline, which its tensors do not show; by default those of the authors'
            size that `args.model` names.
        normalize_patch_tokens: the authors' `tokens_norm`, which no tensor shows; by default what `args` says, else true, as
            in all released models.

    Returns:
        `output_dir`.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        FileExistsError: `output_dir` is a file, or is not empty and `overwrite` is false.
        OSError: the folder cannot be written; nothing is left of it.
        ValueError: the file is not such a checkpoint (the message says why), or holds more than plain data, which would need
            code named by the file to run.

    Example:
        >>> folder = convert_from_original("out/ckpt.pt", "./my-tost")
        >>> model = AutoModelForCausalLM.from_pretrained(folder)
    """
    checkpoint, target = Path(checkpoint), Path(output_dir)
    check_folder(target, overwrite)
    contents = _load_pickle(checkpoint)
    state = _state_dict(contents, "model_ema" if ema else "model", checkpoint)
    if any(name.startswith(_VISION_MODULES) for name in state):
        stated = _read_settings(contents, "args")
        config: Config = _vision_config(state, stated, num_attention_heads, normalize_patch_tokens, checkpoint)
    elif num_attention_heads is not None or normalize_patch_tokens is not None:
        raise ValueError(
            f"{checkpoint} is not a vision checkpoint; num_attention_heads and normalize_patch_tokens are for those alone."
        )
    else:
        config = _language_config(state, _read_settings(contents, "model_args"), checkpoint)
    model = _model(config)
    _load_authors_tensors(model, state, checkpoint)
    if isinstance(config, ToSTConfig) and not config.tie_word_embeddings:
        logger.warning("%s: lm_head differs from wte; the model is converted with tie_word_embeddings=False.", checkpoint)
    with staged_folder(target) as folder:
        model.save_pretrained(folder)
        if isinstance(config, ToSTVisionConfig):
            save_image_processor(config, folder)
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
    """Converts a transformers folder to a checkpoint that the authors' code loads.

    Of a `ToSTForCausalLM` the file holds `model`, `model_args`, `iter_num`, `best_val_loss` and `config`; of a
    `ToSTForImageClassification`, `model` and `args`, a plain dict. It has no `optimizer`, so the authors' training run cannot
    resume from it. It holds nothing that `torch.load` with `weights_only=True` refuses.

    Args:
        model_dir: folder with `config.json` and `model.safetensors` (or its shards).
        output_file: the file to write, usually `ckpt.pt` (language) or `checkpoint.pth` (vision).
        overwrite: whether to replace an existing file.
        iter_num, best_val_loss, config: the training state that a language file records; the defaults are those of a fresh
            run.

    Returns:
        `output_file`.

    Raises:
        FileNotFoundError: the folder, its configuration or its weights are missing.
        FileExistsError: `output_file` exists and `overwrite` is false.
        OSError: the file cannot be written; nothing is left of it.
        ValueError: the folder holds no such model, or one that the authors' code cannot represent (such as a position-free
            one).

    Example:
        >>> convert_to_original("./my-tost", "ckpt.pt")
    """
    source, target = Path(model_dir), Path(output_file)
    check_file(target, overwrite)
    model_config = cast(Config, load_config(source))
    settings: dict[str, object]
    if isinstance(model_config, ToSTVisionConfig):
        settings = {"args": _vision_args(model_config, source)}
    else:
        settings = {
            "model_args": _language_args(model_config, source),
            "iter_num": iter_num,
            "best_val_loss": torch.tensor(best_val_loss),
            "config": dict(config or {}),
        }
    state = dict(tensors(weight_files(source)))
    if "model.embed_tokens.weight" in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]  # tied: stored once by us, twice by the authors
    _check_tensors(state, _model(model_config).state_dict(), source)
    with staged_file(target) as file:
        torch.save({"model": _to_authors(model_config, state)} | settings, file)
    return target


# Names


def rename(name: str, names: Mapping[str, str]) -> str | None:
    """The new name of a tensor by a table such as `LANGUAGE_NAMES`; None where the table does not have its module."""
    number = re.search(r"(?<=\.)\d+(?=\.)", name)
    layer = number[0] if number else ""
    for template in (name, re.sub(r"(?<=\.)\d+(?=\.)", "{}", name, count=1)):
        module, _, leaf = template.rpartition(".")
        if template in names:
            return names[template].replace("{}", layer)
        if module in names:
            return names[module].replace("{}", layer) + f".{leaf}"
    return None


def _names(config: Config) -> Mapping[str, str]:
    if isinstance(config, ToSTVisionConfig):
        return VISION_NAMES | VISION_ATTENTION_NAMES[config.attention_type]
    return LANGUAGE_NAMES


def _to_authors(config: Config, state: StateDict) -> StateDict:
    """A model's state dict under the authors' names and in their shapes."""
    names = {ours: authors for authors, ours in _names(config).items()}
    renamed = {cast(str, rename(name, names)): tensor for name, tensor in state.items()}
    if _POSITION_PROJECTION in renamed:
        renamed[_POSITION_PROJECTION] = renamed[_POSITION_PROJECTION][..., None, None]
    return renamed


def _load_authors_tensors(model: PreTrainedModel, state: StateDict, source: Path) -> None:
    """Loads a state dict with the authors' names into a model; ValueError if it is not the model's."""
    config, own = cast(Config, model.config), model.state_dict()
    _check_tensors(state, _to_authors(config, own), source)
    renamed = {rename(name, _names(config)): tensor.contiguous() for name, tensor in state.items()}
    model.load_state_dict({name: renamed[name].reshape(tensor.shape) for name, tensor in own.items()}, assign=True)
    model.tie_weights()


def _check_tensors(state: StateDict, needed: StateDict, source: Path) -> None:
    check_names(state, needed, source)
    for name, tensor in state.items():
        check_tensor(name, tensor, needed[name], source)


# The authors' file


def _load_pickle(path: Path) -> Any:
    try:
        # the authors' vision checkpoints hold one under "args"
        with torch.serialization.safe_globals([argparse.Namespace]):
            # memory-mapped, the optimizer is never read
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError:
        raise
    except Exception as error:  # torch.load raises nearly anything on a file that is not its own
        raise ValueError(
            f"{path} cannot be loaded without running code that it names: it is no checkpoint, is damaged, or holds more than "
            "tensors, numbers, strings, lists and dicts."
        ) from error


def _state_dict(contents: object, key: str, source: Path) -> StateDict:
    """The tensors under "model" or "model_ema", without the prefixes of torch.compile and DDP."""
    stored = contents.get(key) if isinstance(contents, Mapping) else None
    if not isinstance(stored, Mapping) or not stored:
        raise ValueError(f"{source} is not a checkpoint of the authors' code: that is a dict with a state dict under {key!r}.")
    state = {_WRAPPERS.sub("", name): tensor for name, tensor in stored.items()}
    if wrong := [name for name, tensor in state.items() if not isinstance(tensor, torch.Tensor)]:
        raise ValueError(f"{source}: {wrong[0]!r} of {key!r} is not a tensor.")
    return state


def _read_settings(contents: Mapping, key: str) -> Mapping:
    """`model_args` or `args`: what the run that wrote the file was told."""
    stated = contents.get(key, {})
    return vars(stated) if isinstance(stated, argparse.Namespace) else stated


def _shape(state: StateDict, name: str, ndim: int, source: Path) -> torch.Size:
    if name not in state:
        raise ValueError(f"{source} does not hold a ToST model: it lacks {name}.")
    if state[name].ndim != ndim:
        raise ValueError(f"{source}: {name} must have {ndim} dimensions, got shape {tuple(state[name].shape)}.")
    return state[name].shape


def _count(state: StateDict, pattern: str) -> int:
    """How many different numbers the names have in a place."""
    return len({match[1] for name in state if (match := re.match(pattern, name))})


def _make_config(config_class: type[Config], fields: Mapping, source: Path) -> Any:
    try:
        return config_class(**fields)
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{source}: {error}") from error


def _reject_settings(config: Config, fixed: Mapping, source: Path) -> None:
    """Rejects a configuration with other values than these, the only ones in the authors' code."""
    for name, value in fixed.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{source} has {name}={getattr(config, name)!r}, but a model in the authors' format has {name}={value!r}."
            )


# Language models


def _language_config(state: StateDict, model_args: Mapping, source: Path) -> ToSTConfig:
    """The configuration by the tensors' shapes, which `model_args` must not contradict."""
    _reject_gpt2(state, model_args, source)
    vocab_size, n_embd = _shape(state, "transformer.wte.weight", 2, source)
    sizes = {
        "n_layer": _count(state, r"transformer\.h\.([^.]*)"),
        "n_head": _shape(state, "transformer.h.0.attn.temp", 2, source)[0],
        "n_embd": n_embd,
        "block_size": _shape(state, "transformer.wpe.weight", 2, source)[0],
        "bias": "transformer.ln_f.bias" in state,
        "vocab_size": vocab_size,
    }
    for name, size in sizes.items():
        if model_args.get(name, size) != size:
            raise ValueError(f"{source}: model_args says {name}={model_args[name]}, but the tensors say {name}={size}.")
    embedding, head = state["transformer.wte.weight"], state.get("lm_head.weight")
    tied = head is None or (head.dtype == embedding.dtype and torch.equal(head, embedding))  # as in the authors' models
    end_of_text = _END_OF_TEXT if vocab_size > _END_OF_TEXT else None
    fields = {_LANGUAGE_SETTINGS[name]: size for name, size in sizes.items()} | {
        "tie_word_embeddings": tied,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        **dict.fromkeys(_DROPOUTS, model_args.get("dropout", 0.0)),
    }
    return _make_config(ToSTConfig, fields, source)


def _reject_gpt2(state: StateDict, model_args: Mapping, source: Path) -> None:
    c_attn = state.get("transformer.h.0.attn.c_attn.weight")
    fused_qkv = c_attn is not None and c_attn.ndim == 2 and c_attn.shape[0] == 3 * c_attn.shape[1]
    if fused_qkv or not model_args.get("TSSA", True):
        reason = "c_attn projects to q, k and v" if fused_qkv else "model_args has TSSA=False"
        raise ValueError(
            f"{source} is a GPT-2 checkpoint with softmax attention ({reason}), not a ToST model; convert it as a GPT-2 "
            f"model instead."
        )


def _language_args(config: ToSTConfig, source: Path) -> dict:
    """`model_args` of the authors' code; rejects what that code cannot express."""
    if options := config.options():
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ValueError(
            f"{source} has options that are not in the authors' code ({given}); the authors' format has no place for "
            "these options."
        )
    if config.max_position_embeddings is None:
        raise ValueError(f"{source} is position-free (max_position_embeddings=None); the authors' format has no such model.")
    fixed = {
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "intermediate_size": 4 * config.hidden_size,
        **dict.fromkeys(_DROPOUTS, config.hidden_dropout),
    }
    _reject_settings(config, fixed, source)
    return {name: getattr(config, ours) for name, ours in _LANGUAGE_SETTINGS.items()} | {"TSSA": True}


# Vision models


def _vision_config(
    state: StateDict, args: Mapping, heads: int | None, normalize_patch_tokens: bool | None, source: Path
) -> ToSTVisionConfig:
    """The configuration by the tensors' shapes and, for what these do not show, by `args`."""
    if local := [name for name in state if any(module in name for module in _XCIT_MODULES)]:
        raise ValueError(
            f"{source} is an XCiT checkpoint with local patch interaction ({list_names(local, most=1)}), which neither ToST's "
            "trunk nor its baselines have; it cannot be converted."
        )
    width = _shape(state, "cls_token", 3, source)[2]
    attention_type = _attention_type(state, width, source)
    if normalize_patch_tokens is None:
        normalize_patch_tokens = args.get("tokens_norm", True)
    fields = {
        "hidden_size": width,
        "num_hidden_layers": _count(state, r"blocks\.([^.]*)"),
        "num_class_attention_layers": _count(state, r"cls_attn_blocks\.([^.]*)"),
        "num_attention_heads": _vision_heads(state, args, heads, attention_type, width, source),
        "intermediate_size": _shape(state, "blocks.0.mlp.fc1.weight", 2, source)[0],
        "image_size": args.get("input_size", 224),
        "patch_size": 2 ** _count(state, r"patch_embed\.proj\.([^.]*)\.0\.weight"),
        "num_channels": _shape(state, "patch_embed.proj.0.0.weight", 4, source)[1],
        "attention_type": attention_type,
        "normalize_patch_tokens": normalize_patch_tokens,
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "hidden_dropout": args.get("drop", 0.0),
        "embedding_dropout": args.get("drop", 0.0),
        "drop_path_rate": args.get("drop_path", 0.0),
        "num_labels": _shape(state, "head.weight", 2, source)[0],
    }
    return _make_config(ToSTVisionConfig, fields, source)


def _attention_type(state: StateDict, width: int, source: Path) -> str:
    if "blocks.0.attn.temperature" in state:
        return "xca"
    fused_qkv = _shape(state, "blocks.0.attn.qkv.weight", 2, source)[0] == 3 * width
    return "softmax" if fused_qkv and "blocks.0.attn.temp" not in state else "tssa"


def _vision_heads(state: StateDict, args: Mapping, heads: int | None, attention_type: str, width: int, source: Path) -> int:
    """The number of heads: a tensor's, except in a softmax baseline."""
    if attention_type != "softmax":
        name, ndim = ("temp", 2) if attention_type == "tssa" else ("temperature", 3)
        stored = _shape(state, f"blocks.0.attn.{name}", ndim, source)[0]
        if heads not in (None, stored):
            raise ValueError(f"{source}: {heads} attention heads are asked for, but the tensors say {stored}.")
        return stored
    size = re.search("tiny|small|medium|large", str(args.get("model")))
    preset: Mapping[str, Any] = VISION_PRESETS[f"tost-vision-{size[0]}-patch16"] if size else {}
    named = preset["num_attention_heads"] if preset.get("hidden_size") == width else None
    for known in (heads, args.get("num_heads"), named):
        if known is not None:
            return known
    raise ValueError(
        f"{source} has softmax attention, whose number of heads is not in the tensors, and args.model "
        f"({args.get('model')!r}) names no size of this width; give num_attention_heads (--num-attention-heads)."
    )


def _vision_args(config: ToSTVisionConfig, source: Path) -> dict:
    """What `args` of the authors' code says of a model; rejects what that code cannot express."""
    fixed = {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "attention_dropout": 0,
        "mlp_type": "mlp",
        "normalize_scores": True,
        "embedding_dropout": config.hidden_dropout,
    }
    _reject_settings(config, fixed, source)
    return {name: getattr(config, ours) for name, ours in _VISION_SETTINGS.items()}


# The transformers folder


def _model(config: Config) -> PreTrainedModel:
    """The model that a checkpoint is of, without memory for its weights."""
    return empty_model(config, ToSTForImageClassification if isinstance(config, ToSTVisionConfig) else ToSTForCausalLM)


__all__ = [
    "LANGUAGE_NAMES",
    "VISION_ATTENTION_NAMES",
    "VISION_NAMES",
    "convert_from_original",
    "convert_to_original",
    "rename",
]
