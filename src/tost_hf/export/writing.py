# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""`tost-hf export`: writes a model as an ONNX program, compares the two, and adds the files that run it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from transformers import PreTrainedConfig

from ..cache_files import state_bytes
from ..extras import require
from ..files import EXPORT_DESCRIPTION, check_folder, staged_folder
from ..hub.loading import load_config, load_fitting_tokenizer, load_model, load_processor, resolve_model_folder
from ..model.configuration_tost import TSSA
from .comparing import Agreement, compare
from .onnx_program import save_onnx
from .programs import PAST, PRESENT, LanguageProgram, ModelProgram, make_program
from .runtime import load


README_TEMPLATE = Path(__file__).with_name("readme_template.md")
PROGRAM_NAME = "model.onnx"
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "int8": 0.2}  # by dtype of the weights; see `compare`
REQUIRED_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class ExportResult(NamedTuple):
    """Result of `export_model`."""

    folder: Path
    agreement: Agreement


def export_model(
    source: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    dtype: str = "float32",
    tokenizer: str | os.PathLike | None = None,
    revision: str | None = None,
    overwrite: bool = False,
) -> ExportResult:
    """Exports a model to ONNX and checks that the program computes the same outputs as the model.

    Shapes are dynamic: one program serves all batch sizes, lengths and image sizes. That of a language model has its state as
    a float32 input and output, for prefill, chunked prefill and decoding.

    The folder contains the program, `export.json` (inputs, outputs, the state of a language model, and how closely the program
    agrees with the model), the tokenizer or image processor, a script that runs it without this package, and a README.md.

    ```python
    exported = export_model("./tost-demo", "./tost-onnx", dtype="int8")
    print(exported.agreement)
    ```

    Args:
        source: a model folder, or a repository of the Hub.
        output_dir: the folder to write to.
        dtype: "float32", "float16" (statistics stay in float32) or "int8" (weights of matrix products, with ONNX Runtime's
            quantizer).
        tokenizer: a folder or repository with the tokenizer; by default that of the model, if it has one.
        revision: branch, tag or commit of the repository.
        overwrite: write to a folder that is not empty. Files of the same names are replaced, the program of an earlier export
            is removed, and other files stay.

    Returns:
        The folder and the `Agreement` of program and model.

    Raises:
        ValueError: the model has sliding windows; the program returns other outputs; the tokenizer does not fit the model; or
            the output folder is, contains or is inside the folder of the model or tokenizer.
        ImportError: the packages of the extra `export` are not installed.
        OSError: the model does not exist, or the folder cannot be written.
    """
    if dtype not in TOLERANCES:
        raise ValueError(f"ONNX programs are written in {', '.join(TOLERANCES)}, not in {dtype!r}.")
    for package in REQUIRED_PACKAGES:
        require(package, "export")
    target = Path(output_dir)
    check_folder(target, overwrite, sources=[source, *([] if tokenizer is None else [tokenizer])])
    folder = resolve_model_folder(source, revision)
    config = load_config(folder)
    processor = _load_processor(folder, config, tokenizer)
    model = load_model(folder, config)
    program = make_program(model.half() if dtype == "float16" else model.float())
    metadata = make_metadata(program, dtype)
    with staged_folder(target) as staged:
        save_onnx(program, staged / PROGRAM_NAME, dtype)
        agreement = compare(program, load(staged, metadata), metadata, TOLERANCES[dtype])
        metadata["agreement"] = agreement._asdict()
        (staged / EXPORT_DESCRIPTION).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
        if processor is not None:
            processor.save_pretrained(staged)
        _write_scripts_and_readme(staged, program, metadata, agreement)
    return ExportResult(target, agreement)


def _load_processor(folder: Path, config: PreTrainedConfig, tokenizer: str | os.PathLike | None) -> Any:
    if tokenizer is None:
        return load_processor(folder, config)
    if config.model_type != "tost":
        raise ValueError("This model reads images; a tokenizer is for text models.")
    return load_fitting_tokenizer(os.fspath(tokenizer), config)


def make_metadata(program: ModelProgram, dtype: str) -> dict:
    """The content of `export.json`, without the agreement.

    `state` lists the tensors of a language model's state with the names of their inputs and outputs. Before the first token
    they are zeros, and a dimension "cached" is 0.
    """
    config: Any = program.model.config
    names: tuple[str, ...]
    metadata: dict[str, Any] = {
        "model": PROGRAM_NAME,
        "dtype": dtype,
        "architecture": type(program.model).__name__,
        "inputs": [spec._asdict() for spec in program.inputs],
        "outputs": [spec._asdict() for spec in program.outputs],
    }
    if isinstance(program, LanguageProgram):
        names = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
        metadata |= {name: config.to_dict()[name] for name in names}
        if config.position_embedding_type == "none":
            metadata["max_position_embeddings"] = None
        metadata["statistics_layers"] = [i for i, kind in enumerate(config.layer_types) if kind == TSSA]
        metadata["num_attention_heads"] = config.num_attention_heads
        size = state_bytes(config)
        metadata |= {"state_bytes": size.saved, "state_bytes_per_token": size.per_token}
        metadata["state"] = [
            spec._asdict() | {"input": PAST + spec.name, "output": PRESENT + spec.name} for spec in program.state
        ]
    elif program.is_vision:
        names = ("image_size", "patch_size", "num_attention_heads", "num_labels")
        metadata |= {name: getattr(config, name) for name in names}
        metadata["labels"] = [config.id2label[i] for i in range(config.num_labels)]
    return metadata


def _write_scripts_and_readme(folder: Path, program: ModelProgram, metadata: dict, agreement: Agreement) -> None:
    script, package = "", ""
    if isinstance(program, LanguageProgram):
        script, package = 'generate.py "Once upon a time"', "tokenizers"
    elif "num_labels" in metadata and program.outputs[0].name == "logits":
        script, package = "classify.py picture.png", "pillow"
    for name in ("runtime.py", *script.split()[:1]):
        shutil.copyfile(Path(__file__).with_name(name), folder / name)
    template = jinja2.Template(README_TEMPLATE.read_text(encoding="utf-8"), keep_trailing_newline=True)
    readme = template.render(metadata, package=package, script=script, comparison=agreement)
    (folder / "README.md").write_text(readme, encoding="utf-8")
