"""Processes forked from one that has imported: as good as fresh ones, for their executor's tasks alone, and gone."""

import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path

import process_calls
import psutil
import pytest
from leaks import nothing_left_behind as nothing_left_behind
from process_calls import Calls
from process_tree import work_folder_of
from tables import every_case
from tiers import in_tiers

from elephant.cluster.warm_workers import COLD, WarmWorkers
from elephant.errors import ENDED
from elephant.rank.executor import is_stopped, memory_is_short
from elephant.task import warm_processes
from elephant.task.forkserver import ForkRequest, send_request
from elephant.task.warm_processes import ForkedProcess, environment_key

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other kernels have no descriptors of processes")

WARM = WarmWorkers(limit=2, idle_s=60)
PRELOADED = ("elephant.rank.program", "elephant.rank.chunks")
WAIT_S = 30


def wait_until(condition, seconds=WAIT_S):
    """Waits until something is so; returns it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def processes_in(folder):
    """Returns the processes, servers and those that they have forked, whose command line has a folder in it."""
    return [process for process, words in _living() if str(folder) in " ".join(words)]


def servers_in(folder):
    return [
        process
        for process, words in _living()
        if "elephant.task.forkserver" in words[2:3]
        and str(folder) in " ".join(words)
        and work_folder_of(process) is None
    ]


def _living():
    """Yields every other process that is alive, and its command line."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                yield process, words


def is_over(process):
    """Returns whether a process has ended with all its threads: until then it holds what it had open."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE and len(os.listdir(f"/proc/{process.pid}/task")) == 1
    except (psutil.NoSuchProcess, FileNotFoundError):
        return True


def end(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


@pytest.fixture(autouse=True)
def heeded_signals():
    """Signals as in a terminal: what runs in the background of a shell ignores some, and so would fresh processes."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def local(tmp_path, monkeypatch):
    """Spark's local folder, of an executor whose Java process is this one's parent."""
    folder = tmp_path / "local"
    folder.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(folder))
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setattr(warm_processes, "executor_above", lambda process: (os.getppid(), "7"))
    monkeypatch.setattr(warm_processes, "_PRELOADED", PRELOADED)
    yield folder
    # All but servers has gone with its test.
    left = wait_until(lambda: len(processes_in(folder)) == len(servers_in(folder)), 15)
    processes = processes_in(folder)
    for process in processes:
        end(process)
    assert left, processes
    assert [path.name for path in folder.iterdir() if not path.name.startswith("forkserver-")] == []


@pytest.fixture
def other_modules(tmp_path, monkeypatch):
    """A folder of modules on the import path."""
    folder = tmp_path / "ünder a: 'folder\"".replace(":", "")
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def preload(monkeypatch, *names):
    monkeypatch.setattr(warm_processes, "_PRELOADED", (*PRELOADED, *names))


def blocking_module(folder, tmp_path):
    """Writes a module whose import takes until a file is there; returns that file."""
    shared_lock = tmp_path / "gate"
    text = f"import os, time\nopen({str(shared_lock)!r} + '.reached', 'w').close()\n"
    text += f"while not os.path.exists({str(shared_lock)!r}):\n    time.sleep(0.02)\n"
    (folder / "blocking_module.py").write_text(text)
    return shared_lock


@pytest.mark.parametrize("backend", [None, "jax"], ids=["forked", "spare"])
def test_process_when_it_is_forked_then_is_as_a_fresh_one(other_modules, monkeypatch, backend):
    monkeypatch.setenv("ODD", "two\nlines=1 'and' \"more\" \udcff ü")
    monkeypatch.setenv("REMOVED_BY_IMPORT", "1")
    monkeypatch.setenv("CHANGED_BY_IMPORT", "before")
    text = "import os\nos.environ.pop('REMOVED_BY_IMPORT')\nos.environ['CHANGED_BY_IMPORT'] = 'after'\n"
    (other_modules / "sitecustomize.py").write_text(text + "os.environ['SET_BY_IMPORT'] = '1'\n")
    with Calls(COLD, backend=backend, OF_TASK="1") as fresh:
        wanted = fresh(process_calls.state)
    assert wanted["environment"]["CHANGED_BY_IMPORT"] == "after" and wanted["environment"]["OF_TASK"] == "1"
    # The second one is forked while the first one runs.
    with Calls(WARM, backend=backend, OF_TASK="1"), Calls(WARM, backend=backend, OF_TASK="1") as forked:
        assert forked(process_calls.is_forked)
        got = forked(process_calls.state)
    assert got == wanted


