"""Installs elephant's wheel into one environment after the other, and runs the tests of `matrix.yaml` in each.

Prints a row of a table for each environment: the versions that were installed, and what the tests said. It exits with 1
where one could not be installed, or a test failed. It needs uv, which it installs beside the environments where the
PATH has none, and a package registry. An environment takes some 2.4 GB, and goes when its tests have run.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from checkout import copy_checkout  # noqa: E402 - it is found by the line above

MATRIX = Path(__file__).with_name("matrix.yaml")
# What the tests themselves need, and the extras of every environment, besides its own ones.
TEST_PACKAGES = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.7", "hypothesis>=6.100", "psutil>=5.9")
EXTRAS = ("java", "jobs", "fsspec")
COLUMNS = ("pyspark", "tensorflow", "keras", "numpy", "pyarrow", "pandas")
_INSTALL_S, _TESTS_S = 900.0, 1500.0
_VERSIONS = (
    "import importlib.metadata as m, json, platform, sys;"
    "print(json.dumps({'python': platform.python_version()} | {n: m.version(n) for n in sys.argv[1:]}))"
)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A row of the matrix.

    Args:
        name: As it is in the table.
        python: Version of Python, to the minor.
        extras: Extras of elephant's, besides those that all environments have.
        pins: Requirements that the resolver has to meet.
        constraints: Name of a file of docs/constraints.
    """

    name: str
    python: str
    extras: Sequence[str] = ()
    pins: Sequence[str] = ()
    constraints: str = ""


@dataclass(kw_only=True)
class Outcome:
    """What became of an environment: its versions, and the words of the table's last column."""

    environment: Environment
    versions: dict[str, str] = field(default_factory=dict)
    result: str = ""
    good: bool = False
    seconds: float = 0.0

    def row(self) -> str:
        """The line of the table."""
        found = [self.versions.get(name, "") for name in ("python", *COLUMNS)]
        return f"| {' | '.join([self.environment.name, *found, self.result])} |"


class NotInstalledError(Exception):
    """An environment could not be made."""


def environments(matrix: dict[str, Any]) -> Iterator[Environment]:
    """Yields the rows of a matrix."""
    for row in matrix["environments"]:
        yield Environment(**row)


def find_uv(folder: Path) -> str:
    """Returns the program uv: the one on the PATH, or else one that is installed into a folder."""
    found = shutil.which("uv")
    if found:
        return found
    home = folder / "uv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, timeout=_INSTALL_S)
    subprocess.run([str(home / "bin" / "pip"), "install", "-q", "uv"], check=True, timeout=_INSTALL_S)
    return str(home / "bin" / "uv")


