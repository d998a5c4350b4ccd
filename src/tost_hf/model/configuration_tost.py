# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Configuration of ToST text models, and presets of the paper's sizes."""

import copy
import math
from dataclasses import field
from typing import Any, cast

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .base_tost import ToSTBaseConfig, check_fields


# Layer types, by which transformers' caches choose their layer classes. In memory TSSA layers are CAUSAL_STATISTICS, because
# the cache layer of "linear_attention" cannot crop a recurrent state, has no sequence length, and is the same for every model.
# Files have transformers' name: tokenizers and Trainer read any `config.json` as a `PreTrainedConfig`, which rejects others.
CAUSAL_STATISTICS, LINEAR_ATTENTION = "tost_causal_statistics", "linear_attention"
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"

PRESETS: dict[str, dict[str, Any]] = {
    "tost-base": {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768},
    "tost-medium": {"num_hidden_layers": 24, "num_attention_heads": 16, "hidden_size": 1024},
    "tost-large": {"num_hidden_layers": 36, "num_attention_heads": 20, "hidden_size": 1280},
}
_PLUS_FIELDS = {"forgetting": "token", "conv_kernel": 4, "max_position_embeddings": None}
PRESETS |= {
    "tost-plus-base": PRESETS["tost-base"] | _PLUS_FIELDS,
    "tost-plus-medium": PRESETS["tost-medium"] | _PLUS_FIELDS,
    "tost-hybrid-base": PRESETS["tost-base"]
    | _PLUS_FIELDS
    | {"layer_types": ([CAUSAL_STATISTICS] * 3 + [FULL_ATTENTION]) * 3},
}

BEYOND_PAPER = ("forgetting", "conv_kernel", "layer_types", "sliding_window", "num_key_value_heads", "rope_parameters")
# all options, with the values of the published models; `get_option_defaults` adds those that depend on other fields
OPTION_DEFAULTS: dict[str, Any] = dict.fromkeys(BEYOND_PAPER)
OPTION_DEFAULTS |= {"forgetting": "none", "is_causal": True, "pooling": None}

DECAY_TYPES = ("none", "head", "token")
POOLING_TYPES = ("mean", "first", "last")
MAX_CONV_KERNEL = 64
SCALED_ROPE_TYPES = ("dynamic", "yarn", "longrope", "llama3")  # relative to a length
BATCH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")  # whose frequencies depend on the longest position of a batch
ROPE_ERROR = "rope_parameters are for softmax attention layers of position-free models (max_position_embeddings=None)."


