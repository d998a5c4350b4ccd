# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Converts checkpoints of the authors' code to transformers folders, and back.

Only this module loads pickles, with `weights_only=True`: no code in the file is run.
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
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .files import check_file, check_folder, name_file_in_errors, open_safetensors, read_json, staged_file, staged_folder
from .hub.loading import empty_model, load_config
from .image_processing import save_image_processor
from .model.configuration_tost import ToSTConfig
from .model.configuration_tost_vision import VISION_PRESETS, ToSTVisionConfig
from .model.modeling_tost import ToSTForCausalLM
from .model.modeling_tost_vision import ToSTForImageClassification


logger = logging.getLogger(__name__)

Config = ToSTConfig | ToSTVisionConfig
StateDict = dict[str, torch.Tensor]
PathLike = str | os.PathLike[str]

# Our name of each module or parameter, and the authors'; {} is the layer index.
_LANGUAGE_LAYER_NAMES = {
    "input_layernorm": "ln_1",
    "self_attn.in_proj": "attn.c_attn",
    "self_attn.out_proj": "attn.c_proj",
    "self_attn.temp": "attn.temp",
    "self_attn.denom_bias": "attn.denom_bias",
    "attention_layer_scale": "gamma1",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "mlp_layer_scale": "gamma2",
}
_LANGUAGE_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.embed_positions": "transformer.wpe",
    **{f"model.layers.{{}}.{ours}": f"transformer.h.{{}}.{authors}" for ours, authors in _LANGUAGE_LAYER_NAMES.items()},
    "model.norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
_VISION_LAYER_NAMES = {
    "attention_norm": "norm1",
    "attention_layer_scale": "gamma1",
    "mlp_norm": "norm2",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "mlp_layer_scale": "gamma2",
}
_SOFTMAX_NAMES = {"attention.qkv": "attn.qkv", "attention.out_proj": "attn.proj"}
_ATTENTION_NAMES = {  # by attention_type
    "tssa": {
        "attention.in_proj": "attn.qkv",  # a single projection, although it is named qkv
        "attention.temp": "attn.temp",
        "attention.out_proj": "attn.to_out.0",
    },
    "xca": {**_SOFTMAX_NAMES, "attention.temperature": "attn.temperature"},
    "softmax": _SOFTMAX_NAMES,
}
_VISION_NAMES = {
    "tost.class_token": "cls_token",
    # the authors' stem is a Sequential with an activation after every convolution except the last
    **{f"tost.embeddings.patch_embeddings.convolutions.{i}": f"patch_embed.proj.{2 * i}.0" for i in range(5)},
    **{f"tost.embeddings.patch_embeddings.norms.{i}": f"patch_embed.proj.{2 * i}.1" for i in range(5)},
    "tost.embeddings.position_embeddings.projection": "pos_embeder.token_projection",
    "tost.norm": "norm",
    "classifier": "head",
}

_LANGUAGE_SETTINGS = {  # from the authors' names in `model_args` to ours
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "block_size": "max_position_embeddings",
    "bias": "use_bias",
    "vocab_size": "vocab_size",
    "dropout": "hidden_dropout",
}
_VISION_SETTINGS = {  # from the authors' names in `args` to ours
    "input_size": "image_size",
    "nb_classes": "num_labels",
    "drop": "hidden_dropout",
    "drop_path": "drop_path_rate",
    # in the authors' code the model's name determines these two; `convert_from_original` reads them
    "num_heads": "num_attention_heads",
    "tokens_norm": "normalize_patch_tokens",
}
# values that are fixed in the authors' code
_FIXED_IN_LANGUAGE = {"tie_word_embeddings": True, "hidden_act": "gelu", "layer_norm_eps": 1e-5}
_FIXED_IN_VISION = {"hidden_act": "gelu", "layer_norm_eps": 1e-6, "attention_dropout": 0}

_WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+")  # prefixes by torch.compile and DDP
_VISION_MODULES = ("cls_token", "patch_embed.", "cls_attn_blocks.", "pos_embeder.")
_POSITION_PROJECTION = "pos_embeder.token_projection.weight"  # a 1x1 convolution in the authors' code, a Linear here
_END_OF_TEXT_ID = 50256  # of GPT-2's tokenizer, which the authors use
_DROPOUTS = ("hidden_dropout", "attention_dropout", "embedding_dropout")  # a single setting in the authors' code


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

    The folder contains `config.json`, `model.safetensors` and `generation_config.json` (language) or
    `preprocessor_config.json` (vision). It loads with `AutoModelForCausalLM` or `AutoModelForImageClassification`. Values and
    dtype of the tensors stay the same. The type of model and its sizes are inferred from the tensors; vision models are ToST
    and its baselines, the same model with cross-covariance or softmax attention. Checkpoints have no tokenizer: the authors'
    models use GPT-2's.

    Args:
        checkpoint: the file, a dict with the state dict, `model`, and usually `model_args` (language) or `args` (vision). Its
            other entries are ignored.
        output_dir: the folder to write.
        overwrite: whether to replace the model in a folder that is not empty; other files in it stay.
        ema: whether to use the EMA weights, `model_ema`. For vision models only, like the next two arguments.
        num_attention_heads: the number of heads of a softmax baseline, which cannot be inferred from its tensors; by default
            that of the authors' size that `args.model` names.
        normalize_patch_tokens: the authors' `tokens_norm`, which cannot be inferred from the tensors; by default the value in
            `args`, else true, as in all released models.

    Returns:
        `output_dir`.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        FileExistsError: `output_dir` is a file, or is not empty and `overwrite` is false.
        OSError: the folder cannot be written; partial output is removed.
        ValueError: the file is not such a checkpoint (the message says why), or loading it would run code that it names.

    Example:
        >>> folder = convert_from_original("out/ckpt.pt", "./my-tost")
        >>> model = AutoModelForCausalLM.from_pretrained(folder)
    """
    checkpoint, target = Path(checkpoint), Path(output_dir)
    check_folder(target, overwrite)
    contents, key = _load_pickle(checkpoint), "model_ema" if ema else "model"
    if not isinstance(contents, Mapping) or not isinstance(contents.get(key), Mapping):
        raise ValueError(f"{checkpoint} is not a checkpoint of the authors' code, a dict with a state dict under {key!r}.")
    state_dict = {_WRAPPERS.sub("", name): tensor for name, tensor in contents[key].items()}
    is_vision = any(name.startswith(_VISION_MODULES) for name in state_dict)
    if not is_vision and (num_attention_heads is not None or normalize_patch_tokens is not None):
        raise ValueError(
            f"{checkpoint} is not a vision checkpoint; num_attention_heads and normalize_patch_tokens do not apply."
        )
    settings = contents.get("args" if is_vision else "model_args", {})
    settings = vars(settings) if isinstance(settings, argparse.Namespace) else settings
    try:
        if is_vision:
            config: Config = _vision_config(state_dict, settings, num_attention_heads, normalize_patch_tokens)
        else:
            config = _language_config(state_dict, settings)
    except KeyError as error:
        raise ValueError(f"{checkpoint} does not contain a ToST model: it lacks {error.args[0]}.") from error
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{checkpoint}: {error}") from error
    model = _empty_model(config)
    _check_tensors(state_dict, _to_authors_state_dict(config, model.state_dict()), checkpoint)
    names = _authors_names(config)
    for name, tensor in model.state_dict().items():
        state_dict[name] = state_dict.pop(_rename(name, names)).reshape(tensor.shape).contiguous()
    model.load_state_dict(state_dict, assign=True)
    model.tie_weights()
    if not is_vision and not config.tie_word_embeddings:
        logger.warning("%s: lm_head differs from wte; the model is converted with tie_word_embeddings=False.", checkpoint)
    with staged_folder(target) as folder:
        model.save_pretrained(folder)
        if isinstance(config, ToSTVisionConfig):
            save_image_processor(config, folder)
    return target


def convert_to_original(model_dir: PathLike, output_file: PathLike, *, overwrite: bool = False) -> Path:
    """Converts a transformers folder to a checkpoint that the authors' code loads.

    The file of a `ToSTForCausalLM` contains `model`, `model_args`, and `iter_num`, `best_val_loss` and `config` as at the
    start of a run; that of a `ToSTForImageClassification` contains `model` and `args`, a plain dict. It has no `optimizer`, so
    the authors' training run cannot resume from it. `torch.load` loads it with `weights_only=True`.

    Args:
        model_dir: folder with `config.json` and `model.safetensors` (or its shards).
        output_file: the file to write, usually `ckpt.pt` (language) or `checkpoint.pth` (vision).
        overwrite: whether to replace an existing file.

    Returns:
        `output_file`.

    Raises:
        FileNotFoundError: the folder, its configuration or its weights are missing.
        FileExistsError: `output_file` exists and `overwrite` is false.
        OSError: the file cannot be written; partial output is removed.
        ValueError: the folder contains no such model, or one that the authors' code cannot represent (such as a position-free
            one), or `output_file` is one of the model's files.

    Example:
        >>> convert_to_original("./my-tost", "ckpt.pt")
    """
    source, target = Path(model_dir), Path(output_file)
    model_config = cast(Config, load_config(source))
    weights = _weights_files(source)
    check_file(target, overwrite, sources=[source / CONFIG_NAME, *weights])
    settings: dict[str, object]
    if isinstance(model_config, ToSTVisionConfig):
        fixed = {**_FIXED_IN_VISION, "embedding_dropout": model_config.hidden_dropout}
        settings = {"args": _authors_settings(model_config, _VISION_SETTINGS, fixed, source)}
    else:
        fixed = {**_FIXED_IN_LANGUAGE, "intermediate_size": 4 * model_config.hidden_size}
        fixed |= dict.fromkeys(_DROPOUTS, model_config.hidden_dropout)
        model_args = _authors_settings(model_config, _LANGUAGE_SETTINGS, fixed, source)
        settings = {"model_args": model_args | {"TSSA": True}}
        settings |= {"iter_num": 0, "best_val_loss": torch.tensor(1e9), "config": {}}
    state_dict: StateDict = {}
    for path in weights:
        with open_safetensors(path) as file:
            state_dict |= {name: file.get_tensor(name) for name in file.keys()}
    if "model.embed_tokens.weight" in state_dict:  # tied weights, which the authors' format stores twice
        state_dict["lm_head.weight"] = state_dict["model.embed_tokens.weight"]
    _check_tensors(state_dict, _empty_model(model_config).state_dict(), source)
    with staged_file(target) as staged:
        torch.save({"model": _to_authors_state_dict(model_config, state_dict)} | settings, staged)
    return target


def _weights_files(folder: Path) -> list[Path]:
    """The safetensors files that `from_pretrained` reads."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if (folder / SAFE_WEIGHTS_NAME).is_file() or not index.is_file():
        return [folder / SAFE_WEIGHTS_NAME]
    with name_file_in_errors(index):
        return [folder / name for name in sorted({*read_json(index)["weight_map"].values()})]


