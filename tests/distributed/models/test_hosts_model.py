"""Tasks over two hosts as a model: frames, ends and notices of failures, explored in every interleaving.

What `host_links`, `host_door` and the kernel do, with words for queues: a host has sent so many frames, and
each says to which task it belongs and what it is.  Whatever is taken from another task, or waited for in
vain, is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.distributed.models.exploration import (
    Exploration,
    Failed,
    Program,
    WrongError,
    load,
    store,
    until,
)

TASKS, EXCHANGES = 2, 2
DATA, ENDED = 0, 1


@dataclass(frozen=True)
class TwoHosts:
    """Two hosts that run tasks one after the other, and what is done wrong on purpose."""

    wrong: tuple[str, ...] = ()

    def words(self) -> dict[str, int]:
        """Return all words at the beginning."""
        names = [f"{word}{host}" for host in (0, 1) for word in ("sent", "done", "told", "death")]
        most = TASKS * (EXCHANGES + 1)
        return dict.fromkeys([*names, *(f"frame{host}-{n}" for host in (0, 1) for n in range(most))], 0)

    def explore(self, *, raised: tuple[int, ...] = (), killed: tuple[int, ...] = ()) -> int:
        """Visit every state; returns how many there are."""
        programs = [lambda: host(self, 0), lambda: host(self, 1)]
        return Exploration(programs, self.words(), "sc", raised, killed).run()


def frame(task: int, kind: int, number: int) -> int:
    """Return a frame as one number."""
    return 100 * task + 10 * kind + number + 1


def unhurt(request: tuple[Any, ...]) -> Program:
    """Do what belongs to a node or the kernel: an error or interrupt of the user's code does not reach it."""
    while True:
        try:
            return (yield request)
        except Failed:
            continue


def host(model: TwoHosts, me: int) -> Program:
    """Run every task; one begins when the one before has ended on both hosts."""
    other, sent, taken = 1 - me, 0, 0
    for task in range(1, TASKS + 1):
        well = True
        for number in range(EXCHANGES):
            yield from unhurt(store(f"frame{me}-{sent}", frame(task, DATA, number)))
            sent += 1
            yield from unhurt(store(f"sent{me}", sent))
            taken, well = yield from receive(model, me, task, number, taken)
            if not well:
                break
        if not well and "no notice" not in model.wrong:
            yield from unhurt(store(f"told{other}", task))  # by the kernel, to which this host has reported
        if well:
            yield from unhurt(store(f"frame{me}-{sent}", frame(task, ENDED, 0)))
            sent += 1
            yield from unhurt(store(f"sent{me}", sent))
        yield from unhurt(store(f"done{me}", task))
        if "do not wait for the end" not in model.wrong and (
            yield from unhurt(until((f"done{other}", task), (f"death{other}", 1)))
        ):
            return  # it is lost: the next task is on another one


def receive(model: TwoHosts, me: int, task: int, number: int, taken: int) -> Program:
    """Take the other host's frame of an exchange, and drop those of ended tasks.

    Sends on how many were taken, and whether it came.
    """
    other = 1 - me
    ends = () if "do not look for a loss" in model.wrong else ((f"death{other}", 1),)
    while True:
        try:
            if (yield until((f"sent{other}", taken + 1), (f"told{me}", task), *ends)):
                return taken, False
        except Failed:  # an error or an interrupt of the rank that waits
            return taken, False
        found = yield from unhurt(load(f"frame{other}-{taken}"))
        taken += 1
        if found // 100 < task and "late frames are taken" not in model.wrong:
            continue
        if found % 100 // 10 != DATA:
            return taken, False
        if found != frame(task, DATA, number):
            raise WrongError(f"host {me} takes frame {found} in task {task}, exchange {number}")
        return taken, True


FAULTS: list[dict[str, tuple[int, ...]]] = [{}]
FAULTS += [{what: (whom,)} for what in ("raised", "killed") for whom in (0, 1)]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_failure_at_any_step(fault: dict[str, tuple[int, ...]]) -> None:
    """No frame of another task is taken, and nobody waits for ever."""
    assert TwoHosts().explore(**fault) > 100


@pytest.mark.parametrize(
    ("wrong", "fault", "seen"),
    [
        (("late frames are taken",), {"raised": (0,)}, "takes frame 10[12] in task 2"),
        (("do not look for a loss",), {"killed": (0,)}, "process 1 waits for ever"),
        (("no notice",), {"raised": (0,)}, "waits for ever"),
        (("do not wait for the end",), {"raised": (0,)}, "takes frame 201 in task 1"),
    ],
)
def test_the_model_sees_what_is_done_wrong(
    wrong: tuple[str, ...], fault: dict[str, tuple[int, ...]], seen: str
) -> None:
    """Each step that is left out is found."""
    with pytest.raises(WrongError, match=seen):
        TwoHosts(wrong).explore(**fault)
