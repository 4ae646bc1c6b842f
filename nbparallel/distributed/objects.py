"""Any object as bytes, with shared arrays inside by handle: one function each way."""

from __future__ import annotations

from typing import Any

from nbparallel.sharing.store import Store
from nbparallel.transfer import pickling


def dumps(obj: Any, store: Store) -> tuple[bytes, object]:
    """Return the object's bytes, and what to hold until every receiver has loaded them."""
    pickled = pickling.dumps(obj, store)
    return pickled.data, pickled


def loads(data: bytes | memoryview, store: Store) -> Any:
    """Rebuild the object."""
    return pickling.loads(data, store)
