"""numpy arrays in shared memory: made by one process, mapped by others of its session."""

from nbparallel.sharing.arrays import empty, from_file, full, is_shared, ones, segments, share, zeros
from nbparallel.sharing.lifecycle.segment import Location, SegmentBroker, SegmentStatistics
from nbparallel.sharing.memory.mapping import Access, Mapping
from nbparallel.sharing.store import Store, begin_in_session, current_store, set_current_store
from nbparallel.sharing.strategies.registry import (
    SharingStrategies,
    get_all_sharing_strategies,
    get_sharing_strategy,
    register_sharing_strategy,
    set_sharing_strategy,
)
from nbparallel.sharing.strategies.strategy import SegmentSource, Strategy

__all__ = [
    "Access",
    "Location",
    "Mapping",
    "SegmentBroker",
    "SegmentSource",
    "SegmentStatistics",
    "SharingStrategies",
    "Store",
    "Strategy",
    "begin_in_session",
    "current_store",
    "empty",
    "from_file",
    "full",
    "get_all_sharing_strategies",
    "get_sharing_strategy",
    "is_shared",
    "ones",
    "register_sharing_strategy",
    "segments",
    "set_current_store",
    "set_sharing_strategy",
    "share",
    "zeros",
]
