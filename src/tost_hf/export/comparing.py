# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Compares an exported program with its model: outputs for several shapes, and greedy tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from .programs import LanguageProgram, ModelProgram
from .runtime import LanguageModel, Run


PROMPT_TOKENS, GREEDY_TOKENS = 40, 50  # longer than a chunk of the operator
SPLITS: tuple[tuple[int, ...], ...] = ((), (6, 7), (1, 20))  # positions at which a prompt is split into chunks


class Agreement(NamedTuple):
    """How closely an exported program agrees with its model."""

    difference: float  # maximum root mean square difference of outputs, in standard deviations of the model's outputs
    greedy_tokens: int  # number of compared greedy tokens
    equal_tokens: int  # number of those that are equal

    def __str__(self) -> str:
        greedy = f"; {self.equal_tokens} of {self.greedy_tokens} greedy tokens were the same" if self.greedy_tokens else ""
        return f"Its outputs differ from the model's by {self.difference:.1e} of their standard deviation{greedy}."


@torch.no_grad()
def compare(program: ModelProgram, run: Run, metadata: dict, tolerance: float) -> Agreement:
    """Compares the exported program with the model on the same inputs.

    Args:
        run: the exported program.
        metadata: the content of its `export.json`.
        tolerance: the maximum of `Agreement.difference`. A greedy token may differ if the model's logits of the two tokens are
            within ten times as many standard deviations.

    Raises:
        ValueError: the outputs differ, or those of one of them are not finite.
    """
    model, is_language = program.model, isinstance(program, LanguageProgram)
    outputs: list[tuple[np.ndarray, torch.Tensor]] = []  # of the exported program, and of the model
    for batch in (2, 1):
        inputs = _make_inputs(program, batch)
        if is_language:
            input_ids, mask = inputs
            outputs += [
                _compute_logits(model, LanguageModel(run, metadata, batch), input_ids, mask, split) for split in SPLITS
            ]
        else:
            actual = run({spec.name: x.numpy() for spec, x in zip(program.inputs, inputs)})
            outputs += [(actual[spec.name], expected) for spec, expected in zip(program.outputs, program(*inputs))]
    difference = max(_relative_error(actual, expected) for actual, expected in outputs)
    if difference > tolerance:
        raise ValueError(
            f"The exported program returns other outputs than the model: they differ by {difference:.2g} standard deviations, "
            f"and {tolerance:.2g} is allowed. Nothing was written."
        )
    if not is_language:
        return Agreement(difference, 0, 0)
    greedy_ids = _generate_greedily(model)
    exported, mask, split = LanguageModel(run, metadata), torch.ones_like(greedy_ids), range(1, greedy_ids.shape[1])
    actual_logits, logits = _compute_logits(model, exported, greedy_ids, mask, split)
    actual_ids = torch.from_numpy(actual_logits.argmax(-1))
    gaps = (logits.amax(-1) - logits.gather(-1, actual_ids[:, None])[:, 0]) / logits.std(-1).clamp_min(1e-6)
    num_equal = int((actual_ids == logits.argmax(-1)).sum())
    if gaps.max() > 10 * tolerance:
        raise ValueError(
            f"The exported program chooses other tokens than the model, although their logits are {gaps.max():.2g} standard "
            f"deviations apart; it agreed in {num_equal} of {len(actual_ids)}. Nothing was written."
        )
    return Agreement(difference, len(actual_ids), num_equal)


def _relative_error(actual: np.ndarray, expected: torch.Tensor) -> float:
    """The root mean square difference, in standard deviations of `expected`; ValueError if one of them is not finite."""
    for name, x in (("model", expected.numpy()), ("exported program", actual)):
        if not np.isfinite(x).all():
            raise ValueError(f"The {name} returns NaN or infinite outputs in this dtype. Nothing was written.")
    reference = expected.double().numpy()
    return float(np.sqrt(np.mean((actual - reference) ** 2)) / max(reference.std(), 1e-6))


def _make_inputs(program: ModelProgram, batch: int) -> tuple[torch.Tensor, ...]:
    """Random images whose shape depends on the batch size; or tokens and a mask, with left padding in the last of several."""
    config: Any = program.model.config
    generator = torch.Generator().manual_seed(batch)
    if program.is_vision:
        sides = [count * config.patch_size for count in (6, 8 - batch)]
        return (torch.randn([batch, config.num_channels, *sides], generator=generator),)
    shape = batch, min(PROMPT_TOKENS, config.max_position_embeddings)
    input_ids = torch.randint(config.vocab_size, shape, generator=generator)
    mask = torch.ones_like(input_ids)
    mask[-1, : 2 * (batch > 1)] = 0
    return input_ids, mask


def _compute_logits(
    model: PreTrainedModel, exported: LanguageModel, input_ids: torch.Tensor, mask: torch.Tensor, split: Sequence[int]
) -> tuple[np.ndarray, torch.Tensor]:
    """The logits of the exported program and of the model, without padding; the program's input is split into chunks."""
    expected = model(input_ids, attention_mask=mask, use_cache=False).logits.float()
    chunks = zip(input_ids.tensor_split(tuple(split), 1), mask.tensor_split(tuple(split), 1))
    outputs = [exported.forward(ids.numpy(), chunk_mask.numpy()) for ids, chunk_mask in chunks if ids.numel()]
    return np.concatenate(outputs, 1)[mask.bool().numpy()], expected[mask.bool()]


def _generate_greedily(model: PreTrainedModel) -> torch.Tensor:
    """The ids (1, tokens) of greedy generation, which does not stop at an end-of-sequence token."""
    config: Any = model.config
    start_id = config.bos_token_id if isinstance(config.bos_token_id, int) else 0
    num_new_tokens = min(GREEDY_TOKENS, config.max_position_embeddings) - 1
    prompt = torch.tensor([[min(max(start_id, 0), config.vocab_size - 1)]])
    options = {"max_new_tokens": num_new_tokens, "min_new_tokens": num_new_tokens, "do_sample": False, "pad_token_id": 0}
    return cast(Any, model).generate(prompt, attention_mask=torch.ones_like(prompt), **options)
