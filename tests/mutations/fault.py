"""A small fault that can be planted in the code, to see whether the tests find it."""

from dataclasses import dataclass
from pathlib import Path


class FaultError(Exception):
    """A fault does not apply to the code as it is."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planted fault.

    Args:
        name: What it is called on the command line.
        file: The file to change, from the root of the repository.
        old: Text that occurs exactly once there.
        new: What takes its place.
        breaks: What goes wrong for a user, in a sentence.
        tests: Test files or node ids, one of which is expected to fail.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    def planted(self, root: Path) -> str:
        """Returns the file's text with the fault; raises FaultError when it does not apply exactly once."""
        path = root / self.file
        if not path.is_file():
            raise FaultError(f"{self.name}: there is no {self.file}")
        text = path.read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise FaultError(f"{self.name}: expected {self.old!r} once in {self.file}. Received: {count} times.")
        return text.replace(self.old, self.new)
