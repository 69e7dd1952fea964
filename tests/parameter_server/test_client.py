"""What workers and the driver get from a real server, against numpy."""

import threading
import time

import numpy as np
import psutil
import pytest
from leaks import nothing_left_behind as nothing_left_behind
from servers import LAYOUT, until, whole_numbers

from elephant.compression import BFloat16, Float16, Int8
from elephant.config import Timeouts
from elephant.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    ServerFailedError,
    SupersededError,
    UnsupportedError,
)
from elephant.parameter_server.layout import Layout

ADD = {"name": "add"}
SGD = {"name": "sgd", "learning_rate": 0.5}


def test_pull_when_nothing_was_pushed_then_gives_the_initial_weights_once(serve):
    values = whole_numbers(LAYOUT, 1)
    worker, out = serve(values=values).worker(), LAYOUT.zeros()
    first = worker.pull(out)
    assert first.modified and np.array_equal(out, values)
    out[0] = 77
    second = worker.pull(out)
    assert not second.modified and second.version == first.version and out[0] == 77


def test_pull_into_another_array_when_not_modified_then_fills_it_all_the_same(serve):
    values = whole_numbers(LAYOUT, 1)
    worker, one, other = serve(values=values).worker(), LAYOUT.zeros(), LAYOUT.zeros()
    worker.pull(one)
    assert worker.pull(other).modified and np.array_equal(other, values)


def test_pushes_when_added_then_give_the_sum(serve):
    updates = [whole_numbers(LAYOUT, seed) for seed in range(4)]
    worker, out = serve(rule=ADD).worker(), LAYOUT.zeros()
    for step, update in enumerate(updates, 1):
        assert not worker.push(update, step=step).refused
    assert worker.pull(out).modified
    assert np.array_equal(out, np.sum(updates, axis=0))
    assert worker.exchanges == 5 and worker.waited_s > 0
    assert worker.bytes_sent > 4 * LAYOUT.num_values * 4 and worker.bytes_received > LAYOUT.num_values * 4


def test_push_pull_when_rule_is_sgd_then_returns_the_updated_weights_and_the_rate(serve):
    values, gradient = whole_numbers(LAYOUT, 1), whole_numbers(LAYOUT, 2)
    worker, out = serve(rule=SGD, values=values).worker(), LAYOUT.zeros()
    reply = worker.push_pull(gradient, out, step=1)
    assert reply.rate == 0.5 and reply.modified and np.array_equal(out, values - 0.5 * gradient)


def test_push_pull_when_update_and_out_are_one_array_then_works(serve):
    flat = whole_numbers(LAYOUT, 2)
    expected = flat.copy()
    serve(rule=ADD).worker().push_pull(flat, flat, step=1)
    assert np.array_equal(flat, expected)


def test_push_pull_of_one_array_when_refused_then_still_brings_the_weights(serve):
    values, flat = whole_numbers(LAYOUT, 2), LAYOUT.zeros()
    worker = serve(rule=ADD, values=values).worker()
    worker.pull(flat)
    flat[7] = np.nan
    assert worker.push_pull(flat, flat, step=1).refused
    assert np.array_equal(flat, values)


def test_push_of_an_impossible_step_then_raises(serve):
    worker = serve().worker()
    for step, call in ((0, 0), (-1, 0), (1, -1)):
        with pytest.raises(ConfigurationError, match="expected a step from 1 on"):
            worker.push(LAYOUT.zeros(), step=step, call=call)


def test_push_when_its_place_is_not_beyond_the_last_then_is_not_applied_again(serve):
    serving, update, out = serve(rule=ADD), whole_numbers(LAYOUT, 3), LAYOUT.zeros()
    worker = serving.worker()
    for step, call in [(1, 0), (1, 0), (1, 1), (1, 1), (2, 0), (1, 1), (2, 0)]:
        worker.push(update, step=step, call=call)
    worker.pull(out)
    assert np.array_equal(out, 3 * update)
    assert serving.control().statistics()["duplicates"] == 4


