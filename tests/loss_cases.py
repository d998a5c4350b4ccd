"""One training step of every head and kind of label, on the same eight examples however they are divided."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import randomize, small_config, small_vision_config
from sharded_cases import count_processes
from transformers import Trainer, TrainingArguments

import tost_hf


BATCH, NUM_LABELS, VOCAB = 8, 3, 97
PROBLEM_TYPES = {  # problem type, labels: a class, several of them, one or several numbers
    "class": ("single_label_classification", NUM_LABELS),
    "classes": ("multi_label_classification", NUM_LABELS),
    "number": ("regression", 1),
    "numbers": ("regression", NUM_LABELS),
}
HEADS = {
    "causal": tost_hf.ToSTForCausalLM,
    "masked": tost_hf.ToSTForMaskedLM,
    "tokens": tost_hf.ToSTForTokenClassification,
    "question": tost_hf.ToSTForQuestionAnswering,
    **{f"sequence, {labels}": tost_hf.ToSTForSequenceClassification for labels in PROBLEM_TYPES},
    **{f"image, {labels}": tost_hf.ToSTForImageClassification for labels in PROBLEM_TYPES},
}
IMAGE_HEADS = [head for head in HEADS if head.startswith("image")]
# ToSTTrainer computes losses as Trainer does, ToSTVisionTrainer does not
CASES = [*(f"{head}, Trainer" for head in HEADS), "causal, Trainer, smoothed", "causal, ToSTTrainer"]
CASES += [f"{head}, ToSTVisionTrainer" for head in IMAGE_HEADS]


def make_labels(labels: str, generator: torch.Generator) -> list:
    values = torch.randn(BATCH, NUM_LABELS, generator=generator)
    if labels == "class":
        return values.argmax(1).tolist()
    return {"classes": (values > 0).float(), "number": values[:, 0], "numbers": values}[labels].tolist()


def make_model(head: str) -> torch.nn.Module:
    labels = head.rpartition(", ")[2]
    problem_type, num_labels = PROBLEM_TYPES.get(labels, (None, NUM_LABELS))
    options = {"problem_type": problem_type, "num_labels": num_labels}
    if not head.startswith("image"):
        return randomize(HEADS[head](small_config(is_causal=head != "masked", **options)))
    model = randomize(HEADS[head](small_vision_config(num_class_attention_layers=1, **options)))
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # statistics of a micro-batch would make its losses others
            module.eval().train = lambda mode=True, module=module: module
    return model


def make_examples(head: str) -> list[dict]:
    """Sequences of several lengths, with several numbers of labels, or images."""
    generator = torch.Generator().manual_seed(5)
    labels = head.rpartition(", ")[2]
    values = make_labels(labels, generator) if labels in PROBLEM_TYPES else [None] * BATCH
    if head.startswith("image"):
        images = torch.randn(BATCH, 3, 16, 16, generator=generator)
        return [{"pixel_values": image, "labels": label} for image, label in zip(images, values)]
    examples = []
    for i, label in enumerate(values):
        length = 5 + 3 * i
        ids = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        if head == "question":
            targets = {"start_positions": i % 4, "end_positions": 2 + i % 3}
        elif labels in PROBLEM_TYPES:
            targets = {"labels": label}
        else:
            is_target = (torch.rand(length, generator=generator) < 0.2 + 0.1 * i).tolist()
            classes = VOCAB if head != "tokens" else NUM_LABELS
            targets = {"labels": [token % classes if use else -100 for token, use in zip(ids, is_target)]}
        examples.append({"input_ids": ids, "attention_mask": [1] * length} | targets)
    return examples


def pad(examples: list[dict]) -> dict[str, torch.Tensor]:
    """A batch, padded to its longest sequence."""
    batch = {}
    for name, first in examples[0].items():
        values = [example[name] for example in examples]
        if isinstance(first, list) and "input_ids" in examples[0] and len(first) == len(examples[0]["input_ids"]):
            length, filler = max(map(len, values)), -100 if name == "labels" else 0
            values = [value + [filler] * (length - len(value)) for value in values]
        batch[name] = torch.stack(values) if isinstance(first, torch.Tensor) else torch.tensor(values)
    return batch


def train_one_step(case: str, micro_batch_size: int | None = None) -> tuple[float, float]:
    """The loss and the norm of the gradient of a step on the eight examples."""
    processes = count_processes()
    head, _, trainer_name = case.removesuffix(", smoothed").rpartition(", ")
    trainer_class = Trainer if trainer_name == "Trainer" else getattr(tost_hf, trainer_name)
    args_class = getattr(tost_hf, f"{trainer_name.removesuffix('Trainer')}TrainingArguments", TrainingArguments)
    micro_batch_size = micro_batch_size or BATCH // 2 // processes  # two of them for each process
    args = args_class(
        output_dir=str(Path(os.environ["TOST_TEST_MODELS"], "out")),
        max_steps=1,
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=BATCH // micro_batch_size // processes,
        max_grad_norm=1e9,
        label_smoothing_factor=0.1 if case.endswith("smoothed") else 0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = trainer_class(make_model(head), args, train_dataset=make_examples(head), data_collator=pad)
    trainer.train()
    log = next(log for log in trainer.state.log_history if "loss" in log)
    return log["loss"], log["grad_norm"]


def step_of_process(case: str) -> tuple[float, float]:
    assert dist.get_world_size() == 2
    return train_one_step(case)
