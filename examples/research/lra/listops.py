# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""ListOps of Long Range Arena: nested lists of digits under MIN, MAX, MED and SM, reimplemented from the published rules.

A tree grows from the root at depth 1: a node is an operator with probability 1/4, else a digit; at the maximum depth all nodes
are digits. An operator has 2 to 10 arguments. The length of an expression counts operators, digits and closing brackets; the
parentheses in the published files are redundant, and models do not see them.
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
    """Limits of the expressions; the defaults are the published ones."""

    min_length: int = 500  # min_length and max_length are exclusive
    max_length: int = 2_000
    max_depth: int = 10
    max_arguments: int = 10

    def __post_init__(self):
        if self.min_length + 1 >= self.max_length:
            raise ValueError("There is no length between min_length and max_length, both exclusive.")


class _TooLong(Exception):
    """An expression has reached the maximum length."""


class _ExpressionGenerator:
    """Generates one expression in the published format, with its value and its length."""

    def __init__(self, rng: random.Random, rules: ListOpsRules):
        self.rng, self.rules, self.length = rng, rules, 0

    def generate(self, depth: int = 1) -> tuple[str, int]:
        """The source and the value of a node."""
        if depth >= self.rules.max_depth or self.rng.random() > OPERATOR_PROBABILITY:
            self._count(1)
            digit = self.rng.randrange(10)
            return str(digit), digit
        self._count(2)
        arguments = [self.generate(depth + 1) for _ in range(self.rng.randint(MIN_ARGUMENTS, self.rules.max_arguments))]
        operator = self.rng.choice(OPERATORS)
        source = operator
        for argument, _ in arguments:
            source = f"( {source} {argument} )"
        return f"( {source} {END} )", evaluate(operator, [value for _, value in arguments])

    def _count(self, tokens: int) -> None:
        self.length += tokens
        if self.length >= self.rules.max_length:
            raise _TooLong


def evaluate(operator: str, values: list[int]) -> int:
    """An operator's value; the median of an even number is the mean of the middle two, rounded down."""
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[SM":
        return sum(values) % 10
    values, middle = sorted(values), len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) // 2


def generate_expressions(rules: ListOpsRules, seed: int) -> Iterator[dict]:
    """Yields distinct examples with `Source`, `Target` and `length`, determined by the seed and the rules."""
    rng, hashes = random.Random(seed), set()
    while True:
        generator = _ExpressionGenerator(rng, rules)
        try:
            source, target = generator.generate()
        except _TooLong:
            continue
        if generator.length > rules.min_length and hash(source) not in hashes:
            hashes.add(hash(source))
            yield {"Source": source, "Target": target, "length": generator.length}
