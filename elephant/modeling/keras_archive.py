"""Bytes of a ``.keras`` file: saved, loaded, and changed for another backend or for predictions alone."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shutil
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import h5py
import keras
import numpy as np

from elephant.backends import current
from elephant.backends.keras_private import (
    compile_settings,
    compiled_with_values,
    load_assets,
    load_some_layers,
    model_of_config,
)
from elephant.errors import ConfigurationError
from elephant.modeling.archive_inspection import BACKENDS_OPTIMIZERS, UNREADABLE, require_known_code
from elephant.modeling.keras_saving import accepted_configs, found_lambdas
from elephant.modeling.model_equality import are_equal
from elephant.modeling.stages import without_values
from elephant.modeling.variables import read_values
from elephant.storage.filesystem import scratch_folder

_CONFIG, _WEIGHTS, _ASSETS = "config.json", "model.weights.h5", "assets"
_COPIED_BYTES = 2**22


def save_archive(model: keras.Model) -> bytes:
    """Returns a model as the bytes of a ``.keras`` file; raises ConfigurationError when Keras cannot save it."""
    with tempfile.TemporaryDirectory(prefix="elephant-model-", dir=scratch_folder()) as folder:
        path = Path(folder) / "model.keras"
        _restore_optimizer(model)
        try:
            with accepted_configs(model), warnings.catch_warnings():
                # Its first rows build it.
                warnings.filterwarnings("ignore", "You are saving a model that has not yet been built")
                model.save(path)
        except (NotImplementedError, TypeError, ValueError) as error:
            # Without Keras' example of a class, which is longer than all else.
            reason = " ".join(str(error).partition("\nExample:")[0].split())
            raise ConfigurationError(
                f"model: Keras cannot save {model.name!r}: {reason} "
                "Pass a function that builds and compiles the model instead: KerasEstimator(model=build_model).",
                topic="a-model-that-keras-cannot-save",
            ) from error
        return path.read_bytes()


def _restore_optimizer(model: keras.Model) -> None:
    """Puts the optimizer back among a model's compile settings: Keras takes it out when it saves a model as ``.h5``.

    A model that is saved without would be built with RMSprop.
    """
    settings = compile_settings(model)
    if settings is not None and "loss" in settings and "optimizer" not in settings:
        settings["optimizer"] = model.optimizer


def load_archive(archive: bytes, custom_objects: Mapping[str, Any], safe_mode: bool) -> keras.Model:
    """Returns the model of a ``.keras`` archive; in safe mode, after a look at the code that it names."""
    with tempfile.TemporaryDirectory(prefix="elephant-model-", dir=scratch_folder()) as folder:
        path = Path(folder) / "model.keras"
        with _loading(archive, custom_objects, safe_mode):
            path.write_bytes(archive)
            return keras.saving.load_model(path, custom_objects=dict(custom_objects), safe_mode=safe_mode)


def load_structure(
    archive: bytes, custom_objects: Mapping[str, Any], safe_mode: bool, *, saved_on: str | None = None
) -> keras.Model:
    """Returns the model of a ``.keras`` archive, compiled, whose variables have shapes and no values.

    The archive's weights are not read, and the optimizer is not built: both take no memory.

    Args:
        saved_on: The backend that has saved it; see `settings_for_this_backend`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="elephant-assets-", dir=scratch_folder()) as folder,
        _loading(archive, custom_objects, safe_mode),
        zipfile.ZipFile(io.BytesIO(archive)) as given,
    ):
        config = json.loads(given.read(_CONFIG))
        settings = config.pop("compile_config", None)
        with without_values():
            model: keras.Model = model_of_config(config, custom_objects, safe_mode)
        assets = [name for name in given.namelist() if name.startswith(f"{_ASSETS}/")]
        if assets:
            given.extractall(folder, assets)
            load_assets(model, Path(folder) / _ASSETS)
        if settings:
            _compile(model, settings_for_this_backend(settings, saved_on=saved_on), custom_objects, safe_mode)
        return model