def test_position_when_a_later_attempt_comes_then_is_the_last_step_applied(serve):
    serving, update, out = serve(rule=ADD, num_partitions=2), whole_numbers(LAYOUT, 3), LAYOUT.zeros()
    first = serving.worker(partition=1, attempt=4)
    assert first.position == 0
    first.push(update, step=7)
    second = serving.worker(partition=1, attempt=9)
    assert second.position == 7
    assert serving.worker(partition=0, attempt=5).position == 0
    for ask in (lambda: first.push(update, step=8), lambda: first.pull(out)):
        with pytest.raises(SupersededError, match="after attempt 4"):
            ask()
    with pytest.raises(SupersededError):
        serving.worker(partition=1, attempt=8)
    second.push(update, step=8)
    second.pull(out)
    assert np.array_equal(out, 2 * update)


def test_update_with_nan_when_pushed_then_is_refused_and_the_fit_fails_past_the_limit(serve):
    serving, good, out = serve(rule=ADD, max_refused=2), whole_numbers(LAYOUT, 3), LAYOUT.zeros()
    worker = serving.worker()
    for step, bad_value in enumerate((np.nan, np.inf), 1):
        bad = good.copy()
        bad[-40] = bad_value
        assert worker.push(bad, step=step).refused
    assert not worker.push_pull(good, out, step=3).refused
    assert np.array_equal(out, good)
    with pytest.raises(ServerFailedError, match="3 with NaN or infinities, the last in step 4 of partition 0"):
        worker.push(bad, step=4)
    with pytest.raises(ServerFailedError, match="Lower the learning rate"):
        worker.pull(out)
    assert "NaN" in serving.control().statistics()["failure"]


def test_update_of_large_finite_values_when_pushed_then_is_not_refused(serve):
    update = LAYOUT.zeros()
    update[5] = 3e38
    out = LAYOUT.zeros()
    assert not serve(rule=ADD).worker().push_pull(update, out, step=1).refused
    assert out[5] == np.float32(3e38)


def test_worker_whose_model_has_other_shapes_when_it_connects_then_is_told_so(serve):
    with pytest.raises(ConfigurationError, match="worker whose model has other shapes"):
        serve().worker(layout=Layout([("kernel", (600, 1024)), ("bias", (37,))]))


def test_worker_with_a_wrong_token_when_it_connects_then_is_turned_away(serve):
    serving = serve()
    with pytest.raises(AuthenticationError):
        serving.worker(token=b"0123456789abcdef-wrong")
    control = serving.control()
    until(lambda: control.statistics()["refused_connections"] == {"127.0.0.1": 1}, "the count of the stranger")


def test_worker_beyond_the_partitions_when_it_connects_then_is_refused(serve):
    with pytest.raises(ConfigurationError, match=r"partition below 1\. Received: 3"):
        serve().worker(partition=3)


def test_worker_with_a_compression_of_ranks_when_made_then_is_refused_by_name(serve):
    serving = serve()
    for name in ("topk", "powersgd:2"):
        with pytest.raises(UnsupportedError, match=f"compression='{name}' needs all ranks"):
            serving.worker(compression=name)


def test_arrays_of_another_form_when_exchanged_then_raise(serve):
    worker = serve().worker()
    for array in (np.zeros(3, np.float32), np.zeros(LAYOUT.num_values), LAYOUT.zeros()[::-1]):
        with pytest.raises(ConfigurationError, match="expected a contiguous float32 array"):
            worker.pull(array)
        with pytest.raises(ConfigurationError, match="expected a contiguous float32 array"):
            worker.push(array, step=1)


def _through(codec, values):
    """What is left of values that go through a codec by stripes of 2**18."""
    decoded = np.empty_like(values)
    for start in range(0, len(values), 1 << 18):
        part = values[start : start + (1 << 18)]
        data = np.empty(codec.encoded_bytes(len(part)), np.uint8)
        codec.encode(part, data, offset=start)
        codec.decode(data, decoded[start : start + len(part)])
    return decoded


