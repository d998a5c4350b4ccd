# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Shared by the scripts: arguments, changes to a configuration, data from files, and the steps of a training run."""

import ast
import dataclasses
import json
import logging
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import datasets
import torch
import transformers
import yaml
from datasets import load_dataset
from huggingface_hub import ModelCard
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerState,
    TrainingArguments,
)
from transformers.hf_argparser import HfArg

from tost_hf import ToSTConfig, ToSTVisionConfig
from tost_hf.files import RUN_ARGUMENTS, TRAINER_STATE, staged_file
from tost_hf.hub.cards import save_card
from tost_hf.hub.contents import HUB_TOKEN
from tost_hf.model.configuration_tost import PRESETS
from tost_hf.model.configuration_tost_vision import VISION_PRESETS
from tost_hf.training.checkpoints import choose_checkpoint


logger = logging.getLogger("scripting")

BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")  # of x86 and ARM, as torch.cpu.get_capabilities names them
COMPRESSION_EXTENSIONS = ("gz", "bz2", "xz", "zst", "lz4")
LOADERS = {"txt": "text", "json": "json", "jsonl": "json", "csv": "csv", "parquet": "parquet"}


# Arguments -----------------------------------------------------------------------------------------------------------


@dataclass
class HubArguments:
    """Access to models and datasets of the Hub."""

    cache_dir: str | None = HfArg(default=None, help="Where downloads are stored.")
    model_revision: str = HfArg(default="main", help="The branch, tag or commit of the model to use.")
    token: str | None = HfArg(default=None, help="The Hub token. Default: that of `hf auth login`.")
    trust_remote_code: bool = HfArg(default=False, help="Whether to run the code of a Hub repository. Read it first.")

    @property
    def hub_options(self) -> dict:
        """Arguments of `from_pretrained` for a model, its tokenizer or its processor."""
        return {
            "cache_dir": self.cache_dir,
            "revision": self.model_revision,
            "token": self.token,
            "trust_remote_code": self.trust_remote_code,
        }