def _compile(
    model: keras.Model, settings: Mapping[str, Any], custom_objects: Mapping[str, Any], safe_mode: bool
) -> None:
    """Compiles a model by saved settings, as Keras does it, and leaves the optimizer without variables of weights."""
    if type(model).compile_from_config is not keras.Model.compile_from_config:
        with keras.saving.custom_object_scope(dict(custom_objects)):
            model.compile_from_config(settings)
        return
    given = keras.saving.deserialize_keras_object(
        dict(settings), custom_objects=dict(custom_objects), safe_mode=safe_mode
    )
    model.compile(**given)


@contextlib.contextmanager
def _loading(archive: bytes, custom_objects: Mapping[str, Any], safe_mode: bool) -> Iterator[None]:
    """Says what is wrong with an archive that Keras loads in a ``with`` block, and nothing of what is not."""
    if safe_mode:
        require_known_code(archive, ".keras", custom_objects)
    try:
        with warnings.catch_warnings(), found_lambdas(custom_objects):
            # An optimizer that was never used has: its step count, its rate unless a schedule has it, those of
            # optimizers inside of it, and what loss scaling counts.
            warnings.filterwarnings("ignore", r"Skipping variable loading for optimizer.* has [1-8] variables")
            # The first call of a layer without a build builds it: the weights are compared, or come beside.
            warnings.filterwarnings("ignore", r"`build\(\)` was called on layer")
            # `model_source` has an answer to that.
            warnings.filterwarnings("ignore", r"`compile\(\)` was not called as part of model loading")
            yield
    except UNREADABLE as error:
        raise ConfigurationError(
            f"model: Keras cannot rebuild it from its archive: {_cause(error)} "
            "Or pass a function that builds the model.",
            topic="a-model-that-keras-cannot-save",
        ) from error


def extract_weights(archive: bytes, folder: Path) -> Path:
    """Writes the weights of a ``.keras`` archive, and of its optimizer, to a file of HDF5 in a folder."""
    path = folder / _WEIGHTS
    with zipfile.ZipFile(io.BytesIO(archive)) as given, given.open(_WEIGHTS) as member, path.open("wb") as file:
        shutil.copyfileobj(member, file, _COPIED_BYTES)
    return path


def _cause(error: Exception) -> str:
    """Returns the class that Keras misses or cannot make, without the whole config around it, and what to do."""
    refused = re.findall(r"\w+\.__init__\(\) got an unexpected keyword argument '\w+'", str(error))
    if refused:
        return f"{refused[-1]}. Let it take **options, and hand them to super().__init__(**options)."
    missing = re.search(r"Could not locate (?:class|function) '[^']*'\.", str(error))
    return (
        f"{missing[0] if missing else error} Pass its custom classes and functions as customObjects={{'Name': Name}}, "
        "or register them with @keras.saving.register_keras_serializable()."
    )


def without_weights(archive: bytes) -> bytes:
    """Returns a ``.keras`` archive of which `load_structure` makes a model, and nothing else: its weights are left out.

    Args:
        archive: The bytes of a ``.keras`` file.
    """
    return _rewritten(archive, {_WEIGHTS: lambda _: b""})


def with_other_weights(archive: bytes, model: keras.Model, weights: list[np.ndarray]) -> bytes:
    """Returns a ``.keras`` archive with other weights, and an optimizer that has not been used.

    One copy of the weights is in memory at a time, the given one and then the archive's.

    Args:
        archive: The bytes of a ``.keras`` file.
        model: What `load_structure` makes of it.
        weights: The values of its weights, in their order. The list is emptied.
    """
    with tempfile.TemporaryDirectory(prefix="elephant-model-", dir=scratch_folder()) as folder:
        file, made = Path(folder) / _WEIGHTS, Path(folder) / "model.keras"
        # Keras makes an optimizer to see what all of them have.
        with _ValueScope(model, weights), compiled_with_values():
            model.save_weights(file)
        weights.clear()
        with zipfile.ZipFile(io.BytesIO(archive)) as given, zipfile.ZipFile(made, "w") as kept:
            for name in given.namelist():
                if name != _WEIGHTS:
                    kept.writestr(name, given.read(name))
            kept.write(file, _WEIGHTS)
        file.unlink()
        return made.read_bytes()


