"""Files on any file system that Spark reaches, through the Hadoop client that Spark carries."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from elephant.errors import UnsupportedError


def write_file(session: SparkSession, path: str, content: bytes) -> None:
    """Writes one file; raises what the file system raises when it is there already.

    Args:
        session: The Spark session.
        path: Any path that Spark takes: ``hdfs://``, ``s3a://``, ``dbfs:/``, ``file:/`` or without a scheme.
        content: All of it.
    """
    with tempfile.TemporaryDirectory(prefix="elephant-save-") as folder:
        local = Path(folder) / "content"
        local.write_bytes(content)
        file_system, hadoop_path, local_path = _hadoop(session, path, local)
        file_system.copyFromLocalFile(False, False, local_path, hadoop_path)


def read_file(session: SparkSession, path: str) -> bytes | None:
    """Returns the content of one file, or None when there is none."""
    with tempfile.TemporaryDirectory(prefix="elephant-load-") as folder:
        local = Path(folder) / "content"
        file_system, hadoop_path, local_path = _hadoop(session, path, local)
        if not file_system.exists(hadoop_path):
            return None
        # The raw local file system leaves no checksum file beside the copy.
        file_system.copyToLocalFile(False, hadoop_path, local_path, True)
        return local.read_bytes()


def _hadoop(session: SparkSession, path: str, local: Path) -> tuple[Any, Any, Any]:
    context = getattr(session, "_sc", None)
    if context is None:
        raise UnsupportedError(
            "Saving and loading through Spark Connect is not available in this version of elephant. "
            "Save fitted.model with keras, or use a classic Spark session."
        )
    hadoop = context._jvm.org.apache.hadoop.fs
    target = hadoop.Path(path)
    return target.getFileSystem(context._jsc.hadoopConfiguration()), target, hadoop.Path(f"file://{local}")
