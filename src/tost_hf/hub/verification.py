# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""`tost-hf verify`: is this folder or repository a complete, working, honest ToST model? And `tost-hf info`: what is it?"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from transformers import GenerationConfig, PreTrainedConfig

from ..cache_files import state_bytes
from ..model.base_tost import AUTO_MAPS, code_files
from ..model.configuration_tost import CAUSAL_STATISTICS
from ..version import __version__
from .checks import check_card, check_weights, load_config, model_class, parameter_count, weight_files
from .code_references import foreign_code
from .connection import download
from .loading import NUM_TOKENS, check_loading
from .publishing import forbidden_content, same_content
from .records import CARD, load_card
from .secrets import has_detect_secrets


@dataclass(frozen=True)
class Check:
    """One line of a report."""

    name: str
    passed: bool
    detail: str


def verify(source: str | os.PathLike, *, revision: str | None = None, token: str | None = None) -> list[Check]:
    """Checks a model folder, or a repository of the Hub after downloading it.

    The hashes of what was downloaded are compared with the Hub's listing; the configuration, the tensors' names, shapes and
    values, the card's metadata (by the Hub's own validation, for a repository) and the files' kinds are checked; then the
    model is loaded with this package's code (never the repository's) and run: a language model has to generate the same
    tokens with and without its cache, a vision model to give finite logits.

    Returns:
        One `Check` for each of these; the source is sound if all of them passed.

    Raises:
        OSError: the repository or the revision does not exist, or the Hub cannot be reached.

    Example:
        >>> [check.name for check in verify("./my-tost") if not check.passed]
    """
    local = os.path.isdir(source)
    checks: list[Check] = []
    folder, found = (Path(source), None) if local else download(str(source), revision, token)

    def check(name: str, run: Callable[[], str]) -> bool:
        try:
            checks.append(Check(name, True, run()))
        except (ValueError, OSError) as error:
            checks.append(Check(name, False, str(error)))
        except Exception as error:  # of a folder in which anything may be wrong
            checks.append(Check(name, False, f"{type(error).__name__}: {error}"))
        return checks[-1].passed

    if found is not None:
        check("hashes", lambda: _check_hashes(folder, found.siblings or []))
    check("files", lambda: _check_files(folder))
    if check("config", lambda: _describe(load_config(folder))):
        config, foreign = load_config(folder), foreign_code(_all_files(folder))
        check("code", lambda: _check_code(folder, config, foreign))
        # a model is not built where the configuration may name code to load
        if not foreign and check(
            "weights", lambda: f"{check_weights(folder, config):,} parameters, all finite, all in their places"
        ):
            check("model", lambda: _run(folder, config))
    check("card", lambda: _check_card(folder, None if local else token, online=not local))
    return checks


def _check_hashes(folder: Path, siblings) -> str:
    for sibling in siblings:
        path = folder / sibling.rfilename
        if not path.is_file():
            raise ValueError(f"{sibling.rfilename} is in the repository's listing, but was not downloaded.")
        if not same_content(sibling, path):
            raise ValueError(
                f"{sibling.rfilename} is not the file that the repository lists (its hash differs): it was changed on the "
                f"way, or in the cache ({path})."
            )
    return f"{len(siblings)} files are what the repository lists"


