"""A training process that freezes is noticed, and none outlives the task that started it."""

import contextlib
import importlib.metadata
import os
import pickle
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
import types

import psutil
import pytest
from call_process import calling
from leaks import nothing_left_behind as nothing_left_behind
from tiers import in_tiers

from elephant.backends.process_environment import process_environment
from elephant.errors import ENDED, FROZEN
from elephant.rank.process_pipe import PULSE_FILE, RESULT_FILE
from elephant.task import warm_processes
from elephant.task.process import RankProcess
from elephant.task.warm_processes import new_work_folder


@pytest.fixture
def process():
    with RankProcess("function", dict(os.environ)) as running:
        yield running


def first_pulse(process):
    """Waits until the process has touched its file, which it does from its start on; returns its id."""
    file = process.work_folder / PULSE_FILE
    made = file.stat().st_mtime_ns
    deadline = time.monotonic() + 60
    while file.stat().st_mtime_ns == made and time.monotonic() < deadline:
        time.sleep(0.05)
    (child,) = [child for child in psutil.Process().children() if str(process.work_folder) in " ".join(child.cmdline())]
    return child


def test_process_when_it_runs_then_knows_its_work_folder(process):
    child = first_pulse(process)
    assert child.environ()["ELEPHANT_WORK_FOLDER"] == str(process.work_folder)


def test_work_folders_when_every_user_may_write_beside_them_then_are_this_user_s_alone_and_not_to_be_guessed(
    tmp_path, monkeypatch
):
    tmp_path.chmod(0o1777)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    before = os.umask(0)
    try:
        folders = [new_work_folder("elephant-rank-") for _ in range(20)]
    finally:
        os.umask(before)
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    # What is the same in all is no secret: the rest is drawn.
    same = len(os.path.commonprefix([folder.name for folder in folders]))
    drawn = {folder.name[same:] for folder in folders}
    assert len(drawn) == 20 and min(map(len, drawn)) >= 7


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_folder_of_servers_when_others_can_enter_it_then_is_refused(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    folder = warm_processes._own_folder(os.getpid())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and warm_processes._own_folder(os.getpid()) == folder
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="a folder of this user alone"):
        warm_processes._own_folder(os.getpid())
    folder.rmdir()
    # Another user may have made it before, and a link is none, wherever it leads to.
    folder.symlink_to(tmp_path)
    with pytest.raises(OSError):
        warm_processes._own_folder(os.getpid())


def test_process_when_it_cannot_be_started_then_nothing_is_left_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    with pytest.raises(ValueError, match="illegal environment variable name"):
        RankProcess("function", {**os.environ, "A=B": "1"})
    assert list(tmp_path.iterdir()) == []


def sleep_long():
    time.sleep(600)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt], ids=["no error", "an interrupt"])
def test_process_when_its_block_is_left_while_it_works_then_is_gone_and_so_is_all_that_it_had(error):
    process = calling(sleep_long)
    child = first_pulse(process)

    def leave():
        with contextlib.suppress(KeyboardInterrupt), process:
            if error is not None:
                raise error

    # In a thread, because a process that is not ended is waited for.
    leaving = threading.Thread(target=leave, name="test-leave", daemon=True)
    leaving.start()
    leaving.join(20)
    try:
        assert not leaving.is_alive(), "the process is waited for and not ended"
        # Not even a zombie: nobody would wait for it later.
        assert not psutil.pid_exists(child.pid)
        assert not process.work_folder.exists()
        assert not process.running
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
        leaving.join(20)


def test_process_when_it_is_frozen_then_is_killed_and_named(process):
    child = first_pulse(process)
    child.send_signal(signal.SIGSTOP)
    failure = process.wait(silence_s=1.5)
    assert failure.kind == FROZEN
    assert failure.message == "its process was frozen: it gave no sign of life for 1.5 s, and was killed"
    assert not child.is_running()


def test_process_when_it_waits_for_long_then_is_not_taken_for_frozen(process):
    child, began = first_pulse(process), time.monotonic()
    # It waits for its job for longer than the silence that is allowed, and then is killed by somebody else.
    killer = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(3); os.kill({child.pid}, 9)"])
    failure = process.wait(silence_s=1.5)
    killer.wait()
    assert failure.kind == ENDED and "killed (signal 9)" in failure.message
    assert time.monotonic() - began > 2


@pytest.mark.parametrize(
    ("installed", "kept"),
    [
        ({"pyspark": "4.1.0", "py4j": "0.10.9.9"}, ["lib", "more/pyspark.zip", "app.zip"]),
        ({"pyspark": "4.1.1", "py4j": "0.10.9.9"}, ["lib", "spark/pyspark.zip", "more/pyspark.zip", "app.zip"]),
        ({}, ["lib", "spark/pyspark.zip", "spark/py4j-0.10.9.9-src.zip", "more/pyspark.zip", "app.zip"]),
    ],
)
def test_environment_when_spark_brings_archives_of_what_is_installed_then_leaves_them_out(monkeypatch, installed, kept):
    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    in_use = types.SimpleNamespace(__file__="spark/pyspark.zip/pyspark/__init__.py", __version__="4.1.0")
    places = ["lib", "", "spark/pyspark.zip", "spark/py4j-0.10.9.9-src.zip", "more/pyspark.zip", "app.zip"]
    monkeypatch.setitem(sys.modules, "pyspark", in_use)
    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr(sys, "path", places)
    environment = process_environment(threads=1, devices=(), backend=None)
    monkeypatch.undo()
    assert environment["PYTHONPATH"].split(os.pathsep) == kept


