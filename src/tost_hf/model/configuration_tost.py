# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Configuration of ToST text models, and presets of the paper's sizes."""

from typing import Any, cast

from huggingface_hub.dataclasses import strict
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .base_tost import ToSTBaseConfig, check_fields


# Layer types, by which transformers' caches choose their layer classes. In memory the type of TSSA layers is "tssa", because
# the cache layer of "linear_attention" cannot crop a recurrent state, has no sequence length, and is the same for every model.
# Files have transformers' name: tokenizers and Trainer read any `config.json` as a `PreTrainedConfig`, which rejects others.
TSSA, LINEAR_ATTENTION = "tssa", "linear_attention"
TSSA_NAMES = (LINEAR_ATTENTION, "tost_causal_statistics")  # the second in files of version 0.2
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"

PRESETS: dict[str, dict[str, Any]] = {
    "tost-base": {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768},
    "tost-medium": {"num_hidden_layers": 24, "num_attention_heads": 16, "hidden_size": 1024},
    "tost-large": {"num_hidden_layers": 36, "num_attention_heads": 20, "hidden_size": 1280},
}
# The longest text that models without a position table are meant for; other libraries read it, models do not. vLLM accepts
# requests, and sentence-transformers reads texts, up to this length. It is not larger since lm-evaluation-harness computes the
# logits of windows of this length, which take 1.65 GB in float32 (26 GB for 131,072 tokens).
MAX_TEXT_LENGTH = 8192
_PLUS_FIELDS = {
    "decay_type": "token",
    "conv_kernel": 4,
    "position_embedding_type": "none",
    "max_position_embeddings": MAX_TEXT_LENGTH,
}
PRESETS |= {
    "tost-plus-base": PRESETS["tost-base"] | _PLUS_FIELDS,
    "tost-plus-medium": PRESETS["tost-medium"] | _PLUS_FIELDS,
    "tost-hybrid-base": PRESETS["tost-base"]
    | _PLUS_FIELDS
    | {"layer_types": ([TSSA] * 3 + [SLIDING_ATTENTION]) * 3, "sliding_window": 256},
}

BEYOND_PAPER = ("decay_type", "conv_kernel", "layer_types", "sliding_window", "num_key_value_heads", "rope_parameters")
# all options, with the values of the published models; `get_option_defaults` adds those that depend on other fields
OPTION_DEFAULTS: dict[str, Any] = dict.fromkeys(BEYOND_PAPER)
OPTION_DEFAULTS |= {"decay_type": "none", "is_causal": True, "pooling": None, "position_embedding_type": "learned"}

