"""Tables of Delta Lake and Iceberg by their own jars: rows that are read, predictions written back, and streams."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from lakehouse_jars import NoReleaseError, lakehouse_jars
from maven_jars import JarsUnavailableError, fetch_jars

PREAMBLE = """
    import os, sys

    sys.path.insert(0, sys.argv[1])
    import numpy as np
    import pytest
    from counting_model import counted, counting_data, counting_model, weights_of
    from elephant import KerasEstimator
    from elephant.cluster.local import local_session

    folder = sys.argv[2]
    columns = counting_data(64)
    numbers = np.arange(64)


    def session(**settings):
        settings = {name.replace("__", "."): value for name, value in settings.items()}
        spark = local_session(1, conf={"spark.jars": sys.argv[3], "spark.sql.shuffle.partitions": "2", **settings})
        rows = list(zip(numbers.tolist(), columns["features"].tolist(), columns["label"].tolist()))
        return spark, spark.createDataFrame(rows, "id long, features array<float>, label double").coalesce(2)


    def estimator(batch_size):
        return KerasEstimator(model=counting_model(), batchSize=batch_size, shuffle=False, verbose=0)


    def require_counted(source, kept=numbers >= 0):
        fitted = estimator(int(kept.sum())).fit(source)
        expected = counted({"features": columns["features"][kept]}, batch_size=kept.sum(), epochs=1)
        np.testing.assert_allclose(weights_of(fitted), expected, atol=1e-6)
        return fitted


    def require_refused(path, words):
        with pytest.raises(ValueError, match=words + ".*DataFrame of the table instead"):
            estimator(64).fit(path)


    def require_scored(frame, fitted):
        rows = frame.orderBy("id").collect()
        assert [row.id for row in rows] == numbers.tolist()
        found = [row.prediction for row in rows]
        np.testing.assert_allclose(found, columns["features"] @ weights_of(fitted), rtol=1e-5, atol=1e-5)

"""

DELTA = """
    spark, rows = session(
        spark__sql__extensions="io.delta.sql.DeltaSparkSessionExtension",
        spark__sql__catalog__spark_catalog="org.apache.spark.sql.delta.catalog.DeltaCatalog",
        spark__databricks__delta__snapshotPartitions="1",
    )
    table = lambda path, **options: spark.read.format("delta").options(**options).load(path)

    # Deleted rows, and the version from before.
    path = f"{folder}/deleted"
    rows.write.format("delta").option("delta.enableDeletionVectors", "true").save(path)
    require_counted(path)
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id % 4 = 1")
    require_counted(table(path), numbers % 4 != 1)
    require_refused(path, "Received: one with deletion vectors")
    require_counted(table(path, versionAsOf=0))

    # Columns by other names than those of the files.
    path = f"{folder}/mapped"
    writer = rows.withColumnRenamed("features", "old").write.format("delta")
    writer.option("delta.columnMapping.mode", "name").save(path)
    spark.sql(f"ALTER TABLE delta.`{path}` RENAME COLUMN old TO features")
    require_counted(table(path))
    require_refused(path, "Received: column mapping by name")

    # A column that older files do not have.
    path = f"{folder}/evolved"
    rows.where("id < 24").write.format("delta").save(path)
    later = rows.where("id >= 24").selectExpr("*", "1.5 AS added")
    later.write.format("delta").option("mergeSchema", "true").mode("append").save(path)
    require_counted(table(path))
    fitted = require_counted(path)

    # Predictions, written over the table that they were made of, and into another one by a stream that goes on.
    fitted.transform(table(path)).write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(path)
    require_scored(table(path), fitted)
    source, target = f"{folder}/arriving", f"{folder}/scored"
    for part in ("id < 40", "id >= 40"):
        rows.where(part).write.format("delta").mode("append").save(source)
        scored = fitted.transform(spark.readStream.format("delta").load(source))
        writer = scored.writeStream.format("delta").option("checkpointLocation", f"{folder}/checkpoints")
        writer.trigger(availableNow=True).start(target).awaitTermination()
    require_scored(table(target), fitted)
    stream = estimator(64).fit_stream(
        spark.readStream.format("delta").load(source),
        checkpointLocation=f"{folder}/fitted",
        trigger={"availableNow": True},
    )
    stream.awaitTermination(300)
    np.testing.assert_allclose(weights_of(stream.model), weights_of(fitted), atol=1e-6)
    spark.stop()
"""

ICEBERG = """
    spark, rows = session(
        spark__sql__extensions="org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        spark__sql__catalog__ice="org.apache.iceberg.spark.SparkCatalog",
        spark__sql__catalog__ice__type="hadoop",
        spark__sql__catalog__ice__warehouse=folder,
    )
    rows.writeTo("ice.db.rows").using("iceberg").create()
    first = spark.sql("SELECT snapshot_id FROM ice.db.rows.snapshots").first().snapshot_id
    spark.sql("DELETE FROM ice.db.rows WHERE id % 4 = 1")
    require_counted(spark.table("ice.db.rows"), numbers % 4 != 1)
    fitted = require_counted(spark.sql(f"SELECT * FROM ice.db.rows VERSION AS OF {first}"))
    spark.sql("ALTER TABLE ice.db.rows ADD COLUMN added double")
    require_counted(spark.table("ice.db.rows"), numbers % 4 != 1)
    fitted.transform(rows).writeTo("ice.db.scored").using("iceberg").create()
    require_scored(spark.table("ice.db.scored"), fitted)
    spark.stop()
"""


@pytest.mark.timeout(600)
@pytest.mark.slow("a session of its own; tests/data/test_delta.py has what fit(path) reads of a table, and refuses")
@pytest.mark.parametrize(("kind", "script"), [("Delta Lake", DELTA), ("Iceberg", ICEBERG)], ids=["delta", "iceberg"])
def test_fit_when_rows_are_in_tables_then_every_row_of_their_version_counts_once(tmp_path, kind, script):
    try:
        jars = fetch_jars(lakehouse_jars(kind))
    except (JarsUnavailableError, NoReleaseError) as error:
        pytest.skip(str(error))
    program = tmp_path / "session.py"
    program.write_text(textwrap.dedent(PREAMBLE) + textwrap.dedent(script), encoding="utf-8")
    support = str(Path(__file__).parents[1] / "support")
    command = [sys.executable, str(program), support, str(tmp_path / "tables"), ",".join(map(str, jars))]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-4000:]
