"""Ranks' processes that start warm, forked by a server that has imported Keras: one that an executor keeps for them.

`elephant.task.forkserver` is the server. Here is the tasks' side: find the server of this
executor or start one, ask it for a process, and follow that process as `subprocess.Popen` would.
A task that gets none starts a fresh process. Ranks that call a function of the user's have a server of their own,
without Keras.

The first server of an executor is started ahead, by a small job that the driver runs as soon as it has a model
(`elephant.cluster.preload`): it imports while the user's program still reads and prepares.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elephant.backends import BACKENDS, asked_for, backend_named, keras_file
from elephant.backends.process_environment import READ_LATE, process_environment
from elephant.cluster.compiled_files import compiled_files
from elephant.cluster.warm_workers import WarmWorkers
from elephant.rank.executor import executor_above, memory_is_short, process_start
from elephant.storage.filesystem import local_folder, private_folder
from elephant.task.forkserver import (
    LENGTH,
    ForkRequest,
    cold_marker,
    is_ready,
    lock_path,
    owner_of,
    received_exactly,
    send_request,
    socket_path,
)

# In place of an exit code, which is less: nobody has heard how the process ended, because the server had ended before.
UNHEARD = 256
FOLDER = "forkserver"
_POLL_S = 0.02
_LOOK_S = 0.5
_FIND_S = 5.0
_ANSWER_S = 10.0
# For the server's import, on a machine that is busy with others'.
_START_S = 90.0
# For a server that has imported, and takes 20 ms: one that takes longer is frozen, or swapped out.
_FORK_S = 4.0
# Ranks of functions may be dozens on one executor, which all ask at once.
_FORK_MANY_S = 20.0
_BACKLOG = 64
# What training and inference import: modules above this one among them, which their processes may use.
_PRELOADED: tuple[str, ...] = (
    "elephant.rank.__main__",
    "elephant.rank.synchronous",
    "elephant.rank.traced_step",
    "elephant.rank.asynchronous.worker_fit",
    "elephant.rank.predictor",
    "elephant.task.predict_task",
    "elephant.spark.evaluate",
)
# What a rank needs that calls a function of the user's, which may do without Keras, or set its backend first.
_WITHOUT_KERAS: tuple[str, ...] = ("elephant.rank.__main__", "elephant.collective.bootstrap", "pyspark.cloudpickle")
_FUNCTION = "function"
_PACKAGES = ("elephant-spark", "keras", "numpy", *(name for one in BACKENDS.values() for name in one.packages))
# Variables that differ between tasks and fits, and that nothing reads while it is imported.
_OF_TASK = ("SPARK_", "PYSPARK_", "PYTHON_WORKER_", "PYTHON_UDF_", "ELEPHANT_")
_OF_SHELL = ("_", "PWD", "OLDPWD", "SHLVL")


class ForkedProcess:
    """A process that the server has been asked for, as `subprocess.Popen` would show it.

    Args:
        start_fresh: Starts a process in its place, where the server refuses or is lost before it has forked.
        fork_s: Seconds that a server which has imported may take to fork. It then has `_FORK_S` to say how one ended.
    """

    def __init__(
        self,
        connection: socket.socket,
        lock: Path,
        *,
        start_fresh: Callable[[], subprocess.Popen[bytes]],
        on_started: Callable[[], None],
        fork_s: float = _FORK_S,
    ) -> None:
        self._connection = connection
        self._fork_s = fork_s
        connection.settimeout(_FORK_S)
        self._lock = lock
        self._start_fresh = start_fresh
        self._on_started = on_started
        self._fresh: subprocess.Popen[bytes] | None = None
        self._is_expected = is_ready(lock)
        self._deadline = time.monotonic() + (fork_s if self._is_expected else _START_S)
        # The process' pidfd, once it is forked.
        self._descriptor = -1
        self._is_heard = True
        self._code: int | None = None
        # One thread may wait while another looks, or kills.
        self._hearing = threading.Lock()

    def poll(self) -> int | None:
        """Returns the exit code; None while the process runs, or is still to be forked."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the process has ended; returns its exit code, minus the signal's number where one ended it.

        Args:
            timeout: For how long, in seconds; None waits as long as it takes.

        Raises:
            subprocess.TimeoutExpired: The process still runs.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            with self._hearing:
                self._take_answers()
                if self._code is not None:
                    return self._code
                fresh = self._fresh
            if fresh is not None:
                return fresh.wait(None if timeout is None else left_s)
            if left_s == 0.0:
                raise subprocess.TimeoutExpired("a forked training process", timeout or 0.0)
            self._ready(min(left_s, _LOOK_S))

    def await_start(self) -> None:
        """Waits until the process, or the one in its place, is there."""
        while True:
            with self._hearing:
                self._take_answers()
                if self._descriptor >= 0 or self._fresh is not None or self._code is not None:
                    return
            self._ready(_LOOK_S)

    def kill(self) -> None:
        """Ends the process at once."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Sends the process a signal; one that was not forked yet is not forked at all."""
        with self._hearing:
            self._take_answers()
            if self._fresh is not None:
                self._fresh.send_signal(number)
            elif self._descriptor >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._descriptor, number)
            elif self._code is None:
                # The server forks nothing for a task that has hung up.
                self._connection.close()
                self._code = -number

    def close(self) -> None:
        """Lets go of what belongs to the process, which has ended."""
        self._connection.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _ready(self, timeout_s: float) -> set[int]:
        """Waits until the server has said something, or the process has ended; returns the descriptors that tell it."""
        poller = select.poll()
        for descriptor in (self._connection.fileno() if self._is_heard else -1, self._descriptor):
            if descriptor >= 0:
                poller.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in poller.poll(timeout_s * 1000)}

    def _take_answers(self) -> None:
        """Takes what the server has said by now."""
        while self._code is None and self._fresh is None:
            ready = self._ready(0.0)
            if not ready and self._descriptor < 0 and self._is_late():
                self._end_server()
                self._begin_fresh()
            elif not ready:
                return
            elif self._is_heard:
                # Where the process' end alone is seen yet, the server is about to say how it was.
                self._take(self._message())
            else:
                self._code = UNHEARD

    def _is_late(self) -> bool:
        """Returns whether the server should have answered by now."""
        if not self._is_expected and is_ready(self._lock):
            self._is_expected = True
            self._deadline = min(self._deadline, time.monotonic() + self._fork_s)
        return time.monotonic() > self._deadline

    def _take(self, message: dict[str, Any]) -> None:
        if "exit" in message:
            self._code = int(message["exit"])
        elif "pid" in message:
            if self._descriptor < 0:
                # This process has no descriptor left for it. It reads what no other one may read then.
                self._descriptor = os.pidfd_open(int(message["pid"]))
            self._on_started()
        elif self._descriptor < 0:
            self._begin_fresh()
        else:
            # The server is gone. The process goes on, and its end will be seen.
            self._is_heard = False

    def _message(self) -> dict[str, Any]:
        """Returns the server's next message, which is due; nothing where the server is gone, or says nothing."""
        try:
            head, came, _, _ = socket.recv_fds(self._connection, LENGTH.size, 1)
            if came:
                self._descriptor = came[0]
            (size,) = LENGTH.unpack(head)
            message: dict[str, Any] = json.loads(received_exactly(self._connection, size))
            return message
        except TimeoutError:
            # The next process is not to wait for it as well.
            self._end_server()
            return {}
        except (OSError, ValueError, struct.error):
            return {}

    def _begin_fresh(self) -> None:
        self._connection.close()
        self._fresh = self._start_fresh()
        self._on_started()

    def _end_server(self) -> None:
        """Ends a server that is frozen: what it forked later would read what another process reads."""
        # The other end of the connection is known by the task that began to listen, which may be this one.
        _signal_server(self._lock, signal.SIGKILL)


