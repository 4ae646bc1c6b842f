"""A saved timeline follows the Trace Event Format as its readers take it; none of them can be run here.

Perfetto and chrome://tracing take complete events of one thread as calls: those that overlap without lying in
each other are left out.  Perfetto counts whole nanoseconds, and cuts off what is beyond.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from nbparallel.session import Session
from nbparallel.session.monitoring.timeline import chrome_trace

METADATA = {
    "process_name": {"name": str},
    "process_sort_index": {"sort_index": int},
    "thread_name": {"name": str},
}


def check(made: dict[str, Any]) -> int:
    """Raise unless a file with `made` is valid and its calls lie in each other; return how many there are."""
    made = json.loads(json.dumps(made, allow_nan=False))
    assert set(made) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert made["displayTimeUnit"] in ("ms", "ns")
    calls: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in made["traceEvents"]:
        assert type(event["name"]) is str
        assert type(event["pid"]) is type(event["tid"]) is int
        if event["ph"] == "M":
            kinds = METADATA[event["name"]]
            assert {key: type(value) for key, value in event["args"].items()} == kinds
            continue
        assert set(event) == {"ph", "name", "cat", "ts", "dur", "pid", "tid", "args"}
        assert (event["ph"], type(event["cat"]), type(event["args"])) == ("X", str, dict)
        for key in ("ts", "dur"):
            assert isinstance(event[key], (int, float))
            assert math.isfinite(event[key])
            assert event[key] >= 0
        begin = int(event["ts"] * 1000)
        calls.setdefault((event["pid"], event["tid"]), []).append((begin, begin + int(event["dur"] * 1000)))
    for of_one in calls.values():
        open_until: list[int] = []
        for begin, end in sorted(of_one, key=lambda call: call[0]):  # equal ones stay as in the file
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], (begin, end, open_until)
            open_until.append(end)
    return sum(map(len, calls.values()))


@pytest.mark.slow
def test_a_real_cell_follows_the_format() -> None:
    """Statements, operations and waits of several ranks."""
    steps = "for i in range(30):\n    all_reduce(i)\n    send(i, 1) if rank == 0 else recv(src=0)\n"
    with Session(2) as session:
        session.run(steps + "barrier()\nx = 1")
        seen = session.timeline()
    assert seen is not None
    assert check(chrome_trace(seen)) > 60  # how many waited is by chance
