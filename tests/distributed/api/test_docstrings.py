"""What a reader finds who asks for help on a rank: ``all_reduce?`` and ``dist.<TAB>``."""

from __future__ import annotations

import nbparallel
import nbparallel.distributed as dist


def test_operations_are_described_where_they_are() -> None:
    """The whole description, not a line that leads to another object."""
    for name in ("send", "recv", "broadcast", "all_reduce", "barrier", "gather", "scatter", "all_to_all"):
        text = getattr(dist, name).__doc__
        assert text == getattr(dist.Communicator, name).__doc__
        assert "see `Communicator" not in text
        assert len(text.splitlines()) > 3, name


def test_listing_a_module_shows_what_a_user_may_use() -> None:
    """Nothing that the module itself imports."""
    for module in (nbparallel, dist):
        names = [name for name in dir(module) if not name.startswith("_")]
        assert set(module.__all__) <= set(names)
        assert not {"Any", "annotations", "functools", "importlib", "TYPE_CHECKING"} & set(names)
