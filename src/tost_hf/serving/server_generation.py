# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Generation for the server's clients: bounded by the model's positions, cancelled when the client has disconnected."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from uuid import uuid4

import anyio.from_thread
import torch
from fastapi import HTTPException
from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails
from openai.types.responses.response_usage import ResponseUsage
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cli.serving.response import compute_usage
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    CBStreamer,
    GenerationState,
    InferenceThread,
    _StreamError,
    response_events_to_chunks,
)
from transformers.generation import GenerationMode

from ..cache_files import CachedPrefix
from ..model.modeling_tost import ToSTForCausalLM
from .generation import BatchingManager
from .requests import BATCHED_MODES, BatchOutput, BatchRequest, Cancelled, prepare_request
from .sampling import RejectNonFinite
from .scheduler import TooManyRequests, check_batching_config


SERVED_MODES = (*BATCHED_MODES, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)  # others' code is in repositories
MAX_TOKENS = 2**16  # of prompt and answer, where the model sets no limit: the memory of the server does
DEFAULT_NEW_TOKENS = 1024  # as transformers' server
MAX_TOGETHER = 64  # requests that are computed together
MAX_WAITING = 256  # and that wait; more are rejected
MANAGER_NAME = "_served_in_batches"  # attribute of a model
logger = logging.getLogger(__name__)


@dataclass
class ClientRequest:
    """The HTTP request being answered: the seed and the prefix it asks for, and what is generated for it."""

    seed: int | None = None
    prefix: str | None = None
    generation: BatchRequest | None = None
    disconnected: bool = False

    @property
    def output(self) -> BatchOutput:
        """The output of the generation, which has begun."""
        return cast(BatchRequest, self.generation).output

    def disconnect(self) -> None:
        """Ends the generation, or the one that is about to begin; nothing happens where it is done."""
        self.disconnected = True
        if self.generation is not None:
            self.generation.cancel()


current_request: ContextVar[ClientRequest] = ContextVar("current_request")


def chat_usage(completion_tokens: int, **counts: int) -> CompletionUsage:
    """OpenAI's usage of the current request, with its prefix, and the tokens that were read from the prefix cache."""
    output = current_request.get().output
    return CompletionUsage(
        prompt_tokens=len(output.prompt_ids),
        completion_tokens=completion_tokens,
        total_tokens=len(output.prompt_ids) + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=output.num_cached_tokens),
    )


def response_usage(input_tokens: int, output_tokens: int) -> ResponseUsage:
    """`chat_usage` for the Responses API."""
    output = current_request.get().output
    usage = compute_usage(len(output.prompt_ids), output_tokens)
    usage.input_tokens_details.cached_tokens = output.num_cached_tokens
    return usage


class GenerationFailed(RuntimeError):
    """The model failed; the request is valid."""

    def __init__(self, reason: object):
        super().__init__(f"The generation failed: {shorten(reason)}")


