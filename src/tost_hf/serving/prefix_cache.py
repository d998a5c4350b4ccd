# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Automatic prefix caching: states of texts that were read, found by the longest equal prefix of token ids.

The states are in a radix tree of token ids, as in SGLang's RadixAttention: prefixes are compared token by token, never by a
hash. A recurrent state cannot be cut to a shorter prefix, so there are states where the scheduler stores them: at chunk
borders and at the ends of prompts and answers. The tree also tells where a text leaves the stored ones, its branch point, and
the scheduler adds a state there.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache

from .batch_states import state_tensors


NODE_BYTES = 1024  # of a node and its state, beside token ids and tensors; estimated
FINGERPRINT_VALUES = 64  # of each parameter
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class PrefixMatch(NamedTuple):
    length: int  # tokens of the longest prefix that has a state
    state: Cache | None  # must not be changed
    shared_length: int  # tokens of the longest prefix that a stored text begins with


class _Node:
    """A node of the tree: its `edge` is the token ids from its parent's end to its own, `depth` all before its end."""

    __slots__ = ("children", "depth", "edge", "parent", "pinned", "state", "state_bytes")

    def __init__(self, parent: "_Node | None", edge: np.ndarray):
        self.parent, self.edge = parent, edge.copy()  # of a text that need not stay in memory
        self.depth: int = len(edge) + (0 if parent is None else parent.depth)
        self.children: dict[int, _Node] = {}  # by the first token of their edges
        self.state: Cache | None = None
        self.state_bytes, self.pinned = 0, False
        if parent is not None:
            parent.children[int(edge[0])] = self

    @property
    def nbytes(self) -> int:
        return NODE_BYTES + self.edge.nbytes + self.state_bytes