def test_process_when_it_prints_then_its_lines_come_in_order():
    with Calls(WARM) as forked:
        assert forked(process_calls.write, "a line") == 0
        assert forked.finish() is None
        assert forked.recorded.lines == ["a line", "a line", "from a program"]


@pytest.mark.parametrize("backend", [None, "jax"], ids=["forked", "spares"])
def test_process_when_several_are_forked_then_their_random_numbers_differ(backend):
    with Calls(WARM, backend=backend) as one, Calls(WARM, backend=backend) as two:
        with Calls(WARM, backend=backend) as three:
            drawn = [each(process_calls.random_numbers) for each in (one, two, three)]
    assert all(len(set(numbers)) == 3 for numbers in zip(*drawn, strict=True)), drawn


@every_case("how", ["exits", "sys.exit", "interrupted", "SIGKILL", "SIGSEGV", "SIGTERM", "SIGINT"])
def test_process_when_it_ends_before_its_work_is_done_then_is_told_as_of_a_fresh_one(how):
    told = []
    for warm in (COLD, WARM):
        with Calls(warm) as process:
            assert isinstance(process.process._process, ForkedProcess) == (warm is WARM)
            with contextlib.suppress(Exception):
                process(process_calls.ends, how)
            told.append(dataclasses.asdict(process.process.wait()))
    for about in told:
        # Frames below those of the program differ.
        about["traceback"] = bool(about["traceback"])
        if "most recent call first" in about["log_tail"]:
            about["log_tail"] = "Python frames"
    assert told[1] == told[0]


def test_process_when_it_is_killed_then_both_who_wait_and_who_looks_hear_it():
    with Calls(WARM) as forked:
        process, codes = forked.process._process, []
        waiting = [threading.Thread(target=lambda: codes.append(process.wait(WAIT_S))) for _ in range(4)]
        for thread in waiting:
            thread.start()
        assert forked.process.running
        killing = [threading.Thread(target=process.kill) for _ in range(4)]
        for thread in killing:
            thread.start()
        for thread in (*killing, *waiting):
            thread.join(WAIT_S)
        assert codes == [-signal.SIGKILL] * 4
        assert process.poll() == -signal.SIGKILL and not forked.process.running


def test_process_when_it_signals_its_group_then_neither_server_nor_others_end():
    with Calls(WARM) as one, Calls(WARM) as other:
        assert one(process_calls.signal_group)
        assert other(process_calls.parent) == one(process_calls.parent)


def test_process_when_its_server_is_killed_then_goes_on_and_counts(local):
    with Calls(WARM) as forked:
        server = psutil.Process(forked(process_calls.parent))
        server.kill()
        wait_until(lambda: not servers_in(local))
        assert forked.process.running
        assert forked(process_calls.is_forked)
        assert forked.finish() is None


def test_process_when_its_server_and_then_it_are_killed_then_the_task_hears_that_nobody_knows_how(local):
    with Calls(WARM) as forked:
        server = psutil.Process(forked(process_calls.parent))
        server.kill()
        wait_until(lambda: not servers_in(local))
        assert forked.process.running
        forked.process.kill()
        failure = forked.process.wait()
    assert failure.kind == ENDED and "the server that it was forked from had ended before" in failure.message


@pytest.mark.slow("waits for a frozen server, as the test of one that has served does")
def test_process_when_its_server_is_frozen_then_its_end_is_known_in_seconds_and_the_server_ends(local):
    with Calls(WARM) as forked, Calls(WARM) as other:
        server = psutil.Process(forked(process_calls.parent))
        assert other(process_calls.parent) == server.pid
        server.suspend()
        began = time.monotonic()
        assert forked.finish() is None
        assert wait_until(lambda: is_over(server))
        assert other.finish() is None
        assert time.monotonic() - began < 8


def test_server_when_it_was_killed_then_the_next_process_has_another(local):
    with Calls(WARM) as first:
        before = first(process_calls.parent)
        server = psutil.Process(before)
        server.kill()
        assert wait_until(lambda: is_over(server))
        with Calls(WARM) as second:
            assert second(process_calls.is_forked) and second(process_calls.parent) != before


