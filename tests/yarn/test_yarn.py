"""The jobs on YARN and HDFS as Hadoop ships them: both modes, what is shipped, and containers that come and go."""

import contextlib
import json
import re
import signal
import sysconfig
import tarfile
import venv
from pathlib import Path

import psutil
import pytest
from hadoop_cluster import await_state
from spark_submit import JOBS, ROWS, complaint, last_line

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(900, func_only=True),
    pytest.mark.slow("applications on YARN; tests/spark_jobs submits these jobs to a standalone cluster"),
]

ROOT = Path(__file__).resolve().parents[2]
SEVERAL = ROOT / "tests" / "spark_jobs" / "several_jobs.py"
SUBMIT_S, GONE_S = 600.0, 60.0
_KEPT, _ENDED = re.compile(r"going on after epoch (\d+) of 2000"), re.compile(r"^ *(\d+)/2000 ")
CLUSTER_MODE = ("--deploy-mode", "cluster")


def code_of(inputs):
    """Returns options of ``spark-submit`` that ship the user's code."""
    return ("--py-files", str(inputs / "net_of_user.py"))


def words_of(hadoop, name, **settings):
    """Returns what `train.py` is told; what it writes lies in ``/name`` of HDFS."""
    given = {
        "data": f"{hadoop.hdfs}/in/data.parquet",
        "model": "net_of_user:build",
        "output": f"{hadoop.hdfs}/{name}/fitted",
        "num-workers": 2,
        "batch-size": 16,
        "seed": 3,
        **settings,
    }
    return [
        str(word) for key, value in given.items() for word in ((f"--{key}", value) if value != "" else (f"--{key}",))
    ]


def submit(hadoop, job, *words, options=()):
    return hadoop.submit(JOBS / f"{job}.py", *words, options=options, timeout_s=SUBMIT_S)


@contextlib.contextmanager
def training(hadoop, inputs, name, *, options=(), **settings):
    """Gives a job that is in the middle of its epochs, its application, and what it writes; see `words_of`."""
    words = words_of(hadoop, name, **{"checkpoint-path": f"{hadoop.hdfs}/{name}/checkpoints", "epochs": 12, **settings})
    slow = ("--callbacks", "net_of_user:Slow")
    with hadoop.started(JOBS / "train.py", *words, *slow, options=(*code_of(inputs), *options)) as process:
        known = {one["id"] for one in hadoop.applications()}
        [application] = await_state(
            lambda: [one["id"] for one in hadoop.applications() if one["id"] not in known],
            lambda found: len(found) == 1,
        )
        await_state(lambda: process.poll() is not None or checkpoints_of(hadoop, name), bool, timeout_s=SUBMIT_S)
        if process.poll() is not None:
            pytest.fail("".join(process.communicate()))
        yield process, application


def checkpoints_of(hadoop, name):
    """Returns the epochs after which a job has written a checkpoint."""
    # The last file of a checkpoint: without it, there is none.
    found = (re.fullmatch(r"epoch-(\d+).*\.json", one) for one in hadoop.names(f"/{name}/checkpoints"))
    return [int(one[1]) for one in found if one]


def ended(process):
    """Returns the exit code of a job, and all that it printed."""
    out, err = process.communicate(timeout=SUBMIT_S)
    return process.returncode, out, err


def driver_log(hadoop, application, attempt):
    """Returns what a driver in cluster mode has printed."""
    logs = hadoop.container_logs(application)
    return "".join(text for name, text in logs.items() if f"_{attempt:02}_000001/stdout" in name)


