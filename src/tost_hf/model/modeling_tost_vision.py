# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""ToST vision models: XCiT with TSSA in place of cross-covariance attention, and the paper's two baselines."""

import itertools
import math
from dataclasses import dataclass
from typing import Unpack, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .base_tost import ToSTBaseModel, add_class_names
from .configuration_tost_vision import ToSTVisionConfig
from .layers_tost import MLP, MembershipsMixin, TokenStatisticsSelfAttention, make_dropout
from .tssa_reference import compute_dtype


@dataclass
class ToSTVisionModelOutput(MembershipsMixin, BaseModelOutputWithPooling):
    """Output of `ToSTVisionModel`: the fields of transformers' `BaseModelOutputWithPooling`, and two on request.

    Args:
        memberships: with `output_memberships=True`, Pi of every TSSA block, each (B, H, N) in float32.
        class_attentions: with `output_class_attentions=True`, the class token's attention weights over itself and the patches,
            of every class-attention block, each (B, H, 1, 1 + N).
    """

    class_attentions: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class ToSTImageClassifierOutput(MembershipsMixin, ImageClassifierOutput):
    """Output of `ToSTForImageClassification`: logits (B, num_labels), the loss, and the fields of `ToSTVisionModelOutput`."""

    class_attentions: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class ToSTBackboneOutput(MembershipsMixin, BackboneOutput):
    """Output of `ToSTBackbone`: the fields of transformers' `BackboneOutput`, and `memberships`."""


# Embeddings ----------------------------------------------------------------------------------------------------------