@every_case(
    ("name", "value", "same"),
    [
        ("OMP_NUM_THREADS", "2", False),
        ("TF_NUM_INTRAOP_THREADS", "2", False),
        ("TF_CPP_MIN_LOG_LEVEL", "0", False),
        ("KERAS_BACKEND", "jax", False),
        ("PYTHONPATH", "/elsewhere", False),
        ("LD_PRELOAD", "libx.so", False),
        ("XLA_FLAGS", "--xla_dump", False),
        ("OF_THE_USER", "1", False),
        ("CUDA_VISIBLE_DEVICES", "1", True),
        ("ELEPHANT_WORK_FOLDER", "/elsewhere", True),
        ("SPARK_LOCAL_DIRS", "/elsewhere", True),
        ("PYTHON_WORKER_FACTORY_PORT", "7", True),
        ("PYSPARK_PYTHON", "python", True),
        ("_", "/bin/env", True),
    ],
)
def test_key_when_a_variable_differs_that_an_import_reads_then_is_another(name, value, same):
    environment = {"PATH": "/bin", "OMP_NUM_THREADS": "1"}
    assert (environment_key({**environment, name: value}) == environment_key(environment)) == same


def test_key_when_the_folder_or_a_limit_differs_then_is_another(tmp_path, monkeypatch):
    before = environment_key({})
    monkeypatch.chdir(tmp_path)
    inside = environment_key({})
    monkeypatch.setattr("resource.getrlimit", lambda kind: (1, 1))
    assert len({before, inside, environment_key({})}) == 3


def test_key_when_the_settings_of_keras_differ_then_is_another(tmp_path):
    environment = {**os.environ, "KERAS_HOME": str(tmp_path)}
    before = environment_key(environment)
    (tmp_path / "keras.json").write_text('{"floatx": "float64"}')
    assert environment_key(environment) != before


def test_server_when_the_devices_of_ranks_differ_then_serves_them_all(local):
    with Calls(WARM, CUDA_VISIBLE_DEVICES="3") as one, Calls(WARM, CUDA_VISIBLE_DEVICES="5,6") as other:
        assert one(process_calls.variable, "CUDA_VISIBLE_DEVICES") == "3"
        assert other(process_calls.variable, "CUDA_VISIBLE_DEVICES") == "5,6"
        assert len(servers_in(local)) == 1


def test_server_when_more_keys_are_asked_for_than_may_wait_then_the_oldest_leaves(local):
    alive = []
    for number in range(3):
        with Calls(WARM, OF_TASK=str(number)) as forked:
            alive.append(forked(process_calls.parent))
    wait_until(lambda: len(servers_in(local)) == 2)
    assert sorted(server.pid for server in servers_in(local)) == sorted(alive[1:])


def test_server_of_functions_when_others_are_asked_for_then_counts_apart_and_is_taken_for_functions_alone(local):
    assert environment_key({}, "function") != environment_key({}) == environment_key({}, "fit")
    for name in ("function-1", "function-2", "2", "3"):
        warm_processes.lock_path(local, name).touch()
    asked, places = [], {"function-1": 11, "function-2": 12, "2": 13, "3": 14}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(warm_processes, "_server_of", lambda path: places[path.stem])
        patched.setattr(warm_processes, "_signal_server", lambda path, number: asked.append(path.stem))
        warm_processes._make_room(local, "4", 2)
        warm_processes._make_room(local, "function-3", 2)
    assert [name.startswith("function") for name in asked] == [False, True]
    for name in places:
        warm_processes.lock_path(local, name).unlink()


def test_server_when_four_tasks_ask_at_once_then_is_one(local):
    barrier, parents = threading.Barrier(4), []

    def task():
        barrier.wait(WAIT_S)
        with Calls(WARM) as forked:
            parents.append(forked(process_calls.parent))

    tasks = [threading.Thread(target=task) for _ in range(4)]
    for thread in tasks:
        thread.start()
    for thread in tasks:
        thread.join(WAIT_S)
    assert len(parents) == 4 and len(set(parents)) == 1
    assert [server.pid for server in servers_in(local)] == parents[:1]


def test_process_when_its_code_came_after_the_server_then_is_found(other_modules):
    with Calls(WARM):
        pass
    (other_modules / "came_later.py").write_text("answer = 42\n")
    with Calls(WARM) as forked:
        assert forked(process_calls.is_forked)
        assert forked(process_calls.attribute, "came_later", "answer") == 42


