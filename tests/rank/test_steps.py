"""The step of a process is known when it was killed in it, and which executor it is on."""

import os
import subprocess
import sys
import textwrap

from elephant.rank.process_pipe import begin_step, last_step, make_step_file

KILLED = """
    import os, sys
    from pathlib import Path
    from elephant.rank.process_pipe import begin_step, keep_steps
    keep_steps(Path(sys.argv[1]))
    for step in (1, 2, 3_000_000_000):
        begin_step(step)
    os.kill(os.getpid(), 9)
"""
ASKS = "from elephant.rank.executor import executor_id; print(executor_id())"
# A process as Spark's executors are, with a Python worker below it, and a training process below that.
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]]); 0"


def run(*command):
    return subprocess.run([sys.executable, "-c", *command], capture_output=True, text=True, timeout=60)


def test_step_when_a_process_is_killed_then_is_the_one_it_was_in(tmp_path):
    make_step_file(tmp_path / "step")
    assert last_step(tmp_path / "step") is None
    assert run(textwrap.dedent(KILLED), str(tmp_path / "step")).returncode == -9
    assert last_step(tmp_path / "step") == 3_000_000_000


def test_step_when_the_folder_is_gone_then_is_unknown_and_not_made_anew(tmp_path):
    assert run(textwrap.dedent(KILLED), str(tmp_path / "step")).returncode == -9
    assert os.listdir(tmp_path) == [] and last_step(tmp_path / "step") is None
    begin_step(7)
    assert os.listdir(tmp_path) == []


def test_executor_when_a_process_above_names_one_then_is_that():
    below = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ASKS!r}])"
    assert run(PARENT, below, "--executor-id", "7").stdout.strip() == "7"
    assert run(PARENT, below, "org.apache.spark.deploy.SparkSubmit").stdout.strip() == "driver"
    assert run(PARENT, below).stdout.strip() == ""
