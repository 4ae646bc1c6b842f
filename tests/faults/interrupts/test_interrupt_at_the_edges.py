"""F23: interrupts while ranks start, or are stopped: a clean beginning, or nothing at all."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from traitlets.config import Config

from nbparallel.channel import Channel
from nbparallel.session import Session
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.processes.launch import SupervisorLaunch
from nbparallel.testing.processes import family
from nbparallel_magics.state import NbParallel, PrestartedSupervisor


def press_at(monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], presses: int = 1) -> list[int]:
    """Press Ctrl-C whenever that function begins, at most so often; the list tells the presses."""
    owner, name = place
    function: Callable[..., Any] = getattr(owner, name)
    pressed: list[int] = []

    def press(*args: Any, **options: Any) -> Any:
        if len(pressed) < presses:
            pressed.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return function(*args, **options)

    monkeypatch.setattr(owner, name, press)
    return pressed


def processes() -> list[str]:
    """Return what this run has started and is there."""
    return [str(record) for record in family(os.getpid(), os.environ["NBP_TEST_RUN"])]


def test_f23_presses_that_wait_are_not_lost() -> None:
    """What is deferred raises at the end, once, and whoever had SIGINT before has it again."""
    found = signal.getsignal(signal.SIGINT)

    def own(*_: object) -> None:
        """Stand in for a handler that a library has put there."""

    signal.signal(signal.SIGINT, own)
    reached = []

    def press_twice() -> None:
        with InterruptCounter():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            reached.append(True)

    try:
        with pytest.raises(KeyboardInterrupt):
            press_twice()
        assert reached
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, found)


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("where", [(Channel, "send"), (SupervisorLaunch, "terminate")])
def test_f23_an_interrupt_while_a_supervisor_is_prestarted_or_terminated(
    monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    """What `%load_ext` starts in the background is whole, and is known, or is gone: it can be ended."""
    prestarted = PrestartedSupervisor(NbParallel(config=Config()))

    def start_and_terminate() -> None:
        prestarted.start()
        prestarted.terminate()

    with monkeypatch.context() as patched:
        pressed = press_at(patched, where)
        with pytest.raises(KeyboardInterrupt):
            start_and_terminate()
        assert pressed
    prestarted.terminate()
    assert processes() == []


@pytest.mark.slow
def test_f23_an_interrupt_behind_the_start_of_a_with_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks run when it raises, and the block is never entered: the session is stopped all the same."""
    session = Session(1)
    start = session.start

    def start_then_raise() -> None:
        start()
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "start", start_then_raise)
    with pytest.raises(KeyboardInterrupt), session:
        raise AssertionError("the block was entered")
    assert session.closed
    assert processes() == []
