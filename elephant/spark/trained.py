"""What a fit leaves, in either kind of mode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elephant.data.schema import RowSpec
from elephant.modeling.model_spec import ModelSource
from elephant.spark.model import KerasModel


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a fit leaves.

    Args:
        variables: The model's, in the order of `elephant.modeling.variables.read_variables`.
        rows: What one row of its input is.
        history: One number per epoch by metric, over all workers.
        statistics: What was counted; see `elephant.spark.model.KerasModel.training_statistics`.
        plan: Where each rank ran; see `elephant.spark.model.KerasModel.plan`.
    """

    variables: list[np.ndarray]
    rows: RowSpec
    history: dict[str, list[float]]
    statistics: dict[str, Any] = field(default_factory=dict)
    plan: list[dict[str, Any]] = field(default_factory=list)

    def as_model(self, source: ModelSource) -> KerasModel:
        """Returns the fitted model.

        Args:
            source: The model that was trained.
        """
        trained = source.with_variables(self.variables, self.rows)
        return KerasModel(trained, history=self.history, training_statistics=self.statistics, plan=self.plan)
