"""A process that joins a world becomes another client: its arrays stay, its segments get new ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nbparallel.errors import ReadOnlyArrayError
from nbparallel.sharing import Store
from nbparallel.wire.segments import creator_of
from tests.harness.ranks import FolderBroker


def test_arrays_stay_and_segments_get_new_ids(tmp_path: Path) -> None:
    """Large and packed arrays keep content and memory; what is made next to them does so too."""
    store = Store()
    large, small = store.zeros((100_000,), strategy="file_descriptor"), store.share(np.arange(10.0))
    before = [store.location(x) for x in (large, small)]
    store.renumber(3)
    places = [store.location(x) for x in (large, small)]
    assert store.client == 3
    for old, new in zip(before, places, strict=True):
        assert old is not None
        assert new is not None
        assert creator_of(old.segment) == 0
        assert creator_of(new.segment) == 3
        assert (new.start, new.stop) == (old.start, old.stop)
        assert new.for_all
    small[0] = large[0] = 7.0
    broker = FolderBroker(str(tmp_path), 3)
    store.connect(broker)
    other = Store(4)
    other.connect(FolderBroker(str(tmp_path), 4))
    for x in (large, small):
        handle = store.handle(x, writable=True)
        assert handle is not None
        seen = other.attach(handle, writable=True)
        assert seen[0] == 7.0
        seen[1] = 8.0
        assert x[1] == 8.0
        del seen
    more = store.share(np.arange(5.0))
    assert more.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert small.tolist() == [7.0, 8.0, *np.arange(2.0, 10.0)]
    other.close()
    store.disconnect(broker)
    broker.forget_all()
    store.renumber(0)
    fresh = store.location(large)
    assert fresh is not None
    assert creator_of(fresh.segment) == 0
    del large, small, more, x
    store.drain()
    assert [segment for segment in store.segments() if segment.phase == "live"] == []


def test_a_client_of_a_session_keeps_its_number(tmp_path: Path) -> None:
    """Where segments are known by their ids these stay."""
    store = Store()
    broker = FolderBroker(str(tmp_path), 0)
    store.connect(broker)
    with pytest.raises(ValueError, match="client 0 of a session, and cannot be 2 as well"):
        store.renumber(2)
    store.disconnect(broker)
    store.renumber(2)
    assert store.client == 2


def test_a_file_that_is_read_only_stays_so(tmp_path: Path) -> None:
    """Nobody is let write to memory that this process itself may only read."""
    from nbparallel import sharing

    np.save(tmp_path / "x.npy", np.arange(20_000))
    previous, store = sharing.current_store(), Store()
    sharing.set_current_store(store)
    try:
        x = sharing.from_file(str(tmp_path / "x.npy"))
        store.renumber(1)
        place = store.location(x)
        assert place is not None
        assert not place.for_all
        with pytest.raises(ReadOnlyArrayError):
            store.allow_write(x)
        del x
        store.close()
    finally:
        sharing.set_current_store(previous)
