# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Whether an exported program computes what its model computes: outputs for several shapes, and greedy tokens."""

from typing import Any, NamedTuple

import numpy as np
import torch

from .programs import BATCH, CACHED, HEIGHT, PAST, PRESENT, WIDTH, LanguageProgram, ModelProgram, Sizes, TextProgram
from .runtime import Run


PROMPT_TOKENS, GREEDY_TOKENS = 40, 50  # more than sums are grouped by
PARTS = ((), (6, 7), (1, 20))  # where a prompt is cut into parts


class Agreement(NamedTuple):
    """How an exported program compares with its model.

    `difference` is the greatest root of a mean squared difference of outputs, in standard deviations of the model's.
    """

    difference: float
    greedy_tokens: int  # of which the program chose ...
    equal_tokens: int  # ... so many as the model did

    def __str__(self) -> str:
        sentence = f"Its outputs differ from the model's by {self.difference:.1e} of their standard deviation"
        if self.greedy_tokens:
            sentence += f"; {self.equal_tokens} of {self.greedy_tokens} greedy tokens were the same"
        return f"{sentence}."


def compare(program: ModelProgram, run: Run, tolerance: float, fixed: Sizes | None = None) -> Agreement:
    """Runs both on the same inputs.

    Args:
        run: the exported program.
        tolerance: the most that `Agreement.difference` may be. Greedy tokens may differ only where the model's logits are
            within ten times as many standard deviations of each other.
        fixed: the sizes of dimensions, where the exported program has no free ones.

    Raises:
        ValueError: they differ.
    """
    batches = (fixed[BATCH],) if fixed else (2, 1)
    if isinstance(program, LanguageProgram):
        difference = max(_text_difference(program, run, batch, cuts) for batch in batches for cuts in PARTS)
    else:
        difference = max(_difference(program, run, inputs) for inputs in _inputs(program, batches, fixed))
    if not difference <= tolerance:
        raise ValueError(
            f"The exported program gives other outputs than the model: they differ by {difference:.2g} standard deviations, "
            f"and {tolerance:.2g} is allowed. Nothing was written."
        )
    if not isinstance(program, LanguageProgram):
        return Agreement(difference, 0, 0)
    equal, most, wanted = _greedy(program, run)
    if most > 10 * tolerance:
        raise ValueError(
            f"The exported program chooses other tokens than the model, though their logits are {most:.2g} standard "
            f"deviations apart; it agreed in {equal} of {wanted}. Nothing was written."
        )
    return Agreement(difference, wanted, equal)


def _relative(got: np.ndarray, expected: torch.Tensor) -> float:
    """The root of the mean squared difference, in standard deviations of `expected`; ValueError if either is not finite."""
    for who, x in (("model", expected.numpy()), ("exported program", got)):
        if not np.isfinite(x).all():
            raise ValueError(f"The {who} gives NaN or infinite outputs in this dtype. Nothing was written.")
    wanted = expected.detach().double().numpy()
    spread = max(float(wanted.std()), 1e-6)
    return float(np.sqrt(np.mean((got.astype(np.float64) - wanted) ** 2))) / spread


