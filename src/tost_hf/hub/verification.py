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

from ..files import name_file_in_errors
from ..model.base_tost import AUTO_MAPS, code_files
from ..version import __version__
from .cards import describe
from .checks import check_card, load_config, model_class
from .contents import check_no_hub_token, check_references, model_files
from .loading import NUM_TOKENS, check_loading, resolve_model_folder
from .records import CARD, load_card


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

    Compares the hashes of downloaded files with the Hub's listing, except offline; checks the configuration, the code, the
    card's metadata (a repository's also by the Hub), and the tensors' names, shapes and values; loads the model, from the
    files that `publish` sends and no others, with this package's code, never with remote code, and runs it: a language model
    must generate the same tokens with and without its cache, a vision model must return finite logits.

    Returns:
        One `Check` for each of these; the source is valid if all of them passed.

    Raises:
        OSError: the repository or the revision does not exist, or is not in the cache and the Hub cannot be reached.

    Example:
        >>> [check.name for check in verify("./my-tost") if not check.passed]
    """
    folder = resolve_model_folder(source, revision, token)
    is_repository = not os.path.isdir(source)
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    checks: list[Check] = []

    def check(name: str, run: Callable[[], str]) -> bool:
        try:
            checks.append(Check(name, True, run()))
        except Exception as error:  # a damaged folder may raise exceptions of any type
            prefix = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
            checks.append(Check(name, False, f"{prefix}{error}"))
        return checks[-1].passed

    if is_repository:
        check("hashes", lambda: _check_hashes(str(source), folder, token))
    check("files", lambda: _check_files(files))
    # if the configuration may refer to foreign code, the model is not built
    if check("config", lambda: _check_config(folder, files)):
        config = load_config(folder)
        check("code", lambda: _check_code(folder, config))
        check("model", lambda: _run(folder, config))
    check("card", lambda: _check_card(folder, online=is_repository))
    return checks


def _check_hashes(repo_id: str, folder: Path, token: str | None) -> str:
    if is_offline_mode():
        return "not compared with the repository's listing, as HF_HUB_OFFLINE is set"
    result = HfApi(token=token).verify_repo_checksums(repo_id, revision=folder.name)
    if invalid_paths := [*(mismatch["path"] for mismatch in result.mismatches), *result.missing_paths]:
        raise ValueError(
            f"Missing from {result.verified_path}, or different from the repository's listing: {', '.join(invalid_paths)}."
        )
    return f"{result.checked_count} files have the hashes that the repository lists"


def _check_files(files: dict[str, Path]) -> str:
    check_no_hub_token(files)
    return f"{len(files)} files, no token of the Hub"


def _check_config(folder: Path, files: dict[str, Path]) -> str:
    check_references(files)
    config = load_config(folder)
    return f"{model_class(config).__name__}, {config.num_hidden_layers} layers of width {config.hidden_size}"


def _run(folder: Path, config: PreTrainedConfig) -> str:
    model, output = check_loading(folder, model_files(folder), config)
    generated = f"; {_generate(model, config)}" if model.can_generate() else ""
    return f"{model.num_parameters():,} parameters, all finite; {output}{generated}"


def _generate(model: Any, config: PreTrainedConfig) -> str:
    """Compares the logits of greedy generation with and without the cache."""
    model.generation_config = GenerationConfig()  # the folder's may ask for arbitrarily long generation
    num_tokens = min(NUM_TOKENS, config.max_position_embeddings // 2)
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


def _check_code(folder: Path, config: PreTrainedConfig) -> str:
    code = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.py"))}
    auto_map = getattr(config, "auto_map", None)
    if not auto_map and not code:
        return "no remote code: loads where tost_hf is installed"
    if auto_map != AUTO_MAPS[config.model_type] or code != {
        name: path.read_bytes() for name, path in code_files(config.model_type).items()
    }:
        raise ValueError(
            f"Its code is not that of tost_hf {__version__}: another version wrote it, or it was changed. Read it before you "
            "set trust_remote_code, or publish the model again."
        )
    return f"loads with trust_remote_code=True; the code is that of tost_hf {__version__}"


def _check_card(folder: Path, online: bool) -> str:
    card = check_card(folder)
    if online:
        with contextlib.suppress(OfflineModeIsEnabled):
            card.validate(repo_type="model")
    return f"license {card.data.get('license')}, {len(card.data.get('eval_results') or [])} results in its metadata"


def info(source: str | os.PathLike, *, revision: str | None = None, token: str | None = None) -> dict[str, str]:
    """Facts about a model folder or repository, for `tost-hf info`; of a repository only small files are downloaded.

    Returns:
        Displayed names and values. Without access to the Hub, the weights are those in the cache.
    """
    facts = {}
    folder = resolve_model_folder(source, revision, token, only_description=True)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
    if not os.path.isdir(source):
        facts["repository"] = f"{source} at {folder.name}"
        with contextlib.suppress(HTTPError, OfflineModeIsEnabled):  # without the Hub, of what the cache contains
            hub_info = HfApi(token=token).model_info(str(source), revision=folder.name, files_metadata=True)
            facts["repository"] += ", private" if hub_info.private else ""
            file_sizes = {sibling.rfilename: sibling.size or 0 for sibling in hub_info.siblings or []}
            sizes = {name: size for name, size in file_sizes.items() if name.endswith(".safetensors")}
    config = load_config(folder)
    facts["model"] = model_class(config).__name__
    with name_file_in_errors(folder / CONFIG_NAME):
        facts |= describe(config)
    facts["weights"] = ", ".join(f"{name} ({size:,} bytes)" for name, size in sizes.items())
    facts["code"] = (
        "included (trust_remote_code works)" if getattr(config, "auto_map", None) else "not included (needs tost_hf)"
    )
    if (folder / CARD).is_file():
        facts["license"] = str(load_card(folder / CARD).data.get("license") or "not named")
    return facts
