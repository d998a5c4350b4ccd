# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Sampling: the next tokens of a batch of requests, each with its own options and seed."""

from collections.abc import Hashable, Sequence

import torch
from transformers import LogitsProcessor
from transformers.generation import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from .requests import BatchRequest


# these look at the scores of one sequence alone and not at its tokens, so sequences with equal ones are processed together
BATCHABLE_PROCESSORS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class NonFiniteLogitsError(FloatingPointError):
    def __init__(self):
        super().__init__("the model's logits are not finite numbers; check its weights with `tost-hf verify`.")


def find_finite(scores: torch.Tensor) -> torch.Tensor:
    """Whether each sequence's scores (B, vocabulary) can be sampled from: (B,). -inf rules out a token, but not all."""
    return scores.max(-1).values.isfinite()


class RejectNonFinite(LogitsProcessor):
    """For `generate`: sampling from logits that are not finite ends, on a GPU, the whole process."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if not find_finite(scores).all():
            raise NonFiniteLogitsError
        return scores


def sample_tokens(requests: Sequence[BatchRequest], logits: torch.Tensor, with_logprobs: bool = False) -> None:
    """Gives each request its next token, or the error for which there is none.

    Args:
        logits: (requests, vocabulary).
        with_logprobs: whether to compute the logarithm of its probability, after all processors.
    """
    scores = logits.to(torch.float32, copy=True)
    finite = find_finite(scores)
    scores = scores.masked_fill(~finite.unsqueeze(1), 0)
    groups: dict[Hashable, list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(_group_key(request), []).append(i)
    results = torch.zeros(len(requests), 3, dtype=torch.float64, device=scores.device)  # read by the host at once
    results[:, 0] = finite
    errors: dict[int, Exception] = {}
    for group in groups.values():
        try:
            tokens, processed = _sample_group([requests[i] for i in group], scores if len(groups) == 1 else scores[group])
        except Exception as error:  # of a logits processor
            errors.update(dict.fromkeys(group, error))
            continue
        results[group, 1] = tokens.double()
        if with_logprobs:
            results[group, 2] = processed.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1).double()
    for i, (is_finite, token, logprob) in enumerate(results.tolist()):
        if not is_finite:
            errors[i] = NonFiniteLogitsError()
        if i in errors:
            requests[i].fail(errors[i])
        else:
            requests[i].add_token(int(token), logprob if with_logprobs else None)


def _group_key(request: BatchRequest) -> Hashable:
    """Equal for requests that may be sampled together."""
    if not _is_batchable(request):
        return id(request)
    return request.settings.do_sample, *((type(x), *vars(x).values()) for x in request.processors)


def _is_batchable(request: BatchRequest) -> bool:
    return all(type(processor) in BATCHABLE_PROCESSORS for processor in request.processors)


def _sample_group(requests: list[BatchRequest], scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (requests,) and processed scores (requests, vocabulary) of requests with the same processors."""
    first = requests[0]
    if first.processors:
        tokens = torch.tensor([[]] * len(requests) if _is_batchable(first) else [first.tokens], dtype=torch.long)
        scores = first.processors(tokens.to(scores.device), scores)  # type: ignore[arg-type]
    if not first.settings.do_sample:
        return scores.argmax(-1), scores
    probabilities = scores.softmax(-1).split(1)
    drawn = [torch.multinomial(x, 1, generator=request.generator) for x, request in zip(probabilities, requests)]
    return torch.cat(drawn).squeeze(1), scores


__all__ = ["RejectNonFinite", "sample_tokens"]
