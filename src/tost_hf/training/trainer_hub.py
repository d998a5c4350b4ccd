# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Pushes to the Hub with the model's source files and card, and without the pickle `training_args.bin`."""

import shutil

from transformers import Trainer

from ..files import TRAINING_ARGS, is_weights_name, staged_file
from ..hub.cards import build_card, is_hub_id, save_card
from ..hub.results import CARD
from ..model.base_tost import AUTO_MAPS, ToSTBaseModel, code_files
from .checkpoints import output_folder


class PublishingTrainer(Trainer):
    """`Trainer` whose `push_to_hub` uploads the model's source files and its card.

    It adds `training_args.bin` (a pickle) to the `.gitignore` of the output folder, which excludes it from uploads. The
    strategies "checkpoint" and "all_checkpoints" push the training state, too, which is needed to resume. With
    `hub_always_push` a push waits for the one in progress.
    """

    def init_hf_repo(self, *args, **kwargs) -> None:
        super().init_hf_repo(*args, **kwargs)
        folder = output_folder(self)
        if self.is_world_process_zero():
            folder.mkdir(parents=True, exist_ok=True)
            ignored = folder / ".gitignore"
            lines = ignored.read_text().splitlines() if ignored.exists() else []
            if TRAINING_ARGS not in lines:
                with staged_file(ignored) as staged:
                    staged.write_text("\n".join([*lines, TRAINING_ARGS, ""]))
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, ToSTBaseModel):
            model.config.auto_map = dict(AUTO_MAPS[model.config.model_type])  # save_pretrained then adds the code
            if self.is_world_process_zero():  # pushes of checkpoints upload the weights from the output folder
                for name, path in code_files(model.config.model_type).items():
                    shutil.copyfile(path, folder / name)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.args.hub_always_push:  # otherwise this push is skipped while one is in progress
            self._finish_current_push()  # which uploads files of the output folder that this one replaces
        super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(self, language=None, license: str | None = None, tags=None, *args, **kwargs) -> None:
        """Writes the output folder's model card from its files; see `tost_hf.hub.build_card`.

        As in transformers, an existing card is replaced.

        Args:
            language, tags: a string or a list, added to the metadata, as are the Hub ids in dataset_tags.
            license: the license of the weights; a card without one cannot be published with `tost-hf publish`.
            args, kwargs: other arguments of `Trainer.create_model_card`; ignored, as the folder's files have their values.
        """
        folder = output_folder(self)
        if not isinstance(self.accelerator.unwrap_model(self.model), ToSTBaseModel):  # for example an adapter
            super().create_model_card(language, license, tags, *args, **kwargs)
        elif self.is_world_process_zero() and any(is_weights_name(path.name) for path in folder.glob("*")):
            card = build_card(folder, repo_id=getattr(self, "hub_model_id", None), license=license)
            for key, value in (("language", language), ("datasets", kwargs.get("dataset_tags")), ("tags", tags)):
                names = [value] if isinstance(value, str) else list(value or [])
                names = [name for name in names if key != "datasets" or is_hub_id(name)]
                if names:
                    setattr(card.data, key, list(dict.fromkeys([*(getattr(card.data, key) or []), *names])))
            save_card(card, folder / CARD)
