"""A household of the test process, which ends with the test."""

import pytest

from nbparallel.multiprocessing import household
from nbparallel.sharing import current_store


@pytest.fixture
def root():
    """Start a household and return this process's membership."""
    yield household.membership()
    household.stop()
    current_store().trim()
