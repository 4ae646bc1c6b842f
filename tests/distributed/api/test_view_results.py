"""An array that is sent to several ranks is looked up once."""

from types import SimpleNamespace

import numpy as np
import pytest

from nbparallel.distributed.point_to_point.packing import Packer
from nbparallel.sharing import Store


@pytest.fixture
def store(monkeypatch):
    """Return a store that counts how often it is asked for a handle."""
    store = Store()
    store.asked = 0

    def handle(x, *, handle=store.handle, **keywords):
        store.asked += 1
        return handle(x, **keywords)

    monkeypatch.setattr(store, "handle", handle)
    yield store
    monkeypatch.undo()
    store.close()


@pytest.mark.filterwarnings(
    "ignore:Setting the (shape|dtype):DeprecationWarning"
)  # NumPy 2.5; users still do
def test_the_same_view_is_packed_once(store):
    """The handle of the last array is remembered while it stays what it was; the array is not kept alive."""
    memory = SimpleNamespace(attach_view=np.frombuffer)
    packer = Packer(SimpleNamespace(store=store, attach=store.attach, memory=memory), 1000)
    x = store.zeros((4, 6), for_all=True)
    first = packer.pack(x, view=True)
    assert packer.pack(x, view=True).body is first.body
    assert store.asked == 1
    assert packer.pack(x[1:], view=True).body != first.body
    x.shape = (6, 4)
    changed = packer.pack(x, view=True)
    assert changed.body != first.body
    x.dtype = np.int64
    assert packer.pack(x, view=True).body != changed.body
    asked = store.asked
    store.rights_changes += 1  # as `allow_write` and `change_client_id` do: its segment may have another id
    packer.pack(x, view=True)
    assert store.asked == asked + 1
    del x, first, changed
    assert not [record for record in store.segments() if record.phase == "live"]
    with pytest.raises(ValueError, match="private"):
        packer.pack(np.zeros(3), view=True)
