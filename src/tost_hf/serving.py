# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""`tost-hf serve`: transformers' own server, with a few defaults that a server of one model needs."""

import os

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from transformers import AutoConfig
from transformers.cli.serving import model_manager
from transformers.cli.transformers import app

from .hub.loading import check_model_exists


class ModelManager(model_manager.ModelManager):
    """transformers' `ModelManager`, which lists the model of the command line, and samples unless the model says otherwise.

    Raises:
        OSError: there is no such model. transformers asks the Hub again for two minutes.
        ValueError: it generates no text, or there is no such device.
    """

    def __init__(self, **kwargs):
        if kwargs.get("force_model") is not None:
            name, _, revision = kwargs["force_model"].partition(":")[0].partition("@")
            check_model_exists(name, revision or None)
            if os.path.isdir(name) and AutoConfig.from_pretrained(name).model_type == "tost_vision":
                raise ValueError(f"{name} is a model of images; the server is for models that generate text.")
        if str(kwargs.get("device")).startswith("cuda") and not torch.cuda.is_available():
            raise ValueError("PyTorch finds no CUDA device: leave out --device, or give --device cpu.")
        super().__init__(**kwargs)

    def load_model_and_processor(self, *args, **kwargs):
        """As in OpenAI's interface, where `temperature` is 1 by default; transformers ignores it without `do_sample`."""
        model, processor = super().load_model_and_processor(*args, **kwargs)
        if model.can_generate() and model.generation_config.do_sample is None:
            model.generation_config.do_sample = True
        return model, processor

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict]:
        """The model of the command line, as transformers 5.24 lists it by another method, and those of the cache."""
        served = {"id": self.force_model, "object": "model", "created": 0, "owned_by": ""}
        return [served] * (self.force_model is not None) + super().get_gen_models(cache_dir)  # type: ignore[misc]


def serve(args: list[str]) -> None:
    """Runs `transformers serve` with these arguments."""
    os.makedirs(HF_HUB_CACHE, exist_ok=True)  # without it transformers' /v1/models fails
    model_manager.ModelManager = ModelManager  # type: ignore[assignment,misc]  # from where transformers' command imports it
    app(["serve", *args], prog_name="tost-hf")
