# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What language and vision models have in common: which configurations they take, which files they read and publish."""

import inspect
import os
import sys
import tempfile
from pathlib import Path
from typing import cast

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError
from transformers import PreTrainedModel

from .remote_code import CodeCarryingConfig, carrying_code
from .tssa_layer import KEPT_IN_FLOAT32, TokenStatisticsSelfAttention


ADAPTER_TARGETS = ("in_proj", "out_proj")  # the projections of TSSA


def _name_adapter_targets(model_type: str) -> None:
    """Tells PEFT, where it is imported, which layers LoRA takes if its configuration names none; PEFT's own entry wins."""
    tables = sys.modules.get("peft.utils.constants")
    if tables is not None:
        tables.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(model_type, list(ADAPTER_TARGETS))


class ToSTBaseModel(PreTrainedModel):
    """Checks configurations, loads weights from safetensors files only, and is saved with its source files on request."""

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
        _name_adapter_targets(wanted.model_type)

    def post_init(self):
        # by the parameters that this model has: transformers' shared tests look for each name
        layers = [module for module in self.modules() if isinstance(module, TokenStatisticsSelfAttention)]
        self._keep_in_fp32_modules_strict = {
            name for name in KEPT_IN_FLOAT32 if any(getattr(layer, name) is not None for layer in layers)
        }
        super().post_init()

    _saved_with_code = False

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
            ValueError: `use_safetensors=False`, or a `distributed_config` that cuts the model by layers.
            OSError: there are no safetensors weights, or they are damaged.
        """
        if use_safetensors is False:
            raise ValueError("ToST models load safetensors weights only; convert pickled ones with `tost-hf convert`.")
        _refuse_pipeline(kwargs.get("distributed_config"))
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
            with_code: whether the flat source files and `auto_map` are saved beside the weights, so that the folder loads with
                `trust_remote_code=True` where this package is not installed. None: as the configuration came, that is with
                them if the model was loaded from a folder that has them.
        """
        if with_code is None and self._saved_with_code:
            with_code = True
        with carrying_code(cast(CodeCarryingConfig, self.config), with_code, Path(inspect.getfile(type(self))).parent):
            try:
                super().save_pretrained(save_directory, *args, **kwargs)
            except SafetensorError as error:  # a full disk comes as one
                raise OSError(
                    f"The weights could not be written to {os.fspath(save_directory)!r}; is the disk full? ({error})"
                ) from error

    def push_to_hub(  # type: ignore[override]  # transformers' decorator hides the parameters of its own from the checker
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

        A card that the repository has is kept. Where there is none, it gets its metadata and one sentence, not transformers'
        form to fill in. `tost-hf publish` checks what it sends; this does not.
        """
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, with_code=with_code, max_shard_size=max_shard_size)
            self._push_card(api, repo_id, revision, tags).save(Path(folder, "README.md"))
            return self._upload_modified_files(
                folder,
                repo_id,
                files_timestamps={},
                commit_message=commit_message,
                commit_description=commit_description,
                token=token,
                create_pr=create_pr,
                revision=revision,
            )

    def _push_card(self, api: HfApi, repo_id: str, revision: str | None, tags: list[str] | None) -> ModelCard:
        try:
            card = ModelCard.load(api.hf_hub_download(repo_id, "README.md", revision=revision))
        except RevisionNotFoundError:  # a branch that this push creates, from main
            return self._push_card(api, repo_id, None, tags)
        except EntryNotFoundError:
            data = ModelCardData(library_name="transformers", tags=["tost"])
            card = ModelCard(f"---\n{data.to_yaml()}\n---\n\nA {type(self).__name__}, pushed without a model card.\n")
        card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *(tags or [])])) or None
        return card


def _refuse_pipeline(distributed_config) -> None:
    """Refuses transformers' pipelines: their later stages take what comes in for embedded tokens, and add positions again."""
    is_dict = isinstance(distributed_config, dict)  # as transformers takes it, too
    size = distributed_config.get("pp_size") if is_dict else getattr(distributed_config, "pp_size", None)
    if (size or 1) > 1:
        raise ValueError(
            "A ToST model cannot be cut by layers (pp_size of distributed_config): use tp_size, which cuts it by heads, or "
            "fully_shard."
        )
