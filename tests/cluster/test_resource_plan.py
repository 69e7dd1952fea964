"""The truth table of the resource plan: Spark's settings and what a fit asks for, against what comes of the two."""

import re
from itertools import product

import numpy as np
import pytest
from tables import every_case

from elephant.cluster import gpu_plan
from elephant.cluster.executors import TaskProfile
from elephant.cluster.gpu_plan import HOSTS, NONE, SPARK, ResourceRequest, plan, prediction_profile, slots_per_executor
from elephant.cluster.warm_workers import WarmWorkers, warm_workers
from elephant.config import Timeouts
from elephant.errors import ClusterError, ConfigurationError

LOCALS = ("local", "local[4]", "local[*]", "local[*, 4]")
STANDALONE = ("local-cluster[2,4,1024]", "spark://host:7077", "spark://a:7077,b:7077")
MANAGED = ("yarn", "k8s://https://host:6443")
CLUSTERS = STANDALONE + MANAGED
HELD, ASKED = "spark.executor.resource.gpu.amount", "spark.task.resource.gpu.amount"


def settings(master, version="4.3.0", **more):
    conf = {"spark.version": version, "spark.executor.cores": "4", "spark.task.cpus": "1"}
    if master is not None:
        conf["spark.master"] = master
    return {**conf, **{name: str(value) for name, value in more.items() if value is not None}}


def gpus(held=None, asked=None):
    return {HELD: held, ASKED: asked}


def others_than(expected, made):
    """Returns the plans, by what they were made of, that are not as expected."""
    return {made_of: plan for made_of, plan in made.items() if plan != expected}


def not_refused(pattern, attempts):
    """Returns what came of the attempts, (settings, request) by a name, that no ClusterError of this text refused."""
    outcomes = {name: outcome_of(*attempt) for name, attempt in attempts.items()}
    return {
        name: outcome
        for name, outcome in outcomes.items()
        if not (isinstance(outcome, ClusterError) and re.search(pattern, str(outcome)))
    }


def outcome_of(conf, request):
    try:
        return plan(conf, request)
    except ClusterError as error:
        return error


# Executors hold, tasks ask for, workers want: where the devices come from, and what the stage asks for by itself.
WITH_PROFILES = [
    (None, None, 1, HOSTS, None),
    (1, None, 1, SPARK, 1),
    (1, 1, 1, SPARK, None),
    (1, "1.0", 1, SPARK, None),
    (1, 0, 1, SPARK, 1),
    (1, 0.25, 1, SPARK, 1),
    (1, 0.75, 1, SPARK, None),
    (2, 0.5, 1, SPARK, 1),
    (2, 1, 1, SPARK, None),
    (2, 2, 1, SPARK, 1),
    (2, None, 2, SPARK, 2),
    (2, 0.5, 2, SPARK, 2),
    (2, 1, 2, SPARK, 2),
    (2, 2, 2, SPARK, None),
    (4, 2, 3, SPARK, 3),
    (4, 4, 2, SPARK, 2),
]


@pytest.mark.parametrize("use_gpu", [True, "auto"])
@pytest.mark.parametrize(("held", "asked", "wanted", "devices", "amount"), WITH_PROFILES)
def test_plan_where_stages_may_ask_for_devices_gives_each_rank_a_whole_one(
    use_gpu, held, asked, wanted, devices, amount
):
    request = ResourceRequest(num_workers=2, use_gpu=use_gpu, gpus_per_worker=wanted)
    profile = None if amount is None else TaskProfile(cpus=1, resource="gpu", amount=amount)
    made = {}
    for master, version in product(CLUSTERS, ["4.0.0", "4.3.0", "5.0.0"]):
        found = plan(settings(master, version, **gpus(held, asked)), request)
        made[master, version] = (found.devices, found.required, found.profile, found.world_size, found.slots_needed)
    assert not (wrong := others_than((devices, use_gpu is True, profile, 2 * wanted, 2), made)), wrong


WHOLE_OR_NOTHING = [case for case in WITH_PROFILES if case[1] is None or float(case[1]) in (0, 1, 2, 4)]


@every_case(("held", "asked", "wanted", "devices", "amount"), WHOLE_OR_NOTHING)
def test_plan_before_spark_4_gives_stages_whole_devices_that_are_not_divided(held, asked, wanted, devices, amount):
    made = {}
    for master, version in product(CLUSTERS, ["3.5.1", "3.5.9"]):
        found = plan(settings(master, version, **gpus(held, asked)), ResourceRequest(gpus_per_worker=wanted))
        made[master, version] = (found.devices, found.profile and found.profile.amount)
    assert not (wrong := others_than((devices, amount), made)), wrong


