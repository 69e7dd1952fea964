"""The manifest of a checkpoint: a small JSON file that is written last, and makes the rest valid."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = 1
_NAME = re.compile(r"^epoch-(\d{8})\.([0-9a-f]{16})\.(json|state\.npz|result\.npz)$")


class DamagedError(ValueError):
    """A file of a checkpoint is not what was written."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file that belongs to a checkpoint.

    Args:
        name: In the checkpoint's folder.
        num_bytes: Its length.
        crc: The CRC-32 of its bytes.
    """

    name: str
    num_bytes: int
    crc: int

    def __post_init__(self) -> None:
        known = isinstance(self.name, str) and is_ours(self.name) and not is_manifest(self.name)
        _require(known, f"expected the name of a checkpoint's arrays. Received: {self.name!r}")
        _require(_is_count(self.num_bytes) and _is_count(self.crc), f"{self.name}: expected a length and a checksum")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is, and which files belong to it.

    Args:
        epochs: Epochs that are done.
        number: Counts the checkpoints of a folder: of two of one epoch, the later one has the higher number.
        finished: Whether the fit has ended, and has nothing left to do.
        state: The arrays of the fit's state.
        result: The model's variables at the end of the fit, where they are others than those of the state.
        history: One number per epoch and metric.
        facts: What else is no array.
        finite: Whether the model has neither NaN nor infinity.

    >>> stored = StoredFile(name="epoch-00000001.0123456789abcdef.state.npz", num_bytes=3, crc=5)
    >>> manifest = Manifest(epochs=1, number=4, state=stored)
    >>> Manifest.from_bytes(manifest.to_bytes()) == manifest
    True
    """

    epochs: int
    number: int
    state: StoredFile
    result: StoredFile | None = None
    finished: bool = False
    history: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    finite: bool = True

    def __post_init__(self) -> None:
        _require(_is_count(self.epochs) and _is_count(self.number), "epochs and number: expected counts")
        _require(all(isinstance(one, bool) for one in (self.finished, self.finite)), "expected booleans")
        _require(isinstance(self.facts, Mapping), "facts: expected an object")
        _require(
            isinstance(self.history, Mapping) and all(isinstance(one, (list, tuple)) for one in self.history.values()),
            "history: expected lists",
        )

    @property
    def files(self) -> list[StoredFile]:
        """Those that belong to it."""
        return [self.state] if self.result is None else [self.state, self.result]

    def is_done(self, epochs: int | None = None) -> bool:
        """Returns whether nothing is left to train.

        Args:
            epochs: Asked for now; None for as many as its fit was asked for.
        """
        enough = epochs is None or self.epochs >= epochs or bool(self.facts.get("stopped"))
        return self.finished and enough

    def to_bytes(self) -> bytes:
        """Returns the file's content."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        return json.dumps({"crc": zlib.crc32(text.encode()), "body": text}).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Returns what `to_bytes` was made of.

        Raises:
            DamagedError: The content is not whole, or of a format that this version does not know.
        """
        try:
            outer = json.loads(content)
            if zlib.crc32(outer["body"].encode()) != outer["crc"]:
                raise DamagedError("a manifest whose checksum does not hold")
            body = json.loads(outer["body"])
            if (version := body.pop("format")) != FORMAT:
                raise DamagedError(f"format {version!r}, of a later version of elephant; this one reads {FORMAT}")
            files = {name: None if body[name] is None else StoredFile(**body[name]) for name in ("state", "result")}
            return cls(**{**body, **files})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise error if isinstance(error, DamagedError) else DamagedError(f"no manifest: {error}") from error


def _require(is_so: bool, expected: str) -> None:
    if not is_so:
        raise DamagedError(expected)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def file_name(epochs: int, writing: str, kind: str) -> str:
    """Returns the name of a file of a checkpoint.

    Args:
        epochs: Epochs that are done.
        writing: Sixteen hexadecimal digits that no other writing has, so that no file is ever written over.
        kind: ``"json"``, ``"state.npz"`` or ``"result.npz"``.
    """
    return f"epoch-{epochs:08d}.{writing}.{kind}"


def is_ours(name: str) -> bool:
    """Whether a name is one of `file_name`.

    >>> is_ours("epoch-00000001.0123456789abcdef.json"), is_ours("notes.json")
    (True, False)
    """
    return _NAME.match(name) is not None


def is_manifest(name: str) -> bool:
    """Whether a name is that of a manifest."""
    return is_ours(name) and name.endswith(".json")


def epochs_of(name: str) -> int:
    """Returns the epochs that a file's name says."""
    match = _NAME.match(name)
    if match is None:
        raise ValueError(f"{name!r} is no file of a checkpoint")
    return int(match[1])
