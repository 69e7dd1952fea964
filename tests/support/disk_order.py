"""In which order files are made durable and moved into place, seen where the system is called."""

import os
from pathlib import Path


class DiskOrder:
    """Notes what is flushed to the disk, moved and removed, and how many bytes a file had then.

    Args:
        monkeypatch: pytest's; it puts back what is replaced here.

    Attributes:
        events: ``("sync", name, bytes)``, ``("replace", name)`` or ``("remove", name)``, with names without folders.
    """

    def __init__(self, monkeypatch):
        self.events = []
        self._fsync, self._replace, unlink = os.fsync, os.replace, Path.unlink

        def note_remove(path, missing_ok=False):
            self.events.append(("remove", path.name))
            unlink(path, missing_ok)

        monkeypatch.setattr(os, "fsync", self._note_sync)
        monkeypatch.setattr(os, "replace", self._note_replace)
        monkeypatch.setattr(Path, "unlink", note_remove)

    def _note_sync(self, descriptor):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.events.append(("sync", name, os.fstat(descriptor).st_size))
        self._fsync(descriptor)

    def _note_replace(self, source, target):
        self.events.append(("replace", os.path.basename(target)))
        self._replace(source, target)


def failing_replace(source, target):
    """Fails as a move does on a file system that has gone read-only."""
    raise OSError(30, "Read-only file system")
