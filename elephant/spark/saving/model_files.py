"""Models that users hand in: objects, .keras files and HDF5 files.

HDF5 is the older form, which Keras 3 still writes and whose weights it reads. But it takes the optimizer out of the
compile settings of the model that it saves, does not load the optimizer's state, and cannot compile models whose loss
was given as ``"mse"`` or another short name. So the settings and the state are written beside, in attributes and a
group that Keras leaves alone.
"""

from __future__ import annotations

import io
import json
import math
import os
import tempfile
import uuid
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import h5py
import keras
import numpy as np

from elephant.backends import current
from elephant.backends.keras_private import can_be_compiled, compile_settings, input_structure
from elephant.config import FitConfig
from elephant.data.json_types import require_parts
from elephant.data.schema import RowSpec
from elephant.driver.coordinator import FitResult
from elephant.errors import ConfigurationError, UnsupportedError, warn_user
from elephant.modeling.archive_inspection import UNREADABLE, KnownCode, code_of_file, require_known_code
from elephant.modeling.keras_archive import for_this_backend, settings_for_this_backend
from elephant.modeling.keras_saving import accepted_configs
from elephant.modeling.layers.sharded_embedding import sharded_embeddings
from elephant.modeling.model_spec import ModelSpec, model_source, require_compiled
from elephant.modeling.variables import build_variables, rated_optimizers, read_variables, write_variables
from elephant.spark.hadoop_files import read_model_bytes, require_no_model, write_model_bytes, write_model_files
from elephant.spark.saving.trust import is_trusted, require_trust

# Elephas' name of the attribute, so that its files are understood.
_CONFIG = "distributed_config"
_COMPILED = "elephant_compile_config"
_OPTIMIZER = "elephant_optimizer"

_MEMBER = "distributed_config.json"
_HDF5 = b"\x89HDF\r\n\x1a\n"
SUFFIXES = (".keras", ".h5")
_OTHERWISE = (
    "Nothing has to be trusted of Keras' own classes, of those that are registered by "
    "@keras.saving.register_keras_serializable() in this process, and of what you pass as "
    "{option}={{'Name': Name}}."
)
# Which Keras' export needs, by format.
_PACKAGES = {"onnx": "tf2onnx onnx", "openvino": "openvino", "torch": "torch", "litert": "tensorflow"}


def save_hdf5(path: Path, model: keras.Model, config: str) -> None:
    """Writes a model, its compile settings, its optimizer's state and a text."""
    compiled_with = compile_settings(model) or {}
    settings = dict(compiled_with)
    compiled = json.dumps(model.get_compile_config())
    try:
        model.save(path)
    finally:
        compiled_with.update(settings)
    with h5py.File(path, "a") as file:
        file.attrs[_CONFIG] = config
        group = file.create_group(_OPTIMIZER)
        # Large models have long settings, for which an attribute is too small.
        group.create_dataset(_COMPILED, data=np.void(compiled.encode()))
        for number, variable in enumerate(model.optimizer.variables if model.optimizer.built else []):
            group.create_dataset(str(number), data=keras.ops.convert_to_numpy(variable))


def load_hdf5(path: Path, custom_objects: Mapping[str, Any], *, safe_mode: bool) -> tuple[keras.Model, str | None]:
    """Returns the model of a file, and the text beside it, if there is one.

    Args:
        path: A file of `save_hdf5`, of Keras or of Elephas.
    """
    with h5py.File(path, "r") as file:
        config = file.attrs.get(_CONFIG)
        training = file.attrs.get("training_config")
        compiled = file[_OPTIMIZER][_COMPILED][()].tobytes().decode() if _OPTIMIZER in file else None
        state = _state(file)
    model = keras.saving.load_model(path, custom_objects=dict(custom_objects), compile=False, safe_mode=safe_mode)
    with keras.saving.custom_object_scope(dict(custom_objects)):
        if compiled is not None:
            model.compile_from_config(settings_for_this_backend(json.loads(compiled)))
            _restore(model.optimizer, state)
        elif training is not None:
            model.compile(**_arguments(settings_for_this_backend(json.loads(training))))
    return model, None if config is None else str(config)


