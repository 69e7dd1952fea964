"""What doctor asks of each executor besides the facts of the pre-flight: limits, time, GPUs, the way to the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# What TensorFlow says of itself when it is asked in a process of its own.
_TENSORFLOW = "import tensorflow as tf; print('gpus', len(tf.config.list_physical_devices('GPU')))"


def probe_function(
    facts: Callable[[], dict[str, Any]], knock: Callable[[], str] | None
) -> Callable[[], dict[str, Any]]:
    """Returns the function that tells an executor's facts.

    Args:
        facts: What `elephant.cluster.executor_facts.facts_function` returned.
        knock: What `elephant.cluster.door.knock_function` returned; None when the driver has no address to knock at.
    """

    def probe() -> dict[str, Any]:
        import resource
        import shutil
        import time

        try:
            shared = shutil.disk_usage("/dev/shm").free
        except OSError:
            shared = None
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return {
            **facts(),
            "time": time.time(),
            "shared_memory_bytes": shared,
            "descriptors": -1 if limit == resource.RLIM_INFINITY else limit,
            "unreached": None if knock is None else knock(),
        }

    return probe


def gpu_function(timeout_s: float) -> Callable[[], dict[str, Any]]:
    """Returns the function that tells which GPUs an executor has, and whether TensorFlow can use them.

    TensorFlow is imported in a process of its own: a Python worker of Spark's that had
    once taken hold of a GPU would keep it.

    Args:
        timeout_s: How long that process may take.
    """
    code = _TENSORFLOW

    def look_for_gpus() -> dict[str, Any]:
        import os
        import shutil
        import socket
        import subprocess
        import sys

        def output(*command: str) -> tuple[str, str]:
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=timeout_s,
                    check=False,
                    env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                )
            except subprocess.TimeoutExpired:
                return "", f"no answer within {timeout_s:g} s"
            except OSError as error:
                return "", str(error)
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            return done.stdout.decode(errors="replace"), "" if done.returncode == 0 else "".join(last)

        program = shutil.which("nvidia-smi")
        listed, complaint = output(program, "-L") if program else ("", "no nvidia-smi")
        counted, error = output(sys.executable, "-c", code)
        numbers = [line.split()[1] for line in counted.splitlines() if line.startswith("gpus ")]
        return {
            "host": socket.gethostname(),
            "gpus": [line for line in listed.splitlines() if line.startswith("GPU ")],
            "complaint": complaint,
            "tensorflow": int(numbers[0]) if numbers else None,
            "error": error,
        }

    return look_for_gpus