@pytest.mark.parametrize(
    ("name", "pushed", "pulled"),
    [("bfloat16", BFloat16(), BFloat16()), ("float16", Float16(), Float16()), ("int8", Int8(), BFloat16())],
)
def test_compression_when_pushed_and_pulled_then_is_the_codecs_rounding(serve, name, pushed, pulled):
    update, out = np.random.default_rng(5).standard_normal(LAYOUT.num_values).astype(np.float32), LAYOUT.zeros()
    serving = serve(rule=ADD)
    worker = serving.worker(compression=name)
    worker.push_pull(update, out, step=1)
    expected = _through(pushed, update)
    assert np.array_equal(serving.control().fetch().values, expected)
    assert np.array_equal(out, _through(pulled, expected))
    assert worker.bytes_sent < 0.6 * 4 * LAYOUT.num_values


def test_error_feedback_when_many_small_updates_are_pushed_then_loses_one_rounding_in_all(serve):
    rng = np.random.default_rng(6)
    updates = rng.standard_normal((12, LAYOUT.num_values)).astype(np.float32)
    sums = {}
    for name in ("int8", "int8:feedback"):
        serving = serve(rule=ADD)
        worker = serving.worker(compression=name)
        for step, update in enumerate(updates, 1):
            worker.push(update, step=step)
        sums[name] = serving.control().fetch().values
    error = {name: np.abs(total - updates.sum(0)).mean() for name, total in sums.items()}
    assert error["int8:feedback"] < 0.5 * error["int8"]


def test_state_when_workers_send_it_then_is_the_weighted_average_of_what_each_sent_last(serve):
    initial = np.array([9.0, 9.0])
    serving = serve(num_partitions=2, num_state_values=2, state=initial)
    assert np.array_equal(serving.control().fetch().state, initial)
    one, other = serving.worker(0), serving.worker(1)
    assert np.array_equal(one.average_state(np.array([1.0, 2.0]), 10), [1.0, 2.0])
    assert np.allclose(other.average_state(np.array([4.0, 5.0]), 30), [3.25, 4.25], rtol=1e-15)
    assert np.allclose(one.average_state(np.array([2.0, 2.0]), 10), [3.5, 4.25], rtol=1e-15)
    assert np.allclose(other.average_state(np.array([np.nan, 5.0]), 30), [3.5, 4.25], rtol=1e-15)
    with pytest.raises(ConfigurationError, match=r"state: expected float64 of shape \(2,\)"):
        one.average_state(np.zeros(3), 1)


def test_fetch_when_momentum_is_kept_then_has_values_slots_and_iterations(serve):
    start, velocity, gradient = (whole_numbers(LAYOUT, seed) for seed in (1, 2, 3))
    rule = {"name": "sgd", "learning_rate": 0.5, "momentum": 0.5}
    serving = serve(rule=rule, values=start, slots=[velocity], iterations=41)
    serving.worker().push(gradient, step=1)
    fetched = serving.control().fetch()
    moved = np.float32(0.5) * velocity - np.float32(0.5) * gradient
    assert fetched.iterations == 42 and len(fetched.slots) == 1
    assert np.array_equal(fetched.slots[0], moved) and np.array_equal(fetched.values, start + moved)


def test_rate_and_stop_when_the_driver_sets_them_then_reach_workers(serve):
    serving, gradient, out = serve(rule=SGD), whole_numbers(LAYOUT, 3), LAYOUT.zeros()
    worker, control = serving.worker(), serving.control()
    control.set_rate(0.25)
    assert worker.push_pull(gradient, out, step=1).rate == 0.25
    assert np.array_equal(out, -0.25 * gradient)
    control.set_rate(float("nan"))
    assert worker.pull(out).rate == 0.5
    control.stop()
    assert worker.pull(out).stop and worker.push(gradient, step=2).stop


def test_rule_without_a_rate_when_asked_then_says_nan(serve):
    assert np.isnan(serve(rule=ADD).worker().pull(LAYOUT.zeros()).rate)


