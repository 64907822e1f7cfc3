"""Examples in docstrings run and print what they say."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import tl_valuealign as va

MODULES = [info.name for info in pkgutil.walk_packages(va.__path__, "tl_valuealign.")]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NEED_THE_POCKET_MODEL = ("pocket_model", "load_nanochat")


def _examples():
    """Every docstring with an example: of modules, functions, classes and their members.

    Handed over object by object, because doctest takes functions that are wrapped by a decorator
    for somebody else's.
    """
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in MODULES:
        module = importlib.import_module(name)
        own = [
            value
            for value in vars(module).values()
            if getattr(value, "__module__", None) == name
            and (inspect.isfunction(value) or inspect.isclass(value))
        ]
        for value in own:
            scope = {"va": va, **vars(module)}
            label = f"{name}.{value.__qualname__}"
            yield from finder.find(value, label, module=False, globs=scope)


def _cases():
    for test in _examples():
        if test.examples:
            source = "".join(example.source for example in test.examples)
            bridge = any(word in source for word in NEED_THE_POCKET_MODEL)
            yield pytest.param(test, id=test.name, marks=[pytest.mark.bridge] if bridge else [])


CASES = list(_cases())


@pytest.mark.parametrize("test", CASES)
def test_example_prints_what_it_says(test):
    output = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=output.append)
    assert result.attempted and not result.failed, "".join(output)


def test_examples_are_found_behind_decorators():
    names = {case.id for case in CASES}
    for name in ("chance.chance_alignment", "spectra.count_directions"):
        assert f"tl_valuealign.{name}" in names


def test_an_example_that_lies_is_caught():
    def lies():
        """
        >>> 1 + 1
        3
        """

    (test,) = doctest.DocTestFinder().find(lies, "lies", module=False, globs={})
    with pytest.raises(AssertionError, match="Expected"):
        test_example_prints_what_it_says(test)
