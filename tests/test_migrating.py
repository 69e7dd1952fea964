"""The pages on moving here name only what there is, and a script before and after differs only in the library."""

import difflib
import importlib
import inspect
import re
from pathlib import Path

import elephant

ROOT = Path(__file__).parents[1]
GUIDES = [
    ROOT / "docs" / name for name in ("migrating.md", "from_elephas.md", "from_horovod.md", "from_tf_distribute.md")
]
TEXT = "\n\n".join(page.read_text() for page in GUIDES)
TUTORIAL = (ROOT / "docs" / "tutorials" / "moving.py").read_text()


def spans_of(text):
    """Returns the code spans in the second column of every table whose second heading is elephant."""
    spans, inside = [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        inside = bool(cells) and (inside or cells[1] == "elephant")
        if inside and cells[1] not in ("elephant", "---", "none"):
            spans += re.findall(r"`([^`]+)`", cells[1])
    return spans


def thing_called(name):
    """Returns what a dotted name of elephant, keras or pyspark stands for; raises where there is no such thing."""
    parts = name.split(".")
    if parts[0] in ("elephant", "keras", "pyspark"):
        for cut in range(len(parts), 0, -1):
            try:
                thing = importlib.import_module(".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            break
    else:
        thing, cut = elephant, 0
    for part in parts[cut:]:
        if inspect.isclass(thing) and re.search(rf"self\.{part}\b.*=", inspect.getsource(thing.__init__)):
            return property  # an attribute that instances have
        thing = getattr(thing, part)
    return thing


def arguments_of(thing):
    called = thing.__init__ if inspect.isclass(thing) else thing
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name for name, parameter in inspect.signature(called).parameters.items() if parameter.kind not in kinds}


SPANS = sorted(set(spans_of(TEXT)))


def test_guide_when_its_tables_are_read_then_every_row_says_what_takes_its_place():
    rows = [line for line in TEXT.splitlines() if line.startswith("|")]
    empty = [row for row in rows if not row.split("|")[2].strip()]
    assert len(SPANS) > 60
    assert empty == []


def test_guide_when_it_names_something_of_elephant_then_it_exists():
    offenders = [f"{span}: {fault}" for span in SPANS if (fault := fault_of(span))]
    assert not offenders, "\n".join(offenders)


def fault_of(span):
    """Returns what is wrong with a code span; None when there is what it names, with these arguments."""
    found = re.fullmatch(r"([\w.]+)(?:\((.*)\))?", span)
    if not found:
        return "is neither a name nor a call"
    try:
        thing = thing_called(found[1])
    except AttributeError as error:
        return str(error)
    arguments = re.split(r",(?![^(]*\))", found[2] or "")  # a tuple is one
    named = {argument.split("=")[0].strip() for argument in arguments if argument.strip()}
    unknown = named - (arguments_of(thing) if named else set())
    return f"has no {', '.join(sorted(unknown))}" if unknown else None


def test_script_of_elephas_when_compared_with_the_one_after_the_move_then_differs_only_where_the_library_enters():
    shown = re.search(r"Before, with Elephas 7:\n#\n# ```python\n(.*?)# ```", TUTORIAL, re.DOTALL)[1]
    before = [line.removeprefix("#").removeprefix(" ") for line in shown.splitlines()]
    after = re.search(r"two imports are others:\n\n# %%\n(.*?)\n+# %%", TUTORIAL, re.DOTALL)[1].splitlines()
    changed = [
        line for line in difflib.unified_diff(before, after, n=0, lineterm="") if re.match(r"[-+](?![-+])", line)
    ]
    assert changed
    assert [line for line in changed if "import" not in line or "eleph" not in line] == []
