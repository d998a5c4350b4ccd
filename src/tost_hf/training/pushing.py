# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What a trainer's pushes to the Hub contain beyond transformers': the model's source files and its card."""

import shutil
from typing import Any

from transformers import Trainer

from ..files import TRAINING_ARGS, is_weights_name, staged_file
from ..hub.cards import build_card, is_hub_id, save_card
from ..hub.results import CARD
from ..model.base_tost import AUTO_MAPS, ToSTBaseModel, code_files
from .checkpoints import output_folder


def prepare_output_folder(trainer: Trainer) -> None:
    """Adds the source files to the output folder, which is pushed, and excludes `training_args.bin`, a pickle."""
    folder, model = output_folder(trainer), trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(model, ToSTBaseModel):
        model.config.auto_map = dict(AUTO_MAPS[model.config.model_type])  # save_pretrained then adds the code
    if not trainer.is_world_process_zero():
        return
    folder.mkdir(parents=True, exist_ok=True)
    ignored = folder / ".gitignore"
    lines = ignored.read_text().splitlines() if ignored.exists() else []
    if TRAINING_ARGS not in lines:
        with staged_file(ignored) as staged:
            staged.write_text("\n".join([*lines, TRAINING_ARGS, ""]))
    if isinstance(model, ToSTBaseModel):  # pushes of checkpoints upload the weights from the output folder
        for name, path in code_files(model.config.model_type).items():
            shutil.copyfile(path, folder / name)


def write_card(trainer: Trainer, language: Any, license: str | None, tags: Any, datasets: Any) -> None:
    """Writes the model card of the output folder, if there is a model; see `ToSTTrainer.create_model_card`."""
    folder = output_folder(trainer)
    if not trainer.is_world_process_zero() or not any(is_weights_name(path.name) for path in folder.glob("*")):
        return
    card = build_card(folder, repo_id=getattr(trainer, "hub_model_id", None), license=license)
    for key, value in (("language", language), ("datasets", datasets), ("tags", tags)):
        names = [value] if isinstance(value, str) else list(value or [])
        names = [name for name in names if key != "datasets" or is_hub_id(name)]
        if names:
            setattr(card.data, key, list(dict.fromkeys([*(getattr(card.data, key) or []), *names])))
    save_card(card, folder / CARD)


__all__ = ["prepare_output_folder", "write_card"]