@pytest.mark.parametrize(("asked", "wanted"), [(0.5, 1), (0.25, 1), (0.5, 2)])
def test_plan_before_spark_4_refuses_devices_that_are_divided_and_its_remedies_work(asked, wanted):
    request = ResourceRequest(num_workers=2, gpus_per_worker=wanted)
    attempts = {master: (settings(master, "3.5.9", **gpus(2, asked)), request) for master in CLUSTERS}
    assert not (wrong := not_refused(f"Set {re.escape(ASKED)}={wanted} .*Without {re.escape(ASKED)}, the", attempts)), (
        wrong
    )
    asking = {master: plan(settings(master, "3.5.9", **gpus(2, wanted)), request).profile for master in CLUSTERS}
    assert not (wrong := others_than(None, asking)), wrong
    silent = {master: plan(settings(master, "3.5.9", **gpus(2)), request).profile.amount for master in CLUSTERS}
    assert not (wrong := others_than(wanted, silent)), wrong


@pytest.mark.parametrize(("amount", "held"), [("1e-320", 1), ("1e-9", 2), ("0.001", 1)])
def test_plan_of_the_smallest_fractions_is_refused_like_others(amount, held):
    with pytest.raises(ClusterError, match="expected whole GPUs"):
        plan(settings("spark://h:7077", "3.5.9", **gpus(held, amount)), ResourceRequest(num_workers=2))


def test_plan_of_settings_made_by_hand_takes_numbers_and_booleans():
    conf = {"spark.master": " yarn ", "spark.executor.cores": 4, "spark.task.cpus": 1.0, HELD: 2, ASKED: 1}
    assert plan(conf, ResourceRequest()) == plan(settings("yarn", **gpus(2, 1)), ResourceRequest())
    with pytest.raises(ClusterError, match="dynamicAllocation"):
        plan({**conf, "spark.dynamicAllocation.enabled": True}, ResourceRequest())
    assert plan({**conf, ASKED: None}, ResourceRequest()).profile.amount == 1
    assert plan(conf, ResourceRequest(num_workers=np.int64(3))).slots_needed == 3


@every_case(("name", "value"), [
    ("num_workers", 0),
    ("gpus_per_worker", 0),
    ("gpus_per_worker", True),
    ("use_gpu", "yes"),
    ("use_gpu", 1),
    ("gpu_resource", " "),
])  # fmt: skip
def test_request_of_something_else_is_refused(name, value):
    with pytest.raises(ConfigurationError, match=f"{name}: expected .*Received: "):
        ResourceRequest(**{name: value})


@pytest.mark.parametrize("held", [None, 1, 4])
def test_plan_in_local_mode_shares_out_what_the_host_has(held):
    made = {}
    for master, version, dynamic in product(LOCALS, ["3.5.0", "4.0.0", "4.3.0"], ["true", "false"]):
        conf = settings(master, version, **gpus(held), **{"spark.dynamicAllocation.enabled": dynamic})
        found = plan(conf, ResourceRequest(num_workers=2, gpus_per_worker=2))
        made[master, version, dynamic] = (found.devices, found.profile)
    assert not (wrong := others_than((HOSTS, None), made)), wrong


@pytest.mark.parametrize("amount", ["1", "0.25", "2"])
@pytest.mark.parametrize("resource", ["gpu", "fpga"])
def test_plan_in_local_mode_with_task_resources_refuses_what_hangs(amount, resource):
    name = f"spark.task.resource.{resource}.amount"
    attempts = {
        (master, use_gpu): (settings(master, **{name: amount}), ResourceRequest(use_gpu=use_gpu))
        for master, use_gpu in product(LOCALS, [True, False, "auto"])
    }
    pattern = f"{re.escape(name)}: expected no such setting with master local.*Leave it"
    assert not (wrong := not_refused(pattern, attempts)), wrong


def test_plan_in_local_mode_with_task_resources_of_zero_goes_on():
    assert plan(settings("local[2]", **gpus(asked=0)), ResourceRequest()).devices == HOSTS


@pytest.mark.parametrize("masters", [LOCALS, (*CLUSTERS, None)], ids=["local", "clusters"])
@pytest.mark.parametrize(("held", "asked"), [(None, None), (1, None), (2, 0.5), (2, 1)])
def test_plan_without_gpus_asks_for_nothing(masters, held, asked):
    asked = None if masters is LOCALS else asked
    made = {}
    for master in masters:
        found = plan(settings(master, **gpus(held, asked)), ResourceRequest(use_gpu=False))
        made[master] = (found.devices, found.profile, found.required, bool(found.notes))
    assert not (wrong := others_than((NONE, None, False, bool(asked)), made)), wrong


