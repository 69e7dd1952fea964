import sys
import threading

import numpy as np
import pytest

from elephant.errors import PeerLostError
from elephant.net.work_queue import WorkQueue


@pytest.fixture
def exchange():
    made = WorkQueue("test-exchange")
    yield made
    made.close()
    assert not any(thread.name == "test-exchange" for thread in threading.enumerate())


def test_operations_when_submitted_then_run_in_order_beside_the_caller(exchange):
    may_go, seen = threading.Event(), []
    exchange.submit(lambda: seen.append(may_go.wait(10)))
    exchange.submit(lambda: seen.append("second"))
    assert seen == []
    may_go.set()
    exchange.wait()
    assert seen == [True, "second"]


def test_wait_when_an_operation_failed_then_raises_the_first_failure_and_can_go_on(exchange):
    def fail(text):
        raise PeerLostError(text)

    exchange.submit(lambda: fail("first"))
    exchange.submit(lambda: fail("second"))
    with pytest.raises(PeerLostError, match="first"):
        exchange.wait()
    exchange.submit(lambda: None)
    exchange.wait()


def test_wait_when_an_operation_would_end_the_process_then_raises_what_it_raised(exchange):
    exchange.submit(lambda: sys.exit(3))
    with pytest.raises(SystemExit):
        exchange.wait()


def test_wait_when_nothing_was_submitted_then_returns(exchange):
    exchange.wait()


def test_wait_when_the_queue_is_closed_then_returns_and_it_works_again(exchange):
    done = []
    for number in range(2):
        exchange.submit(lambda number=number: done.append(number))
        exchange.close()
        exchange.wait()
    assert done == [0, 1]


def test_close_when_done_then_keeps_no_buffer_alive(exchange):
    import weakref

    array = np.zeros(3)
    kept = weakref.ref(array)
    exchange.submit(lambda array=array: None)
    exchange.wait()
    del array
    exchange.close()
    assert kept() is None


def test_sums_when_exchanged_in_the_background_then_are_those_of_numpy(run_world):
    def work(collective):
        exchange = WorkQueue(f"test-exchange-{collective.rank}")
        try:
            arrays = [np.full(1000 + step, collective.rank + step, np.float32) for step in range(5)]
            for array in arrays:
                exchange.submit(lambda array=array: collective.allreduce_(array))
            exchange.wait()
        finally:
            exchange.close()
        return [(array.size, set(array.tolist())) for array in arrays]

    expected = [(1000 + step, {float(sum(rank + step for rank in range(3)))}) for step in range(5)]
    assert run_world(3, work) == [expected] * 3
