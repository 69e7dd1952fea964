"""Plants the faults of `faults.py` one at a time in a copy of the tree, and tells which ones the tests find.

Prints a JSON line for each fault and a summary. A fault is found when one of its tests fails, or does not end before
the deadline. In the end the tests that have found something run once more, without a fault: one that fails then has
found nothing. Exits with 1 under 95 % found, and with 2 when a fault does not apply to the code, or its tests cannot be
run or fail without it.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fault import Fault, FaultError
from faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from checkout import copy_checkout  # noqa: E402 - it is found by the line above

WANTED = 0.95
# With a fault planted, the test that all faults apply would find every one of them.
OWN_TESTS = "tests/mutations"
# What `make test` leaves out, of the markers that there are.
LEFT_OUT = ("slow", "gpu")
# What pytest returns when tests have failed; other codes say that it could not run them.
_TESTS_FAILED = 1
_ENDED_BY_DEADLINE = -1
_CHECK_S = 1800.0


@contextlib.contextmanager
def copied_tree() -> Iterator[Path]:
    """Copies what git tracks, and what it would, into a folder that goes afterwards."""
    with tempfile.TemporaryDirectory(prefix="elephant-mutations-", ignore_cleanup_errors=True) as folder:
        copy_checkout(folder)
        yield Path(folder)


def run_tests(tree: Path, arguments: Sequence[str], deadline_s: float) -> tuple[int, str]:
    """Runs pytest on a copy of the tree; returns its exit code, or -1 after the deadline, and what it printed."""
    # What a fault keeps tests from removing goes with the copy.
    temporary = tree / "tmp"
    temporary.mkdir(exist_ok=True)
    # Compiled files are told apart by second and size only: a fault may change neither.
    variables = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(temporary)}
    environment = {**os.environ, **variables}
    workers = ["-n", "0"] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *workers]
    # More examples than `make test` has: a fault is to be found by whatever seed.
    command += ["--hypothesis-profile=ci", "--hypothesis-seed=0", *arguments]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            code = _ENDED_BY_DEADLINE
        finally:
            # Whatever the tests have started, and a fault has kept from ending.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()


def suite() -> list[str]:
    """Returns the arguments that choose the tests of `make test`."""
    known = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return ["-m", " and ".join(f"not {name}" for name in LEFT_OUT if f'"{name}:' in known)]


def try_out(tree: Path, fault: Fault, *, whole: bool, deadline_s: float) -> dict[str, object]:
    """Plants a fault, runs its tests, and takes it away again; returns what is printed of it."""
    path, began = tree / fault.file, time.monotonic()
    try:
        planted = fault.planted(tree)
    except FaultError as error:
        return {"fault": fault.name, "result": "error", "seconds": 0.0, "by": str(error)}
    original = path.read_text(encoding="utf-8")
    path.write_text(planted, encoding="utf-8")
    try:
        tests = [f"--ignore={OWN_TESTS}"] if whole else fault.tests
        code, text = run_tests(tree, ["-x", *suite(), *tests], deadline_s)
    finally:
        path.write_text(original, encoding="utf-8")
    result, by = {0: ("survived", ""), _ENDED_BY_DEADLINE: ("found", "the deadline")}.get(code, ("error", text[-2000:]))
    if code == _TESTS_FAILED:
        result, by = "found", next(iter(failed_in(text)), "a test that ended the run")
    return {"fault": fault.name, "result": result, "seconds": round(time.monotonic() - began, 1), "by": by}


def failed_in(text: str) -> list[str]:
    """Returns the tests that failed, by what pytest printed."""
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)


def failing_without_fault(tree: Path, tests: Sequence[str]) -> list[str]:
    """Returns those of the tests that fail on the code as it is."""
    code, text = run_tests(tree, [*suite(), *tests], _CHECK_S) if tests else (0, "")
    if code not in (0, _TESTS_FAILED):
        sys.exit(f"{text[-6000:]}\nThe tests cannot be run without a fault (exit code {code}).")
    return failed_in(text)


def chosen(names: Sequence[str]) -> list[Fault]:
    """Returns the faults whose names begin with one of those given; all when none is given."""
    found = [fault for fault in FAULTS if not names or any(fault.name.startswith(name) for name in names)]
    if not found:
        sys.exit(f"--only: expected a name of a fault, or its beginning. Received: {', '.join(names)}.")
    return found


def main() -> int:
    """Runs the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="a fault, or how names begin")
    parser.add_argument("--budget", metavar="SECONDS", type=float, default=math.inf, help="for all faults together")
    parser.add_argument("--deadline", metavar="SECONDS", type=float, help="for one fault (150; 7200 with --whole)")
    parser.add_argument("--whole", action="store_true", help="run all tests of `make test` for each fault")
    parser.add_argument("--unchecked", action="store_true", help="do not run them without a fault in the end")
    options = parser.parse_args()
    # So that what was started ends, and the copy goes, also when this is ended from outside.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    faults, began = chosen(options.only), time.monotonic()
    deadline_s = options.deadline or (7200.0 if options.whole else 150.0)
    results: list[str] = []
    finders: set[str] = set()
    with copied_tree() as tree:
        for fault in faults:
            if time.monotonic() - began >= options.budget:
                break
            said = try_out(tree, fault, whole=options.whole, deadline_s=deadline_s)
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()
            results.append(str(said["result"]))
            if said["result"] == "found" and "::" in str(said["by"]):
                finders.add(str(said["by"]))
        false = [] if options.unchecked else failing_without_fault(tree, sorted(finders))
    for test in false:
        sys.stdout.write(f"{test} fails without a fault too: it has found nothing\n")
    found, errors = results.count("found"), results.count("error")
    tried = len(results) - errors
    sys.stdout.write(
        f"{found} of {tried} found, {results.count('survived')} survived, {errors} errors, "
        f"{len(faults) - len(results)} not reached, {time.monotonic() - began:.0f} s\n"
    )
    if errors or false:
        return 2
    return 0 if found >= WANTED * tried else 1


if __name__ == "__main__":
    sys.exit(main())
