"""Plugin of pytest that keeps the suite within a budget of seconds.

`make test-all` passes ``--budget=tests/budget.toml``. The end of such a run lists the slowest tests and the seconds of
each folder. A folder breaks its budget when it takes more than ``tolerance`` times its seconds, and a test breaks it
when it takes more than ``slow_s`` without ``@pytest.mark.slow("reason")``. A shared machine may stand still for a
minute: the first breach is a warning, and only one that the run before had as well fails the run. A fresh clone, as in
CI, remembers no run before. All folders together break theirs by no such chance: that fails the run at once.
Durations are those of the controller, so that they are whole under xdist too. Seconds are those of the machine on which
a program that the budget names takes so much processor time as it says: a run measures that program before its tests
and after them, and where it is slower, everything may take longer by the mean of both.
"""

import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings the same module
    import tomli as tomllib

NAMED_TESTS = 20
SHARED = "shared_s"
_CACHE_KEY = "elephant/budget"
_WHOLE = "all tests"


def pytest_addoption(parser):
    parser.getgroup("budget").addoption(
        "--budget", metavar="FILE", default="", help="Seconds of the folders (TOML), which the run is held to."
    )


def pytest_configure(config):
    config.pluginmanager.register(SharedSeconds(), "budget-shared-seconds")
    if config.option.budget and not hasattr(config, "workerinput"):
        limits = Limits.read(config.rootpath / config.option.budget)
        config.pluginmanager.register(Report(config, limits), "budget-report")
        # The report names the slowest tests itself.
        config.option.durations = None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    # A report, because xdist cannot say of an exception in its processes what it was.
    report = yield
    bare = {item.nodeid.partition("[")[0]: None for item in report.result or () if _lacks_reason(item)}
    if report.passed and bare:
        report.outcome, report.result = "failed", []
        report.longrepr = f'Expected @pytest.mark.slow("reason"). Received no reason: {", ".join(bare)}.'
    return report


def _lacks_reason(item):
    marks = list(item.iter_markers("slow")) if isinstance(item, pytest.Item) else []
    reasons = [mark.kwargs.get("reason", mark.args[0] if mark.args else None) for mark in marks]
    return not all(isinstance(reason, str) and reason.strip() for reason in reasons)


@dataclass(frozen=True)
class Limits:
    """What a run is held to.

    Args:
        folders: Seconds of each folder.
        tolerance: How many times its seconds a folder may take.
        slow_s: A test that takes longer must be marked as slow.
        kept: Tests that run in `make test` although they take longer, and why, by their names without parameters.
        speed: The program whose processor time tells how fast a machine is (``program``), and the seconds of it on the
            machine of which all these seconds are (``cpu_s``). Empty where seconds are those of any machine.
    """

    folders: dict
    tolerance: float = 1.5
    slow_s: float = 10.0
    kept: dict = field(default_factory=dict)
    speed: dict = field(default_factory=dict)

    @classmethod
    def read(cls, path):
        """Returns the limits that a TOML file holds."""
        return cls(**tomllib.loads(path.read_text()))

    def slowness(self):
        """Returns how many times as long as on the machine of the budget a program takes here and now; 1 at least."""
        if not self.speed:
            return 1.0
        return max(1.0, processor_seconds(self.speed["program"]) / self.speed["cpu_s"])


def processor_seconds(program):
    """Returns the processor time of a Python program in a process of its own, however many others run beside it."""
    # Isolated: of what the tests leave out of their processes (`tests/support/startup`), this one leaves out nothing.
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, program
    return usage.ru_utime + usage.ru_stime


