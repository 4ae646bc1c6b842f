"""What the tests of the operations share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.ranks import RankOutcome, run_ranks


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """Return a function that runs another on ranks and returns their values, or raises the first error."""

    def run(world_size: int, function: Callable[..., Any], **options: Any) -> list[Any]:
        outcomes = run_ranks(world_size, function, **options)
        for outcome in outcomes:
            assert outcome.signal is None, outcome
            if outcome.error is not None:
                raise outcome.error
        return [outcome.value for outcome in outcomes]

    return run


@pytest.fixture
def outcomes() -> Callable[..., list[RankOutcome]]:
    """Return a function that runs another on ranks and returns how each ended."""
    return run_ranks
