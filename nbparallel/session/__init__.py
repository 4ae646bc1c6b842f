"""The notebook side: starts ranks, sends cells to them, collects results and output.

Attributes load on first use (PEP 562): `processes.launch` has to be importable without the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbparallel.session.command_line import Script
    from nbparallel.session.diagnostics.doctor import Examination, Finding, examine
    from nbparallel.session.diagnostics.measurement import scaling, strategy_bench
    from nbparallel.session.functions import imap, map, spawn
    from nbparallel.session.monitoring.activity import RankStatistics, SessionStatistics
    from nbparallel.session.monitoring.segments import SessionNames, SharedSegment
    from nbparallel.session.output import OutputSink
    from nbparallel.session.results import CellResult, RankResult, RankValues, RemoteValue
    from nbparallel.session.session import Session
    from nbparallel.session.tasks.cell_queue import PendingCell

_HOMES = {
    "CellResult": "results",
    "Examination": "diagnostics.doctor",
    "Finding": "diagnostics.doctor",
    "OutputSink": "output",
    "PendingCell": "tasks.cell_queue",
    "RankResult": "results",
    "RankStatistics": "monitoring.activity",
    "RankValues": "results",
    "RemoteValue": "results",
    "Script": "command_line",
    "Session": "session",
    "SessionNames": "monitoring.segments",
    "SessionStatistics": "monitoring.activity",
    "SharedSegment": "monitoring.segments",
    "examine": "diagnostics.doctor",
    "imap": "functions",
    "map": "functions",
    "scaling": "diagnostics.measurement",
    "spawn": "functions",
    "strategy_bench": "diagnostics.measurement",
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
    "imap",
    "map",
    "scaling",
    "spawn",
    "strategy_bench",
]


if not TYPE_CHECKING:  # a checker would take every name for one of this module

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'nbparallel.session' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"nbparallel.session.{_HOMES[name]}"), name)
        return value
