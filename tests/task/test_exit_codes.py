"""How a process ended is named, with what usually causes it."""

import pytest
from tables import every_case

from elephant.rank.executor import memory_kills
from elephant.task.process import exit_text


@every_case(
    ("code", "name", "cause"),
    [
        (-4, "signal 4 (SIGILL)", "Install packages built for"),
        (-6, "signal 6 (SIGABRT)", "The last lines say"),
        (-7, "signal 7 (SIGBUS)", "full disk"),
        (-8, "signal 8 (SIGFPE)", "divided integers by zero"),
        (-9, "killed (signal 9)", "out of memory. Raise spark.executor.memoryOverhead"),
        (-11, "signal 11 (SIGSEGV)", "native code has failed"),
        (-15, "signal 15 (SIGTERM)", "cluster manager"),
        (-63, "signal 63", "without a name"),
        (0, "exited with 0", "os._exit"),
        (137, "exited with 137", "os._exit"),
    ],
)
def test_exit_when_a_process_ends_in_any_way_then_is_named_with_its_cause(code, name, cause):
    text = exit_text(code)
    assert name in text and cause in text


def test_exit_when_the_kernel_counts_a_kill_for_memory_then_says_that_it_was_that():
    assert "killed (signal 9) by the kernel, out of memory: its container" in exit_text(-9, memory_kills=1)
    assert "by the kernel" not in exit_text(-9) + exit_text(-11, memory_kills=1)


@pytest.mark.parametrize(
    ("groups", "file", "text", "count"),
    [
        ("0::/\n", "memory.events", "low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n", 2),
        ("0::/user.slice/a\n", "user.slice/a/memory.events", "oom_kill 1\n", 1),
        ("9:name=systemd:/\n4:memory:/yarn/c1\n0::/\n", "memory/yarn/c1/memory.oom_control", "oom_kill 5\n", 5),
        ("4:cpu,memory:/docker/1\n", "memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n", 4),
        ("4:memory:/\n", "memory/memory.oom_control", "oom_kill_disable 0\n", None),
        ("0::/\n", "elsewhere", "oom_kill 1\n", None),
    ],
    ids=["v2", "v2 in a slice", "v1", "v1 in a container", "v1 of an old kernel", "none"],
)
def test_memory_kills_when_groups_are_mounted_then_are_the_kernel_s_count(tmp_path, groups, file, text, count):
    (tmp_path / "cgroup").write_text(groups)
    place = tmp_path / "mount" / file
    place.parent.mkdir(parents=True)
    place.write_text(text)
    assert memory_kills(tmp_path / "cgroup", tmp_path / "mount") == count


def test_memory_kills_when_there_are_no_groups_then_are_unknown(tmp_path):
    assert memory_kills(tmp_path / "missing") is None
