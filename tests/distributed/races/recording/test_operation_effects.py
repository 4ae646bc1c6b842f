"""Effects of operations: every operation is known, with parameters that it has."""

from __future__ import annotations

import inspect

import pytest

from nbparallel.distributed.communicator import OPERATIONS, Communicator
from nbparallel.distributed.races.recording.checked_operations import CheckedOperations
from nbparallel.distributed.races.recording.operation_effects import COLLECTIVES, MESSAGES, UNORDERED

BARRIERS = {"barrier", "monitored_barrier"}
"""Order all, and touch nothing: what holds for those that no table names."""


def test_every_operation_is_known() -> None:
    """A new one orders all ranks; if it orders less, or reads or fills an array, it needs a row."""
    assert {*COLLECTIVES, *MESSAGES, *UNORDERED, *BARRIERS} == set(OPERATIONS)
    assert len(COLLECTIVES) + len(MESSAGES) + len(UNORDERED) + len(BARRIERS) == len(OPERATIONS)
    assert set(MESSAGES) <= set(vars(CheckedOperations))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_row_names_parameters(name: str) -> None:
    """What it reads and fills are parameters of the operation."""
    effect = COLLECTIVES[name]
    assert {*effect.reads, *effect.fills} <= set(inspect.signature(getattr(Communicator, name)).parameters)
