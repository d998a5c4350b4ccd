"""Bad input to language models: errors with a message that says what was wrong."""

import pytest
import torch
from conftest import small_config
from transformers import DynamicCache

from tost_hf import ToSTModel


def ids(*shape):
    return torch.randint(2, 97, shape)


def other_cache(**changes):
    config = small_config(**({"num_hidden_layers": 3} | changes))
    return ToSTModel(config)(ids(1, 3)).past_key_values


def foreign_cache():
    cache = DynamicCache()
    cache.update(torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8), 0)
    return cache


def given(batch: int, length: int, **fields):
    """Inputs of that many tokens, with other fields as tensors."""
    fields = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in fields.items()}
    return {"input_ids": ids(batch, length)} | fields


def continued(length: int, **fields):
    """Tokens after three that a cache holds."""
    return given(1, length, past_key_values=other_cache(), **fields)


STARTS = torch.tensor([[0, 0, 1, 1]])


@pytest.mark.parametrize(
    "inputs, error, message",
    [
        (lambda: {}, ValueError, "exactly one"),
        (lambda: given(1, 3, inputs_embeds=torch.zeros(1, 3, 32)), ValueError, "exactly one"),
        (lambda: {"input_ids": torch.tensor([[3, 97]])}, IndexError, "between 0 and 96"),
        (lambda: {"input_ids": ids(1, 3).bool()}, ValueError, "integers.* got torch.bool"),
        (lambda: {"input_ids": ids(3)}, ValueError, r"shape \(batch, tokens\)"),
        (lambda: given(0, 3), ValueError, "empty"),
        (lambda: {"inputs_embeds": torch.zeros(1, 3, 31)}, ValueError, "inputs_embeds must have shape"),
        (lambda: given(2, 3, attention_mask=torch.ones(2, 4)), ValueError, r"must have shape \(2, 3\)"),
        (lambda: given(1, 3, attention_mask=torch.ones(1, 1, 3, 3)), ValueError, "no token-by-token"),
        (lambda: given(1, 3, attention_mask=[[0.0, 0.0, float("-inf")]]), ValueError, "must hold 1"),
        (lambda: given(1, 3, position_ids=torch.arange(4)[None]), ValueError, "position_ids must have"),
        (lambda: given(1, 3, position_ids=torch.rand(1, 3)), ValueError, "must hold integers"),
        (lambda: given(1, 4, position_ids=[[0, 1, 1, 2]]), ValueError, "fall or repeat"),
        (lambda: given(1, 3, past_key_values=((1, 2),)), TypeError, "must be a transformers Cache"),
        (lambda: given(1, 3, past_key_values=foreign_cache()), ValueError, "another kind of model"),
        (lambda: given(1, 3, past_key_values=other_cache(num_hidden_layers=2)), ValueError, "2 layers"),
        (lambda: given(2, 3, past_key_values=other_cache()), ValueError, "holds 1 sequences"),
        (lambda: continued(3, attention_mask=torch.ones(1, 3)), ValueError, "covers the cached tokens"),
        (lambda: continued(4, position_ids=[[0, 1, 0, 1]]), ValueError, "cannot be combined with a cache"),
        (lambda: continued(2, position_ids=[[0, 1]]), ValueError, "start at 0, but the cache holds 3 tokens"),
        (lambda: given(1, 4, seq_idx=STARTS, position_ids=torch.arange(4)[None]), ValueError, "do not restart at 0"),
        (lambda: given(1, 4, seq_idx=STARTS, cu_seq_lens_q=[0, 3, 4]), ValueError, "sequences at different tokens"),
        (lambda: given(2, 4, cu_seq_lens_q=[0, 2, 4]), ValueError, "batch of size 1"),
        (lambda: given(1, 4, cu_seq_lens_q=[0, 2, 5]), ValueError, "must rise from 0"),
        (lambda: given(1, 4) | {"cu_seq_lens_q": [0, 2, 4]}, TypeError, "cu_seq_lens_q must be a tensor, got list"),
        (lambda: given(1, 4, seq_idx=[[0, 0, 1]]), ValueError, "seq_idx must have shape"),
    ],
)
def test_bad_model_input(tiny_model, inputs, error, message):
    with pytest.raises(error, match=message):
        tiny_model(**inputs())
