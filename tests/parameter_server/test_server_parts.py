"""The parts of a server without its sockets: stripes, ledger, gate, clock, pool, averages, snapshots."""

import dataclasses
import os
import sys
import threading
import time

import numpy as np
import pytest
from disk_order import DiskOrder, failing_replace
from leaks import nothing_left_behind as nothing_left_behind
from servers import LAYOUT, whole_numbers

from elephant.errors import ConfigurationError, DataError
from elephant.net.buffers import aligned_vector
from elephant.parameter_server import snapshot
from elephant.parameter_server.client import ParallelCalls
from elephant.parameter_server.layout import Layout, ServerSpec
from elephant.parameter_server.optimizers import rule_of
from elephant.parameter_server.process import ServerStartup, restore, shard_specs
from elephant.parameter_server.protocol import (
    STRIPE_VALUES,
    RequestHeader,
    RequestKind,
    Status,
    encoded_length,
    is_finite,
    pull_codec,
    push_codec,
)
from elephant.parameter_server.push_log import Entry, PushLog
from elephant.parameter_server.request_handler import IMPATIENCE_S, BufferPool
from elephant.parameter_server.server import ParameterServer, SharedLock, combined
from elephant.parameter_server.staleness import Clock, Staleness
from elephant.parameter_server.store import SnapshotImage, Store

SPEC = ServerSpec(run_id="run", layout=LAYOUT, first_value=0, num_values=LAYOUT.num_values, num_state_values=2)


def in_thread(function):
    thread = threading.Thread(target=function, name="test-part")
    thread.start()
    return thread


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_is_finite_when_one_value_is_not_then_says_so(bad):
    values = np.ones(1000, np.float32)
    assert is_finite(values) and is_finite(values * np.float32(3e38)) and is_finite(values[:0])
    values[777] = bad
    assert not is_finite(values)


