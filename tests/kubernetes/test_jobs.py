"""Jobs of spark_jobs submitted in cluster mode: the driver is a pod, which its executors know by a headless service."""

import contextlib
import json
import time
from functools import partial

import psutil
import pytest
from kubernetes_cluster import NAMESPACE
from spark_applications import ROOT
from spark_submit import JOBS, ROWS, write_inputs

RUN_S, END_S = 400.0, 60.0
# Where the API's server is, and what spares a small machine.
OF_CLUSTER = (
    *("spark.master", "spark.kubernetes.driver.master", "spark.sql.shuffle.partitions", "spark.ui.enabled"),
    *("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"),
)
# What users set for executors beside what Spark sets: all of it has to come through.
TEMPLATE = """\
apiVersion: v1
kind: Pod
metadata:
  labels: {team: vision}
spec:
  containers:
    - name: spark-kubernetes-executor
      resources:
        limits: {ephemeral-storage: 2Gi}
      volumeMounts:
        - {name: shared-memory, mountPath: /dev/shm}
  volumes:
    - {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: 1Gi}}
"""

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(900, func_only=True),
    pytest.mark.slow("a cluster of pods; tests/spark_jobs submits these jobs to a standalone cluster"),
]


@pytest.fixture
def inputs(cluster, folder):
    """Data, a model and code of a user, and a template for executors."""
    write_inputs(folder)
    (folder / "executor.yaml").write_text(TEMPLATE)
    yield folder
    # Of a test that failed, too: what belongs to a driver goes with it.
    for pod in cluster.pods("driver"):
        cluster.delete_pod(pod["metadata"]["name"])


def options_of(cluster, inputs):
    """Returns options of ``spark-submit``: the example for Kubernetes, with two executors."""
    chosen = {
        **{name: cluster.conf[name] for name in OF_CLUSTER},
        "spark.executor.instances": "2",
        "spark.kubernetes.executor.podTemplateFile": str(inputs / "executor.yaml"),
    }
    words = [word for name, value in chosen.items() for word in ("--conf", f"{name}={value}")]
    return ("--properties-file", str(JOBS / "conf" / "kubernetes.conf"), *words)


def words_of(inputs, **settings):
    """Returns what `train.py` is told."""
    given = {
        "data": inputs / "data.parquet",
        "model": "net_of_user:build",
        "output": inputs / "fitted",
        "num-workers": 2,
        "batch-size": 16,
        "seed": 3,
        **settings,
    }
    return [str(word) for name, value in given.items() for word in (f"--{name}", value)]


def submitted(cluster, inputs, **settings):
    """Starts the job, see `KubernetesCluster.started`."""
    code = ("--py-files", f"local://{inputs / 'net_of_user.py'}")
    words = words_of(inputs, **settings)
    script = "local:///opt/elephant/spark_jobs/train.py"
    return cluster.started(script, *words, options=(*options_of(cluster, inputs), *code))


def running(cluster, role):
    """Returns the pods of a role that run."""
    return [pod for pod in cluster.pods(role) if pod["status"]["phase"] == "Running"]


def await_(condition, process, timeout_s=RUN_S, log=lambda: ()):
    """Returns what a function returns as soon as that is something; fails when the submission, if any, ends before."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert process is None or process.poll() is None, (process.communicate(), *log())
        assert time.monotonic() < deadline, f"nothing after {timeout_s:g} s"
        time.sleep(0.1)
    return found


def driver_log(cluster, driver):
    """Returns the lines that the driver's pod has printed."""
    return cluster.kubelet.logs()[driver["metadata"]["name"]].splitlines()


def test_job_when_submitted_in_cluster_mode_then_the_driver_s_pod_trains_and_leaves_a_whole_model(cluster, inputs):
    with submitted(cluster, inputs, epochs=4) as process:
        pods = await_(lambda: len(found := running(cluster, "executor")) == 2 and found, process)
        (driver,), (service,) = cluster.pods("driver"), cluster.api.list("services")
        said = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, said
    lines = driver_log(cluster, driver)
    history = json.loads(lines[-1])
    assert history["loss"][3] < history["loss"][0], lines
    # The address of each rank is that of its pod.
    assert {line.split()[1] for line in lines if line.split()[:1] in (["0"], ["1"])} == {
        pod["status"]["podIP"] for pod in pods
    }
    assert (inputs / "fitted" / "variables.npz").exists()
    (after,) = cluster.pods("driver")
    assert after["status"]["phase"] == "Succeeded" and cluster.pods("executor") == []
    assert_as_the_example_says(driver, service, pods)


