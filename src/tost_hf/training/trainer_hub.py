# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Trainer's pushes to the Hub: single commits with code and card, no needless pickle, failures reported.

transformers' own pushes lack the source files during training, publish `training_args.bin` (a pickle) and a card to be filled
in, and do not report one that failed in the background.
"""

import os
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import HfApi
from transformers import Trainer
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import CONFIG_NAME

from ..files import RUN_ARGUMENTS
from ..hub.cards import build_card, is_hub_id, write_card
from ..hub.checks import forbidden_file
from ..hub.publishing import STAGED, Publication, commit_files, model_files
from ..hub.records import CARD, save_card
from ..model.base_tost import AUTO_MAPS, ToSTBaseModel
from ..version import __version__
from .checkpoints import MANIFEST, output_folder


class PublishingTrainer(Trainer):
    """`Trainer` with `push_to_hub` as ToST's users need it.

    Every push is one commit with weights, configuration, source files, tokenizer or processor and model card. The strategies
    "checkpoint" and "all_checkpoints" add the training state (optimizer, scheduler, random numbers: the Trainer's own files,
    without which nobody could resume); `training_args.bin` is never sent. If a push in the background failed, `train` ends
    with an error that says so; the checkpoints are all in `output_dir`.
    """

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        if private is not None:
            self.args.hub_private_repo = private
        super().init_hf_repo(token=token)
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, ToSTBaseModel):
            model.config.auto_map = dict(AUTO_MAPS[model.config.model_type])  # from now on it is saved with its code
        if not self.is_world_process_zero():
            return
        self._pushes: list[Future[Publication]] = []
        self._pusher = ThreadPoolExecutor(max_workers=1)  # pushes go one after the other
        for left_over in output_folder(self).glob(f"{STAGED}*"):  # of a run that was killed
            shutil.rmtree(left_over, ignore_errors=True)

    def create_model_card(self, language=None, license: str | None = None, tags=None, *args, **kwargs) -> None:
        """Writes the folder's card from what is known of the model and the run; see `tost_hf.hub.build_card`.

        As with transformers' own, one that is in the folder is replaced.

        Args:
            language, tags: a string or a list, added to the metadata; as are the Hub ids in dataset_tags.
            license: the licence of the weights; a card without one can not be published with `tost-hf publish`.
            args, kwargs: the others that transformers' own takes; what they say is known from the folder.
        """
        if not isinstance(self.accelerator.unwrap_model(self.model), ToSTBaseModel):  # an adapter, say
            super().create_model_card(language, license, tags, *args, **kwargs)
        elif self.is_world_process_zero() and (output_folder(self) / CONFIG_NAME).is_file():  # not after evaluation alone
            card = build_card(output_folder(self), repo_id=getattr(self, "hub_model_id", None), license=license)
            for key, value in (("language", language), ("datasets", kwargs.get("dataset_tags")), ("tags", tags)):
                names = [value] if isinstance(value, str) else list(value or [])
                names = [name for name in names if key != "datasets" or is_hub_id(name)]
                if names:
                    setattr(card.data, key, list(dict.fromkeys([*(getattr(card.data, key) or []), *names])))
            save_card(card, output_folder(self) / CARD)

    def push_to_hub(  # type: ignore[override]  # transformers' own returns a Future or None, too, whatever it declares
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs,
    ) -> Publication | Future[Publication] | None:
        """Saves the model to `output_dir` and pushes it with its card, in one commit.

        Args:
            blocking: wait for it; otherwise a `Future` is returned. None on processes other than the first.
            kwargs: for `create_model_card`.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        kwargs.pop("model_name", None)
        self.create_model_card(**kwargs)
        self._finish_current_push()
        files = {name: path for name, path in model_files(output_folder(self)).items() if _is_published(name, path)}
        push = self._push(files, commit_message or "End of training", token, revision)
        return push.result() if blocking else push

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        strategy = self.args.hub_strategy
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        if not self.args.hub_always_push and not all(push.done() for push in self._pushes):
            return  # as in transformers: this checkpoint is left to a later push
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if isinstance(self.accelerator.unwrap_model(self.model), ToSTBaseModel):
            if (run_arguments := output_folder(self) / RUN_ARGUMENTS).is_file():
                shutil.copyfile(run_arguments, Path(checkpoint_folder, RUN_ARGUMENTS))
            write_card(checkpoint_folder, repo_id=self.hub_model_id, overwrite=True)
        # links, because the checkpoint may be deleted (save_total_limit) before it is sent
        staged = tempfile.mkdtemp(prefix=STAGED, dir=self.args.output_dir)
        model = {
            name: path for name, path in model_files(Path(checkpoint_folder)).items() if name != MANIFEST
        }  # not yet written
        checkpoint = {name: _link(path, Path(staged, name)) for name, path in model.items()}
        files = {name: path for name, path in checkpoint.items() if _is_published(name, path)}
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            place = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else Path(checkpoint_folder).name
            files |= {f"{place}/{name}": path for name, path in checkpoint.items()}
        by_steps = self.args.save_strategy == SaveStrategy.STEPS
        progress = f"step {self.state.global_step}" if by_steps else f"epoch {int(self.state.epoch)}"
        push = self._push(files, f"Training in progress, {progress}")
        push.add_done_callback(lambda _: shutil.rmtree(staged, ignore_errors=True))

    def _push(
        self, files: dict[str, Path], message: str, token: str | None = None, revision: str | None = None
    ) -> Future[Publication]:
        api = HfApi(token=token or self.args.hub_token, library_name="tost_hf", library_version=__version__)
        revision = revision or self.args.hub_revision
        assert self.hub_model_id is not None  # init_hf_repo set it
        self._pushes.append(self._pusher.submit(commit_files, api, self.hub_model_id, files, message, revision=revision))
        return self._pushes[-1]

    def _finish_current_push(self) -> None:
        """Called by `train` at its end. Waits for the pushes.

        Raises:
            OSError: one of them failed.
        """
        failed = [error for push in getattr(self, "_pushes", []) if (error := push.exception()) is not None]
        self._pushes = []
        if failed:
            raise OSError(
                f"{len(failed)} pushes to {self.hub_model_id} failed during training; the last one with: {failed[-1]}. "
                f"Nothing is lost: the checkpoints are in {output_folder(self).absolute()}. Push again with "
                "trainer.push_to_hub(), or run the same command again."
            ) from failed[-1]


def _is_published(name: str, path: Path) -> bool:
    return not name.startswith("_") and forbidden_file(name, path) is None


def _link(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
    return target
