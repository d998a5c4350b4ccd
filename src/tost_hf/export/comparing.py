# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Comparison of an exported program with its model: outputs for several shapes, and greedy tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from .programs import LanguageProgram, ModelProgram
from .runtime import LanguageModel, Run


PROMPT_TOKENS, GREEDY_TOKENS = 40, 50  # more than a chunk of the operator
SPLITS: tuple[tuple[int, ...], ...] = ((), (6, 7), (1, 20))  # positions at which a prompt is split into chunks


class Agreement(NamedTuple):
    """How closely an exported program agrees with its model."""

    difference: float  # the largest root mean square difference of outputs, in standard deviations of the model's outputs
    greedy_tokens: int  # that were compared
    equal_tokens: int  # among them

    def __str__(self) -> str:
        greedy = f"; {self.equal_tokens} of {self.greedy_tokens} greedy tokens were the same" if self.greedy_tokens else ""
        return f"Its outputs differ from the model's by {self.difference:.1e} of their standard deviation{greedy}."


@torch.no_grad()
def compare(program: ModelProgram, run: Run, facts: dict, tolerance: float) -> Agreement:
    """Runs both on the same inputs.

    Args:
        run: the exported program.
        facts: the contents of its `export.json`.
        tolerance: the maximum of `Agreement.difference`. Greedy tokens may differ only where the model's logits are within
            ten times as many standard deviations of each other.

    Raises:
        ValueError: they differ, or one of them gives NaN.
    """
    model, is_language = program.model, isinstance(program, LanguageProgram)
    outputs: list[tuple[np.ndarray, torch.Tensor]] = []  # of the exported program, and of the model
    for batch in (2, 1):
        inputs = _make_inputs(program, batch)
        if is_language:
            tokens, mask = inputs
            outputs += [_read_text(model, LanguageModel(run, facts, batch), tokens, mask, split) for split in SPLITS]
        else:
            got = run({spec.name: x.numpy() for spec, x in zip(program.inputs, inputs)})
            outputs += [(got[spec.name], x) for spec, x in zip(program.outputs, program(*inputs))]
    difference = max(_relative(got, expected) for got, expected in outputs)
    if difference > tolerance:
        raise ValueError(
            f"The exported program gives other outputs than the model: they differ by {difference:.2g} standard deviations, "
            f"and {tolerance:.2g} is allowed. Nothing was written."
        )
    if not is_language:
        return Agreement(difference, 0, 0)
    text = _generate_greedily(model)
    found, logits = _read_text(model, LanguageModel(run, facts), text, torch.ones_like(text), range(1, text.shape[1]))
    choices = torch.from_numpy(found.argmax(-1))
    gaps = (logits.amax(-1) - logits.gather(-1, choices[:, None])[:, 0]) / logits.std(-1).clamp_min(1e-6)
    equal = int((choices == logits.argmax(-1)).sum())
    if gaps.max() > 10 * tolerance:
        raise ValueError(
            f"The exported program chooses other tokens than the model, though their logits are {gaps.max():.2g} standard "
            f"deviations apart; it agreed in {equal} of {len(choices)}. Nothing was written."
        )
    return Agreement(difference, len(choices), equal)


def _relative(got: np.ndarray, expected: torch.Tensor) -> float:
    """The root of the mean squared difference, in standard deviations of `expected`; ValueError if either is not finite."""
    for who, x in (("model", expected.numpy()), ("exported program", got)):
        if not np.isfinite(x).all():
            raise ValueError(f"The {who} gives NaN or infinite outputs in this dtype. Nothing was written.")
    reference = expected.double().numpy()
    return float(np.sqrt(np.mean((got - reference) ** 2)) / max(reference.std(), 1e-6))


def _make_inputs(program: ModelProgram, batch: int) -> tuple[torch.Tensor, ...]:
    """Random images whose shape depends on the batch size; or tokens and their mask, the last of several with left padding."""
    config: Any = program.model.config
    random = torch.Generator().manual_seed(batch)
    if program.takes_images:
        sides = [count * config.patch_size for count in (6, 8 - batch)]
        return (torch.randn([batch, config.num_channels, *sides], generator=random),)
    shape = batch, min(PROMPT_TOKENS, config.max_position_embeddings or PROMPT_TOKENS)
    tokens = torch.randint(config.vocab_size, shape, generator=random)
    mask = torch.ones_like(tokens)
    mask[-1, : 2 * (batch > 1)] = 0
    return tokens, mask


def _read_text(
    model: PreTrainedModel, exported: LanguageModel, tokens: torch.Tensor, mask: torch.Tensor, split: Sequence[int]
) -> tuple[np.ndarray, torch.Tensor]:
    """The logits of both at real tokens; the exported program reads the text in chunks, split at these positions."""
    expected = model(tokens, attention_mask=mask, use_cache=False).logits.float()
    chunks = zip(tokens.tensor_split(tuple(split), 1), mask.tensor_split(tuple(split), 1))
    got = np.concatenate([exported.read(chunk.numpy(), real.numpy()) for chunk, real in chunks if chunk.numel()], 1)
    return got[mask.bool().numpy()], expected[mask.bool()]


def _generate_greedily(model: PreTrainedModel) -> torch.Tensor:
    """The model's greedy text (1, tokens), without an end."""
    config: Any = model.config
    start = config.bos_token_id if isinstance(config.bos_token_id, int) else 0
    count = min(GREEDY_TOKENS, config.max_position_embeddings or GREEDY_TOKENS) - 1
    token = torch.tensor([[min(max(start, 0), config.vocab_size - 1)]])
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    return cast(Any, model).generate(token, attention_mask=torch.ones_like(token), **options)
