"""What a release puts on an index: a wheel, a source distribution, and a README whose links hold there."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from checkout import copy_checkout

ROOT = Path(__file__).parents[1]
# What `python -m build` calls in an environment of its own.
_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Names in the tree, in the source distribution without its first folder, in the wheel; metadata; the wheel."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    # In a copy, because setuptools writes beside the sources.
    names = copy_checkout(tree)
    if not names:
        pytest.skip("no checkout of git")
    source, wheel = (folder / distribution(kind, tree, folder) for kind in ("build_sdist", "build_wheel"))
    with tarfile.open(source) as archive:
        in_source = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return names, in_source, set(archive.namelist()), message_from_string(archive.read(metadata).decode()), wheel


def distribution(kind, tree, folder):
    """Returns the name of the file that the backend made."""
    command = [sys.executable, "-c", _BUILD, kind, str(folder)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_distributions_when_built_then_the_source_has_the_tree_and_the_wheel_the_typed_package(built):
    names, in_source, in_wheel, _, _ = built
    kept = {name for name in names if Path(name).name != ".gitignore" and not name.startswith(".")}
    assert sorted(kept - in_source) == []
    package = {name for name in names if name.startswith("elephant/") and not name.endswith(".c")}
    assert "elephant/py.typed" in package
    assert sorted(package - in_wheel) == []
    # Besides, the libraries that are built where there is a compiler.
    others = [name for name in in_wheel - package if ".dist-info/" not in name]
    libraries = r"elephant/(backends/native/exchange|parameter_server/optimizers/native/adam)\.[\w.-]*so"
    assert len(others) in (0, 2)
    assert all(re.fullmatch(libraries, name) for name in others)


def test_description_when_it_links_then_to_files_of_the_repository_by_whole_addresses(built):
    names, _, _, metadata, _ = built
    text = metadata.get_payload()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 20
    assert [link for link in links if not re.match(r"https://|#", link)] == []
    address = metadata["Home-page"] or ""
    linked = {match[1] for link in links if (match := re.match(rf"{address}/(?:blob|raw)/main/([^#]+)", link))}
    assert len(linked) > 10 and [name for name in linked if not (ROOT / name).exists()] == []


def test_kernels_when_a_wheel_has_them_then_load_and_it_is_for_every_python_that_it_names(built, tmp_path):
    _, _, in_wheel, metadata, wheel = built
    pythons = {line.rpartition(" ")[2] for line in metadata.get_all("Classifier") if " :: 3." in line}
    settings = (ROOT / "pyproject.toml").read_text()
    assert {f"3.{minor}" for minor in re.findall(r"cp3(\d+)-manylinux", settings)} == pythons
    if not any(name.endswith(".so") for name in in_wheel):
        pytest.skip("there is no C compiler")
    assert re.search(r"-cp310-abi3-linux_\w+\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # As cibuildwheel calls it.
    command = [sys.executable, str(ROOT / "tests" / "support" / "wheel_kernels.py")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_metadata_when_read_then_has_what_an_index_shows(built):
    metadata = built[3]
    names = ("Name", "Version", "Summary", "Author", "Keywords", "Requires-Python", "Description-Content-Type")
    assert [name for name in names if not metadata[name]] == []
    assert metadata["License-Expression"] or metadata["License"]
    assert len(metadata.get_all("Project-URL")) >= 3 and len(metadata.get_all("Classifier")) > 8