def test_plan_of_several_gpus_without_gpus_is_refused():
    with pytest.raises(ConfigurationError, match=r"gpusPerWorker: expected useGpu=True or 'auto'"):
        plan(settings("yarn"), ResourceRequest(use_gpu=False, gpus_per_worker=2))


@pytest.mark.parametrize(("held", "wanted"), [(1, 2), (2, 4)])
@pytest.mark.parametrize("asked", [None, 0.5, 1])
def test_plan_of_more_devices_than_executors_hold_is_refused(held, wanted, asked):
    attempts = {
        (master, use_gpu): (
            settings(master, **gpus(held, asked)),
            ResourceRequest(use_gpu=use_gpu, gpus_per_worker=wanted),
        )
        for master, use_gpu in product(CLUSTERS, [True, "auto"])
    }
    text = rf"gpusPerWorker={wanted}: expected spark\.executor\.resource\.gpu\.amount of at least {wanted}"
    assert not (wrong := not_refused(text, attempts)), wrong


# Where stages cannot ask: managers that had not learned it.
OBSTACLES = [
    *((master, "3.5.0") for master in MANAGED),
    *((master, "3.3.2") for master in STANDALONE),
    ("mesos://host:5050", "3.5.1"),
    (None, "3.5.1"),
]


@pytest.mark.parametrize(("master", "version"), OBSTACLES)
class TestWithoutProfiles:
    def test_plan_takes_whole_devices_that_tasks_get(self, master, version):
        for held, asked, wanted in ((1, 1, 1), (4, 2, 2)):
            request = ResourceRequest(num_workers=2, gpus_per_worker=wanted)
            made = plan(settings(master, version, **gpus(held, asked)), request)
            assert (made.devices, made.profile, made.notes) == (SPARK, None, ())

    def test_plan_takes_the_first_of_more_devices_and_says_what_is_wasted(self, master, version):
        made = plan(settings(master, version, **gpus(4, 2)), ResourceRequest(num_workers=2))
        assert (made.devices, made.profile) == (SPARK, None)
        assert re.search(r"holds 2 GPUs and uses 1. Set spark\.task\.resource\.gpu\.amount=1", made.notes[0])

    def test_plan_shares_out_what_tasks_do_not_get(self, master, version):
        made = plan(settings(master, version, **gpus(1)), ResourceRequest(use_gpu=True))
        assert (made.devices, made.profile) == (HOSTS, None)
        assert "Set spark.task.resource.gpu.amount=1" in made.notes[0]

    @pytest.mark.parametrize("asked", [0.25, 0.5])
    def test_plan_refuses_fractions_that_several_ranks_would_share(self, master, version, asked):
        conf = settings(master, version, **gpus(1, asked))
        attempts = {use: (conf, ResourceRequest(num_workers=2, use_gpu=use)) for use in (True, "auto")}
        assert not (
            wrong := not_refused(rf"amount={asked}: expected whole GPUs.*Set spark\.task.*amount=1", attempts)
        ), wrong

    def test_plan_takes_fractions_that_nothing_shares(self, master, version):
        conf = settings(master, version, **gpus(1, 0.5))
        assert plan(conf, ResourceRequest(num_workers=1)).devices == SPARK
        one_task = {**conf, "spark.executor.cores": "2", "spark.task.cpus": "2"}
        assert plan(one_task, ResourceRequest(num_workers=4)).devices == SPARK

    @pytest.mark.parametrize("asked", [0.5, 1])
    def test_plan_refuses_fewer_devices_than_wanted(self, master, version, asked):
        with pytest.raises(ClusterError, match=r"gpusPerWorker=2: expected tasks of 2 GPUs.*Set spark\.task.*amount=2"):
            plan(settings(master, version, **gpus(2, asked)), ResourceRequest(gpus_per_worker=2))


@pytest.mark.parametrize("use_gpu", [True, False, "auto"])
def test_plan_of_ranks_at_the_same_time_with_dynamic_allocation_is_refused(use_gpu):
    dynamic = {"spark.dynamicAllocation.enabled": "true"}
    attempts = {m: (settings(m, **gpus(1, 1), **dynamic), ResourceRequest(use_gpu=use_gpu)) for m in CLUSTERS}
    assert not (wrong := not_refused(r"expected spark\.dynamicAllocation\.enabled=false", attempts)), wrong


