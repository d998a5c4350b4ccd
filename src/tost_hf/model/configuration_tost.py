# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Configuration of ToST text models, the sizes of the paper, and how all ToST models are loaded, saved and published."""

import inspect
import os
import shutil
import sys
import tempfile
from dataclasses import field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils import cached_file


# Source files ---------------------------------------------------------------------------------------------------------


OPERATOR_FILES = (
    "tssa.py",
    "tssa_reference.py",
    "tssa_chunked.py",
    "tssa_triton.py",
)
_SHARED_FILES = ("configuration_tost.py", "layers_tost.py", *OPERATOR_FILES)
CODE_FILES = {  # by model type; siblings of this file, here and in every published folder
    "tost": (
        *_SHARED_FILES,
        "modeling_tost.py",
        "cache_tost.py",
        "inputs_tost.py",
        "attention_tost.py",
    ),
    "tost_vision": (*_SHARED_FILES, "configuration_tost_vision.py", "modeling_tost_vision.py"),
}
AUTO_MAPS = {
    "tost": {
        "AutoConfig": "configuration_tost.ToSTConfig",
        "AutoModel": "modeling_tost.ToSTModel",
        "AutoModelForCausalLM": "modeling_tost.ToSTForCausalLM",
        "AutoModelForMaskedLM": "modeling_tost.ToSTForMaskedLM",
        "AutoModelForQuestionAnswering": "modeling_tost.ToSTForQuestionAnswering",
        "AutoModelForSequenceClassification": "modeling_tost.ToSTForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_tost.ToSTForTokenClassification",
    },
    "tost_vision": {
        "AutoConfig": "configuration_tost_vision.ToSTVisionConfig",
        "AutoBackbone": "modeling_tost_vision.ToSTBackbone",
        "AutoModel": "modeling_tost_vision.ToSTVisionModel",
        "AutoModelForImageClassification": "modeling_tost_vision.ToSTForImageClassification",
    },
}


def source_file(name: str) -> Path:
    """Path of a remote-code file beside this one."""
    return Path(__file__).with_name(name)


def code_files(model_type: str, folder: Path | None = None, origin: str | None = None) -> dict[str, Path]:
    """Name and path of each source file that is published with a model of this type.

    Args:
        folder: folder of the model's class, searched after that of this file: transformers copies the code of a local folder
            into one folder per class, with only the files that the class needs.
        origin: folder or repository that the configuration was loaded from, searched last.

    Raises:
        OSError: a file is in none of these places.
    """
    files = {}
    for name in CODE_FILES[model_type]:
        places = [source_file(name), *([] if folder is None else [folder / name])]
        found = next((place for place in places if place.is_file()), None)
        if found is None and origin:
            fetched = cached_file(origin, name, _raise_exceptions_for_missing_entries=False)
            found = None if fetched is None else Path(fetched)
        if found is None:
            raise OSError(
                f"The model's source file {name} was not found, so it cannot be saved with the others: load the model from a "
                "folder or repository that has it, or save with with_code=False."
            )
        files[name] = found
    return files


# Configurations -------------------------------------------------------------------------------------------------------


INHERITED_FIELDS = {  # of every configuration; transformers does not check their types
    "architectures": (list, tuple),
    "attn_implementation": (str,),
    "auto_map": (dict,),
    "dtype": (str, torch.dtype),
    "id2label": (dict,),
    "label2id": (dict,),
    "quantization_config": (dict,),
    "torch_dtype": (str, torch.dtype),
}
MAX_LABELS = 2**20  # transformers makes a name for each of them


