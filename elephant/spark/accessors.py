"""How a class of params gets the accessors that users of Spark ML expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params

_P = TypeVar("_P", bound=Params)


def with_accessors(cls: type[_P]) -> type[_P]:
    """Adds ``getName`` and ``setName`` for every param that a class declares, as all of Spark ML has them."""
    for name, param in list(vars(cls).items()):
        if isinstance(param, Param):
            title = name[0].upper() + name[1:]
            setattr(cls, f"get{title}", _getter(name, param.doc))
            setattr(cls, f"set{title}", _setter(name, param.doc))
    return cls


def _getter(name: str, doc: str) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        return self.getOrDefault(name)

    get.__doc__ = f"Returns {name}: {doc}."
    return get


def _setter(name: str, doc: str) -> Callable[[Any, Any], Any]:
    def set_value(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    set_value.__doc__ = f"Sets {name}: {doc}. Returns the instance."
    return set_value


def optional(instance: Params, param: Param[Any]) -> Any:
    """Returns a param's value, or None when it is not set."""
    return instance.getOrDefault(param) if instance.isDefined(param) else None
