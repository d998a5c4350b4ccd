# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""`ToSTTrainer`: all that training with this package does beyond transformers' Trainer, by its public methods only."""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from ..files import TRAINER_STATE
from ..model.base_tost import AUTO_MAPS, ToSTBaseModel
from ..model.layers_tost import FLOAT32_PARAMETERS
from ..model.modeling_tost import ToSTForCausalLM
from ..parallel.context import parallelize
from .arguments import BaseTrainingArguments, ToSTTrainingArguments
from .callbacks import FiniteLossCallback
from .checkpoints import choose_checkpoint
from .parallelism import FullOptimizerState, check_processes, is_tensor_parallel, make_context_mesh, shard_loaded_weights
from .pushing import prepare_output_folder, write_card
from .streams import PackedStream, StreamLoader, StreamProgressCallback, collate_stream


NO_WEIGHT_DECAY = FLOAT32_PARAMETERS


class ToSTTrainer(Trainer):
    """transformers' `Trainer` with the authors' parameter groups; without `args`, with `ToSTTrainingArguments`.

    Weight decay applies to tensors of two or more dimensions except `temp` and `denom_bias`, which set the sharpness and the
    bias of a membership. Embeddings are decayed; tensors of one dimension (norms, biases, LayerScale) are not.

    It resumes from complete checkpoints only (`tost_hf.training.checkpoints`), with the same batches, also if they are grouped
    by length; trains no further step if the checkpoint has all of them; and stops when the loss becomes NaN
    (`FiniteLossCallback`). Pushes contain the model's source files and card, and not the pickle `training_args.bin`; with
    `hub_always_push` a push waits for the one in progress. The configuration is saved with the `use_cache` that it had. The
    arguments, the model and the data determine the rest, in any combination except for that of context and tensor parallelism:

    - `context_parallel_size`, or `cp_size` of Accelerate's `ParallelismConfig`: that many processes share each sequence (see
      `tost_hf.parallel.parallelize`). Evaluation then returns only the loss, as each process has only the logits of its shard.
    - a model loaded with `distributed_config=DistributedConfig(tp_plan="auto")`: each process has some of the heads.
      Checkpoints contain the whole model and optimizer, and a run may resume with another number of processes.
    - a `tost_hf.training.streams.PackedStream` as training data: each worker of each data-parallel group reads different
      files, and a resumed run continues at the same position; with `ignore_data_skip` it starts the stream over.

    Raises:
        ValueError: the arguments do not suit the model or the processes; raised by `train`: the checkpoint is incomplete.
        FloatingPointError: raised by `train`: the loss became NaN or infinite; nothing was saved since.

    Example, with `dataset` a `datasets.Dataset` of "input_ids" and "labels":

    ```python
    >>> from tost_hf import ToSTConfig, ToSTForCausalLM, ToSTTrainer, ToSTTrainingArguments

    >>> model = ToSTForCausalLM(ToSTConfig.from_preset("tost-base"))
    >>> args = ToSTTrainingArguments("out", max_steps=100)
    >>> trainer = ToSTTrainer(model, args, train_dataset=dataset)
    >>> trainer.train()
    ```
    """

    model: nn.Module  # not None after __init__, also with `model_init`
    optimizer: Any  # while training Accelerate's, around torch's
    checkpoint: str | None = None  # that the current run resumed from
    _full_optimizer_state: FullOptimizerState | None = None  # of a tensor-parallel model
    _continues_stream = False

    def __init__(self, model=None, args: TrainingArguments | None = None, **kwargs):
        args = ToSTTrainingArguments() if args is None else args
        check_processes(args)
        self.context_mesh = make_context_mesh(args, model)
        self._use_cache = _get_use_cache(model)
        save_only_model = args.save_only_model
        args.save_only_model |= is_tensor_parallel(model)  # Trainer requires it, as it cannot save their optimizer
        try:
            super().__init__(model, args, **kwargs)
        finally:
            args.save_only_model = save_only_model
        eval_datasets = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        columns = (getattr(dataset, "column_names", None) or () for dataset in (self.train_dataset, *eval_datasets))
        if args.remove_unused_columns and any("seq_idx" in names for names in columns):
            raise ValueError(
                "Trainer would remove the column seq_idx of packed sequences, which the model accepts without naming it: set "
                "remove_unused_columns=False."
            )
        if self.context_mesh is not None and (args.label_smoothing_factor or self.compute_loss_func is not None):
            raise ValueError(
                "With context_parallel_size the model computes the loss, as a process has only the logits of its shard: "
                "leave label_smoothing_factor and compute_loss_func out."
            )
        _set_use_cache(self.model, self._use_cache)  # Trainer has set it to that of the arguments, which would be saved
        if self.model_init is None:
            self.model = self.model_wrapped = self.prepare_model(self.model)
        self.add_callback(FiniteLossCallback())
        if self._stream is not None:
            self.add_callback(StreamProgressCallback())

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        fsdp_requested = self.args.fsdp_plugin_args is not None or os.environ.get("ACCELERATE_USE_FSDP") == "true"
        if self.args.world_size > 1 and fsdp_requested and not self.is_fsdp_enabled:
            raise ValueError(
                "FSDP was requested, but Accelerate shards no model on CPUs: each process would store all of it. Train on "
                "devices that Accelerate supports, or without FSDP."
            )
        if self.context_mesh is not None:
            self.accelerator.dataloader_config.dispatch_batches = False  # dispatching ignores the mesh
        if isinstance(self.args, BaseTrainingArguments) and self.args.total_batch_size is not None:
            data_parallel_size = self.args.world_size // self._group_size
            self.args.set_gradient_accumulation(data_parallel_size * max(1, self.args.n_gpu))

    # Model and optimizer ----------------------------------------------------------------------------------------------

    def call_model_init(self, trial=None) -> nn.Module:
        model = super().call_model_init(trial)
        self._use_cache = _get_use_cache(model)
        return self.prepare_model(model)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Applies the arguments that concern the model, also to each model that `model_init` returns.

        Raises:
            ValueError: the arguments do not suit the model.
        """
        if getattr(self.args, "fuse_linear_cross_entropy", False):
            causal_lms = [m for m in model.modules() if isinstance(m, ToSTForCausalLM)]
            if not causal_lms:
                raise ValueError("fuse_linear_cross_entropy is for ToSTForCausalLM.")
            causal_lms[0].fuse_linear_cross_entropy = True
        tokenizer = getattr(self, "processing_class", None)  # Trainer calls `model_init` before it is set
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            for config in filter(None, (getattr(model, name, None) for name in ("config", "generation_config"))):
                if getattr(config, "pad_token_id", None) is None:  # Trainer sets it as well, with a warning
                    config.pad_token_id = tokenizer.pad_token_id
        if is_tensor_parallel(model):
            model.register_load_state_dict_pre_hook(shard_loaded_weights)
        return model if self.context_mesh is None else parallelize(model, self.context_mesh["cp"])

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay, from which `Trainer.create_optimizer` builds its two groups."""
        return [
            name
            for name, parameter in model.named_parameters()
            # DeepSpeed's ZeRO-3 flattens parameters and stores their shape in `ds_shape`
            if len(getattr(parameter, "ds_shape", parameter.shape)) >= 2 and name.rpartition(".")[2] not in NO_WEIGHT_DECAY
        ]

    def create_optimizer(self, *args, **kwargs) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        wrapped_optimizer = getattr(optimizer, "optimizer", optimizer)  # in a second training it is Accelerate's
        if is_tensor_parallel(self.model) and getattr(self._full_optimizer_state, "optimizer", None) is not wrapped_optimizer:
            self._full_optimizer_state = FullOptimizerState(wrapped_optimizer)
        return optimizer

    def compute_loss_context_manager(self) -> ExitStack:
        """Context of each forward pass, in which the model's configuration has the `use_cache` of the arguments."""
        stack = super().compute_loss_context_manager()
        stack.callback(_set_use_cache, self.model, _get_use_cache(self.model))
        _set_use_cache(self.model, self.args.use_cache)
        return stack

    # Data -------------------------------------------------------------------------------------------------------------

    @property
    def _stream(self) -> PackedStream | None:
        return self.train_dataset if isinstance(self.train_dataset, PackedStream) else None

    @property
    def _context_size(self) -> int:
        return 1 if self.context_mesh is None else self.context_mesh["cp"].size()

    @property
    def _group_size(self) -> int:
        """Number of processes that share a batch."""
        return self._context_size * self.get_tp_size() * self.get_cp_size() * self.get_sp_size()

    def get_total_train_batch_size(self, args) -> int:
        return super().get_total_train_batch_size(args) // self._context_size

    @contextmanager
    def _share_batches(self) -> Iterator[None]:
        """Data loaders that are made within it return the same batches to the processes that share a sequence."""
        state = self.accelerator.state
        original_mesh, state.device_mesh = state.device_mesh, self.context_mesh or state.device_mesh
        try:
            yield
        finally:
            state.device_mesh = original_mesh  # otherwise FSDP would use it as its mesh

    def get_train_dataloader(self) -> DataLoader:
        if self._stream is not None:
            return self._get_stream_loader(self._stream)
        with self._share_batches():
            loader = super().get_train_dataloader()
        batch_sampler: Any = loader.batch_sampler
        if self.args.train_sampling_strategy == "group_by_length" and batch_sampler is not None:
            # it draws from the global generator, which is in another state when a run resumes
            sampler = getattr(batch_sampler, "batch_sampler", batch_sampler).sampler
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            sampler.generator = torch.Generator()
            sampler.set_epoch = lambda epoch: sampler.generator.manual_seed(seed + epoch)
            sampler.set_epoch(int(self._read_checkpoint_state().epoch or 0))  # later ones are set by Accelerate
        return loader

    def _get_stream_loader(self, stream: PackedStream) -> StreamLoader:
        args, groups = self.args, self.args.world_size // self._group_size
        stream.shard(args.process_index // self._group_size, groups, args.dataloader_num_workers)
        if self._continues_stream:
            stream.load_state_dict(json.loads(Path(str(self.checkpoint), self._position_file).read_text(encoding="utf-8")))
        return StreamLoader(
            stream,
            # that of `auto_find_batch_size`, if it found one
            batch_size=self.get_total_train_batch_size(args) // (args.gradient_accumulation_steps * groups),
            collate_fn=partial(collate_stream, self.data_collator),
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=args.dataloader_pin_memory,
            generator=torch.Generator(),  # the loader draws a seed when it starts: not from the global generator
        )

    def get_eval_dataloader(self, *args, **kwargs) -> DataLoader:
        with self._share_batches():
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args, **kwargs) -> DataLoader:
        with self._share_batches():
            return super().get_test_dataloader(*args, **kwargs)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    @property
    def _position_file(self) -> str:
        return f"stream_{self.args.process_index // self._group_size}.json"

    def checkpoint_files(self) -> list[str]:
        """Files that this trainer needs to resume, in addition to Trainer's."""
        return [self._position_file] * (self._stream is not None and not self.args.ignore_data_skip)

    def _read_checkpoint_state(self) -> TrainerState:
        if self.checkpoint is None:
            return TrainerState()
        return TrainerState.load_from_json(str(Path(self.checkpoint, TRAINER_STATE)))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """`Trainer.train`.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the newest complete one in `output_dir`.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: the checkpoint is incomplete.
        """
        self.checkpoint = None if resume_from_checkpoint is None else choose_checkpoint(self, resume_from_checkpoint)
        self._unprepare_model()
        ignore_data_skip = self.args.ignore_data_skip
        self._continues_stream = self.checkpoint is not None and not ignore_data_skip
        self.args.ignore_data_skip |= self._stream is not None  # the stream continues by itself
        hook = self.model.register_load_state_dict_post_hook(_ignore_tied_weights)
        try:
            return super().train(self.checkpoint, *args, **kwargs)
        finally:
            hook.remove()
            self.args.ignore_data_skip = ignore_data_skip

    def _unprepare_model(self) -> None:
        """After `evaluate`, which prepares the model without DistributedDataParallel: Accelerate prepares no model twice, so
        that each process would train its own."""
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled or is_tensor_parallel(self.model)
        is_wrapped = any(isinstance(module, DistributedDataParallel) for module in self.model_wrapped.modules())
        if self.args.world_size > 1 and not is_sharded and not is_wrapped:
            model: Any = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
            model._is_accelerate_prepared = False
            self.model_wrapped = model

    def set_initial_training_values(self, *args, **kwargs) -> tuple:
        """If the checkpoint has all steps, as many epochs are trained: Trainer would train one more step."""
        num_train_epochs, steps_per_epoch, *others, max_steps = super().set_initial_training_values(*args, **kwargs)
        step = self._read_checkpoint_state().global_step
        if step >= max_steps > 0:
            num_train_epochs, steps_per_epoch = min(num_train_epochs, step), 1  # it divides the step by the latter
        return num_train_epochs, steps_per_epoch, *others, max_steps

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """`Trainer.save_model`; to a checkpoint also what this trainer needs to resume."""
        if not _internal_call or Path(output_dir or "").name != f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}":
            return super().save_model(output_dir, _internal_call)
        folder = Path(str(output_dir))
        if self.args.should_save:  # a checkpoint that is overwritten is incomplete until it is saved
            (folder / TRAINER_STATE).unlink(missing_ok=True)
        push: Any = getattr(self, "push_in_progress", None)
        if self.args.hub_always_push and push is not None:
            push.wait_until_done()  # it uploads files of the output folder that the next push replaces
        super().save_model(output_dir, _internal_call)
        if self._stream is not None and self.args.process_index % self._group_size == 0:
            folder.mkdir(parents=True, exist_ok=True)
            # all batches that were yielded have been trained on
            (folder / self._position_file).write_text(json.dumps(self._stream.state_dict()), encoding="utf-8")
        if self._full_optimizer_state is not None and not self.args.save_only_model:
            self._full_optimizer_state.gather(keep=self.args.should_save)

    # Evaluation -------------------------------------------------------------------------------------------------------

    def prediction_step(self, model, inputs, prediction_loss_only: bool, ignore_keys=None):
        if self.context_mesh is not None and not prediction_loss_only:
            warnings.warn("With context_parallel_size, evaluation returns the loss and no other metrics.", stacklevel=2)
            prediction_loss_only = True
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """`Trainer.evaluate`, after which training has the random numbers that it would have without."""
        with torch.random.fork_rng(devices=[]):  # a DataLoader draws its seed on the CPU
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs) -> EvalLoopOutput:
        """`Trainer.evaluation_loop`, which counts the examples that a tensor- or context-parallel group shares once."""
        if self._group_size > 1:
            self.gather_function = self._gather_from_groups  # Trainer resets it at the end of the loop
        return super().evaluation_loop(*args, **kwargs)

    def _gather_from_groups(self, data: Any) -> Any:
        """Accelerate's `gather_for_metrics` of one process per group: it would count an uneven last batch for less."""
        group_size, state = self._group_size, self.accelerator.gradient_state
        end = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def select(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(0, (self.args.world_size // group_size, group_size, -1))[:, 0].flatten(0, 1)[:end]

        return recursively_apply(select, self.accelerator.gather(data))

    # Hub --------------------------------------------------------------------------------------------------------------

    def init_hf_repo(self, *args, **kwargs) -> None:
        super().init_hf_repo(*args, **kwargs)
        prepare_output_folder(self)

    def create_model_card(self, language=None, license: str | None = None, tags=None, *args, **kwargs) -> None:
        """Writes the output folder's model card from its files; see `tost_hf.hub.build_card`.

        As in transformers, an existing card is replaced.

        Args:
            language, tags: a string or a list, added to the metadata, as are the Hub ids in dataset_tags.
            license: the license of the weights; a card without one cannot be published with `tost-hf publish`.
            args, kwargs: other arguments of `Trainer.create_model_card`; ignored, as the folder's files have their values.
        """
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, ToSTBaseModel) and model.config.model_type in AUTO_MAPS:
            write_card(self, language, license, tags, kwargs.get("dataset_tags"))
        else:  # for example an adapter, or a subclass with a model type of its own
            super().create_model_card(language, license, tags, *args, **kwargs)


def _ignore_tied_weights(model: nn.Module, incompatible_keys: Any) -> None:
    """Trainer would warn of missing weights where tied ones are saved once."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing_keys = incompatible_keys.missing_keys
    loaded = {id(parameter) for name, parameter in parameters.items() if name not in missing_keys}
    missing_keys[:] = [name for name in missing_keys if name not in parameters or id(parameters[name]) not in loaded]


def _get_use_cache(model: nn.Module | None) -> bool | None:
    """`use_cache` of a model's configuration; None if it has none."""
    return getattr(getattr(model, "config", None), "use_cache", None)


def _set_use_cache(model: nn.Module, use_cache: bool | None) -> None:
    config: Any = getattr(model, "config", None)
    if use_cache is not None and config is not None:
        config.use_cache = use_cache
    elif hasattr(config, "use_cache"):
        del config.use_cache


__all__ = ["ToSTTrainer"]