# Names and tensors


def _authors_names(config: Config) -> dict[str, str]:
    """From our names of modules and parameters to the authors'."""
    names = _LANGUAGE_NAMES
    if isinstance(config, ToSTVisionConfig):
        layer_names = _VISION_LAYER_NAMES | _ATTENTION_NAMES[config.attention_type]
        class_layer_names = _VISION_LAYER_NAMES | _SOFTMAX_NAMES
        names = _VISION_NAMES | {f"tost.layers.{{}}.{x}": f"blocks.{{}}.{y}" for x, y in layer_names.items()}
        names |= {f"tost.class_attention_layers.{{}}.{x}": f"cls_attn_blocks.{{}}.{y}" for x, y in class_layer_names.items()}
    num_layers = max(config.num_hidden_layers, getattr(config, "num_class_attention_layers", 0))
    return {ours.format(i): authors.format(i) for ours, authors in names.items() for i in range(num_layers)}


def _rename(name: str, names: Mapping[str, str]) -> str:
    """The authors' name of a parameter; `names` contains its own or that of its module."""
    module, _, leaf = name.rpartition(".")
    return names[name] if name in names else f"{names[module]}.{leaf}"


def _to_authors_state_dict(config: Config, state_dict: StateDict) -> StateDict:
    """A model's state dict with the authors' names and shapes."""
    names = _authors_names(config)
    authors_state_dict = {_rename(name, names): tensor for name, tensor in state_dict.items()}
    if _POSITION_PROJECTION in authors_state_dict:
        authors_state_dict[_POSITION_PROJECTION] = authors_state_dict[_POSITION_PROJECTION][..., None, None]
    return authors_state_dict


def _check_tensors(state_dict: StateDict, expected: StateDict, source: Path) -> None:
    """Raises ValueError unless the tensors are finite and have the expected names, shapes and kinds of dtype."""
    for verb, names in (("lacks", expected.keys() - state_dict.keys()), ("has", state_dict.keys() - expected.keys())):
        if names:
            first_names = ", ".join(sorted(names)[:5])
            raise ValueError(
                f"{source} does not contain the tensors of a ToST model: it {verb} {first_names}, {len(names)} in all."
            )
    for name, tensor in state_dict.items():
        if tensor.shape != expected[name].shape or tensor.is_floating_point() != expected[name].is_floating_point():
            raise ValueError(
                f"{source}: {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, instead of "
                f"{tuple(expected[name].shape)} and {expected[name].dtype}."
            )
        if not tensor.isfinite().all():
            raise ValueError(f"{source}: {name} has NaN or infinite values; use weights from before training diverged.")


def _empty_model(config: Config) -> PreTrainedModel:
    return empty_model(config, ToSTForImageClassification if isinstance(config, ToSTVisionConfig) else ToSTForCausalLM)


# The authors' file


def _load_pickle(path: Path) -> Any:
    try:
        # "args" of the authors' vision checkpoints is a Namespace
        with torch.serialization.safe_globals([argparse.Namespace]):
            # with memory mapping the optimizer's state is never read
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError:
        raise
    except Exception as error:  # torch.load raises exceptions of many types on other files
        raise ValueError(
            f"{path} cannot be loaded without running code that it names: it is not a checkpoint, is damaged, or contains "
            "more than tensors, numbers, strings, lists and dicts."
        ) from error


