"""Which tests share a process of pytest-xdist, and which start first."""

from collections import Counter

import pytest

POOLS = {"rank_pool", "worker_pool"}
POOLS_GROUP = "pools"
SPARK_SESSIONS = 2


def arrange(items, is_counted):
    """Marks and orders collected tests: what needs the same dear fixture goes to the same process, the longest first.

    The tests of the fixture ``spark`` are divided into as many groups as there are sessions of it, by file.

    Args:
        items: The tests, which are reordered in place.
        is_counted: Whether a test will run, so that it counts when the groups of ``spark`` are balanced.
    """
    sessions = _sessions_of_files(items, is_counted)
    places = {}
    for item in items:
        place, group = _place_of(item, sessions)
        places[item] = (place, group or "")
        if "spark" in item.fixturenames and item.get_closest_marker("spark") is None:
            item.add_marker(pytest.mark.spark)
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=places.__getitem__)


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


def _sessions_of_files(items, is_counted):
    files = {item.path.name: 0 for item in items if "spark" in item.fixturenames}
    counts = Counter(item.path.name for item in items if item.path.name in files and is_counted(item))
    return balanced({**files, **counts}, SPARK_SESSIONS)


def _place_of(item, sessions):
    """Returns when a test starts, a number, and its group; None where it shares nothing."""
    scopes = _scopes(item)
    if "spark" in item.fixturenames:
        return 0, f"spark-{sessions[item.path.name]}"
    if POOLS & set(item.fixturenames):
        return 1, POOLS_GROUP
    if "session" in scopes:
        return 2, item.path.parent.name
    if scopes & {"package", "module", "class"}:
        return 3, f"{item.path.parent.name}-{item.path.stem}"
    return (4 if item.get_closest_marker("slow") else 5), None


def _scopes(item):
    """Returns the scopes of the fixtures of the suite's own that a test uses."""
    known = getattr(item, "_fixtureinfo", None)
    definitions = known.name2fixturedefs.values() if known else ()
    return {made[-1].scope for made in definitions if made and made[-1].baseid}
