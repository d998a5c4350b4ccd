# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The data of a study: local versus global interactions."""

import math

import numpy as np
import pytest
import test_experiments  # noqa: F401  adds the folder of the study to sys.path
import torch


import interactions  # isort: skip


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
