"""How the ranks of a run share out devices, and that no two of them have the same one."""

import pytest

from elephant.cluster.gpu_plan import HOSTS, SPARK, ResourcePlan
from elephant.errors import ClusterError
from elephant.task.gpu_assignment import assign_devices
from elephant.task.gpu_devices import Device
from elephant.task.rendezvous import RankReport

AUTO, DEMANDED = ResourcePlan(devices=HOSTS), ResourcePlan(devices=HOSTS, required=True)


def card(rank, host, *, assigned=None, shareable=()):
    device = None if assigned is None else Device(*assigned)
    return RankReport(
        rank=rank,
        run_id="run",
        name=host,
        host=host,
        port=1,
        executor=f"e{rank}",
        assigned=device,
        shareable=tuple(Device(name, f"GPU-{name}") for name in shareable),
    )


def texts(placed):
    return [place.text for place in placed]


def test_cards_with_devices_when_written_and_read_then_are_equal():
    made = card(0, "a", assigned=("1", "GPU-x"), shareable="01")
    assert RankReport.from_text(made.to_text()) == made


@pytest.mark.parametrize("plan", [AUTO, DEMANDED])
def test_ranks_of_a_host_share_out_its_devices_by_rank(plan):
    cards = [card(rank, host, shareable="01") for rank, host in enumerate("abba")]
    placed = assign_devices(cards, plan)
    assert [place.visible for place in placed] == [["0"], ["0"], ["1"], ["1"]]
    assert texts(placed)[0] == "GPU 0 (shared out)"


def test_ranks_keep_what_spark_gave_them():
    cards = [card(0, "a", assigned=("1", "GPU-1")), card(1, "a", assigned=("0", "GPU-0"))]
    assert texts(assign_devices(cards, ResourcePlan(devices=SPARK))) == ["GPU 1", "GPU 0"]


def test_ranks_share_out_what_spark_did_not_give_to_others():
    cards = [card(0, "a", shareable="01"), card(1, "a", assigned=("0", "GPU-0"))]
    assert [place.visible for place in assign_devices(cards, AUTO)] == [["1"], ["0"]]


@pytest.mark.parametrize(
    ("first", "second"),
    [(("0", "0"), ("0", "0")), (("0", "GPU-x"), ("GPU-x", "GPU-x"))],
    ids=["same address", "same device by two names"],
)
def test_two_ranks_on_one_device_are_refused_with_what_to_change(first, second):
    cards = [card(0, "h", assigned=first), card(1, "h", assigned=second)]
    with pytest.raises(ClusterError, match=r"GPU of its own.*of h for ranks 0 and 1 \(executors e0 and e1\)") as caught:
        assign_devices(cards, ResourcePlan(devices=SPARK, resource="mig"))
    for advice in ("spark.worker.resource.mig.amount", "local-cluster", "spark.task.resource.mig.amount"):
        assert advice in str(caught.value)


def test_two_ranks_with_one_address_on_two_hosts_or_two_devices_are_welcome():
    cards = [card(0, "a", assigned=("0", "0")), card(1, "b", assigned=("0", "0"))]
    assert texts(assign_devices(cards, ResourcePlan(devices=SPARK))) == ["GPU 0", "GPU 0"]
    # Containers of one host, each of which counts its only device from zero.
    cards = [card(0, "a", assigned=("0", "GPU-x")), card(1, "a", assigned=("0", "GPU-y"))]
    assert texts(assign_devices(cards, ResourcePlan(devices=SPARK))) == ["GPU 0", "GPU 0"]


def test_ranks_without_any_device_compute_on_the_cpu_without_a_word():
    placed = assign_devices([card(0, "a"), card(1, "b")], AUTO)
    assert texts(placed) == ["CPU", "CPU"]
    assert [place.note for place in placed] == ["", ""]


@pytest.mark.parametrize("cards", [
    [card(0, "a", shareable="0"), card(1, "a", shareable="0")],
    [card(0, "a", shareable="0"), card(1, "b")],
])  # fmt: skip
def test_ranks_of_which_some_have_no_device_all_compute_on_the_cpu_and_say_so(cards):
    placed = assign_devices(cards, AUTO)
    assert texts(placed) == ["CPU", "CPU"]
    assert all("all ranks compute on the CPU" in place.note for place in placed)
    with pytest.raises(ClusterError, match="expected (a GPU for each of the 2 ranks on a|GPUs on every host)"):
        assign_devices(cards, DEMANDED)