def test_process_when_an_archive_was_replaced_after_the_server_then_its_code_is_found(other_modules, monkeypatch):
    archive = other_modules / "archive.zip"
    (other_modules / "of_archive.py").write_text(f"import sys\nsys.path.append({str(archive)!r})\nimport came_first\n")

    def write(**modules):
        with zipfile.ZipFile(archive, "w") as content:
            for name, text in modules.items():
                content.writestr(f"{name}.py", text)

    write(came_first="answer = 1\n")
    preload(monkeypatch, "of_archive")
    with Calls(WARM) as forked:
        assert forked(process_calls.attribute, "came_first", "answer") == 1
    write(came_first="answer = 1\n", came_later="answer = 42\n")
    with Calls(WARM) as forked:
        assert forked(process_calls.is_forked)
        assert forked(process_calls.attribute, "came_later", "answer") == 42


def test_process_when_the_path_of_the_local_folder_is_long_then_is_forked_all_the_same(local, monkeypatch):
    deep = local / "forkserver-deep" / ("x" * 120) / ("y" * 120)
    deep.mkdir(parents=True)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"/nowhere,{deep}")
    with Calls(WARM) as forked:
        assert forked(process_calls.is_forked)


def test_process_when_nothing_may_wait_then_is_fresh_and_there_is_no_server(local):
    with Calls(WarmWorkers(limit=0)) as process:
        assert not process(process_calls.is_forked)
    assert list(local.iterdir()) == []


def no_shell(monkeypatch, local):
    def run(command, **options):
        raise FileNotFoundError(2, "No such file or directory", command[0])

    monkeypatch.setattr(warm_processes.subprocess, "run", run)


def no_executor(monkeypatch, local):
    monkeypatch.setattr(warm_processes, "executor_above", lambda process: None)


def short_memory(monkeypatch, local):
    monkeypatch.setattr(warm_processes, "memory_is_short", lambda: True)


def folder_of_everybody(monkeypatch, local):
    executor = os.getppid()
    folder = local / f"{warm_processes.FOLDER}-{executor}-{warm_processes.process_start(executor)}"
    folder.mkdir()
    folder.chmod(0o777)


def file_in_place_of_the_folder(monkeypatch, local):
    executor = os.getppid()
    (local / f"{warm_processes.FOLDER}-{executor}-{warm_processes.process_start(executor)}").touch()


def server_that_ends_at_once(monkeypatch, local):
    run = subprocess.run
    monkeypatch.setattr(
        warm_processes.subprocess, "run", lambda command, **options: run([*command[:4], "/bin/false"], **options)
    )


@pytest.mark.parametrize(
    "trouble",
    [
        no_shell,
        no_executor,
        short_memory,
        folder_of_everybody,
        file_in_place_of_the_folder,
        server_that_ends_at_once,
    ],
)
def test_process_when_there_can_be_no_server_then_is_fresh(monkeypatch, local, trouble):
    trouble(monkeypatch, local)
    began = time.monotonic()
    with Calls(WARM) as process:
        assert time.monotonic() - began < 4
        assert not process(process_calls.is_forked)
    assert servers_in(local) == []


