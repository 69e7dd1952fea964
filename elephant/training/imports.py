"""Importing Keras without packages that it imports when it finds them, and that a training process does not need.

Keras imports scikit-learn and Matplotlib for wrappers and pictures, which takes a
quarter of the processor time of the whole import.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

UNNEEDED = ("matplotlib", "sklearn")


@contextlib.contextmanager
def passed_over(*packages: str) -> Iterator[None]:
    """Makes what is imported meanwhile believe that these packages are not installed.

    Afterwards they can be imported as ever. Packages that have been imported before stay.
    """
    hidden = [package for package in packages if package not in sys.modules]
    for package in hidden:
        sys.modules[package] = None  # type: ignore[assignment]  # as the import system asks for
    try:
        yield
    finally:
        for package in hidden:
            sys.modules.pop(package, None)
