"""What the figures of sessions on hosts have in common."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.report import Figure, human_seconds, spread

HOSTS = "ab"
RANKS = 4
"""On two hosts, two on each."""


def take_turns(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds that each contender says it took; a first round of all is not counted."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, call in contenders.items():
            seconds = call()
            if turn:
                times[name].append(seconds)
    return times


def figure(
    what: str,
    ours: Sequence[float],
    aim: float | None,
    peers: Mapping[str, Sequence[float]] | None = None,
    *,
    times: tuple[float, str] | None = None,
) -> Figure:
    """Return a row; peers are named in order, and the ratio is that of the first.

    Parameters
    ----------
    aim : float or None
        Seconds.
    times : (float, str), optional
        Instead of seconds: of how many times of which peer's time the aim is.
    """
    middle = statistics.median(ours)
    peers = peers or {}
    texts = [
        f"{name}: {spread(each) if len(each) > 1 else human_seconds(each[0])}" for name, each in peers.items()
    ]
    ratio = statistics.median(next(iter(peers.values()))) / middle if peers else None
    said = "–" if aim is None else f"≤ {human_seconds(aim)}"
    if times is not None:
        number, peer = times
        aim, said = number * statistics.median(peers[peer]), f"≤ {number:g} × {peer}"
    return Figure(
        what, spread(ours), "; ".join(texts) or "–", ratio, said, None if aim is None else middle <= aim
    )


def workers_of(client: Any) -> list[str]:
    """Return the addresses of a cluster's workers, in order of their names."""
    workers = client.sync(client.scheduler.identity)["workers"]
    return sorted(workers, key=lambda address: str(workers[address]["name"]))


def check(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Raise if results are not what they have to be."""
    if list(found) != list(wanted):
        raise RuntimeError(f"the result is {list(found)!r}, not {list(wanted)!r}")
