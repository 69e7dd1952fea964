"""How long the gradients of one step take between two hosts, with each compression, on links of a given rate.

::

    python benchmarks/compression_links.py --rate 1gbit --sizes 784 2560 2560 10

Two network namespaces stand for the hosts, a pair of virtual interfaces limited by ``tc`` for the link. Needs
root, ``ip`` and ``tc``. Each rank is pinned to a core. The gradients are those of a multi-layer perceptron with
layers of the given sizes. All compressions take turns in each repetition. Prints one line of JSON: medians in
milliseconds, from the moment at which both ranks are there to the one at which both have the sum.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import contextlib
import json
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

from elephant.collective import form_collective
from elephant.compression import reduction_for
from elephant.net import Listener

NAMES = (None, "bfloat16", "float16", "int8", "topk", "topk:0.001", "powersgd")
ADDRESSES = ("10.77.9.1", "10.77.9.2")
TIMEOUT_S = 120.0


def slices_of(sizes: list[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Returns start and shape of each kernel and bias."""
    slices, start = [], 0
    for shape in [
        shape for inputs, outputs in zip(sizes, sizes[1:], strict=False) for shape in ((inputs, outputs), (outputs,))
    ]:
        slices.append((start, shape))
        start += int(np.prod(shape))
    return slices


def run_rank(rank: int, sizes: list[int], repetitions: int) -> None:
    """Measures on one rank, which is driven over its standard streams."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    slices = slices_of(sizes)
    with Listener.bind(ADDRESSES[rank]) as listener:
        print(json.dumps(listener.address), flush=True)
        token, *addresses = json.loads(sys.stdin.readline())
        addresses = [tuple(address) for address in addresses]
        collective = form_collective(rank, addresses, listener, token.encode(), "benchmark", TIMEOUT_S)
    count = slices[-1][0] + slices[-1][1][0]
    gradients = np.random.default_rng(rank).standard_normal(count, np.float32)
    flat = np.empty_like(gradients)
    times: dict[str, list[float]] = {str(name): [] for name in NAMES}
    with collective:
        reductions = {str(name): reduction_for(name, slices) for name in NAMES}
        for _ in range(repetitions + 1):
            for name, reduction in reductions.items():
                flat[:] = gradients
                collective.barrier()
                began = time.monotonic()
                reduction.reduce_(flat, collective)
                collective.barrier()
                times[name].append((time.monotonic() - began) * 1000)
    medians = {name: round(statistics.median(values[1:]), 1) for name, values in times.items()}
    print(json.dumps({"values": count, "repetitions": repetitions, "ms": medians}), flush=True)


@contextlib.contextmanager
def link(rate: str) -> Iterator[list[str]]:
    """Makes two namespaces with a link of the rate between them, and removes them at the end."""
    names = [f"elephant-bench-{os.getpid()}-{side}" for side in range(2)]
    with contextlib.ExitStack() as stack:
        for name in names:
            order("ip", "netns", "add", name)
            stack.callback(order, "ip", "netns", "del", name)
        peer = ("peer", "name", "link1", "netns", names[1])
        order("ip", "link", "add", "link0", "netns", names[0], "type", "veth", *peer)
        for side, name in enumerate(names):
            order("ip", "-n", name, "addr", "add", f"{ADDRESSES[side]}/24", "dev", f"link{side}")
            order("ip", "-n", name, "link", "set", f"link{side}", "up")
            limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
            order("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", f"link{side}", "root", *limit)
        yield names


def order(*command: str) -> None:
    """Runs a command that must succeed."""
    subprocess.run(command, check=True, timeout=TIMEOUT_S)


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Starts both ranks and returns what rank 0 measured."""
    arguments = ["--sizes", *map(str, options.sizes), "--repetitions", str(options.repetitions)]
    with link(options.rate) as namespaces, contextlib.ExitStack() as stack:
        ranks = []
        for rank, namespace in enumerate(namespaces):
            command = ["ip", "netns", "exec", namespace, sys.executable, __file__, "--rank", str(rank), *arguments]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            ranks.append(process)
        orders = [secrets.token_hex(16), *(json.loads(process.stdout.readline()) for process in ranks)]
        for process in ranks:
            process.stdin.write(json.dumps(orders) + "\n")
            process.stdin.flush()
        results = [json.loads(process.stdout.readline()) for process in ranks]
        for process in ranks:
            process.wait(TIMEOUT_S)
    return {"rate": options.rate, **results[0]}


def main() -> None:
    """Measures one rate, or is one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="as tc understands it")
    parser.add_argument("--sizes", type=int, nargs="+", default=[784, 2560, 2560, 10])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        print(json.dumps(measure(options)), flush=True)
    else:
        run_rank(options.rank, options.sizes, options.repetitions)


if __name__ == "__main__":
    main()
