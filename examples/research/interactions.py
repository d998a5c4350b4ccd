# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Local and global interactions: how much of what a model learns depends on the order of neighboring tokens.

    python examples/benchmarks/run.py interactions --images CIFAR10_FOLDER --text TEXT_FOLDER

- *Synthetic*: every token of a sequence is sampled, with a given probability, from the successors of the token two positions
  before it (one table for all sequences: local, and not predictable from the current token alone), else from the few tokens
  that its sequence prefers (global). A model is trained for each probability; its loss is compared with GPT-2's and with that
  of the true distribution.
- *Text*: the words of the held-out text are shuffled within windows, for models trained on unshuffled text.
- *Images*: the patches of test images are shuffled within squares, for models trained on unshuffled images.

A window of 1 shuffles nothing. Seeds that have records are not run again.
"""

import re

import numpy as np
import observations
import torch
from compare_lm import SIZES, encode, split_into_examples
from compare_vision import (
    BATCH,
    PATCH_SIZE,
    WIDTH,
    Images,
    accuracy,
    count_patches,
    load_images,
    make_classifier,
    train_classifier,
)
from language_models import make_language_model
from observations import CONTEXT, TEXT_BATCH, TEXT_LEARNING_RATE, load_text, make_text_model, train_text_model
from registry import benchmark
from torch.nn import functional as F
from training import Batches, Results, train
from transformers import PreTrainedModel


LOCAL_PERCENTAGES = (0, 25, 50, 75, 100)  # % of the tokens that follow from the one two positions before
VOCAB_SIZE, NUM_PREFERRED, NUM_SUCCESSORS, DISTANCE = 32, 4, 2, 2
LENGTH, SYNTHETIC_BATCH, SYNTHETIC_LEARNING_RATE = 96, 8, 1e-2
LANGUAGE_MODELS = ("ToST", "GPT-2")
ATTENTION_TYPES = {"ToST": "tssa", "softmax": "softmax"}
WORD_WINDOWS = (1, 2, 4, 16, 64)
PATCH_WINDOWS = (1, 2, 4, 8)  # sides of a square; only those that divide the grid are used
TEST_SEED = 1_000_000


# Synthetic ------------------------------------------------------------------------------------------------------------


def mixed_probabilities(local: float, successors: np.ndarray, preferred: np.ndarray) -> np.ndarray:
    """Transition probabilities (B, vocabulary, vocabulary) of sequences with preferred tokens (B, NUM_PREFERRED)."""
    local_probabilities = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    np.put_along_axis(local_probabilities, successors, 1 / NUM_SUCCESSORS, 1)
    global_probabilities = np.zeros((len(preferred), 1, VOCAB_SIZE))
    np.put_along_axis(global_probabilities[:, 0], preferred, 1 / NUM_PREFERRED, 1)
    return local * local_probabilities + (1 - local) * global_probabilities


def make_mixed_batch(rng: np.random.Generator, local: float, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Sequences whose tokens follow the token `DISTANCE` before with probability `local`, else are preferred tokens.

    Returns:
        `input_ids` and `labels`, (batch, length); `known`, the mean loss of the true distribution.
    """
    successors = np.random.default_rng(0).permuted(np.tile(np.arange(VOCAB_SIZE), (VOCAB_SIZE, 1)), axis=1)[:, :NUM_SUCCESSORS]
    preferred = rng.permuted(np.tile(np.arange(VOCAB_SIZE), (batch, 1)), axis=1)[:, :NUM_PREFERRED]
    probabilities = mixed_probabilities(local, successors, preferred)
    tokens, true_losses, batch_indices = np.empty((batch, length), dtype=np.int64), [], np.arange(batch)
    tokens[:, :DISTANCE] = preferred[:, :DISTANCE]
    for i in range(DISTANCE, length):
        next_probabilities = probabilities[batch_indices, tokens[:, i - DISTANCE]]
        tokens[:, i] = (
            next_probabilities.cumsum(1) > rng.random((batch, 1)) * next_probabilities.sum(1, keepdims=True)
        ).argmax(1)
        true_losses.append(-np.log(next_probabilities[batch_indices, tokens[:, i]]).mean())
    ids = torch.from_numpy(tokens)
    return {"input_ids": ids, "labels": ids, "known": torch.tensor(np.mean(true_losses))}


@torch.no_grad()
def mean_loss(model: PreTrainedModel, batches) -> float:
    model.eval()
    return float(np.mean([model(input_ids=x["input_ids"], labels=x["labels"]).loss.item() for x in batches]))


