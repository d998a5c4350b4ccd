# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Continuous batching by the methods that transformers gives to models: `generate_batch` and a manager of requests.

transformers' own needs layers with pages of keys and values. This one, with the same signatures and results, has a state per
request, and takes sampling options, stop strings and a seed for each.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, GenerationMixin
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.utils import logging

from .batch_requests_tost import BatchOutput, prepare_request
from .batch_scheduler_tost import CHUNK_TOKENS, MAX_ROWS, BatchScheduler


IDLE_SECONDS = 10.0  # after which a manager's thread ends; the next request starts another


class BatchingManager:
    """Takes requests at any time and computes them on a thread of its own.

    The methods are those of transformers' ContinuousBatchingManager.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig | None = None,
        batching_config: ContinuousBatchingConfig | None = None,
    ):
        """`generation_config` holds for requests that bring none; of the other, see `BatchedGenerationMixin`."""
        self.model, self.generation_config = model, generation_config
        self.scheduler = _build_scheduler(model, batching_config)
        self._seeds = _seed_source(batching_config)
        self._changed = threading.Condition()  # of all that follows
        self._results: list[BatchOutput] = []
        self._thread: threading.Thread | None = None
        self._started = False
        self._count = 0

    def start(self) -> None:
        """Begins to compute what was added, and what will be."""
        with self._changed:
            self._started = True
            self._ensure_thread()

    def stop(self, block: bool = True, timeout: float | None = None, hard_stop: bool = False, **kwargs: Any) -> None:
        """Computes nothing more, after the requests that are there (or at once, with errors for these).

        Args:
            block: whether to wait for that.
            timeout: seconds to wait at most.
        """
        with self._changed:
            self._started, thread = False, self._thread
            if hard_stop:
                self.scheduler.cancel_all()
            self._changed.notify_all()
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
        tokenizer: Any = None,
        seed: int | None = None,
        on_output: Callable[[BatchOutput], object] | None = None,
        **options: Any,
    ) -> str:
        """Adds a request; returns its name. Arguments not named here are `prepare_request`'s.

        Args:
            request_id: a name that no other request has; made up unless given.
            streaming: whether there is an output after each token, rather than one at the end.
            on_output: gets the outputs, on the manager's thread; without it they wait for `get_result`.

        Raises:
            ValueError: nothing can be generated after this prompt, or not in this way.
            TooManyRequests: as many wait as may.
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
            tokenizer=tokenizer,
            seed=_next_seed(self._seeds) if seed is None else seed,
            streaming=streaming,
            record_timestamps=record_timestamps,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            **options,
        )
        with self._changed:
            self.scheduler.submit(request)
            self._ensure_thread()
        return request_id

    def add_requests(self, inputs: Sequence[Sequence[int]], **options: Any) -> list[str]:
        """Adds several with the same options; returns their names."""
        return [self.add_request(input_ids, **options) for input_ids in inputs]

    def cancel_request(self, request_id: str) -> None:
        """Ends a request; its last output says so. Nothing happens where it is done."""
        self.scheduler.cancel(request_id)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> BatchOutput | None:
        """The next output (of this request), or None where none comes in `timeout` seconds, or at all."""

        def find() -> BatchOutput | None:
            return next((x for x in self._results if request_id in (None, x.request_id)), None)

        with self._changed:
            self._changed.wait_for(lambda: find() is not None or not self._may_compute(), timeout)
            result = find()
            if result is not None:
                self._results.remove(result)
            return result

    def __iter__(self) -> Iterator[BatchOutput]:
        """Outputs as they come, until nothing more can come."""
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

    # The thread -------------------------------------------------------------------------------------------------------

    def _may_compute(self) -> bool:
        return self._thread is not None and (self.scheduler.busy or self._started)

    def _ensure_thread(self) -> None:
        if self._started and self._thread is None and self.scheduler.busy:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)
        while self._wait_for_work():
            try:
                self.scheduler.step()
            except Exception as error:  # not of a model's pass, of which the scheduler takes care
                logging.get_logger(__name__).error("Continuous batching failed.", exc_info=True)
                self.scheduler.fail_all(error)

    def _wait_for_work(self) -> bool:
        """Whether there is some; else the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self.scheduler.busy or not self._started, IDLE_SECONDS)
            if not self.scheduler.busy:
                self._thread = None
                self._changed.notify_all()
            return self.scheduler.busy


class BatchedGenerationMixin(GenerationMixin):
    """transformers' methods for continuous batching, for models whose cache is made of states.

    Of a `ContinuousBatchingConfig` these are used: `max_requests_per_batch` (how many are computed together; 256 by default),
    `max_batch_tokens` (of prompts, read between two tokens of the others; 512 by default), `max_queue_size` (how many more a
    manager takes in; 0, the default, for any number), `return_logprobs`, `seed`. The rest is about pages of keys and values.
    """

    def init_continuous_batching(  # type: ignore[override]  # theirs has other parts in the same places
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        **kwargs: Any,
    ) -> BatchingManager:
        """A manager of requests, which computes after its `start`."""
        return BatchingManager(self, generation_config, continuous_batching_config)

    @contextmanager
    def continuous_batching_context_manager(  # type: ignore[override]
        self,
        generation_config: GenerationConfig | None = None,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        **kwargs: Any,
    ) -> Generator[BatchingManager]:
        """A manager that computes meanwhile; at the end it finishes the requests that are there."""
        manager = self.init_continuous_batching(generation_config, continuous_batching_config)
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=block, timeout=timeout)

    @torch.no_grad()
    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        *,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> dict[str, GenerationOutput]:
        """Continues prompts of any lengths together: greedily the same texts as `generate` one by one, up to rounding.

        Args:
            inputs: token ids of the prompts.
            generation_config: as in `generate`; with `num_return_sequences` each prompt has as many answers.
            continuous_batching_config: see the class.
            record_timestamps: whether outputs have the time of each token.
            progress_bar: whether to show how many are done.
            tokenizer: needed for stop strings.
            kwargs: fields of the `GenerationConfig`, such as `max_new_tokens`.

        `persistent_manager` and `warmup` change nothing: there is nothing to keep or to warm up.

        Returns:
            Outputs by name, in the order of the prompts. One that failed has an `error`.

        Raises:
            ValueError: a prompt is empty or too long, or an option cannot be used; before anything is computed.
        """
        kwargs.pop("cache_implementation", None)  # "paged", where `generate` calls this
        answers = kwargs.pop("num_return_sequences", None) or getattr(generation_config, "num_return_sequences", None) or 1
        scheduler, seeds = _build_scheduler(self, continuous_batching_config), _seed_source(continuous_batching_config)
        scheduler.max_waiting = None
        options = {"generation_config": generation_config, "tokenizer": tokenizer, "record_timestamps": record_timestamps}
        options |= kwargs | {"num_return_sequences": 1}
        names = [
            name for i in range(len(inputs)) for name in (*(f"req_{i}__child#{j}" for j in range(answers - 1)), f"req_{i}")
        ]
        results: dict[str, BatchOutput | None] = dict.fromkeys(names)
        with logging.tqdm(total=len(names), disable=not progress_bar, unit="request") as bar:

            def deliver(output: BatchOutput) -> None:
                results[output.request_id] = output
                bar.update()

            for i, name in enumerate(names):
                prompt, seed = inputs[i // answers], _next_seed(seeds)
                scheduler.submit(prepare_request(self, prompt, name, deliver, seed=seed, **options))
            while scheduler.busy:
                scheduler.step()
        return {name: output for name, output in results.items() if output is not None}


def check_batching_config(config: ContinuousBatchingConfig) -> None:
    """Raises ValueError where no request would ever be computed."""
    for name in ("max_requests_per_batch", "max_batch_tokens"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, or None for the default; got {value}.")
    if config.max_queue_size < 0:
        raise ValueError(f"max_queue_size must be at least 1, or 0 for any number; got {config.max_queue_size}.")


def _build_scheduler(model: Any, config: ContinuousBatchingConfig | None) -> BatchScheduler:
    config = ContinuousBatchingConfig() if config is None else config
    check_batching_config(config)
    return BatchScheduler(
        model,
        max_rows=config.max_requests_per_batch or MAX_ROWS,
        chunk_tokens=config.max_batch_tokens or CHUNK_TOKENS,
        max_waiting=config.max_queue_size or None,
        return_logprobs=config.return_logprobs,
    )


def _seed_source(config: ContinuousBatchingConfig | None) -> torch.Generator | None:
    """Where seeds come from; None for torch's own generator."""
    return None if config is None or config.seed is None else torch.Generator().manual_seed(config.seed)


def _next_seed(source: torch.Generator | None) -> int:
    return int(torch.randint(2**63 - 1, (), generator=source))


__all__ = ["BatchedGenerationMixin", "BatchingManager", "check_batching_config"]
