"""Asking the user on behalf of ranks whose code called ``input()``."""

from __future__ import annotations

import getpass
import threading
from collections.abc import Sequence
from typing import Any

from nbparallel.errors import rank_list
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.processes.rank_handle import RankExit, RankHandle
from nbparallel.wire.frames import Kind
from nbparallel.wire.messages import InputReply, InputRequest, Outcome

GATHER_SECONDS = 0.15
"""How long a first question waits for those of other ranks: several at once are refused; arbitrary."""

Question = tuple[RankHandle, InputRequest]


def refuse(questions: Sequence[Question]) -> None:
    """Refuse questions that came together."""
    who = rank_list(handle.rank for handle, _ in questions)
    _answer(
        questions,
        refusal=f"{who} called input() at the same time, and there is one keyboard: let one rank ask "
        "(`if rank == 0:`) and send the answer to the others (`broadcast`)",
    )


def ask(question: Question, presses: InterruptCounter) -> None:
    """Ask the user one question; an interrupt, or `failed`, ends it without an answer."""
    handle, request = question
    if threading.current_thread() is not threading.main_thread():
        _answer([question], refusal="no user can be asked for input(): this cell runs in the background")
        return
    prompt = f"[rank {handle.rank}] {request.prompt}"
    try:
        with presses.raising():
            text = getpass.getpass(prompt) if request.secret else input(prompt)
    except KeyboardInterrupt:
        return  # the press was counted, or somebody failed: who waits for the ranks acts on it
    except Exception as error:  # noqa: BLE001  a front end without input, a closed stdin: the rank hears it
        why = " ".join(str(error).split()) or type(error).__name__
        _answer([question], refusal=f"no user can be asked for input(): {why}")
        return
    _answer([question], text)


def failed(message: Any) -> bool:
    """Whether an event means that the task has failed: then nobody is asked any more."""
    return isinstance(message, RankExit) or (isinstance(message, Outcome) and not message.ok)


def _answer(questions: Sequence[Question], text: str = "", *, refusal: str = "") -> None:
    for handle, request in questions:
        handle.send(Kind.INPUT, InputReply(request.serial, text, refusal))
