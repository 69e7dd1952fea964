"""`elephant.run` on a cluster of three executors: results, errors, and that nothing is left."""

import os
import signal
import sys
import threading
import time
import traceback

import numpy as np
import psutil
import pytest
from process_tree import task_of
from screen import MOST_LINES, assert_brief

import elephant
from elephant.config import Timeouts
from elephant.errors import ClusterError, ConfigurationError, JobCancelledError, WorkerFailure


@pytest.fixture(scope="module", autouse=True)
def functions_by_value():
    """Test modules are not on the executors: what they define travels as a notebook's cells do."""
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class Point:
    """A class that the executors can only have from the driver."""

    def __init__(self, x):
        self.x = x


def run(spark, fn, *args, num_workers=2, **options):
    return elephant.run(fn, args, num_workers=num_workers, spark=spark, verbose=0, **options)


def touch(folder, name):
    with open(os.path.join(folder, str(name)), "w"):
        pass


def names_when(folder, count, timeout_s=60):
    """Returns the names of the files in a folder, as soon as there are so many."""
    deadline = time.monotonic() + timeout_s
    while len(os.listdir(folder)) < count:
        assert time.monotonic() < deadline, f"only {os.listdir(folder)}"
        time.sleep(0.05)
    return sorted(os.listdir(folder))


def reduce_without_end(folder, size=1000, pause_s=0.02):
    collective = elephant.collective
    array = np.ones(size, "float32")
    collective.allreduce(array)
    touch(folder, f"{collective.rank()}-{os.getpid()}")
    while True:
        collective.allreduce(array)
        time.sleep(pause_s)


