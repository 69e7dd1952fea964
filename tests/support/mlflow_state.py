"""MLflow's choices of a whole process (store, experiment), taken back."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest


@contextmanager
def own_mlflow() -> Iterator[ModuleType]:
    """MLflow as a new process has it; store, experiment and run that are set in the block do not outlast it."""
    import mlflow
    from mlflow.tracking import fluent

    store = mlflow.get_tracking_uri()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
            patch.delenv(name)
        patch.setattr(fluent, "_active_experiment_id", None)
        try:
            yield mlflow
        finally:
            while mlflow.active_run() is not None:
                mlflow.end_run()
            mlflow.set_tracking_uri(store)
            for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
                del os.environ[name]
