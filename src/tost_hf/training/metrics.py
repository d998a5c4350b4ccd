# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Metrics that need no network: `evaluate.load` downloads the code of even the simplest metric."""

import math

import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    """Fraction of correct predictions; references of -100 are ignored.

    A prediction is a class or token id, or the most likely ids, best first: of five, "top5_accuracy" is returned as well.

    Example:

    ```python
    >>> from tost_hf.training.metrics import Accuracy

    >>> Accuracy().compute(predictions=[5, 7, 9, 1], references=[5, 8, 9, -100])
    {'accuracy': 0.6666666666666666}
    >>> Accuracy().compute(predictions=[[5, 7, 9, 2, 4], [3, 1, 0, 6, 8]], references=[5, 0])
    {'accuracy': 0.5, 'top5_accuracy': 1.0}
    ```
    """

    def __init__(self, **kwargs):
        # in memory: processes that evaluate at the same time would otherwise share a file
        super().__init__(keep_in_memory=True, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.Value("int64")
        features = [datasets.Features({"predictions": x, "references": ids}) for x in (ids, datasets.List(ids))]
        return evaluate.MetricInfo(description=str(self.__doc__), citation="", features=features)

    def _compute(self, predictions, references) -> dict[str, float]:
        predictions, references = np.asarray(predictions), np.asarray(references)
        matches = (predictions.T == references)[..., references != -100]
        if not matches.size:
            return {"accuracy": math.nan}
        ranked = np.atleast_2d(matches)  # by the rank of the prediction
        accuracies = {"accuracy": float(ranked[0].mean())}
        if len(ranked) >= 5:
            accuracies["top5_accuracy"] = float(ranked[:5].any(0).mean())
        return accuracies


def perplexity(loss: float) -> float:
    """exp(`loss`), the perplexity of a mean loss in nats; infinity if it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


__all__ = ["Accuracy", "perplexity"]
