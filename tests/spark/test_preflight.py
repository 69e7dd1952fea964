"""The pre-flight of a fit, and doctor, in a session whose executors are processes of their own."""

import importlib.util
import re
import threading
from dataclasses import replace

import keras
import pytest
from keras_reference import regression_model

from elephant import KerasEstimator
from elephant.cli import doctor
from elephant.cli.doctor import diagnose
from elephant.cluster import reachability
from elephant.cluster.checks import preflight
from elephant.cluster.checks.executor_facts import ExecutorReport, known_executors
from elephant.cluster.checks.preflight import Requirements, preflight_checked, reports_waiting, run_checks
from elephant.cluster.executors import running_executors
from elephant.cluster.row_source import SINCE_4
from elephant.cluster.session import session_settings
from elephant.cluster.spark_job import described
from elephant.errors import ClusterError, ConfigurationError

WAIT_S = 60.0

# The first job of the session is one of these tests', and starts Python on three executors.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine is no reason for an executor not to have answered."""
    monkeypatch.setattr(preflight, "ANSWER_S", 300.0)


def number_of_jobs(spark):
    return len(spark.sparkContext.statusTracker().getJobIdsForGroup())


def with_settings(monkeypatch, module, **more):
    """Lets the session seem to have other settings, which a running one cannot be given."""
    settings = module.session_settings
    named = {name.replace("_", "."): value for name, value in more.items()}
    monkeypatch.setattr(module, "session_settings", lambda session: {**settings(session), **named})


def statuses(check_results):
    return {found.name: found.status for found in check_results if found.status != "ok"}


@pytest.mark.skipif(not SINCE_4, reason="PySpark 3.5 does not list the settings of a running session")
def test_settings_when_one_is_set_in_the_running_session_then_are_those_that_spark_lists(spark):
    odd = 'two\nlines, "quoted" = {ü}'
    spark.conf.set("spark.elephant.odd", odd)
    try:
        settings = session_settings(spark)
        assert settings["spark.elephant.odd"] == odd
        assert settings == {
            **dict(spark.sparkContext.getConf().getAll()),
            **spark.conf.getAll,
            **{"spark.version": spark.version},
        }
    finally:
        spark.conf.unset("spark.elephant.odd")
    assert "spark.elephant.odd" not in session_settings(spark)


def test_preflight_when_several_things_are_missing_then_one_error_names_them_all(spark, monkeypatch):
    with_settings(monkeypatch, preflight, spark_ssl_enabled="true")
    find, no_keys = importlib.util.find_spec, "cryptography"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == no_keys else find(name, *more))
    ask = known_executors.look

    def other_keras(*args, **options):
        look = ask(*args, **options)
        return ExecutorReport(
            facts=[replace(facts, packages={**facts.packages, "keras": "3.0.0"}) for facts in look.facts]
        )

    monkeypatch.setattr(known_executors, "look", other_keras)
    monkeypatch.setattr(known_executors, "known", lambda session: None)
    with (
        pytest.raises(ClusterError) as failure,
        preflight_checked(spark, Requirements(num_workers=9, backend="tensorflow"), print),
    ):
        pytest.fail("the fit was begun")
    lines = str(failure.value).splitlines()
    assert lines[0] == "the Spark application lacks 3 things that this fit needs:"
    assert lines[1].startswith("1. encryption: expected the package cryptography on the driver")
    assert lines[2].startswith("2. numWorkers=9: expected 9 task slots at the same time. Received: 3.")
    assert lines[3].startswith("3. Keras: expected")
    # Which executors there are depends on the tests before: some of them kill one.
    assert re.search(r"Received: 3\.0\.0 on executor \d+ on", lines[3])


# On the workers, where it looks at batches, and else on the driver.
@pytest.mark.parametrize(
    ("mode", "frequency", "error"),
    [("synchronous", 1, ClusterError), ("synchronous", "epoch", ConfigurationError)]
    + [("asynchronous", "epoch", ConfigurationError)],
)
def test_fit_when_a_callback_needs_what_is_not_there_then_says_so_before_anything_begins(
    spark, monkeypatch, tmp_path, mode, frequency, error
):
    def without_board(look):
        packages = [
            {name: version for name, version in one.packages.items() if name != "tensorboard"} for one in look.facts
        ]
        return ExecutorReport(
            facts=[replace(one, packages=kept) for one, kept in zip(look.facts, packages, strict=True)]
        )

    ask, find = known_executors.look, importlib.util.find_spec
    monkeypatch.setattr(known_executors, "look", lambda *args, **options: without_board(ask(*args, **options)))
    monkeypatch.setattr(known_executors, "known", lambda session: None)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "tensorboard" else find(name, *more)
    )
    monkeypatch.setattr("elephant.spark.fit.run_ranks", lambda *args, **options: pytest.fail("the fit was begun"))
    board = keras.callbacks.TensorBoard(str(tmp_path / "logs"), update_freq=frequency)
    estimator = KerasEstimator(model=regression_model("sgd"), mode=mode, callbacks=[board], verbose=0)
    with pytest.raises(error, match="expected tensorboard"):
        estimator.fit(spark.createDataFrame([([1.0] * 6, 1.0)], "features array<float>, label float"))


