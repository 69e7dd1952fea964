"""Inspection of model files before Keras reads them: what of a file that nobody trusts would run, or read elsewhere.

Keras' safe mode is as good as the installed Keras, and several versions could be led around it. So a file is read
first as what it is, JSON and HDF5, and all in it must be known: classes that Keras makes models of, its functions of
numbers, and what is registered or was handed over. A file that cannot be read as such is left to Keras, which cannot
read it either.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import sys
import types
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import h5py
import keras

from elephant.backends import BACKENDS
from elephant.backends.keras_private import legacy_places, named_publicly, saveable
from elephant.errors import ConfigurationError
from elephant.storage.folder import DAMAGES

# The config of the model, by the name that it has in HDF5; and that of its compile settings, which
# `elephant.spark.saving.model_files` writes there.
_MODEL = "model_config"
COMPILED_IN_HDF5 = "elephant_optimizer/elephant_compile_config"

# What Keras makes models of.
KINDS = (
    # Layers, models, operations, losses, metrics, optimizers, features.
    saveable(),
    keras.optimizers.schedules.LearningRateSchedule,
    keras.initializers.Initializer,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    keras.dtype_policies.DTypePolicy,
    keras.quantizers.Quantizer,
    keras.random.SeedGenerator,
    # Not in every Keras 3.
    *filter(None, [getattr(keras.quantizers, "QuantizationConfig", None)]),
)
# Layers that hold a program, or load one.
PROGRAMS = tuple(name for backend in BACKENDS.values() for name in backend.program_layers)
BACKENDS_OPTIMIZERS = tuple(backend.optimizers for backend in BACKENDS.values() if backend.optimizers)
_WITH_VOCABULARY = (keras.layers.StringLookup, keras.layers.IntegerLookup, keras.layers.TextVectorization)
# Where Keras looks for functions of which a config tells the name alone, and where else there are some of arrays.
_UNPLACED_FUNCTIONS = (
    keras.activations,
    keras.constraints,
    keras.initializers,
    keras.losses,
    keras.metrics,
    keras.regularizers,
)
_FUNCTIONS = (*_UNPLACED_FUNCTIONS, keras.ops, keras.ops.image, keras.random)
_NOT_OF_ARRAYS = ("deserialize", "get", "serialize")
# Where it looks for classes so, in HDF5 files and those of Keras 2.
_UNPLACED_CLASSES = (
    *legacy_places(),
    keras.optimizers,
    keras.optimizers.schedules,
    keras.dtype_policies,
    *_UNPLACED_FUNCTIONS,
)
# Packages of Keras' team: Keras imports them where a config names them. Here the caller has imported them.
_PACKAGES_OF_KERAS = ("keras_cv", "keras_hub", "keras_nlp")
_DEEP = "a config that is nested too deeply to be looked at"
_LARGE = "a config that is too large to be looked at"
# Of a config: a few hundred bytes for each layer. A small archive may hold a text of any length.
_MOST_CONFIG_BYTES = 1 << 26
_NAMES = ("class_name", "module", "name", "registered_name")
# Values, which have no code.
_VALUES = ("__bytes__", "__ellipsis__", "__keras_tensor__", "__numpy__", "__slice__", "__tensor__")
# What reading a model's file may raise that is not what it seems.
UNREADABLE = (*DAMAGES, MemoryError, OSError)


@dataclass(frozen=True)
class KnownCode:
    """Code that a file may name besides Keras' own and what is registered with Keras.

    Args:
        given: Classes and functions that whoever loads hands over, by the names that the file uses.
        found: Those that names beside the file have led to: classes, and functions that are losses and metrics. A file
            has no say in what these functions are called with.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    found: Mapping[str, Any] = field(default_factory=dict)

    def is_given(self, name: object) -> bool:
        """Returns whether a name is that of something which may be used for anything."""
        return isinstance(name, str) and (name in self.given or keras.saving.get_registered_object(name) is not None)

    def class_of(self, name: object) -> Any:
        """Returns the class of a name; None where it is not known."""
        if not isinstance(name, str):
            return None
        known = {**self.found, **self.given}
        return known[name] if name in known else keras.saving.get_registered_object(name)