DECAY_TYPES = ("none", "head", "token")
POOLING_TYPES = ("mean", "first", "last")
POSITION_EMBEDDING_TYPES = ("learned", "none")
MAX_CONV_KERNEL = 64
BATCH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")  # whose frequencies depend on the longest position of a batch


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
        position_embedding_type: "learned", as published, for position tables (`embed_positions`, and `denom_bias` in each
            layer), or "none" for a model without these, whose softmax attention layers have rotary positions.
        max_position_embeddings: size of the position tables, which is the maximum sequence length; with "none" the longest
            text that the model is meant for, which other libraries read, and the model does not enforce. Also `n_positions`.
            None, as in files of earlier versions, sets `position_embedding_type="none"`, and 8,192.
        layer_norm_eps: epsilon of the LayerNorms.
        layer_scale_init_value: initial value of both LayerScale vectors of a block.
        use_bias: whether the Linear and LayerNorm layers of the blocks and the final norm have a bias. `lm_head` has none.
        hidden_dropout: dropout after the output projections of the attention and the MLP. Also `hidden_dropout_prob`,
            `resid_pdrop`, `dropout`.
        attention_dropout: dropout on TSSA's 1 / (1 + moment). Also `attention_probs_dropout_prob`, `attn_pdrop`.
        embedding_dropout: dropout on the embedded tokens. Also `embd_pdrop`.
        initializer_range: standard deviation of initial weights; divided by sqrt(2 * `num_hidden_layers`) for the two output
            projections of a block.
        decay_type: decay of the recurrent state: "none", as published, "head" (learned, per head) or "token" (computed from
            each token, per head).
        conv_kernel: kernel size of the short causal convolution on each attention layer's normalized input; None for no
            convolution, as published.
        layer_types: type of each layer: "linear_attention" for TSSA, "full_attention" or "sliding_attention". At least one
            layer must be of the first type, which the attribute lists as "tssa", the type of its cache layer. By default all
            are, as published.
        sliding_window: number of tokens that a "sliding_attention" layer attends to, including the current one.
        num_key_value_heads: number of key and value heads of the attention layers; must divide `num_attention_heads`, which
            is the default.
        rope_parameters: parameters of the rotary positions of softmax attention layers (`position_embedding_type="none"`), as
            in transformers: "rope_theta", and "rope_type" ("default", "linear", "dynamic", "yarn", "longrope", "llama3", ...)
            with its parameters. All channels of a head rotate.
        is_causal: whether a token depends only on itself and the preceding tokens, as in a language model. False for an
            encoder: each layer sums over the whole sequence, and there is no `denom_bias`, no cache and no generation. The
            order of the tokens is then known from `embed_positions` alone: with `position_embedding_type="none"` an encoder
            treats a sequence as a set of tokens.
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
        "forgetting": "decay_type",  # its name in earlier versions
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
    position_embedding_type: str = "learned"
    max_position_embeddings: int | None = 1024
    layer_norm_eps: float | int = 1e-5
    layer_scale_init_value: float | int = 1e-5
    use_bias: bool = False
    hidden_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    embedding_dropout: float | int = 0.0
    initializer_range: float | int = 0.02
    decay_type: str = "none"
    conv_kernel: int | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    num_key_value_heads: int | None = None
    rope_parameters: dict | None = None
    is_causal: bool = True
    pooling: str | None = None
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    pad_token_id: int | None = None

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
        if fields.get("max_position_embeddings", 0) is None:  # see `_set_text_length`
            fields = {"position_embedding_type": "none"} | fields
        return super()._merge_fields(fields, overrides)

    def __post_init__(self, **kwargs):
        self._set_aliases(kwargs)
        if self.max_position_embeddings is None:
            self._set_text_length()
        if self.layer_types is None:
            self.layer_types = [TSSA] * self.num_hidden_layers
        self.layer_types = [TSSA if name in TSSA_NAMES else name for name in self.layer_types]
        if len(self.layer_types) > self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, but num_hidden_layers is {self.num_hidden_layers}."
            )
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.pooling is None:
            self.pooling = "last" if self.is_causal else "mean"
        self.use_cache = self.use_cache and self.is_causal
        rope_parameters = self.rope_parameters
        super().__post_init__(**kwargs)
        if not self.uses_rope:  # where transformers sets its default
            self.rope_parameters = rope_parameters
        self.base_model_tp_plan = self._make_tp_plan()  # type: ignore[misc]  # of an instance, as it depends on the options
        # @strict runs the validators as well, but wraps their error in another one
        self.validate_architecture()

    def _set_text_length(self) -> None:
        """For files of earlier versions, where null stands for no position tables: sets the fields that now say so."""
        self.position_embedding_type, self.max_position_embeddings = "none", MAX_TEXT_LENGTH
        rope = self.rope_parameters or {}
        if "original_max_position_embeddings" in rope:
            length = rope["original_max_position_embeddings"]
            if rope.get("rope_type") == "dynamic":  # transformers scales it from the maximum length
                self.rope_parameters = {k: x for k, x in rope.items() if k != "original_max_position_embeddings"}
            else:
                length = int(length * rope.get("factor", 1))
            self.max_position_embeddings = length

    def validate_architecture(self):
        check_fields(self)
        if self.max_position_embeddings is None:
            raise ValueError("max_position_embeddings must be an integer, got None.")
        if self.position_embedding_type not in POSITION_EMBEDDING_TYPES:
            raise ValueError(
                f"position_embedding_type must be one of {', '.join(POSITION_EMBEDDING_TYPES)}, got "
                f"{self.position_embedding_type!r}."
            )
        if self.decay_type not in DECAY_TYPES:
            raise ValueError(f"decay_type must be one of {', '.join(DECAY_TYPES)}, got {self.decay_type!r}.")
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
        supported = (TSSA, FULL_ATTENTION, SLIDING_ATTENTION)
        if unknown := [layer_type for layer_type in layer_types if layer_type not in supported]:
            raise ValueError(f"layer_types must be among {', '.join((LINEAR_ATTENTION, *supported))}, got {unknown[0]!r}.")
        # more after `num_hidden_layers` was lowered, which other models of transformers allow as well
        if len(layer_types) < self.num_hidden_layers:
            raise ValueError(f"layer_types must name every layer: it names {len(layer_types)} of {self.num_hidden_layers}.")
        if TSSA not in layer_types:
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
        rope = self.rope_parameters
        if (rope is not None) != self.uses_rope:
            raise ValueError('rope_parameters are for softmax attention layers with position_embedding_type="none" alone.')
        if rope is None:
            return
        if (rope_type := rope.get("rope_type")) not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(
                f"rope_parameters must have a rope_type among default, {', '.join(ROPE_INIT_FUNCTIONS)}, the same for all "
                f"layers, got {rope_type!r}."
            )
        if rope.get("partial_rotary_factor", 1) != 1:
            raise ValueError("All channels of a head rotate: remove partial_rotary_factor from rope_parameters.")
        if self.head_dim % 2:
            raise ValueError(f"Rotary positions need an even head_dim, got {self.head_dim}.")

    def get_option_defaults(self) -> dict[str, Any]:
        """The options and their values in published models."""
        return OPTION_DEFAULTS | {
            "layer_types": [TSSA] * len(cast("list[str]", self.layer_types)),
            "num_key_value_heads": self.num_attention_heads,
            "pooling": "last" if self.is_causal else None,
        }

    def to_dict(self) -> dict:
        """As `PreTrainedConfig.to_dict`, without options at their defaults, so that published files do not change."""
        fields = super().to_dict()
        if "layer_types" in fields:
            layer_types = fields["layer_types"][: self.num_hidden_layers]
            fields["layer_types"] = [LINEAR_ATTENTION if name == TSSA else name for name in layer_types]
        return fields

    def _make_tp_plan(self) -> dict[str, str]:
        """How transformers' tensor parallelism shards the heads; "tost_heads" is a style of tost_hf.parallel.tensor."""
        colwise = ["self_attn.in_proj", "mlp.up_proj"]
        if self.decay_type == "token":
            colwise.append("self_attn.forget_proj")
        if self.has_attention:
            colwise += [f"self_attn.{name}_proj" for name in "qkv"]
        styles = dict.fromkeys(colwise, "colwise") | dict.fromkeys(["self_attn.out_proj", "mlp.down_proj"], "rowwise")
        styles["self_attn"] = "tost_heads"
        return {"embed_tokens": "embedding_rowwise"} | {f"layers.*.{name}": style for name, style in styles.items()}

    @property
    def uses_rope(self) -> bool:
        """Whether the model has softmax attention layers with rotary positions."""
        return self.position_embedding_type == "none" and set(cast("list[str]", self.layer_types)) != {TSSA}

    @property
    def has_attention(self) -> bool:
        """Whether some layers are softmax attention."""
        return set(cast("list[str]", self.layer_types)[: self.num_hidden_layers]) != {TSSA}

    @property
    def head_dim(self) -> int:
        """Number of channels p of one head."""
        return self.hidden_size // self.num_attention_heads


__all__ = [
    "BATCH_DEPENDENT_ROPE_TYPES",
    "BEYOND_PAPER",
    "FULL_ATTENTION",
    "OPTION_DEFAULTS",
    "PRESETS",
    "SLIDING_ATTENTION",
    "TSSA",
    "ToSTConfig",
]
