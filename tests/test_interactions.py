# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Measurements of two studies: local versus global interactions, and the tightness of the bound in training."""

import math

import numpy as np
import pytest
import test_experiments
import torch
from test_experiments import TOY, run, write_text


import interactions  # isort: skip  (test_experiments adds its folder to sys.path)


images = test_experiments.images  # a fixture


@pytest.mark.parametrize("percent", interactions.LOCAL_PERCENTAGES)
def test_fraction_of_local_tokens(percent):
    batch = interactions.make_mixed_batch(np.random.default_rng(1), percent / 100, 200, 96)
    tokens = batch["input_ids"]
    followers, local_tokens = {}, interactions.make_mixed_batch(np.random.default_rng(2), 1.0, 200, 96)["input_ids"]
    for first, _, third in local_tokens.unfold(1, 3, 1).flatten(0, 1).tolist():
        followers.setdefault(first, set()).add(third)
    # all sequences have the same followers
    assert all(len(thirds) == interactions.NUM_SUCCESSORS for thirds in followers.values())
    triples = tokens.unfold(1, 3, 1).flatten(0, 1).tolist()
    local_fraction = sum(third in followers.get(first, ()) for first, _, third in triples) / len(triples)
    chance = interactions.NUM_SUCCESSORS / interactions.VOCAB_SIZE
    assert local_fraction == pytest.approx(percent / 100 + (1 - percent / 100) * chance, abs=0.02)
    assert (percent == 0) == all(len(sequence.unique()) <= interactions.NUM_PREFERRED for sequence in tokens)
    entropies = {0: math.log(interactions.NUM_PREFERRED), 100: math.log(interactions.NUM_SUCCESSORS)}
    if percent in entropies:
        assert batch["known"].item() == pytest.approx(entropies[percent], abs=1e-6)
    else:
        assert batch["known"].item() < math.log(interactions.VOCAB_SIZE)


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_words_are_shuffled_within_windows(window):
    words = [f"w{number}" for number in range(23)]
    text = "\n".join(words)
    shuffled = interactions.shuffle_words(text, window, np.random.default_rng(0)).split()
    windows = [(words[i : i + window], shuffled[i : i + window]) for i in range(0, 20, window)]
    assert len(interactions.shuffle_words(text, window, np.random.default_rng(0))) == len(text)
    assert (shuffled == words) == (window == 1)
    if window > 1:
        assert all(sorted(original) == sorted(permuted) for original, permuted in windows[: 22 // window])


@pytest.mark.parametrize("side", [1, 2, 4])
def test_patches_are_shuffled_within_squares(side):
    pixels = torch.arange(3 * 2 * 8 * 8, dtype=torch.uint8).view(3, 2, 8, 8)
    shuffled = interactions.shuffle_patches(pixels, 2, side, torch.Generator().manual_seed(0))
    assert shuffled.dtype == torch.uint8 and torch.equal(shuffled, pixels) == (side == 1)

    def patch_sets(x):
        """The set of patches of each square."""
        squares = x.unfold(2, 2 * side, 2 * side).unfold(3, 2 * side, 2 * side).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        patches = squares.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)
        return [{tuple(patch) for patch in square} for square in patches.tolist()]

    assert patch_sets(shuffled) == patch_sets(pixels)
    if side > 1:
        assert not torch.equal(shuffled[0] - pixels[0], shuffled[1] - pixels[1])  # each image is shuffled differently


def test_interactions_run(tmp_path, images, monkeypatch):
    monkeypatch.setattr(interactions, "LOCAL_PERCENTAGES", (50,))
    monkeypatch.setattr(interactions, "WORD_WINDOWS", (1, 4))
    data = ["--images", str(images), "--text", str(write_text(tmp_path / "text")), "--test_texts", "2"]
    arguments = [*TOY, "--seeds", "0", *data]
    records = run("interactions", tmp_path, *arguments)
    tasks = {"synthetic, 50 % local", "text", "images"}
    assert {x["task"] for x in records} == tasks and {x["seed"] for x in records} == {"0"}
    metrics = {task: {x["metric"] for x in records if x["task"] == task} - {"learning_rate"} for task in tasks}
    assert metrics["images"] == {f"accuracy, window {side}" for side in (1, 2)}
    assert metrics["text"] == {f"loss, window {window}" for window in interactions.WORD_WINDOWS}
    assert run("interactions", tmp_path, *arguments) == records  # nothing is measured twice


def test_tightness_runs(tmp_path, images):
    data = ["--images", str(images), "--text", str(write_text(tmp_path / "text")), "--test_images", "3", "--test_texts", "2"]
    records = run("tightness", tmp_path, *TOY, "--seeds", "0", *data, "--every", "1")
    records = [x for x in records if x["metric"] != "learning_rate"]
    assert len(records) == 2 * 3 * 2 * 4  # tasks, steps, normalizations, layers
    assert all(float(x["value"]) >= 1 - 1e-9 for x in records)  # ratio of the upper bound to the coding rate
    values = {(x["task"], x["seed"], x["metric"]): x["value"] for x in records}
    assert len(values) == len(records)
    assert values["text", "0", "step 0, unit tokens, layer 0"] != values["text", "0", "step 2, unit tokens, layer 0"]
