"""The standalone cluster that other tests run on: where it cannot start, it says why and leaves nothing behind."""

import psutil
import pytest
from standalone_cluster import StandaloneCluster


@pytest.mark.slow("a cluster of its own")
@pytest.mark.spark
def test_enter_when_a_worker_cannot_start_then_its_output_is_told_and_nothing_is_left():
    before = set(psutil.Process().children(recursive=True))
    cluster = StandaloneCluster(1, worker_properties={"spark.worker.resource.gpu.amount": "1"})
    with pytest.raises(RuntimeError, match="worker-0 of the standalone cluster did not start(?s:.*)gpu"), cluster:
        pass
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not cluster.folder.exists()
