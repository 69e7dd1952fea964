"""The first process of a pod: gives it a file system and a name of its own, and runs its command to the end.

It is a program, the first one in a process namespace of its own, started with a JSON object: see `main`. All of the
pod's processes end with it. Like ``tini`` of Spark's images it passes signals on to the command, and takes the exit
codes of processes that nobody else waits for.

The pod sees the machine's files, but what it writes is its own; what several pods share is named.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

# Spark's images begin in a folder of their own: in the root folder Python finds no place for bytecode elsewhere.
WORK_FOLDER = "/opt/work-dir"


def main():
    """Runs the command.

    The only argument is an object with

    - ``root``: an empty folder, for what the pod writes
    - ``hostname``
    - ``mounts``: by path in the pod: a folder or file of this machine, or ``{"size": "64m"}`` for memory
    - ``command``: a list of words
    """
    pod = json.loads(sys.argv[1])
    enter_root(pod["root"], pod["mounts"])
    socket.sethostname(pod["hostname"])
    sys.exit(run(pod["command"]))


def enter_root(folder, mounts):
    """Makes the pod's file system, and enters it: this machine's files below, and the pod's own above them."""
    mount("-t", "tmpfs", "tmpfs", folder)
    upper, work, root = (os.path.join(folder, name) for name in ("upper", "work", "root"))
    for name in (upper, work, root):
        os.mkdir(name)
    mount("-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={work}", root)
    for path in other_file_systems():
        if os.path.isdir(root + path):
            mount("--rbind", path, root + path)
    mount("-t", "proc", "proc", f"{root}/proc")
    # From here to there, so that a folder may hold what is mounted into another one.
    for path, source in sorted(mounts.items()):
        mount_at(root + path, source)
    os.chroot(root)
    os.makedirs(WORK_FOLDER, exist_ok=True)
    os.chdir(WORK_FOLDER)


def other_file_systems():
    """Returns the outermost mount points below the root: an overlay over the root has nothing of them."""
    lines = pathlib.Path("/proc/self/mounts").read_text().splitlines()
    paths = sorted({line.split(" ")[1] for line in lines} - {"/"})
    return [path for path in paths if not any(path.startswith(f"{other}/") for other in paths)]


def mount_at(path, source):
    """Mounts one thing, at a path that need not be there."""
    if isinstance(source, dict):
        os.makedirs(path, exist_ok=True)
        mount("-t", "tmpfs", "-o", f"size={source['size']}", "tmpfs", path)
        return
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    elif not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        pathlib.Path(path).touch()
    mount("--bind", source, path)


def mount(*words):
    """Runs the program of that name."""
    subprocess.run(["mount", *words], check=True, timeout=30)


def run(command):
    """Runs a command, and returns its exit code; what it leaves behind is nobody's any more and is waited for."""
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(child.pid, number))
    while True:
        process_id, status = os.wait()
        if process_id == child.pid:
            code = os.waitstatus_to_exitcode(status)
            # As a shell has it: 137 is an end by SIGKILL.
            return 128 - code if code < 0 else code


if __name__ == "__main__":
    main()
