"""What Python processes of tests start with: the module in ``startup``, which keeps imports of Keras short."""

import os
import runpy
import sys
from pathlib import Path

STARTUP = Path(__file__).parent / "startup"


def shorten_imports():
    """Keeps imports of Keras short, in this process and in those that inherit its environment."""
    here = os.environ.get("PYTHONPATH", "")
    if str(STARTUP) not in here.split(os.pathsep):
        os.environ["PYTHONPATH"] = python_path(*filter(None, [here]))
    if "sitecustomize" not in sys.modules or Path(sys.modules["sitecustomize"].__file__).parent != STARTUP:
        runpy.run_path(str(STARTUP / "sitecustomize.py"))


def python_path(*folders):
    """Returns a `PYTHONPATH` of folders for a process with an environment of its own."""
    return os.pathsep.join(map(str, [STARTUP, *folders]))
