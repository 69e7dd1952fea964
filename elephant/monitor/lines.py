"""What a process prints, as lines that are fit to be shown: bytes come in, short lines of plain text go out."""

from __future__ import annotations

import codecs
import re

LONGEST = 2000
_CUT = " ... (cut)"
# Colours and movements of the cursor (ECMA-48).
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\-_])?")
# What TensorFlow, and what it brings, say of themselves wherever they are imported, and where there is no GPU.
_STAMP = r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: )"
_NOISE = re.compile(
    rf"I0000 00:00:|{_STAMP}I |WARNING: All log messages before absl::InitializeLog|"
    r"To enable the following instructions:|"
    rf"([WE]0000 00:00:|{_STAMP}[WE] ).*"
    r"(Unable to register cu|computation placer already registered|failed call to cuInit|cuda_diagnostics|TF-TRT)"
)


class LineCutter:
    """Cuts bytes into lines of text; bytes that are no UTF-8, and lines without an end, are no trouble.

    A line that is written over (``\\r``, as progress bars do) is as it was left. One that is longer than
    `LONGEST` characters is cut there.

    >>> cutter = LineCutter()
    >>> cutter.feed(b"one\\nt"), cutter.feed(b"wo\\r\\n10 %\\r20 %\\nrest"), cutter.rest()
    (['one'], ['two', '20 %'], ['rest'])
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""
        self._is_cut = False

    def feed(self, chunk: bytes) -> list[str]:
        """Returns the lines that end with these bytes."""
        *ended, rest = (self._begun + self._decoder.decode(chunk)).split("\n")
        lines = []
        for text in ended:
            lines += self._line(text)
            self._is_cut = False
        if "\r" in rest:
            rest = _overwritten(rest)
        if len(rest) > LONGEST:
            lines += self._line(rest)
            # What more there is of it goes, up to its end.
            self._is_cut, rest = True, ""
        self._begun = rest
        return lines

    def rest(self) -> list[str]:
        """Returns the last line, when it has no end."""
        return self._line(self._begun) if self._begun else []

    def _line(self, text: str) -> list[str]:
        return [] if self._is_cut else [shown(text)]


def shown(text: str) -> str:
    """Returns a line as it may be shown: without what would move a cursor, and not too long.

    >>> shown("\\x1b[31mred\\x1b[0m\\ttext\\x00")
    'red    text\\ufffd'
    """
    plain = _ESCAPES.sub("", _overwritten(text).rstrip("\r")[: 2 * LONGEST]).replace("\t", "    ")
    plain = "".join(letter if letter.isprintable() else "\ufffd" for letter in plain)
    return plain if len(plain) <= LONGEST else plain[:LONGEST] + _CUT


def _overwritten(text: str) -> str:
    """Returns what a terminal still shows of a line that may not have ended."""
    body = text.rstrip("\r")
    # The last one may belong to the end of the line.
    return body.rpartition("\r")[2] + text[len(body) : len(body) + 1]


def is_noise(line: str) -> bool:
    """Returns whether a line is one that TensorFlow prints in every process, whatever it does.

    >>> is_noise("2026-11-22 10:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.")
    True
    >>> is_noise("loss is NaN")
    False
    """
    return _NOISE.match(line) is not None
