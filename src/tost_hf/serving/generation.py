# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Continuous batching by the methods that transformers gives to models: `generate_batch` and a manager of requests.

transformers' own needs layers with pages of keys and values. This one, with the same signatures and results, has a state per
request, and accepts sampling options, stop strings and a seed for each. The functions are methods of `ToSTForCausalLM` where
this package is imported.

Of a `ContinuousBatchingConfig` these are used: `max_requests_per_batch` (how many are computed together; 256 by default),
`max_batch_tokens` (of prompts, processed between two tokens of the others; 512 by default), `max_queue_size` (how many more a
manager accepts; 0, the default, for any number), `allow_block_sharing` (whether there is a prefix cache), `return_logprobs`,
`seed`. The rest is about pages of keys and values.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.utils import logging

from .requests import BatchOutput, BatchRequest, prepare_request
from .scheduler import PREFIX_CACHE_BYTES, BatchScheduler


class BatchingManager:
    """Accepts requests at any time and computes them on its own thread, which exists while there are any.

    The methods are those of transformers' ContinuousBatchingManager.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig | None = None,
        batching_config: ContinuousBatchingConfig | None = None,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    ):
        """`generation_config` is for requests that have none; `prefix_cache_bytes` is the prefix cache's size, 0 for none.

        Raises:
            ValueError: with this `batching_config` no request would ever be computed.
        """
        self.model, self.generation_config = model, generation_config
        self.scheduler = BatchScheduler(model, batching_config, prefix_cache_bytes)
        self._seeds = _seed_generator(batching_config)
        self._changed = threading.Condition()  # of all that follows
        self._results: list[BatchOutput] = []
        self._thread: threading.Thread | None = None
        self._started = False
        self._count = 0

    def start(self) -> None:
        """Begins to compute the requests that were added, and will be."""
        with self._changed:
            self._started = True
            self._ensure_thread()

    def stop(self, block: bool = True, timeout: float | None = None, hard_stop: bool = False, **kwargs: Any) -> None:
        """Computes nothing more after the requests that were added (with `hard_stop` these are cancelled).

        Args:
            block: whether to wait for that.
            timeout: seconds to wait at most.
        """
        with self._changed:
            self._started, thread = False, self._thread
            self._changed.notify_all()
        if hard_stop:
            self.scheduler.cancel()
        if block and thread is not None:
            thread.join(timeout)

    def is_running(self) -> bool:
        """Whether requests are computed as they come."""
        return self._started or self._thread is not None

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        *,
        generation_config: GenerationConfig | None = None,
        seed: int | None = None,
        on_output: Callable[[BatchOutput], object] | None = None,
        **options: Any,
    ) -> str:
        """Adds a request; returns its name. Arguments not named here are `prepare_request`'s.

        Args:
            request_id: a name that no other request has; generated unless given.
            streaming: whether there is an output after each token, rather than one at the end.
            on_output: receives the outputs, on the manager's thread; without it they wait for `get_result`.

        Raises:
            ValueError: nothing can be generated after this prompt, or not in this way.
            TooManyRequests: the queue is full.
        """
        if request_id is None:
            with self._changed:
                request_id, self._count = f"req_{self._count}", self._count + 1
        request = prepare_request(
            self.model,
            input_ids,
            request_id,
            self._keep_result if on_output is None else on_output,
            generation_config=self.generation_config if generation_config is None else generation_config,
            seed=_draw_seed(self._seeds) if seed is None else seed,
            streaming=streaming,
            record_timestamps=record_timestamps,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            **options,
        )
        self.submit(request)
        return request_id

    def submit(self, request: BatchRequest) -> None:
        """Adds a request of `prepare_request`.

        Raises:
            TooManyRequests: the queue is full.
        """
        with self._changed:
            self.scheduler.submit(request)
            self._ensure_thread()

    def add_requests(self, inputs: Sequence[Sequence[int]], **options: Any) -> list[str]:
        """Adds several with the same options; returns their names."""
        return [self.add_request(input_ids, **options) for input_ids in inputs]

    def cancel_request(self, request_id: str) -> None:
        """Ends a request; its last output says so. Nothing happens where it is done."""
        self.scheduler.cancel(request_id)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> BatchOutput | None:
        """The next output (of this request), or None where there is none within `timeout` seconds.

        Without a timeout it waits as long as requests are computed.
        """

        def find() -> BatchOutput | None:
            return next((x for x in self._results if request_id in (None, x.request_id)), None)

        def is_over() -> bool:
            return self._thread is None and (timeout is None or not self._started)

        with self._changed:
            self._changed.wait_for(lambda: find() is not None or is_over(), timeout)
            result = find()
            if result is not None:
                self._results.remove(result)
            return result

    def __iter__(self) -> Iterator[BatchOutput]:
        """Outputs as they come, until all requests are done."""
        while (result := self.get_result()) is not None:
            yield result

    def request_id_iter(self, request_id: str) -> Generator[BatchOutput]:
        """Outputs of one request as they come, the last one included."""
        while (result := self.get_result(request_id)) is not None:
            yield result
            if result.is_finished():
                return

    def _keep_result(self, output: BatchOutput) -> None:
        with self._changed:
            self._results.append(output)
            self._changed.notify_all()

    def _ensure_thread(self) -> None:
        if self._started and self._thread is None and self.scheduler.busy:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)
        while self._has_work():
            try:
                self.scheduler.step()
            except Exception as error:  # outside a forward pass, whose errors the scheduler handles
                logging.get_logger(__name__).error("Continuous batching failed.", exc_info=True)
                self.scheduler.fail_all(error)

    def _has_work(self) -> bool:
        """Whether there are requests; if not, the thread is to end."""
        with self._changed:
            if not self.scheduler.busy:
                self._thread = None
                self._changed.notify_all()
            return self._thread is not None


def init_continuous_batching(
    model: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    **kwargs: Any,
) -> BatchingManager:
    """A manager of requests, which computes after its `start`. Keyword argument: `prefix_cache_bytes`."""
    prefix_cache_bytes = kwargs.get("prefix_cache_bytes", PREFIX_CACHE_BYTES)
    return BatchingManager(model, generation_config, continuous_batching_config, prefix_cache_bytes)


@contextmanager
def continuous_batching_context_manager(
    model: Any,
    generation_config: GenerationConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    **kwargs: Any,
) -> Generator[BatchingManager]:
    """A manager that computes within the context, and at its end finishes the requests that were added.

    Keyword argument: `prefix_cache_bytes`.
    """
    manager = init_continuous_batching(model, generation_config, continuous_batching_config, **kwargs)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=block, timeout=timeout)


@torch.no_grad()
def generate_batch(
    model: Any,
    inputs: Sequence[Sequence[int]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **options: Any,
) -> dict[str, GenerationOutput]:
    """Continues prompts of any lengths together: greedily the same texts as `generate` for each, up to rounding.

    Args:
        inputs: token ids of the prompts.
        generation_config: as in `generate`; with `num_return_sequences` each prompt has as many answers.
        continuous_batching_config: see this module.
        record_timestamps: whether outputs have the time of each token.
        progress_bar: whether to show how many are done.
        options: fields of the `GenerationConfig`, such as `max_new_tokens`; and `tokenizer`, needed for stop strings.

    `persistent_manager` and `warmup` have no effect: there is nothing to keep or to warm up.

    Returns:
        Outputs by name, in the order of the prompts. One that failed has an `error`.

    Raises:
        ValueError: a prompt is empty or too long, or an option cannot be used; before anything is computed.
    """
    options.pop("cache_implementation", None)  # "paged", where `generate` calls this
    answers = options.pop("num_return_sequences", None) or getattr(generation_config, "num_return_sequences", None) or 1
    options |= {"generation_config": generation_config, "record_timestamps": record_timestamps, "num_return_sequences": 1}
    scheduler, seeds = BatchScheduler(model, continuous_batching_config), _seed_generator(continuous_batching_config)
    scheduler.max_waiting = None
    results: dict[str, BatchOutput] = {}
    requests = []
    with logging.tqdm(total=len(inputs) * answers, disable=not progress_bar, unit="request") as bar:

        def deliver(output: BatchOutput) -> None:
            results[output.request_id] = output
            bar.update()

        for i, prompt in enumerate(inputs):
            for name in (*(f"req_{i}__child#{j}" for j in range(answers - 1)), f"req_{i}"):
                requests.append(prepare_request(model, prompt, name, deliver, seed=_draw_seed(seeds), **options))
        for request in requests:
            scheduler.submit(request)
        while scheduler.busy:
            scheduler.step()
    return {request.output.request_id: results[request.output.request_id] for request in requests}


def _seed_generator(config: ContinuousBatchingConfig | None) -> torch.Generator | None:
    """The generator of the requests' seeds; None for torch's default one."""
    return None if config is None or config.seed is None else torch.Generator().manual_seed(config.seed)


def _draw_seed(generator: torch.Generator | None) -> int:
    return int(torch.randint(2**63 - 1, (), generator=generator))


__all__ = [
    "BatchingManager",
    "continuous_batching_context_manager",
    "generate_batch",
    "init_continuous_batching",
]
