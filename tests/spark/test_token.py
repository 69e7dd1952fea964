"""The token of a run: in no file, log, argument, environment, page, event log or exception, in any mode."""

import json

import pytest
from standalone_cluster import StandaloneCluster

SCRIPT = """
import json, os, sys, time, keras
sys.path.insert(0, sys.argv[1])
import numpy as np
from pyspark.sql import SparkSession
import elephant
from elephant import KerasEstimator
from secret_search import TokenWatch
from spark_frames import partitioned_frame

CANARY = bytes.fromhex(sys.argv[2])
FOLDER = sys.argv[3]
session = SparkSession.builder.getOrCreate()
context = session.sparkContext
watch = TokenWatch(CANARY, [FOLDER], (context.uiWebUrl, context.applicationId))

def await_look(folder):
    # A search that begins from now on sees this fit.
    open(f"{folder}/begun", "w").close()
    end = time.monotonic() + 20
    while not os.path.exists(f"{folder}/looked") and time.monotonic() < end:
        time.sleep(0.05)

class Telling(keras.callbacks.Callback):
    def __init__(self, canary, folder, fails):
        super().__init__()
        self.canary, self.folder, self.fails = canary, folder, fails

    def on_epoch_begin(self, epoch, logs=None):
        print("canary", self.canary, flush=True)

    def on_train_batch_end(self, batch, logs=None):
        await_look(self.folder)
        if self.fails:
            raise ValueError(f"canary {self.canary}")

def model():
    # More than a MiB: PySpark writes a function that is so large to a file.
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((4,)), keras.layers.Dense(600), keras.layers.Dense(600), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    return model

rng = np.random.default_rng(0)
rows = [[(row.tolist(), float(row[0])) for row in rng.normal(size=(24, 4))] for _ in range(2)]
frame = partitioned_frame(session, rows, "features array<double>, label double")

def fit(folder, fails=False, numWorkers=2, **options):
    KerasEstimator(
        model=model(), numWorkers=numWorkers, epochs=2, batchSize=4, verbose=0,
        callbacks=[Telling(CANARY.hex(), folder, fails)], **options,
    ).fit(frame)

def program(folder, weights):
    elephant.collective.allreduce(np.ones(8, "float32"))
    await_look(folder)

CALLS = {
    "synchronous": fit,
    "asynchronous": lambda folder: fit(folder, mode="asynchronous", parameterServers=2),
    "servers on executors": lambda folder: fit(folder, mode="asynchronous", serverPlacement="executors"),
    "gossip": lambda folder: fit(folder, mode="gossip"),
    "elastic": lambda folder: fit(folder, numWorkers=(1, 2)),
    "run": lambda folder: elephant.run(
        program, (folder, rng.normal(size=200_000)), num_workers=2, spark=session, verbose=0
    ),
    "failing": lambda folder: fit(folder, fails=True),
}
for mode, call in CALLS.items():
    watch.call(mode, f"{FOLDER}/tmp/look at {mode}", call)
watch.look()
session.stop()
print(json.dumps({"modes": watch.said, "found": watch.look()}))
"""
MODES = ["synchronous", "asynchronous", "servers on executors", "gossip", "elastic", "run", "failing"]


@pytest.mark.slow("a cluster of its own, and a fit of each mode")
@pytest.mark.timeout(400)
def test_token_when_fits_of_each_mode_go_on_then_is_nowhere_that_others_can_read(tmp_path, pytestconfig):
    script, canary = tmp_path / "fits.py", bytes(range(64, 96))
    script.write_text(SCRIPT, encoding="utf-8")
    with StandaloneCluster(cores=2, variables={"CANARY": canary.hex()}) as cluster:
        events = cluster.folder / "events"
        events.mkdir()
        conf = {
            "spark.app.name": f"canary {canary.hex()}",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.rolling.enabled": "false",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": events.as_uri(),
            "spark.ui.enabled": "true",
            "spark.ui.port": "0",
        }
        options = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
        support = pytestconfig.rootpath / "tests" / "support"
        done = cluster.submit(script, support, canary.hex(), cluster.folder, timeout_s=380, options=options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-5000:]
    said = json.loads(done.stdout.splitlines()[-1])
    for mode in MODES:
        about = said["modes"][mode]
        assert about["outcome"] == ("WorkerFailure" if mode == "failing" else "ended"), (mode, about)
        assert about["tokens"] >= 1 and about["looked"], (mode, about)
    found = [tuple(one) for one in said["found"]]
    kinds = {kind for name, kind, _ in found if name == "canary"}
    assert kinds == {"arguments", "environment", "files", "pages", "event log", "exceptions"}
    assert [one for one in found if one[0] != "canary"] == []