def _state(file: h5py.File) -> list[np.ndarray]:
    group = file.get(_OPTIMIZER, {})
    return [np.asarray(group[str(number)]) for number in range(len(group) - 1)]


def _restore(optimizer: keras.optimizers.Optimizer, state: list[np.ndarray]) -> None:
    """Gives an optimizer that was built for a model's variables its state back."""
    if len(state) == len(optimizer.variables):
        for variable, value in zip(optimizer.variables, state, strict=True):
            variable.assign(value)


def _arguments(training: dict[str, Any]) -> dict[str, Any]:
    """Returns the compile arguments in a model file of Keras.

    Names, of which ``"mse"`` is one, need no deserializing.
    """
    names = ("loss", "loss_weights", "metrics", "weighted_metrics")
    given = {name: _deserialised(training.get(name)) for name in names}
    return {"optimizer": keras.optimizers.deserialize(training["optimizer_config"]), **given}


def _deserialised(config: Any) -> Any:
    if isinstance(config, dict) and "class_name" in config:
        return keras.saving.deserialize_keras_object(config)
    if isinstance(config, dict):
        return {name: _deserialised(part) for name, part in config.items()}
    if isinstance(config, list):
        return [_deserialised(part) for part in config]
    return config


def suffix_of(path: str | os.PathLike[str]) -> str:
    """Returns ``".keras"`` or ``".h5"``; raises ConfigurationError for a path that ends otherwise.

    >>> suffix_of("hdfs:///models/digits.keras")
    '.keras'
    """
    text = os.fspath(path)
    for suffix in SUFFIXES:
        if text.endswith(suffix):
            return suffix
    raise ConfigurationError(f"path: expected a name that ends in .keras or .h5. Received: {text!r}.")


def write_model(
    path: str | os.PathLike[str], model: keras.Model, config: Mapping[str, Any], *, overwrite: bool
) -> None:
    """Writes a model, its optimizer's state, and how it is trained.

    Args:
        path: Ends in ``.keras`` or ``.h5``; wherever `elephant.spark.hadoop_files.write_model_bytes` writes.
    """
    write_model_bytes(path, model_file(model, suffix_of(path), config), overwrite=overwrite)


def read_model(
    path: str | os.PathLike[str],
    custom_objects: Mapping[str, Any] | None,
    *,
    trusted: bool | None = None,
    option: str = "custom_objects",
) -> tuple[keras.Model, dict[str, Any]]:
    """Returns the model that is at a path, and how it is trained, as `model_of_file`.

    Args:
        path: Ends in ``.keras`` or ``.h5``; wherever `elephant.spark.hadoop_files.read_model_bytes` reads.
        trusted: Whether code in the file, such as lambdas, may run: `elephant.spark.saving.trust.is_trusted`.
        option: The users' name of ``custom_objects``, in errors.

    Raises:
        FileNotFoundError: There is no file.
        ConfigurationError: Keras cannot load it, or it holds code that is not trusted.
    """
    suffix, content = suffix_of(path), read_model_bytes(path)
    if content is None:
        raise FileNotFoundError(f"path: expected a file at {os.fspath(path)}. Received: a path where there is none.")
    kind = "a zip archive" if suffix == ".keras" else "an HDF5 file"
    if not (zipfile.is_zipfile(io.BytesIO(content)) if suffix == ".keras" else content.startswith(_HDF5)):
        raise ConfigurationError(
            f"path={os.fspath(path)}: expected {kind}, as Keras saves models by the name of {suffix}. Received: "
            f"{len(content):,} bytes that are none. Save the model again, or copy the whole file."
        )
    safe_mode = not is_trusted(trusted)
    if safe_mode:
        code = code_of_file(content, suffix, KnownCode(given=custom_objects or {}))
        require_trust(f"path={os.fspath(path)}", code, _OTHERWISE.format(option=option))
    model, config = model_of_file(content, suffix, custom_objects, safe_mode=safe_mode, option=option)
    backend = current()
    is_slow = backend.needs_compiler and not (model.jit_compile or model.run_eagerly)
    if is_slow and can_be_compiled(model):
        warn_user(
            f"path={os.fspath(path)}: expected a model that {backend.title} compiles. Received: jit_compile=False, "
            "which Keras also saves of a model that TensorFlow has trained on a CPU. Its steps take many times as "
            "long. Load it with keras.saving.load_model, compile it again, and pass the model."
        )
    return model, config


