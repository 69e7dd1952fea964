"""What the documentation names is there, and what users can set is documented: links, params, options, settings."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from tables import every_case

import elephant
import elephant.options
from elephant import errors
from elephant.cli import bench
from elephant.cli import main as program
from elephant.config import Timeouts
from elephant.jobs.settings import EVALUATE, SETTINGS, TRAIN, settings_of
from elephant.jobs.settings import PARAMS as PARAMS_OF_JOBS
from elephant.spark.rdd.model import OPTIONS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")])
PARAMS = ROOT / "docs" / "params.md"
SETTING = re.compile(r"spark\.elephant\.\w+(?:\.\w+)*")
# In the table of params, what is no value of Python's.
WORDS = {"not set": None, "required": inspect.Parameter.empty, "[]": ()}


def name_of(page):
    return str(page.relative_to(ROOT))


def heading_anchors(page):
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_links_when_followed_then_lead_to_a_file_and_a_heading():
    offenders = [f"{name_of(page)}: {link}" for page in PAGES for link in broken_links(page)]
    assert not offenders, "\n".join(offenders)


def test_modules_when_pages_of_the_code_name_them_then_are_there():
    folders, offenders = ("elephant", "spark_jobs", "examples", "benchmarks"), []
    paths = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")}
    for page in (ROOT / "docs" / "how_it_works.md", ROOT / "docs" / "development.md"):
        for name in re.findall(r"`([a-z_/]+\.py)`", page.read_text()):
            if not (ROOT / name).exists() and not any(path.endswith("/" + name) for path in paths):
                offenders.append(f"{name_of(page)}: {name}")
    assert not offenders, "\n".join(offenders)


def test_sections_when_errors_point_to_them_then_are_on_the_page_and_at_the_site_s_address():
    """The last line of each error is the address of a heading of docs/troubleshooting.md."""
    headings, named = heading_anchors(ROOT / "docs" / "troubleshooting.md"), set()
    for path in (ROOT / "elephant").rglob("*.py"):
        named |= topics_in(ast.parse(path.read_text()))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    named |= {kind.topic for kind in kinds if kind is not errors.ElephantError}
    assert len(named) > 30 and named <= headings
    site = re.search(r"^site_url: (.*)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)[1]
    assert errors.DataError("", topic="nulls").help_url == f"{site}troubleshooting/#nulls"


def topics_in(tree):
    """Returns the strings that code has as a topic: as an argument, a default, or a constant of such a name."""
    values = []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "topic":
            values.append(node.value)
        elif isinstance(node, ast.Assign) and "topic" in ast.unparse(node.targets[0]).lower():
            values.append(node.value)
    strings = [node.value for value in values for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return {text for text in strings if re.fullmatch(r"[a-z][a-z-]+", str(text))}


def broken_links(page):
    """Yields what is wrong with the links of a page to files and headings."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if target.startswith("http"):
            continue
        found = (page.parent / target).resolve() if target else page
        if not found.exists():
            yield f"{target} does not exist"
        elif anchor and anchor not in heading_anchors(found):
            yield f"{target} has no heading {anchor}"


def test_examples_when_they_call_elephant_then_are_python_with_arguments_that_there_are():
    offenders = [f"{name_of(page)}: {call}" for page in PAGES for call in wrong_calls(page)]
    assert not offenders, "\n".join(offenders)


