# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""ListOps of Long Range Arena: nested lists of digits under MIN, MAX, MED and SM, reimplemented from the published rules.

A tree grows from the root at depth 1: below the greatest depth a node is an operator with probability 1/4, else a digit. An
operator has 2 to 10 arguments. A text's length counts operators, digits and closing brackets; the parentheses that the
published files also have tell nothing more, and models do not see them.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass


OPERATOR_PROBABILITY = 0.25
MIN_ARGUMENTS = 2
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
END = "]"
TOKENS = (*OPERATORS, END, *"0123456789")  # a model's token ids count them from 1; 0 is padding
CLASSES = 10
PUBLISHED_EXAMPLES = {"train": 96_000, "validation": 2_000, "test": 2_000}


@dataclass
class ListOpsRules:
    """Which expressions are kept; the defaults are the published ones."""

    min_length: int = 500  # both are excluded
    max_length: int = 2_000
    max_depth: int = 10
    max_arguments: int = 10

    def __post_init__(self):
        if self.min_length + 1 >= self.max_length:
            raise ValueError("No length lies between min_length and max_length, both excluded.")


class _TooLong(Exception):
    """An expression has outgrown the rules."""


class _Grower:
    """Grows one expression: its text in the published form, its value and its length."""

    def __init__(self, rng: random.Random, rules: ListOpsRules):
        self.rng, self.rules, self.length = rng, rules, 0

    def grow(self, depth: int = 1) -> tuple[str, int]:
        """The text and the value of a node."""
        if depth >= self.rules.max_depth or self.rng.random() > OPERATOR_PROBABILITY:
            self._count(1)
            digit = self.rng.randrange(10)
            return str(digit), digit
        self._count(2)
        arguments = [self.grow(depth + 1) for _ in range(self.rng.randint(MIN_ARGUMENTS, self.rules.max_arguments))]
        operator = self.rng.choice(OPERATORS)
        text = operator
        for argument, _ in arguments:
            text = f"( {text} {argument} )"
        return f"( {text} {END} )", evaluate(operator, [value for _, value in arguments])

    def _count(self, tokens: int) -> None:
        self.length += tokens
        if self.length >= self.rules.max_length:
            raise _TooLong


def evaluate(operator: str, values: list[int]) -> int:
    """An operator's value; the median of an even number is the mean of the middle two, cut to an integer."""
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[SM":
        return sum(values) % 10
    values, middle = sorted(values), len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) // 2


def expressions(rules: ListOpsRules, seed: int) -> Iterator[dict]:
    """Examples with `Source`, `Target` and `length`, no expression twice; the same for the same seed and rules."""
    rng, seen = random.Random(seed), set()
    while True:
        grower = _Grower(rng, rules)
        try:
            source, target = grower.grow()
        except _TooLong:
            continue
        if grower.length > rules.min_length and hash(source) not in seen:
            seen.add(hash(source))
            yield {"Source": source, "Target": target, "length": grower.length}
