"""The examples in docstrings run, and every public name has a docstring."""

import doctest
import importlib
import inspect
import pkgutil
import re

import elephant

MODULES = [
    name for _, name, _ in pkgutil.walk_packages(elephant.__path__, "elephant.") if not name.endswith("__main__")
]


def test_docstrings_when_their_examples_run_then_show_what_they_say(capsys):
    failures = {
        name: doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed for name in MODULES
    }
    offenders = [f"{name}: {count}" for name, count in failures.items() if count]
    # What differs, doctest has printed.
    assert not offenders, "\n".join([*offenders, capsys.readouterr().out])


def test_public_names_when_listed_then_have_docstrings():
    offenders = [label for name in MODULES for label in undocumented(importlib.import_module(name))]
    assert not offenders, "\n".join(offenders)


def undocumented(module):
    """Yields the names of a module, its own among them, that have no docstring."""
    name = module.__name__
    if not module.__doc__:
        yield name
    for label, thing in vars(module).items():
        if label.startswith("_") or getattr(thing, "__module__", None) != name:
            continue
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and not thing.__doc__:
            yield f"{name}.{label}"
        if inspect.isclass(thing):
            yield from (f"{name}.{label}.{member}" for member in undocumented_members(thing))


def undocumented_members(kind):
    """Yields the public functions of a class that have no docstring, of their own or from a base."""
    for member, value in vars(kind).items():
        is_bare = inspect.isfunction(value) and not member.startswith("_") and not inspect.getdoc(value)
        if is_bare and not any(hasattr(base, member) for base in kind.__mro__[1:]):
            yield member


def test_arguments_when_docstrings_list_them_then_are_parameters_or_fields():
    offenders = []
    for name in MODULES:
        for thing in documented(importlib.import_module(name)):
            arguments = re.search(r"^Args:\n((?:    .*\n?)+)", inspect.getdoc(thing), re.MULTILINE)
            if arguments is None:
                continue
            listed, known = re.findall(r"^    (\w+):", arguments[1], re.MULTILINE), inspect.signature(thing).parameters
            offenders += [f"{name}.{thing.__qualname__}: {one}" for one in listed if one not in known]
    assert not offenders, "\n".join(offenders)


def documented(module):
    """Yields the classes and functions of a module, and those of its classes, that have docstrings of their own."""
    things = [thing for thing in vars(module).values() if getattr(thing, "__module__", None) == module.__name__]
    for kind in filter(inspect.isclass, list(things)):
        things += [getattr(member, "__func__", member) for member in vars(kind).values()]
    for thing in things:
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__doc__:
            yield thing
