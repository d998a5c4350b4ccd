# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Metrics of language models that need no network: `evaluate.load` downloads the code of even the simplest one."""

import math

import datasets
import evaluate
import numpy as np


IGNORED_LABEL = -100


class TokenAccuracy(evaluate.Metric):
    """Share of tokens that were the most likely ones; references of -100 are not counted.

    Example:

    ```python
    >>> from tost_hf.metrics import TokenAccuracy

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


def perplexity(loss: float) -> float:
    """exp(`loss`), the perplexity of a mean loss in nats; infinity where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


__all__ = ["TokenAccuracy", "perplexity"]
