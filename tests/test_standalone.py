"""The standalone cluster that other tests run on: where it cannot start, it says why and leaves nothing behind."""

import psutil
import pytest
from standalone_cluster import Place, StandaloneCluster


@pytest.mark.spark
def test_enter_when_a_process_cannot_start_then_its_output_is_told_and_nothing_is_left():
    before = set(psutil.Process().children(recursive=True))
    # In place of Java, which takes seconds.
    cluster = StandaloneCluster(master=Place(prefix=("sh", "-c", "echo no such gpu; exit 1")))
    with pytest.raises(RuntimeError, match="master of the standalone cluster did not start(?s:.*)gpu"), cluster:
        pass
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not cluster.folder.exists()
