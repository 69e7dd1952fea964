"""Servers that end with their test, and leave no folder behind."""

import glob
import os
import tempfile

import pytest
from servers import Serving


@pytest.fixture(autouse=True)
def no_folder_left_behind():
    yield
    left = glob.glob(os.path.join(tempfile.gettempdir(), f"elephant-server-{os.getpid()}-*"))
    assert left == []


@pytest.fixture
def serve():
    opened = []

    def start(*args, **options):
        serving = Serving(*args, **options)
        opened.append(serving)
        return serving

    yield start
    for serving in opened:
        serving.close()
