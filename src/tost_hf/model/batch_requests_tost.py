# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Requests of continuous batching: what each asks for, the choice of its next token, when it is done.

A request is prepared by the same methods of the model as `generate` uses, so that it gets the same text as alone.
"""

import copy
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    GenerationMode,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus


# these look at one row of scores and nothing else, so rows with the same ones go through them together
ROWWISE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class Cancelled(RuntimeError):
    """The request was taken back."""


@dataclass
class BatchOutput(GenerationOutput):
    """transformers' results of a request, and what the error was where there is one."""

    cause: BaseException | None = None


class Choice(NamedTuple):
    """The next token of a request, or why there is none."""

    token: int
    logprob: float
    error: Exception | None = None


@dataclass(eq=False)
class BatchRequest:
    """A text that is being continued.

    `deliver` is called with a copy of `output`: when the request is done, and if it streams after each token.
    """

    output: BatchOutput
    settings: GenerationConfig  # prepared as in `generate`
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList  # beside the length and the end tokens
    generator: torch.Generator
    deliver: Callable[[BatchOutput], object]
    streaming: bool = False
    cancelled: bool = False
    attempts: int = 0  # to compute it together with others, which failed

    def __post_init__(self) -> None:
        ends = self.settings._eos_token_tensor  # set by generate's own preparation
        self.end_tokens = frozenset(() if ends is None else ends.tolist())
        self.max_new_tokens = self.settings.max_length - len(self.output.prompt_ids)

    @property
    def text(self) -> list[int]:
        """The prompt and what was generated after it."""
        return self.output.prompt_ids + self.output.generated_tokens

    @property
    def cached(self) -> int:
        """How many tokens its state holds while it is decoded: all but the last, which is the next input."""
        return len(self.output.prompt_ids) + len(self.output.generated_tokens) - 1

    def start(self) -> None:
        """It no longer waits."""
        if self.output.status == RequestStatus.PENDING:
            self.output.lifespan = (time.perf_counter(), -1)
        self.output.status = RequestStatus.PREFILLING

    def take(self, choice: Choice, with_logprob: bool) -> None:
        """Goes on by a token, and ends where it is the last one or could not be chosen."""
        output = self.output
        if choice.error is not None:
            self.fail(choice.error)
            return
        output.generated_tokens.append(choice.token)
        if with_logprob:
            output.logprobs.append(choice.logprob)
        if output.timestamps is not None:
            output.timestamps.append(time.perf_counter())
        try:
            ended = self._is_done()
        except Exception as error:  # of a criterion
            self.fail(error)
            return
        output.status = RequestStatus.FINISHED if ended else RequestStatus.DECODING
        if ended:
            output.lifespan = (output.lifespan[0], time.perf_counter())
        if ended or self.streaming:
            self._send()

    def fail(self, error: BaseException) -> None:
        """Ends here, with what there is so far."""
        kind = "" if isinstance(error, ValueError | Cancelled) else f"{type(error).__name__}: "
        self.output.cause, self.output.error = error, f"{kind}{error}"
        self.output.status = RequestStatus.FAILED
        self.output.lifespan = (self.output.lifespan[0], time.perf_counter())
        self._send()

    def _is_done(self) -> bool:
        written = self.output.generated_tokens
        if written[-1] in self.end_tokens or len(written) >= self.max_new_tokens:
            return True
        tails = [criterion.maximum_token_len for criterion in self.criteria if isinstance(criterion, StopStringCriteria)]
        tokens = torch.tensor([self.text[-max(tails, default=1) :]])
        return any(bool(criterion(tokens, None).all()) for criterion in self.criteria)

    def _send(self) -> None:
        output = self.output
        times = None if output.timestamps is None else output.timestamps[:]
        tokens, logprobs = output.generated_tokens[:], output.logprobs[:]
        try:
            self.deliver(replace(output, generated_tokens=tokens, logprobs=logprobs, timestamps=times))
        except Exception:  # nobody is there any more
            self.cancelled = True


def prepare_request(
    model: Any,
    input_ids: Sequence[int],
    request_id: str,
    deliver: Callable[[BatchOutput], object],
    *,
    generation_config: GenerationConfig | None = None,
    seed: int,
    tokenizer: Any = None,
    streaming: bool = False,
    record_timestamps: bool = False,
    **options: Any,
) -> BatchRequest:
    """Checks a request and prepares it.

    Args:
        model: a `ToSTForCausalLM`.
        generation_config: what it leaves open is as in `model.generation_config`, and then as in `generate`.
        seed: of the tokens it draws.
        tokenizer: needed for stop strings.
        options: fields of the `GenerationConfig`, which go before those of `generation_config`.

    Raises:
        ValueError: nothing can be generated after this prompt, or not in this way.
    """
    prompt = _check_prompt(model.config, input_ids)
    settings = _prepare_settings(model, len(prompt), generation_config, options)
    criteria = model._get_stopping_criteria(settings, StoppingCriteriaList(), tokenizer=tokenizer)
    generator = torch.Generator(model.device).manual_seed(seed)
    return BatchRequest(
        output=BatchOutput(request_id, prompt_ids=prompt, timestamps=[] if record_timestamps else None),
        settings=settings,
        processors=model._get_logits_processor(settings, input_ids_seq_length=len(prompt), device=model.device),
        criteria=StoppingCriteriaList(x for x in criteria if not isinstance(x, EosTokenCriteria | MaxLengthCriteria)),
        generator=generator,
        deliver=deliver,
        streaming=streaming,
    )


