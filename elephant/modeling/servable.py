"""A trained model as it travels to where it predicts: without what only training needs."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import h5py
import keras
import numpy as np

from elephant.data.schema import RowSpec
from elephant.modeling.settings import KerasSettings
from elephant.modeling.source import ModelSource, registered_objects, save_archive
from elephant.modeling.variables import build_variables

_CONFIG, _WEIGHTS = "config.json", "model.weights.h5"


@dataclass(frozen=True, repr=False, eq=False)
class Servable:
    """A model that predicts and evaluates, without the state of its optimizer.

    Args:
        settings: Keras' settings where it was made.
        archive: The bytes of a ``.keras`` file, or None when there is a builder.
        builder: A function without arguments that returns the model, or None.
        weights: What replaces the built model's weights; None keeps them.
        rows: What one row of its input is, for a builder whose model is not built by it.
        custom_objects: Classes and functions that the archive names.
        safe_mode: Whether Keras refuses code in the archive.
    """

    settings: KerasSettings
    archive: bytes | None = None
    builder: Callable[[], keras.Model] | None = None
    weights: tuple[np.ndarray, ...] | None = None
    rows: RowSpec | None = None
    custom_objects: Mapping[str, Any] = field(default_factory=dict)
    safe_mode: bool = False

    @classmethod
    def of(cls, source: ModelSource) -> Servable:
        """Returns what a source's model needs to predict; a model that a function builds is built for that once."""
        if source.archive is not None:
            archive = without_optimizer(source.archive)
            objects, safe_mode = source.custom_objects, source.safe_mode
            return cls(source.settings, archive=archive, custom_objects=objects, safe_mode=safe_mode)
        weights = tuple(np.array(keras.ops.convert_to_numpy(weight)) for weight in source.build().weights)
        return cls(source.settings, builder=source.builder, weights=weights, rows=source.rows)

    @classmethod
    def of_model(cls, model: keras.Model) -> Servable:
        """Returns what a model, compiled or not, needs to predict; raises ConfigurationError where it cannot travel."""
        archive = without_optimizer(save_archive(model))
        settings = KerasSettings.current()
        return cls(settings, archive=archive, custom_objects=registered_objects(model))

    def build(self) -> keras.Model:
        """Returns a new model; one that was compiled is compiled again, with an optimizer that keeps nothing."""
        source = ModelSource(
            facts=None,  # type: ignore[arg-type]  # nothing of them is needed to build it
            settings=self.settings,
            archive=self.archive,
            builder=self.builder,
            custom_objects=self.custom_objects,
            safe_mode=self.safe_mode,
        )
        model = source.build()
        if self.weights is not None:
            with self.settings.applied():
                build_variables(model, self.rows)
            for variable, value in zip(model.weights, self.weights, strict=True):
                variable.assign(value)
        # Batches are handed over one at a time.
        model.steps_per_execution = 1
        return model


def without_optimizer(archive: bytes) -> bytes:
    """Returns a ``.keras`` archive without its optimizer's state: of Adam's, a third of the bytes.

    The optimizer itself becomes plain gradient descent, which keeps none.

    Args:
        archive: The bytes of a ``.keras`` file.
    """
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as given, zipfile.ZipFile(made, "w") as kept:
        for name in given.namelist():
            content = given.read(name)
            if name == _CONFIG:
                content = _with_plain_optimizer(content)
            elif name == _WEIGHTS:
                content = _without_group(content, "optimizer")
            kept.writestr(name, content)
    return made.getvalue()


def _with_plain_optimizer(content: bytes) -> bytes:
    config = json.loads(content)
    compiled = config.get("compile_config")
    if not isinstance(compiled, dict) or "optimizer" not in compiled:
        return content
    compiled["optimizer"] = "sgd"
    return json.dumps(config).encode()


def _without_group(content: bytes, left_out: str) -> bytes:
    # Copied, not deleted: HDF5 does not give the space of what is deleted back.
    made = io.BytesIO()
    with h5py.File(io.BytesIO(content)) as given, h5py.File(made, "w") as kept:
        kept.attrs.update(given.attrs)
        for name in given:
            if name != left_out:
                given.copy(name, kept)
    return made.getvalue()
