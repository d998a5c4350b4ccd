# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Which files of a model folder lead transformers to code that is not ToST's. Nothing here imports or runs any of it.

With `trust_remote_code=True`, transformers 5.18 to 5.23 finds code through:

- `auto_map`, in the configurations of models, tokenizers, processors, image, video and feature processors;
- `custom_pipelines` in config.json, which `pipeline()` imports;
- `custom_generate/generate.py`, which takes the place of `generate`, and any Python file that one of these names or imports;
- `base_model_name_or_path` in adapter_config.json: where PEFT is installed, that repository is loaded instead;
- attention implementations such as "owner/kernel", which the `kernels` package downloads;
- generation modes that were moved to repositories (`GENERATION_MODES_MAPPING` of generation/utils.py);
- `audio_tokenizer_name_or_path` of processors: the repository of a further model.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from ..model.base_tost import AUTO_MAPS, CODE_FILES


# files that `publish` replaces or removes in a repository
CODE_NAMES = {name for names in CODE_FILES.values() for name in names}
MAX_JSON_BYTES = 256 * 2**20
# of "custom_generate" the file is read today; the key is rejected should a configuration ever hold it
CODE_KEYS = ("auto_map", "custom_pipelines", "custom_generate", "base_model_name_or_path", "audio_tokenizer_name_or_path")
GENERATION_MODES = {  # the values with which the mode is off
    "constraints": (None,),
    "dola_layers": (None,),
    "force_words_ids": (None,),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
}
CLASS_REFERENCE = re.compile(r"[\w.-]+(?:/[\w.-]+)?--\w+\.\w+")  # as in "owner/repository--module.Class"


def foreign_code(files: dict[str, Path]) -> list[str]:
    """Why files of a model folder lead, or may lead, to code other than ToST's: one reason for each place, sorted.

    A file that only has the name of one of ToST's is not compared with it, and of config.json's own `auto_map` only the names
    are looked at: `verify` compares both with this version's.

    Args:
        files: name in the repository, with forward slashes -> where it lies.
    """
    reasons = [f"{name} is Python code that is not ToST's" for name in files if _is_foreign_python(name)]
    for name, path in files.items():
        if name.lower().endswith(".json"):
            reasons += [f"{name} leads to code that is not ToST's by {place}" for place in _references(name, path)]
    return sorted(set(reasons))


def _is_foreign_python(name: str) -> bool:
    return name.lower().endswith((".py", ".pyc", ".pyw", ".so", ".pyd")) and name not in CODE_NAMES


def _references(name: str, path: Path) -> Iterator[str]:
    """The keys and values of a JSON file that name code; none of a file that is no JSON, which transformers cannot read."""
    if path.stat().st_size > MAX_JSON_BYTES:
        yield f"anything in its more than {MAX_JSON_BYTES:,} bytes, which are too many to look through"
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return
    if name == "config.json" and isinstance(content, dict) and _is_own_auto_map(content.get("auto_map")):
        del content["auto_map"]
    pending = [content]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield from (key for key, inner in value.items() if _names_code(name, key, inner))
        if isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str) and "config" in name and CLASS_REFERENCE.fullmatch(value):  # not a vocabulary's token
            yield repr(value)


def _names_code(name: str, key: str, value) -> bool:
    if key in CODE_KEYS:
        return bool(value) and not isinstance(value, int | float)  # a number is a token's, in a vocabulary
    if key.lower().endswith(("attn_implementation", "attn_implementation_internal")):
        return "/" in json.dumps(value)
    return name in ("config.json", "generation_config.json") and value not in GENERATION_MODES.get(key, (value,))


def _is_own_auto_map(auto_map) -> bool:
    """Whether an `auto_map` names classes of ToST in files that `publish` replaces, by whichever version it was written."""
    classes = {reference.rpartition(".")[2] for references in AUTO_MAPS.values() for reference in references.values()}
    return isinstance(auto_map, dict) and all(
        isinstance(reference, str)
        and reference.count(".") == 1
        and f"{reference.partition('.')[0]}.py" in CODE_NAMES
        and reference.partition(".")[2] in classes
        for reference in auto_map.values()
    )