@pytest.mark.parametrize("count", [16, STRIPE_VALUES, STRIPE_VALUES + 16, 3 * STRIPE_VALUES - 16])
def test_encoded_length_then_is_the_sum_over_stripes(count):
    assert encoded_length(None, count) == 4 * count
    assert encoded_length(push_codec("bfloat16"), count) == 2 * count
    chunks = sum(-(-min(STRIPE_VALUES, count - start) // 1024) for start in range(0, count, STRIPE_VALUES))
    assert encoded_length(push_codec("int8"), count) == count + 4 * chunks
    assert encoded_length(push_codec("int8:feedback"), count) == count + 4 * chunks
    assert encoded_length(pull_codec("int8"), count) == 2 * count


def test_aligned_vector_then_begins_at_64_bytes():
    assert aligned_vector(33).ctypes.data % 64 == 0 and aligned_vector(33).shape == (33,)


@pytest.mark.parametrize("layout", [LAYOUT, Layout([("wide", (11, STRIPE_VALUES))])], ids=["few stripes", "many"])
def test_store_when_many_threads_add_then_nothing_is_lost(layout):
    values = layout.zeros()
    store = Store(rule_of({"name": "add"}, layout), values, ())
    updates = [whole_numbers(layout, seed) for seed in range(4)]
    threads = [
        in_thread(lambda update=update: [store.apply(None, update.copy()) for _ in range(10)]) for update in updates
    ]
    for thread in threads:
        thread.join()
    assert np.array_equal(values, 10 * np.sum(updates, axis=0))


def test_store_when_a_rule_raises_in_one_of_its_stripes_then_says_so():
    class Broken:
        def update(self, scalars, start, values, update, slots):
            if start == 9 * STRIPE_VALUES:
                raise ValueError("no such stripe")

    layout = Layout([("wide", (11, STRIPE_VALUES))])
    store = Store(Broken(), layout.zeros(), ())
    with pytest.raises(ValueError, match="no such stripe"):
        store.apply(None, layout.zeros())


def test_store_when_a_factor_is_given_then_the_update_counts_so_much():
    values, update = LAYOUT.zeros(), whole_numbers(LAYOUT, 1)
    store = Store(rule_of({"name": "add"}, LAYOUT), values, ())
    store.apply(None, update.copy(), factor=0.5)
    assert np.array_equal(values, update / 2)
    out = np.empty(STRIPE_VALUES, np.float32)
    store.read(1, out)
    assert np.array_equal(out, values[STRIPE_VALUES : 2 * STRIPE_VALUES])


def test_ledger_when_restored_then_knows_places_and_attempts():
    push_log = PushLog({2: Entry(attempt=5, step=7, call=1, highest_call=1)})
    assert push_log.register(2, 4) is None and push_log.is_superseded(2, 4)
    assert push_log.register(2, 5) == Entry(attempt=5, step=7, call=1, highest_call=1)
    assert push_log.begin(2, 5, (7, 1)) is Status.DUPLICATE
    assert push_log.begin(2, 5, (7, 2)) is Status.OK


def test_ledger_when_a_push_is_being_settled_then_its_repetition_and_a_newer_attempt_wait_for_it():
    push_log, seen = PushLog(), []
    push_log.register(0, 1)
    assert push_log.begin(0, 1, (1, 0)) is Status.OK
    again = in_thread(lambda: seen.append(push_log.begin(0, 1, (1, 0))))
    newer = in_thread(lambda: seen.append(push_log.register(0, 2)))
    time.sleep(0.2)
    assert seen == []
    push_log.finish(0, (1, 0))
    again.join(20)
    newer.join(20)
    assert Entry(attempt=2, step=1) in seen
    assert Status.DUPLICATE in seen or Status.SUPERSEDED in seen


def test_gate_when_wanted_alone_then_goes_before_those_who_come_later():
    shared_lock, order = SharedLock(), []

    def alone():
        with shared_lock.exclusive():
            order.append("alone")

    def late():
        with shared_lock.shared():
            order.append("late")

    with shared_lock.shared(), shared_lock.shared():
        threads = [in_thread(alone)]
        time.sleep(0.2)
        threads.append(in_thread(late))
        time.sleep(0.2)
        assert order == []
    for thread in threads:
        thread.join(20)
    assert order == ["alone", "late"]


def test_staleness_then_counts_pushes_since_the_last_pull():
    staleness = Staleness()
    staleness.registered(0, 10)
    assert staleness.of_push(0, 10) == 0 and staleness.of_push(0, 13) == 3
    staleness.pulled(0, 14)
    staleness.registered(0, 20)
    assert staleness.of_push(0, 20) == 6
    assert staleness.of_push(1, 9) == 0 and staleness.of_push(0, 5000) == 4986
    assert staleness.histogram() == {"0": 2, "3": 1, "6": 1, "255": 1}


def test_clock_then_counts_live_workers_only():
    clock = Clock(2)
    clock.enter(0, 0)
    clock.enter(1, 0)
    clock.advance(0, 3)
    passed = []
    thread = in_thread(lambda: (clock.wait(0, 30, lambda: False), passed.append(1)))
    time.sleep(0.3)
    assert not passed and clock.live() == [0, 1]
    clock.finish(1)
    thread.join(20)
    assert passed and clock.live() == [0]
    # A connection that was lost unnoticed, and the one that replaced it.
    clock.enter(1, 3)
    clock.enter(1, 3)
    clock.leave(1)
    clock.leave(1)
    assert clock.live() == [0, 1]
    clock.leave(1)
    assert clock.live() == [0]


def test_clock_when_given_up_or_released_or_out_of_time_then_returns():
    clock = Clock(0)
    clock.enter(0, 5)
    clock.enter(1, 0)
    assert not clock.wait(0, 0.0, lambda: False)
    assert clock.wait(0, 30, lambda: True)
    clock.release()
    assert clock.wait(0, 30, lambda: False)


def test_pool_when_all_are_taken_then_waits_and_is_impatient():
    pool, got = BufferPool(16, size=1, stall_s=60), []

    def take():
        with pool.borrowed() as buffer:
            got.append(buffer)

    with pool.borrowed() as first:
        assert pool.patience() == 60
        thread = in_thread(take)
        end = time.monotonic() + 20
        while pool.patience() != IMPATIENCE_S and time.monotonic() < end:
            time.sleep(0.01)
        assert pool.patience() == IMPATIENCE_S and not got
    thread.join(20)
    assert got[0] is first and pool.patience() == 60


def test_pool_when_memory_ran_out_once_then_has_its_buffer_still():
    pool = BufferPool(1 << 60, size=1)
    for _ in range(2):
        with pytest.raises((MemoryError, ValueError)), pool.borrowed():
            pass


def image(**more):
    return SnapshotImage(
        values=whole_numbers(LAYOUT, 1), slots=(whole_numbers(LAYOUT, 2),), state=np.array([1.0, 2.0]),
        entries={3: {"attempt": 4, "step": 5, "call": 6, "highest_call": 7}},
        contributions={1: (0.5, np.array([3.0, 4.0])), 0: (2.0, np.array([5.0, 6.0]))},
        iterations=8, updates=9, rate=0.1, stopped=True, counts={"refused": 2}, staleness={"0": 9}, **more,
    )  # fmt: skip


def keep(folder, number=1, name=snapshot.LATEST):
    arrays, kept = folder / f"{name}-{number}.arrays", image()
    snapshot.write_arrays(arrays, kept)
    snapshot.seal(folder, name, arrays, kept.facts(), "run")
    return arrays


def test_restore_when_the_last_snapshot_is_damaged_then_takes_the_first_and_warns(tmp_path, caplog):
    plan = ServerStartup(spec=SPEC, token=b"", listener_fd=-1, folder=str(tmp_path), incarnation=1)
    keep(tmp_path, name=snapshot.INITIAL)
    assert restore(plan).updates == 9 and not caplog.records
    keep(tmp_path).write_bytes(b"damaged")
    assert restore(plan).updates == 9
    assert "goes back to its beginning" in caplog.text


def test_snapshot_when_read_then_is_what_was_written(tmp_path):
    keep(tmp_path, 1)
    keep(tmp_path, 2)
    (tmp_path / "latest-3.arrays").write_bytes(b"half")
    (tmp_path / ".latest.json.0123.unfinished").write_bytes(b"half")
    snapshot.tidy(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["latest-2.arrays", "latest.json"]
    read, kept = snapshot.read_image(tmp_path, snapshot.LATEST, SPEC), image()
    assert all(np.array_equal(*pair) for pair in zip(read.sections, kept.sections, strict=True))
    assert read.facts() == kept.facts()


@pytest.mark.parametrize("file", ["latest.json", "latest-1.arrays"])
@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "gone", "empty"])
def test_snapshot_when_damaged_then_raises(tmp_path, file, damage):
    keep(tmp_path)
    path = tmp_path / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    changed = {"flip": data, "cut": data[: len(data) // 2], "longer": path.read_bytes() + b"x", "empty": b""}
    path.unlink() if damage == "gone" else path.write_bytes(changed[damage])
    with pytest.raises(DataError, match="Expected a whole snapshot in"):
        snapshot.read_image(tmp_path, snapshot.LATEST, SPEC)


@pytest.mark.skipif(sys.platform != "linux", reason="names of descriptors come from /proc")
def test_snapshot_when_sealed_then_is_on_the_disk_before_it_counts_and_the_old_one_goes_last(tmp_path, monkeypatch):
    keep(tmp_path, 1)
    order = DiskOrder(monkeypatch)
    arrays = keep(tmp_path, 2)
    assert order.events[1][1].startswith(".latest.json.")
    # No push is held up for the first sync, so it is of the whole file.
    assert order.events == [
        ("sync", "latest-2.arrays", arrays.stat().st_size),
        ("sync", order.events[1][1], (tmp_path / "latest.json").stat().st_size),
        ("replace", "latest.json"),
        ("sync", tmp_path.name, order.events[3][2]),
        ("remove", "latest-1.arrays"),
    ]


def test_snapshot_when_it_cannot_take_the_place_of_the_old_one_then_that_is_read(tmp_path, monkeypatch):
    keep(tmp_path, 1)
    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(OSError, match="Read-only"):
        keep(tmp_path, 2)
    monkeypatch.undo()
    snapshot.tidy(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["latest-1.arrays", "latest.json"]
    assert snapshot.read_image(tmp_path, snapshot.LATEST, SPEC).facts() == image().facts()


@pytest.mark.parametrize("began", [0, 5])
def test_engine_when_it_goes_on_from_its_snapshot_then_has_its_updates_iterations_and_rate(tmp_path, began):
    spec = dataclasses.replace(SPEC, rule={"name": "sgd", "learning_rate": 0.5}, num_state_values=0)
    begun = SnapshotImage(values=LAYOUT.zeros(), state=np.empty(0), iterations=began)
    engine = ParameterServer(spec, begun)
    engine.push_log.register(0, 1)
    for step in (1, 2):
        header = RequestHeader(kind=RequestKind.PUSH, partition=0, attempt=1, step=step, payload_bytes=0)
        assert engine.settle(header, whole_numbers(LAYOUT, step), finite=True) is Status.OK
    engine.set_rate(0.125)
    engine.stop()
    kept = engine.image()
    snapshot.write_arrays(tmp_path / "latest-1.arrays", kept)
    snapshot.seal(tmp_path, snapshot.LATEST, tmp_path / "latest-1.arrays", kept.facts(), "run")
    again = ParameterServer(spec, snapshot.read_image(tmp_path, snapshot.LATEST, spec), incarnation=1)
    assert (again.updates, again.iterations, again.rate, again.stopped) == (2, began + 2, 0.125, True)
    assert again.push_log.register(0, 2) == Entry(attempt=2, step=2)
    update = whole_numbers(LAYOUT, 3)
    expected = again.store.values - np.float32(0.125) * update
    header = RequestHeader(kind=RequestKind.PUSH, partition=0, attempt=2, step=3, payload_bytes=0)
    assert again.settle(header, update, finite=True) is Status.OK
    assert np.array_equal(again.store.values, expected)
    again.set_rate(float("nan"))
    assert again.rate == 0.5


def test_snapshot_of_another_fit_then_raises(tmp_path):
    keep(tmp_path)
    other = ServerSpec(run_id="other", layout=LAYOUT, first_value=0, num_values=LAYOUT.num_values, num_state_values=2)
    with pytest.raises(DataError, match="snapshot of 'other'"):
        snapshot.read_image(tmp_path, snapshot.LATEST, other)


def test_shard_specs_then_cover_the_vector_and_state_stays_with_the_first():
    parts = shard_specs(SPEC, 3)
    assert parts[0].first_value == 0 and sum(part.num_values for part in parts) == LAYOUT.num_values
    assert all(a.first_value + a.num_values == b.first_value for a, b in zip(parts, parts[1:], strict=False))
    assert [part.num_state_values for part in parts] == [2, 0, 0]
    tiny = ServerSpec(run_id="run", layout=Layout([("a", (3,))]), first_value=0, num_values=16)
    with pytest.raises(ConfigurationError, match="parameterServers: expected at most one for each 16"):
        shard_specs(tiny, 2)


def test_shard_specs_when_the_rule_clips_by_a_norm_then_raises():
    rule = {"name": "sgd", "learning_rate": 0.1, "clip": {"global_norm": 1.0}}
    spec = ServerSpec(run_id="run", layout=LAYOUT, first_value=0, num_values=LAYOUT.num_values, rule=rule)
    assert len(shard_specs(spec, 1)) == 1
    with pytest.raises(ConfigurationError, match="none of 2 servers sees a whole gradient"):
        shard_specs(spec, 2)


def test_side_by_side_then_runs_at_once_and_raises_what_went_wrong():
    together, barrier = ParallelCalls(2), threading.Barrier(2)
    try:
        assert together.call(lambda item: (barrier.wait(20), item)[1], [4, 5]) == [4, 5]
        with pytest.raises(ZeroDivisionError):
            together.call(lambda item: 1 // item, [1, 0])
    finally:
        together.close()


def test_statistics_of_two_servers_then_count_pushes_once_and_bytes_together():
    one = {
        "updates": 5, "version": 6, "snapshots": 2, "refused": 1, "seconds": 3.0, "waited_s": 1.0, "bytes_in": 10,
        "bytes_out": 20, "duplicates": 1, "superseded": 0, "snapshot_failures": 0, "server_restarts": 1,
        "iterations": 5, "failure": None, "staleness": {"0": 5}, "positions": {"10": 3, "9": 2}, "live": [9, 10],
        "refused_connections": {"h1": 2},
    }  # fmt: skip
    other = {**one, "updates": 4, "bytes_in": 1, "failure": "why", "positions": {"10": 2}, "live": [10, 11]}
    said = combined([one, other])
    assert (said["updates"], said["bytes_in"], said["server_restarts"], said["failure"]) == (4, 11, 2, "why")
    assert said["positions"] == {"9": 0, "10": 2} and said["live"] == [9, 10, 11]
    assert said["refused_connections"] == {"h1": 4}