TASK = """
    import os, signal, time
    from elephant.task.process import RankProcess

    # As a task has it; who runs these tests under nohup ignores the signal, and so would this.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with RankProcess("function", dict(os.environ)) as process:
        print(process._process.pid, process.work_folder, flush=True)
        time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell a process of its parent's end")
@pytest.mark.parametrize(("frozen", "end"), [(True, signal.SIGKILL), (False, signal.SIGHUP)], ids=["frozen", "SIGHUP"])
def test_process_when_its_task_is_killed_then_ends_as_well_and_leaves_no_file(frozen, end):
    task = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TASK)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        number, folder = task.stdout.readline().split()
        child = psutil.Process(int(number))
        made = os.stat(os.path.join(folder, PULSE_FILE)).st_mtime_ns
        deadline = time.monotonic() + 60
        while os.stat(os.path.join(folder, PULSE_FILE)).st_mtime_ns == made and time.monotonic() < deadline:
            time.sleep(0.05)
        if frozen:
            child.send_signal(signal.SIGSTOP)
        # Spark kills one task's process, or hangs up on all Python processes of an executor that has ended.
        os.killpg(task.pid, end) if end is signal.SIGHUP else task.kill()
        task.wait(timeout=30)
        psutil.wait_procs([child], timeout=30)
        assert not child.is_running()
        assert not os.path.exists(folder)
    finally:
        task.kill()
        task.wait()
        task.stdout.close()


STOPPED_TASK = """
    import functools, sys
    from call_process import calling
    from test_process import wait_for_file

    with calling(functools.partial(wait_for_file, sys.argv[1]), grace_s=float(sys.argv[2])) as process:
        print(process._process.pid, process.work_folder, flush=True)
        print(process.wait(silence_s=60), flush=True)
"""


def wait_for_file(path):
    open(f"{path}.reached", "w").close()
    while not os.path.exists(path):
        time.sleep(0.05)
    return "done"


def appears(path, until=True):
    deadline = time.monotonic() + 60
    while os.path.exists(path) is not until:
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
@pytest.mark.parametrize(
    "then",
    in_tiers(["killed", "goes on", "stays stopped"], fast=["stays stopped"], slow="another end of the same wait"),
)
def test_process_when_its_task_is_stopped_at_its_end_then_waits_and_leaves_no_file(tmp_path, then):
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    grace_s = "2.5" if then == "stays stopped" else "60"
    command = [sys.executable, "-c", textwrap.dedent(STOPPED_TASK), str(tmp_path / "gate"), grace_s]
    task = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    try:
        number, folder = task.stdout.readline().split()
        child = psutil.Process(int(number))
        appears(tmp_path / "gate.reached")
        task.send_signal(signal.SIGSTOP)
        while psutil.Process(task.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        (tmp_path / "gate").touch()
        appears(os.path.join(folder, RESULT_FILE))
        with pytest.raises(psutil.TimeoutExpired):
            child.wait(timeout=1)
        if then == "stays stopped":
            # Nobody waits for the process, which is a zombie meanwhile.
            appears(folder, until=False)
            task.kill()
        else:
            task.send_signal(signal.SIGKILL if then == "killed" else signal.SIGCONT)
        psutil.wait_procs([child], timeout=30)
        assert not child.is_running()
        assert task.stdout.read() == ("None\n" if then == "goes on" else "")
        task.wait(timeout=30)
        # Who has removed it may be a thread of a process whose leader has ended.
        appears(folder, until=False)
    finally:
        task.kill()
        task.wait()
        task.stdout.close()


def close_streams():
    sys.stdout.close()
    sys.stderr = None
    return "done"


def read_input():
    try:
        input()
    except EOFError:
        return subprocess.run(["cat"], capture_output=True, timeout=60, check=True).stdout
    return None


@pytest.mark.parametrize(("function", "expected"), [(close_streams, "done"), (read_input, b"")])
def test_process_when_its_function_closes_or_reads_standard_streams_then_ends_well(function, expected):
    with calling(function) as process:
        assert process.wait(silence_s=60) is None
        assert pickle.loads(process.result()) == expected


class OddError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def raise_odd():
    raise OddError


def raise_at_length():
    raise ValueError("begins \udcff" + 10**7 * "x" + " ends")


def test_process_when_its_error_has_no_text_then_is_told_all_the_same():
    with calling(raise_odd) as process:
        failure = process.wait(silence_s=60)
    assert failure.kind == "OddError" and failure.message == "(its text cannot be had: RuntimeError)"
    assert "raise OddError" in failure.traceback


def test_process_when_its_error_is_very_long_and_no_unicode_then_both_ends_are_told():
    with calling(raise_at_length) as process:
        failure = process.wait(silence_s=60)
    for text in (failure.message, failure.traceback):
        assert "begins \\udcff" in text and text.rstrip().endswith("ends") and len(text) < 10**5


def fail_without_room():
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    raise ValueError("no room")


def test_process_when_there_is_no_room_for_its_error_then_its_last_lines_have_it():
    with calling(fail_without_room) as process:
        failure = process.wait(silence_s=60)
    assert failure.kind == ENDED and "had no room for its error" in failure.message
    assert "ValueError: no room" in failure.log_tail
