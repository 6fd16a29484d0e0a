"""The examples in docstrings do what they show."""

import doctest
import importlib

import pytest

from tests.support.paths import PROJECT

MODULES = [
    ".".join(path.relative_to(PROJECT).with_suffix("").parts)
    for path in sorted((PROJECT / "aioshard").rglob("*.py"))
    if ">>> " in path.read_text() and path.name != "__init__.py"
]


@pytest.mark.parametrize("module", MODULES)
def test_doctest_examples_pass(module: str) -> None:
    output: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)

    for example in doctest.DocTestFinder().find(importlib.import_module(module), module):
        runner.run(example, out=output.append)

    assert runner.failures == 0, "".join(output)
    assert runner.tries > 0
