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
from spark_submit import JOBS, ROWS, last_line

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(900, func_only=True),
    pytest.mark.slow("applications on YARN; tests/spark_jobs submits these jobs to a standalone cluster"),
]

ROOT = Path(__file__).resolve().parents[2]
SEVERAL = ROOT / "tests" / "spark_jobs" / "several_jobs.py"
SUBMIT_S, GONE_S = 600.0, 60.0
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


@contextlib.contextmanager
def started(hadoop, script, *words, options=()):
    """Gives a job that runs, and its application."""
    known = {one["id"] for one in hadoop.applications()}
    with hadoop.started(script, *words, options=options) as process:
        [application] = await_state(
            lambda: [one["id"] for one in hadoop.applications() if one["id"] not in known],
            lambda found: len(found) == 1,
        )
        yield process, application


def await_job(process, state):
    """Waits until something is so; fails when the job ends before."""
    await_state(lambda: process.poll() is not None or state(), bool, timeout_s=SUBMIT_S)
    if process.poll() is not None:
        pytest.fail("".join(process.communicate()))


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


def test_train_when_a_container_is_preempted_and_then_its_driver_s_is_lost_then_goes_on_from_the_checkpoint(
    hadoop, inputs, archive
):
    # Both nodes are full; what the other queue needs is more than its share leaves this one.
    large = ("--conf", "spark.executor.memoryOverhead=3584m")
    options = (
        *CLUSTER_MODE,
        *("--archives", f"{archive}#environment"),
        *("--conf", "spark.pyspark.python=./environment/bin/python"),
        *("--conf", "spark.yarn.maxAppAttempts=2"),
        *large,
    )
    given = {"checkpoint-path": f"{hadoop.hdfs}/attempts/checkpoints", "epochs": 6, "max-restarts": 2, "resume": ""}
    # The other queue's application may take its time on a busy machine.
    given["timeouts"] = f"slots_s={SUBMIT_S:.0f}"
    words = [*words_of(hadoop, "attempts", **given), "--callbacks", "net_of_user:Held"]
    with started(hadoop, JOBS / "train.py", *words, options=(*code_of(inputs), *options)) as (process, application):
        await_job(process, lambda: 3 in checkpoints_of(hadoop, "attempts"))
        ranks = [words[0] for words in in_containers(application) if "elephant.task.forkserver" in words]
        assert ranks and all(program.endswith("/environment/bin/python") for program in ranks), ranks
        (inputs / "urgent.py").write_text(URGENT)
        urgent = ("--queue", "urgent", "--conf", "spark.executor.instances=1", *large)
        other = hadoop.submit(inputs / "urgent.py", options=urgent, timeout_s=SUBMIT_S)
        assert other.returncode == 0, other.stderr
        (inputs / "epoch-3").touch()
        await_job(process, lambda: 4 in checkpoints_of(hadoop, "attempts"))
        [told] = [one for one in hadoop.applications() if one["id"] == application]
        assert told["preemptedResourceMB"] > 0
        [driver] = [one for name, one in hadoop.containers(application).items() if name.endswith("_01_000001")]
        for one in [driver, *driver.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
        for epoch in (4, 5):
            (inputs / f"epoch-{epoch}").touch()
        code, _, err = ended(process)
    first, second = (driver_log(hadoop, application, attempt) for attempt in (1, 2))
    assert code == 0, (err, second)
    begun_again = first.partition("the fit failed and starts again (1 of 2)")[2]
    # Its last line may be lost with it.
    assert "going on after epoch 3 of 6" in begun_again and set(epochs_in(begun_again)) <= {4}
    history = json.loads(second.splitlines()[-1])
    assert len(history["loss"]) == 6 and history["loss"][-1] < history["loss"][0]
    assert epochs_in(second) == [5, 6]
    assert "_SUCCESS" in hadoop.names("/attempts/fitted")


def epochs_in(said):
    """Returns the epochs that have ended, by the table that a fit prints."""
    return [int(epoch) for epoch in re.findall(r"^ *(\d+)/6 ", said, re.MULTILINE)]


URGENT = """
import time
from pyspark.sql import SparkSession

session = SparkSession.builder.getOrCreate()
assert session.range(0, 10, 1, 1).count() == 10
time.sleep(3)
session.stop()
"""


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


def test_jobs_when_a_container_takes_too_much_memory_then_the_next_resumes_and_when_all_is_killed_then_nothing_is_left(
    hadoop, inputs
):
    one = {"num-workers": 1, "epochs": 2, "checkpoint-path": f"{hadoop.hdfs}/hungry/checkpoints"}
    hungry = [*words_of(hadoop, "hungry", **one), "--callbacks", "net_of_user:Hungry"]
    resumed = ["--checkpoint-path", one["checkpoint-path"], "--trusted"]
    held = {**one, "epochs": 9, "checkpoint-path": f"{hadoop.hdfs}/killed/checkpoints"}
    killed = [*words_of(hadoop, "killed", **held), "--callbacks", "net_of_user:Killed"]
    (inputs / "jobs.json").write_text(json.dumps([["train", hungry], ["resume", resumed], ["train", killed]]))
    options = (*code_of(inputs), "--conf", "spark.executor.instances=1")
    with started(hadoop, SEVERAL, inputs / "jobs.json", "--together", options=options) as (process, application):
        await_job(process, lambda: 3 in checkpoints_of(hadoop, "killed"))
        assert in_containers(application)
        hadoop.kill_application(application)
        code, out, err = ended(process)
    await_state(lambda: in_containers(application), lambda left: not left, timeout_s=GONE_S)
    assert code == 0, err
    of_hungry, of_resumed, of_killed = json.loads(out.splitlines()[-1])
    assert (of_hungry[0], of_resumed[0], of_killed[0]) == (3, 0, 3), (out, err)
    [complaint] = [line for line in of_hungry[2].splitlines() if line.startswith("train.py: ")]
    assert "memory" in complaint and "spark.executor.memoryOverhead" in of_hungry[1] + of_hungry[2]
    assert len(json.loads(of_resumed[1].splitlines()[-1])["loss"]) == 2
    assert "_SUCCESS" in hadoop.names("/hungry/fitted")
    # Its executors' ends and the news of its own reach Spark in either order.
    assert re.search("the Spark job was cancelled: |ExecutorLostFailure", of_killed[1] + of_killed[2])
