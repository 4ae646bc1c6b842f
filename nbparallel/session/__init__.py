"""The kernel's side: who owns the ranks, sends cells, collects what they print.

Attributes load on first use (PEP 562): `ignition` has to be importable without the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbparallel.session.doctor import Examination as Examination
    from nbparallel.session.doctor import Finding as Finding
    from nbparallel.session.doctor import examine as examine
    from nbparallel.session.migration import migrate as migrate
    from nbparallel.session.pending import PendingCell as PendingCell
    from nbparallel.session.result import CellResult as CellResult
    from nbparallel.session.result import RankResult as RankResult
    from nbparallel.session.script import Script as Script
    from nbparallel.session.session import Session as Session
    from nbparallel.session.shared_segments import SharedSegment as SharedSegment
    from nbparallel.session.sink import OutputSink as OutputSink
    from nbparallel.session.spawning import spawn as spawn
    from nbparallel.session.statistics import RankStatistics as RankStatistics
    from nbparallel.session.statistics import SessionStatistics as SessionStatistics
    from nbparallel.session.strategy_measurement import strategy_bench as strategy_bench
    from nbparallel.session.values import RankValues as RankValues
    from nbparallel.session.values import RemoteValue as RemoteValue
    from nbparallel.session.who import SessionNames as SessionNames

_HOMES = {
    "CellResult": "result",
    "Examination": "doctor",
    "Finding": "doctor",
    "OutputSink": "sink",
    "PendingCell": "pending",
    "RankResult": "result",
    "RankStatistics": "statistics",
    "RankValues": "values",
    "RemoteValue": "values",
    "Script": "script",
    "Session": "session",
    "SessionNames": "who",
    "SessionStatistics": "statistics",
    "SharedSegment": "shared_segments",
    "examine": "doctor",
    "migrate": "migration",
    "spawn": "spawning",
    "strategy_bench": "strategy_measurement",
}

__all__ = [
    "CellResult",
    "Examination",
    "Finding",
    "OutputSink",
    "PendingCell",
    "RankResult",
    "RankStatistics",
    "RankValues",
    "RemoteValue",
    "Script",
    "Session",
    "SessionNames",
    "SessionStatistics",
    "SharedSegment",
    "examine",
    "migrate",
    "spawn",
    "strategy_bench",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nbparallel.session' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"nbparallel.session.{_HOMES[name]}"), name)
    return value
