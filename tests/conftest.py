"""Ranks of real processes, kept for the whole session because importing Keras takes seconds."""

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool():
    pool = RankPool()
    yield pool
    pool.close()
