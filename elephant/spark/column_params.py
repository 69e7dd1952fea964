"""The params that name columns, of the estimator and of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters

from elephant.errors import ConfigurationError
from elephant.spark.accessors import optional, with_accessors
from elephant.spark.choice import ColumnChoice


def to_columns(value: Any) -> str | list[str]:
    """Returns one column name, or a list of them; raises TypeError for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(name, str) for name in value):
        return list(value)
    raise TypeError(f"expected a column name or a list of column names. Received: {value!r}.")


def to_columns_by_name(value: Any) -> dict[str, str | list[str]] | list[str]:
    """Returns columns by the name of an input or output, or a list in their order; raises TypeError for the rest."""
    if isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value):
        return {name: to_columns(columns) for name, columns in value.items()}
    columns = to_columns(value)
    if isinstance(columns, list):
        return columns
    raise TypeError(f"expected a dictionary of columns by name, or a list of columns. Received: {value!r}.")


def to_weight_columns(value: Any) -> str | dict[str, str]:
    """Returns a column name, or one by the name of each output; raises TypeError for anything else."""
    if isinstance(value, Mapping):
        return {str(name): TypeConverters.toString(column) for name, column in value.items()}
    return str(TypeConverters.toString(value))


@with_accessors
class ColumnParams(Params):
    """Columns that both the estimator and its model name."""

    featuresCol = Param(
        Params._dummy(),
        "featuresCol",
        "features: one column (array of numbers, ml vector, number), or a list of numeric columns that make one vector",
        typeConverter=to_columns,
    )
    inputCols = Param(
        Params._dummy(),
        "inputCols",
        "for models with several inputs: columns by the name of the input, or a list in the order of the inputs",
        typeConverter=to_columns_by_name,
    )
    predictionCol = Param(
        Params._dummy(),
        "predictionCol",
        "column to add: the class (cross-entropy losses) or the value (one output unit) as double, else an array",
        typeConverter=TypeConverters.toString,
    )
    probabilityCol = Param(
        Params._dummy(),
        "probabilityCol",
        "column to add for classifiers: the classes' probabilities as an ml vector",
        typeConverter=TypeConverters.toString,
    )
    inferenceBatchSize = Param(
        Params._dummy(),
        "inferenceBatchSize",
        "rows that transform and evaluate put through the model at a time",
        typeConverter=TypeConverters.toInt,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            featuresCol="features", predictionCol="prediction", probabilityCol="probability", inferenceBatchSize=1024
        )

    def input_choice(self) -> ColumnChoice:
        """Returns which columns are the model's inputs; raises ConfigurationError when two params choose them."""
        _refuse_both(self, self.featuresCol, "features", self.inputCols)
        return ColumnChoice(features=self.getOrDefault(self.featuresCol), inputs=optional(self, self.inputCols))


@with_accessors
class LabelParams(Params):
    """What a model's outputs are compared with, by the estimator and by its model."""

    labelCol = Param(
        Params._dummy(),
        "labelCol",
        "label: a number, a boolean, an array of numbers or an ml vector; not set means that there is none",
        typeConverter=TypeConverters.toString,
    )
    labelCols = Param(
        Params._dummy(),
        "labelCols",
        "for models with several outputs: columns by the name of the output, or a list in the order of the outputs",
        typeConverter=to_columns_by_name,
    )
    weightCol = Param(
        Params._dummy(),
        "weightCol",
        "sample weights: a numeric column, or one by the name of each output; not set means 1 for every row",
        typeConverter=to_weight_columns,
    )

    def with_labels(self, choice: ColumnChoice) -> ColumnChoice:
        """Returns the choice of columns with those of labels and weights; raises as `input_choice`."""
        _refuse_both(self, self.labelCol, "label", self.labelCols)
        return replace(
            choice,
            label=optional(self, self.labelCol),
            labels=optional(self, self.labelCols),
            weight=optional(self, self.weightCol),
        )


def _refuse_both(params: Params, one: Param[Any], default: str, several: Param[Any]) -> None:
    # The constructor sets the default itself, which nobody has asked for.
    if optional(params, several) is not None and optional(params, one) not in (None, default):
        raise ConfigurationError(
            f"{several.name}: expected {one.name} not to be set, which names the one column. Received: "
            f"{one.name}={params.getOrDefault(one)!r} beside {several.name}={params.getOrDefault(several)!r}."
        )
