"""The directory of a fit in gossip mode: who is told of whom, what newcomers begin from, and what the average is."""

import warnings
from dataclasses import dataclass

import numpy as np
import pytest

from elephant.driver.gossip.directory import GossipDirectory
from elephant.driver.gossip.label_skew import skewed_partitions
from elephant.errors import ProtocolError
from elephant.monitor.events import EpochPart, PeerReady, WorkerModel


@dataclass
class Start:
    """A model of two weights and one moving statistic."""

    def weights(self):
        return np.array([1.0, 2.0], np.float32)

    def state(self):
        return np.array([3.0])


class Told:
    """The last that each worker was told."""

    def __init__(self):
        self.last, self.all = {}, []

    def __call__(self, peers):
        self.last[peers.rank] = peers
        self.all.append(peers)

    def peers_of(self, rank):
        return [tuple(peer[:2]) for peer in self.last[rank].peers]


def directory_of(num_workers=2, **options):
    told = Told()
    return GossipDirectory(Start(), told, num_workers=num_workers, **options), told


def ready(rank, attempt=0, labels=None):
    return PeerReady(rank=rank, attempt=attempt, host="10.0.0.1", port=4000 + rank, labels=labels or {})


def model(rank, values, *, epochs=1, final=False, share=1.0, state=(0.0,), steps=(5, 5), asked=0):
    return WorkerModel(
        rank=rank, epochs=epochs, final=final, share=share, steps=list(steps), exchanges=4, missed=1, refused=0,
        bytes_sent=8, asked=asked, arrays=(np.array(values, np.float32), np.array(state)),
    )  # fmt: skip


def part(rank, epoch=0):
    return EpochPart(rank=rank, epoch=epoch, rows=1, val_rows=0, steps=1, wait_s=0.0, logs={})


def test_workers_when_they_come_and_go_then_the_others_are_told_and_first_ones_begin_from_their_own_start():
    directory, told = directory_of(3)
    for rank in range(3):
        directory.join(ready(rank))
    assert told.peers_of(0) == [(1, 0), (2, 0)] and not any(peers.ahead for peers in told.all)
    directory.leave(1)
    assert told.peers_of(0) == [(2, 0)] and told.peers_of(2) == [(0, 0)]
    directory.join(ready(1, attempt=7))
    assert told.last[1].ahead and len(told.last[1].arrays) == 0
    assert sorted(told.peers_of(0)) == [(1, 7), (2, 0)]
    # The first attempt, where it lives on, hears that it was overtaken.
    directory.join(ready(1, attempt=0))
    assert told.last[1].attempt == 7 and sorted(told.peers_of(2)) == [(0, 0), (1, 7)]


def test_average_when_workers_have_shares_then_is_weighted_by_them_and_counts_each_worker_once():
    directory, told = directory_of()
    for rank in range(2):
        directory.join(ready(rank))
    np.testing.assert_array_equal(directory.fetch().values, [1.0, 2.0])
    directory.add_model(model(0, [3.0, 0.0], state=[2.0]))
    directory.count(part(0))
    np.testing.assert_array_equal(directory.fetch().values, [1.0, 2.0])
    directory.add_model(model(1, [0.0, 1.0], share=0.5, state=[4.0]))
    directory.count(part(1))
    np.testing.assert_allclose(directory.fetch().values, [2.0, 2 / 3], rtol=1e-6)
    np.testing.assert_array_equal(directory.keep().fetched.state, [3.0])
    directory.add_model(model(0, [8.0, 0.0], final=True))
    assert told.peers_of(1) == []
    for _ in range(2):
        directory.add_model(model(1, [0.0, 4.0], final=True))
    directory.end()
    np.testing.assert_array_equal(directory.fetch().values, [4.0, 2.0])
    assert directory.contributors == 2 and directory.statistics["exchanges"] == 8


