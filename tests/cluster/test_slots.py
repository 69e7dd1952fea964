"""How many task slots an application has or will have, and whether a fit can run in them."""

from types import SimpleNamespace

from tables import every_case

from elephant.cluster import executors
from elephant.cluster.checks.session_checks import check_slots, check_some_slot
from elephant.cluster.executors import Executor, awaited_slots, patient, promised_slots, slots_of
from elephant.timeouts import Timeouts

LOCAL = {"spark.master": "local[2]"}
CLUSTER = {"spark.master": "spark://host:7077", "spark.task.cpus": "2"}


@every_case(
    ("master", "conf", "slots"),
    [
        ("local", {}, 0),
        ("local[*]", {}, 0),
        ("local[8,3]", {}, 0),
        ("local-cluster[2,1,1024]", {}, 2),
        ("local-cluster[2, 4, 1024]", {"spark.task.cpus": "2"}, 4),
        ("local-cluster[2,1,1024]", {"spark.task.cpus": "2"}, 0),
        ("yarn", {"spark.executor.instances": "3", "spark.executor.cores": "5", "spark.task.cpus": "2"}, 6),
        ("k8s://https://host", {"spark.executor.instances": "3"}, 3),
        ("spark://host:7077", {}, None),
    ],
)
def test_promised_slots_when_the_configuration_is_known_then_counts_whole_tasks(master, conf, slots):
    assert promised_slots(master, conf) == slots


def session_of(patch, **settings):
    """A session of a cluster with these settings, whose JVM nobody asks."""
    patch.setattr(executors, "session_settings", lambda session: session.settings)
    patch.setattr(executors, "setting", lambda session, name: session.settings.get(name))
    return SimpleNamespace(settings={f"spark.{name.replace('_', '.')}": value for name, value in settings.items()})


FOUR = {"executor_instances": "4"}


@every_case(
    ("settings", "given", "waits"),
    [
        ({"master": "k8s://https://host", **FOUR}, {}, (600.0, 600.0)),
        ({"master": "yarn", **FOUR}, {"executors_s": 5.0}, (600.0, 5.0)),
        ({"master": "yarn", **FOUR}, {"slots_s": 0}, (0.0, 600.0)),
        ({"master": "yarn", "dynamicAllocation_enabled": "true"}, {}, (600.0, 600.0)),
        # There will never be enough.
        ({"master": "yarn", "executor_instances": "2"}, {}, (30.0, 60.0)),
        ({"master": "yarn"}, {}, (30.0, 60.0)),
        ({"master": "spark://host:7077", **FOUR}, {}, (30.0, 60.0)),
    ],
)
def test_waits_when_a_cluster_manager_brings_what_it_has_promised_then_leave_time_for_machines(
    monkeypatch, settings, given, waits
):
    found = patient(session_of(monkeypatch, **settings), Timeouts(**given), wanted=4)
    assert (found.slot_patience_s, found.executor_patience_s) == waits


def test_slots_when_all_promised_executors_have_come_with_too_few_then_are_not_waited_for(monkeypatch):
    session, now = session_of(monkeypatch, master="yarn", **FOUR), [0.0]

    def sleep(seconds):
        now[0] += 1.0

    def running(session):
        # One that is lost is still listed at 50 s, and another one has come at 200 s.
        return "0123" if now[0] == 50.0 or now[0] >= 200.0 else "012"

    monkeypatch.setattr(executors, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(executors, "running_executors", running)
    # As where half of the executors have no device.
    monkeypatch.setattr(executors, "count_slots", lambda session, profile: 2)
    assert awaited_slots(session, 4, 600.0, lambda text: None) == 2 and now == [220.0]
    monkeypatch.setattr(executors, "count_slots", lambda session, profile: 4 if now[0] >= 201.0 else 3)
    now[0] = 0.0
    assert awaited_slots(session, 4, 600.0, lambda text: None) == 4 and now == [201.0]


@every_case(
    ("task_cpus", "resources", "slots"),
    [
        (1, {}, 12),
        (3, {}, 3),
        (9, {}, 0),
        (1, {"gpu": 1}, 3),
        (1, {"gpu": 2}, 1),
        (1, {"gpu": 0.5}, 6),
        # Two tasks share a device, and not two and a half.
        (1, {"gpu": 0.4}, 6),
        (4, {"gpu": 0.4}, 3),
        (1, {"fpga": 1}, 0),
    ],
)
def test_slots_of_executors_when_tasks_take_cores_and_devices_then_counts_the_scarcer(task_cpus, resources, slots):
    executors = [
        Executor(name="0", host="a", cores=8, resources={"gpu": ["0", "1"]}),
        Executor(name="1", host="b", cores=4, resources={"gpu": ["0"]}),
    ]
    assert slots_of(executors, task_cpus=task_cpus, resources=resources) == slots


@every_case(
    ("slots", "settings", "status", "text"),
    [
        (4, CLUSTER, "ok", "numWorkers=3: expected 3 task slots at the same time. Received: 4."),
        (3, CLUSTER, "ok", "Received: 3."),
        (2, CLUSTER, "failure", "Lower numWorkers to 2, or give the application more executors or cores"),
        (2, CLUSTER, "failure", "(spark.task.cpus is 2)."),
        (0, CLUSTER, "failure", "Received: 0. No executor runs: another application may hold the cluster's cores"),
        (0, {**CLUSTER, "spark.driver.host": "10.0.0.9"}, "failure", "may not reach the driver at 10.0.0.9"),
        (0, {**LOCAL, "spark.task.cpus": "4"}, "failure", "Received: 0. Start Spark with master local[12]."),
        (2, LOCAL, "failure", "Lower numWorkers to 2, or start Spark with master local[3]."),
        (None, {**LOCAL, "spark.task.cpus": "2"}, "failure", "Received: 1. Lower numWorkers to 1"),
        (None, {"spark.master": "local[4]"}, "ok", "Received: 4."),
        (None, {"spark.master": "local[*]"}, "unknown", "Spark's own check remains"),
        (None, {}, "unknown", "Spark's own check remains"),
    ],
)
def test_slots_of_ranks_when_checked_then_all_must_fit(slots, settings, status, text):
    found = check_slots("numWorkers", 3, slots, settings)
    assert found.status == status
    assert text in str(found)


def test_slots_of_ranks_when_they_take_devices_then_these_are_named():
    found = check_slots("numWorkers", 3, 2, CLUSTER, resource="1 gpu")
    assert "expected 3 task slots at the same time, each with 1 gpu. Received: 2." in str(found)
    assert "more executors or cores or gpus" in found.remedy


@every_case(
    ("slots", "servers", "status", "text"),
    [
        (5, 1, "ok", ""),
        (4, 1, "warning", "4 workers on 3 task slots: they take turns, each with all of its epochs."),
        (1, 0, "warning", "4 workers on 1 task slots: they take turns"),
        (1, 1, "failure", "parameterServers=1 with serverPlacement='executors': expected at least 2 task slots"),
        (0, 0, "failure", "expected at least one task slot. Received: none. No executor runs"),
        (None, 1, "unknown", "a session that does not tell"),
    ],
)
def test_slots_of_asynchronous_workers_when_checked_then_one_must_fit_beside_the_servers(slots, servers, status, text):
    found = check_some_slot(4, slots, {"spark.master": "yarn"}, servers=servers)
    assert found.status == status
    assert text in str(found)
