"""Trust in saved models: one rule, for every way of loading one, for what of it may run.

Code that a file holds runs only where its writer is trusted: a pickle is not read, and Keras loads in its safe mode.
Trust is ``trusted=True``, or, where that is not said, the Spark setting ``spark.elephant.trustSavedModels``.

A file may name code that is here anyway, which needs no trust:

- what is registered with Keras in this process;
- classes of Keras' kinds, such as layers and losses, in any module that can be imported but the standard library's;
- functions in modules of one's own, those that are neither installed packages nor Spark's: where they are called with
  rows, labels and outputs, of which the file has no say. What is called with what the file says, as the function of a
  ``Lambda`` is, has to be registered. What loading calls, as it does a model function, has to be registered or to say
  that it returns a model: ``def build() -> keras.Model``.

What is refused has not been imported: the source of a module tells what it defines (`elephant.spark.module_source`).
A module is not imported from the folder that is loaded. What of a model's own file runs,
`elephant.modeling.archive_inspection` tells.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickletools
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
from pyspark.cloudpickle import cloudpickle

from elephant.cluster.script_modules import INSTALLED, PLATFORM
from elephant.cluster.session import is_true, setting
from elephant.errors import ConfigurationError
from elephant.modeling.archive_inspection import KINDS
from elephant.spark.hadoop_files import local_path, running_session
from elephant.spark.module_source import definition, is_model, parents_and_module, specs_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTING = "spark.elephant.trustSavedModels"

_OTHERWISE = (
    "Nothing has to be trusted that is registered by @keras.saving.register_keras_serializable() in this process, nor "
    "a layer, loss, metric or the like in a module that can be imported here, nor a loss or a function on batches in "
    "a module of your own, nor a model function there that says def build() -> keras.Model."
)
# Names of a pickle that an error tells.
_MAX_NAMES = 20


def is_trusted(trusted: bool | None, session: SparkSession | None = None) -> bool:
    """Returns whether code in what is loaded may run.

    Args:
        trusted: What the caller says; None leaves it to the setting of the Spark session.
        session: The session; None takes the one that runs in this process, if there is one.
    """
    if trusted is not None:
        return trusted
    session = session or running_session()
    return session is not None and is_true({SETTING: setting(session, SETTING) or ""}, SETTING)


def require_trust(
    place: object,
    code: Sequence[str],
    otherwise: str = _OTHERWISE,
    expected: str = "nothing that runs when it is loaded",
) -> None:
    """Raises ConfigurationError where there is code that would run.

    Args:
        code: What needs trust, each in a few words.
        expected: What may be there without.
        otherwise: How to do without trust.
    """
    if code:
        raise ConfigurationError(
            f"{place}: expected {expected}, unless it is trusted. Received: "
            f"{'; '.join(code)}. Where you trust whoever wrote it, pass trusted=True (a job of spark_jobs: --trusted), "
            f"or set {SETTING}=true for calls without that argument. {otherwise}",
            topic="a-file-that-would-run-code",
        )


def name_of(value: object) -> str | None:
    """Returns the name of a class or function of a module, by which other processes find it; None of anything else.

    >>> name_of(types.SimpleNamespace), name_of(lambda: None), name_of(os.sep)
    ('types:SimpleNamespace', None, None)
    """
    if not isinstance(value, (type, types.FunctionType)):
        return None
    module = str(value.__module__)
    if module == "__main__" or cloudpickle.list_registry_pickle_by_value() & {*parents_and_module(module)}:
        return None
    try:
        return f"{module}:{value.__qualname__}" if _found(module, value.__qualname__) is value else None
    except (KeyError, AttributeError):
        return None


def named(name: str) -> Any:
    """Finds an object by its `name_of`; raises ImportError or AttributeError where it is not here."""
    module, _, qualname = name.partition(":")
    importlib.import_module(module)
    return _found(module, qualname)


def safely_named(name: str, folder: str, *, is_called: bool = False) -> Any:
    """Finds an object by a name in a file that nobody trusts; None where it is not to be used without trust.

    Args:
        name: What `name_of` gave, or anybody wrote.
        is_called: Whether loading calls it: a function has to be registered then, or to say that it returns a model.

    Raises:
        ImportError: There is no such module here.
        AttributeError: The module has no such name.
    """
    module, _, qualname = name.partition(":")
    if not (module in sys.modules or _may_be_imported(module, qualname, folder, is_called=is_called)):
        return None
    if _is_closed(module):
        return None
    importlib.import_module(module)
    value = _found(module, qualname)
    # What a module has imported from elsewhere is not its own.
    is_own = isinstance(value, (type, types.FunctionType)) and (value.__module__, value.__qualname__) == (
        module,
        qualname,
    )
    return value if is_own and _is_harmless(value, is_called=is_called) else None


def _found(module: str, qualname: str) -> Any:
    return functools.reduce(getattr, qualname.split("."), sys.modules[module])


def _is_harmless(value: Any, *, is_called: bool) -> bool:
    if any(value is registered for registered in keras.saving.get_custom_objects().values()):
        return True
    if isinstance(value, type):
        return issubclass(value, KINDS)
    if is_called and not is_model(_annotation(value)):
        return False
    return not _is_installed(value.__module__, getattr(sys.modules[value.__module__], "__file__", None))


def _annotation(function: types.FunctionType) -> str:
    given = function.__annotations__.get("return", "")
    return str(getattr(given, "__name__", given))


def _is_installed(module: str, file: str | None) -> bool:
    return file is None or module.split(".")[0] in PLATFORM or bool(INSTALLED & set(Path(file).parts))


def _is_closed(module: str) -> bool:
    """Returns whether a module is one that no file may name."""
    parts = module.split(".")
    return parts[0] in sys.stdlib_module_names or "__main__" in parts or not all(map(str.isidentifier, parts))


def _may_be_imported(module: str, qualname: str, folder: str, *, is_called: bool) -> bool:
    """Returns whether a module is worth its import, by its source: what is refused has not run before."""
    if _is_closed(module):
        return False
    specs = specs_of(module)
    places = (place for spec in specs for place in (spec.origin, *(spec.submodule_search_locations or ())))
    if any(_is_inside(place, folder) for place in places):
        return False
    defined = definition(module, qualname)
    if defined is None or defined.is_registered:
        return defined is not None
    return defined.is_of_keras or (
        defined.is_function and (defined.gives_model or not is_called) and not _is_installed(module, specs[-1].origin)
    )


def _is_inside(place: str | None, folder: str) -> bool:
    local = local_path(folder)
    if local is None or place is None:
        return False
    real, found = Path(os.path.realpath(local)), Path(os.path.realpath(place))
    # A stage is in the folder of its pipeline, all of which somebody else may have written.
    outermost = [parent for parent in (real, *real.parents) if (parent / "metadata").is_dir()] or [real]
    return outermost[-1] in (found, *found.parents)


def what_a_pickle_names(content: bytes) -> str:
    """Describes the imports and calls of unpickling, in a few words; nothing is unpickled for that.

    >>> import pickle
    >>> what_a_pickle_names(pickle.dumps([types.SimpleNamespace, os.getcwd]))
    'a pickle that names types.SimpleNamespace, posix.getcwd'
    """
    found, texts, memo = list[str](), [""], dict[int, str]()
    try:
        argument: Any
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name.endswith("UNICODE"):
                texts.append(argument)
            elif opcode.name.endswith("BINGET"):
                texts.append(memo.get(argument, ""))
            elif opcode.name == "MEMOIZE":
                memo[len(memo)] = texts[-1]
            elif opcode.name == "STACK_GLOBAL":
                found.append(".".join(texts[-2:]))
            elif opcode.name in ("GLOBAL", "INST"):
                found.append(argument.replace(" ", "."))
    except ValueError:
        found.append("what cannot be read")
    # cloudpickle's own names make classes and functions that are pickled whole.
    told = [name for name in dict.fromkeys(found) if not name.startswith(("cloudpickle.", "pyspark.cloudpickle."))]
    names = f" that names {', '.join(told[:_MAX_NAMES])}{' and more' if told[_MAX_NAMES:] else ''}" if told else ""
    return f"a pickle{names}"
