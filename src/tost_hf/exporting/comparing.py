# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Comparison of an exported program with its model: outputs for several shapes, and greedy tokens."""

from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from .programs import BATCH, LanguageProgram, ModelProgram
from .runtime import LanguageModel, Run


PROMPT_TOKENS, GREEDY_TOKENS = 40, 50  # more than a chunk of the operator
SPLITS = ((), (6, 7), (1, 20))  # positions at which a prompt is split into parts


class Agreement(NamedTuple):
    """How closely an exported program agrees with its model."""

    difference: float  # the largest root mean square difference of outputs, in standard deviations of the model's outputs
    greedy_tokens: int  # that were compared
    equal_tokens: int  # among them

    def __str__(self) -> str:
        greedy = f"; {self.equal_tokens} of {self.greedy_tokens} greedy tokens were the same" if self.greedy_tokens else ""
        return f"Its outputs differ from the model's by {self.difference:.1e} of their standard deviation{greedy}."


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
    batches = (2, 1) if facts["inputs"][0]["shape"][0] == BATCH else (1,)
    model = program.model
    if isinstance(program, LanguageProgram):
        texts = [(LanguageModel(run, facts, batch), batch, split) for batch in batches for split in SPLITS]
        difference = max(_text_difference(model, *text) for text in texts)
    else:
        difference = max(_difference(program, run, _make_inputs(program, batch, facts)) for batch in batches)
    if difference > tolerance:
        raise ValueError(
            f"The exported program gives other outputs than the model: they differ by {difference:.2g} standard deviations, "
            f"and {tolerance:.2g} is allowed. Nothing was written."
        )
    if not isinstance(program, LanguageProgram):
        return Agreement(difference, 0, 0)
    equal, worst, total = _greedy(model, LanguageModel(run, facts))
    if worst > 10 * tolerance:
        raise ValueError(
            f"The exported program chooses other tokens than the model, though their logits are {worst:.2g} standard "
            f"deviations apart; it agreed in {equal} of {total}. Nothing was written."
        )
    return Agreement(difference, total, equal)


def _relative(got: np.ndarray, expected: torch.Tensor) -> float:
    """The root of the mean squared difference, in standard deviations of `expected`; ValueError if either is not finite."""
    for who, x in (("model", expected.numpy()), ("exported program", got)):
        if not np.isfinite(x).all():
            raise ValueError(f"The {who} gives NaN or infinite outputs in this dtype. Nothing was written.")
    reference = expected.double().numpy()
    return float(np.sqrt(np.mean((got - reference) ** 2)) / max(reference.std(), 1e-6))


def _make_inputs(program: ModelProgram, batch: int, facts: dict) -> list[torch.Tensor]:
    """Random texts, the last of them with padding on the right, or images, whose shape depends on the batch size."""
    config: Any = program.model.config
    generator = torch.Generator().manual_seed(0)
    if not program.takes_images:
        mask = torch.ones(batch, min(PROMPT_TOKENS, config.max_position_embeddings or PROMPT_TOKENS), dtype=torch.long)
        mask[-1, -2:] = 0
        return [torch.randint(config.vocab_size, mask.shape, generator=generator), mask]
    shape = list(facts["inputs"][0]["shape"])
    if BATCH in shape:
        side = config.image_size if isinstance(config.image_size, int) else max(config.image_size)
        patches = min(-(-side // config.patch_size), 16)
        shape = [batch, config.num_channels, patches * config.patch_size, (patches + 2 - batch) * config.patch_size]
    return [torch.randn(shape, generator=generator)]


@torch.no_grad()
def _difference(program: ModelProgram, run: Run, inputs: list[torch.Tensor]) -> float:
    expected = program(*inputs)
    got = run({spec.name: x.numpy() for spec, x in zip(program.inputs, inputs)})
    return max(_relative(got[spec.name], x) for spec, x in zip(program.outputs, expected))


@torch.no_grad()
def _text_difference(model: PreTrainedModel, exported: LanguageModel, batch: int, split: tuple[int, ...]) -> float:
    """Of the logits at real tokens, where the exported program reads the prompt in parts; the last of two texts is padded."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(batch)
    count = min(PROMPT_TOKENS, config.max_position_embeddings or PROMPT_TOKENS)
    tokens = torch.randint(config.vocab_size, (batch, count), generator=generator)
    mask = torch.ones_like(tokens)
    mask[-1, : 2 * (batch > 1)] = 0
    expected = model(tokens, attention_mask=mask, use_cache=False).logits
    parts = zip(tokens.tensor_split(split, 1), mask.tensor_split(split, 1))
    got = np.concatenate([exported.read(part.numpy(), real.numpy()) for part, real in parts if part.numel()], 1)
    return _relative(got[mask.bool().numpy()], expected[mask.bool()])


@torch.no_grad()
def _greedy(model: PreTrainedModel, exported: LanguageModel) -> tuple[int, float, int]:
    """Both choose the token after each prefix of the model's greedy text.

    Returns:
        How many choices are equal; the largest difference, in standard deviations, of the model's logits of two unequal
        choices; the number of choices.
    """
    config: Any = model.config
    start = config.bos_token_id if isinstance(config.bos_token_id, int) else 0
    token = torch.tensor([[min(max(start, 0), config.vocab_size - 1)]])
    total = min(GREEDY_TOKENS, (config.max_position_embeddings or GREEDY_TOKENS + 1) - 1)
    cache, equal, worst = None, 0, 0.0
    for _ in range(total):
        outputs = model(token, past_key_values=cache, use_cache=True)
        cache, logits = outputs.past_key_values, outputs.logits[0, -1].float()
        chosen = int(exported.read(token.numpy())[0, -1].argmax())
        token = logits.argmax().view(1, 1)
        equal += chosen == int(token)
        worst = max(worst, float((logits.max() - logits[chosen]) / logits.std().clamp_min(1e-6)))
    return equal, worst, total


__all__ = ["Agreement", "compare"]
