"""The process in which a Python worker of Spark predicts: kept for the next task, replaced when it is lost."""

import os
import signal
import sys
import time

import process_calls
import psutil
import pyarrow as pa
import pytest

from elephant.backends.process_environment import process_environment
from elephant.cluster.warm_workers import WarmWorkers
from elephant.errors import DataError, TrainingError
from elephant.task import model_cache, warm_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other kernels have no descriptors of processes")

WARM = WarmWorkers(limit=2, idle_s=60)
WAIT_S = 45
CHUNKS = [[pa.array([1, 2])], [pa.array([3])]]


@pytest.fixture(autouse=True)
def worker(tmp_path, monkeypatch):
    """This process as a Python worker that has not imported Keras, and its executor's local folder."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setattr(warm_processes, "executor_above", lambda process: (os.getppid(), "7"))
    monkeypatch.setattr(warm_processes, "_PRELOADED", ("elephant.rank.program", "elephant.rank.chunks"))
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    yield tmp_path
    if model_cache._process is not None:
        model_cache._process.close()
        model_cache._process = None
    locks = list(tmp_path.glob(f"{warm_processes.FOLDER}-*/*.lock"))
    for lock in locks:
        warm_processes._signal_server(lock, signal.SIGTERM)
    deadline = time.monotonic() + WAIT_S
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def compute(function, chunks=CHUNKS, warm=WARM, **variables):
    environment = process_environment(threads=1, devices=(), backend=None, more=variables)
    return model_cache.compute(function, chunks, environment=lambda: environment, warm=warm)


def where(chunks):
    """Yields the process for each chunk."""
    for columns in chunks:
        yield os.getpid(), os.environ.get("DEVICE"), columns[0].to_pylist()


def freezing(chunks):
    os.kill(os.getpid(), signal.SIGSTOP)
    yield from chunks


def refused(chunks):
    next(chunks)
    raise DataError("row 3: expected a number")


def killed(chunks):
    next(chunks)
    print("about to die")
    os.kill(os.getpid(), signal.SIGKILL)
    yield 1


def closing(chunks):
    next(chunks)
    os.closerange(3, 100)
    signal.pause()
    yield 1


def test_compute_when_one_function_follows_the_other_then_one_process_serves_both():
    first, second = list(compute(where)), list(compute(where))
    assert first == second
    assert [rows for _, _, rows in first] == [[1, 2], [3]]
    assert {process for process, _, _ in first} != {os.getpid()}
    assert psutil.Process(first[0][0]).is_running()


def test_compute_when_the_environment_is_another_then_so_is_the_process():
    (one, device, _), _ = compute(where, DEVICE="0")
    assert device == "0"
    (other, device, _), _ = compute(where, DEVICE="1")
    assert device == "1" and other != one
    assert not psutil.pid_exists(one)


def test_compute_when_the_process_has_died_between_two_jobs_then_another_computes():
    ((process, _, _), _) = compute(where)
    psutil.Process(process).kill()
    psutil.wait_procs([psutil.Process(process)] if psutil.pid_exists(process) else [], timeout=WAIT_S)
    ((other, _, rows), _) = compute(where)
    assert other != process and rows == [1, 2]


def test_compute_when_the_process_has_frozen_between_two_jobs_then_another_computes(monkeypatch):
    monkeypatch.setattr(model_cache, "_WELL_S", 1.0)
    ((process, _, _), _) = compute(where)
    frozen = psutil.Process(process)
    frozen.suspend()
    # Of one that froze just now, the pulse does not tell.
    time.sleep(model_cache._SILENT_S + 0.5)
    ((other, _, rows), _) = compute(where)
    assert other != process and rows == [1, 2] and not psutil.pid_exists(process)


def test_compute_when_the_process_freezes_in_its_work_then_is_ended_and_named(monkeypatch):
    monkeypatch.setattr(model_cache, "_FROZEN_S", 2.0)
    with pytest.raises(TrainingError, match="its process was frozen"):
        list(compute(freezing))
    assert [rows for _, _, rows in compute(where)] == [[1, 2], [3]]


def test_compute_when_nothing_may_wait_then_computes_right_here():
    assert {process for process, _, _ in compute(where, warm=WarmWorkers())} == {os.getpid()}


def test_compute_when_two_compute_at_once_then_the_second_does_so_right_here():
    first = compute(where)
    elsewhere, _, _ = next(first)
    assert {process for process, _, _ in compute(where)} == {os.getpid()}
    assert next(first)[0] == elsewhere
    first.close()


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (refused, DataError, "row 3: expected a number"),
        (killed, TrainingError, r"(?s)The process that predicts is lost: .*signal 9.*about to die"),
        (closing, TrainingError, "The process that predicts is lost"),
    ],
)
def test_compute_when_it_fails_then_says_why_and_the_next_use_starts_anew(monkeypatch, function, kind, text):
    monkeypatch.setattr(model_cache, "_END_S", 1.0)
    (before, *_), _ = compute(where)
    with pytest.raises(kind, match=text):
        list(compute(function))
    assert not psutil.pid_exists(before)
    assert [rows for _, _, rows in compute(where)] == [[1, 2], [3]]


def test_compute_when_the_rows_fail_then_so_does_it_and_does_not_wait(monkeypatch):
    def rows():
        yield [pa.array([1])]
        raise EOFError("Spark has hung up")

    with pytest.raises(EOFError, match="Spark has hung up"):
        list(compute(where, rows()))
    assert len(list(compute(where))) == 2


def test_compute_when_it_is_left_in_the_middle_then_the_next_use_starts_anew():
    results = compute(where)
    before, _, _ = next(results)
    results.close()
    assert not psutil.pid_exists(before)
    (after, *_), _ = compute(where)
    assert after != before


def test_process_when_there_is_no_server_then_computes_all_the_same(monkeypatch):
    monkeypatch.setattr(warm_processes, "executor_above", lambda process: None)
    (process, *_), _ = compute(where)
    assert process != os.getpid()
    assert not next(iter(compute(forked)))


def forked(chunks):
    yield process_calls.is_forked()