def forked_process(
    request: ForkRequest,
    descriptors: Sequence[int],
    warm: WarmWorkers,
    *,
    start_fresh: Callable[[], subprocess.Popen[bytes]],
    on_started: Callable[[], None],
) -> ForkedProcess | None:
    """Asks the executor's server for a process, and starts the server where there is none.

    Args:
        start_fresh: Starts a process in its place, see `ForkedProcess`.
        on_started: Called when it is there, unless this returns None.

    Returns:
        The process; None where there can be no server.
    """
    if warm.limit == 0 or not _has_servers():
        return None
    if any("=" in name or "\0" in name + value for name, value in request.environment.items()):
        # What starts a fresh process says what is wrong with it.
        return None
    executor = executor_above(os.getpid())
    if executor is None:
        return None
    try:
        program = request.arguments[0]
        folder, key = _own_folder(executor[0]), environment_key(request.environment, program)
        connection = _connected(folder, key, executor[0], request.environment, warm)
    except OSError:
        return None
    if connection is None:
        return None
    try:
        send_request(connection, request, descriptors)
    except OSError:
        connection.close()
        return None
    return ForkedProcess(
        connection,
        lock_path(folder, key),
        start_fresh=start_fresh,
        on_started=on_started,
        fork_s=_FORK_MANY_S if _is_of_functions(key) else _FORK_S,
    )


