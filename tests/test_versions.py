"""The versions that elephant is for: the bounds of setup.py against doctor's, constraints' and the matrix' ones."""

import re
from pathlib import Path

import pytest
import yaml
from lower_bounds import lower_bounds
from packaging.requirements import Requirement
from packaging.version import Version

from elephant.cluster.checks.executor_checks import oldest_arrow
from elephant.cluster.checks.machine_checks import check_packages

ROOT = Path(__file__).parents[1]
CONSTRAINTS = sorted((ROOT / "docs" / "constraints").glob("*.txt"))
MATRIX = yaml.safe_load((ROOT / "tests" / "versions" / "matrix.yaml").read_text())


@pytest.fixture(scope="module")
def bounds():
    """What setup.py takes of each package that users install, as texts of requirements by name."""
    source = (ROOT / "setup.py").read_text()
    # Extras that no cluster installs.
    source = re.sub(r'^ +"local": .*$', "", source[: source.index('"test": [')], flags=re.MULTILINE)
    texts = [text for _, text in re.findall(r"""(["'])([a-z][\w-]*[<>=!][^"']*?)\1""", source)]
    found = [Requirement(text.split(";")[0]) for text in texts]
    return {name: [one for one in found if one.name == name] for name in {one.name for one in found}}


def pins_in(path):
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    pins = [Requirement(line) for line in lines]
    assert lines and all(re.fullmatch(r"==[\d.]+(\.post\d)?", str(pin.specifier)) for pin in pins)
    return {pin.name: str(pin.specifier)[2:] for pin in pins}


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_when_read_then_are_pins_that_setup_py_takes_and_that_the_page_links(path, bounds):
    pins = pins_in(path)
    # The rest of what a client of Spark Connect needs counts where PySpark is one.
    of_connect = set() if Version(pins["pyspark"]) >= Version("4") else {"grpcio"}
    refused = [
        f"{name} {version} for {one}"
        for name, version in pins.items()
        for one in bounds.get(name, [])
        if name not in of_connect and str(one) != "pyspark>=4.0" and Version(version) not in one.specifier
    ]
    assert refused == []
    assert f"(constraints/{path.name})" in (ROOT / "docs" / "install.md").read_text()


def test_doctor_when_versions_are_the_oldest_that_setup_py_takes_then_is_content(bounds):
    oldest = {
        name: min(re.findall(r">=([\d.]+)", str(bounds[name][0].specifier)), key=Version)
        for name in ("keras", "numpy", "pandas", "pyarrow", "pyspark", "tensorflow")
    }
    assert oldest["pyarrow"] == oldest_arrow(oldest["pyspark"])
    assert [one.name for one in check_packages(oldest, "tensorflow") if one.status != "ok"] == []
    for name in ("keras", "numpy", "pandas", "pyarrow", "tensorflow"):
        *numbers, last = oldest[name].split(".")
        older = ".".join(numbers + [str(int(last) - 1)]) if last != "0" else "0"
        found = check_packages({**oldest, name: older}, "tensorflow")
        assert [one.name for one in found if one.status != "ok"] == [name]


def test_matrix_when_read_then_has_each_version_of_its_axes_and_tests_that_there_are():
    rows = MATRIX["environments"]
    assert len(rows) <= 12
    assert {row["constraints"] for row in rows if "constraints" in row} == {path.name for path in CONSTRAINTS}
    pinned = [pins_of(row) for row in rows]
    for name, versions in MATRIX["axes"].items():
        for version in versions:
            newest = version == versions[-1]
            assert any((newest and name not in row) or is_of(row.get(name, ""), version) for row in pinned), name
    for test in MATRIX["tests"]:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists() and f"def {name.partition('[')[0]}" in (ROOT / file).read_text(), test


def pins_of(row):
    """Returns the versions of a row of the matrix, by name."""
    file = row.get("constraints")
    pins = pins_in(ROOT / "docs" / "constraints" / file) if file else {}
    return {**pins, **dict(pin.split("==") for pin in row.get("pins", ())), "python": row["python"]}


def is_of(version, family):
    return version == family or version.startswith(f"{family}.")


def test_lower_bounds_when_listed_for_an_audit_then_are_those_of_users_and_of_no_developer():
    metadata = ["b>=2,<3", "a>=1.0; extra == 'tls'", "c>=1; extra == 'test'", "d", "b>=1", "e>=4; python_version > '3'"]
    assert list(lower_bounds(metadata)) == ["a==1.0", "b==1", "e==4"]
