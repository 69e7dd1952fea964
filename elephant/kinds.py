"""Kinds of values: what an option or a setting may be, how a configuration writes it, and what errors call it.

One kind serves everybody who gives a value: params of Spark, `elephant.config`, job files and command lines. Scalars
and arrays of numpy are values as well, and become Python's own.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from elephant.errors import ElephantError

# A class weight: all classes count alike.
BALANCED = "balanced"
# `module:function`; what has a slash in it, or ends as files of models do, is a path.
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
MODEL_FILE = re.compile(r"\.(keras|h5)$")


def _any(value: Any) -> bool:
    """Returns True."""
    return True


def _same(value: Any) -> Any:
    """Returns the value."""
    return value


@dataclass(frozen=True)
class Kind:
    """Kind of value.

    Args:
        type: Of its values, in signatures.
        expected: What they are called in errors.
        convert: Returns a value as Python has it; raises TypeError, without text, for one of another type.
        holds: Whether a converted value is in the range.
        written: What lines of a configuration or words of a command line are called, where that is something else.
        parse: From what a configuration has to what is converted; raises TypeError or ValueError.
        gather: From the words of a command line, one for each time that an argument was given, to what a configuration
            has; None where an argument is given once, and its text is the value.
        reference: Checks by what name a configuration has code, which it cannot have itself; None for plain values.
        is_switch: Whether a command line has --name and --no-name instead of a value.
    """

    type: Any
    expected: str
    convert: Callable[[Any], Any]
    holds: Callable[[Any], bool] = _any
    _: KW_ONLY
    written: str = ""
    parse: Callable[[Any], Any] = _same
    gather: Callable[[Sequence[str]], Any] | None = None
    reference: Callable[[Any], Any] | None = None
    is_switch: bool = False

    def value_of(self, given: Any) -> Any:
        """Returns a value as Python has it.

        Raises:
            TypeError: It has another type.
            ValueError: It is out of the range.

        >>> import numpy as np
        >>> integer(1).value_of(np.int64(3)), NUMBER.value_of(np.float32(0.5)), COLUMNS.value_of(np.array(["a", "b"]))
        (3, 0.5, ['a', 'b'])
        """
        received = f"expected {self.expected}. Received: {given!r}."
        try:
            value = self.convert(plain(given))
        except ElephantError:
            # It says more.
            raise
        except TypeError:
            raise TypeError(received) from None
        except ValueError:
            raise ValueError(received) from None
        if not self.holds(value):
            raise ValueError(received)
        return value

    def read(self, written: Any) -> Any:
        """Returns the value that a configuration has; of code, its name. Raises as `value_of`, in words or without.

        >>> SWITCH.read(True), integer(1).read("3"), FUNCTION.read("mine:halved")
        (True, 3, 'mine:halved')
        """
        return self.value_of(self.parse(written)) if self.reference is None else self.reference(written)


def plain(value: Any) -> Any:
    """Returns a value with all that numpy has made in it as Python's own.

    >>> import numpy as np
    >>> plain({np.str_("a"): [np.bool_(True), np.array([1, 2])]})
    {'a': [True, [1, 2]]}
    """
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if type(value) is dict:
        return {plain(name): plain(part) for name, part in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def missing_argument(function: Callable[..., Any]) -> str:
    """Returns in words what a function misses that is called without arguments; empty where that is nothing.

    >>> missing_argument(lambda n: n), missing_argument(dict)
    ("missing a required argument: 'n'", '')
    """
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        return str(error)
    except ValueError:
        # Of some that are written in C, Python knows no signature.
        return ""
    return ""


def is_reference(text: str) -> bool:
    """Returns whether a text names something in a module, and not a path.

    >>> is_reference("models:build"), is_reference("hdfs://host/model.keras"), is_reference("model.keras")
    (True, False, False)
    """
    return _REFERENCE.fullmatch(text) is not None and MODEL_FILE.search(text) is None


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise TypeError


def _some_text(value: Any) -> str:
    if _text(value):
        return str(value)
    raise ValueError


# A colon may also be part of a name.
_METRIC = re.compile(r"(.+?)(?::(max|min))?")
# How the names of Keras' metrics end, and those of other usual ones, before a number. What comes before is the name of
# an output or of a class, which may be any: layer2_loss, map_mae.
_LESS_IS_BETTER = re.compile(
    r"(?<![a-z])(loss|error|mae|mse|mape|msle|rmse|\w*crossentropy|hinge|divergence|poisson|logcosh|perplexity"
    r"|false_(positives|negatives))([_@]?\d+)?$"
)
_MORE_IS_BETTER = re.compile(
    r"(?<![a-z0-9])(acc|accuracy|auc|precision|recall|sensitivity|specificity|f1|fbeta|io_?u|dice|r2|similarity"
    r"|correlation|true_(positives|negatives)|ndcg|mrr|map|bleu)(_?score|_coef(ficient)?)?([_@]?\d+)?$"
)


def named_metric(text: str) -> tuple[str, bool]:
    """Returns the name of a metric, and whether more of it is better; see `METRIC`.

    Raises:
        ValueError: It does not say which way is better.

    >>> named_metric("val_loss"), named_metric("val_accuracy"), named_metric("val_gain:max")
    (('val_loss', False), ('val_accuracy', True), ('val_gain', True))
    """
    match = _METRIC.fullmatch(text)
    if match is None:
        raise ValueError
    name, direction = match.groups()
    if direction is not None:
        return name, direction == "max"
    if _LESS_IS_BETTER.search(name.lower()):
        return name, False
    if _MORE_IS_BETTER.search(name.lower()):
        return name, True
    raise ValueError


def _metric(value: Any) -> str:
    named_metric(_text(value))
    return str(value)


def _path(value: Any) -> str:
    return _text(os.fspath(value))


def _integer(value: Any) -> int:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole:
        raise TypeError
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError


def _integer_of_text(value: Any) -> Any:
    return int(value) if isinstance(value, str) else value


def _number_of_text(value: Any) -> Any:
    # In YAML 1.1, 1e-3 is text.
    return float(value) if isinstance(value, str) else value


def _word_or_integer(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _word_or_switch(value: Any) -> Any:
    return {"true": True, "false": False, "auto": "auto"}.get(str(value).lower(), "")


def _function(value: Any) -> Callable[..., Any]:
    if callable(value):
        function: Callable[..., Any] = value
        return function
    raise TypeError


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _columns(value: Any) -> Any:
    """Returns one column, a list of columns, of which some may be lists again, or a dictionary of these by name."""
    if isinstance(value, Mapping) and value and all(isinstance(name, str) and name for name in value):
        return {name: _vector(columns) for name, columns in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return [_vector(columns) for columns in value]
    return _vector(value)


def _vector(value: Any) -> str | list[str]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Sequence) and value and all(isinstance(name, str) and name for name in value):
        return list(value)
    raise TypeError


def _columns_or_none(value: Any) -> Any:
    return None if value is None else _columns(value)


def _weight_columns(value: Any) -> str | dict[str, str]:
    names = list(value.values()) if isinstance(value, Mapping) else [value]
    if names and all(isinstance(name, str) and name for name in names):
        return {str(name): column for name, column in value.items()} if isinstance(value, Mapping) else str(value)
    raise TypeError


def _class_weight(value: Any) -> dict[int, float] | str:
    if isinstance(value, str) and value == BALANCED:
        return value
    if isinstance(value, Mapping) and value:
        # Of JSON and of words, classes are text.
        weights = {_integer(_integer_of_text(label)): float(weight) for label, weight in value.items()}
        if all(label >= 0 and 0 <= weight < math.inf for label, weight in weights.items()):
            return weights
    raise TypeError


def _texts(value: Any) -> list[str]:
    parts = [value] if isinstance(value, str) else value
    if isinstance(parts, Sequence) and parts:
        return [_some_text(part) for part in parts]
    raise TypeError


def _spark_options(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError
    # As Spark writes them: options are text there.
    return {
        _some_text(name): str(option).lower() if isinstance(option, bool) else str(option)
        for name, option in value.items()
    }


def _distribution(value: Any) -> dict[str, Any]:
    """Returns a division of a model's layers as JSON has it; a `LayoutMap` of Keras has a mesh and rules by name."""
    mesh = getattr(value, "device_mesh", None)
    if mesh is not None and isinstance(value, Mapping):
        rules = {pattern: getattr(layout, "axes", layout) for pattern, layout in value.items()}
        value = {"shape": mesh.shape, "axis_names": mesh.axis_names, "layouts": rules}
    if not isinstance(value, Mapping) or not {"shape", "axis_names", "layouts"} <= set(value):
        raise TypeError
    shape, names = [_integer(size) for size in value["shape"]], [_some_text(name) for name in value["axis_names"]]
    layouts = {_some_text(pattern): list(axes) for pattern, axes in value["layouts"].items()}
    rows = value.get("batch_dim_name") or names[0]
    used = [[axis for axis in axes if axis is not None] for axes in layouts.values()]
    is_mesh = len(shape) == len(names) == len(set(names)) and min(shape, default=0) >= 1 and rows in names
    if not is_mesh or not layouts or any(len(axes) > len(set(axes)) or set(axes) - set(names) for axes in used):
        raise ValueError
    return {"shape": shape, "axis_names": names, "batch_dim_name": rows, "layouts": layouts}


