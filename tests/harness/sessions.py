"""Sessions that the tests of a module take in turn, each with fresh ranks.

A session of its own costs a test most of a second: supervisor and template are processes that import.  A rank
that the template forks again costs a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbparallel.session import Session
from nbparallel.testing.plugin import failed


def _renew(session: Session) -> None:
    for rank in range(session.world_size):
        session.restart(rank)
    session.run("pass", namespace={})  # takes the note about the restart; the last test's arrays are released


def _kept(count: int) -> Iterator[list[Session]]:
    with Session(count) as session:
        session.run("pass")  # the first epoch's control segment is there before the first leak check
        yield [session]


def _lent(request: pytest.FixtureRequest, kept: list[Session], count: int) -> Iterator[Session]:
    if not kept:
        with Session(count) as session:
            yield session
        return
    yield kept[0]
    if request.node.stash.get(failed, False):
        kept.pop().stop()  # whatever has happened to it: the tests that follow start their own
        return
    _renew(kept[0])


@pytest.fixture(scope="module")
def two_ranks_of_module() -> Iterator[list[Session]]:
    """Start a session of two ranks for a module; the list is empty once it is of no use."""
    yield from _kept(2)


@pytest.fixture
def two_ranks(request: pytest.FixtureRequest, two_ranks_of_module: list[Session]) -> Iterator[Session]:
    """Return a session of two ranks without variables; for tests that neither stop nor resize it.

    It is the module's: what it counts, as its cells, goes on.
    """
    yield from _lent(request, two_ranks_of_module, 2)


@pytest.fixture(scope="module")
def three_ranks_of_module() -> Iterator[list[Session]]:
    """Start a session of three ranks for a module; the list is empty once it is of no use."""
    yield from _kept(3)


@pytest.fixture
def three_ranks(request: pytest.FixtureRequest, three_ranks_of_module: list[Session]) -> Iterator[Session]:
    """Return a session of three ranks without variables, as `two_ranks`."""
    yield from _lent(request, three_ranks_of_module, 3)