def test_worker_when_it_is_started_again_then_may_begin_from_what_others_have_told_with_the_steps_in_it():
    directory, told = directory_of()
    directory.join(ready(0))
    directory.add_model(model(0, [6.0, 6.0], final=True, steps=(10, 3)))
    directory.join(ready(1, attempt=1))
    begin = told.last[1]
    assert begin.ahead and not begin.done and begin.steps == [10, 3] and begin.peers == []
    np.testing.assert_array_equal(begin.arrays[0], [6.0, 6.0])
    directory.join(ready(0, attempt=2))
    assert told.last[0].done and told.peers_of(1) == []


def test_fit_when_it_is_resumed_stopped_or_gets_another_rate_then_workers_are_told():
    directory, told = directory_of(resumes=True)
    directory.join(ready(0))
    assert not told.last[0].ahead and told.last[0].steps == [0, 0]
    np.testing.assert_array_equal(told.last[0].arrays[1], [3.0])
    directory.set_rate(0.25)
    directory.stop()
    assert (told.last[0].rate, told.last[0].stop) == (0.25, True)


def test_state_when_the_driver_asks_then_is_the_mean_of_all_who_train_and_each_goes_on_from_its_own_last_step():
    directory, told = directory_of()
    for rank in range(2):
        directory.join(ready(rank))
    assert directory.keep_now() is None and told.last[1].asked == 1
    directory.add_model(model(0, [3.0, 0.0], steps=(4, 2), asked=1))
    assert directory.keep_now() is None and told.last[1].asked == 1
    directory.add_model(model(1, [1.0, 2.0], steps=(6, 3), asked=1))
    kept = directory.keep_now()
    np.testing.assert_array_equal(kept.fetched.values, [2.0, 1.0])
    # Worker 1 has heard of later steps of worker 0, of which a part is in its weights.
    assert kept.ledgers == ({0: (4, 0, 0), 1: (3, 0, 0)},)
    # An epoch's end comes between: answers of before may lack a part of it.
    assert directory.keep_now() is None
    directory.add_model(model(0, [3.0, 0.0], asked=2))
    for rank in range(2):
        directory.count(part(rank))
    assert directory.keep_now() is None
    directory.add_model(model(1, [9.0, 9.0], asked=2))
    assert told.last[1].asked == 3
    # Who has ended, or was lost, is not waited for.
    directory.add_model(model(0, [5.0, 0.0], steps=(9, 2), final=True))
    assert directory.keep_now() is None
    directory.leave(1)
    assert directory.keep_now().ledgers == ({0: (9, 0, 0), 1: (2, 0, 0)},)

    again, told = directory_of(resumes=True, positions={0: 4, 1: 3})
    again.join(ready(1))
    assert told.last[1].steps == [4, 3] and not told.last[1].ahead and told.last[1].asked == 0


def test_model_when_it_has_other_lengths_then_is_refused():
    directory, _ = directory_of()
    with pytest.raises(ProtocolError, match=r"Expected weights.*lengths \(2, 1, 2\)\. Received: \(3, 1, 2\)"):
        directory.add_model(model(0, [1.0, 2.0, 3.0]))


def test_labels_when_partitions_are_sorted_by_them_then_the_user_is_told_to_repartition():
    directory, _ = directory_of()
    directory.join(ready(0, labels={"0": 90.0, "1": 10.0}))
    with pytest.warns(UserWarning, match=r"labels that differ strongly.*repartition\(2\)"):
        directory.join(ready(1, labels={"0": 10.0, "1": 90.0}))
    directory, _ = directory_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rank in range(2):
            directory.join(ready(rank, labels={"0": 50.0 + rank, "1": 50.0}))


def test_skew_when_rows_are_drawn_at_random_then_is_none_however_few_they_are():
    random = np.random.default_rng(0)
    for rows in (5, 20, 100, 1000):
        for _ in range(50):
            drawn = random.integers(0, 10, (4, rows))
            counts = {
                at: {str(label): float((one == label).sum()) for label in set(one)} for at, one in enumerate(drawn)
            }
            assert skewed_partitions(counts) == []
