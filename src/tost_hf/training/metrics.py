# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Metrics of predictions, as functions of NumPy arrays or lists."""

import math

import numpy as np


IGNORED_LABEL = -100


def token_accuracy(predictions, references) -> dict[str, float]:
    """Share of tokens that were predicted correctly; NaN if there is none to predict.

    Args:
        predictions: token ids, of any shape.
        references: token ids of the same shape; those of -100 are not counted.

    Example:

    ```python
    >>> from tost_hf.training.metrics import token_accuracy

    >>> token_accuracy(predictions=[5, 7, 9, 1], references=[5, 8, 9, -100])
    {'accuracy': 0.6666666666666666}
    ```
    """
    predictions, references = np.asarray(predictions), np.asarray(references)
    counted = references != IGNORED_LABEL
    return {"accuracy": float((predictions == references)[counted].mean()) if counted.any() else math.nan}


def top_k_accuracy(predictions, references) -> dict[str, float]:
    """Share of images whose class was the most likely one ("accuracy"), or among the five most likely ("top5_accuracy").

    Args:
        predictions: (images, k), the k most likely classes of each image, best first; five, unless there are fewer.
        references: (images,), the class of each.

    Example:

    ```python
    >>> from tost_hf.training.metrics import top_k_accuracy

    >>> top_k_accuracy(predictions=[[5, 7, 9, 1, 2], [3, 1, 0, 2, 8]], references=[5, 0])
    {'accuracy': 0.5, 'top5_accuracy': 1.0}
    ```
    """
    correct = np.asarray(predictions) == np.asarray(references)[:, None]
    return {"accuracy": float(correct[:, 0].mean()), "top5_accuracy": float(correct[:, :5].any(1).mean())}


def perplexity(loss: float) -> float:
    """exp(`loss`), the perplexity of a mean loss in nats; infinity where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


__all__ = ["perplexity", "token_accuracy", "top_k_accuracy"]