def _inputs(program: ModelProgram, batches: tuple[int, ...], fixed: Sizes | None) -> list[list[torch.Tensor]]:
    config: Any = program.model.config
    generator = torch.Generator().manual_seed(0)
    if isinstance(program, TextProgram):
        found = []
        count = min(PROMPT_TOKENS, config.max_position_embeddings or PROMPT_TOKENS)
        for batch in batches:
            mask = torch.ones(batch, count, dtype=torch.long)
            mask[-1, count - 2 :] = 0
            found.append([torch.randint(config.vocab_size, mask.shape, generator=generator), mask])
        return found
    if fixed:
        return [[torch.randn(fixed[BATCH], config.num_channels, fixed[HEIGHT], fixed[WIDTH], generator=generator)]]
    side = config.image_size if isinstance(config.image_size, int) else max(config.image_size)
    side = min(-(-side // config.patch_size), 16) * config.patch_size
    shapes = [(batch, config.num_channels, side, side + i * config.patch_size) for i, batch in enumerate(batches)]
    return [[torch.randn(shape, generator=generator)] for shape in shapes]


@torch.no_grad()
def _difference(program: ModelProgram, run: Run, inputs: list[torch.Tensor]) -> float:
    expected = program(*inputs)
    got = run({spec.name: x.numpy() for spec, x in zip(program.inputs, inputs)})
    return max(_relative(got[spec.name], x) for spec, x in zip(program.outputs, expected))


class Text:
    """A text that a program reads part by part, by its state."""

    def __init__(self, program: LanguageProgram, run: Run, mask: torch.Tensor):
        self.run, self.mask, self.read = run, mask, 0
        self.positions = (mask.cumsum(1) - 1).clamp_min(0)
        self.wanted = {spec.name: spec for spec in program.inputs}
        sizes = {BATCH: len(mask), CACHED: 0}
        self.state = {
            spec.name: np.zeros([sizes[n] if isinstance(n, str) else n for n in spec.shape], np.float32)
            for spec in program.state
        }

    def __call__(self, tokens: torch.Tensor) -> np.ndarray:
        """Reads tokens (batch, tokens); returns their logits."""
        start, self.read = self.read, self.read + tokens.shape[1]
        whole = self.wanted["attention_mask"].shape[1] != self.wanted["input_ids"].shape[1]
        given = {
            "input_ids": tokens.numpy(),
            "attention_mask": self.mask[:, 0 if whole else start : self.read].numpy(),
            "position_ids": self.positions[:, start : self.read].numpy(),
        }
        given = {name: np.ascontiguousarray(x) for name, x in given.items() if name in self.wanted}
        outputs = self.run(given | {PAST + name: x for name, x in self.state.items()})
        self.state = {name: outputs[PRESENT + name] for name in self.state}
        return outputs["logits"]


@torch.no_grad()
def _text_difference(program: LanguageProgram, run: Run, batch: int, cuts: tuple[int, ...]) -> float:
    """Of the logits at real tokens, whether the text is read at once or in parts; the last of several rows is padded."""
    config: Any = program.model.config
    generator = torch.Generator().manual_seed(batch)
    count = min(PROMPT_TOKENS, config.max_position_embeddings or PROMPT_TOKENS)
    tokens = torch.randint(config.vocab_size, (batch, count), generator=generator)
    mask = torch.ones_like(tokens)
    mask[-1, : 2 * (batch > 1)] = 0
    expected = program.model(tokens, attention_mask=mask, use_cache=False).logits
    text = Text(program, run, mask)
    got = np.concatenate([text(part) for part in tokens.tensor_split(cuts, 1) if part.numel()], 1)
    real = mask.bool()
    return _relative(got[real.numpy()], expected[real])


@torch.no_grad()
def _greedy(program: LanguageProgram, run: Run) -> tuple[int, float, int]:
    """Both choose after the model's own greedy tokens: how often alike, how wrong at most, and of how many."""
    config: Any = program.model.config
    start = config.bos_token_id if isinstance(config.bos_token_id, int) else 0
    prompt = torch.tensor([[min(max(start, 0), config.vocab_size - 1)]])
    wanted = min(GREEDY_TOKENS, (config.max_position_embeddings or GREEDY_TOKENS + 1) - 1)
    text = Text(program, run, torch.ones(1, wanted, dtype=torch.long))
    cache, token = None, prompt
    equal, most = 0, 0.0
    for _ in range(wanted):
        outputs = program.model(token, past_key_values=cache, use_cache=True)
        cache, logits = outputs.past_key_values, outputs.logits[0, -1].float()
        chosen = int(text(token)[0, -1].argmax())
        token = logits.argmax().view(1, 1)
        equal += chosen == int(token)
        most = max(most, float((logits.max() - logits[chosen]) / logits.std().clamp_min(1e-6)))
    return equal, most, wanted


__all__ = ["Agreement", "Text", "compare"]
