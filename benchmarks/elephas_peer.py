"""Elephas' HTTP parameter server and its client, in an environment of their own.

Elephas needs older versions of what elephant is tested with, so a process of another Python runs them.
This module has both ends: what the benchmark calls, and, when that Python runs the file, what is measured there.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# With these, Elephas 7.3 trains; it names no upper bounds itself.
REQUIREMENTS = ("elephas==7.3.*", "tensorflow==2.19.*", "keras==3.15.*", "pyspark==4.0.*", "pyarrow==18.*")
_INSTALL_S = 1800.0


@dataclass(frozen=True)
class Cycle:
    """What one exchange took.

    Args:
        get_s: Seconds of ``get_parameters``.
        update_s: Seconds of ``update_parameters``.
    """

    get_s: float
    update_s: float

    @property
    def seconds(self) -> float:
        """Both."""
        return self.get_s + self.update_s


class ElephasPeer:
    """A process that has Elephas' server beside it, and exchanges weights with it when told to.

    Args:
        python: Of the environment that `environment` made.
        units: Widths of the dense layers of the model, its input first.
        debugger: Whether Flask runs with its debugger, as Elephas lets it unless told otherwise.
    """

    def __init__(self, python: Path, units: Sequence[int], *, debugger: bool = True) -> None:
        quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "SPARK_LOCAL_IP": "127.0.0.1"}
        quiet.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [str(python), __file__, str(int(debugger)), *map(str, units)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Flask logs every request there.
            stderr=subprocess.DEVNULL,
            text=True,
            env=quiet,
        )
        self.ready = self._reply()

    def cycle(self, times: int) -> Cycle:
        """Gets the weights and pushes an update, several times in a row, as Elephas' workers do; returns the means."""
        self._process.stdin.write(f"{times}\n")
        self._process.stdin.flush()
        return Cycle(**self._reply())

    def __enter__(self) -> ElephasPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _reply(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"Elephas ended with {self._process.wait(30)}; run {__file__} by hand to see its messages."
            )
        return json.loads(line)


def environment(folder: Path) -> Path:
    """Returns the Python of an environment with Elephas, which is made first where there is none.

    Args:
        folder: Where it is, or shall be.
    """
    python = folder / "bin" / "python"
    finished = folder / "elephas-is-installed"
    if not finished.exists():
        print(f"installing {' '.join(REQUIREMENTS)} into {folder}: some minutes", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=False)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS]
        subprocess.run(command, check=True, timeout=_INSTALL_S, stdout=sys.stderr)
        finished.touch()
    return python


def dense_model(units: Sequence[int]) -> Any:
    """Returns a network of dense layers of these widths, the first one being its input's."""
    import keras

    layers = [keras.layers.Dense(width) for width in units[1:]]
    return keras.Sequential([keras.layers.Input((units[0],)), *layers])


@contextlib.contextmanager
def http_server(model: Any, debugger: bool) -> Iterator[Any]:
    """Runs Elephas' HTTP server on the model's weights, and yields a client of it."""
    from elephas.parameter import HttpClient, HttpServer
    from elephas.utils.serialization import model_to_dict

    with socket.create_server(("127.0.0.1", 0)) as free:
        # Flask cannot be given a socket: it takes the port a moment later.
        port = free.getsockname()[1]
    server = HttpServer(model_to_dict(model), port, "asynchronous", debug=debugger)
    server.start()
    try:
        yield HttpClient(port)
    finally:
        server.stop()


def main() -> None:
    """Answers each line with what one exchange took; the end of the input ends it."""
    debugger, *units = [int(word) for word in sys.argv[1:]]
    # What libraries print must not stand among the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    model = dense_model(units)
    # Elephas subtracts it.
    delta = [weights * 0 + 0.5 for weights in model.get_weights()]
    with http_server(model, bool(debugger)) as client:
        expected = client.get_parameters()[0].flat[0]
        reply({"bytes": sum(array.nbytes for array in delta)})
        for line in sys.stdin:
            times = int(line)
            get_s = update_s = 0.0
            for _ in range(times):
                began = time.perf_counter()
                weights = client.get_parameters()
                between = time.perf_counter()
                client.update_parameters(delta)
                ended = time.perf_counter()
                get_s, update_s = get_s + between - began, update_s + ended - between
                if abs(weights[0].flat[0] - expected) > 1e-3:
                    raise SystemExit(f"expected the weight {expected}. Received: {weights[0].flat[0]}.")
                expected -= delta[0].flat[0]
            reply({"get_s": get_s / times, "update_s": update_s / times})


if __name__ == "__main__":
    main()
