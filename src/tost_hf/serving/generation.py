# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Generation that keeps to the model's positions, ends when its client has gone, and fails alone."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from uuid import uuid4

import anyio.from_thread
import torch
from fastapi import HTTPException
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cli.serving.utils import (
    CBStreamer,
    GenerateManager,
    GenerationState,
    _StreamError,
    response_events_to_chunks,
)
from transformers.generation import GenerationMode

from ..model.batch_requests_tost import BatchOutput
from ..model.batch_scheduler_tost import TooManyRequests
from ..model.batching_tost import BatchedGenerationMixin, BatchingManager, check_batching_config


BUILT_IN_MODES = {
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
}  # transformers takes the code of the others from repositories
MAX_TOKENS = 2**16  # of prompt and answer, where the model sets no limit: the memory of the server does
DEFAULT_NEW_TOKENS = 1024  # as transformers' server
MAX_BEAMS = 8
MIN_TEMPERATURE = 1e-3  # below, logits overflow
MAX_TOGETHER = 64  # requests that are computed together
MAX_WAITING = 256  # and that wait for a place; more are refused
MANAGER_NAME = "_served_in_batches"  # attribute of a model
logger = logging.getLogger(__name__)


@dataclass
class ClientRequest:
    """The HTTP request being answered: the seed it asks for, and how to cancel what it has generated."""

    seed: int | None = None
    cancel: Callable[[], object] = field(default=lambda: None)


current_request: ContextVar[ClientRequest] = ContextVar("current_request")


class GenerationFailed(RuntimeError):
    """The model, not the request, is to blame."""


class BoundedGenerationState(GenerationState):
    """Hands out one `BoundedGeneration` per model."""

    def __init__(self, continuous_batching: bool = True, cb_config: ContinuousBatchingConfig | None = None, **options):
        """Batching is always continuous. `cb_config`: see `BatchedGenerationMixin`."""
        super().__init__(**options)
        self._config = ContinuousBatchingConfig() if cb_config is None else cb_config
        check_batching_config(self._config)
        self._config.max_requests_per_batch = self._config.max_requests_per_batch or MAX_TOGETHER
        self._config.max_queue_size = self._config.max_queue_size or MAX_WAITING
        self._managers: dict[str, BoundedGeneration] = {}

    def get_manager(self, model_id: str, use_cb: bool = False) -> "BoundedGeneration":
        if model_id not in self._managers:
            self._managers[model_id] = BoundedGeneration(self._config)
        return self._managers[model_id]


