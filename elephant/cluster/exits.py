"""What the way in which a training process ended says: the signal's name, what usually causes it, what to do."""

from __future__ import annotations

import signal

EXITED = "its process exited with"
_NATIVE = (
    "native code has failed, of TensorFlow, of a custom operation or of a library that a callback uses. The last "
    "lines have the Python frames. Try the same step in one process, and without that library."
)
_USUALLY = {
    "SIGKILL": (
        "SIGKILL, often from the kernel or the cluster manager, out of memory. Raise spark.executor.memoryOverhead, or "
        "lower what a worker holds, such as batchSize."
    ),
    "SIGSEGV": f"it touched memory that is not its own: {_NATIVE}",
    "SIGABRT": (
        "it gave itself up: native code found something that cannot be, or could not get memory. The last lines say "
        "what."
    ),
    "SIGBUS": (
        "it read a file that is shorter than it was, or memory that cannot be had: often a full disk or a full "
        "/dev/shm. Make room where Spark keeps local data (spark.local.dir)."
    ),
    "SIGILL": (
        "the processor does not know an instruction: a package that was built for another one. Install packages "
        "built for the executors' processors, or their portable builds."
    ),
    "SIGFPE": f"it divided integers by zero: {_NATIVE}",
    "SIGTERM": (
        "somebody asked it to end: a cluster manager that takes the node or the container away, or an administrator. "
        "Its log says why."
    ),
    "SIGINT": "somebody interrupted it at its terminal.",
    "SIGHUP": "its terminal, or the session that it belonged to, was closed.",
    "SIGXCPU": "it used up the processor time that its host allows (ulimit -t).",
    "SIGXFSZ": "it wrote a file larger than its host allows (ulimit -f).",
}
_OF_MEMORY = (
    "by the kernel, out of memory: its container, or its host, had no more. Raise spark.executor.memoryOverhead, "
    "or lower what a worker holds: batchSize, or the cache in memory."
)


def exit_text(code: int, *, memory_kills: int = 0) -> str:
    """Returns how a process ended that said nothing itself.

    Args:
        code: What `subprocess.Popen.returncode` holds: minus the signal's number for one that a signal ended.
        memory_kills: Processes of this container that the kernel has killed meanwhile for want of memory.

    >>> exit_text(-11).partition(":")[0]
    'its process was ended by signal 11 (SIGSEGV)'
    >>> exit_text(-9, memory_kills=1).partition(":")[0]
    'its process was killed (signal 9) by the kernel, out of memory'
    >>> exit_text(3)
    'its process exited with 3: something called os._exit, or a library ended the process.'
    """
    if code == 0:
        return f"{EXITED} 0 before its work was done: something called os._exit."
    if code > 0:
        return f"{EXITED} {code}: something called os._exit, or a library ended the process."
    name = _name_of(-code)
    if name == "SIGKILL":
        how = f"its process was killed (signal {-code})"
        return f"{how} {_OF_MEMORY}" if memory_kills > 0 else f"{how}: {_USUALLY[name]}"
    usually = _USUALLY.get(name)
    how = f"its process was ended by signal {-code} ({name})"
    return f"{how}: {usually}" if usually else f"{how}."


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a signal without a name"