@dataclass
class ModelArguments(HubArguments):
    """Which model to fine-tune, or which configuration to train from scratch."""

    model_name_or_path: str | None = HfArg(default=None, help="The model to fine-tune. Default: train one from scratch.")
    config_name: str | None = HfArg(
        default=None,
        help="The configuration to train from scratch, a folder or a Hub id, or a preset: "
        f"{', '.join((*PRESETS, *VISION_PRESETS))}.",
    )
    config_overrides: str | None = HfArg(
        default=None,
        help="Changes to the configuration, such as n_layer=4,hidden_size=128,max_position_embeddings=null or "
        "num_hidden_layers=6,patch_size=4,drop_path_rate=0.1.",
    )
    dtype: str | None = HfArg(
        default=None,
        help="The dtype of the weights; mixed precision is chosen with --bf16 instead.",
        metadata={"choices": ["auto", "bfloat16", "float16", "float32"]},
    )
    save_dtype: str | None = HfArg(
        default=None,
        help="The dtype in which the trained weights are stored and evaluated; checkpoints keep that of training.",
        metadata={"choices": ["bfloat16", "float16"]},
    )

    @property
    def preset(self) -> str | None:
        """The name of the preset to train from scratch, or None. A folder of that name takes precedence."""
        is_preset = self.config_name in (*PRESETS, *VISION_PRESETS) and not os.path.isdir(self.config_name)
        return self.config_name if is_preset else None

    @property
    def new_model_options(self) -> dict:
        """Options of an Auto class's `from_config`."""
        options = {} if self.dtype in (None, "auto") else {"dtype": getattr(torch, self.dtype)}
        return options | {"trust_remote_code": self.trust_remote_code}

    @property
    def pretrained_options(self) -> dict:
        """Options of an Auto class's `from_pretrained`."""
        return self.hub_options if self.dtype is None else self.hub_options | {"dtype": self.dtype}

    def load_config(self) -> PreTrainedConfig:
        """The configuration before `config_overrides`."""
        name = self.config_name or self.model_name_or_path
        if name is None:
            return AutoConfig.for_model(self.model_type)
        if self.preset is not None:
            return (ToSTConfig if name in PRESETS else ToSTVisionConfig).from_preset(name)
        return load_pretrained(AutoConfig, name, **self.hub_options)


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises an error instead of printing hundreds of options."""
        raise ValueError(f"{message}; --help lists the arguments.")


class _UniqueKeyLoader(yaml.SafeLoader):
    def construct_mapping(self, node, deep=False):
        """Raises an error for a repeated key, of which YAML would use the last value."""
        names = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if names.count(key.value) > 1:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def parse_args(args: list[str], *argument_classes: type, description: str | None = None) -> tuple:
    """Parses the command line into one instance of each dataclass.

    The first argument may be a .yaml or .json file of arguments (examples/recipes); those after it take precedence.

    Raises:
        ValueError: an argument is unknown, abbreviated, missing or of the wrong type; the file is damaged or repeats a name.
    """
    if args and args[0].endswith((".json", ".yaml", ".yml")):
        args = _read_argument_file(Path(args[0])) + args[1:]
    parser = _Parser(argument_classes, description=description, allow_abbrev=False)
    return parser.parse_args_into_dataclasses(args, look_for_args_file=False)


def _read_argument_file(file: Path) -> list[str]:
    """The arguments of a file in the form of a command line, so that they are checked in the same way."""
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), _UniqueKeyLoader)  # JSON is YAML
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"The file of arguments {str(file)!r} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"The file of arguments {str(file)!r} must contain names and values.")
    args = []
    for name, value in values.items():
        if value is not None:
            items = value if isinstance(value, list) else [value]
            args += [f"--{name}", *(item if isinstance(item, str) else json.dumps(item) for item in items)]
    return args


def parse_value(text: str) -> bool | int | float | str | list | dict | None:
    """Parses JSON, Python's literals, and lists of strings without quotes; anything else is a string."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError):
            pass
    if text.startswith("[") and text.endswith("]") and '"' not in text:
        return [parse_value(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    return text


def override_config(config: PreTrainedConfig, assignments: str | None, **defaults) -> PreTrainedConfig:
    """Returns a copy of a configuration with changes.

    Args:
        config: not changed.
        assignments: key=value,key=value,...; None for no change. Lists and objects are written in brackets.
        defaults: changes that `assignments` override.

    Raises:
        ValueError: the configuration has no such key, a key is repeated, or the value does not suit it.
    """
    overrides, fields = {}, config.to_dict()
    valid_keys = fields.keys() | {field.name for field in dataclasses.fields(config)}  # to_dict omits options that are off
    for assignment in filter(None, re.split(r",(?![^\[{]*[]}])", assignments or "")):
        key, separator, value = assignment.partition("=")
        key = config.attribute_map.get(key.strip(), key.strip())
        if not separator or key not in valid_keys:
            raise ValueError(
                f"--config_overrides does not understand {assignment!r}: write key=value, with a key of the "
                f"{config.model_type} configuration."
            )
        if key in overrides:
            raise ValueError(f"--config_overrides sets {key} twice.")
        overrides[key] = parse_value(value.strip())
    overrides = defaults | overrides
    if "hidden_size" in overrides and fields.get("intermediate_size") == 4 * fields["hidden_size"]:
        fields["intermediate_size"] = None  # follows the new width
    try:
        if "num_hidden_layers" in overrides and "layer_types" in fields:
            num_layers = overrides["num_hidden_layers"]
            fields["layer_types"] = (fields["layer_types"] * num_layers)[:num_layers]  # the pattern repeats
        return type(config).from_dict(fields | overrides)
    except TypeError as error:
        raise ValueError(f"--config_overrides {assignments!r} has a value that does not suit its key: {error}") from error


def load_pretrained(auto_class, name: str, **options):
    """`auto_class.from_pretrained`.

    Raises:
        ValueError: it cannot be loaded; the message says why.
    """
    try:
        return auto_class.from_pretrained(name, **options)
    except Exception as error:  # the ways of loading raise many types
        kind = auto_class.__name__.removeprefix("Auto")
        raise ValueError(f"No {kind} can be loaded from {name!r}: {error}") from error


# Data ----------------------------------------------------------------------------------------------------------------


def file_extension(file: str) -> str:
    """The lower-case extension of a file name, without that of a compression format."""
    name, _, extension = file.lower().rpartition(".")
    return name.rpartition(".")[2] if extension in COMPRESSION_EXTENSIONS else extension


def read_dataset(path: str, config_name: str | None = None, **options):
    """`datasets.load_dataset`.

    Raises:
        ValueError: the data cannot be read; the message names the file or the dataset.
    """
    try:
        return load_dataset(path, config_name, **options)
    except Exception as error:  # the readers of formats raise many types: EOFError, LZMAError, ...
        reason = error.__cause__ or error  # datasets' own message says only that an error occurred
        if "corresponds to no data" in str(reason):
            reason = "it has no examples"
        files = options.get("data_files") or path
        names = ", ".join(map(repr, [files] if isinstance(files, str) else files))
        raise ValueError(f"The data of {names} cannot be read: {reason}") from error


def check_limits(data_args) -> None:
    """Raises a ValueError if a maximum number of samples is not positive."""
    for name in ("max_train_samples", "max_eval_samples", "max_predict_samples"):
        value = getattr(data_args, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}.")


# Training runs -----------------------------------------------------------------------------------------------------


def run(main: Callable[[], None]) -> None:
    """Calls a script's `main`; errors that the user can fix end it with their message, without a traceback."""
    try:
        main()
    except (ValueError, OSError, ImportError, FloatingPointError, SafetensorError, StrictDataclassError) as error:
        logger.debug("", exc_info=True)  # with --log_level debug
        sys.exit(f"{Path(sys.argv[0]).name}: error: {error}")


def set_up_logging(training_args: TrainingArguments, script_logger: logging.Logger) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    if training_args.should_log:  # the main process logs more than the others
        transformers.utils.logging.set_verbosity_info()
    level = training_args.get_process_log_level()
    for each_logger in (logger, script_logger):
        each_logger.setLevel(level)
    datasets.utils.logging.set_verbosity(level)
    datasets.utils.logging.disable_propagation()  # or the root logger prints its records a second time
    transformers.utils.logging.set_verbosity(level)
    script_logger.warning(
        f"process {training_args.process_index} of {training_args.world_size}, device {training_args.device}, "
        f"mixed precision {training_args.mixed_precision}"  # from the arguments or Accelerate's configuration file
    )
    if training_args.mixed_precision == "bf16" and training_args.device.type == "cpu" and not has_bf16_instructions():
        script_logger.warning("This processor has no bfloat16 instructions: bf16 is many times slower on it than float32.")


def has_bf16_instructions() -> bool:
    """Whether the processor has bfloat16 instructions; True if this version of PyTorch cannot tell."""
    capabilities = getattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})()
    return any(capabilities.get(name) for name in BF16_INSTRUCTIONS)


