"""Another user of the host, who tries to read what a rank has."""

import os
import subprocess

import pytest

from elephant.testing import run_local

OTHER = 65534
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("by_value"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]


def tried_by_another(user):
    """Returns by name whether commands of another user succeed on this rank's process and folder, and their output."""
    own, folder = os.getpid(), os.environ["ELEPHANT_WORK_FOLDER"]
    inside = os.path.join(folder, "secret")
    with open(inside, "w") as file:
        file.write("rows")
    os.chmod(inside, 0o644)
    commands = {
        "arguments": ["cat", f"/proc/{own}/cmdline"],
        "environment": ["cat", f"/proc/{own}/environ"],
        "descriptors": ["ls", f"/proc/{own}/fd"],
        "memory maps": ["cat", f"/proc/{own}/maps"],
        "memory": ["head", "-c", "1", f"/proc/{own}/mem"],
        "names in the folder": ["ls", folder],
        "a file in the folder": ["cat", inside],
        "a file put into the folder": ["touch", os.path.join(folder, "mine")],
    }
    found = {}
    for name, command in commands.items():
        done = subprocess.run(command, user=user, group=user, extra_groups=[], cwd="/", capture_output=True, timeout=30)
        found[name] = (done.returncode == 0, done.stdout)
    return found, [name for name in os.environ if "token" in name.lower()]


def test_other_user_of_a_host_when_a_rank_is_at_work_then_sees_its_arguments_and_nothing_else():
    for found, names in run_local(tried_by_another, args=(OTHER,), num_workers=2):
        succeeded = {name for name, (is_done, _) in found.items() if is_done}
        # So the commands themselves work.
        assert succeeded == {"arguments"} and found["arguments"][1]
        assert not names