class BoundedGeneration(GenerateManager):
    """Generates for all requests together; beams, compiled steps and other models' texts one at a time, on another thread.

    Both methods raise, before anything is computed, ValueError for a request that does not fit the model, and HTTPException
    (429) where too many wait. Both are called on a worker thread (see `_start_in_thread`) and continue on the event loop.
    """

    def __init__(self, config: ContinuousBatchingConfig):
        super().__init__()
        self._config = config

    def generate_streaming(self, *request, **options):
        anyio.from_thread.check_cancelled()  # the client has gone while its prompt was tokenized
        return anyio.from_thread.run_sync(partial(self._start_streaming, *request, **options))

    def _start_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        fit_to_model(model, inputs["input_ids"], gen_config)
        if (gen_config.num_beams or 1) > 1:
            raise ValueError("Beams (num_beams) are chosen at the very end, so their answer cannot be streamed.")
        if not _can_be_batched(model, gen_config):
            guarded = cast(PreTrainedModel, _GuardedModel(model))
            return super().generate_streaming(guarded, processor, inputs, gen_config, request_id, response_parser)
        queue: asyncio.Queue = asyncio.Queue()
        batching, name = self._batching(model), uuid4().hex  # a client may give two requests the same request_id
        tokenizer = getattr(processor, "tokenizer", processor)._tokenizer
        loop = asyncio.get_running_loop()
        streamer = _WholeTextStreamer(cast(Any, batching), name, tokenizer, loop, queue, response_parser=response_parser)

        def pass_on(output: BatchOutput) -> None:
            try:
                streamer.put(output)
                error = output.error
            except Exception as failure:  # a tokenizer that cannot decode what was generated
                streamer.cancel()
                error = f"{type(failure).__name__}: {failure}"
            if error is not None:
                queue.put_nowait(_StreamError(_failure(error)))
            elif output.is_finished():
                streamer.end()

        self._add(batching, processor, inputs, gen_config, name, pass_on, streaming=True)
        return queue, streamer

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        await asyncio.sleep(0)  # the first suspension: from here on the event loop
        fit_to_model(model, inputs["input_ids"], gen_config)
        if not _can_be_batched(model, gen_config):
            return await self._generate_alone(model, processor, inputs, gen_config, request_id)
        batching, name = self._batching(model), uuid4().hex
        done: asyncio.Future[BatchOutput] = asyncio.get_running_loop().create_future()

        def pass_on(output: BatchOutput) -> None:
            if not done.cancelled():
                done.set_result(output)

        self._add(batching, processor, inputs, gen_config, name, pass_on)
        output = await done
        if isinstance(output.cause, ValueError):
            raise ValueError(one_line(output.error))
        if output.error is not None:
            raise GenerationFailed(_failure(output.error))
        tokens = output.generated_tokens
        return processor.decode(tokens, skip_special_tokens=True), len(output.prompt_ids), tokens

    def _batching(self, model: Any) -> BatchingManager:
        """The model's manager. It lies with the model, and goes with it when that is unloaded."""
        if (manager := vars(model).get(MANAGER_NAME)) is None:
            manager = model.init_continuous_batching(continuous_batching_config=self._config)
            manager.start()
            setattr(model, MANAGER_NAME, manager)
        return manager

    @staticmethod
    def _add(batching: BatchingManager, processor, inputs, gen_config, name, pass_on, streaming: bool = False) -> None:
        """Adds a request whose outputs come to `pass_on` on this event loop."""
        loop, request = asyncio.get_running_loop(), current_request.get()
        request.cancel = partial(batching.cancel_request, name)
        try:
            batching.add_request(
                inputs["input_ids"][0].tolist(),
                name,
                streaming=streaming,
                generation_config=gen_config,
                tokenizer=processor,
                seed=request.seed,
                on_output=lambda output: loop.call_soon_threadsafe(pass_on, output),
            )
        except TooManyRequests as error:
            raise HTTPException(429, str(error)) from error

    async def _generate_alone(self, model, processor, inputs, gen_config, request_id):
        guarded = _GuardedModel(model)
        answer = super().generate_non_streaming(
            cast(PreTrainedModel, guarded), processor, inputs, gen_config, request_id=request_id
        )
        work = asyncio.ensure_future(answer)
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, even if nobody waits any more
        return await asyncio.shield(work)


class _WholeTextStreamer(CBStreamer):
    """Sends at the end what was held back of an unfinished character, as the answer that is not streamed has it."""

    _text = ""  # that was sent

    def put(self, output) -> None:
        tokens = output.generated_tokens
        for token in tokens[self.total_tokens :]:
            self.total_tokens += 1
            self._send(self._decode_stream.step(self._tokenizer, token))
        if output.is_finished():
            whole = self._tokenizer.decode(tokens, skip_special_tokens=self._parser is None)
            self._send(whole[len(self._text) :] if whole.startswith(self._text) else None)

    def _send(self, text: str | None) -> None:
        if text:
            self._text += text
            chunks = [text] if self._parser is None else response_events_to_chunks(self._parser.feed(text))
            for chunk in chunks:
                self._queue.put_nowait(chunk)


def _can_be_batched(model: Any, gen_config: GenerationConfig) -> bool:
    chosen_one_by_one = gen_config.get_generation_mode() in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    return isinstance(model, BatchedGenerationMixin) and chosen_one_by_one and gen_config.cache_implementation is None


