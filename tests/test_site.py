"""The documentation site is built without a warning, and its reference has every public name."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from browser import Frame, look_at, needs_browser

import elephant
from elephant import collective, errors

ROOT = Path(__file__).parents[1]
# Not functions or classes, and what no user meets.
_NO_ENTRY = {"__version__", "collective", "PositionLost", "SupersededError"}


WHY_SLOW = "builds the site; test_documentation.py follows its links"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, and what its build has said."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    build = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert build.returncode == 0, build.stderr
    return folder, build.stderr


@pytest.mark.slow(WHY_SLOW)
def test_site_when_built_then_has_no_warning_and_every_public_name_and_can_be_searched(site):
    folder, said = site
    assert said == ""
    described = names_in((folder / "objects.inv").read_bytes())
    public = [f"elephant.{name}" for name in elephant.__all__ if name not in _NO_ENTRY]
    public += [f"elephant.collective.{name}" for name in collective.__all__ if name not in _NO_ENTRY]
    public += [
        f"elephant.errors.{name}" for name, kind in vars(errors).items() if is_error(kind) and name not in _NO_ENTRY
    ]
    assert [name for name in public if name not in described and in_api(name) not in described] == []
    entries = json.loads((folder / "search" / "search_index.json").read_text())["docs"]
    assert {"params/", "tutorials/text/", "reference/estimator/"} <= {entry["location"] for entry in entries}


@needs_browser
@pytest.mark.slow(WHY_SLOW)
def test_site_when_opened_in_a_browser_then_is_as_wide_as_a_phone_or_a_screen_in_light_and_dark(site):
    folder, _ = site
    pages = [folder / "index.html", folder / "progress" / "index.html"]
    # A page remembers the theme, so that all in one browser have the same.
    for theme in ("light", "dark"):
        frames = [Frame(page, theme, width) for page, width in zip(pages, (1300, 400), strict=True)]
        # It is searched where it is served.
        for frame, seen in zip(frames, look_at(f"site-{theme}", *frames, heard="search_index.js"), strict=True):
            assert seen.measures["needed"] <= frame.width and seen.measures["texts"] > 2000, seen.measures
            assert (seen.background > 0.8) == (theme == "light") and 0.01 < seen.drawn < 0.5, seen.measures


def in_api(name):
    """Returns the name of a function of `elephant.collective` where it is defined."""
    return name.replace("elephant.collective.", "elephant.collective.api.")


def is_error(kind):
    return isinstance(kind, type) and issubclass(kind, errors.ElephantError)


def names_in(inventory):
    """Returns the names in an inventory of Sphinx' form: four lines, then compressed lines that begin with a name."""
    packed = inventory.split(b"\n", 4)[4]
    return {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}
