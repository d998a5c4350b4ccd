# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Compares an exported program with its model: outputs for several shapes, and what the script prints."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedModel, pipeline

from .programs import LanguageProgram, ModelProgram
from .runtime import LanguageModel, Run


PROMPT_TOKENS, GREEDY_TOKENS = 40, 50  # longer than a chunk of the operator
SPLITS: tuple[tuple[int, ...], ...] = ((), (6, 7), (1, 20, *range(31, 40)))  # positions at which a prompt is split into chunks
TEXT = "The"  # the prompt of `generate.py`
ROTATED = 6  # of EXIF orientations, by 90 degrees


class Agreement(NamedTuple):
    """How closely an exported program agrees with its model."""

    difference: float  # maximum root mean square difference of outputs, relative to the root mean square of the model's

    def __str__(self) -> str:
        return f"Its outputs differ from the model's by {self.difference:.1e}, relative to their size."


@torch.no_grad()
def compare(program: ModelProgram, run: Run, metadata: dict, tolerance: float) -> Agreement:
    """Compares the exported program with the model on the same inputs.

    Args:
        run: the exported program.
        metadata: the content of its `export.json`.
        tolerance: the maximum of `Agreement.difference`.

    Raises:
        ValueError: the outputs differ, or those of one of them are not finite.
    """
    model, is_language = program.model, isinstance(program, LanguageProgram)
    outputs: list[tuple[np.ndarray, torch.Tensor]] = []  # of the exported program, and of the model
    for batch in (2, 1):
        inputs = _make_inputs(program, batch)
        if is_language:
            input_ids, mask = inputs
            outputs += [
                _compute_logits(model, LanguageModel(run, metadata, batch), input_ids, mask, split) for split in SPLITS
            ]
        else:
            actual = run({spec.name: x.numpy() for spec, x in zip(program.inputs, inputs)})
            outputs += [(actual[spec.name], expected) for spec, expected in zip(program.outputs, program(*inputs))]
    difference = max(_relative_error(actual, expected) for actual, expected in outputs)
    if difference > tolerance:
        raise ValueError(
            f"The exported program returns other outputs than the model: they differ by {difference:.2g}, relative to their "
            f"size, and {tolerance:.2g} is allowed. Nothing was written."
        )
    return Agreement(difference)


@torch.no_grad()
def compare_script(script: Path, model: PreTrainedModel, exported: LanguageModel | None, tolerance: float) -> None:
    """Compares what a script of the exported folder prints with what transformers' pipeline returns.

    Args:
        script: `generate.py` or `classify.py`, beside all files that it reads.
        exported: the exported language model; None for image classifiers.
        tolerance: as in `compare`. A greedy token, and the text from there on, may differ if the difference of the model's
            logits of the two tokens is at most ten times that, relative to their size.

    Raises:
        ValueError: the script fails, or prints something else.
    """
    if exported is not None:
        _compare_text(script, model, exported, tolerance)
    else:
        _compare_classes(script, model, tolerance)


def _compare_text(script: Path, model: Any, exported: LanguageModel, tolerance: float) -> None:
    tokenizer = AutoTokenizer.from_pretrained(script.parent)
    prompt_length = len(tokenizer(TEXT)["input_ids"])
    num_new_tokens = min(GREEDY_TOKENS, model.config.max_position_embeddings - prompt_length)
    options = {"max_new_tokens": num_new_tokens, "do_sample": False}
    generator: Any = pipeline("text-generation", model, tokenizer=tokenizer, device="cpu")
    expected = generator(TEXT, **options)[0]["generated_text"]
    text = _run_script(script, TEXT, "--tokens", str(num_new_tokens), "--temperature", "0")
    if text.splitlines() == f"{expected}\n".splitlines():
        return
    ids = torch.tensor([generator(TEXT, **options, return_tensors=True)[0]["generated_token_ids"]])
    split = range(prompt_length, ids.shape[1])
    actual_logits, logits = _compute_logits(model, exported, ids, torch.ones_like(ids), split)
    tokens, logits = torch.from_numpy(actual_logits.argmax(-1))[prompt_length - 1 : -1], logits[prompt_length - 1 : -1]
    gaps = (logits.amax(-1) - logits.gather(-1, tokens[:, None])[:, 0]) / logits.square().mean(-1).sqrt().clamp_min(1e-6)
    gaps = gaps[tokens != ids[0, prompt_length:]]
    if not len(gaps) or gaps[0] > 10 * tolerance:
        raise ValueError(f"{script.name} prints {text!r}, the pipeline returns {expected!r}. Nothing was written.")