class ToSTBaseConfig(PreTrainedConfig):
    """A configuration that is saved with the source files of its models where its `auto_map` is set.

    Loading one from a file runs no code that the file names, and raises ValueError for any damage.
    """

    def __post_init__(self, **kwargs):
        labels = kwargs.get("num_labels")
        if labels is not None and not (isinstance(labels, int) and 0 <= labels <= MAX_LABELS):
            raise ValueError(f"num_labels must be a whole number from 0 to {MAX_LABELS:,}, got {_shorten(labels)}.")
        for alias, name in self.attribute_map.items():
            if alias in kwargs:  # set under the field's name, so that its type is checked
                setattr(self, name, kwargs.pop(alias))
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """As `PreTrainedConfig.from_dict`; raises ValueError, with the field's name, for any impossible value."""
        _check_inherited_fields(cls, config_dict)
        try:
            return super().from_dict(config_dict, **kwargs)
        except Exception as error:  # transformers raises many types of errors for fields of a wrong type
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            reason = f"{kind}{error}".splitlines()[-1].strip()
            raise ValueError(f"The configuration of this {cls.model_type} model is wrong: {reason[:300]}") from error

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Has no effect: `auto_map` decides whether the source files are saved. transformers calls it for remote code."""

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs):
        """As `PreTrainedConfig.save_pretrained`, with the source files beside `config.json` where `auto_map` is set."""
        folder = self.__dict__.pop("_model_folder", None)  # set by a model that saves its configuration
        if getattr(self, "auto_map", None):
            self.auto_map = dict(AUTO_MAPS[self.model_type])  # a loaded one may name older files, or their repository
            os.makedirs(save_directory, exist_ok=True)
            for name, source in code_files(self.model_type, folder, self._name_or_path).items():
                target = Path(save_directory, name)
                if source.resolve() != target.resolve():
                    shutil.copyfile(source, target)
        super().save_pretrained(save_directory)
        if push_to_hub:  # the base class would upload config.json alone
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)


def _check_inherited_fields(config_class: type, fields: dict) -> None:
    """Rejects wrong values that transformers accepts in fields of every configuration, and references to code."""
    for name, value in fields.items():
        if name.startswith("__") or callable(getattr(config_class, name, None)):
            raise ValueError(f"{_shorten(name)} is not a field of a configuration but the name of a method.")
        if isinstance(derived := getattr(config_class, name, None), property) and derived.fset is None:
            raise ValueError(f"{name} follows from other fields, so it cannot be given.")
        if value is not None and not isinstance(value, INHERITED_FIELDS.get(name, object)):
            raise ValueError(f"{name} must be a {INHERITED_FIELDS[name][0].__name__}, got {_shorten(value)}.")
    parts = [name for name in ("decoder", "generator", "text_config", "text_encoder") if fields.get(name) is not None]
    if parts:
        raise ValueError(f"{parts[0]} belongs to models composed of several models; a ToST model is not one.")
    if not all(isinstance(name, str) for name in fields.get("architectures") or ()):
        raise ValueError(f"architectures must be names of classes, got {_shorten(fields['architectures'])}.")
    if not all(str(key).isdecimal() for key in fields.get("id2label") or ()):
        raise ValueError(f"id2label must name labels by number, got {_shorten(fields['id2label'])}.")
    for name in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        if "/" in str(fields.get(name) or ""):
            raise ValueError(
                f"{name} is {_shorten(fields[name])}, code on the Hub, which ToST does not need; remove that field."
            )
    for dtype in (fields.get("dtype"), fields.get("torch_dtype")):
        named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if dtype is not None and not (isinstance(named, torch.dtype) and named.is_floating_point):
            raise ValueError(f"dtype must be one of floating-point numbers, such as 'float32', got {_shorten(dtype)}.")


def _shorten(value: object) -> str:
    return repr(value)[:100]


# Models ---------------------------------------------------------------------------------------------------------------


ADAPTER_TARGETS = ("in_proj", "out_proj")  # the projections of TSSA


def _register_adapter_targets(model_type: str) -> None:
    """Registers LoRA's default target modules with PEFT, if it is imported and has none for this model type."""
    tables = sys.modules.get("peft.utils.constants")
    if tables is not None:
        tables.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(model_type, list(ADAPTER_TARGETS))


