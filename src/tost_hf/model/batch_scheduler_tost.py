# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The scheduler of continuous batching: requests join a running batch and leave it, a token at a time.

A state is of one size at any length, so a batch of requests of any lengths is their states, row by row. Keys and values of
hybrid models end at the same place, with padding before the shorter ones.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.utils import logging

from .batch_requests_tost import BatchRequest, Cancelled, choose_tokens
from .cache_tost import CausalStatisticsCache, join_rows
from .configuration_tost import CAUSAL_STATISTICS


logger = logging.get_logger(__name__)
MAX_ROWS = 256  # requests computed together
CHUNK_TOKENS = 512  # of prompts, read between two tokens of the others
MOST_ATTEMPTS = 3


class TooManyRequests(RuntimeError):
    """As many requests wait as may."""


class _Prefill:
    """Prompts that are read together, padded on the left to one length, some columns at a time; equal ones only once."""

    def __init__(self, model: Any, requests: Sequence[BatchRequest]):
        self.model, self.requests = model, list(requests)
        rows: dict[tuple[int, ...], int] = {}
        self.row_of = {request: rows.setdefault(tuple(request.text), len(rows)) for request in requests}
        self.length = max(map(len, rows))
        padding = [self.length - len(text) for text in rows]
        self.tokens = torch.tensor([[0] * n + list(text) for n, text in zip(padding, rows)], device=model.device)
        columns = torch.arange(self.length, device=model.device)
        self.positions = columns - torch.tensor(padding, device=model.device).unsqueeze(1)
        self.mask = (self.positions >= 0).long() if any(padding) else None
        self.read = 0
        self.cache: Cache = CausalStatisticsCache(model.config)

    def read_on(self, most_tokens: int) -> torch.Tensor | None:
        """Reads the next columns. At the end: the logits after each prompt (requests, vocabulary)."""
        start, self.read = self.read, min(self.read + max(most_tokens // len(self.tokens), 1), self.length)
        logits = self.model(
            input_ids=self.tokens[:, start : self.read],
            attention_mask=None if self.mask is None else self.mask[:, : self.read],
            position_ids=self.positions[:, start : self.read].clamp_min(0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits[self.rows(self.requests)] if self.read == self.length else None

    def rows(self, requests: Sequence[BatchRequest]) -> torch.Tensor:
        """Where these requests stand in the cache."""
        return torch.tensor([self.row_of[request] for request in requests], device=self.tokens.device)


class BatchScheduler:
    """Computes requests together. Each `step` reads a chunk of waiting prompts and generates a token for all others.

    A request that fails alone ends with its error. Where a pass over several fails, each starts again by itself, from what it
    has; so the one to blame fails alone. `submit` and `cancel` may be called from other threads than `step`.

    Args:
        model: a `ToSTForCausalLM`; put into evaluation mode.
        max_rows: how many requests are computed together.
        chunk_tokens: how many tokens of prompts are read in one step.
        max_waiting: how many more requests are taken in; None for any number.
        return_logprobs: whether outputs have the logarithms of their tokens' probabilities.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int = MAX_ROWS,
        chunk_tokens: int = CHUNK_TOKENS,
        max_waiting: int | None = None,
        return_logprobs: bool = False,
    ):
        self.model = model.eval()
        self.max_rows, self.chunk_tokens, self.max_waiting = max_rows, chunk_tokens, max_waiting
        self.return_logprobs = return_logprobs
        self.attends = set(model.config.layer_types) != {CAUSAL_STATISTICS}
        self.waiting: deque[BatchRequest] = deque()
        self.prefills: deque[_Prefill] = deque()
        self.running: list[BatchRequest] = []  # the rows of `cache`
        self.cache: Cache | None = None
        self._lock = threading.Lock()  # of what waits

    @property
    def busy(self) -> bool:
        """Whether there is something to compute."""
        return bool(self.waiting or self.prefills or self.running)

    def _requests(self) -> list[BatchRequest]:
        """All that are not done."""
        reading = [request for prefill in self.prefills for request in prefill.requests]
        return [*self.waiting, *reading, *self.running]

    def submit(self, request: BatchRequest) -> None:
        """Takes a request in.

        Raises:
            TooManyRequests: as many wait as may.
        """
        with self._lock:
            if self.max_waiting is not None and len(self._requests()) >= self.max_rows + self.max_waiting:
                raise TooManyRequests(f"{self.max_waiting} requests wait already; try again later.")
            self.waiting.append(request)

    def cancel(self, request_id: str) -> None:
        """Ends a request at the next step; nothing happens where it is done."""
        with self._lock:
            for request in self._requests():
                if request.output.request_id == request_id:
                    request.cancelled = True

    def cancel_all(self) -> None:
        """Ends every request at the next step."""
        with self._lock:
            for request in self._requests():
                request.cancelled = True

    def fail_all(self, error: BaseException) -> None:
        """Ends every request with this error."""
        with self._lock:
            ended = self._requests()
            self.waiting, self.prefills, self.running, self.cache = deque(), deque(), [], None
        for request in ended:
            request.fail(error)

    @torch.no_grad()
    def step(self) -> None:
        """Reads a chunk of prompts, then generates a token for every request whose prompt has been read."""
        self._drop_cancelled()
        self._admit()
        if self.prefills:
            self._prefill()
        if self.running:
            self._decode()

    # Coming and going -------------------------------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        with self._lock:
            gone = [request for request in self._requests() if request.cancelled]
            if not gone:
                return
            self.waiting = deque(request for request in self.waiting if not request.cancelled)
            for prefill in self.prefills:
                prefill.requests = [request for request in prefill.requests if not request.cancelled]
            self.prefills = deque(prefill for prefill in self.prefills if prefill.requests)
            self._keep([i for i, request in enumerate(self.running) if not request.cancelled])
        for request in gone:
            request.fail(Cancelled("The request was cancelled."))

    def _admit(self) -> None:
        """Puts waiting requests whose lengths differ at most by half into one prefill, as long as rows are free."""
        with self._lock:
            free = self.max_rows + len(self.waiting) - len(self._requests())
            while free > 0 and self.waiting:
                longest, alone = len(self.waiting[0].text), self.waiting[0].attempts > 0
                together: list[BatchRequest] = []
                for request in self.waiting:
                    length = len(request.text)
                    fits = not alone and not request.attempts and length <= 2 * longest and longest <= 2 * length
                    if len(together) < free and (fits or not together):
                        together.append(request)
                chosen = set(together)
                self.waiting = deque(request for request in self.waiting if request not in chosen)
                for request in together:
                    request.start()
                self.prefills.append(_Prefill(self.model, together))
                free -= len(together)

    def _put_back(self, requests: Sequence[BatchRequest], error: Exception) -> None:
        """After a pass over these requests failed: each tries again by itself; a single one has failed."""
        with self._lock:
            self._take_out(requests)
            again = [request for request in requests if len(requests) > 1 and request.attempts < MOST_ATTEMPTS]
            for request in again:
                request.attempts += 1
            self.waiting.extendleft(reversed(again))
        for request in requests:
            if request not in again:
                logger.error("A generation failed.", exc_info=error)
                request.fail(error)

    def _take_out(self, requests: Sequence[BatchRequest]) -> None:
        """Of what is computed: all requests of the first prefill, or all that run."""
        if requests is self.running:
            self.running, self.cache = [], None
        else:
            self.prefills.popleft()

    def _join(self, requests: list[BatchRequest], cache: Cache) -> None:
        caches = [cache] if self.cache is None else [self.cache, cache]
        self.running = self.running + requests
        self.cache = join_rows(caches, max(request.cached for request in self.running))

    def _keep(self, rows: list[int]) -> None:
        """Lets all other rows go."""
        if len(rows) == len(self.running):
            return
        self.running = [self.running[i] for i in rows]
        if not rows:
            self.cache = None
            return
        assert self.cache is not None  # there were rows
        self.cache.batch_select_indices(torch.tensor(rows, device=self.model.device))
        self.cache = join_rows([self.cache], max(request.cached for request in self.running))

    # Computing --------------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        prefill = self.prefills[0]
        try:
            logits = prefill.read_on(self.chunk_tokens)
        except Exception as error:  # whatever a model raises
            self._put_back(prefill.requests, error)
            return
        if logits is None:
            with self._lock:
                self.prefills.rotate(-1)  # others come first
            return
        going_on = [prefill.requests[i] for i in self._extend(prefill.requests, logits)]
        with self._lock:
            self._take_out(prefill.requests)
            if going_on:
                prefill.cache.batch_select_indices(prefill.rows(going_on))
                self._join(going_on, prefill.cache)

    def _decode(self) -> None:
        requests, device = self.running, self.model.device
        tokens = torch.tensor([request.output.generated_tokens[-1:] for request in requests], device=device)
        positions = torch.tensor([[request.cached] for request in requests], device=device)
        mask = None
        if self.attends:
            longest = max(request.cached for request in requests)
            mask = (torch.arange(longest + 1, device=device) >= longest - positions).long()
        try:
            logits = self.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
            ).logits[:, -1]
        except Exception as error:  # whatever a model raises
            self._put_back(requests, error)
            return
        self._keep(self._extend(requests, logits))

    def _extend(self, requests: Sequence[BatchRequest], logits: torch.Tensor) -> list[int]:
        """Gives each request its next token; returns the rows of those that go on."""
        for request, choice in zip(requests, choose_tokens(requests, logits, self.return_logprobs)):
            request.take(choice, self.return_logprobs)
        return [i for i, request in enumerate(requests) if not request.output.is_finished()]


__all__ = ["BatchScheduler", "TooManyRequests"]
