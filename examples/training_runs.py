# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A script's training run: its steps, what it shows meanwhile and at its end, and the records for the card."""

import json
import logging
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from matplotlib.figure import Figure
from scripting import recorded_command
from tqdm import tqdm
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ProgressCallback

from tost_hf.files import CURVES, RUN_ARGUMENTS, TRAINER_STATE, staged_file
from tost_hf.model.base_tost import AUTO_MAPS
from tost_hf.training.checkpoints import choose_checkpoint, list_checkpoints


logger = logging.getLogger("scripting.training_runs")  # at the level of the scripts

MIN_LOGGING_STEPS = 10
ESTIMATE_STEPS = 10
PROBE_TOKENS = 64
MIN_CURVE_POINTS = 3
SPEED_METRICS = ("runtime", "per_second", "samples", "preparation_time")
USAGE = """python -c "import tost_hf, transformers; print(transformers.pipeline('{task}', {folder!r})({example}))\""""
NEXT_STEPS = {
    "text-generation": USAGE.replace("{example}", "'It was', do_sample=True"),
    "text-classification": USAGE.replace("{example}", "'Some text'"),
    "image-classification": "tost-hf inspect {path} PHOTO.jpg --out inside",
}


# Display -------------------------------------------------------------------------------------------------------------


class ConsoleCallback(ProgressCallback):
    """The progress bar, with a line of text for each loss and each evaluation.

    A `logging_steps` that is a fraction of the run is raised to ten steps.
    """

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if args.logging_steps < 1:
            state.logging_steps = max(state.logging_steps, min(MIN_LOGGING_STEPS, state.max_steps))
        super().on_train_begin(args, state, control, **kwargs)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs) -> None:
        super().on_prediction_step(args, state, control, eval_dataloader=eval_dataloader, **kwargs)
        if self.prediction_bar is not None:
            self.prediction_bar.leave = False

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Writes the loss, or the metrics of an evaluation, above the bar."""
        if self.training_bar is None:
            return
        if "loss" in logs:
            result = f"loss {float(logs['loss']):.3f}, learning rate {float(logs['learning_rate']):.1e}"
        elif metrics := readable_metrics(logs, "eval_"):
            result = "held out: " + ", ".join(f"{name} {value}" for name, value in metrics.items())
            self.on_evaluate(args, state, control)  # closes the bar of the evaluation, which is done
        else:  # the summary of the training
            return
        self.training_bar.write(f"step {state.global_step:,}: {result}")


class TimeEstimateCallback(TrainerCallback):
    """Estimates, after ten steps, how long the training takes, from the number of tokens in them.

    Their number of steps would not tell, as the first batches are of long texts.

    Args:
        num_tokens: of the training examples.
    """

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens
        self.start_step = 0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.start_step = state.global_step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        num_steps = state.global_step - self.start_step
        if num_steps == 1:  # which also compiles kernels
            self.start_time, self.start_tokens = time.monotonic(), state.num_input_tokens_seen
        elif num_steps == ESTIMATE_STEPS and state.is_world_process_zero and state.num_input_tokens_seen:
            speed = (state.num_input_tokens_seen - self.start_tokens) / (time.monotonic() - self.start_time)
            num_epochs = state.max_steps * state.epoch / state.global_step
            seconds = (num_epochs * self.num_tokens - state.num_input_tokens_seen) / speed
            if seconds > 0:
                tqdm.write(f"step {state.global_step:,} of {state.max_steps:,}: about {format_time(seconds)} of training left")


class CurvesCallback(TrainerCallback):
    """Plots the losses and accuracies of a run to its output folder, at every evaluation and at the end.

    Nothing is drawn of fewer than three training losses: two points are no curve.
    """

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero and sum("loss" in entry for entry in state.log_history) >= MIN_CURVE_POINTS:
            plot_curves(state.log_history, Path(args.output_dir, CURVES))

    on_train_end = on_evaluate


def plot_curves(log_history: list[dict], file: Path) -> None:
    """Plots the training loss, and loss and accuracy on held-out examples, over the steps.

    Args:
        log_history: of a `TrainerState`.
        file: the PNG file to write.
    """
    curves = {"loss": (("loss", "training"), ("eval_loss", "held out")), "accuracy": (("eval_accuracy", "held out"),)}
    if not any("eval_accuracy" in entry for entry in log_history):
        del curves["accuracy"]
    figure = Figure(figsize=(4.5 * len(curves), 3.5), layout="constrained")
    for axis, (quantity, series) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items()):
        for name, label in series:
            points = [(entry["step"], float(entry[name])) for entry in log_history if name in entry]
            if points:
                axis.plot(*zip(*points), marker="o", markersize=3, label=label)
        axis.set(xlabel="step", ylabel="loss, nats" if quantity == "loss" else quantity)
        axis.grid(alpha=0.3)
        axis.legend()
    with staged_file(file) as staged:
        figure.savefig(staged, format="png", dpi=80)


def readable_metrics(metrics: dict, prefix: str) -> dict[str, str]:
    """The metrics that begin with `prefix`, except for counts and speed, such as {"accuracy": "34.7 %", "loss": "3.540"}."""
    values = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    return {
        name.replace("_", " "): f"{100 * value:.1f} %" if "accuracy" in name else f"{value:.3f}"
        for name, value in values.items()
        if not name.endswith(SPEED_METRICS)
    }


def format_time(seconds: float) -> str:
    """A duration, such as "33 s", "2 min 5 s" or "3 h 4 min"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def describe_run(trainer: Trainer, model_args, data_args, examples: str, samples: dict[str, int | None]) -> None:
    """Logs the model, where it is trained, and the data."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    source = model_args.model_name_or_path or f"new, of the type {model.config.model_type}"
    dtype = str(model.dtype).removeprefix("torch.")
    precision = dtype if args.mixed_precision in (None, "no") else f"{dtype}, mixed precision {args.mixed_precision}"
    device = args.device.type if args.world_size == 1 else f"{args.world_size} processes, {args.device.type}"
    logger.info(f"Model: {source}; {model.num_parameters():,} parameters, {precision}, on {device}")
    names = [getattr(data_args, name, None) for name in ("dataset_name", "train_file", "train_dir")]
    names += [getattr(data_args, f"validation_{kind}", None) for kind in ("file", "dir")]
    name = next(filter(None, names), "test data")
    if isinstance(name, list):  # expanded patterns
        name = name[0] + (f" and {len(name) - 1} more" if len(name) > 1 else "")
    counts = {"for training": samples["train"], "held out": samples["eval"]}
    sizes = ", ".join(f"{count:,} {use}" for use, count in counts.items() if count)
    logger.info(f"Data: {name}; {examples}: {sizes}" if sizes else f"Data: {name}")


def estimate_memory(trainer: Trainer, tokens: int) -> float:
    """The bytes that a training step adds to those of the weights, extrapolated from a few tokens, as all of it is linear.

    They are of the gradients, the two moments of AdamW, what autograd saves, and two copies of the logits in the loss.

    Args:
        trainer: with training examples of "input_ids" and "labels".
        tokens: of a batch on one device, with padding.
    """
    model = trainer.accelerator.unwrap_model(trainer.model).train()
    example = trainer.train_dataset[0]
    batch = trainer.data_collator([{name: example[name] for name in ("input_ids", "labels") if name in example}])
    batch = {name: (x[:, :PROBE_TOKENS] if x.ndim > 1 else x).to(trainer.args.device) for name, x in batch.items()}
    sizes: dict[int, int] = {}

    def record(x: torch.Tensor) -> torch.Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    saved_tensors = torch.autograd.graph.saved_tensors_hooks(record, lambda x: x)
    with torch.random.fork_rng(), trainer.accelerator.autocast(), trainer.compute_loss_context_manager(), saved_tensors:
        _, outputs = trainer.compute_loss(model, batch, return_outputs=True)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    saved = sum(sizes.values()) - sum(sizes.get(x.untyped_storage().data_ptr(), 0) for x in model.parameters())
    logits = outputs.get("logits")
    saved += 0 if logits is None else 8 * logits.numel()
    return 3 * sum(x.numel() * x.element_size() for x in parameters) + saved / batch["input_ids"].numel() * tokens


def describe_memory(trainer: Trainer, longest: int | None) -> None:
    """Logs the memory of a training step if it can be estimated.

    Args:
        longest: tokens of the longest training example; None if the examples are no texts.
    """
    args = trainer.args
    if longest is None or args.world_size > 1 or args.gradient_checkpointing or not isinstance(trainer.train_dataset, Dataset):
        return
    count = min(args.train_batch_size, len(trainer.train_dataset))
    size = estimate_memory(trainer, count * longest) / 1e6
    amount = f"{size / 1000:.1f} GB" if size >= 1000 else f"{size:.0f} MB"
    logger.info(f"Memory of a training step: about {amount}, for {count} x {longest:,} tokens")


def summarize(trainer: Trainer, task: str, time: str, metrics: dict | None) -> None:
    """Logs the metrics before and after training, its time, the folder, and commands to continue with.

    Args:
        trainer: after training or evaluation.
        task: its name on the Hub.
        time: how long training took, a sentence.
        metrics: those of the evaluation at the end, if there was one.
    """
    folder, history = trainer.args.output_dir, trainer.state.log_history
    if metrics is not None:
        after = readable_metrics(metrics, "eval_")
        before = next((readable_metrics(entry, "eval_") for entry in history if entry["step"] == 0), {})
        columns = {"before": before, "after": after} if before and trainer.args.do_train else {"": after}
        logger.info(f"\n{'Held out':20}" + "".join(f"{title:>12}" for title in columns))
        for name in after:
            logger.info(f"{name:20}" + "".join(f"{column.get(name, ''):>12}" for column in columns.values()))
    if trainer.args.do_train:
        path = shlex.quote(folder)
        files = f"The model, its card and {CURVES}" if Path(folder, CURVES).is_file() else "The model and its card"
        logger.info(f"\n{time} {files} are in {folder}.")
        if checkpoints := list_checkpoints(folder).values():
            size = sum(file.stat().st_size for path in checkpoints for file in path.rglob("*") if file.is_file()) / 1e6
            logger.info(
                f"The {len(checkpoints)} checkpoints there ({size:.0f} MB) continue the run if it gets more steps; "
                f"--save_total_limit {trainer.args.save_total_limit} kept them."
            )
        if trainer.processing_class is not None and trainer.model.config.model_type in AUTO_MAPS:
            logger.info("Next:\n  " + NEXT_STEPS[task].format(task=task, folder=folder, path=path))
            logger.info(f"  tost-hf publish {path} OWNER/NAME --license apache-2.0")


# Steps ---------------------------------------------------------------------------------------------------------------


def train_and_report(
    trainer: Trainer,
    model_args,
    data_args,
    task: str,
    examples: str,
    samples: dict[str, int | None],
    longest: int | None = None,
    before_card: Callable = lambda: None,
) -> None:
    """Trains and evaluates as requested by the arguments, writes results and a model card, and pushes if requested.

    Args:
        trainer: with its datasets.
        model_args, data_args: described in the card.
        task: its name on the Hub.
        examples: what an example is, in the plural, such as "images".
        samples: number of examples of "train" and "eval", None if unknown.
        longest: tokens of the longest training example, if they are texts.
        before_card: called after training and evaluation, before the card is written.
    """
    args, time, metrics = trainer.args, "", None
    if trainer.pop_callback(ProgressCallback) is not None:  # unless --disable_tqdm
        trainer.add_callback(ConsoleCallback())
    trainer.add_callback(CurvesCallback())
    describe_run(trainer, model_args, data_args, examples, samples)
    if args.do_train:
        describe_memory(trainer, longest)
        time = train(trainer, model_args, data_args, samples["train"])
    elif not Path(args.output_dir, RUN_ARGUMENTS).exists():
        record_run(trainer, model_args, data_args)
    if args.do_eval:
        metrics = trainer.evaluate()
        if "eval_perplexity" in metrics:
            metrics["perplexity"] = metrics["eval_perplexity"]
        save_metrics(trainer, "eval", metrics, samples["eval"])
    before_card()

    card_options = {"finetuned_from": model_args.model_name_or_path, "tasks": task}
    if data_args.dataset_name is not None:
        card_options["dataset_tags"] = data_args.dataset_name
        card_options["dataset_args"] = data_args.dataset_config_name
        card_options["dataset"] = " ".join(filter(None, (data_args.dataset_name, data_args.dataset_config_name)))
    if args.push_to_hub:
        trainer.push_to_hub(**card_options)
    else:
        trainer.create_model_card(**card_options)
    summarize(trainer, task, time, metrics)


def train(trainer: Trainer, model_args, data_args, num_samples: int | None) -> str:
    """Trains, or resumes a run, and saves the model, the results and the record of the run.

    Returns:
        A sentence with the time that it took.
    """
    args = trainer.args
    if trainer.model.dtype in (torch.float16, torch.bfloat16):
        logger.warning(
            f"The weights are {trainer.model.dtype}, in which small updates are lost: train them with --dtype float32."
        )
    checkpoint, start_step = choose_checkpoint(trainer, args.resume_from_checkpoint), 0
    if checkpoint is None:
        record_run(trainer, model_args, data_args)
    else:
        logger.info(
            f"Resuming from {checkpoint}, with its optimizer and learning rates; to start afresh, use another --output_dir or "
            "--resume_from_checkpoint false."
        )
        args.eval_on_start = False  # the checkpoint has its result
        state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE)))
        start_step = state.global_step
        for name in ("logging_steps", "save_steps"):
            if getattr(args, name) < 1:  # a fraction, which Trainer would compare with the number of the checkpoint
                setattr(args, name, getattr(state, name))
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()  # and the tokenizer or image processor
    if model_args.save_dtype is not None and trainer.is_world_process_zero():
        store_in_dtype(trainer.model, args.output_dir, model_args.save_dtype)
    has_trained = result.global_step > start_step
    if has_trained:
        result.metrics["train_start_step"] = start_step  # the loss and the runtime are those from here on
        save_metrics(trainer, "train", result.metrics, num_samples)
        if checkpoint is not None:
            record_run(trainer, model_args, data_args, is_resumed=True)
    if has_trained or not Path(args.output_dir, TRAINER_STATE).is_file():
        trainer.save_state()
    if not has_trained:
        return f"The run ended at step {start_step} before: there was nothing left to train."
    time = format_time(result.metrics["train_runtime"])
    return f"Trained in {time}, from step {start_step} on." if start_step else f"Trained in {time}."


def store_in_dtype(model: PreTrainedModel, folder: str, dtype: str) -> None:
    """Stores a saved model's weights in another dtype, to which `model` gets rounded; they load in that of config.json."""
    stored = type(model).from_pretrained(folder, dtype=dtype)  # keeps float32 where the model needs it
    with tempfile.TemporaryDirectory(dir=folder) as staging:
        stored.save_pretrained(staging)
        for file in Path(staging).glob("*.safetensors*"):
            os.replace(file, Path(folder, file.name))
    model.load_state_dict(stored.state_dict())