class ToSTBaseModel(PreTrainedModel):
    """Checks configurations, loads weights from safetensors files only, and saves source files with them on request."""

    _saved_with_code = False  # by default

    def __init__(self, config, *inputs, **kwargs):
        wanted = type(self).config_class
        assert wanted is not None  # transformers takes it from the annotation of `config`
        if getattr(config, "model_type", None) != wanted.model_type:
            raise ValueError(
                f"{type(self).__name__} needs a {wanted.__name__} (model type {wanted.model_type!r}), got a "
                f"{type(config).__name__} of model type {getattr(config, 'model_type', None)!r}."
            )
        for name in ("hidden_size", "intermediate_size"):
            if getattr(config, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}.")
        super().__init__(config, *inputs, **kwargs)
        _register_adapter_targets(wanted.model_type)

    def post_init(self):
        # only parameters that this model has: transformers' shared tests look for each
        names = (getattr(module, "float32_parameters", ()) for module in self.modules())
        self._keep_in_fp32_modules_strict = set(chain(*names))
        super().post_init()

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """From now on models of this class are saved with their source files, unless `with_code=False`.

        transformers calls it for models that it loads by remote code. All of ToST's Auto classes are named in `auto_map`.
        """
        cls._saved_with_code = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, use_safetensors: bool | None = None, **kwargs):
        """As `PreTrainedModel.from_pretrained`, from safetensors files only: weights are never unpickled.

        Raises:
            ValueError: `use_safetensors=False`, or a `distributed_config` with pipeline parallelism.
            OSError: there are no safetensors weights, or they are damaged.
        """
        if use_safetensors is False:
            raise ValueError("ToST models load safetensors weights only; convert pickled ones with `tost-hf convert`.")
        _reject_pipeline_parallelism(kwargs.get("distributed_config"))
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *model_args, use_safetensors=True, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"The weights of {str(pretrained_model_name_or_path)!r} are damaged or incomplete ({error}); fetch or copy "
                "them again."
            ) from error

    def save_pretrained(self, save_directory, *args, with_code: bool | None = None, **kwargs):
        """As `PreTrainedModel.save_pretrained`.

        Args:
            with_code: whether source files and `auto_map` are saved with the weights, so that the folder loads with
                `trust_remote_code=True` where this package is not installed. None: if the model was loaded from a folder that
                has them.
        """
        fields = self.config.__dict__
        auto_map = fields.pop("auto_map", None)  # transformers does not expect None as its value
        if with_code if with_code is not None else (auto_map or self._saved_with_code):
            fields["auto_map"] = AUTO_MAPS[self.config.model_type]
        fields["_model_folder"] = Path(inspect.getfile(type(self))).parent
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        except SafetensorError as error:  # for example on a full disk
            raise OSError(
                f"The weights could not be written to {os.fspath(save_directory)!r}; is the disk full? ({error})"
            ) from error
        finally:
            for name in ("_model_folder", "auto_map"):
                fields.pop(name, None)
            if auto_map:
                fields["auto_map"] = auto_map

    def push_to_hub(  # type: ignore[override]  # transformers' decorator hides the parameters from the type checker
        self,
        repo_id: str,
        *,
        with_code: bool | None = None,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str | None = "50GB",
        tags: list[str] | None = None,
    ) -> str:
        """As `PreTrainedModel.push_to_hub`, in one commit, with `with_code` as in `save_pretrained`.

        The repository's card is kept. If there is none, a short one with metadata is written instead of transformers' form.
        `tost-hf publish` checks what it uploads; this does not.
        """
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        try:
            card = ModelCard.load(api.hf_hub_download(repo_id, "README.md", revision=revision))
        except EntryNotFoundError:
            data = ModelCardData(library_name="transformers", tags=["tost"])
            card = ModelCard(f"---\n{data.to_yaml()}\n---\n\nA {type(self).__name__}, pushed without a model card.\n")
        card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *(tags or [])])) or None
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, with_code=with_code, max_shard_size=max_shard_size)
            card.save(Path(folder, "README.md"))
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message or f"Upload {type(self).__name__}",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
            )


