"""Errors cross process borders whole."""

import pickle

from tables import every_case

from elephant import errors
from elephant.cluster.task import RankProcessError
from elephant.monitor.events import RankFailure


def test_worker_error_when_pickled_then_keeps_its_data():
    error = errors.WorkerFailure("ValueError: no", rank=3, host="h", traceback="File x", log_tail="last")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.rank, copy.host, copy.traceback, copy.log_tail) == (3, "h", "File x", "last")
    assert str(copy) == str(error)
    assert str(error).startswith("rank 3 on h failed: ValueError: no")


def test_rank_process_error_when_pickled_then_keeps_its_failure():
    error = RankProcessError(RankFailure(kind="K", message="m", traceback="t", log_tail="l"))
    assert pickle.loads(pickle.dumps(error)).failure == error.failure


@every_case("name", [name for name in dir(errors) if name.endswith("Error")])
def test_error_when_pickled_then_keeps_its_text(name):
    kind = getattr(errors, name)
    copy = pickle.loads(pickle.dumps(kind("text")))
    assert type(copy) is kind and str(copy) == "text"
    assert issubclass(kind, errors.ElephantError)
