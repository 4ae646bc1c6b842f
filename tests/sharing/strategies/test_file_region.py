"""`file_region`: many arrays, one segment."""

import numpy as np
import pytest

from nbparallel.sharing import Store


def many(store, count, *, for_all=False, strategy="file_region"):
    """Share a number of small arrays."""
    return [store.share(np.full(100, i, float), strategy=strategy, for_all=for_all) for i in range(count)]


def test_rights_are_kept_apart(exchange):
    """What all may write lies in another region than what they may only read."""
    store, other = exchange.store(0), exchange.store(1)
    (mine,), (ours,) = many(store, 1), many(store, 1, for_all=True)
    assert store.location(mine).segment != store.location(ours).segment
    other.attach(store.handle(ours, writable=True), writable=True)[0] = 5
    assert ours[0] == 5
    assert store.packed_read_only(mine) is not None
    assert store.packed_read_only(ours) is None
    with pytest.raises(ValueError, match="packed"):
        store.allow_write(mine)
    moved = store.share(mine, strategy="file_region", for_all=True)
    assert store.location(moved).for_all
    assert np.array_equal(moved, mine)


def test_large_and_zeroed():
    """An array larger than half a region has one of its own; zeros are zeros in used memory too."""
    store = Store()
    large = store.share(np.ones(2 << 20), strategy="file_region")
    small = many(store, 1)
    assert store.location(large).segment != store.location(small[0]).segment
    del small
    store.drain()
    assert not store.zeros(1000, strategy="file_region").any()
    del large
    store.close()
