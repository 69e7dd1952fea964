"""Names of others that begin with an underscore stand in few files: a release that changes one then breaks one place.

What counts, in a file of the package:

- an attribute ``x._name``, also in `getattr`, `hasattr`, `setattr` and `delattr`: not of ``self`` and ``cls``, nor a
  name that the same file defines in a class of its own, unless it is known as one of others
- an import of a private module or name: one with an underscore, `keras.src`, `tensorflow.python`
- a text that begins with the name of such a module

Dunder names, those of named tuples and those that Python's documentation describes are public.
"""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "elephant"
MAX_FILES = 10
# Where such names belong, by what they are of.
HOMES = {
    "backends/keras_private.py": "Keras",
    "cluster/spark_private.py": "PySpark and Py4J",
    "backends/tensorflow.py": "TensorFlow",
    "backends/jax_devices.py": "JAX",
    "backends/torch_devices.py": "PyTorch",
}
OF_OBJECTS = ("self", "cls")
BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
OF_NAMED_TUPLES = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}
DOCUMENTED = {"os._exit", "sys._getframe"}
TEXT = re.compile(r"(keras\.src|tensorflow\.python)(\.|$)")
PRIVATE_MODULE = re.compile(r"(keras\.src|tensorflow\.python|[\w.]*\b_(?!_)\w+)(\.|$)")


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMED_TUPLES


def foreign_private_names(text, known=frozenset()):
    """Returns (line, name) of the names of others with an underscore that a module uses.

    Args:
        known: Names that are of others, although the module may define one of the same spelling.
    """
    tree = ast.parse(text)
    own, documentation = own_names(tree) - known, docstrings(tree)
    found = set()
    for node in ast.walk(tree):
        for owner, name in attributes(node):
            is_own = isinstance(owner, ast.Name) and owner.id in OF_OBJECTS
            if (
                is_private(name)
                and not is_own
                and name not in own
                and ast.unparse(owner) + "." + name not in DOCUMENTED
            ):
                found.add((node.lineno, f"{ast.unparse(owner)}.{name}"))
        found |= {(node.lineno, name) for name in imported(node) if PRIVATE_MODULE.match(name)}
        if isinstance(node, ast.Constant) and id(node) not in documentation and TEXT.match(str(node.value)):
            found.add((node.lineno, repr(node.value)))
    return sorted(found)


def attributes(node):
    """Yields (object, name) of an attribute that a node uses, as a name or as a text."""
    if isinstance(node, ast.Attribute):
        yield node.value, node.attr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
        if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            yield node.args[0], node.args[1].value


def imported(node):
    """Yields the full names that a node imports, of other packages."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("elephant", "__future__")):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_names(tree):
    """Returns the names of methods and attributes that classes of a module define."""
    names = set()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(kind):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id in OF_OBJECTS else set()
        names |= {part.target.id for part in kind.body if isinstance(part, ast.AnnAssign)}
    return names


def docstrings(tree):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, kinds) and node.body]
    return {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}


def test_private_names_when_files_are_walked_then_stand_in_the_modules_that_are_for_them():
    homes = "\n".join(f"  those of {names}: elephant/{path}" for path, names in HOMES.items())
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    known = {name.rpartition(".")[2] for home in HOMES for _, name in foreign_private_names(texts[home])}
    by_file = {path: found for path, text in texts.items() if (found := foreign_private_names(text, known))}
    offenders = [
        f"  elephant/{path}:{line}: {name}"
        for path, found in sorted(by_file.items())
        if path not in HOMES
        for line, name in found
    ]
    assert not offenders, (
        "Private names of others, which a release of theirs may change, have an entry each in one module, with the "
        f"version, the reason and a test:\n{homes}\nHere they are not, or their file is new in HOMES:\n"
        + "\n".join(offenders)
    )
    assert len(by_file) <= MAX_FILES
    assert set(by_file) == set(HOMES)


def test_private_names_when_a_module_has_some_of_each_kind_then_others_are_told_from_its_own():
    text = '''"""About keras.src and x._y."""
import os, tensorflow.python.eager
from jax._src import xla_bridge
from keras.src import backend
from elephant.rank import _own
from pyspark.sql.types import StructType, _parse

class Pair:
    _first: int
    def __init__(self, other):
        """keras.src is private."""
        self._second = other._second
        super().__init__(other._first, other._third)
        self._fourth, cls._fifth = 1, self._model._learning_rate
        os._exit(other.__dict__, other._replace(a=1)._sixth)

getattr(layer, "_losses", None), hasattr(layer, "losses"), getattr(layer, name), setattr(self, "_a", 1)
kind.startswith("keras.src.backend."), "see keras.src"
'''
    assert foreign_private_names(text) == [
        (2, "tensorflow.python.eager"),
        (3, "jax._src.xla_bridge"),
        (4, "keras.src.backend"),
        (6, "pyspark.sql.types._parse"),
        (13, "other._third"),
        (14, "self._model._learning_rate"),
        (15, "other._replace(a=1)._sixth"),
        (17, "layer._losses"),
        (18, "'keras.src.backend.'"),
    ]
