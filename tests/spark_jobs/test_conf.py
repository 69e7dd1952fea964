"""The examples in spark_jobs/conf: every line is explained, and one is submitted, see `trained`."""

import json
import os
import re
import shutil
import subprocess
import sysconfig

import pytest
from spark_submit import JOBS, last_line

from elephant.jobs.settings import settings_of
from elephant.jobs.submission import read_settings
from elephant.options import key_of

CONF = JOBS / "conf"
PROPERTIES = sorted(CONF.glob("*.conf"))
JOB_FILES = sorted(CONF.glob("*.yaml"))


def settings_in(path):
    """Returns the settings of a properties file, as Java reads it; a comment must stand above each."""
    settings, explained = {}, False
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            explained = True
        elif line.strip():
            assert explained, f"{path.name}: nothing explains {line!r}"
            name, value = re.fullmatch(r"(\S+)\s+(\S.*)", line).groups()
            assert name not in settings, f"{path.name}: {name} comes twice"
            settings[name], explained = value, False
    return settings


def test_examples_when_listed_then_there_is_one_for_each_kind_of_cluster():
    kinds = {"local", "standalone", "yarn", "kubernetes", "gpu-standalone", "gpu-yarn", "gpu-kubernetes"}
    assert {path.stem for path in PROPERTIES} == kinds
    assert {path.stem for path in JOB_FILES} == {"train", "evaluate", "predict", "resume"}


@pytest.mark.parametrize("path", PROPERTIES, ids=lambda path: path.stem)
def test_properties_when_read_then_each_line_is_explained_and_a_synchronous_fit_can_run(path):
    settings = settings_in(path)
    assert all(name.startswith("spark.") for name in settings)
    master = {"local": "local[2]", "standalone": "spark://", "yarn": "yarn", "kubernetes": "k8s://"}
    assert settings["spark.master"].startswith(master[path.stem.removeprefix("gpu-")])
    if path.stem != "local":
        assert settings["spark.dynamicAllocation.enabled"] == "false"
        # A slot for each of the four workers of train.yaml.
        instances = settings.get("spark.executor.instances")
        cores = int(settings["spark.executor.cores"])
        assert int(instances or int(settings["spark.cores.max"]) // cores) == 4
        assert settings.get("spark.executor.resource.gpu.amount", settings.get("spark.task.cpus")) in ("1", str(cores))
    # With it in local mode, and without GPUs, every job waits for ever.
    assert "spark.task.resource.gpu.amount" not in settings


def test_dockerfile_when_read_then_makes_what_the_example_for_kubernetes_expects():
    lines = (JOBS / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    said = {
        word: [line.split()[1:] for line in lines if line.startswith(f"{word} ")] for word in ("COPY", "USER", "RUN")
    }
    settings = settings_in(CONF / "kubernetes.conf")
    environment = settings["spark.pyspark.python"].removesuffix("/bin/python")
    assert any("venv" in words and environment in words for words in said["RUN"])
    assert ["spark_jobs", "/opt/elephant/spark_jobs"] in said["COPY"]
    assert "local:///opt/elephant/spark_jobs/train.py" in (CONF / "kubernetes.conf").read_text()
    sources = [source for words in said["COPY"] for source in words[:-1]]
    assert [source for source in sources if not (JOBS.parent / source).exists()] == []
    # No root, and a number: a cluster that forbids root cannot tell who a name is.
    assert said["USER"][-1] == ["185"]


def test_dockerfile_when_linted_then_is_clean():
    linter = shutil.which("hadolint", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    if linter is None:
        pytest.skip("needs hadolint, which pip installs with elephant-spark[dev]")
    done = subprocess.run([linter, JOBS / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.stem)
def test_job_file_when_read_then_its_job_knows_every_key(path):
    pytest.importorskip("yaml", reason="needs PyYAML, which reads job files")
    job = path.stem
    settings = read_settings(f"{job}.py", "", settings_of(job), ["--config", str(path)])
    assert settings


def test_gpu_addresses_when_there_are_two_gpus_then_are_what_spark_takes(tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$1" = --query-gpu=index ] && printf "0\\n1\\n"\n')
    tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([CONF / "gpu-addresses.sh"], env=environment, capture_output=True, text=True, timeout=30)
    assert json.loads(done.stdout) == {"name": "gpu", "addresses": ["0", "1"]}


@pytest.mark.spark
@pytest.mark.timeout(1500)
def test_gpu_example_when_the_workers_report_gpus_then_each_rank_gets_its_own(trained, inputs):
    last_line(trained)
    metadata = next((inputs / "fitted" / "metadata").glob("part-*")).read_text()
    assert sorted(rank["devices"] for rank in json.loads(metadata)["plan"]) == [["0"], ["1"]]


@pytest.mark.parametrize("job", ["train", "evaluate", "predict", "resume"])
def test_readme_when_searched_then_tells_of_every_setting(job):
    told = set(re.findall(r"`([a-z-]+)`", (JOBS / "README.md").read_text()))
    # To whose table the page sends its readers.
    params = re.findall(r"^\| `(\w+)`", (JOBS.parent / "docs" / "params.md").read_text(), re.MULTILINE)
    assert {setting.key for setting in settings_of(job)} <= told | {key_of(name) for name in params}
