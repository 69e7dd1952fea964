"""How long an allreduce between two processes of this machine takes, against a plain stream of the same bytes.

::

    python benchmarks/allreduce.py

Each rank is pinned to a core of its own. Repetitions of the ring and of the stream
take turns, so that both meet the same machine. Prints one line of JSON per size.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import socket
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

from elephant.collective import form_collective
from elephant.net import Listener

WORLD_SIZE = 2
HOST = "127.0.0.1"
TIMEOUT_S = 300.0
# Bytes, and repetitions of which the median is taken.
SIZES = {4 * 2**10: 301, 256 * 2**10: 151, 4 * 2**20: 51, 64 * 2**20: 11}

Interval = tuple[float, float]


def run_rank(rank: int, pipe: Connection, token: bytes, sizes: dict[int, int]) -> None:
    """Measures one rank, and sends for each size a list of (allreduce, stream) intervals."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    with Listener.bind(HOST) as listener, socket.create_server((HOST, 0)) as plain:
        pipe.send((listener.address, plain.getsockname()[:2]))
        ring_addresses, plain_address = pipe.recv()
        with (
            form_collective(rank, ring_addresses, listener, token, "benchmark", TIMEOUT_S) as ring,
            open_stream(rank, plain, plain_address) as stream,
        ):
            for size, repetitions in sizes.items():
                array = np.empty(size // 4, np.float32)
                intervals = []
                for _ in range(repetitions + 2):
                    ring.barrier()
                    array.fill(rank + 1)
                    ring.barrier()
                    reduced = timed(lambda array=array: ring.allreduce_(array))
                    if not (array == 3.0).all():
                        raise SystemExit(f"rank {rank}: expected the sum 3 in every element. Received: {array}.")
                    ring.barrier()
                    intervals.append((reduced, timed(lambda array=array: pass_on(rank, stream, array))))
                # The first ones touch memory and grow socket buffers.
                pipe.send(intervals[2:])


def open_stream(rank: int, listening: socket.socket, address: tuple[str, int]) -> socket.socket:
    """Returns a plain connection from rank 0 to rank 1, with the system's own buffers."""
    if rank == 0:
        stream = socket.create_connection(address, timeout=TIMEOUT_S)
    else:
        listening.settimeout(TIMEOUT_S)
        stream, _ = listening.accept()
        stream.settimeout(TIMEOUT_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def pass_on(rank: int, stream: socket.socket, array: np.ndarray) -> None:
    """Sends the array's bytes on rank 0 and receives them on rank 1."""
    view = memoryview(array).cast("B")
    if rank == 0:
        stream.sendall(view)
        return
    while len(view):
        view = view[stream.recv_into(view) :]


def timed(action) -> Interval:
    """Returns when the action began and ended, in seconds of the clock that all processes share."""
    began = time.monotonic()
    action()
    return began, time.monotonic()


def summarise(size: int, by_rank: list[list[tuple[Interval, Interval]]]) -> dict[str, object]:
    """Returns the medians of one size: ``by_rank[rank][repetition]`` holds the two intervals."""
    times: dict[str, list[float]] = {"allreduce": [], "stream": []}
    for repetition in zip(*by_rank, strict=True):
        reduced, passed = zip(*repetition, strict=True)
        # From the moment at which all ranks are there to the one at which all have the result.
        times["allreduce"].append(max(end for _, end in reduced) - max(begin for begin, _ in reduced))
        # From the sender's start to the receiver's end.
        times["stream"].append(passed[1][1] - passed[0][0])
    medians = {name: statistics.median(values) * 1000 for name, values in times.items()}
    return {
        "bytes": size,
        "ranks": len(by_rank),
        "repetitions": len(times["stream"]),
        "allreduce_ms": round(medians["allreduce"], 4),
        "stream_ms": round(medians["stream"], 4),
        "ratio": round(medians["allreduce"] / medians["stream"], 2),
    }


def main() -> None:
    """Starts the ranks and prints what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, help="of every size (from 301 of the smallest to 11 of the largest)")
    options = parser.parse_args()
    sizes = {size: options.repetitions or repetitions for size, repetitions in SIZES.items()}

    context = multiprocessing.get_context("spawn")
    token = secrets.token_bytes(32)
    pipes, processes = [], []
    for rank in range(WORLD_SIZE):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_rank, args=(rank, theirs, token, sizes), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    addresses = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(([ring for ring, _ in addresses], addresses[1][1]))
    for size in sizes:
        print(json.dumps(summarise(size, [pipe.recv() for pipe in pipes])), flush=True)
    for process in processes:
        process.join(TIMEOUT_S)


if __name__ == "__main__":
    main()
