"""Copies of the checkout, for what writes beside the sources."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tracked_files():
    """Returns the names of the files that git tracks, and of those that it would; none where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    names = [name for name in listed.stdout.split("\0") if name]
    return [name for name in names if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def copy_checkout(folder):
    """Copies those files into a folder, and returns their names."""
    names = tracked_files()
    for name in names:
        target = Path(folder) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return names