def _reject_pipeline_parallelism(distributed_config) -> None:
    """Rejects transformers' pipeline parallelism: its later stages take their input for embedded tokens, and add positions."""
    is_dict = isinstance(distributed_config, dict)  # which transformers accepts, too
    size = distributed_config.get("pp_size") if is_dict else getattr(distributed_config, "pp_size", None)
    if (size or 1) > 1:
        raise ValueError(
            "A ToST model cannot be cut by layers, that is, by pipeline parallelism (pp_size of distributed_config): use "
            "tp_size, which shards the heads, or fully_shard."
        )


# Text configuration ---------------------------------------------------------------------------------------------------


CAUSAL_STATISTICS = "tost_causal_statistics"  # the cache layer type of a causal TSSA layer
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"  # transformers' names

PRESETS: dict[str, dict[str, Any]] = {
    "tost-base": {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768},
    "tost-medium": {"num_hidden_layers": 24, "num_attention_heads": 16, "hidden_size": 1024},
    "tost-large": {"num_hidden_layers": 36, "num_attention_heads": 20, "hidden_size": 1280},
}
_PLUS = {"forgetting": "token", "conv_kernel": 4, "max_position_embeddings": None}
PRESETS |= {
    "tost-plus-base": PRESETS["tost-base"] | _PLUS,
    "tost-plus-medium": PRESETS["tost-medium"] | _PLUS,
    "tost-hybrid-base": PRESETS["tost-base"] | _PLUS | {"layer_types": ([CAUSAL_STATISTICS] * 3 + [FULL_ATTENTION]) * 3},
}


# Of the Long Range Arena models the paper gives layers, widths, heads, dropout and the place of the norms. All else is ours:
# one token per byte or grey level and four special ones, the task's longest text, biases, LayerScale at 1, mean pooling.
_ENCODER = {"is_causal": False, "pooling": "mean", "use_bias": True, "layer_scale_init_value": 1.0, "hidden_dropout": 0.1}
_ENCODER |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
LRA_PRESETS: dict[str, dict[str, Any]] = {
    f"tost-lra-{task}": _ENCODER
    | dict(zip(("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"), sizes))
    | {"vocab_size": vocabulary, "max_position_embeddings": tokens, "num_labels": classes}
    | {"architectures": ["ToSTForSequenceClassification"]}
    for task, sizes, vocabulary, tokens, classes in (
        ("listops", (6, 512, 8, 2048), 32, 2048, 10),
        ("text", (4, 256, 4, 1024), 260, 4096, 2),
        ("retrieval", (6, 128, 4, 512), 260, 4096, 2),
        ("image", (8, 64, 8, 128), 260, 1024, 10),
        ("pathfinder", (2, 64, 2, 128), 260, 1024, 2),
    )
}
LRA_PRESETS["tost-lra-retrieval"]["architectures"] = ["ToSTModel"]  # of pairs of texts, whose head is the task's own
LRA_PRESETS["tost-lra-image"]["hidden_dropout"] = 0.0
LRA_PRESETS["tost-lra-pathfinder"]["pre_norm"] = False

OPTION_DEFAULTS = dict.fromkeys(("conv_kernel", "layer_types", "sliding_window", "num_key_value_heads", "rope_parameters"))
OPTION_DEFAULTS["forgetting"] = "none"
BEYOND_PAPER = tuple(OPTION_DEFAULTS)
ABLATIONS = {"mlp_type": "mlp", "ista_step_size": 0.1, "ista_threshold": 0.1, "normalize_scores": True}
OPTION_DEFAULTS |= ABLATIONS | {
    "is_causal": True,
    "pooling": None,
    "pre_norm": True,
}  # all options, with the published model's values

MAX_SIZES = {  # far above any model: larger sizes in a file are damage or an attack, and must not be allocated
    "vocab_size": 2**31 - 1,
    "max_position_embeddings": 2**31 - 1,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_attention_heads": 2**20,
    "num_hidden_layers": 1024,
    "num_class_attention_layers": 1024,
    "num_channels": 1024,
}
FORGETTING = ("none", "head", "token")
POOLING = ("mean", "first", "last")
MLP_TYPES = ("mlp", "ista")
MAX_KERNEL = 64
MAX_NUMBER = 2.0**127  # of a float32