def fit_to_model(model: PreTrainedModel, input_ids: torch.Tensor, gen_config: GenerationConfig) -> None:
    """Caps what is generated (in place) by the positions that a prompt (1, T) leaves.

    Raises:
        ValueError: nothing can be generated after this prompt, or not in this way.
    """
    config, tokens = model.config.get_text_config(), input_ids.shape[-1]
    if tokens == 0:
        raise ValueError("The prompt is empty: write at least one token.")
    positions = getattr(config, "max_position_embeddings", None) or MAX_TOKENS
    if tokens >= positions:
        raise ValueError(f"The prompt has {tokens} tokens; there are {positions} positions for prompt and answer.")
    if int(input_ids.max()) >= config.vocab_size:
        raise ValueError(f"The prompt has token {int(input_ids.max())}; the model knows {config.vocab_size} tokens.")
    _check_mode(gen_config)
    wanted = gen_config.max_new_tokens
    if wanted is None:
        wanted = DEFAULT_NEW_TOKENS if gen_config.max_length is None else gen_config.max_length - tokens
    if wanted < 1:
        raise ValueError(f"At least 1 token must be generated after the {tokens} of the prompt, got {wanted}.")
    gen_config.max_new_tokens, gen_config.max_length = min(wanted, positions - tokens), None


def _check_mode(gen_config: GenerationConfig) -> None:
    mode = gen_config.get_generation_mode()
    if mode not in BUILT_IN_MODES:
        raise ValueError(f"Generation by {mode.value} is not served, only greedy search, sampling and beams.")
    if (gen_config.num_beams or 1) > MAX_BEAMS or (gen_config.num_return_sequences or 1) > 1:
        raise ValueError(f"At most {MAX_BEAMS} beams (num_beams) and one answer (num_return_sequences) are served.")
    if gen_config.do_sample and gen_config.temperature is not None and gen_config.temperature < MIN_TEMPERATURE:
        raise ValueError(f"temperature must be 0 or at least {MIN_TEMPERATURE}, got {gen_config.temperature}.")


class _GuardedModel:
    """A model as one request sees it: it stops when `client_gone` is set, and its errors are one line."""

    def __init__(self, model: Any):
        self.model, self.client_gone = model, threading.Event()
        request = current_request.get()
        self.seed, request.cancel = request.seed, self.client_gone.set

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def generate(self, **inputs) -> torch.Tensor:
        """As the model's.

        Raises:
            ValueError: the request is to blame.
            GenerationFailed: the model is to blame.
        """
        if self.client_gone.is_set():  # while it waited for its turn
            return inputs["input_ids"]
        inputs["logits_processor"] = LogitsProcessorList([_FiniteLogits()])
        inputs["stopping_criteria"] = StoppingCriteriaList([_ClientGone(self.client_gone)])
        try:
            with torch.random.fork_rng(enabled=self.seed is not None):
                if self.seed is not None:
                    torch.manual_seed(self.seed)
                return self.model.generate(**inputs)
        except ValueError as error:
            raise ValueError(one_line(error)) from error
        except Exception as error:
            if type(error).__module__.startswith("transformers.cli."):  # the server's own sign to stop
                raise
            logger.error("A generation failed.", exc_info=True)
            raise GenerationFailed(_failure(f"{type(error).__name__}: {error}")) from error


class _ClientGone(StoppingCriteria):
    def __init__(self, event: threading.Event):
        self.event = event

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full(input_ids.shape[:1], self.event.is_set(), device=input_ids.device, dtype=torch.bool)


class _FiniteLogits(LogitsProcessor):
    """Sampling from logits that are not finite ends, on a GPU, the whole process."""

    def __call__(self, input_ids, scores) -> torch.Tensor:
        if not torch.isfinite(scores.max(dim=-1).values).all():  # -inf is a token ruled out; not all may be
            raise FloatingPointError("the model's logits are not finite numbers; check its weights with `tost-hf verify`.")
        return scores


def _failure(message: object) -> str:
    return f"The generation failed: {one_line(message)}"


def one_line(message: object) -> str:
    """As a sentence for a client: short, and plain enough to be put between quotes in a stream, which transformers does."""
    text = " ".join(str(message).split()).replace("\\", "/").replace('"', "'")
    return text[:500].encode("utf-8", "replace").decode()