class ServedGeneration(GenerationState, BaseGenerateManager):
    """Generates for all requests together; beams, compiled steps and other models' texts one at a time, on another thread.

    Both methods raise, before anything is computed, ValueError for a request that does not fit the model, and HTTPException
    (429) where too many wait. Both are called on a worker thread (see `start_in_thread`) and continue on the event loop.
    """

    def __init__(
        self,
        prefixes: Mapping[str, CachedPrefix],
        prefix_cache_bytes: int,
        cb_config: ContinuousBatchingConfig | None = None,
        **options,
    ):
        """`prefixes`: those that requests may name. `cb_config`: see generation.py.

        Raises:
            ValueError: with this `cb_config` no request would ever be computed; or `prefix_cache_bytes` is negative.
        """
        if prefix_cache_bytes < 0:
            raise ValueError(f"--prefix-cache-bytes must be at least 0, which is off; got {prefix_cache_bytes}.")
        config = ContinuousBatchingConfig() if cb_config is None else cb_config
        check_batching_config(config)
        config.max_requests_per_batch = config.max_requests_per_batch or MAX_TOGETHER
        config.max_queue_size = config.max_queue_size or MAX_WAITING
        super().__init__(cb_config=config, **options)
        self._prefixes, self._prefix_cache_bytes = prefixes, prefix_cache_bytes
        self._thread = InferenceThread()  # one for all that is generated alone: compiled steps are bound to their thread

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        return isinstance(model, ToSTForCausalLM)

    def get_manager(self, model_id: str, use_cb: bool = False) -> "ServedGeneration":
        return self

    def stop(self) -> None:
        """Does nothing: the threads end with the process."""

    def generate_streaming(self, *args, **kwargs):
        return anyio.from_thread.run_sync(partial(self._start_streaming, *args, **kwargs))

    def _start_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        if (gen_config.num_beams or 1) > 1:
            raise ValueError("Beams (num_beams) are chosen at the very end, so their answer cannot be streamed.")
        queue: asyncio.Queue = asyncio.Queue()
        streamer = TextStreamer(getattr(processor, "tokenizer", processor)._tokenizer, queue, response_parser)

        def pass_on(output: BatchOutput) -> None:
            error = _find_error(output)
            try:
                streamer.put(output)
            except Exception as failure:  # a tokenizer that cannot decode what was generated
                streamer.cancel()
                error = GenerationFailed(f"{type(failure).__name__}: {failure}")
            if error is not None:
                queue.put_nowait(_StreamError(str(error)))
            elif output.is_finished():
                streamer.end()

        self._submit(model, processor, inputs, gen_config, pass_on, streaming=True)
        return queue, streamer

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        await asyncio.sleep(0)  # the first suspension: from here on the event loop
        done: asyncio.Future[BatchOutput] = asyncio.get_running_loop().create_future()

        def pass_on(output: BatchOutput) -> None:
            if not done.cancelled():
                done.set_result(output)

        self._submit(model, processor, inputs, gen_config, pass_on)
        output = await done
        if (error := _find_error(output)) is not None:
            raise error
        tokens = output.generated_tokens
        return processor.decode(tokens, skip_special_tokens=True), len(output.prompt_ids), tokens

    def _submit(
        self,
        model: Any,
        processor: Any,
        inputs: dict[str, Any],
        gen_config: GenerationConfig,
        pass_on: Callable[[BatchOutput], object],
        streaming: bool = False,
    ) -> None:
        """Submits a request whose outputs come to `pass_on` on this event loop."""
        loop, client = asyncio.get_running_loop(), current_request.get()
        if gen_config.max_new_tokens is None and gen_config.max_length is None:
            gen_config.max_new_tokens = DEFAULT_NEW_TOKENS
        prompt, positions = torch.as_tensor(inputs["input_ids"]).flatten().tolist(), MAX_TOKENS
        if client.prefix is not None:
            if (prefix := self._prefixes.get(client.prefix)) is None:
                names = ", ".join(self._prefixes) or "none"
                raise ValueError(f"There is no prefix {client.prefix!r} here; there are: {names}.")
            prompt = prefix.continued_by(prompt, getattr(processor, "bos_token_id", None))[0].tolist()
            positions += prefix.input_ids.shape[1]
        request = prepare_request(
            model,
            prompt,
            uuid4().hex,
            lambda output: loop.call_soon_threadsafe(pass_on, output),
            generation_config=gen_config,
            tokenizer=processor,
            seed=int(torch.randint(2**63 - 1, ())) if client.seed is None else client.seed,
            streaming=streaming,
            modes=SERVED_MODES,
            default_positions=positions,
        )
        gen_config.max_new_tokens, gen_config.max_length = request.max_new_tokens, None  # by which handlers see why it ended
        client.generation = request
        if client.disconnected:
            request.cancel()
        if isinstance(model, ToSTForCausalLM):
            gen_config.use_cache = None  # which transformers' handlers have turned off, for a batch with pages
            tokens = torch.tensor([prompt], device=model.device)
            inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        batched = isinstance(model, ToSTForCausalLM) and gen_config.cache_implementation is None
        if batched and request.settings.get_generation_mode() in BATCHED_MODES:
            try:
                self._batching_manager(model).submit(request)
            except TooManyRequests as error:
                raise HTTPException(429, str(error)) from error
        else:
            self._thread.submit(_generate_alone, request, model, processor, inputs, gen_config)

    def _batching_manager(self, model: ToSTForCausalLM) -> BatchingManager:
        """The model's manager: an attribute of the model, so that both are unloaded together."""
        if (manager := vars(model).get(MANAGER_NAME)) is None:
            manager = BatchingManager(model, batching_config=self._cb_config, prefix_cache_bytes=self._prefix_cache_bytes)
            for prefix in self._prefixes.values():
                manager.scheduler.pin_prefix(prefix.input_ids[0].tolist(), prefix.cache)
            manager.start()
            setattr(model, MANAGER_NAME, manager)
        return manager


