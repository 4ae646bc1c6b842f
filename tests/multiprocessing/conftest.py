"""Each test runs with all three start methods."""

import pytest


@pytest.fixture(params=["fork", "spawn", "forkserver"])
def method(request: pytest.FixtureRequest) -> str:
    """Start method of the processes."""
    return str(request.param)