NOTHING_MORE = KnownCode()


def code_of_file(
    content: bytes, suffix: str, known: KnownCode = NOTHING_MORE, *, is_compiled: bool = True
) -> list[str]:
    """Lists what a model's file would run, or read elsewhere, each in a few words; of a file that is damaged, nothing.

    Args:
        content: The bytes of the file.
        suffix: ``".keras"``; any other one is that of HDF5.
        known: Code that it may name.
        is_compiled: Whether Keras is to compile the model as the file says.
    """
    try:
        configs, elsewhere = (_of_archive if suffix == ".keras" else _of_hdf5)(content)
        used = {name: json.loads(config) for name, config in configs.items() if name == _MODEL or is_compiled}
        if not is_compiled and isinstance(used.get(_MODEL), dict):
            used[_MODEL].pop("compile_config", None)
    except RecursionError:
        return [_DEEP]
    except UNREADABLE:
        return []
    try:
        parts = [_pieces(config, known, "the model", compiles=name != _MODEL) for name, config in used.items()]
        return list(dict.fromkeys([*itertools.chain.from_iterable(parts), *elsewhere]))
    except RecursionError:
        return [_DEEP]


def require_known_code(content: bytes, suffix: str, custom_objects: Mapping[str, Any]) -> None:
    """Raises ConfigurationError where a file that nobody trusts would run something; called where Keras loads it.

    Args:
        custom_objects: Code that it may name.
    """
    code = code_of_file(content, suffix, KnownCode(given=custom_objects))
    if code:
        raise ConfigurationError(
            "model: expected classes and functions of Keras', registered ones and custom objects alone, because nobody "
            f"has trusted the file (safe_mode). Received: {'; '.join(code)}. Load it with trusted=True where you trust "
            "whoever wrote it."
        )


