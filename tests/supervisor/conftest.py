"""What tests of the supervisor have locked is given up at their end."""

from collections.abc import Iterator

import pytest

from tests.supervisor.leftovers import release


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    release()
