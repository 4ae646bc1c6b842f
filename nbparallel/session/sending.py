"""Pickling what a call sends, with an error that names the part which cannot travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbparallel import sharing
from nbparallel.errors import UnpicklableError
from nbparallel.sharing import SegmentBroker
from nbparallel.transfer import pickling
from nbparallel.transfer.pickling import Pickled


def dump(whole: Any, parts: Mapping[str, Any], broker: SegmentBroker) -> Pickled:
    """Pickle `whole`; if that fails, raise for the first of `parts` (by what people call it) that does.

    Raises
    ------
    UnpicklableError
        It names the part, and what inside of it cannot travel.
    """
    store = sharing.current_store()
    try:
        return pickling.dumps(whole, store, broker=broker)
    except UnpicklableError:
        for name, part in parts.items():
            pickling.dumps(part, store, broker=broker, name=name)
        raise
