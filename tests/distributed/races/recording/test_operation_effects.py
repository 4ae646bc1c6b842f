"""Effects of operations: every operation is known, with parameters that it has."""

from __future__ import annotations

import inspect

import pytest

from nbparallel.distributed.communicator import OPERATIONS, Communicator
from nbparallel.distributed.races.operations import COLLECTIVES, COMPOSED, MESSAGES, UNORDERED

BARRIERS = {"barrier", "monitored_barrier"}
"""Order all, and touch nothing: what holds for those that no table names."""


def test_every_operation_is_known() -> None:
    """A new one orders all ranks; if it orders less, or reads or fills an array, it needs a row."""
    known = [*COLLECTIVES, *MESSAGES, *COMPOSED, *UNORDERED, *BARRIERS]
    assert sorted(known) == sorted(OPERATIONS)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_row_names_parameters(name: str) -> None:
    """What it reads and fills are parameters of the operation."""
    effect = COLLECTIVES[name]
    assert {*effect.reads, *effect.fills} <= set(inspect.signature(getattr(Communicator, name)).parameters)
