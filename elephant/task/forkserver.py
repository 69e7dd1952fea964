"""Fork server of ranks' processes: ``python -m elephant.task.forkserver``.

The server imports Keras and its backend, or neither for functions of the user's, runs nothing, and
forks a process for each rank that asks: the rank starts in a fraction of a second where a fresh
process would import for seconds. The idea is that of `multiprocessing.forkserver`; this one belongs
to an executor of Spark's instead of the process that started it, and ends with it.

Where the import leaves a state that a fork would break (threads of the backend's own, an open
device), the server forks before the import instead: spare processes import, then wait for one
rank each.

A task may start it ahead, before there are ranks. It then imports, and waits for the first of them.

A rank's Spark task connects by a Unix socket in a folder that only this user can enter. The
server serves descendants of its own executor alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import json
import os
import random
import selectors
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import zipimport
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elephant.rank.executor import is_gone, is_stopped, memory_is_short, parents_of, process_start, quick_imports
from elephant.rank.process_pipe import DESCRIPTORS, FORKED
from elephant.storage.filesystem import WORK_FOLDER

REFUSED = "refused"
# Behind the server's process id in its file, once it answers at once.
READY = "ready"
_PROGRAM = "elephant.rank"
LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
_DEVICES = ("/dev/nvidia", "/dev/dri", "/dev/kfd")
_LOOK_S = 1.0
# A task that is alive sends its request at once. Others wait meanwhile; one that is late starts a process itself.
_REQUEST_S = 1.0
_END_GRACE_S = 10.0
# For tasks that outlive their executor: those that are stopped, as long as Spark may wait for them.
_CLEAR_UP_S = 30.0
_CLEAR_UP_LOOK_S = 0.1
# Archives on the import path as they were when the imports ended, by the place in them.
_ARCHIVES: dict[str, tuple[int, ...] | None] = {}
_MAX_REQUEST_BYTES = 2**24
_MAX_DESCRIPTORS = 32


@dataclass(frozen=True, kw_only=True)
class ForkRequest:
    """Request of a task to the server for one process. Three descriptors travel with it, and those that it inherits.

    Args:
        arguments: Of ``python -m elephant.rank``, which the process then is.
        environment: All of its environment variables.
        folder: Its working directory.
        descriptors: What the task calls the descriptors that the process inherits.
        idle_s: Seconds without a process after which the server ends.
        limit: Spare processes that may wait at a time; not used where the server forks after the import.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]
    idle_s: float
    limit: int

    def to_bytes(self) -> bytes:
        """Returns the form that crosses the socket."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, block: bytes) -> ForkRequest:
        """Reads the form of `to_bytes`."""
        request = cls(**json.loads(block))
        return replace(request, idle_s=float(request.idle_s), limit=int(request.limit))


class ForkServer:
    """The server's loop: accept requests, fork, report how each process has ended."""

    def __init__(
        self,
        folder: Path,
        key: str,
        listener: socket.socket,
        lock: int,
        executor: tuple[int, int],
        *,
        modules: Sequence[str],
        forks_after_import: bool,
        idle_s: float,
        spares: int = 0,
    ) -> None:
        self._folder, self._key, self._listener, self._lock = folder, key, listener, lock
        self._executor = executor
        self._modules = modules
        self._forks_after_import = forks_after_import
        self._selector = selectors.DefaultSelector()
        self._children: list[_Child] = []
        self._spares: list[_Spare] = []
        self._idle_s = idle_s
        self._limit = spares
        # How many ranks may be asked for first; zero once one was.
        self._expected = spares
        self._idle_since = time.monotonic()
        self._leaves = False
        self._refusal = ""

    def serve(self) -> None:
        """Serves until the executor ends, nobody has asked for a while, memory is short, or SIGTERM asks to leave."""
        signal.signal(signal.SIGTERM, self._leave)
        self._say(str(os.getpid()))
        try:
            executor = _executor_descriptor(*self._executor)
        except ProcessLookupError:
            self._clear_up()
            return
        self._selector.register(executor, selectors.EVENT_READ, None)
        if self._forks_after_import:
            with self._looking_meanwhile():
                self._refusal = import_all(self._modules)
            if self._refusal:
                with contextlib.suppress(OSError):
                    # For tasks to come, which then need not ask.
                    cold_marker(self._folder, self._key).touch()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._say(f"{os.getpid()} {READY}")
        self._idle_since = time.monotonic()
        while True:
            for key, _ in self._selector.select(_LOOK_S):
                if key.data is None:
                    self._clear_up()
                    return
                key.data()
            self._end_abandoned()
            self._remove_abandoned()
            # Now, as no descriptor of a rank is open here that a spare process would keep open.
            self._make_spares()
            if not self._folder.is_dir() or self._is_over():
                return

    def close(self) -> None:
        """Ends spare processes and removes the socket. Processes of ranks go on, and end with their tasks."""
        for spare in self._spares:
            spare.end()
        with contextlib.suppress(OSError):
            socket_path(self._folder, self._key).unlink(missing_ok=True)
            lock_path(self._folder, self._key).unlink(missing_ok=True)
            # Where it was the last one.
            self._folder.rmdir()
        self._listener.close()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            # On a full disk it cannot be asked to leave, and serves all the same.
            os.pwrite(self._lock, text.encode(), 0)

    def _leave(self, *_: object) -> None:
        self._leaves = True

    def _is_over(self) -> bool:
        if self._children:
            self._idle_since = time.monotonic()
            return False
        idle_s = time.monotonic() - self._idle_since
        return self._leaves or bool(self._refusal) or idle_s > self._idle_s or (idle_s > _LOOK_S and memory_is_short())

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        descriptors: list[int] = []
        try:
            connection.settimeout(_REQUEST_S)
            if not _belongs_to(connection, self._executor[0]):
                raise PermissionError("expected a task of this server's own executor")
            request = received_request(connection, descriptors)
            self._idle_s, self._limit, self._expected = request.idle_s, request.limit, 0
            if self._refusal:
                _reply(connection, {REFUSED: self._refusal})
                connection.close()
            elif _is_closed(connection) or not os.path.isdir(request.folder):
                connection.close()
            else:
                self._start(connection, request, descriptors)
        except Exception:
            # Its task sees the connection end, and starts a process of its own. Others are served.
            connection.close()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _start(self, connection: socket.socket, request: ForkRequest, descriptors: Sequence[int]) -> None:
        if self._forks_after_import:
            run = functools.partial(run_request, request, descriptors)
            process_id = self._fork(run, own=[connection.fileno()])
        else:
            spare = self._waiting_spare() or self._new_spare([connection.fileno(), *descriptors])
            process_id = spare.hand_over(request, descriptors)
        try:
            child = _Child(process_id, os.pidfd_open(process_id), connection, request)
        except OSError:
            # Without a descriptor its end would not be seen.
            _end(process_id)
            raise
        self._children.append(child)
        self._selector.register(child.descriptor, selectors.EVENT_READ, lambda: self._ended(child))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._abandoned(child))
        with contextlib.suppress(OSError):
            # A task that is gone meanwhile does not listen, which the process is about to notice.
            _reply(connection, {"pid": process_id}, [child.descriptor])

    def _waiting_spare(self) -> _Spare | None:
        """Returns the first process that waits; None where none does."""
        while self._spares:
            spare = self._spares.pop(0)
            if spare.waits():
                return spare
            spare.end()
        return None

    def _make_spares(self) -> None:
        """Has as many processes wait as ranks run here now: so many are likely to be asked for next."""
        if self._forks_after_import:
            return
        with contextlib.suppress(OSError):
            running = sum(not child.has_ended for child in self._children)
            wanted = min(max(running, self._expected), self._limit)
            while len(self._spares) < wanted and not memory_is_short():
                self._spares.append(self._new_spare())

    def _ended(self, child: _Child) -> None:
        """Reports to the task how its process has ended."""
        _, status = os.waitpid(child.process_id, 0)
        with contextlib.suppress(OSError):
            _reply(child.connection, {"exit": os.waitstatus_to_exitcode(status)})
        self._selector.unregister(child.descriptor)
        os.close(child.descriptor)
        child.has_ended = True
        if child.abandoned_at is not None:
            self._forget(child)

    def _abandoned(self, child: _Child) -> None:
        """Takes note that a task has hung up: it has done with its process, or is gone."""
        self._selector.unregister(child.connection)
        child.abandoned_at = time.monotonic()
        if child.has_ended:
            self._forget(child)
            return
        # It ends without its task. One that is stopped would not notice.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.descriptor, signal.SIGCONT)

    def _forget(self, child: _Child) -> None:
        child.connection.close()
        self._children.remove(child)

    def _end_abandoned(self) -> None:
        for child in self._children:
            if child.abandoned_at is not None and time.monotonic() - child.abandoned_at > _END_GRACE_S:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(child.descriptor, signal.SIGKILL)

    def _remove_abandoned(self) -> None:
        """Removes the work folders of tasks that are gone: Spark kills tasks at any moment, also before they ask."""
        used = {child.request.environment.get(WORK_FOLDER) for child in self._children}
        for folder in self._work_folders():
            if is_gone(int(folder.name.split("-")[-2])) and str(folder) not in used:
                shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def _looking_meanwhile(self) -> Iterator[None]:
        """Removes in a thread what tasks leave that are gone, and ends this process where the executor is.

        The thread is joined before anything is forked.
        """
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_LOOK_S):
                self._remove_abandoned()
                if is_gone(self._executor[0]):
                    self._clear_up()
                    self.close()
                    os._exit(0)

        thread = threading.Thread(target=look, name="elephant-forkserver-look", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _work_folders(self) -> list[Path]:
        found = self._folder.parent.glob(f"*-{owner_of(*self._executor)}-*-*")
        return [folder for folder in found if folder.name.split("-")[-2].isdigit()]

    def _clear_up(self) -> None:
        """Stays for a moment after the executor: its tasks end after it, and what they leave nobody else removes."""
        self._listener.close()
        for spare in self._spares:
            spare.end()
        self._spares.clear()
        # Processes of ranks end with their tasks, and remove their folders; not those that are killed as well.
        deadline = time.monotonic() + _CLEAR_UP_S
        while self._work_folders() and time.monotonic() < deadline:
            self._children = [child for child in self._children if not is_gone(child.process_id)]
            self._remove_abandoned()
            time.sleep(_CLEAR_UP_LOOK_S)

    def _new_spare(self, own: Sequence[int] = ()) -> _Spare:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            # With the server's end open, it would not see that the server is gone.
            process_id = self._fork(functools.partial(wait_as_spare, theirs, self._modules), own=[ours.fileno(), *own])
        return _Spare(process_id, ours)

    def _fork(self, run: Callable[[], None], *, own: Sequence[int]) -> int:
        """Forks a process that closes what is the server's, and runs; returns its id."""
        process_id = os.fork()
        if process_id:
            return process_id
        try:
            all_own = {self._lock, *own, *(key.fd for key in self._selector.get_map().values())}
            all_own |= {spare.connection.fileno() for spare in self._spares}
            all_own |= {child.connection.fileno() for child in self._children}
            self._selector.close()
            for descriptor in all_own:
                os.close(descriptor)
            # A signal to the group of one rank is not for the others, or for the server.
            os.setpgid(0, 0)
            run()
        except BaseException:
            # Where its output is connected already, its task shows it.
            traceback.print_exc()
        finally:
            os._exit(1)


@dataclass
class _Child:
    """A process of a rank, its pidfd, the connection to its task, and what that asked for."""

    process_id: int
    descriptor: int
    connection: socket.socket
    request: ForkRequest
    has_ended: bool = False
    abandoned_at: float | None = None


@dataclass
class _Spare:
    """A process that imports, or has imported, and waits for a request."""

    process_id: int
    connection: socket.socket

    def waits(self) -> bool:
        """Returns whether the process is there, and not stopped."""
        is_there = os.waitid(os.P_PID, self.process_id, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        return is_there and not is_stopped(self.process_id)

    def hand_over(self, request: ForkRequest, descriptors: Sequence[int]) -> int:
        """Gives the process what it is to run; returns its id. The server's own connection to it ends.

        Raises:
            OSError: The process has ended meanwhile.
        """
        try:
            with self.connection:
                send_request(self.connection, request, descriptors)
        except OSError:
            self.end()
            raise
        return self.process_id

    def end(self) -> None:
        """Ends the process, which sees its connection close."""
        self.connection.close()
        _end(self.process_id)


def _end(process_id: int) -> None:
    """Ends a child that nobody has waited for yet."""
    os.kill(process_id, signal.SIGKILL)
    os.waitpid(process_id, 0)


def socket_path(folder: Path, key: str) -> Path:
    """Returns the socket's path of the server of a key."""
    return folder / f"{key}.socket"


def lock_path(folder: Path, key: str) -> Path:
    """Returns the file that is locked as long as there is a server of a key; it holds the server's process id."""
    return folder / f"{key}.lock"


def is_ready(lock: Path) -> bool:
    """Returns whether the server of a lock has said that it answers at once."""
    try:
        return lock.read_text().split()[1:] == [READY]
    except OSError:
        return False


def cold_marker(folder: Path, key: str) -> Path:
    """Returns the file that says that there can be no server of a key."""
    return folder / f"{key}.cold"


def send_request(connection: socket.socket, request: ForkRequest, descriptors: Sequence[int]) -> None:
    """Sends a request and the descriptors that belong to it: standard input, output, and those to inherit."""
    block = request.to_bytes()
    socket.send_fds(connection, [LENGTH.pack(len(block))], list(descriptors))
    connection.sendall(block)


def received_request(connection: socket.socket, descriptors: list[int]) -> ForkRequest:
    """Returns a request, and adds to the list the descriptors that came with it.

    Raises:
        ValueError: What came is no request.
        OSError: The connection failed.
    """
    head, came, _, _ = socket.recv_fds(connection, LENGTH.size, _MAX_DESCRIPTORS)
    descriptors.extend(came)
    if len(head) < LENGTH.size:
        raise ValueError("expected the length of a request")
    (size,) = LENGTH.unpack(head)
    if size > _MAX_REQUEST_BYTES:
        raise ValueError(f"expected a request of at most {_MAX_REQUEST_BYTES} bytes")
    request = ForkRequest.from_bytes(received_exactly(connection, size))
    if len(descriptors) != 2 + len(request.descriptors):
        raise ValueError("expected as many descriptors as the request names")
    return request


def received_exactly(connection: socket.socket, size: int) -> bytes:
    """Returns so many bytes; raises ValueError where the connection ends before."""
    block = bytearray()
    while len(block) < size:
        piece = connection.recv(min(size - len(block), 2**16))
        if not piece:
            raise ValueError("expected more of the message")
        block += piece
    return bytes(block)


def owner_of(executor: int, start: int) -> str:
    """Returns the part of a folder's name that says whose it is: an executor's process, and when that has started."""
    return f"{executor}-{start}"


def import_all(modules: Sequence[str]) -> str:
    """Imports modules, Keras and its backend with them; returns why a process must not be forked then, or nothing."""
    before = {path: _state_of(path) for path in sys.path}
    try:
        with quick_imports():
            for module in modules:
                importlib.import_module(module)
    except BaseException as error:
        # A process of the rank's own will meet it again, and tell it.
        return f"{type(error).__name__}: {error}"
    states = {path: (before.get(one.archive), _state_of(one.archive)) for path, one in _archives().items()}
    _ARCHIVES.update({path: now for path, (then, now) in states.items() if now == then})
    held = [os.path.basename(path) for path in _open_files() if path.startswith(_DEVICES)]
    return f"the import has opened {', '.join(held)}" if held else ""


def wait_as_spare(connection: socket.socket, modules: Sequence[str]) -> None:
    """Imports, waits for one request, and runs it; ends where the server does."""
    failed = import_all(modules)
    descriptors: list[int] = []
    connection.settimeout(None)
    try:
        request = received_request(connection, descriptors)
    except (OSError, ValueError):
        os._exit(0)
    connection.close()
    if failed:
        run_fresh(request, descriptors)
    run_request(request, descriptors)


def run_fresh(request: ForkRequest, descriptors: Sequence[int]) -> None:
    """Becomes the process that a task would have started itself, which has imported nothing. Never returns."""
    # First out of the way of the numbers that they are to have.
    inherited = [fcntl.fcntl(held, fcntl.F_DUPFD_CLOEXEC, 3 + max((2, *request.descriptors))) for held in descriptors]
    for held in descriptors:
        os.close(held)
    for held, wanted in zip(inherited, (0, 1, *request.descriptors), strict=True):
        os.dup2(held, wanted)
    os.dup2(1, 2)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(request.folder)
    os.execve(sys.executable, [sys.executable, "-m", _PROGRAM, *request.arguments], request.environment)


def run_request(request: ForkRequest, descriptors: Sequence[int]) -> None:
    """Becomes the process that a task asked for, and runs it to its end. Never returns."""
    stdin, output, *inherited = descriptors
    os.dup2(stdin, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(stdin)
    os.close(output)
    DESCRIPTORS.update(zip(request.descriptors, inherited, strict=True))
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request.folder)
    _take_environment({**request.environment, FORKED: "1"})
    _look_again()
    sys.argv = [_PROGRAM, *request.arguments]
    _reseed()
    module = importlib.import_module("elephant.rank.__main__")
    module.end(module.main())


def _look_again() -> None:
    """Has imports look again into what is on their path, which may hold more by now than when the server looked.

    Not into archives that have not changed: Python reads the list of each once for every package in it, which takes a
    tenth of a second with those of Spark.
    """
    same = {path: one for path, one in _archives().items() if _ARCHIVES.get(path, ()) == _state_of(one.archive)}
    for path in same:
        del sys.path_importer_cache[path]
    importlib.invalidate_caches()
    sys.path_importer_cache.update(same)


def _archives() -> dict[str, zipimport.zipimporter]:
    """Returns the importers of archives, by the place in an archive that each is for."""
    found = sys.path_importer_cache.items()
    return {path: importer for path, importer in found if isinstance(importer, zipimport.zipimporter)}


def _state_of(archive: str) -> tuple[int, ...] | None:
    """Returns time, size and number of a file, by which it is the same one; None where there is none."""
    try:
        state = os.stat(archive)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino


def _take_environment(environment: dict[str, str]) -> None:
    """Replaces the server's environment, except what its imports have changed, as they would have changed this one."""
    started = dict(line.partition("=")[::2] for line in _start_environment())
    same = {name for name in {*started, *os.environ} if environment.get(name) == started.get(name)}
    changed = {name: value for name, value in os.environ.items() if name in same and started.get(name) != value}
    removed = {name for name in same if name not in os.environ}
    os.environ.clear()
    os.environ.update({name: value for name, value in environment.items() if name not in removed} | changed)


def _start_environment() -> list[str]:
    """Returns the variables with which the kernel has started this process, or the one that it was forked from."""
    try:
        block = Path("/proc/self/environ").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(line) for line in block.split(b"\0") if line]


def _reseed() -> None:
    """Gives the process random numbers of its own: all that are forked would draw the same ones."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _executor_descriptor(process: int, start: int) -> int:
    """Returns a descriptor that tells of the end of the executor's Java process.

    Raises:
        OSError: It has ended.
    """
    descriptor = os.pidfd_open(process)
    if process_start(process) != start:
        raise ProcessLookupError(f"expected the executor's process {process} to run")
    return descriptor


def _belongs_to(connection: socket.socket, executor: int) -> bool:
    """Returns whether the other end is a process of this user, below the executor's."""
    process, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return user == os.geteuid() and executor in parents_of(process)


def _is_closed(connection: socket.socket) -> bool:
    timeout_s = connection.gettimeout()
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(timeout_s)


def _open_files() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def _reply(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    block = json.dumps(message).encode()
    socket.send_fds(connection, [LENGTH.pack(len(block)) + block], list(descriptors))


def main() -> None:
    """Runs the server: ``FOLDER KEY LISTENER LOCK EXECUTOR_PID EXECUTOR_START MODULES FORKS IDLE_S SPARES``."""
    folder, key, listener, lock, process, start, modules, forks, idle_s, spares = sys.argv[1:11]
    # Signals to the group of Spark's daemon, or of a terminal, are not for it.
    os.setpgid(0, 0)
    server = ForkServer(
        Path(folder),
        key,
        socket.socket(fileno=int(listener)),
        int(lock),
        (int(process), int(start)),
        modules=modules.split(","),
        forks_after_import=forks == "1",
        idle_s=float(idle_s),
        spares=int(spares),
    )
    try:
        server.serve()
    finally:
        server.close()


if __name__ == "__main__":
    main()
