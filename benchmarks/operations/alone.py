"""What operations take on one rank if all others are always on time: its work, without any waiting.

All ranks call an operation until every slot holds what they write there.  Then the others stop, and rank 0
goes on as if they had arrived at every meeting to come.  So it takes what it would with a core of its own,
but for the lines that other cores would have written in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from benchmarks.operations.growth import Row
from benchmarks.operations.parts import least, pretend
from benchmarks.operations.trials import TRIALS, Setting
from nbparallel.distributed import Communicator
from nbparallel.wire.control import GENERATIONS
from tests.harness.ranks import parts_of, run_ranks

BATCH_SECONDS = 0.001
"""The least of many batches counts."""
WARM = 2
"""Calls by which ranks learn what others pass: later slots look alike."""


def work_alone(ranks: int, rows: Sequence[Row]) -> list[float]:
    """Return processor seconds of one call of each row on rank 0."""
    ready, end = os.pipe(), os.pipe()

    def work(c: Communicator) -> list[float]:
        found = []
        for row in rows:
            call = TRIALS[row.operation](Setting(c, row.nbytes, ())).call
            for _ in range(WARM + GENERATIONS):
                call()
            if c.rank:
                os.write(ready[1], b"x")  # it writes no word until it may go on
                os.read(end[0], 1)
            else:
                for _ in range(1, ranks):
                    os.read(ready[0], 1)
                found.append(_without_others(c, call))
                os.write(end[1], b"x" * (ranks - 1))
        return found

    try:
        outcomes = run_ranks(ranks, work, seconds=600)
    finally:
        for fd in (*ready, *end):
            os.close(fd)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return outcomes[0].value  # type: ignore[no-any-return]


def _without_others(c: Communicator, call: Callable[[], object]) -> float:
    """Return the time of a call; afterwards all words and counters are as they were."""
    collectives = parts_of(c).collectives
    area, protocol = collectives.protocol.area, collectives.protocol
    words = {word: area.words[word] for word in (*area.arrive, *area.done)}
    counters = dict(vars(protocol))
    pretend(c)
    began = time.perf_counter()
    call()
    found = least(call, max(1, int(BATCH_SECONDS / (time.perf_counter() - began))))
    for word, value in words.items():
        area.words[word] = value
    vars(protocol).update(counters)
    return found
