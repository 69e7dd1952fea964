"""A suite of a few tests in a folder of its own, which a new pytest runs with plugins of this one."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

SUPPORT = Path(__file__).parent
RUN_S = 60
_SETTINGS = f"""
[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["{SUPPORT}"]
addopts = ["--import-mode=importlib", "--strict-markers"]
markers = ["slow(reason): of the tiny suite", "spark: of the tiny suite"]
"""


class TinySuite:
    """A folder with files of a suite.

    Args:
        folder: Where it is made.
        files: Their texts by their paths.
    """

    def __init__(self, folder, files):
        self._folder = folder
        for path, text in {"pyproject.toml": _SETTINGS, **files}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(dedent(text))

    def run(self, *arguments):
        """Returns (exit status, what pytest printed)."""
        # What an outer run under xdist tells its processes is not for the inner one.
        outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        # Those plugins that it needs: all that are installed take half its time.
        environment = {**outer, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "pytest_timeout", *arguments],
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_S,
        )
        return done.returncode, done.stdout