def _all_files(folder: Path) -> dict[str, Path]:
    """Name -> path of every file but those that git and the Hub's client keep."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in files.items() if not name.startswith((".cache/", ".git/"))}


def _check_files(folder: Path) -> str:
    files = _all_files(folder)
    if reasons := forbidden_content(folder, files):
        raise ValueError("; ".join(reasons))
    kinds = "nothing that looks like a secret" if has_detect_secrets() else "no token of the Hub (without detect-secrets)"
    return f"{len(files)} files, no pickle, no training state, {kinds}"


def _describe(config: PreTrainedConfig) -> str:
    return f"{model_class(config).__name__}, {config.num_hidden_layers} layers of width {config.hidden_size}"


def _run(folder: Path, config: PreTrainedConfig) -> str:
    loaded = check_loading(folder, config)
    return f"{loaded.output}; {_generate(loaded.model, config)}" if loaded.model.can_generate() else loaded.output


def _generate(model: Any, config: PreTrainedConfig) -> str:
    """Greedy tokens from the cache, against those of the whole sequence computed without one."""
    model.generation_config = GenerationConfig()  # not the folder's, by which generating may take any time
    start = config.bos_token_id if config.bos_token_id is not None else 0
    prompt = torch.tensor([[min(start, config.vocab_size - 1)]])
    wanted = min(NUM_TOKENS, (config.max_position_embeddings or NUM_TOKENS + 1) - 1)
    options = {"max_new_tokens": wanted, "min_new_tokens": wanted, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(prompt, attention_mask=torch.ones_like(prompt), use_cache=True, **options)
    uncached = model.generate(prompt, attention_mask=torch.ones_like(prompt), use_cache=False, **options)
    if not torch.equal(cached, uncached):
        raise ValueError(f"It generates {cached[0].tolist()} with its cache, but {uncached[0].tolist()} without it.")
    return f"generates {wanted} tokens, the same with and without its cache"


def _check_code(folder: Path, config: PreTrainedConfig, foreign: list[str]) -> str:
    if foreign:
        raise ValueError(f"{'; '.join(foreign)}. Do not set trust_remote_code for it.")
    there = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    auto_map = getattr(config, "auto_map", None)
    if not auto_map and not there:
        return "no remote code: loads where tost_hf is installed"
    if not auto_map:
        raise ValueError(f"It has {', '.join(there)}, but no auto_map in its config.json that names them.")
    if auto_map != AUTO_MAPS[config.model_type]:
        raise ValueError(f"Its config.json has an auto_map that is not that of tost_hf {__version__}; do not trust it.")
    ours = code_files(config.model_type)
    missing = sorted(set(ours) - set(there))
    if missing:
        raise ValueError(f"Its config.json has an auto_map, but {', '.join(missing)} is missing.")
    changed = [name for name, path in there.items() if name not in ours or path.read_bytes() != ours[name].read_bytes()]
    if changed:
        raise ValueError(
            f"Its code is not that of tost_hf {__version__} in {', '.join(changed)}. Another version wrote it, or it was "
            "changed: read it before you set trust_remote_code, or publish the model again."
        )
    return f"loads with trust_remote_code=True; the code is that of tost_hf {__version__}"


def _check_card(folder: Path, token: str | None, *, online: bool) -> str:
    card = check_card(folder)
    if online:
        with contextlib.suppress(OfflineModeIsEnabled):
            card.validate(repo_type="model")
    return f"licence {card.data.license}, {len(card.data.eval_results or [])} results in its metadata"


def _describe_state(config: PreTrainedConfig) -> str:
    """The size of the state of one sequence."""
    if not config.is_causal:
        return "none: an encoder sees the whole text at once"
    state = state_bytes(config)
    growth = f", and {state.per_token:,} with every token" if state.per_token else ""
    return f"{state.saved:,} bytes per sequence at any length ({state.in_memory:,} in memory){growth}"


def info(source: str | os.PathLike, *, revision: str | None = None, token: str | None = None) -> dict[str, str]:
    """What a folder or a repository holds, for `tost-hf info`; of a repository only small files are fetched.

    Returns:
        Names and values as they are printed.
    """
    facts = {}
    if os.path.isdir(source):
        folder = Path(source)
        sizes = {path.name: path.stat().st_size for path in weight_files(folder)}
    else:
        folder, found = download(str(source), revision, token, ["config.json", "README.md", "generation_config.json"])
        facts["repository"] = f"{found.id} at {found.sha}{', private' if found.private else ''}"
        listed = {sibling.rfilename: sibling.size or 0 for sibling in found.siblings or []}
        sizes = {name: size for name, size in listed.items() if name.endswith(".safetensors")}
    config = load_config(folder)
    facts["model"] = _describe(config)
    facts["heads"] = f"{config.num_attention_heads} of {config.hidden_size // config.num_attention_heads} channels"
    facts["parameters"] = f"{parameter_count(config):,}"
    facts["weights"] = ", ".join(f"{name} ({size:,} bytes)" for name, size in sizes.items())
    if config.model_type == "tost":
        facts["positions"] = (
            f"{config.max_position_embeddings:,}" if config.max_position_embeddings else "no limit (position-free)"
        )
        facts["state"] = _describe_state(config)
        if attention := [kind for kind in config.layer_types if kind != CAUSAL_STATISTICS]:
            kinds = ", ".join(f"{attention.count(kind)} {kind}" for kind in sorted(set(attention)))
            facts["layers"] = f"{config.num_hidden_layers}, of which {kinds}"
    else:
        facts["images"] = f"{config.image_size} pixels, patches of {config.patch_size}, attention {config.attention_type}"
    if options := [f"{name} {value}" for name, value in config.options().items() if name != "layer_types"]:
        facts["options"] = ", ".join(options)
    facts["code"] = (
        "included (trust_remote_code works)" if getattr(config, "auto_map", None) else "not included (needs tost_hf)"
    )
    if (folder / CARD).is_file():
        facts["licence"] = str(load_card(folder / CARD).data.license or "not named")
    return facts