class ToSTVisionPatchEmbeddings(nn.Module):
    """The stem: 3x3 convolutions of stride 2, each with BatchNorm, one for each factor of two in the patch size.

    In training, a BatchNorm whose `weight` is frozen (`requires_grad=False`) normalizes by its running statistics and keeps
    them: adapters and new heads are trained and saved without the stem.
    """

    def __init__(self, config: ToSTVisionConfig):
        super().__init__()
        self.patch_size, self.num_channels = config.patch_size, config.num_channels
        num_convolutions = config.patch_size.bit_length() - 1
        channels = [config.num_channels, *(config.hidden_size >> i for i in reversed(range(num_convolutions)))]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=2, padding=1, bias=False)
            for in_channels, out_channels in itertools.pairwise(channels)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(out_channels) for out_channels in channels[1:])
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(B, C, height, width) to (B, D, height / patch size, width / patch size)."""
        self._check_pixel_values(pixel_values)
        # convolutions are faster, and their output is (B, N, D) in memory
        x = pixel_values.contiguous(memory_format=torch.channels_last)
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms)):
            x = convolution(x if i == 0 else self.act_fn(x))
            # of one channel, a convolution may return another layout, for which torch's gradient of BatchNorm may be wrong
            x = self._normalize(cast(nn.BatchNorm2d, norm), x.contiguous(memory_format=torch.channels_last))
        return x

    def _normalize(self, norm: nn.BatchNorm2d, x: torch.Tensor) -> torch.Tensor:
        # by the mode of the module, which may be converted to SyncBatchNorm, wrapped by PEFT, or offloaded
        if not norm.training or norm.weight.requires_grad:
            return norm(x)
        x = norm.eval()(x)
        norm.train()
        return x

    def _check_pixel_values(self, pixel_values: torch.Tensor) -> None:
        if pixel_values.ndim != 4 or pixel_values.shape[1] != self.num_channels:
            raise ValueError(
                f"pixel_values must have shape (batch, {self.num_channels}, height, width), got {tuple(pixel_values.shape)}."
            )
        batch, _, height, width = pixel_values.shape
        if batch == 0 or height < self.patch_size or width < self.patch_size:
            raise ValueError(
                f"pixel_values must contain at least one image, with sides of at least one patch ({self.patch_size} pixels), "
                f"got {batch} of {height} x {width} pixels."
            )
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(
                f"The sides of an image must be multiples of the patch size ({self.patch_size}), got {height} x {width}; "
                "resize or crop it."
            )


class ToSTVisionPositionEmbeddings(nn.Module):
    """Fourier encoding of a patch's two coordinates in a grid of any size, projected to `hidden_size`."""

    features = 32  # sines and cosines of one axis
    temperature = 10000

    def __init__(self, config: ToSTVisionConfig):
        super().__init__()
        self.projection = nn.Linear(2 * self.features, config.hidden_size)

    def forward(self, height: int, width: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Encodings (height * width, D) in row-major order."""
        vertical = self._encode(height, device)[:, None].expand(height, width, -1)
        horizontal = self._encode(width, device)[None].expand(height, width, -1)
        encoding = torch.cat([vertical, horizontal], -1).flatten(0, 1)
        return self.projection(encoding.to(dtype))  # not the weight's dtype: it may be quantized

    def _encode(self, length: int, device: torch.device) -> torch.Tensor:
        """Interleaved sines and cosines of positions 1 to `length`, scaled to one turn, (length, 32)."""
        position = torch.arange(1, length + 1, dtype=torch.float32, device=device)
        angle = position / (length + 1e-6) * (2 * math.pi)
        index = torch.arange(self.features // 2, dtype=torch.float32, device=device)
        angle = angle[:, None] / self.temperature ** (2 * index / self.features)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


class ToSTVisionEmbeddings(nn.Module):
    """Patch embeddings plus position embeddings."""

    def __init__(self, config: ToSTVisionConfig):
        super().__init__()
        self.patch_embeddings = ToSTVisionPatchEmbeddings(config)
        self.position_embeddings = ToSTVisionPositionEmbeddings(config)
        self.dropout = make_dropout(config.embedding_dropout)

    def forward(self, pixel_values: torch.Tensor | None) -> torch.Tensor:
        """The patches of images (B, C, height, width) in row-major order, (B, N, D)."""
        if pixel_values is None:
            raise ValueError("Give pixel_values, of shape (batch, channels, height, width).")
        convolution = cast(nn.Conv2d, self.patch_embeddings.convolutions[0])
        patches = self.patch_embeddings(pixel_values.to(convolution.weight.dtype))
        positions = self.position_embeddings(*patches.shape[-2:], patches.device, patches.dtype)
        patches = patches.flatten(2).transpose(1, 2).contiguous()
        return self.dropout(patches + positions)


# Attention -----------------------------------------------------------------------------------------------------------


class _QKVAttention(nn.Module):
    """Base of attention layers with a fused projection to queries, keys and values."""

    def __init__(self, config: ToSTVisionConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.dropout = config.attention_dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.qkv_bias)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_dropout = make_dropout(config.hidden_dropout)

    def split(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each (B, H, N, p)."""
        B, N, _ = hidden_states.shape
        query, key, value = self.qkv(hidden_states).view(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return query, key, value

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenates the heads (B, H, N, p) and applies the output projection, to (B, N, D)."""
        return self.out_dropout(self.out_proj(x.transpose(1, 2).flatten(2)))


class ToSTVisionSoftmaxAttention(_QKVAttention):
    """The ViT baseline: softmax attention between all patches."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        dropout = self.dropout if self.training else 0.0
        return self.merge(F.scaled_dot_product_attention(*self.split(hidden_states), dropout_p=dropout)), None


class ToSTVisionCrossCovarianceAttention(_QKVAttention):
    """The XCiT baseline (arXiv 2106.09681): attention between channels, normalized over the patches."""

    def __init__(self, config: ToSTVisionConfig):
        super().__init__(config)
        self.temperature = nn.Parameter(torch.ones(config.num_attention_heads, 1, 1))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        query, key, value = self.split(hidden_states)
        query, key = F.normalize(query, dim=-2), F.normalize(key, dim=-2)
        scores = (query.transpose(-2, -1) @ key).to(compute_dtype(value.dtype)) * self.temperature
        attn_weights = scores.softmax(-1).to(value.dtype)
        attn_weights = F.dropout(attn_weights, self.dropout, self.training)
        return self.merge(value @ attn_weights.transpose(-2, -1)), None


class ToSTVisionClassAttention(_QKVAttention):
    """Attention with the class token, the first one, as the only query (CaiT)."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The class token (B, 1, D) and its attention weights over all tokens (B, H, 1, 1 + N)."""
        query, key, value = self.split(hidden_states)
        attn_weights = (query[:, :, :1] @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(-1)
        return self.merge(F.dropout(attn_weights, self.dropout, self.training) @ value), attn_weights


def _make_attention(config: ToSTVisionConfig) -> nn.Module:
    if config.attention_type == "xca":
        return ToSTVisionCrossCovarianceAttention(config)
    if config.attention_type == "softmax":
        return ToSTVisionSoftmaxAttention(config)
    return TokenStatisticsSelfAttention(
        config.hidden_size,
        config.num_attention_heads,
        causal=False,
        in_bias=config.qkv_bias,
        out_bias=True,
        attention_dropout=config.attention_dropout,
        hidden_dropout=config.hidden_dropout,
    )


# Blocks --------------------------------------------------------------------------------------------------------------


class _ToSTVisionBlock(GradientCheckpointingLayer):
    """Base of both kinds of block: two normalized residual branches with LayerScale and stochastic depth."""

    def __init__(self, config: ToSTVisionConfig, attention: nn.Module):
        super().__init__()
        hidden_size, layer_scale = config.hidden_size, float(config.layer_scale_init_value)
        self.drop_path_rate = float(config.drop_path_rate)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=config.layer_norm_eps)
        self.attention = attention
        self.attention_layer_scale = nn.Parameter(torch.full((hidden_size,), layer_scale))
        self.mlp_norm = nn.LayerNorm(hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config, inner_dropout=config.hidden_dropout)
        self.mlp_layer_scale = nn.Parameter(torch.full((hidden_size,), layer_scale))

    def drop_path(self, branch: torch.Tensor) -> torch.Tensor:
        """Stochastic depth: zeroes the branch of random images, and scales up the others to the same mean."""
        if not self.training or self.drop_path_rate == 0:
            return branch
        return branch * F.dropout(branch.new_ones(branch.shape[0], 1, 1), self.drop_path_rate)


class ToSTVisionLayer(_ToSTVisionBlock):
    """A block over the patches: attention and MLP, (B, N, D) to (B, N, D)."""

    def __init__(self, config: ToSTVisionConfig):
        super().__init__(config, _make_attention(config))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        attn_output, _ = self.attention(self.attention_norm(hidden_states))
        hidden_states = hidden_states + self.drop_path(self.attention_layer_scale * attn_output)
        return hidden_states + self.drop_path(self.mlp_layer_scale * self.mlp(self.mlp_norm(hidden_states)))


class ToSTVisionClassAttentionLayer(_ToSTVisionBlock):
    """A block over class token and patches, (B, 1 + N, D) to (B, 1 + N, D): class attention, and an MLP on the class token.

    As in the authors' code, the residual branches of the patches are the normalized patches.
    """

    def __init__(self, config: ToSTVisionConfig):
        super().__init__(config, ToSTVisionClassAttention(config))
        self.normalize_patch_tokens = config.normalize_patch_tokens

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(hidden_states)
        attn_output, _ = self.attention(normed)
        branch = torch.cat([attn_output, normed[:, 1:]], 1)
        hidden_states = hidden_states + self.drop_path(self.attention_layer_scale * branch)
        if self.normalize_patch_tokens:
            hidden_states = self.mlp_norm(hidden_states)
        else:
            hidden_states = torch.cat([self.mlp_norm(hidden_states[:, :1]), hidden_states[:, 1:]], 1)
        branch = torch.cat([self.mlp_layer_scale * self.mlp(hidden_states[:, :1]), hidden_states[:, 1:]], 1)
        return hidden_states + self.drop_path(branch)


# Models --------------------------------------------------------------------------------------------------------------


class ToSTVisionPreTrainedModel(ToSTBaseModel):
    """Base class of the ToST vision models: weight initialization, loading and saving.

    Example:

    ```python
    >>> model = ToSTVisionModel(ToSTVisionConfig(hidden_size=32, num_attention_heads=4))
    >>> isinstance(model, ToSTVisionPreTrainedModel)
    True
    ```
    """

    config: ToSTVisionConfig
    # names of modules are part of checkpoints: here they are those of transformers' ViT (`attention`, `classifier`, a base
    # model named after its type), in text models those of its decoders (`self_attn`, `score`, `lm_head`, `model`)
    base_model_prefix = "tost"
    main_input_name = "pixel_values"
    input_modalities = ("image",)  # type: ignore[assignment]  # a tuple as in transformers' own models
    supports_gradient_checkpointing = True
    _input_embed_layer = "patch_embeddings"
    _no_split_modules = ["ToSTVisionEmbeddings", "ToSTVisionLayer", "ToSTVisionClassAttentionLayer"]
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": ToSTVisionLayer,  # the patches: embedded, and after each block
        "memberships": OutputRecorder(TokenStatisticsSelfAttention, index=1),
        "class_attentions": OutputRecorder(ToSTVisionClassAttention, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            bound = self.config.initializer_factor / math.sqrt(module.weight[0].numel())  # PyTorch's default
            init.uniform_(module.weight, -bound, bound)
        else:
            super()._init_weights(module)
        if isinstance(module, TokenStatisticsSelfAttention):
            init.ones_(module.temp)
        elif isinstance(module, ToSTVisionCrossCovarianceAttention):
            init.ones_(module.temperature)
        elif isinstance(module, _ToSTVisionBlock):
            init.constant_(module.attention_layer_scale, self.config.layer_scale_init_value)
            init.constant_(module.mlp_layer_scale, self.config.layer_scale_init_value)
        elif isinstance(module, ToSTVisionModel):
            init.trunc_normal_(module.class_token, std=self.config.initializer_range)


class ToSTVisionModel(ToSTVisionPreTrainedModel):
    """The ToST vision model without a head: stem, TSSA blocks over the patches, class-attention blocks, final LayerNorm.

    Example:

    ```python
    >>> model = ToSTVisionModel(ToSTVisionConfig(hidden_size=32, num_attention_heads=4))
    >>> model(torch.randn(1, 3, 64, 96)).last_hidden_state.shape
    torch.Size([1, 25, 32])
    ```
    """

    def __init__(self, config: ToSTVisionConfig):
        super().__init__(config)
        self.embeddings = ToSTVisionEmbeddings(config)
        self.layers = nn.ModuleList(ToSTVisionLayer(config) for _ in range(config.num_hidden_layers))
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.class_attention_layers = nn.ModuleList(
            ToSTVisionClassAttentionLayer(config) for _ in range(config.num_class_attention_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ToSTVisionModelOutput:
        """Runs the base model.

        Args:
            pixel_values: (B, C, height, width), both sides multiples of the patch size.
            interpolate_pos_encoding: accepted for compatibility; positions are always computed for the size of the image.

        Returns:
            `last_hidden_state` (B, 1 + N, D), the class token, then the patches in row-major order, all after the final norm;
            `pooler_output` (B, D), the class token.
        """
        self._check_output_attentions(kwargs.get("output_attentions"), self.config.attention_type == "softmax")
        hidden_states = self.embeddings(pixel_values)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        hidden_states = torch.cat([self.class_token.expand(hidden_states.shape[0], -1, -1), hidden_states], 1)
        for layer in self.class_attention_layers:
            hidden_states = layer(hidden_states)
        hidden_states = self.norm(hidden_states)
        return ToSTVisionModelOutput(last_hidden_state=hidden_states, pooler_output=hidden_states[:, 0])


class ToSTForImageClassification(ToSTVisionPreTrainedModel):
    """ToST with a linear classifier on the class token.

    Example:

    ```python
    >>> config = ToSTVisionConfig(hidden_size=32, num_attention_heads=4, num_labels=5)
    >>> model = ToSTForImageClassification(config)
    >>> images, labels = torch.randn(2, 3, 224, 224), torch.tensor([0, 4])
    >>> model(images, labels=labels).logits.shape
    torch.Size([2, 5])
    ```
    """

    accepts_loss_kwargs = False  # read by Trainer: the loss is the mean over a micro-batch

    def __init__(self, config: ToSTVisionConfig):
        super().__init__(config)
        self.num_labels = cast(int, config.num_labels)
        self.tost = ToSTVisionModel(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels) if self.num_labels > 0 else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ToSTImageClassifierOutput:
        """Logits (B, num_labels), and the loss of `config.problem_type` if labels are given."""
        outputs = self.tost(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config)
        return ToSTImageClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            memberships=outputs.memberships,
            class_attentions=outputs.class_attentions,
        )


# Backbone -------------------------------------------------------------------------------------------------------------


class ToSTBackbone(BackboneMixin, ToSTVisionPreTrainedModel):
    """Stem and TSSA blocks as a backbone: feature maps have `hidden_size` channels, one pixel per patch, and no final norm.

    Loads the weights of any ToST vision model, without its class token, class-attention blocks and head.

    Example:

    ```python
    >>> config = ToSTVisionConfig(hidden_size=32, num_attention_heads=4, out_indices=[1, 2])
    >>> backbone = ToSTBackbone(config)
    >>> [tuple(x.shape) for x in backbone(torch.randn(1, 3, 64, 96)).feature_maps]
    [(1, 32, 4, 6), (1, 32, 4, 6)]
    ```
    """

    has_attentions = False  # in the sense of `output_attentions`
    _keys_to_ignore_on_load_unexpected = [r"class_token$", r"class_attention_layers\.", r"(^|tost\.)norm\.", r"^classifier\."]

    def __init__(self, config: ToSTVisionConfig):
        super().__init__(config)
        if config.out_features is None:
            config.out_features = config.stage_names[-1:]
        self.num_features = [config.hidden_size] * len(config.stage_names)
        self.embeddings = ToSTVisionEmbeddings(config)
        self.layers = nn.ModuleList(ToSTVisionLayer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> ToSTBackboneOutput:
        """Runs the blocks up to the last requested stage.

        Args:
            pixel_values: (B, C, height, width), both sides multiples of the patch size; the image need not be square.

        Returns:
            `feature_maps`, one (B, D, height / patch size, width / patch size) for each of `out_features`: "stem", the
            embedded patches with their positions, and "stage1", "stage2", ..., the patches after each block.
        """
        self._check_output_attentions(kwargs.get("output_attentions"), self.config.attention_type == "softmax")
        patches = self.embeddings(pixel_values)
        grid = [side // self.config.patch_size for side in pixel_values.shape[-2:]]
        *earlier_stages, last_stage = (self.stage_names.index(name) for name in self.out_features)
        stages = [patches]
        for layer in self.layers[:last_stage]:
            stages.append(layer(stages[-1]))
        out_stages = (stages[index] for index in (*earlier_stages, last_stage))
        feature_maps = tuple(x.transpose(1, 2).unflatten(2, grid).contiguous() for x in out_stages)
        return ToSTBackboneOutput(feature_maps=feature_maps)


class _RestoreName(WeightRenaming):
    """A renaming of weights in loading only: they are saved under the names that they have in the model."""

    __slots__ = ()

    def reverse_transform(self) -> WeightRenaming:
        return self


# transformers renames every `out_proj` of a DETR to `o_proj` in loading, in its backbone as well
register_checkpoint_conversion_mapping("ToSTBackbone", [_RestoreName("o_proj", "out_proj")], overwrite=True)
add_class_names("tost_vision")


__all__ = ["ToSTBackbone", "ToSTBackboneOutput", "ToSTForImageClassification", "ToSTVisionModel", "ToSTVisionPreTrainedModel"]
