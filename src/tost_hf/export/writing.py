# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""`tost-hf export`: writes a model as an ONNX program, compares the two, and adds the files that run it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple, cast

import jinja2
from transformers import PreTrainedConfig

from ..cache_files import state_bytes
from ..extras import require
from ..files import EXPORT_DESCRIPTION, check_folder, staged_folder
from ..hub.loading import load_config, load_fitting_tokenizer, load_model, load_processor, resolve_model_folder
from ..image_processing import make_image_processor
from ..model.configuration_tost import TSSA
from ..model.modeling_tost_vision import ToSTForImageClassification
from .comparing import Agreement, compare, compare_script
from .onnx_program import save_onnx
from .programs import PAST, PRESENT, LanguageProgram, ModelProgram, make_program
from .runtime import LanguageModel, load


README_TEMPLATE = Path(__file__).with_name("readme_template.md")
PROGRAM_NAME = "model.onnx"
TOLERANCES = {"float32": 1e-4, "float16": 2e-2}  # by dtype of the weights; see `compare`
# settings of generation_config.json that `generate.py` applies, or that do not change the tokens
GENERATION_SETTINGS = (
    "do_sample temperature top_k top_p max_length max_new_tokens bos_token_id eos_token_id pad_token_id use_cache "
    "cache_implementation output_attentions output_hidden_states transformers_version _from_model_config"
).split()
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
    """Exports a model to ONNX and checks that the program and its script return what the model and its pipeline return.

    Shapes are dynamic: one program serves all batch sizes, lengths and image sizes. That of a language model has its state as
    a float32 input and output, for prefill, chunked prefill and decoding.

    The folder contains the program, `export.json` (inputs, outputs, the state of a language model, and how closely the program
    agrees with the model), a README.md, the tokenizer or image processor, and for a language model with a tokenizer or an
    image classifier a script that runs it without PyTorch and this package. The stages are printed.

    ```python
    exported = export_model("./tost-demo", "./tost-onnx", dtype="float16")
    print(exported.agreement)
    ```

    Args:
        source: a model folder, or a repository of the Hub.
        output_dir: the folder to write to.
        dtype: "float32" or "float16" (statistics stay in float32).
        tokenizer: a folder or repository with the tokenizer; by default that of the model, if it has one.
        revision: branch, tag or commit of the repository.
        overwrite: write to a folder that is not empty. Files of the same names are replaced, the program of an earlier export
            is removed, and other files stay.

    Returns:
        The folder and the `Agreement` of program and model.

    Raises:
        ValueError: the model has settings of generation that the script does not apply; the program or script returns other
            outputs; the tokenizer does not fit the model; or the output folder is, contains or is inside the folder of the
            model or tokenizer.
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
    if model.can_generate() and processor is not None:
        unknown = cast(Any, model).generation_config.to_diff_dict().keys() - GENERATION_SETTINGS
        if unknown:
            names = ", ".join(sorted(unknown))
            raise ValueError(f"The script of an export does not apply {names} of generation_config.json: remove them.")
    with staged_folder(target) as staged:
        print(f"Exporting {metadata['architecture']} to ONNX in {dtype} ...", flush=True)
        save_onnx(program, staged / PROGRAM_NAME)
        print("Comparing its outputs with the model's ...", flush=True)
        run = load(staged, metadata)
        agreement = compare(program, run, metadata, TOLERANCES[dtype])
        metadata["agreement"] = agreement._asdict()
        (staged / EXPORT_DESCRIPTION).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
        if processor is not None:
            processor.save_pretrained(staged)
        if model.can_generate():
            cast(Any, model).generation_config.save_pretrained(staged)
        script = _write_scripts_and_readme(staged, program, metadata, agreement, processor)
        if script is not None:
            print(f"Comparing {script.name} with transformers' pipeline ...", flush=True)
            exported = LanguageModel(run, metadata) if model.can_generate() else None
            compare_script(script, model, exported, TOLERANCES[dtype])
    return ExportResult(target, agreement)


def _load_processor(folder: Path, config: PreTrainedConfig, tokenizer: str | os.PathLike | None) -> Any:
    if tokenizer is None:
        processor = load_processor(folder, config)
        if processor is None and config.model_type == "tost_vision" and cast(Any, config).num_channels in (1, 3):
            return make_image_processor(cast(Any, config))
        return processor
    if config.model_type != "tost":
        raise ValueError("This model reads images; a tokenizer is for text models.")
    return load_fitting_tokenizer(os.fspath(tokenizer), config)


def make_metadata(program: ModelProgram, dtype: str) -> dict:
    """The content of `export.json`, without the agreement.

    `state` lists the tensors of a language model's state with the names of their inputs and outputs. Before the first token
    they are zeros, a dimension "cached" is `window`, and the attention mask begins with as many zeros.
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
        metadata["tssa_layers"] = [i for i, kind in enumerate(config.layer_types) if kind == TSSA]
        metadata["num_attention_heads"] = config.num_attention_heads
        metadata["window"] = program.window
        size = state_bytes(config)
        metadata |= {"state_bytes": size.saved, "state_bytes_per_token": size.per_token}
        metadata["state"] = [
            spec._asdict() | {"input": PAST + spec.name, "output": PRESENT + spec.name} for spec in program.state
        ]
    elif program.is_vision:
        names = ("image_size", "patch_size", "num_attention_heads", "num_labels")
        metadata |= {name: getattr(config, name) for name in names}
        metadata["labels"] = [config.id2label[i] for i in range(config.num_labels)]
        metadata["function_to_apply"] = "softmax"  # as in transformers' image classification pipeline
        if config.problem_type == "regression":
            metadata["function_to_apply"] = "none"
        elif config.problem_type == "multi_label_classification" or config.num_labels == 1:
            metadata["function_to_apply"] = "sigmoid"
    return metadata


def _write_scripts_and_readme(
    folder: Path, program: ModelProgram, metadata: dict, agreement: Agreement, processor: Any
) -> Path | None:
    """Returns the script that runs the program; None if there is none for the model, or no tokenizer or image processor."""
    command, packages = "", ""
    if isinstance(program, LanguageProgram) and processor is not None:
        command, packages = 'generate.py "Once upon a time"', "transformers"
    elif isinstance(program.model, ToSTForImageClassification) and processor is not None:
        command, packages = "classify.py picture.png", "transformers pillow"
    names = command.split()[:1]
    for name in ("runtime.py", *names):
        shutil.copyfile(Path(__file__).with_name(name), folder / name)
    template = jinja2.Template(README_TEMPLATE.read_text(encoding="utf-8"), keep_trailing_newline=True)
    readme = template.render(metadata, packages=packages, command=command, comparison=agreement)
    (folder / "README.md").write_text(readme, encoding="utf-8")
    return folder / names[0] if names else None