def _compare_classes(script: Path, model: Any, tolerance: float) -> None:
    from PIL import ExifTags, Image

    config, processor = model.config, AutoImageProcessor.from_pretrained(script.parent, backend="pil")
    classifier: Any = pipeline("image-classification", model, image_processor=processor, device="cpu")
    if config.num_channels == 1:  # the pipeline itself converts all images to RGB
        classifier.image_processor = lambda images, **options: processor(images.convert("L"), **options)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "picture.png"))
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8))
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = ROTATED
        image.resize((14 * config.patch_size, 10 * config.patch_size)).save(path, exif=exif)
        expected = classifier(path, top_k=config.num_labels)
        output = _run_script(script, path)
    classes = [
        (float(number) / (100 if unit else 1), label)
        for number, unit, label in re.findall(r"^ *(\S+?)(%?)  (.*)$", output, re.MULTILINE)
    ]
    margin = max(tolerance, 1e-3) * max(1, *(abs(x["score"]) for x in expected))  # three digits are printed
    is_equal = len(classes) == len(expected[:5]) and all(
        abs(score - best["score"]) <= margin  # classes of nearly equal scores may be swapped
        and any(label == x["label"] and abs(score - x["score"]) <= margin for x in expected)
        for (score, label), best in zip(classes, expected)
    )
    if not is_equal:
        raise ValueError(f"{script.name} prints {classes}, the pipeline returns {expected[:5]}. Nothing was written.")


def _run_script(script: Path, *arguments: str) -> str:
    command = [sys.executable, "-X", "utf8", str(script), *arguments]
    result = subprocess.run(command, capture_output=True, encoding="utf-8")
    if result.returncode:
        raise ValueError(f"{script.name} fails: {result.stderr.strip()}. Nothing was written.")
    return result.stdout


def _relative_error(actual: np.ndarray, expected: torch.Tensor) -> float:
    """The root mean square difference, relative to that of `expected`; ValueError if one of them is not finite."""
    for name, x in (("model", expected.numpy()), ("exported program", actual)):
        if not np.isfinite(x).all():
            raise ValueError(f"The {name} returns NaN or infinite outputs in this dtype. Nothing was written.")
    reference = expected.double().numpy()
    return float(np.sqrt(np.mean((actual - reference) ** 2)) / max(np.sqrt(np.mean(reference**2)), 1e-6))


def _make_inputs(program: ModelProgram, batch: int) -> tuple[torch.Tensor, ...]:
    """Random images whose shape depends on the batch size; or tokens and a mask, with left padding in the last of several."""
    config: Any = program.model.config
    generator = torch.Generator().manual_seed(batch)
    if program.is_vision:
        sides = [count * config.patch_size for count in (6, 8 - batch)]
        return (torch.randn([batch, config.num_channels, *sides], generator=generator),)
    shape = batch, min(program.window + PROMPT_TOKENS, config.max_position_embeddings)
    input_ids = torch.randint(config.vocab_size, shape, generator=generator)
    mask = torch.ones_like(input_ids)
    mask[-1, : 2 * (batch > 1)] = 0
    return input_ids, mask


def _compute_logits(
    model: PreTrainedModel, exported: LanguageModel, input_ids: torch.Tensor, mask: torch.Tensor, split: Sequence[int]
) -> tuple[np.ndarray, torch.Tensor]:
    """The logits of the exported program and of the model, without padding; the program's input is split into chunks."""
    expected = model(input_ids, attention_mask=mask, use_cache=False).logits.float()
    chunks = zip(input_ids.tensor_split(tuple(split), 1), mask.tensor_split(tuple(split), 1))
    outputs = [exported.forward(ids.numpy(), chunk_mask.numpy()) for ids, chunk_mask in chunks if ids.numel()]
    return np.concatenate(outputs, 1)[mask.bool().numpy()], expected[mask.bool()]