def drop_defaults(fields: dict, off: dict) -> dict:
    """The fields of a configuration's file without options at their defaults."""
    return {key: value for key, value in fields.items() if key not in off or value != off[key]}


def check_max_sizes(config: PreTrainedConfig) -> None:
    """Rejects (ValueError) sizes above `MAX_SIZES`."""
    for name, most in MAX_SIZES.items():
        if (getattr(config, name, None) or 0) > most:
            raise ValueError(f"{name} must be at most {most:,}, got {str(getattr(config, name))[:40]}.")


def check_fields(config: PreTrainedConfig, counts: tuple[str, ...], probabilities: tuple[str, ...]) -> None:
    """Rejects (ValueError) impossible values in fields of text and vision configurations."""
    # models reject a width of 0, not configurations: transformers' tools create such ones to test the fields
    for name, least in (dict.fromkeys(counts, 1) | {"hidden_size": 0, "intermediate_size": 0}).items():
        if getattr(config, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(config, name)}.")
    check_max_sizes(config)
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size ({config.hidden_size}) must be a multiple of num_attention_heads ({config.num_attention_heads})."
        )
    for name in probabilities:
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(config, name)}.")
    if not config.layer_norm_eps > 0:
        raise ValueError(f"layer_norm_eps must be above 0, got {config.layer_norm_eps}.")
    if config.initializer_range < 0:
        raise ValueError(f"initializer_range must not be negative, got {config.initializer_range}.")
    if config.mlp_type not in MLP_TYPES:
        raise ValueError(f"mlp_type must be one of {', '.join(MLP_TYPES)}, got {config.mlp_type[:40]!r}.")
    if not config.ista_step_size > 0:
        raise ValueError(f"ista_step_size must be above 0, got {config.ista_step_size}.")
    if not config.ista_threshold >= 0:
        raise ValueError(f"ista_threshold must not be negative, got {config.ista_threshold}.")
    numbers = "layer_norm_eps layer_scale_init_value initializer_range initializer_factor ista_step_size ista_threshold"
    for name in numbers.split():
        if not abs(getattr(config, name, 0)) < MAX_NUMBER:  # true of NaN as well
            raise ValueError(f"{name} must be a finite number that float32 can hold, got {str(getattr(config, name))[:40]}.")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = getattr(config, name, None)
        if any(i < 0 for i in (ids if isinstance(ids, list) else [ids or 0])):
            raise ValueError(f"{name} must not be negative, got {ids}; write null for none.")
    if config.hidden_act not in ACT2FN:
        raise ValueError(f"hidden_act {config.hidden_act!r} is not an activation that transformers knows, such as 'gelu'.")


