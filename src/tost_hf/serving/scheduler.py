# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The scheduler of continuous batching: requests join a running batch and leave it between two tokens.

A state has one size at any length, so a batch of requests of any lengths is the concatenation of their states. Keys and values
of hybrid models are aligned at their ends, with padding before the shorter ones.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.utils import logging

from ..model.cache_tost import CausalStatisticsCache, join_rows
from ..model.configuration_tost import CAUSAL_STATISTICS
from .requests import BatchRequest, Cancelled
from .sampling import sample_tokens


logger = logging.get_logger(__name__)
MAX_BATCH_SIZE = 256  # requests computed together
MAX_PREFILL_TOKENS = 512  # of prompts, between two tokens of the others
MAX_ATTEMPTS = 3


class TooManyRequests(RuntimeError):
    """The queue is full."""


class _Prefill:
    """Chunked prefill of prompts, padded on the left to one length; equal ones are computed once."""

    def __init__(self, model: Any, requests: Sequence[BatchRequest]):
        self.model, self.requests = model, list(requests)
        prompts: dict[tuple[int, ...], int] = {}  # and their batch indices
        self.batch_index = {request: prompts.setdefault(tuple(request.tokens), len(prompts)) for request in requests}
        self.length = max(map(len, prompts))
        padding = [self.length - len(prompt) for prompt in prompts]
        self.tokens = torch.tensor([[0] * n + list(prompt) for n, prompt in zip(padding, prompts)], device=model.device)
        self.positions = torch.arange(self.length, device=model.device) - torch.tensor(padding, device=model.device)[:, None]
        self.mask = (self.positions >= 0).long() if any(padding) else None
        self.processed = 0  # positions
        self.cache: Cache = CausalStatisticsCache(model.config)

    def process_chunk(self, max_tokens: int) -> torch.Tensor | None:
        """Processes the next positions. After the last: the logits after each prompt (requests, vocabulary)."""
        start, end = self.processed, min(self.processed + max(max_tokens // len(self.tokens), 1), self.length)
        logits = self.model(
            input_ids=self.tokens[:, start:end],
            attention_mask=None if self.mask is None else self.mask[:, :end],
            position_ids=self.positions[:, start:end].clamp_min(0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        self.processed = end
        return logits[self.indices(self.requests)] if end == self.length else None

    def indices(self, requests: Sequence[BatchRequest]) -> torch.Tensor:
        """The batch indices of these requests in the cache."""
        return torch.tensor([self.batch_index[request] for request in requests], device=self.tokens.device)


class BatchScheduler:
    """Computes requests together. Each `step` processes a chunk of waiting prompts and decodes a token for all others.

    A request that fails alone ends with its error. Where a forward pass over several fails, each is retried individually, from
    what it has generated; so only the one to blame fails. `submit` and `cancel` may be called from other threads than `step`.

    Args:
        model: a `ToSTForCausalLM`; put into evaluation mode.
        max_batch_size: how many requests are computed together.
        max_prefill_tokens: how many tokens of prompts are processed in one step.
        max_waiting: how many more requests are accepted; None for any number.
        return_logprobs: whether outputs have the logarithms of their tokens' probabilities.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_batch_size: int = MAX_BATCH_SIZE,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        max_waiting: int | None = None,
        return_logprobs: bool = False,
    ):
        self.model = model.eval()
        self.max_batch_size, self.max_prefill_tokens, self.max_waiting = max_batch_size, max_prefill_tokens, max_waiting
        self.return_logprobs = return_logprobs
        self.has_attention = set(model.config.layer_types) != {CAUSAL_STATISTICS}
        self.waiting: deque[BatchRequest] = deque()
        self.prefills: deque[_Prefill] = deque()
        self.running: list[BatchRequest] = []  # in the order of the batch in `cache`
        self.cache: Cache | None = None
        self._lock = threading.Lock()  # of the three collections of requests

    @property
    def busy(self) -> bool:
        """Whether there is something to compute."""
        return bool(self.waiting or self.prefills or self.running)

    def _requests(self) -> list[BatchRequest]:
        """All that are not done."""
        prefilling = [request for prefill in self.prefills for request in prefill.requests]
        return [*self.waiting, *prefilling, *self.running]

    def submit(self, request: BatchRequest) -> None:
        """Adds a request to the queue.

        Raises:
            TooManyRequests: the queue is full.
        """
        with self._lock:
            if self.max_waiting is not None and len(self._requests()) >= self.max_batch_size + self.max_waiting:
                raise TooManyRequests(f"{self.max_waiting} requests wait already; try again later.")
            self.waiting.append(request)

    def cancel(self, request_id: str | None = None) -> None:
        """Cancels a request, or all, at the next step; nothing happens where it is done."""
        with self._lock:
            for request in self._requests():
                if request_id in (None, request.output.request_id):
                    request.cancel()

    def fail_all(self, error: BaseException) -> None:
        """Ends every request with this error."""
        with self._lock:
            ended = self._requests()
            self.waiting, self.prefills, self.running, self.cache = deque(), deque(), [], None
        for request in ended:
            request.fail(error)

    @torch.no_grad()
    def step(self) -> None:
        """Processes a chunk of prompts, then decodes a token for every request whose prompt is complete."""
        self._drop_cancelled()
        self._admit()
        if self.prefills:
            self._prefill()
        if self.running:
            self._decode()

    # Admission and removal --------------------------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        with self._lock:
            cancelled = dict.fromkeys(request for request in self._requests() if request.cancelled)
            if not cancelled:
                return
            self.waiting = deque(request for request in self.waiting if request not in cancelled)
            for prefill in self.prefills:
                prefill.requests = [request for request in prefill.requests if request not in cancelled]
            self.prefills = deque(prefill for prefill in self.prefills if prefill.requests)
            self._keep([i for i, request in enumerate(self.running) if request not in cancelled])
        for request in cancelled:
            request.fail(Cancelled("The request was cancelled."))

    def _admit(self) -> None:
        """Puts waiting requests whose lengths differ by at most a factor of 2 into one prefill, while the batch has space."""
        with self._lock:
            free = self.max_batch_size + len(self.waiting) - len(self._requests())
            while free > 0 and self.waiting:
                first = self.waiting[0]
                length = len(first.tokens)
                similar = [
                    request
                    for request in self.waiting
                    if not request.attempts and len(request.tokens) <= 2 * length and length <= 2 * len(request.tokens)
                ]
                chosen = dict.fromkeys([first] if first.attempts else similar[:free])
                self.waiting = deque(request for request in self.waiting if request not in chosen)
                for request in chosen:
                    request.start()
                self.prefills.append(_Prefill(self.model, list(chosen)))
                free -= len(chosen)

    def _retry_individually(self, requests: Sequence[BatchRequest], error: Exception) -> None:
        """After a forward pass over these requests failed; a single one has failed for good."""
        with self._lock:
            self._remove(requests)
            retried = [request for request in requests if len(requests) > 1 and request.attempts < MAX_ATTEMPTS]
            for request in retried:
                request.attempts += 1
            self.waiting.extendleft(reversed(retried))
        for request in requests:
            if request not in retried:
                logger.error("A generation failed.", exc_info=error)
                request.fail(error)

    def _remove(self, requests: Sequence[BatchRequest]) -> None:
        """Removes all requests of the first prefill, or all that are decoded."""
        if requests is self.running:
            self.running, self.cache = [], None
        else:
            self.prefills.popleft()

    def _join(self, requests: list[BatchRequest], cache: Cache) -> None:
        caches = [cache] if self.cache is None else [self.cache, cache]
        self.running = self.running + requests
        self.cache = join_rows(caches, max(request.cached_tokens for request in self.running))

    def _keep(self, indices: list[int]) -> None:
        """Removes all other requests from the batch."""
        if len(indices) == len(self.running):
            return
        kept, cache = [self.running[i] for i in indices], self.cache
        self.running, self.cache = [], None
        if kept:
            assert cache is not None
            cache.batch_select_indices(torch.tensor(indices, device=self.model.device))
            self._join(kept, cache)

    # Computing --------------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        prefill = self.prefills[0]
        try:
            logits = prefill.process_chunk(self.max_prefill_tokens)
        except Exception as error:  # whatever a model raises
            self._retry_individually(prefill.requests, error)
            return
        if logits is None:
            with self._lock:
                self.prefills.rotate(-1)  # others come first
            return
        unfinished = [prefill.requests[i] for i in self._extend(prefill.requests, logits)]
        with self._lock:
            self._remove(prefill.requests)
            if unfinished:
                prefill.cache.batch_select_indices(prefill.indices(unfinished))
                self._join(unfinished, prefill.cache)

    def _decode(self) -> None:
        requests, device = self.running, self.model.device
        tokens = torch.tensor([request.output.generated_tokens[-1:] for request in requests], device=device)
        positions = torch.tensor([[request.cached_tokens] for request in requests], device=device)
        mask = None
        if self.has_attention:
            longest = max(request.cached_tokens for request in requests)
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
            self._retry_individually(requests, error)
            return
        unfinished = self._extend(requests, logits)
        with self._lock:
            self._keep(unfinished)

    def _extend(self, requests: Sequence[BatchRequest], logits: torch.Tensor) -> list[int]:
        """Gives each request its next token; returns the indices of those that are not done."""
        sample_tokens(requests, logits, self.return_logprobs)
        return [i for i, request in enumerate(requests) if not request.output.is_finished()]


__all__ = ["MAX_BATCH_SIZE", "MAX_PREFILL_TOKENS", "BatchScheduler", "TooManyRequests"]