def test_run_when_three_workers_exchange_then_gives_results_by_rank(spark):
    def exchange(offset):
        collective = elephant.collective
        rank = collective.rank()
        inside = np.full(2, float(rank))
        collective.allreduce_(inside, op="max")
        from_last = np.full(2, rank)
        collective.broadcast_(from_last, root=2)
        collective.barrier()
        try:
            nested = elephant.run(int, num_workers=2)
        except ConfigurationError as error:
            nested = str(error)
        return {
            "nested": nested,
            "rank": (rank, collective.world_size()),
            "local": (collective.local_rank(), collective.local_world_size()),
            "sum": collective.allreduce(np.array([rank + offset, 1])).tolist(),
            "mean": collective.allreduce(np.array([rank], "float32"), op="mean").tolist(),
            "max": inside.tolist(),
            "from last": from_last.tolist(),
            "from first": collective.broadcast(np.array([rank])).tolist(),
            "ragged": [part.tolist() for part in collective.allgather(np.arange(rank))],
            "part": collective.reduce_scatter(np.arange(4)).tolist(),
        }

    results = run(spark, exchange, 10, num_workers=3)
    assert [result.pop("rank") for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert [result.pop("local") for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert [result.pop("part") for result in results] == [[0, 3], [6], [9]]
    refused = "elephant.run: expected to be called on the driver. Received: a call inside a worker"
    assert all(result.pop("nested").startswith(refused) for result in results)
    expected = {
        "sum": [33, 3],
        "mean": [1.0],
        "max": [2.0, 2.0],
        "from last": [2, 2],
        "from first": [0],
        "ragged": [[], [0], [0, 1]],
    }
    assert results == [expected] * 3


def test_run_when_the_function_uses_numpy_only_then_keras_is_not_imported(spark):
    def look():
        loaded = [name for name in ("keras", "tensorflow") if name in sys.modules]
        return loaded, os.environ["ELEPHANT_TEST"], os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"]

    assert run(spark, look, env={"ELEPHANT_TEST": "set"}) == [([], "set", "1", "-1")] * 2


@pytest.mark.slow(
    "three runs; test_warm_fits.py and tests/task/test_warm_processes.py hold what a forked process finds"
)
def test_run_when_it_is_repeated_then_ranks_come_from_a_server_that_knows_nothing_of_the_run_before(spark):
    """What would be a fresh process for a function is forked, without Keras, and with the environment of its run."""

    def change():
        from elephant.rank.process_pipe import is_forked

        before = "LEFT" in os.environ
        # As a function may that chooses its backend itself.
        os.environ["KERAS_BACKEND"] = "numpy"
        elephant.left = os.environ["LEFT"] = "here"
        import keras

        return is_forked(), before, keras.config.backend(), os.getppid(), elephant.collective.rank()

    def look():
        return hasattr(elephant, "left"), "keras" in sys.modules, os.environ.get("LEFT"), os.getppid()

    changed = run(spark, change, num_workers=3)
    assert [answer[:3] + answer[4:] for answer in changed] == [(True, False, "numpy", rank) for rank in range(3)]
    seen = run(spark, look, num_workers=3)
    assert [answer[:3] for answer in seen] == [(False, False, None)] * 3
    assert {answer[3] for answer in seen} == {answer[3] for answer in changed}
    # What the user sets is nothing that a process is to hold afterwards.
    fresh = run(spark, look, env={"LEFT": "user"})
    assert [answer[2] for answer in fresh] == ["user"] * 2
    assert not {answer[3] for answer in fresh} & {answer[3] for answer in seen}


def test_run_when_the_session_is_not_given_then_takes_the_active_one(spark, capsys):
    def speak():
        print("from rank", elephant.collective.rank())
        return elephant.collective.rank()

    assert elephant.run(speak, num_workers=2) == [0, 1]
    lines = capsys.readouterr().out.splitlines()
    # A rank may speak before the other one has begun.
    titles = ["rank", "host", "executor", "device", "threads"]
    (first,) = [number for number, line in enumerate(lines) if line.split() == titles]
    rank, host, executor, *rest = lines[first + 1].split()
    assert [rank, host, *rest] == ["0", "127.0.0.1", "CPU", "1"] and executor.isdecimal()
    assert {f"[rank {rank}, 127.0.0.1] from rank {rank}" for rank in (0, 1)} <= set(lines)


def test_run_when_one_worker_is_asked_for_then_spark_is_not_used(spark):
    assert elephant.run(os.getpid, num_workers=1, spark=spark) == [os.getpid()]


def test_run_when_classes_of_the_driver_come_back_then_they_are_the_same_classes(spark):
    results = run(spark, lambda point: Point(point.x + elephant.collective.rank()), Point(1))
    assert [type(result) for result in results] == [Point, Point]
    assert [result.x for result in results] == [1, 2]


def test_run_when_a_rank_raises_then_the_error_has_its_frames_and_last_lines(spark):
    def fail():
        collective = elephant.collective
        collective.barrier()
        if collective.rank() == 1:
            print("about to fail")
            raise ValueError("wrong on purpose")
        collective.allreduce(np.zeros(1_000_000, "float32"))

    wanted = r"rank 1 on 127.0.0.1 \(executor \d+\) failed: ValueError: wrong on purpose"
    with pytest.raises(WorkerFailure, match=wanted) as failure:
        run(spark, fail)
    assert failure.value.rank == 1 and failure.value.step is None
    assert 'raise ValueError("wrong on purpose")' in failure.value.traceback
    assert "elephant/training" not in failure.value.traceback
    assert "about to fail" in failure.value.log_tail


def test_run_when_a_peer_hides_its_loss_then_the_cause_is_still_told(spark):
    def fail():
        collective = elephant.collective
        if collective.rank() == 1:
            raise ValueError("the cause")
        try:
            collective.allreduce(np.zeros(1_000_000, "float32"))
        except Exception:
            raise RuntimeError("an echo under another name") from None

    with pytest.raises(WorkerFailure, match="ValueError: the cause"):
        run(spark, fail)


def test_run_when_a_rank_ends_without_an_exception_then_says_how(spark):
    def leave():
        if elephant.collective.rank() == 1:
            os._exit(0)
        elephant.collective.barrier()

    with pytest.raises(WorkerFailure, match="exited with 0 before its work was done") as failure:
        run(spark, leave)
    assert failure.value.rank == 1


def test_run_when_a_rank_is_killed_in_mid_allreduce_then_fails_in_seconds(spark, tmp_path):
    killed = []

    def kill():
        names = names_when(tmp_path, 2)
        os.kill(int(names[1].split("-")[1]), signal.SIGKILL)
        killed.append(time.monotonic())

    watcher = threading.Thread(target=kill, name="fault")
    watcher.start()
    with pytest.raises(WorkerFailure, match=r"rank 1 .*killed \(signal 9\).*out of memory") as failure:
        run(spark, reduce_without_end, str(tmp_path), 4_000_000, 0.0)
    watcher.join(timeout=10)
    assert time.monotonic() - killed[0] < 40
    assert_brief(
        failure.value,
        cause=r"rank 1 on 127\.0\.0\.1 \(executor \d+\) failed: ProcessEnded: its process was killed \(signal 9\)",
        remedy=r"Raise spark\.executor\.memoryOverhead, or lower [^.]+\.",
        topic="a-process-that-ended",
    )


def test_run_when_the_spark_task_of_a_rank_is_killed_then_names_the_rank(spark, tmp_path):
    executors = []

    def kill():
        names = names_when(tmp_path, 2)
        task = task_of(int(names[1].split("-")[1]))
        command = next(process for process in task.parents() if process.name() == "java").cmdline()
        executors.append(command[command.index("--executor-id") + 1])
        task.kill()

    watcher = threading.Thread(target=kill, name="fault")
    watcher.start()
    with pytest.raises(WorkerFailure, match="rank 1 .*lost without an error report") as failure:
        run(spark, reduce_without_end, str(tmp_path))
    watcher.join(timeout=10)
    assert failure.value.rank == 1 and [failure.value.executor] == executors


def test_run_when_a_rank_freezes_then_the_driver_gives_up(spark, tmp_path):
    frozen = []

    def freeze():
        frozen.append(int(names_when(tmp_path, 2)[1].split("-")[1]))
        os.kill(frozen[0], signal.SIGSTOP)

    watcher = threading.Thread(target=freeze, name="fault")
    watcher.start()
    with pytest.raises(WorkerFailure, match="nothing was heard from it for 4 s"):
        run(spark, reduce_without_end, str(tmp_path), timeouts=Timeouts(heartbeat_s=4.0))
    watcher.join(timeout=10)
    # A frozen process cannot let go by itself: Spark ends its task, and the task would have ended it.
    if os.path.exists(f"/proc/{frozen[0]}"):
        os.kill(frozen[0], signal.SIGKILL)


@pytest.mark.slow("a silence; tests/monitor/test_task_allgather.py holds it without Spark")
def test_run_when_the_spark_task_of_a_rank_freezes_then_names_the_rank(spark, tmp_path):
    def wait_for_gate(folder):
        touch(folder, f"{elephant.collective.rank()}-{os.getpid()}")
        while not os.path.exists(os.path.join(folder, "gate")):
            time.sleep(0.05)

    def freeze():
        task_of(int(names_when(tmp_path, 2)[1].split("-")[1])).suspend()
        touch(tmp_path, "gate")

    watcher = threading.Thread(target=freeze, name="fault")
    watcher.start()
    with pytest.raises(WorkerFailure, match="rank 1 .* from its Spark task for 4 s: its Python worker is frozen"):
        run(spark, wait_for_gate, str(tmp_path), timeouts=Timeouts(heartbeat_s=4.0))
    watcher.join(timeout=10)


def test_run_when_interrupted_then_ends_and_another_run_works(spark, tmp_path):
    def interrupt():
        names_when(tmp_path, 2)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt, name="fault")
    watcher.start()
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(spark, reduce_without_end, str(tmp_path))
    watcher.join(timeout=10)
    shown = "".join(traceback.format_exception(stopped.value))
    assert len(shown.splitlines()) <= MOST_LINES and "pyspark" not in shown
    # But for the frame that raises it anew.
    package = os.path.dirname(elephant.__file__)
    frames = [frame.filename for frame in traceback.extract_tb(stopped.value.__traceback__)]
    assert [name for name in frames if name.startswith(package)] == [os.path.join(package, "errors.py")]
    assert run(spark, elephant.collective.rank) == [0, 1]


def test_run_when_two_run_at_once_then_both_are_right(spark):
    results = {}

    def start(offset):
        # One executor is left over: the second barrier job waits for the first.
        results[offset] = run(spark, lambda: int(elephant.collective.allreduce(np.array([offset]))[0]))

    threads = [threading.Thread(target=start, args=(offset,)) for offset in (1, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert results == {1: [2, 2], 10: [20, 20]}


def test_run_when_something_cannot_be_pickled_then_says_what(spark):
    lock = threading.Lock()
    with pytest.raises(ConfigurationError, match=r"fn: expected something that can be pickled.*lock"):
        run(spark, lambda: lock)
    with pytest.raises(ConfigurationError, match=r"args\[1\]: expected something that can be pickled"):
        run(spark, max, 1, lock)
    with pytest.raises(ConfigurationError, match=r"kwargs\['key'\]: expected something that can be pickled"):
        run(spark, max, 1, 2, kwargs={"key": lock})
    with pytest.raises(ConfigurationError, match="result of rank [01]: expected something that can be pickled.*lock"):
        run(spark, threading.Lock)


def test_run_when_code_is_missing_on_the_executors_then_says_how_to_ship_it(spark, tmp_path, monkeypatch):
    (tmp_path / "known_to_the_driver_alone.py").write_text("def work():\n    return 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    import known_to_the_driver_alone

    with pytest.raises(ConfigurationError, match="No module named 'known_to_the_driver_alone'.*--py-files"):
        run(spark, known_to_the_driver_alone.work)


def test_run_when_there_are_too_few_slots_then_says_so_at_once(spark):
    with pytest.raises(ClusterError, match="num_workers=4: expected 4 task slots.*Lower num_workers to 3"):
        run(spark, int, num_workers=4)


def test_run_when_its_job_is_cancelled_then_says_so_and_its_processes_end(spark, tmp_path):
    ended = []

    def cancel_when_running():
        ranks = [psutil.Process(int(name.split("-")[1])) for name in names_when(tmp_path, 2)]
        spark.sparkContext.cancelAllJobs()
        _, left = psutil.wait_procs(ranks, timeout=30)
        ended.append(not left)

    watcher = threading.Thread(target=cancel_when_running, name="fault")
    watcher.start()
    with pytest.raises(JobCancelledError, match="the Spark job was cancelled: .*all jobs"):
        run(spark, reduce_without_end, str(tmp_path))
    watcher.join(timeout=40)
    assert ended == [True]
