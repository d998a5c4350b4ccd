# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Requests for generation: their one validation, for library and server, and their progress until they are done.

A request is prepared by the methods of the model that `generate` uses, so that it gets the text that it would get alone.
"""

import copy
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerationMode, MaxLengthCriteria, StopStringCriteria
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus


BATCHED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
MAX_BEAMS = 8
MIN_TEMPERATURE = 1e-3  # below, logits overflow


class Cancelled(RuntimeError):
    """The request was cancelled."""


@dataclass
class BatchOutput(GenerationOutput):
    """transformers' results of a request, the exception where there is one, and how much of the prompt was cached."""

    cause: BaseException | None = None
    num_cached_tokens: int = 0  # of the prompt, read from the prefix cache


@dataclass(eq=False)
class BatchRequest:
    """A sequence that is being continued.

    `deliver` is called with a copy of `output`: when the request is done, and if it streams after each token.
    """

    output: BatchOutput
    settings: GenerationConfig  # prepared as in `generate`; `max_length` counts prompt and answer
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList  # beside the length and the end tokens
    generator: torch.Generator
    deliver: Callable[[BatchOutput], object]
    streaming: bool = False
    cancelled: bool = False
    retried: bool = False  # after a pass with others, which failed
    cache_version: int = 0  # of the prefix cache when its prefill began

    def __post_init__(self) -> None:
        end_tokens = self.settings._eos_token_tensor  # set by generate's own preparation
        self.end_tokens = frozenset(() if end_tokens is None else end_tokens.tolist())
        self.max_new_tokens = self.settings.max_length - len(self.output.prompt_ids)

    @property
    def tokens(self) -> list[int]:
        """The prompt and what was generated after it."""
        return self.output.prompt_ids + self.output.generated_tokens

    @property
    def num_computed_tokens(self) -> int:
        """How many tokens its state contains while it is decoded: all but the last, which is the next input."""
        return len(self.output.prompt_ids) + len(self.output.generated_tokens) - 1

    def cancel(self) -> None:
        """Ends it at the next step; from any thread."""
        self.cancelled = True

    def start(self) -> None:
        """Marks it as no longer waiting."""
        if not self.retried:
            self.output.lifespan = (time.perf_counter(), -1)
        self.output.status = RequestStatus.PREFILLING

    def retry(self) -> None:
        """Marks it as waiting again, to be continued from what it has generated."""
        self.retried, self.output.status = True, RequestStatus.PENDING

    def add_token(self, token: int, logprob: float | None = None) -> None:
        """Appends a token and delivers; finishes where it is the last one."""
        output = self.output
        output.status = RequestStatus.DECODING
        output.generated_tokens.append(token)
        if logprob is not None:
            output.logprobs.append(logprob)
        if output.timestamps is not None:
            output.timestamps.append(time.perf_counter())
        try:
            finished = self._is_last(token)
        except Exception as error:  # of a stopping criterion
            self.fail(error)
            return
        if finished:
            self.finish()
        elif self.streaming:
            self.send()

    def finish(self) -> None:
        """Ends successfully, with what was generated."""
        self._end(RequestStatus.FINISHED)

    def fail(self, error: BaseException) -> None:
        """Ends with an error, and with what was generated before it."""
        kind = "" if isinstance(error, ValueError | Cancelled) else f"{type(error).__name__}: "
        self.output.cause, self.output.error = error, f"{kind}{error}"
        self._end(RequestStatus.FAILED)

    def send(self) -> None:
        """Delivers a copy of the output."""
        output = self.output
        times = None if output.timestamps is None else output.timestamps[:]
        tokens, logprobs = output.generated_tokens[:], output.logprobs[:]
        try:
            self.deliver(replace(output, generated_tokens=tokens, logprobs=logprobs, timestamps=times))
        except Exception:  # the listener no longer exists
            self.cancel()

    def _end(self, status: RequestStatus) -> None:
        self.output.status, self.output.lifespan = status, (self.output.lifespan[0], time.perf_counter())
        self.send()

    def _is_last(self, token: int) -> bool:
        if token in self.end_tokens or len(self.output.generated_tokens) >= self.max_new_tokens:
            return True
        lengths = [criterion.maximum_token_len for criterion in self.criteria if isinstance(criterion, StopStringCriteria)]
        tokens = torch.tensor([self.tokens[-max(lengths, default=1) :]])
        return any(bool(criterion(tokens, None).all()) for criterion in self.criteria)


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
    modes: Collection[GenerationMode] = BATCHED_MODES,
    default_positions: int | None = None,
    **options: Any,
) -> BatchRequest:
    """Validates and prepares a request.

    Args:
        model: a `ToSTForCausalLM`.
        generation_config: what it leaves open is as in `model.generation_config`, and then as in `generate`.
        seed: of the tokens it samples.
        tokenizer: needed for stop strings.
        modes: of generation, that are possible.
        default_positions: for prompt and answer, where the model has no limit.
        options: fields of the `GenerationConfig`, which override those of `generation_config`.

    Raises:
        ValueError: nothing can be generated after this prompt, or not in this way.
    """
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or default_positions
    prompt = _check_prompt(input_ids, config.vocab_size, positions)
    settings = _prepare_settings(model, len(prompt), generation_config, options, positions)
    _check_mode(settings, modes)
    criteria = model._get_stopping_criteria(settings, StoppingCriteriaList(), tokenizer=tokenizer)
    return BatchRequest(
        output=BatchOutput(request_id, prompt_ids=prompt, timestamps=[] if record_timestamps else None),
        settings=settings,
        processors=model._get_logits_processor(settings, input_ids_seq_length=len(prompt), device=model.device),
        criteria=StoppingCriteriaList(x for x in criteria if not isinstance(x, EosTokenCriteria | MaxLengthCriteria)),
        generator=torch.Generator(model.device).manual_seed(seed),
        deliver=deliver,
        streaming=streaming,
    )