def _authors_settings(config: Config, names: Mapping[str, str], fixed: Mapping, source: Path) -> dict[str, object]:
    """`model_args` or `args` of a configuration; ValueError if the authors' code cannot represent it."""
    unsupported = config.options() | {name: getattr(config, name) for name in fixed if getattr(config, name) != fixed[name]}
    if unsupported:
        options = ", ".join(f"{name}={value!r}" for name, value in unsupported.items())
        raise ValueError(f"{source} has {options}; the authors' format has no such options.")
    return {name: getattr(config, ours) for name, ours in names.items()}


def _count_modules(state_dict: StateDict, pattern: str) -> int:
    """The number of different values of the pattern's group in the names."""
    return len({match[1] for name in state_dict if (match := re.match(pattern, name))})


def _language_config(state_dict: StateDict, model_args: Mapping) -> ToSTConfig:
    """Infers the configuration from the tensors' shapes, which `model_args` must not contradict."""
    embedding, head = state_dict["transformer.wte.weight"], state_dict.get("lm_head.weight")
    sizes = {
        "n_layer": _count_modules(state_dict, r"transformer\.h\.([^.]*)"),
        "n_head": len(state_dict["transformer.h.0.attn.temp"]),
        "n_embd": embedding.shape[-1],
        "block_size": len(state_dict["transformer.wpe.weight"]),
        "bias": "transformer.ln_f.bias" in state_dict,
        "vocab_size": len(embedding),
    }
    for name, size in sizes.items():
        if model_args.get(name, size) != size:
            raise ValueError(f"model_args says {name}={model_args[name]}, but the tensors say {name}={size}.")
    end_of_text_id = _END_OF_TEXT_ID if len(embedding) > _END_OF_TEXT_ID else None
    fields: dict[str, Any] = {_LANGUAGE_SETTINGS[name]: size for name, size in sizes.items()}
    fields |= dict.fromkeys(_DROPOUTS, model_args.get("dropout", 0.0))
    fields |= dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text_id)
    return ToSTConfig(**fields, tie_word_embeddings=head is None or torch.equal(head, embedding))


def _vision_config(state_dict: StateDict, args: Mapping, heads: int | None, normalize_tokens: bool | None) -> ToSTVisionConfig:
    """Infers the configuration from the tensors' shapes; `args` supplies what they do not determine."""
    width = state_dict["cls_token"].shape[-1]
    if "blocks.0.attn.temperature" in state_dict:
        attention_type, heads = "xca", len(state_dict["blocks.0.attn.temperature"])
    elif len(state_dict["blocks.0.attn.qkv.weight"]) == 3 * width:
        attention_type, heads = "softmax", _softmax_heads(args, heads, width)
    else:
        attention_type, heads = "tssa", len(state_dict["blocks.0.attn.temp"])
    fields = {
        "hidden_size": width,
        "num_hidden_layers": _count_modules(state_dict, r"blocks\.([^.]*)"),
        "num_class_attention_layers": _count_modules(state_dict, r"cls_attn_blocks\.([^.]*)"),
        "num_attention_heads": heads,
        "intermediate_size": len(state_dict["blocks.0.mlp.fc1.weight"]),
        "image_size": args.get("input_size", 224),
        "patch_size": 2 ** _count_modules(state_dict, r"patch_embed\.proj\.([^.]*)\.0\.weight"),
        "num_channels": state_dict["patch_embed.proj.0.0.weight"].shape[1],
        "attention_type": attention_type,
        "normalize_patch_tokens": args.get("tokens_norm", True) if normalize_tokens is None else normalize_tokens,
        "qkv_bias": "blocks.0.attn.qkv.bias" in state_dict,
        "hidden_dropout": args.get("drop", 0.0),
        "embedding_dropout": args.get("drop", 0.0),
        "drop_path_rate": args.get("drop_path", 0.0),
        "num_labels": len(state_dict["head.weight"]),
    }
    return ToSTVisionConfig(**fields)


def _softmax_heads(args: Mapping, heads: int | None, width: int) -> int:
    """The number of heads of a softmax baseline: the argument, that in `args`, or that of the size that `args.model` names."""
    size = re.search("tiny|small|medium|large", str(args.get("model")))
    preset: Mapping[str, Any] = VISION_PRESETS[f"tost-vision-{size[0]}-patch16"] if size else {}
    preset_heads = preset["num_attention_heads"] if preset.get("hidden_size") == width else None
    for num_heads in (heads, args.get("num_heads"), preset_heads):
        if num_heads is not None:
            return num_heads
    raise ValueError(
        "the number of heads of softmax attention cannot be inferred from the tensors, and args.model "
        f"({args.get('model')!r}) names no size of this width; give num_attention_heads (--num-attention-heads)."
    )


__all__ = ["convert_from_original", "convert_to_original"]