class TextStreamer(CBStreamer):
    """Decodes the tokens of a request into text; at its end the bytes of an unfinished character, too."""

    def __init__(self, tokenizer: Any, queue: asyncio.Queue, response_parser: Any):
        super().__init__(cast(Any, None), "", tokenizer, asyncio.get_running_loop(), queue, response_parser=response_parser)
        self.client = current_request.get()
        self._text = ""  # that was sent

    def put(self, output) -> None:
        tokens = output.generated_tokens
        for token in tokens[self.total_tokens :]:
            self.total_tokens += 1
            self._send(self._decode_stream.step(self._tokenizer, token))
        if output.is_finished():
            text = self._tokenizer.decode(tokens, skip_special_tokens=self._parser is None)
            self._send(text[len(self._text) :] if text.startswith(self._text) else None)

    def cancel(self) -> None:
        self.client.disconnect()

    def _send(self, text: str | None) -> None:
        if text:
            self._text += text
            for chunk in [text] if self._parser is None else response_events_to_chunks(self._parser.feed(text)):
                self._queue.put_nowait(chunk)


def _generate_alone(request: BatchRequest, model: Any, processor: Any, inputs: dict, gen_config: GenerationConfig) -> None:
    """Computes a request by `generate`, with the same outputs as the scheduler's."""
    request.start()
    try:
        if not request.cancelled:  # while it waited
            with torch.random.fork_rng():
                torch.manual_seed(request.generator.initial_seed())
                tokens = model.generate(
                    **inputs,
                    generation_config=gen_config,
                    tokenizer=processor,
                    logits_processor=LogitsProcessorList([RejectNonFinite()]),
                    stopping_criteria=StoppingCriteriaList([_Progress(request)]),
                )
            request.output.generated_tokens = tokens[0, len(request.output.prompt_ids) :].tolist()
    except Exception as error:  # whatever a model raises
        logger.error("A generation failed.", exc_info=error)
        request.fail(error)
    else:
        request.fail(Cancelled("The request was cancelled.")) if request.cancelled else request.finish()


class _Progress(StoppingCriteria):
    """Delivers the tokens of a request that streams, and stops one that was cancelled."""

    def __init__(self, request: BatchRequest):
        self.request = request

    def __call__(self, input_ids, scores, **kwargs):
        if self.request.streaming:
            self.request.output.generated_tokens = input_ids[0, len(self.request.output.prompt_ids) :].tolist()
            self.request.send()
        return torch.full(input_ids.shape[:1], self.request.cancelled, device=input_ids.device, dtype=torch.bool)


def _find_error(output: BatchOutput) -> Exception | None:
    """What the client is told of a request that failed."""
    if isinstance(output.cause, ValueError):
        return ValueError(shorten(output.error))
    return None if output.error is None else GenerationFailed(output.error)


def shorten(message: object) -> str:
    """One short line, plain enough to be put between quotes in a stream, which transformers does."""
    text = " ".join(str(message).split()).replace("\\", "/").replace('"', "'")
    return text[:500].encode("utf-8", "replace").decode()
