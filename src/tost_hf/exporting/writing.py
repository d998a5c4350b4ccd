# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""`tost-hf export`: a model's program in a format, checked against the model, with all that is needed to run it."""

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, snapshot_download
from transformers import PreTrainedConfig, PreTrainedModel

from ..cache_files import state_bytes
from ..files import check_folder, staged_folder
from ..hub.checks import load_config
from ..hub.connection import hub_calls, listing
from ..hub.loading import TOKENIZER_FILES, load_fitting_tokenizer, load_model
from ..hub.records import IMAGE_PROCESSOR_FILES
from . import executorch_files
from .comparing import Agreement, compare
from .programs import MASKED, LanguageProgram, ModelProgram, Sizes, TensorSpec, VisionProgram, program_of
from .runtime import load


FACTS = "export.json"
DTYPES = ("float32", "float16", "int8")
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "int8": 0.2}  # see `compare`


class Format(NamedTuple):
    """A kind of file that programs are written as."""

    module: str  # of this room: `trace`, `write`, `MODEL_FILE`
    needs: tuple[str, ...]  # modules, besides those of this package
    dtypes: tuple[str, ...]


ONNX = ("onnx", "onnxscript", "onnxruntime")
FORMATS = {
    "onnx": Format("onnx_files", ONNX, DTYPES),
    "openvino": Format("openvino_files", (*ONNX, "openvino"), ("float32", "float16")),
    "executorch": Format("executorch_files", ("executorch",), ("float32",)),
    "torch": Format("torch_files", (), ("float32", "float16")),
}


class Exported(NamedTuple):
    """What `export_model` wrote."""

    folder: Path
    agreement: Agreement