def test_process_when_the_working_folder_is_gone_then_is_fresh(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with Calls(WARM) as process:
        assert not process(process_calls.is_forked)


def test_process_when_its_environment_cannot_be_then_says_so_as_of_a_fresh_one():
    with pytest.raises(ValueError, match="illegal environment variable name"):
        Calls(WARM, **{"A=B": "1"})
    with pytest.raises(ValueError, match="embedded null byte"):
        Calls(WARM, AB="1\0")


@pytest.mark.parametrize("backend", [None, "jax"], ids=["server", "spare"])
@pytest.mark.parametrize(
    "text",
    in_tiers(
        {"raises": "raise ImportError('half')", "exits": "raise SystemExit('no')"},
        fast=["raises"],
        slow="another exception",
    ),
)
def test_process_when_the_import_fails_then_is_fresh_and_has_imported_nothing(
    other_modules, local, monkeypatch, backend, text
):
    (other_modules / "failing_module.py").write_text(text)
    preload(monkeypatch, "failing_module")
    with Calls(COLD, backend=backend) as process:
        wanted = process(process_calls.state)
    for _ in range(2):
        with Calls(WARM, backend=backend) as process:
            assert not process(process_calls.is_forked)
            assert process(process_calls.state) == wanted
            assert process.finish() is None
    if backend is None:
        assert wait_until(lambda: not servers_in(local))
        assert [path.suffix for path in local.glob("*/*")] == [".cold"]


def test_task_when_its_job_is_large_and_the_server_not_ready_then_does_not_wait(other_modules, tmp_path, monkeypatch):
    shared_lock = blocking_module(other_modules, tmp_path)
    preload(monkeypatch, "blocking_module")
    began = time.monotonic()
    with Calls(WARM, job=b"x" * 50_000_000, waits=False) as process:
        assert time.monotonic() - began < 5
        assert process.process.running
        shared_lock.touch()
        process.started()
        assert process(process_calls.is_forked)


def test_process_when_the_server_hangs_then_is_fresh_and_the_server_ends(other_modules, tmp_path, local, monkeypatch):
    shared_lock = blocking_module(other_modules, tmp_path)
    preload(monkeypatch, "blocking_module")
    with Calls(WARM, waits=False) as process:
        assert wait_until((tmp_path / "gate.reached").exists)
        process.process._process._deadline = 0.0
        process.started()
        assert not process(process_calls.is_forked)
        assert process.finish() is None
    assert wait_until(lambda: not servers_in(local))
    assert not shared_lock.exists()


def test_process_when_its_server_has_served_and_is_frozen_then_is_fresh_in_seconds_and_the_next_is_forked(
    server, local
):
    frozen, _ = server
    frozen.suspend()
    began = time.monotonic()
    with Calls(WARM) as process:
        assert not process(process_calls.is_forked)
    # Of a server that begins, the wait is 90 s.
    assert time.monotonic() - began < 45
    assert wait_until(lambda: is_over(frozen))
    with Calls(WARM) as process:
        assert process(process_calls.is_forked)


def test_process_when_it_is_killed_before_it_is_there_then_never_is(other_modules, tmp_path, local, monkeypatch):
    shared_lock = blocking_module(other_modules, tmp_path)
    preload(monkeypatch, "blocking_module")
    with Calls(WARM, waits=False) as process:
        pass
    assert process.process._process.poll() == -signal.SIGKILL
    shared_lock.touch()
    with Calls(WARM) as next_one:
        server = psutil.Process(next_one(process_calls.parent))
        assert len(server.children()) == 1


@pytest.fixture
def server(local):
    """A server that has forked a process already, and its socket's path."""
    with Calls(WARM) as forked:
        process = psutil.Process(forked(process_calls.parent))
    (path,) = local.glob("*/*.socket")
    return process, path


def request_of(work_folder, **changes):
    about = {"arguments": ["chunks", str(work_folder)], "environment": {}, "folder": "/", "descriptors": []}
    return ForkRequest(**{**about, "idle_s": 60.0, "limit": 2, **changes})


def connected(path):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(WAIT_S)
    with contextlib.chdir(path.parent) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        connection.connect(path.name if hasattr(contextlib, "chdir") else str(path))
    return connection


@every_case(
    "block",
    [
        b"",
        b"\0",
        struct.pack("!I", 2**32 - 1),
        struct.pack("!I", 100) + b"half of it",
        struct.pack("!I", 4) + b"[1]x",
        struct.pack("!I", 2) + b"{}",
        struct.pack("!I", 100_000) + b"[" * 100_000,
        struct.pack("!I", 2) + b"\xff\xff",
    ],
    ids=["nothing", "half a length", "too long", "half", "no JSON", "no fields", "deep", "no text"],
)
def test_server_when_it_gets_garbage_then_answers_nothing_and_serves_on(server, block):
    process, path = server
    with connected(path) as connection:
        connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    with Calls(WARM) as forked:
        assert forked(process_calls.parent) == process.pid


def test_server_when_half_a_request_comes_and_no_more_then_keeps_others_waiting_for_a_second(server):
    process, path = server
    with connected(path) as connection:
        connection.sendall(struct.pack("!I", 100) + b"half of it")
        began = time.monotonic()
        with Calls(WARM) as forked:
            assert forked(process_calls.parent) == process.pid
        assert time.monotonic() - began < 6


@every_case(
    "changes",
    [{"idle_s": "soon"}, {"idle_s": None}, {"limit": "x"}, {"descriptors": [5]}, {"folder": "/no/such/folder"}],
)
def test_server_when_a_request_is_wrong_then_forks_nothing_and_serves_on(server, tmp_path, changes):
    process, path = server
    with connected(path) as connection, open(os.devnull, "r+b") as nothing:
        send_request(connection, request_of(tmp_path, **changes), [nothing.fileno()] * 2)
        assert connection.recv(100) == b""
    with Calls(WARM) as forked:
        assert forked(process_calls.parent) == process.pid


def test_server_when_a_task_has_hung_up_before_it_was_heard_then_forks_nothing(server, tmp_path):
    process, path = server
    process.suspend()
    with connected(path) as connection, open(os.devnull, "r+b") as nothing:
        send_request(connection, request_of(tmp_path), [nothing.fileno()] * 2)
    process.resume()
    with Calls(WARM) as forked:
        assert forked(process_calls.parent) == process.pid
        assert wait_until(lambda: len(process.children()) == 1)
    assert tmp_path.exists()


def test_server_when_nobody_asks_for_long_then_ends_and_leaves_no_file(local):
    with Calls(WarmWorkers(limit=2, idle_s=0.1)) as forked:
        server = forked(process_calls.parent)
        time.sleep(2.5)
        # As long as a process runs it does not.
        assert psutil.pid_exists(server)
    assert wait_until(lambda: not servers_in(local))
    assert list(local.iterdir()) == []


@pytest.mark.parametrize("backend", ["tensorflow", "jax"], ids=["forked", "spare"])
def test_server_when_it_was_started_ahead_then_is_one_and_the_first_process_is_its_own(local, monkeypatch, backend):
    # As `Calls` has it.
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "")
    for _ in range(2):
        warm_processes.start_server(backend, WARM, threads=1, spares=1)
    (server,) = wait_until(lambda: [process for process in servers_in(local) if is_begun(process, backend)])
    # Where Keras cannot be forked after its import, a process has imported it and waits.
    waiting = [process.pid for process in server.children()]
    with Calls(WARM, backend=backend) as forked:
        assert forked(process_calls.parent) == server.pid
        assert waiting == ([] if backend == "tensorflow" else [forked(os.getpid)])


