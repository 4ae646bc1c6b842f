"""F20, F23: an interrupt between any two steps of the session's own code does no harm.

Ctrl-C is pressed at every instruction of the files that take and release the session's lock, one press a
run: where SIGINT raises there, no lock and no handler may be left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nbparallel.errors import BusyError, ClosedError
from nbparallel.session import Session, interrupts, session as sessions
from nbparallel.session.processes import elastic_pool, supervisor_client
from nbparallel.session.tasks import cell_queue
from nbparallel.testing.processes import family
from nbparallel.testing.waiting import wait_until
from tests.faults.interrupts.instruction_signals import InstructionSignals

MODULES = (contextlib, elastic_pool, interrupts, cell_queue, supervisor_client, sessions)
FILES = {module.__file__ for module in MODULES}


def press(function: Callable[[], object], number: int) -> bool:
    """Call `function`, with a Ctrl-C at that instruction of `FILES`; return whether it was interrupted."""
    try:
        InstructionSignals(FILES, signal.SIGINT, number).run(function)
    except KeyboardInterrupt:
        return True
    return False


def instructions(function: Callable[[], object]) -> range:
    """Return the numbers of the instructions that `function` executes in `FILES`."""
    signals = InstructionSignals(FILES, signal.SIGINT)
    signals.run(function)
    assert signals.count > 20
    return range(1, signals.count + 1)


def some(numbers: range) -> range:
    """Return sixty of the numbers, evenly spread: each costs the start of a process."""
    return numbers[:: -(-len(numbers) // 60)]


def check(session: Session) -> None:
    """Fail if the session is not as usable as before: a cell in the background may take a moment."""

    def works() -> bool:
        try:
            return list(session.run("all_reduce(1)").values) == [session.world_size] * session.world_size
        except BusyError:
            return False

    wait_until(works, "the session stays busy", seconds=5.0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Two ranks."""
    with Session(2) as session:
        session.run("pass")
        yield session


CALLS: dict[str, Callable[[Session], object]] = {
    "run": lambda session: session.run("1"),
    "submit": lambda session: session.submit("1").wait(10),
    "start": lambda session: session.start(),
    "pull": lambda session: session.pull("rank"),
    "who": lambda session: session.who({}),
    "share_names": lambda session: session.share_names([], {}),
}


@pytest.mark.time_limit(120)
@pytest.mark.parametrize("name", CALLS)
def test_f20_a_press_at_every_instruction(session: Session, name: str, sampled: Any) -> None:
    """It ends by KeyboardInterrupt or by its end, and whatever comes next finds the session free."""
    CALLS[name](session)  # what is imported or cached is so from now on
    numbers = instructions(lambda: CALLS[name](session))
    pressed = 0
    for number in sampled(numbers, one_in=15):
        pressed += press(lambda: CALLS[name](session), number)
        check(session)
    assert pressed, "no press raised"


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_f23_a_press_at_instructions_of_restart(session: Session, sampled: Any) -> None:
    """The rank is back with its number, the other one keeps its variables."""
    session.run("kept = rank")
    numbers = instructions(lambda: session.restart(1))
    session.restart(0)
    session.run("kept = rank")
    for number in sampled(some(numbers), one_in=4):
        press(lambda: session.restart(1), number)
        check(session)
        assert list(session.run("globals().get('kept')").values) in ([0, None], [0, 1]), "all or nothing"
        assert session.run("kept = rank").notes == ()


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_f23_a_press_at_instructions_of_stop(sampled: Any) -> None:
    """All is gone, or nothing: a second `stop` ends what the first one has not begun to end."""
    numbers, before = instructions(started().stop), processes()
    for number in sampled(some(numbers), one_in=4):
        session = started()
        press(session.stop, number)
        session.stop()
        assert processes() <= before
        with pytest.raises(ClosedError):
            session.run("1")


def processes() -> set[int]:
    """Return the processes of this run."""
    return {record.pid for record in family(os.getpid(), os.environ["NBP_TEST_RUN"])}


def started() -> Session:
    """Return a session whose only rank runs."""
    session = Session(1)
    session.start()
    return session


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_f23_a_press_at_instructions_of_the_first_start(sampled: Any) -> None:
    """All ranks run, or none, and then the next use starts them."""
    session = Session(1)
    numbers = instructions(session.start)
    session.stop()
    before = processes()
    for number in sampled(some(numbers), one_in=4):
        session = Session(1)
        press(session.start, number)
        if not session.started:
            assert processes() <= before
        with session:
            check(session)
