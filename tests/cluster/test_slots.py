"""How many task slots an application will have, from its configuration."""

import pytest

from elephant.cluster.executors import promised_slots


@pytest.mark.parametrize(
    ("master", "conf", "slots"),
    [
        ("local", {}, 0),
        ("local[*]", {}, 0),
        ("local[8,3]", {}, 0),
        ("local-cluster[2,1,1024]", {}, 2),
        ("local-cluster[2, 4, 1024]", {"spark.task.cpus": "2"}, 4),
        ("local-cluster[2,1,1024]", {"spark.task.cpus": "2"}, 0),
        ("yarn", {"spark.executor.instances": "3", "spark.executor.cores": "5", "spark.task.cpus": "2"}, 6),
        ("k8s://https://host", {"spark.executor.instances": "3"}, 3),
        ("spark://host:7077", {}, None),
    ],
)
def test_promised_slots_when_the_configuration_is_known_then_counts_whole_tasks(master, conf, slots):
    assert promised_slots(master, conf) == slots