def find_python(version: str) -> str:
    """Returns a Python of a minor version that runs, on the PATH or among pyenv's; empty without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*sorted(map(str, pyenv.glob(f"{version}.*/bin/python"))), f"python{version}"]
    code = "import sys; print('{}.{}'.format(*sys.version_info))"
    for candidate in candidates:
        if shutil.which(candidate):
            asked = subprocess.run([candidate, "-c", code], capture_output=True, text=True, timeout=60)
            if asked.stdout.strip() == version:
                return candidate
    return ""


class Machine:
    """Where environments are made: a folder, with uv, elephant's wheel, and a copy of the tests without the package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uv = find_uv(folder)
        self.tree = folder / "tree"
        copy_checkout(self.tree)
        self._run(self.uv, "build", "--wheel", "--quiet", "--out-dir", str(folder / "dist"), str(self.tree))
        (self.wheel,) = (folder / "dist").glob("*.whl")
        # So that tests import the wheel's.
        shutil.rmtree(self.tree / "elephant")
        shutil.rmtree(self.tree / "build", ignore_errors=True)

    def install(self, environment: Environment) -> Path:
        """Makes an environment, and returns its folder.

        Raises:
            NotInstalledError: There is no such Python here, or no set of packages.
        """
        python = find_python(environment.python)
        if not python:
            raise NotInstalledError(f"no Python {environment.python} on this machine")
        home = self.folder / environment.name
        self._run(self.uv, "venv", "--quiet", "--python", python, str(home))
        wheel = f"elephant-spark[{','.join([*EXTRAS, *environment.extras])}] @ {self.wheel.as_uri()}"
        command = [self.uv, "pip", "install", "--quiet", "--python", str(home / "bin" / "python"), wheel]
        if environment.constraints:
            command += ["--constraints", str(ROOT / "docs" / "constraints" / environment.constraints)]
        self._run(*command, *environment.pins, *TEST_PACKAGES)
        return home

    def test(self, home: Path, tests: Sequence[str]) -> tuple[bool, str]:
        """Runs tests in an environment; returns whether all have passed, and what came of them in words."""
        report, log = home / "report.xml", self.folder / f"{home.name}.log"
        options = ["-q", "-n", "0", "-p", "no:randomly", "-p", "no:cacheprovider", f"--junitxml={report}"]
        variables = {"PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(home)}
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
        with log.open("w") as output:
            try:
                subprocess.run(
                    [str(home / "bin" / "pytest"), *options, *tests],
                    cwd=self.tree, env=environment, stdout=output, stderr=output, timeout=_TESTS_S,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return False, f"no end after {_TESTS_S:g} s"
        return counted(report, log)

    def _run(self, *command: str) -> None:
        environment = {"UV_CACHE_DIR": str(self.folder / "cache")} | os.environ
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_INSTALL_S)
        if done.returncode:
            raise NotInstalledError(" ".join(done.stderr.split())[:600])


def counted(report: Path, log: Path) -> tuple[bool, str]:
    """Returns whether all tests of a report have passed, and their numbers and the names of those that have not."""
    if not report.exists():
        return False, f"pytest did not end: {log.read_text()[-300:]}"
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    kinds = {kind: [case for case in cases if case.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    bad = kinds["failure"] + kinds["error"]
    passed = len(cases) - len(bad) - len(kinds["skipped"])
    words = f"{passed} passed"
    if kinds["skipped"]:
        words += f", {len(kinds['skipped'])} skipped"
    if bad:
        words += f", {len(bad)} failed: {', '.join(sorted({str(case.get('name')) for case in bad}))}"
    return not bad and passed > 0, words


def versions_in(home: Path) -> dict[str, str]:
    """Returns the versions of an environment's Python and packages."""
    asked = subprocess.run(
        [str(home / "bin" / "python"), "-c", _VERSIONS, *COLUMNS],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found: dict[str, str] = json.loads(asked.stdout)
    return found


def tried(machine: Machine, environment: Environment, tests: Sequence[str], keep: bool) -> Outcome:
    """Makes an environment, runs the tests in it, and removes it."""
    began, outcome = time.monotonic(), Outcome(environment=environment)
    home = machine.folder / environment.name
    try:
        machine.install(environment)
        outcome.versions = versions_in(home)
        if tests:
            outcome.good, outcome.result = machine.test(home, tests)
        else:
            outcome.good, outcome.result = True, "installed"
    except NotInstalledError as error:
        outcome.result = f"not installed: {error}"
    finally:
        if not keep:
            shutil.rmtree(home, ignore_errors=True)
    outcome.seconds = time.monotonic() - began
    return outcome


def main() -> int:
    """Runs the program, and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="environments whose names begin so")
    parser.add_argument("--folder", type=Path, help="where environments and logs are, and stay; a temporary one")
    parser.add_argument("--install-only", action="store_true", help="run no tests")
    parser.add_argument("--keep", action="store_true", help="keep the environments; needs --folder")
    given = parser.parse_args()
    matrix = yaml.safe_load(MATRIX.read_text())
    wanted = [one for one in environments(matrix) if not given.only or one.name.startswith(tuple(given.only))]
    tests = [] if given.install_only else matrix["tests"]
    with tempfile.TemporaryDirectory(prefix="elephant-versions-", ignore_cleanup_errors=True) as temporary:
        folder = given.folder.resolve() if given.folder else Path(temporary)
        shutil.rmtree(folder / "tree", ignore_errors=True)
        machine = Machine(folder)
        print(f"| {' | '.join(['Environment', 'python', *COLUMNS, str(datetime.date.today())])} |", flush=True)
        print("|---" * (len(COLUMNS) + 3) + "|", flush=True)
        good = True
        for environment in wanted:
            outcome = tried(machine, environment, tests, given.keep and given.folder is not None)
            good = good and outcome.good
            print(outcome.row(), flush=True)
            print(f"{environment.name}: {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
