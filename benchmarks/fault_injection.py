"""A driver with a cluster for cases, the ranks that it holds at a moment, and the faults that happen to them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from fault_table import EXECUTORS, RANKS, Action, Case, Fault, Moment, Part, Place
from leftovers import MARK

# Last, because some modules there and here share a name.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from network_namespaces import Network
from process_tree import predicts, processes_of, task_of
from standalone_cluster import Place as HostPlace
from standalone_cluster import StandaloneCluster

_ROOT = Path(__file__).resolve().parent.parent
HEARTBEAT_S = 6.0
CASE_S, GONE_S = 120.0, 45.0
_START_S = 180.0
_DISK_BYTES = 512 << 20
_MEMORY_LIMIT = 64 << 20
_CONTROLLER = Path("/sys/fs/cgroup/memory")
# The driver has the first host; the last one is cut off, and comes back.
_LINKS_OF_LAST = ((2, 0), (2, 1))


class Hung(Exception):  # noqa: N818  (an outcome)
    """Something has not come in its time."""


def until(condition: Callable[[], Any], timeout_s: float, awaited: str) -> Any:
    """Returns what a condition gives as soon as it holds; raises Hung after some time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise Hung(f"{awaited} has not come in {timeout_s:g} s")
        time.sleep(0.02)
    return value


