import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tables import every_case

from elephant.collective import LocalCommunicator
from elephant.collective.fusion import LinkSpeed, automatic_bucket_bytes, measure_link, plan_buckets

MEGABYTE = 1 << 20


@given(sizes=st.lists(st.integers(0, 100), max_size=30), bucket_bytes=st.integers(1, 120))
def test_plan_when_made_then_every_array_is_in_one_bucket_from_last_to_first(sizes, bucket_bytes):
    plan = plan_buckets(sizes, bucket_bytes)
    assert [position for bucket in plan for position in bucket] == list(reversed(range(len(sizes))))
    for bucket in plan[:-1]:
        filled = [sizes[position] for position in bucket]
        # Full, and not by more than the array that filled it.
        assert sum(filled) >= bucket_bytes
        while filled and filled[-1] == 0:
            filled.pop()
        assert sum(filled[:-1]) < bucket_bytes


def test_plan_when_nothing_is_to_travel_then_is_empty():
    assert plan_buckets([], 8) == []


@every_case(
    ("total", "latency_s", "bytes_per_s", "expected"),
    [
        (4 * MEGABYTE, 1e-4, 1e8, 4 * MEGABYTE),  # too little to split
        (96 * MEGABYTE, 1e-4, 5e9, 96 * MEGABYTE),  # too fast to hide
        (96 * MEGABYTE, 1e-4, 5e8, 16 * MEGABYTE),
        (960 * MEGABYTE, 1e-4, 5e8, 32 * MEGABYTE),
        (12 * MEGABYTE, 1e-4, 5e8, 4 * MEGABYTE),
        (96 * MEGABYTE, 5e-3, 5e8, 50_000_000),  # latency of no more than a twentieth
    ],
)
def test_bucket_bytes_when_chosen_then_follow_the_model_and_the_link(total, latency_s, bytes_per_s, expected):
    link = LinkSpeed(latency_s=latency_s, bytes_per_s=bytes_per_s)
    assert automatic_bucket_bytes(total, link) == expected


def test_link_when_measured_then_all_ranks_have_the_same_numbers(run_world):
    links = run_world(3, measure_link)
    assert links[0] == links[1] == links[2]
    assert links[0].bytes_per_s > 0 and np.isfinite(links[0].latency_s)


def test_link_when_there_is_one_rank_then_is_measured_too():
    assert measure_link(LocalCommunicator()).bytes_per_s > 0