class PrefixCache:
    """The states of one model, at most `max_bytes` of them and their token ids; the least recently used are evicted.

    States are those of a batch of one sequence. The caller must not change a state that it stores or finds.
    """

    def __init__(self, max_bytes: int):
        if max_bytes < 0:
            raise ValueError(f"The prefix cache must have at least 0 bytes, which is off; got {max_bytes}.")
        self.max_bytes = max_bytes
        self.version = 0  # changes with the model: states that were computed under another one are not stored
        self.clear()

    def __len__(self) -> int:
        """Number of states."""
        return len(self._evictable) + self._num_pinned

    @property
    def enabled(self) -> bool:
        """Whether a state may be found."""
        return bool(self.max_bytes or self._num_pinned)

    def clear(self) -> None:
        """Drops all states."""
        self._root = _Node(None, encode_tokens([]))
        self._evictable: OrderedDict[_Node, None] = OrderedDict()  # nodes with states, least recently used first
        self._num_pinned = 0
        self._fingerprint: Hashable = None
        self.nbytes = 0  # of the tree; pinned states do not count
        self.version += 1

    def validate(self, fingerprint: Hashable) -> None:
        """Drops all states if they are another model's than that of this `model_fingerprint`."""
        if fingerprint != self._fingerprint:
            if self._fingerprint is not None:
                self.clear()
            self._fingerprint = fingerprint

    def find(self, tokens: np.ndarray) -> PrefixMatch:
        """The longest prefix of a text (`encode_tokens`) that has a state."""
        _, best, shared = self._descend(tokens)
        if best.state is not None and not best.pinned:
            self._evictable.move_to_end(best)
        return PrefixMatch(best.depth, best.state, shared)

    def store(self, tokens: np.ndarray, state: Cache, version: int, pinned: bool = False) -> None:
        """Stores the state after a text.

        Not stored: what is not finite, was computed before the model changed, or is larger than the whole cache.

        Args:
            tokens: the text, by `encode_tokens`.
            version: `PrefixCache.version` when the text's computation began.
            pinned: never evict this state.
        """
        tensors = state_tensors(state)
        nbytes = sum(x.nbytes for x in tensors)
        if version != self.version or (not pinned and nbytes + tokens.nbytes + 2 * NODE_BYTES > self.max_bytes):
            return
        if not all(bool(x.isfinite().all()) for x in tensors):
            return
        node = self._insert(tokens)
        if pinned and not node.pinned:
            self._evictable.pop(node, None)
            self.nbytes -= node.state_bytes
            node.state, node.state_bytes, node.pinned = state, 0, True
            self._num_pinned += 1
        elif node.state is None:
            node.state, node.state_bytes = state, nbytes
            self.nbytes += nbytes
        if not node.pinned:
            self._evictable[node] = None
            self._evictable.move_to_end(node)
        while self.nbytes > self.max_bytes and self._evictable:
            self._evict(self._evictable.popitem(last=False)[0])

    # The tree ---------------------------------------------------------------------------------------------------------

    def _descend(self, tokens: np.ndarray) -> tuple[_Node, _Node, int]:
        """The deepest node on the path of a text, the deepest with a state (or the root), and the tokens on that path."""
        node = best = self._root
        while node.depth < len(tokens) and (child := node.children.get(int(tokens[node.depth]))) is not None:
            rest = tokens[node.depth :][: len(child.edge)]
            differing = np.flatnonzero(child.edge[: len(rest)] != rest)
            common = int(differing[0]) if len(differing) else len(rest)
            if common < len(child.edge):
                return node, best, node.depth + common
            node = child
            best = best if node.state is None else node
        return node, best, node.depth

    def _insert(self, tokens: np.ndarray) -> _Node:
        """The node at the end of a text; added if there is none."""
        node, _, shared = self._descend(tokens)
        if shared > node.depth:  # the text leaves an edge in its middle, or ends there
            node = self._split(node.children[int(tokens[node.depth])], shared - node.depth)
        return node if shared == len(tokens) else self._add(node, tokens[shared:])

    def _add(self, parent: _Node, edge: np.ndarray) -> _Node:
        node = _Node(parent, edge)
        self.nbytes += node.nbytes
        return node

    def _split(self, node: _Node, length: int) -> _Node:
        """A new node `length` tokens into this node's edge."""
        upper = _Node(node.parent, node.edge[:length])
        node.parent, node.edge = upper, node.edge[length:].copy()
        upper.children[int(node.edge[0])] = node
        self.nbytes += NODE_BYTES
        return upper

    def _evict(self, node: _Node) -> None:
        """Drops a node's state, and the nodes that no other state needs."""
        self.nbytes -= node.state_bytes
        node.state, node.state_bytes = None, 0
        while node.parent is not None and node.state is None and not node.children:
            self.nbytes -= node.nbytes
            del node.parent.children[int(node.edge[0])]
            node = node.parent
        if node.parent is not None and node.state is None and len(node.children) == 1:  # join it with its only child
            (child,) = node.children.values()
            child.parent, child.edge = node.parent, np.concatenate([node.edge, child.edge])
            node.parent.children[int(child.edge[0])] = child
            self.nbytes -= NODE_BYTES


def encode_tokens(tokens: Sequence[int]) -> np.ndarray:
    """Token ids as the prefix cache compares them."""
    return np.array(tokens, dtype=np.int32)


@torch.no_grad()
def model_fingerprint(model: Any) -> Hashable:
    """Equal as long as the model computes the same states.

    It has each parameter's address, dtype, version (which counts changes in place) and 64 of its values (`.data` is changed
    without a new version), and the adapters in use.
    """
    identity: list[Hashable] = []
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        version = None if x.is_inference() else x._version
        if type(x) not in PLAIN_TENSORS or x.is_meta:  # quantised, sharded or offloaded
            identity.append((name, id(x), version, x.dtype, tuple(x.shape)))
            continue
        identity.append((name, x.data_ptr(), version, x.dtype, tuple(x.shape)))
        values = x.detach().reshape(-1)[:: max(x.numel() // FINGERPRINT_VALUES, 1)]
        samples.setdefault(x.device, []).append(values.float())
    for name, module in model.named_modules():
        if (adapters := getattr(module, "active_adapters", None)) is not None and not callable(adapters):
            scaling = getattr(module, "scaling", {})
            state = (getattr(module, "disable_adapters", None), getattr(module, "merged", None))
            identity.append((name, tuple(adapters), state, tuple(scaling.items()) if isinstance(scaling, dict) else ()))
    return tuple(identity), tuple(torch.cat(values).cpu().numpy().tobytes() for values in samples.values())


__all__ = ["PrefixCache", "PrefixMatch", "encode_tokens", "model_fingerprint"]