def record_run(trainer: Trainer, model_args, data_args, is_resumed: bool = False) -> None:
    """Writes the run's command, dataset and initial model to the output folder, for the card.

    The commands of a run that was resumed by another one are all recorded.
    """
    if not trainer.is_world_process_zero():
        return
    file, command = Path(trainer.args.output_dir, RUN_ARGUMENTS), recorded_command(sys.argv)
    if is_resumed and file.is_file():
        earlier_commands = json.loads(file.read_text(encoding="utf-8"))["command"].splitlines()
        command = "\n".join(dict.fromkeys([*earlier_commands, command]))
    names = {"dataset_name": data_args.dataset_name, "model_name_or_path": model_args.model_name_or_path}
    # folders are named by their last part, so that nobody takes them for repositories of the Hub
    names = {key: Path(name).resolve().name if os.path.exists(name) else name for key, name in names.items() if name}
    run_arguments = {"command": command, "dataset_config_name": data_args.dataset_config_name} | names
    with staged_file(file) as staged:
        staged.write_text(
            json.dumps({name: value for name, value in run_arguments.items() if value}, indent=2) + "\n", encoding="utf-8"
        )


def save_metrics(trainer: Trainer, split: str, metrics: dict[str, float], samples: int | None) -> None:
    """Writes metrics to the output folder."""
    if samples is not None:
        metrics[f"{split}_samples"] = samples
    trainer.save_metrics(split, metrics)


def report_final_metrics(trainer: Trainer, split: str, metrics: dict[str, float], samples: int) -> None:
    """Logs the metrics on test data and writes them to the output folder."""
    save_metrics(trainer, split, metrics, samples)
    values = ", ".join(f"{name} {value}" for name, value in readable_metrics(metrics, f"{split}_").items())
    logger.info(f"\n{samples:,} test examples: {values}")
