"""Large private arrays in steps so small that short ones have many."""

from __future__ import annotations

import pytest

from nbparallel.distributed.collectives import direct, in_place


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in place what does not fit into a slot, in small steps; ranks are forked and inherit that."""
    for constant in [name for name in vars(in_place) if name.startswith("LEAST_")]:
        monkeypatch.setattr(in_place, constant, 0)
    monkeypatch.setattr(in_place, "BLOCK", 9_000)
    monkeypatch.setattr(in_place, "PIECE", 15_000)
    monkeypatch.setattr(direct, "PIECE", 32 << 10)