def is_begun(server, backend):
    return backend == "tensorflow" or server.children()


def test_server_when_it_was_started_ahead_and_nobody_comes_then_ends_and_leaves_no_file(local):
    warm_processes.start_server("tensorflow", WarmWorkers(limit=2, idle_s=0.5), threads=1, spares=1)
    assert wait_until(lambda: servers_in(local))
    assert wait_until(lambda: not servers_in(local))
    assert list(local.iterdir()) == []


def test_server_when_none_may_wait_then_none_is_started_ahead(local):
    warm_processes.start_server("tensorflow", WarmWorkers(limit=0), threads=1, spares=1)
    assert list(local.iterdir()) == []


@pytest.mark.parametrize(
    "backend", in_tiers({"server": None, "with spares": "jax"}, fast=["with spares"], slow="the same without spares")
)
def test_server_when_it_is_asked_to_leave_then_does_so_after_its_last_process(local, backend):
    with Calls(WARM, backend=backend) as forked:
        server = psutil.Process(forked(process_calls.parent))
        server.terminate()
        time.sleep(1.5)
        assert server.is_running() and forked(process_calls.is_forked)
        assert forked.finish() is None
    assert wait_until(lambda: not processes_in(local))
    assert list(local.iterdir()) == []


def test_server_when_its_folder_is_gone_then_ends(local):
    with Calls(WARM):
        pass
    (folder,) = local.iterdir()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert wait_until(lambda: not servers_in(local))
    assert list(local.iterdir()) == []


def test_server_when_the_disk_is_full_then_serves_all_the_same(local, monkeypatch):
    # Its lock, which is all that it writes, cannot be written to.
    opened = os.open

    def open_for_reading(path, flags, *mode, **options):
        if str(path).endswith(".lock"):
            os.close(opened(path, flags, *mode, **options))
            flags = os.O_RDONLY
        return opened(path, flags, *mode, **options)

    monkeypatch.setattr(warm_processes.os, "open", open_for_reading)
    with Calls(WARM) as forked:
        assert forked(process_calls.is_forked)


def test_spares_when_ranks_run_then_as_many_wait_and_are_taken_next(local):
    with Calls(WARM, backend="jax") as first:
        server = psutil.Process(first(process_calls.parent))
        assert wait_until(lambda: len(server.children()) == 2)
        waiting = {child.pid for child in server.children()}
        with Calls(WARM, backend="jax") as second:
            assert second(os.getpid) in waiting
            assert wait_until(lambda: len(server.children()) == 4)
    assert first.process.wait() is not None
    # They wait on while nobody asks, and end with the server.
    assert wait_until(lambda: len(server.children()) == 2)
    server.terminate()
    assert wait_until(lambda: not processes_in(local))


