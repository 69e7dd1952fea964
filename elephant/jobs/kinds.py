"""What the value of a job's setting may be, from a command line, where all is text, or from a file, where it is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# `module:function`; what has a slash in it, or ends as files of models do, is a path.
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_MODEL_FILE = re.compile(r"\.(keras|h5)$")


@dataclass(frozen=True)
class Kind:
    """One kind of value.

    Args:
        expected: What it is called in messages.
        check: Returns the value as it is used, from what a file has; raises TypeError or ValueError for others.
        gather: Makes what a file would have of the words of a command line, one for each time that an argument
            was given; None where an argument is given once, and its text is the value.
        is_switch: Whether a command line has ``--name`` and ``--no-name`` instead of a value.
    """

    expected: str
    check: Callable[[Any], Any]
    gather: Callable[[Sequence[str]], Any] | None = None
    is_switch: bool = False


def is_reference(text: str) -> bool:
    """Whether a text names something in a module, and not a path.

    >>> is_reference("models:build"), is_reference("hdfs://host/model.keras"), is_reference("model.keras")
    (True, False, False)
    """
    return _REFERENCE.fullmatch(text) is not None and _MODEL_FILE.search(text) is None


def _text(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise TypeError


def _label(value: Any) -> str | None:
    # No text, or null, says that there is no label.
    return None if value is None or value == "" else _text(value)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError
    return int(value)


def _number(value: Any) -> float:
    # Text too: in YAML 1.1, 1e-3 is no number.
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError
    return float(value)


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError


def _frequency(value: Any) -> str | int:
    return int(value) if str(value).isdecimal() else _text(value)


def _use_gpu(value: Any) -> bool | str:
    known: dict[str, bool | str] = {"true": True, "false": False, "auto": "auto"}
    text = str(value).lower()
    return known[text] if text in known else str(_refuse())


def _warm_workers(value: Any) -> int | str:
    text = str(value)
    return int(text) if text.isdecimal() else text if text == "auto" else str(_refuse())


def _refuse() -> Any:
    raise ValueError


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [_text(value)]
    if isinstance(value, Sequence) and value:
        return [_text(part) for part in value]
    raise TypeError


def _columns(value: Any) -> str | list[str]:
    return value if isinstance(value, str) and value else _texts(value)


def _columns_by_name(value: Any) -> dict[str, str | list[str]] | list[str]:
    if isinstance(value, Mapping) and value:
        return {_text(name): _columns(columns) for name, columns in value.items()}
    return _texts(value)


def _weight_columns(value: Any) -> str | dict[str, str]:
    if isinstance(value, Mapping) and value:
        return {_text(name): _text(column) for name, column in value.items()}
    return _text(value)


def _weights(value: Any) -> dict[str, float]:
    # By text: JSON, in which jobs are kept, has no other keys.
    if isinstance(value, Mapping) and value:
        return {str(_integer(label)): _number(weight) for label, weight in value.items()}
    raise TypeError


def _seconds(value: Any) -> dict[str, float]:
    if isinstance(value, Mapping) and value:
        return {_text(name): _number(seconds) for name, seconds in value.items()}
    raise TypeError


def _options(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError
    # As Spark writes them: options are text there.
    return {
        _text(name): str(option).lower() if isinstance(option, bool) else str(option) for name, option in value.items()
    }


def _references(value: Any) -> list[str]:
    return [_reference(part) for part in _texts(value)]


def _reference(value: Any) -> str:
    return value if is_reference(_text(value)) else _refuse()


def _references_by_name(value: Any) -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        return {_text(name): _reference(reference) for name, reference in value.items()}
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


def pairs_or_list(words: Sequence[str]) -> Any:
    """Returns a dictionary where the words are pairs, and a list of them where none is."""
    return pairs(words) if any("=" in word for word in words) else list(words)


def pairs_or_one(words: Sequence[str]) -> Any:
    """Returns a dictionary where the words are pairs, and the word where there is one that is none."""
    return pairs(words) if any("=" in word for word in words) else one_or_several(words)


def one_of(*names: str) -> Kind:
    """Returns the kind of value that is one of the names."""
    return Kind(f"one of {', '.join(names)}", lambda value: value if value in names else _refuse())


TEXT = Kind("text", _text)
LABEL = Kind("a column, or nothing for none", _label)
INTEGER = Kind("an integer", _integer)
NUMBER = Kind("a number", _number)
SWITCH = Kind("true or false", _switch, is_switch=True)
FREQUENCY = Kind("batch, epoch or a number of steps", _frequency)
USE_GPU = Kind("true, false or auto", _use_gpu)
WARM_WORKERS = Kind("auto or a number", _warm_workers)
TEXTS = Kind("text, or a list of it", _texts, list)
COLUMNS = Kind("a column, or a list of them", _columns, one_or_several)
COLUMNS_BY_NAME = Kind("pairs such as name=column, or a list of columns", _columns_by_name, pairs_or_list)
WEIGHT_COLUMNS = Kind("a column, or pairs such as output=column", _weight_columns, pairs_or_one)
WEIGHTS = Kind("pairs such as class=weight", _weights, pairs)
SECONDS = Kind("pairs such as name=seconds", _seconds, pairs)
OPTIONS = Kind("pairs such as name=value", _options, pairs)
REFERENCE = Kind("module:function", _reference)
REFERENCES = Kind("module:name, or a list of such", _references, list)
REFERENCES_BY_NAME = Kind("pairs such as Name=module:Name", _references_by_name, pairs)
