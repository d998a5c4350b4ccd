# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""`tost-hf verify` checks that a folder or repository is a complete, working ToST model; `tost-hf info` describes it."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, is_offline_mode
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME

from ..files import name_file_in_errors, read_json
from ..model.base_tost import AUTO_MAPS, code_files
from ..version import __version__
from .cards import check_card, describe
from .loading import (
    NUM_TOKENS,
    load_config,
    load_model,
    load_processor,
    model_class,
    resolve_model_folder,
    run_model,
)
from .publishing import check_texts
from .results import CARD, load_card


# of logits with and without a cache, in their standard deviations
CACHE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05, torch.float64: 1e-9}


@dataclass(frozen=True)
class Check:
    """The result of one check of `verify`."""

    name: str
    passed: bool
    detail: str


def verify(source: str | os.PathLike, *, revision: str | None = None, token: str | None = None) -> list[Check]:
    """Checks a model folder, or a repository of the Hub after downloading it; with HF_HUB_OFFLINE, what the cache contains.

    Of a repository it compares the hashes of its files with the Hub's listing, except offline. It checks the configuration,
    compares the code with this version's, and loads model and tokenizer or image processor as `from_pretrained` does, never
    with remote code. The model's output must be finite, a language model's the same with and without its cache. The card must
    be one that can be published.

    Returns:
        One `Check` for each of these; the source is valid if all of them passed.

    Raises:
        OSError: the repository or the revision does not exist, or is not in the cache and the Hub cannot be reached.

    Example:
        >>> [check.name for check in verify("./my-tost") if not check.passed]
    """
    folder = resolve_model_folder(source, revision, token)
    is_repository = not os.path.isdir(source)
    checks: dict[str, Callable[[], str]] = {
        "files": lambda: _check_files(folder),
        "code": lambda: _check_code(folder),
        "model": lambda: _check_model(folder),
        "card": lambda: _check_card(folder, online=is_repository),
    }
    if is_repository:
        checks = {"hashes": lambda: _check_hashes(str(source), folder, token)} | checks
    return [_run_check(name, check) for name, check in checks.items()]


def _run_check(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except Exception as error:  # a damaged folder may raise exceptions of any type
        return Check(name, False, str(error) if isinstance(error, ValueError | OSError) else repr(error))


def _check_hashes(repo_id: str, folder: Path, token: str | None) -> str:
    if is_offline_mode():
        return "not compared with the repository's listing, as HF_HUB_OFFLINE is set"
    result = HfApi(token=token).verify_repo_checksums(repo_id, revision=folder.name)
    if invalid_paths := [*(mismatch["path"] for mismatch in result.mismatches), *result.missing_paths]:
        raise ValueError(
            f"Missing from {result.verified_path}, or different from the repository's listing: {', '.join(invalid_paths)}."
        )
    return f"{result.checked_count} files have the hashes that the repository lists"


def _check_files(folder: Path) -> str:
    check_texts(folder)
    return f"{sum(path.is_file() for path in folder.rglob('*'))} files, no token of the Hub"


def _check_model(folder: Path) -> str:
    config: Any = load_config(folder, strict=True)
    model, processor = load_model(folder, config), load_processor(folder, config)
    results = [f"{type(model).__name__}, {model.num_parameters():,} parameters, all finite; {run_model(model, processor)}"]
    if model.can_generate():
        results.append(_generate(model, config))
    if processor is not None:
        results.append(f"{type(processor).__name__} loads")
    return "; ".join(results)


def _generate(model: Any, config: PreTrainedConfig) -> str:
    """Compares the logits of greedy generation with and without the cache."""
    model.generation_config = GenerationConfig()  # the folder's may ask for arbitrarily long generation
    num_tokens = max(1, min(NUM_TOKENS, config.max_position_embeddings // 2))
    prompt = torch.linspace(0, config.vocab_size - 1, num_tokens).long()[None]
    options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True, "attention_mask": torch.ones_like(prompt)}
    cached = model.generate(prompt, use_cache=True, **options)
    logits = model(cached.sequences[:, :-1], use_cache=False).logits[0, num_tokens - 1 :].float()
    difference = ((torch.cat(cached.logits).float() - logits).abs().max() / logits.std()).item()
    if difference > CACHE_TOLERANCE[model.dtype]:
        raise ValueError(
            f"Its logits with its cache differ from those without by {difference:.1g} of their standard deviation: this "
            f"version of transformers ({transformers.__version__}) may not suit it."
        )
    return f"generates {num_tokens} tokens, with the logits that it has without its cache"


def _check_code(folder: Path) -> str:
    code = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.py")}
    auto_maps = [x for path in sorted(folder.glob("*config.json")) if (x := read_json(path).get("auto_map"))]
    if not code and not auto_maps:
        return "no remote code: loads where tost_hf is installed"
    model_type = load_config(folder).model_type
    expected = {name: path.read_bytes() for name, path in code_files(model_type).items()}
    if auto_maps != [AUTO_MAPS[model_type]] or code != expected:
        raise ValueError(
            f"Its code is not that of tost_hf {__version__}: another version wrote it, or it was changed. Read it before you "
            "set trust_remote_code, or publish the model again."
        )
    return f"loads with trust_remote_code=True; the code is that of tost_hf {__version__}"


def _check_card(folder: Path, online: bool) -> str:
    card = check_card(folder / CARD)
    if online:
        with contextlib.suppress(OfflineModeIsEnabled):
            card.validate(repo_type="model")
    return f"license {card.data.get('license')}, {len(card.data.get('eval_results') or [])} results in its metadata"


def info(source: str | os.PathLike, *, revision: str | None = None, token: str | None = None) -> dict[str, str]:
    """Describes a model folder or repository, for `tost-hf info`; of a repository only small files are downloaded.

    Returns:
        Displayed names and values. Without access to the Hub, the weights are those in the cache.
    """
    description = {}
    folder = resolve_model_folder(source, revision, token, only_description=True)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
    if not os.path.isdir(source):
        description["repository"] = f"{source} at {folder.name}"
        with contextlib.suppress(HTTPError, OfflineModeIsEnabled):  # without the Hub, of what the cache contains
            hub_info = HfApi(token=token).model_info(str(source), revision=folder.name, files_metadata=True)
            description["repository"] += ", private" if hub_info.private else ""
            file_sizes = {sibling.rfilename: sibling.size or 0 for sibling in hub_info.siblings or []}
            sizes = {name: size for name, size in file_sizes.items() if name.endswith(".safetensors")}
    config = load_config(folder)
    description["model"] = model_class(config).__name__
    with name_file_in_errors(folder / CONFIG_NAME):
        description |= describe(config)
    description["weights"] = ", ".join(f"{name} ({size:,} bytes)" for name, size in sizes.items())
    has_code = bool(getattr(config, "auto_map", None))
    description["code"] = "included (trust_remote_code works)" if has_code else "not included (needs tost_hf)"
    if (folder / CARD).is_file():
        description["license"] = str(load_card(folder / CARD).data.get("license") or "not named")
    return description