def export_model(
    source: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    format: str = "onnx",
    dtype: str = "float32",
    tokenizer: str | os.PathLike | None = None,
    revision: str | None = None,
    overwrite: bool = False,
) -> Exported:
    """Writes a model for another runtime, after checking that it computes the same there.

    The folder gets the program, `export.json` (inputs, outputs, the state of a language model, and how closely the program
    agrees with the model), the tokenizer or image processor, a script that runs it without this package, and a README.md.

    Args:
        source: a model folder, or a repository of the Hub.
        format: one of `FORMATS`. Each is one program for all batches, lengths and image sizes; a language model's takes a
            prompt, in parts or whole, and single tokens, and its state goes in and comes out as float32. But in
            "executorch" all shapes are fixed: one row, of one token or of a prompt's next 32, or one image of the
            configured size; layers of attention remember 1,024 tokens at most.
        dtype: "float32", "float16" (statistics stay in float32) or, for "onnx" alone, "int8" (weights of matrix products, by
            ONNX Runtime's own quantiser).
        tokenizer: a folder or repository to take the tokenizer from; by default the model's own, if it has one.
        overwrite: write into a folder that is not empty.

    Raises:
        ValueError: the model cannot be exported, or gives other numbers there; or the tokenizer does not fit it.
        ImportError: the format's packages are not installed.
        OSError: the model is not there, or the folder cannot be written.
    """
    _check_format(format, dtype)
    target = Path(output_dir)
    check_folder(target, overwrite)
    folder = model_folder(source, revision)
    config = load_config(folder)
    found = _tokenizer(folder, config, tokenizer)
    program = program_of(_in_dtype(load_model(folder, config), dtype))
    files = importlib.import_module(f".{FORMATS[format].module}", __package__)
    traced = files.trace(program)
    with staged_folder(target) as staged:
        path = files.write(traced, staged, dtype)
        facts = describe(program, format, dtype, path.name)
        agreement = _compare(program, staged, facts, fixed_sizes(program, format), TOLERANCES[dtype])
        facts["agreement"] = agreement._asdict()
        (staged / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        if found is not None:
            found.save_pretrained(staged)
        for name in IMAGE_PROCESSOR_FILES:
            if isinstance(program, VisionProgram) and (folder / name).is_file():
                shutil.copyfile(folder / name, staged / name)
        _write_script_and_page(staged, program, facts, agreement)
    return Exported(target, agreement)


def _check_format(format: str, dtype: str) -> None:
    if format not in FORMATS:
        raise ValueError(f"There is no export format {format!r}; choose one of {', '.join(FORMATS)}.")
    if dtype not in FORMATS[format].dtypes:
        raise ValueError(f"The format {format} is written in {', '.join(FORMATS[format].dtypes)}, not in {dtype!r}.")
    for module in FORMATS[format].needs:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ImportError(
                f"Exporting to {format} needs {module}, which is missing: pip install {' '.join(_packages(format))}."
            ) from error


def _packages(format: str) -> list[str]:
    """What pip is to install."""
    own = [module for module in FORMATS[format].needs if module not in ONNX]
    return ["'tost-hf[export]'"] * (len(own) < len(FORMATS[format].needs)) + own


def fixed_sizes(program: ModelProgram, format: str) -> Sizes | None:
    """The sizes of all dimensions, in a format that has no free ones."""
    return executorch_files.fixed_sizes(program) if format == "executorch" else None


def _compare(program: ModelProgram, folder: Path, facts: dict, fixed: Sizes | None, tolerance: float) -> Agreement:
    """`compare`, in which whatever a runtime raises is a ValueError: it is no matter of the disk."""
    try:
        return compare(program, load(folder, facts), tolerance, fixed)
    except ValueError:
        raise
    except Exception as error:  # each runtime has exceptions of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"The exported program does not run: {reason}. Nothing was written.") from error


def model_folder(source: str | os.PathLike, revision: str | None = None) -> Path:
    """The folder of a model: as it is, or of a repository after downloading it.

    Raises:
        OSError: there is no such folder or repository, or the Hub cannot be reached.
    """
    if os.path.isdir(source):
        return Path(source)
    if os.path.isabs(source) or os.fspath(source).startswith(".") or os.path.exists(source):
        raise FileNotFoundError(f"There is no model folder {os.fspath(source)!r}.")
    with hub_calls():
        sha = listing(HfApi(), os.fspath(source), revision).sha
        return Path(snapshot_download(os.fspath(source), revision=sha))


def _tokenizer(folder: Path, config: PreTrainedConfig, source: str | os.PathLike | None) -> Any:
    if config.model_type != "tost":
        if source is not None:
            raise ValueError("This model reads images; a tokenizer is for text models.")
        return None
    if source is None and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return load_fitting_tokenizer(os.fspath(folder if source is None else source), config)


def _in_dtype(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    return model.half() if dtype == "float16" else model.float()


def describe(program: ModelProgram, format: str, dtype: str, file: str) -> dict:
    """What `export.json` holds besides the agreement: all that a runtime has to know.

    `state` lists the tensors of a language model's state with the names under which they go in and come out. Before the
    first token they are zeros, and a dimension "cached" is 0. Where shapes are fixed, `methods` are those of the file with
    the number of tokens that each takes; the shapes are those of one token.
    """
    config: Any = program.model.config
    sizes = fixed_sizes(program, format) or {}

    def tensor(spec: TensorSpec) -> dict:
        return {"name": spec.name, "dtype": spec.dtype, "shape": [sizes.get(str(n), n) for n in spec.shape]}

    facts: dict[str, Any] = {
        "format": format,
        "model": file,
        "dtype": dtype,
        "architecture": type(program.model).__name__,
        "inputs": [tensor(spec) for spec in program.inputs],
        "outputs": [tensor(spec) for spec in program.outputs],
    }
    if sizes:
        facts["methods"] = executorch_files.methods(program)
    if isinstance(program, LanguageProgram):
        names = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
        facts |= {name: getattr(config, name) for name in names}
        if sizes and program.attends:  # it remembers no more
            facts["max_position_embeddings"] = sizes[MASKED]
        facts["statistics_layers"] = [i for i, kind in enumerate(config.all_layer_types) if "statistics" in kind]
        facts["num_attention_heads"] = config.num_attention_heads
        size = state_bytes(config)
        facts |= {"state_bytes": size.saved, "state_bytes_per_token": size.per_token}
        facts["state"] = [
            tensor(spec) | {"input": came.name, "output": left.name}
            for spec, came, left in zip(program.state, program.inputs[-len(program.state) :], program.outputs[2:])
        ]
    elif isinstance(program, VisionProgram):
        facts |= {name: getattr(config, name) for name in ("image_size", "patch_size", "num_attention_heads", "num_labels")}
        facts["labels"] = [config.id2label[i] for i in range(config.num_labels)]
    return facts


RUNTIMES = {  # and the packages that run it
    "onnx": ("ONNX Runtime", "onnxruntime"),
    "openvino": ("OpenVINO", "openvino"),
    "executorch": ("ExecuTorch", "executorch torch"),
    "torch": ("torch.export", "torch"),
}
SCRIPTS = {"generate.py": "run_language_model.py", "classify.py": "run_vision_model.py"}
PAGE = """\
# {architecture} for {runtime}

`{model}` is a {architecture} in {dtype}, written by `tost-hf export` (https://arxiv.org/abs/2412.17810). It takes {takes}.
`export.json` names its inputs and outputs.

{agreement}
"""
CALL = """
```python
import json
from pathlib import Path
from runtime import load

run = load(Path("."), json.loads(Path("export.json").read_text()))  # takes inputs by name, gives outputs by name
```
"""


def _write_script_and_page(folder: Path, program: ModelProgram, facts: dict, agreement: Agreement) -> None:
    runtime, packages = RUNTIMES[facts["format"]]
    words = {key: facts[key] for key in ("architecture", "model", "dtype")} | {"runtime": runtime}
    page = PAGE.format(**words, takes=_takes(program, facts), agreement=agreement)
    if isinstance(program, LanguageProgram):
        page += f"\n{_state(facts)}\n"
    shutil.copyfile(Path(__file__).with_name("runtime.py"), folder / "runtime.py")
    name, argument, also = "", "", ""
    if isinstance(program, LanguageProgram):
        name, argument, also = "generate.py", '"Once upon a time"', "tokenizers"
    elif "num_labels" in facts and program.outputs[0].name == "logits":
        name, argument, also = "classify.py", "picture.png", "pillow"
    if name:
        shutil.copyfile(Path(__file__).with_name(SCRIPTS[name]), folder / name)
        page += f"\n```bash\npip install {packages} numpy {also}\npython {name} {argument}\n```\n"
    (folder / "README.md").write_text(page + CALL, encoding="utf-8")


def _takes(program: ModelProgram, facts: dict) -> str:
    if isinstance(program, LanguageProgram):
        if "methods" not in facts:
            return "a prompt or single tokens, of any batch and length, and the state of the text before them"
        parts = " or ".join(f"{count} (method `{name}`)" for name, count in facts["methods"].items())
        return f"the next tokens of one text, {parts}, and the state of the text before them"
    if isinstance(program, VisionProgram):
        if "methods" in facts:
            return "one image of {} by {} pixels".format(*facts["inputs"][0]["shape"][2:])
        return f"images whose sides are multiples of {facts['patch_size']} pixels, of any batch"
    return "texts (`input_ids`, `attention_mask`) of any length"


def _state(facts: dict) -> str:
    size, more = facts["state_bytes"], facts["state_bytes_per_token"]
    if not more:
        return f"The state takes {size:,} bytes, whatever the text's length."
    if "methods" in facts:
        most = facts["max_position_embeddings"]
        return f"The state takes {size + more * (most - 1):,} bytes, with room for texts of {most:,} tokens."
    return f"The state takes {size:,} bytes, and {more:,} more for each token."


__all__ = ["DTYPES", "FACTS", "FORMATS", "Exported", "describe", "export_model", "model_folder"]