def train_and_report(
    trainer: Trainer, model_args, data_args, task: str, samples: dict[str, int | None], before_card: Callable = lambda: None
) -> None:
    """Trains and evaluates as requested by the arguments, writes results and a model card, and pushes if requested.

    Args:
        trainer: with its datasets.
        model_args, data_args: described in the card.
        task: its name on the Hub.
        samples: number of examples of "train" and "eval", None if unknown.
        before_card: called after training and evaluation, before the card is written.
    """
    args = trainer.args
    record_run(trainer, model_args, data_args)
    if args.do_train:
        if trainer.model.dtype in (torch.float16, torch.bfloat16):
            logger.warning(
                f"The weights are {trainer.model.dtype}, in which small updates are lost: train them with --dtype float32."
            )
        checkpoint = choose_checkpoint(trainer, args.resume_from_checkpoint)
        if checkpoint is not None:
            logger.warning(
                f"Resuming from {checkpoint}; to start afresh, use another --output_dir or --resume_from_checkpoint false."
            )
        start_step = 0 if checkpoint is None else TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE))).global_step
        result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()  # and the tokenizer or image processor
        if model_args.save_dtype is not None and trainer.is_world_process_zero():
            store_in_dtype(trainer.model, args.output_dir, model_args.save_dtype)
        if result.global_step > start_step:
            report(trainer, "train", result.metrics, samples["train"])
        else:
            logger.warning(f"The run ended at step {start_step}: there was nothing left to train.")
        if result.global_step > start_step or not Path(args.output_dir, TRAINER_STATE).is_file():
            trainer.save_state()
    if args.do_eval:
        metrics = trainer.evaluate()
        if "eval_perplexity" in metrics:
            metrics["perplexity"] = metrics["eval_perplexity"]
        report(trainer, "eval", metrics, samples["eval"])
    before_card()

    card_options = {"finetuned_from": model_args.model_name_or_path, "tasks": task}
    if data_args.dataset_name is not None:
        card_options["dataset_tags"] = data_args.dataset_name
        card_options["dataset_args"] = data_args.dataset_config_name
        card_options["dataset"] = " ".join(filter(None, (data_args.dataset_name, data_args.dataset_config_name)))
    if args.push_to_hub:
        trainer.push_to_hub(**card_options)
    else:
        trainer.create_model_card(**card_options)


