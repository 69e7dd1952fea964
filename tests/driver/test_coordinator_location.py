"""Who coordinates a run, by what a session is and is told; see tests/spark/test_hosting.py and tests/spark_connect."""

import pytest

from elephant.driver import coordinator_location
from elephant.errors import ConfigurationError


class Conf(dict):
    """The settings of a session."""

    def get(self, name, default=None):
        return super().get(name, default)


class Session:
    def __init__(self, wanted):
        self.conf = Conf({} if wanted is None else {"spark.elephant.coordinator": wanted})


@pytest.mark.parametrize(
    ("wanted", "remote", "reached", "hosts", "may"),
    [
        (None, False, None, False, False),
        ("auto", True, True, False, True),
        ("auto", True, False, True, True),
        ("auto", True, "busy", True, True),
        ("driver", True, None, False, False),
        ("executors", False, None, True, True),
        ("executors", True, None, True, True),
    ],
)
def test_host_when_a_session_is_told_or_asked_then_follows(wanted, remote, reached, hosts, may, monkeypatch):
    monkeypatch.setattr(coordinator_location, "is_remote", lambda session: remote)
    # Nobody is asked where there is nothing to find out.
    tried = []

    def is_reached(session):
        assert reached is not None
        tried.append(session)
        return None if reached == "busy" else reached

    monkeypatch.setattr(coordinator_location, "is_reached", is_reached)
    session = Session(wanted)
    assert coordinator_location.coordinates_on_executors(session) is hosts
    assert coordinator_location.coordinates_on_executors(session) is hosts
    # What came of it holds for the session; when nobody was free to try it, the next fit asks again.
    assert len(tried) == {None: 0, "busy": 2}.get(reached, 1)
    assert coordinator_location.may_coordinate_on_executors(session) is may


def test_host_when_the_setting_has_another_value_then_is_refused():
    for asked in (coordinator_location.coordinates_on_executors, coordinator_location.may_coordinate_on_executors):
        with pytest.raises(ConfigurationError, match="spark.elephant.coordinator: expected auto, driver or executors"):
            asked(Session("clients"))


def test_coordinator_when_the_setting_has_its_former_name_then_the_error_says_the_new_one():
    session = Session(None)
    session.conf["spark.elephant.hosting"] = "executors"  # its FORMER name
    with pytest.raises(
        ConfigurationError, match=r"expected its new name, spark\.elephant\.coordinator\. Received: 'exec"
    ):
        coordinator_location.coordinates_on_executors(session)
