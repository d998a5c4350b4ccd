# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Two studies: local against global interactions, and the tightness of the bound in training; what they measure is right."""

import math

import numpy as np
import pytest
import test_experiments
import torch
from test_experiments import TOY, run, write_text


import interactions  # isort: skip  (found once test_experiments has named its folder)


images = test_experiments.images  # a fixture


@pytest.mark.parametrize("share", interactions.LOCAL_SHARES)
def test_the_share_of_local_tokens(share):
    batch = interactions.make_mixed_batch(np.random.default_rng(1), share / 100, 200, 96)
    tokens = batch["input_ids"]
    follows, purely_local = {}, interactions.make_mixed_batch(np.random.default_rng(2), 1.0, 200, 96)["input_ids"]
    for before, _, after in purely_local.unfold(1, 3, 1).flatten(0, 1).tolist():
        follows.setdefault(before, set()).add(after)
    assert all(len(found) == interactions.FOLLOWERS for found in follows.values())  # one table for all sequences
    triples = tokens.unfold(1, 3, 1).flatten(0, 1).tolist()
    local = sum(after in follows.get(before, ()) for before, _, after in triples) / len(triples)
    by_chance = interactions.FOLLOWERS / interactions.VOCAB_SIZE
    assert local == pytest.approx(share / 100 + (1 - share / 100) * by_chance, abs=0.02)
    assert (share == 0) == all(len(sequence.unique()) <= interactions.PREFERRED for sequence in tokens)
    ends = {0: math.log(interactions.PREFERRED), 100: math.log(interactions.FOLLOWERS)}
    if share in ends:
        assert batch["known"].item() == pytest.approx(ends[share], abs=1e-6)
    else:
        assert batch["known"].item() < math.log(interactions.VOCAB_SIZE)


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_words_stay_in_their_windows(window):
    words = [f"w{number}" for number in range(23)]
    text = "\n".join(words)
    shuffled = interactions.shuffle_words(text, window, np.random.default_rng(0)).split()
    parts = [(words[i : i + window], shuffled[i : i + window]) for i in range(0, 20, window)]
    assert len(interactions.shuffle_words(text, window, np.random.default_rng(0))) == len(text)
    assert (shuffled == words) == (window == 1)
    if window > 1:
        assert all(sorted(before) == sorted(after) for before, after in parts[: 22 // window])


@pytest.mark.parametrize("side", [1, 2, 4])
def test_patches_stay_in_their_squares(side):
    pixels = torch.arange(3 * 2 * 8 * 8, dtype=torch.uint8).view(3, 2, 8, 8)
    shuffled = interactions.shuffle_patches(pixels, 2, side, torch.Generator().manual_seed(0))
    assert shuffled.dtype == torch.uint8 and torch.equal(shuffled, pixels) == (side == 1)

    def patches(x):
        """Of each square, its patches in no order."""
        squares = x.unfold(2, 2 * side, 2 * side).unfold(3, 2 * side, 2 * side).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        cut = squares.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)
        return [{tuple(patch) for patch in square} for square in cut.tolist()]

    assert patches(shuffled) == patches(pixels)
    if side > 1:
        assert not torch.equal(shuffled[0] - pixels[0], shuffled[1] - pixels[1])  # each image in its own way


def test_interactions_run(tmp_path, images, monkeypatch):
    monkeypatch.setattr(interactions, "LOCAL_SHARES", (50,))
    monkeypatch.setattr(interactions, "WORDS", (1, 4))
    data = ["--images", str(images), "--text", str(write_text(tmp_path / "text")), "--test_texts", "2"]
    arguments = [*TOY, *data]
    records = run("interactions", tmp_path, *arguments)
    tasks = {"synthetic, 50 % local", "text", "images"}
    assert {x["task"] for x in records} == tasks and {x["seed"] for x in records} == {"0", "1"}
    metrics = {task: {x["metric"] for x in records if x["task"] == task} - {"learning_rate"} for task in tasks}
    assert metrics["images"] == {f"accuracy, window {side}" for side in (1, 2)}
    assert metrics["text"] == {f"loss, window {window}" for window in interactions.WORDS}
    assert run("interactions", tmp_path, *arguments) == records  # nothing is measured twice


def test_tightness_runs(tmp_path, images):
    data = ["--images", str(images), "--text", str(write_text(tmp_path / "text")), "--test_images", "3", "--test_texts", "2"]
    records = run("tightness", tmp_path, *TOY, *data, "--every", "1")
    records = [x for x in records if x["metric"] != "learning_rate"]
    assert len(records) == 2 * 2 * 3 * 2 * 4  # tasks, seeds, steps, normalisations, layers
    assert all(float(x["value"]) >= 1 - 1e-9 for x in records)  # a bound from above
    values = {(x["task"], x["seed"], x["metric"]): x["value"] for x in records}
    assert len(values) == len(records)
    assert values["text", "0", "step 0, unit tokens, layer 1"] != values["text", "0", "step 2, unit tokens, layer 1"]
