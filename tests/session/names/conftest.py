"""A notebook and one rank for the tests of names."""

import pytest

from tests.session.names.pair import Pair


@pytest.fixture
def pair():
    """Return a notebook and a rank."""
    pair = Pair()
    with pair.on_rank():
        pass
    yield pair
    pair.close()
