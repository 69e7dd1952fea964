"""Class weights: which fits can have them, and a weight for every class that labels may name."""

from __future__ import annotations

from collections.abc import Mapping

from elephant.data.schema import SCALAR, DataSchema
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.model_spec import ModelSource


def class_weights(
    given: Mapping[int, float] | None, source: ModelSource, schema: DataSchema
) -> dict[int, float] | None:
    """Returns what Keras' fit takes as ``class_weight``: a weight for every class of the model's output.

    Keras itself gives classes without one the weight 1 when it has arrays, and fails on them in the
    middle of an epoch when it has a dataset.

    Args:
        given: Weights by class, as the user gave them, or None.
        source: The model.
        schema: The prepared columns.

    Raises:
        ConfigurationError: The fit has sample weights too, or labels that are no classes: Keras refuses these as well.
        UnsupportedError: The Keras backend is another one than tensorflow.
    """
    if given is None:
        return None
    if source.settings.backend != "tensorflow":
        raise UnsupportedError(
            f"classWeight: expected the Keras backend tensorflow. Received: {source.settings.backend!r}. "
            "Give weightCol instead: a column of each row's weight."
        )
    if schema.weights:
        raise ConfigurationError(
            "classWeight: expected a fit without weightCol: Keras takes one of the two. Received: both. "
            "Multiply the column by the weight of the row's class."
        )
    if len(schema.labels) != 1 or len(source.facts.outputs) != 1:
        raise ConfigurationError(
            f"classWeight: expected a model with one output and a label column. Received: {len(source.facts.outputs)} "
            f"outputs and {len(schema.labels)} label columns. Give weightCol={{output: column}} instead."
        )
    label, shape = schema.labels[0], source.facts.outputs[0].shape
    if label.kind != SCALAR and (label.shape is None or len(label.shape) != 1):
        raise ConfigurationError(
            f"classWeight: expected labels that are class numbers or one-hot. Received: {label.title} with arrays of "
            f"shape {label.shape}. Give weightCol instead."
        )
    classes = max([*given, 1, *((shape[-1] - 1,) if shape and shape[-1] else ())]) + 1
    return {number: float(given.get(number, 1.0)) for number in range(classes)}
