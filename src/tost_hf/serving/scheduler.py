# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The scheduler of continuous batching: requests join a running batch and leave it between two tokens."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.utils import logging

from ..model.configuration_tost import CAUSAL_STATISTICS, FULL_ATTENTION
from .batch_states import concat_states, empty_state, select_states
from .prefix_cache import TOKEN_BYTES, PrefixCache, encode_tokens, model_fingerprint
from .requests import BatchRequest, Cancelled
from .sampling import sample_tokens


logger = logging.get_logger(__name__)
MAX_BATCH_SIZE = 256  # requests computed together
MAX_PREFILL_TOKENS = 512  # of prompts, between two tokens of the others
PREFIX_CACHE_BYTES = 2**28
MAX_BORDER_STATES = 32  # stored of one prompt, before its last chunk
MIN_CHUNK = 32
MAX_ATTEMPTS = 3


class TooManyRequests(RuntimeError):
    """The queue is full."""


class _Prefill:
    """Chunked prefill of one request, up to the token before its last one, which is its first input as it is decoded.

    Chunks end at multiples of the chunk size counted from the text's first token, the last ones at those of 256, 128, 64
    and 32: texts with a common prefix have common borders. A state is never changed, only replaced.
    """

    def __init__(self, request: BatchRequest, state: Cache):
        self.request, self.state = request, state
        self.key = encode_tokens(request.tokens[:-1])
        self.tokens = request.tokens[:-1]
        self.length = 0  # tokens that are in the state
        self.branch_point = 0

    @property
    def done(self) -> bool:
        return self.length == len(self.tokens)

    def prefix(self, length: int) -> bytes:
        """The first tokens, as the prefix cache compares them."""
        return self.key[: length * TOKEN_BYTES]

    def resume(self, cache: PrefixCache) -> None:
        """Continues from a longer prefix, if the cache has a state of it."""
        found = cache.find(self.key)
        if found.state is not None and found.length > self.length:
            if not self.request.attempts:  # else it finds its own state
                self.request.output.num_cached_tokens += found.length - self.length
            self.state, self.length = found.state, found.length
        self.branch_point = found.shared_length

    def next_border(self, chunk_size: int) -> int:
        """Where the next chunk ends."""
        end = len(self.tokens)
        sizes = [chunk_size, *(size for size in (256, 128, 64, MIN_CHUNK) if size < chunk_size)]
        for size in sizes:
            border = (self.length // size + 1) * size
            if border <= end and (size == chunk_size or border - self.length >= MIN_CHUNK):
                end = border
                break
        return self.branch_point if self.length + MIN_CHUNK // 4 <= self.branch_point < end else end


class BatchScheduler:
    """Computes requests together. Each `step` processes a chunk of waiting prompts and decodes a token for all others.

    A request that fails alone ends with its error. Where a forward pass over several fails, each is retried individually, from
    what it has generated; so only the one to blame fails. `submit` and `cancel` may be called from other threads than `step`.

    Prompts continue from the longest prefix in the `prefix_cache`, which gets states at chunk borders and at the ends of
    prompts and answers. It is asked before each chunk, so prompts that arrive together compute a common prefix once.

    Args:
        model: a `ToSTForCausalLM`; put into evaluation mode.
        max_batch_size: how many requests are computed together.
        max_prefill_tokens: how many tokens of prompts are processed in one step.
        max_waiting: how many more requests are accepted; None for any number.
        return_logprobs: whether outputs have the logarithms of their tokens' probabilities.
        prefix_cache_bytes: size of the prefix cache; 0 for none.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_batch_size: int = MAX_BATCH_SIZE,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        max_waiting: int | None = None,
        return_logprobs: bool = False,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    ):
        self.model = model.eval()
        self.max_batch_size, self.max_prefill_tokens, self.max_waiting = max_batch_size, max_prefill_tokens, max_waiting
        self.return_logprobs = return_logprobs
        self.has_attention = set(model.config.layer_types) != {CAUSAL_STATISTICS}
        self.prefix_cache = PrefixCache(prefix_cache_bytes)
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
        prefilling = [prefill.request for prefill in self.prefills]
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

    def pin_prefix(self, tokens: Sequence[int], cache: Cache) -> None:
        """Stores the state after a text, never to be evicted as long as the model stays the same; before the first step."""
        self.prefix_cache.validate(model_fingerprint(self.model))
        state = concat_states(self.model.config, [cache], len(tokens))
        self.prefix_cache.store(encode_tokens(list(tokens)), state, self.prefix_cache.version, pinned=True)

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
        if self.running and self.cache is not None:
            self._decode(self.running, self.cache)
            with self._lock:
                self._keep([i for i, request in enumerate(self.running) if not request.output.is_finished()])

    # Admission and removal --------------------------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        with self._lock:
            cancelled = dict.fromkeys(request for request in self._requests() if request.cancelled)
            if not cancelled:
                return
            self.waiting = deque(request for request in self.waiting if request not in cancelled)
            self.prefills = deque(prefill for prefill in self.prefills if prefill.request not in cancelled)
            self._keep([i for i, request in enumerate(self.running) if request not in cancelled])
        for request in cancelled:
            request.fail(Cancelled("The request was cancelled."))

    def _admit(self) -> None:
        """Moves waiting requests to the prefills while the batch has space."""
        if not self.waiting:
            return
        if self.prefix_cache.enabled:
            self.prefix_cache.validate(model_fingerprint(self.model))
        with self._lock:
            while self.waiting and len(self.prefills) + len(self.running) < self.max_batch_size:
                request = self.waiting.popleft()
                request.start()
                request.cache_version = self.prefix_cache.version
                self.prefills.append(_Prefill(request, empty_state(self.model)))

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
        """Removes requests whose prompts are processed, or all that are decoded."""
        if requests is self.running:
            self.running, self.cache = [], None
        else:
            self.prefills = deque(prefill for prefill in self.prefills if prefill.request not in requests)

    def _keep(self, indices: list[int]) -> None:
        """Removes all other requests from the batch."""
        if len(indices) == len(self.running):
            return
        cache, self.cache = self.cache, None
        self.running = [self.running[i] for i in indices]
        if self.running and cache is not None:
            self.cache = select_states(self.model.config, cache, indices, self._longest)

    @property
    def _longest(self) -> int:
        """Most tokens of a sequence in the batch that is decoded."""
        return max(request.num_computed_tokens for request in self.running)

    # Prefill ----------------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Processes the next chunks of prompts; those that are complete join the batch."""
        chunks = self._choose_chunks()
        if chunks:
            try:
                self._process_chunks(chunks)
            except Exception as error:  # whatever a model raises
                self._retry_individually([prefill.request for prefill in chunks], error)
                return
        done = [prefill for prefill in self.prefills if self._resume(prefill)]
        with self._lock:
            self._remove([prefill.request for prefill in (*chunks, *done)])
            self.prefills.extend(prefill for prefill in chunks if not prefill.done)  # others come first
        for prefill in done:
            if prefill.request.attempts:  # the last token is the first that may fail again, and is computed alone
                prefill.state = concat_states(self.model.config, [prefill.state], len(prefill.tokens))
                self._decode([prefill.request], prefill.state)
        done = [prefill for prefill in done if not prefill.request.output.is_finished()]
        if done:
            caches = [prefill.state for prefill in done] if self.cache is None else [self.cache, *(x.state for x in done)]
            with self._lock:
                self.running = [*self.running, *(prefill.request for prefill in done)]
            self.cache = concat_states(self.model.config, caches, self._longest)

    def _resume(self, prefill: _Prefill) -> bool:
        """Continues from the prefix cache; returns whether the prompt is complete."""
        if self.prefix_cache.enabled and not prefill.done:
            prefill.resume(self.prefix_cache)
        return prefill.done

    def _choose_chunks(self) -> dict[_Prefill, int]:
        """The prefills to process, and where their chunks end: the first, and others of similar lengths.

        A text that is chosen already is left out: its state is found in the cache then. So are, after a failure, all but one.
        """
        chosen: dict[_Prefill, int] = {}
        texts: set[bytes] = set()
        for prefill in self.prefills:
            if self._resume(prefill):
                continue
            end = prefill.next_border(self.max_prefill_tokens)
            sizes = [end - prefill.length, *(border - other.length for other, border in chosen.items())]
            if self.prefix_cache.enabled and prefill.prefix(end) in texts:
                continue
            # padding between keys and a chunk would count in the windows of sliding attention
            if max(sizes) > (min(sizes) if self.has_attention else 2 * min(sizes)):
                continue
            if chosen and (len(sizes) * max(sizes) > self.max_prefill_tokens or prefill.request.attempts):
                continue
            chosen[prefill] = end
            texts.add(prefill.prefix(end))
            if prefill.request.attempts:
                break
        return chosen

    def _process_chunks(self, chunks: dict[_Prefill, int]) -> None:
        config, device = self.model.config, self.model.device
        starts = torch.tensor([[prefill.length] for prefill in chunks], device=device)
        sizes = torch.tensor([[end - prefill.length] for prefill, end in chunks.items()], device=device)
        longest, size = int(starts.max()), int(sizes.max())
        tokens = [prefill.tokens[prefill.length : end] for prefill, end in chunks.items()]
        index = torch.arange(size, device=device) - (size - sizes)  # in the chunk; negative at padding
        mask = None
        if len(chunks) > 1:
            mask = (index >= 0).long()
            if self.has_attention:
                cached = torch.arange(longest, device=device) >= longest - starts
                mask = torch.cat([cached.long(), mask], 1)
        cache = concat_states(config, [prefill.state for prefill in chunks], longest)
        self.model(
            input_ids=torch.tensor([[0] * (size - len(x)) + x for x in tokens], device=device),
            attention_mask=mask,
            position_ids=(starts + index).clamp_min(0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=index.new_empty(0),  # the state is all that is needed
        )
        for i, (prefill, end) in enumerate(chunks.items()):
            prefill.state = cache if len(chunks) == 1 else select_states(config, cache, [i], end)
            prefill.length = end
            if self._is_stored(prefill):
                self._store(prefill.request, prefill.prefix(end), prefill.state)

    def _is_stored(self, prefill: _Prefill) -> bool:
        """Whether the prefix cache gets this state: of a long prompt not every one, with keys only the last ones."""
        remaining = len(prefill.tokens) - prefill.length
        if remaining < self.max_prefill_tokens or prefill.length == prefill.branch_point:
            return True
        stride = self.max_prefill_tokens * -(-len(prefill.tokens) // (self.max_prefill_tokens * MAX_BORDER_STATES))
        return FULL_ATTENTION not in self.model.config.layer_types and prefill.length % stride == 0

    def _store(self, request: BatchRequest, key: bytes, state: Cache) -> None:
        if self.prefix_cache.max_bytes:
            self.prefix_cache.store(key, state, request.cache_version)

    # Decoding ---------------------------------------------------------------------------------------------------------

    def _decode(self, requests: list[BatchRequest], cache: Cache) -> None:
        """Gives each request its next token, from its last one and the states in the cache."""
        device = self.model.device
        tokens = torch.tensor([request.tokens[-1:] for request in requests], device=device)
        lengths = [request.num_computed_tokens for request in requests]
        positions, longest = torch.tensor(lengths, device=device).unsqueeze(1), max(lengths)
        mask = None
        if self.has_attention:
            mask = (torch.arange(longest + 1, device=device) >= longest - positions).long()
        elif min(lengths) == 0 < longest:  # says that the cache of some has no token yet
            mask = torch.ones_like(tokens)
        try:
            logits = self.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
        except Exception as error:  # whatever a model raises
            self._retry_individually(requests, error)
            return
        sample_tokens(requests, logits, self.return_logprobs)
        for i, request in enumerate(requests):
            if request.output.status == RequestStatus.FINISHED and self.prefix_cache.max_bytes:
                length = request.num_computed_tokens
                state = select_states(self.model.config, cache, [i], length)
                self._store(request, encode_tokens(request.tokens[:length]), state)


__all__ = ["MAX_BATCH_SIZE", "MAX_PREFILL_TOKENS", "PREFIX_CACHE_BYTES", "BatchScheduler", "TooManyRequests"]
