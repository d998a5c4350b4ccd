# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The vision trunk as a backbone of models for dense tasks: the patches after chosen blocks, as feature maps."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.backbone_utils import BackboneMixin
from transformers.modeling_outputs import BackboneOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_tost_vision import ToSTVisionConfig
from .modeling_tost_vision import ToSTVisionEmbeddings, ToSTVisionLayer, ToSTVisionPreTrainedModel


@dataclass
class ToSTBackboneOutput(BackboneOutput):
    """`memberships` as in `ToSTVisionModelOutput`."""

    memberships: tuple[torch.FloatTensor, ...] | None = None


class ToSTBackbone(BackboneMixin, ToSTVisionPreTrainedModel):
    """Stem and TSSA blocks alone: every map has the model's width and a place per patch, without a final norm.

    Reads the weights of any ToST vision model and leaves out its class token, class-attention blocks and head.
    """

    has_attentions = False  # of the kind that `output_attentions` asks for
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
        """Runs the blocks up to the last wanted one.

        Args:
            pixel_values: (B, C, height, width), both sides multiples of the patch size; the image need not be square.

        Returns:
            `feature_maps`, one (B, D, height / patch size, width / patch size) for each of `out_features`: "stem", the
            embedded patches with their positions, and "stage1", "stage2", ..., the patches after each block.
        """
        patches = self.embeddings(pixel_values)
        grid = [side // self.config.patch_size for side in pixel_values.shape[-2:]]
        *before, last = (self.stage_names.index(name) for name in self.out_features)
        stages = [patches]
        for layer in self.layers[:last]:
            stages.append(layer(stages[-1]))
        maps = (stages[stage].transpose(1, 2).unflatten(2, grid).contiguous() for stage in (*before, last))
        return ToSTBackboneOutput(feature_maps=tuple(maps))


__all__ = ["ToSTBackbone", "ToSTBackboneOutput"]
