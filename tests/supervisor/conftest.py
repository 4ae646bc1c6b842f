"""What tests of the sweep may not do: leave pointers where the sweeps of real sessions look."""

import pytest

from nbparallel.wire import owners


@pytest.fixture
def no_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave nothing where other sessions look."""
    monkeypatch.setattr(owners, "pointer_path", lambda record: "")