def store_in_dtype(model: PreTrainedModel, folder: str, dtype: str) -> None:
    """Stores a saved model's weights in another dtype, to which `model` gets rounded."""
    stored = type(model).from_pretrained(folder, dtype=dtype)  # keeps float32 where the model needs it
    with tempfile.TemporaryDirectory(dir=folder) as staging:
        stored.save_pretrained(staging)
        for file in Path(staging).iterdir():
            os.replace(file, Path(folder, file.name))
    model.load_state_dict(stored.state_dict())


def record_run(trainer: Trainer, model_args, data_args) -> None:
    """Writes the run's command, dataset and initial model to the output folder, for the card."""
    file = Path(trainer.args.output_dir, RUN_ARGUMENTS)
    if not trainer.is_world_process_zero() or (file.exists() and not trainer.args.do_train):
        return
    run_arguments = {
        "command": recorded_command(sys.argv),
        "dataset_name": data_args.dataset_name,
        "dataset_config_name": data_args.dataset_config_name,
        "model_name_or_path": model_args.model_name_or_path,
    }
    with staged_file(file) as staged:
        staged.write_text(
            json.dumps({name: value for name, value in run_arguments.items() if value}, indent=2) + "\n", encoding="utf-8"
        )


def recorded_command(argv: list[str]) -> str:
    """The command line that repeats a run, without the Hub token, because records are published."""
    script, examples_folder = Path(argv[0]).resolve(), Path(__file__).resolve().parent
    name = script.relative_to(examples_folder).as_posix() if script.is_relative_to(examples_folder) else script.name
    return HUB_TOKEN.sub("HF_TOKEN", shlex.join(["python", f"examples/{name}", *argv[1:]]))


def report(trainer: Trainer, split: str, metrics: dict[str, float], samples: int | None) -> None:
    """Prints metrics and writes them to the output folder."""
    if samples is not None:
        metrics[f"{split}_samples"] = samples
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)


def save_with_section(card: ModelCard, section: str, file: Path) -> None:
    """Saves a model card with a section at its end."""
    card.text = f"{card.text.rstrip()}\n\n{section}\n"
    save_card(card, file)