def _of_archive(content: bytes) -> tuple[dict[str, str | bytes], list[str]]:
    """Returns the configs in an archive, and what else it reads."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        elsewhere = []
        for name in archive.namelist():
            if name.endswith(".h5"):
                with archive.open(name) as member, h5py.File(member) as file:
                    elsewhere += _read_elsewhere(file)
        if archive.getinfo("config.json").file_size > _MOST_CONFIG_BYTES:
            return {}, [*elsewhere, _LARGE]
        return {_MODEL: archive.read("config.json")}, elsewhere


def _of_hdf5(content: bytes) -> tuple[dict[str, str | bytes], list[str]]:
    with h5py.File(io.BytesIO(content)) as file:
        elsewhere = _read_elsewhere(file)
        configs = {name: file.attrs[name] for name in (_MODEL, "training_config") if name in file.attrs}
        if not elsewhere and COMPILED_IN_HDF5 in file:
            configs[COMPILED_IN_HDF5] = file[COMPILED_IN_HDF5][()].tobytes()
        return configs, elsewhere


def _read_elsewhere(file: h5py.File) -> list[str]:
    """Returns in words which arrays of an HDF5 file are in other files."""
    found: list[str] = []

    def look(name: str, part: Any) -> None:
        if isinstance(part, h5py.Dataset) and (part.external or part.is_virtual):
            found.append(f"an array outside of the file, {name}")
        elif isinstance(part, h5py.Group):
            links = (part.get(key, getlink=True) for key in part)
            found.extend(
                f"a link to another file, {link.filename}" for link in links if isinstance(link, h5py.ExternalLink)
            )

    look("/", file)
    file.visititems(look)
    return found


def _pieces(config: Any, known: KnownCode, owner: str, *, compiles: bool = False) -> Iterator[str]:
    """Yields, in words, code and files that a part of a Keras config would run or read.

    Args:
        owner: The innermost object with a name.
        compiles: Whether the part is of compile settings, and of no object in these.
    """
    if isinstance(config, list):
        for part in config:
            yield from _pieces(part, known, owner, compiles=compiles)
    elif isinstance(config, str):
        # Keras takes a name for the function that goes by it.
        if not (compiles or known.is_given(config)) and isinstance(known.found.get(config), types.FunctionType):
            yield f"the function {config} of {owner}"
    elif isinstance(config, Mapping):
        yield from _pieces_of_object(config, known, owner, compiles=compiles)


def _pieces_of_object(config: Mapping[str, Any], known: KnownCode, owner: str, *, compiles: bool) -> Iterator[str]:
    kind, inner = config.get("class_name"), config.get("config")
    if isinstance(inner, Mapping) and isinstance(inner.get("name"), str):
        owner = f"{kind} {inner['name']!r}"
    if isinstance(kind, str) and "config" in config:
        compiles = compiles and kind == "function"
        yield from (_function if kind == "function" else _class)(config, known, owner, compiles=compiles)
    for key, part in config.items():
        # Names of objects are no names of functions, and those of a function have been looked at.
        if not (isinstance(part, str) and (key in _NAMES or kind == "function")):
            yield from _pieces(part, known, owner, compiles=compiles or key == "compile_config")


def _function(config: Mapping[str, Any], known: KnownCode, owner: str, *, compiles: bool) -> Iterator[str]:
    name, module = config["config"], config.get("module")
    if "inbound_nodes" in config:
        yield f"the function {_full_name(config, name)} in the place of a layer"
    elif not (
        known.is_given(name)
        or _is_of_arrays(module, name)
        or (compiles and isinstance(name, str) and name in known.found)
    ):
        yield f"the function {_full_name(config, name)} of {owner}"


def _is_of_arrays(module: object, name: object) -> bool:
    """Returns whether Keras finds a function of its own that computes with arrays."""
    if not isinstance(name, str) or name in _NOT_OF_ARRAYS:
        return False
    if module in (None, "builtins"):
        return any(callable(vars(place).get(name)) for place in _UNPLACED_FUNCTIONS)
    own = [vars(place)[name] for place in _FUNCTIONS if name in vars(place)]
    return any(found is one for found in _of_keras(module, name) for one in own)


def _class(config: Mapping[str, Any], known: KnownCode, owner: str, *, compiles: bool) -> Iterator[str]:
    name, inner = config["class_name"], config["config"]
    if name == "__lambda__":
        yield f"a lambda of {owner}"
    elif name in PROGRAMS:
        yield f"the program of {owner}"
    elif name not in _VALUES:
        kind = _named_class(config, known)
        if kind is None:
            yield f"{_full_name(config, name)} of {owner}"
        elif isinstance(inner, Mapping) and issubclass(kind, _WITH_VOCABULARY):
            if isinstance(inner.get("vocabulary"), str):
                yield f"a file that {owner} reads, {inner['vocabulary']}"


def _named_class(config: Mapping[str, Any], known: KnownCode) -> type | None:
    """Returns the class that Keras finds by a config; None where it is of no kind that is known."""
    name, module = config["class_name"], config.get("module")
    # Configs without a module, of HDF5 and Keras 2, have no registered names.
    key = name if module is None else config.get("registered_name", name)
    custom = known.class_of(key)
    found = [custom] if custom is not None else list(_of_keras(module, name))
    kinds = [one for one in found if isinstance(one, type) and (issubclass(one, KINDS) or known.is_given(key))]
    return kinds[0] if kinds and len(kinds) == len(found) else None


def _of_keras(module: object, name: str) -> Iterator[Any]:
    """Yields objects that Keras finds in itself by a module and a name."""
    if module is None:
        yield from (vars(place)[name] for place in _UNPLACED_CLASSES if name in vars(place))
    elif not isinstance(module, str):
        return
    elif module.split(".")[0] in _PACKAGES_OF_KERAS:
        yield vars(sys.modules[module]).get(name) if module in sys.modules else None
    elif module.split(".")[0] == "keras":
        public = named_publicly(f"{module}.{name}")
        yield public if public is not None else _internal(module, name)


def _internal(module: str, name: str) -> Any:
    try:
        return vars(importlib.import_module(module)).get(name)
    except (ImportError, ValueError):
        # Optimizers of a backend that is not installed are loaded as Keras' own: `elephant.modeling.keras_archive`.
        return vars(keras.optimizers).get(name) if module.startswith(BACKENDS_OPTIMIZERS) else None


def _full_name(config: Mapping[str, Any], name: object) -> str:
    module = config.get("module")
    return f"{module}.{name}" if module not in (None, "builtins") else str(name)
