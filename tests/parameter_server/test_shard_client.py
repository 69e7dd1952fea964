"""One vector over several servers."""

import numpy as np
import pytest
from leaks import nothing_left_behind as nothing_left_behind
from servers import LAYOUT, whole_numbers

from elephant.errors import ConfigurationError
from elephant.parameter_server.client import ParameterServerClient
from elephant.parameter_server.protocol import RequestHeader, RequestKind

ADD = {"name": "add"}


@pytest.mark.parametrize("compression", [None, "bfloat16", "int8:feedback"])
def test_two_servers_when_used_as_one_then_give_the_same(serve, compression):
    values = whole_numbers(LAYOUT, 1)
    outs = []
    for count in (1, 2):
        serving = serve(rule=ADD, values=values, count=count, num_state_values=1)
        worker, out = serving.worker(compression=compression), LAYOUT.zeros()
        assert worker.pull(out).modified and not worker.pull(out).modified
        # Multiples of 1/16 up to 127/16: every encoding here holds them, or the same of them.
        worker.push(whole_numbers(LAYOUT, 2), step=1)
        reply = worker.push_pull(whole_numbers(LAYOUT, 3), out, step=2)
        assert reply.modified and np.array_equal(worker.average_state(np.array([3.0]), 2), [3.0])
        outs.append((out, serving.control().fetch()))
        worker.close(finished=True)
    if compression != "int8:feedback":
        assert np.array_equal(outs[0][0], values + whole_numbers(LAYOUT, 2) + whole_numbers(LAYOUT, 3))
    assert np.array_equal(outs[0][0], outs[1][0]) or compression == "int8:feedback"
    assert np.allclose(outs[0][1].values, outs[1][1].values, atol=0.2) and outs[1][1].state == [3.0]


def test_update_with_nan_in_one_part_then_is_refused_by_all(serve):
    serving = serve(rule=ADD, count=2)
    bad = whole_numbers(LAYOUT, 1)
    bad[3] = np.nan
    assert serving.worker().push(bad, step=1).refused
    assert not serving.control().fetch().values.any()
    assert serving.control().statistics()["refused"] == 1


@pytest.mark.parametrize(("compression", "great"), [("float16", 1e5), ("bfloat16", 3.4e38)])
def test_update_with_a_value_too_great_for_the_encoding_of_one_part_then_is_refused_by_all(serve, compression, great):
    serving, update = serve(rule=ADD, count=2), LAYOUT.zeros()
    update[0], update[LAYOUT.segments[-1].stop - 1] = great, 1
    assert serving.worker(compression=compression).push(update, step=1).refused
    assert not serving.control().fetch().values.any()


def test_position_when_a_push_reached_one_server_only_then_is_the_earlier_and_the_retry_counts_once(serve):
    serving, update = serve(rule=ADD, count=2), whole_numbers(LAYOUT, 1)
    first = serving.worker(attempt=1)
    first.push(update, step=1)
    first._shards[0].exchange(RequestHeader(kind=RequestKind.PUSH, step=2), update[first._parts[0]], None)
    second, out = serving.worker(attempt=2), LAYOUT.zeros()
    assert second.position == 1
    second.push_pull(update, out, step=2)
    assert np.array_equal(out, 2 * update)


def test_position_when_a_step_has_several_calls_and_one_is_missing_then_is_the_step_before(serve):
    serving, update, out = serve(rule=ADD), whole_numbers(LAYOUT, 1), LAYOUT.zeros()
    first = serving.worker(attempt=1)
    for place in [(1, 0), (1, 1), (2, 0)]:
        first.push(update, step=place[0], call=place[1])
    second = serving.worker(attempt=2)
    assert second.position == 1
    for call in (0, 1):
        second.push_pull(update, out, step=2, call=call)
    assert np.array_equal(out, 4 * update)


def test_servers_when_named_in_another_order_then_are_refused(serve):
    serving = serve(count=2)
    with pytest.raises(ConfigurationError, match="Name the servers in the order of their parts"):
        ParameterServerClient(
            serving.addresses[::-1],
            token=b"0123456789abcdef-right",
            run_id="run",
            layout=LAYOUT,
            partition=0,
            attempt=1,
        )
