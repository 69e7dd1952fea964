"""How processes of the tests start: imports of Keras without what no test uses, Java with an archive of classes."""

import os
import subprocess
import sys

import class_archive
import pytest

KERAS = """
import importlib.util
import sys
import keras

assert not {"IPython", "jax", "matplotlib", "scipy", "sklearn"} & set(sys.modules), sorted(sys.modules)
assert importlib.util.find_spec('scipy') and importlib.util.find_spec('sklearn')
"""


@pytest.mark.slow("imports of Keras; it is about how quickly tests start, and nothing that users have")
def test_keras_when_imported_then_finds_no_packages_that_tests_do_not_use_and_others_find_them():
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run([sys.executable, "-c", KERAS], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def run_script(tmp_path, *arguments, **variables):
    """Returns what the script for tests passes on to Java: its arguments and its class path."""
    java, script = tmp_path / "java", tmp_path / "home" / "bin" / "java"
    java.write_text('#!/bin/sh\nprintf "%s\\n" "$CLASSPATH" "$@"\n')
    java.chmod(0o755)
    class_archive.write_script(script, java, of_all=["-all"], of_driver="-driver")
    environment = {**os.environ, **variables}
    done = subprocess.run([script, *arguments], env=environment, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.splitlines()


def test_class_path_when_it_has_spark_s_jars_then_begins_with_them_and_all_else_is_as_it_came(tmp_path):
    jars, main = f"{class_archive.spark_jars()}/*", "org.apache.spark.deploy.SparkSubmit"
    words = ["-cp", "/a b/conf/:/home/jars/*", "-Dx=it's $HOME *", main, "-cp", "x", "--conf", ""]
    assert run_script(tmp_path, *words, CLASSPATH="") == [
        "", "-all", "-driver", "-cp", f"{jars}:/a b/conf/:/home/jars/*", *words[2:]
    ]  # fmt: skip
    launcher = ["-cp", "/own.jar", "org.apache.spark.launcher.Main", main]
    assert run_script(tmp_path, *launcher, CLASSPATH="") == ["", "-all", *launcher]
    assert run_script(tmp_path, "Executor", CLASSPATH=f"conf:{jars}") == [f"{jars}:conf:{jars}", "-all", "Executor"]
