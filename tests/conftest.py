"""Processes that are kept for the whole session because importing Keras takes seconds."""

import pytest
from rank_pool import RankPool
from worker_pool import WorkerPool


@pytest.fixture(scope="session")
def rank_pool():
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def worker_pool():
    pool = WorkerPool()
    yield pool
    pool.close()
