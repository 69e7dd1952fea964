"""The examples in docstrings run, and every public name has a docstring."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import elephant

MODULES = [
    name for _, name, _ in pkgutil.walk_packages(elephant.__path__, "elephant.") if not name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_when_their_examples_run_then_show_what_they_say(name):
    failures, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failures == 0


@pytest.mark.parametrize("name", MODULES)
def test_public_names_when_listed_then_have_docstrings(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    for label, thing in vars(module).items():
        if label.startswith("_") or getattr(thing, "__module__", None) != name:
            continue
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__, f"{name}.{label} has no docstring"
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                undocumented = inspect.isfunction(value) and not member.startswith("_") and not inspect.getdoc(value)
                inherited = any(hasattr(base, member) for base in thing.__mro__[1:])
                assert not undocumented or inherited, f"{name}.{label}.{member} has no docstring"