def test_staleness_when_others_push_in_between_then_divides_and_is_counted(serve):
    serving, update, out = serve(rule=ADD, divide_by_staleness=True, num_partitions=2), LAYOUT.zeros(), LAYOUT.zeros()
    update[:16] = 12
    one, other = serving.worker(0), serving.worker(1)
    one.pull(out)
    other.pull(out)
    one.push(update, step=1)
    one.push(update, step=2)
    other.push_pull(update, out, step=1)
    assert np.array_equal(out[:16], np.full(16, 12 + 6 + 4))
    assert serving.control().statistics()["staleness"] == {"0": 1, "1": 1, "2": 1}


def test_staleness_when_a_worker_has_pulled_since_then_is_counted_from_there(serve):
    serving, update, out = serve(rule=ADD, divide_by_staleness=True, num_partitions=2), LAYOUT.zeros(), LAYOUT.zeros()
    update[:16] = 12
    one, other = serving.worker(0), serving.worker(1)
    for step in (1, 2):
        one.push(update, step=step)
    other.pull(out)
    # Nothing has been pushed since: it counts whole. What one pushes then is as old as its own pull, which comes last.
    other.push(update, step=1)
    one.pull(out)
    one.push_pull(update, out, step=3)
    assert np.array_equal(out[:16], np.full(16, 12 + 6 + 12 + 12))
    assert serving.control().statistics()["staleness"] == {"0": 3, "1": 1}


def test_statistics_when_asked_then_count_what_happened(serve):
    serving, update = serve(rule=ADD, num_partitions=3), whole_numbers(LAYOUT, 1)
    worker = serving.worker(partition=2)
    worker.push(update, step=5)
    worker.push(update, step=6)
    said = serving.control().statistics()
    assert (said["updates"], said["iterations"], said["live"], said["positions"]) == (2, 2, [2], {"2": 6})
    assert said["bytes_in"] > 2 * update.nbytes and said["seconds"] > 0 and said["failure"] is None
    worker.close(finished=True)
    assert serving.control().statistics()["live"] == []


def _in_thread(function):
    thread = threading.Thread(target=function, name="test-worker")
    thread.start()
    return thread


def test_bound_on_staleness_when_one_is_slow_then_the_other_waits_for_it_and_goes_on_when_it_leaves(serve):
    serving, update = serve(rule=ADD, num_partitions=2, max_staleness=2), LAYOUT.zeros()
    fast, slow = serving.worker(0), serving.worker(1)
    done = []

    def run():
        for step in range(1, 9):
            fast.push(update, step=step)
            done.append(step)

    thread = _in_thread(run)
    for step in (3, 4):
        until(lambda step=step: done == list(range(1, step + 1)), f"step {step}")
        time.sleep(0.5)
        assert done == list(range(1, step + 1))
        if step == 3:
            slow.push(update, step=1)
    slow.close(finished=False)
    thread.join(30)
    assert done[-1] == 8
    assert serving.control().statistics()["waited_s"] > 0.5


def test_bound_on_staleness_when_the_wait_is_longer_than_a_servers_silence_may_be_then_is_waited_out(serve):
    serving, update = serve(rule=ADD, num_partitions=2, max_staleness=0), LAYOUT.zeros()
    fast, slow = serving.worker(0, timeouts=Timeouts(connect_s=30, collective_s=2)), serving.worker(1)
    replies = []
    thread = _in_thread(lambda: replies.append(fast.push_pull(update, LAYOUT.zeros(), step=1)))
    thread.join(4)
    assert replies == []
    slow.push(update, step=1)
    thread.join(30)
    assert [reply.modified for reply in replies] == [True]


def test_pull_when_the_server_is_silent_for_too_long_then_says_for_how_long(serve):
    # One that is frozen for ten seconds is replaced, and a client with more patience hears of nothing.
    serving = serve(rule=ADD, heartbeat_s=10.0)
    worker = serving.worker(timeouts=Timeouts(connect_s=30, collective_s=1))
    process = psutil.Process(serving.process.process_id)
    process.suspend()
    until(lambda: process.status() == psutil.STATUS_STOPPED, "a frozen server")
    with pytest.raises(DeadlineExceededError, match="Received: nothing for 1 s"):
        worker.pull(LAYOUT.zeros())