class FaultDriver:
    """A process of `fault_driver` with its cluster, from ``with`` to the end of the block.

    Args:
        folder: Where all of its files are.
        place: The kind of its cluster.
        closing: Closes what it needs.
    """

    def __init__(self, folder: Path, place: Place, closing: contextlib.ExitStack) -> None:
        self.folder, self.place = folder, place
        self.local, self.temporary, self.shift = folder / "local", folder / "tmp", folder / "shift"
        self.mark = secrets.token_hex(8)
        self.network: Network | None = None
        self.executors = RANKS if place is Place.NAMESPACES else EXECUTORS
        for path in (self.local, self.temporary):
            path.mkdir(parents=True)
        environment, prefix = {**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary)}, ()
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), environment.get("PYTHONPATH", "")])
        if place is Place.SHIFTED_CLOCK:
            environment |= self._shifted_clock()
        elif place is Place.SMALL_DISK:
            closing.enter_context(small_disk(self.local))
        elif place is Place.NAMESPACES:
            self.network = closing.enter_context(Network(3))
            cluster = closing.enter_context(cluster_over(self.network, self.mark))
            environment |= cluster.environment
            environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), environment["PYTHONPATH"]])
            prefix = self.network.hosts[0].prefix
            self.local = Path(cluster.folder)
        self._answers, self._num_answers = folder / "answers", 0
        self._log = closing.enter_context(open(folder / "log", "w"))
        program = [
            sys.executable,
            str(Path(__file__).with_name("fault_driver.py")),
            str(self.local),
            str(self._answers),
        ]
        self._command = subprocess.Popen(
            [*prefix, *program], env=environment, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, text=True
        )
        self.process = psutil.Process(self._command.pid)
        closing.callback(self._end)
        if "ready" not in self.answer(_START_S):
            raise SystemExit((folder / "log").read_text()[-3000:])

    def _shifted_clock(self) -> dict[str, str]:
        library = self.folder / "clock_shift.so"
        source = Path(__file__).with_name("clock_shift.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
        self.shift.write_bytes((0).to_bytes(8, sys.byteorder, signed=True))
        return {"LD_PRELOAD": str(library), "ELEPHANT_CLOCK_SHIFT": str(self.shift)}

    @property
    def is_running(self) -> bool:
        """Whether it can take orders."""
        return self._command.poll() is None

    def begin(self, **order: Any) -> None:
        """Has it begin a run."""
        assert self._command.stdin is not None
        self._command.stdin.write(json.dumps({**order, "executors": self.executors}) + "\n")
        self._command.stdin.flush()

    @property
    def has_answered(self) -> bool:
        """Whether there is an answer that nobody has taken, or never will be one."""
        text = self._answers.read_text() if self._answers.exists() else ""
        return text.count("\n") > self._num_answers or not self.is_running

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Returns what it says next; ``ended`` where it has ended."""

        def look() -> dict[str, Any] | None:
            lines = self._answers.read_text().splitlines(keepends=True) if self._answers.exists() else []
            if len(lines) > self._num_answers and lines[self._num_answers].endswith("\n"):
                self._num_answers += 1
                return dict(json.loads(lines[self._num_answers - 1]))
            return None if self.is_running else {"ended": self._command.returncode}

        return dict(until(look, timeout_s, "an answer of the driver"))

    def dump(self) -> None:
        """Has it print the stacks of its threads."""
        with contextlib.suppress(psutil.Error):
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1)

    def kill(self) -> None:
        """Kills it and all that it has started."""
        with contextlib.suppress(psutil.Error):
            for one in [*self.process.children(recursive=True), self.process]:
                with contextlib.suppress(psutil.Error):
                    one.kill()
        self._command.wait(30)

    def _end(self) -> None:
        if self._command.stdin is not None:
            with contextlib.suppress(OSError):
                self._command.stdin.close()
        try:
            self._command.wait(60)
        except subprocess.TimeoutExpired:
            self.dump()
            self.kill()

    def in_fit(self) -> list[str]:
        """Returns what there is of a fit: its processes, threads' folders, snapshots."""
        found = [
            f"process {process.pid}: {name}"
            for name in ("rank", "parameter_server")
            for process in processes_of(f"elephant.{name}", folder=self.local)
            if not predicts(process)
        ]
        folders = self.local.glob("**/blockmgr-*/elephant-*")
        return found + [str(path) for path in [*folders, *self.temporary.glob("elephant-server-*")]]


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mounts a file system of its own on a folder."""
    options = f"size={_DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def cluster_over(network: Network, mark: str) -> Iterator[StandaloneCluster]:
    """Runs a standalone cluster: the master on the first host, a worker on each of the others."""
    places = [HostPlace(host.address, host.prefix) for host in network.hosts]
    conf = {
        "spark.executor.heartbeatInterval": "2s",
        "spark.storage.blockManagerHeartbeatTimeoutMs": "12s",
        "spark.network.timeoutInterval": "2s",
    }
    with StandaloneCluster(places=places[1:], master=places[0], conf=conf, variables={MARK: mark}) as cluster:
        yield cluster


@dataclass
class Held:
    """A rank that waits at the moment: its training process, and that of its Spark task."""

    process: psutil.Process
    task: psutil.Process

    def get(self, part: Part, driver: FaultDriver) -> psutil.Process:
        """Returns the process of a kind that belongs to it."""
        if part is Part.TRAINING:
            return self.process
        if part is Part.PYTHON_WORKER:
            return self.task
        if part is Part.EXECUTOR:
            return self.executor
        if part is Part.FORK_SERVER:
            return psutil.Process(self.process.ppid())
        if part is Part.SERVER:
            return processes_of("elephant.parameter_server", folder=driver.local)[0]
        return driver.process

    @property
    def executor(self) -> psutil.Process:
        """The executor's Java process."""
        return next(process for process in self.task.parents() if process.name() == "java")

    @property
    def executor_id(self) -> str:
        """Spark's name of it."""
        command = self.executor.cmdline()
        return str(command[command.index("--executor-id") + 1])


def held_ranks(case: Case, driver: FaultDriver, folder: Path) -> list[Held]:
    """Waits until all ranks are at the moment; returns them."""

    def found() -> list[Held]:
        held = _before_meeting(driver, folder) if case.moment is Moment.MEETING else _at_gate(folder)
        if not held and driver.has_answered:
            raise Hung("the run has ended before the moment has come")
        return held

    return list(until(found, CASE_S, "the moment in each rank"))


def _before_meeting(driver: FaultDriver, folder: Path) -> list[Held]:
    ranks = [one for one in processes_of("elephant.rank", folder=driver.local) if not predicts(one)]
    if len(ranks) < RANKS or not (folder / "asked").exists():
        return []
    return [Held(one, task_of(one.pid)) for one in ranks]


def _at_gate(folder: Path) -> list[Held]:
    names = sorted(os.listdir(folder / "waits"))
    if len(names) < RANKS:
        return []
    return [Held(*(psutil.Process(int(number)) for number in name.split("-"))) for name in names]


class Disturbance:
    """Carries a fault out, and takes it back.

    Attributes:
        at: When it was, in seconds since 1970.
        undo: Takes back what would disturb later cases.
    """

    def __init__(self, case: Case, held: Held, driver: FaultDriver, chance: random.Random) -> None:
        self._case, self._held, self._driver, self._chance = case, held, driver, chance
        self.undo, self.at = contextlib.ExitStack(), 0.0
        fault = case.fault
        self._victim = held.get(fault.part, driver) if fault.part else None

        # Before it is lost with what it names.
        self._executor_id, self._host = held.executor_id, "127.0.0.1"
        if driver.network is not None:
            self._host = driver.network.hosts[-1].address

    def is_named(self, answer: dict[str, Any]) -> bool:
        """Returns whether an error names the rank to which it has happened."""
        if self._driver.network is not None:
            return bool(answer["host"] == self._host)
        return bool(answer["executor"] == self._executor_id)

    def happen(self) -> None:
        """Does it."""
        fault = self._case.fault
        self.at = time.time()
        if fault.action and self._victim is not None:
            self._victim.send_signal(getattr(signal, fault.action.value))
            if fault.action is Action.STOP:
                self.undo.callback(self._resume)
        elif fault.place is Place.NAMESPACES:
            self._cut()
        elif fault is Fault.FULL_DISK:
            self._fill()
        elif fault is Fault.MEMORY_LIMIT:
            self._limit()
        elif fault is Fault.CLOCK_JUMP:
            self._jump(self._chance.choice((-3600, 3600)))
            self.undo.callback(self._jump, 0)
        if fault is Fault.STOP_DRIVER or fault.place is Place.NAMESPACES:
            time.sleep(2.5 * HEARTBEAT_S)
            self.undo.close()

    def _resume(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._victim.resume()

    def _cut(self) -> None:
        both = self._case.fault is Fault.CUT_LINK
        for link in _LINKS_OF_LAST:
            self._driver.network.cut(*link, both=both)
            self.undo.callback(self._driver.network.heal, *link, both=both)

    def _fill(self) -> None:
        filler = self._driver.local / "filler"
        self.undo.callback(filler.unlink)
        for size in (1 << 20, 1 << 12):
            with open(filler, "ab", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass

    def _limit(self) -> None:
        group = _CONTROLLER / f"elephant-fault-{os.getpid()}"
        group.mkdir()
        self.undo.callback(_remove_group, group)
        (group / "memory.limit_in_bytes").write_text(str(_MEMORY_LIMIT))
        (group / "cgroup.procs").write_text(str(self._held.process.pid))

    def _jump(self, seconds: int) -> None:
        with open(self._driver.shift, "r+b") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))


def _remove_group(group: Path) -> None:
    until(lambda: not (group / "cgroup.procs").read_text(), GONE_S, "the end of a process")
    group.rmdir()
