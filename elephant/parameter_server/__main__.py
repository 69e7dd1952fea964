"""The process of one server: ``python -m elephant.parameter_server``, started by `elephant.parameter_server.process`.

It is told everything through its standard input, which then stays open: when it closes, the
process that started it has ended, or wants this one to.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import select
import shutil
import signal
import socket
import sys
from pathlib import Path

from elephant.errors import DataError
from elephant.net.server import Server
from elephant.net.stream import Listener
from elephant.parameter_server import process
from elephant.parameter_server.process import ServerStartup
from elephant.parameter_server.protocol import CONTEXT
from elephant.parameter_server.request_handler import BufferPool, RequestService
from elephant.parameter_server.server import ParameterServer
from elephant.parameter_server.snapshot import Snapshotter

_LOOK_MS = 1000
# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serves until standard input closes."""
    faulthandler.enable()
    # An interrupt of the driver is the driver's to handle: it closes this process when it ends the fit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if sys.platform == "linux":
        # Stopped, it would not see its parent's end. To go on for nothing, when a mere thread has ended, does no harm.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    parent = os.getppid()
    pipe = open(0, "rb", buffering=0, closefd=False)
    try:
        startup, image = process.read(pipe)
    except DataError as error:
        # One line: what else there is to know, such as why no snapshot could be written, is in the lines before it.
        sys.exit(str(error))
    server = ParameterServer(startup.spec, image, startup.incarnation)
    snapshotter = Snapshotter(server, Path(startup.folder))
    listener = Listener(socket.socket(fileno=startup.listener_fd))
    service = RequestService(
        server, BufferPool(startup.spec.num_values, stall_s=startup.spec.stall_s), snapshotter, listener
    )
    snapshotter.start(initial=not startup.restores)
    Server(
        listener,
        startup.token,
        CONTEXT.format(run_id=startup.spec.run_id),
        service.serve,
        on_exhausted=lambda error: server.fail(str(error)),
        name="elephant-server",
    )
    _say(process.READY)
    _wait_until_orphaned(parent)
    _leave(startup)


def _wait_until_orphaned(parent: int) -> None:
    """Returns when standard input has closed, or the parent is gone while something else still holds the pipe."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    while os.getppid() == parent:
        if poller.poll(_LOOK_MS) and not os.read(0, 1):
            return
        _say(process.BEAT)


def _say(line: str) -> None:
    # A parent that is gone is noticed by other signs.
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def _leave(startup: ServerStartup) -> None:
    """Ends the process at once: nobody is left to serve, and nobody else would remove the snapshots."""
    shutil.rmtree(startup.folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
