"""Files that the user's code writes by relative paths in the processes of ranks: taken there, put down on the driver.

A rank's process stands in a folder of its own, beside what elephant keeps of it. What the executor's folder holds, such
as files that Spark has shipped, is there as links.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections.abc import Mapping, Sequence
from importlib import machinery
from pathlib import Path

from elephant.errors import text_of

# Limits of a fit: so many for rank 0, and as many for all others together.
MOST_BYTES = 64 * 2**20
_MOST_FILES = 1000
_SHOWN = 10
# In lower case: some file systems tell no difference.
_IMPORTED = tuple({suffix.lower() for suffix in machinery.all_suffixes()} | {".pth", ".pyc", ".pyd", ".pyw"})


def make_folder(folder: Path) -> None:
    """Makes the folder in which a process is to stand, from where this one stands."""
    folder.mkdir()
    with contextlib.suppress(FileNotFoundError), os.scandir(os.getcwd()) as found:
        for entry in found:
            (folder / entry.name).symlink_to(os.path.abspath(entry.path))


def taken_files(folder: Path, most_bytes: int = MOST_BYTES) -> tuple[dict[str, bytes], list[str]]:
    """Returns the files below a folder, the smallest first, and in words those that there was no room for.

    Args:
        folder: Of `make_folder`. Links are left out, and what they lead to.
        most_bytes: Of all of them.
    """
    sizes: dict[str, int] = {}
    for place, _, names in os.walk(folder):
        for path in (Path(place) / name for name in names):
            # A temporary one may be gone by now.
            with contextlib.suppress(FileNotFoundError):
                about = path.lstat()
                if stat.S_ISREG(about.st_mode):
                    sizes[path.relative_to(folder).as_posix()] = about.st_size
    taken, left_out, total = dict[str, bytes](), list[str](), 0
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        total += sizes[name]
        if total <= most_bytes and len(taken) < _MOST_FILES:
            try:
                taken[os.fsencode(name).decode("utf-8", "replace")] = (folder / name).read_bytes()
            except OSError as error:
                left_out.append(f"{name} ({text_of(error)})")
        else:
            left_out.append(f"{name} ({sizes[name] / 1e6:,.1f} MB)")
    return taken, _shortened([name.encode("utf-8", "replace").decode() for name in left_out])


def put_down(files: Mapping[int, Mapping[str, bytes]], folder: Path) -> tuple[str, list[str]]:
    """Writes the files of all ranks into a folder; returns a line that says so, or nothing, and in words what failed.

    A file gets the name that it had on its rank. One that a lower rank wrote too, and that differs, is below
    ``rank-N``. What was there before, and differs, is kept with a ``~`` behind its name.

    None is put down that a program finds by its name, as Python finds ``sitecustomize.py``, or that a listing does not
    show: no rank is to decide what runs on the driver.

    Args:
        files: Contents by relative path, by rank.
    """
    owned, placed, kept, failed = dict[str, bytes](), list[str](), list[str](), list[str]()
    for rank, name, content in [(one, *file) for one in sorted(files) for file in sorted(files[one].items())]:
        if owned.get(name) == content:
            continue
        path = f"rank-{rank}/{name}" if name in owned else name
        owned[path] = content
        try:
            if _replaced(folder, path, content):
                kept.append(f"{path}~")
            placed.append(path)
        except (OSError, ValueError) as error:
            failed.append(f"{path} ({error})")
    before = f"; what was there before is {', '.join(_shortened(kept))}" if kept else ""
    if not placed:
        return "", failed
    return f"files that workers wrote are in {folder.resolve()}: {', '.join(_shortened(placed))}{before}", failed


def _replaced(folder: Path, path: str, content: bytes) -> bool:
    """Writes a file, whole or not at all; returns whether another one was there, which is kept beside."""
    _refuse_found_by_name(path)
    root = folder.resolve()
    target = root / path
    if not target.parent.resolve().is_relative_to(root) or target.name in ("", ".", ".."):
        raise ValueError(f"it would not be below {root}")
    if target.is_dir():
        raise ValueError("a folder of this name is there")
    if target.is_file() and target.stat().st_size == len(content) and target.read_bytes() == content:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{uuid.uuid4().hex}.part")
    try:
        partial.write_bytes(content)
        differs = os.path.lexists(target)
        if differs:
            target.replace(f"{target}~")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return differs


def _refuse_found_by_name(path: str) -> None:
    name = path.lower()
    if name.endswith(_IMPORTED):
        raise ValueError("Python might import it from there")
    if any(part.startswith(".") for part in name.split("/") if part not in (".", "..")):
        raise ValueError("it would be hidden")


def _shortened(names: Sequence[str]) -> list[str]:
    return [*names[:_SHOWN], f"and {len(names) - _SHOWN:,} more"] if len(names) > _SHOWN else list(names)
