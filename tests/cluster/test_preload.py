"""Preload of Keras: once for each application, in the background, and only where a fit would find it."""

import threading

import pytest
from tables import every_case

from elephant.cluster import preload
from elephant.cluster.executors import Executor
from elephant.cluster.warm_workers import WarmWorkers

ONE, TWO = (Executor(name=name, host="h", cores=4) for name in "01")
WAIT_S = 10


class Context:
    """A context of Spark."""


class Session:
    """A session of Spark that has some settings."""

    version = "4.0.0"

    def __init__(self, **settings):
        self.conf = {f"spark.{name.replace('__', '.')}": value for name, value in settings.items()}


class Remote(Session):
    """A session of Spark Connect."""


Remote.__module__ = "pyspark.sql.connect.session"


@pytest.fixture
def application(monkeypatch):
    """An application with two executors: its context, the sessions asked for, and the looks at its executors."""
    found = {"context": Context(), "asked": [], "looks": [], "slots": 8, "fails": False}
    # One comes after the other.
    found["executors"] = [[], [ONE]] + [[ONE, TWO]] * 10

    def look(session, *, tasks, timeout_s, preload):
        if found["fails"]:
            raise RuntimeError("no JVM")
        found["looks"].append((tasks, preload))

    monkeypatch.setattr(preload, "active_context", lambda: found["context"])
    monkeypatch.setattr(preload, "running_executors", lambda session: found["executors"].pop(0))
    monkeypatch.setattr(preload, "expected_slots", lambda session: found["slots"])
    monkeypatch.setattr(preload, "_EXECUTORS_S", 0.3)
    monkeypatch.setattr(preload, "jvm_context", lambda session: found["context"])
    monkeypatch.setattr(preload, "has_own_properties", lambda context: False)
    monkeypatch.setattr(preload, "session_settings", lambda session: dict(session.conf))
    monkeypatch.setattr(preload.known_executors, "look", look)
    yield found
    join()


def begin(application, session):
    def session_of():
        application["asked"].append(session)
        return session

    preload.begin_preload(session_of, lambda limits, spares: (limits, spares))
    join()


def join():
    for thread in threading.enumerate():
        if thread.name == "elephant-preload":
            thread.join(WAIT_S)


def test_preload_when_two_models_are_made_then_is_begun_once_and_again_in_the_next_application(application):
    for _ in range(2):
        begin(application, Session())
    assert application["looks"] == [(2, (WarmWorkers(limit=2), 2))] and len(application["asked"]) == 1
    application["context"] = Context()
    begin(application, Session(task__cpus="4"))
    assert application["looks"][1:] == [(2, (WarmWorkers(limit=2), 1))]


@every_case(
    ("session", "changes"),
    [
        (Session(), {"context": None}),
        (None, {}),
        (Remote(), {}),
        (Session(), {"executors": [[]] * 10}),
        (Session(elephant__warmWorkers="0"), {}),
        (Session(elephant__warmWorkers="few"), {}),
        # Of executors that come and go with tasks, nobody knows how many there will be.
        (Session(), {"slots": None}),
        (Session(), {"fails": True}),
    ],
)
def test_preload_when_nothing_would_be_found_or_it_fails_then_nothing_is_begun_and_nothing_raised(
    application, monkeypatch, session, changes
):
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    application.update(changes)
    begin(application, session)
    assert application["looks"] == told == []


def test_fit_when_the_preload_takes_long_then_waits_a_moment_and_not_again(application, monkeypatch):
    begun, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(preload.known_executors, "look", lambda *session, **options: begun.set() or ended.wait(WAIT_S))
    preload.begin_preload(Session, lambda limits, spares: None)
    assert begun.wait(WAIT_S)
    # The second time, it would wait for longer than a test may take.
    for wait_s in (0.2, 10_000.0):
        monkeypatch.setattr(preload, "_AWAIT_S", wait_s)
        preload.await_preload()
    assert not ended.is_set()
    (thread,) = [one for one in threading.enumerate() if one.name == "elephant-preload"]
    ended.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_fit_when_the_preload_still_waits_for_executors_then_takes_its_place(application, monkeypatch):
    waiting, goes_on = threading.Event(), threading.Event()

    def executors(session):
        waiting.set()
        goes_on.wait(WAIT_S)
        return [ONE, TWO]

    monkeypatch.setattr(preload, "running_executors", executors)
    preload.begin_preload(Session, lambda limits, spares: None)
    assert waiting.wait(WAIT_S)
    preload.await_preload()
    goes_on.set()
    join()
    assert application["looks"] == []


def test_preload_when_the_driver_was_forked_then_leaves_its_connection_alone(application, monkeypatch):
    monkeypatch.setattr(preload.os, "getpid", lambda: preload._driver + 1)
    begin(application, Session())
    assert application["asked"] == application["looks"] == []