@dataclass
class Durations:
    """Seconds of the tests of a run.

    Attributes:
        total: Seconds of each test, with its fixtures.
        own: The same without fixtures that tests share, which whoever comes first waits for.
        marked: The tests that are marked as slow.
    """

    total: dict = field(default_factory=lambda: defaultdict(float))
    own: dict = field(default_factory=lambda: defaultdict(float))
    marked: set = field(default_factory=set)

    def add(self, report):
        """Adds one phase of a test."""
        name = report.nodeid
        shared = sum(seconds for key, seconds in report.user_properties if key == SHARED)
        self.total[name] += report.duration
        self.own[name] += max(0.0, report.duration - shared)
        if "slow" in report.keywords:
            self.marked.add(name)

    def of_folders(self):
        """Returns the seconds of each folder."""
        seconds = defaultdict(float)
        for name, duration in self.total.items():
            seconds[name.partition("::")[0].rpartition("/")[0]] += duration
        return dict(sorted(seconds.items()))

    def slowest(self, count):
        """Returns (seconds, test) of the slowest tests."""
        return sorted(((seconds, name) for name, seconds in self.total.items()), reverse=True)[:count]

    def breaches(self, limits, slowness=1.0):
        """Returns what breaks the budget, as sentences by what they are about.

        Args:
            slowness: How many times its seconds everything may take, before the tolerance.
        """
        found = {}
        tolerance, slow_s = limits.tolerance * slowness, limits.slow_s * slowness
        whole, budget = sum(self.total.values()), sum(limits.folders.values())
        if whole > tolerance * budget:
            found[_WHOLE] = f"{_WHOLE} took {whole:.0f} s, more than {tolerance:.2g} times their {budget:g} s"
        for folder, seconds in self.of_folders().items():
            budget = limits.folders.get(folder)
            if budget is None:
                found[folder] = f"{folder} has no budget, and took {seconds:.0f} s"
            elif seconds > tolerance * budget:
                found[folder] = f"{folder} took {seconds:.0f} s, more than {tolerance:.2g} times its {budget:g} s"
        for name, seconds in sorted(self.own.items()):
            has_reason = name in self.marked or name.partition("[")[0] in limits.kept
            if seconds > slow_s and not has_reason:
                found[name] = f"{name} took {seconds:.1f} s, more than {slow_s:.2g} s, and is not marked as slow"
        return found


class Report:
    """The durations of a run, in the process that prints them."""

    def __init__(self, config, limits):
        self._config, self._limits = config, limits
        self._durations = Durations()
        self._warnings, self._failures = [], []
        self._slowness = [1.0]

    def pytest_sessionstart(self):
        self._slowness = [self._limits.slowness()]

    def pytest_runtest_logreport(self, report):
        self._durations.add(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session, exitstatus):
        is_whole = self._config.args_source is pytest.Config.ArgsSource.TESTPATHS and not self._config.option.keyword
        if not is_whole or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        cache = getattr(self._config, "cache", None)
        before = cache.get(_CACHE_KEY, []) if cache else []
        self._slowness.append(self._limits.slowness())
        found = self._durations.breaches(self._limits, sum(self._slowness) / 2)
        if cache:
            cache.set(_CACHE_KEY, sorted(found))
        self._failures = [found.pop(_WHOLE)] if _WHOLE in found else []
        self._failures += [
            f"{text}; so it did in the run before" for subject, text in found.items() if subject in before
        ]
        self._warnings = [text for subject, text in found.items() if subject not in before]
        if self._failures and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section(f"slowest {NAMED_TESTS} tests")
        for seconds, name in self._durations.slowest(NAMED_TESTS):
            terminalreporter.line(f"{seconds:8.2f} s  {name}")
        terminalreporter.section("seconds of the folders")
        if self._limits.speed:
            told = " and ".join(f"{times:.2f}" for times in self._slowness)
            terminalreporter.line(f"This machine took {told} times the seconds of the budget's, before and after.")
        for folder, seconds in self._durations.of_folders().items():
            terminalreporter.line(f"{seconds:8.0f} of {self._limits.folders.get(folder, 0):4g} s  {folder}")
        for text in self._warnings:
            terminalreporter.line(f"budget: warning: {text}", yellow=True)
        for text in self._failures:
            terminalreporter.line(f"budget: FAILED: {text}", red=True)


class SharedSeconds:
    """Notes in the reports of a test the seconds of fixtures that outlive it."""

    def __init__(self):
        self._seconds, self._depth = 0.0, 0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope == "function" or self._depth:
            return (yield)
        started = time.perf_counter()
        self._depth += 1
        try:
            return (yield)
        finally:
            self._depth -= 1
            self._seconds += time.perf_counter() - started

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item, nextitem):
        started = time.perf_counter()
        try:
            return (yield)
        finally:
            # What shared fixtures take to end, the last test of a file is not asked for.
            if nextitem is None or nextitem.path != item.path:
                self._seconds += time.perf_counter() - started

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        if self._seconds:
            report.user_properties.append((SHARED, self._seconds))
            self._seconds = 0.0
        return report