def preload_function(backend: str, warm: WarmWorkers, *, ranks_per_task: int, spares: int) -> Callable[[], None]:
    """Returns the function by which a task has its executor import Keras before there are ranks.

    It is made here, inside another one, because Spark then sends its code along: on an executor without elephant, or
    with another one, it does nothing.

    Args:
        ranks_per_task: Ranks that will share a task's cores.
        spares: Processes that import, where Keras on this backend cannot be forked after its import.
    """

    def start() -> None:
        try:
            from pyspark import TaskContext

            from elephant.task.warm_processes import start_server

            context = TaskContext.get()
            if context is not None:
                threads = max(int(context.cpus()) // ranks_per_task, 1)
                start_server(backend, warm, threads=threads, spares=spares)
        except Exception:
            # The ranks' own tasks will meet it again, and tell it.
            return

    return start


def start_server(backend: str, warm: WarmWorkers, *, threads: int, spares: int) -> None:
    """Starts the server of this executor's ranks, where there is none and can be one; it imports after that.

    Args:
        threads: Of each rank.
        spares: See `preload_function`.

    Raises:
        OSError: It cannot be started.
    """
    executor = executor_above(os.getpid())
    if warm.limit == 0 or not _has_servers() or executor is None:
        return
    # That of a rank's process, but for what no import reads.
    environment = process_environment(threads=threads, devices=(), backend=backend)
    environment |= compiled_files(environment)
    folder, key = _own_folder(executor[0]), environment_key(environment)
    if not cold_marker(folder, key).exists():
        _start_server(folder, key, executor[0], environment, warm, spares)


def _has_servers() -> bool:
    """Returns whether the system has what servers need."""
    return hasattr(os, "pidfd_open") and hasattr(socket, "send_fds")


def new_work_folder(prefix: str) -> Path:
    """Makes the work folder of a process; the executor's servers remove it once its task, this process, is gone."""
    executor, owner = executor_above(os.getpid()), ""
    if executor is not None:
        # An executor that is gone leaves nothing: Spark removes the folder around it.
        with contextlib.suppress(OSError):
            owner = f"{owner_of(executor[0], process_start(executor[0]))}-{os.getpid()}-"
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{owner}", dir=local_folder())).absolute()


def _own_folder(executor: int) -> Path:
    """Returns the folder of this executor's servers, which nobody but this user can enter.

    Raises:
        OSError: It cannot be made, or is somebody else's.
    """
    return private_folder(Path(local_folder()) / f"{FOLDER}-{owner_of(executor, process_start(executor))}")


def _connected(
    folder: Path, key: str, executor: int, environment: Mapping[str, str], warm: WarmWorkers
) -> socket.socket | None:
    deadline = time.monotonic() + _FIND_S
    started = False
    while time.monotonic() < deadline and not cold_marker(folder, key).exists():
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Where too many wait for it already, this one does not.
        connection.settimeout(_ANSWER_S)
        try:
            with _short(folder) as place:
                connection.connect(f"{place}/{socket_path(folder, key).name}")
        except OSError:
            connection.close()
        else:
            return connection
        if started:
            # It has ended at once, as another one would.
            return None
        started = _start_server(folder, key, executor, environment, warm)
        if not started:
            # Another task may be at it, or a server about to end.
            time.sleep(_POLL_S)
    return None


def _start_server(
    folder: Path, key: str, executor: int, environment: Mapping[str, str], warm: WarmWorkers, spares: int = 0
) -> bool:
    """Starts the server of a key; returns whether this task was the one to do it.

    Raises:
        OSError: There is no memory for one, or it cannot be started.
    """
    lock = os.open(lock_path(folder, key), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        if not _is_locked(lock) or os.fstat(lock).st_ino != _inode(lock_path(folder, key)):
            # Another task is at it, or a server that has left has removed the file meanwhile.
            return False
        with contextlib.suppress(OSError):
            # The process id of a server that was killed, which is anybody's by now.
            os.ftruncate(lock, 0)
        if memory_is_short():
            raise OSError(errno.ENOMEM, "expected memory for a process that waits")
        _make_room(folder, key, warm.limit)
        path = socket_path(folder, key)
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, _short(folder) as place:
            listener.bind(f"{place}/{path.name}")
            listener.listen(_BACKLOG)
            waits = (warm.idle_s, spares)
            _run_server(folder, key, listener.fileno(), lock, executor, environment, waits)
        return True
    finally:
        os.close(lock)


def _run_server(
    folder: Path,
    key: str,
    listener: int,
    lock: int,
    executor: int,
    environment: Mapping[str, str],
    waits: tuple[float, int],
) -> None:
    modules, forks = _WITHOUT_KERAS, True
    if not _is_of_functions(key):
        modules, forks = _PRELOADED, backend_named(asked_for(environment)).forks_after_import
    imports = [",".join(modules), int(forks)]
    arguments = [folder, key, listener, lock, executor, process_start(executor), *imports, *waits]
    command = [sys.executable, "-m", "elephant.task.forkserver", *map(str, arguments)]
    os.set_inheritable(lock, True)
    # The shell ends at once, so that the server is nobody's child: Spark ends Python workers as it likes. It stays in
    # the session of its executor, to which YARN counts the memory of processes without a parent.
    done = subprocess.run(
        ["/bin/sh", "-c", '"$@" &', "sh", *command],
        env={**_read_at_import(environment), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(listener, lock),
        check=False,
    )
    if done.returncode:
        raise OSError(f"expected /bin/sh to start a server. Received: exit code {done.returncode}")


def _make_room(folder: Path, key: str, limit: int) -> None:
    """Asks servers of other keys to leave, the one first that has served longest, until there may be one more.

    Those that have not imported Keras, and are small, count apart.
    """
    serving = []
    for path in folder.glob("*.lock"):
        # A server that leaves meanwhile takes its file along.
        with contextlib.suppress(FileNotFoundError):
            is_alike = _is_of_functions(path.stem) == _is_of_functions(key)
            if is_alike and path.stem != key and _server_of(path):
                serving.append((path.stat().st_mtime, path))
    for _, path in sorted(serving)[: max(len(serving) - limit + 1, 0)]:
        _signal_server(path, signal.SIGTERM)


def _signal_server(lock: Path, number: signal.Signals) -> None:
    """Sends a signal to the server that holds a lock, where there is one."""
    with contextlib.suppress(OSError):
        # To nobody rather than to process 0, which means this process and its like.
        if process := _server_of(lock):
            os.kill(process, number)


def _server_of(lock: Path) -> int:
    """Returns the process that serves under a lock; zero where none does, or none has said so yet."""
    with open(lock) as file:
        if _is_locked(file.fileno()):
            return 0
        said = file.read().split()
        return int(said[0]) if said and said[0].isdigit() else 0


def _is_locked(descriptor: int) -> bool:
    """Locks a file for as long as it is open; returns whether nobody else has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def environment_key(environment: Mapping[str, str], program: str = "") -> str:
    """Returns the key of a server: a digest of all that its import may have read, and whether it imports Keras.

    A process that was made for other threads, another backend or another import path is not taken.
    """
    read = sorted(_read_at_import(environment).items())
    text = json.dumps([sys.executable, read, _inherited(), _keras_settings(environment), *map(_version, _PACKAGES)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:20]
    return f"{_FUNCTION}-{digest}" if program == _FUNCTION else digest


def _is_of_functions(key: str) -> bool:
    """Returns whether the server of a key has not imported Keras."""
    return key.startswith(_FUNCTION)


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    later = (*READ_LATE, *_OF_SHELL)
    return {name: value for name, value in environment.items() if name not in later and not name.startswith(_OF_TASK)}


def _keras_settings(environment: Mapping[str, str]) -> str:
    try:
        return keras_file(environment).read_text(errors="replace")
    except OSError:
        return ""


def _inherited() -> list[Any]:
    """Returns the attributes that a process has from the one that started it, besides its environment."""
    limits = [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_NOFILE)]
    return [os.getcwd(), sorted(os.sched_getaffinity(0)), limits]


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return -1


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Gives a folder a short name meanwhile: paths of sockets have at most 107 characters."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
