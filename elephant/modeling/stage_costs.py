"""Costs of the calls of a model: the seconds of their passes, or where there is nothing to measure, their weights."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import keras
import numpy as np

from elephant.backends import current
from elephant.backends.keras_private import has_value
from elephant.modeling.stages import GraphTensorSpec, ModelGraph, ModelStage

_ROWS = 32
# What a dimension that may have any size counts as.
_OPEN_SIZE = 8
_TIMES = 3


def call_costs(graph: ModelGraph, num_rows: int = _ROWS) -> list[float]:
    """Returns the cost of each call: seconds of its passes, or its weights where the model was made without values.

    Args:
        num_rows: Of random rows that are measured.
    """
    if all(has_value(variable) for call in graph.calls for variable in call.variables):
        return measured_seconds(graph, num_rows)
    seen: set[int] = set()
    costs = []
    for call in graph.calls:
        new = {id(variable): math.prod(variable.shape) for variable in call.variables if id(variable) not in seen}
        seen |= new.keys()
        costs.append(float(sum(new.values())))
    return costs


def measured_seconds(graph: ModelGraph, num_rows: int) -> list[float]:
    """Returns the seconds of the passes of each call, those of calls without variables with the call before them.

    The variables stay as they are.
    """
    starts = [place for place, call in enumerate(graph.calls) if place == 0 or call.variables]
    costs = [0.0] * len(graph.calls)
    for start, stop in zip(starts, [*starts[1:], len(graph.calls)], strict=True):
        costs[start] = _seconds(graph, start, stop, num_rows)
    return costs


def _seconds(graph: ModelGraph, start: int, stop: int, num_rows: int) -> float:
    stage = ModelStage(graph, start, stop)
    functions, random = current().stage_functions(stage, None, is_first=start == 0), np.random.default_rng(0)
    inputs = random_tensors(stage.entering, num_rows, random)
    states = [(variable, np.array(keras.ops.convert_to_numpy(variable))) for variable in stage.non_trainable_variables]
    took = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        outputs, _, passed = functions.forward(inputs, None, 1.0)
        floats = [output for output, spec in zip(outputs, stage.leaving, strict=False) if spec.is_float]
        functions.backward(passed, floats, 1.0, None)
        took.append(time.perf_counter() - began)
    for variable, value in states:
        variable.assign(value)
    return min(took)


def random_tensors(specs: Sequence[GraphTensorSpec], num_rows: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Returns arrays that a stage takes: random floats, zeros of other kinds, then masks that leave nothing out."""
    arrays, masks = [], []
    for spec in specs:
        shape = (num_rows, *(size or _OPEN_SIZE for size in spec.shape[1:]))
        floats = generator.normal(size=shape)
        arrays.append(floats.astype(_numpy_dtype(spec.dtype)) if spec.is_float else np.zeros(shape, spec.dtype))
        if spec.is_masked:
            masks.append(np.ones(shape[:2], bool))
    return arrays + masks


def _numpy_dtype(name: str) -> np.dtype:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)
