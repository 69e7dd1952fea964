"""What ``module:name`` names: code of the user's, which ``--py-files`` brings to the driver and the executors."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from elephant.errors import ConfigurationError


def resolve(setting: str, reference: str) -> Any:
    """Returns what a reference names.

    Args:
        setting: What the user calls it, for messages.
        reference: ``module:name``; both may have dots.

    Raises:
        ConfigurationError: There is no such module, or no such name in it.

    Example:
        >>> resolve("--preprocessing", "os.path:join")("a", "b")
        'a/b'
    """
    module, _, name = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{setting}: expected a module that can be imported. Received: {reference!r}: {error}. "
            "Ship it: spark-submit --py-files FILE.py (or .zip)."
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(
                f"{setting}: expected a name in {module}. Received: {reference!r}, which {module} does not have."
            )
        found = getattr(found, part)
    return found


def resolve_all(setting: str, references: Mapping[str, str]) -> dict[str, Any]:
    """Returns what several references name, by the keys that they are given under."""
    return {name: resolve(setting, reference) for name, reference in references.items()}


def resolve_callbacks(setting: str, references: Sequence[str]) -> list[Any]:
    """Returns callbacks: those that references name, and those that named classes and functions make.

    A function may return one or a list of them.
    """
    callbacks: list[Any] = []
    for reference in references:
        found = resolve(setting, reference)
        made = found() if callable(found) else found
        callbacks.extend(made if isinstance(made, (list, tuple)) else [made])
    return callbacks
