"""Reads TFRecord files of ``tf.train.Example`` with TensorFlow: ``python -m elephant.rank.input.tfrecord_reader``.

A process of its own, as training is: TensorFlow's memory and threads are gone when
its rows are read. It gets what to read as JSON through its standard input, and writes
an Arrow stream to its standard output; what went wrong it writes to a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import fs as arrow_fs

from elephant.errors import DataError, ElephantError, first_line, kind_of, topic_of
from elephant.storage.filesystem import Found, open_file_system, refuse_other_file

_BATCH_ROWS = 1024
_LOOKED_AT = 100
# Which of TensorFlow's types each kind of feature has, and what Arrow calls it.
_KINDS = {"float_list": "float32", "int64_list": "int64", "bytes_list": "string"}
_ARROW = {"float32": pa.float32(), "int64": pa.int64(), "string": pa.binary()}


def compression_of(path: str) -> str:
    """Returns TensorFlow's word for the compression of a file, by the file's name.

    >>> compression_of("rows.tfrecord.gz"), compression_of("rows.tfrecord")
    ('GZIP', '')
    """
    return "GZIP" if path.endswith(".gz") else ""


def describe(url: str, found: Sequence[Found]) -> dict[str, tuple[str, bool]]:
    """Returns the features of a data set's first records, by name: their kind, and whether each has one value.

    Raises:
        DataError: They hold something else than ``tf.train.Example``, or nothing.
    """
    import tensorflow as tf

    system, _ = open_file_system(url)
    features: dict[str, tuple[str, bool]] = {}
    for file in found:
        with _local_copy(system, file) as path:
            try:
                for record in tf.data.TFRecordDataset(path, compression_of(file.path)).take(_LOOKED_AT):
                    _look_at(tf.train.Example.FromString(record.numpy()), features)
            except Exception as error:
                raise _unreadable(file, error) from error
        if features:
            return features
    raise DataError(f"{url}: expected TFRecord files of tf.train.Example with features. Received: none in them.")


def _look_at(example: Any, features: dict[str, tuple[str, bool]]) -> None:
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind")
        if kind is not None:
            single = len(getattr(feature, kind).value) == 1
            features[name] = (kind, single and features.get(name, (kind, True))[1])


def read_shares(
    url: str, shares: Sequence[tuple[Found, int, int]], features: Mapping[str, tuple[str, bool]]
) -> Iterator[pa.RecordBatch]:
    """Yields records as record batches: lists, or numbers and bytes where each record has one value.

    Args:
        features: What to read, as `describe` gives it.

    Raises:
        DataError: A file has changed or cannot be read, or a record has not the values that it should.
    """
    system, _ = open_file_system(url)
    for found, index, count in shares:
        refuse_other_file(system, found)
        with _local_copy(system, found) as path:
            yield from _read_file(path, found, index, count, features)


def _read_file(
    path: str, found: Found, index: int, count: int, features: Mapping[str, tuple[str, bool]]
) -> Iterator[pa.RecordBatch]:
    import tensorflow as tf

    records = tf.data.TFRecordDataset(path, compression_of(found.path), buffer_size=4 << 20)
    if count > 1:
        records = records.shard(count, index)
    wanted = {
        name: tf.io.RaggedFeature(_KINDS[kind], row_splits_dtype=tf.int64) for name, (kind, _) in features.items()
    }
    row = 0
    try:
        for batch in records.batch(_BATCH_ROWS).map(lambda some: tf.io.parse_example(some, wanted)).prefetch(2):
            arrays = [_column(batch[name], features[name], name, found, row) for name in features]
            yield pa.RecordBatch.from_arrays(arrays, list(features))
            row += len(arrays[0])
    except tf.errors.OpError as error:
        raise _unreadable(found, error) from error


def _column(values: Any, feature: tuple[str, bool], name: str, found: Found, first_row: int) -> pa.Array:
    kind, single = feature
    lengths = np.diff(values.row_splits.numpy())
    elements = pa.array(values.values.numpy(), _ARROW[_KINDS[kind]])
    if not single:
        offsets = pa.array(values.row_splits.numpy().astype(np.int32))
        return pa.ListArray.from_arrays(offsets, elements)
    wrong = np.flatnonzero(lengths != 1)
    if len(wrong):
        raise DataError(
            f"{found.path}: expected one value of the feature {name!r} in every record, as in the first ones. "
            f"Received: {int(lengths[wrong[0]])} in record {first_row + int(wrong[0])} of those read here. Say what it "
            f"is: elephant.Files(path, schema='{name} array<...>, ...')."
        )
    return elements


@contextlib.contextmanager
def _local_copy(system: Any, found: Found) -> Iterator[str]:
    """A file where TensorFlow can read it: where it is, or copied to this host for the time of a ``with`` block."""
    if isinstance(system, arrow_fs.LocalFileSystem):
        yield found.path
        return
    with tempfile.TemporaryDirectory(prefix="elephant-records-") as folder:
        target = str(Path(folder) / "records")
        arrow_fs.copy_files(
            found.path, target, source_filesystem=system, destination_filesystem=arrow_fs.LocalFileSystem()
        )
        yield target


def _unreadable(found: Found, error: Exception) -> DataError:
    reason = first_line(getattr(error, "message", error))
    return DataError(f"{found.path}: expected TFRecords of tf.train.Example that can be read. Received: {reason}")


def main(failure_file: str) -> None:
    """Reads what standard input asks for; a failure goes to the file, for the process that started this one."""
    # What TensorFlow prints must not get into the stream.
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        asked = json.load(sys.stdin)
        features = {name: (str(kind), bool(single)) for name, (kind, single) in asked["features"].items()}
        shares = [(Found(*found), index, count) for found, index, count in asked["shares"]]
        _write(stream, features, read_shares(asked["url"], shares, features))
    except Exception as error:
        trace = "" if isinstance(error, ElephantError) else traceback.format_exc()
        said = {"kind": kind_of(error), "message": str(error), "traceback": trace, "topic": topic_of(error)}
        Path(failure_file).write_text(json.dumps(said))
        sys.exit(1)


def _write(stream: Any, features: Mapping[str, tuple[str, bool]], batches: Iterator[pa.RecordBatch]) -> None:
    types = {name: _ARROW[_KINDS[kind]] for name, (kind, _) in features.items()}
    schema = pa.schema(
        [(name, types[name] if single else pa.list_(types[name])) for name, (_, single) in features.items()]
    )
    with stream, pa.ipc.new_stream(stream, schema) as writer:
        for batch in batches:
            writer.write_batch(batch.cast(schema))


if __name__ == "__main__":
    main(sys.argv[1])
