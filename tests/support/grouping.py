"""Plugin of pytest that says which tests share a process of pytest-xdist, and which start first.

``pytest -n 2 --dist loadscope`` then gives a group whole to one process. The processes collect the tests and the one
that schedules them does not, so they write their groups into a folder that it reads. (Marks of the name
``xdist_group`` are without effect under pytest 9.2, which keeps a test's name elsewhere than pytest-xdist 3.8 changes
it.)
"""

import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest

POOL = "rank_pool"
# Fixtures of processes that have imported Keras: whoever needs one runs where the pool is.
_OF_POOL = {POOL, "warm_ranks"}
# A session takes a minute until it is warm: two are worth it where there is much to do with them.
SPARK_SESSIONS = 2
SPARK_SESSIONS_WITHOUT_SLOW = 1
# Numbers of groups that share a session of Spark's, a Connect server or a standalone cluster, see `_place_of`.
_OF_CLUSTERS = (0, 2)
_FOLDER = pytest.StashKey()
_INPUT = "groups_folder"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    without_slow = "not slow" in config.option.markexpr
    sessions = SPARK_SESSIONS_WITHOUT_SLOW if without_slow else SPARK_SESSIONS
    groups = arrange(items, sessions, lambda item: not (without_slow and item.get_closest_marker("slow")))
    given = getattr(config, "workerinput", None)
    if given:
        (Path(given[_INPUT]) / f"{given['workerid']}.json").write_text(json.dumps(groups))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput[_INPUT] = _folder_of(node.config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.option.dist != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        """Gives whole groups to processes, in the order of the tests."""

        groups = None

        def _split_scope(self, nodeid):
            if self.groups is None:
                # Every process has the same tests.
                self.groups = json.loads(next(Path(_folder_of(config)).iterdir()).read_text())
            return self.groups.get(nodeid, nodeid)

        def remove_node(self, node):
            """Takes a process out whose test ended it; xdist alone would run that test again in the next process."""
            work = self.assigned_work[node]
            ended = next((name for unit in work.values() for name, is_done in unit.items() if not is_done), None)
            for scope, unit in list(work.items()):
                if ended in unit:
                    unit[ended] = True
                if all(unit.values()):
                    del work[scope]
            super().remove_node(node)
            return ended

        def _reschedule(self, node):
            if node not in self.registered_collections:
                # One that takes over, and still collects: xdist alone asks for its tests all the same.
                return
            super()._reschedule(node)
            # A process begins a test when it knows the next one; xdist alone gives one that takes over a single test.
            while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                self._assign_work_unit(node)

    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


def pytest_unconfigure(config):
    if _FOLDER in config.stash:
        config.stash[_FOLDER].cleanup()


def _folder_of(config):
    if _FOLDER not in config.stash:
        config.stash[_FOLDER] = tempfile.TemporaryDirectory(prefix="pytest-groups-")
    return config.stash[_FOLDER].name


def arrange(items, num_sessions, is_counted):
    """Orders collected tests, the longest groups first, marks those of Spark, and returns the groups by their names.

    What needs the same dear fixture is of one group. The tests of the fixture ``spark`` are divided into as many
    groups as there are sessions of it, by file.

    Args:
        items: The tests, which are reordered in place.
        num_sessions: Sessions of Spark.
        is_counted: Whether a test will run, so that it counts when the groups of ``spark`` are balanced.
    """
    sessions = _sessions_of_files(items, num_sessions, is_counted)
    places = {item: _place_of(item, sessions) for item in items}
    for item in items:
        if "spark" in item.fixturenames and item.get_closest_marker("spark") is None:
            item.add_marker(pytest.mark.spark)
    items.sort(key=lambda item: (places[item], _place_in_file(item, places[item][0])))
    return {item.nodeid: group for item, (_, group) in places.items() if group}


def balanced(sizes, num_groups):
    """Returns the group of each file: the largest file first, each to the group that has least.

    >>> balanced({"a": 5, "b": 3, "c": 3, "d": 1}, 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    loads, groups = [0] * num_groups, {}
    for name, size in sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0])):
        groups[name] = loads.index(min(loads))
        loads[groups[name]] += size
    return groups


def _sessions_of_files(items, num_sessions, is_counted):
    sizes = Counter({item.path.name: 0 for item in items if "spark" in item.fixturenames})
    sizes.update(item.path.name for item in items if "spark" in item.fixturenames and is_counted(item))
    return balanced(sizes, num_sessions)


def _place_of(item, sessions):
    """Returns when a test starts, a number, and its group; an empty one where it shares nothing."""
    scopes = _scopes(item)
    if "spark" in item.fixturenames:
        return 0, f"spark-{sessions[item.path.name]}"
    if _OF_POOL & {*item.fixturenames}:
        return 1, POOL
    if "session" in scopes:
        return 2, item.path.parent.name
    if scopes & {"package", "module", "class"}:
        return 3, f"{item.path.parent.name}-{item.path.stem}"
    return (4 if item.get_closest_marker("slow") else 5), ""


def _place_in_file(item, number):
    """Returns where a test stands, for those that share a cluster: they run in the order of their files.

    What one test does to executors and Python workers Spark mends while the next one begins. All else keeps the order
    that it has, a random one in `make test-all`.
    """
    if number not in _OF_CLUSTERS:
        return ()
    path, line, name = item.location
    return path, line or 0, name


def _scopes(item):
    """Returns the scopes of the fixtures of the suite's own that a test uses."""
    known = getattr(item, "_fixtureinfo", None)
    definitions = known.name2fixturedefs.values() if known else ()
    return {made[-1].scope for made in definitions if made and made[-1].baseid}
