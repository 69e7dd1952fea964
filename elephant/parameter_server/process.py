"""Server processes: their settings on standard input, and the processes themselves.

::

    8 bytes    length of the manifest (little-endian)
    manifest   JSON: spec, token, descriptor of the listening socket, folder, incarnation, iterations, slots, state
    arrays     values, each slot, state, those of tables that are not as they are drawn: raw, little-endian; none of
               them where the server is to restore a snapshot

The token goes no other way: arguments and environment can be read by other processes.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import logging
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from elephant.errors import ClusterError, ConfigurationError, DataError, NetworkError
from elephant.net.addresses import Address, Ports, listening_socket, name_of
from elephant.net.buffers import aligned_vector
from elephant.net.frames import raw_view
from elephant.net.handshake import check_token
from elephant.parameter_server import snapshot
from elephant.parameter_server.layout import ServerSpec
from elephant.parameter_server.optimizers import without_clipping
from elephant.parameter_server.store import SnapshotImage
from elephant.parameter_server.tables import ServedTables, bytes_of_tables

READY = "elephant parameter server is ready"
BEAT = "elephant parameter server lives"
logger = logging.getLogger(__name__)
_LENGTH = struct.Struct("<Q")

MAX_RESTARTS = 5
RESTARTS_WITHIN_S = 600.0
_TAIL_LINES = 30
_READY_S = 60.0
# A slow disk writes as much of a server's tables.
_START_BYTES_PER_S = 30e6
_GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class ServerStartup:
    """Order for a server's start.

    Args:
        spec: What to keep.
        token: The job's random token.
        listener_fd: The listening socket that the process inherits.
        folder: Where its snapshots are.
        incarnation: How often it was started before. A server that was goes on from its last snapshot.
        iterations: Updates that the optimizer has made before.
        num_slots: Slots that follow; none leaves them to the rule.
        push_log: By partition, in text: the last step that was settled in an earlier fit, its last call, and the
            highest call of any step.
        tables: Of each table the arrays that follow the state, whole or as references to them: type and shape by name.
    """

    spec: ServerSpec
    token: bytes = field(repr=False)
    listener_fd: int
    folder: str
    incarnation: int = 0
    iterations: int = 0
    num_slots: int = 0
    push_log: dict[str, Sequence[int]] = field(default_factory=dict)
    tables: Sequence[Mapping[str, tuple[str, Sequence[int]]]] = ()

    @property
    def restores(self) -> bool:
        """True if it goes on from a snapshot, and no arrays follow."""
        return self.incarnation > 0


def write(pipe: BinaryIO, startup: ServerStartup, arrays: Sequence[np.ndarray] = ()) -> None:
    """Tells a process how to begin.

    Raises:
        BrokenPipeError: It has ended.
    """
    values = {**{name: getattr(startup, name) for name in startup.__dataclass_fields__}}
    values.update(spec=startup.spec.to_json(), token=startup.token.hex())
    text = json.dumps(values).encode()
    pipe.write(_LENGTH.pack(len(text)) + text)
    for array in arrays:
        pipe.write(raw_view(array))
    pipe.flush()


def read(pipe: Any) -> tuple[ServerStartup, SnapshotImage]:
    """Reads the order and the first values.

    Raises:
        ValueError: The pipe was closed before all was told.
        DataError: There is no snapshot to restore.
    """
    head = bytearray(_LENGTH.size)
    snapshot.fill(pipe, memoryview(head))
    text = bytearray(_LENGTH.unpack(head)[0])
    snapshot.fill(pipe, memoryview(text))
    values = json.loads(text)
    values.update(spec=ServerSpec.from_json(values["spec"]), token=bytes.fromhex(values["token"]))
    startup = ServerStartup(**values)
    if startup.restores:
        return startup, restore(startup)
    vectors = [aligned_vector(startup.spec.num_values) for _ in range(1 + startup.num_slots)]
    state = np.empty(startup.spec.num_state_values)
    tables = [{name: np.empty(shape, dtype) for name, (dtype, shape) in one.items()} for one in startup.tables]
    for array in (*vectors, state, *(array for one in tables for array in one.values())):
        snapshot.fill(pipe, raw_view(array))
    entries = {
        int(partition): {"step": step, "call": call, "highest_call": highest}
        for partition, (step, call, highest) in startup.push_log.items()
    }
    image = SnapshotImage(
        values=vectors[0],
        slots=tuple(vectors[1:]),
        state=state,
        iterations=startup.iterations,
        entries=entries,
        tables=ServedTables(startup.spec, tables),
    )
    return startup, image


def restore(startup: ServerStartup) -> SnapshotImage:
    """Returns the last snapshot that is whole; the one of the beginning where there is no later one.

    Raises:
        DataError: There is none at all.
    """
    folder = Path(startup.folder)
    snapshot.tidy(folder)
    try:
        return snapshot.read_image(folder, snapshot.LATEST, startup.spec)
    except DataError as error:
        if snapshot.exists(folder, snapshot.LATEST):
            logger.warning(
                "The last snapshot cannot be used: %s The server goes back to its beginning. Workers repeat what they "
                "have pushed, except those that have finished: run the fit again.",
                error,
            )
        return snapshot.read_image(folder, snapshot.INITIAL, startup.spec)


def shard_specs(spec: ServerSpec, count: int) -> list[ServerSpec]:
    """Divides the spec of one server among several: contiguous parts, about equally long.

    The state that is averaged stays with the first.

    Raises:
        ConfigurationError: There are fewer than 16 values for each server, or the rule clips by a norm.

    >>> from elephant.parameter_server.layout import Layout
    >>> whole = ServerSpec(run_id="r", layout=Layout([("a", (100,))]), first_value=0, num_values=112)
    >>> [(part.first_value, part.num_values) for part in shard_specs(whole, 2)]
    [(0, 64), (64, 48)]
    """
    if count > 1 and without_clipping(spec.rule)[1] is not None:
        raise ConfigurationError(
            f"rule: expected one without clipping by a norm, because none of {count} servers sees a whole gradient. "
            f"Received: {spec.rule!r}. Take it out with optimizers.without_clipping, and have workers clip."
        )
    parts = spec.layout.cut(count)
    if any(part.stop == part.start for part in parts):
        raise ConfigurationError(
            f"parameterServers: expected at most one for each 16 of the model's {spec.layout.num_values} values. "
            f"Received: {count}."
        )
    return [
        replace(
            spec,
            first_value=part.start,
            num_values=part.stop - part.start,
            num_state_values=spec.num_state_values if index == 0 else 0,
            part=index,
            parts=count,
        )
        for index, part in enumerate(parts)
    ]


def listening_sockets(host: str, port: int, count: int, ports: Ports = None) -> list[socket.socket]:
    """Returns sockets for so many servers to listen on.

    Args:
        port: Of the first one, whose next ones the others have; zero takes free ones.
        ports: Among which, where ``port`` is zero.

    Raises:
        ClusterError: A port is taken, or the address is not of this machine.
    """
    sockets: list[socket.socket] = []
    try:
        for index in range(count):
            sockets.append(listening_socket(host, port + index if port else 0, ports))
    except NetworkError as error:
        for sock in sockets:
            sock.close()
        wanted = name_of((host, port + len(sockets) if port else 0))
        raise ClusterError(
            f"Expected a parameter server to listen on {wanted}. Received: {error} {_remedy(error.__cause__)}"
        ) from error
    return sockets


def _remedy(cause: BaseException | None) -> str:
    code = cause.errno if isinstance(cause, OSError) else None
    if code == errno.EACCES:
        return "Ports below 1024 are not for everybody: choose a higher one with port, or a free one with port=0."
    if code == errno.EADDRNOTAVAIL:
        return "Set spark.driver.bindAddress, or spark.driver.host, to an address of this machine."
    return (
        "End what uses that port, such as a fit that still runs, choose another one with port, or let the system "
        "choose with port=0."
    )


class ServerProcess:
    """One parameter server in a process of its own, which ends with this one.

    When the process is lost, it is started again on the same port and goes on from its last
    snapshot, five times within ten minutes; then ``failure`` says why no more.

    Args:
        spec: What it keeps. Its snapshots go to a folder of their own, within ``snapshot_folder`` where that is
            given, which is removed in the end.
        token: The job's random token, 16 bytes or more.
        values: The weights to begin with, float32 of shape (spec.num_values,).
        slots: What the rule begins with, of the same shape each; none leaves it to the rule.
        state: The state before any worker has sent one, float64 of shape (spec.num_state_values,); None is zero.
        tables: Rows of each whole table, and what its rule remembers, by name, or references to them; those not given
            are the first.
        push_log: Pushes of an earlier fit, by partition, which this one goes on from; see
            `elephant.parameter_server.control_client.ServerState`. None begins without any.

    Raises:
        ConfigurationError: The arrays do not fit the spec.
        ClusterError: The process did not start.
        OSError: The folder for snapshots cannot be made.
    """

    def __init__(
        self,
        spec: ServerSpec,
        listener: socket.socket,
        token: bytes,
        values: np.ndarray,
        slots: Sequence[np.ndarray] = (),
        iterations: int = 0,
        state: np.ndarray | None = None,
        *,
        push_log: Mapping[int, Sequence[int]] | None = None,
        tables: Sequence[Mapping[str, np.ndarray]] = (),
        note: Callable[[str], None] | None = None,
    ) -> None:
        check_token(token)
        arrays = [*_checked(spec, values, slots, state), *(array for one in tables for array in one.values())]
        self.restarts = 0
        self._restarted_at: collections.deque[float] = collections.deque(maxlen=MAX_RESTARTS)
        self.failure: str | None = None
        self._listener = listener
        self._note = note or logger.warning
        self._closing = False
        self._changing = threading.Lock()
        self._ready = threading.Event()
        self._told = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        host, port = listener.getsockname()[:2]
        self.address: Address = (str(host), int(port))
        if spec.snapshot_folder is not None:
            os.makedirs(spec.snapshot_folder, exist_ok=True)
        self._folder = tempfile.mkdtemp(prefix=f"elephant-server-{os.getpid()}-", dir=spec.snapshot_folder)
        self._startup = ServerStartup(
            spec=spec, token=token, listener_fd=listener.fileno(), folder=self._folder,
            iterations=iterations, num_slots=len(slots),
            push_log={str(partition): list(entry) for partition, entry in (push_log or {}).items()},
            tables=[{name: (array.dtype.str, array.shape) for name, array in one.items()} for one in tables],
        )  # fmt: skip
        self._watcher = threading.Thread(target=self._watch, name="elephant-server-watch", daemon=True)
        try:
            self._process = process = self._start(self._startup)
            self._watcher.start()
            self._tell(process, self._startup, arrays)
            self._await_ready()
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        """The server's process, at present."""
        if self._process is None:
            raise ClusterError(f"Expected a parameter server on {name_of(self.address)}. Received: none was started.")
        return self._process.pid

    def close(self) -> None:
        """Ends the server and removes what it kept; does nothing where that was done."""
        with self._changing:
            self._closing = True
        self._ready.set()
        if self._process is not None:
            self._end(self._process)
        if self._watcher.ident is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, startup: ServerStartup) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "elephant.parameter_server"],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(startup.listener_fd,),
            start_new_session=True,
        )

    def _tell(
        self, process: subprocess.Popen[bytes], startup: ServerStartup, arrays: Sequence[np.ndarray] = ()
    ) -> None:
        # A process that has ended is noticed by the watcher, which knows why; one that was closed meanwhile is no news.
        with contextlib.suppress(BrokenPipeError, ValueError):
            write(cast(BinaryIO, process.stdin), startup, arrays)
        self._told.set()

    def _await_ready(self) -> None:
        limit_s = start_s(self._startup.spec)
        came = self._ready.wait(limit_s)
        if self.failure is not None or not came:
            reason = self.failure or f"nothing for {limit_s:.0f} s."
            raise ClusterError(f"Expected the parameter server on {name_of(self.address)} to start. Received: {reason}")

    def _watch(self) -> None:
        """Follows the server until it has ended for good; any other end of this thread is a failure of the server."""
        try:
            self._follow_all()
        except Exception as error:
            self.failure = f"the parameter server on {name_of(self.address)} cannot be followed: {error!r}"
            self._ready.set()

    def _follow_all(self) -> None:
        """Follows one process after the other, until one ends that was asked to, or too many were lost."""
        while self._process is not None:
            process = self._process
            self._follow(process)
            code = process.wait()
            _close_pipes(process)
            with self._changing:
                if self._closing:
                    return
                lost = f"its process {_exit_text(code)}. Its last lines: {''.join(self._tail).strip() or 'none'}"
                often = is_too_often(self._restarted_at, time.monotonic())
                if often or not self._ready.is_set():
                    times = (
                        f", and {MAX_RESTARTS} times in the {RESTARTS_WITHIN_S / 60:g} minutes before" if often else ""
                    )
                    self.failure = f"the parameter server on {name_of(self.address)} was lost{times}: {lost}"
                    self._ready.set()
                    return
                startup = self._restarted()
                self._told.clear()
                try:
                    self._process = process = self._start(startup)
                except OSError as error:
                    self.failure = f"the parameter server on {name_of(self.address)} cannot be started again: {error}"
                    return
                self.restarts += 1
                self._restarted_at.append(time.monotonic())
            self._tell(process, startup)
            try:
                self._note(f"The parameter server on {name_of(self.address)} was lost, and started again: {lost}")
            except Exception:
                # The server is followed whatever the caller makes of the news.
                logger.exception("Telling of a parameter server that was lost failed")

    def _restarted(self) -> ServerStartup:
        startup = self._startup
        return ServerStartup(
            spec=startup.spec, token=startup.token, listener_fd=startup.listener_fd, folder=startup.folder,
            incarnation=self.restarts + 1,
        )  # fmt: skip

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """Takes what a process prints until it ends, and ends it where nothing comes any more, not even its beat."""
        pipe, begun, is_ready = cast(BinaryIO, process.stdout), b"", False
        poller = select.poll()
        poller.register(pipe, select.POLLIN)
        while True:
            silence_s = self._startup.spec.heartbeat_s if is_ready else start_s(self._startup.spec)
            if not poller.poll(1000 * silence_s):
                self._tail.append(f"(nothing was heard of it for {silence_s:.0f} s: it was ended)")
                process.kill()
                return
            data = os.read(pipe.fileno(), 1 << 16)
            if not data:
                return
            *lines, begun = (begun + data).split(b"\n")
            is_ready = is_ready or READY.encode() in lines
            for line in lines:
                self._take(line.decode(errors="replace").strip())

    def _take(self, line: str) -> None:
        if line == READY:
            self._ready.set()
        elif line != BEAT:
            self._tail.append(f"{line}\n")
            logger.warning("%s", line)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Asks the process to end, then makes it."""
        if self._told.is_set():
            with contextlib.suppress(OSError, ValueError):
                cast(BinaryIO, process.stdin).close()
        else:
            # It is not reading what another thread writes to it, or not yet: closing the pipe would wait for that.
            process.kill()
        for insist in (process.terminate, process.kill):
            try:
                process.wait(_GRACE_S)
                return
            except subprocess.TimeoutExpired:
                insist()
        process.wait()


def start_s(spec: ServerSpec) -> float:
    """Returns the seconds that a server may take to draw, read and keep what it begins with."""
    return _READY_S + bytes_of_tables(spec) / _START_BYTES_PER_S


def is_too_often(restarted_at: Iterable[float], now: float) -> bool:
    """Returns whether a server that is lost now was started again so often of late that it is not once more.

    Args:
        restarted_at: When it was, in seconds.
        now: The same clock's time.

    >>> is_too_often([0, 1, 2, 3], now=4)
    False
    >>> is_too_often([0, 1, 2, 3, 4], now=599), is_too_often([0, 1, 2, 3, 4], now=600)
    (True, False)
    """
    return sum(now - at < RESTARTS_WITHIN_S for at in restarted_at) >= MAX_RESTARTS


def _checked(
    spec: ServerSpec, values: np.ndarray, slots: Sequence[np.ndarray], state: np.ndarray | None
) -> list[np.ndarray]:
    """Returns the arrays in the form in which they are sent."""
    state = np.zeros(spec.num_state_values) if state is None else state
    arrays = [np.ascontiguousarray(array, "<f4") for array in (values, *slots)]
    arrays.append(np.ascontiguousarray(state, "<f8"))
    expected = [(spec.num_values,)] * (1 + len(slots)) + [(spec.num_state_values,)]
    received = [array.shape for array in arrays]
    if received != expected:
        raise ConfigurationError(f"values, slots and state: expected the shapes {expected}. Received: {received}.")
    return arrays


def _environment() -> dict[str, str]:
    """Returns the environment of a server: one thread for each numpy call, and this process's import path."""
    single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    path = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, **single, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _exit_text(code: int) -> str:
    if code == -9:
        return "was killed (signal 9): often the kernel or the cluster manager, out of memory"
    return f"was ended by signal {-code}" if code < 0 else f"exited with {code}"


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