def in_containers(application):
    """Returns the words of each process on this machine that was started in a container of an application."""
    own = application.removeprefix("application_")
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        with contextlib.suppress(psutil.Error):
            if own in (process.info["environ"] or {}).get("CONTAINER_ID", ""):
                found.append(process.info["cmdline"])
    return found


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """A Python environment as an archive, in the form of venv-pack and conda-pack; its packages are this machine's."""
    folder = tmp_path_factory.mktemp("archive")
    venv.create(folder / "environment", symlinks=False, with_pip=False)
    [packages] = (folder / "environment").glob("lib/python*/site-packages")
    (packages / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    with tarfile.open(folder / "environment.tar.gz", "w:gz") as file:
        file.add(folder / "environment", arcname=".")
    return folder / "environment.tar.gz"


def test_train_when_its_driver_s_container_is_lost_then_the_next_attempt_goes_on_from_the_checkpoint(
    hadoop, inputs, archive
):
    options = (
        *CLUSTER_MODE,
        *("--archives", f"{archive}#environment"),
        *("--conf", "spark.pyspark.python=./environment/bin/python"),
        *("--conf", "spark.yarn.maxAppAttempts=2"),
    )
    with training(hadoop, inputs, "attempts", options=options, resume="") as (process, application):
        ranks = [words[0] for words in in_containers(application) if "elephant.task.forkserver" in words]
        assert ranks and all(program.endswith("/environment/bin/python") for program in ranks), ranks
        [driver] = [one for name, one in hadoop.containers(application).items() if name.endswith("_01_000001")]
        for one in [driver, *driver.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
        code, _, err = ended(process)
    second = driver_log(hadoop, application, 2)
    assert code == 0, (err, second)
    history = json.loads(second.splitlines()[-1])
    assert len(history["loss"]) == 12 and history["loss"][-1] < history["loss"][0]
    epochs = [line.split()[0] for line in second.splitlines() if "/12 " in line]
    assert epochs[-1] == "12/12" and "1/12" not in epochs
    assert "_SUCCESS" in hadoop.names("/attempts/fitted")


def test_jobs_when_executors_come_and_go_then_train_asynchronously_evaluate_and_predict(hadoop, inputs):
    own = f"{hadoop.hdfs}/asynchronous"
    training = words_of(hadoop, "asynchronous", mode="asynchronous", epochs=8, **{"events-path": f"{own}/events"})
    of_model = ["--data", f"{hadoop.hdfs}/in/data.parquet", "--model", f"{own}/fitted"]
    jobs = [["train", training], ["evaluate", of_model], ["predict", [*of_model, "--output", f"{own}/predictions"]]]
    (inputs / "jobs.json").write_text(json.dumps(jobs))
    allocation = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.initialExecutors": "1",
        "spark.dynamicAllocation.executorIdleTimeout": "2s",
    }
    words = [word for name, value in allocation.items() for word in ("--conf", f"{name}={value}")]
    options = (*code_of(inputs), *words)
    done = hadoop.submit(SEVERAL, inputs / "jobs.json", "--together", options=options, timeout_s=SUBMIT_S)
    ended_all = last_line(done)
    assert [code for code, _, _ in ended_all] == [0, 0, 0], "\n".join(err for _, _, err in ended_all)
    history, metrics, written = (json.loads(out.splitlines()[-1]) for _, out, _ in ended_all)
    assert len(history["loss"]) == 8 and metrics["accuracy"] > 0.8 and written["rows"] == ROWS
    [events] = hadoop.names("/asynchronous/events")
    assert events.endswith(".jsonl")
    assert "_SUCCESS" in hadoop.names("/asynchronous/predictions")


def test_train_when_a_container_takes_too_much_memory_then_the_error_says_what_to_raise(hadoop, inputs):
    small = ("--conf", "spark.executor.memoryOverhead=384m", "--conf", "spark.executor.instances=1")
    words = [*words_of(hadoop, "memory", epochs=200, **{"num-workers": 1}), "--callbacks", "net_of_user:Slow"]
    done = submit(hadoop, "train", *words, options=(*code_of(inputs), *small))
    assert done.returncode == 3
    assert "memory" in complaint(done, "train")
    assert "spark.executor.memoryOverhead" in done.stdout + done.stderr


def test_train_when_a_container_is_preempted_then_goes_on_and_when_all_is_killed_then_another_job_does(hadoop, inputs):
    large = ("--conf", "spark.executor.memoryOverhead=4608m", "--conf", "spark.executor.instances=3")
    # More epochs than there is time for: the other job comes in their middle.
    given = {"num-workers": 3, "max-restarts": 2, "epochs": 2000}
    with training(hadoop, inputs, "preempted", options=large, **given) as (process, mine):
        (inputs / "urgent.py").write_text(URGENT)
        urgent = ("--queue", "urgent", "--conf", "spark.executor.instances=1", *large[:2])
        other = hadoop.submit(inputs / "urgent.py", options=urgent, timeout_s=SUBMIT_S)
        assert other.returncode == 0, other.stderr
        next(line for line in process.stdout if "the fit failed and starts again (1 of 2)" in line)
        kept = next(found for found in map(_KEPT.search, process.stdout) if found)[1]
        ended_next = next(found for found in map(_ENDED.search, process.stdout) if found)[1]
        assert int(ended_next) == int(kept) + 1
        [told] = [one for one in hadoop.applications() if one["id"] == mine]
        assert told["preemptedResourceMB"] > 0
        assert in_containers(mine)
        hadoop.kill_application(mine)
        code, out, err = ended(process)
    assert code == 3
    # Its executors' ends and the news of its own reach Spark in either order.
    assert re.search("the Spark job was cancelled: |ExecutorLostFailure", out + err)
    await_state(lambda: in_containers(mine), lambda left: not left, timeout_s=GONE_S)
    epochs = max(checkpoints_of(hadoop, "preempted")) + 2
    words = ["--checkpoint-path", f"{hadoop.hdfs}/preempted/checkpoints", "--trusted", "--epochs", epochs]
    resumed = submit(hadoop, "resume", *words, "--num-workers", 2, options=code_of(inputs))
    assert len(last_line(resumed)["loss"]) == epochs
    assert "_SUCCESS" in hadoop.names("/preempted/fitted")


URGENT = """
import time
from pyspark.sql import SparkSession

session = SparkSession.builder.getOrCreate()
assert session.range(0, 10, 1, 1).count() == 10
time.sleep(3)
session.stop()
"""
