# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Shared by the scripts: arguments, changes to a configuration, data from files, and the steps of a training run."""

import ast
import dataclasses
import difflib
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import datasets
import torch
import transformers
import yaml
from datasets import Features, Value, load_dataset
from huggingface_hub import ModelCard
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    HfArgumentParser,
    PreTrainedConfig,
    TrainingArguments,
)
from transformers.hf_argparser import HfArg

from tost_hf import ToSTConfig, ToSTVisionConfig
from tost_hf.files import is_path
from tost_hf.hub.cards import save_card
from tost_hf.hub.loading import check_model_exists
from tost_hf.hub.publishing import HUB_TOKEN
from tost_hf.hub.results import shorten_paths
from tost_hf.model.base_tost import RESEARCH_OPTIONS
from tost_hf.model.configuration_tost import PRESETS
from tost_hf.model.configuration_tost_vision import VISION_PRESETS


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
        help="Changes to the configuration, such as n_layer=4,hidden_size=128,position_embedding_type=none or "
        "num_hidden_layers=6,patch_size=4,drop_path_rate=0.1.",
    )
    dtype: str | None = HfArg(
        default=None,
        help="The dtype of the weights; mixed precision is chosen with --bf16 instead.",
        metadata={"choices": ["auto", "bfloat16", "float16", "float32"]},
    )
    save_dtype: str | None = HfArg(
        default=None,
        help="The dtype to which the trained weights are rounded in their file; they load in that of training.",
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

    def parse_known_args(self, args=None, namespace=None):
        """Replaces defaults of Trainer: 50 losses and ten checkpoints, the last two kept (and the best, if loaded).

        With --do_eval, evaluation is before training and after each epoch.
        """
        defaults = {action.dest: action.default for action in self._actions}
        fractions = {"logging_steps": 0.02, "save_steps": 0.1}
        self.set_defaults(**{name: value for name, value in fractions.items() if defaults.get(name) == 500})
        chooses_evaluation = defaults.get("eval_strategy") == "no"
        if chooses_evaluation:
            self.set_defaults(eval_strategy=None)
        namespace, unknown_args = super().parse_known_args(args, namespace)
        if names := [arg for arg in unknown_args if arg.startswith("--")]:
            similar = difflib.get_close_matches(names[0].partition("=")[0], self._option_string_actions, n=1)
            self.error(f"There is no argument {names[0]}" + (f", but {similar[0]}" if similar else ""))
        if chooses_evaluation and namespace.eval_strategy is None:
            evaluates = namespace.do_train and namespace.do_eval
            namespace.eval_strategy = "epoch" if evaluates else "no"
            namespace.eval_on_start = namespace.eval_on_start or evaluates
        if "save_total_limit" in defaults and namespace.save_total_limit is None:
            namespace.save_total_limit = 3 if namespace.load_best_model_at_end else 2
        return namespace, unknown_args


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
    valid_keys |= RESEARCH_OPTIONS.keys()  # rejected by the configuration, which names the module that has them
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


def position_limit(config: PreTrainedConfig) -> int | None:
    """The longest sequence that a model can process; None for no limit."""
    has_limit = getattr(config, "position_embedding_type", "learned") != "none"
    return getattr(config, "max_position_embeddings", None) if has_limit else None


def load_pretrained(auto_class, name: str, **options):
    """`auto_class.from_pretrained`.

    Raises:
        OSError: there is no such folder or repository, or the Hub cannot be reached.
        ValueError: it cannot be loaded; the message says why.
    """
    check_model_exists(name, *map(options.get, ("revision", "token", "cache_dir")))
    try:
        return auto_class.from_pretrained(name, **options)
    except Exception as error:  # the ways of loading raise many types
        kind = auto_class.__name__.removeprefix("Auto")
        other_type = re.match(r"Unrecognized configuration class <class '[\w.]+\.(\w+)'>", str(error))
        reason = f"it is configured by {other_type[1]}" if other_type else error  # transformers lists 200 others
        raise ValueError(f"No {kind} can be loaded from {name!r}: {reason}") from error


# Data ----------------------------------------------------------------------------------------------------------------


def file_extension(file: str) -> str:
    """The lower-case extension of a file name, without that of a compression format."""
    name, _, extension = file.lower().rpartition(".")
    return name.rpartition(".")[2] if extension in COMPRESSION_EXTENSIONS else extension


def read_dataset(path: str, config_name: str | None = None, **options):
    """`datasets.load_dataset`; the columns of csv files are strings, as written, unless `features` are given.

    Raises:
        FileNotFoundError: there is no such file or folder, and its name is not that of a dataset.
        ValueError: the data cannot be read; the message names the file or the dataset.
    """
    is_local = is_path(path) or (Path(path).suffix and file_extension(path) in LOADERS)
    if is_local and not os.path.exists(path):  # datasets would ask the Hub, again and again without a network
        raise FileNotFoundError(f"There is no file or folder {path!r}.")
    try:
        # not "01" as 1, and "NA" and "None" as missing
        if path == "csv" and "features" not in options and (columns := _csv_columns(options)):
            options |= {"features": Features(dict.fromkeys(columns, Value("string"))), "keep_default_na": False}
        return load_dataset(path, config_name, **options)
    except Exception as error:  # the readers of formats raise many types: EOFError, LZMAError, ...
        reason = error.__cause__ or error  # datasets' own message says only that an error occurred
        if "corresponds to no data" in str(reason):
            reason = "it has no examples"
        files = options.get("data_files") or path
        names = ", ".join(map(repr, [files] if isinstance(files, str) else files))
        raise ValueError(f"The data of {names} cannot be read: {reason}") from error


def _csv_columns(options: dict) -> list[str]:
    """The columns of csv files, none if they have no records."""
    return list(next(iter(load_dataset("csv", **{"split": "train"} | options | {"streaming": True, "nrows": 1})), {}))


def check_actions(training_args: TrainingArguments, *names: str) -> None:
    """Raises a ValueError if none of these arguments is set, such as "do_train"."""
    if not any(getattr(training_args, name) for name in names):
        raise ValueError(f"There is nothing to do: give {', '.join(f'--{name}' for name in names)}, or some of them.")


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
    except KeyboardInterrupt:
        logger.error("Interrupted. The same command continues a training from its last checkpoint, if it has saved one.")
        sys.exit(130)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Only warnings and errors name their level."""
        message = super().format(record)
        return message if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {message}"


def is_news(record: logging.LogRecord) -> bool:
    """False for the warning that checkpoints are ordered by their steps, as all are of the same second."""
    return "mtime may not be reliable" not in record.getMessage()


def set_up_logging(training_args: TrainingArguments, script_logger: logging.Logger) -> None:
    """Shows the scripts' own messages on the main process, and those of the libraries as --log_level says."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Formatter())
    logging.basicConfig(handlers=[handler])
    level = training_args.get_process_log_level()
    is_default = training_args.log_level == "passive" and level == logging.WARNING
    for each_logger in (logger, script_logger):
        each_logger.setLevel(logging.INFO if is_default and training_args.should_log else level)
    if is_default:
        transformers.utils.logging.disable_progress_bar()  # of loading and saving; not that of training
        logging.getLogger("transformers.trainer_utils").addFilter(is_news)
    datasets.utils.logging.set_verbosity(level)
    datasets.utils.logging.disable_propagation()  # or the root logger prints its records a second time
    transformers.utils.logging.set_verbosity(level)
    if training_args.mixed_precision == "bf16" and training_args.device.type == "cpu" and not has_bf16_instructions():
        script_logger.warning("This processor has no bfloat16 instructions: bf16 is many times slower on it than float32.")


def has_bf16_instructions() -> bool:
    """Whether the processor has bfloat16 instructions; True if this version of PyTorch cannot tell."""
    capabilities = getattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})()
    return any(capabilities.get(name) for name in BF16_INSTRUCTIONS)


def recorded_command(argv: list[str]) -> str:
    """The command line that repeats a run, without the Hub token and folders of this machine, because it is published."""
    script, examples_folder = Path(argv[0]).resolve(), Path(__file__).resolve().parent
    name = script.relative_to(examples_folder).as_posix() if script.is_relative_to(examples_folder) else script.name
    return HUB_TOKEN.sub("HF_TOKEN", shlex.join(["python", f"examples/{name}", *map(shorten_paths, argv[1:])]))


def save_with_section(card: ModelCard, section: str, file: Path) -> None:
    """Saves a model card with a section at its end."""
    card.text = f"{card.text.rstrip()}\n\n{section}\n"
    save_card(card, file)
