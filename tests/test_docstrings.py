"""Docstrings: each public name has an entry in the reference and an example; examples that need no files run."""

import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch

import tost_hf


REFERENCE = Path(__file__).parents[1] / "examples/guides/reference"
PUBLIC = {name: value for name in tost_hf.__all__ if callable(value := getattr(tost_hf, name))}


def find_examples(docstring: str) -> list[str]:
    """The code of fenced blocks or, if there are none, of the section "Example:"."""
    blocks = re.findall(r"```python\n(.*?)```", docstring, re.DOTALL)
    return blocks or re.findall(r"^Example:\n((?:    .*\n?)+)", docstring, re.MULTILINE)


EXAMPLES = {name: find_examples(inspect.getdoc(value) or "") for name, value in PUBLIC.items()}
RUNNABLE = [name for name in PUBLIC if name.startswith(("ToST", "TSSA", "tssa", "Causal", "Token")) and "Train" not in name]


def test_every_public_name_has_an_entry_and_an_example():
    entries = re.findall(r"^::: tost_hf\.(\w+)$", "\n".join(page.read_text() for page in REFERENCE.glob("*.md")), re.MULTILINE)
    assert sorted(PUBLIC.keys() - {*entries}) == []
    outputs = {name for name in PUBLIC if name.startswith("ToST") and "Output" in name}  # the examples are on the models
    assert [name for name, examples in EXAMPLES.items() if not examples and name not in outputs] == []


@pytest.mark.parametrize("name", RUNNABLE)
def test_examples_run(name):
    for example in EXAMPLES[name]:
        test = doctest.DocTestParser().get_doctest(example, {"torch": torch} | PUBLIC, name, None, None)
        assert test.examples and doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_compile(name):
    for example in EXAMPLES[name]:
        statements = doctest.DocTestParser().get_examples(example)
        compile("".join(statement.source for statement in statements) or example, name, "exec")
