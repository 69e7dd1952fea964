"""Fits whose rows, checkpoints, events and models are in an object store: by Spark's S3A, and by pyarrow."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("moto", reason="the package moto, with which tests have an object store, is not installed")
from lakehouse_jars import NoReleaseError, lakehouse_jars
from maven_jars import JarsUnavailableError, fetch_jars
from object_store import object_store

SCRIPT = """
    import json, os, sys, time

    sys.path.insert(0, sys.argv[1])
    import numpy as np
    from counting_model import counted, counting_data, counting_model, weights_of
    from elephant import KerasEstimator, KerasModel
    from elephant.cluster.local import local_session

    settings, credentials, schemes = json.loads(sys.argv[2])
    columns = counting_data(64)


    def session(more):
        return local_session(1, conf={**settings, **{f"spark.executorEnv.{name}": more[name] for name in more}})


    def estimator(**options):
        return KerasEstimator(model=counting_model(), batchSize=64, shuffle=False, verbose=0, **options)


    def require_counted(fitted, epochs=1):
        np.testing.assert_allclose(weights_of(fitted), counted(columns, batch_size=64, epochs=epochs), atol=1e-6)


    spark = session(credentials)
    # Of this process alone: the JVM runs, and executors have the environment that it began with.
    os.environ.update(credentials)
    rows = list(zip(columns["features"].tolist(), columns["label"].tolist()))
    frame = spark.createDataFrame(rows, "features array<float>, label double").coalesce(3)
    if "s3a" in schemes:
        frame.write.parquet("s3a://bucket/rows")
    else:
        import pyarrow.parquet as pq
        from pyarrow import fs
        pq.write_table(frame.toArrow(), "bucket/rows/0.parquet", filesystem=fs.FileSystem.from_uri("s3://bucket")[0])
    for scheme in schemes:
        place = f"{scheme}://bucket/{scheme}"
        options = {"checkpointPath": f"{place}/checkpoints", "eventsPath": f"{place}/events"}
        require_counted(estimator(epochs=2, **options).fit(f"{scheme}://bucket/rows"), 2)
        fitted = estimator(epochs=3, resume=True, **options).fit(frame)
        require_counted(fitted, 3)
        fitted.save(f"{place}/model.keras")
        require_counted(KerasModel(f"{place}/model.keras"), 3)
        if scheme == "s3a":
            fitted.write().save(f"{place}/model")
            fitted.write().overwrite().save(f"{place}/model")
            require_counted(KerasModel.load(f"{place}/model"), 3)
        else:
            for act in (fitted.save, KerasModel.load, lambda path: fitted.write().overwrite().save(path)):
                try:
                    act(f"{place}/model")
                except ValueError as error:
                    assert "expected a path that Spark's Hadoop client knows" in str(error), error
                else:
                    raise AssertionError("a scheme that Hadoop does not know was written to")
    spark.stop()

    # Executors without credentials, and a driver that has them.
    spark = session(dict.fromkeys(credentials, ""))
    begun = time.monotonic()
    try:
        estimator().fit("s3://bucket/rows")
    except ValueError as error:
        text = f"{type(error).__name__}: {error}"
    print("RESULT", json.dumps({"text": text, "seconds": time.monotonic() - begun}))
    spark.stop()
"""


def jars_of_s3a():
    """Returns the jars of ``s3a://``; none where Hadoop's client has none for this Spark, or they cannot be had."""
    try:
        return fetch_jars(lakehouse_jars("Hadoop's S3A"))
    except (JarsUnavailableError, NoReleaseError) as error:
        print(f"s3a:// is left out: {error}")
        return []


@pytest.mark.timeout(600)
@pytest.mark.slow(
    "two sessions of its own; tests/data/test_object_store.py has folders, rows and credentials without Spark"
)
def test_fit_when_all_is_in_an_object_store_then_counts_every_row_and_lacking_credentials_are_named(tmp_path):
    jars = jars_of_s3a()
    schemes = ["s3a", "s3"] if jars else ["s3"]
    script = tmp_path / "session.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    with object_store("bucket") as store:
        settings = {**store.settings, "spark.jars": ",".join(map(str, jars))} if jars else {}
        given = json.dumps([settings, store.credentials, schemes])
        done = subprocess.run(
            [sys.executable, str(script), str(Path(__file__).parents[1] / "support"), given],
            env={**os.environ, **store.place, "AWS_EC2_METADATA_DISABLED": "true"},
            capture_output=True,
            text=True,
            timeout=580,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found = store.file_system()
        listed = sorted(info.path for info in found.get_file_info(selector("bucket")) if info.is_file)
    for scheme in schemes:
        kinds = [path.removeprefix(f"bucket/{scheme}/").split("/")[0] for path in listed if f"/{scheme}/" in path]
        assert {"checkpoints", "events", "model.keras"} <= set(kinds)
        assert kinds.count("events") == 2
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT")).split(" ", 1)[1])
    assert "ACCESS_DENIED" in result["text"] and "spark.executorEnv.AWS_ACCESS_KEY_ID" in result["text"], result
    assert result["seconds"] < 60


def selector(path):
    from pyarrow import fs

    return fs.FileSelector(path, recursive=True)