def _check_prompt(config: Any, input_ids: Sequence[int]) -> list[int]:
    try:
        prompt = [index(token) for token in input_ids]
    except TypeError as error:
        raise ValueError(f"A prompt must be a sequence of token ids, which are integers: {error}.") from error
    if not prompt:
        raise ValueError("The prompt is empty: write at least one token.")
    if min(prompt) < 0 or max(prompt) >= config.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < config.vocab_size)
        raise ValueError(f"The prompt has token {wrong}; the model knows {config.vocab_size} tokens.")
    positions = config.max_position_embeddings
    if positions is not None and len(prompt) >= positions:
        raise ValueError(f"The prompt has {len(prompt)} tokens; there are {positions} positions for prompt and answer.")
    return prompt


def _prepare_settings(model: Any, prompt_length: int, given: GenerationConfig | None, options: dict) -> GenerationConfig:
    """The whole configuration of one request; `max_length` is then the length of prompt and answer together."""
    if given is not None and not isinstance(given, GenerationConfig):
        raise ValueError(f"generation_config must be a GenerationConfig, got {given!r}; name single options by keyword.")
    given = GenerationConfig() if given is None else copy.deepcopy(given)
    unknown = given.update(**{name: value for name, value in options.items() if value is not None})
    if unknown:
        raise ValueError(f"These are no options of generation: {', '.join(sorted(unknown))}.")
    is_default = {
        name: all(getattr(config, name) is None for config in (given, model.generation_config))
        for name in ("max_length", "min_length")
    }
    settings, _ = model._prepare_generation_config(given)
    mode = settings.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"Generation by {mode.value} cannot be batched continuously, only greedy search and sampling.")
    if settings.guidance_scale not in (None, 1):
        raise ValueError("guidance_scale runs the model twice per token, which continuous batching does not do.")
    model._prepare_special_tokens(settings, kwargs_has_attention_mask=True, device=model.device)
    settings = model._prepare_generated_length(
        generation_config=settings,
        has_default_max_length=is_default["max_length"],
        has_default_min_length=is_default["min_length"],
        model_input_name="input_ids",
        input_ids_length=prompt_length,
        inputs_tensor=None,
    )
    settings.max_length = min(settings.max_length, model.config.max_position_embeddings or settings.max_length)
    if settings.max_length <= prompt_length:
        wanted = settings.max_length - prompt_length
        raise ValueError(f"At least 1 token must be generated after the {prompt_length} of the prompt, got {wanted}.")
    return settings


# The next tokens -------------------------------------------------------------------------------------------------------


def choose_tokens(requests: Sequence[BatchRequest], logits: torch.Tensor, with_logprobs: bool = False) -> list[Choice]:
    """The next token of each request.

    Args:
        logits: (requests, vocabulary).
        with_logprobs: whether to compute the logarithm of its probability, after all processors.
    """
    scores = logits.to(torch.float32, copy=True)
    finite = scores.max(-1).values.isfinite()  # -inf is a token ruled out; not all may be
    scores = scores.masked_fill(~finite.unsqueeze(1), 0)
    alike: dict[Hashable, list[int]] = {}
    for i, request in enumerate(requests):
        alike.setdefault(_way_of_choosing(request), []).append(i)
    results = torch.zeros(len(requests), 3, dtype=torch.float64, device=scores.device)
    results[:, 0] = finite
    errors: dict[int, Exception] = {}
    for rows in alike.values():
        own = scores if len(alike) == 1 else scores[rows]
        try:
            tokens, own = _choose_alike([requests[i] for i in rows], own)
        except Exception as error:  # of a processor
            errors.update(dict.fromkeys(rows, error))
            continue
        results[rows, 1] = tokens.double()
        if with_logprobs:
            results[rows, 2] = own.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1).double()
    choices = []
    for i, (is_finite, token, logprob) in enumerate(results.tolist()):  # waits for the device, once
        if not is_finite:
            errors[i] = FloatingPointError(
                "the model's logits are not finite numbers; check its weights with `tost-hf verify`."
            )
        choices.append(Choice(int(token), logprob, errors.get(i)))
    return choices


def _way_of_choosing(request: BatchRequest) -> Hashable:
    """Equal for requests that may be computed together."""
    if not _is_rowwise(request):
        return id(request)
    return request.settings.do_sample, *((type(x), *vars(x).values()) for x in request.processors)


def _is_rowwise(request: BatchRequest) -> bool:
    return all(type(processor) in ROWWISE for processor in request.processors)


def _choose_alike(requests: list[BatchRequest], scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (requests,) and processed scores (requests, vocabulary) of requests with the same processors."""
    first = requests[0]
    if first.processors:
        text = torch.tensor([[]] * len(requests) if _is_rowwise(first) else [first.text], dtype=torch.long)
        scores = first.processors(text.to(scores.device), scores)  # type: ignore[arg-type]
    if not first.settings.do_sample:
        return scores.argmax(-1), scores
    rows = scores.softmax(-1).split(1)
    drawn = [torch.multinomial(row, 1, generator=request.generator) for row, request in zip(rows, requests)]
    return torch.cat(drawn).squeeze(1), scores


__all__ = ["BatchOutput", "BatchRequest", "Cancelled", "Choice", "choose_tokens", "prepare_request"]