def _check_prompt(input_ids: Sequence[int], vocab_size: int, positions: int | None) -> list[int]:
    try:
        prompt = [index(token) for token in input_ids]
    except TypeError as error:
        raise ValueError(f"A prompt must be a sequence of token ids, which are integers: {error}.") from error
    if not prompt:
        raise ValueError("The prompt is empty: write at least one token.")
    if positions is not None and len(prompt) >= positions:
        raise ValueError(f"The prompt has {len(prompt)} tokens; there are {positions} positions for prompt and answer.")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise ValueError(f"The prompt has token {wrong}; the model knows {vocab_size} tokens.")
    return prompt


def _prepare_settings(
    model: Any, prompt_length: int, given: GenerationConfig | None, options: dict, positions: int | None
) -> GenerationConfig:
    """The complete configuration of one request; `max_length` is then the length of prompt and answer together."""
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
    model._prepare_special_tokens(settings, kwargs_has_attention_mask=True, device=model.device)
    settings = model._prepare_generated_length(
        generation_config=settings,
        has_default_max_length=is_default["max_length"],
        has_default_min_length=is_default["min_length"],
        model_input_name="input_ids",
        input_ids_length=prompt_length,
        inputs_tensor=None,
    )
    settings.max_length = min(settings.max_length, positions or settings.max_length)
    if settings.max_length <= prompt_length:
        wanted = settings.max_length - prompt_length
        raise ValueError(f"At least 1 token must be generated after the {prompt_length} of the prompt, got {wanted}.")
    return settings


def _check_mode(settings: GenerationConfig, modes: Collection[GenerationMode]) -> None:
    mode = settings.get_generation_mode()
    if mode not in modes:
        raise ValueError(f"Generation by {mode.value} is not possible here, only by {', '.join(x.value for x in modes)}.")
    if (settings.num_beams or 1) > MAX_BEAMS or (settings.num_return_sequences or 1) > 1:
        raise ValueError(f"A request may have {MAX_BEAMS} beams (num_beams) at most, and one answer (num_return_sequences).")
    if settings.guidance_scale not in (None, 1):
        raise ValueError("guidance_scale runs the model twice per token, which is not possible here.")
    if settings.do_sample and settings.temperature is not None and settings.temperature < MIN_TEMPERATURE:
        raise ValueError(f"temperature must be at least {MIN_TEMPERATURE} (do_sample=False is 0), got {settings.temperature}.")


__all__ = ["BATCHED_MODES", "MAX_BEAMS", "BatchOutput", "BatchRequest", "Cancelled", "prepare_request"]
