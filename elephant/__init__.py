"""Elephant trains one Keras 3 model across Apache Spark executors, from a DataFrame.

Importing it is light: Spark and Keras are imported when a name that needs them is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elephant.spark.estimator import KerasEstimator
    from elephant.spark.model import KerasModel

__version__ = "0.1.0"

__all__ = ["KerasEstimator", "KerasModel", "__version__"]

_HOME = {"KerasEstimator": "elephant.spark.estimator", "KerasModel": "elephant.spark.model"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
