"""Events as they may come over a connection, of most kinds."""

import dataclasses

import numpy as np

from elephant.monitor import events

STATE = events.StateSaved(
    rank=0, epochs=1, history={"loss": [0.5]}, facts={"seed": 1}, names=["a", "b"], arrays=(np.eye(2), np.ones(()))
)
EVENTS = [
    events.Alive(rank=0),
    events.TaskStarted(rank=1, host="h", executor="0", attempt=0, stays=True),
    events.Started(rank=1, host="h", device="CPU", threads=2, training_rows=3, validation_rows=4, devices=["0"]),
    events.StepEnded(rank=0, epoch=1, step=2, steps=3, logs={"loss": 0.5, "auc": [0.5]}),
    events.CallbacksDue(
        rank=0, epoch=None, steps=3, logs={}, stopped=False, learning_rate=0.1, iterations=3, rows={"x": 0},
        row_shapes={"features": [4]}, arrays=(np.ones((2, 3), np.float32),),
    ),
    events.RankTrace(
        rank=0, epoch=1, phases=[["a", 0.0, 1.0]], task_phases=[], clock_s=0.0, sent=1.0, arrays=(np.ones((2, 5)),)
    ),
    events.EpochPart(
        rank=0, epoch=0, rows=1, val_rows=0, steps=1, wait_s=0.0, logs={"loss": 1.0}, arrays=(np.ones(2), np.ones(0))
    ),
    events.Printed(rank=0, host="h", lines=["one"]),
    events.PeerReady(rank=0, attempt=0, host="h", port=1, labels={"1": 3.0}),
    events.WorkerModel(
        rank=0, epochs=1, final=True, share=1.0, steps=[1], exchanges=0, missed=0, refused=0, bytes_sent=0,
        arrays=(np.ones(3, np.float32), np.ones(2)),
    ),
    STATE,
    dataclasses.replace(STATE, shapes=[[2, 2], []], arrays=()),
    events.StateArrays(rank=0, arrays=(np.ones(4), np.ones(1))),
    events.FilesLeft.of({"a.txt": b"abc"}, ["b"], rank=0),
    events.Arrived(rank=0, text="{}", num_tasks=2),
    events.RankFailure(rank=2, host="h", kind="ValueError", message="no", traceback="File", log_tail="last", step=3),
]  # fmt: skip