def export_model(path: str | os.PathLike[str], model: keras.Model, format: str, options: Mapping[str, Any]) -> None:
    """Has Keras export a model for inference, and writes what comes of it: a file, or a folder of them.

    Args:
        path: Wherever `elephant.spark.hadoop_files.write_model_bytes` writes.
        format: One of those of ``keras.Model.export``.
        options: Keras' other arguments.

    Raises:
        FileExistsError: There is such a file already.
        ConfigurationError: Keras cannot export the model in this format.
        ImportError: A package that the format needs is not here.
    """
    # Before it takes its time.
    require_no_model(path)
    if sharded := sharded_embeddings(model):
        raise UnsupportedError(
            f"export: expected layers that Keras can export. Received: the ShardedEmbedding {sharded[0].name!r}, whose "
            "rows lie outside of the model's program. Use save, or build the model with keras.layers.Embedding and "
            "give it the rows of table(...).numpy()."
        )
    with tempfile.TemporaryDirectory(prefix="elephant-export-") as folder:
        # By the same name: for some formats Keras looks at its end.
        local = Path(folder) / PurePosixPath(os.fspath(path)).name
        try:
            inputs = input_structure(model)
            if inputs is None and getattr(model, "inputs", None):
                inputs = model.inputs[0]
            if inputs is not None:
                # On symbols: some exporters want a model that has been called.
                model(inputs)
            model.export(str(local), format=format, **{"verbose": False, **options})
        except ImportError as error:
            pip = f"Run pip install {_PACKAGES[format]}." if format in _PACKAGES else "Install it."
            raise ImportError(
                f"format={format!r}: expected the packages that Keras exports with. Received: {error}. {pip}"
            ) from error
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigurationError(f"format={format!r}: Keras cannot export {model.name!r}: {error}") from error
        write_model_files(path, local.parent)