@strict
class ToSTConfig(ToSTBaseConfig):
    r"""Configuration of a ToST text model. The defaults are the language model tost-base (110,384,016 parameters).

    Args:
        vocab_size: number of token ids; 50,304 is GPT-2's 50,257 padded to a multiple of 64.
        hidden_size: width D. Also `n_embd`.
        num_hidden_layers: number of blocks. Also `n_layer`.
        num_attention_heads: number of heads (subspaces) H; must divide `hidden_size`. Also `n_head`. With one head every
            membership is 1 and a token's score has no effect.
        intermediate_size: width of the MLP; 4 * `hidden_size` if None.
        hidden_act: activation of the MLP; "gelu" is the exact (erf) one.
        max_position_embeddings: length of the learned position tables (`embed_positions`, and `denom_bias` in each layer),
            which is the longest text. None for the position-free variant, which has neither table and no limit.
            Also `n_positions`.
        layer_norm_eps: epsilon of the LayerNorms.
        layer_scale_init_value: initial value of both LayerScale vectors of a block.
        use_bias: whether the Linear and LayerNorm layers of the blocks and the final norm have a bias. `lm_head` has none.
        hidden_dropout: dropout after the attention's and the MLP's output projection.
        attention_dropout: dropout on TSSA's 1 / (1 + moment).
        embedding_dropout: dropout on the embedded tokens.
        initializer_range: standard deviation of initial weights; the two output projections of a block get it divided by
            sqrt(2 * `num_hidden_layers`).
        forgetting: decay of the running sums: "none", as published, "head" (learned, per head) or "token" (computed from each
            token, per head).
        conv_kernel: taps of the short causal convolution on each attention layer's normalised input; None for none, as
            published.
        layer_types: of each layer "tost_causal_statistics", "full_attention" or "sliding_attention"; None for the first
            throughout, as published. At least one layer must be of the first type.
        sliding_window: tokens that a "sliding_attention" layer sees, including the current one.
        num_key_value_heads: heads of the attention layers' keys and values; must divide `num_attention_heads`, its default.
        rope_parameters: of rotary positions, which attention layers have in a position-free model: "rope_theta" and
            "rope_type", "default" or "linear" (with "factor"). Other models do not have this attribute.
        is_causal: whether a token sees only itself and the tokens before it, as in a language model. False makes an encoder:
            each layer's sums run over the whole text, there is no `denom_bias`, no cache and no generation. The order of the
            tokens then comes from `embed_positions` alone: without it (`max_position_embeddings=None`) an encoder takes a
            text for a set of tokens.
        pooling: features that a sequence classifier computes its logits from: those of the "first" or the "last" real token,
            or their "mean". None for "last" in causal models, as published, and "mean" in encoders.
        mlp_type: "mlp", as published, or "ista", CRATE's step towards a sparse code in a learned dictionary (the paper's
            ablation; `ISTAStep`), which replaces the MLP with its residual branch and LayerScale.
        ista_step_size, ista_threshold: of that step.
        normalize_scores: whether memberships are made from squares that are normalised per channel over the tokens, as
            published, or from the squares themselves (the paper's ablation). Without normalisation the plain formulas run,
            on every device.
        pre_norm: whether LayerNorm stands before the attention and the MLP, as published, with another one after the last
            block; or, if False, after each of the two sums.
        tie_word_embeddings: whether `lm_head` shares the token embedding's weight.
        use_cache: whether forward returns the running statistics; always False in an encoder.
        bos_token_id, eos_token_id, pad_token_id: special token ids; 50256 is GPT-2's end-of-text.

    Raises:
        ValueError: a value is impossible.

    Example:

    ```python
    >>> from tost_hf import ToSTConfig, ToSTForCausalLM

    >>> model = ToSTForCausalLM(ToSTConfig.from_preset("tost-base", max_position_embeddings=2048))
    ```
    """

    model_type = "tost"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    }

    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    max_position_embeddings: int | None = 1024
    layer_norm_eps: float | int = 1e-5
    layer_scale_init_value: float | int = 1e-5
    use_bias: bool = False
    hidden_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    embedding_dropout: float | int = 0.0
    initializer_range: float | int = 0.02
    forgetting: str = "none"
    conv_kernel: int | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    num_key_value_heads: int | None = None
    rope_parameters: dict | None = field(default=None, compare=False)  # no attribute where no layer rotates
    is_causal: bool = True
    pooling: str | None = None
    pre_norm: bool = True
    mlp_type: str = "mlp"
    ista_step_size: float | int = 0.1
    ista_threshold: float | int = 0.1
    normalize_scores: bool = True
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    pad_token_id: int | None = None

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "ToSTConfig":
        """The configuration of a named size ("tost-base", "tost-lra-text", ...), with any field overridden."""
        presets = PRESETS | LRA_PRESETS
        if name not in presets:
            raise ValueError(f"There is no preset {name!r}; choose one of {', '.join(presets)}.")
        fields = presets[name] | overrides
        if "layer_types" in presets[name] and "layer_types" not in overrides:  # the pattern, for any number of layers
            layers = fields.get("n_layer", fields["num_hidden_layers"])
            fields["layer_types"] = (fields["layer_types"] * layers)[:layers]
        return cls(**fields)

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)  # also sets what came under a GPT-2 name
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if not self.is_causal:
            self.use_cache = False
        # @strict runs the validators as well, but wraps their message in another error
        self.validate_architecture()

    def validate_architecture(self):
        check_fields(
            self,
            counts=("vocab_size", "num_hidden_layers", "num_attention_heads"),
            probabilities=("hidden_dropout", "attention_dropout", "embedding_dropout"),
        )
        if self.forgetting not in FORGETTING:
            raise ValueError(f"forgetting must be one of {', '.join(FORGETTING)}, got {self.forgetting[:40]!r}.")
        if self.conv_kernel is not None and not 2 <= self.conv_kernel <= MAX_KERNEL:
            raise ValueError(f"conv_kernel must be from 2 to {MAX_KERNEL}, or None for none, got {self.conv_kernel}.")
        self.validate_layer_type()
        self._check_attention_layers()
        self._check_encoder()
        if self.max_position_embeddings is not None and self.max_position_embeddings < 1:
            raise ValueError(
                f"max_position_embeddings must be at least 1, or None for no limit, got {self.max_position_embeddings}."
            )

    def options(self) -> dict[str, object]:
        """The options that differ from the published model (see `OPTION_DEFAULTS`)."""
        return {name: value for name, value in self.to_dict().items() if name in OPTION_DEFAULTS}

    def to_dict(self) -> dict:
        """As `PreTrainedConfig.to_dict`, without options at their defaults, so that published files do not change."""
        fields = super().to_dict()
        for name in ("layer_types", "rope_parameters"):
            if (given := fields.pop(f"_{name}", None)) is not None:
                fields[name] = given
        return drop_defaults(fields, OPTION_DEFAULTS)

    def _check_encoder(self):
        if self.pooling is not None and self.pooling not in POOLING:
            raise ValueError(f"pooling must be one of {', '.join(POOLING)}, or None, got {self.pooling[:40]!r}.")
        if self.is_causal:
            if self.pooling == "first":
                raise ValueError("pooling='first' needs is_causal=False: a causal model's first token sees no other token.")
            return
        causal = [
            name for name in BEYOND_PAPER if name != "layer_types" and getattr(self, name, None) != OPTION_DEFAULTS[name]
        ]
        if set(self.all_layer_types) != {CAUSAL_STATISTICS}:
            causal.append("layer_types")
        if causal:
            raise ValueError(f"{causal[0]} is for causal models; an encoder (is_causal=False) does not have it.")

    def validate_layer_type(self):
        """As in transformers, whose list of types lacks `CAUSAL_STATISTICS`.

        It has "linear_attention", whose cache layer has no rollback, static addresses or float64 sums.
        """
        kinds = (CAUSAL_STATISTICS, FULL_ATTENTION, SLIDING_ATTENTION)
        own = self.__dict__.get("_layer_types") or self.all_layer_types  # as given, however many
        if unknown := [kind for kind in own if kind not in kinds]:
            raise ValueError(f"layer_types must hold {', '.join(kinds)} and nothing else, got {unknown[0][:40]!r}.")
        if len(own) != self.num_hidden_layers:
            raise ValueError(f"layer_types must name every layer: it names {len(own)} of {self.num_hidden_layers}.")
        if CAUSAL_STATISTICS not in own:
            raise ValueError(f"layer_types must hold {CAUSAL_STATISTICS} at least once.")

    def _check_attention_layers(self):
        if SLIDING_ATTENTION in self.all_layer_types and (self.sliding_window is None or self.sliding_window < 2):
            raise ValueError(
                f"sliding_attention layers need a sliding_window of at least 2 tokens, got {self.sliding_window}."
            )
        groups = self.num_key_value_heads
        if groups is not None and (groups < 1 or self.num_attention_heads % groups):
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads ({self.num_attention_heads}), got {groups}."
            )
        if self.__dict__["_rope_parameters"] is not None and not self.rotates:
            raise ValueError(
                "rope_parameters are for attention layers of position-free models (max_position_embeddings=None)."
            )
        if self.rotates and (self.rope_parameters or {}).get("rope_type") not in ("default", "linear"):
            raise ValueError(
                "rope_parameters must have rope_type 'default' or 'linear', for all layers alike: other types stretch from "
                "a limit that a position-free model does not have."
            )
        if self.rotates and self.head_dim % 2:
            raise ValueError(f"Rotary positions need an even width of heads, got {self.head_dim}.")

    @property
    def pooling_in_use(self) -> str:
        """`pooling`, or its default."""
        return self.pooling or ("last" if self.is_causal else "mean")

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How transformers' tensor parallelism shards the heads; "tost_heads" is a style of tost_hf.parallel."""
        has_mlp = self.mlp_type == "mlp"  # every process computes the whole of an ISTA step
        columns = ["self_attn.in_proj", "mlp.up_proj"] if has_mlp else ["self_attn.in_proj"]
        if self.forgetting == "token":
            columns.append("self_attn.forget_proj")
        if set(self.all_layer_types) != {CAUSAL_STATISTICS}:
            columns += [f"self_attn.{name}_proj" for name in "qkv"]
        styles = dict.fromkeys(columns, "colwise") | {"self_attn.out_proj": "rowwise"}
        if has_mlp:
            styles["mlp.down_proj"] = "rowwise"
        styles["self_attn"] = "tost_heads"
        return {"embed_tokens": "embedding_rowwise"} | {f"layers.*.{name}": style for name, style in styles.items()}

    @base_model_tp_plan.setter
    def base_model_tp_plan(self, plan: dict[str, str]):
        """Has no effect: the plan follows from the fields. transformers 5.18 sets one for tied embeddings."""

    @property
    def rotates(self) -> bool:
        """Whether the model has attention layers with rotary positions."""
        return self.max_position_embeddings is None and set(self.all_layer_types) != {CAUSAL_STATISTICS}

    @property
    def all_layer_types(self) -> list[str]:
        """The type of every layer: `layer_types`, which is never None when read."""
        assert self.layer_types is not None
        return self.layer_types

    @property
    def head_dim(self) -> int:
        """Width p of one head."""
        return self.hidden_size // self.num_attention_heads