class _ValueScope(keras.StatelessScope):
    """Scope in which a model's weights have given values, each a tensor for as long as something looks at it."""

    def __init__(self, model: keras.Model, values: Sequence[np.ndarray]) -> None:
        super().__init__(initialize_variables=False)
        self._given = {id(variable): value for variable, value in zip(model.weights, values, strict=True)}

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns the value of a variable; None of one that has its own."""
        value = self._given.get(id(variable))
        return None if value is None else keras.ops.convert_to_tensor(value, dtype=variable.dtype)


def has_weights_of(archive: bytes, model: keras.Model, structure: keras.Model) -> bool:
    """Returns whether a ``.keras`` archive gives back all weights of a model, bit by bit.

    One weight at a time is in memory. False also stands for an archive of which that cannot be said in this way.

    Args:
        archive: The bytes of a ``.keras`` file.
        model: The model that was saved.
        structure: What `load_structure` makes of the archive.
    """
    if [tuple(weight.shape) for weight in model.weights] != [tuple(weight.shape) for weight in structure.weights]:
        return False
    with tempfile.TemporaryDirectory(prefix="elephant-model-", dir=scratch_folder()) as folder:
        try:
            file = extract_weights(archive, Path(folder))
            with _ComparingScope(model, structure) as comparing:
                load_some_layers(structure, file, [structure.optimizer])
        except Exception:
            # A layer looks at the values that it is given, say.
            return False
    return comparing.equal == len(model.weights)


def holds_values(archive: bytes, values: Sequence[np.ndarray]) -> bool:
    """Returns whether a ``.keras`` archive holds values, bit by bit, each as often as they do.

    Args:
        archive: The bytes of a ``.keras`` file.
        values: Those of a model's variables. Its archive may hold more.
    """
    with zipfile.ZipFile(io.BytesIO(archive)) as given, h5py.File(io.BytesIO(given.read(_WEIGHTS))) as file:
        held: Counter[_Content] = Counter()

        def take(_: str, item: Any) -> None:
            # Texts are no variable's.
            if isinstance(item, h5py.Dataset) and item.dtype.kind != "O":
                held[_content(item[()])] += 1

        file.visititems(take)
    return Counter(map(_content, values)) <= held


_Content = tuple[tuple[int, ...], str, bytes]


def _content(value: Any) -> _Content:
    """Returns a value's shape and type, and a hash of its bytes."""
    array = np.ascontiguousarray(value)
    return np.shape(value), str(array.dtype), hashlib.blake2b(array.reshape(-1).view(np.uint8).data).digest()


class _ComparingScope(keras.StatelessScope):
    """Scope in which a structure's weights get values, which are compared with those of a model and not kept."""

    def __init__(self, model: keras.Model, structure: keras.Model) -> None:
        super().__init__(initialize_variables=False)
        pairs = zip(structure.weights, model.weights, strict=True)
        self._expected = {id(variable): weight for variable, weight in pairs}
        self.equal = 0

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Takes note of a value: Keras' variables call it."""
        variable, value = update
        # Of a second value for the same weight nothing is known.
        weight = self._expected.pop(id(variable), None)
        if weight is not None:
            self.equal += are_equal(read_values([weight]), [keras.ops.convert_to_numpy(value)])