def run_synthetic(args, results: Results) -> None:
    for percentage in LOCAL_PERCENTAGES:
        for name in LANGUAGE_MODELS:

            def run(seed, learning_rate, percentage=percentage, name=name):
                def make(rng):
                    return make_mixed_batch(rng, percentage / 100, SYNTHETIC_BATCH, LENGTH)

                sizes = {"width": SIZES["small"].width, "layers": 2, "head_dim": SIZES["small"].head_dim}
                model = make_language_model(name, vocab_size=VOCAB_SIZE, context=LENGTH, **sizes)
                data = Batches(make, args.steps, seed)
                train(model, data, steps=args.steps, learning_rate=learning_rate, seed=seed, data_collator=drop_known)
                test = list(Batches(make, 16, TEST_SEED))
                return model, {"loss": mean_loss(model, test), "known": float(np.mean([x["known"] for x in test]))}

            case = {"task": f"synthetic, {percentage} % local", "model": name, "batch": SYNTHETIC_BATCH, "context": LENGTH}
            results.add_missing(run, width=SIZES["small"].width, learning_rate=SYNTHETIC_LEARNING_RATE, **case)


def drop_known(batches: list[dict]) -> dict[str, torch.Tensor]:
    return {name: x for name, x in batches[0].items() if name != "known"}


# Text and images ------------------------------------------------------------------------------------------------------


def shuffle_words(text: str, window: int, rng: np.random.Generator) -> str:
    """The text with its words, each with the space after it, shuffled within windows of so many words."""
    words = re.findall(r"\S*\s+|\S+", text)
    windows = (words[start : start + window] for start in range(0, len(words), window))
    return "".join(words[index] for words in windows for index in rng.permutation(len(words)))


def shuffle_patches(pixels: torch.Tensor, patch_size: int, side: int, generator: torch.Generator) -> torch.Tensor:
    """Images (N, C, height, width) with their patches shuffled within squares of `side` by `side` patches."""
    height, width = (x // patch_size for x in pixels.shape[-2:])
    positions = (
        torch.arange(height * width).view(height // side, side, width // side, side).transpose(1, 2).reshape(-1, side**2)
    )
    order = torch.rand(len(pixels), *positions.shape, generator=generator).argsort(-1)
    source = positions.expand(len(pixels), -1, -1).gather(-1, order)
    patches = F.unfold(pixels.float(), patch_size, stride=patch_size)  # (N, C * patch_size^2, positions)
    shuffled = torch.empty_like(patches)
    shuffled[..., positions.flatten()] = patches.gather(-1, source.flatten(1)[:, None].expand_as(patches))
    return F.fold(shuffled, pixels.shape[-2:], patch_size, stride=patch_size).to(pixels.dtype)


def run_text(args, results: Results) -> None:
    data, _ = load_text(args)
    held_out_text = "".join(data.held_out_documents)
    held_out = {
        window: split_into_examples(
            encode(data.tokenizer, [shuffle_words(held_out_text, window, np.random.default_rng(0))]), CONTEXT
        )
        for window in WORD_WINDOWS
    }
    batches = {window: torch.utils.data.DataLoader(examples[: args.test_texts], 50) for window, examples in held_out.items()}
    for name in LANGUAGE_MODELS:

        def run(seed, _, name=name):
            model = make_text_model(data, 2, name)
            train_text_model(model, data, args.steps, seed=seed)
            return model, {f"loss, window {window}": mean_loss(model, shuffled) for window, shuffled in batches.items()}

        case = {"task": "text", "model": name, "batch": TEXT_BATCH, "context": CONTEXT}
        results.add_missing(run, width=SIZES["small"].width, learning_rate=TEXT_LEARNING_RATE, **case)


def run_images(args, results: Results) -> None:
    training, test = load_images(args.images, args.test_images)
    grid = training.pixels.shape[-1] // PATCH_SIZE
    shuffled = {
        side: Images(shuffle_patches(test.pixels, PATCH_SIZE, side, torch.Generator().manual_seed(0)), test.labels, [])
        for side in PATCH_WINDOWS
        if grid % side == 0
    }
    for name, attention_type in ATTENTION_TYPES.items():

        def run(seed, learning_rate, attention_type=attention_type):
            model = make_classifier(training, attention_type=attention_type)
            model, _ = train_classifier(model, training, args, learning_rate=learning_rate, seed=seed)
            return model, {
                f"accuracy, window {side}": accuracy(model, shuffled_images) for side, shuffled_images in shuffled.items()
            }

        case = {"task": "images", "model": name, "batch": BATCH, "context": count_patches(training)}
        results.add_missing(run, width=WIDTH, **case)


def add_arguments(parser) -> None:
    observations.add_arguments(parser)
    parser.set_defaults(test_images=2000)


@benchmark("interactions", __doc__, add_arguments, trains=True, steps=300, learning_rates=(1e-3,))
def run(args, results: Results) -> None:
    for run_task in (run_synthetic, run_text, run_images):
        run_task(args, results)
    results.print_means()
