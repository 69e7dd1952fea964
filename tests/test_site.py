"""The documentation site is built without a warning, and its reference has every public name."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import elephant
from elephant import collective, errors

ROOT = Path(__file__).parents[1]
# Not functions or classes, and what no user meets.
_NO_ENTRY = {"__version__", "collective", "PositionLost", "SupersededError"}


@pytest.mark.slow("builds the site; test_documentation.py follows its links")
def test_site_when_built_then_has_no_warning_and_every_public_name_and_can_be_searched(tmp_path):
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    build = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert (build.returncode, build.stderr) == (0, "")
    described = names_in((tmp_path / "site" / "objects.inv").read_bytes())
    public = [f"elephant.{name}" for name in elephant.__all__ if name not in _NO_ENTRY]
    public += [f"elephant.collective.{name}" for name in collective.__all__ if name not in _NO_ENTRY]
    public += [
        f"elephant.errors.{name}" for name, kind in vars(errors).items() if is_error(kind) and name not in _NO_ENTRY
    ]
    assert [name for name in public if name not in described and in_api(name) not in described] == []
    entries = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())["docs"]
    assert {"params/", "tutorials/text/", "reference/estimator/"} <= {entry["location"] for entry in entries}


def in_api(name):
    """Returns the name of a function of `elephant.collective` where it is defined."""
    return name.replace("elephant.collective.", "elephant.collective.api.")


def is_error(kind):
    return isinstance(kind, type) and issubclass(kind, errors.ElephantError)


def names_in(inventory):
    """Returns the names in an inventory of Sphinx' form: four lines, then compressed lines that begin with a name."""
    packed = inventory.split(b"\n", 4)[4]
    return {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}