def without_optimizer(archive: bytes) -> bytes:
    """Returns a ``.keras`` archive without its optimizer's state: of Adam's, a third of the bytes.

    The optimizer itself becomes plain gradient descent, which keeps none.

    Args:
        archive: The bytes of a ``.keras`` file.
    """
    try:
        return _rewritten(archive, {_CONFIG: _with_plain_optimizer, _WEIGHTS: _without_optimizer_state})
    except UNREADABLE as error:
        raise ConfigurationError(
            f"model: expected what Keras has saved. Received: an archive that is damaged: {type(error).__name__}: "
            f"{error}. Save the model again."
        ) from error


def for_this_backend(archive: bytes, *, saved_on: str | None = None) -> bytes:
    """Returns a ``.keras`` archive as the backend of this process loads and trains it, see `settings_for_this_backend`.

    Args:
        archive: The bytes of a ``.keras`` file.
        saved_on: The backend that has saved it; None where that is not known.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as given:
            config = json.loads(given.read(_CONFIG))
    except UNREADABLE:
        # Keras says what is wrong with it.
        return archive
    settings = config.get("compile_config") if isinstance(config, dict) else None
    if not isinstance(settings, dict):
        return archive
    config["compile_config"] = settings_for_this_backend(settings, saved_on=saved_on)
    return archive if config["compile_config"] == settings else _rewritten(archive, {_CONFIG: lambda _: _json(config)})


def settings_for_this_backend(settings: Mapping[str, Any], *, saved_on: str | None = None) -> dict[str, Any]:
    """Returns compile settings that another backend may have saved, as they are right on the backend of this process.

    Keras saves what ``jit_compile="auto"`` has come to. JAX' True has PyTorch compile for minutes; False, of PyTorch or
    of TensorFlow without a GPU, leaves JAX uncompiled. So it is ``"auto"`` once more. And PyTorch's optimizers have
    names that Keras finds where PyTorch is installed, where they take tensors of PyTorch alone.

    Args:
        settings: Those of ``keras.Model.get_compile_config``.
        saved_on: The backend that has saved them; None where that is not known. Then PyTorch's optimizers tell whether
            it was PyTorch, and settings of TensorFlow and JAX are not told apart.
    """
    here, given = current(), dict(settings)
    portable = cast(dict[str, Any], _with_portable_optimizers(given))
    if here.name == saved_on or (saved_on is None and bool(here.optimizers) == (portable != given)):
        return given
    return {**portable, "jit_compile": "auto"} if "jit_compile" in portable else portable


def _with_portable_optimizers(config: Any) -> Any:
    if isinstance(config, list):
        return [_with_portable_optimizers(part) for part in config]
    if not isinstance(config, dict):
        return config
    if str(config.get("module")).startswith(BACKENDS_OPTIMIZERS):
        config = {**config, "module": "keras.optimizers", "registered_name": None}
    return {name: _with_portable_optimizers(part) for name, part in config.items()}


def _rewritten(archive: bytes, changes: Mapping[str, Callable[[bytes], bytes]]) -> bytes:
    """Returns a zip archive with the content of some of its members changed."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as given, zipfile.ZipFile(made, "w") as kept:
        for name in given.namelist():
            kept.writestr(name, changes.get(name, bytes)(given.read(name)))
    return made.getvalue()


def _json(config: Any) -> bytes:
    return json.dumps(config).encode()


def _with_plain_optimizer(content: bytes) -> bytes:
    config = json.loads(content)
    compiled = config.get("compile_config")
    if not isinstance(compiled, dict) or "optimizer" not in compiled:
        return content
    compiled["optimizer"] = "sgd"
    return _json(config)


def _without_optimizer_state(content: bytes) -> bytes:
    # Copied, not deleted: HDF5 does not give the space of what is deleted back.
    made = io.BytesIO()
    with h5py.File(io.BytesIO(content)) as given, h5py.File(made, "w") as kept:
        kept.attrs.update(given.attrs)
        for name in given:
            if name != "optimizer":
                given.copy(name, kept)
    return made.getvalue()