@pytest.mark.parametrize(("held", "asked", "amount"), [(None, None, None), (1, 1, None), (1, None, 1), (2, 0.5, 1)])
def test_plan_of_workers_at_their_own_pace_with_dynamic_allocation_starts_executors(held, asked, amount):
    # Spark refuses a profile of tasks alone, for whose executors nobody has asked for devices.
    of_executors = {"held": held, "script": "/find", "vendor": "nvidia.com"}
    profile = None if amount is None else TaskProfile(cpus=1, resource="gpu", amount=amount, **of_executors)
    made = {}
    for master, version in product(CLUSTERS, ["3.5.0", "3.5.9", "4.3.0"]):
        conf = settings(master, version, **gpus(held, asked), **{"spark.dynamicAllocation.enabled": "true"})
        conf |= {HELD.replace("amount", "discoveryScript"): "/find", HELD.replace("amount", "vendor"): "nvidia.com"}
        found = plan(conf, ResourceRequest(synchronous=False))
        is_said = any(f"executors that there are, set {ASKED}=1" in note for note in found.notes)
        made[master, version] = (found.profile, is_said)
    assert not (wrong := others_than((profile, amount is not None), made)), wrong


@every_case(("held", "asked", "devices", "amount"), [
    (None, None, HOSTS, None),
    (None, 1, SPARK, None),
    (1, None, SPARK, 1),
    (1, 0.5, SPARK, 1),
    (None, 2, SPARK, None),
])  # fmt: skip
def test_plan_where_no_master_is_known_takes_what_is_said(held, asked, devices, amount):
    conf = {name: str(value) for name, value in gpus(held, asked).items() if value is not None}
    made = plan({"spark.version": "4.0.0", **conf}, ResourceRequest())
    assert (made.devices, made.profile and made.profile.amount) == (devices, amount)


def test_plan_of_nothing_known_at_all_shares_out_what_hosts_have():
    made = plan({}, ResourceRequest(num_workers=3))
    assert (made.devices, made.profile, made.slots_needed, made.slots_per_executor) == (HOSTS, None, 3, None)


def test_plan_of_another_resource_reads_its_settings_only():
    conf = settings("yarn", **gpus(1, 1))
    assert plan(conf, ResourceRequest(gpu_resource="mig")).devices == HOSTS
    conf["spark.executor.resource.mig.amount"] = "2"
    made = plan(conf, ResourceRequest(gpu_resource="mig", gpus_per_worker=2))
    assert made.profile == TaskProfile(cpus=1, resource="mig", amount=2)


def test_plan_with_gpus_demanded_that_spark_does_not_schedule_says_so():
    made = plan(settings("spark://host:7077"), ResourceRequest(use_gpu=True))
    assert made.notes[0].startswith("spark.executor.resource.gpu.amount is not set")
    assert plan(settings("spark://host:7077"), ResourceRequest()).notes == ()
    of_others = settings("spark://host:7077", **{"spark.executor.resource.GPU.amount": "1"})
    assert plan(of_others, ResourceRequest(use_gpu=True)).notes[0].endswith("set spark.elephant.gpuResource to GPU")


@pytest.mark.parametrize("name", [HELD, ASKED, "spark.task.cpus", "spark.executor.cores"])
@pytest.mark.parametrize("value", ["one", "-1", "nan"])
def test_plan_with_a_setting_that_is_no_number_names_it(name, value):
    with pytest.raises(ConfigurationError, match=f"{re.escape(name)}: expected a number"):
        plan(settings("yarn", **{name: value}), ResourceRequest())


@every_case(
    ("master", "more", "slots"),
    [
        ("local-cluster[2,4,1024]", {"spark.executor.cores": "", **gpus(2, None)}, 2),
        ("local-cluster[2,4,1024]", {"spark.executor.cores": "", **gpus()}, 4),
        ("spark://host:7077", {"spark.executor.cores": "", **gpus(2, None)}, None),
        ("yarn", {"spark.executor.cores": "", **gpus(2, None)}, 1),
        ("yarn", {"spark.executor.cores": "8", "spark.task.cpus": "2", **gpus(2, None)}, 2),
        ("yarn", {"spark.executor.cores": "8", "spark.task.cpus": "4", **gpus(4, 1)}, 2),
        ("k8s://host", {"spark.executor.cores": "8", **gpus(3, 1)}, 3),
    ],
)
def test_plan_counts_slots_by_cores_and_devices(master, more, slots):
    assert plan(settings(master, **more), ResourceRequest()).slots_per_executor == slots


def test_plan_without_room_for_a_task_is_refused():
    conf = settings("yarn", **{"spark.executor.cores": "2", "spark.task.cpus": "4"})
    with pytest.raises(ClusterError, match=r"room for a task: spark\.task\.cpus is 4"):
        plan(conf, ResourceRequest())