@strict
class ToSTConfig(ToSTBaseConfig):
    r"""Configuration of a ToST text model. The defaults are those of tost-base (110,384,016 parameters).

    Args:
        vocab_size: number of token ids; 50,304 is GPT-2's 50,257 padded to a multiple of 64.
        hidden_size: width D. Also `n_embd`.
        num_hidden_layers: number of blocks. Also `n_layer`.
        num_attention_heads: number of heads (subspaces) H; must divide `hidden_size`. Also `n_head`. With one head every
            membership is 1 and a token's score has no effect.
        intermediate_size: width of the MLP; 4 * `hidden_size` if None.
        hidden_act: activation of the MLP; "gelu" is the exact (erf) one.
        max_position_embeddings: length of the learned position tables (`embed_positions`, and `denom_bias` in each layer),
            which is the maximum sequence length. None for the position-free variant, which has neither table and no limit;
            the attribute is then infinity, which other libraries compare with lengths, and null in files. Also `n_positions`.
        layer_norm_eps: epsilon of the LayerNorms.
        layer_scale_init_value: initial value of both LayerScale vectors of a block.
        use_bias: whether the Linear and LayerNorm layers of the blocks and the final norm have a bias. `lm_head` has none.
        hidden_dropout: dropout after the output projections of the attention and the MLP. Also `hidden_dropout_prob`,
            `resid_pdrop`, `dropout`.
        attention_dropout: dropout on TSSA's 1 / (1 + moment). Also `attention_probs_dropout_prob`, `attn_pdrop`.
        embedding_dropout: dropout on the embedded tokens. Also `embd_pdrop`.
        initializer_range: standard deviation of initial weights; divided by sqrt(2 * `num_hidden_layers`) for the two output
            projections of a block.
        forgetting: decay of the recurrent state: "none", as published, "head" (learned, per head) or "token" (computed from
            each token, per head).
        conv_kernel: kernel size of the short causal convolution on each attention layer's normalized input; None for no
            convolution, as published.
        layer_types: type of each layer: "linear_attention" for TSSA, "full_attention" or "sliding_attention". At least one
            layer must be of the first type, which the attribute lists as "tost_causal_statistics", the type of its cache
            layer. By default all are, as published.
        sliding_window: number of tokens that a "sliding_attention" layer attends to, including the current one.
        num_key_value_heads: number of key and value heads of the attention layers; must divide `num_attention_heads`, which
            is the default.
        rope_parameters: parameters of the rotary position embeddings that attention layers have in a position-free model, as
            in transformers: "rope_theta", "rope_type" ("default", "linear", "dynamic", "yarn", "longrope", "llama3", ...) with
            its parameters, and "partial_rotary_factor". Types that scale from a length need it as
            "original_max_position_embeddings", with a "factor". Other models do not have this attribute.
        is_causal: whether a token depends only on itself and the preceding tokens, as in a language model. False for an
            encoder: each layer sums over the whole sequence, and there is no `denom_bias`, no cache and no generation. The
            order of the tokens is then known from `embed_positions` alone: without it (`max_position_embeddings=None`) an
            encoder treats a sequence as a set of tokens.
        pooling: features that a sequence classifier computes its logits from: those of the "first" or the "last" real token,
            or the "mean" over real tokens. The default is "last" in causal models, as published, and "mean" in encoders.
        tie_word_embeddings: whether `lm_head` shares the token embedding's weight.
        use_cache: whether forward returns the recurrent state; always False in an encoder.
        bos_token_id: id of the token that begins a text; 50256 is GPT-2's end-of-text.
        eos_token_id: id, or ids, of the token that ends a text.
        pad_token_id: id of the padding token.

    Raises:
        ValueError: a value is invalid.

    Example:

    ```python
    >>> config = ToSTConfig.from_preset("tost-base", max_position_embeddings=2048)
    >>> config.hidden_size, config.n_positions
    (768, 2048)
    ```
    """

    model_type = "tost"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # its name before and since transformers 5.24
    attribute_map = ToSTBaseConfig.attribute_map | {
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
    max_position_embeddings: int | float | None = 1024
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
    rope_parameters: dict | None = field(default_factory=lambda: None)  # no class attribute: `hasattr` is false without it
    is_causal: bool = True
    pooling: str | None = None
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    pad_token_id: int | None = None

    __eq__ = PreTrainedConfig.__eq__  # that of dataclasses reads `rope_parameters`

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "ToSTConfig":
        """The configuration of a named size ("tost-base", "tost-plus-base", ...), with any field overridden."""
        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}; choose one of {', '.join(PRESETS)}.")
        return cls(**cls._merge_fields(PRESETS[name], overrides))

    @classmethod
    def _merge_fields(cls, fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
        layer_types, num_layers = fields.get("layer_types"), overrides.get("n_layer", overrides.get("num_hidden_layers"))
        if layer_types is not None and num_layers is not None:
            overrides = {"layer_types": (layer_types * num_layers)[:num_layers]} | overrides  # repeats the pattern
        return super()._merge_fields(fields, overrides)

    def __post_init__(self, **kwargs):
        self._set_aliases(kwargs)
        if self.max_position_embeddings is None:
            self.max_position_embeddings = math.inf
        if self.layer_types is None:
            self.layer_types = [CAUSAL_STATISTICS] * self.num_hidden_layers
        self.layer_types = [CAUSAL_STATISTICS if name == LINEAR_ATTENTION else name for name in self.layer_types]
        if len(self.layer_types) > self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, but num_hidden_layers is {self.num_hidden_layers}."
            )
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.pooling is None:
            self.pooling = "last" if self.is_causal else "mean"
        self.use_cache = self.use_cache and self.is_causal
        if not self.uses_rope:
            rope_parameters = self.rope_parameters
            del self.rope_parameters
            if rope_parameters is not None:
                raise ValueError(ROPE_ERROR)
        super().__post_init__(**kwargs)
        self.base_model_tp_plan = self._make_tp_plan()  # type: ignore[misc]  # of an instance, as it depends on the options
        # @strict runs the validators as well, but wraps their error in another one
        self.validate_architecture()

    def validate_architecture(self):
        check_fields(self)
        if self.forgetting not in DECAY_TYPES:
            raise ValueError(f"forgetting must be one of {', '.join(DECAY_TYPES)}, got {self.forgetting!r}.")
        if self.conv_kernel is not None and not 2 <= self.conv_kernel <= MAX_CONV_KERNEL:
            raise ValueError(f"conv_kernel must be from 2 to {MAX_CONV_KERNEL}, or None for none, got {self.conv_kernel}.")
        self.validate_layer_type()
        self._check_attention_layers()
        self._check_encoder()

    def _check_encoder(self):
        if self.pooling not in POOLING_TYPES:
            raise ValueError(f"pooling must be one of {', '.join(POOLING_TYPES)}, or None, got {self.pooling!r}.")
        if self.is_causal:
            if self.pooling == "first":
                raise ValueError("pooling='first' needs is_causal=False: a causal model's first token depends only on itself.")
            return
        if causal_options := [name for name in self.options() if name in BEYOND_PAPER]:
            raise ValueError(f"{causal_options[0]} is for causal models; an encoder (is_causal=False) does not have it.")

    def validate_layer_type(self):
        """As in transformers, for the types of this model."""
        layer_types = cast("list[str]", self.layer_types)
        supported = (CAUSAL_STATISTICS, FULL_ATTENTION, SLIDING_ATTENTION)
        if unknown := [layer_type for layer_type in layer_types if layer_type not in supported]:
            raise ValueError(f"layer_types must be among {', '.join((LINEAR_ATTENTION, *supported))}, got {unknown[0]!r}.")
        # more after `num_hidden_layers` was lowered, which other models of transformers allow as well
        if len(layer_types) < self.num_hidden_layers:
            raise ValueError(f"layer_types must name every layer: it names {len(layer_types)} of {self.num_hidden_layers}.")
        if CAUSAL_STATISTICS not in layer_types:
            raise ValueError(f"layer_types must contain {LINEAR_ATTENTION} (TSSA) at least once.")

    def _check_attention_layers(self):
        if SLIDING_ATTENTION in cast("list[str]", self.layer_types) and (
            self.sliding_window is None or self.sliding_window < 2
        ):
            raise ValueError(
                f"sliding_attention layers need a sliding_window of at least 2 tokens, got {self.sliding_window}."
            )
        num_key_value_heads = cast(int, self.num_key_value_heads)
        if num_key_value_heads < 1 or self.num_attention_heads % num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads ({self.num_attention_heads}), got {num_key_value_heads}."
            )
        self.validate_rope()
        if self.uses_rope and self.head_dim % 2:
            raise ValueError(f"Rotary positions need an even head_dim, got {self.head_dim}.")

    def validate_rope(self):
        """As in transformers, for a model without a maximum length."""
        rope = getattr(self, "rope_parameters", None)
        if rope is None and self.uses_rope:
            raise ValueError("Softmax attention layers of position-free models need rope_parameters.")
        if rope is not None and not self.uses_rope:
            raise ValueError(ROPE_ERROR)
        if rope is None:
            return
        if (rope_type := rope.get("rope_type")) not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(
                f"rope_parameters must have a rope_type among default, {', '.join(ROPE_INIT_FUNCTIONS)}, the same for all "
                f"layers, got {rope_type!r}."
            )
        length, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
        if rope_type in SCALED_ROPE_TYPES and not (isinstance(length, int) and isinstance(factor, int | float)):
            raise ValueError(
                f"rope_parameters of rope_type {rope_type!r} need 'factor', and in 'original_max_position_embeddings' the "
                "length that they scale from: a position-free model has no maximum length."
            )
        config = self.with_finite_length()
        try:
            super(ToSTConfig, config).validate_rope()
        except KeyError as error:
            raise ValueError(error.args[0]) from error

    def with_finite_length(self) -> "ToSTConfig":
        """A copy with the maximum length that transformers' functions for rotary positions expect."""
        config, rope = copy.copy(self), cast(dict, self.rope_parameters)
        length = rope.get("original_max_position_embeddings", 1)
        if rope["rope_type"] == "dynamic":  # scales from the maximum length
            config.ignore_keys_at_rope_validation = {"original_max_position_embeddings"}
        else:
            length = int(length * rope.get("factor", 1))
        config.max_position_embeddings = length
        return config

    def get_option_defaults(self) -> dict[str, Any]:
        """The options and their values in published models."""
        return OPTION_DEFAULTS | {
            "layer_types": [CAUSAL_STATISTICS] * len(cast("list[str]", self.layer_types)),
            "num_key_value_heads": self.num_attention_heads,
            "pooling": "last" if self.is_causal else None,
        }

    def to_dict(self) -> dict:
        """As `PreTrainedConfig.to_dict`, without options at their defaults, so that published files do not change."""
        fields = super().to_dict()
        if self.is_position_free:  # JSON has no infinity
            fields["max_position_embeddings"] = None
        if "layer_types" in fields:
            names = {CAUSAL_STATISTICS: LINEAR_ATTENTION}
            layer_types = fields["layer_types"][: self.num_hidden_layers]
            fields["layer_types"] = [names.get(layer_type, layer_type) for layer_type in layer_types]
        return fields

    def _make_tp_plan(self) -> dict[str, str]:
        """How transformers' tensor parallelism shards the heads; "tost_heads" is a style of tost_hf.parallel."""
        colwise = ["self_attn.in_proj", "mlp.up_proj"]
        if self.forgetting == "token":
            colwise.append("self_attn.forget_proj")
        if self.has_attention:
            colwise += [f"self_attn.{name}_proj" for name in "qkv"]
        styles = dict.fromkeys(colwise, "colwise") | dict.fromkeys(["self_attn.out_proj", "mlp.down_proj"], "rowwise")
        styles["self_attn"] = "tost_heads"
        return {"embed_tokens": "embedding_rowwise"} | {f"layers.*.{name}": style for name, style in styles.items()}

    @property
    def is_position_free(self) -> bool:
        """Whether the model has no position tables, and so no maximum length."""
        return self.max_position_embeddings in (None, math.inf)

    @property
    def uses_rope(self) -> bool:
        """Whether the model has softmax attention layers with rotary positions."""
        return self.is_position_free and set(cast("list[str]", self.layer_types)) != {CAUSAL_STATISTICS}

    @property
    def has_attention(self) -> bool:
        """Whether some layers are softmax attention."""
        return set(cast("list[str]", self.layer_types)[: self.num_hidden_layers]) != {CAUSAL_STATISTICS}

    @property
    def head_dim(self) -> int:
        """Number of channels p of one head."""
        return self.hidden_size // self.num_attention_heads


__all__ = [
    "BATCH_DEPENDENT_ROPE_TYPES",
    "BEYOND_PAPER",
    "CAUSAL_STATISTICS",
    "FULL_ATTENTION",
    "OPTION_DEFAULTS",
    "PRESETS",
    "SLIDING_ATTENTION",
    "ToSTConfig",
]