def _reference(value: Any) -> str:
    if is_reference(_some_text(value)):
        return str(value)
    raise ValueError


def _references(value: Any) -> list[str]:
    return [_reference(part) for part in _texts(value)]


def _references_by_name(value: Any) -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        return {_some_text(name): _reference(reference) for name, reference in value.items()}
    raise TypeError


def one_or_several(words: Sequence[str]) -> str | list[str]:
    """Returns the one word, or a list of several."""
    return words[0] if len(words) == 1 else list(words)


def pairs(words: Sequence[str]) -> dict[str, str | list[str]]:
    """Returns words such as ``name=value`` as a dictionary; a name that comes again has a list of values.

    >>> pairs(["a=x", "b=y", "b=z"])
    {'a': 'x', 'b': ['y', 'z']}
    """
    values: dict[str, list[str]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise ValueError
        values.setdefault(name, []).append(value)
    return {name: one_or_several(several) for name, several in values.items()}


def pairs_or_words(words: Sequence[str]) -> Any:
    """Returns a dictionary where the words are pairs; otherwise the one word, or a list of several."""
    return pairs(words) if any("=" in word for word in words) else one_or_several(words)


def integer(least: int, expected: str = "", most: float = math.inf) -> Kind:
    """Returns the kind of integers from least to most."""
    return Kind(
        int,
        expected or f"an integer of at least {least}",
        _integer,
        lambda value: least <= value <= most,
        parse=_integer_of_text,
    )


def number(expected: str, holds: Callable[[float], bool] = _any) -> Kind:
    """Returns the kind of some numbers."""
    return Kind(float, expected, _number, holds, parse=_number_of_text)


def one_of(*names: str, convert: Callable[[Any], Any] = _text) -> Kind:
    """Returns the kind of value that is one of the names.

    Args:
        names: The names.
        convert: From what else users may call them.
    """
    return Kind(str, f"one of {', '.join(names)}", convert, lambda value: value in names)


def count_or(*words: str, expected: str, holds: Callable[[Any], bool], written: str = "") -> Kind:
    """Returns the kind of integers, or of words in their place.

    >>> count_or("auto", expected="'auto' or an integer", holds=lambda count: count >= 0).read("3")
    3
    """

    def is_one(value: Any) -> bool:
        is_count = isinstance(value, int) and not isinstance(value, bool)
        return holds(value) if is_count else isinstance(value, str) and value in words

    return Kind(int | str, expected, _same, is_one, written=written, parse=_word_or_integer)


def _workers(value: Any) -> int | tuple[int, int]:
    """Returns a number of workers, or the fewest and the most."""
    if isinstance(value, (list, tuple)):
        least, most = map(_integer, value)
        return least, most
    return _integer(value)


def _are_workers(value: int | tuple[int, int]) -> bool:
    least, most = value if isinstance(value, tuple) else (value, value)
    return 1 <= least <= most


def _workers_of_text(value: Any) -> Any:
    """Returns the number of workers, or the fewest and the most, that a configuration says.

    >>> _workers_of_text("4"), _workers_of_text("2,8"), _workers_of_text([2, 8])
    (4, [2, 8], [2, 8])
    """
    if isinstance(value, str) and "," in value:
        return [int(part) for part in value.split(",")]
    return _integer_of_text(value)


def _ports(value: Any) -> tuple[int, int]:
    """Returns the first and the last port of a pair, or of a text.

    >>> _ports("40000-40100"), _ports([40000, 40100])
    ((40000, 40100), (40000, 40100))
    """
    if isinstance(value, str):
        value = [int(part) for part in value.split("-")]
    if not isinstance(value, (list, tuple)):
        raise TypeError
    first, last = map(_integer, value)
    return first, last


def _are_ports(value: tuple[int, int]) -> bool:
    return 1 <= value[0] <= value[1] <= 65535


def _stages(value: Any) -> int | list[str]:
    """Returns a number of stages, or the names of the layers with which all but the first begin."""
    return [_some_text(name) for name in value] if isinstance(value, (list, tuple)) else _integer(value)


def _is_divided(value: int | list[str]) -> bool:
    return value >= 2 if isinstance(value, int) else len(value) >= 1 and len(set(value)) == len(value)


def _stages_of_text(value: Any) -> Any:
    """Returns the number of stages, or the names of layers, that words of a configuration say.

    >>> _stages_of_text("2"), _stages_of_text(["2"]), _stages_of_text("head"), _stages_of_text(["block4", "head"])
    (2, 2, ['head'], ['block4', 'head'])
    """
    words = list(value) if isinstance(value, (list, tuple)) else [value]
    if len(words) == 1 and (isinstance(words[0], int) or re.fullmatch(r"[0-9]+", str(words[0]))):
        return _integer_of_text(words[0])
    return words


TEXT = Kind(str, "text", _text, parse=_some_text)
TEXTS = Kind(list, "text, or a list of it", _texts, gather=list)
METRIC = Kind(
    str,
    "the name of a metric, such as 'val_loss', and ':max' or ':min' behind it where the name does not say which way is "
    "better",
    _metric,
    parse=_some_text,
)
PATH = Kind(str, "a path", _path, written="text", parse=_some_text)
INTEGER = Kind(int, "an integer", _integer, parse=_integer_of_text)
NUMBER = number("a number")
SWITCH = Kind(bool, "true or false", _switch, is_switch=True)
SWITCH_OR_AUTO = Kind(
    bool | str,
    "True, False or 'auto'",
    _same,
    lambda value: isinstance(value, bool) or value == "auto",
    written="true, false or auto",
    parse=_word_or_switch,
)
FUNCTION = Kind(Callable, "a function on a batch", _function, written="module:function", reference=_reference)
# Whether Keras takes them, it must say itself.
CALLBACKS = Kind(
    list, "callbacks", _listed, written="module:name, or a list of such", gather=list, reference=_references
)
COLUMNS = Kind(
    str | list | dict,
    "a column name, a list of column names, or a dictionary of these by the name of the input",
    _columns,
    written="a column, a list of them, or pairs such as name=column",
    gather=pairs_or_words,
)
LABEL_COLUMNS = Kind(
    str | list | dict | None,
    "a column name, a list of column names, or a dictionary of these by the name of the output",
    _columns_or_none,
    written="a column, a list of them, pairs such as name=column, or nothing for none",
    parse=lambda value: None if value == "" else value,
    gather=pairs_or_words,
)
WEIGHT_COLUMNS = Kind(
    str | dict,
    "a column name, or column names by the name of the output",
    _weight_columns,
    written="a column, or pairs such as output=column",
    gather=pairs_or_words,
)
CLASS_WEIGHT = Kind(
    dict | str,
    "a dictionary of weights, finite and at least 0, by class, such as {0: 1.0, 1: 5.0}, or 'balanced'",
    _class_weight,
    written=f"pairs such as class=weight, or {BALANCED}",
    gather=pairs_or_words,
)
DISTRIBUTION = Kind(
    dict,
    "keras.distribution.ModelParallel, or a LayoutMap with a device mesh and rules that name its axes",
    _distribution,
    written="module:name",
    reference=_reference,
)
WORKERS = Kind(
    int | tuple,
    "an integer of at least 1, or the fewest and the most workers of an elastic fit, such as (2, 8)",
    _workers,
    _are_workers,
    written="a number, or the fewest and the most, such as 2,8",
    parse=_workers_of_text,
)
PORTS = Kind(
    tuple | str,
    "the first and the last port, such as (40000, 40100) or '40000-40100'",
    _ports,
    _are_ports,
    written="the first and the last, such as 40000-40100",
)
STAGES = Kind(
    int | list,
    "an integer of at least 2, or the names of layers, each the first of a stage after the first",
    _stages,
    _is_divided,
    written="a number, or names of layers",
    parse=_stages_of_text,
    gather=list,
)
SPARK_OPTIONS = Kind(dict, "pairs such as name=value", _spark_options, gather=pairs)
REFERENCES_BY_NAME = Kind(
    dict,
    "objects by name",
    _same,
    written="pairs such as Name=module:Name",
    gather=pairs,
    reference=_references_by_name,
)