def assert_as_the_example_says(driver, service, pods):
    """Fails where the API was asked for other things than what the example and the template name."""
    # All ports of a headless service lead to the pod.
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= driver["metadata"]["labels"].items()
    assert driver["spec"]["serviceAccountName"] == "spark"
    assert driver["spec"]["containers"][0]["resources"]["limits"]["memory"] == f"{(2 + 4) * 1024}Mi"
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        assert container["resources"] == {
            "requests": {"cpu": "4", "memory": f"{(4 + 6) * 1024}Mi"},
            "limits": {"memory": f"{(4 + 6) * 1024}Mi", "ephemeral-storage": "2Gi"},
        }
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/data", "/dev/shm"} <= mounted and pod["metadata"]["labels"]["team"] == "vision"


def test_job_when_its_driver_s_pod_is_deleted_in_mid_fit_then_no_pod_and_no_process_is_left(cluster, inputs):
    with submitted(cluster, inputs, epochs=100_000) as process:
        (driver,) = await_(lambda: running(cluster, "driver"), process)
        log = partial(driver_log, cluster, driver)
        await_(lambda: any(line.split()[:1] == ["1/100000"] for line in log()), process, log=log)
        names = [pod["metadata"]["name"] for pod in [driver, *running(cluster, "executor")]]
        processes = [one for name in names for one in cluster.kubelet.processes(name)]
        assert len(names) == 3 and len(processes) > 8
        cluster.delete_pod(driver["metadata"]["name"])
        _, left = psutil.wait_procs(processes, timeout=END_S)
        assert left == []
        said = process.communicate(timeout=END_S)
    # spark_jobs/README.md says where the driver's exit code is instead.
    assert process.returncode == 0, said
    assert [pod["metadata"]["name"] for role in ("driver", "executor") for pod in running(cluster, role)] == []


@contextlib.contextmanager
def notebook(cluster, command):
    """Makes a pod that nobody has submitted, and a headless service for it; gives the name that others know it by."""
    meta = {"name": "notebook", "namespace": NAMESPACE}
    cluster.api.create("services", {"metadata": meta, "spec": {"clusterIP": "None", "selector": {"app": "notebook"}}})
    container = {"name": "notebook", "image": "elephant:tests", "command": command}
    cluster.api.create(
        "pods", {"metadata": {**meta, "labels": {"app": "notebook"}}, "spec": {"containers": [container]}}
    )
    try:
        yield lambda: cluster.api.get("pods", NAMESPACE, "notebook")
    finally:
        cluster.delete_pod("notebook")
        cluster.api.delete("services", NAMESPACE, "notebook")


def test_jobs_when_a_pod_submits_them_in_client_mode_then_executors_that_come_and_go_reach_it_by_a_service(
    cluster, inputs
):
    settings = {
        **{name: value for name, value in cluster.conf.items() if name != "spark.executor.instances"},
        "spark.driver.host": f"notebook.{NAMESPACE}.svc",
        "spark.kubernetes.driver.pod.name": "notebook",
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.initialExecutors": "1",
        "spark.dynamicAllocation.maxExecutors": "2",
        "spark.dynamicAllocation.executorIdleTimeout": "2s",
    }
    training = words_of(inputs, mode="asynchronous", epochs=8)
    of_model = ["--data", str(inputs / "data.parquet"), "--model", str(inputs / "fitted")]
    predictions = str(inputs / "predictions")
    jobs = [["train", training], ["evaluate", of_model], ["predict", [*of_model, "--output", predictions]]]
    (inputs / "jobs.json").write_text(json.dumps(jobs))
    submission = [
        "/opt/spark/bin/spark-submit",
        *(word for name, value in settings.items() for word in ("--conf", f"{name}={value}")),
        *("--py-files", str(inputs / "net_of_user.py")),
        *(str(ROOT / "tests" / "spark_jobs" / "several_jobs.py"), str(inputs / "jobs.json"), "--together"),
    ]
    with notebook(cluster, submission) as pod:
        (executor, *_) = await_(lambda: running(cluster, "executor"), None)
        ended = await_(lambda: (now := pod()) and now["status"]["phase"] in ("Succeeded", "Failed") and now, None)
        lines = driver_log(cluster, ended)
    assert ended["status"]["phase"] == "Succeeded", lines
    variables = {one["name"]: one.get("value") for one in executor["spec"]["containers"][0]["env"]}
    assert f"@notebook.{NAMESPACE}.svc:" in variables["SPARK_DRIVER_URL"]
    done = json.loads(lines[-1])
    assert [code for code, _, _ in done] == [0, 0, 0], "\n".join(err for _, _, err in done)
    history, metrics, written = (json.loads(out.splitlines()[-1]) for _, out, _ in done)
    assert len(history["loss"]) == 8 and metrics["accuracy"] > 0.8 and written["rows"] == ROWS
    assert [pod["metadata"]["name"] for pod in running(cluster, "executor")] == []
