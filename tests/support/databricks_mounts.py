"""Mounts as Databricks has them, simulated in this process: files are written from the first byte to the last."""

import builtins

from elephant.storage import filesystem


class InOrder:
    """A file that takes bytes from the first to the last."""

    def __init__(self, file):
        self._file = file

    def write(self, content):
        return self._file.write(content)

    def flush(self):
        self._file.flush()

    def seek(self, *_):
        raise OSError(95, "Operation not supported")

    def close(self):
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def simulate_mounts(monkeypatch, folder):
    """Has a folder's ``dbfs`` stand for ``/dbfs``, and its ``Volumes`` for ``/Volumes``; returns the first, made.

    What Python opens there for writing refuses to seek.
    """
    root = folder / "dbfs"
    root.mkdir()
    mounts = (f"{root}/", f"{folder}/Volumes/")
    monkeypatch.setattr(filesystem, "_DBFS", mounts[0])
    monkeypatch.setattr(filesystem, "_VOLUMES", mounts[1])
    real = builtins.open

    def refusing(file, mode="r", *args, **kwargs):
        opened = real(file, mode, *args, **kwargs)
        return InOrder(opened) if str(file).startswith(mounts) and "r" not in mode else opened

    monkeypatch.setattr(builtins, "open", refusing)
    return root
