"""Source of a module that is not imported yet: what it defines, read without running any of it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import keras

_REGISTERING = "register_keras_serializable"
# Where classes of Keras' kinds have public names.
_PLACES = (
    keras,
    keras.layers,
    keras.models,
    keras.losses,
    keras.metrics,
    keras.optimizers,
    keras.optimizers.schedules,
    keras.initializers,
    keras.regularizers,
    keras.constraints,
)
_MODELS = ("Model", "Sequential", "Functional")
_MOST_STEPS = 10


@dataclass(frozen=True)
class Definition:
    """A class or function as the source of its module has it.

    Args:
        is_of_keras: Whether it is a class whose bases lead to a class of Keras by what they are called.
        is_function: Whether it is a function.
        gives_model: Whether it is a function that says that it returns a model of Keras: ``-> keras.Model``.
        is_registered: Whether it is registered with Keras where it is defined.
    """

    is_of_keras: bool
    is_function: bool
    gives_model: bool
    is_registered: bool


def parents_and_module(module: str) -> list[str]:
    """Returns the names of a module's packages, and its own.

    >>> parents_and_module("nets.vision.blocks")
    ['nets', 'nets.vision', 'nets.vision.blocks']
    """
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def specs_of(module: str) -> list[ModuleSpec]:
    """Returns where the packages of a module and it itself are, the outermost first; nothing is imported.

    Raises:
        ModuleNotFoundError: One of them is nowhere.
    """
    specs: list[ModuleSpec] = []
    for name in parents_and_module(module):
        spec = _found_below(name, specs[-1]) if specs else importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        specs.append(spec)
    return specs


def _found_below(name: str, package: ModuleSpec) -> ModuleSpec | None:
    # By its last name, in the folders: what Python looks for by the whole name has its packages imported.
    return PathFinder.find_spec(name.rpartition(".")[2], list(package.submodule_search_locations or ()))


def definition(module: str, qualname: str) -> Definition | None:
    """Finds a class or function at the top of a module's source; None where it has none of that name.

    Raises:
        ModuleNotFoundError: There is no such module.
    """
    for node in _statements(_tree(specs_of(module)[-1])):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == qualname:
            return Definition(
                is_of_keras=isinstance(node, ast.ClassDef) and _leads_to_keras(qualname, module, _MOST_STEPS),
                is_function=isinstance(node, ast.FunctionDef),
                gives_model=isinstance(node, ast.FunctionDef) and _gives_model(node),
                is_registered=any(_last(decorator) == _REGISTERING for decorator in node.decorator_list),
            )
    return None


def _gives_model(node: ast.FunctionDef) -> bool:
    return node.returns is not None and is_model(ast.unparse(node.returns))


def is_model(annotation: str) -> bool:
    """Returns whether an annotation names a class of Keras' models.

    >>> is_model("keras.Model"), is_model("'Sequential'"), is_model("str")
    (True, True, False)
    """
    return annotation.strip("'\"").rpartition(".")[2] in _MODELS


def _tree(spec: ModuleSpec) -> ast.Module:
    read: Any = getattr(spec.loader, "get_source", None)
    try:
        source = read(spec.name) if read is not None else None
        return ast.parse(source or "")
    except (ImportError, OSError, SyntaxError, ValueError, RecursionError):
        # Nothing that can be read defines nothing.
        return ast.Module(body=[], type_ignores=[])


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yields the statements at the top of a module, those below an ``if`` or ``try`` included."""
    waiting = list(tree.body)
    while waiting:
        statement = waiting.pop(0)
        yield statement
        if isinstance(statement, (ast.If, ast.Try)):
            waiting += [*statement.body, *statement.orelse]
            waiting += [inner for handler in getattr(statement, "handlers", []) for inner in handler.body]


def _last(expression: ast.expr) -> str:
    """Returns the last part of a dotted name, also of one that is called or indexed."""
    while isinstance(expression, (ast.Call, ast.Subscript)):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    return expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", "")


def _leads_to_keras(name: str, module: str, steps: int) -> bool:
    """Returns whether a module has a class of Keras by that name, or one that derives from one."""
    if not steps:
        return False
    try:
        specs = specs_of(module)
    except ImportError:
        return False
    for node in _statements(_tree(specs[-1])):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return any(
                _is_of_keras(_last(base)) or _leads_to_keras(_last(base), module, steps - 1) for base in node.bases
            )
        if isinstance(node, ast.ImportFrom):
            package = module if specs[-1].submodule_search_locations is not None else module.rpartition(".")[0]
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _is_of_keras(alias.name) or _leads_to_keras(alias.name, _origin(node, package), steps - 1)
    return False


def _is_of_keras(name: str) -> bool:
    return any(isinstance(vars(place).get(name), type) for place in _PLACES)


def _origin(node: ast.ImportFrom, package: str) -> str:
    """Returns the module that a ``from`` names."""
    parts = package.split(".")
    above = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*above, *filter(None, [node.module])])