def test_preflight_when_the_executors_are_the_same_then_a_second_one_runs_no_job(spark, monkeypatch):
    needs, notes = Requirements(num_workers=3, backend="tensorflow"), []
    first = run_checks(spark, needs, notes.append)
    # What is seen of a machine that is nearly full would be a warning, which is no news here.
    assert set(statuses(first.check_results)) <= {"disk"}
    assert {found.name for found in first.check_results} >= {
        "numWorkers=3",
        "Python",
        "elephant",
        "Keras",
        "tensorflow",
    }
    assert first.slots == 3
    known = known_executors.known(spark)
    assert [facts.executor for facts in known.facts] == [one.name for one in running_executors(spark)]
    jobs = number_of_jobs(spark)
    assert run_checks(spark, needs, notes.append) == first
    assert number_of_jobs(spark) == jobs
    # A full disk, say, is looked at again: somebody may have made room.
    monkeypatch.setattr("elephant.cluster.checks.executor_checks.FLOOR_BYTES", 1 << 60)
    assert statuses(run_checks(spark, needs, notes.append).check_results)["disk"] == "failure"
    assert number_of_jobs(spark) == jobs + 1
    assert notes == []


def test_fit_when_another_job_holds_its_slots_then_says_so_again_and_again(spark, tmp_path):
    held, release, lines = tmp_path / "held", tmp_path / "release", []

    def hold(batches):
        import time

        for _ in batches:
            pass
        held.touch()
        while not release.exists():
            time.sleep(0.05)
        return iter(())

    def note(text):
        lines.append(text)
        if len(lines) == 2:
            release.touch()

    def ends(batches):
        for _ in batches:
            pass
        return iter(())

    def run():
        with described(spark, "Tuesday's report"):
            spark.range(0, 1, 1, 1).mapInArrow(hold, "x int").collect()

    holder = threading.Thread(target=run)
    holder.start()
    try:
        started = threading.Event()
        while not held.exists() and holder.is_alive():
            started.wait(0.05)
        with reports_waiting(spark, needed=3, slots=3, note=note, repeat_s=0.2):
            spark.range(0, 3, 1, 3).mapInArrow(ends, "x int", barrier=True).collect()
    finally:
        release.touch()
        holder.join(WAIT_S)
    assert len(lines) >= 2
    assert lines[0].startswith("waiting for 3 task slots at the same time: 2 of 3 are free, job ")
    assert lines[0].endswith(", Tuesday's report)")
    assert "holds 1 (stage" in lines[0]


def test_doctor_when_asked_in_a_notebook_then_finds_nothing_wrong(spark):
    check_results = diagnose(spark, num_workers=3)
    assert set(statuses(check_results)) <= {"disk", "pandas", "/dev/shm", "this machine", "open files"}
    assert not any(found.failed for found in check_results)
    received = {found.name: found.received for found in check_results}
    assert received["way to the driver"].startswith("3 of 3 executors reach 127.0.0.1:")
    assert received["trial run"].endswith("s for 3 ranks")


@pytest.mark.slow("a second doctor; tests/cli holds what it says")
def test_doctor_when_a_port_is_blocked_and_executors_come_and_go_then_says_what_to_do(spark, monkeypatch):
    class Blocked(reachability.ReachabilityProbe):
        def __init__(self, *given):
            super().__init__(*given)
            self._server.close()

    monkeypatch.setattr(reachability, "ReachabilityProbe", Blocked)
    with_settings(monkeypatch, doctor, spark_dynamicAllocation_enabled="true")
    check_results = diagnose(spark, num_workers=3, timeout_s=WAIT_S)
    failed = {found.name: found for found in check_results if found.failed}
    assert set(failed) == {"dynamic allocation", "way to the driver"}
    assert re.search(r"executor \d+ on", failed["way to the driver"].received)
    assert "ConnectionRefusedError" in failed["way to the driver"].received
    assert "Set spark.driver.host" in failed["way to the driver"].remedy
    assert "spark.executor.instances=3" in failed["dynamic allocation"].remedy
    # It would only fail, and wait long for it.
    assert "trial run" not in {found.name for found in check_results}
    # So would a fit, which asks again next time.
    known_executors.forget()
    with pytest.raises(ClusterError, match="executors that reach the driver at .* ConnectionRefusedError") as refused:
        with preflight_checked(spark, Requirements(num_workers=3), print):
            pass
    assert "Set spark.driver.host" in str(refused.value) and refused.value.topic == "a-port-that-is-blocked"
    monkeypatch.undo()
    known_executors.forget()
    again = run_checks(spark, Requirements(num_workers=3), print)
    assert not [found for found in again.check_results if found.failed]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_workers": 0}, "num_workers: expected an integer of at least 1"),
        ({"mode": "turbo"}, "mode: expected one of"),
        ({"timeout_s": 0}, "timeout_s: expected more than 0 seconds"),
    ],
)
def test_doctor_when_its_arguments_are_wrong_then_refuses_them_before_any_job(options, text):
    with pytest.raises(ConfigurationError, match=text):
        diagnose(None, **options)