def wrong_calls(page):
    """Yields the calls of elephant on a page that have arguments which there are not, and blocks that are no Python."""
    called = {
        "KerasEstimator": elephant.KerasEstimator,
        "elephant.run": elephant.run,
        "SparkModel": elephant.SparkModel,
    }
    for block in blocks_of(page):
        try:
            nodes = list(ast.walk(ast.parse(block)))
        except SyntaxError as error:
            yield f"{error}: {block}"
            continue
        for node in nodes:
            thing = called.get(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
            if thing is not None:
                known = {*inspect.signature(thing).parameters, *(OPTIONS if thing is elephant.SparkModel else ())}
                unknown = {keyword.arg for keyword in node.keywords} - known
                if unknown:
                    yield f"{ast.unparse(node)}: there is no {', '.join(sorted(map(str, unknown)))}"


def test_params_when_the_page_lists_params_then_has_all_of_them_with_their_defaults():
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| ([^|]+) \|$", PARAMS.read_text(), re.MULTILINE))
    params = {
        name: parameter.default
        for name, parameter in inspect.signature(elephant.KerasEstimator).parameters.items()
        if name not in ("customObjects", "unknown")
    }
    shown = {name: WORDS[text] if text in WORDS else ast.literal_eval(text) for name, text in plain(rows).items()}
    assert shown == params


def test_params_when_the_page_says_what_params_are_for_then_in_the_words_of_the_table():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| [^|]+ \|$", PARAMS.read_text(), re.MULTILINE)
    # But for what Markdown adds, and links.
    said = {name: re.sub(r" \(\[.*\)|`", "", text).replace('"', "'") for name, text in rows if name != "model"}
    assert said == {option.param: option.help for option in elephant.options.OPTIONS}


def plain(rows):
    return {name: text.strip().strip("`") for name, text in rows.items()}


def test_docstrings_when_they_list_arguments_then_name_all_of_them():
    for thing, names in (
        (elephant.KerasEstimator, set(inspect.signature(elephant.KerasEstimator).parameters) - {"unknown"}),
        (elephant.run, set(inspect.signature(elephant.run).parameters) - {"unknown"}),
    ):
        assert {name for name in names if f"        {name}: " not in thing.__doc__} == set()


def test_run_when_its_page_shows_its_signature_then_it_is_that():
    shown = re.search(r"^elephant\.run(\(fn,.*?\))$", (ROOT / "docs" / "run.md").read_text(), re.DOTALL | re.MULTILINE)
    arguments = ast.parse(f"def run{shown[1]}: ...").body[0].args
    real = {name: one for name, one in inspect.signature(elephant.run).parameters.items() if name != "unknown"}
    assert [argument.arg for argument in [*arguments.args, *arguments.kwonlyargs]] == list(real)
    defaults = [ast.literal_eval(value) for value in [*arguments.defaults, *arguments.kw_defaults]]
    assert defaults == [real[name].default for name in list(real)[1:]]


def test_settings_of_spark_when_the_package_reads_them_then_are_documented_and_no_others():
    read = {name for path in (ROOT / "elephant").rglob("*.py") for name in SETTING.findall(path.read_text())}
    told = {name for page in PAGES for name in SETTING.findall(page.read_text())}
    assert told == read


def test_settings_of_jobs_when_listed_then_are_all_there_are():
    text = (ROOT / "spark_jobs" / "README.md").read_text()
    # Those of a training job alone are the params of another page, as the list says.
    listed = [setting for setting in SETTINGS if setting not in PARAMS_OF_JOBS or EVALUATE in setting.jobs]
    assert {setting.key for setting in listed if f"`{setting.key}`" not in text} == set()


@every_case(
    ("command", "page", "title"),
    [
        ("doctor", "doctor.md", "Option"),
        ("run", "run.md", "Option of the file's run"),
        ("report", "progress.md", "Option of the page"),
    ],
)
def test_arguments_of_programs_when_listed_then_are_all_there_are(command, page, title, capsys):
    with pytest.raises(SystemExit):
        program.main([command, "--help"])
    known = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    table = (ROOT / "docs" / page).read_text().partition(f"| {title} | |")[2].partition("| Exit code")[0]
    assert set(re.findall(r"--[a-z][a-z-]*", table)) == known


def test_arguments_of_bench_when_listed_then_are_those_that_no_training_job_has_and_its_page():
    page = (ROOT / "docs" / "performance.md").read_text()
    table = page.partition("| Argument of `elephant bench` |")[2].partition("\n\n")[0]
    listed = {name for line in table.splitlines() for name in re.findall(r"`--([a-z-]+)`", line.split(" | ")[0])}
    own = {setting.key for setting in bench.SETTINGS} - {setting.key for setting in settings_of(TRAIN)}
    assert listed == own | {"output"}


def test_deadlines_when_listed_then_have_their_values():
    text = (ROOT / "docs" / "clusters.md").read_text()
    rows = re.findall(r"^\| `(\w+_s)` \| (\d+) s(?:; (\d+) s on YARN and Kubernetes)? \|", text, re.MULTILINE)
    short = Timeouts()
    usual = {**vars(short), "slots_s": short.slot_patience_s, "executors_s": short.executor_patience_s}
    assert {name: float(value) for name, value, _ in rows} == usual
    assert {name: float(longer or value) for name, value, longer in rows} == vars(short.with_new_machines())


def test_version_and_repository_when_several_files_name_them_then_alike():
    citation, site = (ROOT / "CITATION.cff").read_text(), (ROOT / "mkdocs.yml").read_text()
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == elephant.__version__
    named = [
        re.search(r"^REPOSITORY = \"(.*)\"$", (ROOT / "setup.py").read_text(), re.MULTILINE)[1],
        re.search(r"^repo_url: (.*)$", site, re.MULTILINE)[1],
        re.search(r"^repository-code: (.*)$", citation, re.MULTILINE)[1],
    ]
    assert len(set(named)) == 1, named


def test_waits_before_a_first_step_when_listed_then_are_what_the_live_line_says():
    text = (ROOT / "docs" / "progress.md").read_text()
    table = text[text.index("| What 'starting' waits for") :].split("\n\n")[0]
    listed = {
        row.replace("2 running tasks", "{tasks} running tasks")
        for row in re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    }
    sources = "".join(path.read_text() for path in (ROOT / "elephant").rglob("*.py"))
    assert len(listed) == 5 and [row for row in listed if f'"{row}"' not in sources] == []