def _get_layer_types(config: ToSTConfig) -> list[str]:
    check_max_sizes(config)  # transformers asks for this list before the other checks
    given = config.__dict__.get("_layer_types")
    return [CAUSAL_STATISTICS] * config.num_hidden_layers if given is None else given[: config.num_hidden_layers]


def _set_layer_types(config: ToSTConfig, layer_types: list[str] | None) -> None:
    if layer_types is not None and set(layer_types) == {CAUSAL_STATISTICS} and len(layer_types) == config.num_hidden_layers:
        layer_types = None  # as published
    config.__dict__["_layer_types"] = layer_types


def _get_rope_parameters(config: ToSTConfig) -> dict | None:
    if not config.rotates:
        raise AttributeError("Only position-free models with attention layers have rope_parameters.")
    return config.__dict__.get("_rope_parameters")


def _set_rope_parameters(config: ToSTConfig, rope_parameters: dict | None) -> None:
    config.__dict__["_rope_parameters"] = rope_parameters


# A property over the field, so that its default follows `num_hidden_layers` at any time. transformers' caches read it.
ToSTConfig.layer_types = property(_get_layer_types, _set_layer_types)  # type: ignore[assignment]  # replaces the field
# A property, too: to transformers every configuration with this attribute is one of a model with rotary positions.
ToSTConfig.rope_parameters = property(_get_rope_parameters, _set_rope_parameters)  # type: ignore[assignment]


__all__ = [
    "ABLATIONS",
    "AUTO_MAPS",
    "BEYOND_PAPER",
    "CAUSAL_STATISTICS",
    "CODE_FILES",
    "FULL_ATTENTION",
    "LRA_PRESETS",
    "OPERATOR_FILES",
    "OPTION_DEFAULTS",
    "PRESETS",
    "SLIDING_ATTENTION",
    "ToSTBaseConfig",
    "ToSTConfig",
    "code_files",
    "source_file",
]
