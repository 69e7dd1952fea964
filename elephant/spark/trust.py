"""Trust in saved models: one rule, for every way of loading one, for what of it may run.

Code that a file holds runs only where its writer is trusted: a pickle is not read, and Keras loads in its safe mode.
Trust is ``trusted=True``, or, where that is not said, the Spark setting ``spark.elephant.trustSavedModels``.

A file may name code that is here anyway, which needs no trust:

- what is registered with Keras in this process, or was in a model that was given to elephant here;
- classes of Keras' kinds, such as layers and losses, in any module that can be imported but the standard library's;
- other classes, and functions, in modules of one's own: those that are neither installed packages nor Spark's.

A module is not imported from the folder that is loaded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import json
import os
import pickletools
import sys
import types
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import keras
from pyspark.cloudpickle import cloudpickle

from elephant.cluster.session import is_true, setting
from elephant.errors import ConfigurationError
from elephant.spark.hadoop_files import local_path, running_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTING = "spark.elephant.trustSavedModels"

_OTHERWISE = (
    "Nothing has to be trusted that is registered by @keras.saving.register_keras_serializable() in this process, or "
    "was defined in a module of your own that can be imported here."
)
_KINDS = (
    keras.layers.Layer,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.initializers.Initializer,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
)
# Layers that hold a program, which Keras' safe mode refuses.
_PROGRAMS = ("TFSMLayer", "TorchModuleWrapper")
# Where pip and Debian install, and what may come by PYTHONPATH or with Spark all the same.
_INSTALLED = {"site-packages", "dist-packages"}
_PLATFORM = {"elephant", "jax", "keras", "numpy", "py4j", "pyspark", "tensorflow", "torch"}
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


def require_trust(place: object, code: Sequence[str], otherwise: str = _OTHERWISE) -> None:
    """Raises ConfigurationError where there is code that would run.

    Args:
        otherwise: How to do without trust.
    """
    if code:
        raise ConfigurationError(
            f"{place}: expected nothing that runs when it is loaded, unless it is trusted. Received: "
            f"{'; '.join(code)}. Where you trust whoever wrote it, pass trusted=True (a job of spark_jobs: --trusted), "
            f"or set {SETTING}=true for calls without that argument. {otherwise}"
        )


def name_of(value: object) -> str | None:
    """Returns the name of a class or function of a module, by which other processes find it; None of anything else.

    >>> name_of(json.JSONDecoder), name_of(lambda: None), name_of(json.decoder.NaN)
    ('json.decoder:JSONDecoder', None, None)
    """
    if not isinstance(value, (type, types.FunctionType)):
        return None
    module = str(value.__module__)
    if module == "__main__" or cloudpickle.list_registry_pickle_by_value() & {*_with_parents(module)}:
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


def safely_named(name: str, folder: str) -> Any:
    """Finds an object by a name in a file that nobody trusts; None where it is not to be used without trust.

    Args:
        name: What `name_of` gave, or anybody wrote.

    Raises:
        ImportError: There is no such module here.
        AttributeError: The module has no such name.
    """
    module, _, qualname = name.partition(":")
    if not _import_safely(module, folder):
        return None
    value = _found(module, qualname)
    # What a module has imported from elsewhere is not its own.
    is_own = isinstance(value, (type, types.FunctionType)) and (value.__module__, value.__qualname__) == (
        module,
        qualname,
    )
    return value if is_own and _is_harmless(value) else None


def _found(module: str, qualname: str) -> Any:
    return functools.reduce(getattr, qualname.split("."), sys.modules[module])


def _with_parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _is_harmless(value: Any) -> bool:
    if any(value is registered for registered in keras.saving.get_custom_objects().values()):
        return True
    if isinstance(value, type) and issubclass(value, _KINDS):
        return True
    file = getattr(sys.modules[value.__module__], "__file__", None)
    is_installed = value.__module__.split(".")[0] in _PLATFORM or _INSTALLED & set(Path(file or "").parts)
    return file is not None and not is_installed


def _import_safely(module: str, folder: str) -> bool:
    """Imports a module, parents first; returns False for one that no file may name, before any of its code has run."""
    parts = module.split(".")
    if parts[0] in sys.stdlib_module_names or "__main__" in parts or not all(map(str.isidentifier, parts)):
        return False
    for parent in _with_parents(module):
        if parent in sys.modules:
            continue
        spec = importlib.util.find_spec(parent)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {parent!r}", name=parent)
        if any(_is_inside(place, folder) for place in (spec.origin, *(spec.submodule_search_locations or ()))):
            return False
        importlib.import_module(parent)
    return True


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
    >>> what_a_pickle_names(pickle.dumps([json.JSONDecoder, os.getcwd]))
    'a pickle that names json.decoder.JSONDecoder, posix.getcwd'
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
    # Of cloudpickle itself is what makes classes and functions that are pickled whole.
    told = [name for name in dict.fromkeys(found) if not name.startswith(("cloudpickle.", "pyspark.cloudpickle."))]
    names = f" that names {', '.join(told[:_MAX_NAMES])}{' and more' if told[_MAX_NAMES:] else ''}" if told else ""
    return f"a pickle{names}"


def code_of_file(content: bytes, suffix: str) -> list[str]:
    """Lists the code in a model's file, each piece in a few words; of a file that is damaged, none.

    Args:
        content: The bytes of the file.
        suffix: ``".keras"`` or ``".h5"``.
    """
    try:
        configs = _hdf5_configs(content) if suffix == ".h5" else _archive_configs(content)
        return list(dict.fromkeys(piece for config in configs for piece in _pieces(json.loads(config), "the model")))
    except (KeyError, OSError, ValueError, zipfile.BadZipFile):
        return []


def _archive_configs(content: bytes) -> list[bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [archive.read("config.json")]


def _hdf5_configs(content: bytes) -> list[str | bytes]:
    with h5py.File(io.BytesIO(content)) as file:
        return [file.attrs[name] for name in ("model_config", "training_config") if name in file.attrs]


def _pieces(config: Any, owner: str) -> Iterator[str]:
    """Yields the pieces of code that a part of a Keras config holds; the owner is the innermost object with a name."""
    if isinstance(config, Mapping):
        inner = config.get("config")
        if isinstance(inner, Mapping) and isinstance(inner.get("name"), str):
            owner = f"{config.get('class_name')} {inner['name']!r}"
        if config.get("class_name") == "__lambda__":
            yield f"a lambda of {owner}"
        elif config.get("class_name") in _PROGRAMS:
            yield f"the program of {owner}"
        config = list(config.values())
    if isinstance(config, list):
        for part in config:
            yield from _pieces(part, owner)
