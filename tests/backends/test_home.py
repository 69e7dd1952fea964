"""What belongs to one framework is named in `elephant.backends` alone, so that a backend is added in one place."""

import ast
import re
from pathlib import Path

from elephant.backends import BACKENDS, VARIABLE, log_levels
from elephant.backends.process_environment import READ_LATE

PACKAGE = Path(__file__).resolve().parents[2] / "elephant"
HOME = PACKAGE / "backends"

# Parts of names besides those of frameworks themselves: what is imported as tf, variables that begin with XLA.
WORDS = {"flax", "tf", "xla"}
EXACTLY = {
    VARIABLE,
    *READ_LATE,
    *log_levels("2"),
    *(name for backend in BACKENDS.values() for name in (*backend.environment(1), *backend.program_layers)),
}
# A mode of Keras' lookup layers: term frequency, inverse document frequency. A format of files. A package of Neptune's.
OTHERS = {"tf_idf", "TFRecord", "neptune_tensorflow_keras"}
# Modules of backends that name several: the list of them, and the private names that Keras has for what is theirs.
SHARED = ("__init__.py", "keras_private.py")
# Where a framework is named that Keras may compute without.
ALLOWED = {
    "monitor/listeners.py": "flavors of MLflow, which has one for TensorFlow",
    "spark/model.py": "a format of keras.Model.export",
    "spark/saving/model_files.py": "packages with which keras.Model.export writes its formats",
    "training/images.py": "TensorFlow decodes files of images where Pillow is not installed",
    "rank/input/tfrecord_reader.py": "TensorFlow reads its own files, whatever Keras computes with",
}


def names_in(tree):
    """Yields (line, name) of all identifiers, imports and strings of a module; a text with spaces is for people."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in (getattr(node, "module", None), *(alias.name for alias in node.names)):
                yield node.lineno, name or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not re.search(r"\s", node.value):
            yield node.lineno, node.value
        else:
            # Of a name, an attribute, a function or class, an argument.
            found = next((vars(node)[key] for key in ("id", "attr", "name", "arg") if vars(node).get(key)), None)
            if isinstance(found, str) and hasattr(node, "lineno"):
                yield node.lineno, found


def is_of_a_framework(name):
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
    return name not in OTHERS and (name in EXACTLY or bool(WORDS & words) or bool(named_in(name)))


def test_names_of_frameworks_when_the_package_is_walked_then_stand_in_the_backends_folder():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if HOME not in path.parents:
            for line, name in names_in(ast.parse(path.read_text())):
                if is_of_a_framework(name):
                    found.setdefault(str(path.relative_to(PACKAGE)), []).append(f"line {line}: {name}")
    assert {path: names for path, names in found.items() if path not in ALLOWED} == {}
    # An exception that is not needed any more goes.
    assert found.keys() == ALLOWED.keys()


def named_in(name):
    """Returns the backends whose names a name has."""
    return [backend for backend in BACKENDS if backend in name.lower()]


def test_modules_of_backends_when_walked_then_name_the_framework_alone_by_which_they_are_called():
    offenders = [
        f"{path.relative_to(HOME)}, line {line}: {name}"
        for path in sorted(HOME.rglob("*.py"))
        for line, name in names_in(ast.parse(path.read_text()))
        if path.name not in SHARED and any(not path.name.startswith(backend) for backend in named_in(name))
    ]
    assert not offenders, "\n".join(offenders)
