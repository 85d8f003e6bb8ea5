"""Fixtures of the tests of the compile backend."""

import pytest

from cupyops._compile import runner


@pytest.fixture
def graphs():
    """The runners of the graphs that are compiled meanwhile."""
    found = []
    runner.listeners.append(found.append)
    yield found
    runner.listeners.remove(found.append)
