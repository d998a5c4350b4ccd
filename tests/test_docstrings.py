"""The reference: each public name has an entry and an example; examples that need no files run."""

import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch

import tost_hf


REFERENCE = Path(__file__).parents[1] / "examples/guides/reference"
PUBLIC = {name: value for name in tost_hf.__all__ if callable(value := getattr(tost_hf, name))}
CLASSES = {name: value for name, value in PUBLIC.items() if isinstance(value, type)}
EXAMPLES = {name: re.findall(r"```python\n(.*?)```", inspect.getdoc(value) or "", re.DOTALL) for name, value in PUBLIC.items()}
RUNNABLE = [name for name in CLASSES if name.startswith(("ToST", "Causal", "Token", "TSSA")) and "Train" not in name]


def test_every_public_name_has_an_entry_and_an_example():
    entries = re.findall(r"^::: tost_hf\.(\w+)$", "\n".join(page.read_text() for page in REFERENCE.glob("*.md")), re.MULTILINE)
    assert PUBLIC.keys() - {*entries} == set()
    assert [name for name, examples in EXAMPLES.items() if not examples] == []


@pytest.mark.parametrize("name", RUNNABLE)
def test_examples_run(name):
    for example in EXAMPLES[name]:
        test = doctest.DocTestParser().get_doctest(example, {"torch": torch} | PUBLIC, name, None, None)
        assert test.examples and doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_are_python(name):
    for example in EXAMPLES[name]:
        test = doctest.DocTestParser().get_doctest(example, {}, name, None, None)
        for statement in test.examples:
            compile(statement.source, name, "single")
        assert test.examples, f"the example of {name} has no prompt >>>"
