"""Importing Keras in less time than it takes by itself: seconds that every training process begins with.

Keras imports scikit-learn and Matplotlib for wrappers and pictures, which a training
process does not need: a quarter of the processor time of the whole import. A sixth of
the rest goes to Python's collector, which walks all that has been imported so far, again and again, and finds nothing.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

UNNEEDED = ("matplotlib", "sklearn")


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Imports meanwhile in less time, for a process that keeps what it imports until it ends.

    Matplotlib and scikit-learn are passed over, and the collector rests. What is there afterwards it never walks
    again, which makes it quicker for as long as the process lives.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with passed_over(*UNNEEDED):
            yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


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
