"""Parameters and fields whose type is a class of this project carry a word of that class, or of the glossary.

`python tests/test_names.py` prints the share of those that do, and the words of the others.
"""

import ast
import collections
import functools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "elephant"
GLOSSARY = ROOT / "docs" / "development.md"
# Percent of the parameters and fields that agree with their classes. It only rises.
AGREEING = 96.0
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# A callable's arguments, a class as a value, and a literal say nothing about what a name holds.
_WITHOUT_VALUES = {"Callable", "type", "Literal"}


@functools.cache
def words_of(name):
    """Returns the words of a name in the singular: `RankReports` and `rank_reports` have rank and report.

    >>> sorted(words_of("_IOSlices")), sorted(words_of("copies"))
    (['io', 'slice'], ['copy'])
    """
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().split("_")
    return frozenset(singular(part) for part in parts if part)


def singular(word):
    if word.endswith("ies"):
        return f"{word[:-3]}y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def agree(words, others):
    """Returns whether two sets share a word, or an abbreviation of four letters or more: sock of socket."""
    if words & others:
        return True
    pairs = [(short, long) for one in words for other in others for short, long in ((one, other), (other, one))]
    return any(len(short) >= 4 and long.startswith(short) for short, long in pairs)


def statements(tree):
    """Yields a module and all statements in it, without their expressions, which are most of what a walk would meet."""
    pending = collections.deque([tree])
    while pending:
        node = pending.popleft()
        yield node
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            pending.extend(getattr(node, name, ()))


def glossary_words():
    """Returns the words in the first column of the glossary of docs/development.md."""
    table = GLOSSARY.read_text().partition("### Glossary")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ") and "Word" not in line]
    return {singular(word) for row in rows for word in re.findall(r"[a-z]+", row)}


class Names:
    """The parameters and fields of a package that hold instances of its classes.

    `rows` has (file, line, name, classes) of each.
    """

    def __init__(self, package):
        self.rows = []
        trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
        self._bases = {
            node.name: [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
            for tree in trees.values()
            for node in statements(tree)
            if isinstance(node, ast.ClassDef)
        }
        for path, tree in trees.items():
            others = _names_of_others(tree)
            for line, name, annotation in _annotated(tree):
                if held := sorted({kind for kind in _values_in(annotation, others) if kind in self._bases}):
                    self.rows.append((path.relative_to(package), line, name, held))

    def words_of(self, kind):
        """Returns the words of a class and of those that it inherits from: an `EpochEnded` is an event."""
        bases = (self.words_of(base) for base in self._bases[kind] if base in self._bases and base != kind)
        return words_of(kind).union(*bases)

    def that_disagree(self):
        known = glossary_words()
        for row in self.rows:
            words = words_of(row[2])
            if not words & known and not any(agree(words, self.words_of(kind)) for kind in row[3]):
                yield row


def _names_of_others(tree):
    """Returns the names that a module imports from elsewhere, or gives to values of its own."""
    found = set()
    for node in statements(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] != "elephant":
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names} - {"elephant"}
    own = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return found | {target.id for target in own if isinstance(target, ast.Name)}


def _annotated(tree):
    """Yields (line, name, annotation) of the parameters and fields of a module."""
    for node in statements(tree):
        if isinstance(node, FUNCTIONS):
            every = node.args
            given = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
            yield from ((one.lineno, one.arg, one.annotation) for one in given if one and one.annotation)
        elif isinstance(node, ast.ClassDef):
            fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            yield from ((one.lineno, one.target.id, one.annotation) for one in fields)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            yield node.lineno, node.target.attr, node.annotation


def _values_in(annotation, others):
    """Yields the names of an annotation, those in containers and alternatives included, without those of others."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        yield from _values_in(ast.parse(annotation.value, mode="eval").body, others)
    elif isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).rpartition(".")[2] in _WITHOUT_VALUES:
        return
    elif isinstance(annotation, ast.Name | ast.Attribute):
        path = ast.unparse(annotation).split(".")
        yield from [] if path[0] in others else [path[-1]]
    else:
        for part in ast.iter_child_nodes(annotation):
            yield from _values_in(part, others)


def share_that_agrees(names):
    """Returns (percent of the names that agree with their classes, the rows of the others)."""
    others = list(names.that_disagree())
    return 100 * (1 - len(others) / len(names.rows)), others


def worst(rows):
    """Returns a line for each word and class of the rows, the most frequent first."""
    found = collections.defaultdict(list)
    for path, line, name, kinds in rows:
        found[f"{name}: {' | '.join(kinds)}"].append(f"{path}:{line}")
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"{len(places):3} {name}  ({', '.join(places[:3])})" for name, places in ordered]


def test_names_when_compared_with_their_classes_then_as_many_agree_as_before():
    share, others = share_that_agrees(Names(PACKAGE))
    assert share >= AGREEING, (
        f"Expected {AGREEING} % of parameters and fields to have a word of their class, or of the glossary in "
        f"docs/development.md. Received: {share:.1f} %. Name them after what they hold. The others:\n"
        + "\n".join(worst(others)[:40])
    )
    assert share < AGREEING + 1, (
        f"{share:.1f} % agree: write {int(share * 2) / 2} into AGREEING of tests/test_names.py."
    )


def test_agreement_when_names_are_read_then_knows_plurals_containers_bases_and_classes_of_others(tmp_path):
    (tmp_path / "module.py").write_text(
        "from threading import Event\n"
        "class Report: ...\n"
        "class RankReport(Report): ...\n"
        "class SocketIO: ...\n"
        "class Event: ...\n"
        "def run(reports: dict[str, list[RankReport]], sock: 'SocketIO | None', cards: list[RankReport]): ...\n"
        "def hear(ended: Event, make: Callable[[Report], None], rank: Report, look: Report = None): ...\n"
        "class Other:\n"
        "    newest: Report\n"
        "    report: Report\n"
        "    def __init__(self):\n"
        "        self._last: Report | None = None\n"
    )
    names = Names(tmp_path)
    assert sorted(row[2] for row in names.rows) == [
        "_last", "cards", "look", "newest", "rank", "report", "reports", "sock",
    ]  # fmt: skip
    assert sorted(row[2] for row in names.that_disagree()) == ["_last", "cards", "look", "newest"]


if __name__ == "__main__":
    percent, left = share_that_agrees(Names(PACKAGE))
    sys.stdout.write("\n".join([*worst(left), f"{percent:.1f} % agree"]) + "\n")
