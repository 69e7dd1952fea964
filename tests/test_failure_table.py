"""Every row of the table of failures in the documentation has tests, and they are there."""

import ast
import re
from functools import cache
from pathlib import Path

from tables import every_case

ROOT = Path(__file__).resolve().parent.parent
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def tables():
    """Returns the rows of each table of the first chapter, as lists of cells, without their heads."""
    chapter = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8").split("\n## ")[1]
    found = [[]]
    for line in chapter.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [table[2:] for table in found if table]


@cache
def names_in(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


EVENTS, TESTS = tables()


def test_table_when_read_then_says_for_every_event_what_happens_in_every_mode():
    assert len(EVENTS) >= 12
    assert {len(row) for row in EVENTS} == {6} and all(all(row) for row in EVENTS)


@every_case("event", [row[0] for row in EVENTS])
def test_event_when_it_is_in_the_table_then_has_tests(event):
    (cells,) = [row[1] for row in TESTS if row[0] == event]
    named = TEST.findall(cells)
    assert named and len(named) == cells.count("::")
    for path, name in named:
        assert name in names_in(path), f"{path} has no {name}"
