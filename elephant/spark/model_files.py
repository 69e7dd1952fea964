"""One file with a Keras model and how it is trained: ``.keras`` or ``.h5``, which Keras opens as any other."""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from elephant.errors import ConfigurationError
from elephant.spark.storage import read_model_bytes, write_model_bytes
from elephant.spark.trust import code_of_file, is_trusted, require_trust

_MEMBER = "distributed_config.json"
_SUFFIXES = (".keras", ".h5")


def suffix_of(path: str | os.PathLike[str]) -> str:
    """Returns ``".keras"`` or ``".h5"``; raises ConfigurationError for a path that ends otherwise.

    >>> suffix_of("hdfs:///models/digits.keras")
    '.keras'
    """
    text = os.fspath(path)
    for suffix in _SUFFIXES:
        if text.endswith(suffix):
            return suffix
    raise ConfigurationError(f"path: expected a name that ends in .keras or .h5. Received: {text!r}.")


def write_model(
    path: str | os.PathLike[str], model: keras.Model, config: Mapping[str, Any], *, overwrite: bool
) -> None:
    """Writes a model, its optimizer's state, and how it is trained.

    Args:
        path: Ends in ``.keras`` or ``.h5``; wherever `elephant.spark.storage.write_model_bytes` writes.
        model: A compiled model.
        config: What JSON holds, about how it is trained.
        overwrite: Whether to replace a file that is there.
    """
    write_model_bytes(path, model_file(model, suffix_of(path), config), overwrite=overwrite)


def read_model(
    path: str | os.PathLike[str], custom_objects: Mapping[str, Any] | None, *, trusted: bool | None = None
) -> tuple[keras.Model, dict[str, Any]]:
    """Returns the model that is at a path, and how it is trained, as `model_of_file`.

    Args:
        path: Ends in ``.keras`` or ``.h5``; wherever `elephant.spark.storage.read_model_bytes` reads.
        custom_objects: Custom layers, losses, metrics and functions by name.
        trusted: Whether code in the file, such as lambdas, may run: `elephant.spark.trust.is_trusted`.

    Raises:
        FileNotFoundError: There is no file.
        ConfigurationError: Keras cannot load it, or it holds code that is not trusted.
    """
    suffix, content = suffix_of(path), read_model_bytes(path)
    if content is None:
        raise FileNotFoundError(f"path: expected a file at {os.fspath(path)}. Received: a path where there is none.")
    safe_mode = not is_trusted(trusted)
    if safe_mode:
        require_trust(f"path={os.fspath(path)}", code_of_file(content, suffix))
    return model_of_file(content, suffix, custom_objects, safe_mode=safe_mode)


def model_file(model: keras.Model, suffix: str, config: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a file with a model, its optimizer's state, and the config.

    Args:
        model: A compiled model.
        suffix: The form of the file.
        config: What JSON holds, about how it is trained.

    Raises:
        ConfigurationError: Keras cannot save the model in this form.
    """
    with tempfile.TemporaryDirectory(prefix="elephant-save-") as folder:
        path = Path(folder) / f"model{suffix}"
        try:
            _save(path, model, json.dumps(config))
        except (NotImplementedError, TypeError, ValueError) as error:
            raise ConfigurationError(f"model: Keras cannot save {model.name!r} as {suffix}: {error}") from error
        return path.read_bytes()


def model_of_file(
    content: bytes, suffix: str, custom_objects: Mapping[str, Any] | None = None, *, safe_mode: bool = True
) -> tuple[keras.Model, dict[str, Any]]:
    """Returns the model of a file, and its config: an empty one where Keras alone has written the file.

    Args:
        content: The bytes of the file.
        suffix: Its form.
        custom_objects: Custom layers, losses, metrics and functions by name.
        safe_mode: Whether Keras refuses code in the file, such as lambdas.

    Raises:
        ConfigurationError: Keras cannot load the model.
    """
    with tempfile.TemporaryDirectory(prefix="elephant-load-") as folder:
        path = Path(folder) / f"model{suffix}"
        path.write_bytes(content)
        try:
            model, text = _load(path, dict(custom_objects or {}), safe_mode)
        except (NotImplementedError, TypeError, ValueError, OSError) as error:
            raise ConfigurationError(
                f"path: expected a Keras model. Received: a file that Keras cannot load: {error} Pass custom classes "
                "and functions as custom_objects={'Name': Name}."
            ) from error
    return model, {} if text is None else dict(json.loads(text))


def _save(path: Path, model: keras.Model, config: str) -> None:
    if path.suffix == ".h5":
        from elephant.spark.hdf5_model import save_hdf5

        save_hdf5(path, model, config)
        return
    model.save(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(_MEMBER, config)


def _load(path: Path, custom_objects: dict[str, Any], safe_mode: bool) -> tuple[keras.Model, str | None]:
    if path.suffix == ".h5":
        from elephant.spark.hdf5_model import load_hdf5

        return load_hdf5(path, custom_objects, safe_mode=safe_mode)
    model = keras.saving.load_model(path, custom_objects=custom_objects, safe_mode=safe_mode)
    with zipfile.ZipFile(path) as archive:
        return model, archive.read(_MEMBER).decode() if _MEMBER in archive.namelist() else None
