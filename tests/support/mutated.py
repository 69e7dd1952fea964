"""What a hostile peer, or a damaged file, may have in the place of a message: mutations of valid ones, any JSON."""

import struct
import zlib

import numpy as np
from hypothesis import strategies as st

from elephant.net.frames import Message, encode

# The ends of the ranges of integers, and what lies beside them.
EDGES = sorted({
    edge for bits in (7, 8, 15, 16, 31, 32, 63, 64) for edge in (2**bits - 1, 2**bits, -(2**bits), 2**bits + 1)
})  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from(EDGES) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mutated(draw, content):
    """Returns bytes with a few changes: some of them replaced, left out, doubled or added, or the end cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        stop = min(start + draw(st.sampled_from([0, 1, 1, 2, 4, 8, 64])), len(data))
        what = draw(st.sampled_from(["bytes", "integer", "left out", "doubled", "cut off"]))
        if what == "bytes":
            data[start:stop] = draw(st.binary(max_size=8))
        elif what == "integer":
            data[start : start + 8] = struct.pack("<Q", draw(st.sampled_from(EDGES)) % 2**64)
        elif what == "left out":
            del data[start:stop]
        elif what == "doubled":
            data[start:start] = data[start:stop]
        else:
            del data[start:]
    return bytes(data)


@st.composite
def mutated_fields(draw, fields):
    """Returns fields of a message of which some have another value, are missing, or are no fields of it."""
    fields = dict(fields)
    for name in draw(st.lists(st.sampled_from([*fields, "more"]), min_size=1, max_size=2)):
        if draw(st.integers(0, 3)):
            # Of the same form most often, or a check of the form is all that is tried.
            value = fields.get(name)
            numbers = st.integers(0, 9) | st.sampled_from([-1, *EDGES])
            near = numbers if type(value) is int else st.lists(numbers, max_size=4) if type(value) is list else JSON
            fields[name] = draw(near | JSON)
        else:
            fields.pop(name, None)
    return fields


@st.composite
def mutated_arrays(draw, arrays):
    """Returns arrays of which some have another dtype, shape or value, are missing, or are there twice."""
    arrays = list(arrays)
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.integers(0, len(arrays)))
        what = draw(st.sampled_from(["dtype", "shape", "values", "left out", "doubled", "another"]))
        if what == "another" or place == len(arrays):
            arrays.insert(place, np.full(draw(st.integers(0, 3)), 1, draw(st.sampled_from(["u1", "i8", "f4", "?"]))))
        elif what == "dtype":
            with np.errstate(all="ignore"):
                arrays[place] = arrays[place].astype(draw(st.sampled_from(["f2", "f4", "f8", "i4", "i8", "u8"])))
        elif what == "shape":
            arrays[place] = draw(st.sampled_from([np.ravel, np.atleast_2d, np.atleast_3d, np.sum]))(arrays[place])
            arrays[place] = np.asarray(arrays[place])
        elif what == "values":
            odd = draw(st.sampled_from([np.nan, np.inf, -np.inf, -1, 0, 1, 2**31, 2**63]))
            with np.errstate(all="ignore"):
                arrays[place] = np.full(arrays[place].shape, odd).astype(arrays[place].dtype)
        elif what == "left out":
            del arrays[place]
        else:
            arrays.insert(place, arrays[place])
    return tuple(arrays)


@st.composite
def mutated_message(draw, message):
    """Returns a message that differs from a valid one in fields or arrays; now and then it is that one itself."""
    fields, arrays = message.fields, message.arrays
    # What is wrong in two ways is refused for the first one.
    what = draw(st.sampled_from(["none", "fields", "arrays"]))
    if what == "fields":
        fields = draw(mutated_fields(fields))
    elif what == "arrays":
        arrays = draw(mutated_arrays(arrays))
    return Message(kind=message.kind, fields=fields, arrays=arrays)


def frame_of(message):
    """Returns a message as it travels."""
    return b"".join(bytes(part) for part in encode(message))


def with_right_checksum(frame, header_bytes):
    """Returns a frame whose header has the checksum that belongs to it, so that a mutation of it is looked at."""
    if len(frame) < header_bytes:
        return frame
    leading = frame[: header_bytes - 4]
    return leading + struct.pack("<I", zlib.crc32(leading)) + frame[header_bytes:]
