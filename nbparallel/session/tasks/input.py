"""``input()`` on ranks: ask the user, and send the answer or a refusal."""

from __future__ import annotations

import getpass
import threading
from collections.abc import Sequence
from typing import Any

from nbparallel.errors import rank_list
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.processes.rank_death import RankDeath
from nbparallel.session.processes.rank_handle import RankHandle
from nbparallel.wire.frames import Kind
from nbparallel.wire.messages import InputReply, InputRequest, Outcome

GATHER_SECONDS = 0.15
"""Time that a first question waits for those of other ranks, all of which are refused; arbitrary."""

Question = tuple[RankHandle, InputRequest]


def refuse(questions: Sequence[Question], *, elsewhere: bool) -> None:
    """Refuse questions that several ranks asked together, or that were asked on another machine."""
    if elsewhere:
        _answer(questions, refusal="no user can be asked for input(): this rank is on a host of a cluster")
        return
    ranks = rank_list(handle.rank for handle, _ in questions)
    _answer(
        questions,
        refusal=f"{ranks} called input() at the same time, and there is one keyboard: let one rank ask "
        "(`if rank == 0:`) and send the answer to the others (`broadcast`)",
    )


def ask(question: Question, interrupts: InterruptCounter) -> None:
    """Ask the user one question; an interrupt, or the failure of a rank, ends it without an answer."""
    handle, request = question
    if threading.current_thread() is not threading.main_thread():
        _answer(
            [question],
            refusal="no user can be asked for input(): this cell runs in the background or in a subshell",
        )
        return
    prompt = f"[rank {handle.rank}] {request.prompt}"
    try:
        with interrupts.raising():
            text = getpass.getpass(prompt) if request.secret else input(prompt)
    except KeyboardInterrupt:
        return  # the interrupt was counted, or a rank failed: `TaskRun.wait` acts on both
    except Exception as error:  # noqa: BLE001  a front end without input, a closed stdin: the rank raises it
        why = " ".join(str(error).split()) or type(error).__name__
        _answer([question], refusal=f"no user can be asked for input(): {why}")
        return
    _answer([question], text)


def failed(message: Any) -> bool:
    """Whether an event is the failure of a task: then no question is asked any more."""
    return isinstance(message, RankDeath) or (isinstance(message, Outcome) and not message.ok)


def _answer(questions: Sequence[Question], text: str = "", *, refusal: str = "") -> None:
    for handle, request in questions:
        handle.send(Kind.INPUT, InputReply(request.serial, text, refusal))
