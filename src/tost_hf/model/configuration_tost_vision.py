# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Configuration of ToST vision models, and presets of the paper's sizes."""

from huggingface_hub.dataclasses import strict
from transformers.backbone_utils import BackboneConfigMixin

from .base_tost import ToSTBaseConfig, check_fields


FEATURE_FIELDS = ("out_features", "out_indices")
ATTENTION_TYPES = ("tssa", "xca", "softmax")

_SIZES = {  # hidden size, layers, heads, initial LayerScale
    "tiny": (192, 12, 4, 1.0),
    "small": (384, 12, 8, 1.0),
    "tiny-24": (192, 24, 4, 1e-5),
    "small-24": (384, 24, 8, 1e-5),
    "medium": (512, 24, 8, 1e-5),
    "large": (768, 24, 16, 1e-5),
}
VISION_PRESETS = {
    f"tost-vision-{size}-patch{patch_size}": {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "layer_scale_init_value": layer_scale,
        "patch_size": patch_size,
    }
    for size, (hidden_size, num_layers, num_heads, layer_scale) in _SIZES.items()
    for patch_size in (16, 8)
}


@strict
class ToSTVisionConfig(BackboneConfigMixin, ToSTBaseConfig):
    r"""Configuration of a ToST vision model. The defaults are those of the paper's ToST-S with 16-pixel patches.

    Args:
        hidden_size: width D.
        num_hidden_layers: number of blocks over the patches.
        num_class_attention_layers: number of class-attention blocks after them (CaiT).
        num_attention_heads: number of heads; must divide `hidden_size`.
        intermediate_size: width of the MLPs; 4 * `hidden_size` if None.
        hidden_act: activation of the stem and the MLPs; "gelu" is the exact (erf) one.
        image_size: side of the images that the model is meant for. Other sizes work: positions are computed for each image.
        patch_size: side of a patch, a power of two from 2 to 32: the stem halves the image once for each factor of two and
            doubles its channels, up to `hidden_size`.
        num_channels: channels of an image.
        attention_type: "tssa", or one of the paper's baselines in the same model: "xca" (cross-covariance attention, XCiT) or
            "softmax" (plain attention).
        normalize_patch_tokens: whether a class-attention block normalizes the patch tokens as well as the class token before
            its MLP, as all released models do (`tokens_norm` in the authors' code).
        layer_norm_eps: epsilon of the LayerNorms.
        layer_scale_init_value: initial value of the LayerScale vectors (the authors' eta).
        qkv_bias: whether the attentions' input projections have a bias.
        hidden_dropout: dropout after output projections. Also `hidden_dropout_prob`, `resid_pdrop`, `dropout`.
        attention_dropout: dropout on TSSA's 1 / (1 + moment), or on the baselines' attention weights. Also
            `attention_probs_dropout_prob`, `attn_pdrop`.
        embedding_dropout: dropout on the embedded patches.
        drop_path_rate: probability of dropping a residual branch for an image during training, the same in every block.
        initializer_range: standard deviation of the truncated normal distribution of initial Linear weights and class token.
        initializer_factor: factor on the stem's initial weights, which are PyTorch's default for convolutions; leave it at 1.
        out_features: names of the `stage_names` that a `ToSTBackbone` returns as feature maps; the last one by default.
        out_indices: the same by index.

    Raises:
        ValueError: a value is invalid.

    Example:

    ```python
    >>> config = ToSTVisionConfig.from_preset("tost-vision-tiny-patch16", num_labels=10)
    >>> config.hidden_size, config.num_labels
    (192, 10)
    ```
    """

    model_type = "tost_vision"
    base_config_key = "vision_config"

    hidden_size: int = 384
    num_hidden_layers: int = 12
    num_class_attention_layers: int = 2
    num_attention_heads: int = 8
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int = 16
    num_channels: int = 3
    attention_type: str = "tssa"
    normalize_patch_tokens: bool = True
    layer_norm_eps: float | int = 1e-6
    layer_scale_init_value: float | int = 1.0
    qkv_bias: bool = True
    hidden_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    embedding_dropout: float | int = 0.0
    drop_path_rate: float | int = 0.0
    initializer_range: float | int = 0.02
    initializer_factor: float | int = 1.0
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    @property
    def stage_names(self) -> list[str]:
        """ "stem", the embedded patches, and "stage1", "stage2", ..., one for each block over the patches."""
        return ["stem", *(f"stage{number}" for number in range(1, self.num_hidden_layers + 1))]

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "ToSTVisionConfig":
        """The configuration of a named size ("tost-vision-small-patch16", ...), with any field overridden."""
        if name not in VISION_PRESETS:
            raise ValueError(f"There is no vision preset {name!r}; choose one of {', '.join(VISION_PRESETS)}.")
        return cls(**(VISION_PRESETS[name] | overrides))

    def __post_init__(self, **kwargs):
        features = {name: kwargs.pop(name, getattr(self, f"_{name}")) for name in FEATURE_FIELDS}
        super().__post_init__(**kwargs)
        self.validate_architecture()  # as in ToSTConfig
        if any(value is not None for value in features.values()):  # otherwise `ToSTBackbone` sets the last stage
            self.set_output_features_output_indices(**features)

    def validate_architecture(self):
        check_fields(self)
        if self.patch_size not in (2, 4, 8, 16, 32):
            raise ValueError(f"patch_size must be a power of two from 2 to 32, got {self.patch_size}.")
        if self.hidden_size % (self.patch_size // 2):
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of half the patch_size ({self.patch_size}): the stem "
                "doubles its channels up to hidden_size."
            )
        sides = [self.image_size] if isinstance(self.image_size, int) else list(self.image_size)
        if len(sides) not in (1, 2) or min(sides) < 1:
            raise ValueError(f"image_size must be one side, or height and width, in pixels, got {self.image_size}.")
        if self.attention_type not in ATTENTION_TYPES:
            raise ValueError(f"attention_type must be one of {', '.join(ATTENTION_TYPES)}, got {self.attention_type!r}.")

    def set_output_features_output_indices(self, out_features: list | None, out_indices: list | None):
        """As in transformers; rejects empty lists."""
        if any(value is not None and not value for value in (out_features, out_indices)):
            raise ValueError("out_features and out_indices must name at least one of stage_names, or be omitted.")
        super().set_output_features_output_indices(out_features, out_indices)

    def to_dict(self) -> dict:
        """As `PreTrainedConfig.to_dict`, without options at their defaults."""
        return {name: value for name, value in super().to_dict().items() if name not in FEATURE_FIELDS or value is not None}


__all__ = ["ATTENTION_TYPES", "VISION_PRESETS", "ToSTVisionConfig"]
