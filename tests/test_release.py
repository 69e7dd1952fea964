"""What a release puts on an index: a wheel, a source distribution, and a README whose links hold there."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What `python -m build` calls in an environment of its own.
_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The names in the source distribution, without its first folder; the names in the wheel; its metadata."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    # A copy of what is in the repository, because setuptools writes beside the sources.
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    if not names:
        pytest.skip("no checkout of git")
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    source, wheel = (folder / distribution(kind, tree, folder) for kind in ("build_sdist", "build_wheel"))
    with tarfile.open(source) as archive:
        in_source = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return names, in_source, set(archive.namelist()), message_from_string(archive.read(metadata).decode())


def distribution(kind, tree, folder):
    """Returns the name of the file that the backend made."""
    command = [sys.executable, "-c", _BUILD, kind, str(folder)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_distributions_when_built_then_the_source_has_the_tree_and_the_wheel_the_typed_package(built):
    names, in_source, in_wheel, _ = built
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
    names, _, _, metadata = built
    text = metadata.get_payload()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 20
    assert [link for link in links if not re.match(r"https://|#", link)] == []
    address = metadata["Home-page"] or ""
    linked = {match[1] for link in links if (match := re.match(rf"{address}/(?:blob|raw)/main/([^#]+)", link))}
    assert len(linked) > 10 and [name for name in linked if not (ROOT / name).exists()] == []
