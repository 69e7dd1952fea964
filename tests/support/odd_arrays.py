"""Archives of arrays that are none, though their checksums are right."""

import io
import struct
import zipfile


def member(name, content, compression=zipfile.ZIP_STORED):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as archive:
        archive.writestr(name, content)
    return made.getvalue()


def npy(text, data=b""):
    """Returns an array's file whose header is a text."""
    header = text.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def unknown_compression():
    content = member("arr_0.npy", b"x")
    # The method is in the member's own header, and in the directory.
    at, there = content.index(b"PK\x03\x04") + 8, content.index(b"PK\x01\x02") + 10
    return content[:at] + b"\x63\x00" + content[at + 2 : there] + b"\x63\x00" + content[there + 2 :]


SHAPE = "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }"
ODD_ARRAYS = {
    "nothing": b"",
    "another name": member("weights.npy", npy(SHAPE % "(1,)", b"1234")),
    "an empty member": member("arr_0.npy", b""),
    "no header": member("arr_0.npy", npy("{")),
    "a header of another type": member("arr_0.npy", npy("[1, 2]")),
    "a type that is none": member("arr_0.npy", npy("{'descr': 3, 'fortran_order': False, 'shape': (1,), }")),
    "too few bytes": member("arr_0.npy", npy(SHAPE % "(7,)", b"1234")),
    "more than there is memory": member("arr_0.npy", npy(SHAPE % "(1000000000000000,)")),
    "a negative shape": member("arr_0.npy", npy(SHAPE % "(-3,)")),
    "objects": member("arr_0.npy", npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"12345678")),
    "texts": member("arr_0.npy", npy("{'descr': '<U1', 'fortran_order': False, 'shape': (1,), }", b"1234")),
    "a compression that nobody knows": unknown_compression(),
}
