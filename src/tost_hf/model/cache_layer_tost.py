# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The cache layer of causal TSSA: three running sums, of constant size, inside transformers' Cache framework.

`generate()` builds these layers by itself, from `config.layer_types`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, CacheLayerMixin

from .configuration_tost import CAUSAL_STATISTICS
from .convolution_tost import find_taps, join_rows, last_rows
from .tssa_reference import TSSAState, as_state


Tensors = TypeVar("Tensors", bound=tuple)

RECORDED_TAIL = 64  # tokens that stay removable after a crop
STATE_NAMES = TSSAState._fields
SAVED_NAMES = (*STATE_NAMES, "recent_inputs")  # of a layer, in memory and in files; the last only with a convolution


class RecordedTokens(NamedTuple):
    """What a layer keeps of tokens that may be taken back."""

    w: torch.Tensor  # projected, (B, t, H, p)
    membership: torch.Tensor  # (B, t, H), 0 at padding
    log_decay: torch.Tensor | None  # (B, t, H), where the layer forgets
    inputs: torch.Tensor | None  # of the layer, (B, t, D), where it has a convolution


class LayerPast(NamedTuple):
    """What a layer knows of the tokens up to one of them."""

    state: TSSAState
    recent_inputs: torch.Tensor | None


class CausalStatisticsLayer(CacheLayerMixin):
    """Running statistics of one causal TSSA layer.

    `sum_sq` and `sum_weighted_sq` are (B, H, p), `sum_membership` is (B, H); None until the first update. They have the dtypes
    of a `TSSAState`: the last two are float64, so that a million small terms, added one by one, are not lost. In a layer with
    a convolution `recent_inputs` (B, conv_kernel - 1, D) holds the layer's last inputs, oldest first; else it is None.

    With `max_cache_len` (as `StaticCache` passes it) or `static=True` the tensors keep their addresses, the number of tokens
    seen included, so that a compiled decode step is neither recompiled nor skipped by CUDA graphs; the
    cached sums then carry no gradient. The number itself limits nothing: the state is of one size at any length.

    While recording is on (`activate_past_recording`), the tokens since the last `crop`, and up to 64 before it, can be
    taken back exactly: the sums are put together again from those before the recorded tokens, nothing is subtracted.
    """

    _layer_type = CAUSAL_STATISTICS
    is_croppable = True
    supports_early_init = False  # the key/value shapes of that path mean nothing here

    def __init__(self, max_cache_len: int | None = None, static: bool = False, **kwargs):
        super().__init__()
        self.static = static or max_cache_len is not None
        self.max_cache_len = max_cache_len
        self.is_compileable = self.static
        self.sum_sq: torch.Tensor | None = None
        self.sum_weighted_sq: torch.Tensor | None = None
        self.sum_membership: torch.Tensor | None = None
        self.recent_inputs: torch.Tensor | None = None
        # a tensor, not a number: a number is part of an exported program, which would then be one for caches of that length
        self.cumulative_length: Any = torch.zeros((), dtype=torch.long, device="cpu")
        self.device: torch.device | None = None
        self.record_past = False
        self._base: LayerPast | None = None  # before the first recorded token
        self._recorded: list[RecordedTokens] = []

    @property
    def state(self) -> TSSAState | None:
        """The three running sums, or None before the first token."""
        if not self.is_initialized:
            return None
        self.prefetch()
        state = self._stored_state()
        if self.static and torch.is_grad_enabled():  # a backward pass must not find it overwritten
            state = TSSAState(*(x.clone() for x in state))
        return state

    @property
    def may_be_overwritten(self) -> bool:
        """Whether a step may add to the tensors of `state` themselves: nobody else looks at them, now or in a backward."""
        if not self.is_initialized or self.record_past or torch.is_grad_enabled():
            return False
        state = self._stored_state()
        if any(x is not y for x, y in zip(as_state(state, state.sum_sq), state)):  # cast by others, such as an exporter
            return False
        return self.static if torch.compiler.is_compiling() else all(map(_is_its_own, state))

    @property
    def past_inputs(self) -> torch.Tensor | None:
        """`recent_inputs`, on the device they were computed on."""
        self.prefetch()
        return self.recent_inputs

    @property
    def batch_size(self) -> int:
        """Number of sequences; AttributeError before the first token, as in transformers' own lazy layers."""
        if self.sum_sq is None:
            raise AttributeError("The layer has seen no token yet, so its batch size is unknown.")
        return self.sum_sq.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that the layer's sums and recent inputs take in memory; those of recorded tokens come on top."""
        return sum(x.nbytes for x in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the layer holds, by name; none before the first token."""
        held = {name: getattr(self, name) for name in SAVED_NAMES}
        return {name: x for name, x in held.items() if x is not None}

    # float64 sums take the bytes of float32 sums with float32 remainders, and need no adding and splitting at every step
    def _stored_state(self) -> TSSAState:
        assert self.sum_sq is not None and self.sum_weighted_sq is not None and self.sum_membership is not None
        return TSSAState(self.sum_sq, self.sum_weighted_sq, self.sum_membership)

    def set_state(self, state: TSSAState) -> None:
        """Takes over new sums: in place where addresses are static, and for the same batch size."""
        for name, new in zip(STATE_NAMES, as_state(state, state.sum_sq)):
            self._store(name, new)

    def set_recent_inputs(self, recent_inputs: torch.Tensor | None) -> None:
        """Takes over new last inputs, as `set_state` does with sums."""
        if recent_inputs is not None:
            self._store("recent_inputs", recent_inputs)

    def _store(self, name: str, new: torch.Tensor) -> None:
        old = getattr(self, name)
        if new is old:  # updated in place
            return
        if self.static and old is not None and old.shape == new.shape:
            old.copy_(new.detach())
        else:
            setattr(self, name, new.detach().clone() if self.static else new)
            self._mark_static(getattr(self, name))

    def _mark_static(self, tensor: torch.Tensor) -> None:
        if self.static and not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(tensor)

    def lazy_initialization(self, state: TSSAState) -> None:  # type: ignore[override]  # declared for keys and values alone
        """Makes room for sums of the given state's shapes, dtype and device."""
        self.device = state.sum_sq.device
        if self.static or torch.compiler.is_compiling():  # else on the CPU, where reading it waits for no device
            self.cumulative_length = self.cumulative_length.to(self.device)
            self._mark_static(self.cumulative_length)
        self.set_state(TSSAState(*(torch.zeros_like(x) for x in state)))
        self.is_initialized = True

    def update_state(
        self,
        state: TSSAState,
        w: torch.Tensor,
        membership: torch.Tensor,
        *,
        log_decay: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
        recent_inputs: torch.Tensor | None = None,
    ) -> None:
        """Stores what is known after new tokens.

        Args:
            state: the sums after these tokens.
            w: the projected tokens, (B, T, H, p).
            membership: their membership, (B, H, T), 0 at padding.
            log_decay: logarithm of their forget factors, (B, T, H), where the layer forgets.
            inputs: of the layer, (B, T, D), where it has a convolution.
            recent_inputs: the last of them, (B, conv_kernel - 1, D).
        """
        if not self.is_initialized:
            self.lazy_initialization(state)
        if self.record_past:
            if recent_inputs is None:
                inputs = None
            elif self.recent_inputs is None:
                self.set_recent_inputs(torch.zeros_like(recent_inputs))
            if not self._recorded:
                self._base = _map_tensors(torch.clone, LayerPast(self._stored_state(), self.recent_inputs))
            self._recorded.append(RecordedTokens(w, membership.transpose(1, 2), log_decay, inputs))
        self.set_state(state)
        self.set_recent_inputs(recent_inputs)
        if self.static:
            self.cumulative_length.add_(w.shape[1])
        else:
            self.cumulative_length = self.cumulative_length + w.shape[1]

    def update(self, key_states, value_states, *args, **kwargs):
        raise NotImplementedError(
            f"{type(self).__name__} keeps statistics, not keys and values: use it with a ToST model, which calls update_state."
        )

    def get_seq_length(self) -> Any:
        """Tokens seen, padding included: a number; a 0-dimensional tensor where static or compiled."""
        if not self.is_initialized:
            return 0
        return self.cumulative_length if self.static or torch.compiler.is_compiling() else int(self.cumulative_length)

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    # Rollback ---------------------------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """From here on keeps what `crop` needs. Memory grows with the tokens between two calls of `crop`."""
        if not self.record_past:
            self._forget()
        self.record_past = True

    def _forget(self) -> None:
        self._base, self._recorded = None, []

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens, padding counted (0 removes none, and frees old records).

        Raises:
            ValueError: the number is positive, or more tokens than were recorded.
            RuntimeError: recording is not on.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}.")
        if not self.record_past:
            raise RuntimeError("Call activate_past_recording() on the cache before the tokens that crop is to take back.")
        recorded = sum(tokens.w.shape[1] for tokens in self._recorded)
        keep = recorded + tokens_to_remove
        if keep < 0:
            raise ValueError(f"Cannot take back {-tokens_to_remove} tokens: only the last {recorded} are recorded.")
        if not recorded:
            return
        tokens = RecordedTokens._make(None if x[0] is None else torch.cat(x, 1) for x in zip(*self._recorded))
        assert self._base is not None  # kept with the first record
        forgotten = max(keep - RECORDED_TAIL, 0)
        self._base = _add_tokens(self._base, _map_tensors(lambda x: x[:, :forgotten], tokens))
        tokens = _map_tensors(lambda x: x[:, forgotten:keep], tokens)
        self._recorded = [tokens] if keep else []
        if tokens_to_remove:
            past = _add_tokens(self._base, tokens)
            self.set_state(past.state)
            self.set_recent_inputs(past.recent_inputs)
            self.cumulative_length += tokens_to_remove

    # Batch ------------------------------------------------------------------------------------------------------------

    def _map_batch(self, fn) -> None:
        """Applies `fn` to every tensor with a batch dimension."""
        if not self.is_initialized:
            return
        past = _map_tensors(fn, LayerPast(self._stored_state(), self.recent_inputs))
        self.set_state(past.state)
        self.set_recent_inputs(past.recent_inputs)
        if self._base is not None:
            self._base = _map_tensors(fn, self._base)
        self._recorded = [_map_tensors(fn, tokens) for tokens in self._recorded]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map_batch(lambda x: x[indices.to(x.device)])

    def reset(self) -> None:
        """Back to the start of a sequence; tensors stay where they are."""
        for x in self.tensors().values():
            x.detach().zero_()
        self._forget()
        self.cumulative_length.zero_()

    # Devices ----------------------------------------------------------------------------------------------------------

    def _move(self, device: torch.device) -> None:
        if self.sum_sq is not None and self.sum_sq.device != device:
            for name, x in self.tensors().items():
                setattr(self, name, x.to(device, non_blocking=True))

    def offload(self) -> None:
        """Moves the sums to the CPU; the next use brings them back."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Moves the sums back to the device they were computed on."""
        if self.device is not None:
            self._move(self.device)


