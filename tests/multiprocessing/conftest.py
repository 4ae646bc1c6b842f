"""Each test runs with all three start methods; fresh interpreters take their time."""

import pytest


@pytest.fixture(params=["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def method(request: pytest.FixtureRequest) -> str:
    """Start method of the processes."""
    return str(request.param)
