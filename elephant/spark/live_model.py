"""The user's own model on the driver: what it is trained from, and what takes what was learnt."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras

from elephant.config import FitConfig
from elephant.data.schema import RowSpec
from elephant.modeling.model_spec import ModelSource, model_source, require_compiled
from elephant.modeling.variables import build_variables, rated_optimizers, read_variables, write_variables
from elephant.spark.model_files import read_model
from elephant.spark.trained import Trained


class LiveModel:
    """A model that stays the user's object, compiled as it is.

    Args:
        model: A compiled model; a function without arguments that returns one; or a file's path.
        custom_objects: Custom layers, losses, metrics and functions by name.

    Attributes:
        model: The model.

    Raises:
        ConfigurationError: It is not compiled, or cannot be built in another process.
    """

    def __init__(self, model: Any, custom_objects: Mapping[str, Any]) -> None:
        self._custom_objects = custom_objects
        self._builder: ModelSource | None = None
        # What one row of the input is, for a function whose model waits for its first batch.
        self._rows: RowSpec | None = None
        if isinstance(model, (str, os.PathLike)):
            model = read_model(model, custom_objects)[0]
        # It says why a model cannot travel, when it cannot.
        source = model_source(model, custom_objects)
        if not isinstance(model, keras.Model):
            self._builder = source
            model = source.build()
        require_compiled(model)
        self.model: keras.Model = model

    def source(self) -> ModelSource:
        """Returns the model as it is now, with its weights and its optimizer's state, for other processes to build."""
        if self._builder is None:
            return model_source(self.model, self._custom_objects)
        if not self.model.built:
            return self._builder
        build_variables(self.model, self._rows)
        variables = tuple(read_variables(self.model))
        return replace(self._builder, variables=variables, rows=self._rows, source_id=uuid.uuid4().hex)

    def take(self, trained: Trained, config: FitConfig) -> None:
        """Gives the model what a fit has learnt."""
        self._rows = trained.rows
        build_variables(self.model, trained.rows)
        write_variables(self.model, trained.variables)
        if config.scale_learning_rate:
            # Or the next fit would scale it once more.
            for optimizer in rated_optimizers(self.model):
                rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
                optimizer.learning_rate = rate / config.num_workers

    def input_widths(self) -> list[int]:
        """Returns how many values a row of each input has; zero where that is free."""
        tensors = getattr(self.model, "inputs", None) or []
        return [math.prod(size or 0 for size in tensor.shape[1:]) for tensor in tensors]