# CacheLayerMixin enters subclasses in the dynamic table only
STATIC_LAYER_TYPE_MAPPING[CAUSAL_STATISTICS] = CausalStatisticsLayer


def _map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], values: Tensors) -> Tensors:
    """A NamedTuple of tensors, None and more such tuples, with `fn` applied to every tensor."""
    kind: Any = type(values)
    return kind(*(x if x is None else _map_tensors(fn, x) if isinstance(x, tuple) else fn(x) for x in values))


def _is_its_own(x: torch.Tensor) -> bool:
    """Whether adding to a tensor in place is allowed, and changes no other tensor."""
    if x.requires_grad or (x.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    return x.is_contiguous() and x.nbytes == x.untyped_storage().nbytes()


def _add_tokens(past: LayerPast, tokens: RecordedTokens) -> LayerPast:
    """What is known after more tokens."""
    state, membership, recent = past.state, tokens.membership, past.recent_inputs
    # padding is recognised by its membership, which is 0 in every head, and only there
    real = membership.sum(-1) != 0
    x = tokens.w.to(state.sum_sq.dtype).masked_fill(~real[..., None, None], 0)
    terms = TSSAState(sq := x * x, sq * membership.unsqueeze(-1), membership)
    if tokens.log_decay is not None:
        log_decay = tokens.log_decay.masked_fill(~real.unsqueeze(-1), 0)
        up_to = log_decay.flip(1).cumsum(1).flip(1)  # of each token and all later ones
        later = (up_to - log_decay).exp()  # what later tokens leave of each one
        terms = TSSAState(*(term * later.view(*later.shape, *[1] * (term.ndim - 3)) for term in terms))
        total = up_to[:, :1].sum(1).exp()  # 1 where there are no tokens
        state = TSSAState(*(old * total.view(*total.shape, *[1] * (old.ndim - 2)) for old in state))
    sums = TSSAState(*(old + term.sum(1) for old, term in zip(state, terms)))
    if recent is not None:
        assert tokens.inputs is not None  # recorded with recent inputs
        kernel = recent.shape[1] + 1
        recent = last_rows(join_rows(recent, tokens.inputs, kernel), find_taps(kernel, real, None), kernel)
    return LayerPast(sums, recent)