@pytest.mark.parametrize(("master", "slots"), [("local[4]", 2), ("local", 0), ("local[*]", None), ("local[5, 2]", 2)])
def test_plan_in_local_mode_counts_the_cores_of_its_master(master, slots):
    conf = settings(master, **{"spark.executor.cores": "1", "spark.task.cpus": "2"})
    if slots == 0:
        with pytest.raises(ClusterError, match=r"room for a task: spark\.task\.cpus is 2.*1 cores \(spark\.master\)"):
            plan(conf, ResourceRequest())
    else:
        assert plan(conf, ResourceRequest()).slots_per_executor == slots


def test_profile_asks_for_as_many_cores_as_tasks_have():
    conf = settings("yarn", **{"spark.task.cpus": "2", "spark.executor.cores": "8"}, **gpus(1))
    assert plan(conf, ResourceRequest()).profile == TaskProfile(cpus=2, resource="gpu", amount=1)


@every_case(
    ("cores", "task_cpus", "held", "amount", "slots"),
    [
        (4, 1, None, 0, 4),
        (4, 3, None, 0, 1),
        (4, 1, 1, 1, 1),
        (4, 1, 1, 0.25, 4),
        (8, 1, 1, 0.25, 4),
        (8, 1, 2, 0.5, 4),
        (8, 1, 3, 0.3, 8),
        (8, 1, 4, 2, 2),
        (8, 1, 5, 2, 2),
        (None, 1, 2, 1, None),
    ],
)
def test_slots_per_executor_are_what_cores_and_devices_allow(cores, task_cpus, held, amount, slots):
    assert slots_per_executor(cores=cores, task_cpus=task_cpus, held=held, amount=amount) == slots


class Session:
    """A session of Spark that has some settings."""

    def __init__(self, **settings):
        self.conf = {f"spark.elephant.{name}": value for name, value in settings.items()}


def test_request_when_the_cluster_has_a_name_of_its_own_for_gpus_then_asks_for_these():
    assert ResourceRequest().named_in(Session(gpuResource="mig")).gpu_resource == "mig"
    assert ResourceRequest().named_in(Session()).gpu_resource == "gpu"
    assert ResourceRequest(gpu_resource="card").named_in(Session(gpuResource="mig")).gpu_resource == "card"


@every_case(
    ("more", "profile"),
    [
        ({HELD: 2}, TaskProfile(cpus=1, resource="gpu", amount=1)),
        ({HELD: 2, "spark.task.cpus": 2}, TaskProfile(cpus=2, resource="gpu", amount=1)),
        ({HELD: 2, ASKED: 1}, None),
        ({HELD: 1, ASKED: 0.25}, None),
        ({HELD: 2, ASKED: 2}, None),
        ({HELD: 2, "spark.dynamicAllocation.enabled": "true"}, TaskProfile(cpus=1, resource="gpu", amount=1, held=2)),
    ],
)
def test_prediction_profile_when_tasks_have_no_gpu_then_asks_for_one_each(monkeypatch, more, profile):
    conf = settings("yarn", **more)
    monkeypatch.setattr(gpu_plan, "scheduling_settings", lambda session, resource: conf)
    assert prediction_profile(Session()) == profile


@every_case(
    ("master", "version", "more", "named"),
    [
        ("local[4]", "4.3.0", {}, "on each, with master local"),
        ("yarn", "4.3.0", {}, f"executors with GPUs \\({HELD}\\)"),
        ("yarn", "3.4.4", {HELD: 2}, ASKED),
    ],
)
def test_prediction_profile_where_no_stage_can_ask_is_refused(monkeypatch, master, version, more, named):
    conf = settings(master, version, **more)
    monkeypatch.setattr(gpu_plan, "scheduling_settings", lambda session, resource: conf)
    with pytest.raises(ClusterError, match=f"inferenceUseGpu=True: .*{named}"):
        prediction_profile(Session())


def test_warm_workers_when_the_cluster_sets_them_then_are_so_many_and_two_otherwise():
    limits = [warm_workers(session).limit for session in (None, Session(), Session(warmWorkers="auto"))]
    assert limits == [2, 2, 2]
    assert warm_workers(Session(warmWorkers="0"), Timeouts(warm_s=5.0)) == WarmWorkers(idle_s=5.0)
    with pytest.raises(ConfigurationError, match="spark.elephant.warmWorkers: expected 'auto' or an integer .* 'few'"):
        warm_workers(Session(warmWorkers="few"))
