# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Metrics that need no network: `evaluate.load` downloads the code of even the simplest metric."""

import math

import datasets
import evaluate
import numpy as np


IGNORED_LABEL = -100


class TokenAccuracy(evaluate.Metric):
    """Fraction of tokens predicted correctly; references of -100 are ignored.

    Example:

    ```python
    >>> from tost_hf.training.metrics import TokenAccuracy

    >>> TokenAccuracy().compute(predictions=[5, 7, 9, 1], references=[5, 8, 9, -100])
    {'accuracy': 0.6666666666666666}
    ```
    """

    def __init__(self, *args, keep_in_memory: bool = True, **kwargs):
        # in memory: processes that evaluate at the same time would otherwise share a file
        super().__init__(*args, keep_in_memory=keep_in_memory, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Fraction of tokens predicted correctly, without those whose reference is -100.",
            citation="",
            inputs_description="predictions: token ids; references: token ids, or -100 for ignored tokens.",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions, references) -> dict[str, float]:
        predictions, references = np.asarray(predictions), np.asarray(references)
        label_mask = references != IGNORED_LABEL
        if not label_mask.any():
            return {"accuracy": math.nan}
        return {"accuracy": float((predictions == references)[label_mask].mean())}


class TopKAccuracy(evaluate.Metric):
    """Fraction of images whose class was the most likely one ("accuracy"), or among the k most likely ("top5_accuracy").

    Predictions are the most likely classes of each image, best first: five, or all if there are fewer.

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
            description="Fraction of images whose class was the most likely one, or among the five most likely.",
            citation="",
            inputs_description="predictions: the most likely classes of each image, best first; references: its class.",
            features=datasets.Features(
                {"predictions": datasets.List(datasets.Value("int64")), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references) -> dict[str, float]:
        matches = np.asarray(predictions) == np.asarray(references)[:, None]
        return {"accuracy": float(matches[:, 0].mean()), "top5_accuracy": float(matches[:, :5].any(1).mean())}


def perplexity(loss: float) -> float:
    """exp(`loss`), the perplexity of a mean loss in nats; infinity if it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


__all__ = ["TokenAccuracy", "TopKAccuracy", "perplexity"]
