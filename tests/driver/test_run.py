"""`elephant.run` without Spark: a world of one, and what is refused before anything starts."""

import inspect
import os
import pickle
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

import elephant
from elephant import collective
from elephant.driver.run import pickled_call
from elephant.errors import ConfigurationError


def test_run_when_there_is_one_worker_then_calls_the_function_here():
    def place(first, *, second):
        return os.getpid(), first + second, collective.rank(), collective.world_size()

    assert elephant.run(place, (1,), {"second": 2}, num_workers=1) == [(os.getpid(), 3, 0, 1)]


def test_run_when_there_is_one_worker_then_exceptions_pass_as_they_are():
    class OwnError(Exception):
        pass

    def fail():
        raise OwnError("mine")

    with pytest.raises(OwnError, match="mine"):
        elephant.run(fail, num_workers=1)
    assert elephant.run(int, num_workers=1) == [0]


def test_run_when_given_variables_then_they_are_set_for_its_time(monkeypatch):
    monkeypatch.setenv("ELEPHANT_TEST_KEPT", "before")
    monkeypatch.delenv("ELEPHANT_TEST_NEW", raising=False)

    def read():
        return os.environ["ELEPHANT_TEST_KEPT"], os.environ["ELEPHANT_TEST_NEW"]

    env = {"ELEPHANT_TEST_KEPT": "inside", "ELEPHANT_TEST_NEW": "1"}
    assert elephant.run(read, env=env, num_workers=1) == [("inside", "1")]
    assert os.environ["ELEPHANT_TEST_KEPT"] == "before" and "ELEPHANT_TEST_NEW" not in os.environ


def test_run_when_no_number_of_workers_is_given_then_a_warning_says_that_it_is_one():
    with pytest.warns(UserWarning, match=r"num_workers.*Received: none, so that one worker.*Pass num_workers=N"):
        assert elephant.run(collective.world_size) == [1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert elephant.run(collective.world_size, num_workers=1) == [1]


def test_run_when_nested_then_says_that_it_cannot_be():
    with pytest.raises(ConfigurationError, match="expected to be called on the driver.*inside a worker"):
        elephant.run(lambda: elephant.run(int, num_workers=1), num_workers=1)


def test_run_when_threads_run_at_once_then_neither_is_nested():
    both = threading.Barrier(2, timeout=20)
    results = []
    threads = [
        threading.Thread(target=lambda: results.extend(elephant.run(both.wait, num_workers=1))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(results) == [0, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fn": 3}, "fn: expected a function. Received: 3"),
        ({"args": 3}, "args: expected a tuple of arguments. Received: 3. .* by its name, num_workers=3"),
        ({"args": "ab"}, "args: expected a tuple of arguments. Received: 'ab'"),
        ({"kwargs": {1: 2}}, "kwargs: expected a dictionary of arguments by name"),
        ({"num_workers": 0}, "num_workers: expected an integer of at least 1. Received: 0"),
        ({"num_workers": True}, "num_workers: expected an integer of at least 1. Received: True"),
        ({"num_workers": 2.0}, "num_workers: expected an integer of at least 1. Received: 2.0"),
        ({"spark": "local[2]"}, "spark: expected a SparkSession. Received: 'local"),
        ({"verbose": 7}, "verbose: expected 0, 1, 2 or 'auto'. Received: 7"),
        ({"timeouts": 30}, "timeouts: expected elephant.config.Timeouts. Received: 30"),
        ({"env": {"A": 1}}, "env: expected a dictionary of strings by name"),
        ({"env": {"A=B": "1"}}, "env: expected a dictionary of strings by name"),
        ({"env": {"": "1"}}, "env: expected a dictionary of strings by name"),
        ({"env": {"A": "1\0"}}, "env: expected a dictionary of strings by name"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_run_when_an_argument_is_wrong_then_refuses_before_anything_starts(given, message):
    with pytest.raises(ConfigurationError, match=message):
        elephant.run(**{"fn": int, **given})
    with pytest.raises(TypeError, match="elephant.run has no argument 'numWorkers'. Did you mean 'num_workers'"):
        elephant.run(int, numWorkers=2)


def test_run_when_pyspark_is_missing_then_one_worker_runs_and_two_say_how_to_install_it():
    code = """
import sys
sys.modules["pyspark"] = None
import elephant
print(elephant.run(elephant.collective.world_size, num_workers=1))
try:
    elephant.run(int, num_workers=2)
except elephant.errors.ClusterError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    first, second, address = done.stdout.splitlines()
    assert first == "[1]" and address.startswith("See https://")
    assert second.startswith("num_workers=2: expected PySpark") and "pip install 'elephant-spark[local]'" in second


def test_collective_functions_when_there_is_one_rank_then_give_back_what_they_got():
    array = np.arange(6, dtype="float32").reshape(3, 2)
    for result in (
        collective.allreduce(array),
        collective.allreduce(array, op="mean"),
        collective.reduce_scatter(array, op="max"),
        collective.broadcast(array),
        collective.allgather(array)[0],
    ):
        np.testing.assert_array_equal(result, np.arange(6).reshape(3, 2))
        assert not np.shares_memory(result, array)
    collective.allreduce_(array, op="min")
    collective.broadcast_(array)
    collective.barrier()
    assert (collective.local_rank(), collective.local_world_size()) == (0, 1)


def test_collective_functions_when_arguments_are_wrong_then_refuse_as_between_ranks():
    with pytest.raises(ConfigurationError, match="op: expected one of"):
        collective.allreduce(np.zeros(2), op="median")
    with pytest.raises(ConfigurationError, match="a rank from 0 to 0. Received: 1"):
        collective.broadcast(np.zeros(2), root=1)


def test_using_when_left_then_the_world_is_one_again():
    class Pair(collective.LocalCommunicator):
        @property
        def world_size(self):
            return 2

    with collective.using(Pair()):
        assert collective.world_size() == 2
        with pytest.raises(ConfigurationError, match="inside a worker"):
            elephant.run(int)
    assert collective.world_size() == 1


@elephant.distributed()
def place_of(first, *, second=2):
    """Returns where it runs."""
    return os.getpid(), first + second, collective.world_size()


def test_distributed_when_called_then_runs_the_function_under_its_own_name():
    assert place_of(1, second=5) == [(os.getpid(), 6, 1)]
    assert (place_of.__name__, place_of.__doc__) == ("place_of", "Returns where it runs.")
    assert place_of.__wrapped__(1) == (os.getpid(), 3, 1)


def test_distributed_when_given_options_then_they_are_those_of_run():
    env, failing = {"ELEPHANT_TEST_NEW": "1"}, elephant.distributed(num_workers=0)(int)
    assert elephant.distributed(env=env)(os.getenv)("ELEPHANT_TEST_NEW") == ["1"]
    with pytest.raises(ConfigurationError, match="num_workers: expected an integer of at least 1. Received: 0"):
        failing()
    options = [inspect.signature(function).parameters for function in (elephant.run, elephant.distributed)]
    assert list(options[0].values())[3:] == list(options[1].values())


def test_distributed_when_the_function_travels_then_it_is_the_function_and_not_its_run():
    # By its name it would be what the decorator has made of it.
    call = pickle.loads(pickled_call(place_of.__wrapped__, (1,), {}))
    assert call.fn(*call.args) == (os.getpid(), 3, 1)
