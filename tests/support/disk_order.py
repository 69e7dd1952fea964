"""In which order files are made durable and moved into place, seen where the system is called."""

import os


class DiskOrder:
    """Notes what is flushed to the disk, moved and removed, and how many bytes a file had then.

    Args:
        monkeypatch: pytest's; it puts the functions of `os` back.

    Attributes:
        events: ``("sync", name, bytes)``, ``("replace", name)`` or ``("remove", name)``, with names without folders.
    """

    def __init__(self, monkeypatch):
        self.events = []
        self._fsync, self._replace, self._unlink = os.fsync, os.replace, os.unlink
        monkeypatch.setattr(os, "fsync", self._note_sync)
        monkeypatch.setattr(os, "replace", self._note_replace)
        monkeypatch.setattr(os, "unlink", self._note_remove)

    def _note_sync(self, descriptor):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.events.append(("sync", name, os.fstat(descriptor).st_size))
        self._fsync(descriptor)

    def _note_replace(self, source, target):
        self.events.append(("replace", os.path.basename(target)))
        self._replace(source, target)

    def _note_remove(self, path, **options):
        self.events.append(("remove", os.path.basename(path)))
        self._unlink(path, **options)


def failing_replace(source, target):
    """Fails as a move does on a file system that has gone read-only."""
    raise OSError(30, "Read-only file system")