def model_file(model: keras.Model, suffix: str, config: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a file with a model, its optimizer's state, and the config.

    Raises:
        ConfigurationError: Keras cannot save the model in this form.
    """
    with tempfile.TemporaryDirectory(prefix="elephant-save-") as folder:
        path = Path(folder) / f"model{suffix}"
        try:
            with accepted_configs(model):
                _save(path, model, json.dumps(config))
        except (NotImplementedError, TypeError, ValueError) as error:
            raise ConfigurationError(f"model: Keras cannot save {model.name!r} as {suffix}: {error}") from error
        return path.read_bytes()


def model_of_file(
    content: bytes,
    suffix: str,
    custom_objects: Mapping[str, Any] | None = None,
    *,
    safe_mode: bool = True,
    option: str = "custom_objects",
) -> tuple[keras.Model, dict[str, Any]]:
    """Returns the model of a file, and its config: an empty one where Keras alone has written the file.

    Args:
        content: The bytes of the file.
        safe_mode: Whether Keras refuses code in the file, such as lambdas.
        option: The users' name of ``custom_objects``, in errors.

    Raises:
        ConfigurationError: Keras cannot load the model.
    """
    if safe_mode:
        require_known_code(content, suffix, custom_objects or {})
    with tempfile.TemporaryDirectory(prefix="elephant-load-") as folder:
        path = Path(folder) / f"model{suffix}"
        path.write_bytes(for_this_backend(content) if suffix == ".keras" else content)
        try:
            model, text = _load(path, dict(custom_objects or {}), safe_mode)
            config = {} if text is None else json.loads(text)
            require_parts(config, {"config": dict[str, Any], "class_name": str})
        except UNREADABLE as error:
            raise ConfigurationError(
                f"path: expected a Keras model. Received: a file that Keras cannot load: {error} Pass custom classes "
                f"and functions as {option}={{'Name': Name}}."
            ) from error
    return model, config


def _save(path: Path, model: keras.Model, config: str) -> None:
    if path.suffix == ".h5":
        save_hdf5(path, model, config)
        return
    model.save(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(_MEMBER, config)


def _load(path: Path, custom_objects: dict[str, Any], safe_mode: bool) -> tuple[keras.Model, str | None]:
    if path.suffix == ".h5":
        return load_hdf5(path, custom_objects, safe_mode=safe_mode)
    model = keras.saving.load_model(path, custom_objects=custom_objects, safe_mode=safe_mode)
    with zipfile.ZipFile(path) as archive:
        return model, archive.read(_MEMBER).decode() if _MEMBER in archive.namelist() else None


def source_of(
    model: object,
    custom_objects: Mapping[str, Any] | None = None,
    *,
    trusted: bool | None = None,
    to_train: bool = True,
) -> ModelSpec:
    """Returns the source of a user's model.

    Args:
        model: A compiled `keras.Model`; a function without arguments that returns one; the path of one that Keras
            has saved, wherever `elephant.spark.hadoop_files.read_model_bytes` reads; or a fitted `KerasModel`, with
            which training goes on from its weights and its optimizer's state.
        trusted: Whether code in the file of a path may run: `elephant.spark.saving.trust.is_trusted`.
        to_train: Whether it is to be trained; one that is not need not be compiled.

    Raises:
        ConfigurationError: It is none of these, is not compiled, or cannot be rebuilt; its file holds code that is
            not trusted.
    """
    if isinstance(model, (str, os.PathLike)):
        return model_source(_loaded(model, custom_objects, trusted), custom_objects, to_train=to_train)
    fitted = None if isinstance(model, keras.Model) else getattr(model, "source", None)
    return model_source(fitted if isinstance(fitted, ModelSpec) else model, custom_objects, to_train=to_train)


def _loaded(
    path: str | os.PathLike[str], custom_objects: Mapping[str, Any] | None, trusted: bool | None
) -> keras.Model:
    if not os.fspath(path).endswith(SUFFIXES):
        raise ConfigurationError(
            f"model: expected a path that ends in .keras or .h5. Received: {os.fspath(path)!r}. For a "
            "folder that KerasModel.save has made, pass KerasModel.load(path)."
        )
    try:
        return read_model(path, custom_objects, trusted=trusted, option="customObjects")[0]
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"model: expected the path of a saved model. Received: {os.fspath(path)!r}, where there is no file."
        ) from error


class UserModel:
    """A model that stays the user's object, compiled as it is.

    Args:
        model: A compiled model; a function without arguments that returns one; or a file's path.

    Attributes:
        model: The model.

    Raises:
        ConfigurationError: It is not compiled, or cannot be built in another process.
    """

    def __init__(self, model: Any, custom_objects: Mapping[str, Any]) -> None:
        self._custom_objects = custom_objects
        self._spec: ModelSpec | None = None
        # What one row of the input is, for a function whose model waits for its first batch.
        self._rows: RowSpec | None = None
        if isinstance(model, (str, os.PathLike)):
            model = read_model(model, custom_objects)[0]
        # It says why a model cannot travel, when it cannot.
        spec = model_source(model, custom_objects)
        if not isinstance(model, keras.Model):
            self._spec = spec
            model = spec.build()
        require_compiled(model)
        self.model: keras.Model = model

    def source(self) -> ModelSpec:
        """Returns the model as it is now, with its weights and its optimizer's state, for other processes to build."""
        if self._spec is None:
            return model_source(self.model, self._custom_objects)
        if not self.model.built:
            return self._spec
        build_variables(self.model, self._rows)
        variables = tuple(read_variables(self.model))
        return replace(self._spec, variables=variables, rows=self._rows, source_id=uuid.uuid4().hex)

    def take(self, result: FitResult, config: FitConfig) -> None:
        """Gives the model what a fit has learned."""
        self._rows = result.rows
        build_variables(self.model, result.rows)
        write_variables(self.model, result.variables)
        if config.scale_learning_rate:
            # Or the next fit would scale it once more.
            for optimizer in rated_optimizers(self.model):
                rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
                optimizer.learning_rate = rate / config.batches_per_step

    def input_widths(self) -> list[int]:
        """Returns how many values a row of each input has; zero where that is free."""
        tensors = getattr(self.model, "inputs", None) or []
        return [math.prod(size or 0 for size in tensor.shape[1:]) for tensor in tensors]