@pytest.mark.parametrize("frozen", [False, True], ids=["killed", "frozen"])
def test_spare_when_it_has_died_or_is_frozen_then_the_next_one_serves_and_no_zombie_is_left(frozen):
    with Calls(WARM, backend="jax") as first:
        server = psutil.Process(first(process_calls.parent))
        (spare,) = {child.pid for child in server.children()} - {first(os.getpid)}
        os.kill(spare, signal.SIGSTOP if frozen else signal.SIGKILL)
        assert wait_until(lambda: is_stopped(spare) if frozen else is_over(psutil.Process(spare)))
        with Calls(WARM, backend="jax") as second:
            assert second(process_calls.is_forked) and second(process_calls.parent) == server.pid
            assert wait_until(lambda: not psutil.pid_exists(spare))


def test_spares_when_their_server_is_killed_then_end(local):
    with Calls(WARM, backend="jax") as first:
        server = psutil.Process(first(process_calls.parent))
        assert wait_until(lambda: len(server.children()) == 2)
        spares = [child for child in server.children() if child.pid != first(os.getpid)]
        server.kill()
        assert psutil.wait_procs(spares, timeout=WAIT_S)[1] == []


EXECUTOR = """
    import os, subprocess, sys, time

    # Stands for the executor's Java process; its child is the task.
    subprocess.Popen([sys.executable, "-c", sys.argv[1]])
    time.sleep(120)
"""
TASK = """
    import os, sys, time
    from elephant.task import warm_processes

    warm_processes.executor_above = lambda process: (os.getppid(), "7")
    warm_processes._PRELOADED = ("elephant.rank.program", "elephant.rank.chunks")

    import process_calls

    with process_calls.Calls(warm_processes.WarmWorkers(limit=2, idle_s=60)) as forked:
        assert forked(process_calls.is_forked)
        print(os.getpid(), forked(os.getpid), forked(process_calls.parent), forked.process.work_folder, flush=True)
        time.sleep(100)
"""


# One whose server still imports, and which has rows already.
EARLY_TASK = """
    import os, time
    from elephant.task import warm_processes

    warm_processes.executor_above = lambda process: (os.getppid(), "7")
    warm_processes._PRELOADED = ("elephant.rank.program", "blocking_module")

    import process_calls

    with process_calls.Calls(warm_processes.WarmWorkers(limit=2, idle_s=60), waits=False) as early:
        (early.process.work_folder / "shard").mkdir()
        print(os.getpid(), early.process.work_folder, flush=True)
        time.sleep(100)
"""


@pytest.fixture
def executor():
    """An executor with a task and its forked process: the ids of all, the server's, and the work folder."""
    with executor_of(TASK) as found:
        yield found


@contextlib.contextmanager
def executor_of(task):
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", textwrap.dedent(EXECUTOR), textwrap.dedent(task)]
    java = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        *ids, folder = java.stdout.readline().split()
        yield java, *(psutil.Process(int(number)) for number in ids), folder
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(java.pid, signal.SIGKILL)
        java.wait()
        java.stdout.close()


@pytest.mark.parametrize("frozen", [False, True], ids=["running", "frozen"])
def test_process_when_its_task_is_killed_then_ends_and_leaves_no_file(executor, frozen):
    _, task, forked, server, folder = executor
    if frozen:
        forked.suspend()
    task.kill()
    assert psutil.wait_procs([forked], timeout=WAIT_S)[1] == []
    assert wait_until(lambda: not os.path.exists(folder))
    assert server.is_running()


def test_server_when_a_task_is_killed_at_any_moment_then_its_folder_goes_and_that_of_one_that_lives_stays(
    executor, local
):
    _, task, forked, server, folder = executor
    owner = Path(folder).name.removesuffix(f"-{Path(folder).name.split('-')[-1]}").removesuffix(str(task.pid))
    # One that was killed before it asked for a process, or while the server imported; one that lives; other executors'.
    killed = subprocess.Popen(["true"])
    killed.wait()
    kept = [local / name for name in (f"{owner}{os.getpid()}-abc", f"elephant-1-1-{killed.pid}-abc", f"{owner}x-abc")]
    gone = [local / f"{owner}{killed.pid}-abc", local / f"{owner}{killed.pid}-abd".replace("elephant-", "model-")]
    for place in kept + gone:
        place.mkdir()
    assert wait_until(lambda: not any(place.exists() for place in gone))
    assert all(place.exists() for place in kept) and os.path.exists(folder) and forked.is_running()
    for place in kept:
        place.rmdir()


def test_process_when_it_and_its_task_are_killed_at_once_then_the_server_goes_on_and_leaves_no_file(executor):
    _, task, forked, server, folder = executor
    server.suspend()
    task.kill()
    forked.kill()
    assert wait_until(lambda: is_over(task) and is_over(forked))
    server.resume()
    assert wait_until(lambda: not os.path.exists(folder))
    assert server.is_running() and server.status() != psutil.STATUS_ZOMBIE


