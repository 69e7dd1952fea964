"""Types of all params, for editors and type checkers: ``python tests/support/param_types.py`` writes them.

What `elephant.spark.params` makes of the table of options, nobody sees who only reads it. This declares the same, with
the types of the constructor's signature: `elephant/spark/param_types.pyi`.
"""

import inspect
import textwrap
from pathlib import Path

from elephant import KerasEstimator
from elephant.options import INPUT, LABEL, OPTIONS, Scope, options_of

FILE = Path(__file__).resolve().parents[2] / "elephant" / "spark" / "param_types.pyi"
_HEAD = '''"""Params of the estimator and its model, made of elephant.options; see tests/support/param_types.py."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import keras
from pyspark.ml.param import Param, Params
from typing_extensions import Self

from elephant.config import Timeouts
from elephant.monitor.listeners import FitListener
from elephant.spark.model import KerasModel
'''
_WIDTH = 116


def text():
    """Returns the text of the file."""
    types = {name: parameter.annotation for name, parameter in inspect.signature(KerasEstimator).parameters.items()}
    of_params = {option.param: types[option.param] for option in OPTIONS}
    others = {name: types[name] for name in ("model", "customObjects")}
    return "\n\n".join(
        [
            _HEAD,
            _dictionary("Options", "TypedDict, total=False", "Params that a fit takes by name.", of_params),
            _dictionary("Arguments", "Options, total=False", "Arguments of the constructor.", others),
            _declarations("ModelParamTypes", "Those of the estimator and its model.", (INPUT, LABEL), of_params),
            _declarations(
                "TrainingParamTypes",
                "Those of the estimator alone.",
                [scope for scope in Scope if scope not in (INPUT, LABEL)],
                of_params,
            ),
        ]
    )


def _dictionary(name, bases, doc, types):
    lines = [f"    {param}: {_or_none(kind)}" for param, kind in types.items()]
    return "\n".join([f"class {name}({bases}):", f'    """{doc}"""', "", *lines, ""])


def _declarations(name, doc, scopes, types):
    lines = [f"class {name}(Params):", f'    """{doc}"""', ""]
    for option in options_of(*scopes):
        param, kind = option.param, types[option.param]
        title = param[0].upper() + param[1:]
        lines += [
            f"    {param}: Param[Any]",
            f"    def get{title}(self) -> {kind}:",
            *_docstring(f"Returns {param}: {option.help}."),
            f"    def set{title}(self, value: {_or_none(kind)}) -> Self:",
            *_docstring(f"Sets {param}: {option.help}. Returns the instance."),
        ]
    return "\n".join([*lines, ""])


def _docstring(words):
    return textwrap.wrap(f'"""{words}"""', _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _or_none(kind):
    """Returns a type to which None belongs: it takes a param's value away."""
    return kind if kind.endswith("| None") else f"{kind} | None"


if __name__ == "__main__":
    FILE.write_text(text())
