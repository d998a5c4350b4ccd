# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The models of the server: which it may load, with a message for each that cannot be loaded."""

import os
import sys
from collections.abc import Mapping

import transformers
from huggingface_hub.errors import CacheNotFound
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cli.serving.model_manager import ModelManager

from ..cache_files import CachedPrefix, load_prefix
from ..model.modeling_tost import ToSTForCausalLM


class ServedModels(ModelManager):
    """The models of the server."""

    def __init__(
        self,
        *,
        force_model: str | None = None,
        trust_remote_code: bool = False,
        prefix_files: Mapping[str, str] | None = None,
        prefixes: dict[str, CachedPrefix] | None = None,
        **options,
    ):
        """Loads `force_model`, if there is one, and its `prefix_files` into `prefixes`.

        Raises:
            ValueError, OSError: it or a file cannot be loaded; or code is trusted without saying whose.
        """
        if force_model is None and prefix_files:
            raise ValueError("--prefix needs a MODEL: a file of `tost-hf cache` belongs to one model.")
        if force_model is None and trust_remote_code:
            raise ValueError(
                "--trust-remote-code needs a MODEL: without one, any client could have any repository's code run here."
            )
        if force_model is not None and _is_path(force_model) and not os.path.isdir(force_model):
            raise FileNotFoundError(f"There is no folder {force_model!r}.")
        super().__init__(force_model=force_model, trust_remote_code=trust_remote_code, **options)
        for loaded in self.loaded_models.values():
            if prefix_files and not isinstance(loaded.model, ToSTForCausalLM):
                raise ValueError(f"--prefix is for ToST models, not {type(loaded.model).__name__}.")
            for name, file in (prefix_files or {}).items():
                assert prefixes is not None  # given with the files
                prefixes[name] = load_prefix(file, loaded.model)
            if getattr(loaded.processor, "chat_template", None) is None:
                print(
                    f"tost-hf: {force_model} has no chat template, so /v1/completions works and chat does not; put a "
                    "chat_template.jinja beside its tokenizer to chat.",
                    file=sys.stderr,
                )

    def load_model_and_processor(self, model_id_and_revision, *args, **options):
        """As transformers' own.

        Raises:
            ValueError, OSError, ImportError: the model cannot be loaded.
        """
        try:
            return super().load_model_and_processor(model_id_and_revision, *args, **options)
        except (ValueError, OSError, ImportError):
            raise
        except Exception as error:
            raise ValueError(f"{model_id_and_revision} cannot be loaded: {type(error).__name__}: {error}") from error

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict]:  # type: ignore[override]  # theirs is static
        """The model that the server holds; else those of the Hub's cache."""
        if self.force_model is not None:
            return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": ""}]
        try:
            return super().get_gen_models(cache_dir)
        except CacheNotFound:
            return []

    def _load_model(self, model_id_and_revision, tqdm_class=None, **options):  # type: ignore[override]
        # transformers looks for the class in its own module, where a repository's own is not
        if options.get("gguf_file") is None:
            model_id, revision = model_id_and_revision.split("@", 1)
            loading = {"revision": revision, "trust_remote_code": self.trust_remote_code}
            names = AutoConfig.from_pretrained(model_id, **loading).architectures
            own = getattr(transformers, str(names[0]), None) if names else None
            if own is None or not own.__module__.startswith("transformers."):
                loading |= {"dtype": self.dtype, "device_map": self.device, "tqdm_class": tqdm_class}
                loading |= {"attn_implementation": self.attn_implementation}
                loading |= {"quantization_config": self.get_quantization_config()} if self.quantization else {}
                return AutoModelForCausalLM.from_pretrained(model_id, **loading)
        return super()._load_model(model_id_and_revision, tqdm_class=tqdm_class, **options)


def _is_path(model: str) -> bool:
    """Whether this can only be a folder: repositories are called NAME or OWNER/NAME."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or (os.sep != "/" and os.sep in model)
