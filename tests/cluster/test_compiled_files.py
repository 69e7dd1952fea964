"""Compiled files of an executor's processes: kept in a private folder of its own where they would be kept nowhere."""

import os
import subprocess
import sys

import pytest

from elephant.cluster import compiled_files

WAIT_S = 60


@pytest.fixture
def local(tmp_path, monkeypatch):
    """Spark's local folder, of an executor above this process, which has a backend that is not compiled."""
    package, folder = tmp_path / "packages" / "uncompiled_backend", tmp_path / "local"
    package.mkdir(parents=True)
    folder.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(compiled_files, "executor_above", lambda process: (1, "0"))
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(folder))
    return folder


def environment(**more):
    base = {name: value for name, value in os.environ.items() if name not in ("PYTHONPYCACHEPREFIX", "KERAS_BACKEND")}
    base |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "KERAS_BACKEND": "uncompiled_backend"}
    return base | {"PYTHONDONTWRITEBYTECODE": "1"} | more


def test_files_when_none_may_be_written_then_are_kept_in_a_folder_of_this_user_alone(local):
    given = environment()
    made = compiled_files.compiled_files(given)
    assert made == {"PYTHONPYCACHEPREFIX": str(local / "pycache"), "PYTHONDONTWRITEBYTECODE": ""}
    known = (local / "pycache").stat()
    assert known.st_mode & 0o777 == 0o700 and known.st_uid == os.geteuid()
    command = [sys.executable, "-c", "import uncompiled_backend; print(uncompiled_backend.__cached__)"]
    done = subprocess.run(command, env=given | made, stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.startswith(str(local / "pycache")) and os.path.exists(done.stdout.strip())
    # The next process gets the same.
    assert compiled_files.compiled_files(given) == made


def test_files_when_packages_are_read_only_then_are_kept_all_the_same(local, monkeypatch):
    given = environment(PYTHONDONTWRITEBYTECODE="")
    assert compiled_files.compiled_files(given) == {}
    package = local.parent / "packages" / "uncompiled_backend"
    monkeypatch.setattr(os, "access", lambda path, mode: path != package)
    assert compiled_files.compiled_files(given)["PYTHONPYCACHEPREFIX"] == str(local / "pycache")


@pytest.mark.parametrize("reason", ["own folder", "compiled", "no executor", "no such package"])
def test_files_when_there_is_no_need_then_nothing_changes(local, monkeypatch, reason):
    given = environment()
    if reason == "own folder":
        given["PYTHONPYCACHEPREFIX"] = "/users/own"
    elif reason == "compiled":
        command = [sys.executable, "-c", "import uncompiled_backend"]
        subprocess.run(command, env=given | {"PYTHONDONTWRITEBYTECODE": ""}, timeout=WAIT_S, check=True)
    elif reason == "no executor":
        monkeypatch.setattr(compiled_files, "executor_above", lambda process: None)
    else:
        given["KERAS_BACKEND"] = "no_such_backend"
    assert compiled_files.compiled_files(given) == {}
    assert list(local.iterdir()) == []


@pytest.mark.parametrize(
    "trouble", ["others may enter", "others may replace it", "a link", "no folder", "no folder of Spark's"]
)
def test_files_when_others_could_write_them_then_none_are_kept(local, tmp_path, monkeypatch, trouble):
    if trouble == "others may enter":
        (local / "pycache").mkdir()
        (local / "pycache").chmod(0o755)
    elif trouble == "others may replace it":
        local.chmod(0o777)
    elif trouble == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (local / "pycache").symlink_to(tmp_path / "elsewhere")
    elif trouble == "no folder":
        (local / "pycache").write_text("")
    else:
        monkeypatch.delenv("SPARK_LOCAL_DIRS")
    assert compiled_files.compiled_files(environment()) == {}