def test_push_when_its_worker_is_ahead_of_one_that_came_later_then_is_taken_in_and_the_pull_waits(serve):
    serving, update = serve(rule=ADD, num_partitions=2, max_staleness=0, stall_s=1.0), LAYOUT.zeros()
    fast, control = serving.worker(0), serving.control()
    fast.push(update, step=1)
    slow = serving.worker(1)
    replies = []
    thread = _in_thread(lambda: replies.append(fast.push_pull(update, LAYOUT.zeros(), step=2)))
    until(lambda: control.statistics()["positions"]["0"] == 2, "the push")
    assert replies == []
    slow.push(update, step=2)
    thread.join(30)
    assert len(replies) == 1


def test_bound_of_zero_when_both_push_and_pull_then_steps_are_in_lockstep(serve):
    serving = serve(rule=ADD, num_partitions=2, max_staleness=0)
    update, seen = LAYOUT.zeros(), {0: [], 1: []}
    update[:16] = 1
    workers = [serving.worker(0), serving.worker(1)]

    def run(rank):
        out = LAYOUT.zeros()
        for step in range(1, 11):
            workers[rank].push_pull(update, out, step=step)
            seen[rank].append(out[0])

    threads = [_in_thread(lambda rank=rank: run(rank)) for rank in (0, 1)]
    for thread in threads:
        thread.join(60)
    # Each sees all pushes up to its step, and at most the other's next one besides.
    for values in seen.values():
        assert len(values) == 10
        assert all(2 * step <= value <= 2 * step + 1 for step, value in enumerate(values, 1))


def test_bound_on_staleness_when_the_fit_stops_then_lets_all_pass(serve):
    serving, update = serve(rule=ADD, num_partitions=2, max_staleness=0), LAYOUT.zeros()
    fast, _ = serving.worker(0), serving.worker(1)
    fast.push(update, step=1)
    replies = []
    thread = _in_thread(lambda: replies.append(fast.push(update, step=2)))
    time.sleep(0.5)
    assert not replies
    serving.control().stop()
    thread.join(30)
    assert replies[0].stop


def test_interrupt_when_a_worker_waits_then_ends_it_and_close_is_prompt(serve):
    serving, update = serve(rule=ADD, num_partitions=2, max_staleness=0), LAYOUT.zeros()
    fast, _ = serving.worker(0), serving.worker(1)
    fast.push(update, step=1)
    errors = []

    def wait():
        try:
            fast.push(update, step=2)
        except Exception as error:
            errors.append(error)

    thread = _in_thread(wait)
    time.sleep(0.5)
    fast.close(finished=False)
    thread.join(30)
    assert len(errors) == 1 and isinstance(errors[0], ConnectionError)
    with pytest.raises(ConfigurationError, match="closed ones"):
        fast.push(update, step=3)


def test_hogwild_when_one_worker_pushes_then_is_exact(serve):
    updates = [whole_numbers(LAYOUT, seed) for seed in range(3)]
    worker, out = serve(rule=ADD, locked=False).worker(), LAYOUT.zeros()
    for step, update in enumerate(updates, 1):
        worker.push_pull(update, out, step=step)
    assert np.array_equal(out, np.sum(updates, axis=0))


def test_many_workers_when_they_push_at_once_then_nothing_is_lost(serve):
    serving = serve(rule=ADD, num_partitions=6)
    workers = [serving.worker(partition) for partition in range(6)]

    def run(partition):
        out = LAYOUT.zeros()
        for step in range(1, 9):
            workers[partition].push_pull(whole_numbers(LAYOUT, 100 * partition + step), out, step=step)

    threads = [_in_thread(lambda partition=partition: run(partition)) for partition in range(6)]
    for thread in threads:
        thread.join(120)
    expected = np.sum([whole_numbers(LAYOUT, 100 * each + step) for each in range(6) for step in range(1, 9)], axis=0)
    assert np.array_equal(serving.control().fetch().values, expected)
