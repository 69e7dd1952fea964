"""What belongs to one framework is named in `elephant.backends` alone, so that a backend is added in one place."""

import ast
import re
from pathlib import Path

from elephant.backends import BACKENDS, VARIABLE, log_levels
from elephant.backends.process_environment import READ_LATE

PACKAGE = Path(__file__).resolve().parents[2] / "elephant"
HOME = PACKAGE / "backends"

# Frameworks as packages, prefixes of variables and parts of names have them.
WORDS = {*BACKENDS, "flax", "pytorch", "tf", "xla"}
EXACTLY = {
    VARIABLE,
    *READ_LATE,
    *log_levels("2"),
    *(name for backend in BACKENDS.values() for name in (*backend.environment(1), *backend.program_layers)),
}
# A mode of Keras' lookup layers: term frequency, inverse document frequency.
OTHERS = {"tf_idf"}
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
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return name not in OTHERS and (name in EXACTLY or bool(WORDS & {word.lower() for word in words}))


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


def test_frameworks_when_one_is_named_in_another_s_modules_then_only_its_own_have_it():
    others = {name: {*BACKENDS} - {name} for name in BACKENDS}
    offenders = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in sorted(HOME.rglob("*.py"))
        for _, name in names_in(ast.parse(path.read_text()))
        for own in BACKENDS
        if path.name.startswith(own) and name.split(".")[0] in others[own]
    ]
    assert not offenders, "\n".join(offenders)
