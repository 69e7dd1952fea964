"""A program that fits once with the callbacks of several experiment trackers, offline, and tells what each has kept.

In a process of its own, because trackers change imports, start processes, and end them with the interpreter. Its
argument is a folder, in which all of them write; its standard input has the keys of their services.
"""

# Comet asks to be imported before Keras.
import comet_ml  # isort: skip
import json
import os
import struct
import sys
import zipfile
from pathlib import Path

import keras
import neptune
import wandb
from keras_reference import classifier_data, regression_model
from neptune.integrations.tensorflow_keras import NeptuneCallback
from secret_search import SecretSearch
from spark_frames import partitioned_frame, split_rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from wandb.integration.keras import WandbMetricsLogger, WandbModelCheckpoint
from wandb.proto.wandb_internal_pb2 import Record

from elephant import KerasEstimator
from elephant.cluster.local import local_session

ROWS = 32
# Of a file of W&B: its name and version, and blocks of records as LevelDB's log has them (doc/log_format.md there).
_HEADER, _BLOCK, _RECORD = 7, 1 << 15, struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4


def records_of(content):
    """Yields the records of a file of W&B."""
    place, parts = _HEADER, []
    while place + _RECORD.size <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _RECORD.size:
            place += left
            continue
        _, size, kind = _RECORD.unpack_from(content, place)
        parts = [] if kind in (_WHOLE, _FIRST) else parts
        parts.append(content[place + _RECORD.size : place + _RECORD.size + size])
        place += _RECORD.size + size
        if kind in (_WHOLE, _LAST):
            record = Record()
            record.ParseFromString(b"".join(parts))
            yield record


def of_wandb(folder):
    """Returns what a run of W&B has logged, by name."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    logged = {}
    for record in records_of(path.read_bytes()):
        for item in record.history.item:
            name = "/".join(item.nested_key) or item.key
            logged.setdefault(name, []).append(json.loads(item.value_json))
    return logged


def of_comet(folder):
    """Returns what an experiment of Comet has logged, as pairs of epoch and value."""
    (path,) = folder.glob("comet/*.zip")
    logged = {}
    with zipfile.ZipFile(path) as archive:
        for line in archive.read("messages.json").splitlines():
            message = json.loads(line)
            metric = message["payload"].get("metric")
            if metric:
                logged.setdefault(metric["metricName"], []).append([metric["epoch"], metric["metricValue"]])
    return logged


def of_neptune(folder):
    """Returns what a run of Neptune has logged, by path."""
    logged = {}
    for path in sorted(folder.glob(".neptune/offline/*/data-*.log")):
        text, decoder = path.read_text(), json.JSONDecoder()
        while text:
            entry, end = decoder.raw_decode(text)
            text, what = text[end:].lstrip(), entry["obj"]
            if what["type"] == "LogFloats":
                logged.setdefault("/".join(what["path"]), []).extend(one["value"] for one in what["values"])
    return logged


def of_board(folder):
    """Returns what TensorBoard shows, as pairs of epoch and value."""
    board = EventAccumulator(str(folder / "board" / "train")).Reload()
    return [[one.step, float(make_ndarray(one.tensor_proto))] for one in board.Tensors("epoch_loss")]


def main(folder, keys):
    """Fits, closes all, and prints a line of JSON."""
    os.chdir(folder)
    session = local_session(2, conf={"spark.local.dir": str(folder / "local"), "spark.sql.shuffle.partitions": "2"})
    parts = split_rows(classifier_data(ROWS), (ROWS // 2,) * 2)
    frame = partitioned_frame(session, parts, "features array<double>, label double")
    run = wandb.init(project="digits", dir=folder, mode="offline", settings=wandb.Settings(api_key=keys["wandb"]))
    config = comet_ml.ExperimentConfig(offline_directory=str(folder / "comet"))
    experiment = comet_ml.start(api_key=keys["comet"], project_name="digits", online=False, experiment_config=config)
    neptune_run = neptune.init_run(project="team/digits", api_token=keys["neptune"], mode="offline")
    search = SecretSearch({name: key.encode() for name, key in keys.items()})

    def look(epoch, logs):
        search.look_at_files(folder / "local", "files of the executors")
        search.look_at_processes()

    callbacks = [
        WandbMetricsLogger(),
        WandbModelCheckpoint("digits.keras", monitor="val_loss"),
        experiment.get_callback("keras"),
        NeptuneCallback(run=neptune_run),
        keras.callbacks.TensorBoard(str(folder / "board")),
        keras.callbacks.LambdaCallback(on_epoch_end=look),
    ]
    model, events = regression_model(keras.optimizers.Adam(0.01)), str(folder / "events")
    options = {"numWorkers": 2, "epochs": 3, "batchSize": 4, "validationFraction": 0.25, "eventsPath": events}
    try:
        fitted = KerasEstimator(model, callbacks=callbacks, **options).fit(frame)
    finally:
        run.finish()
        experiment.end()
        neptune_run.stop()
        session.stop()
    search.look_at_files(folder / "events")
    kept = {
        "wandb": of_wandb(folder),
        "comet": of_comet(folder),
        "neptune": of_neptune(folder),
        "board": of_board(folder),
    }
    print(json.dumps({"history": fitted.history, "found": sorted(search.found), **kept}))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), json.load(sys.stdin))
