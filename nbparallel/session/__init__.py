"""The kernel's side: who owns the ranks, sends cells, collects what they print."""

from nbparallel.session.result import CellResult, RankResult
from nbparallel.session.session import Session
from nbparallel.session.sink import OutputSink
from nbparallel.session.statistics import RankStatistics, SessionStatistics
from nbparallel.session.values import RankValues, RemoteValue

__all__ = [
    "CellResult",
    "OutputSink",
    "RankResult",
    "RankStatistics",
    "RankValues",
    "RemoteValue",
    "Session",
    "SessionStatistics",
]