def test_process_when_it_is_stopped_and_its_server_killed_before_then_ends_with_its_task_all_the_same(executor):
    _, task, forked, server, folder = executor
    server.kill()
    assert wait_until(lambda: forked.ppid() != server.pid)
    forked.suspend()
    task.kill()
    assert psutil.wait_procs([forked], timeout=WAIT_S)[1] == []
    assert not os.path.exists(folder)


@pytest.mark.parametrize(
    "frozen",
    in_tiers({"running": False, "frozen": True}, fast=["running"], slow="killed in the same way"),
)
def test_process_when_executor_and_task_are_killed_then_nothing_of_it_is_left(executor, local, frozen):
    java, task, forked, server, _ = executor
    if frozen:
        forked.suspend()
    java.kill()
    task.kill()
    assert psutil.wait_procs([forked, server], timeout=WAIT_S)[1] == []
    assert wait_until(lambda: not list(local.iterdir()))


def test_executor_when_it_is_killed_while_rows_are_written_and_the_server_imports_then_nothing_of_it_is_left(
    local, other_modules, tmp_path
):
    gate = blocking_module(other_modules, tmp_path)
    with executor_of(EARLY_TASK) as (java, task, folder):
        assert wait_until((tmp_path / "gate.reached").exists)
        java.kill()
        task.kill()
        # A server may import for long: neither is the disk full meanwhile, nor does it go on.
        assert wait_until(lambda: not os.path.exists(folder))
        assert wait_until(lambda: not list(local.iterdir()) and not servers_in(local))
    assert not gate.exists()


def test_server_when_a_stranger_asks_then_gives_it_nothing(executor, local, tmp_path):
    _, _, forked, server, _ = executor
    (path,) = local.glob("*/*.socket")
    # This process is the same user's, but above the executor.
    with connected(path) as connection, open(os.devnull, "r+b") as nothing:
        with contextlib.suppress(BrokenPipeError):
            send_request(connection, request_of(tmp_path), [nothing.fileno()] * 2)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
    assert [child.pid for child in server.children()] == [forked.pid]
    assert (path.parent.stat().st_mode & 0o777) == 0o700


def test_server_when_its_lock_names_nobody_then_no_process_is_signalled(local, monkeypatch):
    signalled = []
    monkeypatch.setattr(warm_processes.os, "kill", lambda *about: signalled.append(about))
    for name, text in (("empty", ""), ("garbage", "x1"), ("free", str(os.getpid()))):
        (local / f"{name}.lock").write_text(text)
    with open(local / "empty.lock") as empty, open(local / "garbage.lock") as garbage:
        for file in (empty, garbage):
            assert warm_processes._is_locked(file.fileno())
        for name in ("empty", "garbage", "free", "not there"):
            warm_processes._signal_server(local / f"{name}.lock", signal.SIGKILL)
        warm_processes._make_room(local, "key", 0)
    assert signalled == []
    for path in local.glob("*.lock"):
        path.unlink()


HOST = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: {} kB\n\nodd\n"


@pytest.mark.parametrize(
    ("available", "limit", "current", "droppable", "short"),
    [
        (500, "max", 999, 0, False),
        (99, "max", 0, 0, True),
        (101, "1000", 899, 0, False),
        (500, "1000", 901, 0, True),
        (500, "1000", 950, 100, False),
        (500, None, 0, 0, False),
        ("odd", "1000", 999, 0, False),
    ],
)
def test_memory_when_less_than_a_tenth_is_left_then_is_short(tmp_path, available, limit, current, droppable, short):
    host, groups, mount = tmp_path / "meminfo", tmp_path / "groups", tmp_path / "mount"
    host.write_text(HOST.format(available))
    groups.write_text("0::/pod/one\n")
    group = mount / "pod" / "one"
    group.mkdir(parents=True)
    if limit is not None:
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{current}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {droppable}\n")
    assert memory_is_short(host, groups, mount) == short


def test_memory_when_it_cannot_be_read_then_is_not_called_short(tmp_path):
    assert not memory_is_short(tmp_path / "none", tmp_path / "none", tmp_path)


def test_request_when_it_crosses_then_is_the_same():
    request = request_of("/x", environment={"A": "ü\udcff\n"}, descriptors=[3, 9])
    assert ForkRequest.from_bytes(request.to_bytes()) == request
    assert pickle.loads(pickle.dumps(WARM)) == WARM
