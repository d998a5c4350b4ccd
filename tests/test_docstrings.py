"""The examples in docstrings of models, their outputs, caches, configurations and layers."""

import doctest
import inspect
import re

import pytest
import torch

import tost_hf


CLASSES = {name: value for name, value in vars(tost_hf).items() if name in tost_hf.__all__ and isinstance(value, type)}
EXAMPLES = {
    name: example
    for name, value in CLASSES.items()
    for example in re.findall(r"```python\n(.*?)```", inspect.getdoc(value) or "", re.DOTALL)
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name):
    test = doctest.DocTestParser().get_doctest(EXAMPLES[name], {"torch": torch} | CLASSES, name, None, None)
    assert test.examples and doctest.DocTestRunner().run(test).failed == 0


def test_every_model_and_output_has_an_example():
    assert {name for name in CLASSES if name.startswith("ToST")} <= EXAMPLES.keys()
