"""Attempts of an elastic fit with a cluster, a clock and a store of states that the test plays."""

import contextlib
import io

import pytest

from elephant.checkpoint.memory import StatesInMemory
from elephant.checkpoint.state import FitState
from elephant.config import FitConfig
from elephant.driver.elastic.fit import ElasticFit, SlotsFreedError
from elephant.driver.elastic.policy import ElasticPolicy
from elephant.errors import ClusterError, UnsupportedError
from elephant.monitor.progress import Progress


class Job:
    """Takes the place of a job: what has options."""

    def __init__(self, config):
        self.config = config


class Cluster:
    """Slots by the second.

    Args:
        slots: Pairs of a second and the slots that there are from then on.
    """

    def __init__(self, *slots, is_dynamic=False, least=1, most=4, slots_s=30.0):
        self.slots, self.now, self.asked, self.held = slots, 0.0, [], 0
        self.out = io.StringIO()
        self.fit = ElasticFit(
            ElasticPolicy(least, most, slots_s=slots_s),
            Progress(num_workers=most, epochs=3, verbose=1, stream=self.out),
            slots=lambda own: [count for second, count in self.slots if second <= self.now][-1],
            asked=self._asked,
            is_dynamic=is_dynamic,
            pause=self._pause,
            clock=lambda: self.now,
        )

    @contextlib.contextmanager
    def _asked(self, number):
        self.asked.append(number)
        self.held += 1
        yield
        self.held -= 1

    def _pause(self, seconds):
        self.now += seconds

    def begin(self, monkeypatch):
        """Returns the workers of the next attempt."""
        least, most = self.fit.policy.least, self.fit.policy.most
        monkeypatch.setattr("elephant.driver.elastic.fit.replace", lambda job, config: Job(config))
        return self.fit.sized(Job(FitConfig(num_workers=(least, most)))).config.num_workers


def test_attempt_when_slots_for_the_fewest_are_there_then_begins_at_once_with_all(monkeypatch):
    cluster = Cluster((0, 3))
    assert cluster.begin(monkeypatch) == 3 and cluster.now == 0
    assert "beginning with 3 workers of at most 4" in cluster.out.getvalue()


def test_attempt_when_too_few_slots_come_in_time_then_says_so_and_what_to_do(monkeypatch):
    cluster = Cluster((0, 1), least=2, slots_s=5.0)
    with pytest.raises(
        ClusterError, match=r"numWorkers=\(2, 4\): expected at least 2 task slots within 5 s\. Received: 1"
    ):
        cluster.begin(monkeypatch)
    assert cluster.out.getvalue().count("waiting for task slots: the cluster has 1") == 1


def test_attempt_when_a_worker_was_lost_then_waits_for_its_slot_and_says_what_it_goes_on_with(monkeypatch):
    cluster = Cluster((0, 4), (1, 3), (5, 4), (100, 3))
    assert cluster.begin(monkeypatch) == 4
    cluster.now = 1.0
    assert cluster.fit.policy.goes_on_after_loss(came_further=True)
    assert cluster.begin(monkeypatch) == 4 and cluster.now == 5.0
    cluster.now = 100.0
    assert cluster.fit.policy.goes_on_after_loss(came_further=True)
    assert cluster.begin(monkeypatch) == 3 and cluster.now == 130.0
    assert cluster.fit.sizes == [4, 4, 3] and "going on with 3 workers, 4 before" in cluster.out.getvalue()


def test_attempt_when_executors_are_started_on_demand_then_asks_for_them_and_waits_until_no_more_come(monkeypatch):
    cluster = Cluster((0, 0), (2, 1), (5, 2), (7, 3), is_dynamic=True)
    assert cluster.begin(monkeypatch) == 3
    # Nobody asks any more, and the last one came some seconds ago.
    assert cluster.asked == [4] and cluster.held == 0 and 14 <= cluster.now <= 16


SESSIONS = {
    "rank 0 coordinates": ({"coordinates_on_executors": True}, "expected executors that reach the driver, which has"),
    "slots are unknown": ({"count_slots": None}, "expected a session that tells its task slots"),
    "speculation": (
        {"allocates_dynamically": True, "setting": "true"},
        r"expected spark\.speculation=false with dynamic",
    ),
}


@pytest.mark.parametrize("name", SESSIONS)
def test_fit_when_the_session_is_none_for_it_then_is_refused_by_name(monkeypatch, name):
    facts, message = SESSIONS[name]
    usual = {"coordinates_on_executors": False, "count_slots": 2, "allocates_dynamically": False, "setting": ""}
    for function, value in {**usual, "jvm_context": object(), **facts}.items():
        monkeypatch.setattr(f"elephant.driver.elastic.fit.{function}", lambda *_, value=value: value)
    with pytest.raises(UnsupportedError, match=rf"numWorkers=\(1, 2\): {message}"):
        ElasticFit.of(None, Job(FitConfig(num_workers=(1, 2))), None)
    assert ElasticFit.of(None, Job(FitConfig(num_workers=2)), None) is None


def states_of(cluster, states):
    """Gives the attempt's states, in order, to what watches them; returns how many it took, and whether it grew."""
    store = StatesInMemory()
    with cluster.fit.watched(store, 3) as watch:
        for number, state in enumerate(states, 1):
            watch.keep(state)
            try:
                watch.check()
            except SlotsFreedError:
                assert store.latest().state is state
                return number, True
        watch.check()
    assert cluster.held == 0
    return len(states), False


def test_fit_when_slots_are_lost_as_an_attempt_begins_then_it_may_be_sized_anew(monkeypatch):
    cluster = Cluster((0, 4), (1, 3))
    cluster.begin(monkeypatch)
    assert not cluster.fit.has_lost_slots()
    cluster.now = 1.0
    assert cluster.fit.has_lost_slots()


def test_states_when_slots_are_freed_then_the_attempt_ends_at_the_end_of_an_epoch_alone(monkeypatch):
    cluster = Cluster((0, 2), (1, 4))
    cluster.begin(monkeypatch)
    cluster.now = 1.0
    states = [FitState(epochs=0, step=3), FitState(epochs=1), FitState(epochs=1, step=2)]
    assert states_of(cluster, states) == (2, True)
    assert cluster.begin(monkeypatch) == 4 and cluster.fit.policy.restarts == 0


def test_states_when_nothing_is_left_to_train_or_to_grow_to_then_the_attempt_goes_on(monkeypatch):
    cluster = Cluster((0, 2), (1, 4))
    cluster.begin(monkeypatch)
    cluster.now = 1.0
    ended = [FitState(epochs=3), FitState(epochs=2, facts={"stopped": True})]
    assert states_of(cluster, ended) == (2, False)
    full = Cluster((0, 4), (1, 9))
    full.begin(monkeypatch)
    full.now = 1.0
    assert states_of(full, [FitState(epochs=1), FitState(epochs=2)]) == (2, False) and full.asked == [4]


def test_states_when_executors_are_started_on_demand_then_more_are_asked_for_once_the_fit_runs(monkeypatch):
    cluster = Cluster((0, 2), (20, 2), (40, 3), is_dynamic=True)
    assert cluster.begin(monkeypatch) == 2
    assert states_of(cluster, [FitState(epochs=1), FitState(epochs=2)]) == (2, False)
    assert cluster.asked == [4, 2]
    cluster.now = 40.0
    assert states_of(cluster, [FitState(epochs=1)]) == (1, True)
