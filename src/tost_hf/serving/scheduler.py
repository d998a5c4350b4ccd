# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The scheduler of continuous batching: requests join a running batch and leave it between two tokens."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.utils import logging

from ..model.configuration_tost import CAUSAL_STATISTICS, FULL_ATTENTION
from .batch_states import concat_states, empty_state, select_states, state_tensors
from .prefix_cache import PrefixCache, encode_tokens, model_fingerprint
from .requests import BatchRequest, Cancelled
from .sampling import sample_tokens


logger = logging.get_logger(__name__)
MAX_BATCH_SIZE = 256  # requests computed together
MAX_PREFILL_TOKENS = 512  # of prompts, between two tokens of the others
PREFIX_CACHE_BYTES = 2**28
MAX_BORDER_STATES = 32  # stored of one prompt, before its last chunk
LARGE_STATES = 8
MIN_CHUNK = 32


class TooManyRequests(RuntimeError):
    """The queue is full."""


class _Prefill:
    """Chunked prefill of one request, up to the token before its last one, which is its first input as it is decoded.

    Chunks end at multiples of the chunk size counted from the text's first token, the last ones at those of 256, 128, 64
    and 32: texts with a common prefix have common borders. A state is never changed, only replaced.
    """

    def __init__(self, request: BatchRequest, state: Cache):
        self.request, self.state = request, state
        self.tokens = encode_tokens(request.tokens[:-1])
        self.length = 0  # tokens that are in the state
        self.branch_point = 0

    @property
    def done(self) -> bool:
        return self.length == len(self.tokens)

    def resume(self, cache: PrefixCache) -> None:
        """Continues from a longer prefix, if the cache has a state of it."""
        found = cache.find(self.tokens)
        if found.state is not None and found.length > self.length:
            if not self.request.retried:  # else it finds its own state
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
    """Continues many sequences at once, each by its own options, as if it were alone.

    Each `step` processes some tokens of prompts and then decodes one token for each request whose prompt is complete. A
    request that fails gets an error and the others continue: where a forward pass fails, its requests are retried
    individually, from what they have generated, so that only the cause fails. `submit` and `cancel` may be called from other
    threads than `step`.

    Prompts continue from the longest prefix in the `prefix_cache`, which gets states at chunk borders and at the ends of
    prompts and answers. It is asked before each chunk, so prompts that arrive together compute a common prefix once.

    Args:
        model: a `ToSTForCausalLM`; put into evaluation mode.
        config: see generation.py.
        prefix_cache_bytes: size of the prefix cache; 0 for none.

    Raises:
        ValueError: with this `config` no request would ever be computed.
    """

    def __init__(
        self,
        model: Any,
        config: ContinuousBatchingConfig | None = None,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    ):
        config = ContinuousBatchingConfig() if config is None else config
        check_batching_config(config)
        self.model = model.eval()
        self.max_batch_size = config.max_requests_per_batch or MAX_BATCH_SIZE
        self.max_prefill_tokens = config.max_batch_tokens or MAX_PREFILL_TOKENS
        self.max_waiting = config.max_queue_size or None
        self.return_logprobs = config.return_logprobs
        self.has_attention = set(model.config.layer_types) != {CAUSAL_STATISTICS}
        self.prefix_cache = PrefixCache(prefix_cache_bytes if config.allow_block_sharing else 0)
        self.requests: dict[BatchRequest, None] = {}  # that are not done, in the order they came
        self.prefills: list[_Prefill] = []
        self.running: list[BatchRequest] = []  # in the order of the batch in `cache`
        self.cache: Cache | None = None
        self._lock = threading.Lock()  # of `requests`; only `step` uses the rest

    @property
    def busy(self) -> bool:
        """Whether there is something to compute."""
        return bool(self.requests)

    @property
    def waiting(self) -> list[BatchRequest]:
        """The requests that are not being computed."""
        with self._lock:
            return [request for request in self.requests if request.output.status == RequestStatus.PENDING]

    def submit(self, request: BatchRequest) -> None:
        """Adds a request to the queue.

        Raises:
            TooManyRequests: the queue is full.
        """
        with self._lock:
            if self.max_waiting is not None and len(self.requests) >= self.max_batch_size + self.max_waiting:
                raise TooManyRequests(f"{self.max_waiting} requests wait already; try again later.")
            self.requests[request] = None

    def pin_prefix(self, tokens: Sequence[int], cache: Cache) -> None:
        """Stores the state after a text, never to be evicted as long as the model stays the same; before the first step."""
        self.prefix_cache.validate(model_fingerprint(self.model))
        state = concat_states(self.model.config, [cache], len(tokens))
        self.prefix_cache.store(encode_tokens(tokens), state, self.prefix_cache.version, pinned=True)

    def cancel(self, request_id: str | None = None) -> None:
        """Cancels a request, or all, at the next step; nothing happens where it is done."""
        with self._lock:
            for request in self.requests:
                if request_id in (None, request.output.request_id):
                    request.cancel()

    def fail_all(self, error: BaseException) -> None:
        """Ends every request with this error."""
        with self._lock:
            ended, self.requests = self.requests, {}
        self.prefills, self.running, self.cache = [], [], None
        for request in ended:
            request.fail(error)

    @torch.no_grad()
    def step(self) -> None:
        """Processes a chunk of prompts, then decodes a token for every request whose prompt is complete."""
        self._fail_cancelled()
        self._admit()
        if self.prefills:
            self._prefill()
        if self.running and self.cache is not None:
            self._decode(self.running, self.cache)
            self._remove_done()

    # Admission and removal --------------------------------------------------------------------------------------------

    def _fail_cancelled(self) -> None:
        with self._lock:
            cancelled = [request for request in self.requests if request.cancelled]
        for request in cancelled:
            request.fail(Cancelled("The request was cancelled."))
        self._remove(cancelled)

    def _remove_done(self) -> None:
        computed = [*(prefill.request for prefill in self.prefills), *self.running]
        self._remove([request for request in computed if request.output.is_finished()])

    def _remove(self, requests: list[BatchRequest]) -> None:
        if not requests:
            return
        with self._lock:
            for request in requests:
                del self.requests[request]
        self.prefills = [prefill for prefill in self.prefills if prefill.request in self.requests]
        kept = [i for i, request in enumerate(self.running) if request in self.requests]
        if len(kept) < len(self.running):
            self.running = [self.running[i] for i in kept]
            cache, self.cache = self.cache, None
            if self.running and cache is not None:
                self.cache = select_states(self.model.config, cache, kept, self._longest)

    def _admit(self) -> None:
        """Moves waiting requests to the prefills while the batch has space."""
        free = self.max_batch_size - len(self.prefills) - len(self.running)
        admitted = self.waiting[:free] if free else []
        if admitted and self.prefix_cache.enabled:
            self.prefix_cache.validate(model_fingerprint(self.model))
        for request in admitted:
            request.start()
            request.cache_version = self.prefix_cache.version
            self.prefills.append(_Prefill(request, empty_state(self.model)))

    def _fail(self, request: BatchRequest, error: Exception) -> None:
        logger.error("A generation failed.", exc_info=error)
        request.fail(error)

    @property
    def _longest(self) -> int:
        """Most tokens of a sequence in the batch that is decoded."""
        return max(request.num_computed_tokens for request in self.running)

    # Prefill ----------------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Processes the next chunks of prompts; those that are complete join the batch."""
        chunks = self._choose_chunks()
        passes = [chunks] if chunks else []
        while passes:
            processed = passes.pop()
            try:
                self._process_chunks(processed)
            except Exception as error:  # whatever a model raises
                if len(processed) == 1:
                    self._fail(next(iter(processed)).request, error)
                else:
                    passes += [{prefill: end} for prefill, end in processed.items()]
        self._remove_done()
        for prefill in self.prefills:
            if self._resume(prefill) and prefill.request.retried:  # computed alone, since the pass with others failed
                prefill.state = concat_states(self.model.config, [prefill.state], len(prefill.tokens))
                self._decode([prefill.request], prefill.state)
        self._remove_done()
        done = [prefill for prefill in self.prefills if prefill.done]
        unfinished = [prefill for prefill in self.prefills if not prefill.done]
        self.prefills = sorted(unfinished, key=lambda prefill: prefill in chunks)  # others come first
        if done:
            caches = [prefill.state for prefill in done] if self.cache is None else [self.cache, *(x.state for x in done)]
            self.running += [prefill.request for prefill in done]
            self.cache = concat_states(self.model.config, caches, self._longest)

    def _resume(self, prefill: _Prefill) -> bool:
        """Continues from the prefix cache; returns whether the prompt is complete."""
        if self.prefix_cache.enabled and not prefill.done:
            prefill.resume(self.prefix_cache)
        return prefill.done

    def _choose_chunks(self) -> dict[_Prefill, int]:
        """The prefills to process, and where their chunks end: the first, and others of similar lengths.

        A text that is chosen already is left out: its state is found in the cache then.
        """
        chosen: dict[_Prefill, int] = {}
        texts: set[bytes] = set()
        for prefill in self.prefills:
            if self._resume(prefill):
                continue
            end = prefill.next_border(self.max_prefill_tokens)
            text = prefill.tokens[:end].tobytes()
            sizes = [end - prefill.length, *(border - other.length for other, border in chosen.items())]
            if self.prefix_cache.enabled and text in texts:
                continue
            # padding between keys and a chunk would count in the windows of sliding attention
            if max(sizes) > (min(sizes) if self.has_attention else 2 * min(sizes)):
                continue
            if chosen and len(sizes) * max(sizes) > self.max_prefill_tokens:
                continue
            chosen[prefill] = end
            texts.add(text)
        return chosen

    def _process_chunks(self, chunks: dict[_Prefill, int]) -> None:
        config, device = self.model.config, self.model.device
        starts = torch.tensor([[prefill.length] for prefill in chunks], device=device)
        sizes = torch.tensor([[end - prefill.length] for prefill, end in chunks.items()], device=device)
        longest, size = int(starts.max()), int(sizes.max())
        tokens = [prefill.tokens[prefill.length : end].tolist() for prefill, end in chunks.items()]
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
                self._store(prefill.request, prefill.tokens[:end], prefill.state)

    def _is_stored(self, prefill: _Prefill) -> bool:
        """Whether the prefix cache gets this state: of a long prompt not every one, with many keys only the last border's."""
        remaining = len(prefill.tokens) - prefill.length
        if prefill.length == prefill.branch_point:
            return True
        if self._is_large(prefill.state):
            return not prefill.done and prefill.next_border(self.max_prefill_tokens) == len(prefill.tokens)
        if remaining < self.max_prefill_tokens:
            return True
        stride = self.max_prefill_tokens * -(-len(prefill.tokens) // (self.max_prefill_tokens * MAX_BORDER_STATES))
        return FULL_ATTENTION not in self.model.config.layer_types and prefill.length % stride == 0

    def _is_large(self, state: Cache) -> bool:
        """Whether the prefix cache has space for few such states."""
        return sum(x.nbytes for x in state_tensors(state)) * LARGE_STATES > self.prefix_cache.max_bytes

    def _store(self, request: BatchRequest, tokens: np.ndarray, state: Cache) -> None:
        if self.prefix_cache.max_bytes:
            self.prefix_cache.store(tokens, state, request.cache_version)

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
            if len(requests) == 1:
                self._fail(requests[0], error)
            else:  # each is read again, since their states are lost
                for request in requests:
                    request.retry()
                self.running, self.cache = [], None
            return
        sample_tokens(requests, logits, self.return_logprobs)
        for i, request in enumerate(requests):
            if request.output.status == RequestStatus.FINISHED and self.prefix_cache.max_bytes:
                length = request.num_computed_tokens
                state = select_states(self.model.config, cache, [i], length)
                if not self._is_large(state):
                    self._store(request, encode_tokens(request.tokens[:length]), state)


def check_batching_config(config: ContinuousBatchingConfig) -> None:
    """Raises ValueError where no request would ever be computed."""
    for name in ("max_requests_per_batch", "max_batch_tokens"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, or None for the default; got {value}.")
    if config.max_queue_size < 0:
        raise ValueError(f"max_queue_size must be at least 1, or 0 for any number; got {config.max_queue_size}.")


__all__ = ["PREFIX_CACHE_BYTES", "BatchScheduler", "TooManyRequests", "check_batching_config"]
