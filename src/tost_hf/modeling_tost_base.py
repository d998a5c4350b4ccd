# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What language and vision models have in common: which configurations they take, and which files they read."""

from safetensors import SafetensorError
from transformers import PreTrainedModel


class ToSTBaseModel(PreTrainedModel):
    """Checks configurations, and loads weights from safetensors files only."""

    def __init__(self, config, *inputs, **kwargs):
        wanted = type(self).config_class
        if getattr(config, "model_type", None) != wanted.model_type:
            raise ValueError(
                f"{type(self).__name__} needs a {wanted.__name__} (model type {wanted.model_type!r}), got a "
                f"{type(config).__name__} of model type {getattr(config, 'model_type', None)!r}."
            )
        for name in ("hidden_size", "intermediate_size"):
            if getattr(config, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}.")
        super().__init__(config, *inputs, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, use_safetensors: bool | None = None, **kwargs):
        """As `PreTrainedModel.from_pretrained`, from safetensors files only: weights are never unpickled.

        Raises:
            ValueError: `use_safetensors=False`.
            OSError: there are no safetensors weights, or they are damaged.
        """
        if use_safetensors is False:
            raise ValueError("ToST models load safetensors weights only; convert pickled ones with `tost-hf convert`.")
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *model_args, use_safetensors=True, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"The weights of {str(pretrained_model_name_or_path)!r} are damaged or incomplete ({error}); fetch or copy "
                "them again."
            ) from error
