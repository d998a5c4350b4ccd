# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Metrics that need no network: `evaluate.load` downloads the code of even the simplest one."""

import math

import datasets
import evaluate
import numpy as np


IGNORED_LABEL = -100


class TokenAccuracy(evaluate.Metric):
    """Share of tokens that were the most likely ones; references of -100 are not counted.

    Example:

    ```python
    >>> from tost_hf.training.metrics import TokenAccuracy

    >>> TokenAccuracy().compute(predictions=[5, 7, 9, 1], references=[5, 8, 9, -100])
    {'accuracy': 0.6666666666666666}
    ```
    """

    def __init__(self, *args, keep_in_memory: bool = True, **kwargs):
        # in memory: processes that evaluate side by side would otherwise share a file
        super().__init__(*args, keep_in_memory=keep_in_memory, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of tokens predicted correctly, without those whose reference is -100.",
            citation="",
            inputs_description="predictions: token ids; references: token ids, or -100 where nothing is to be predicted.",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions, references) -> dict[str, float]:
        predictions, references = np.asarray(predictions), np.asarray(references)
        counted = references != IGNORED_LABEL
        if not counted.any():
            return {"accuracy": math.nan}
        return {"accuracy": float((predictions == references)[counted].mean())}


class TopKAccuracy(evaluate.Metric):
    """Share of images whose class was the most likely one ("accuracy"), or among the k most likely ("top5_accuracy").

    Predictions are the classes of an image from the most likely on, as many as count: five, unless there are fewer.

    Example:

    ```python
    >>> from tost_hf.training.metrics import TopKAccuracy

    >>> TopKAccuracy().compute(predictions=[[5, 7, 9, 1, 2], [3, 1, 0, 2, 8]], references=[5, 0])
    {'accuracy': 0.5, 'top5_accuracy': 1.0}
    ```
    """

    def __init__(self, *args, keep_in_memory: bool = True, **kwargs):
        super().__init__(*args, keep_in_memory=keep_in_memory, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of images whose class was the most likely one, or among the five most likely.",
            citation="",
            inputs_description="predictions: the most likely classes of each image, best first; references: its class.",
            features=datasets.Features(
                {"predictions": datasets.List(datasets.Value("int64")), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references) -> dict[str, float]:
        right = np.asarray(predictions) == np.asarray(references)[:, None]
        return {"accuracy": float(right[:, 0].mean()), "top5_accuracy": float(right[:, :5].any(1).mean())}


def perplexity(loss: float) -> float:
    """exp(`loss`), the perplexity of a mean loss in nats; infinity where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


__all__ = ["TokenAccuracy", "TopKAccuracy", "perplexity"]
